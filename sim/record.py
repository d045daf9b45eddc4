"""What a simulated run leaves: a row a request, columns a step, and the moments that turn them into a story."""

from __future__ import annotations

import csv
import math
from array import array
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from paged.core.metrics import Counters

REFUSED: Final = "refused"
"""Finish reason of a request that was never taken; `reason` says why."""

ADMITTED: Final = 0  # took a slot and blocks: the start of the step that did it
SAMPLED: Final = 1  # got its first token after an admission: the end of that step
PREEMPTED: Final = 2  # lost its blocks: the start of the step that took them

_ROWS_AT_ONCE: Final = 4096

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class RequestRecord:
    """What became of one sample of a request; seconds are on the simulation's clock, NaN if that never happened.

    Attributes:
        key: the request's id and the sample.
        arrival_s: when it was added.
        prompt_tokens: length of its prompt.
        max_tokens: most tokens it may generate.
        first_scheduled_s: start of the first step that computed any of it.
        first_token_s: end of the step that sampled its first token.
        finish_s: end of the step that sampled its last one.
        output_tokens: tokens generated.
        cached_tokens: tokens that its first admission took over from the cache.
        num_preemptions: times it was preempted.
        finish_reason: `stop`, `length`, `abort`, `error`, `refused`; None while it is unfinished.
        reason: why it was refused.
    """

    key: tuple[str, int]
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    first_scheduled_s: float = math.nan
    first_token_s: float = math.nan
    finish_s: float = math.nan
    output_tokens: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None
    reason: str | None = None

    @property
    def queue_s(self) -> float:
        """From arrival to the first step that computed any of it."""
        return self.first_scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time from one token to the next; NaN for fewer than two tokens."""
        if self.output_tokens < 2:
            return math.nan
        return (self.finish_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From arrival to the last token."""
        return self.finish_s - self.arrival_s


class StepColumns(NamedTuple):
    """The steps of a record, one array a column, in order; they are valid until the next step is appended.

    Attributes:
        start_s, end_s: the step on the simulation's clock.
        num_seqs: sequences computed in it.
        num_tokens: tokens computed in it.
        num_running: sequences that hold blocks while it executes.
        num_waiting: sequences that wait while it executes, preempted ones included.
        used_blocks: blocks referenced while it executes.
        waste_tokens: token places in those blocks that no scheduled token fills.
        preemptions: sequences preempted by its plan.
    """

    start_s: Floats
    end_s: Floats
    num_seqs: Ints
    num_tokens: Ints
    num_running: Ints
    num_waiting: Ints
    used_blocks: Ints
    waste_tokens: Ints
    preemptions: Ints


# How a step's row lies in memory.
_ROW: Final = Struct(f"=2d{len(StepColumns._fields) - 2}q")
_ROW_DTYPE: Final = np.dtype([(name, "f8" if name.endswith("_s") else "i8") for name in StepColumns._fields])
_pack = _ROW.pack


class EventColumns(NamedTuple):
    """The moments of all requests, one array a column, in order; valid until the next one is noted.

    Attributes:
        time_s: when, on the simulation's clock.
        request: whose, as an index into `SimRecord.requests`.
        kind: ADMITTED, SAMPLED or PREEMPTED.
    """

    time_s: Floats
    request: Ints
    kind: Ints


