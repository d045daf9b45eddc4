"""What a step log says about time: each step's shape, its own duration, and the host's work before it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from paged.sim.shape import StepShape
from paged.sim.step_log import AbandonEvent, CommitEvent, ConfigEvent, Event, PlanEvent


class MeasuredStep(NamedTuple):
    """One committed step.

    Attributes:
        session: which of the log's processes ran it, from 0.
        step: its number in that process, from 0.
        shape: what was computed.
        step_s: its own duration: from its start, or the end of the step before if that is later, to its end.
        host_s: from the end of the step before to its start, in which the host committed and planned; None where
            that was not all (an arrival, an abort, an empty plan), or where another step was in flight meanwhile.
        start_s, end_s: as the executor told them.
    """

    session: int
    step: int
    shape: StepShape
    step_s: float
    host_s: float | None
    start_s: float
    end_s: float


class StepTimes:
    """Turns the events of a log, one after the other, into measured steps.

    Attributes:
        num_sessions: processes met so far.
    """

    def __init__(self) -> None:
        self.num_sessions = 0
        self._in_flight: deque[tuple[int, StepShape, float | None]] = deque()
        self._last_end_s: float | None = None
        # Since when the host does nothing but commit, plan and launch with nothing in flight; None if it does not.
        self._busy_since_s: float | None = None

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not committed."""
        return len(self._in_flight)

    def see(self, event: Event) -> MeasuredStep | None:
        """Take in the next event; a commit gives a step.

        Raises:
            ValueError: a commit is not of the oldest step in flight.
        """
        busy_since_s, self._busy_since_s = self._busy_since_s, None
        if isinstance(event, PlanEvent):
            self._in_flight.append((event.step, StepShape.of(event), busy_since_s))
        elif isinstance(event, CommitEvent):
            return self._commit(event)
        elif isinstance(event, ConfigEvent | AbandonEvent):
            self._in_flight.clear()
            if isinstance(event, ConfigEvent):
                self.num_sessions += 1
                self._last_end_s = None
        return None

    def _commit(self, event: CommitEvent) -> MeasuredStep:
        oldest = self._in_flight[0][0] if self._in_flight else None
        if event.step != oldest:
            known = "none is in flight" if oldest is None else f"{oldest} is the oldest in flight"
            raise ValueError(f"line {event.line} commits step {event.step}, but {known}")
        _, shape, busy_since_s = self._in_flight.popleft()
        begin_s = event.start_s if self._last_end_s is None else max(event.start_s, self._last_end_s)
        host_s = None if busy_since_s is None else event.start_s - busy_since_s
        self._last_end_s = event.end_s
        if not self._in_flight:
            self._busy_since_s = event.end_s
        step_s = max(0.0, event.end_s - begin_s)
        return MeasuredStep(self.num_sessions - 1, event.step, shape, step_s, host_s, event.start_s, event.end_s)
