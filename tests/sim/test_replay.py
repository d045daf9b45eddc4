"""A real run's decisions come out of the simulator's scheduler again; a log that was tampered with does not pass."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_tools import INVARIANT, SEEDED, SPEC, VOCAB, Arrival, drive, make_engine, random_prompt, runner_of
from paged import CompletionOutput, Engine, SampleUpdate
from paged.core.policy import VICTIMS, Fifo, Policy, Reserve, Watermark
from paged.core.scheduler import NonFiniteLogitsError
from paged.model.decoder import Decoder
from paged.sim.replay import ReplayReport, policy_of, replay
from paged.sim.shape import StepShape

Log = list[dict[str, Any]]


class PlantedError(Exception):
    """What a broken executor raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timid(Watermark):
    """A policy that only this test knows: a replay must find whatever policy there is."""

    patience: int = 2


def run_engine(path: Path, seed: int, depth: int, policy: Policy) -> tuple[Engine, Counter[str]]:
    """A run that meets all that can happen in a small pool; appends its events to ``path``."""
    rng = random.Random(seed)
    decoder = Decoder.random(SPEC, 1, numerics=INVARIANT, dtype=torch.float32)
    decoder.tensors()["lm_head.weight"].mul_(4)
    # Whoever has the last id in its prompt gets NaN logits.
    decoder.tensors()["model.embed_tokens.weight"][VOCAB - 1] = torch.nan
    engine = make_engine(
        decoder,
        num_blocks=12,
        block_size=4,
        chunk_size=7,
        max_step_tokens=24,
        max_num_seqs=6,
        depth=depth,
        policy=policy,
        eos_token_ids=(3, 20, 50),
        step_log=path,
    )
    stem = random_prompt(rng, 16, 16, VOCAB - 1)
    arrivals = []
    for number in range(14):
        prompt = [*stem[: rng.choice((0, 8, 16))], *random_prompt(rng, 1, 5, VOCAB - 1)]
        if number == 5:
            prompt.insert(2, VOCAB - 1)
        params = replace(
            SEEDED,
            n=rng.choice((1, 2, 3)),
            seed=rng.randrange(1000),
            max_tokens=rng.choice((1, 8, 16)),
            stop_token_ids=(rng.randrange(VOCAB),),
            prompt_logprobs=rng.choice((None, None, 0)),
            logit_bias={VOCAB - 1: -1e4},
        )
        arrivals.append(Arrival(f"r{number}", prompt, params, rng.randint(0, 20)))
    met: Counter[str] = Counter()
    weights = {name: tensor.clone() for name, tensor in decoder.tensors().items()}
    collect = runner_of(engine).collect

    def broken() -> Any:
        met["collected"] += 1
        if met["collected"] == 12:
            raise PlantedError
        return collect()

    runner_of(engine).collect = broken  # type: ignore[method-assign]

    def interfere(number: int) -> list[CompletionOutput]:
        if number == 9:
            try:
                engine.load_weights(weights)
                met["new weights"] += 1
            except (PlantedError, NonFiniteLogitsError):
                pass
        return engine.abort(f"r{number % 14}") if number in (6, 11, 17) else []

    def patient() -> list[SampleUpdate]:
        try:
            return engine.run_step()
        except PlantedError:
            met["abandons"] += 1
            return []

    result = drive(engine, arrivals, interfere, step=patient)
    engine.close()
    met.update(output.finish_reason for output in result.outputs.values())
    counters = engine.scheduler.counters
    met["preemptions"] = counters.num_preemptions
    met["cached"] = counters.cached_tokens
    met["dropped"] = counters.dropped_tokens
    return engine, met


def read_log(path: Path) -> Log:
    return [json.loads(line) for line in path.read_text().splitlines()]


