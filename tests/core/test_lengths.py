"""Checks what the history of output lengths counts, and what it makes of samples that have not ended."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.core.lengths import BOUNDS, Hazard, LengthHistory, span_of

NOBODY = [0] * len(BOUNDS)


def running(*outputs: int) -> tuple[list[int], list[int]]:
    """Counts and tokens by span of sequences that have come so far."""
    counts, tokens = list(NOBODY), list(NOBODY)
    for output in outputs:
        counts[span_of(output)] += 1
        tokens[span_of(output)] += output
    return counts, tokens


def chance(hazard: Hazard, start: int, end: int) -> float:
    """Of whoever has come to `start`, the share that comes to `end`."""
    return math.exp(hazard.up_to(start) - hazard.up_to(end))


def test_spans_are_as_fine_everywhere() -> None:
    assert BOUNDS[:9] == (0, 1, 2, 3, 4, 6, 8, 12, 16)
    assert all(high / low <= 1.5 for low, high in pairwise(BOUNDS[2:]))
    assert BOUNDS[-1] > 10**11


@given(st.integers(0, 10**7))
def test_a_length_lies_in_its_span(length: int) -> None:
    assert BOUNDS[span_of(length)] <= length < BOUNDS[span_of(length) + 1]


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=60), st.integers(1, 20))
def test_the_last_samples_are_counted_by_span(samples: list[tuple[int, bool]], capacity: int) -> None:
    history = LengthHistory(capacity)
    for length, stopped in samples:
        history.add(length, stopped)
    kept = samples[-capacity:]
    assert history.num_samples == len(kept)
    assert (history.counts, history.tokens) == running(*(length for length, _ in kept))
    assert history.stops == running(*(length for length, stopped in kept if stopped))[0]


def test_of_the_imagined_sample_any_length_is_as_likely() -> None:
    """Nothing is known but the bound, 96: half of it is reached with half a chance, and so on."""
    hazard = LengthHistory().hazard(NOBODY, NOBODY, 96)
    for bound in (8, 16, 24, 32, 48, 64):
        assert chance(hazard, 0, bound) == pytest.approx(1 - bound / 96, abs=0.004)
    assert chance(hazard, 0, 96) < 0.15


def test_a_hazard_is_the_stops_over_the_tokens_written() -> None:
    """Span 8-11: three of ten stop after 9 tokens, one runs and has 10, six have come further."""
    history = LengthHistory()
    for length in (9, 9, 9, *[40] * 4):
        history.add(length, stopped=True)
    hazard = history.hazard(*running(10, 20, 20), 1000)
    written = 3 * 1 + 2 + 6 * 4
    # The imagined sample: it ends there in 4 cases of 1,000, and writes 4 tokens but in the few in which it has ended.
    expected = (3 + 0.004) / (written + 4 * 0.99)
    assert hazard.up_to(12) - hazard.up_to(8) == pytest.approx(4 * expected)
    assert hazard.up_to(10) - hazard.up_to(8) == pytest.approx(2 * expected)


def test_who_is_cut_has_not_stopped() -> None:
    """Requests that each ask for their own length are cut at it; that teaches nothing about stopping."""
    cut, stopped = LengthHistory(), LengthHistory()
    for _ in range(100):
        cut.add(60, stopped=False)
        stopped.add(60, stopped=True)
    assert chance(cut.hazard(NOBODY, NOBODY, 200), 0, 64) > 0.95
    assert chance(stopped.hazard(NOBODY, NOBODY, 200), 0, 64) < 0.3


def test_that_short_samples_finish_first_makes_no_difference() -> None:
    """Of 400 that started together, those below 500 tokens have finished: what finished alone would say that none
    comes further; beside those that run it says what the whole batch will show in the end."""
    rng = random.Random(1)
    lengths = [min(16384, int(rng.lognormvariate(math.log(1000), 1.0)) + 1) for _ in range(400)]
    history = LengthHistory()
    for length in sorted(lengths):
        if length < 500:
            history.add(length, stopped=True)
    num_left = sum(length >= 500 for length in lengths)
    assert 250 < num_left < 350
    estimate = chance(history.hazard(*running(*[500] * num_left), 16384), 0, 500)
    assert estimate == pytest.approx(num_left / 400, abs=0.02)
    alone = chance(history.hazard(NOBODY, NOBODY, 16384), 0, 500)
    assert alone < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_many_samples_tell_the_distribution(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(100, 1024) for _ in range(1024)]
    history = LengthHistory()
    for length in lengths:
        history.add(length, stopped=True)
    hazard = history.hazard(NOBODY, NOBODY, 1024)
    for at in (64, 128, 256, 512, 768, 1000):
        assert chance(hazard, 0, at) == pytest.approx(sum(length > at for length in lengths) / 1024, abs=0.05)


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.booleans()), max_size=40),
    st.lists(st.integers(0, 2999), max_size=20),
    st.integers(1, 3000),
)
def test_hazards_are_positive_and_finite(samples: list[tuple[int, bool]], outputs: list[int], longest: int) -> None:
    history = LengthHistory()
    for length, stopped in samples:
        history.add(length, stopped)
    hazard = history.hazard(*running(*outputs), longest)
    totals = [hazard.up_to(length) for length in range(0, 2 * longest, 1 + longest // 50)]
    assert totals[0] == 0
    assert all(low < high < math.inf for low, high in pairwise(totals))
