"""Decode rows on Hopper: the Triton kernel's contract with a warp group that loads and one that multiplies.

Contract: what ``paged.kernels.attention_triton`` says, to the bit. As many programs as the card holds share the items,
which are splits and whole rows. One warp group of each claims them and gathers queries and tiles of keys and values
from the paged cache into a ring of stages, running ahead from item to item; the other multiplies 16 rows, the query
heads of one kv head and padding, and folds a whole row's splits in registers.
"""

from __future__ import annotations

import functools

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from paged.kernels.attention_hopper import fold, suits_hopper
from paged.kernels.batch_layout import BatchLayout, DecodeWork
from paged.kernels.kv_cache import LayerCache
from paged.kernels.launch import is_dependent, launch, num_sms
from paged.kernels.numerics import Numerics

ROWS = 16
# A stage is a tile of keys and one of values, 32 KiB for heads of 128; no bits hang on these.
STAGES = 3
PROGRAMS_PER_SM = 2
REGISTERS = 128
LOAD_REGISTERS = 64


def suits_hopper_decode(num_heads: int, cache: LayerCache, dtype: torch.dtype, numerics: Numerics) -> bool:
    """Whether the kernel takes H query heads of ``dtype`` and such a cache on the device where it lies."""
    return suits_hopper(dtype, cache, numerics) and num_heads // cache.num_kv_heads <= ROWS


def num_programs(device: torch.device) -> int:
    """Programs that the card runs at a time."""
    return PROGRAMS_PER_SM * num_sms(device)


def decode_items_hopper(
    q_THD: torch.Tensor,
    cache: LayerCache,
    layout: BatchLayout,
    work: DecodeWork,
    sums_IHD: torch.Tensor,
    tops_IH: torch.Tensor,
    totals_IH: torch.Tensor,
    out_THD: torch.Tensor,
    *,
    factor: float,
    numerics: Numerics,
) -> None:
    """Write the greatest score, the sum of weights and the sum of values of each split and head, and whole rows' out.

    ``factor`` is scale * log2(e).
    """
    launch(
        _kernel,
        (min(work.items_I4.shape[0] * cache.num_kv_heads, num_programs(q_THD.device)),),
        q_THD,
        cache.key,
        cache.value,
        layout.block_tables_BN,
        work.items_I4,
        work.num_items_1,
        claimed(q_THD.device),
        sums_IHD,
        tops_IH,
        totals_IH,
        out_THD,
        layout.block_tables_BN.stride(0),
        factor,
        NUM_KV_HEADS=cache.num_kv_heads,
        NUM_SHARED=q_THD.shape[1] // cache.num_kv_heads,
        ROWS=ROWS,
        HEAD_DIM=cache.head_dim,
        BLOCK_SIZE=cache.block_size,
        TILE=numerics.kv_tile,
        SPLIT=numerics.kv_split,
        STAGES=STAGES,
        LOAD_REGISTERS=LOAD_REGISTERS,
        IS_DEPENDENT=is_dependent(q_THD),
        num_warps=4,
        maxnreg=REGISTERS,
        on=q_THD,
    )


@functools.cache
def claimed(device: torch.device) -> torch.Tensor:
    """How many items the programs have claimed beyond their first; zero between launches. Graphs keep the address.

    Launches that use it must not overlap: all of a device come from one stream.
    """
    assert not torch.cuda.is_current_stream_capturing(), "run once before a graph is captured"
    return torch.zeros(1, dtype=torch.int32, device=device)


@gluon.jit
def _item(items_ptr, place, exists, NUM_KV_HEADS: gl.constexpr):
    """Row of the block tables, row of the step, number of the split and keys of the row of the item at ``place``."""
    item_ptr = items_ptr + place // NUM_KV_HEADS * 4
    return (
        gl.load(item_ptr, exists, 0),
        gl.load(item_ptr + 1, exists, 0),
        gl.load(item_ptr + 2, exists, 0),
        gl.load(item_ptr + 3, exists, 0),
    )


