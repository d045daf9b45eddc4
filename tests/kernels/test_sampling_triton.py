"""The card's sampling: the same tokens, sets and numbers as the torch twin, in Triton's interpreter and on a card."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from card_tools import needs_card
from paged.kernels import exponential, sampling, sampling_adjust_triton, sampling_math_triton, sampling_triton
from paged.kernels.sampling import SampledRows, sample, sample_by_torch, sample_on_card, token_logprobs
from paged.kernels.sampling_columns import LogitBias, Penalties, SamplingColumns
from tests.kernels.test_exponential import around_whole_exponents, inverse_temperatures

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QWEN_VOCAB = 151_936


def logits_of(
    generator: np.random.Generator, num_rows: int, vocab_size: int, scale: float | None = None
) -> torch.Tensor:
    """Rows of all sorts: peaked and flat, with ties, with a thousand equal ones at the top, with -inf."""
    scales = generator.choice([0.01, 1, 3, 8], (num_rows, 1)) if scale is None else scale
    logits = generator.standard_normal((num_rows, vocab_size), dtype=np.float32) * scales
    for row in range(num_rows if scale is None else 0):
        sort = generator.integers(7)
        if sort == 0:
            logits[row] = np.round(logits[row])
        elif sort == 1:
            logits[row, generator.integers(vocab_size, size=vocab_size // 5)] = logits[row].max()
        elif sort == 2:
            logits[row, generator.random(vocab_size) < 0.5] = -np.inf
            logits[row, generator.integers(vocab_size)] = 1.0
        elif sort == 3:
            logits[row] = 0.25
        elif sort == 4:
            logits[row, : vocab_size // 10] += 10
    return torch.from_numpy(logits.astype(np.float32))


def columns_of(generator: np.random.Generator, num_rows: int, vocab_size: int, asks: str) -> SamplingColumns:
    """Columns with the features named in ``asks``, each in some rows only."""

    def choose(*options: Any) -> np.ndarray:
        return generator.choice(np.array(options), num_rows)

    values: dict[str, Any] = {
        "temperature_R": torch.from_numpy(choose(0.0, 0.6, 1.0, 1.7)),
        "seeds_R": torch.from_numpy(generator.integers(-(2**63), 2**63, num_rows)),
        "positions_R": torch.from_numpy(generator.integers(0, 40_000, num_rows)),
    }
    if "k" in asks:
        values["top_k_R"] = torch.from_numpy(choose(0, 1, 17, 50, 1500, vocab_size - 1, 10**9))
    if "p" in asks:
        values["top_p_R"] = torch.from_numpy(choose(1.0, 0.999, 0.95, 0.5, 0.0))
    if "m" in asks:
        values["min_p_R"] = torch.from_numpy(choose(0.0, 1e-6, 0.01, 0.3, 1.0))
    if "a" in asks:
        rows = np.flatnonzero(generator.random(num_rows) < 0.4)
        size = (len(rows), vocab_size)
        values["penalties"] = Penalties(
            rows_P=torch.from_numpy(rows),
            repetition_P=torch.from_numpy(generator.choice([1.0, 1.3, 0.8], len(rows))),
            presence_P=torch.from_numpy(generator.choice([0.0, 0.7, -0.4], len(rows))),
            frequency_P=torch.from_numpy(generator.choice([0.0, 0.3, -0.1], len(rows))),
            output_counts_PV=torch.from_numpy(generator.poisson(0.4, size).astype(np.int32)),
            prompt_mask_PV=torch.from_numpy(generator.random(size) < 0.2),
        )
        biased = np.flatnonzero(generator.random(num_rows) < 0.3)
        values["bias"] = LogitBias(
            rows_N=torch.from_numpy(biased),
            token_ids_N=torch.from_numpy(generator.integers(vocab_size, size=len(biased))),
            values_N=torch.from_numpy(generator.normal(size=len(biased)) * 3),
        )

    return mapped(SamplingColumns(**values), lambda tensor: tensor.to(DEVICE))


def mapped(columns: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Columns, penalties or biases with ``function`` of each of their tensors."""

    def map_value(value: Any) -> Any:
        if value is None:
            return None
        return function(value) if isinstance(value, torch.Tensor) else mapped(value, function)

    return type(columns)(**{name: map_value(getattr(columns, name)) for name in columns.__dataclass_fields__})


