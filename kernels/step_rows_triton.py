"""The small work around a step's rows on a card: one launch each.

Contract: what ``paged.kernels.step_rows`` says.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from paged.kernels.launch import is_dependent, launch

BLOCK: Final = 128
"""Rows of a program."""


def step_inputs_triton(
    slot_T: torch.Tensor,
    position_T: torch.Tensor,
    tokens_SP: torch.Tensor,
    blocks_SN: torch.Tensor,
    block_size: int,
    padding_slot: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``paged.kernels.step_rows.step_inputs``."""
    num_rows = slot_T.shape[0]
    token_T, position_out_T, cell_T = (torch.empty_like(slot_T, dtype=torch.int64) for _ in range(3))
    launch(
        _inputs_kernel,
        (triton.cdiv(num_rows, BLOCK),),
        slot_T,
        position_T,
        tokens_SP,
        blocks_SN,
        token_T,
        position_out_T,
        cell_T,
        num_rows,
        tokens_SP.shape[1],
        blocks_SN.shape[1],
        padding_slot,
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        IS_DEPENDENT=is_dependent(slot_T),
        num_warps=4,
        on=slot_T,
    )
    return token_T, position_out_T, cell_T


def keep_last_rows_triton(
    hidden_TN: torch.Tensor, row_B: torch.Tensor, kept_BN: torch.Tensor, not_finite_B: torch.Tensor
) -> None:
    """As ``paged.kernels.step_rows.keep_last_rows``."""
    width = hidden_TN.shape[1]
    block = triton.next_power_of_2(width)
    launch(
        _last_rows_kernel,
        (row_B.shape[0],),
        hidden_TN,
        row_B,
        kept_BN,
        not_finite_B,
        width,
        BLOCK=block,
        IS_DEPENDENT=is_dependent(hidden_TN),
        num_warps=max(1, min(8, block // 256)),
        on=hidden_TN,
    )


def keep_draws_triton(
    drawn: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    slot_R: torch.Tensor,
    position_R: torch.Tensor,
    tokens_SP: torch.Tensor,
    results_4S: torch.Tensor,
) -> None:
    """As ``paged.kernels.step_rows.keep_draws``."""
    num_rows = slot_R.shape[0]
    launch(
        _draws_kernel,
        (triton.cdiv(num_rows, BLOCK),),
        *drawn,
        slot_R,
        position_R,
        tokens_SP,
        results_4S,
        num_rows,
        tokens_SP.shape[1],
        results_4S.shape[1],
        BLOCK=BLOCK,
        IS_DEPENDENT=is_dependent(slot_R),
        num_warps=4,
        on=slot_R,
    )


# One kernel for graphs of all sizes and tables of all widths, whose entries are read and written one by one.
@triton.jit(do_not_specialize=["num_rows", "num_positions", "num_blocks", "padding_slot"])
def _inputs_kernel(
    slot_ptr,
    position_ptr,
    tokens_ptr,
    blocks_ptr,
    token_ptr,
    position_out_ptr,
    cell_ptr,
    num_rows,
    num_positions,
    num_blocks,
    padding_slot,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists_B = row_B < num_rows
    slot_B = tl.load(slot_ptr + row_B, exists_B, 0).to(tl.int64)
    position_B = tl.load(position_ptr + row_B, exists_B, 0).to(tl.int64)
    token_B = tl.load(tokens_ptr + slot_B * num_positions + position_B, exists_B, 0)
    block_B = tl.load(blocks_ptr + slot_B * num_blocks + position_B // BLOCK_SIZE, exists_B, 0)
    cell_B = block_B.to(tl.int64) * BLOCK_SIZE + position_B % BLOCK_SIZE
    tl.store(token_ptr + row_B, token_B.to(tl.int64), exists_B)
    tl.store(position_out_ptr + row_B, position_B, exists_B)
    tl.store(cell_ptr + row_B, tl.where(slot_B == padding_slot, -1, cell_B), exists_B)


@triton.jit
def _last_rows_kernel(
    hidden_ptr, row_ptr, kept_ptr, not_finite_ptr, width, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr
):
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + index).to(tl.int64)
    column_N = tl.arange(0, BLOCK)
    exists_N = column_N < width
    x_N = tl.load(hidden_ptr + row * width + column_N, exists_N, 0.0)
    tl.store(kept_ptr + index * width + column_N, x_N, exists_N)
    # Of finite numbers alone is the difference to itself 0.
    wide_N = x_N.to(tl.float32)
    not_finite = tl.max((wide_N - wide_N != 0.0).to(tl.int32))
    tl.store(not_finite_ptr + index, not_finite != 0)


@triton.jit(do_not_specialize=["num_rows", "num_positions", "num_columns"])
def _draws_kernel(
    token_ptr,
    logprob_ptr,
    behavior_ptr,
    nan_ptr,
    slot_ptr,
    position_ptr,
    tokens_ptr,
    results_ptr,
    num_rows,
    num_positions,
    num_columns,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists_B = row_B < num_rows
    token_B = tl.load(token_ptr + row_B, exists_B, 0).to(tl.int32)
    slot_B = tl.load(slot_ptr + row_B, exists_B, 0).to(tl.int64)
    position_B = tl.load(position_ptr + row_B, exists_B, 0)
    tl.store(tokens_ptr + slot_B * num_positions + position_B, token_B, exists_B)
    logprob_B = tl.load(logprob_ptr + row_B, exists_B, 0.0).to(tl.int32, bitcast=True)
    behavior_B = tl.load(behavior_ptr + row_B, exists_B, 0.0).to(tl.int32, bitcast=True)
    nan_B = tl.load(nan_ptr + row_B, exists_B, 0).to(tl.int32)
    tl.store(results_ptr + row_B, token_B, exists_B)
    tl.store(results_ptr + num_columns + row_B, logprob_B, exists_B)
    tl.store(results_ptr + 2 * num_columns + row_B, behavior_B, exists_B)
    tl.store(results_ptr + 3 * num_columns + row_B, nan_B, exists_B)
