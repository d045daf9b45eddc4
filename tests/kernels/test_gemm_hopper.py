"""The Hopper kernel for few rows: how products are cut; on a card bits, and the order of dependent launches."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from card_tools import DEVICE, needs_hopper
from paged.kernels import gemm as gemm_module
from paged.kernels import gemm_hopper as hopper_module
from paged.kernels.gemm import Tiling, gemm
from paged.kernels.gemm_gate import cancelling_numbers
from paged.kernels.gemm_hopper import MAX_ROWS, HopperTiling, gemm_hopper, suits_hopper, tiling_for
from paged.kernels.launch import are_copyable
from paged.kernels.norm import add_rms_norm

# Of the Triton kernel, whose bits are the contract's.
REFERENCE = Tiling(16, 32, 64, False, 4, 3)


@pytest.mark.parametrize("num_processors", [132, 114, 1])
def test_tilings_fit_the_card_and_cover_the_product(num_processors: int) -> None:
    """Shared memory is 227 KiB a processor; a tile is at most two boxes of 2^n rows."""
    num_columns = (8, 100, 1024, 2048, 3072, 4096, 6144, 12288, 24576, 75968, 151936)
    sizes = ((1, 8, 9, 16, 17, 33, 64), num_columns, (8, 1024, 2048, 3072, 4096, 6144, 12288))
    for rows, columns, inner in itertools.product(*sizes):
        tiling = tiling_for(rows, columns, inner, num_processors)
        assert rows <= tiling.rows <= MAX_ROWS
        assert tiling.columns % 8 == 0
        assert tiling.columns.bit_count() <= 2
        assert 2 <= tiling.stages <= 16
        # No program has more tiles than it would with the largest ones, nor a ring that it could not fill.
        num_tiles = -(-columns // tiling.columns)
        assert -(-num_tiles // num_processors) == -(-columns // (128 * num_processors))
        num_steps = -(-num_tiles // num_processors) * -(-inner // (64 * tiling.blocks))
        assert tiling.stages <= max(2, num_steps)
        # Where there is enough to load, much is on its way.
        assert tiling.stages == max(2, num_steps) or tiling.shared_bytes > 160 * 1024 or tiling.stages == 16
        # Room is left for the kernels that run between products, and for 16 bytes of barriers a stage.
        assert tiling.shared_bytes <= 200 * 1024
        # The last operand ends where the ring does, in rows of 128 bytes.
        num_blocks = tiling.stages * tiling.blocks
        ring_rows = tiling.shared_bytes // 128 - num_blocks * tiling.rows
        assert (num_blocks - 1) * tiling.columns + tiling.operand_rows == ring_rows
        # As much as a barrier counts.
        assert tiling.blocks * (tiling.rows + tiling.columns) * 128 < 1 << 20


def test_the_copy_engine_takes_multiples_of_16_bytes() -> None:
    wide = torch.zeros(4, 48, dtype=torch.float16)
    assert are_copyable(wide, wide[:, :32], wide[1:, 8:40])
    assert not are_copyable(wide, wide[:, 1:33])
    assert not are_copyable(wide[:, :36])
    assert not are_copyable(torch.zeros(4, 44, dtype=torch.float16)[:, :40])
    assert not are_copyable(wide[:1].expand(4, 48))
    assert not suits_hopper(wide, wide)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_are_those_of_the_triton_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged sizes, rows that lie apart, NaN behind, beside and among them, few and many programs, odd tilings."""
    rng = random.Random(0)
    num_programs = [1, 7, 132]
    monkeypatch.setattr(hopper_module, "num_sms", lambda device: rng.choice(num_programs))
    tilings = [HopperTiling(64, 24, 1, 3), HopperTiling(16, 96, 2, 4), HopperTiling(8, 64, 4, 2)]
    wide = torch.float32
    kinds = (1000, 1544, dtype, False), (33, 64, wide, False), (4104, 520, dtype, True), (3000, 8, dtype, False)
    for columns, inner, out_dtype, has_bias in kinds:
        x, weight = cancelling_numbers(80, columns, inner, dtype, DEVICE, seed=columns)
        weight[:: rng.randint(5, 9)] = float("nan")
        bias = (1e-4 * torch.randn(columns, device=DEVICE)).to(dtype)
        terms = (weight, bias if has_bias else None)
        want = gemm(x, *terms, out_dtype=out_dtype, tiling=REFERENCE)
        for _ in range(60):
            tiling = rng.choice(tilings)
            rows = rng.sample(range(80), rng.randint(1, tiling.rows))
            batch = torch.full((len(rows) + 9, inner + 16), float("nan"), dtype=dtype, device=DEVICE)
            part = batch[1 : len(rows) + 1, 8 : inner + 8]
            part.copy_(x[rows])
            assert suits_hopper(part, weight)
            out = torch.empty(len(rows), columns, dtype=out_dtype, device=DEVICE)
            gemm_hopper(part, *terms, out, tiling=tiling)
            assert torch.equal(out.nan_to_num(7.0), want[rows].nan_to_num(7.0)), (columns, inner, rows, tiling)
    x[5:9] = float("nan")
    out = gemm(x[:MAX_ROWS], weight)
    assert out[5:9].isnan().all()
    assert torch.equal(out[9:].nan_to_num(7.0), want[9:MAX_ROWS].nan_to_num(7.0))