def assert_equal(ours: SampledRows, twin: SampledRows) -> None:
    assert torch.equal(ours.nan_R, twin.nan_R)
    assert torch.equal(ours.tokens_R, twin.tokens_R)
    for name in ("logprobs_R", "behavior_logprobs_R"):
        column = getattr(ours, name)
        # In the interpreter numpy takes the logarithm, whose last place is not always torch's.
        places = 2.0**-50 if column.dtype == torch.float64 and DEVICE == "cpu" else 0
        torch.testing.assert_close(column, getattr(twin, name), rtol=0, atol=places, equal_nan=True)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and lists small enough that a few thousand tokens fill several."""
    for name, value in (("PART", 512), ("CANDIDATES", 256), ("HALF_BRACKET", 64)):
        monkeypatch.setattr(sampling_triton, name, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("vocab_size", "asks", "short"),
    [(5, "kpm", False), (1500, "", False), (1500, "k", True), (1501, "pa", True), (1501, "kpm", False)],
)
def test_rows_equal_the_twin(
    small_parts: None, monkeypatch: pytest.MonkeyPatch, vocab_size: int, asks: str, short: bool, dtype: torch.dtype
) -> None:
    if short:
        monkeypatch.setattr(sampling, "mass_bits", lambda vocab_size: exponential.SHORT_BITS)
    generator = np.random.default_rng(vocab_size)
    logits = logits_of(generator, 6, vocab_size).to(dtype)
    logits[1, 0], logits[3] = torch.nan, -torch.inf
    columns = columns_of(generator, 6, vocab_size, asks)
    ours, twin = (draw(logits.to(DEVICE), columns) for draw in (sample_on_card, sample_by_torch))
    assert ours.nan_R.tolist() == [row in (1, 3) for row in range(6)]
    assert_equal(ours, twin)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("asks", ["", "p"])
def test_high_logits_and_extreme_temperatures_equal_the_twin(
    small_parts: None, monkeypatch: pytest.MonkeyPatch, asks: str, short: bool
) -> None:
    """A bound on logits in fp32 was rounded up to the highest one, so that tokens without mass had all of it.

    Then rows were cut wrong, and where the highest was close to the least number of fp32 the token was none of the row.
    """
    if short:
        monkeypatch.setattr(sampling, "mass_bits", lambda vocab_size: exponential.SHORT_BITS)
    logits = torch.randn(7, 515, generator=torch.Generator().manual_seed(4))
    logits[0] += 3e6
    logits[1] *= 1e30
    logits[2] *= 1e-6
    logits[3:5] = -torch.inf
    logits[3, 514] = torch.finfo(torch.float32).min
    logits[4, 7] = -3.0
    logits[5, ::2] = -0.0
    columns = columns_of(np.random.default_rng(8), 7, 515, asks)
    columns.temperature_R.copy_(torch.tensor([1e-3, 1.0, 1e4, 1.0, 1e4, 1e-30, 1e30]))
    if columns.top_p_R is not None:
        columns.top_p_R.copy_(torch.tensor([0.95, 1 - 2.0**-53, 0.999999, 0.5, 1.0, 1e-300, 1 - 2.0**-24]))
    assert_equal(sample_on_card(logits.to(DEVICE), columns), sample_by_torch(logits.to(DEVICE), columns))


@pytest.mark.parametrize(("num_equal", "num_rows", "half_bracket"), [(100, 24, 64), (300, 6, 64), (100, 12, 1)])
def test_equal_tokens_are_kept_by_lowest_id(
    small_parts: None, monkeypatch: pytest.MonkeyPatch, num_equal: int, num_rows: int, half_bracket: int
) -> None:
    """A hundred equal tokens fit the list, three hundred must be looked for in the row; either way three remain.

    So they do where a narrow bracket lies below all of the hundred, which then are not all kept.
    """
    monkeypatch.setattr(sampling_triton, "HALF_BRACKET", half_bracket)
    logits = torch.full((num_rows, 300), -60.0)
    logits[:, 300 - num_equal :] = 3.0
    columns = columns_of(np.random.default_rng(9), num_rows, 300, "k")
    columns.temperature_R.fill_(1.0)
    assert columns.top_k_R is not None
    columns.top_k_R.fill_(3)
    ours = sample_on_card(logits.to(DEVICE), columns)
    assert set(ours.tokens_R.tolist()) == {300 - num_equal + i for i in range(3)}
    assert_equal(ours, sample_by_torch(logits.to(DEVICE), columns))


class Recorded:
    """A kernel that keeps the arguments of its launches by the names of its parameters, as each launch left them."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.kernel[grid](*arguments, **options)
            copies = (x.clone() if isinstance(x, torch.Tensor) else x for x in arguments)
            self.launches.append(dict(zip(self.kernel.arg_names, copies, strict=False)))

        return launch


