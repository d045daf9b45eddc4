"""Checks sampling against numpy references that share no code with it, and each row against itself in other company."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import special, stats
from torch import Tensor

from paged.kernels.exponential import mass_scale
from paged.kernels.philox import gumbel_noise
from paged.kernels.sampling import (
    SampledRows,
    _distribution,
    highest,
    log_of_mass,
    log_sum_exp,
    mass_bits,
    masses,
    nucleus_mass,
    probabilities,
    processed_logits,
    sample,
    token_logprobs,
    top_logprobs,
)
from paged.kernels.sampling_columns import LogitBias, Penalties, SamplingColumns

QWEN_VOCAB = 151_936
TOLERANCES = [(5, 1e-12), (99, 1e-12), (100, 1e-12), (260, 1e-12), (QWEN_VOCAB, 1e-7)]


def doubles(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_columns(num_rows: int, **values: Any) -> SamplingColumns:
    """Columns from numbers, one for all rows or a list; T = 1 and seed = row by default."""
    types = {"temperature": torch.float64, "top_p": torch.float64, "min_p": torch.float64}
    special_columns = {name: values.pop(name) for name in ("penalties", "bias") if name in values}
    values = {"temperature": 1.0, "seeds": list(range(num_rows)), "positions": 7} | values
    tensors = {
        f"{name}_R": torch.tensor(
            value if isinstance(value, list) else [value] * num_rows, dtype=types.get(name, torch.int64)
        )
        for name, value in values.items()
    }
    return SamplingColumns(**tensors, **special_columns)


def random_logits(generator: np.random.Generator, num_rows: int, vocab_size: int, kind: str = "mixed") -> Tensor:
    """Rows of all sorts: peaked, flat, with many ties, with duplicates of the highest, with -inf."""
    logits = generator.normal(size=(num_rows, vocab_size)) * generator.choice([0.3, 1, 3, 8], (num_rows, 1))
    for row in range(num_rows):
        sort = generator.integers(6) if kind == "mixed" else 5
        if sort == 0:
            logits[row] = np.round(logits[row])
        elif sort == 1:
            logits[row, generator.integers(vocab_size, size=3)] = logits[row].max()
        elif sort == 2:
            logits[row, generator.random(vocab_size) < 0.5] = -np.inf
            logits[row, generator.integers(vocab_size)] = 1.0
        elif sort == 3:
            logits[row] = 0.25
    return torch.from_numpy(logits.astype(np.float32))


def random_columns(generator: np.random.Generator, num_rows: int, vocab_size: int, *, adjust: bool) -> SamplingColumns:
    """Every feature, each in some rows only."""

    def choose(*options: Any) -> list[Any]:
        return [options[i] for i in generator.integers(len(options), size=num_rows)]

    penalties = bias = None
    if adjust:
        rows = np.flatnonzero(generator.random(num_rows) < 0.4)
        size = (len(rows), vocab_size)
        penalties = Penalties(
            rows_P=torch.from_numpy(rows),
            repetition_P=doubles(generator.choice([1.0, 1.3, 0.8], len(rows))),
            presence_P=doubles(generator.choice([0.0, 0.7, -0.4], len(rows))),
            frequency_P=doubles(generator.choice([0.0, 0.3, -0.1], len(rows))),
            output_counts_PV=torch.from_numpy(generator.poisson(0.4, size).astype(np.int32)),
            prompt_mask_PV=torch.from_numpy(generator.random(size) < 0.2),
        )
        biased = np.flatnonzero(generator.random(num_rows) < 0.3).repeat(2)
        tokens = [token for _ in biased[::2] for token in generator.choice(vocab_size, 2, replace=False)]
        bias = LogitBias(
            rows_N=torch.from_numpy(biased),
            token_ids_N=torch.tensor(tokens, dtype=torch.int64),
            values_N=doubles(generator.normal(size=len(biased)) * 3),
        )
    return make_columns(
        num_rows,
        temperature=choose(0.0, 0.0, 0.6, 1.0, 1.7),
        seeds=generator.integers(-(2**63), 2**63, num_rows).tolist(),
        positions=generator.integers(0, 40_000, num_rows).tolist(),
        top_k=choose(0, -1, 1, 2, 17, 1500, vocab_size, 10**9),
        top_p=choose(1.0, 1.0, 0.95, 0.5, 0.05),
        min_p=choose(0.0, 0.0, 0.01, 0.3, 1.0),
        penalties=penalties,
        bias=bias,
    )


def take_rows(columns: SamplingColumns, rows: list[int]) -> SamplingColumns:
    """Columns of a batch that consists of these rows, in this order."""
    index = torch.tensor(rows, dtype=torch.int64)
    values: dict[str, Any] = {}
    for field in fields(columns):
        value = getattr(columns, field.name)
        if isinstance(value, Tensor):
            values[field.name] = value[index]
    penalties, bias = columns.penalties, columns.bias
    if penalties is not None:
        places = [(rows.index(row), place) for place, row in enumerate(penalties.rows_P.tolist()) if row in rows]
        old = torch.tensor([place for _, place in places], dtype=torch.int64)
        taken = {f.name: getattr(penalties, f.name)[old] for f in fields(penalties)}
        values["penalties"] = Penalties(**taken | {"rows_P": torch.tensor([n for n, _ in places], dtype=torch.int64)})
    if bias is not None:
        places = [(rows.index(row), place) for place, row in enumerate(bias.rows_N.tolist()) if row in rows]
        old = torch.tensor([place for _, place in places], dtype=torch.int64)
        new = torch.tensor([n for n, _ in places], dtype=torch.int64)
        values["bias"] = LogitBias(new, bias.token_ids_N[old], bias.values_N[old])
    return SamplingColumns(**values)


def bits(values: Tensor) -> Tensor:
    """The bit pattern, so that NaN equals NaN and 0 differs from -0."""
    views = {torch.float32: torch.int32, torch.float64: torch.int64}
    return values.view(views[values.dtype]) if values.dtype in views else values


def assert_same_rows(result: SampledRows, expected: SampledRows, rows: Any = slice(None)) -> None:
    for field in fields(result):
        here, there = getattr(result, field.name), getattr(expected, field.name)[rows]
        assert torch.equal(bits(here), bits(there)), (field.name, here, there)


# ---- An independent reference


def reference_row(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Probabilities of one row of processed logits, float64: the straight way, a full sort and a running sum."""
    scaled = (logits.astype(np.float64) - logits.max()) / (temperature or 1.0)
    weights = np.exp(scaled).astype(np.longdouble)
    order = np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))
    kept = [token for token in order if weights[token] >= min_p]
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1:
        running = np.cumsum(weights[kept])
        kept = kept[: int(np.searchsorted(running, np.longdouble(top_p) * running[-1], side="left")) + 1]
    result = np.zeros(len(logits))
    result[kept] = (weights[kept] / weights[kept].sum()).astype(np.float64)
    return result


