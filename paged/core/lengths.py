"""How long samples turned out, from which policies may learn."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque


class LengthHistory:
    """Output lengths of the samples that finished last, in order of finishing and in order of length.

    Args:
        capacity: how many are kept; the oldest is forgotten first.
    """

    __slots__ = ("_ordered", "_recent", "capacity", "num_seen")

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self.num_seen = 0
        self._recent: deque[int] = deque()
        self._ordered: list[int] = []

    def __len__(self) -> int:
        return len(self._ordered)

    @property
    def ordered(self) -> list[int]:
        """The lengths kept, shortest first; to be read only."""
        return self._ordered

    def add(self, length: int) -> None:
        """Take in a finished sample of ``length`` output tokens."""
        self.num_seen += 1
        self._recent.append(length)
        insort(self._ordered, length)
        if len(self._recent) > self.capacity:
            oldest = self._recent.popleft()
            del self._ordered[bisect_right(self._ordered, oldest) - 1]

    def num_longer(self, length: int) -> int:
        """How many of the lengths kept exceed ``length``."""
        return len(self._ordered) - bisect_right(self._ordered, length)