@pytest.mark.skipif(DEVICE == "cuda", reason="its sizes are for the interpreter")
def test_each_pass_of_the_cut_leaves_rows_to_the_next(small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter, half and all of a list is held in turn, then none; only the first rows are drawn from theirs."""
    cut, finish = (Recorded(getattr(sampling_triton, name)) for name in ("cut_kernel", "_finish_kernel"))
    monkeypatch.setattr(sampling_triton, "cut_kernel", cut)
    monkeypatch.setattr(sampling_triton, "_finish_kernel", finish)
    generator = np.random.default_rng(12)
    logits = logits_of(generator, 16, 1500, 0.3)
    logits[:4, :20] += 12
    logits[4:8, 500:900] = 4.0
    columns = columns_of(generator, 16, 1500, "p")
    columns.temperature_R.fill_(1.0)
    assert columns.top_p_R is not None
    columns.top_p_R.fill_(0.25)
    ours = sample_on_card(logits.to(DEVICE), columns)
    assert_equal(ours, sample_by_torch(logits.to(DEVICE), columns))
    cut_after = [launch["is_cut_ptr"] for launch in cut.launches]
    assert [is_cut_R[:4].all() for is_cut_R in cut_after] == [True, True, True]
    assert [is_cut_R[4:8].any() for is_cut_R in cut_after] == [False, False, True]
    assert 4 < cut_after[1].sum() < 12 < cut_after[2].sum() == 16
    assert cut.launches[0]["listed_ptr"][4:8].min() > sampling_triton.CANDIDATES
    drawn_R = finish.launches[0]["drawn_ptr"]
    assert torch.equal(drawn_R[:4], ours.tokens_R[:4].int())
    assert (drawn_R[4:] < 0).all()


class Skipped:
    """A kernel that does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: None


@pytest.mark.skipif(DEVICE == "cuda", reason="its sizes are for the interpreter")
def test_the_bracket_holds_the_last_token_of_rows_with_two_humps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens far above a bulk that the nucleus ends in: a small error in the few's mass moves it by thousands.

    A quarter of such rows was once searched token by token, because the few were taken for the middles of their bins.
    """
    cut = Recorded(sampling_triton.cut_kernel)
    monkeypatch.setattr(sampling_triton, "cut_kernel", cut)
    for name in ("_draw_kernel", "_finish_kernel"):
        monkeypatch.setattr(sampling_triton, name, Skipped())
    generator = np.random.default_rng(18)
    num_rows = 8
    logits = logits_of(generator, num_rows, QWEN_VOCAB, 2.5)
    high = torch.from_numpy(12 + 4 * generator.standard_normal((num_rows, 40), dtype=np.float32))
    logits.scatter_(1, torch.from_numpy(generator.integers(QWEN_VOCAB, size=(num_rows, 40))), high)
    columns = columns_of(generator, num_rows, QWEN_VOCAB, "p")
    columns.temperature_R.fill_(1.5)
    assert columns.top_p_R is not None
    columns.top_p_R.fill_(0.95)
    sample_on_card(logits.to(DEVICE), columns)
    # Before the last pass only rows are cut whose bracket was right, and which half a list had room for.
    assert cut.launches[1]["is_cut_ptr"].all()
    assert cut.launches[1]["listed_ptr"].max() > sampling_triton.HALF_BRACKET * 1.5, "no nucleus ended in the bulk"


@pytest.mark.skipif(DEVICE == "cuda", reason="its sizes are for the interpreter")
def test_only_adjusted_rows_are_drawn_in_fp64(small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made for one row a penalty and one a bias; two rows have them all, and the third place stays empty."""
    finish = Recorded(sampling_triton._finish_kernel)
    monkeypatch.setattr(sampling_triton, "_finish_kernel", finish)
    generator = np.random.default_rng(14)
    logits = logits_of(generator, 6, 700, 2.0).to(DEVICE)
    plain = columns_of(generator, 6, 700, "p")
    plain.temperature_R.fill_(0.8)
    penalties = Penalties(
        rows_P=torch.tensor([4]),
        repetition_P=torch.tensor([1.5]).double(),
        presence_P=torch.tensor([0.3]).double(),
        frequency_P=torch.tensor([-0.2]).double(),
        output_counts_PV=torch.from_numpy(generator.poisson(0.4, (1, 700)).astype(np.int32)),
        prompt_mask_PV=torch.from_numpy(generator.random((1, 700)) < 0.2),
    )
    bias = LogitBias(torch.tensor([1, 4]), torch.tensor([699, 3]), torch.tensor([30.0, 30.0]).double())
    columns = replace(plain, penalties=penalties, bias=bias)
    ours = sample_on_card(logits, columns)
    assert finish.launches[-1]["logits_ptr"].dtype == torch.float64
    assert finish.launches[-1]["rows_ptr"].tolist() == [1, 4, 6]
    assert finish.launches[-1]["temperature_ptr"].tolist() == [0.8, 0.8, -1.0]
    assert ours.tokens_R[[1, 4]].tolist() == [699, 3]
    assert_equal(ours, sample_by_torch(logits, columns))
    others = [0, 2, 3, 5]
    alone = sample_on_card(logits, plain)
    assert finish.launches[-1]["logits_ptr"].dtype == torch.float32
    assert_equal(mapped(ours, lambda column: column[others]), mapped(alone, lambda column: column[others]))


@pytest.mark.parametrize("asks", ["", "p", "kpma"])
def test_nothing_waits_for_the_host(monkeypatch: pytest.MonkeyPatch, asks: str) -> None:
    """Tensors without values: an operation whose shape or course hangs on values cannot run on them."""
    for module in (sampling_triton, sampling_adjust_triton):
        for name in dir(module):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Skipped())
    generator = np.random.default_rng(15)
    columns = mapped(columns_of(generator, 5, 300, asks), lambda tensor: tensor.to("meta"))
    sampled = sample_on_card(torch.empty(5, 300, device="meta"), columns)
    assert sampled.tokens_R.shape == sampled.logprobs_R.shape == (5,)


