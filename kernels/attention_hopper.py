"""Paged attention of chunks on Hopper: the Triton kernel's contract with one loading and two computing warp groups.

Contract: what ``paged.kernels.attention_triton`` says, to the bit: its decode kernel and this one may take rows of one
sequence. A program is 128 rows (positions times the query heads that share a kv head). Two warp groups multiply 64 rows
each, a tile's values together with the next one's keys, which a third fetches from the paged cache as one stage: by the
copy engine in spans of keys that lie side by side in a block, or thread by thread where blocks are of odd sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paged.kernels.batch_layout import BatchLayout, ChunkTiles
from paged.kernels.kv_cache import LayerCache
from paged.kernels.launch import has_wgmma, is_dependent, launch
from paged.kernels.numerics import Numerics

ROWS = 128
STAGES = 4
COMPUTE_REGISTERS = 224
LOAD_REGISTERS = 56
# Keys of a copy by the engine: the pattern in which shared memory is swizzled has 8 rows of 64 elements.
LEAST_SPAN = 8
MOST_SPAN = 16
_SPAN_LAYOUT = gl.NVMMASharedLayout(128, 16, rank=2)


def suits_hopper(dtype: torch.dtype, cache: LayerCache, numerics: Numerics) -> bool:
    """Whether the kernel takes queries of ``dtype`` and such a cache on the device where it lies."""
    return (
        has_wgmma(cache.key.device)
        and cache.key.dtype == dtype
        and cache.head_dim in (64, 128)
        and numerics.kv_tile == 64
    )


def chunk_attention_hopper(
    q_THD: torch.Tensor,
    cache: LayerCache,
    layout: BatchLayout,
    tiles: ChunkTiles,
    out_THD: torch.Tensor,
    *,
    factor: float,
    numerics: Numerics,
) -> None:
    """Write attention of the rows of ``tiles`` to their rows of ``out_THD``.

    ``factor`` is scale * log2(e).
    """
    num_shared = q_THD.shape[1] // cache.num_kv_heads
    span = span_of(cache.block_size)
    engine_keys, engine_values = _spans(cache, span) if span else (None, None)
    launch(
        _kernel,
        (tiles.tiles_N4.shape[0] * cache.num_kv_heads,),
        q_THD,
        cache.key,
        cache.value,
        engine_keys,
        engine_values,
        layout.block_tables_BN,
        tiles.tiles_N4,
        tiles.num_tiles_1,
        out_THD,
        layout.block_tables_BN.stride(0),
        factor,
        NUM_KV_HEADS=cache.num_kv_heads,
        NUM_SHARED=num_shared,
        PADDED=triton.next_power_of_2(num_shared),
        HEAD_DIM=cache.head_dim,
        BLOCK_SIZE=cache.block_size,
        TILE=numerics.kv_tile,
        SPLIT_TILES=numerics.kv_split // numerics.kv_tile,
        SPAN=span,
        STAGES=STAGES,
        LOAD_WARPS=1 if span else 4,
        COMPUTE_REGISTERS=COMPUTE_REGISTERS,
        LOAD_REGISTERS=LOAD_REGISTERS,
        IS_DEPENDENT=is_dependent(q_THD),
        num_warps=4,
        on=q_THD,
    )


def span_of(block_size: int) -> int:
    """Keys that the copy engine fetches at once, which must lie in one block; 0 if it cannot."""
    span = min(block_size & -block_size, MOST_SPAN)
    return span if span >= LEAST_SPAN else 0


def _spans(cache: LayerCache, span: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """What the copy engine must know to fetch 64 dimensions of ``span`` keys or values; built once for a cache."""
    found: tuple[TensorDescriptor, TensorDescriptor] | None = cache.derived.get("spans")
    if found is None:
        keys, values = (
            TensorDescriptor.from_tensor(x_NSKD.flatten(0, 1).flatten(1), [span, 64], _SPAN_LAYOUT)
            for x_NSKD in (cache.key, cache.value)
        )
        found = cache.derived["spans"] = (keys, values)
    return found


@gluon.jit
def _load_by_threads(
    key_ptr, value_ptr, table_ptr, head, num_keys, keys, values, ready, free,
    NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, LOAD_WARPS: gl.constexpr,
):  # fmt: skip
    """Copy tiles into the ring of stages: number t is keys of tile t and values of tile t - 1."""
    LANES: gl.constexpr = HEAD_DIM // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [LOAD_WARPS, 1], [1, 0])
    place_P = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    dim_D = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    num_tiles = gl.cdiv(num_keys, TILE)
    # What lies beyond the end is the last key again: stale memory, which may be NaN, is not read.
    key_P = gl.minimum(place_P, num_keys - 1)
    block_P = gl.load(table_ptr + key_P // BLOCK_SIZE)
    cell_P = key_P.to(gl.int64)
    for tile in range(num_tiles + 1):
        stage = tile % STAGES
        mbarrier.wait(free.index(stage), (tile // STAGES & 1) ^ 1)
        if tile > 0:
            offset_PD = ((cell_P * NUM_KV_HEADS + head) * HEAD_DIM)[:, None] + dim_D[None]
            async_copy.async_copy_global_to_shared(values.index(stage), value_ptr + offset_PD)
        cell_P = block_P.to(gl.int64) * BLOCK_SIZE + key_P % BLOCK_SIZE
        if tile < num_tiles:
            offset_PD = ((cell_P * NUM_KV_HEADS + head) * HEAD_DIM)[:, None] + dim_D[None]
            async_copy.async_copy_global_to_shared(keys.index(stage), key_ptr + offset_PD)
        async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
        key_P = gl.minimum((tile + 1) * TILE + place_P, num_keys - 1)
        block_P = gl.load(table_ptr + key_P // BLOCK_SIZE)


@gluon.jit
def _spans_of(stages, SPAN: gl.constexpr):
    """The stages as pieces of SPAN keys and 64 dimensions: in shared memory a tile is its columns, 64 at a time."""
    NUM: gl.constexpr = stages.shape[0] * stages.shape[1] * stages.shape[2] // (SPAN * 64)
    return stages._reinterpret(stages.dtype, [NUM, SPAN, 64], gl.NVMMASharedLayout(128, 16, rank=2))


@gluon.jit
def _copy_spans(
    engine, ready, stages, stage, table_ptr, head, tile, num_keys, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr, SPAN: gl.constexpr,
):  # fmt: skip
    """Have a tile copied into its stage span by span; what lies beyond the end is the last span again."""
    PARTS: gl.constexpr = TILE // SPAN
    HALVES: gl.constexpr = HEAD_DIM // 64
    spans = _spans_of(stages, SPAN)
    for part in gl.static_range(PARTS):
        key = gl.minimum(tile * TILE + part * SPAN, (num_keys - 1) // SPAN * SPAN)
        cell = gl.load(table_ptr + key // BLOCK_SIZE) * BLOCK_SIZE + key % BLOCK_SIZE
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                engine,
                [cell, head * HEAD_DIM + half * 64],
                ready,
                spans.index((stage * HALVES + half) * PARTS + part),
            )


@gluon.jit
def _load_by_engine(
    engine_keys, engine_values, value_ptr, table_ptr, head, num_keys, keys, values, ready, free,
    NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
    SPAN: gl.constexpr, STAGES: gl.constexpr, LOAD_WARPS: gl.constexpr,
):  # fmt: skip
    """Do as ``_load_by_threads`` does; keys of a span that are not stored may be anything, as scores are hidden."""
    BYTES: gl.constexpr = TILE * HEAD_DIM * keys.dtype.primitive_bitwidth // 8
    num_tiles = gl.cdiv(num_keys, TILE)
    # Values that are not stored must not be NaN, though they weigh nothing.
    ends_inside = num_keys % SPAN != 0
    for tile in range(num_tiles + 1):
        stage = tile % STAGES
        mbarrier.wait(free.index(stage), (tile // STAGES & 1) ^ 1)
        has_keys = tile < num_tiles
        has_values = (tile > 0) & (has_keys | (not ends_inside))
        mbarrier.expect(ready.index(stage), 2 * BYTES, has_keys & has_values)
        mbarrier.expect(ready.index(stage), BYTES, has_keys != has_values)
        if has_keys:
            _copy_spans(
                engine_keys, ready.index(stage), keys, stage, table_ptr, head, tile, num_keys,
                HEAD_DIM, BLOCK_SIZE, TILE, SPAN,
            )  # fmt: skip
        if has_values:
            _copy_spans(
                engine_values, ready.index(stage), values, stage, table_ptr, head, tile - 1, num_keys,
                HEAD_DIM, BLOCK_SIZE, TILE, SPAN,
            )  # fmt: skip
    if ends_inside:
        HALVES: gl.constexpr = HEAD_DIM // 64
        PARTS: gl.constexpr = TILE // SPAN
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [LOAD_WARPS, 1], [1, 0])
        spans = _spans_of(values, SPAN)
        place_P = (num_tiles - 1) * TILE + gl.arange(0, SPAN, gl.SliceLayout(1, layout))
        dim_D = head * HEAD_DIM + gl.arange(0, 64, gl.SliceLayout(0, layout))
        first = num_tiles % STAGES * HALVES * PARTS
        for part in gl.static_range(PARTS):
            key_P = gl.minimum(place_P + part * SPAN, num_keys - 1)
            cell_P = gl.load(table_ptr + key_P // BLOCK_SIZE).to(gl.int64) * BLOCK_SIZE + key_P % BLOCK_SIZE
            offset_PD = (cell_P * (NUM_KV_HEADS * HEAD_DIM))[:, None] + dim_D[None]
            for half in gl.static_range(HALVES):
                async_copy.async_copy_global_to_shared(
                    spans.index(first + half * PARTS + part), value_ptr + (offset_PD + half * 64)
                )
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(ready.index(num_tiles % STAGES), count=1)


@gluon.jit
def _load(
    engine_keys, engine_values, key_ptr, value_ptr, table_ptr, head, num_keys, keys, values, ready, free,
    NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
    SPAN: gl.constexpr, STAGES: gl.constexpr, LOAD_WARPS: gl.constexpr,
):  # fmt: skip
    if SPAN == 0:
        _load_by_threads(
            key_ptr, value_ptr, table_ptr, head, num_keys, keys, values, ready, free,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, STAGES, LOAD_WARPS,
        )  # fmt: skip
    else:
        _load_by_engine(
            engine_keys, engine_values, value_ptr, table_ptr, head, num_keys, keys, values, ready, free,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, SPAN, STAGES, LOAD_WARPS,
        )  # fmt: skip


@gluon.jit
def fold(
    top_R, total_RW, sum_RD, top2_R, total2_RW, sum2_RD, factor, ROWS_OF_SUM: gl.constexpr, ROWS_OF_TOTAL: gl.constexpr
):
    """Fold the split to the right (2) into what lies to its left; into nothing, it is taken as it is."""
    new_R = gl.maximum(top_R, top2_R)
    base_R = new_R * factor
    base_R = gl.where(new_R == float("-inf"), 0.0, base_R)
    left_R = gl.exp2(top_R * factor - base_R)
    right_R = gl.exp2(top2_R * factor - base_R)
    left_D, right_D = gl.convert_layout(left_R, ROWS_OF_SUM), gl.convert_layout(right_R, ROWS_OF_SUM)
    left_W, right_W = gl.convert_layout(left_R, ROWS_OF_TOTAL), gl.convert_layout(right_R, ROWS_OF_TOTAL)
    total_RW = total_RW * left_W[:, None] + total2_RW * right_W[:, None]
    sum_RD = sum_RD * left_D[:, None] + sum2_RD * right_D[:, None]
    return new_R, total_RW, sum_RD


@gluon.jit
def _hide(score_RP, tile, last_R, position, SCORE: gl.constexpr, TILE: gl.constexpr):
    """Scores of the tile with the keys beyond a row's position taken out; only the last tiles have such keys."""
    if (tile + 1) * TILE > position + 1:
        key_P = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, SCORE))
        score_RP = gl.where(key_P[None] <= last_R[:, None], score_RP, float("-inf"))
    return score_RP


