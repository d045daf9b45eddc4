"""Checks the simulated loop: a schedule worked out by hand, what must add up, and what goes wrong loudly."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from loop_tools import Ticks, Watched, random_case
from paged.core.limits import SchedulerConfig
from paged.core.plan import StepPlan
from paged.core.policy import Fifo, Forecast, Load, Policy, Reserve, Watermark
from paged.core.prompt import HashedPrompt, OpaquePrompt
from paged.core.scheduler import Scheduler
from paged.core.sequence import Sequence
from paged.sim import driver
from paged.sim.driver import simulate
from paged.sim.record import PREEMPTED, SimRecord
from paged.sim.report import summarize
from paged.sim.shape import StepShape
from paged.workload.job import Job


def job(name: str, prompt: int, output: int, arrival_s: float = 0.0, max_tokens: int | None = None) -> Job:
    return Job(
        id=name,
        prompt=OpaquePrompt(name, prompt),
        output_len=output,
        max_tokens=output if max_tokens is None else max_tokens,
        arrival_s=arrival_s,
    )


def times(record: SimRecord) -> dict[str, tuple[float, float, float]]:
    return {r.key[0]: (r.first_scheduled_s, r.first_token_s, r.finish_s) for r in record.requests}


@dataclass
class Work:
    """A step takes 10 s and one more for each token."""

    def step_s(self, shape: StepShape) -> float:
        return 10.0 + shape.num_tokens

    def host_s(self, num_seqs: int) -> float:
        return 0.5


def test_three_requests_by_hand() -> None:
    """Chunks of 4, a budget of 6, two places; every step is written out.

    The host's half second passes before each step:

    ====  ==============  =================================  ======  =====
    step  starts at       computes                           tokens  ends
    ====  ==============  =================================  ======  =====
    0     0.5             a: 4 of its 5                      4       14.5
    1     15.0            a: its 5th, first token; b: 3      4       29.0
    2     29.5            a and b decode                     2       41.5
    3     42.0            a decodes and ends; b too          2       54.0
    4     54.5            c (waited for a place): 2          2       66.5
    5     67.0            c decodes and ends                 1       78.0
    ====  ==============  =================================  ======  =====
    """
    config = SchedulerConfig(num_blocks=20, block_size=4, max_num_seqs=2, chunk_size=4, max_step_tokens=6)
    jobs = [job("a", 5, 3), job("b", 3, 3, arrival_s=2.0), job("c", 2, 2, arrival_s=20.0)]
    record = simulate(jobs, Scheduler(config), Work())
    steps = record.steps
    assert steps.start_s.tolist() == [0.5, 15.0, 29.5, 42.0, 54.5, 67.0]
    assert steps.end_s.tolist() == [14.5, 29.0, 41.5, 54.0, 66.5, 78.0]
    assert steps.num_tokens.tolist() == [4, 4, 2, 2, 2, 1]
    assert steps.num_seqs.tolist() == [1, 2, 2, 2, 1, 1]
    assert steps.num_running.tolist() == [1, 2, 2, 2, 1, 1]
    assert steps.num_waiting.tolist() == [0, 0, 1, 1, 0, 0]
    assert steps.used_blocks.tolist() == [2, 3, 3, 4, 1, 1]
    # Places in those blocks less the tokens in them: a has 4, 5, 6, 7, then b 3, 4, 5, then c 2, 3.
    assert steps.waste_tokens.tolist() == [8 - 4, 12 - 8, 12 - 10, 16 - 12, 4 - 2, 4 - 3]
    assert times(record) == {"a": (0.5, 29.0, 54.0), "b": (15.0, 29.0, 54.0), "c": (54.5, 66.5, 78.0)}
    assert [r.finish_reason for r in record.requests] == ["length"] * 3
    assert record.counters.forward_tokens == 15


def test_a_deeper_pipeline_hides_the_host() -> None:
    """The host plans the second step while the first one executes: only the first host time is on the clock."""
    config = SchedulerConfig(num_blocks=20, block_size=4, depth=2)
    record = simulate([job("a", 4, 4)], Scheduler(config), Ticks(seconds=2.0, host=0.5))
    assert record.steps.start_s.tolist() == [0.5, 2.5, 4.5, 6.5]
    slow = simulate([job("a", 4, 4)], Scheduler(config), Ticks(seconds=2.0, host=3.0))
    # The device waits for the host, which makes one plan after the other.
    assert slow.steps.start_s.tolist() == [3.0, 6.0, 9.0, 12.0]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_no_depth_makes_the_host_faster(depth: int) -> None:
    config = SchedulerConfig(num_blocks=40, block_size=4, depth=depth)
    record = simulate([job("a", 4, 50)], Scheduler(config), Ticks(seconds=1.0, host=10.0))
    assert record.num_steps == 50
    assert record.end_s == (50 * 11.0 if depth == 1 else 50 * 10.0 + 1.0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_lengths_are_those_of_the_jobs_and_every_block_comes_back(depth: int) -> None:
    num_preemptions = num_cached = num_stopped = 0
    for seed in range(150):
        config, policy, jobs = random_case(seed, depth)
        scheduler = Watched(config, policy)
        record = simulate(jobs, scheduler, Ticks())
        assert [r.key[0] for r in record.requests] == [j.id for j in jobs]
        for made, wanted in zip(record.requests, jobs, strict=True):
            assert made.output_tokens == wanted.output_len
            assert made.finish_reason == ("stop" if wanted.output_len < wanted.max_tokens else "length")
            assert made.arrival_s == wanted.arrival_s <= made.first_scheduled_s < made.first_token_s <= made.finish_s
        counters = record.counters
        assert counters.output_tokens == sum(j.output_len for j in jobs)
        assert counters.prompt_tokens == sum(len(j.prompt) for j in jobs)
        saved = counters.forward_tokens - counters.recomputed_tokens + counters.cached_tokens
        surplus = counters.dropped_tokens
        assert saved == counters.minimal_forward_tokens + surplus
        assert sum(r.num_preemptions for r in record.requests) == counters.num_preemptions
        scheduler.check()
        assert scheduler.pool.num_free == config.num_blocks
        assert record.steps.waste_tokens.min() >= 0
        assert record.num_steps == len(scheduler.plans)
        num_preemptions += counters.num_preemptions
        num_cached += counters.cached_tokens
        num_stopped += sum(r.finish_reason == "stop" for r in record.requests)
    assert num_preemptions > 30
    assert num_cached > 100
    assert num_stopped > 300


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_request_may_end_before_a_plan_tells_of_its_preemption(depth: int) -> None:
    """A look for a plan that comes to nothing may preempt; the victim's token in flight can then end it.

    The next plan still names it. It once was a KeyError, or a preemption that nobody counted.
    """
    num_late = num_preemptions = 0
    for seed in range(3000):
        rng = np.random.default_rng(seed)
        config = SchedulerConfig(num_blocks=int(rng.integers(3, 5)), block_size=2, depth=depth, prefix_reuse=False)
        jobs = []
        for number in range(int(rng.integers(3, 6))):
            length = int(rng.integers(1, 4))
            max_tokens = int(rng.integers(1, 2 * config.num_blocks + 2 - length))
            output_len = int(rng.integers(1, max_tokens + 1))
            jobs.append(job(f"r{number}", length, output_len, float(rng.integers(0, 4)), max_tokens))
        jobs.sort(key=lambda job: job.arrival_s)
        scheduler = Watched(config, Fifo())
        record = simulate(jobs, scheduler, Ticks())
        assert sum(r.num_preemptions for r in record.requests) == record.counters.num_preemptions
        assert [r.output_tokens for r in record.requests] == [j.output_len for j in jobs]
        num_preemptions += record.counters.num_preemptions
        num_late += record.counters.num_preemptions - int((record.events.kind == PREEMPTED).sum())
    assert num_preemptions > 300
    assert num_late > 10, "some preemption was told too late, or never"


def test_littles_law() -> None:
    """Requests in the system, averaged over time, are the arrival rate times the mean time that one spends there."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(2.0, 300))
    jobs = [job(f"r{i}", 20, int(rng.integers(1, 40)), float(arrival)) for i, arrival in enumerate(arrivals)]
    config = SchedulerConfig(num_blocks=40, block_size=4, max_num_seqs=8)
    record = simulate(jobs, Scheduler(config), Ticks(seconds=0.5))
    span_s = record.end_s - record.start_s
    spent_s = sum(r.e2e_s for r in record.requests)
    steps = record.steps
    # A step's counts hold while it executes; a request that arrives meanwhile is counted from the next step on.
    uncounted_s = sum(
        float(steps.start_s[k] - r.arrival_s)
        for r in record.requests
        if (k := int(np.searchsorted(steps.start_s, r.arrival_s))) < len(steps.start_s)
    )
    in_system = float(((steps.num_running + steps.num_waiting) * (record.until_s() - steps.start_s)).sum())
    assert in_system == pytest.approx(spent_s - uncounted_s, rel=1e-9)
    # As the report tells it, within the granularity of a step.
    summary = summarize(record)
    rate = len(jobs) / span_s
    told = summary["mean_running"] + summary["mean_waiting"]
    assert told == pytest.approx(rate * summary["e2e_s"]["mean"], rel=0.05)
    assert summary["mean_waiting"] > 0.5


