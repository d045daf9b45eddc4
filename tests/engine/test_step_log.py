"""The step log tells a run completely: its events, given to a fresh scheduler, decide every step again."""

from __future__ import annotations

import errno
import json
import os
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_tools import INVARIANT, SEEDED, SPEC, VOCAB, Arrival, drive, make_engine, random_prompt, runner_of
from paged import CompletionOutput, Engine, SampleUpdate
from paged.core.limits import SchedulerConfig
from paged.core.plan import StepPlan, StepResult
from paged.core.policy import Fifo, Policy, Reserve, Watermark
from paged.core.prompt import Prompt
from paged.core.request import Request, SamplingParams
from paged.core.scheduler import NonFiniteLogitsError, Scheduler
from paged.core.sequence import FinishReason
from paged.model.decoder import Decoder
from paged.step_log import StepLog
from paged.writing import UnwritableError

POLICIES: dict[str, type[Policy]] = {"fifo": Fifo, "reserve": Reserve, "watermark": Watermark}


class PlantedError(Exception):
    """What a broken executor raises."""


def poisoned_decoder() -> Decoder:
    """A random model in which the embedding of the last id is NaN."""
    decoder = Decoder.random(SPEC, 1, numerics=INVARIANT, dtype=torch.float32)
    decoder.tensors()["lm_head.weight"].mul_(4)
    decoder.tensors()["model.embed_tokens.weight"][VOCAB - 1] = torch.nan
    return decoder


def record(path: Path, seed: int, depth: int, policy: Policy) -> tuple[Engine, list[dict[str, Any]], Counter[str]]:
    """A run full of bad luck in a small pool: its engine, the events of its log, and what it met."""
    rng = random.Random(seed)
    block_size = rng.choice((2, 4, 5))
    engine = make_engine(
        poisoned_decoder(),
        num_blocks=-(-40 // block_size) + rng.randint(0, 4),
        block_size=block_size,
        chunk_size=rng.choice((3, 7, 64)),
        max_step_tokens=rng.choice((12, 64)),
        max_num_seqs=rng.choice((4, 10)),
        depth=depth,
        policy=policy,
        eos_token_ids=(3, 20, 50),
        step_log=path,
    )
    stems = [random_prompt(rng, 18, 18, VOCAB - 1) for _ in range(2)]
    arrivals = []
    for number in range(12):
        prompt = [*rng.choice(stems)[: rng.randint(0, 16)], *random_prompt(rng, 1, 5, VOCAB - 1)]
        if number == 7:
            prompt.insert(len(prompt) // 2, VOCAB - 1)
        params = replace(
            SEEDED,
            n=3 if number == 7 else rng.choice((1, 1, 2, 3)),
            seed=rng.randrange(1000),
            max_tokens=rng.choice((1, 6, 12, 16)),
            prompt_logprobs=rng.choice((None, None, None, 0)),
            ignore_eos=rng.random() < 0.3,
            logit_bias={VOCAB - 1: -1e4},
        )
        samples = [params.n - 1] if rng.random() < 0.2 and number != 7 else None
        arrivals.append(Arrival(f"r{number}", prompt, params, rng.randint(0, 20), samples))
    aborts = {rng.randint(3, 25): f"r{rng.randrange(12)}" for _ in range(4)}
    runner, met = runner_of(engine), Counter[str]()
    weights = {name: tensor.clone() for name, tensor in runner.decoder.tensors().items()}
    breaks = {rng.randint(2, 30) for _ in range(2)}
    for name in ("submit", "collect"):
        work = getattr(runner, name)

        def broken(*args: Any, name: str = name, work: Any = work) -> Any:
            met[name] += 1
            if met[name] in breaks and (name == "submit") == (met[name] % 2 == 0):
                met["failures"] += 1
                raise PlantedError
            return work(*args)

        setattr(runner, name, broken)

    def interfere(number: int) -> list[CompletionOutput]:
        if number in (9, 18):
            try:
                engine.load_weights(weights)
                met["new weights"] += 1
            except (PlantedError, NonFiniteLogitsError):
                pass
        outputs = engine.abort(aborts[number]) if number in aborts else []
        met["aborted"] += len(outputs)
        return outputs

    def patient() -> list[SampleUpdate]:
        try:
            return engine.run_step()
        except PlantedError:
            return []

    result = drive(engine, arrivals, interfere, step=patient)
    met.update(output.finish_reason for output in result.outputs.values())
    engine.close()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for name in ("num_preemptions", "cached_tokens", "dropped_tokens"):
        met[name] += getattr(engine.scheduler.counters, name)
    num_in_flight = 0
    for event in events:
        kind = event["event"]
        if kind == "plan" and event["step"] is None:
            met["empty plans"] += num_in_flight > 0
        elif kind in ("plan", "commit"):
            num_in_flight += 1 if kind == "plan" else -1
        elif kind == "abandon":
            num_in_flight = 0
            met["abandons"] += 1
    return engine, events, met


def told(plan: StepPlan | None) -> dict[str, Any]:
    """What the log should say of a plan, in JSON's terms."""
    if plan is None:
        return {"step": None}
    columns = ("step", "weight_version", "slots", "starts", "lengths", "logits", "appended", "released", "preempted")
    started = [[s.slot, s.request.id, s.request.sample, s.num_cached, s.blocks] for s in plan.started]
    return json.loads(json.dumps({name: getattr(plan, name) for name in columns} | {"started": started}))


def replay(events: list[dict[str, Any]]) -> Scheduler:
    """Give the events of a log to a fresh scheduler; every plan that it makes must be the one in the log."""
    first, *rest = events
    assert first["event"] == "config"
    policy = dict(first["policy"])
    scheduler = Scheduler(SchedulerConfig(**first["limits"]), POLICIES[policy.pop("name")](**policy))
    for event in rest:
        kind = event["event"]
        if kind == "add":
            prompt = Prompt(event["prompt_token_ids"])
            params = SamplingParams(prompt_logprobs=0 if event["is_scored"] else None)
            scheduler.add(
                Request(event["id"], sample, prompt, params, seed, event["max_tokens"])
                for sample, seed in zip(event["samples"], event["seeds"], strict=True)
            )
        elif kind == "abort":
            assert scheduler.abort(event["id"], event["sample"], FinishReason(event["reason"]))
        elif kind == "plan":
            plan = told(scheduler.plan())
            assert {key: value for key, value in event.items() if key not in ("event", "time_s")} == plan
        elif kind == "commit":
            scheduler.commit(
                StepResult(event["step"], event["tokens"], event["stopped"], [], event["start_s"], event["end_s"])
            )
        elif kind == "weights":
            scheduler.change_weights()
            assert scheduler.weight_version == event["version"]
        else:
            assert kind == "abandon"
            scheduler.abandon()
        scheduler.check()
    return scheduler


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", [Fifo(), Watermark(0.1), Reserve()], ids=lambda policy: type(policy).__name__)
def test_a_log_replays_on_a_fresh_scheduler(policy: Policy, depth: int, tmp_path: Path) -> None:
    """The log was not enough to replay: it left out empty plans, which can preempt, the policy, and aborted samples.

    A simulator that reads it must meet the same preemptions and the same blocks, to the last.
    """
    met: Counter[str] = Counter()
    for seed in range(4):
        engine, events, found = record(tmp_path / f"{seed}.jsonl", seed, depth, policy)
        met += found
        scheduler = replay(events)
        assert scheduler.counters == engine.scheduler.counters
        assert not scheduler.has_unfinished
        assert scheduler.num_in_flight == 0
        times = [event["time_s"] for event in events]
        assert times == sorted(times)
        ends = [event["end_s"] for event in events if event["event"] == "commit"]
        assert ends == sorted(ends)
    assert (met["num_preemptions"] > 5) == (type(policy) is not Reserve), met
    assert met["cached_tokens"] > 100, met
    assert met["abandons"] == met["failures"] > 5, met
    assert met["aborted"] == met["abort"] > 5, met
    assert met["new weights"] >= 4, met
    assert met["error"] > 3, met
    assert met["stop"] >= 4, met
    assert met["length"] > 10, met
    assert (met["empty plans"] > 3) == (depth > 1), met
    assert (met["dropped_tokens"] > 0) or depth == 1, met


def test_a_replay_of_another_log_fails(tmp_path: Path) -> None:
    """The control: without one of its events, or under other limits, the same plans do not come out."""
    _, events, _ = record(tmp_path / "steps.jsonl", 1, 2, Fifo())
    replay(events)
    for kind in ("add", "abort", "abandon"):
        index = next(i for i, event in enumerate(events) if event["event"] == kind)
        with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError, KeyError)):
            replay(events[:index] + events[index + 1 :])
    config = {**events[0], "limits": {**events[0]["limits"], "num_blocks": events[0]["limits"]["num_blocks"] + 3}}
    with pytest.raises(AssertionError):
        replay([config, *events[1:]])


