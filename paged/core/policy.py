"""When a waiting sequence is admitted and who yields when blocks run out: small frozen objects from config."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paged.core.sequence import Sequence


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class Policy:
    """What a scheduler asks of a policy; the answers are pure functions of what it shows.

    A waiting sequence is admitted when ``blocks_to_admit`` blocks (those it can adopt included) and
    ``blocks_kept_free`` more are to be had; the margin is waived while nothing runs.
    """

    def blocks_to_admit(self, sequence: Sequence, block_size: int) -> int:
        """Blocks that must be there for ``sequence`` to be admitted, at least those of all its tokens."""
        return num_blocks_for(sequence.num_tokens, block_size)

    def blocks_kept_free(self, running: Seq[Sequence], num_blocks: int, block_size: int) -> int:
        """Blocks of the pool's ``num_blocks`` that an admission must leave free for those ``running``."""
        return 0

    def victim(self, candidates: Seq[Sequence]) -> Sequence:
        """Whom of ``candidates`` (oldest first, never empty) to preempt."""
        return candidates[-1]


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
        if not 0 <= self.fraction < 1:
            raise ValueError(f"policy.fraction must be at least 0 and below 1, not {self.fraction!r}")

    def blocks_kept_free(self, running: Seq[Sequence], num_blocks: int, block_size: int) -> int:
        """The watermark, rounded up to whole blocks."""
        return math.ceil(self.fraction * num_blocks)


@dataclass(frozen=True, slots=True)
class Reserve(Policy):
    """Reserves every sequence's whole ``max_tokens`` at admission, so that nothing is ever preempted."""

    def blocks_to_admit(self, sequence: Sequence, block_size: int) -> int:
        """Blocks of the sequence at its longest; the last token sampled is never written."""
        return num_blocks_for(sequence.max_tokens_total - 1, block_size)

    def blocks_kept_free(self, running: Seq[Sequence], num_blocks: int, block_size: int) -> int:
        """What those running have reserved and not taken yet."""
        return sum(max(0, self.blocks_to_admit(sequence, block_size) - len(sequence.blocks)) for sequence in running)
