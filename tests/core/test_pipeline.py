"""Checks that a deeper pipeline changes when things are known, never what comes out: hundreds of random runs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from mock_device import Run, ask, drive, setup, verify
from paged.core.metrics import Counters
from paged.core.policy import Fifo, Policy, Reserve, Watermark
from paged.core.prompt import Prompt
from paged.core.request import Request
from paged.core.sequence import FinishReason

NUM_RUNS = 320
DEPTHS = (1, 2, 3)


@dataclass
class Scenario:
    """A random configuration, workload and run of bad luck."""

    num_blocks: int
    block_size: int
    policy: Policy
    limits: dict[str, Any]
    arrivals: dict[int, list[list[Request]]] = field(default_factory=dict)
    aborts: dict[int, list[tuple[str, int | None]]] = field(default_factory=dict)
    late_aborts: dict[int, list[tuple[str, int | None]]] = field(default_factory=dict)
    abandons: set[int] = field(default_factory=set)


def scenario(seed: int) -> Scenario:
    rng = random.Random(seed)
    block_size = rng.choice((1, 2, 3, 4, 4, 5, 8))
    longest = rng.randint(12, 40)
    num_blocks = -(-longest // block_size) + rng.randint(0, 8)
    limits = {
        "max_num_seqs": rng.choice((2, 3, 6, 16)),
        "chunk_size": rng.choice((1, 2, 3, 5, 64)),
        "max_step_tokens": rng.choice((4, 8, 16, 64)),
        "stop_every": rng.choice((8, 20, 60)),
        "poison": rng.random() < 0.5,
        "prefix_reuse": rng.random() < 0.85,
    }
    policy = rng.choice((Fifo(), Fifo(), Watermark(rng.choice((0.05, 0.2))), Reserve()))
    made = Scenario(num_blocks, block_size, policy, limits)
    stems = [[rng.randrange(50) for _ in range(longest)] for _ in range(2)]
    tick = 0
    for number in range(rng.randint(4, 9)):
        tick += rng.choice((0, 0, 0, 1, 2, 4))
        common = rng.choice(stems)[: rng.randint(0, longest // 2)]
        own = [rng.randrange(50) for _ in range(rng.randint(0 if common else 1, 5))]
        prompt = Prompt([*common, *own][: longest - 1])
        max_tokens = rng.randint(1, longest + 1 - len(prompt))
        scoring = {"prompt_logprobs": 0} if rng.random() < 0.1 else {}
        batch = [ask(f"r{number}", prompt, max_tokens, sample=j, **scoring) for j in range(rng.choice((1, 1, 1, 3)))]
        made.arrivals.setdefault(tick, []).append(batch)
        if rng.random() < 0.2:
            aborts = rng.choice((made.aborts, made.late_aborts))
            aborts.setdefault(tick + rng.randint(0, 25), []).append((f"r{number}", rng.choice((None, 0))))
    made.abandons = {rng.randint(1, 40) for _ in range(rng.choice((0, 0, 1, 3)))}
    return made


def play(made: Scenario, depth: int, *, eager: bool) -> tuple[Counters, Run]:
    scheduler, device = setup(
        made.num_blocks, made.block_size, policy=made.policy, depth=depth, eager=eager, **made.limits
    )
    run = drive(
        scheduler, device, made.arrivals, aborts=made.aborts, late_aborts=made.late_aborts, abandons=made.abandons
    )
    verify(run, device.model)
    return scheduler.counters, run


@pytest.mark.parametrize("eager", [False, True], ids=["executed when collected", "executed when submitted"])
def test_every_depth_gives_the_same_tokens(eager: bool) -> None:
    met: Counter[str] = Counter()
    for seed in range(NUM_RUNS):
        made = scenario(seed)
        runs = {depth: play(made, depth, eager=eager) for depth in DEPTHS}
        shallow = runs[1][1]
        for depth, (counters, run) in runs.items():
            cut = (FinishReason.ABORT, FinishReason.ERROR)
            for outcome, other in zip(run.outcomes, shallow.outcomes, strict=True):
                assert outcome.request is other.request
                if outcome.reason in cut or other.reason in cut:
                    shorter, longer = sorted((outcome.tokens, other.tokens), key=len)
                    assert longer[: len(shorter)] == shorter
                else:
                    assert (outcome.tokens, outcome.reason) == (other.tokens, other.reason), (seed, depth)
            met[f"preemptions at {depth}"] += counters.num_preemptions
            met[f"cached tokens at {depth}"] += counters.cached_tokens
            met[f"dropped tokens at {depth}"] += counters.dropped_tokens
            met[f"abandoned plans at {depth}"] += run.num_abandoned
            for outcome in run.outcomes:
                met[f"{outcome.reason} at {depth}"] += 1
            for _, _, state in run.states:
                met[f"aborted {state}"] += 1
    for depth in DEPTHS:
        assert met[f"preemptions at {depth}"] > 300, met
        assert met[f"cached tokens at {depth}"] > 1000, met
        for reason in ("stop", "length", "abort"):
            assert met[f"{reason} at {depth}"] > 100, met
        # At depth 1 only an abort while the step executes drops a token, and nothing is in flight between turns.
        assert met[f"dropped tokens at {depth}"] > (10 if depth == 1 else 300), met
        assert (met[f"abandoned plans at {depth}"] > 100) == (depth > 1), met
    for state in ("waiting", "preempted", "prefill in flight", "decode in flight", "preempted in flight"):
        assert met[f"aborted {state}"] > 0, met


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_stop_is_found_late_and_what_ran_ahead_is_dropped(depth: int) -> None:
    scheduler, device = setup(40, 4, depth=depth, stop_every=5)
    run = drive(scheduler, device, {0: [[ask(f"r{i}", range(i, i + 5), 100)] for i in range(12)]})
    verify(run, device.model)
    assert all(outcome.reason is FinishReason.STOP for outcome in run.outcomes)
    assert scheduler.counters.dropped_tokens == 12 * (depth - 1)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_length_limit_is_known_ahead_and_nothing_runs_over(depth: int) -> None:
    scheduler, device = setup(48, 4, depth=depth)
    run = drive(scheduler, device, {0: [[ask(f"r{i}", range(i, i + 5), 9)] for i in range(12)]})
    verify(run, device.model)
    assert scheduler.counters.dropped_tokens == 0
    assert scheduler.counters.forward_tokens + scheduler.counters.cached_tokens == 12 * (5 + 9 - 1)


@pytest.mark.parametrize("depth", DEPTHS)
def test_as_many_plans_as_the_depth_are_in_flight(depth: int) -> None:
    scheduler, device = setup(40, 4, depth=depth)
    seen: list[int] = []
    run = drive(scheduler, device, {0: [[ask("r", [1], 30)]]}, before_plan=lambda _, s: seen.append(s.num_in_flight))
    assert max(seen) == depth - 1
    assert len(run.plans) == 30


def test_one_preempted_with_a_token_in_flight_waits_for_that_token() -> None:
    """Admitted again too early, it would compute from tokens that the scheduler does not know yet."""
    met = 0
    for num_blocks in range(6, 14):
        scheduler, device = setup(num_blocks, 2, depth=3, prefix_reuse=False)

        def look(_: int, scheduler: Any) -> None:
            nonlocal met
            met += any(sequence.num_in_flight for sequence in scheduler._waiting)
            assert not any(s.num_in_flight and s.slot >= 0 for s in scheduler._waiting)

        arrivals = {i: [[ask(f"r{i}", range(i, i + 4), 8)]] for i in range(6)}
        run = drive(scheduler, device, arrivals, before_plan=look)
        verify(run, device.model)
    assert met > 10


@pytest.mark.parametrize("depth", DEPTHS)
def test_abandon_at_every_step(depth: int) -> None:
    """Also twice in a row, and with the device's memory full of garbage afterwards."""
    arrivals = {i: [[ask(f"r{i}", range(i % 2, 7), 9)]] for i in range(5)}
    num_abandoned = num_preemptions = 0
    for tick in range(1, 30):
        scheduler, device = setup(8, 4, depth=depth, stop_every=30, chunk_size=3)
        run = drive(scheduler, device, arrivals, abandons={tick, tick + 1, tick + 6})
        verify(run, device.model)
        num_abandoned += run.num_abandoned
        num_preemptions += scheduler.counters.num_preemptions
    assert num_preemptions > 0
    assert (num_abandoned > 60) == (depth > 1)