def reference_penalties(
    logits: list[float], prompt: set[int], output: list[int], repetition: float, presence: float, frequency: float
) -> list[float]:
    """One token at a time, from the definitions."""
    result = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            logit = logit / repetition if logit > 0 else logit * repetition
        logit -= frequency * output.count(token)
        logit -= presence if token in output else 0.0
        result.append(logit)
    return result


# ---- Masses


def test_mass_bits_fit_62_bits() -> None:
    assert [mass_bits(size) for size in (1, 2, 1024, 1025, 32_000, QWEN_VOCAB)] == [52, 52, 52, 51, 47, 44]
    for size in (1, 5, 1024, 1025, QWEN_VOCAB):
        total = masses(torch.zeros(1, size), doubles([1.0])).sum()
        assert int(total) == size * 2 ** mass_bits(size) <= 2**62


@pytest.mark.parametrize("vocab_size", [5, 99, 260, QWEN_VOCAB])
def test_masses_are_the_whole_weights(vocab_size: int) -> None:
    logits = random_logits(np.random.default_rng(3), 4, vocab_size)
    temperature = [0.6, 1.0, 0.0, 1.7]
    result = masses(logits, doubles(temperature)).numpy()
    for row, divisor in enumerate((0.6, 1.0, 1.0, 1.7)):
        values = logits[row].numpy().astype(np.float64)
        exact = np.exp((values - values.max()) / divisor) * 2.0 ** mass_bits(vocab_size)
        # The long one is rounded: half a unit, and two units in the last place of numpy's exponential. The short one is
        # cut, and the distance from the highest logit was rounded to fp32.
        far = np.where(np.isneginf(values), 0, (values.max() - values) / divisor)
        unit, error = (
            (1, 2e-7 + far * 2.0**-24) if mass_scale(mass_bits(vocab_size), logits.dtype).is_short else (0.5, 2.0**-51)
        )
        assert (np.abs(result[row] - exact) <= unit + exact * error).all()
        assert result[row].max() == 2 ** mass_bits(vocab_size)
        assert (result[row][np.isneginf(values)] == 0).all()


def test_subtract_before_dividing() -> None:
    """Dividing first would round large logits before their small difference is taken."""
    logits = doubles([[1e6 + 1 / 3, 1e6, 1e6 - 7.7]])
    expected = [math.exp((value - logits[0, 0].item()) / 0.6) * 2**52 for value in logits[0].tolist()]
    assert masses(logits, doubles([0.6]))[0].tolist() == pytest.approx(expected, rel=0, abs=4)