def replay_events(path: Path, events: Log) -> ReplayReport:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return replay(path)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    """A log with preemptions, at depth 2."""
    path = tmp_path_factory.mktemp("run") / "steps.jsonl"
    _, met = run_engine(path, 1, 2, Watermark(fraction=0.05))
    assert met["preemptions"] > 2, met
    return read_log(path)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "policy",
    [
        Fifo(victim="most_blocks"),
        Watermark(fraction=0.1, victim="least_computed"),
        Reserve(),
        Timid(fraction=0.1),
    ],
    ids=str,
)
def test_every_plan_of_a_real_run_comes_out_again(policy: Policy, depth: int, tmp_path: Path) -> None:
    met: Counter[str] = Counter()
    for seed in range(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        engine, found = run_engine(folder / "steps.jsonl", seed, depth, policy)
        met += found
        report = replay(folder)
        assert report.exact, report.first_difference
        assert report.counters == engine.scheduler.counters
        assert report.num_steps == engine.scheduler.counters.num_steps > 30
        assert (report.source, report.num_sessions, report.torn_line) == (str(seed), 1, None)
        events = read_log(folder / "steps.jsonl")
        assert report.num_empty_plans == sum(event["event"] == "plan" and event["step"] is None for event in events)
        commits = [event for event in events if event["event"] == "commit"]
        assert report.recorded_span_s == pytest.approx(commits[-1]["end_s"] - commits[0]["start_s"])
        assert 0 < report.recorded_step_s <= report.recorded_span_s + 1e-9
    assert (met["preemptions"] > 2) == (not isinstance(policy, Reserve)), met
    assert met["cached"] > 30, met
    assert min(met["abort"], met["error"], met["stop"], met["length"]) >= 2, met
    assert met["abandons"] == 2, met
    assert met["new weights"] >= 1, met
    assert (met["dropped"] > 0) == (depth > 1), met


def test_a_resumed_run_begins_anew(tmp_path: Path) -> None:
    """Each process had a scheduler of its own; what the first left unfinished is not there for the second."""
    path = tmp_path / "steps.jsonl"
    run_engine(path, 1, 2, Fifo())
    events = read_log(path)
    cut = next(i for i, event in enumerate(events) if event["event"] == "plan" and event.get("step") == 12)
    path.write_text("".join(json.dumps(event) + "\n" for event in events[:cut]))
    second, _ = run_engine(path, 2, 3, Watermark(fraction=0.1))
    report = replay(tmp_path)
    assert report.counters.peak_blocks == 12
    assert report.exact, report.first_difference
    assert report.num_sessions == 2
    assert report.num_steps == 12 + second.scheduler.counters.num_steps
    assert report.counters.num_added > second.scheduler.counters.num_added
    unknown = {"event": "abort", "time_s": 0.0, "id": "nobody", "sample": None, "reason": "abort"}
    difference = replay_events(path, [*read_log(path)[: cut + 1], unknown]).first_difference
    assert difference is not None
    assert (difference.session, difference.step) == (1, 0)
    assert difference.sentence.startswith(f"step 0 of process 2 (line {cut + 2}): ")


def test_a_torn_end_is_left_out_and_told(log: Log, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in log[:40]) + json.dumps(log[40])[:-7])
    report = replay(path)
    assert report.exact
    assert report.torn_line == 41
    assert "line 41" in report.table()


# Tampering

Tamper = Callable[[dict[str, Any]], None]


def plans(log: Log, has: Callable[[dict[str, Any]], Any]) -> list[int]:
    """Indices of plans that have something."""
    return [i for i, event in enumerate(log) if event["event"] == "plan" and event["step"] is not None and has(event)]


def shorter_chunk(plan: dict[str, Any]) -> None:
    plan["lengths"][max(range(len(plan["lengths"])), key=plan["lengths"].__getitem__)] -= 1


def other_start(plan: dict[str, Any]) -> None:
    plan["starts"][-1] += 1


def other_flags(plan: dict[str, Any]) -> None:
    plan["logits"][0] ^= 1


def one_row_less(plan: dict[str, Any]) -> None:
    for name in ("slots", "starts", "lengths", "logits"):
        plan[name].pop()


def other_member(plan: dict[str, Any]) -> None:
    plan["slots"][0], plan["slots"][1] = plan["slots"][1], plan["slots"][0]


def other_block_at_start(plan: dict[str, Any]) -> None:
    plan["started"][0][4][-1] ^= 1


def one_block_more_at_start(plan: dict[str, Any]) -> None:
    plan["started"][0][4].append(3)


def other_cached(plan: dict[str, Any]) -> None:
    plan["started"][0][3] += 4


def not_started(plan: dict[str, Any]) -> None:
    plan["started"].pop()


def other_block(plan: dict[str, Any]) -> None:
    plan["appended"][0][1] ^= 1


def no_block(plan: dict[str, Any]) -> None:
    plan["appended"].clear()


def not_released(plan: dict[str, Any]) -> None:
    plan["released"].pop()


def no_preemption(plan: dict[str, Any]) -> None:
    plan["preempted"].pop()


def other_preemption(plan: dict[str, Any]) -> None:
    plan["preempted"][0][1] += 1


