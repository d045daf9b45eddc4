"""Checks that the simulator decides what the engine decides: every plan of a real run, column by column."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_tools import INVARIANT, SPEC, make_engine
from loop_tools import Ticks, Watched, random_case
from paged.core.limits import SchedulerConfig
from paged.core.plan import StepPlan
from paged.core.policy import Policy
from paged.core.prompt import OpaquePrompt
from paged.core.request import SamplingParams
from paged.model.decoder import Decoder
from paged.sim.driver import simulate
from paged.workload.job import Job

# So many tokens, drawn so evenly, that two samples do not happen to write equal blocks, which the engine would share.
VOCAB_SIZE = 4096
EVENLY = 1000.0


@cache
def decoder() -> Decoder:
    return Decoder.random(replace(SPEC, vocab_size=VOCAB_SIZE), 1, numerics=INVARIANT)


def tokens_of(prompt: OpaquePrompt) -> list[int]:
    rng = random.Random(prompt.id)
    return [rng.randrange(VOCAB_SIZE) for _ in range(len(prompt))]


def plans_of_engine(config: SchedulerConfig, policy: Policy, jobs: list[Job]) -> list[StepPlan]:
    """Plans of the engine with a real model, to which a job is added before the step that begins at its time."""
    engine = make_engine(
        decoder(),
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        chunk_size=config.chunk_size,
        depth=config.depth,
        prefix_reuse=config.prefix_reuse,
        policy=policy,
    )
    plans: list[StepPlan] = []
    submit = engine.executor.submit

    def watch(plan: StepPlan) -> None:
        plans.append(plan)
        submit(plan)

    engine.executor.submit = watch  # type: ignore[method-assign]
    to_come = list(jobs)
    lengths: dict[str, int] = {}
    now = 0.0
    while to_come or engine.has_unfinished:
        while to_come and to_come[0].arrival_s <= now:
            job = to_come.pop(0)
            assert isinstance(job.prompt, OpaquePrompt)
            params = SamplingParams(max_tokens=job.max_tokens, temperature=EVENLY)
            engine.add_request(tokens_of(job.prompt), params, job.id, output_len=job.output_len)
        if engine.has_unfinished:
            for update in engine.step():
                if update.output is not None:
                    lengths[update.request_id] = len(update.output.token_ids)
            now += 1
        else:
            now = to_come[0].arrival_s
    assert lengths == {job.id: job.output_len for job in jobs}
    return plans


def essence(plan: StepPlan) -> list[Any]:
    """All that a plan decides, with requests by their ids."""
    started = [(s.slot, s.request.id, s.num_output, list(s.blocks), s.num_cached) for s in plan.started]
    columns = [plan.released, plan.appended, plan.slots, plan.starts, plan.lengths, plan.logits, plan.preempted]
    return [plan.step, plan.weight_version, started, *map(list, columns)]


def compare(seed: int) -> tuple[list[StepPlan], int]:
    config, policy, jobs = random_case(seed)
    real = plans_of_engine(config, policy, jobs)
    scheduler = Watched(config, policy)
    record = simulate(jobs, scheduler, Ticks(seconds=1.0))
    for ours, theirs in zip(scheduler.plans, real, strict=False):
        assert essence(ours) == essence(theirs), (seed, config, policy)
    assert len(scheduler.plans) == len(real), seed
    return real, record.counters.cached_tokens


def test_every_plan_of_the_engine_is_the_simulators() -> None:
    met: Counter[str] = Counter()
    for seed in range(60):
        plans, cached = compare(seed)
        met["plans"] += len(plans)
        met["preemptions"] += sum(len(plan.preempted) for plan in plans)
        met["cached tokens"] += cached
        met["chunks"] += sum(length > 1 for plan in plans for length in plan.lengths)
    assert met["plans"] > 2000, met
    assert met["preemptions"] > 20, met
    assert met["cached tokens"] > 100, met
    assert met["chunks"] > 300, met


@settings(max_examples=15, deadline=None)
@given(st.integers(1000, 10**6))
def test_any_case_is_decided_alike(seed: int) -> None:
    compare(seed)


def test_a_simulation_under_another_policy_would_be_seen() -> None:
    """The control: some plan differs as soon as the policy does."""
    different = 0
    for seed in range(60):
        config, policy, jobs = random_case(seed)
        scheduler, other = Watched(config, policy), Watched(config, Stingy())
        simulate(jobs, scheduler, Ticks())
        simulate(jobs, other, Ticks())
        different += [essence(p) for p in scheduler.plans] != [essence(p) for p in other.plans]
    assert different > 10


class Stingy(Policy):
    """Keeps half of the pool free."""

    def blocks_kept_free(self, sequence: Any, load: Any) -> int:
        return int(load.num_blocks) // 2
