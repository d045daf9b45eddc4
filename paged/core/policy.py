"""When a waiting sequence is admitted and who yields when blocks run out: small frozen objects from config."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, NamedTuple

from paged.core.blocks import BlockPool
from paged.core.lengths import BOUNDS, Hazard, LengthHistory, span_of
from paged.core.memory import num_blocks_for
from paged.core.sequence import Sequence


@dataclass(slots=True)
class Load:
    """What a scheduler shows its policy; to be read only.

    Attributes:
        running: sequences that hold blocks, oldest first.
        pool: whose blocks they are.
        block_size: tokens in a block.
        lengths: how long the samples turned out that finished so far.
    """

    running: Seq[Sequence]
    pool: BlockPool
    block_size: int
    lengths: LengthHistory

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.pool.num_blocks

    @property
    def num_used(self) -> int:
        """Blocks of it that running sequences hold, shared ones counted once."""
        return self.pool.num_used


def _youngest(candidates: Seq[Sequence]) -> Sequence:
    return candidates[-1]


def _least_computed(candidates: Seq[Sequence]) -> Sequence:
    return min(reversed(candidates), key=lambda sequence: sequence.num_scheduled)


def _most_blocks(candidates: Seq[Sequence]) -> Sequence:
    return max(reversed(candidates), key=lambda sequence: len(sequence.blocks))


# Among equals the youngest yields.
VICTIMS: Mapping[str, Callable[[Seq[Sequence]], Sequence]] = {
    "youngest": _youngest,
    "least_computed": _least_computed,
    "most_blocks": _most_blocks,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a scheduler asks of a policy; the answers are pure functions of what it shows.

    A waiting sequence is admitted when ``blocks_to_admit`` blocks (those it can adopt included) and
    ``blocks_kept_free`` more are to be had; the margin is waived while nothing runs.

    Attributes:
        victim: whom to preempt: the ``youngest``, the one with the ``least_computed`` tokens (the least to compute
            again), or the one with the ``most_blocks`` (the most room at once).
    """

    victim: str = "youngest"

    def __post_init__(self) -> None:
        if self.victim not in VICTIMS:
            raise ValueError(f"policy.victim must be one of {', '.join(VICTIMS)}, not {self.victim!r}")

    def blocks_to_admit(self, sequence: Sequence, load: Load) -> int:
        """Blocks that must be there for ``sequence`` to be admitted, at least those of all its tokens."""
        return num_blocks_for(sequence.num_tokens, load.block_size)

    def blocks_kept_free(self, sequence: Sequence, load: Load) -> int:
        """Blocks of the pool that admitting ``sequence`` must leave free for those running."""
        return 0

    def choose_victim(self, candidates: Seq[Sequence]) -> Sequence:
        """Whom of ``candidates`` (oldest first, never empty) to preempt."""
        return VICTIMS[self.victim](candidates)


@dataclass(frozen=True, slots=True)
class Fifo(Policy):
    """Admits whenever the whole token list fits now; growth is paid for by preemption."""


@dataclass(frozen=True, slots=True)
class Watermark(Policy):
    """Keeps a share of the pool free at admission.

    Attributes:
        fraction: share of all blocks kept free, in [0, 1).
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        # The bare super() would look for the class that slots=True has replaced.
        super(Watermark, self).__post_init__()
        if not 0 <= self.fraction < 1:
            raise ValueError(f"policy.fraction must be at least 0 and below 1, not {self.fraction!r}")

    def blocks_kept_free(self, sequence: Sequence, load: Load) -> int:
        """The watermark, rounded up to whole blocks."""
        return math.ceil(self.fraction * load.num_blocks)


@dataclass(frozen=True, slots=True)
class Reserve(Policy):
    """Reserves every sequence's whole ``max_tokens`` at admission, so that nothing is ever preempted."""

    def blocks_to_admit(self, sequence: Sequence, load: Load) -> int:
        """Blocks of the sequence at its longest; the last token sampled is never written."""
        return num_blocks_for(sequence.max_tokens_total - 1, load.block_size)

    def blocks_kept_free(self, sequence: Sequence, load: Load) -> int:
        """What those running have reserved and not taken yet."""
        return sum(max(0, self.blocks_to_admit(other, load) - len(other.blocks)) for other in load.running)


