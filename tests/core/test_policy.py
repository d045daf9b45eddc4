"""Checks what the policies answer, alone; what they do to a run is checked with the scheduler."""

from __future__ import annotations

import copy
import random
from bisect import bisect_right
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mock_device import ask
from paged.core.blocks import BlockPool
from paged.core.lengths import LengthHistory
from paged.core.memory import num_blocks_for
from paged.core.policy import Fifo, Forecast, Load, Policy, Reserve, Watermark
from paged.core.prompt import OpaquePrompt
from paged.core.request import Request, SamplingParams
from paged.core.sequence import Sequence


def load(*running: Sequence, num_blocks: int = 100, lengths: LengthHistory | None = None, num_shared: int = 0) -> Load:
    """What a policy is shown: of the blocks that those running hold, `num_shared` are counted twice."""
    pool = BlockPool(num_blocks)
    pool.allocate(sum(len(sequence.blocks) for sequence in running) - num_shared)
    return Load(running, pool, 4, lengths or LengthHistory())


def sequence(num_prompt: int, max_tokens: int, num_blocks: int = 0, number: int = 0) -> Sequence:
    made = Sequence(ask(f"r{number}", range(num_prompt), max_tokens))
    made.blocks = list(range(num_blocks))
    return made


def written(output: int, max_tokens: int, num_prompt: int = 8, number: int = 0) -> Sequence:
    """A sequence that has written `output` tokens and holds the blocks of all but the last."""
    prompt = OpaquePrompt(f"p{number}", num_prompt)
    made = Sequence(Request(f"r{number}", 0, prompt, SamplingParams(), 0, max_tokens))
    made.num_output = output
    made.num_tokens = num_prompt + output
    made.blocks = list(range(num_blocks_for(num_prompt + output, 4)))
    return made


def history(*lengths: int, stopped: bool = True) -> LengthHistory:
    made = LengthHistory()
    for length in lengths:
        made.add(length, stopped)
    return made


@pytest.mark.parametrize("policy", [Fifo(), Watermark(0.5), Forecast(), Policy()])
def test_admission_asks_for_the_blocks_of_all_tokens(policy: Policy) -> None:
    assert policy.blocks_to_admit(sequence(9, 100), load()) == 3


def test_fifo_keeps_nothing_free() -> None:
    assert Fifo().blocks_kept_free(sequence(4, 4), load(sequence(4, 100))) == 0


@pytest.mark.parametrize(
    ("fraction", "num_blocks", "kept"), [(0.0, 40, 0), (0.1, 40, 4), (0.1, 41, 5), (0.01, 10, 1), (0.99, 10, 10)]
)
def test_the_watermark_is_rounded_up_to_whole_blocks(fraction: float, num_blocks: int, kept: int) -> None:
    assert Watermark(fraction).blocks_kept_free(sequence(4, 4), load(num_blocks=num_blocks)) == kept


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 7, float("nan")])
def test_a_watermark_must_be_a_share(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"policy\.fraction must be at least 0 and below 1"):
        Watermark(fraction)


def test_reserve_counts_what_is_held_at_most() -> None:
    """A sequence of N tokens holds N - 1: prompt 3 and 6 new ones fit 2 blocks of 4."""
    policy = Reserve()
    assert policy.blocks_to_admit(sequence(3, 6), load()) == 2
    assert policy.blocks_to_admit(sequence(3, 7), load()) == 3
    running = [sequence(3, 7, num_blocks=1), sequence(3, 6, num_blocks=2), sequence(20, 1, num_blocks=5)]
    assert policy.blocks_kept_free(sequence(1, 1), load(*running)) == 2


# The forecast


@pytest.mark.parametrize("risk", [0, 1, -0.1, 1.5, float("nan")])
def test_a_risk_is_a_chance(risk: float) -> None:
    with pytest.raises(ValueError, match=r"policy\.risk must be above 0 and below 1"):
        Forecast(risk)


def test_the_forecast_keeps_nothing_free_when_nothing_runs() -> None:
    assert Forecast().blocks_kept_free(written(0, 100), load()) == 0


