"""Checks every rule of the scheduler against a device that verifies each KV read."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from mock_device import MockDevice, Outcome, Run, ask, assert_idle, drive, setup, snapshot, state_of, take_in, verify
from paged.core.limits import SchedulerConfig
from paged.core.memory import num_blocks_for
from paged.core.plan import NO_LOGITS, SAMPLE, SCORE, StepPlan, StepResult
from paged.core.policy import Fifo, Forecast, Load, Policy, Reserve, Watermark
from paged.core.prompt import Prompt
from paged.core.request import Request
from paged.core.scheduler import NonFiniteLogitsError, Scheduler
from paged.core.sequence import FinishReason
from paged.core.sequence import Sequence as Seq


def step(scheduler: Scheduler, device: MockDevice, run: Run | None = None) -> StepPlan:
    """One turn at depth 1."""
    plan = scheduler.plan()
    assert plan is not None
    scheduler.check()
    device.submit(plan)
    take_in(scheduler, run or _Ignore(), device.collect())
    return plan


class _Ignore(Run):
    """A run that takes note of nothing, for tests that look at plans alone."""

    def of(self, request_id: str, sample: int = 0) -> Outcome:
        return Outcome(ask(request_id, [0], 1, sample=sample))

    def finish(self, finished: Any) -> None:
        pass


def rows(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    return list(zip(plan.slots, plan.starts, plan.lengths, plan.logits, strict=True))


# Whom a step computes


def test_decodes_first_then_chunks_then_admissions() -> None:
    scheduler, device = setup(40, 4, chunk_size=4, max_step_tokens=6, prefix_reuse=False)
    scheduler.add([ask("long prompt", range(11), 5)])
    step(scheduler, device)
    scheduler.add([ask("decodes", [1], 5)])
    plan = step(scheduler, device)
    assert rows(plan) == [(0, 4, 4, NO_LOGITS), (1, 0, 1, SAMPLE)]
    scheduler.add([ask("new", range(9), 5)])
    plan = step(scheduler, device)
    assert rows(plan) == [(1, 1, 1, SAMPLE), (0, 8, 3, SAMPLE), (2, 0, 2, NO_LOGITS)]
    plan = step(scheduler, device)
    assert rows(plan) == [(0, 11, 1, SAMPLE), (1, 2, 1, SAMPLE), (2, 2, 4, NO_LOGITS)], "oldest first"


def test_a_row_is_the_least_of_remaining_chunk_and_budget() -> None:
    scheduler, device = setup(40, 4, chunk_size=5, max_step_tokens=8, prefix_reuse=False)
    scheduler.add([ask("a", range(13), 1)])
    scheduler.add([ask("b", range(7), 1)])
    assert rows(step(scheduler, device)) == [(0, 0, 5, NO_LOGITS), (1, 0, 3, NO_LOGITS)]
    assert rows(step(scheduler, device)) == [(0, 5, 5, NO_LOGITS), (1, 3, 3, NO_LOGITS)]
    assert rows(step(scheduler, device)) == [(1, 6, 1, SAMPLE), (0, 10, 3, SAMPLE)], "one token goes first"
    assert_idle(scheduler)


def test_more_decodes_than_budget_starve_nobody_for_good() -> None:
    scheduler, device = setup(40, 4, max_step_tokens=2, prefix_reuse=False)
    run = drive(scheduler, device, {0: [[ask(f"r{i}", [i], 6)] for i in range(5)]})
    verify(run, device.model)
    assert max(len(plan.slots) for plan in run.plans) == 2


def test_admission_needs_the_whole_list_and_nobody_overtakes() -> None:
    scheduler, device = setup(5, 4, chunk_size=4, prefix_reuse=False)
    scheduler.add([ask("a", range(8), 3)])
    scheduler.add([ask("b", range(13), 3)])  # 4 blocks of 5, though its first chunk needs one
    scheduler.add([ask("c", [1], 2)])  # would fit
    plan = step(scheduler, device)
    assert [started.request.id for started in plan.started] == ["a"]
    assert len(plan.started[0].blocks) == 2, "all blocks of the prompt at once"
    started = []
    while scheduler.has_unfinished:
        plan = step(scheduler, device)
        started += [each.request.id for each in plan.started]
        if scheduler.is_live("a"):
            assert not started
    assert started == ["b", "c"]


def test_requests_start_in_the_order_they_came() -> None:
    scheduler, device = setup(12, 4, max_num_seqs=3, stop_every=6)
    rng = random.Random(5)
    names = [f"r{i}" for i in range(30)]
    batches = [[ask(name, [rng.randrange(50) for _ in range(rng.randint(1, 12))], 8)] for name in names]
    run = drive(scheduler, device, {0: batches})
    verify(run, device.model)
    first_starts = list(dict.fromkeys(s.request.id for plan in run.plans for s in plan.started))
    assert first_starts == names
    assert max(len(plan.slots) for plan in run.plans) == 3


def test_slots_limit_who_runs() -> None:
    scheduler, device = setup(100, 4, max_num_seqs=2)
    run = drive(scheduler, device, {0: [[ask(f"r{i}", [i], 4)] for i in range(5)]})
    assert max(len(plan.slots) for plan in run.plans) == 2
    assert {slot for plan in run.plans for slot in plan.slots} == {0, 1}
    verify(run, device.model)


def test_samples_of_one_request_differ_and_share_their_prompt() -> None:
    scheduler, device = setup(40, 4)
    prompt = Prompt(range(17))
    run = drive(scheduler, device, {0: [[ask("g", prompt, 9, sample=j) for j in range(4)]]})
    verify(run, device.model)
    assert len({tuple(outcome.tokens) for outcome in run.outcomes}) == 4
    assert scheduler.counters.cached_tokens == 3 * 16
    assert [o.finished.num_cached_tokens for o in run.outcomes if o.finished] == [0, 16, 16, 16]


def test_the_same_calls_give_the_same_plans() -> None:
    arrivals = {i: [[ask(f"r{i}", range(i % 3, 10), 20)]] for i in range(8)}

    def once() -> list[StepPlan]:
        scheduler, device = setup(9, 4, stop_every=15, depth=2)
        run = drive(scheduler, device, arrivals)
        assert scheduler.counters.num_preemptions > 0
        return run.plans

    assert once() == once()


# How much memory a request needs


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("num_prompt", range(1, 10))
def test_a_pool_of_exactly_the_needed_blocks_serves_a_request(num_prompt: int, max_tokens: int) -> None:
    """The last token is never fed back: N tokens hold N - 1 (prompt 3, 6 new, blocks of 4: 2 blocks)."""
    needed = num_blocks_for(num_prompt + max_tokens - 1, 4)
    assert (num_prompt, max_tokens, needed) != (3, 6, 3)
    request = ask("r", range(num_prompt), max_tokens)
    for depth in (1, 2, 3):
        scheduler, device = setup(needed, 4, depth=depth)
        run = drive(scheduler, device, {0: [[request]]})
        verify(run, device.model)
        counters = scheduler.counters
        assert counters.forward_tokens == counters.minimal_forward_tokens == num_prompt + max_tokens - 1
        assert counters.num_preemptions == 0
        assert counters.peak_blocks == needed
        assert not any(scheduler.pool.references)
    if needed > 1:
        scheduler, _ = setup(needed - 1, 4)
        before = snapshot(scheduler)
        with pytest.raises(ValueError, match=f"can never fit the cache, {4 * (needed - 1)} tokens"):
            scheduler.add([request])
        assert snapshot(scheduler) == before


def test_unlimited_means_what_the_limits_leave() -> None:
    scheduler, device = setup(5, 4)
    assert scheduler.config.max_tokens_for(7, 3) == 3
    most = scheduler.config.max_tokens_for(7, None)
    assert most == 14  # 20 held, and the last token needs no room
    drive(scheduler, device, {0: [[ask("r", range(7), most)]]})
    with pytest.raises(ValueError, match="can never fit"):
        scheduler.add([ask("s", range(7), most + 1)])
    scheduler, device = setup(5, 4, max_seq_len=10)
    most = scheduler.config.max_tokens_for(7, None)
    assert most == 4
    drive(scheduler, device, {0: [[ask("r", range(7), most)]]})
    with pytest.raises(ValueError, match="exceeds max_seq_len, 10 tokens"):
        scheduler.add([ask("s", range(7), most + 1)])


# Refusals

REFUSALS: dict[str, tuple[Callable[[], list[Request]], str]] = {
    "empty prompt": (lambda: [ask("x", [], 4)], "the prompt must hold at least one token"),
    "id too large": (lambda: [ask("x", [3, 50, 51], 4)], "prompt token id 50 is outside the vocabulary, 0 to 49"),
    "negative id": (lambda: [ask("x", [3, -1], 4)], "prompt token id -1 is outside the vocabulary"),
    "larger than the pool": (lambda: [ask("x", range(20), 38)], "20 tokens with max_tokens 38 can never fit the cache"),
    "beyond max_seq_len": (lambda: [ask("x", range(20), 32)], "20 tokens with max_tokens 32 exceeds max_seq_len, 50"),
    "prompt alone too long": (lambda: [ask("x", [1] * 60, 1)], "can never fit|exceeds"),
    "live already": (lambda: [ask("running", [1], 4)], "'running' is in use"),
    "waiting already": (lambda: [ask("waiting", [1], 4)], "'waiting' is in use"),
    "a sample live already": (lambda: [ask("running", [1], 4, sample=1), ask("running", [1], 4)], "in use"),
    "twice in a batch": (lambda: [ask("x", [1], 4), ask("x", [2], 4)], "'x' is given twice"),
    "one bad among good": (lambda: [ask("x", [1], 4), ask("x", [99], 4, sample=1)], "token id 99"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_leaves_everything_untouched(name: str) -> None:
    make, message = REFUSALS[name]
    max_seq_len = None if name == "larger than the pool" else 50
    scheduler, device = setup(14, 4, max_seq_len=max_seq_len, vocab_size=50, max_num_seqs=1)
    neighbours = [ask("running", range(9), 12), ask("waiting", range(9), 12)]
    for request in neighbours:
        scheduler.add([request])
    run = Run()
    for request in neighbours:
        run.add(request)
    for _ in range(4):
        step(scheduler, device, run)
    before = snapshot(scheduler)
    with pytest.raises(ValueError, match=message):
        scheduler.add(make())
    assert snapshot(scheduler) == before
    scheduler.check()
    while scheduler.has_unfinished:
        step(scheduler, device, run)
    verify(run, device.model)
    assert_idle(scheduler)


def test_an_id_may_come_again_after_its_end() -> None:
    scheduler, device = setup(14, 4)
    drive(scheduler, device, {0: [[ask("x", [1], 2)]]})
    run = drive(scheduler, device, {0: [[ask("x", [1], 2)]], 1: []})
    verify(run, device.model)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_blocks", 0), ("block_size", -1), ("max_num_seqs", 0), ("max_step_tokens", 0), ("chunk_size", 0),
     ("depth", 0), ("max_seq_len", 0), ("vocab_size", 0), ("depth", True), ("block_size", 4.0), ("num_blocks", "9")],
)  # fmt: skip
def test_limits_are_checked_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} must be a whole number, at least 1, not {value!r}"):
        SchedulerConfig(**{"num_blocks": 8, field: value})


@pytest.mark.parametrize(
    ("field", "most"),
    [("num_blocks", 10**8), ("block_size", 2**31 - 1), ("max_num_seqs", 2**31 - 1), ("max_step_tokens", 2**31 - 1),
     ("chunk_size", 2**31 - 1), ("max_seq_len", 2**31 - 1), ("depth", 2**31 - 1)],
)  # fmt: skip
def test_a_limit_too_large_is_refused_by_name(field: str, most: int) -> None:
    """`num_blocks=99999999999999999999` ended in a traceback of torch's (in `sim`, all memory went), and for such a
    `block_size` another key was blamed."""
    with pytest.raises(ValueError, match=f"{field} must be a whole number, at most {most}, not {most + 1}"):
        SchedulerConfig(**{"num_blocks": 8, field: most + 1})
    SchedulerConfig(**{"num_blocks": 8, field: most})


def test_exceeding_the_pool_but_not_the_length_limit_is_refused_at_once() -> None:
    """Fault 9: such a request used to wait at the head of the queue for ever, and everybody behind it too."""
    scheduler, device = setup(4, 4, max_seq_len=1000)
    with pytest.raises(ValueError, match="can never fit the cache"):
        scheduler.add([ask("huge", range(16), 2)])
    run = drive(scheduler, device, {0: [[ask("fits", range(16), 1)], [ask("next", range(3), 9)]]})
    verify(run, device.model)


# The loop's contract


def test_plans_and_results_must_alternate_as_agreed() -> None:
    scheduler, device = setup(8, 4, depth=2)
    assert scheduler.plan() is None, "nothing to do"
    scheduler.add([ask("a", [1], 5)])
    for _ in range(2):
        plan = scheduler.plan()
        assert plan is not None
        device.submit(plan)
    with pytest.raises(AssertionError, match="commit a result before planning on"):
        scheduler.plan()
    first, second = device.collect(), device.collect()
    before = snapshot(scheduler)
    with pytest.raises(AssertionError, match="result of step 1, expected 0"):
        scheduler.commit(second)
    assert snapshot(scheduler) == before
    assert scheduler.commit(first).step == 0
    assert scheduler.commit(second).step == 1


def test_a_result_must_hold_a_token_for_each_sampled_row() -> None:
    scheduler, _ = setup(8, 4)
    scheduler.add([ask("a", [1], 5)])
    scheduler.plan()
    with pytest.raises(AssertionError, match="one stop flag for each"):
        scheduler.commit(StepResult(0, [1, 2], [False, False], [], 0.0, 0.0))


def test_a_steady_result_must_hold_a_token_for_each_row() -> None:
    scheduler, device = setup(8, 4)
    scheduler.add([ask("a", [1], 15)])
    for _ in range(4):
        plan = scheduler.plan()
        assert plan is not None
        device.submit(plan)
        result = device.collect()
        if plan.step < 3:
            scheduler.commit(result)
    with pytest.raises(AssertionError, match="one stop flag for each"):
        scheduler.commit(result._replace(stopped=[False, False]))
    with pytest.raises(ValueError, match="zip"):
        scheduler.commit(result._replace(tokens=[1, 2]))


def test_nothing_to_plan_while_the_last_token_is_in_flight() -> None:
    scheduler, device = setup(8, 4, depth=2)
    scheduler.add([ask("a", [1], 1)])
    plan = scheduler.plan()
    assert plan is not None
    device.submit(plan)
    assert scheduler.plan() is None
    assert [f.reason for f in scheduler.commit(device.collect()).finished] == [FinishReason.LENGTH]


class Impossible(Policy):
    """Asks for more blocks than there are."""

    def blocks_to_admit(self, sequence: Seq, load: Load) -> int:
        return 1000


def test_a_stall_raises_instead_of_planning_nothing_for_ever() -> None:
    scheduler, _ = setup(8, 4, policy=Impossible())
    scheduler.add([ask("a", [1], 1)])
    with pytest.raises(RuntimeError, match="no sequence can make progress: 0 running, 1 waiting, 8 of 8 blocks free"):
        scheduler.plan()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_plan_that_only_preempted_does_not_block_admission_for_good(depth: int) -> None:
    """With the old one's last token in flight, the young one finds no block, is its own victim, and no row is left.

    The names of those preempted stayed noted without a plan, and forbade the next plan to admit anybody: a stall.
    """
    scheduler, device = setup(2, 4, depth=depth, prefix_reuse=False)
    batches = [[ask("old", range(4), 1)], [ask("young", range(4, 8), 3)]]
    run = drive(scheduler, device, {0: batches})
    verify(run, device.model)
    assert scheduler.counters.num_preemptions == (depth > 1)
    assert sum(len(plan.preempted) for plan in run.plans) == (depth > 1), "told by the next plan"
    scheduler, device = setup(2, 4, depth=depth, prefix_reuse=False)
    verify(drive(scheduler, device, {0: batches}, abandons={2}), device.model)


# Preemption


def test_the_youngest_is_the_victim_and_returns_to_the_front() -> None:
    scheduler, device = setup(6, 4, prefix_reuse=False)
    batches = [[ask(name, [ord(name)] * 8, 9)] for name in "abcd"]
    run = drive(scheduler, device, {0: batches})
    verify(run, device.model)
    first = next(plan for plan in run.plans if plan.preempted)
    assert [request_id for request_id, _ in first.preempted] == ["c"], "a, b and c run: c is the youngest"
    assert not first.started
    order = [started.request.id for plan in run.plans for started in plan.started]
    assert order.index("d") > max(i for i, name in enumerate(order) if name == "c"), "c comes back before d"
    again = next(s for plan in run.plans for s in plan.started if s.request.id == "c" and s.output_ids)
    assert list(again.output_ids) == run.of("c").tokens[: len(again.output_ids)], "the tokens are kept"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_thrash_is_bounded(depth: int) -> None:
    """Fault 10: a request preempted 173,622 times, 79% of compute spent on recomputation.

    Whoever is preempted comes back only when its whole list fits again, and the oldest always goes on.
    """
    scheduler, device = setup(30, 4, max_num_seqs=16, chunk_size=64, max_step_tokens=128, depth=depth)
    rng = random.Random(1)
    batches = [[ask(f"r{i}", [rng.randrange(50) for _ in range(rng.randint(4, 30))], 60)] for i in range(40)]
    run = drive(scheduler, device, {0: batches}, max_ticks=2500)
    verify(run, device.model)
    counters = scheduler.counters
    assert counters.num_preemptions > 40, "this workload is meant to press"
    assert max(o.finished.num_preemptions for o in run.outcomes if o.finished) <= 12
    assert counters.recomputed_tokens < counters.minimal_forward_tokens
    assert counters.forward_tokens < 2 * counters.minimal_forward_tokens


@dataclass(frozen=True)
class OldestVictim(Policy):
    def choose_victim(self, candidates: Sequence[Seq]) -> Seq:
        return candidates[0]


@dataclass(frozen=True)
class LongestVictim(Policy):
    def choose_victim(self, candidates: Sequence[Seq]) -> Seq:
        return max(candidates, key=lambda sequence: (len(sequence.blocks), sequence.request.key))


@dataclass(frozen=True)
class MiddleVictim(Policy):
    def choose_victim(self, candidates: Sequence[Seq]) -> Seq:
        return candidates[len(candidates) // 2]


POLICIES = [Fifo(), Watermark(0.15), Reserve(), Forecast(risk=0.8), OldestVictim(), LongestVictim(), MiddleVictim()]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_the_first_that_runs_is_never_offered_as_a_victim(policy: Policy) -> None:
    offered: list[tuple[Seq, list[Seq]]] = []

    class Watched(type(policy)):  # type: ignore[misc]
        def choose_victim(self, candidates: Sequence[Seq]) -> Seq:
            offered.append((scheduler._running[0], list(candidates)))
            assert [c.slot for c in candidates] == [s.slot for s in scheduler._running if s in candidates]
            return policy.choose_victim(candidates)

    scheduler, device = setup(10, 4, policy=Watched(), prefix_reuse=False)
    run = drive(scheduler, device, {i: [[ask(f"r{i}", range(6), 20)]] for i in range(8)})
    verify(run, device.model)
    assert (len(offered) > 3) == (not isinstance(policy, Reserve | Forecast))
    assert all(candidates and first not in candidates for first, candidates in offered)


def test_a_watermark_is_kept_while_somebody_runs_and_waived_when_nobody_does() -> None:
    scheduler, device = setup(10, 4, policy=Watermark(0.5), prefix_reuse=False)
    scheduler.add([ask("large", range(33), 3)])  # 9 of 10 blocks
    assert [started.request.id for started in step(scheduler, device).started] == ["large"]
    scheduler.abort("large")
    for name in ("first", "second", "third"):
        scheduler.add([ask(name, range(9), 3)])  # 3 blocks each, and 5 stay free
    assert [started.request.id for started in step(scheduler, device).started] == ["first"]
    scheduler.abort("first")
    assert [started.request.id for started in step(scheduler, device).started] == ["second"]


def test_a_policy_that_has_refused_is_asked_again_when_somebody_has_left() -> None:
    """Looking at everybody that runs in every step, for the same answer, cost more than the step's plan."""
    asked: list[tuple[str, int]] = []

    class Careful(Policy):
        def blocks_kept_free(self, sequence: Seq, load: Load) -> int:
            asked.append((sequence.request.id, scheduler.counters.num_steps))
            return 0 if len(load.running) < 2 else 30

    scheduler, device = setup(30, 4, policy=Careful(), prefix_reuse=False)
    for name, max_tokens in (("a", 20), ("b", 9), ("c", 5), ("d", 5)):
        scheduler.add([ask(name, range(4), max_tokens)])
    while scheduler.has_unfinished:
        step(scheduler, device)
    # b leaves with the ninth step, and c with the fourteenth.
    assert asked == [("b", 0), ("c", 0), ("c", 9), ("d", 9), ("d", 14)]