_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True)
class Forecast(Policy):
    """Admits a sequence if the chance that it will have to yield is at most ``risk``.

    The youngest yields, so the question is whether the pool will hold the newcomer and those before it until the
    newcomer ends. Each sequence grows by a token a step and stops at a step that is not known; the ``LengthHistory``
    tells how likely it is to stop at each length. The blocks that all running sequences hold at a later step are then
    a sum of independent numbers of known mean and variance, and nearly normal. Blocks that running sequences share
    count once: each sequence is taken to hold its even part of them.

    Attributes:
        risk: accepted chance that a newcomer is preempted before it ends, above 0 and below 1. A small one computes
            little twice and leaves room unused; where prefill is cheap beside decoding, a larger one is faster.
    """

    risk: float = 0.1

    def __post_init__(self) -> None:
        # The bare super() would look for the class that slots=True has replaced.
        super(Forecast, self).__post_init__()
        if not 0 < self.risk < 1:
            raise ValueError(f"policy.risk must be above 0 and below 1, not {self.risk!r}")

    def blocks_kept_free(self, sequence: Sequence, load: Load) -> int:
        """Blocks by which the running sequences may grow before ``sequence`` ends, but for a chance of ``risk``."""
        if not load.running:
            return 0
        hazard, groups = _survey(sequence, load)
        block_size, num_used, own_output = load.block_size, load.num_used, sequence.num_output
        end = _last_step(sequence.request.max_tokens - own_output, block_size)
        # The expected sum is smooth except where a group reaches its bound: to find its peak, a look at those times and
        # at each doubling will do.
        times = {block_size << power for power in range((end // block_size).bit_length())}
        times.update(group.last for group in groups)
        times.add(end)
        times.discard(0)
        own_passed = hazard.up_to(own_output)
        margin = 0.0
        for time in sorted(times):
            # The newcomer yields if it still runs and the pool is full: the product of both chances is to be the risk.
            stays = math.exp(own_passed - hazard.up_to(own_output + time))
            if time > end or stays <= self.risk:
                break
            chance = self.risk / stays
            grown = time / block_size
            growth = most = grown - num_used
            variance = 0.0
            for number, output, passed, held, last in groups:
                if time <= last:
                    lives = math.exp(passed - hazard.up_to(output + time))
                    blocks = held + number * grown
                    most += blocks
                    growth += lives * blocks
                    variance += lives * (1 - lives) * blocks * blocks / number
            # By the reflection principle a random walk has been above a level at some time about twice as often as it
            # is at the end.
            quantile = growth - _NORMAL.inv_cdf(chance / 2) * math.sqrt(variance)
            margin = max(margin, min(quantile, most))
        return math.ceil(margin)


POLICIES: Final[Mapping[str, type[Policy]]] = {
    "fifo": Fifo,
    "watermark": Watermark,
    "reserve": Reserve,
    "forecast": Forecast,
}
"""The policies by the names that a config has for them."""


class _Group(NamedTuple):
    """Running sequences with about as much output, and about as much left to their ``max_tokens``.

    Attributes:
        number: how many.
        output: output tokens of each, on average.
        passed: the hazard of these tokens, which each of them has outlived.
        held: blocks that they hold together, their part of shared ones included.
        last: steps from now after which none of them is left, a multiple of the block size.
    """

    number: int
    output: float
    passed: float
    held: float
    last: int


def _survey(sequence: Sequence, load: Load) -> tuple[Hazard, list[_Group]]:
    """How likely samples are to stop at each length, and the running sequences in a few groups."""
    counts, tokens = [0] * len(BOUNDS), [0] * len(BOUNDS)
    output, longest = sequence.num_output, sequence.request.max_tokens
    span = span_of(output)
    counts[span], tokens[span] = 1, output
    sums: dict[tuple[int, int], list[int]] = {}
    num_held = 0
    for other in load.running:
        output, held, most = other.num_output, len(other.blocks), other.request.max_tokens
        if most > longest:
            longest = most
        left = most - output
        span = bisect_right(BOUNDS, output) - 1
        counts[span] += 1
        tokens[span] += output
        num_held += held
        key = span, bisect_right(BOUNDS, left)
        group = sums.get(key)
        if group is None:
            sums[key] = [1, output, held, left]
        else:
            group[0] += 1
            group[1] += output
            group[2] += held
            if left > group[3]:
                group[3] = left
    hazard = load.lengths.hazard(counts, tokens, longest)
    num_shared = (num_held - load.num_used) / len(load.running)
    groups = []
    for number, output, held, left in sums.values():
        mean = output / number
        last = _last_step(left, load.block_size)
        groups.append(_Group(number, mean, hazard.up_to(mean), held - number * num_shared, last))
    return hazard, groups


def _last_step(num_left: int, block_size: int) -> int:
    """Steps, in whole blocks, in which a sequence that may have ``num_left`` more tokens can still grow."""
    return num_blocks_for(num_left - 1, block_size) * block_size