def other_version(plan: dict[str, Any]) -> None:
    plan["weight_version"] += 1


def other_step(plan: dict[str, Any]) -> None:
    plan["step"] += 1


@pytest.mark.parametrize(
    ("has", "tamper", "what", "words"),
    [
        (lambda plan: max(plan["lengths"]) > 1, shorter_chunk, "lengths", "computes tokens"),
        (lambda plan: plan["starts"], other_start, "starts", "starts at position"),
        (lambda plan: plan["logits"], other_flags, "logits", "has the logits flags"),
        (
            lambda plan: len(plan["slots"]) > 1,
            one_row_less,
            "slots",
            "the log computes no more, the scheduler",
        ),
        (lambda plan: len(plan["slots"]) > 1, other_member, "slots", "the log computes 'r"),
        (lambda plan: plan["started"], other_block_at_start, "started", "as block"),
        (lambda plan: plan["started"], one_block_more_at_start, "started", "blocks in the log"),
        (lambda plan: plan["started"], other_cached, "started", "tokens from the cache in the log"),
        (lambda plan: plan["started"], not_started, "started", "the log starts no more, the scheduler starts 'r"),
        (lambda plan: plan["appended"], other_block, "appended", "the log gives block"),
        (lambda plan: plan["appended"], no_block, "appended", "the log gives no more, the scheduler gives block"),
        (lambda plan: plan["released"], not_released, "released", "the log releases no more, the scheduler releases"),
        (
            lambda plan: plan["preempted"],
            no_preemption,
            "preempted",
            "the log preempts no more, the scheduler",
        ),
        (lambda plan: plan["preempted"], other_preemption, "preempted", "the log preempts 'r"),
        (lambda plan: True, other_version, "weight_version", "in the log"),
        (lambda plan: True, other_step, "step", "the scheduler calls it step"),
    ],
)
@pytest.mark.parametrize("which", [0, -1])
def test_a_plan_that_was_tampered_with_is_found(
    has: Callable[[dict[str, Any]], Any], tamper: Tamper, what: str, words: str, which: int, log: Log, tmp_path: Path
) -> None:
    index = plans(log, has)[which]
    events = copy.deepcopy(log)
    tamper(events[index])
    report = replay_events(tmp_path / "steps.jsonl", events)
    difference = report.first_difference
    assert difference is not None
    assert not report.exact
    assert (difference.line, difference.what, difference.session) == (index + 1, what, 0)
    assert difference.step == events[index]["step"]
    assert difference.expected != difference.found
    assert words in difference.sentence
    assert difference.sentence.startswith(f"step {difference.step} (line {index + 1}): ")
    assert "\n" not in difference.sentence
    assert report.num_steps == log[index]["step"]
    assert difference.sentence in report.table()
    summary = json.loads(json.dumps(report.summary()))
    assert summary["exact"] is False
    assert summary["first_difference"]["step"] == difference.step


@pytest.mark.parametrize(
    "change",
    [
        {"policy": {"name": "watermark", "fraction": 0.4}},
        {"policy": {"name": "watermark", "fraction": 0.05, "victim": "most_blocks"}},
        {"policy": {"name": "reserve"}},
        {"limits": {"num_blocks": 13}},
        {"limits": {"chunk_size": 6}},
        {"limits": {"prefix_reuse": False}},
    ],
    ids=str,
)
def test_another_policy_or_limit_is_found_at_the_first_step_that_it_changes(
    change: dict[str, Any], log: Log, tmp_path: Path
) -> None:
    config = copy.deepcopy(log[0])
    config["policy"] = change.get("policy", config["policy"])
    config["limits"] |= change.get("limits", {})
    path = tmp_path / "steps.jsonl"
    report = replay_events(path, [config, *log[1:]])
    difference = report.first_difference
    assert difference is not None
    # Up to there the two decide alike, and one event further they don't: that is what "first" means.
    assert replay_events(path, [config, *log[1 : difference.line - 1]]).exact
    assert not replay_events(path, [config, *log[1 : difference.line]]).exact


def index_of(log: Log, kind: str) -> int:
    return next(i for i, event in enumerate(log) if event["event"] == kind and event.get("step", 0) is not None)


def drop(log: Log, kind: str) -> Log:
    index = index_of(log, kind)
    return log[:index] + log[index + 1 :]