@pytest.mark.parametrize("num_shards", [2, 3, 4])
@pytest.mark.parametrize("vocab_size", [5, 99, 100, QWEN_VOCAB])
def test_shards_of_the_vocabulary_equal_the_row(vocab_size: int, num_shards: int) -> None:
    """Masses, log-sum-exp and the draw, put together from shards, are those of the full row, bit for bit."""
    generator = np.random.default_rng(4)
    logits, temperature = random_logits(generator, 3, vocab_size), doubles([0.6, 1.0, 0.0])
    seeds, positions = torch.tensor([1, -2, 3]), torch.tensor([5, 6, 7])
    edges = [vocab_size * shard // num_shards for shard in range(num_shards + 1)]
    row_max, size = logits.amax(1), vocab_size
    total, best, best_token = torch.zeros(3, dtype=torch.int64), torch.full((3,), -torch.inf).double(), torch.zeros(3)
    for start, end in pairwise(edges):
        part = masses(logits[:, start:end], temperature, row_max_R=row_max, vocab_size=size)
        total += part.sum(1)
        assert torch.equal(part, masses(logits, temperature)[:, start:end])
        scaled = (logits[:, start:end].double() - row_max.double()[:, None]) / temperature.clamp_min(0.6)[:, None]
        scaled[2] *= 0.6
        noise = gumbel_noise(seeds, positions, end - start, start)
        noise[2] = 0
        score, token = (scaled + noise).max(1)
        best_token = torch.where(score > best, token + start, best_token)
        best = torch.maximum(best, score)
    assert torch.equal(log_of_mass(total, vocab_size), log_sum_exp(logits, temperature))
    columns = SamplingColumns(temperature_R=temperature, seeds_R=seeds, positions_R=positions)
    assert torch.equal(sample(logits, columns).tokens_R, best_token.long())


def test_masses_add_up_in_any_order_where_floats_do_not() -> None:
    logits = random_logits(np.random.default_rng(5), 8, QWEN_VOCAB, kind="plain")
    shuffled = logits[:, torch.from_numpy(np.random.default_rng(6).permutation(QWEN_VOCAB))]
    temperature = torch.ones(8, dtype=torch.float64)
    assert torch.equal(log_sum_exp(logits, temperature), log_sum_exp(shuffled, temperature))
    sums = [values.double().exp().sum(1) for values in (logits, shuffled)]
    assert not torch.equal(*sums), "the test needs a case that differs"


# ---- Log-probabilities


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(
    ("vocab_size", "tolerance"), [(5, 1e-12), (99, 1e-12), (100, 1e-12), (260, 1e-12), (QWEN_VOCAB, 1e-8)]
)
def test_token_logprobs_equal_log_softmax(vocab_size: int, tolerance: float, temperature: float) -> None:
    generator = np.random.default_rng(7)
    logits = random_logits(generator, 6, vocab_size, kind="plain")
    ids = torch.from_numpy(generator.integers(vocab_size, size=(6, 20)))
    ids[:, 0] = logits.argmax(1)
    ids[:, 1] = logits.argmin(1)
    column = torch.full((6,), temperature, dtype=torch.float64)
    expected = special.log_softmax(logits.numpy().astype(np.float64) / temperature, axis=1)
    expected = np.take_along_axis(expected, ids.numpy(), 1)
    scale = np.maximum(1, np.abs(expected))

    wide = token_logprobs(logits.double(), column, ids)
    assert wide.dtype == torch.float64
    assert (np.abs(wide.numpy() - expected) <= tolerance * scale).all()
    narrow = token_logprobs(logits, column, ids)
    assert narrow.dtype == torch.float32
    assert (np.abs(narrow.numpy() - expected) <= 1e-6 * scale).all()
    if not mass_scale(mass_bits(vocab_size), logits.dtype).is_short:
        assert torch.equal(narrow, wide.float()), "rounded once"
    assert torch.equal(token_logprobs(logits, column, ids[:, 3]), narrow[:, 3])


@pytest.mark.parametrize("kind", ["peaked", "wide", "flat", "level", "two tokens"])
def test_short_masses_cost_a_logprob_nothing(kind: str) -> None:
    """Against fp64 they err by less than fp32 can show of most log-probabilities, and no more than torch's of fp32."""
    generator = np.random.default_rng(27)
    scale = {"peaked": 8.0, "wide": 3.0, "flat": 1.0, "level": 0.01, "two tokens": 0.0}[kind]
    logits = torch.from_numpy(generator.standard_normal((3, QWEN_VOCAB), dtype=np.float32) * np.float32(scale))
    if kind == "two tokens":
        logits[:, 7], logits[:, 100] = 90.0, torch.tensor([80.0, 88.5, 90.0])
    temperature = doubles([0.6, 1.0, 1.7])
    scaled = logits.double() / temperature[:, None]
    exact = torch.log_softmax(scaled, 1)
    lse = torch.logsumexp(scaled, 1) - scaled.amax(1)
    assert (log_sum_exp(logits, temperature) - lse).abs().max() < 1e-7
    ids = torch.cat([torch.arange(0, QWEN_VOCAB, 97), torch.tensor([7, 100])]).expand(3, -1)
    ours, torchs = (
        (logprobs.double() - exact.gather(1, ids)).abs()
        for logprobs in (token_logprobs(logits, temperature, ids), torch.log_softmax(scaled.float(), 1).gather(1, ids))
    )
    assert (ours.amax(1) <= torchs.amax(1)).all()
    assert ours.square().mean() <= torchs.square().mean()


def test_log_sum_exp_is_relative_to_the_highest() -> None:
    logits = random_logits(np.random.default_rng(8), 5, 260, kind="plain").double()
    expected = torch.logsumexp(logits / 0.7, 1) - logits.amax(1) / 0.7
    torch.testing.assert_close(log_sum_exp(logits, torch.full((5,), 0.7).double()), expected, rtol=0, atol=1e-7)


def test_logprobs_with_minus_infinity() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]])
    result = token_logprobs(logits, doubles([1.0]), torch.tensor([[0, 1]]))
    assert result[0].tolist() == pytest.approx([-math.log(2), -math.inf], rel=1e-6)


