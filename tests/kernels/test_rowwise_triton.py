"""The row-wise Triton kernels: their torch twins' numbers within a rounding, and rows that know no neighbours."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")
from card_tools import needs_card
from paged.kernels import activation, norm, rope, rowwise_triton
from paged.kernels.kv_cache_triton import store_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# A unit in the last place, relative.
UNITS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
# The interpreter's bf16 is left to a card.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=[pytest.mark.gpu, needs_card])]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_close(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], units: int) -> None:
    """Within some units of the last place, and mostly equal: another rounding point shows in a tenth and more.

    In rotations a rounding of a product may be one of a larger number.
    """
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        unit = units * UNITS[one.dtype]
        torch.testing.assert_close(one.cpu().double(), other.double(), rtol=unit, atol=4 * unit)
        if one.dtype != torch.float32:
            assert (one.cpu() == other).double().mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32, 70, 2048])
def test_norms(dtype: torch.dtype, width: int) -> None:
    x, delta, weight = (
        numbers(5, width + 6, dtype=dtype),
        numbers(5, width, seed=1, dtype=dtype),
        numbers(width, seed=2),
    )
    weight = weight.to(dtype)
    here = [tensor.to(DEVICE) for tensor in (x, delta, weight)]
    rows = x[:, 3 : width + 3]
    summed, normed = rowwise_triton.add_rms_norm(here[0][:, 3 : width + 3], *here[1:], 1e-6)
    want = norm.add_rms_norm(rows, delta, weight, 1e-6)
    assert torch.equal(summed.cpu(), want[0])
    assert_close([normed], want[1:], 4)
    assert normed.is_contiguous()
    heads = numbers(4, 3, width, seed=4, dtype=dtype)
    strided = heads[:, 1:]
    assert_close(
        [rowwise_triton.rms_norm(strided.to(DEVICE), here[2], 1e-6)], [norm.rms_norm(strided, weight, 1e-6)], 4
    )
    assert not rowwise_triton.rms_norm(torch.zeros_like(here[0][:, :width]), here[2], 1e-6).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (10, 1, 80), (1, 1, 32)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_heads(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, has_norm: bool) -> None:
    qkv = numbers(6, heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
    weights = [numbers(head_dim, seed=seed, dtype=dtype) if has_norm else None for seed in (1, 2)]
    cos, sin = rope.rope_tables(100, head_dim, 1e4, dtype=dtype)
    arguments = [q, k, cos[50:56], sin[50:56], *weights]
    here = [tensor if tensor is None else tensor.to(DEVICE) for tensor in arguments]
    got = rowwise_triton.norm_rope(*here, 1e-6)
    assert_close(got, rope.norm_rope(*arguments, 1e-6), 8)
    assert all(tensor.is_contiguous() for tensor in got)
    # Queries and keys do not take each other's weight.
    if has_norm:
        here[4] = torch.zeros_like(here[4])
        q_only, k_same = rowwise_triton.norm_rope(*here, 1e-6)
        assert not q_only.any()
        assert torch.equal(k_same, got[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (10, 1, 80), (3, 3, 32)])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("cache_dtype", [None, torch.float32])
def test_heads_on_their_way_to_the_cache(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, has_norm: bool, cache_dtype: torch.dtype | None
) -> None:
    """One kernel gives what norm, rotation and storage give; a row without a cell is stored nowhere."""
    qkv = numbers(6, heads + 2 * kv_heads, head_dim, dtype=dtype).to(DEVICE)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    weights = [numbers(head_dim, seed=seed, dtype=dtype).to(DEVICE) if has_norm else None for seed in (1, 2)]
    cos, sin = rope.rope_tables(100, head_dim, 1e4, dtype=dtype, device=DEVICE)
    arguments = [cos[50:56], sin[50:56], *weights, 1e-6]
    cell_T = torch.tensor([7, 0, -1, 11, 3, 8], device=DEVICE)
    shape = (3, 4, kv_heads, head_dim)
    caches = [torch.full(shape, -5.0, dtype=cache_dtype or dtype, device=DEVICE) for _ in range(4)]
    expected_q, turned_k = rowwise_triton.norm_rope(q, k, *arguments)
    store_triton(*caches[:2], turned_k, v, cell_T)
    got_q = rowwise_triton.norm_rope_store(q, k, v, *arguments, *caches[2:], cell_T)
    assert torch.equal(got_q, expected_q)
    assert torch.equal(caches[2], caches[0])
    assert torch.equal(caches[3], caches[1])
    assert (caches[2] == -5.0).all(-1).all(-1).sum() == 12 - 5, "five rows are stored"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 1500])
def test_gated_silu(dtype: torch.dtype, width: int) -> None:
    gate_up = 3 * numbers(4, 2 * width, dtype=dtype)
    gate_up[0, :5] = torch.tensor([-1e4, -100.0, 0.0, 100.0, float("nan")])
    got, want = rowwise_triton.silu_mul(gate_up.to(DEVICE)), activation.silu_mul(gate_up)
    assert got[0, 4].isnan()
    assert got.isnan().sum() == 1
    assert_close([got.nan_to_num()], [want.nan_to_num()], 4)


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_know_no_neighbours(dtype: torch.dtype) -> None:
    """Rows taken out of 300, in any order and company, have the bits they had among all; NaN rows stay alone."""
    rng = random.Random(0)
    x, weight, head_weight = (numbers(*shape, dtype=dtype).to(DEVICE) for shape in ((300, 3072), (3072,), (128,)))
    cos, sin = rope.rope_tables(300, 128, 1e6, dtype=dtype, device=DEVICE)

    def made(rows: list[int]) -> list[torch.Tensor]:
        part = x[rows]
        heads = part.view(-1, 24, 128)
        rotated = rope.norm_rope(heads[:, :16], heads[:, 16:], cos[rows], sin[rows], head_weight, head_weight, 1e-6)
        return [*norm.add_rms_norm(part, part, weight, 1e-6), *rotated, activation.silu_mul(part)]

    whole = made(list(range(300)))
    x[100:] = float("nan")
    for _ in range(60):
        rows = rng.sample(range(300), rng.choice((1, 2, rng.randint(1, 300))))
        kept = [index for index, row in enumerate(rows) if row < 100]
        for got, want in zip(made(rows), whole, strict=True):
            assert torch.equal(got[kept], want[[rows[index] for index in kept]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 280, 2048])
def test_sums_of_squares_hang_on_their_part_alone(dtype: torch.dtype, width: int) -> None:
    """A rank that holds a row's later parts sums them as a rank that holds the whole row does."""
    x = numbers(6, width + 8, dtype=dtype).to(DEVICE)[:, 8:]
    sums = rowwise_triton.sums_of_squares(x, 4)
    want = x.double().unflatten(1, (4, -1)).square().sum(-1)
    torch.testing.assert_close(sums.double(), want, rtol=1e-5, atol=0)
    half = rowwise_triton.sums_of_squares(x[2:, width // 2 :], 2)
    assert torch.equal(half, sums[2:, 2:])


@pytest.mark.parametrize("width", [64, 70])
def test_rows_come_to_the_kernels_in_one_alignment(width: int) -> None:
    """A compiler gives a thread other elements of a row whose address or stride is no multiple of 16."""
    wide = numbers(6, 2 * width + 3).to(DEVICE)
    views = [wide[:, :width], wide[1:, 1 : width + 1], wide[:, 16 : width + 16], wide[:, :width].contiguous()[1:]]
    for view in views:
        aligned = rowwise_triton._aligned(view)
        assert torch.equal(aligned, view)
        assert aligned.data_ptr() % 16 == 0
        assert aligned.stride(0) % 16 == 0 or aligned.is_contiguous()
