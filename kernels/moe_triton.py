"""The experts of a mixture on a CUDA device: two grouped products and a sum of fixed order, without asking the host.

Contract: that of ``paged.kernels.moe`` over bf16 or fp16; an expert's products have the bits of
``paged.kernels.gemm``. Pairs of a row and a slot are sorted by expert. The grid holds as many tiles of rows as any
distribution over experts may need; a program finds its expert in the tiles' bounds on the device, or has nothing to do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paged.kernels.gemm import DTYPES, PLAIN_TILING, Tiling, has_copy_engine, operands, tree
from paged.kernels.launch import is_dependent, launch
from paged.kernels.rowwise_triton import silu_mul

_SUM_BLOCK = 1024


def run_experts(
    x_TN: torch.Tensor,
    experts_TC: torch.Tensor,
    weights_TC: torch.Tensor,
    gate_up_EIN: torch.Tensor,
    down_ENI: torch.Tensor,
    *,
    k_segments: int = 1,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """As ``paged.kernels.moe.run_experts`` for one rank; ``tiling`` as for ``products``."""
    assert weights_TC.is_contiguous(), weights_TC.stride()
    parts = (gate_up_EIN, down_ENI, weights_TC)
    made_TCN = products(x_TN, experts_TC, *parts, dtype=x_TN.dtype, k_segments=k_segments, tiling=tiling)
    num_rows, num_chosen, hidden = made_TCN.shape
    out_TN = torch.empty(num_rows, hidden, dtype=x_TN.dtype, device=x_TN.device)
    launch(
        _sum_kernel,
        (num_rows, triton.cdiv(hidden, _SUM_BLOCK)),
        made_TCN,
        out_TN,
        num_chosen,
        hidden,
        BLOCK=_SUM_BLOCK,
        IS_DEPENDENT=is_dependent(x_TN),
        num_warps=4,
        on=x_TN,
    )
    return out_TN


def products(
    x_TN: torch.Tensor,
    experts_TC: torch.Tensor,
    gate_up_EIN: torch.Tensor,
    down_ENI: torch.Tensor,
    weights_TC: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    k_segments: int = 1,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """What each row's experts make of it, [T, C, N].

    Args:
        x_TN, experts_TC, gate_up_EIN, down_ENI, k_segments: as for ``paged.kernels.moe.run_experts``.
        weights_TC: what the results, once rounded, are multiplied by; ``None`` for nothing.
        dtype: of the results: that of ``x``, or float32 for terms of longer sums.
        tiling: changes speed alone; ``None`` takes one for the size.
    """
    num_rows, num_chosen = experts_TC.shape
    num_experts, hidden, inner = down_ENI.shape
    assert x_TN.dtype in DTYPES, x_TN.dtype
    assert inner % k_segments == 0, (inner, k_segments)
    num_pairs = num_rows * num_chosen
    if tiling is None:
        tiling = _tiling_for(num_pairs // num_experts, k_segments) if has_copy_engine(x_TN) else PLAIN_TILING
    expert_P = experts_TC.flatten()
    order_P = expert_P.argsort(stable=True)
    # bincount would wait for the device.
    bounds_E = torch.searchsorted(expert_P[order_P], torch.arange(num_experts + 1, device=x_TN.device))
    tiles_E = (bounds_E.diff() + tiling.rows - 1) // tiling.rows
    tile_bounds_E = torch.nn.functional.pad(tiles_E.cumsum(0), (1, 0))
    # Each expert that is chosen at all leaves at most one tile unfilled.
    num_row_tiles = min(num_pairs, triton.cdiv(num_pairs, tiling.rows) + num_experts)

    def grouped(x_PK: torch.Tensor, weight_ENK: torch.Tensor, *, is_last: bool) -> torch.Tensor:
        num_columns, inner_size = weight_ENK.shape[1:]
        segments = k_segments if is_last else 1
        out_dtype = dtype if is_last else x_PK.dtype
        out_PN = torch.empty(num_pairs, num_columns, dtype=out_dtype, device=x_PK.device)
        x, weight, use_descriptors = operands(x_PK, weight_ENK.flatten(0, 1), tiling, segments)
        # Columns run fastest: neighbours in time share a tile of rows and an expert's weights.
        launch(
            _grouped_kernel,
            (triton.cdiv(num_columns, tiling.columns), num_row_tiles),
            x,
            weight,
            out_PN,
            order_P if is_last else None,
            weights_TC if is_last else None,
            bounds_E,
            tile_bounds_E,
            num_pairs,
            num_columns,
            inner_size,
            inner_size // segments,
            x_PK.stride(0),
            NUM_EXPERTS=num_experts,
            BLOCK=triton.next_power_of_2(num_experts),
            ROWS=tiling.rows,
            COLUMNS=tiling.columns,
            DEPTH=tiling.depth,
            WEIGHTS_FIRST=tiling.weights_first,
            SEGMENTS=segments,
            USE_DESCRIPTORS=use_descriptors,
            IS_DEPENDENT=is_dependent(x_PK),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            on=x_PK,
        )
        return out_PN

    gate_up_PI = grouped(x_TN[order_P // num_chosen], gate_up_EIN, is_last=False)
    made_PN = grouped(silu_mul(gate_up_PI), down_ENI, is_last=True)
    return made_PN.view(num_rows, num_chosen, hidden)


def _tiling_for(rows_per_expert: int, k_segments: int) -> Tiling:
    if rows_per_expert <= 16:
        return Tiling(16, 64, 128, True, 4, 5)
    if rows_per_expert <= 64:
        return Tiling(64, 64, 128, False, 4, 4)
    # Three accumulators of a larger tile would not fit a tree of segments.
    return Tiling(128, 128 if k_segments == 1 else 64, 64, False, 8, 4)


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_kernel(
    x,
    weight,
    out_pointer,
    pair_pointer,
    share_pointer,
    bounds_pointer,
    tile_bounds_pointer,
    num_pairs,
    num_columns,
    inner_size,
    segment_size,
    x_stride,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    SEGMENTS: tl.constexpr,
    USE_DESCRIPTORS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One tile of one expert's product; the last one goes to the pairs' rows, scaled by their shares if given."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row_tile = tl.program_id(1)
    experts_B = tl.arange(0, BLOCK)
    ends_B = tl.load(tile_bounds_pointer + 1 + experts_B, mask=experts_B < NUM_EXPERTS, other=2**31 - 1)
    expert = tl.sum((ends_B <= row_tile).to(tl.int32), 0)
    if expert < NUM_EXPERTS:
        tl.assume(segment_size > 0)
        tile_of_expert = row_tile - tl.load(tile_bounds_pointer + expert).to(tl.int32)
        first_row = tl.load(bounds_pointer + expert).to(tl.int32) + tile_of_expert * ROWS
        last_row = tl.load(bounds_pointer + expert + 1).to(tl.int32)
        first_column = tl.program_id(0) * COLUMNS
        # Rows and columns beyond the expert's are the next one's; they are computed and not stored.
        acc = tree(
            x, weight, first_row, expert * num_columns + first_column, 0, num_pairs, NUM_EXPERTS * num_columns,
            inner_size, segment_size, x_stride, ROWS, COLUMNS, DEPTH, WEIGHTS_FIRST, SEGMENTS, USE_DESCRIPTORS,
        )  # fmt: skip
        if WEIGHTS_FIRST:
            acc = tl.trans(acc)
        rows_R = first_row + tl.arange(0, ROWS)
        columns_C = first_column + tl.arange(0, COLUMNS)
        dtype = out_pointer.dtype.element_ty
        out_RC = acc.to(dtype)
        pair_R = rows_R.to(tl.int64)
        if pair_pointer is not None:
            pair_R = tl.load(pair_pointer + rows_R, mask=rows_R < last_row, other=0)
        if share_pointer is not None:
            share_R = tl.load(share_pointer + pair_R, mask=rows_R < last_row, other=0.0).to(tl.float32)
            out_RC = (out_RC.to(tl.float32) * share_R[:, None]).to(dtype)
        mask_RC = (rows_R < last_row)[:, None] & (columns_C < num_columns)[None, :]
        tl.store(out_pointer + pair_R[:, None] * num_columns + columns_C[None, :], out_RC, mask=mask_RC)


@triton.jit
def _sum_kernel(made_pointer, out_pointer, num_chosen, width, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """A part of one row: its slots' results, added in order and rounded after each."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_B = columns_B < width
    dtype = out_pointer.dtype.element_ty
    start = made_pointer + row * num_chosen * width
    total_B = tl.load(start + columns_B, mask=mask_B, other=0.0)
    for slot in range(1, num_chosen):
        made_B = tl.load(start + slot * width + columns_B, mask=mask_B, other=0.0)
        total_B = (total_B.to(tl.float32) + made_B.to(tl.float32)).to(dtype)
    tl.store(out_pointer + row * width + columns_B, total_B, mask=mask_B)
