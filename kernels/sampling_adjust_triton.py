"""Owns the rows that penalties or biases adjust: their copies in fp64, made on the card.

Shapes: R rows, V token ids, A adjusted rows, P rows with penalties, N biases, B groups of a quarter of a part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged.kernels.launch import is_dependent, launch
from paged.kernels.sampling_columns import SamplingColumns
from paged.kernels.sampling_math_triton import PART, load_part


def adjusting_rows(columns: SamplingColumns) -> list[Tensor]:
    """Numbers of the rows that have penalties and of those that have biases, the latter once for each."""
    rows = [] if columns.penalties is None else [columns.penalties.rows_P]
    return rows if columns.bias is None else [*rows, columns.bias.rows_N]


def adjusted(logits_RV: Tensor, columns: SamplingColumns, size: int) -> tuple[Tensor, Tensor, SamplingColumns]:
    """Rows after penalties and bias as ``processed_logits`` has them: their numbers, logits and columns.

    There is room for ``size`` rows; what is left over has the number R and a temperature below 0.
    """
    num_rows, vocab_size = logits_RV.shape
    device, penalties, bias = logits_RV.device, columns.penalties, columns.bias
    is_adjusted_R = torch.zeros(num_rows, dtype=torch.bool, device=device)
    for rows in adjusting_rows(columns):
        is_adjusted_R.index_fill_(0, rows, True)
    number_R = is_adjusted_R.cumsum(0)
    rows_A = torch.searchsorted(number_R, torch.arange(1, size + 1, device=device))
    adjusted_AV = torch.empty((size, vocab_size), dtype=torch.float64, device=device)
    entry_A, changes = rows_A, [logits_RV] * 5
    if penalties is not None:
        entries_P = torch.arange(len(penalties.rows_P), device=device)
        entry_A = torch.full_like(rows_A, -1)
        entry_A.index_copy_(0, number_R.index_select(0, penalties.rows_P) - 1, entries_P)
        changes = [penalties.repetition_P, penalties.presence_P, penalties.frequency_P]
        changes += [penalties.output_counts_PV.contiguous(), penalties.prompt_mask_PV.contiguous()]
    launch(
        _penalty_kernel, (triton.cdiv(vocab_size, PART), size),
        logits_RV, rows_A, entry_A, *changes, adjusted_AV, logits_RV.stride(0), vocab_size, num_rows,
        PENALIZES=penalties is not None, PART=PART, ALIGNED=vocab_size % 4 == 0, IS_DEPENDENT=is_dependent(logits_RV),
        num_warps=8, on=logits_RV,
    )  # fmt: skip
    if bias is not None and len(bias.rows_N):
        launch(
            _bias_kernel, (triton.cdiv(len(bias.rows_N), 128),),
            adjusted_AV, number_R, bias.rows_N, bias.token_ids_N, bias.values_N, vocab_size, len(bias.rows_N),
            BLOCK=128, IS_DEPENDENT=is_dependent(logits_RV), num_warps=4, on=logits_RV,
        )  # fmt: skip
    some_A = rows_A.clamp_max(num_rows - 1)

    def chosen(column_R: Tensor | None) -> Tensor | None:
        return None if column_R is None else column_R.index_select(0, some_A)

    temperature_A = columns.temperature_R.index_select(0, some_A).masked_fill_(rows_A == num_rows, -1.0)
    columns_A = SamplingColumns(
        temperature_R=temperature_A,
        seeds_R=columns.seeds_R.index_select(0, some_A),
        positions_R=columns.positions_R.index_select(0, some_A),
        top_k_R=chosen(columns.top_k_R),
        top_p_R=chosen(columns.top_p_R),
        min_p_R=chosen(columns.min_p_R),
    )
    return rows_A, adjusted_AV, columns_A


# Their number changes from step to step.
@triton.jit(do_not_specialize=["num_rows"])
def _penalty_kernel(
    logits_ptr, rows_ptr, entry_ptr, repetition_ptr, presence_ptr, frequency_ptr, counts_ptr, prompt_ptr, adjusted_ptr,
    stride, vocab_size, num_rows, PENALIZES: tl.constexpr, PART: tl.constexpr, ALIGNED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A part of a row in fp64 after its penalties, if it has any."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    place = tl.program_id(1)
    row = tl.load(rows_ptr + place)
    if row < num_rows:
        for quarter in range(4):
            x_B4, id_B4, _group_B = load_part(
                logits_ptr, row, part * 4 + quarter, stride, vocab_size, PART // 4, ALIGNED
            )
            x_B4 = x_B4.to(tl.float64)
            exists_B4 = id_B4 < vocab_size
            if PENALIZES:
                entry = tl.load(entry_ptr + place)
                if entry >= 0:
                    count_B4 = tl.load(counts_ptr + entry * vocab_size + id_B4, exists_B4, 0)
                    in_prompt_B4 = tl.load(prompt_ptr + entry * vocab_size + id_B4, exists_B4, 0) != 0
                    repetition = tl.load(repetition_ptr + entry)
                    repeated_B4 = tl.where(x_B4 > 0, x_B4 / repetition, x_B4 * repetition)
                    x_B4 = tl.where((count_B4 > 0) | in_prompt_B4, repeated_B4, x_B4)
                    x_B4 -= tl.load(frequency_ptr + entry) * count_B4.to(tl.float64)
                    x_B4 -= tl.load(presence_ptr + entry) * (count_B4 > 0).to(tl.float64)
            tl.store(adjusted_ptr + place.to(tl.int64) * vocab_size + id_B4, x_B4, exists_B4)


@triton.jit(do_not_specialize=["num_biases"])
def _bias_kernel(
    adjusted_ptr, number_ptr, rows_ptr, ids_ptr, values_ptr, vocab_size, num_biases, BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Add biases to the adjusted rows, whose numbers count from 1."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    bias_N = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists_N = bias_N < num_biases
    place_N = tl.load(number_ptr + tl.load(rows_ptr + bias_N, exists_N, 0), exists_N, 1) - 1
    logit_N_ptr = adjusted_ptr + place_N * vocab_size + tl.load(ids_ptr + bias_N, exists_N, 0)
    biased_N = tl.load(logit_N_ptr, exists_N, 0.0) + tl.load(values_ptr + bias_N, exists_N, 0.0)
    tl.store(logit_N_ptr, biased_N, exists_N)
