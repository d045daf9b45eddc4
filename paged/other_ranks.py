"""The other ranks of an engine as each rank sees them while all start: what they agree on, and where they wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

from paged.consensus import Leader
from paged.kernels.collectives import SINGLE, RankGroup
from paged.runner.links import Link


class OtherRanks(ABC):
    """What a start asks of the other ranks. All ranks call ``least`` and ``meet`` in the same order.

    Attributes:
        group: what carries the tensors of all ranks.
        num_sharing: most ranks that have one card; each gets as much of what the engine may use of it.
    """

    def __init__(self, group: RankGroup, num_sharing: int) -> None:
        self.group = group
        self.num_sharing = num_sharing

    @abstractmethod
    def least(self, number: int) -> int:
        """The least of all ranks' numbers, which all of them get. Waits for each rank as long as it is at work."""

    def meet(self) -> None:
        """Wait until all ranks are here, as long as they are at work."""
        self.least(0)

    def computing(self, *, is_limited: bool = True) -> AbstractContextManager[None]:
        """To be entered around what all ranks compute together, which ends if one of them is lost.

        Unless ``is_limited``, it may take any time.
        """
        return nullcontext()


class Alone(OtherRanks):
    """Those of the only rank: none."""

    def __init__(self) -> None:
        super().__init__(SINGLE, 1)

    def least(self, number: int) -> int:
        """The number itself."""
        return number


class RanksOfLeader(OtherRanks):
    """Those that rank 0 leads; raises as the leader does."""

    def __init__(self, leader: Leader, group: RankGroup, num_sharing: int) -> None:
        super().__init__(group, num_sharing)
        self._leader = leader

    def least(self, number: int) -> int:
        """As ``Leader.least``."""
        return self._leader.least(number)

    def computing(self, *, is_limited: bool = True) -> AbstractContextManager[None]:
        """As ``Leader.computing``."""
        return self._leader.computing(is_limited=is_limited)


class RanksOfFollower(OtherRanks):
    """Those of ranks 1, 2, ..., which speak with rank 0 alone; it watches over what all compute."""

    def __init__(self, link: Link, group: RankGroup, num_sharing: int) -> None:
        super().__init__(group, num_sharing)
        self._link = link

    def least(self, number: int) -> int:
        """As rank 0 says once it has heard all; raises ``LinkClosedError`` if it is gone."""
        self._link.send(number)
        agreed: int = self._link.receive()
        return agreed