@pytest.mark.gpu
@needs_hopper
def test_products_that_suit_are_the_hopper_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(x: torch.Tensor, *rest: object, **options: object) -> None:
        made.append(x.shape[0])
        gemm_hopper(x, *rest, **options)

    monkeypatch.setattr(gemm_module, "gemm_hopper", counted)
    x, weight = cancelling_numbers(65, 512, 1024, torch.bfloat16, DEVICE, seed=0)
    bias = weight[:, 0].contiguous()
    for others in ((x, weight), (F.pad(x[:8], (0, 1))[:, :1024], weight), (x[:, :1020].contiguous(), weight[:, :1020])):
        gemm(others[0], others[1].contiguous())
    gemm(x[:8], weight, k_segments=2)
    gemm(x[:8], weight, tiling=REFERENCE)
    assert not made
    want = gemm(x[:MAX_ROWS], weight, bias, out_dtype=torch.float32, tiling=REFERENCE)
    assert torch.equal(gemm(x[:MAX_ROWS], weight, bias, out_dtype=torch.float32), want)
    assert made == [MAX_ROWS]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize(("size", "num_programs"), [(256, 1), (1024, 3), (4096, 132)])
def test_a_chain_of_dependent_launches_keeps_its_order(
    num_rows: int, size: int, num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel begins while the one before works, with several tiles a program or one; memory is used again."""
    monkeypatch.setattr(hopper_module, "num_sms", lambda device: num_programs)
    weights = [torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) / size**0.5 for _ in range(6)]
    norm_weight = torch.ones(size, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(num_rows, size, device=DEVICE, dtype=torch.bfloat16)

    def chain(tiling: Tiling | None) -> torch.Tensor:
        y = x
        for index, weight in enumerate(weights):
            y = gemm(y, weight, tiling=tiling)
            if index % 2:
                y = add_rms_norm(y, x, norm_weight, 1e-6)[1]
        return y

    want = chain(REFERENCE)
    assert torch.equal(chain(None), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(None)
    for _ in range(50):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.gpu
@needs_hopper
def test_weights_that_were_just_written_are_read_anew() -> None:
    """Outside of a graph and in a replay, with a dependent kernel between the writing one and the product or none."""
    weight = torch.zeros(6144, 4096, device=DEVICE, dtype=torch.bfloat16)
    x = torch.ones(1, 4096, device=DEVICE, dtype=torch.bfloat16)
    norm_weight = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)
    gemm(add_rms_norm(x, x, norm_weight, 1e-6)[1], weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = gemm(x, weight)
    for value in range(1, 33):
        weight.fill_(value)
        plain = gemm(x, weight)
        weight.fill_(-value)
        normed = gemm(add_rms_norm(x, torch.zeros_like(x), norm_weight, 0.0)[1], weight)
        weight.fill_(value + 1)
        graph.replay()
        assert (plain == 4096 * value).all()
        assert (normed == -4096 * value).all()
        assert (replayed == 4096 * (value + 1)).all()