@gluon.jit
def _load(
    q_ptr, key_ptr, value_ptr, tables_ptr, items_ptr, num_items_ptr, claimed_ptr, table_stride, queries, keys, values,
    places, counts, keys_ready, values_ready, keys_free, values_free, NUM_KV_HEADS: gl.constexpr,
    NUM_SHARED: gl.constexpr, ROWS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr, IS_DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Copy the queries and the tiles of this program's items into the ring of stages; an item of no keys is the end."""
    LANES: gl.constexpr = HEAD_DIM // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place_P = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    dim_D = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    # Rows of padding are the last head again.
    shared_R = gl.minimum(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), NUM_SHARED - 1)
    num_places = gl.load(num_items_ptr) * NUM_KV_HEADS
    place = gl.program_id(0)
    # The list is as long as there are programs, even if the item does not count: no need to wait for the number first.
    table_row, row, number, num_keys = _item(items_ptr, place, True, NUM_KV_HEADS)
    # What lies beyond the end is the last key again: stale memory, which may be NaN, is not read.
    key_P = gl.minimum(gl.maximum(number, 0) * SPLIT + place_P, num_keys - 1)
    block_P = gl.load(tables_ptr + table_row.to(gl.int64) * table_stride + key_P // BLOCK_SIZE, place < num_places, 0)
    # Lists and block tables are on the device before the step's kernels start; queries, keys and values are theirs.
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    step = 0
    while place < num_places:
        head = place % NUM_KV_HEADS
        first = gl.maximum(number, 0) * SPLIT
        count = num_keys
        target = -1 - (row * NUM_KV_HEADS + head)
        if number >= 0:
            count = gl.minimum(num_keys - first, SPLIT)
            target = place
        row_R = (row.to(gl.int64) * NUM_KV_HEADS + head) * NUM_SHARED + shared_R
        num_tiles = gl.cdiv(count, TILE)
        for tile in range(num_tiles):
            stage = step % STAGES
            parity = (step // STAGES & 1) ^ 1
            cell_P = block_P.to(gl.int64) * BLOCK_SIZE + key_P % BLOCK_SIZE
            offset_PD = ((cell_P * NUM_KV_HEADS + head) * HEAD_DIM)[:, None] + dim_D[None]
            mbarrier.wait(keys_free.index(stage), parity)
            if tile == 0:
                places.index(stage).store(gl.full([1], target, gl.int32, ONE))
                counts.index(stage).store(gl.full([1], count, gl.int32, ONE))
                async_copy.async_copy_global_to_shared(
                    queries.index(stage), q_ptr + (row_R * HEAD_DIM)[:, None] + dim_D[None]
                )
            async_copy.async_copy_global_to_shared(keys.index(stage), key_ptr + offset_PD)
            async_copy.mbarrier_arrive(keys_ready.index(stage), increment_count=False)
            mbarrier.arrive(keys_ready.index(stage), count=1)
            mbarrier.wait(values_free.index(stage), parity)
            async_copy.async_copy_global_to_shared(values.index(stage), value_ptr + offset_PD)
            async_copy.mbarrier_arrive(values_ready.index(stage), increment_count=False)
            # What the next tile needs is fetched while there is no free stage.
            start = first + (tile + 1) * TILE
            if tile == num_tiles - 1:
                claim = gl.atomic_add(claimed_ptr, 1, sem="relaxed")
                # Every item is followed by one claim, whoever has it, so that this was the launch's last.
                gl.store(claimed_ptr, 0, claim == num_places - 1)
                place = claim + gl.num_programs(0)
                table_row, row, number, num_keys = _item(items_ptr, place, place < num_places, NUM_KV_HEADS)
                start = gl.maximum(number, 0) * SPLIT
            key_P = gl.minimum(start + place_P, num_keys - 1)
            block_P = gl.load(tables_ptr + table_row.to(gl.int64) * table_stride + key_P // BLOCK_SIZE, key_P >= 0, 0)
            step += 1
    stage = step % STAGES
    mbarrier.wait(keys_free.index(stage), (step // STAGES & 1) ^ 1)
    counts.index(stage).store(gl.full([1], 0, gl.int32, ONE))
    async_copy.mbarrier_arrive(keys_ready.index(stage), increment_count=False)
    mbarrier.arrive(keys_ready.index(stage), count=1)


@gluon.jit
def _number(shared):
    """The only number of ``shared``, [1]."""
    return gl.max(shared.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _attend_split(
    q_RD, keys, values, keys_ready, values_ready, keys_free, values_free, step, count, factor, ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Softmax over ``count`` keys that come through the ring from ``step`` on, as the Triton kernel's of that name.

    The sum of weights is [ROWS, 32], all columns alike.
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    dtype: gl.constexpr = keys.dtype
    key_P = gl.arange(0, TILE, gl.SliceLayout(0, MMA))
    zero_RP = gl.zeros([ROWS, TILE], gl.float32, MMA)
    # Each of the four warps multiplies its own columns of ones.
    ones_PW = gl.full([TILE, 32], 1.0, dtype, RIGHT)
    top_R = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    total_RW = gl.zeros([ROWS, 32], gl.float32, MMA)
    sum_RD = gl.zeros([ROWS, HEAD_DIM], gl.float32, MMA)
    for tile in range(gl.cdiv(count, TILE)):
        stage = (step + tile) % STAGES
        parity = (step + tile) // STAGES & 1
        mbarrier.wait(keys_ready.index(stage), parity)
        key_DP = keys.index(stage).permute((1, 0)).load(RIGHT)
        mbarrier.arrive(keys_free.index(stage), count=1)
        score_RP = mma_v2(q_RD, key_DP, zero_RP)
        if (tile + 1) * TILE > count:
            score_RP = gl.where((tile * TILE + key_P < count)[None], score_RP, float("-inf"))
        new_R = gl.maximum(top_R, gl.max(score_RP, 1))
        base_R = gl.where(new_R == float("-inf"), 0.0, new_R) * factor
        # Products are rounded before they are subtracted: only so is the decay exactly 1 where the maximum stays.
        decay_R = gl.exp2(top_R * factor - base_R)
        weight_RP = gl.exp2(gl.fma(score_RP, gl.full_like(score_RP, 0.0) + factor, -base_R[:, None])).to(dtype)
        weight_RP = gl.convert_layout(weight_RP, LEFT)
        mbarrier.wait(values_ready.index(stage), parity)
        value_PD = values.index(stage).load(RIGHT)
        mbarrier.arrive(values_free.index(stage), count=1)
        total_RW = mma_v2(weight_RP, ones_PW, total_RW * decay_R[:, None])
        sum_RD = mma_v2(weight_RP, value_PD, sum_RD * decay_R[:, None])
        top_R = new_R
    return top_R, total_RW, sum_RD


@gluon.jit
def _attend(
    queries, keys, values, places, counts, keys_ready, values_ready, keys_free, values_free, sums_ptr, tops_ptr,
    totals_ptr, out_ptr, factor, NUM_SHARED: gl.constexpr, ROWS: gl.constexpr, HEAD_DIM: gl.constexpr,
    TILE: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attention over the keys of each item that comes through the ring; splits are folded left to right."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    shared_R = gl.arange(0, ROWS, ROW)
    dim_D = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, MMA))
    is_head_R = shared_R < NUM_SHARED
    step = 0
    mbarrier.wait(keys_ready.index(0), 0)
    count = _number(counts.index(0))
    while count > 0:
        place = _number(places.index(step % STAGES))
        q_RD = queries.index(step % STAGES).load(gl.DotOperandLayout(0, MMA, 2))
        top_R = gl.zeros([ROWS], gl.float32, ROW)
        total_RW = gl.zeros([ROWS, 32], gl.float32, MMA)
        sum_RD = gl.zeros([ROWS, HEAD_DIM], gl.float32, MMA)
        for first in range(0, count, SPLIT):
            part = gl.minimum(count - first, SPLIT)
            top2_R, total2_RW, sum2_RD = _attend_split(
                q_RD, keys, values, keys_ready, values_ready, keys_free, values_free, step, part, factor,
                ROWS, HEAD_DIM, TILE, STAGES, MMA,
            )  # fmt: skip
            step += gl.cdiv(part, TILE)
            if first == 0:
                top_R, total_RW, sum_RD = top2_R, total2_RW, sum2_RD
            else:
                top_R, total_RW, sum_RD = fold(top_R, total_RW, sum_RD, top2_R, total2_RW, sum2_RD, factor, ROW, ROW)
        # All columns of the total are alike.
        total_R = gl.max(total_RW, 1)
        if place >= 0:
            place_R = place.to(gl.int64) * NUM_SHARED + shared_R
            # Keys and values stream through the second-level cache; what the fold will read is to outlast them there.
            sum_ptr_RD = sums_ptr + (place_R * HEAD_DIM)[:, None] + dim_D[None]
            gl.store(tops_ptr + place_R, top_R, is_head_R, eviction_policy="evict_last")
            gl.store(totals_ptr + place_R, total_R, is_head_R, eviction_policy="evict_last")
            gl.store(sum_ptr_RD, sum_RD, is_head_R[:, None], eviction_policy="evict_last")
        else:
            place_R = (-1 - place).to(gl.int64) * NUM_SHARED + shared_R
            out_RD = (sum_RD / total_R[:, None]).to(keys.dtype)
            gl.store(out_ptr + (place_R * HEAD_DIM)[:, None] + dim_D[None], out_RD, is_head_R[:, None])
        mbarrier.wait(keys_ready.index(step % STAGES), step // STAGES & 1)
        count = _number(counts.index(step % STAGES))


# Tables of any width have one build: their entries are read one by one.
@gluon.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["num_items_ptr", "tops_ptr", "totals_ptr"]
)
def _kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    tables_ptr,
    items_ptr,
    num_items_ptr,
    claimed_ptr,
    sums_ptr,
    tops_ptr,
    totals_ptr,
    out_ptr,
    table_stride,
    factor,
    NUM_KV_HEADS: gl.constexpr,
    NUM_SHARED: gl.constexpr,
    ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
    IS_DEPENDENT: gl.constexpr,
):
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    queries = gl.allocate_shared_memory(dtype, [STAGES, ROWS, HEAD_DIM], SHARED)
    keys = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], SHARED)
    values = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], SHARED)
    # Of the item that begins in a stage: the place of its sums, or -1 - the place of a whole row in the output, in kv
    # heads both; and its number of keys.
    places = gl.allocate_shared_memory(gl.int32, [STAGES, 1], mbarrier.MBarrierLayout())
    counts = gl.allocate_shared_memory(gl.int32, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Every thread of the loading group arrives when its copies have; with keys, once more for the item's numbers.
        mbarrier.init(keys_ready.index(stage), count=129)
        mbarrier.init(values_ready.index(stage), count=128)
        mbarrier.init(keys_free.index(stage), count=1)
        mbarrier.init(values_free.index(stage), count=1)
    gl.warp_specialize(
        [
            (_attend, (queries, keys, values, places, counts, keys_ready, values_ready, keys_free, values_free,
                       sums_ptr, tops_ptr, totals_ptr, out_ptr, factor,
                       NUM_SHARED, ROWS, HEAD_DIM, TILE, SPLIT, STAGES)),
            (_load, (q_ptr, key_ptr, value_ptr, tables_ptr, items_ptr, num_items_ptr, claimed_ptr, table_stride,
                     queries, keys, values, places, counts, keys_ready, values_ready, keys_free, values_free,
                     NUM_KV_HEADS, NUM_SHARED, ROWS, HEAD_DIM, BLOCK_SIZE, TILE, SPLIT, STAGES, IS_DEPENDENT)),
        ],
        [4],
        [LOAD_REGISTERS],
    )  # fmt: skip
