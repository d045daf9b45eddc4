"""Checks that counting a steady decoding gives the very plans of visiting every sequence in every step."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_device import ask, assert_idle
from paged.core.limits import SchedulerConfig
from paged.core.metrics import Counters
from paged.core.plan import SAMPLE, StepPlan, StepResult
from paged.core.policy import Fifo, Forecast, Load, Policy, Reserve, Watermark
from paged.core.prompt import OpaquePrompt, Prompt
from paged.core.request import Request, SamplingParams
from paged.core.scheduler import Commit, NonFiniteLogitsError, Scheduler
from paged.core.sequence import FinishReason, Sequence


@dataclass(frozen=True)
class Nosy(Policy):
    """A policy whose margin depends on everything it is shown."""

    def blocks_kept_free(self, sequence: Sequence, load: Load) -> int:
        shown = sum(s.num_tokens + 3 * s.num_computed + 5 * s.num_output + s.num_scheduled for s in load.running)
        return (shown + sequence.num_tokens + sum(load.lengths.tokens)) % 4


@dataclass
class Case:
    """Arrivals, aborts and abandons by turn, under some limits."""

    config: SchedulerConfig
    policy: Policy
    known_tokens: bool
    stop_share: float
    arrivals: dict[int, list[Request]]
    aborts: dict[int, str]
    abandons: set[int]
    new_weights: set[int]
    nan_share: float
    seed: int


def case(seed: int) -> Case:
    rng = random.Random(seed)
    block_size = rng.choice((1, 2, 4, 4, 8))
    longest = rng.choice((30, 60, 120))
    config = SchedulerConfig(
        num_blocks=-(-longest // block_size) + rng.randint(0, 30),
        block_size=block_size,
        max_num_seqs=rng.choice((2, 4, 16)),
        chunk_size=rng.choice((2, 5, 64)),
        max_step_tokens=rng.choice((3, 16, 64)),
        depth=rng.choice((1, 1, 2, 3)),
        prefix_reuse=rng.random() < 0.7,
    )
    policy = rng.choice((Fifo(), Watermark(0.1), Reserve(), Nosy(), Forecast(), Fifo(victim="most_blocks")))
    known = rng.random() < 0.5
    arrivals: dict[int, list[Request]] = {}
    turn = 0
    for number in range(rng.randint(2, 12)):
        turn += rng.choice((0, 0, 1, 5, 30))
        length = rng.randint(1, longest // 2)
        stem = rng.randrange(3)
        prompt = Prompt([stem] * length) if known else OpaquePrompt(f"p{stem}", length)
        max_tokens = rng.randint(1, longest + 1 - length)
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if rng.random() < 0.1 else None)
        request = Request(f"r{number}", 0, prompt, params, number, max_tokens)
        arrivals.setdefault(turn, []).append(request)
    aborts = {rng.randint(1, 90): f"r{rng.randrange(8)}" for _ in range(rng.choice((0, 0, 2)))}
    abandons = {rng.randint(1, 60) for _ in range(rng.choice((0, 0, 0, 1)))}
    new_weights = {rng.randint(1, 60) for _ in range(rng.choice((0, 0, 0, 1)))}
    shares = rng.choice((0.0, 0.01, 0.05)), rng.choice((0.0, 0.0, 0.01))
    return Case(config, policy, known, shares[0], arrivals, aborts, abandons, new_weights, shares[1], seed)


def commit(made: Case, scheduler: Scheduler, plan: StepPlan) -> Commit:
    """Commit what ``plan`` gives: tokens, stops and now and then a NaN, whose request is aborted first."""
    rng = random.Random(f"{made.seed} {plan.step}")
    count = sum(1 for logits in plan.logits if logits & SAMPLE)
    tokens = [rng.randrange(5) for _ in range(count)] if made.known_tokens else None
    stopped = [rng.random() < made.stop_share for _ in range(count)]
    nan_rows = [row for row in range(len(plan.slots)) if rng.random() < made.nan_share]
    result = StepResult(plan.step, tokens, stopped, nan_rows, 0.0, 0.0)
    try:
        return scheduler.commit(result)
    except NonFiniteLogitsError as error:
        for request in error.requests:
            scheduler.abort(request.id, request.sample, FinishReason.ERROR)
        return scheduler.commit(result)


def play(made: Case) -> tuple[list[StepPlan], list[Commit], Counters, int]:
    """Plans, commits and counts of a run whose books nobody looks at in between, and how often the columns stayed."""
    scheduler = Scheduler(made.config, made.policy)
    plans: list[StepPlan] = []
    commits: list[Commit] = []
    in_flight: list[StepPlan] = []
    num_same = 0
    turn = -1
    while turn < max(made.arrivals) or scheduler.has_unfinished or scheduler.num_in_flight:
        turn += 1
        assert turn < 5000
        if turn in made.abandons:
            scheduler.abandon()
            in_flight.clear()
        if turn in made.new_weights:
            while in_flight:
                commits.append(commit(made, scheduler, in_flight.pop(0)))
            scheduler.change_weights()
        if turn in made.aborts:
            scheduler.abort(made.aborts[turn])
        for request in made.arrivals.get(turn, ()):
            scheduler.add([request])
        plan = scheduler.plan()
        if plan is not None:
            num_same += bool(plans) and plan.slots is plans[-1].slots
            in_flight.append(plan)
            copied: Any = [list(column) if isinstance(column, list) else column for column in plan]
            plans.append(plan)
            assert list(plan) == copied
        if in_flight and (plan is None or scheduler.num_in_flight == made.config.depth):
            commits.append(commit(made, scheduler, in_flight.pop(0)))
    assert_idle(scheduler)
    return plans, commits, scheduler.counters, num_same


def columns(plan: StepPlan) -> list[Any]:
    return [list(column) if isinstance(column, list | tuple) else column for column in plan]


def test_plans_and_commits_are_those_of_visiting_every_sequence() -> None:
    met: Counter[str] = Counter()
    for seed in range(400):
        made = case(seed)
        plans, commits, counters, num_same = play(made)
        with mock.patch.object(Scheduler, "_begin_steady", return_value=None):
            visited = play(made)
        assert visited[3] == 0, "the control does visit every sequence"
        assert [columns(plan) for plan in plans] == [columns(plan) for plan in visited[0]], seed
        assert [[list(part) if isinstance(part, list | tuple) else part for part in commit] for commit in commits] == [
            [list(part) if isinstance(part, list | tuple) else part for part in commit] for commit in visited[1]
        ], seed
        assert counters == visited[2], seed
        met["steady"] += num_same
        met["plans"] += len(plans)
        met["preemptions"] += counters.num_preemptions
        met["cached"] += counters.cached_tokens
        met["dropped"] += counters.dropped_tokens
        met["growing steadily"] += sum(
            bool(plan.appended) and plan.slots is before.slots for before, plan in pairwise(plans)
        )
    assert met["steady"] > met["plans"] / 3, met
    assert min(met["preemptions"], met["cached"], met["dropped"], met["growing steadily"]) > 300, met


@settings(max_examples=60, deadline=None)
@given(st.integers(1000, 10**6))
def test_plans_are_the_same_for_any_case(seed: int) -> None:
    made = case(seed)
    plans = play(made)[0]
    with mock.patch.object(Scheduler, "_begin_steady", return_value=None):
        assert [columns(plan) for plan in plans] == [columns(plan) for plan in play(made)[0]]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_a_plan_holds_never_changes_afterwards(depth: int) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=40, block_size=4, depth=depth, chunk_size=3))
    held: list[tuple[StepPlan, list[Any]]] = []
    in_flight: list[StepPlan] = []
    arrivals = {0: 3, 7: 2, 30: 1}
    for turn in range(80):
        for number in range(arrivals.get(turn, 0)):
            scheduler.add([ask(f"r{turn}-{number}", range(number, number + 5), 25 + number)])
        plan = scheduler.plan()
        if plan is not None:
            held.append((plan, columns(plan)))
            in_flight.append(plan)
        if in_flight and (plan is None or scheduler.num_in_flight == depth):
            oldest = in_flight.pop(0)
            count = sum(1 for logits in oldest.logits if logits & SAMPLE)
            scheduler.commit(StepResult(oldest.step, [1] * count, [False] * count, (), 0.0, 0.0))
    assert_idle(scheduler)
    assert sum(one.slots is other.slots for (one, _), (other, _) in pairwise(held)) > 20
    for plan, then in held:
        assert columns(plan) == then
