"""Checks distributions of lengths: their bounds, their shape, their seeds, and every way to write one."""

from __future__ import annotations

import json
import math
import random
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.workload.job import MAX_LENGTH
from paged.workload.lengths import KEYS, Empirical, Fixed, Lengths, LogNormal, Pareto, Uniform, lengths_from

LENGTHS = st.integers(1, MAX_LENGTH)
BOUNDS = st.tuples(st.integers(1, 10_000), st.none() | st.integers(10_000, MAX_LENGTH))


def draw(lengths: Lengths, count: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    sampler = lengths.sampler()
    return [sampler(generator) for _ in range(count)]


@st.composite
def distributions(make: st.DrawFn) -> tuple[Lengths, int, int]:
    """A distribution and the bounds that its draws must keep."""
    low, high = make(BOUNDS)
    bounds = {"low": low, "high": high}
    kind = make(st.sampled_from(["fixed", "uniform", "lognormal", "pareto", "empirical"]))
    if kind == "fixed":
        length = make(LENGTHS)
        return Fixed(length=length), length, length
    if kind == "uniform":
        return Uniform(low=low, high=high or MAX_LENGTH), low, high or MAX_LENGTH
    if kind == "lognormal":
        median = make(st.floats(low, 1e6))
        return LogNormal(median=median, sigma=make(st.floats(0, 10)), **bounds), low, high or MAX_LENGTH
    if kind == "pareto":
        return (
            Pareto(scale=make(st.floats(low, 1e6)), alpha=make(st.floats(0.1, 100)), **bounds),
            low,
            high or MAX_LENGTH,
        )
    seen = make(st.lists(LENGTHS, min_size=1, max_size=20))
    return Empirical(lengths=tuple(seen)), min(seen), max(seen)


@given(distributions(), st.integers(0, 2**32))
def test_draws_are_whole_numbers_within_bounds_and_follow_from_the_seed(
    case: tuple[Lengths, int, int], seed: int
) -> None:
    lengths, low, high = case
    drawn = draw(lengths, 30, seed)
    assert all(type(length) is int and low <= length <= high for length in drawn)
    assert draw(lengths, 30, seed) == drawn
    assert draw(lengths, 7, seed) == drawn[:7]


def test_shapes_are_those_promised() -> None:
    count = 40_000
    lognormal = sorted(draw(LogNormal(median=1200, sigma=0.9), count))
    assert lognormal[count // 2] == pytest.approx(1200, rel=0.02)
    # One standard deviation above the median.
    assert lognormal[int(0.8413 * count)] == pytest.approx(1200 * math.exp(0.9), rel=0.03)
    pareto = draw(Pareto(scale=400, alpha=1.5), count)
    assert min(pareto) == 400
    assert sum(length > 1600 for length in pareto) / count == pytest.approx((400 / 1600) ** 1.5, rel=0.05)
    uniform = draw(Uniform(low=3, high=5), count)
    assert {length: pytest.approx(uniform.count(length), rel=0.05) for length in (3, 4, 5)} == dict.fromkeys(
        (3, 4, 5), count / 3
    )
    seen = draw(Empirical(lengths=(7, 9, 9, 9)), count)
    assert seen.count(9) / count == pytest.approx(0.75, rel=0.02)


def test_bounds_move_lengths_and_do_not_draw_again() -> None:
    free = draw(LogNormal(median=1200, sigma=0.9), 200)
    bounded = draw(LogNormal(median=1200, sigma=0.9, low=500, high=4096), 200)
    assert bounded == [min(4096, max(500, length)) for length in free]
    assert {500, 4096} <= set(bounded)


def test_draws_are_pinned() -> None:
    """The same on any machine: whoever changes a draw changes every published simulation."""
    assert draw(LogNormal(median=1200, sigma=0.9, low=16, high=4096), 5) == [1016, 1235, 2250, 1100, 4096]
    assert draw(Pareto(scale=400, alpha=1.3), 5) == [1673, 1191, 608, 503, 693]
    assert draw(Uniform(low=100, high=1024), 5) == [964, 494, 876, 1011, 530]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (512, Fixed(length=512)),
        ("fixed:512", Fixed(length=512)),
        ({"dist": "fixed", "length": 512}, Fixed(length=512)),
        ("uniform:100:1024", Uniform(low=100, high=1024)),
        ("lognormal:1200:0.9", LogNormal(median=1200, sigma=0.9)),
        ("lognormal:1200.5:1:16:4096", LogNormal(median=1200.5, sigma=1, low=16, high=4096)),
        (
            {"dist": "lognormal", "median": 1200, "sigma": 0.9, "low": 16, "high": None},
            LogNormal(median=1200, sigma=0.9, low=16),
        ),
        ("pareto:400:1.3", Pareto(scale=400, alpha=1.3)),
        ({"dist": "pareto", "scale": 400.0, "alpha": 1.3, "high": 9000}, Pareto(scale=400.0, alpha=1.3, high=9000)),
        ("empirical:a:b/results.jsonl", Empirical(path=Path("a:b/results.jsonl"))),
        ({"dist": "empirical", "lengths": [3, 4]}, Empirical(lengths=(3, 4))),
    ],
)
def test_every_way_to_write_a_distribution(value: object, expected: Lengths) -> None:
    assert lengths_from(value, "workload.output", outputs=True) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            None,
            "workload.output must be a whole number, a text such as lognormal:1200:0.9, or keys with dist, not null",
        ),
        (True, "workload.output must be a whole number, a text"),
        (3.5, "not 3.5"),
        ([3, 4], r"not \[3, 4\]"),
        (0, "workload.output.length must be a whole number, between 1 and 10000000, not 0"),
        (10**9, "workload.output.length must be a whole number, between 1 and 10000000"),
        ("lognormal", "workload.output must be a text such as fixed:512, uniform:100:1024, .* not 'lognormal'"),
        ("zipf:3", "workload.output must be a text such as"),
        ("uniform:1:2:3", "workload.output must be uniform:LOW:HIGH, not 'uniform:1:2:3'"),
        ("uniform:1", "workload.output must be uniform:LOW:HIGH, not 'uniform:1'"),
        (
            "lognormal:1200:0.9:16384",
            "must be lognormal:MEDIAN:SIGMA or lognormal:MEDIAN:SIGMA:LOW:HIGH, not 'lognormal:1200:0.9:16384'; "
            "workload.cap bounds outputs",
        ),
        ("pareto:400:1.3:9000", "must be pareto:SCALE:ALPHA or pareto:SCALE:ALPHA:LOW:HIGH, not .*; workload.cap"),
        ("lognormal:1200", "must be lognormal:MEDIAN:SIGMA or lognormal:MEDIAN:SIGMA:LOW:HIGH, not 'lognormal:1200'$"),
        ("lognormal:100:0.9:101:500", "workload.output.low must be at most the median, 100, not 101"),
        ("pareto:100:1:201:500", "workload.output.low must be at most the median, 200, not 201"),
        ({"dist": "lognormal", "median": 10, "sigma": 1, "low": 16}, "low must be at most the median, 10, not 16"),
        ("uniform:1:x", "workload.output must have numbers between its colons, not 'x'"),
        ("fixed:-3", "workload.output.length must be a whole number, between 1 and 10000000, not -3$"),
        ("uniform:5:3", "workload.output.high must be at least low, 5, not 3"),
        ("uniform:1.5:3", "workload.output.low must be a whole number, between 1 and"),
        ("lognormal:nan:1", "workload.output.median must be a number above 0"),
        ("lognormal:inf:1", "workload.output.median must be a number above 0"),
        ("lognormal:0:1", "workload.output.median must be a number above 0"),
        ("lognormal:10:-1", "workload.output.sigma must be a number between 0 and 10, not -1"),
        ("pareto:10:0", "workload.output.alpha must be a number between 0.1 and 100"),
        ({}, "workload.output.dist must be one of fixed, uniform, lognormal, pareto, empirical, not None"),
        ({"dist": ["fixed"]}, "workload.output.dist must be one of"),
        ({"dist": "lognormal", "median": "x", "sigma": 1}, "workload.output.median must be a number above 0"),
        (
            {"dist": "lognormal", "median": 5, "sigm": 1},
            r"workload.output.sigm is not a key of lognormal .* mean sigma\?",
        ),
        (
            {"dist": "fixed", "length": 5, "median": 3},
            "workload.output.median is not a key of fixed lengths; it has length",
        ),
        ({"dist": "empirical", "outputs": False}, "workload.output.outputs is not a key"),
        ({"dist": "empirical"}, "workload.output.lengths or path must be given, and not both"),
        ({"dist": "empirical", "lengths": [], "path": None}, "workload.output.lengths must hold at least one length"),
        (
            {"dist": "empirical", "lengths": [3, 0]},
            "workload.output.lengths must be whole numbers from 1 to 10000000, not 0",
        ),
        ({"dist": "empirical", "lengths": 5}, "workload.output.lengths must be a list of whole numbers, not 5"),
        ({"dist": "empirical", "path": 5}, "workload.output.path must be a text, not 5"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_key(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        lengths_from(value, "workload.output", outputs=True)
    assert "\n" not in str(caught.value)


def test_the_keys_named_are_those_of_the_distributions() -> None:
    kinds = (Fixed, Uniform, LogNormal, Pareto, Empirical)
    assert {field.name for kind in kinds for field in fields(kind)} | {"dist"} == {*KEYS, "outputs"}


def test_empirical_lengths_come_from_lists_of_numbers_and_from_traces(tmp_path: Path) -> None:
    numbers = tmp_path / "lengths.txt"
    numbers.write_text("3\n\n5\r\n3\n")
    assert set(draw(Empirical(path=numbers), 50)) == {3, 5}
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1,10,0\n2023-11-16 18:15:47,20,9\n")
    assert set(draw(Empirical(path=trace), 50)) == {1, 9}
    assert set(draw(Empirical(path=trace, outputs=False), 50)) == {10, 20}
    results = tmp_path / "results.jsonl"
    row = {"id": "a", "sample": 0, "prompt_token_ids": [1, 2], "token_ids": [3, 4, 5], "finish_reason": "stop"}
    results.write_text(json.dumps(row) + "\n")
    assert draw(Empirical(path=results), 3) == [3, 3, 3]
    assert draw(Empirical(path=tmp_path, outputs=False), 3) == [2, 2, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3\nx\n", "line 2: a length must be a whole number from 1 to 10000000, not 'x'"),
        ("3\n0\n", "line 2: a length must be"),
        ("3\n" + "9" * 30, "line 2: a length must be"),
        ("", "holds no request"),
    ],
)
def test_a_broken_file_of_lengths_is_told_when_it_is_read(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    lengths = Empirical(path=path)
    with pytest.raises(ValueError, match=f"workload.output.path must be a file of lengths or a trace: .*{message}"):
        lengths.sampler()
    with pytest.raises(ValueError, match=r"workload.prompt.path must be a file .* cannot be read"):
        Empirical(path=tmp_path / "absent", outputs=False).sampler()