def swap_commits(log: Log) -> Log:
    """The first two commits in the wrong order."""
    first, second = [i for i, event in enumerate(log) if event["event"] == "commit"][:2]
    events = list(log)
    events[first], events[second] = events[second], events[first]
    return events


def test_other_events_that_are_missing_or_out_of_order_are_found(log: Log, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for kind in ("add", "abort", "weights", "abandon"):
        assert not replay_events(path, drop(log, kind)).exact, kind
    difference = replay_events(path, swap_commits(log)).first_difference
    assert difference is not None
    assert difference.what == "commit"
    assert "step 0 is the oldest in flight" in difference.sentence
    difference = replay_events(path, drop(log, "commit")).first_difference
    assert difference is not None
    assert difference.what == "in_flight"
    assert "the log plans with 2 steps in flight, the depth is 2" in difference.sentence
    index = index_of(log, "add")
    difference = replay_events(path, [*log[: index + 1], *log[index:]]).first_difference
    assert difference is not None
    assert difference.what == "add"
    assert "is in use" in difference.sentence
    unknown = {"event": "abort", "time_s": 0.0, "id": "nobody", "sample": None, "reason": "abort"}
    difference = replay_events(path, [*log[:5], unknown, *log[5:]]).first_difference
    assert difference is not None
    assert (difference.what, difference.line) == ("abort", 6)
    assert "request 'nobody', which the scheduler does not hold" in difference.sentence


def test_a_log_that_contradicts_itself_is_no_difference_but_a_mistake(log: Log, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    index = next(i for i, event in enumerate(log) if event["event"] == "commit" and event["tokens"])
    events = copy.deepcopy(log)
    events[index]["tokens"].append(1)
    events[index]["stopped"].append(False)
    with pytest.raises(ValueError, match=rf"line {index + 1} commits \d+ tokens, but line \d+ planned \d+"):
        replay_events(path, events)
    for change, sentence in (
        ({"limits": {**log[0]["limits"], "num_blocs": 3}}, "line 1: num_blocs is not a limit that is known"),
        ({"limits": {"block_size": 4}}, "line 1: .*num_blocks"),
        ({"limits": {**log[0]["limits"], "depth": 0}}, "line 1: depth must be a whole number"),
        ({"policy": {"name": "bold"}}, "line 1: the policy 'bold' is not one of .*fifo, .*reserve"),
        ({"policy": {}}, "line 1: the policy None is not one of"),
        ({"policy": {"name": "fifo", "nerve": 3}}, "line 1: the policy fifo has no field nerve"),
        ({"policy": {"name": "watermark", "fraction": 2}}, "line 1: policy.fraction must be"),
    ):
        with pytest.raises(ValueError, match=sentence):
            replay_events(path, [{**log[0], **change}, *log[1:]])


def test_any_policy_is_found_by_its_name_and_fields() -> None:
    for victim in VICTIMS:
        facts = {"name": "watermark", "fraction": 0.3, "victim": victim}
        assert policy_of(facts) == Watermark(fraction=0.3, victim=victim)
    assert policy_of({"name": "timid", "patience": 5}) == Timid(patience=5)
    # A log from before a field was there.
    assert policy_of({"name": "fifo"}) == Fifo()


class Constant:
    """Predicts the same for every step."""

    def step_s(self, shape: StepShape) -> float:
        assert shape.num_tokens > 0
        return 0.5

    def host_s(self, num_seqs: int) -> float:
        raise AssertionError("a replay compares steps, not what lies between them")


def test_predicted_times_are_told_apart_from_decisions(log: Log, tmp_path: Path) -> None:
    events = copy.deepcopy(log)
    commits = [event for event in events if event["event"] == "commit"]
    for number, event in enumerate(commits):
        event["start_s"], event["end_s"] = 2.0 * number, 2.0 * number + (0.25 if number % 2 else 1.0)
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    report = replay(path, Constant())
    assert report.exact
    even, odd = -(-len(commits) // 2), len(commits) // 2
    assert report.recorded_step_s == pytest.approx(even + 0.25 * odd)
    assert report.recorded_span_s == pytest.approx(2.0 * (len(commits) - 1) + (0.25 if len(commits) % 2 == 0 else 1.0))
    assert report.predicted is not None
    assert report.predicted.num_steps == len(commits)
    assert report.predicted.mape == pytest.approx((0.5 * even + 1.0 * odd) / len(commits))
    assert report.predicted.total == pytest.approx(0.5 * len(commits) / report.recorded_step_s - 1)
    assert "predicted" in report.table()
    assert replay(path).predicted is None
