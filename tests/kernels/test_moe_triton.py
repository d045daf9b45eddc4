"""The grouped products of experts: the torch twin's numbers, an expert's own bits, and nothing asked of the host."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from card_tools import needs_card
from paged.kernels import moe, moe_triton
from paged.kernels.gemm import Tiling, gemm
from paged.kernels.numerics import Numerics
from paged.kernels.rowwise_triton import silu_mul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SMALL = Tiling(16, 32, 32, False, 4, 3)
WEIGHTS_FIRST = Tiling(16, 64, 32, True, 4, 3)
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def parts(rows: int, experts: int, hidden: int, inner: int, dtype: torch.dtype = torch.float16) -> Parts:
    generator = torch.Generator().manual_seed(rows)

    def numbers(*shape: int, scale: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale**-0.5).to(DEVICE, dtype)

    weights = numbers(experts, 2 * inner, hidden, scale=hidden), numbers(experts, hidden, inner, scale=inner)
    return (numbers(rows, hidden, scale=1), *weights)


def chosen(rows: int, experts: int, count: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and shares by a router that never takes the last expert and prefers the second."""
    logits = torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    logits[:, 1] += 2
    logits[:, -1] = -100
    return moe.route(logits, count, normalize=True)


@pytest.mark.parametrize("tiling", [SMALL, WEIGHTS_FIRST])
@pytest.mark.parametrize(("rows", "hidden", "inner", "k_segments"), [(1, 64, 32, 1), (23, 64, 32, 2), (23, 72, 20, 1)])
def test_numbers_of_the_torch_twin(tiling: Tiling, rows: int, hidden: int, inner: int, k_segments: int) -> None:
    x, gate_up, down = parts(rows, 6, hidden, inner)
    experts, shares = chosen(rows, 6, 3, x.dtype)
    got = moe_triton.run_experts(x, experts, shares, gate_up, down, k_segments=k_segments, tiling=tiling)
    terms = (tensor.cpu() for tensor in (x, experts, shares, gate_up, down))
    want = moe.run_experts(*terms, numerics=Numerics(), k_segments=k_segments)
    torch.testing.assert_close(got.cpu().double(), want.double(), rtol=2e-3, atol=4e-3)
    assert (got.cpu() == want).double().mean() > 0.8


def test_all_rows_may_choose_the_same_experts() -> None:
    x, gate_up, down = parts(40, 6, 32, 16)
    experts = torch.tensor([[2, 5]], device=DEVICE).expand(40, 2).contiguous()
    shares = torch.full((40, 2), 0.5, dtype=x.dtype, device=DEVICE)
    got = moe_triton.run_experts(x, experts, shares, gate_up, down, tiling=SMALL)
    want = moe.run_experts(*(t.cpu() for t in (x, experts, shares, gate_up, down)), numerics=Numerics())
    torch.testing.assert_close(got.cpu().double(), want.double(), rtol=2e-3, atol=4e-3)


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k_segments", [1, 4])
def test_experts_have_their_own_bits(dtype: torch.dtype, k_segments: int) -> None:
    """Equal to one expert after another by the plain kernel, and for a row to what it gets alone; no waiting."""
    x, gate_up, down = parts(300, 16, 1024, 512, dtype)
    experts, shares = chosen(300, 16, 4, dtype)
    made = torch.zeros(300, 4, 1024, dtype=dtype, device=DEVICE)
    for expert in range(16):
        rows, slots = (experts == expert).nonzero(as_tuple=True)
        if len(rows):
            out = gemm(silu_mul(gemm(x[rows], gate_up[expert])), down[expert], k_segments=k_segments)
            made[rows, slots] = out * shares[rows, slots, None]
    want = made[:, 0]
    for slot in range(1, 4):
        want = want + made[:, slot]
    for tiling in (None, Tiling(64, 64, 64, False, 4, 3), Tiling(128, 128, 64, False, 8, 3)):
        terms = (x, experts, shares, gate_up, down)
        assert torch.equal(moe_triton.run_experts(*terms, k_segments=k_segments, tiling=tiling), want)
    for rows in (1, 2, 40, 299):
        part = (x[-rows:], experts[-rows:].contiguous(), shares[-rows:].contiguous(), gate_up, down)
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = moe.run_experts(*part, numerics=Numerics(), k_segments=k_segments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(got, want[-rows:])