@pytest.mark.parametrize(("vocab_size", "k"), [(5, 3), (5, 9), (260, 20), (5000, 20), (5000, 1024), (99, 0), (5000, 0)])
def test_top_logprobs_are_in_order(vocab_size: int, k: int) -> None:
    """Ties come by id, also where the last one of the chosen is tied with tokens that are left out."""
    generator = np.random.default_rng(9)
    logits = torch.cat(
        [random_logits(generator, 12, vocab_size), torch.zeros(1, vocab_size), torch.zeros(1, vocab_size)]
    )
    logits[-1, ::2] = -0.0
    temperature = torch.full((14,), 0.6, dtype=torch.float64)
    ids, logprobs = top_logprobs(logits, temperature, k)
    assert ids.shape == logprobs.shape == (14, min(k, vocab_size))
    for row in range(14):
        order = np.lexsort((np.arange(vocab_size), -logits[row].numpy()))
        assert ids[row].tolist() == order[:k].tolist()
    assert torch.equal(logprobs, token_logprobs(logits, temperature, ids))


def test_highest_is_the_same_with_and_without_a_sort() -> None:
    logits = random_logits(np.random.default_rng(10), 20, 6000)
    full = highest(logits, 6000)
    for k in (1, 7, 1024, 1500):
        assert torch.equal(highest(logits, k), full[:, :k])


# ---- Truncation


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(5, 120), (99, 100), (260, 100), (5000, 40)])
def test_distribution_equals_the_reference(vocab_size: int, num_rows: int) -> None:
    generator = np.random.default_rng(vocab_size)
    logits = random_logits(generator, num_rows, vocab_size)
    columns = random_columns(generator, num_rows, vocab_size, adjust=True)
    compare_with_reference(logits, columns)


def test_distribution_equals_the_reference_at_full_size() -> None:
    """Peaked rows settle among the candidates; a flat row, and a top_k beyond them, take the full sort."""
    logits = random_logits(np.random.default_rng(11), 6, QWEN_VOCAB, kind="plain")
    logits *= torch.tensor([0.5, 3.0, 1.5, 3.0, 1.5, 1.5])[:, None] / logits.std(1, keepdim=True)
    columns = make_columns(
        6,
        temperature=[1.0, 0.6, 1.0, 0.8, 1.0, 1.0],
        top_p=[0.9, 0.95, 1.0, 0.97, 1.0, 0.05],
        top_k=[0, 0, 3000, 20, 0, 3000],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.02, 0.0],
    )
    kept = compare_with_reference(logits, columns)
    assert kept[0] > 1024 > kept[1] > 1
    assert kept[2] == 3000
    assert 20 > kept[3] > 1
    assert kept[4] > 1
    assert 1024 > kept[5] > 1, "the nucleus of more tokens than are candidates lies within them"


def kept_tokens(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """The tokens that ``sample`` may draw, bool [R, V]; a greedy row's are those it would have at temperature 1."""
    state = _distribution(logits, columns)
    kept = (state.scaled_RV > -torch.inf) & ~state.nan_R.unsqueeze(1)
    if state.truncated_B is not None:
        kept[state.truncated_B] &= state.keep_BV
    return kept


def compare_with_reference(logits: Tensor, columns: SamplingColumns) -> list[int]:
    processed = processed_logits(logits, columns).numpy()
    result, kept = probabilities(logits, columns).numpy(), kept_tokens(logits, columns).numpy()
    assert columns.top_k_R is not None
    assert columns.top_p_R is not None
    assert columns.min_p_R is not None
    for row in range(len(logits)):
        settings = (columns.temperature_R, columns.top_k_R, columns.top_p_R, columns.min_p_R)
        expected = reference_row(processed[row], *(column[row].item() for column in settings))
        assert np.abs(result[row] - expected).max() < 1e-6
        # Relative too: a wrong normalization of a small nucleus must not hide below 1e-6.
        assert (np.abs(result[row] - expected) <= 1e-6 * expected + 1e-11).all()
        assert (kept[row] == (expected > 0)).all()
    return [int(count) for count in kept.sum(1)]


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.5, 0.95, math.nextafter(1.0, 0.0)])
@pytest.mark.parametrize(("vocab_size", "num_rows"), [(5, 40), (260, 40), (5000, 12)])
def test_nucleus_is_minimal_exactly(vocab_size: int, num_rows: int, top_p: float) -> None:
    """In exact arithmetic: the kept mass reaches the share, and without its last token it does not."""
    logits = random_logits(np.random.default_rng(12), num_rows, vocab_size)
    columns = make_columns(num_rows, top_p=top_p, temperature=0.8)
    kept, mass = kept_tokens(logits, columns), masses(logits, columns.temperature_R)
    order = highest(logits, vocab_size)
    for row in range(num_rows):
        share = Fraction(top_p) * int(mass[row].sum())
        length = int(kept[row].sum())
        assert kept[row][order[row, :length]].all(), "a prefix of the order"
        sums = mass[row][order[row, :length]].cumsum(0).tolist()
        assert sums[-1] >= share
        assert length == 1 or sums[-2] < share


