"""Checks that the trace is what the viewers read: fields, nesting, order, and what it tells."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from paged.sim import chrome_trace
from paged.sim.chrome_trace import write_trace
from paged.sim.record import SimRecord

NEEDED = {
    "M": {"name", "pid", "args"},
    "X": {"name", "ts", "dur", "pid", "tid"},
    "C": {"name", "ts", "pid", "args"},
    "i": {"name", "ts", "pid", "tid", "s"},
}


def traced(record: SimRecord, folder: Path) -> dict[str, Any]:
    write_trace(record, folder / "trace.json")
    trace = json.loads((folder / "trace.json").read_text())
    check(trace)
    return trace


def check(trace: dict[str, Any]) -> None:
    """Every event has what its phase needs, times are whole microseconds, and slices of a lane nest or are apart."""
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event.keys() >= NEEDED[event["ph"]], event
        assert isinstance(event["ts"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append(event)
    for slices in lanes.values():
        open_until: list[int] = []
        for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1], event
            open_until.append(event["ts"] + event["dur"])


def named(trace: dict[str, Any], what: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == what}


def test_everything_has_a_name(record: SimRecord, tmp_path: Path) -> None:
    trace = traced(record, tmp_path)
    assert named(trace, "process_name") == {(1, 0): "engine", (2, 0): "requests"}
    used = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["ph"] in "Xi"}
    assert used == named(trace, "thread_name").keys()


def test_a_slice_a_step(record: SimRecord, tmp_path: Path) -> None:
    steps = [event for event in traced(record, tmp_path)["traceEvents"] if event.get("cat") == "step"]
    assert [event["ts"] for event in steps] == [0, 1_000_000, 2_000_000, 6_000_000, 7_000_000, 8_000_000]
    assert [event["name"] for event in steps] == [
        *("with prefill", "with prefill", "decode", "with prefill", "decode", "with prefill")
    ]
    assert steps[3]["args"] == {"step": 3, "steps": 1, "rows": 2, "tokens": 7, "preemptions": 0}


def test_the_life_of_a_preempted_request(record: SimRecord, tmp_path: Path) -> None:
    events = traced(record, tmp_path)["traceEvents"]
    whole = next(event for event in events if event["name"] == "d sample 1")
    assert (whole["ts"], whole["dur"]) == (6_000_000, 3_500_000)
    assert whole["args"]["finish_reason"] == "length"
    phases = [e for e in events if e.get("cat") == "phase" and e["tid"] == whole["tid"] and e["ts"] >= 6_000_000]
    assert [(event["name"], event["ts"] // 1000, event["dur"] // 1000) for event in phases] == [
        ("prefill", 6000, 1000),
        ("preempted", 7000, 1000),
        ("prefill", 8000, 1500),
    ]
    instants = [event for event in events if event["ph"] == "i"]
    assert [(event["ts"], event["args"]["request"]) for event in instants] == [(7_000_000, "d sample 1")]


def test_waiting_is_a_phase_and_lanes_are_used_again(record: SimRecord, tmp_path: Path) -> None:
    events = traced(record, tmp_path)["traceEvents"]
    b = next(event for event in events if event["name"] == "b")
    inside = [e for e in events if e.get("cat") == "phase" and e["tid"] == b["tid"] and e["ts"] < 2_000_000]
    assert [(event["name"], event["ts"], event["dur"]) for event in inside] == [
        ("queued", 500_000, 500_000),
        ("prefill", 1_000_000, 1_000_000),
    ]
    lives = {event["name"]: event["tid"] for event in events if event.get("cat") == "request"}
    assert sorted(lives) == ["a", "b", "c", "d sample 1"], "what was refused has no life"
    assert sorted(lives.values()) == [1, 1, 2, 2]


def test_counters_fall_to_zero_when_all_has_finished(record: SimRecord, tmp_path: Path) -> None:
    events = traced(record, tmp_path)["traceEvents"]
    running = [(e["ts"] / 1e6, e["args"]["running"]) for e in events if e["ph"] == "C" and e["name"] == "running"]
    assert running == [(0, 1), (1, 2), (2, 1), (4, 0), (6, 2), (7, 1), (8, 1), (9.5, 0)]
    assert {event["name"] for event in events if event["ph"] == "C"} == {"running", "waiting", "KV blocks"}


def test_an_unfinished_request_lasts_to_the_end(record: SimRecord, tmp_path: Path) -> None:
    record.add_request(("late", 0), 9.0, prompt_tokens=4, max_tokens=2)
    events = traced(record, tmp_path)["traceEvents"]
    whole = next(event for event in events if event["name"] == "late")
    assert (whole["ts"], whole["dur"], whole["args"]["finish_reason"]) == (9_000_000, 500_000, "unfinished")


def test_an_empty_run_is_a_valid_trace(tmp_path: Path) -> None:
    assert traced(SimRecord(num_blocks=4, block_size=4), tmp_path)["otherData"]["num_steps"] == 0


def test_a_long_run_is_thinned_and_says_so(record: SimRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert traced(record, tmp_path)["otherData"]["thinned"] == "nothing"
    monkeypatch.setattr(chrome_trace, "MOST_STEPS", 3)
    monkeypatch.setattr(chrome_trace, "MOST_REQUESTS", 3)
    monkeypatch.setattr(chrome_trace, "MOST_COUNTS", 4)
    trace = traced(record, tmp_path)
    steps = [event for event in trace["traceEvents"] if event.get("cat") == "step"]
    assert [event["args"]["steps"] for event in steps] == [2, 1, 1, 2], "no slice reaches over the pause"
    assert sum(event["args"]["tokens"] for event in steps) == 24
    assert sum(1 for event in trace["traceEvents"] if event.get("cat") == "request") == 3
    said = trace["otherData"]["thinned"]
    assert "up to 2 steps" in said
    assert "the last 1 requests" in said
    assert "4 of 6 steps" in said
