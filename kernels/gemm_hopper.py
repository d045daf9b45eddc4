"""Products of few rows on Hopper: a kernel that streams weights before its turn has come.

Contract: what ``paged.kernels.gemm`` says of one chain, to the bit, for at most 64 rows. One warp of each program
copies weights and rows of ``x`` into a ring of stages; four others multiply them. A program has a processor's memory to
itself, and the processors' shares of the weights are even.

A graph's launch fills its ring with weights while the kernels before it still run, as nobody writes weights within a
graph. Outside of a graph the kernel before may be the one that writes them, so there the weights wait, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paged.kernels.launch import are_copyable, has_wgmma, launch, num_sms

MAX_ROWS = 64
_LOAD_REGISTERS = 32
# Rows of weights that the matrix unit takes, and how many of its operands a program multiplies side by side.
_OPERAND = 64
_MAX_OPERANDS = 2
# Inputs side by side in shared memory, 128 bytes: as many as its swizzle spans.
_BLOCK = 64
# What a program takes of a processor's shared memory.
_RING_BYTES = 200 * 1024
# A step of 16 inputs takes half the time with four blocks to a stage as with one: waiting for a stage costs the
# multiplying warps more than the products do. Fewer stages than these would leave too little in flight.
_MAX_BLOCKS = 4
_MIN_STAGES = 6
_MAX_STAGES = 16


@dataclass(frozen=True, slots=True)
class HopperTiling:
    """How a product is cut: changes its speed, never its bits.

    Attributes:
        rows: of ``x``, padding included.
        columns: rows of the weight that a program multiplies at a time, a multiple of 8 up to 128.
        blocks: groups of 64 inputs to a stage.
        stages: of the ring.
    """

    rows: int
    columns: int
    blocks: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program's operands; the last tile's reaches beyond its rows."""
        num_rows = self.stages * self.blocks * (self.rows + self.columns) + self.operand_rows - self.columns
        return 2 * _BLOCK * num_rows

    @property
    def operand_rows(self) -> int:
        """Rows of weights that are multiplied; those beyond ``columns`` are any."""
        return _OPERAND * triton.cdiv(self.columns, _OPERAND)