def test_nucleus_of_equal_tokens() -> None:
    """Half of ten equal tokens is five exactly, and the next larger share takes a sixth; the lowest ids stay."""
    for top_p, length in ((0.5, 5), (math.nextafter(0.5, 1), 6), (0.1, 1), (0.3, 3), (0.9999, 10), (1e-300, 1)):
        kept = kept_tokens(torch.zeros(1, 10), make_columns(1, top_p=top_p))[0].tolist()
        # 0.1 and 0.3 are not these decimal numbers: the first is a little more, the second a little less.
        expected = math.ceil(Fraction(top_p) * 10)
        assert kept == [True] * expected + [False] * (10 - expected)
        assert expected == (2 if top_p == 0.1 else length)


@settings(max_examples=500, deadline=None)
@given(
    st.integers(1, 2**62) | st.sampled_from([1, 2**31 - 1, 2**31, 2**62 - 1, 2**62]),
    st.floats(0, 1) | st.sampled_from([5e-324, 2.0**-62, 2.0**-63, 0.5, 1 - 2.0**-53, 1.0]),
)
@example(2**62, 0.001)
@example(2**62, 3 * 2.0**-63)
@example(3 * 2**61, 2.0**-10)
def test_nucleus_mass_is_exact(total: int, top_p: float) -> None:
    expected = max(1, math.ceil(Fraction(top_p) * total))
    assert nucleus_mass(torch.tensor([total]), doubles([top_p])).tolist() == [expected]


def test_top_k_comes_before_top_p() -> None:
    """0.4, 0.3, 0.2, 0.1: of the first two, 0.55 needs one; of all four it would need two."""
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    assert kept_tokens(logits, make_columns(1, top_k=2, top_p=0.55))[0].tolist() == [False, False, False, True]
    assert kept_tokens(logits, make_columns(1, top_p=0.55))[0].tolist() == [False, False, True, True]
    assert kept_tokens(logits, make_columns(1, top_k=2))[0].tolist() == [False, False, True, True]
    assert kept_tokens(logits, make_columns(1, min_p=0.6))[0].tolist() == [False, False, True, True]
    assert kept_tokens(logits, make_columns(1, min_p=0.6, top_p=0.55))[0].tolist() == [False, False, False, True]


def test_top_p_of_one_keeps_tokens_without_mass() -> None:
    logits = torch.tensor([[0.0, -100.0, -200.0, -torch.inf]])
    for columns, expected in (
        (make_columns(1, top_p=1.0, top_k=2), 2),
        (make_columns(1, top_p=1.0), 3),
        (make_columns(1, top_p=0.999, top_k=2), 1),
    ):
        assert int(kept_tokens(logits, columns).sum()) == expected


def test_min_p_follows_the_temperature() -> None:
    logits = torch.tensor([[0.0, -1.0, -2.0]])
    for temperature, expected in ((1.0, 2), (0.5, 1), (2.5, 3)):
        columns = make_columns(1, temperature=temperature, min_p=0.3)
        assert int(kept_tokens(logits, columns).sum()) == expected


def test_top_k_of_one_is_greedy() -> None:
    logits = random_logits(np.random.default_rng(13), 60, 99)
    columns = make_columns(60, temperature=1.7, top_k=1)
    assert torch.equal(sample(logits, columns).tokens_R, sample(logits, make_columns(60, temperature=0.0)).tokens_R)
    assert sample(logits, columns).behavior_logprobs_R.tolist() == [0.0] * 60


# ---- Penalties and bias


def test_penalties_equal_a_naive_reference() -> None:
    generator = np.random.default_rng(14)
    vocab_size, num_rows = 23, 40
    logits = random_logits(generator, num_rows, vocab_size)
    rows = generator.permutation(num_rows)[:25]
    prompts = [set(generator.integers(vocab_size, size=6).tolist()) for _ in rows]
    outputs = [generator.integers(vocab_size, size=generator.integers(12)).tolist() for _ in rows]
    values = [(generator.uniform(0.5, 2), generator.uniform(-2, 2), generator.uniform(-2, 2)) for _ in rows]
    penalties = Penalties(
        rows_P=torch.from_numpy(rows),
        repetition_P=doubles([repetition for repetition, _, _ in values]),
        presence_P=doubles([presence for _, presence, _ in values]),
        frequency_P=doubles([frequency for _, _, frequency in values]),
        output_counts_PV=torch.tensor([[o.count(t) for t in range(vocab_size)] for o in outputs], dtype=torch.int32),
        prompt_mask_PV=torch.tensor([[token in prompt for token in range(vocab_size)] for prompt in prompts]),
    )
    expected = logits.double()
    for row, prompt, output, numbers in zip(rows, prompts, outputs, values, strict=True):
        expected[row] = doubles(reference_penalties(logits[row].double().tolist(), prompt, output, *numbers))
    given_logits = logits.clone()
    assert torch.equal(processed_logits(logits, make_columns(num_rows, penalties=penalties)), expected)
    assert torch.equal(logits, given_logits), "raw logits are not changed"


def test_repetition_reaches_the_prompt_and_the_others_do_not() -> None:
    penalties = Penalties(
        rows_P=torch.tensor([0]),
        repetition_P=doubles([2.0]),
        presence_P=doubles([10.0]),
        frequency_P=doubles([100.0]),
        output_counts_PV=torch.tensor([[0, 0, 3, 1]], dtype=torch.int32),
        prompt_mask_PV=torch.tensor([[False, True, False, False]]),
    )
    processed = processed_logits(torch.tensor([[1.0, 1.0, 1.0, -1.0]]), make_columns(1, penalties=penalties))
    assert processed.tolist() == [[1.0, 0.5, 0.5 - 310, -2.0 - 110]]


