"""When a waiting sequence is admitted and who yields when blocks run out: small frozen objects from config."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paged.core.lengths import LengthHistory
from paged.core.sequence import Sequence


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


@dataclass(slots=True)
class Load:
    """What a scheduler shows its policy; to be read only.

    Attributes:
        running: sequences that hold blocks, oldest first.
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
        lengths: how long the samples turned out that finished so far.
    """

    running: Seq[Sequence]
    num_blocks: int
    block_size: int
    lengths: LengthHistory


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
