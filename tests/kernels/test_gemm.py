"""The canonical matrix product: values, tails and the tree of segments anywhere; bits on a card."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from card_tools import needs_card
from paged.kernels import gemm as gemm_module
from paged.kernels.gemm import Tiling, gemm, tiling_for
from paged.kernels.gemm_gate import cancelling_numbers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SMALL = Tiling(16, 32, 32, False, 4, 3)
WEIGHTS_FIRST = Tiling(16, 64, 32, True, 4, 3)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half().to(DEVICE)


@pytest.mark.parametrize("tiling", [None, SMALL, WEIGHTS_FIRST])
@pytest.mark.parametrize(("rows", "columns", "inner"), [(1, 48, 64), (37, 70, 96), (3, 17, 36)])
@pytest.mark.parametrize("k_segments", [1, 4])
def test_close_to_fp64(tiling: Tiling | None, rows: int, columns: int, inner: int, k_segments: int) -> None:
    weight, bias = numbers(columns, inner, seed=1), numbers(columns, seed=2)
    wide = numbers(rows, inner + 8)
    for x in (wide[:, :inner].contiguous(), wide[:, 8:], wide[:, 1 : inner + 1]):
        exact = x.double() @ weight.double().T
        out = gemm(x, weight, k_segments=k_segments, out_dtype=torch.float32, tiling=tiling)
        torch.testing.assert_close(out.double(), exact, atol=1e-4, rtol=0)
    rounded = gemm(x, weight, bias, k_segments=k_segments, tiling=tiling)
    assert rounded.dtype == torch.float16
    torch.testing.assert_close(rounded.double(), exact + bias.double(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("tiling", [SMALL, WEIGHTS_FIRST])
def test_nothing_leaks_between_rows_or_from_behind(tiling: Tiling) -> None:
    """NaN in neighbouring rows, in the rest of a wider tensor, and in the memory behind the operands."""
    x, weight = (torch.full((40, size), float("nan"), dtype=torch.float16, device=DEVICE) for size in (80, 72))
    x, weight = x[1:20, :72], weight[:33]
    x.copy_(numbers(19, 72))
    weight.copy_(numbers(33, 72, seed=1))
    want = gemm(x.contiguous(), weight, tiling=tiling)
    assert torch.equal(gemm(x, weight, tiling=tiling), want)
    x[5:9] = float("nan")
    out = gemm(x, weight, tiling=tiling)
    assert out[5:9].isnan().all()
    assert torch.equal(out[:5], want[:5])
    assert torch.equal(out[9:], want[9:])


@pytest.mark.parametrize("max_split_tiles", [-1, 1000])
def test_segments_fold_as_a_balanced_tree(monkeypatch: pytest.MonkeyPatch, max_split_tiles: int) -> None:
    """Segments that sum to 1, 2^24, 1 and -2^24: the tree gives 1, one chain 0. In registers and through memory."""
    monkeypatch.setattr(gemm_module, "_MAX_SPLIT_TILES", max_split_tiles)
    x = torch.zeros(3, 128, dtype=torch.float16, device=DEVICE)
    x[:, ::32] = torch.tensor([1.0, 4096.0, 1.0, -4096.0])
    weight = torch.zeros(20, 128, dtype=torch.float16, device=DEVICE)
    weight[:, ::32] = torch.tensor([1.0, 4096.0, 1.0, 4096.0])
    bias = torch.full((20,), 0.5, dtype=torch.float16, device=DEVICE)
    for tiling in (SMALL, WEIGHTS_FIRST):
        assert (gemm(x, weight, bias, k_segments=4, tiling=tiling) == 1.5).all()
        assert (gemm(x, weight, bias, k_segments=1, tiling=tiling) == 0.5).all()


def test_launcher_checks() -> None:
    x, weight = numbers(2, 24), numbers(8, 24)
    with pytest.raises(ValueError, match="k_segments 16"):
        gemm(x, weight, k_segments=16)
    for bad_x, bad_weight in ((x.float(), weight), (x.float(), weight.float()), (x[:, :16], weight), (x[:0], weight)):
        with pytest.raises(AssertionError):
            gemm(bad_x, bad_weight)
    with pytest.raises(AssertionError):
        gemm(x, weight, out_dtype=torch.bfloat16)


def test_tilings_fit_a_processor() -> None:
    """227 KiB of shared memory; the pipeline holds at most a buffer a stage."""
    for rows in (1, 16, 17, 32, 33, 64, 65, 128, 129, 5000):
        for columns, segments in itertools.product((100, 1024, 2048, 4096, 6144, 24576, 151936), (1, 4)):
            tiling = tiling_for(rows, columns, 12288, segments)
            buffers = tiling.num_stages * (tiling.rows + tiling.columns) * tiling.depth * 2
            assert buffers <= 227 * 1024, tiling
            assert rows <= tiling.rows or tiling.rows >= 64


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k_segments", [1, 2, 4])
def test_bits_hang_on_the_row_alone(dtype: torch.dtype, k_segments: int) -> None:
    """Any number of rows, tiling, place and company; on numbers where another order of summation shows."""
    rng = random.Random(k_segments)
    tilings = [SMALL, WEIGHTS_FIRST, Tiling(64, 64, 64, False, 4, 4), Tiling(128, 128, 64, False, 8, 3)]
    for columns, inner in ((1024, 1536), (1000, 2048)):
        x, weight = cancelling_numbers(200, columns, inner, dtype, torch.device(DEVICE), seed=columns)
        want = gemm(x, weight, k_segments=k_segments, tiling=SMALL)
        other = gemm(x, weight, k_segments=4 if k_segments == 1 else 1, tiling=SMALL)
        assert (want != other).float().mean() > 0.5
        for _ in range(40):
            rows = rng.sample(range(200), rng.choice((1, 5, rng.randint(1, 200))))
            company = torch.full((rng.randint(0, 60), inner), float("nan"), dtype=dtype, device=DEVICE)
            place = rng.randint(0, len(company))
            batch = torch.cat((company[:place], x[rows], company[place:]))
            batch = F.pad(batch, (0, rng.choice((0, 1, 8))))[:, :inner]
            got = gemm(batch, weight, k_segments=k_segments, tiling=rng.choice([None, *tilings]))
            assert torch.equal(got[place : place + len(rows)], want[rows])