# Abort


def _crowd() -> list[list[Request]]:
    """Requests that share prompts, in a pool too small for them."""
    shared = list(range(9))
    group = Prompt([*shared, 9])
    return [
        [ask("a", [*shared, 30, 31], 12)],
        [ask("g", group, 9, sample=j) for j in range(3)],
        [ask("b", [*shared, 40], 10)],
        [ask("c", range(20, 33), 8)],
        [ask("d", range(20, 29), 11)],
    ]


@pytest.mark.parametrize("late", [False, True], ids=["between steps", "while a step executes"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_abort_at_every_step_gives_everything_back_and_disturbs_nobody(depth: int, late: bool) -> None:
    def world() -> tuple[Scheduler, MockDevice]:
        return setup(11, 4, depth=depth, chunk_size=4, max_step_tokens=12, stop_every=40, eager=late)

    arrivals = {i: [batch] for i, batch in enumerate(_crowd())}
    scheduler, device = world()
    undisturbed = drive(scheduler, device, arrivals)
    verify(undisturbed, device.model)
    assert scheduler.counters.num_preemptions > 0
    assert scheduler.counters.cached_tokens > 0
    states: Counter[str] = Counter()
    for tick in range(undisturbed.num_ticks):
        for target in ("a", "b", "c", "d", "g"):
            scheduler, device = world()
            aborts = {tick: [(target, None if tick % 2 else 1 if target == "g" else 0)]}
            early, late_ones = ({}, aborts) if late else (aborts, {})
            run = drive(scheduler, device, arrivals, aborts=early, late_aborts=late_ones)
            verify(run, device.model)
            states.update(state for _, _, state in run.states)
            for outcome, other in zip(run.outcomes, undisturbed.outcomes, strict=True):
                if outcome.request.id != target:
                    assert outcome.tokens == other.tokens
                    assert outcome.reason == other.reason
    names = ["waiting", "preempted"]
    names += [f"{name} in flight" for name in ("prefill", "decode")] if late or depth > 1 else ["prefill", "decode"]
    names += ["preempted in flight"] if depth > 2 or (late and depth > 1) else []
    for name in names:
        assert states[name] > 0, (name, states)


@pytest.mark.parametrize("depth", [1, 2])
def test_cancel_and_retry_on_a_shared_prefix(depth: int) -> None:
    """Fault 8: cancelling a request and sending it again, on a prefix that others use, corrupted those others."""
    num_cancelled = num_cached = num_preemptions = 0
    for tick in range(5, 30):
        for target in ("a", "b", "g"):
            scheduler, device = setup(11, 4, depth=depth, chunk_size=5, max_step_tokens=12, stop_every=40)
            arrivals = {i: [batch] for i, batch in enumerate(_crowd())}
            again = next(batch for batch in _crowd() if batch[0].id == target)
            arrivals |= {tick: [again], tick + 3: [again]}  # after the aborts of the same turns
            run = drive(scheduler, device, arrivals, aborts={tick: [(target, None)], tick + 3: [(target, None)]})
            verify(run, device.model)
            num_cancelled += sum(outcome.reason is FinishReason.ABORT for outcome in run.outcomes)
            num_cached += scheduler.counters.cached_tokens
            num_preemptions += scheduler.counters.num_preemptions
    assert num_cancelled > 100
    assert num_cached > 1000
    assert num_preemptions > 50


def test_abort_of_the_unknown_is_no_error() -> None:
    scheduler, device = setup(8, 4)
    assert scheduler.abort("nobody") == []
    scheduler.add([ask("a", [1], 3)])
    assert scheduler.abort("a", 5) == []
    step(scheduler, device)
    (finished,) = scheduler.abort("a")
    assert (finished.reason, finished.num_output) == (FinishReason.ABORT, 1)
    assert scheduler.abort("a") == []
    assert_idle(scheduler)


# Fuzz


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_fuzz(policy: Policy, depth: int) -> None:
    """120 requests in 14 blocks, with sharing, stops and aborts, consistent after every event."""
    rng = random.Random(depth)
    stems = [[rng.randrange(50) for _ in range(16)] for _ in range(4)]
    arrivals: dict[int, list[list[Request]]] = {}
    aborts: dict[int, list[tuple[str, int | None]]] = {}
    tick = count = 0
    while count < 120:
        tick += rng.choice((0, 0, 1, 2, 5))
        stem = rng.choice(stems)[: rng.randint(0, 16)]
        prompt = Prompt([*stem, *(rng.randrange(50) for _ in range(rng.randint(1, 8)))])
        samples = min(rng.choice((1, 1, 1, 3)), 120 - count)
        max_tokens = rng.randint(1, 56 + 1 - len(prompt)) if rng.random() < 0.5 else rng.randint(1, 12)
        extra = {"prompt_logprobs": 0} if rng.random() < 0.1 else {}
        batch = [ask(f"r{count}", prompt, max_tokens, sample=j, **extra) for j in range(samples)]
        arrivals.setdefault(tick, []).append(batch)
        if rng.random() < 0.15:
            sample = rng.choice((None, 0))
            aborts.setdefault(tick + rng.randint(0, 60), []).append((f"r{count}", sample))
        count += samples
    scheduler, device = setup(
        14, 4, policy=policy, depth=depth, stop_every=30, max_num_seqs=6, chunk_size=7, max_step_tokens=16,
        eager=depth == 2,
    )  # fmt: skip
    run = drive(scheduler, device, arrivals, aborts=aborts)
    verify(run, device.model)
    assert len(run.outcomes) == 120
    reasons = Counter(outcome.reason for outcome in run.outcomes)
    counters = scheduler.counters
    assert min(reasons[reason] for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)) > 3, reasons
    assert counters.cached_tokens > 100
    assert counters.dropped_tokens > 0 or depth == 1
    assert counters.forward_tokens == sum(plan.num_tokens for plan in run.plans)
    assert counters.peak_blocks <= 14
    if isinstance(policy, Reserve):
        assert counters.num_preemptions == 0
    else:
        assert counters.num_preemptions > (2 if isinstance(policy, Watermark) else 10)
        assert counters.recomputed_tokens > 0


# Prefix reuse


@pytest.mark.parametrize("together", [True, False], ids=["together", "in turn"])
@pytest.mark.parametrize("num_prompt", [3, 4, 5, 7, 8, 9, 11, 12, 13])
def test_prompts_around_a_multiple_of_the_block_size_sent_again(num_prompt: int, together: bool) -> None:
    """Faults 5 and 6: at exactly k x block_size a full hit scheduled no token, or sampled from nothing."""
    prompt = list(range(num_prompt))
    names = ("first", "second", "third")
    for chunk_size in (1, 3, 4, 64):
        for depth in (1, 2):
            scheduler, device = setup(30, 4, chunk_size=chunk_size, depth=depth)
            arrivals = {(0 if together else 40 * i): [[ask(name, prompt, 10)]] for i, name in enumerate(names)}
            if together:
                arrivals = {0: [[ask(name, prompt, 10)] for name in names]}
            run = drive(scheduler, device, arrivals)  # the device demands at least a token in every row
            verify(run, device.model)
            full = (num_prompt - 1) // 4 * 4
            assert [o.finished.num_cached_tokens for o in run.outcomes if o.finished] == [0, full, full]
            counters = scheduler.counters
            assert counters.cached_tokens == 2 * full
            assert counters.forward_tokens == 3 * (num_prompt + 9) - 2 * full


def test_a_finished_transcript_is_found_again_with_its_sampled_tokens() -> None:
    scheduler, device = setup(30, 4)
    run = drive(scheduler, device, {0: [[ask("turn 1", range(6), 11)]]})
    transcript = [*range(6), *run.of("turn 1").tokens]  # 17 tokens, of which 16 are held
    run = drive(scheduler, device, {0: [[ask("turn 2", [*transcript, 1, 2, 3], 5)]]})
    verify(run, device.model)
    assert scheduler.counters.cached_tokens == 16


def test_the_longest_common_prefix_is_taken_over() -> None:
    scheduler, device = setup(30, 4)
    drive(scheduler, device, {0: [[ask("a", range(16), 1)]]})
    for tokens, cached in (([*range(9), 40, 41, 42, 43], 8), ([40, *range(1, 16)], 0), (range(20), 16)):
        before = scheduler.counters.cached_tokens
        run = drive(scheduler, device, {0: [[ask("b", list(tokens), 3)]]})
        verify(run, device.model)
        assert scheduler.counters.cached_tokens - before == cached


def test_without_reuse_nothing_is_taken_over() -> None:
    scheduler, device = setup(30, 4, prefix_reuse=False)
    run = drive(scheduler, device, {0: [[ask("a", range(16), 4)], [ask("b", range(16), 4)]]})
    verify(run, device.model)
    assert scheduler.counters.cached_tokens == 0
    assert scheduler.pool.num_cached == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_follower_waits_for_a_running_leader_and_others_pass(depth: int) -> None:
    scheduler, device = setup(40, 4, chunk_size=4, depth=depth)
    batches = [
        [ask("leader", range(17), 4)], [ask("follower", [*range(17), 30], 4)], [ask("second", range(17), 4)],
        [ask("stranger", range(30, 39), 4)],
    ]  # fmt: skip
    run = drive(scheduler, device, {0: batches})
    verify(run, device.model)
    started = {s.request.id: (plan.step, s.num_cached) for plan in run.plans for s in plan.started}
    assert started["leader"] == (0, 0)
    assert started["stranger"] == (0, 0), "the stranger passes those that wait"
    # Blocks are published by the commits of steps 0 to 3, and the followers start when the fourth is there.
    assert started["follower"] == started["second"] == (3 + depth, 16)


def test_those_that_were_passed_keep_their_place() -> None:
    scheduler, device = setup(40, 4, chunk_size=4, max_num_seqs=2)
    batches = [
        [ask("leader", range(17), 4)], [ask("follower", range(17), 4)], [ask("second", [*range(17), 1], 4)],
        [ask("stranger", range(30, 33), 12)], [ask("late", range(40, 43), 4)],
    ]  # fmt: skip
    run = drive(scheduler, device, {0: batches})
    verify(run, device.model)
    order = [started.request.id for plan in run.plans for started in plan.started]
    assert order == ["leader", "stranger", "follower", "second", "late"]


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_followers_of_a_leader_that_leaves_go_on_alone(how: str) -> None:
    scheduler, device = setup(9 if how == "preempt" else 30, 4, chunk_size=4, max_step_tokens=9)
    follower = [ask("follower", range(17), 3)]
    if how == "abort":
        batches = {0: [[ask("leader", range(17), 3)], follower]}
        run = drive(scheduler, device, batches, aborts={2: [("leader", None)]})
        assert run.of("leader").reason is FinishReason.ABORT
        assert run.of("follower").finished.num_cached_tokens == 8  # type: ignore[union-attr]
    else:
        batches = {0: [[ask("old", range(20, 36), 20)], [ask("leader", range(17), 3)], follower]}
        run = drive(scheduler, device, batches)
        assert run.of("leader").finished.num_preemptions > 0  # type: ignore[union-attr]
    verify(run, device.model)


def test_blocks_are_found_only_after_the_commit_that_filled_them() -> None:
    """Fault 7: blocks published while planning were read, or freed and kept, before anything was in them."""
    scheduler, device = setup(30, 4, chunk_size=8)
    request = ask("a", range(10), 8)
    scheduler.add([request])
    keys = request.prompt.block_keys(4, b"weights:0")
    tokens, _ = device.model.reference(request)
    generated = Prompt([*request.prompt.token_ids, *tokens]).block_keys(4, b"weights:0")
    assert generated[:2] == keys
    found: list[int] = []
    while scheduler.has_unfinished:
        plan = scheduler.plan()
        assert plan is not None
        computed = plan.starts[0]
        assert [scheduler.pool.lookup(key) is not None for key in generated] == [
            (i + 1) * 4 <= computed for i in range(len(generated))
        ], "only what earlier steps computed"
        device.submit(plan)
        result = device.collect()
        assert sum(scheduler.pool.lookup(key) is not None for key in generated) == computed // 4
        scheduler.commit(result)
        found.append(sum(scheduler.pool.lookup(key) is not None for key in generated))
    assert found == [2, 2, 2, 3, 3, 3, 3, 4, 4]


@pytest.mark.parametrize("how", ["abort", "preempt", "abandon"])
def test_blocks_of_a_step_that_never_commits_for_them_are_never_found(how: str) -> None:
    scheduler, device = setup(6, 4, depth=2)
    scheduler.add([ask("old", [40] * 8, 12)])
    request = ask("a", range(15), 8)
    scheduler.add([request])
    plan = scheduler.plan()
    assert plan is not None
    assert sum(plan.lengths) == 8 + 15
    device.submit(plan)
    if how == "abort":
        scheduler.abort("a")
    elif how == "abandon":
        device.abandon()
        scheduler.abandon()
    else:
        plan = scheduler.plan()  # the old one needs a third block while the prompt of the young one is in flight
        assert plan is not None
        assert plan.preempted == [("a", 0)]
        assert state_of(scheduler, "a") == "preempted in flight"
    keys = request.prompt.block_keys(4, b"weights:0")
    if scheduler.num_in_flight:
        scheduler.commit(device.collect())
    assert all(scheduler.pool.lookup(key) is None for key in keys)
    scheduler.check()


def test_prompt_logprobs_skip_hits_and_score_every_token_once() -> None:
    """Fault 12: prompt log-probabilities used to depend on what the cache happened to hold."""
    scheduler, device = setup(30, 4, chunk_size=5)
    prompt = list(range(14))
    batches = [[ask("plain", prompt, 3)], [ask("scored", prompt, 3, prompt_logprobs=0)], [ask("after", prompt, 3)]]
    run = drive(scheduler, device, {0: batches})
    verify(run, device.model)
    assert run.of("scored").finished.num_cached_tokens == 0  # type: ignore[union-attr]
    assert run.of("after").finished.num_cached_tokens == 12  # type: ignore[union-attr]
    scored = [row for result in run.results for row in result.payload]
    assert scored == [(("scored", 0), 0, 5), (("scored", 0), 5, 5), (("scored", 0), 10, 4)]
    again = drive(scheduler, device, {0: [[ask("scored", prompt, 3, prompt_logprobs=0)]]})
    assert [row for result in again.results for row in result.payload] == scored, "a warm cache changes nothing"


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    scheduler, device = setup(30, 4)
    run = drive(scheduler, device, {0: [[ask("r", [1], 3, prompt_logprobs=0)]]})
    assert not any(logits & SCORE for plan in run.plans for logits in plan.logits)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_scores_are_complete_though_preempted_or_abandoned(depth: int) -> None:
    num_interrupted = 0
    for seed in range(30):
        rng = random.Random(seed)
        scheduler, device = setup(9, 4, chunk_size=2, max_step_tokens=6, depth=depth)
        batches = [[ask(f"r{i}", [i] * rng.randint(6, 16), 14, prompt_logprobs=0)] for i in range(5)]
        run = drive(scheduler, device, {0: batches}, abandons={rng.randint(2, 40)})
        verify(run, device.model)
        covered: dict[tuple[str, int], set[int]] = {}
        for result in run.results:
            for key, start, length in result.payload:
                covered.setdefault(key, set()).update(range(start, start + length))
        for outcome in run.outcomes:
            assert covered[outcome.request.key] >= set(range(len(outcome.request.prompt) - 1))
        num_interrupted += run.num_abandoned + scheduler.counters.num_preemptions
        assert scheduler.counters.num_preemptions > 0
    assert num_interrupted > 60


# NaN


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nan_changes_nothing_until_those_concerned_are_aborted(depth: int) -> None:
    for tick in range(1, 12):
        scheduler, device = setup(20, 4, depth=depth)
        requests = [ask(f"r{i}", range(i, i + 9), 12) for i in range(4)]
        run = Run()
        for request in requests:
            scheduler.add([request])
            run.add(request)
        raised: list[tuple[Request, ...]] = []
        turn = 0
        while scheduler.has_unfinished or scheduler.num_in_flight:
            if turn == tick:
                device.nan_requests = {("r1", 0), ("r3", 0)}
            turn += 1
            plan = scheduler.plan()
            if plan is not None:
                device.submit(plan)
            if scheduler.num_in_flight < depth and plan is not None:
                continue
            result = device.collect()
            if result.nan_rows and scheduler.is_live("r1"):
                before = snapshot(scheduler)
                for _ in range(2):
                    with pytest.raises(NonFiniteLogitsError, match="'r1' sample 0, 'r3' sample 0") as caught:
                        scheduler.commit(result)
                    assert isinstance(caught.value, FloatingPointError)
                    scheduler.check()
                    assert snapshot(scheduler) == before
                raised.append(caught.value.requests)
            take_in(scheduler, run, result)
        assert raised == [(requests[1], requests[3])]
        assert_idle(scheduler)
        verify(run, device.model)
        assert [outcome.reason for outcome in run.outcomes] == ["length", "error", "length", "error"]


def test_nan_of_the_dead_and_of_the_preempted() -> None:
    """Rows of sequences that have ended meanwhile are nobody's concern; those of preempted ones still are."""
    scheduler, device = setup(20, 4, depth=2)
    scheduler.add([ask("a", range(5), 9)])
    device.nan_requests = {("a", 0)}
    plan = scheduler.plan()
    assert plan is not None
    device.submit(plan)
    scheduler.abort("a")
    assert scheduler.commit(device.collect()).accepted == [None]

    caught = 0
    for seed in range(20):
        scheduler, device = setup(8, 4, depth=2)
        batches = [[ask(f"r{i}", range(i, i + 7), 14)] for i in range(4)]

        def poison(tick: int, scheduler: Scheduler, device: MockDevice = device, at: int = seed) -> None:
            if tick == at:
                device.nan_requests = {("r1", 0), ("r2", 0)}

        run = drive(scheduler, device, {0: batches}, before_plan=poison)
        verify(run, device.model)
        caught += sum(o.reason is FinishReason.ERROR and o.finished.num_preemptions > 0 for o in run.outcomes)  # type: ignore[union-attr]
        assert run.of("r0").reason is FinishReason.LENGTH
    assert caught > 3


# Failure of the executor


def test_abandon_returns_everybody_to_the_queue_in_order() -> None:
    scheduler, device = setup(30, 4, depth=2, max_num_seqs=3)
    for i in range(5):
        scheduler.add([ask(f"r{i}", range(i, i + 6), 9)])
    for _ in range(2):
        plan = scheduler.plan()
        assert plan is not None
        device.submit(plan)
    scheduler.commit(device.collect())
    scheduler.abandon()
    device.abandon()
    scheduler.check()
    assert [sequence.request.id for sequence in scheduler._waiting] == [f"r{i}" for i in range(5)]
    assert [sequence.num_output for sequence in scheduler._waiting] == [1, 1, 1, 0, 0]
    assert scheduler.pool.num_free == 30
    assert scheduler.counters.num_preemptions == 0, "a failure is no preemption"
    plan = scheduler.plan()
    assert plan is not None
    assert [len(started.output_ids) for started in plan.started] == [1, 1, 1]
    assert plan.step == 2


def test_a_queue_of_followers_is_not_walked_in_every_step() -> None:
    """Thousands that wait for one leader's prompt, computed token by token, once cost milliseconds a plan."""
    scheduler, device = setup(400, 4, chunk_size=1, max_num_seqs=64)
    calls = 0
    match = scheduler._reuse.match

    def counted(sequence: Seq) -> list[int] | None:
        nonlocal calls
        calls += 1
        return match(sequence)

    scheduler._reuse.match = counted  # type: ignore[method-assign]
    prompt = Prompt(range(41))
    for number in range(50):
        scheduler.add([ask(f"r{number}", prompt, 2)])
    run = Run()
    for request in [sequence.request for sequence in scheduler._waiting]:
        run.add(request)
    for _ in range(41):
        plan = scheduler.plan()
        assert plan is not None
        device.submit(plan)
        take_in(scheduler, run, device.collect())
    assert scheduler.num_running == 50, "they follow as soon as the prompt's last full block is there"
    # Looked at when they arrive, and whenever a block of the prompt has come.
    assert calls <= 50 * 13