def test_the_same_jobs_give_the_same_record_in_any_process() -> None:
    program = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from loop_tools import Ticks, random_case\n"
        "from paged.core.scheduler import Scheduler\n"
        "from paged.sim.driver import simulate\n"
        "for seed in range(20):\n"
        "    config, policy, jobs = random_case(seed)\n"
        "    record = simulate(jobs, Scheduler(config, policy), Ticks(0.1, 0.01))\n"
        "    print([list(column) for column in record.steps], record.requests)\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 10_000


def test_prompts_given_as_hashes_share_blocks() -> None:
    config = SchedulerConfig(num_blocks=200, block_size=16)
    jobs = [
        Job(id=name, prompt=HashedPrompt(hashes, 1200), output_len=4, max_tokens=4, arrival_s=10.0 * i)
        for i, (name, hashes) in enumerate([("a", (1, 2, 3)), ("b", (1, 2, 9)), ("c", (7, 2, 3))])
    ]
    record = simulate(jobs, Scheduler(config), Ticks())
    assert [r.cached_tokens for r in record.requests] == [0, 1024, 0]


def test_a_request_that_can_never_fit_is_a_row_and_the_others_go_on() -> None:
    config = SchedulerConfig(num_blocks=4, block_size=4)
    record = simulate([job("a", 3, 2), job("b", 30, 2), job("c", 3, 2, 5.0)], Scheduler(config), Ticks())
    assert [r.finish_reason for r in record.requests] == ["length", "refused", "length"]
    assert record.requests[1].reason == (
        "a prompt of 30 tokens with max_tokens 2 can never fit the cache, 16 tokens (num_blocks 4 x block_size 4)"
    )


