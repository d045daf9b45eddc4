"""Paged attention on a card in Triton: decode rows split by split, chunks tile by tile, and one order of sums for both.

Contract, with T rows of the step, H query heads, K kv heads, G = H / K, D head size: what ``paged.kernels.attention``
says, for models in bf16 or fp16. Scores are fp32 sums of products in the model's dtype. A split of ``kv_split`` keys is
an online softmax over its tiles of ``kv_tile`` keys, with base 2: weights are ``exp2(score * c - top * c)`` with
c = scale * log2(e), rounded to the model's dtype, and both the sum of weights and the sum of values are matrix products
that continue the accumulator. Splits are folded left to right in fp32: the first as it is, each later one as
``sum * a + sum2 * b``. Which kernel takes a row, the rows beside it, chunks, blocks and warps leave its bits alone:
equal programs of exact or elementwise operations, and matrix products that keep one order (shown on the card).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from paged.kernels.attention_hopper import chunk_attention_hopper, suits_hopper
from paged.kernels.batch_layout import BatchLayout
from paged.kernels.kv_cache import LayerCache
from paged.kernels.numerics import Numerics

LOG2_E = math.log2(math.e)

# How the kernels are launched; no bits hang on these.
CHUNK_ROWS = 128
CHUNK_WARPS = 8
CHUNK_STAGES = 2
DECODE_WARPS = 4
DECODE_STAGES = 2
# Splits read at a time and dimensions of a program, for rows with few splits and with many.
FOLDS = ((4, 256), (32, 32))


def supported(q_THD: torch.Tensor, cache: LayerCache) -> bool:
    """Whether the kernels take such queries and such a cache; the cache may also be wider than the model, in fp32."""
    head_dim = q_THD.shape[2]
    return (
        q_THD.dtype in (torch.bfloat16, torch.float16)
        and cache.key.dtype in (q_THD.dtype, torch.float32)
        and head_dim in (16, 32, 64, 128, 256)
        and q_THD.shape[1] // cache.num_kv_heads <= 64
    )


@dataclass(frozen=True, slots=True, eq=False)
class DecodeWork:
    """The splits of the rows that are alone in their sequence's part of the step, on the device.

    Attributes:
        items_I4: int32, one split: sequence, row of the step, number of the split, keys of the row.
        rows_N3: int32, one row: row of the step, its first item, number of its items.
        most_splits: the largest number of items of a row; a launch may be built for it, no bits hang on it.
    """

    items_I4: torch.Tensor
    rows_N3: torch.Tensor
    most_splits: int


def attention_triton(
    q_THD: torch.Tensor, cache: LayerCache, layout: BatchLayout, *, scale: float, numerics: Numerics
) -> torch.Tensor:
    """Attention of all rows of a step as [T, H, D], in the dtype of ``q``; arguments as ``attention`` takes them.

    Raises:
        AssertionError: on queries or a cache that ``supported`` refuses, or a scale that is not positive.
    """
    assert supported(q_THD, cache), (q_THD.shape, q_THD.dtype, cache.key.shape, cache.key.dtype)
    assert q_THD.is_contiguous(), q_THD.stride()
    assert scale > 0, scale
    out_THD = torch.empty_like(q_THD)
    work = _decode_work(layout, numerics)
    if work is not None:
        decode_attention(q_THD, cache, layout, work, out_THD, scale=scale, numerics=numerics)
    if max(layout.lengths) > 1:
        chunk_attention(q_THD, cache, layout, out_THD, scale=scale, numerics=numerics)
    return out_THD


def decode_attention(
    q_THD: torch.Tensor,
    cache: LayerCache,
    layout: BatchLayout,
    work: DecodeWork,
    out_THD: torch.Tensor,
    *,
    scale: float,
    numerics: Numerics,
) -> None:
    """Write attention of the rows of ``work`` to their rows of ``out_THD``: one program a split, then one a row."""
    num_kv_heads, head_dim = cache.num_kv_heads, cache.head_dim
    num_shared = q_THD.shape[1] // num_kv_heads
    num_items = work.items_I4.shape[0]
    sums_IHD = q_THD.new_empty((num_items, q_THD.shape[1], head_dim), dtype=torch.float32)
    # The greatest score and the sum of weights of each item and head.
    tops_IH, totals_IH = q_THD.new_empty((2, num_items, q_THD.shape[1]), dtype=torch.float32)
    # On Hopper and later the second kernel starts before the first ends, and waits inside for what that one writes.
    chained = q_THD.is_cuda and torch.cuda.get_device_capability(q_THD.device)[0] >= 9
    fold_options: dict[str, Any] = {"launch_pdl": True} if chained else {}
    _decode_kernel[(num_items * num_kv_heads,)](
        q_THD,
        cache.key,
        cache.value,
        layout.block_tables_BN,
        work.items_I4,
        sums_IHD,
        tops_IH,
        totals_IH,
        layout.block_tables_BN.stride(0),
        scale * LOG2_E,
        NUM_KV_HEADS=num_kv_heads,
        NUM_SHARED=num_shared,
        ROWS=max(16, triton.next_power_of_2(num_shared)),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.block_size,
        TILE=numerics.kv_tile,
        SPLIT=numerics.kv_split,
        CHAINED=chained,
        num_warps=DECODE_WARPS,
        num_stages=DECODE_STAGES,
        enable_fp_fusion=False,
    )
    splits, width = FOLDS[work.most_splits > 1 + FOLDS[0][0]]
    width = min(head_dim, width)
    _fold_kernel[(work.rows_N3.shape[0] * q_THD.shape[1], head_dim // width)](
        sums_IHD,
        tops_IH,
        totals_IH,
        work.rows_N3,
        out_THD,
        scale * LOG2_E,
        NUM_HEADS=q_THD.shape[1],
        HEAD_DIM=head_dim,
        DIMS=width,
        SPLITS=splits,
        CHAINED=chained,
        num_warps=1,
        enable_fp_fusion=False,
        **fold_options,
    )


def chunk_attention(
    q_THD: torch.Tensor,
    cache: LayerCache,
    layout: BatchLayout,
    out_THD: torch.Tensor,
    *,
    scale: float,
    numerics: Numerics,
) -> None:
    """Write attention of the sequences with several rows to their rows of ``out_THD``."""
    if suits_hopper(q_THD, cache, numerics):
        chunk_attention_hopper(q_THD, cache, layout, out_THD, factor=scale * LOG2_E, numerics=numerics)
        return
    num_kv_heads = cache.num_kv_heads
    num_shared = q_THD.shape[1] // num_kv_heads
    padded = triton.next_power_of_2(num_shared)
    rows = min(CHUNK_ROWS, 64) if cache.head_dim > 128 else CHUNK_ROWS
    tiles_N4 = layout.chunk_tiles(rows // padded)
    _chunk_kernel[(tiles_N4.shape[0] * num_kv_heads,)](
        q_THD,
        cache.key,
        cache.value,
        layout.block_tables_BN,
        tiles_N4,
        out_THD,
        layout.block_tables_BN.stride(0),
        scale * LOG2_E,
        NUM_KV_HEADS=num_kv_heads,
        NUM_SHARED=num_shared,
        PADDED=padded,
        ROWS=rows,
        HEAD_DIM=cache.head_dim,
        BLOCK_SIZE=cache.block_size,
        TILE=numerics.kv_tile,
        SPLIT=numerics.kv_split,
        num_warps=CHUNK_WARPS,
        num_stages=CHUNK_STAGES,
        enable_fp_fusion=False,
    )


def _decode_work(layout: BatchLayout, numerics: Numerics) -> DecodeWork | None:
    return layout.derived(("splits", numerics.kv_split), lambda: _make_decode_work(layout, numerics.kv_split))


def _make_decode_work(layout: BatchLayout, split: int) -> DecodeWork | None:
    single_N = np.flatnonzero(np.asarray(layout.lengths) == 1)
    if single_N.size == 0:
        return None
    row_N = np.asarray(layout.offsets)[single_N]
    keys_N = np.asarray(layout.starts)[single_N] + 1
    count_N = -(-keys_N // split)
    end_N = np.cumsum(count_N)
    first_N = end_N - count_N
    number_I = np.arange(end_N[-1]) - np.repeat(first_N, count_N)
    items_I4 = np.column_stack(
        (*(np.repeat(x, count_N) for x in (single_N, row_N)), number_I, np.repeat(keys_N, count_N))
    )
    # One transfer, and items first: they keep the alignment that lets a program read its item at once.
    host = np.concatenate((items_I4.ravel(), np.column_stack((row_N, first_N, count_N)).ravel())).astype(np.int32)
    items, rows = torch.from_numpy(host).to(layout.positions_T.device).split([items_I4.size, 3 * row_N.size])
    return DecodeWork(items.view(-1, 4), rows.view(-1, 3), int(count_N.max()))


@triton.jit
def _attend_split(
    q_RD,
    last_R,
    key_ptr,
    value_ptr,
    table_ptr,
    head,
    first,
    num_keys,
    factor,
    NUM_KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Softmax over the split that starts at key ``first``: greatest score, sum of weights, sum of values.

    Row r sees the keys up to position ``last_R[r]``; ``num_keys`` keys are stored. A row that sees none of the split
    gets -inf and zeros.
    """
    tl.assume(num_keys > first)
    dim_D = tl.arange(0, HEAD_DIM)
    ones = tl.full([TILE, 16], 1.0, q_RD.dtype)
    top_R = tl.full([ROWS], float("-inf"), tl.float32)
    total_RW = tl.zeros([ROWS, 16], tl.float32)
    sum_RD = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for start in range(first, tl.minimum(first + SPLIT, num_keys), TILE):
        key_P = start + tl.arange(0, TILE)
        stored_P = key_P < num_keys
        block_P = tl.load(table_ptr + key_P // BLOCK_SIZE, stored_P, 0)
        cell_P = block_P.to(tl.int64) * BLOCK_SIZE + key_P % BLOCK_SIZE
        offset_PD = (cell_P * NUM_KV_HEADS + head)[:, None] * HEAD_DIM + dim_D[None]
        # Stale memory may be NaN, and 0 * NaN is no zero.
        key_PD = tl.load(key_ptr + offset_PD, stored_P[:, None], 0.0).to(q_RD.dtype)
        value_PD = tl.load(value_ptr + offset_PD, stored_P[:, None], 0.0).to(q_RD.dtype)
        score_RP = tl.dot(q_RD, key_PD.T)
        score_RP = tl.where(key_P[None] <= last_R[:, None], score_RP, float("-inf"))
        new_R = tl.maximum(top_R, tl.max(score_RP, 1))
        base_R = tl.where(new_R == float("-inf"), 0.0, new_R) * factor
        # Products are rounded before they are subtracted: only so is the decay exactly 1 where the maximum stays.
        decay_R = tl.exp2(top_R * factor - base_R)
        weight_RP = tl.exp2(tl.fma(score_RP, factor, -base_R[:, None])).to(q_RD.dtype)
        total_RW = tl.dot(weight_RP, ones, total_RW * decay_R[:, None])
        sum_RD = tl.dot(weight_RP, value_PD, sum_RD * decay_R[:, None])
        top_R = new_R
    # All columns of the total are alike.
    return top_R, tl.max(total_RW, 1), sum_RD


@triton.jit
def _decode_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    tables_ptr,
    items_ptr,
    sums_ptr,
    tops_ptr,
    totals_ptr,
    table_stride,
    factor,
    NUM_KV_HEADS: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One split of one row for the query heads of one kv head."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    item = tl.program_id(0) // NUM_KV_HEADS
    head = tl.program_id(0) % NUM_KV_HEADS
    sequence = tl.load(items_ptr + item * 4)
    row = tl.load(items_ptr + item * 4 + 1)
    number = tl.load(items_ptr + item * 4 + 2)
    num_keys = tl.load(items_ptr + item * 4 + 3)
    dim_D = tl.arange(0, HEAD_DIM)
    shared_R = tl.arange(0, ROWS)
    is_head_R = shared_R < NUM_SHARED
    head_R = head * NUM_SHARED + shared_R
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * NUM_SHARED
    q_offset_RD = (row.to(tl.int64) * NUM_HEADS + head_R)[:, None] * HEAD_DIM + dim_D[None]
    q_RD = tl.load(q_ptr + q_offset_RD, is_head_R[:, None], 0.0)
    last_R = tl.zeros([ROWS], tl.int32) + (num_keys - 1)
    top_R, total_R, sum_RD = _attend_split(
        q_RD,
        last_R,
        key_ptr,
        value_ptr,
        tables_ptr + sequence.to(tl.int64) * table_stride,
        head,
        number * SPLIT,
        num_keys,
        factor,
        NUM_KV_HEADS,
        ROWS,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE,
        SPLIT,
    )
    place_R = item.to(tl.int64) * NUM_HEADS + head_R
    tl.store(tops_ptr + place_R, top_R, is_head_R)
    tl.store(totals_ptr + place_R, total_R, is_head_R)
    tl.store(sums_ptr + place_R[:, None] * HEAD_DIM + dim_D[None], sum_RD, is_head_R[:, None])


@triton.jit
def _fold(top, total, sums, top2, total2, sums2, factor):
    """Fold the split to the right (2) into what lies to its left; a split that a row does not reach changes nothing."""
    new = tl.maximum(top, top2)
    base = new * factor
    left = tl.exp2(top * factor - base)
    right = tl.exp2(top2 * factor - base)
    if len(sums.shape) == 2:
        return new, total * left + total2 * right, sums * left[:, None] + sums2 * right[:, None]
    else:
        return new, total * left + total2 * right, sums * left + sums2 * right


@triton.jit
def _fold_kernel(
    sums_ptr,
    tops_ptr,
    totals_ptr,
    rows_ptr,
    out_ptr,
    factor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Fold the splits of DIMS dimensions of one row and head; SPLITS of them are read at a time."""
    index = tl.program_id(0) // NUM_HEADS
    head = tl.program_id(0) % NUM_HEADS
    row = tl.load(rows_ptr + index * 3)
    first = tl.load(rows_ptr + index * 3 + 1)
    count = tl.load(rows_ptr + index * 3 + 2)
    dim_D = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    place = first.to(tl.int64) * NUM_HEADS + head
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    top = tl.load(tops_ptr + place)
    total = tl.load(totals_ptr + place)
    sum_D = tl.load(sums_ptr + place * HEAD_DIM + dim_D)
    for start in range(1, count, SPLITS):
        for step in tl.static_range(SPLITS):
            # Beyond the last split there is nothing, which folds into no change.
            exists = start + step < count
            here = place + (start + step) * NUM_HEADS
            top2 = tl.load(tops_ptr + here, exists, float("-inf"))
            total2 = tl.load(totals_ptr + here, exists, 0.0)
            sum2_D = tl.load(sums_ptr + here * HEAD_DIM + dim_D, exists, 0.0)
            top, total, sum_D = _fold(top, total, sum_D, top2, total2, sum2_D, factor)
    out_offset = (row.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(out_ptr + out_offset + dim_D, (sum_D / total).to(out_ptr.dtype.element_ty))


@triton.jit
def _chunk_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    tables_ptr,
    tiles_ptr,
    out_ptr,
    table_stride,
    factor,
    NUM_KV_HEADS: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """A tile of positions of one sequence for the query heads of one kv head; splits are folded in registers."""
    tile = tl.program_id(0) // NUM_KV_HEADS
    head = tl.program_id(0) % NUM_KV_HEADS
    sequence = tl.load(tiles_ptr + tile * 4)
    first_row = tl.load(tiles_ptr + tile * 4 + 1)
    num_positions = tl.load(tiles_ptr + tile * 4 + 2)
    position = tl.load(tiles_ptr + tile * 4 + 3)
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * NUM_SHARED
    dim_D = tl.arange(0, HEAD_DIM)
    # Row r of the tile is position r // PADDED and head r % PADDED of those that share the kv head.
    place_R = tl.arange(0, ROWS) // PADDED
    shared_R = tl.arange(0, ROWS) % PADDED
    exists_R = (place_R < num_positions) & (shared_R < NUM_SHARED)
    row_R = (first_row + place_R).to(tl.int64) * NUM_HEADS + head * NUM_SHARED + shared_R
    offset_RD = row_R[:, None] * HEAD_DIM + dim_D[None]
    q_RD = tl.load(q_ptr + offset_RD, exists_R[:, None], 0.0)
    num_keys = position + num_positions
    last_R = position + tl.minimum(place_R, num_positions - 1)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    top_R, total_R, sum_RD = _attend_split(
        q_RD, last_R, key_ptr, value_ptr, table_ptr, head, 0, num_keys, factor,
        NUM_KV_HEADS, ROWS, HEAD_DIM, BLOCK_SIZE, TILE, SPLIT,
    )  # fmt: skip
    for first in range(SPLIT, num_keys, SPLIT):
        top2_R, total2_R, sum2_RD = _attend_split(
            q_RD, last_R, key_ptr, value_ptr, table_ptr, head, first, num_keys, factor,
            NUM_KV_HEADS, ROWS, HEAD_DIM, BLOCK_SIZE, TILE, SPLIT,
        )  # fmt: skip
        top_R, total_R, sum_RD = _fold(top_R, total_R, sum_RD, top2_R, total2_R, sum2_RD, factor)
    tl.store(out_ptr + offset_RD, (sum_RD / total_R[:, None]).to(out_ptr.dtype.element_ty), exists_R[:, None])
