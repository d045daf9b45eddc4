"""Paged attention on a card in Triton: decode rows whole or split, chunks tile by tile, and one order of sums for all.

Contract, with T rows of the step, H query heads, K kv heads, G = H / K, D head size: what ``paged.kernels.attention``
says, for models in bf16 or fp16. Scores are fp32 sums of products in the model's dtype. A split of ``kv_split`` keys is
an online softmax over its tiles of ``kv_tile`` keys, with base 2: weights are ``exp2(score * c - top * c)`` with
c = scale * log2(e), rounded to the model's dtype, and both the sum of weights and the sum of values are matrix products
that continue the accumulator. Splits are folded left to right in fp32: the first as it is, each later one as
``sum * a + sum2 * b``. Which kernel takes a row, whether one program takes all its splits, the rows beside it, chunks,
blocks and warps leave its bits alone: equal programs of exact or elementwise operations, and matrix products that keep
one order (shown on the card).

No grid hangs on how much work there is, only on how long the lists of it are: programs read from the device what
counts, so that a CUDA graph can hold the launches. A program waits for the kernel before its own and only then lets the
next one start: so what was written before the one it waits for is there from the first.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from paged.kernels import attention_hopper, attention_hopper_decode
from paged.kernels.attention_hopper import chunk_attention_hopper, suits_hopper
from paged.kernels.attention_hopper_decode import decode_items_hopper, suits_hopper_decode
from paged.kernels.attention_hopper_fold import fold_splits_hopper
from paged.kernels.batch_layout import BatchLayout, ChunkTiles, DecodeWork
from paged.kernels.kv_cache import LayerCache
from paged.kernels.launch import is_dependent, launch, num_sms
from paged.kernels.numerics import Numerics

LOG2_E = math.log2(math.e)

# How the kernels are launched; no bits hang on these.
CHUNK_ROWS = 128
CHUNK_WARPS = 8
CHUNK_STAGES = 2
DECODE_WARPS = 4
DECODE_STAGES = 2
DECODE_PROGRAMS_PER_SM = 3
# Splits read at a time and dimensions of a program, for rows with few splits and with many.
FOLDS = ((4, 256), (32, 32))

# The only tile of keys that the kernels have been shown to be right and equal with.
KV_TILE = 64


def unsupported(q_THD: torch.Tensor, cache: LayerCache, numerics: Numerics) -> str | None:
    """Why the kernels refuse such queries and such a cache, or ``None``; an fp32 cache suits every model of theirs."""
    if q_THD.dtype not in (torch.bfloat16, torch.float16):
        return f"the model is in {q_THD.dtype}"
    if cache.key.dtype not in (q_THD.dtype, torch.float32):
        return f"the cache is in {cache.key.dtype} and the model in {q_THD.dtype}"
    if cache.head_dim not in (16, 32, 64, 128, 256):
        return f"the head size is {cache.head_dim}"
    if q_THD.shape[1] // cache.num_kv_heads > 64:
        return f"{q_THD.shape[1] // cache.num_kv_heads} query heads share a kv head"
    if numerics.kv_tile != KV_TILE:
        return f"kv_tile is {numerics.kv_tile}"
    return None


def positions_per_tile(num_heads: int, cache: LayerCache, dtype: torch.dtype, numerics: Numerics) -> int:
    """Most rows of a tile of chunks for the kernel that will take them: H query heads of ``dtype``, cached so."""
    rows = attention_hopper.ROWS if suits_hopper(dtype, cache, numerics) else _chunk_rows(cache)
    return rows // triton.next_power_of_2(num_heads // cache.num_kv_heads)


def programs_at_once(num_heads: int, cache: LayerCache, dtype: torch.dtype, numerics: Numerics) -> int:
    """Programs that the card runs at a time of the kernel that will take decode rows: H query heads of ``dtype``."""
    if suits_hopper_decode(num_heads, cache, dtype, numerics):
        return attention_hopper_decode.num_programs(cache.key.device)
    return _decode_programs(cache.key.device)


def attention_triton(
    q_THD: torch.Tensor, cache: LayerCache, layout: BatchLayout, *, scale: float, numerics: Numerics
) -> torch.Tensor:
    """Attention of all rows of a step as [T, H, D], in the dtype of ``q``; arguments as ``attention`` takes them.

    Raises:
        AssertionError: on queries or a cache that are ``unsupported``, or a scale that is not positive.
    """
    reason = unsupported(q_THD, cache, numerics)
    assert reason is None, reason
    assert q_THD.is_contiguous(), q_THD.stride()
    assert layout.block_tables_BN.stride(1) == 1, layout.block_tables_BN.stride()
    assert scale > 0, scale
    out_THD = torch.empty_like(q_THD)
    num_programs = programs_at_once(q_THD.shape[1], cache, q_THD.dtype, numerics)
    work = layout.decode_work(numerics.kv_split, cache.num_kv_heads, num_programs)
    if work is not None:
        decode_attention(q_THD, cache, layout, work, out_THD, scale=scale, numerics=numerics)
    tiles = layout.chunk_tiles(positions_per_tile(q_THD.shape[1], cache, q_THD.dtype, numerics))
    if tiles is not None:
        chunk_attention(q_THD, cache, layout, tiles, out_THD, scale=scale, numerics=numerics)
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
    """Write attention of the rows of ``work`` to theirs of ``out_THD``: its items, then the fold of what is split."""
    num_kv_heads, head_dim = cache.num_kv_heads, cache.head_dim
    num_shared = q_THD.shape[1] // num_kv_heads
    num_items = work.items_I4.shape[0]
    num_sums = num_items if work.most_splits else 0
    sums_IHD = q_THD.new_empty((num_sums, q_THD.shape[1], head_dim), dtype=torch.float32)
    # The greatest score and the sum of weights of each split and head.
    tops_IH, totals_IH = q_THD.new_empty((2, num_sums, q_THD.shape[1]), dtype=torch.float32)
    is_hopper = suits_hopper_decode(q_THD.shape[1], cache, q_THD.dtype, numerics)
    if is_hopper:
        decode_items_hopper(
            q_THD,
            cache,
            layout,
            work,
            sums_IHD,
            tops_IH,
            totals_IH,
            out_THD,
            factor=scale * LOG2_E,
            numerics=numerics,
        )
    else:
        launch(
            _decode_kernel,
            (min(num_items * num_kv_heads, _decode_programs(q_THD.device)),),
            q_THD,
            cache.key,
            cache.value,
            layout.block_tables_BN,
            work.items_I4,
            work.num_items_1,
            sums_IHD,
            tops_IH,
            totals_IH,
            out_THD,
            layout.block_tables_BN.stride(0),
            scale * LOG2_E,
            NUM_KV_HEADS=num_kv_heads,
            NUM_SHARED=num_shared,
            ROWS=max(16, triton.next_power_of_2(num_shared)),
            HEAD_DIM=head_dim,
            BLOCK_SIZE=cache.block_size,
            TILE=numerics.kv_tile,
            SPLIT=numerics.kv_split,
            IS_DEPENDENT=is_dependent(q_THD),
            num_warps=DECODE_WARPS,
            num_stages=DECODE_STAGES,
            on=q_THD,
        )
    if work.most_splits:
        _fold_split_rows(sums_IHD, tops_IH, totals_IH, work, out_THD, factor=scale * LOG2_E, is_hopper=is_hopper)


def _fold_split_rows(
    sums_IHD: torch.Tensor,
    tops_IH: torch.Tensor,
    totals_IH: torch.Tensor,
    work: DecodeWork,
    out_THD: torch.Tensor,
    *,
    factor: float,
    is_hopper: bool,
) -> None:
    """Fold the splits of the rows of ``work`` that are not whole, into their rows of ``out_THD``."""
    has_many = work.most_splits > 1 + FOLDS[0][0]
    if has_many and is_hopper:
        fold_splits_hopper(sums_IHD, tops_IH, totals_IH, work.rows_N3, out_THD, factor=factor)
        return
    num_heads, head_dim = out_THD.shape[1:]
    splits, width = FOLDS[has_many]
    width = min(head_dim, width)
    launch(
        _fold_kernel,
        (work.rows_N3.shape[0] * num_heads, head_dim // width),
        sums_IHD,
        tops_IH,
        totals_IH,
        work.rows_N3,
        out_THD,
        factor,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        DIMS=width,
        SPLITS=splits,
        IS_DEPENDENT=is_dependent(out_THD),
        num_warps=1,
        on=out_THD,
    )


def chunk_attention(
    q_THD: torch.Tensor,
    cache: LayerCache,
    layout: BatchLayout,
    tiles: ChunkTiles,
    out_THD: torch.Tensor,
    *,
    scale: float,
    numerics: Numerics,
) -> None:
    """Write attention of the rows of ``tiles`` to their rows of ``out_THD``.

    A tile holds at most ``positions_per_tile`` rows.
    """
    if suits_hopper(q_THD.dtype, cache, numerics):
        chunk_attention_hopper(q_THD, cache, layout, tiles, out_THD, factor=scale * LOG2_E, numerics=numerics)
        return
    num_kv_heads = cache.num_kv_heads
    num_shared = q_THD.shape[1] // num_kv_heads
    launch(
        _chunk_kernel,
        (tiles.tiles_N4.shape[0] * num_kv_heads,),
        q_THD,
        cache.key,
        cache.value,
        layout.block_tables_BN,
        tiles.tiles_N4,
        tiles.num_tiles_1,
        out_THD,
        layout.block_tables_BN.stride(0),
        scale * LOG2_E,
        NUM_KV_HEADS=num_kv_heads,
        NUM_SHARED=num_shared,
        PADDED=triton.next_power_of_2(num_shared),
        ROWS=_chunk_rows(cache),
        HEAD_DIM=cache.head_dim,
        BLOCK_SIZE=cache.block_size,
        TILE=numerics.kv_tile,
        SPLIT=numerics.kv_split,
        IS_DEPENDENT=is_dependent(q_THD),
        num_warps=CHUNK_WARPS,
        num_stages=CHUNK_STAGES,
        on=q_THD,
    )


def _chunk_rows(cache: LayerCache) -> int:
    """Rows of a program of the chunk kernel: positions times the query heads that share a kv head."""
    return 64 if cache.head_dim > 128 else CHUNK_ROWS


def _decode_programs(device: torch.device) -> int:
    """Programs that share the items: as many as the card holds at a time; interpreted, a few, each with much to do."""
    return (num_sms(device) if device.type == "cuda" else 1) * DECODE_PROGRAMS_PER_SM


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


# Tables of any width have one build: their entries are read one by one.
@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["num_items_ptr", "tops_ptr", "totals_ptr"]
)
def _decode_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    tables_ptr,
    items_ptr,
    num_items_ptr,
    sums_ptr,
    tops_ptr,
    totals_ptr,
    out_ptr,
    table_stride,
    factor,
    NUM_KV_HEADS: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Splits or whole rows for the query heads of one kv head each, as many as fall to this program."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dim_D = tl.arange(0, HEAD_DIM)
    shared_R = tl.arange(0, ROWS)
    is_head_R = shared_R < NUM_SHARED
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * NUM_SHARED
    for place in range(tl.program_id(0), tl.load(num_items_ptr) * NUM_KV_HEADS, tl.num_programs(0)):
        item = place // NUM_KV_HEADS
        head = place % NUM_KV_HEADS
        table_row = tl.load(items_ptr + item * 4)
        row = tl.load(items_ptr + item * 4 + 1)
        number = tl.load(items_ptr + item * 4 + 2)
        num_keys = tl.load(items_ptr + item * 4 + 3)
        head_R = head * NUM_SHARED + shared_R
        q_offset_RD = (row.to(tl.int64) * NUM_HEADS + head_R)[:, None] * HEAD_DIM + dim_D[None]
        q_RD = tl.load(q_ptr + q_offset_RD, is_head_R[:, None], 0.0)
        last_R = tl.zeros([ROWS], tl.int32) + (num_keys - 1)
        first = tl.maximum(number, 0) * SPLIT
        table_ptr = tables_ptr + table_row.to(tl.int64) * table_stride
        top_R, total_R, sum_RD = _attend_split(
            q_RD, last_R, key_ptr, value_ptr, table_ptr, head, first, num_keys, factor,
            NUM_KV_HEADS, ROWS, HEAD_DIM, BLOCK_SIZE, TILE, SPLIT,
        )  # fmt: skip
        if number >= 0:
            place_R = item.to(tl.int64) * NUM_HEADS + head_R
            tl.store(tops_ptr + place_R, top_R, is_head_R)
            tl.store(totals_ptr + place_R, total_R, is_head_R)
            tl.store(sums_ptr + place_R[:, None] * HEAD_DIM + dim_D[None], sum_RD, is_head_R[:, None])
        else:
            for start in range(SPLIT, num_keys, SPLIT):
                top2_R, total2_R, sum2_RD = _attend_split(
                    q_RD, last_R, key_ptr, value_ptr, table_ptr, head, start, num_keys, factor,
                    NUM_KV_HEADS, ROWS, HEAD_DIM, BLOCK_SIZE, TILE, SPLIT,
                )  # fmt: skip
                top_R, total_R, sum_RD = _fold(top_R, total_R, sum_RD, top2_R, total2_R, sum2_RD, factor)
            out_RD = (sum_RD / total_R[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + q_offset_RD, out_RD, is_head_R[:, None])


@triton.jit
def _greater(left, right):
    return tl.maximum(left, right)


@triton.jit(do_not_specialize_on_alignment=["tops_ptr", "totals_ptr"])
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
    IS_DEPENDENT: tl.constexpr,
):
    """Fold the splits of DIMS dimensions of one row and head, SPLITS of them read at a time."""
    index = tl.program_id(0) // NUM_HEADS
    head = tl.program_id(0) % NUM_HEADS
    row = tl.load(rows_ptr + index * 3)
    first = tl.load(rows_ptr + index * 3 + 1)
    count = tl.load(rows_ptr + index * 3 + 2)
    dim_D = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    place = first.to(tl.int64) * NUM_HEADS + head
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    exists = row >= 0
    top = tl.load(tops_ptr + place, exists, 0.0)
    total_D = tl.zeros([DIMS], tl.float32) + tl.load(totals_ptr + place, exists, 1.0)
    sum_D = tl.load(sums_ptr + place * HEAD_DIM + dim_D, exists, 0.0)
    split_S = tl.arange(0, SPLITS)
    for start in range(1, count, SPLITS):
        # Beyond the last split there is nothing, which folds into no change.
        exists_S = start + split_S < count
        here_S = place + (start + split_S) * NUM_HEADS
        top_S = tl.load(tops_ptr + here_S, exists_S, float("-inf"))
        total_S = tl.load(totals_ptr + here_S, exists_S, 0.0)
        # What ``_fold`` does, with the factors of all splits at once: a maximum is the same in any order.
        new_S = tl.maximum(tl.associative_scan(top_S, 0, _greater), top)
        before_S = tl.where(split_S == 0, top, tl.gather(new_S, tl.maximum(split_S - 1, 0), 0))
        base_S = new_S * factor
        left_S = tl.exp2(before_S * factor - base_S)
        right_S = tl.exp2(top_S * factor - base_S)
        for step in tl.static_range(SPLITS):
            here = place + (start + step) * NUM_HEADS
            sum2_D = tl.load(sums_ptr + here * HEAD_DIM + dim_D, start + step < count, 0.0)
            step_D = tl.full([DIMS], step, tl.int32)
            left_D, right_D = tl.gather(left_S, step_D, 0), tl.gather(right_S, step_D, 0)
            total_D = total_D * left_D + tl.gather(total_S, step_D, 0) * right_D
            sum_D = sum_D * left_D + sum2_D * right_D
        top = tl.max(new_S, 0)
    out_offset = (row.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(out_ptr + out_offset + dim_D, (sum_D / total_D).to(out_ptr.dtype.element_ty), exists)


@triton.jit
def _fold(top_R, total_R, sum_RD, top2_R, total2_R, sum2_RD, factor):
    """Fold the split to the right (2) into what lies to its left; a split that a row does not reach changes nothing."""
    new_R = tl.maximum(top_R, top2_R)
    base_R = new_R * factor
    left_R = tl.exp2(top_R * factor - base_R)
    right_R = tl.exp2(top2_R * factor - base_R)
    return new_R, total_R * left_R + total2_R * right_R, sum_RD * left_R[:, None] + sum2_RD * right_R[:, None]


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["num_tiles_ptr"])
def _chunk_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    tables_ptr,
    tiles_ptr,
    num_tiles_ptr,
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
    IS_DEPENDENT: tl.constexpr,
):
    """A tile of positions of one sequence for the query heads of one kv head; splits are folded in registers."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0) // NUM_KV_HEADS
    head = tl.program_id(0) % NUM_KV_HEADS
    if tile >= tl.load(num_tiles_ptr):
        return
    table_row = tl.load(tiles_ptr + tile * 4)
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
    table_ptr = tables_ptr + table_row.to(tl.int64) * table_stride
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