def test_bias_forces_and_forbids() -> None:
    logits = random_logits(np.random.default_rng(15), 50, 30, kind="plain")
    first = logits.argmax(1)
    forced, rows = (first + 1) % 30, torch.arange(50)
    forcing = LogitBias(rows, forced, torch.full((50,), 1e4, dtype=torch.float64))
    forbidding = LogitBias(rows, first, torch.full((50,), -1e4, dtype=torch.float64))
    for temperature in (0.0, 1.0):
        plain = make_columns(50, temperature=temperature)
        result = sample(logits, replace(plain, bias=forcing))
        assert torch.equal(result.tokens_R, forced)
        assert torch.equal(result.logprobs_R, token_logprobs(logits, plain.temperature_R, forced))
        assert result.behavior_logprobs_R.tolist() == [0.0] * 50
        assert not (sample(logits, replace(plain, bias=forbidding)).tokens_R == first).any()
        assert (sample(logits, plain).tokens_R == first).any()


def test_penalties_come_before_bias() -> None:
    penalties = Penalties(
        torch.tensor([0]),
        doubles([2.0]),
        doubles([0.0]),
        doubles([0.0]),
        torch.ones(1, 2, dtype=torch.int32),
        torch.zeros(1, 2, dtype=torch.bool),
    )
    bias = LogitBias(torch.tensor([0]), torch.tensor([1]), doubles([3.0]))
    processed = processed_logits(torch.ones(1, 2), make_columns(1, penalties=penalties, bias=bias))
    assert processed.tolist() == [[0.5, 3.5]]


# ---- The draw


def frequencies(logits: Tensor, columns: SamplingColumns) -> np.ndarray:
    return np.bincount(sample(logits, columns).tokens_R, minlength=logits.shape[1])


@pytest.mark.parametrize("vary", ["positions", "seeds"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6}, {"temperature": 1.5, "top_p": 0.8}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.2}],
    ids=str,
)
def test_frequencies_follow_the_distribution(settings: dict[str, Any], vary: str) -> None:
    num_rows, vocab_size = 20_000, 13
    generator = np.random.default_rng(16)
    row = generator.normal(size=vocab_size).astype(np.float32)
    row[3], row[4] = -np.inf, row[5]
    other = "seeds" if vary == "positions" else "positions"
    columns = make_columns(num_rows, **{vary: list(range(num_rows)), other: 12345}, **settings)
    counts = frequencies(torch.from_numpy(row).expand(num_rows, vocab_size), columns)
    settings = {"temperature": 1.0} | settings
    expected = reference_row(row, **settings)
    assert counts[expected == 0].sum() == 0
    support = expected > 0
    assert stats.chisquare(counts[support], expected[support] * num_rows).pvalue > 1e-3
    # The same test does notice a temperature that is off by a quarter.
    wrong = reference_row(row, **settings | {"temperature": settings["temperature"] * 1.25})[support]
    assert stats.chisquare(counts[support], wrong / wrong.sum() * num_rows).pvalue < 1e-4


@pytest.mark.parametrize("step", [{"positions": 1}, {"seeds": 1}])
def test_neighbouring_draws_are_independent(step: dict[str, int]) -> None:
    num_rows, vocab_size = 20_000, 4
    logits = torch.tensor([0.5, 0.0, -0.5, 0.2]).expand(num_rows, vocab_size)
    draws = []
    for shift in (0, 1):
        base = torch.arange(num_rows)
        seeds, positions = base * 2, base * 3
        shifted = SamplingColumns(
            temperature_R=torch.ones(num_rows, dtype=torch.float64),
            seeds_R=seeds + shift * step.get("seeds", 0),
            positions_R=positions + shift * step.get("positions", 0),
        )
        draws.append(sample(logits, shifted).tokens_R.numpy())
    table = np.zeros((vocab_size, vocab_size))
    np.add.at(table, tuple(draws), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_noise_is_keyed_by_seed_position_and_token_alone() -> None:
    """Equal (seed, position) draw equally in any row and step; a change of either changes the draws."""
    logits = torch.randn(1, 260, generator=torch.Generator().manual_seed(0)).expand(64, 260)
    alike = sample(logits, make_columns(64, seeds=5, positions=9)).tokens_R
    assert (alike == alike[0]).all()
    for columns in (make_columns(64, seeds=5, positions=list(range(64))), make_columns(64, positions=9)):
        assert len(set(sample(logits, columns).tokens_R.tolist())) > 20
    assert sample(logits[:1], make_columns(1, seeds=5, positions=9)).tokens_R[0] == alike[0]


def test_draw_is_the_maximum_of_score_and_noise() -> None:
    generator = np.random.default_rng(17)
    logits = random_logits(generator, 50, 260)
    columns = replace(random_columns(generator, 50, 260, adjust=False), top_k_R=None, top_p_R=None, min_p_R=None)
    noise = gumbel_noise(columns.seeds_R, columns.positions_R, 260).numpy()
    tokens = sample(logits, columns).tokens_R
    for row in range(50):
        temperature = columns.temperature_R[row].item()
        values = logits[row].numpy().astype(np.float64)
        score = (values - values.max()) / temperature + noise[row] if temperature else values
        assert tokens[row] == score.argmax()


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0], [-0.0, 0.0, -1.0, 0.0, -2.0], [-torch.inf] * 4 + [-5.0]])
    assert sample(logits, make_columns(3, temperature=0.0)).tokens_R.tolist() == [1, 0, 4]
    assert sample(logits, make_columns(3, temperature=[0.0, 1.0, 0.0], top_p=0.5)).tokens_R[[0, 2]].tolist() == [1, 4]


