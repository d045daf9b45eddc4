"""The reader of step logs: what the writer writes comes back, and what is no event is told with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paged.core.plan import SAMPLE, Started, StepPlan, StepResult
from paged.core.prompt import Prompt
from paged.core.request import Request, SamplingParams
from paged.core.sequence import FinishReason
from paged.sim.step_log import (
    AbandonEvent,
    AbortEvent,
    AddEvent,
    CommitEvent,
    ConfigEvent,
    EmptyPlanEvent,
    PlanEvent,
    StepLogReader,
    WeightsEvent,
    step_log_of,
)
from paged.step_log import StepLog

CONFIG = {"event": "config", "time_s": 0.0, "limits": {"num_blocks": 8}, "policy": {"name": "fifo"}}
ADD = {
    "event": "add",
    "time_s": 0.1,
    "id": "a",
    "samples": [0],
    "seeds": [7],
    "prompt_token_ids": [1, 2],
    "max_tokens": 3,
    "is_scored": False,
}
PLAN = {
    "event": "plan",
    "time_s": 0.2,
    "step": 0,
    "weight_version": 0,
    "slots": [0],
    "starts": [0],
    "lengths": [2],
    "logits": [1],
    "started": [[0, "a", 0, 0, [4]]],
    "appended": [],
    "released": [],
    "preempted": [],
}
COMMIT = {"event": "commit", "time_s": 0.4, "step": 0, "tokens": [5], "stopped": [False], "start_s": 0.2, "end_s": 0.3}


def write(path: Path, *events: dict[str, Any], end: str = "\n") -> Path:
    path.write_text("\n".join(json.dumps(event) for event in events) + end)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    params = SamplingParams(n=2, prompt_logprobs=0)
    requests = [Request("a", sample, Prompt([1, 2, 3]), params, 70 + sample, 9) for sample in range(2)]
    started = Started(1, requests[0], (), 0, (6, 4), 2)
    plan = StepPlan(3, 1, [0, 2], [started], [(1, 5)], [1, 3], [2, 8], [1, 1], [SAMPLE, SAMPLE], [("b", 1)])
    path = tmp_path / "steps.jsonl"
    with StepLog(path) as log:
        log.config({"num_blocks": 8, "depth": 2}, {"name": "watermark", "fraction": 0.25})
        log.add(requests)
        log.abort("a", None, "abort")
        log.abort("a", 1, "error")
        log.plan(plan)
        log.plan(None)
        log.commit(StepResult(3, [5, 6], [False, True], [], 1.25, 1.5))
        log.change_weights(2)
        log.abandon()
    reader = StepLogReader(path)
    config, add, abort, error, planned, empty, commit, weights, abandon = reader
    assert isinstance(config, ConfigEvent)
    assert (config.limits, config.policy) == ({"num_blocks": 8, "depth": 2}, {"name": "watermark", "fraction": 0.25})
    assert isinstance(add, AddEvent)
    assert (add.id, add.samples, add.seeds, add.prompt_token_ids) == ("a", [0, 1], [70, 71], [1, 2, 3])
    assert (add.max_tokens, add.is_scored, add.output_len) == (9, True, None)
    assert isinstance(abort, AbortEvent)
    assert (abort.id, abort.sample, abort.reason) == ("a", None, FinishReason.ABORT)
    assert isinstance(error, AbortEvent)
    assert (error.sample, error.reason) == (1, FinishReason.ERROR)
    assert isinstance(planned, PlanEvent)
    assert (planned.step, planned.weight_version, planned.released) == (3, 1, [0, 2])
    columns = (planned.slots, planned.starts, planned.lengths, planned.logits)
    assert columns == ([1, 3], [2, 8], [1, 1], [SAMPLE, SAMPLE])
    assert (planned.started, planned.appended, planned.preempted) == ([[1, "a", 0, 2, [6, 4]]], [[1, 5]], [["b", 1]])
    assert isinstance(empty, EmptyPlanEvent)
    assert isinstance(commit, CommitEvent)
    assert (commit.step, commit.tokens, commit.stopped) == (3, [5, 6], [False, True])
    assert (commit.start_s, commit.end_s) == (1.25, 1.5)
    assert isinstance(weights, WeightsEvent)
    assert weights.version == 2
    assert isinstance(abandon, AbandonEvent)
    events = [config, add, abort, error, planned, empty, commit, weights, abandon]
    assert [event.line for event in events] == list(range(1, 10))
    times = [event.time_s for event in events]
    assert times == sorted(times)
    assert reader.torn_line is None


def test_a_forced_length_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "log", CONFIG, {**ADD, "output_len": 5}, {**ADD, "output_len": None})
    _, forced, free = StepLogReader(path)
    assert isinstance(forced, AddEvent)
    assert isinstance(free, AddEvent)
    assert (forced.output_len, free.output_len) == (5, None)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "log", CONFIG, ADD, end="\n" + json.dumps(PLAN)[:40])
    reader = StepLogReader(path)
    assert [event.line for event in reader] == [1, 2]
    assert reader.torn_line == 3


def test_a_torn_line_that_others_follow_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(json.dumps(CONFIG) + "\n" + json.dumps(ADD)[:30] + "\n" + json.dumps(PLAN) + "\n")
    with pytest.raises(ValueError, match=r"log, line 2: not JSON"):
        list(StepLogReader(path))


@pytest.mark.parametrize(
    ("event", "changes", "sentence"),
    [
        (ADD, {"event": "ad"}, "event must be one of config, add, abort, plan, commit, weights, abandon, not 'ad'"),
        (ADD, {"event": ["add"]}, "event must be one of config, add"),
        (ADD, {"id": 3}, "id of event add must be a text, not 3"),
        (ADD, {"seeds": [1, 2]}, "event add must hold a seed for each sample, not 2 for 1"),
        (ADD, {"samples": [], "seeds": []}, "event add must hold a seed for each sample, not 0 for 0"),
        (ADD, {"prompt_token_ids": None}, "prompt_token_ids of event add must be a list of whole numbers, not null"),
        (ADD, {"max_tokens": 2.5}, "max_tokens of event add must be a whole number, not 2.5"),
        (ADD, {"is_scored": 1}, "is_scored of event add must be true or false, not 1"),
        (ADD, {"output_len": "5"}, "output_len of event add must be a whole number"),
        (ADD, {"time_s": "now"}, "time_s of event add must be a number"),
        (ADD, {"time_s": float("nan")}, "time_s of event add must be a number"),
        (PLAN, {"starts": [0, 1]}, "slots, starts, lengths and logits of event plan must be equally long"),
        (PLAN, {"slots": [], "starts": [], "lengths": [], "logits": []}, "equally long and not empty"),
        (PLAN, {"lengths": [0]}, "lengths at least 1"),
        (PLAN, {"starts": [-1]}, "starts of event plan must be at least 0"),
        (PLAN, {"slots": [True]}, "slots of event plan must be a list of whole numbers"),
        (PLAN, {"started": [[0, "a", 0, [4]]]}, "started of event plan must be a list of [int, str, int, int, list]"),
        (PLAN, {"appended": [[0, 1, 2]]}, "appended of event plan must be a list of [int, int]"),
        (PLAN, {"preempted": ["a"]}, "preempted of event plan must be a list of [str, int]"),
        (PLAN, {"step": "0"}, "step of event plan must be a whole number"),
        (COMMIT, {"stopped": []}, "event commit must hold a flag for each token, not 0 for 1"),
        (COMMIT, {"stopped": [0]}, "stopped of event commit must be a list of true and false"),
        (COMMIT, {"end_s": 0.1}, "end_s of event commit must not lie before start_s"),
        (COMMIT, {"start_s": None}, "start_s of event commit must be a number"),
        (CONFIG, {"limits": []}, "limits of event config must be an object"),
        ({"event": "abort", "time_s": 0, "id": "a", "sample": None}, {"reason": "tired"}, "reason of event abort must"),
        ({"event": "abort", "time_s": 0, "id": "a", "reason": "abort"}, {}, "event abort lacks sample"),
        ({"event": "weights", "time_s": 0}, {}, "event weights lacks version"),
        ({"event": "abandon"}, {}, "event abandon lacks time_s"),
    ],
)
def test_what_is_no_event_is_told_with_its_line(
    event: dict[str, Any], changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "log", CONFIG, {**event, **changes}, ADD)
    with pytest.raises(ValueError, match="line 2: ") as error:
        list(StepLogReader(path))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no events"),
        (json.dumps(CONFIG)[:20], "holds no events"),
        (json.dumps(ADD) + "\n", "line 1: a step log begins with an event config"),
        ("[]\n", "line 1: not a JSON object"),
    ],
)
def test_a_log_begins_with_its_config(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        list(StepLogReader(tmp_path / "log"))


def test_events_before_a_malformed_line_are_given(tmp_path: Path) -> None:
    """The file is read as it is asked for: a log of gigabytes must not have to fit into memory."""
    path = write(tmp_path / "log", CONFIG, ADD, {"event": "nonsense"}, PLAN)
    events = iter(StepLogReader(path))
    assert [next(events).line for _ in range(2)] == [1, 2]
    with pytest.raises(ValueError, match="line 3"):
        next(events)


def test_a_folder_without_a_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^.* holds no steps\.jsonl, which every run leaves$"):
        step_log_of(tmp_path)
    with pytest.raises(ValueError, match=r"nowhere does not exist$"):
        step_log_of(tmp_path / "nowhere")
    path = write(tmp_path / "steps.jsonl", CONFIG)
    assert step_log_of(tmp_path) == step_log_of(path) == path
    with pytest.raises(ValueError, match="can't be read"):
        list(StepLogReader(tmp_path / "nothing"))


def test_the_folder_of_a_sweep_is_told_with_its_runs(tmp_path: Path) -> None:
    for name in ("10", "2", "0"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "steps.jsonl", CONFIG)
    with pytest.raises(ValueError, match=r" is the folder of a sweep: give one of the folders in it, 0, 2, 10$"):
        step_log_of(tmp_path)
    (tmp_path / "11").mkdir()
    write(tmp_path / "11" / "steps.jsonl", CONFIG)
    with pytest.raises(ValueError, match=r"0, 2, 10, \.\.\.$"):
        step_log_of(tmp_path)
