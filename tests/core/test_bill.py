"""The bill of preemption: one long decoder against six arrivals in pools too small for them, to the token."""

from __future__ import annotations

import pytest

from mock_device import Run, ask, drive, setup, verify
from paged.core.metrics import Counters
from paged.core.policy import Fifo, Policy, Reserve, Watermark

MINIMUM = 445  # (4 + 64 - 1) + 6 x (24 + 40 - 1)
POOLS = range(20, 41)


def bill(num_blocks: int, policy: Policy) -> tuple[Counters, Run]:
    scheduler, device = setup(
        num_blocks, 4, policy=policy, chunk_size=64, max_step_tokens=128, prefix_reuse=False, depth=1
    )
    arrivals = {3 * i: [[ask(f"short {i}", range(1 + i, 25 + i), 40)]] for i in range(6)}
    arrivals[0].insert(0, [ask("long", range(4), 64)])
    run = drive(scheduler, device, arrivals)
    verify(run, device.model)
    return scheduler.counters, run


@pytest.fixture(scope="module")
def fifo() -> dict[int, tuple[Counters, Run]]:
    return {num_blocks: bill(num_blocks, Fifo()) for num_blocks in POOLS}


def test_fifo_pays_for_every_pool_what_the_study_paid(fifo: dict[int, tuple[Counters, Run]]) -> None:
    preemptions = {num_blocks: counters.num_preemptions for num_blocks, (counters, _) in fifo.items()}
    tokens = {num_blocks: counters.forward_tokens for num_blocks, (counters, _) in fifo.items()}
    assert all(7 <= count <= 10 for count in preemptions.values()), preemptions
    assert (min(preemptions.values()), max(preemptions.values())) == (7, 10)
    assert (min(tokens.values()), max(tokens.values())) == (671, 818), tokens
    pinned = {20: (7, 681), 26: (10, 818), 32: (7, 671), 40: (7, 727)}
    assert {pool: (preemptions[pool], tokens[pool]) for pool in pinned} == pinned


def test_the_counts_add_up(fifo: dict[int, tuple[Counters, Run]]) -> None:
    for num_blocks, (counters, run) in fifo.items():
        assert counters.minimal_forward_tokens == MINIMUM
        assert counters.forward_tokens == sum(plan.num_tokens for plan in run.plans)
        assert counters.forward_tokens - counters.recomputed_tokens == MINIMUM
        assert counters.num_preemptions == sum(len(plan.preempted) for plan in run.plans)
        assert counters.num_preemptions == sum(o.finished.num_preemptions for o in run.outcomes if o.finished)
        assert counters.num_steps == len(run.plans)
        assert (counters.prompt_tokens, counters.output_tokens) == (4 + 6 * 24, 64 + 6 * 40)
        assert counters.cached_tokens == counters.dropped_tokens == 0
        assert counters.peak_blocks <= num_blocks


def test_the_oldest_is_never_a_victim(fifo: dict[int, tuple[Counters, Run]]) -> None:
    for num_blocks in POOLS:
        for run in (fifo[num_blocks][1], bill(num_blocks, Watermark(0.1))[1]):
            victims = [key for plan in run.plans for key in plan.preempted]
            assert victims
            assert ("long", 0) not in victims
            assert run.of("long").finished.num_preemptions == 0  # type: ignore[union-attr]


def test_a_watermark_of_a_tenth_pays_less_in_every_pool(fifo: dict[int, tuple[Counters, Run]]) -> None:
    for num_blocks in POOLS:
        mine, other = bill(num_blocks, Watermark(0.1))[0], fifo[num_blocks][0]
        assert mine.num_preemptions < other.num_preemptions, num_blocks
        assert mine.forward_tokens < other.forward_tokens, num_blocks
        assert 4 <= mine.num_preemptions <= 7
        assert 586 <= mine.forward_tokens <= 741


def test_reserve_pays_the_minimum() -> None:
    for num_blocks in POOLS:
        counters, run = bill(num_blocks, Reserve())
        assert counters.num_preemptions == 0
        assert counters.forward_tokens == MINIMUM
        assert not any(plan.preempted for plan in run.plans)