def test_greedy_pays_no_heed_to_seed_and_position() -> None:
    logits = random_logits(np.random.default_rng(18), 30, 99)
    first = sample(logits, make_columns(30, temperature=0.0))
    assert_same_rows(sample(logits, make_columns(30, temperature=0.0, seeds=3, positions=99)), first)
    assert torch.equal(first.tokens_R, logits.argmax(1))


def test_logprob_is_of_the_raw_distribution_and_behaviour_of_the_truncated_one() -> None:
    """The fault that spoils an importance ratio: the two confused, or the temperature left out of one of them."""
    logits = random_logits(np.random.default_rng(19), 80, 260, kind="plain")
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        for temperature in (0.6, 1.0):
            columns = make_columns(80, temperature=temperature, top_p=0.7, top_k=30)
            result = sample(logits.to(dtype), columns)
            assert result.logprobs_R.dtype == result.behavior_logprobs_R.dtype == dtype
            raw = torch.log_softmax(logits.double() / temperature, 1).gather(1, result.tokens_R[:, None])[:, 0]
            truncated = [reference_row(row, temperature, 30, 0.7) for row in logits.numpy()]
            behavior = np.log(np.array(truncated)[np.arange(80), result.tokens_R])
            scale = raw.abs().clamp_min(1)
            assert ((result.logprobs_R - raw).abs() <= tolerance * scale).all()
            assert result.behavior_logprobs_R.numpy() == pytest.approx(behavior, abs=tolerance * 20)
            assert (result.behavior_logprobs_R - result.logprobs_R).mean() > 0.1
    greedy = sample(logits, make_columns(80, temperature=0.0))
    expected = torch.log_softmax(logits.double(), 1).amax(1)
    assert (greedy.logprobs_R - expected).abs().max() < 1e-6


def test_logprobs_agree_with_scoring_bit_for_bit() -> None:
    """`token_logprobs` scores a text; sampling it must have given the same bits, whatever the processors did."""
    generator = np.random.default_rng(20)
    for vocab_size in (99, 260, 5000):
        logits = random_logits(generator, 40, vocab_size)
        columns = random_columns(generator, 40, vocab_size, adjust=True)
        result = sample(logits, columns)
        assert torch.equal(result.logprobs_R, token_logprobs(logits, columns.temperature_R, result.tokens_R))
        chosen = probabilities(logits, columns).gather(1, result.tokens_R[:, None])[:, 0]
        assert result.behavior_logprobs_R.exp().numpy() == pytest.approx(chosen.numpy(), rel=1e-5)


# ---- Rows alone, in company, and in bad company


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("vocab_size", "num_rows"), [(5, 33), (99, 33), (260, 33), (5000, 15)])
def test_a_row_is_the_same_in_any_company(vocab_size: int, num_rows: int, dtype: torch.dtype) -> None:
    generator = np.random.default_rng(21)
    logits = random_logits(generator, num_rows, vocab_size).to(dtype)
    columns = random_columns(generator, num_rows, vocab_size, adjust=True)
    together = sample(logits, columns)
    tops = top_logprobs(logits, columns.temperature_R, 5)
    shuffled = generator.permutation(num_rows).tolist()
    batches = [[row] for row in range(num_rows)] + [shuffled, shuffled[:7], shuffled[3:20], list(range(1, num_rows))]
    for rows in batches:
        assert_same_rows(sample(logits[rows], take_rows(columns, rows)), together, rows)
        ids, logprobs = top_logprobs(logits[rows], columns.temperature_R[rows], 5)
        assert torch.equal(ids, tops[0][rows])
        assert torch.equal(bits(logprobs), bits(tops[1][rows]))
    for kind in (probabilities, kept_tokens):
        assert torch.equal(kind(logits[shuffled], take_rows(columns, shuffled)), kind(logits, columns)[shuffled])


def test_a_row_is_the_same_at_full_size() -> None:
    """Here rows run in tiles, and a flat neighbour sends itself, not this row, to the full sort."""
    logits = random_logits(np.random.default_rng(22), 5, QWEN_VOCAB, kind="plain")
    logits[2] *= 0.01
    columns = make_columns(5, temperature=[0.6, 1.0, 1.0, 0.0, 0.9], top_p=[0.95, 1.0, 0.9, 1.0, 0.5])
    together = sample(logits, columns)
    for rows in ([0], [1], [2], [3], [4], [4, 0], [1, 3, 0]):
        assert_same_rows(sample(logits[rows], take_rows(columns, rows)), together, rows)