def suits_hopper(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> bool:
    """Whether the kernel takes such operands on the device where they lie."""
    return x_TK.shape[0] <= MAX_ROWS and has_wgmma(x_TK.device) and are_copyable(x_TK, weight_NK)


def tiling_for(num_rows: int, num_columns: int, inner_size: int, num_processors: int) -> HopperTiling:
    """A tiling that gives the processors even shares of the weights, and a ring no larger than such a share."""
    rows = max(8, triton.next_power_of_2(num_rows))
    num_tiles = triton.cdiv(num_columns, num_processors * _MAX_OPERANDS * _OPERAND)
    columns = _box_rows(triton.cdiv(num_columns, num_processors * num_tiles))
    # Blocks that the ring has room for.
    held = (_RING_BYTES // (2 * _BLOCK) - -columns % _OPERAND) // (rows + columns)
    blocks = _MAX_BLOCKS
    while blocks > 1 and _MIN_STAGES * blocks > held:
        blocks //= 2
    num_steps = num_tiles * triton.cdiv(inner_size, blocks * _BLOCK)
    stages = min(_MAX_STAGES, held // blocks, max(2, num_steps))
    return HopperTiling(rows, columns, blocks, stages)


def _box_rows(num_columns: int) -> int:
    """The next multiple of 8 that is a power of two or the sum of two: as many rows as two boxes of weights have."""
    columns = 8 * triton.cdiv(num_columns, 8)
    while columns.bit_count() > 2:
        columns += 8
    return columns


def gemm_hopper(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_TN: torch.Tensor,
    *,
    tiling: HopperTiling | None = None,
) -> None:
    """Write the product of operands that suit; ``tiling`` is ``tiling_for`` the size unless given."""
    num_rows, inner_size = x_TK.shape
    num_columns = weight_NK.shape[0]
    if tiling is None:
        tiling = tiling_for(num_rows, num_columns, inner_size, num_sms(x_TK.device))
    assert num_rows <= tiling.rows, (num_rows, tiling)
    first_rows = 1 << tiling.columns.bit_length() - 1
    layout = gl.NVMMASharedLayout(128, 16)
    x = TensorDescriptor(x_TK, [num_rows, inner_size], [x_TK.stride(0), 1], [tiling.rows, _BLOCK], layout)
    weight = TensorDescriptor.from_tensor(weight_NK, [first_rows, _BLOCK], layout)
    rest_rows = tiling.columns - first_rows
    weight_rest = TensorDescriptor.from_tensor(weight_NK, [rest_rows, _BLOCK], layout) if rest_rows else weight
    num_tiles = triton.cdiv(num_columns, tiling.columns)
    launch(
        _gemm_hopper_kernel,
        (min(num_tiles, num_sms(x_TK.device)),),
        x,
        weight,
        weight_rest,
        bias_N,
        out_TN,
        num_rows,
        num_columns,
        triton.cdiv(inner_size, _BLOCK * tiling.blocks),
        int(torch.cuda.is_current_stream_capturing()),
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        FIRST=first_rows,
        OPERAND=tiling.operand_rows,
        BLOCK=_BLOCK,
        BLOCKS=tiling.blocks,
        STAGES=tiling.stages,
        LOAD_REGISTERS=_LOAD_REGISTERS,
        num_warps=4,
        # Without a limit no program of the next kernel shares the processor.
        maxnreg=128,
        on=x_TK,
    )


@gluon.jit
def _load_weights(
    weight, weight_rest, ring, ready, row, k, stage, ROWS: gl.constexpr, COLUMNS: gl.constexpr, FIRST: gl.constexpr,
    BLOCK: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Copy a stage's weights; the stage is ready when its part of ``x`` has come as well."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    mbarrier.expect(ready.index(stage), BLOCKS * (ROWS + COLUMNS) * 2 * BLOCK)
    for block in gl.static_range(BLOCKS):
        place = (stage * BLOCKS + block) * (COLUMNS // 8)
        tma.async_copy_global_to_shared(
            weight, [row, k + BLOCK * block], ready.index(stage),
            ring.index(place)._reinterpret(ring.dtype, [FIRST, BLOCK], SHARED),
        )  # fmt: skip
        if FIRST < COLUMNS:
            tma.async_copy_global_to_shared(
                weight_rest, [row + FIRST, k + BLOCK * block], ready.index(stage),
                ring.index(place + FIRST // 8)._reinterpret(ring.dtype, [COLUMNS - FIRST, BLOCK], SHARED),
            )  # fmt: skip


@gluon.jit
def _load_x(x, x_ring, ready, k, stage, BLOCK: gl.constexpr, BLOCKS: gl.constexpr):
    """Copy a stage's inputs; zeros stand for rows and inputs beyond the last."""
    for block in gl.static_range(BLOCKS):
        tma.async_copy_global_to_shared(
            x, [0, k + BLOCK * block], ready.index(stage), x_ring.index(stage * BLOCKS + block)
        )


@gluon.jit
def _load(
    x, weight, weight_rest, ring, x_ring, ready, free, num_columns, num_steps, is_early, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, FIRST: gl.constexpr, BLOCK: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the operands of this program's tiles into the ring, one tile after the other."""
    DEPTH: gl.constexpr = BLOCK * BLOCKS
    num_tiles = gl.cdiv(gl.cdiv(num_columns, COLUMNS) - gl.program_id(0), gl.num_programs(0))
    total = num_tiles * num_steps
    filled = gl.minimum(total, STAGES)
    if is_early == 0:
        tl.extra.cuda.gdc_wait()
    row = gl.program_id(0) * COLUMNS
    k = 0
    for stage in range(filled):
        _load_weights(weight, weight_rest, ring, ready, row, k, stage, ROWS, COLUMNS, FIRST, BLOCK, BLOCKS)
        k += DEPTH
        if k == num_steps * DEPTH:
            k = 0
            row += gl.num_programs(0) * COLUMNS
    # The kernels behind may start when this program has no more than a ring of weights to come: their own weights
    # would only delay these before, and keep the memory busy while these are multiplied and stored.
    if total <= 2 * STAGES:
        tl.extra.cuda.gdc_launch_dependents()
    # The kernel before may still write ``x``, and read what ``out`` overwrites.
    tl.extra.cuda.gdc_wait()
    x_k = 0
    for stage in range(filled):
        _load_x(x, x_ring, ready, x_k, stage, BLOCK, BLOCKS)
        x_k += DEPTH
        if x_k == num_steps * DEPTH:
            x_k = 0
    for step in range(filled, total):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
        _load_weights(weight, weight_rest, ring, ready, row, k, stage, ROWS, COLUMNS, FIRST, BLOCK, BLOCKS)
        _load_x(x, x_ring, ready, k, stage, BLOCK, BLOCKS)
        k += DEPTH
        if k == num_steps * DEPTH:
            k = 0
            row += gl.num_programs(0) * COLUMNS
        if step + 1 == total - STAGES:
            tl.extra.cuda.gdc_launch_dependents()


@gluon.jit
def _multiply(
    ring, x_ring, ready, free, bias_ptr, out_ptr, num_rows, num_columns, num_steps, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, OPERAND: gl.constexpr, BLOCK: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply what comes through the ring and write ``out``.

    A stage is ready only when rows of ``x`` have come that were asked for behind the wait for the kernel before, so
    what is stored here is stored behind that wait.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    # ptxas serializes the matrix unit's work in a loop that may be empty.
    gl.assume(num_steps > 0)
    place_C = gl.arange(0, OPERAND, gl.SliceLayout(1, MMA))
    row_R = gl.arange(0, ROWS, gl.SliceLayout(0, MMA))
    done = 0
    for tile in range(gl.program_id(0), gl.cdiv(num_columns, COLUMNS), gl.num_programs(0)):
        acc_CR = gl.zeros([OPERAND, ROWS], gl.float32, MMA)
        # The range must not begin with `done`: Triton 3.6 takes that for the zero of the first tile.
        for tile_step in range(num_steps):
            step = done + tile_step
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            for block in gl.static_range(BLOCKS):
                # Rows of weights beyond COLUMNS are whatever lies behind; their products are not stored.
                place = (stage * BLOCKS + block) * (COLUMNS // 8)
                weight_CD = ring.index(place)._reinterpret(ring.dtype, [OPERAND, BLOCK], SHARED)
                x_DR = x_ring.index(stage * BLOCKS + block).permute((1, 0))
                acc_CR = warpgroup_mma(weight_CD, x_DR, acc_CR, is_async=True)
            # The products of the step before are done: its stage is free.
            acc_CR = warpgroup_mma_wait(BLOCKS, (acc_CR,))
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
        acc_CR = warpgroup_mma_wait(0, (acc_CR,))
        done += num_steps
        column_C = tile * COLUMNS + place_C
        # One comparison: with two, ptxas serializes the matrix unit's work.
        is_column_C = column_C < gl.minimum((tile + 1) * COLUMNS, num_columns)
        if bias_ptr is not None:
            acc_CR += gl.load(bias_ptr + column_C, is_column_C, 0.0).to(gl.float32)[:, None]
        out_CR = out_ptr + row_R.to(gl.int64)[None] * num_columns + column_C[:, None]
        gl.store(out_CR, acc_CR.to(out_ptr.dtype.element_ty), is_column_C[:, None] & (row_R < num_rows)[None])


@gluon.jit(do_not_specialize=["num_rows", "num_columns", "num_steps", "is_early"])
def _gemm_hopper_kernel(
    x,
    weight,
    weight_rest,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    num_steps,
    is_early,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    FIRST: gl.constexpr,
    OPERAND: gl.constexpr,
    BLOCK: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    # In groups of 8 rows, 1 KiB; the last tile's operand reaches beyond it if it has fewer than 64 rows.
    num_groups: gl.constexpr = (STAGES * BLOCKS * COLUMNS + OPERAND - COLUMNS) // 8
    ring = gl.allocate_shared_memory(x.dtype, [num_groups, 8, BLOCK], SHARED)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES * BLOCKS, ROWS, BLOCK], SHARED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    gl.warp_specialize(
        [
            (_multiply, (ring, x_ring, ready, free, bias_ptr, out_ptr, num_rows, num_columns, num_steps,
                         ROWS, COLUMNS, OPERAND, BLOCK, BLOCKS, STAGES)),
            (_load, (x, weight, weight_rest, ring, x_ring, ready, free, num_columns, num_steps, is_early,
                     ROWS, COLUMNS, FIRST, BLOCK, BLOCKS, STAGES)),
        ],
        [1],
        [LOAD_REGISTERS],
    )  # fmt: skip