def test_no_jobs_no_steps() -> None:
    record = simulate([], Scheduler(SchedulerConfig(num_blocks=4)), Ticks())
    assert record.num_steps == 0
    assert not record.requests


@dataclass(frozen=True)
class Never(Policy):
    """Admits nobody."""

    def blocks_to_admit(self, sequence: Sequence, load: Load) -> int:
        return 10**9


def test_a_policy_that_admits_nobody_is_an_error_and_no_silent_end() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=4), Never())
    with pytest.raises(RuntimeError, match="no sequence can make progress: 0 running, 1 waiting"):
        simulate([job("a", 3, 2)], scheduler, Ticks())


def test_a_watchdog_ends_a_run_that_computes_the_same_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler whose every step is undone: it plans for ever and computes nothing new."""

    class Sisyphus(Scheduler):
        def commit(self, result: Any) -> Any:
            commit = super().commit(result)
            self.abandon()
            return commit

    monkeypatch.setattr(driver, "WATCHDOG_STEPS", 10_000)
    scheduler = Sisyphus(SchedulerConfig(num_blocks=40, block_size=4, chunk_size=4, prefix_reuse=False))
    with pytest.raises(RuntimeError, match=r"no progress in 1\d,\d{3} steps: 0 running, 1 waiting"):
        simulate([job("a", 30, 20)], scheduler, Ticks())


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_step_without_a_sensible_time_is_an_error(seconds: float) -> None:
    with pytest.raises(RuntimeError, match=rf"the latency model gives step 0 {seconds} s"):
        simulate([job("a", 3, 2)], Scheduler(SchedulerConfig(num_blocks=4)), Ticks(seconds=seconds))


def test_ctrl_c_keeps_what_there_is() -> None:
    class Impatient(Scheduler):
        def plan(self) -> StepPlan | None:
            if self.counters.num_steps == 7:
                raise KeyboardInterrupt
            return super().plan()

    record = simulate([job("a", 3, 2), job("b", 3, 50)], Impatient(SchedulerConfig(num_blocks=40)), Ticks())
    assert record.interrupted
    assert [r.finish_reason for r in record.requests] == ["length", None]
    assert record.num_steps == record.counters.num_steps == 7


def test_an_interruption_between_steps_keeps_what_was_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_STEPS_PER_CHECK", 10)
    monkeypatch.setattr(driver, "_SECONDS_PER_CALL", 0.0)

    def stop(record: SimRecord, num_ended: int) -> None:
        raise KeyboardInterrupt

    scheduler = Scheduler(SchedulerConfig(num_blocks=40, depth=2))
    jobs = [job("a", 3, 2), job("b", 3, 50), job("late", 3, 2, 99.0)]
    record = simulate(jobs, scheduler, Ticks(), on_progress=stop)
    assert record.interrupted
    assert [(r.key[0], r.finish_reason, r.output_tokens) for r in record.requests] == [
        ("a", "length", 2),
        ("b", "abort", 10),
    ]
    assert scheduler.pool.num_free == 40


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_STEPS_PER_CHECK", 10)
    monkeypatch.setattr(driver, "_SECONDS_PER_CALL", 0.0)
    told: list[tuple[int, int]] = []
    jobs = [job(f"r{i}", 3, 9, 10.0 * i) for i in range(6)]
    scheduler = Scheduler(SchedulerConfig(num_blocks=40), Fifo())
    simulate(jobs, scheduler, Ticks(), on_progress=lambda record, ended: told.append((record.num_steps, ended)))
    assert [steps for steps, _ in told] == [10, 20, 30, 40, 50]
    assert [ended for _, ended in told] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_who_decides_knows_a_length_before_its_sample_ends(depth: int) -> None:
    """With other lengths for all, plans are the same until the first sample stops."""
    num_compared = 0
    for seed in range(60):
        config, _, jobs = random_case(seed, depth)
        others = [replace(one, output_len=one.max_tokens) for one in jobs]
        for policy in POLICIES:
            plans = []
            for some in (jobs, others):
                scheduler = Watched(config, policy)
                record = simulate(some, scheduler, Ticks())
                plans.append(scheduler.plans)
                if some is jobs:
                    ends = [r.finish_s for r in record.requests if r.finish_reason == "stop"]
            first = int(min(ends, default=math.inf) if ends else 1e9)
            until = sum(end <= first for end in record.steps.end_s) if first < 1e9 else len(plans[0])
            for ours, theirs in list(zip(*plans, strict=False))[:until]:
                assert [list(c) for c in ours[4:]] == [list(c) for c in theirs[4:]]
                num_compared += 1
    assert num_compared > 1000


POLICIES = [Fifo(), Watermark(0.1), Reserve(), Forecast()]


def test_nobody_is_taken_in_before_arriving() -> None:
    """Adding a difference of times to a time may give less than the time that was meant."""
    rng = np.random.default_rng(1)
    for scale in (1.0, 1e5, 1e8):
        arrivals = np.sort(rng.random(400)) * scale
        jobs = [job(f"r{i}", 3, 2, float(arrival)) for i, arrival in enumerate(arrivals)]
        record = simulate(jobs, Scheduler(SchedulerConfig(num_blocks=4000)), Ticks(seconds=0.1 + scale / 1e4))
        assert min(r.queue_s for r in record.requests) >= 0