def test_columns_that_ask_for_nothing_change_nothing() -> None:
    """The absent column, and a column of neutral values, give the same bits; so do neutral penalties."""
    logits = random_logits(np.random.default_rng(23), 20, 260)
    plain = make_columns(20, temperature=[0.0, 0.7] * 10)
    neutral = make_columns(20, temperature=[0.0, 0.7] * 10, top_k=0, top_p=1.0, min_p=0.0)
    none = torch.empty(0, dtype=torch.int64)
    penalties = Penalties(
        none, *[none.double()] * 3, torch.empty(0, 260, dtype=torch.int32), torch.empty(0, 260, dtype=torch.bool)
    )
    expected = sample(logits, plain)
    assert_same_rows(sample(logits, neutral), expected)
    assert_same_rows(sample(logits, replace(plain, penalties=penalties)), expected)
    assert_same_rows(sample(logits, replace(plain, bias=LogitBias(none, none, none.double()))), expected)


@pytest.mark.parametrize("vocab_size", [5, 260, 5000])
def test_a_row_without_a_distribution_is_flagged_alone(vocab_size: int) -> None:
    generator = np.random.default_rng(24)
    num_rows = 24
    logits = random_logits(generator, num_rows, vocab_size)
    columns = random_columns(generator, num_rows, vocab_size, adjust=True)
    healthy = sample(logits, columns)
    assert not healthy.nan_R.any()
    bad = list(range(1, num_rows, 2))
    for place, row in enumerate(bad):
        if place % 4 == 0:
            logits[row, generator.integers(vocab_size)] = torch.nan
        elif place % 4 == 1:
            logits[row, generator.integers(vocab_size)] = torch.inf
        elif place % 4 == 2:
            logits[row] = -torch.inf
        else:
            logits[row] = torch.nan
    result = sample(logits, columns)
    assert result.nan_R.tolist() == [row in bad for row in range(num_rows)]
    good = list(range(0, num_rows, 2))
    assert_same_rows(SampledRows(*(getattr(result, f.name)[good] for f in fields(result))), healthy, good)
    assert (result.tokens_R[bad] == 0).all()
    assert result.logprobs_R[bad].isnan().all()
    assert result.behavior_logprobs_R[bad].isnan().all()
    assert probabilities(logits, columns)[bad].isnan().all()
    assert not kept_tokens(logits, columns)[bad].any()
    ids, logprobs = top_logprobs(logits, columns.temperature_R, 3)
    assert logprobs[bad].isnan().all()
    assert ((ids >= 0) & (ids < vocab_size)).all()
    assert not logprobs[good].isnan().any()


def test_an_overflow_by_a_penalty_is_flagged() -> None:
    penalties = Penalties(
        torch.tensor([1]),
        doubles([1e-320]),
        doubles([0.0]),
        doubles([0.0]),
        torch.ones(1, 5, dtype=torch.int32),
        torch.zeros(1, 5, dtype=torch.bool),
    )
    result = sample(torch.ones(2, 5), make_columns(2, penalties=penalties))
    assert result.nan_R.tolist() == [False, True]
    assert result.logprobs_R.isnan().tolist() == [False, True]


def test_no_rows() -> None:
    result = sample(torch.empty(0, 7), make_columns(0))
    assert [len(getattr(result, field.name)) for field in fields(result)] == [0] * 4


@pytest.mark.parametrize("function", [torch.exp, torch.log])
def test_elementwise_functions_know_no_position(function: Any) -> None:
    """What the equality of rows rests on: these two give an element the same bits at any place of any vector."""
    values = torch.from_numpy(np.random.default_rng(25).uniform(0, 1, 3000))
    values = values * -40 if function is torch.exp else values
    expected = torch.cat([function(value.view(1)) for value in values])
    for start in range(0, 20):
        for length in (1, 3, 7, 8, 9, 31, 33, 100, 260, 2900):
            part = slice(start, start + length)
            assert torch.equal(function(values[part]), expected[part])
            assert torch.equal(function(values[part].clone()), expected[part])
        assert torch.equal(function(values[start::3]), expected[start::3])
        assert torch.equal(function(values[:2996].view(-1, 7).t()), expected[:2996].view(-1, 7).t())


def test_exponential_is_monotone_and_exact_at_zero() -> None:
    """Masses fall along the order of the logits, as min_p assumes, and the likeliest token's is 2^s exactly."""
    values = torch.zeros(1)
    for scale in (1e-15, 1e-9, 1e-3, 1.0, 40.0):
        values = torch.from_numpy(np.sort(np.random.default_rng(26).uniform(-scale, 0, 300_000)))
        assert (values.exp().diff() >= 0).all()
    assert (torch.zeros(9, dtype=torch.float64).exp() == 1).all()


def test_wrong_arguments_are_caught() -> None:
    logits, columns = torch.zeros(2, 5), make_columns(2)
    for wrong in (
        replace(columns, temperature_R=columns.temperature_R.float()),
        replace(columns, seeds_R=columns.seeds_R[:1]),
        replace(columns, top_k_R=torch.zeros(2, dtype=torch.int32)),
        replace(columns, top_p_R=torch.ones(3, dtype=torch.float64)),
    ):
        with pytest.raises(AssertionError):
            sample(logits, wrong)
    with pytest.raises(AssertionError):
        sample(logits.to(torch.bfloat16), columns)
    with pytest.raises(AssertionError):
        sample(logits[0], columns)
    with pytest.raises(AssertionError):
        token_logprobs(logits, columns.temperature_R, torch.zeros(3, dtype=torch.int64))
