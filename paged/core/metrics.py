"""What runs and simulations report of themselves in numbers: a scheduler's counts, and percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

_Number = TypeVar("_Number", int, float)


@dataclass(slots=True)
class Counters:
    """Totals over a scheduler's life; one owner adds to them, everybody may read.

    Attributes:
        num_steps: plans handed out.
        num_added, num_finished: sequences.
        num_preemptions: preemptions, not sequences preempted.
        forward_tokens: tokens scheduled for computation.
        recomputed_tokens: those of them that had been scheduled before a preemption.
        cached_tokens: tokens taken over from the cache that had never been scheduled.
        minimal_forward_tokens: what the finished sequences need without preemption and reuse, N - 1 each.
        prompt_tokens, output_tokens: of the finished sequences.
        dropped_tokens: tokens sampled beyond a stop, because a deeper pipeline had them in flight.
        peak_blocks: most blocks referenced at once.
    """

    num_steps: int = 0
    num_added: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    forward_tokens: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    minimal_forward_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    dropped_tokens: int = 0
    peak_blocks: int = 0


def percentile(ordered: Sequence[_Number], share: float) -> _Number | None:
    """The smallest of the sorted values that at least ``share`` of them do not exceed; None if there are none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None