def test_all_kernels_wait_for_the_one_before() -> None:
    """A program that ends at once without waiting lets the next kernel begin too early, so the wait comes first."""
    modules = (sampling_triton, sampling_adjust_triton)
    kernels = {name: getattr(module, name) for module in modules for name in dir(module) if name.endswith("_kernel")}
    assert len(kernels) == 9, kernels
    for name, kernel in kernels.items():
        before, after = inspect.getsource(kernel.fn).split("tl.extra.cuda.gdc_wait()")
        assert not {"tl.load", "tl.store", "return"} & set(re.findall(r"[\w.]+", before.split('"""')[-1])), name
        assert after.lstrip().startswith("tl.extra.cuda.gdc_launch_dependents()"), name


@triton.jit
def _masses_kernel(logits_ptr, inverse_ptr, mass_ptr, sum_ptr, SIZE: tl.constexpr, BITS: tl.constexpr):
    row = tl.program_id(0)
    place_B4 = row * SIZE + tl.arange(0, SIZE // 4)[:, None] * 4 + tl.arange(0, 4)[None]
    x_B4, inverse = tl.load(logits_ptr + place_B4), tl.load(inverse_ptr + row)
    row_max = (inverse * 0).to(x_B4.dtype)
    tl.store(mass_ptr + place_B4, sampling_math_triton.masses_of(x_B4, row_max, inverse, BITS, True))
    weight_B4 = sampling_math_triton.weights_of(x_B4, row_max, inverse, BITS, True)
    sum_B = sampling_math_triton.no_mass(SIZE // 4, BITS, True)
    for _ in range(3):
        sum_B = sampling_math_triton.add_masses(sum_B, weight_B4, SIZE // 4, BITS, True)
    tl.store(sum_ptr + row, sampling_math_triton.total_mass(sum_B, BITS, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_short_masses_are_those_of_the_twin(dtype: torch.dtype) -> None:
    """Token by token, most of them close to where a weight is a power of two; and sums of many lose nothing."""
    generator = np.random.default_rng(30)
    num_rows = 2000 if DEVICE == "cuda" else 60
    inverse = torch.tensor(inverse_temperatures(generator, num_rows), dtype=torch.float64)
    rows = [around_whole_exponents(generator, value)[-2048:] for value in inverse.tolist()]
    logits = torch.stack([torch.nn.functional.pad(row, (0, 2048 - len(row))) for row in rows]).to(dtype)
    scale = exponential.MassScale(exponential.SHORT_BITS, is_short=True)
    twin = exponential.integer_masses(logits, torch.zeros(num_rows, dtype=dtype), inverse, scale)
    logits, inverse, twin = logits.to(DEVICE), inverse.to(DEVICE), twin.to(DEVICE)
    ours, sums = torch.empty_like(twin), torch.empty_like(twin[:, 0])
    _masses_kernel[(num_rows,)](
        logits, inverse, ours, sums, SIZE=2048, BITS=exponential.SHORT_BITS, enable_fp_fusion=False
    )
    assert torch.equal(ours, twin)
    assert torch.equal(sums, 3 * twin.sum(1))


@triton.jit
def _noise_kernel(words_ptr, rough_ptr, exact_ptr, SIZE: tl.constexpr, FAST_LOG: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    word = tl.load(words_ptr + place).to(tl.uint32)
    tl.store(rough_ptr + place, sampling_math_triton.rough_score(word.to(tl.float32) * 0, word, FAST_LOG))
    tl.store(exact_ptr + place, sampling_math_triton.exact_noise(word))


def test_rough_noise_keeps_its_margin() -> None:
    """The draw is exact because the rough noise is nowhere lower than the true one by as much as the margin assumes."""
    ends = torch.arange(2**14)
    around = 2**27 + torch.arange(-(2**13), 2**13)
    powers = torch.cat([2**bits + torch.arange(-64, 64) for bits in range(7, 32)])
    words = torch.cat(
        (ends, 2**32 - 1 - ends, around, powers, torch.from_numpy(np.random.default_rng(1).integers(0, 2**32, 2**18)))
    )
    words = words[: len(words) // 1024 * 1024].to(DEVICE)
    rough = torch.empty(len(words), dtype=torch.float32, device=DEVICE)
    exact = torch.empty(len(words), dtype=torch.float64, device=DEVICE)
    _noise_kernel[(len(words) // 1024,)](
        words, rough, exact, SIZE=1024, FAST_LOG=DEVICE == "cuda", enable_fp_fusion=False
    )
    error = rough.double() - math.log(math.log(2)) - exact
    assert error.min() > -sampling_math_triton.MARGIN.value / 8, error.min()
    # Higher by more than that it is for few words only, whose tokens must else be computed in fp64 all the time.
    assert (error > sampling_math_triton.MARGIN.value / 8).double()[-(2**17) :].mean() < 1e-3
    one_minus_u = (1 - 2.0**-33 - words.double() * 2.0**-32).clamp_min(2.0**-24)
    assert (exact + (-one_minus_u.log()).log()).abs().max() < 1e-13


@pytest.mark.skipif(DEVICE == "cuda", reason="a compiled kernel has read the margin already")
def test_draws_too_close_to_tell_are_computed(small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With margins that nearly all tokens fall into, whole parts are computed and the same tokens are drawn."""
    generator = np.random.default_rng(3)
    logits = logits_of(generator, 6, 1500, 1.0).to(DEVICE)
    columns = columns_of(generator, 6, 1500, "p")
    expected = sample_by_torch(logits, columns)
    assert_equal(sample_on_card(logits, columns), expected)
    searched = []
    rough = sampling_triton.highest_rough.fn
    monkeypatch.setattr(
        sampling_triton, "highest_rough", lambda *arguments: searched.append(arguments[4]) or rough(*arguments)
    )
    assert_equal(sample_on_card(logits, columns), expected)
    assert not searched
    for name in ("MARGIN", "SLACK"):
        monkeypatch.setattr(sampling_triton, name, tl.constexpr(8.0))
    assert_equal(sample_on_card(logits, columns), expected)
    assert len(searched) > 6 * 4


@triton.jit
def _bounds_kernel(x_ptr, words_ptr, inverse_ptr, bound_ptr, score_ptr, SIZE: tl.constexpr, PART: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inverse = tl.load(inverse_ptr + tl.program_id(0))
    x, word = tl.load(x_ptr + place), tl.load(words_ptr + place).to(tl.uint32)
    key = sampling_math_triton._token_key(x, word, sampling_math_triton.slope_of(inverse))
    # The group's place takes the key's last digits.
    key = (key & (2**32 - PART // 4)) | (place & (PART // 4 - 1)).to(tl.uint32)
    tl.store(bound_ptr + place, sampling_math_triton.score_bound(key, PART))
    tl.store(score_ptr + place, x.to(tl.float64) * inverse + sampling_math_triton.exact_noise(word))


def test_no_score_exceeds_the_bound_of_its_key() -> None:
    """What is told from keys alone is certain; and the bound is close where scores are high, so that it tells a lot."""
    generator = np.random.default_rng(31)
    num_programs = 128
    words = torch.from_numpy(generator.integers(0, 2**32, (num_programs, 1024)))
    words[:, :512] >>= torch.from_numpy(generator.integers(0, 32, (num_programs, 512)))
    words[:, :8] = torch.tensor([0, 1, 2, 3, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])
    inverse = torch.from_numpy(2.0 ** generator.uniform(-8, 8, num_programs))
    x = torch.from_numpy(-generator.exponential(4, words.shape) * generator.integers(0, 2, words.shape))
    x = (x / inverse[:, None]).float()
    x[:, 8:10] = torch.tensor([-torch.inf, -1e30])
    x, words, inverse = x.to(DEVICE), words.to(DEVICE), inverse.to(DEVICE)
    bound, score = (torch.empty(words.shape, dtype=torch.float64, device=DEVICE) for _ in range(2))
    _bounds_kernel[(num_programs,)](x, words, inverse, bound, score, SIZE=1024, PART=8192, enable_fp_fusion=False)
    excess = bound - score
    assert excess.min() > -sampling_math_triton.SLACK.value / 2, excess.min()
    # Words below 2^8 are cut off in the noise; they are one in 2^24.
    assert excess[(score > 3) & (x == 0) & (words >= 2**8)].max() < 0.12
    assert (bound[:, 8] < -1e3).all()


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("asks", ["", "k", "p", "m", "kp", "kpm", "pa"])
@pytest.mark.parametrize("scale", [None, 1.0, 3.0])
def test_full_rows_equal_the_twin(asks: str, scale: float | None) -> None:
    generator = np.random.default_rng(7)
    logits = logits_of(generator, 40, QWEN_VOCAB, scale).to(DEVICE)
    columns = columns_of(generator, 40, QWEN_VOCAB, asks)
    ours = sample_on_card(logits, columns)
    assert_equal(ours, sample_by_torch(logits, columns))
    logprobs = token_logprobs(logits, columns.temperature_R, ours.tokens_R)
    assert torch.equal(logprobs, ours.logprobs_R)


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("vocab_size", [QWEN_VOCAB, 32_000], ids=["short", "long"])
def test_a_card_gives_the_masses_of_the_cpu(vocab_size: int) -> None:
    """Nothing in a mass but products, sums and roundings: the sums agree across devices to the bit."""
    logits = logits_of(np.random.default_rng(8), 8, vocab_size)
    temperature = torch.tensor([0.6, 1.0, 1.7, 0.0] * 2, dtype=torch.float64)
    ids = torch.arange(8)
    on_cpu = token_logprobs(logits, temperature, ids)
    assert torch.equal(token_logprobs(logits.to(DEVICE), temperature.to(DEVICE), ids.to(DEVICE)).cpu(), on_cpu)


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("asks", ["", "p", "kpm", "kpma"])
def test_a_graph_of_a_sample_gives_what_a_call_gives(asks: str) -> None:
    """Captured once, replayed over other logits and columns in the same tensors; and no call waits for the host."""
    generator = np.random.default_rng(16)
    logits = logits_of(generator, 40, QWEN_VOCAB).to(DEVICE)
    columns = columns_of(generator, 40, QWEN_VOCAB, asks)
    first = sample(logits, columns)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample(logits, columns)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample(logits, columns)
    graph.replay()
    assert_equal(captured, first)

    def other(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(tensor.roll(1, 0))

    for _ in range(3):
        logits.copy_(logits_of(generator, 40, QWEN_VOCAB))
        mapped(columns, other)
        columns.positions_R.add_(1)
        for rows in sampling_adjust_triton.adjusting_rows(columns):
            rows.add_(1).remainder_(40)
        expected = sample(logits, columns)
        graph.replay()
        assert_equal(captured, expected)
        assert not torch.equal(captured.tokens_R, first.tokens_R)