def test_the_forecast_is_a_quantile_of_a_sum_of_lives() -> None:
    """Nine of ten samples stop within their first eight tokens, so that few of 100 are left when a newcomer is; of
    as many that had no reason to stop, all would have grown."""
    policy = Forecast()
    short = history(*[7] * 900, *[60] * 100)
    running = [written(1, 64, number=i) for i in range(100)]
    shown = load(*running, num_blocks=10_000, lengths=short)
    # Nobody can need more than 64 tokens, 16 blocks, each.
    assert policy.blocks_kept_free(written(0, 64), shown) < 0.1 * 100 * 16
    lasting = load(*running, num_blocks=10_000, lengths=history(*[60] * 1000))
    assert policy.blocks_kept_free(written(0, 64), lasting) > 0.5 * 100 * 16


def test_a_simulated_batch_keeps_within_the_margin_as_often_as_asked() -> None:
    """1,000 futures of 40 sequences and a newcomer: a pool of what they hold and the margin runs out before the
    newcomer ends in about so many as `risk` says."""
    rng = random.Random(3)
    lengths = sorted(min(400, int(rng.lognormvariate(4.0, 0.8)) + 1) for _ in range(1000))
    known = history(*lengths)
    running = [written(rng.randint(0, 60), 400, number=i) for i in range(40)]
    shown = load(*running, num_blocks=5000, lengths=known)
    newcomer = written(0, 400, number=99)
    for risk in (0.05, 0.1, 0.3):
        size = shown.num_used + len(newcomer.blocks) + Forecast(risk).blocks_kept_free(newcomer, shown)
        num_full = 0
        for _ in range(1000):
            ends = [lengths[rng.randrange(bisect_right(lengths, other.num_output), 1000)] for other in running]
            end = rng.choice(lengths)
            lives = [(other.num_tokens, bound - other.num_output) for other, bound in zip(running, ends, strict=True)]
            lives.append((newcomer.num_tokens, end))
            num_full += any(
                sum(num_blocks_for(tokens + time, 4) for tokens, left in lives if time < left) > size
                for time in range(0, end, 4)
            )
        assert 0.5 * risk < num_full / 1000 < 1.7 * risk, (risk, num_full)


def test_a_longer_past_promises_a_longer_future() -> None:
    """Under a heavy tail those that are old are the ones that will grow."""
    rng = random.Random(0)
    heavy = history(*(min(4096, int(20 * rng.paretovariate(1.0))) for _ in range(1000)))
    margins = []
    for age in (20, 80, 320):
        running = [written(age, 4096, number=i) for i in range(20)]
        margins.append(Forecast().blocks_kept_free(written(0, 4096), load(*running, num_blocks=40_000, lengths=heavy)))
    assert 2 * margins[0] < margins[1]
    assert 2 * margins[1] < margins[2]


def test_with_known_ends_the_forecast_sees_who_makes_room_for_whom() -> None:
    """Requests that ask for exactly their length: while the two old ones live the newcomer is short, and later they
    are gone. Reserving all of everybody's asks for nearly three times as much."""
    cut = history(*[40] * 200, stopped=False)
    running = [written(40, 44, number=0), written(40, 44, number=1)]
    shown = load(*running, lengths=cut)
    newcomer = written(0, 40)
    # At most one block more for each within their 4 tokens, and the newcomer's own: 8 + 40 - 1 tokens in 12 blocks.
    assert Forecast().blocks_kept_free(newcomer, shown) == 3
    assert Reserve().blocks_to_admit(newcomer, shown) + Reserve().blocks_kept_free(newcomer, shown) == 14


def test_a_small_risk_keeps_more_free() -> None:
    running = [written(10 * i, 400, number=i) for i in range(20)]
    shown = load(*running, num_blocks=5000, lengths=history(*range(10, 400, 3)))
    margins = [
        Forecast(risk).blocks_kept_free(written(0, 400), shown) for risk in (1e-300, 0.01, 0.05, 0.3, 0.8, 1 - 1e-16)
    ]
    assert margins == sorted(margins, reverse=True)
    assert margins[1] > margins[2] > margins[3] > margins[4]
    assert margins[-1] == 0


def test_samples_that_all_stop_at_one_length_leave_nobody_beyond() -> None:
    """A thousand that stop where a span begins: the chance to get through that span is too small for a float."""
    stopped = history(*[1024] * 1000)
    running = [written(10, 16_384, number=i) for i in range(4)]
    kept = Forecast().blocks_kept_free(written(0, 16_384), load(*running, num_blocks=20_000, lengths=stopped))
    assert 256 < kept < 5 * 400, "all five grow to 1,024 tokens, and hardly further"


