"""How long samples turned out, and what that says about those that are still being written."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Final

BOUNDS: Final[tuple[int, ...]] = (0, 1, *(size for power in range(1, 40) for size in (2**power, 3 * 2 ** (power - 1))))
"""Where spans of lengths begin: 0, 1, 2, 3, 4, 6, 8, 12, 16, ...; as fine everywhere, relative to the length."""


def span_of(length: int) -> int:
    """The span that ``length`` lies in, as an index into ``BOUNDS``."""
    return bisect_right(BOUNDS, length) - 1


class LengthHistory:
    """Output lengths of the samples that finished last, by span.

    Args:
        capacity: how many are kept; the oldest is forgotten first.

    Attributes:
        num_samples: how many are kept.
        counts: by span, the number of samples whose length lies in it. Others only read this and the next two.
        tokens: by span, the output tokens of these samples together.
        stops: by span, how many of these samples stopped by themselves instead of reaching ``max_tokens``.
    """

    __slots__ = ("_recent", "capacity", "counts", "num_samples", "stops", "tokens")

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self.num_samples = 0
        self.counts = [0] * len(BOUNDS)
        self.tokens = [0] * len(BOUNDS)
        self.stops = [0] * len(BOUNDS)
        self._recent: deque[tuple[int, bool]] = deque()

    def add(self, length: int, stopped: bool) -> None:
        """Take in a finished sample of ``length`` output tokens; ``stopped`` is False if it was cut there."""
        self._recent.append((length, stopped))
        self._count(length, stopped, 1)
        if self.num_samples > self.capacity:
            self._count(*self._recent.popleft(), -1)

    def _count(self, length: int, stopped: bool, number: int) -> None:
        span = span_of(length)
        self.num_samples += number
        self.counts[span] += number
        self.tokens[span] += number * length
        self.stops[span] += number * stopped

    def hazard(self, counts: Sequence[int], tokens: Sequence[int], longest: int) -> Hazard:
        """How likely samples are to stop at each length: the hazard rate, estimated from right-censored data.

        In each span the rate is the number of samples that stopped there, divided by the tokens that all samples wrote
        there. Samples that were cut or still run contribute the tokens that they have written. Without them the
        estimate would be too short, because short samples finish first. One more sample, whose length is uniform up to
        ``longest``, is counted as a prior: it decides where no sample has been, and hardly matters where many have.

        Args:
            counts: running sequences by the span of their output so far.
            tokens: the output tokens of those.
            longest: the most output tokens that any of them may have, at least 1.
        """
        by_span = [kept + running for kept, running in zip(self.counts, counts, strict=True)]
        num_beyond = sum(by_span)
        hazards = []
        for span in range(span_of(longest - 1) + 1):
            low, high = BOUNDS[span], BOUNDS[span + 1]
            num_beyond -= by_span[span]
            written = self.tokens[span] + tokens[span] - by_span[span] * low + num_beyond * (high - low)
            # The prior's chance to end in this span, and the tokens that it is expected to write in it.
            high = min(high, longest)
            ends = (high - low) / longest
            writes = ends * (longest - 0.5 * (low + high))
            hazards.append((self.stops[span] + ends) / (written + writes))
        return Hazard(hazards)


class Hazard:
    """The chance that a sample which has come to some length stops there; constant within each span.

    Args:
        hazards: of each span, from the first on; the last one's holds for all lengths beyond.
    """

    __slots__ = ("_hazards", "_totals")

    def __init__(self, hazards: Sequence[float]) -> None:
        self._hazards = hazards
        self._totals = [0.0]
        for span, hazard in enumerate(hazards):
            self._totals.append(self._totals[-1] + hazard * (BOUNDS[span + 1] - BOUNDS[span]))

    def up_to(self, length: float) -> float:
        """The hazard of all tokens before ``length``; the chance to get from k to m is ``exp(up_to(k) - up_to(m))``."""
        span = bisect_right(BOUNDS, length, 0, len(self._hazards)) - 1
        return self._totals[span] + self._hazards[span] * (length - BOUNDS[span])