def full_from_now_on(engine: Engine) -> None:
    """Let the disk of an engine's step log be full."""
    log = engine._loop._log
    assert log is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._file.fileno())
    os.close(full)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_log_that_cannot_be_written_ends_the_engine_and_closes_quietly(depth: int, tmp_path: Path) -> None:
    """It failed again while the step was given up, and again when the engine was closed: three chained tracebacks."""
    path = tmp_path / "steps.jsonl"
    engine = make_engine(depth=depth, step_log=path)
    engine.add_request([1, 2, 3], SEEDED)
    engine.step()
    full_from_now_on(engine)
    for _ in range(2):
        with pytest.raises(
            UnwritableError, match=rf"^{re.escape(str(path))} cannot be written \(No space left"
        ) as raised:
            engine.step()
        assert raised.value.errno == errno.ENOSPC
        assert engine.scheduler.num_in_flight == 0
    with pytest.raises(UnwritableError):
        engine.add_request([4], SEEDED, "refused")
    assert not engine.scheduler.is_live("refused")
    engine.close()
    engine.close()


def test_requests_of_a_call_that_fails_for_a_full_disk_are_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that could not be logged stayed, and so did all behind the first that was to be forgotten."""
    engine = make_engine(step_log=tmp_path / "steps.jsonl")
    submit = engine.executor.submit

    def fill(plan: StepPlan) -> None:
        full_from_now_on(engine)
        submit(plan)

    monkeypatch.setattr(engine.executor, "submit", fill)
    for _ in range(2):
        with pytest.raises(UnwritableError):
            engine.generate([[1, 2, 3], [4, 5], [6]], SEEDED, use_tqdm=False)
        assert not engine.has_unfinished
    engine.close()


@pytest.mark.parametrize("error", [PlantedError(), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_full_disk_does_not_hide_why_a_step_was_given_up(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(step_log=tmp_path / "steps.jsonl")
    engine.add_request([1, 2, 3], SEEDED)
    engine.step()

    def fail() -> StepResult:
        full_from_now_on(engine)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "collect", fail)
        with pytest.raises(type(error)):
            engine.step()
    assert engine.num_running == 0
    assert engine.num_waiting == 1
    with pytest.raises(UnwritableError):
        engine.step()
    engine.close()


def test_closing_tells_what_nobody_was_told(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    log.commit(StepResult(0, [1], [False], [], 0.0, 1.0), is_agreed=False)
    log.abort("r", None, "abort")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._file.fileno())
    os.close(full)
    with pytest.raises(UnwritableError):
        log.close()
    log.close()