def test_shared_blocks_are_counted_once() -> None:
    """Sixteen samples of one prompt of 400 tokens: as each ends, only its own blocks come back."""
    running = [written(8, 64, num_prompt=400, number=i) for i in range(16)]
    lengths = history(*range(9, 20))
    alone = load(*running, num_blocks=5000, lengths=lengths)
    shared = load(*running, num_blocks=5000, lengths=lengths, num_shared=15 * 100)
    newcomer = written(0, 64, num_prompt=400)
    assert Forecast().blocks_kept_free(newcomer, alone) == 0, "those that end give back more than the others take"
    assert Forecast().blocks_kept_free(newcomer, shared) > 4


@given(
    st.lists(st.tuples(st.integers(0, 199), st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(1, 400), st.booleans()), max_size=20),
    st.tuples(st.integers(0, 99), st.integers(1, 300)),
    st.sampled_from((1e-9, 0.05, 0.5, 0.999)),
)
def test_nobody_asks_for_more_than_all_could_need(
    shown: list[tuple[int, int, int]], ended: list[tuple[int, bool]], newcomer: tuple[int, int], risk: float
) -> None:
    """The margin is never negative, and at most what the running and the newcomer can still grow by."""
    running = [written(output, output + left, num_prompt=prompt) for output, left, prompt in shown]
    lengths = LengthHistory()
    for length, stopped in ended:
        lengths.add(length, stopped)
    output, left = newcomer
    kept = Forecast(risk).blocks_kept_free(
        written(output, output + left), load(*running, num_blocks=10_000, lengths=lengths)
    )
    assert 0 <= kept <= sum(left // 4 + 1 for _, left, _ in shown) + left // 4 + 1


def test_a_forecast_is_a_function_of_what_it_is_shown() -> None:
    """How long a sample will be is known to the executor; no policy may look."""
    newcomer = written(0, 400)
    kept = set()
    for output_len in (1, 399, None):
        running = [written(10 * i, 400, number=i) for i in range(20)]
        for each in (*running, newcomer):
            each.request = replace(each.request, output_len=output_len)
        shown = load(*running, num_blocks=5000, lengths=history(*range(10, 400, 3)))
        kept.add(Forecast().blocks_kept_free(newcomer, shown))
    assert len(kept) == 1
    assert kept.pop() > 0


# Victims


@pytest.mark.parametrize(("victim", "chosen"), [("youngest", 3), ("least_computed", 2), ("most_blocks", 1)])
@pytest.mark.parametrize("make", [Policy, Fifo, Watermark, Reserve, Forecast])
def test_whom_to_preempt_is_part_of_every_policy(make: type[Policy], victim: str, chosen: int) -> None:
    """Among equals the youngest yields."""
    candidates = [sequence(9, 4, num_blocks=n, number=i) for i, n in enumerate((3, 5, 1, 4))]
    for candidate, computed in zip(candidates, (9, 9, 3, 5), strict=True):
        candidate.num_scheduled = computed
    assert make(victim=victim).choose_victim(candidates) is candidates[chosen]
    equals = [sequence(9, 4, num_blocks=2, number=i) for i in range(3)]
    assert make(victim=victim).choose_victim(equals) is equals[-1]


def test_a_victim_must_be_chosen_in_a_known_way() -> None:
    with pytest.raises(ValueError, match=r"policy\.victim must be one of youngest, least_computed, most_blocks, not"):
        Watermark(0.1, victim="x")


def test_the_youngest_candidate_is_the_victim() -> None:
    candidates = [sequence(4, 4, number=i) for i in range(3)]
    for policy in (Policy(), Fifo(), Watermark(), Reserve(), Forecast()):
        assert policy.choose_victim(candidates) is candidates[-1]
        assert policy.choose_victim(candidates[:1]) is candidates[0]


@pytest.mark.parametrize("policy", [Fifo(), Watermark(0.2), Reserve(), Forecast()])
def test_policies_are_frozen_and_change_nothing(policy: Policy) -> None:
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        policy.extra = 1  # type: ignore[attr-defined]
    shown = [sequence(5, 9, num_blocks=2, number=i) for i in range(3)]
    before = copy.deepcopy([(s.blocks, s.output_ids, s.status, s.num_tokens) for s in shown])
    policy.blocks_to_admit(shown[0], load(*shown))
    policy.blocks_kept_free(shown[0], load(*shown))
    policy.choose_victim(shown)
    assert [(s.blocks, s.output_ids, s.status, s.num_tokens) for s in shown] == before