@gluon.jit
def _step(
    tile, starts_split: gl.constexpr, follows_start, queries, keys, values, ones_PW, zero_RP, ready, free, weight_RP,
    top_R, total_RW, sum_RD, last_R, position, factor, SCORE: gl.constexpr, SUM: gl.constexpr, TOTAL: gl.constexpr,
    TILE: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add the values of tile - 1 to the sums, of a split that it starts if ``follows_start``, and weigh ``tile``.

    Its stage is there; the next one is when this returns: greatest scores, weights, the decay of the sums, and these.
    """
    stage = tile % STAGES
    if SPAN == 0:
        fence_async_shared()
    score_token = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), zero_RP, use_acc=False, is_async=True)
    sum_token = warpgroup_mma(
        gl.convert_layout(weight_RP, gl.DotOperandLayout(0, SUM, 2)), values.index(stage), sum_RD,
        use_acc=not follows_start, is_async=True,
    )  # fmt: skip
    total_token = warpgroup_mma(
        gl.convert_layout(weight_RP, gl.DotOperandLayout(0, TOTAL, 2)), ones_PW, total_RW,
        use_acc=not follows_start, is_async=True,
    )  # fmt: skip
    score_RP = _hide(warpgroup_mma_wait(2, [score_token]), tile, last_R, position, SCORE, TILE)
    new_R = gl.max(score_RP, 1)
    if not starts_split:
        new_R = gl.maximum(top_R, new_R)
    base_R = gl.where(new_R == float("-inf"), 0.0, new_R) * factor
    decay_R = gl.exp2(top_R * factor - base_R)
    wide_RP = gl.exp2(gl.fma(score_RP, gl.full_like(score_RP, 0.0) + factor, -base_R[:, None]))
    # Compilers move exponentials beyond the wait for the products, so that nothing overlaps: unless the wait takes
    # them along, and waiting for the next stage, which is a loop, stands before it.
    mbarrier.wait(ready.index((tile + 1) % STAGES), (tile + 1) // STAGES & 1)
    total_RW, sum_RD, wide_RP, decay_R = warpgroup_mma_wait(0, [total_token, sum_token, wide_RP, decay_R])
    mbarrier.arrive(free.index(stage), count=1)
    return new_R, wide_RP.to(queries.dtype), decay_R, total_RW, sum_RD


@gluon.jit
def _rows(
    group, first_row, num_positions, head, NUM_KV_HEADS: gl.constexpr, NUM_SHARED: gl.constexpr,
    PADDED: gl.constexpr, HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Where the group's rows lie among queries and outputs, and which of them exist.

    Row r of the program is position r // PADDED and head r % PADDED of those that share the kv head.
    """
    place_R = group * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    dim_D = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    shared_R = place_R % PADDED
    exists_R = (place_R // PADDED < num_positions) & (shared_R < NUM_SHARED)
    row_R = (first_row + place_R // PADDED).to(gl.int64) * (NUM_KV_HEADS * NUM_SHARED) + head * NUM_SHARED + shared_R
    return (row_R * HEAD_DIM)[:, None] + dim_D[None], exists_R


@gluon.jit
def _compute(
    group, q_ptr, q, keys, values, ones, ready, free, out_ptr, first_row, num_positions, position,
    head, factor, NUM_KV_HEADS: gl.constexpr, NUM_SHARED: gl.constexpr, PADDED: gl.constexpr,
    HEAD_DIM: gl.constexpr, TILE: gl.constexpr, SPLIT_TILES: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attention of rows 64 * group to 64 * group + 63 of the program."""
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    ROW_OF_SUM: gl.constexpr = gl.SliceLayout(1, SUM)
    ROW_OF_TOTAL: gl.constexpr = gl.SliceLayout(1, TOTAL)
    dtype: gl.constexpr = q.dtype
    num_tiles = gl.cdiv(position + num_positions, TILE)
    last_R = position + gl.minimum((group * 64 + gl.arange(0, 64, ROW)) // PADDED, num_positions - 1)
    # Here, and not before the groups part, so that keys are on their way meanwhile.
    LANES: gl.constexpr = HEAD_DIM // 8
    GATHER: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    q_offset_RD, exists_R = _rows(
        group, first_row, num_positions, head, NUM_KV_HEADS, NUM_SHARED, PADDED, HEAD_DIM, GATHER
    )
    queries = q.index(group)
    queries.store(gl.load(q_ptr + q_offset_RD, exists_R[:, None], 0.0))
    fence_async_shared()
    ones_PW = ones.permute((1, 0))
    zero_RP = gl.zeros([64, TILE], gl.float32, SCORE)
    # The fold of all splits before the one in progress, and that one's sums.
    all_top_R = gl.full([64], float("-inf"), gl.float32, ROW)
    all_total_RW = gl.zeros([64, 8], gl.float32, TOTAL)
    all_sum_RD = gl.zeros([64, HEAD_DIM], gl.float32, SUM)
    total_RW = gl.zeros([64, 8], gl.float32, TOTAL)
    sum_RD = gl.zeros([64, HEAD_DIM], gl.float32, SUM)

    mbarrier.wait(ready.index(0), 0)
    fence_async_shared()
    score_RP = warpgroup_mma(queries, keys.index(0).permute((1, 0)), zero_RP, use_acc=False)
    mbarrier.arrive(free.index(0), count=1)
    score_RP = _hide(score_RP, 0, last_R, position, SCORE, TILE)
    top_R = gl.max(score_RP, 1)
    weight_RP = gl.exp2(gl.fma(score_RP, gl.full_like(score_RP, 0.0) + factor, -(top_R * factor)[:, None])).to(dtype)
    mbarrier.wait(ready.index(1 % STAGES), 1 // STAGES & 1)
    for first in range(0, num_tiles, SPLIT_TILES):
        if first > 0:
            new_R, weight_RP, decay_R, total_RW, sum_RD = _step(
                first, True, SPLIT_TILES == 1, queries, keys, values, ones_PW, zero_RP, ready, free, weight_RP,
                top_R, total_RW, sum_RD, last_R, position, factor, SCORE, SUM, TOTAL, TILE, SPAN, STAGES,
            )  # fmt: skip
            all_top_R, all_total_RW, all_sum_RD = fold(
                all_top_R, all_total_RW, all_sum_RD, top_R, total_RW, sum_RD, factor, ROW_OF_SUM, ROW_OF_TOTAL
            )
            top_R = new_R
        for tile in range(first + 1, gl.minimum(first + SPLIT_TILES, num_tiles)):
            top_R, weight_RP, decay_R, total_RW, sum_RD = _step(
                tile, False, tile == first + 1, queries, keys, values, ones_PW, zero_RP, ready, free, weight_RP,
                top_R, total_RW, sum_RD, last_R, position, factor, SCORE, SUM, TOTAL, TILE, SPAN, STAGES,
            )  # fmt: skip
            total_RW = total_RW * gl.convert_layout(decay_R, ROW_OF_TOTAL)[:, None]
            sum_RD = sum_RD * gl.convert_layout(decay_R, ROW_OF_SUM)[:, None]
    fence_async_shared()
    use_acc = (num_tiles - 1) % SPLIT_TILES != 0
    total_RW = warpgroup_mma(
        gl.convert_layout(weight_RP, gl.DotOperandLayout(0, TOTAL, 2)), ones_PW, total_RW, use_acc=use_acc
    )
    sum_RD = warpgroup_mma(
        gl.convert_layout(weight_RP, gl.DotOperandLayout(0, SUM, 2)), values.index(num_tiles % STAGES), sum_RD,
        use_acc=use_acc,
    )  # fmt: skip
    all_top_R, all_total_RW, all_sum_RD = fold(
        all_top_R, all_total_RW, all_sum_RD, top_R, total_RW, sum_RD, factor, ROW_OF_SUM, ROW_OF_TOTAL
    )
    # All columns of the total are alike.
    total_R = gl.convert_layout(gl.max(all_total_RW, 1), ROW_OF_SUM)
    out_offset_RD, exists_R = _rows(
        group, first_row, num_positions, head, NUM_KV_HEADS, NUM_SHARED, PADDED, HEAD_DIM, SUM
    )
    out_RD = (all_sum_RD / total_R[:, None]).to(dtype)
    gl.store(out_ptr + out_offset_RD, out_RD, exists_R[:, None])


# Tables of any width and lists that begin anywhere have one build: their entries are read one by one.
@gluon.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["num_tiles_ptr"])
def _kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    engine_keys,
    engine_values,
    tables_ptr,
    tiles_ptr,
    num_tiles_ptr,
    out_ptr,
    table_stride,
    factor,
    NUM_KV_HEADS: gl.constexpr,
    NUM_SHARED: gl.constexpr,
    PADDED: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    SPLIT_TILES: gl.constexpr,
    SPAN: gl.constexpr,
    STAGES: gl.constexpr,
    LOAD_WARPS: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
    IS_DEPENDENT: gl.constexpr,
):
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    number = gl.program_id(0) // NUM_KV_HEADS
    head = gl.program_id(0) % NUM_KV_HEADS
    if number >= gl.load(num_tiles_ptr):
        return
    table_row = gl.load(tiles_ptr + number * 4)
    first_row = gl.load(tiles_ptr + number * 4 + 1)
    num_positions = gl.load(tiles_ptr + number * 4 + 2)
    position = gl.load(tiles_ptr + number * 4 + 3)
    table_ptr = tables_ptr + table_row.to(gl.int64) * table_stride

    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    q = gl.allocate_shared_memory(dtype, [2, 64, HEAD_DIM], shared)
    keys = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], shared)
    values = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], shared)
    ones = gl.allocate_shared_memory(dtype, [8, TILE], shared)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # The copy engine arrives once, or every thread that loads when its copies have; each computing group once.
        mbarrier.init(ready.index(stage), count=1 if SPAN else 32 * LOAD_WARPS)
        mbarrier.init(free.index(stage), count=2)
    ones.store(gl.full([8, TILE], 1.0, dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    fence_async_shared()
    num_keys = position + num_positions
    gl.warp_specialize(
        [
            (_compute, (0, q_ptr, q, keys, values, ones, ready, free, out_ptr, first_row, num_positions, position,
                        head, factor, NUM_KV_HEADS, NUM_SHARED, PADDED, HEAD_DIM, TILE, SPLIT_TILES, SPAN, STAGES)),
            (_compute, (1, q_ptr, q, keys, values, ones, ready, free, out_ptr, first_row, num_positions, position,
                        head, factor, NUM_KV_HEADS, NUM_SHARED, PADDED, HEAD_DIM, TILE, SPLIT_TILES, SPAN, STAGES)),
            (_load, (engine_keys, engine_values, key_ptr, value_ptr, table_ptr, head, num_keys, keys, values, ready,
                     free, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, SPAN, STAGES, LOAD_WARPS)),
        ],
        [4, LOAD_WARPS],
        [COMPUTE_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
