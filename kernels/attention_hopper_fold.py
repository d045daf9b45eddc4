"""The fold of rows with many splits on Hopper: the Triton kernel's contract with partial sums in flight ahead of it.

Contract: what ``paged.kernels.attention_triton`` says, to the bit: the splits of a row and head from left to right. A
fixed number of programs of one warp shares the rows. Only two operations a split depend on the split before: all else,
the factors and the copies of partial sums, is done for many splits at once, ahead of them.
"""

from __future__ import annotations

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from paged.kernels.launch import is_dependent, launch, num_sms

# A stage is 64 splits of 32 dimensions, 8 KiB; no bits hang on these.
DIMS = 32
SPLITS = 64
STAGES = 3
UNROLLED = 8
PROGRAMS_PER_SM = 8


def fold_splits_hopper(
    sums_IHD: torch.Tensor,
    tops_IH: torch.Tensor,
    totals_IH: torch.Tensor,
    rows_N3: torch.Tensor,
    out_THD: torch.Tensor,
    *,
    factor: float,
) -> None:
    """Write the rows of ``rows_N3`` to theirs of ``out_THD``; where there is none, there is none after it.

    Greatest scores, sums of weights and sums of values are those of I splits and H heads, D is a multiple of 32, and
    ``factor`` is scale * log2(e).
    """
    num_heads, head_dim = sums_IHD.shape[1:]
    assert head_dim % DIMS == 0, head_dim
    num_places = rows_N3.shape[0] * num_heads * (head_dim // DIMS)
    launch(
        _kernel,
        (min(num_places, PROGRAMS_PER_SM * num_sms(sums_IHD.device)),),
        sums_IHD,
        tops_IH,
        totals_IH,
        rows_N3,
        out_THD,
        num_places,
        factor,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        DIMS=DIMS,
        SPLITS=SPLITS,
        STAGES=STAGES,
        UNROLLED=UNROLLED,
        IS_DEPENDENT=is_dependent(sums_IHD),
        num_warps=1,
        on=sums_IHD,
    )


@gluon.jit
def _greater(left, right):
    return gl.maximum(left, right)


@gluon.jit
def _row(rows_ptr, place, num_places, PLACES: gl.constexpr):
    """Row of the step, first item and number of items of the row at ``place``; a negative row where there is none."""
    row_ptr = rows_ptr + place // PLACES * 3
    exists = place < num_places
    return gl.load(row_ptr, exists, -1), gl.load(row_ptr + 1, exists, 0), gl.load(row_ptr + 2, exists, 0)


@gluon.jit
def _copy(
    sums, stage, sums_ptr, place, start, count, dim_D, NUM_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    SPLITS: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Copy the sums of SPLITS splits from ``start`` on to a stage: one group, empty where there are none."""
    if start < count:
        split_S = gl.arange(0, SPLITS, gl.SliceLayout(1, COPY))
        offset_SD = (split_S * (NUM_HEADS * HEAD_DIM))[:, None] + dim_D[None]
        # What is beyond the last split becomes 0: stale memory, which may be NaN, is not read.
        exists_S = split_S < count - start
        start_ptr = sums_ptr + (place + start * NUM_HEADS) * HEAD_DIM
        async_copy.async_copy_global_to_shared(sums.index(stage), start_ptr + offset_SD, exists_S[:, None])
    async_copy.commit_group()


@gluon.jit
def _numbers(
    tops_ptr, totals_ptr, place, start, count, NUM_HEADS: gl.constexpr, SPLITS: gl.constexpr, SPLIT: gl.constexpr
):
    """Greatest scores of SPLITS splits from ``start`` on and of each one's left neighbour, and sums of weights."""
    split_S = start + gl.arange(0, SPLITS, SPLIT)
    exists_S = split_S < count
    here_S = place + split_S * NUM_HEADS
    return (
        gl.load(tops_ptr + here_S, exists_S, float("-inf")),
        gl.load(tops_ptr + here_S - NUM_HEADS, exists_S, float("-inf")),
        gl.load(totals_ptr + here_S, exists_S, 0.0),
    )


@gluon.jit
def _number(shared, LANE: gl.constexpr):
    """The only number of ``shared``, [1]."""
    return gl.max(shared.load(LANE), 0)


@gluon.jit(do_not_specialize=["num_places"], do_not_specialize_on_alignment=["tops_ptr", "totals_ptr"])
def _kernel(
    sums_ptr,
    tops_ptr,
    totals_ptr,
    rows_ptr,
    out_ptr,
    num_places,
    factor,
    NUM_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    DIMS: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    UNROLLED: gl.constexpr,
    IS_DEPENDENT: gl.constexpr,
):
    """Fold DIMS dimensions of one row and head after the other, STAGES * SPLITS of the splits' sums in flight."""
    GROUPS: gl.constexpr = HEAD_DIM // DIMS
    PLACES: gl.constexpr = NUM_HEADS * GROUPS
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [128 // DIMS, DIMS // 4], [1, 1], [1, 0])
    LANE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    SPLIT: gl.constexpr = gl.BlockedLayout([SPLITS // 32], [32], [1], [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sums = gl.allocate_shared_memory(gl.float32, [STAGES, SPLITS, DIMS], gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
    lefts = gl.allocate_shared_memory(gl.float32, [SPLITS], PLAIN)
    rights = gl.allocate_shared_memory(gl.float32, [SPLITS], PLAIN)
    totals = gl.allocate_shared_memory(gl.float32, [SPLITS], PLAIN)
    # The same memory, split by split.
    sum_of = sums._reinterpret(gl.float32, [STAGES * SPLITS, DIMS], PLAIN)
    left_of = lefts._reinterpret(gl.float32, [SPLITS, 1], PLAIN)
    right_of = rights._reinterpret(gl.float32, [SPLITS, 1], PLAIN)
    total_of = totals._reinterpret(gl.float32, [SPLITS, 1], PLAIN)
    work = gl.program_id(0)
    row, first, count = _row(rows_ptr, work, num_places, PLACES)
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    while row >= 0:
        head = work // GROUPS % NUM_HEADS
        place = first.to(gl.int64) * NUM_HEADS + head
        copied_D = work % GROUPS * DIMS + gl.arange(0, DIMS, gl.SliceLayout(0, COPY))
        dim_D = work % GROUPS * DIMS + gl.arange(0, DIMS, LANE)
        top = gl.load(tops_ptr + place)
        total_D = gl.zeros([DIMS], gl.float32, LANE) + gl.load(totals_ptr + place)
        sum_D = gl.load(sums_ptr + place * HEAD_DIM + dim_D)
        top_S, before_S, total_S = _numbers(tops_ptr, totals_ptr, place, 1, count, NUM_HEADS, SPLITS, SPLIT)
        for stage in gl.static_range(STAGES):
            _copy(
                sums, stage, sums_ptr, place, 1 + stage * SPLITS, count, copied_D, NUM_HEADS, HEAD_DIM, SPLITS, COPY
            )  # fmt: skip
        stage = 0
        for start in range(1, count, SPLITS):
            # What the Triton kernel's ``_fold`` does, with the factors of all splits at once: a maximum is the same in
            # any order.
            before_S = gl.maximum(gl.associative_scan(before_S, 0, _greater), top)
            new_S = gl.maximum(before_S, top_S)
            base_S = new_S * factor
            right_S = gl.exp2(top_S * factor - base_S)
            lefts.store(gl.exp2(before_S * factor - base_S))
            totals.store(total_S * right_S)
            # Beyond the last split, where steps are unrolled, -0 is added, which changes nothing.
            rights.store(gl.where(start + gl.arange(0, SPLITS, SPLIT) < count, right_S, -0.0))
            top = gl.max(new_S, 0)
            top_S, before_S, total_S = _numbers(
                tops_ptr, totals_ptr, place, start + SPLITS, count, NUM_HEADS, SPLITS, SPLIT
            )
            async_copy.wait_group(STAGES - 1)
            for begin in range(0, gl.minimum(count - start, SPLITS), UNROLLED):
                for more in gl.static_range(UNROLLED):
                    step = begin + more
                    left = _number(left_of.index(step), LANE)
                    sum2_D = sum_of.index(stage * SPLITS + step).load(LANE)
                    total_D = total_D * left + _number(total_of.index(step), LANE)
                    sum_D = sum_D * left + sum2_D * _number(right_of.index(step), LANE)
            _copy(
                sums, stage, sums_ptr, place, start + STAGES * SPLITS, count, copied_D,
                NUM_HEADS, HEAD_DIM, SPLITS, COPY,
            )  # fmt: skip
            stage = (stage + 1) % STAGES
        async_copy.wait_group(0)
        out_ptr_D = out_ptr + (row.to(gl.int64) * NUM_HEADS + head) * HEAD_DIM + dim_D
        gl.store(out_ptr_D, (sum_D / total_D).to(out_ptr.dtype.element_ty))
        work += gl.num_programs(0)
        row, first, count = _row(rows_ptr, work, num_places, PLACES)
