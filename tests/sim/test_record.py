"""Checks what a simulated run leaves: rows, columns, moments, and the files made of them."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from paged.sim.record import ADMITTED, PREEMPTED, SAMPLED, SimRecord, StepColumns


def test_a_row_keeps_the_first_times_and_the_last(record: SimRecord) -> None:
    d = record.requests[3]
    assert (d.first_scheduled_s, d.first_token_s, d.finish_s, d.num_preemptions) == (6.0, 7.0, 9.5, 1)
    assert (d.queue_s, d.ttft_s, d.tpot_s, d.e2e_s) == (0.0, 1.0, 2.5, 3.5)


def test_one_token_has_no_time_between_tokens(record: SimRecord) -> None:
    assert math.isnan(record.requests[1].tpot_s)


def test_moments_tell_a_preemption_in_order(record: SimRecord) -> None:
    events = record.events
    mine = events.request == 3
    assert events.kind[mine].tolist() == [ADMITTED, SAMPLED, PREEMPTED, ADMITTED, SAMPLED]
    assert events.time_s[mine].tolist() == [6.0, 7.0, 7.0, 8.0, 9.5]


def test_columns_are_parallel(record: SimRecord) -> None:
    steps = record.steps
    assert steps.num_tokens.tolist() == [5, 5, 1, 7, 1, 5]
    assert {len(column) for column in steps} == {record.num_steps} == {6}
    assert steps.start_s.dtype == np.float64
    assert steps.used_blocks.dtype == np.int64


def test_a_held_view_forbids_appending_instead_of_going_stale(record: SimRecord) -> None:
    steps = record.steps
    with pytest.raises(BufferError):
        record.append_step(9.5, 10.0, 1, 1, 1, 0, 1, 0, 0)
    del steps


def test_an_empty_record_has_empty_columns() -> None:
    empty = SimRecord(num_blocks=1, block_size=1)
    assert {len(column) for column in (*empty.steps, *empty.events, empty.until_s())} == {0}
    assert empty.start_s == empty.end_s == 0.0


def test_a_state_lasts_until_the_next_step_unless_nothing_is_left(record: SimRecord) -> None:
    assert record.until_s().tolist() == [1.0, 2.0, 4.0, 7.0, 8.0, 9.5]


def test_a_pause_with_a_request_in_hand_belongs_to_the_step_before() -> None:
    made = SimRecord(num_blocks=4, block_size=4)
    made.add_request(("a", 0), 0.0, prompt_tokens=1, max_tokens=3)
    made.append_step(0.0, 1.0, 1, 1, 1, 0, 1, 3, 0)
    made.append_step(1.25, 2.0, 1, 1, 1, 0, 1, 2, 0)
    assert made.until_s().tolist() == [1.25, 2.0]


def test_the_clock_begins_with_the_first_request_that_was_taken(record: SimRecord) -> None:
    early = record.add_request(("f", 0), -5.0, prompt_tokens=99, max_tokens=1)
    assert record.start_s == -5.0
    record.refuse(early, "it can never fit")
    assert (record.start_s, record.end_s) == (0.0, 9.5)


def test_steps_csv(record: SimRecord, tmp_path: Path) -> None:
    record.write_steps(tmp_path / "steps.csv")
    lines = (tmp_path / "steps.csv").read_text().splitlines()
    assert lines[0] == "start_s,end_s,num_seqs,num_tokens,num_running,num_waiting,used_blocks,waste_tokens,preemptions"
    assert lines[5] == "7.000000,8.000000,1,1,1,1,1,0,1"
    assert len(lines) == 7


def test_steps_csv_of_many_steps_has_every_one_once(tmp_path: Path) -> None:
    made = SimRecord(num_blocks=4, block_size=4)
    for step in range(10_000):
        made.append_step(step, step + 0.5, step, 2, 3, 4, 5, 6, 7)
    made.write_steps(tmp_path / "steps.csv")
    read = np.loadtxt(tmp_path / "steps.csv", delimiter=",", skiprows=1)
    assert np.array_equal(read, np.stack(made.steps, axis=1))
    assert read.shape == (10_000, len(StepColumns._fields))


def test_requests_csv(record: SimRecord, tmp_path: Path) -> None:
    record.write_requests(tmp_path / "requests.csv")
    with (tmp_path / "requests.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], int(row["sample"])) for row in rows] == [request.key for request in record.requests]
    a, b, *_, e = rows
    assert (a["finish_reason"], a["output_tokens"], a["tpot_s"], a["e2e_s"]) == ("stop", "3", "1.500000", "4.000000")
    assert (b["sample"], b["tpot_s"], b["queue_s"]) == ("0", "", "0.500000")
    assert (e["id"], e["finish_reason"], e["reason"]) == ("e, the long", "refused", "it can never fit")
    assert e["first_token_s"] == e["ttft_s"] == e["finish_s"] == ""
