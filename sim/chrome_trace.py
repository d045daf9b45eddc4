"""A simulated run in Chrome's Trace Event Format, for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged.sim.record import ADMITTED, PREEMPTED, REFUSED, SAMPLED, RequestRecord, SimRecord
from paged.sim.report import seconds

MOST_STEPS: Final = 50_000
"""Most slices for steps; in a longer run one slice stands for several steps in a row."""

MOST_REQUESTS: Final = 20_000
"""Most requests that are shown, the first ones to arrive."""

MOST_COUNTS: Final = 5_000
"""Most points of a counter; in a longer run the points in between are left out."""

# Processes of the trace. All of the format's times are in microseconds.
_ENGINE: Final = 1
_REQUESTS: Final = 2
_STEPS_LANE: Final = 1
_PREEMPTIONS_LANE: Final = 2

Event = dict[str, Any]


def write_trace(record: SimRecord, path: Path) -> None:
    """Write `trace.json`: steps and counters of the engine, and the life of every request.

    A request has one slice from its arrival to its end, with its phases inside: `queued` (until a step computes any of
    it), `prefill` (until it has a token), `decode`, and after a preemption `preempted`, `prefill` (that is, computed
    again) and `decode`. Requests that do not overlap share a lane. Preemptions are instant events as well. What was
    thinned to keep the file small is said in `otherData`.
    """
    thinned = _thinned(record)
    facts = {
        "num_blocks": record.num_blocks,
        "block_size": record.block_size,
        "num_steps": record.num_steps,
        "num_requests": len(record.requests),
        "thinned": "; ".join(thinned) or "nothing",
    }
    with path.open("w", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(facts)},\n"traceEvents": [\n')
        separator = ""
        for event in _events(record):
            file.write(separator + event)
            separator = ",\n"
        file.write("\n]}\n")


def _thinned(record: SimRecord) -> list[str]:
    said = []
    if (per_slice := _steps_per_slice(record)) > 1:
        said.append(f"a slice of the lane of steps stands for up to {per_slice} steps")
    if (left_out := len(_shown_requests(record, None)) - MOST_REQUESTS) > 0:
        said.append(f"the last {left_out} requests to arrive are left out")
    if record.num_steps > MOST_COUNTS:
        said.append(f"counters show {MOST_COUNTS} of {record.num_steps} steps")
    return said


def _steps_per_slice(record: SimRecord) -> int:
    return -(-record.num_steps // MOST_STEPS)


def _shown_requests(record: SimRecord, most: int | None) -> list[int]:
    """Indices of the requests that were taken, by arrival."""
    taken = [index for index, request in enumerate(record.requests) if request.finish_reason != REFUSED]
    return sorted(taken, key=lambda index: record.requests[index].arrival_s)[:most]


def _events(record: SimRecord) -> Iterator[str]:
    """The events as JSON, one a string."""
    yield from map(_json, _names(_ENGINE, "engine", {_STEPS_LANE: "steps", _PREEMPTIONS_LANE: "preemptions"}))
    yield from _steps(record)
    yield from _counters(record)
    yield from map(_json, _lives(record))


def _json(event: Event) -> str:
    return json.dumps(event, separators=(",", ":"))


def _names(process: int, name: str, lanes: dict[int, str]) -> Iterator[Event]:
    """Metadata: what a process and its lanes are called, and their order."""
    told = [("process_name", 0, "name", name), ("process_sort_index", 0, "sort_index", process)]
    for lane, text in lanes.items():
        told += [("thread_name", lane, "name", text), ("thread_sort_index", lane, "sort_index", lane)]
    for what, lane, key, value in told:
        yield {"ph": "M", "name": what, "pid": process, "tid": lane, "ts": 0, "args": {key: value}}


def _steps(record: SimRecord) -> Iterator[str]:
    """A slice a step, or for several in a row; a slice does not reach over a pause."""
    if not record.num_steps:
        return
    steps = record.steps
    first_of_slice = np.arange(record.num_steps) % _steps_per_slice(record) == 0
    first_of_slice[1:] |= record.until_s()[:-1] < steps.start_s[1:]
    firsts = np.flatnonzero(first_of_slice)
    lasts = np.append(firsts[1:], record.num_steps) - 1
    start_us, end_us = _us(steps.start_s[firsts]), _us(steps.end_s[lasts])
    sums = [np.add.reduceat(column, firsts) for column in (steps.num_seqs, steps.num_tokens, steps.preemptions)]
    line = (
        '{"ph":"X","name":"%s","cat":"step","pid":1,"tid":1,"ts":%d,"dur":%d,'
        '"args":{"step":%d,"steps":%d,"rows":%d,"tokens":%d,"preemptions":%d}}'
    )
    is_decode = sums[0] == sums[1]
    names = np.where(is_decode, "decode", "with prefill").tolist()
    columns = (start_us, end_us - start_us, firsts, lasts - firsts + 1, *sums)
    yield from map(line.__mod__, zip(names, *(column.tolist() for column in columns), strict=True))


def _counters(record: SimRecord) -> Iterator[str]:
    """Running, waiting and referenced blocks whenever they may have changed, and 0 where nothing is left."""
    if not record.num_steps:
        return
    steps, until_s = record.steps, record.until_s()
    shown = np.unique(np.linspace(0, record.num_steps - 1, min(record.num_steps, MOST_COUNTS)).astype(np.int64))
    pauses = np.flatnonzero(until_s < np.append(steps.start_s[1:], np.inf))
    ts = np.concatenate([_us(steps.start_s[shown]), _us(until_s[pauses])])
    order = np.argsort(ts, kind="stable")
    for name, column in (
        ("running", steps.num_running),
        ("waiting", steps.num_waiting),
        ("KV blocks", steps.used_blocks),
    ):
        line = f'{{"ph":"C","name":"{name}","pid":{_ENGINE},"tid":0,"ts":%d,"args":{{"{name}":%d}}}}'
        values = np.concatenate([column[shown], np.zeros(len(pauses), np.int64)])
        yield from map(line.__mod__, zip(ts[order].tolist(), values[order].tolist(), strict=True))


def _lives(record: SimRecord) -> Iterator[Event]:
    """The slices of the requests and their preemptions, lane by lane."""
    shown = _shown_requests(record, MOST_REQUESTS)
    moments: dict[int, list[tuple[float, int]]] = {index: [] for index in shown}
    events = record.events
    for time_s, index, kind in zip(*(column.tolist() for column in events), strict=True):
        if index in moments:
            moments[index].append((time_s, kind))
    lane_ends: list[tuple[int, int]] = []  # a heap of (when a lane is free again in us, lane)
    named: dict[int, str] = {}
    slices: list[Event] = []
    for index in shown:
        request = record.requests[index]
        start_us, end_us = _whole_us(request.arrival_s), _whole_us(_end_s(request, record))
        if lane_ends and lane_ends[0][0] <= start_us:
            lane = heapq.heapreplace(lane_ends, (end_us, lane_ends[0][1]))[1]
        else:
            lane = len(lane_ends) + 1
            heapq.heappush(lane_ends, (end_us, lane))
        named[lane] = f"lane {lane}"
        slices.extend(_life(request, start_us, end_us, lane, moments[index]))
    yield from _names(_REQUESTS, "requests", named)
    yield from slices


def _end_s(request: RequestRecord, record: SimRecord) -> float:
    """When a request left, or for an unfinished one the end of what was simulated."""
    return max(request.arrival_s, record.end_s) if math.isnan(request.finish_s) else request.finish_s


def _life(
    request: RequestRecord, start_us: int, end_us: int, lane: int, moments: list[tuple[float, int]]
) -> Iterator[Event]:
    name = request.key[0] if request.key[1] == 0 else f"{request.key[0]} sample {request.key[1]}"
    facts = {
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "cached_tokens": request.cached_tokens,
        "preemptions": request.num_preemptions,
        "finish_reason": request.finish_reason or "unfinished",
        "time to first token": "-" if math.isnan(request.ttft_s) else seconds(request.ttft_s),
    }
    yield _slice(name, "request", lane, start_us, end_us, facts)
    phase, since_us = "queued", start_us
    for time_s, kind in moments:
        now_us = min(max(_whole_us(time_s), since_us), end_us)
        if now_us > since_us:
            yield _slice(phase, "phase", lane, since_us, now_us, {})
        phase, since_us = _PHASES[kind], now_us
        if kind == PREEMPTED:
            where = {"pid": _ENGINE, "tid": _PREEMPTIONS_LANE, "ts": now_us}
            yield {"ph": "i", "name": "preempted", "cat": "preemption", "s": "t", **where, "args": {"request": name}}
    if end_us > since_us:
        yield _slice(phase, "phase", lane, since_us, end_us, {})


_PHASES: Final = {ADMITTED: "prefill", SAMPLED: "decode", PREEMPTED: "preempted"}


def _slice(name: str, category: str, lane: int, start_us: int, end_us: int, facts: dict[str, Any]) -> Event:
    where = {"pid": _REQUESTS, "tid": lane, "ts": start_us, "dur": end_us - start_us}
    return {"ph": "X", "name": name, "cat": category, **where, "args": facts}


# Whole microseconds: neighbours that share a bound then share it exactly, and nested slices nest.


def _whole_us(time_s: float) -> int:
    return round(time_s * 1e6)


def _us(times_s: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    return np.rint(times_s * 1e6).astype(np.int64)