class SimRecord:
    """A simulated run; the executor and the driver fill it, everybody else reads.

    Attributes:
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
        requests: in the order they were added, refused ones included.
        counters: the scheduler's own.
        wall_s: time that the simulation took on the clock on the wall.
        interrupted: whether it was ended before its requests were.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.requests: list[RequestRecord] = []
        self.counters = Counters()
        self.wall_s = 0.0
        self.interrupted = False
        self._steps = bytearray()
        self._event_s = array("d")
        self._event_request, self._event_kind = array("q"), array("q")

    # What is noted

    def add_request(self, key: tuple[str, int], arrival_s: float, prompt_tokens: int, max_tokens: int) -> int:
        """Open the row of a request; its index, by which the other methods know it."""
        self.requests.append(RequestRecord(key, arrival_s, prompt_tokens, max_tokens))
        return len(self.requests) - 1

    def refuse(self, index: int, reason: str) -> None:
        """Close the row of a request that the scheduler did not take."""
        request = self.requests[index]
        request.finish_reason, request.reason = REFUSED, reason

    def admit(self, index: int, time_s: float) -> None:
        """Note that a request was started, for the first time or again."""
        request = self.requests[index]
        if math.isnan(request.first_scheduled_s):
            request.first_scheduled_s = time_s
        self._event(time_s, index, ADMITTED)

    def sample(self, index: int, time_s: float) -> None:
        """Note the first token of a request after an admission; the tokens after it are not noted one by one."""
        request = self.requests[index]
        if math.isnan(request.first_token_s):
            request.first_token_s = time_s
        self._event(time_s, index, SAMPLED)

    def preempt(self, index: int, time_s: float) -> None:
        """Note that a request lost its blocks."""
        self._event(time_s, index, PREEMPTED)

    def finish(
        self, index: int, time_s: float, reason: str, output_tokens: int, cached_tokens: int, num_preemptions: int = 0
    ) -> None:
        """Close the row of a request."""
        request = self.requests[index]
        request.finish_s = time_s
        request.finish_reason = reason
        request.output_tokens = output_tokens
        request.cached_tokens = cached_tokens
        request.num_preemptions = num_preemptions

    def append_step(
        self,
        start_s: float,
        end_s: float,
        num_seqs: int,
        num_tokens: int,
        num_running: int,
        num_waiting: int,
        used_blocks: int,
        waste_tokens: int,
        preemptions: int,
    ) -> None:
        """Append one step, as `StepColumns` describes it."""
        # One packed row instead of nine appends to arrays: this runs for every step (benchmarks/trace_hour.py).
        self._steps += _pack(
            start_s, end_s, num_seqs, num_tokens, num_running, num_waiting, used_blocks, waste_tokens, preemptions
        )

    def _event(self, time_s: float, index: int, kind: int) -> None:
        self._event_s.append(time_s)
        self._event_request.append(index)
        self._event_kind.append(kind)

    # What is read

    @property
    def num_steps(self) -> int:
        """Steps appended so far."""
        return len(self._steps) // _ROW.size

    @property
    def start_s(self) -> float:
        """The first arrival, or 0 where nothing arrived."""
        return min((request.arrival_s for request in self.requests if request.finish_reason != REFUSED), default=0.0)

    @property
    def end_s(self) -> float:
        """The end of the last step; `start_s` if there was none."""
        return float(self.steps.end_s[-1]) if self._steps else self.start_s

    @property
    def steps(self) -> StepColumns:
        """The steps as arrays, without a copy: nothing can be appended while they are held."""
        rows = np.frombuffer(self._steps, _ROW_DTYPE)
        return StepColumns._make(rows[name] for name in StepColumns._fields)

    def until_s(self) -> Floats:
        """When the state that each step describes ends: with the next step, or with this one where all has finished."""
        steps = self.steps
        until_s = np.append(steps.start_s[1:], steps.end_s[-1:])
        taken = [request for request in self.requests if request.finish_reason != REFUSED]
        arrivals = np.sort(np.array([request.arrival_s for request in taken], np.float64))
        # Numpy sorts NaN, the end of what is unfinished, to the back.
        ends = np.sort(np.array([request.finish_s for request in taken], np.float64))
        num_arrived = np.searchsorted(arrivals, steps.end_s, side="right")
        is_empty = num_arrived == np.searchsorted(ends, steps.end_s, side="right")
        return np.where(is_empty, steps.end_s, until_s)

    @property
    def events(self) -> EventColumns:
        """The moments of the requests as arrays, without a copy: nothing can be noted while they are held."""
        return EventColumns(
            np.asarray(self._event_s),
            np.asarray(self._event_request),
            np.asarray(self._event_kind),
        )

    def write_steps(self, path: Path) -> None:
        """Write `steps.csv`: a line a step, seconds to the microsecond."""
        line = ",".join(["%.6f"] * 2 + ["%d"] * (len(StepColumns._fields) - 2)) + "\n"
        with path.open("w", encoding="utf-8") as file, memoryview(self._steps) as rows:
            file.write(",".join(StepColumns._fields) + "\n")
            for first in range(0, len(rows), _ROWS_AT_ONCE * _ROW.size):
                some = _ROW.iter_unpack(rows[first : first + _ROWS_AT_ONCE * _ROW.size])
                file.write("".join(map(line.__mod__, some)))

    def write_requests(self, path: Path) -> None:
        """Write `requests.csv`: a line a request, in the order of arrival; what never happened is left empty."""
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(_REQUEST_COLUMNS)
            writer.writerows(_request_row(request) for request in self.requests)


_REQUEST_COLUMNS: Final = (
    "id",
    "sample",
    "arrival_s",
    "first_scheduled_s",
    "first_token_s",
    "finish_s",
    "prompt_tokens",
    "max_tokens",
    "output_tokens",
    "cached_tokens",
    "num_preemptions",
    "finish_reason",
    "reason",
    "queue_s",
    "ttft_s",
    "tpot_s",
    "e2e_s",
)


def _request_row(request: RequestRecord) -> tuple[object, ...]:
    return (
        *request.key,
        _seconds(request.arrival_s),
        _seconds(request.first_scheduled_s),
        _seconds(request.first_token_s),
        _seconds(request.finish_s),
        request.prompt_tokens,
        request.max_tokens,
        request.output_tokens,
        request.cached_tokens,
        request.num_preemptions,
        request.finish_reason or "",
        request.reason or "",
        _seconds(request.queue_s),
        _seconds(request.ttft_s),
        _seconds(request.tpot_s),
        _seconds(request.e2e_s),
    )


def _seconds(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6f}"
