"""The canonical matrix product on a CUDA device: one order of summation, whatever the tile.

Contract, with T rows, K inputs, N outputs: ``x @ weight.T + bias`` over bf16 or fp16. An element is one chain of the
matrix unit over ascending K, with an fp32 accumulator; with ``k_segments`` S it is S such chains over equal parts of K,
folded as a balanced tree in fp32. The bias is added in fp32 and the sum rounded once, or never for an fp32 result. An
element's bits hang on its row, its column of weights and S alone: tile shape, warps, stages, operand order and how the
operands are fetched leave them as they are, so a tiling may be chosen by size and speed.

Each launch may begin while the kernel before it ends (programmatic dependent launch): it asks the L2 cache for its
first weights, which nobody writes during a step, and waits for that kernel before it reads anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from paged.kernels.gemm_hopper import gemm_hopper, suits_hopper
from paged.kernels.launch import are_copyable, is_dependent, launch

DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut: changes its speed, never its bits.

    Attributes:
        rows: rows of ``x`` a program takes.
        columns: rows of the weight a program takes.
        depth: inputs loaded at a time.
        weights_first: the weights are the matrix unit's left operand, which holds 64 rows or more.
        num_warps: warps a program has.
        num_stages: loads in flight.
    """

    rows: int
    columns: int
    depth: int
    weights_first: bool
    num_warps: int
    num_stages: int


# Fits any card that multiplies bf16; the others are for Hopper.
PLAIN_TILING = Tiling(32, 64, 64, False, 4, 3)

# Tiles up to which each segment of K is a program's own work: fewer leave half the processors of an H200 idle.
_MAX_SPLIT_TILES = 66
# A tree of segments in registers holds three accumulators; more numbers a thread than this spill.
_MAX_TREE_REGISTERS = 128
# What the sums of segments may take of the device's memory.
_MAX_SUMS_BYTES = 2**28

# Weights that a launch asks the L2 cache for while the kernel before it still runs. More was slower.
_PREFETCHED_BYTES = 2 * 2**20


def tiling_for(num_rows: int, num_columns: int, inner_size: int, k_segments: int = 1) -> Tiling:
    """The tiling that was fastest on an H200 for products of about this size (benchmarks/gemm_h200.py)."""
    if k_segments > 1:
        if num_rows <= 16:
            return Tiling(16, 64, 256, True, 4, 3)
        if num_rows <= 128:
            return Tiling(64, 64, 128, False, 4, 5)
        # Large tiles pay for the way through memory where K is long.
        is_large = inner_size >= 8192 and 4 * k_segments * num_rows * num_columns <= _MAX_SUMS_BYTES
        return Tiling(128, 128, 64, False, 4, 7) if is_large else Tiling(128, 64, 64, False, 8, 6)
    is_head = num_columns > 32768
    if num_rows <= 16:
        # With three stages two programs share a processor, which pays where some processors would have two anyway.
        shallow = 4096 < num_columns <= 8192
        return Tiling(16, 128, 128, True, 4, 6) if is_head else Tiling(16, 64, 256, True, 4, 3 if shallow else 5)
    if num_rows <= 32:
        return Tiling(32, 128, 128, True, 4, 4) if is_head else Tiling(32, 64, 128, True, 4, 8)
    if num_rows <= 64:
        if is_head:
            return Tiling(64, 128, 64, False, 4, 9)
        return Tiling(64, 16, 128, False, 4, 6) if num_columns <= 1024 else Tiling(64, 64, 128, False, 4, 7)
    if num_rows <= 128:
        return Tiling(64, 64, 128, False, 4, 7) if num_columns <= 4096 else Tiling(128, 64, 64, False, 4, 9)
    return Tiling(64, 128, 64, False, 4, 5) if num_columns <= 2048 else Tiling(128, 128, 64, False, 4, 7)


def gemm(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    k_segments: int = 1,
    out_dtype: torch.dtype | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """The product [T, N].

    Args:
        x_TK: activations; rows may be apart, elements of a row adjoin.
        weight_NK: weights, contiguous, of the same dtype.
        bias_N: bias of the same dtype, or ``None``.
        k_segments: S, a power of two that divides K.
        out_dtype: the inputs' (the default) or fp32.
        tiling: ``None`` takes the Hopper kernel where it suits, and else ``tiling_for`` the size.
    """
    num_rows, inner_size = x_TK.shape
    num_columns = weight_NK.shape[0]
    out_dtype = x_TK.dtype if out_dtype is None else out_dtype
    assert num_rows > 0, x_TK.shape
    assert weight_NK.shape[1] == inner_size, (x_TK.shape, weight_NK.shape)
    assert x_TK.dtype == weight_NK.dtype, (x_TK.dtype, weight_NK.dtype)
    assert x_TK.dtype in DTYPES, x_TK.dtype
    assert out_dtype in (x_TK.dtype, torch.float32), out_dtype
    assert x_TK.stride(1) == 1, x_TK.stride()
    assert weight_NK.is_contiguous(), weight_NK.stride()
    assert bias_N is None or (bias_N.shape == (num_columns,) and bias_N.dtype == x_TK.dtype)
    assert k_segments & (k_segments - 1) == 0, k_segments
    if inner_size % k_segments:
        raise ValueError(f"the product's inner size {inner_size} must be a multiple of k_segments {k_segments}")
    out_TN = torch.empty(num_rows, num_columns, dtype=out_dtype, device=x_TK.device)
    if tiling is None:
        if k_segments == 1 and suits_hopper(x_TK, weight_NK):
            gemm_hopper(x_TK, weight_NK, bias_N, out_TN)
            return out_TN
        tiling = PLAIN_TILING
        if has_copy_engine(x_TK):
            tiling = tiling_for(num_rows, num_columns, inner_size, k_segments)
    num_tiles = triton.cdiv(num_rows, tiling.rows) * triton.cdiv(num_columns, tiling.columns)
    tree_registers = 3 * tiling.rows * tiling.columns // (32 * tiling.num_warps)
    is_split = k_segments > 1 and (num_tiles <= _MAX_SPLIT_TILES or tree_registers > _MAX_TREE_REGISTERS)
    sums_STN = out_TN
    if is_split:
        sums_STN = torch.empty(k_segments, num_rows, num_columns, dtype=torch.float32, device=x_TK.device)
    segment_size = inner_size // k_segments
    x, weight, use_descriptors = operands(x_TK, weight_NK, tiling, k_segments)
    launch(
        _gemm_kernel,
        (num_tiles, k_segments if is_split else 1),
        x,
        weight,
        weight_NK,
        None if is_split else bias_N,
        sums_STN,
        num_rows,
        num_columns,
        inner_size,
        segment_size,
        x_TK.stride(0),
        max(16, min(segment_size * 2, _PREFETCHED_BYTES // num_columns) & -16),
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        DEPTH=tiling.depth,
        WEIGHTS_FIRST=tiling.weights_first,
        SEGMENTS=1 if is_split else k_segments,
        USE_DESCRIPTORS=use_descriptors,
        IS_DEPENDENT=is_dependent(x_TK),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        on=x_TK,
    )
    if is_split:
        launch(
            _fold_segments_kernel,
            (triton.cdiv(num_rows * num_columns, 1024),),
            sums_STN,
            bias_N,
            out_TN,
            num_rows * num_columns,
            num_columns,
            SEGMENTS=k_segments,
            SIZE=1024,
            IS_DEPENDENT=is_dependent(x_TK),
            num_warps=4,
            on=x_TK,
        )
    return out_TN


def has_copy_engine(tensor: torch.Tensor) -> bool:
    """Whether tiles of the tensor may be fetched by descriptor, and a Hopper's shared memory is there."""
    return is_dependent(tensor) or not tensor.is_cuda


def operands(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, tiling: Tiling, k_segments: int
) -> tuple[torch.Tensor | TensorDescriptor, torch.Tensor | TensorDescriptor, bool]:
    """The two operands as ``tree`` takes them, and whether they are descriptors."""
    num_rows, inner_size = x_TK.shape
    # The copy engine cannot stop at a segment's end.
    use_descriptors = (
        has_copy_engine(x_TK)
        and are_copyable(x_TK, weight_NK)
        and (k_segments == 1 or inner_size // k_segments % tiling.depth == 0)
    )
    if not use_descriptors:
        return x_TK, weight_NK, False
    x = TensorDescriptor(x_TK, [num_rows, inner_size], [x_TK.stride(0), 1], [tiling.rows, tiling.depth])
    return x, TensorDescriptor.from_tensor(weight_NK, [tiling.columns, tiling.depth]), True


@triton.jit(do_not_specialize=["num_rows", "prefetched_bytes"])
def _gemm_kernel(
    x,
    weight,
    weight_pointer,
    bias_pointer,
    out_pointer,
    num_rows,
    num_columns,
    inner_size,
    segment_size,
    x_stride,
    prefetched_bytes,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    SEGMENTS: tl.constexpr,
    USE_DESCRIPTORS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One tile of ``out``; axis 1 of the grid is the segment of K if each is a program's own."""
    row_tile, column_tile = _tile_of(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS))
    first_row, first_column = row_tile * ROWS, column_tile * COLUMNS
    first_k = tl.program_id(1) * segment_size
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        if USE_DESCRIPTORS:
            _prefetch(weight_pointer, first_column, first_k, num_columns, inner_size, prefetched_bytes, COLUMNS)
        tl.extra.cuda.gdc_wait()
    # ptxas serializes the matrix unit's work in a loop that may be empty.
    tl.assume(segment_size > 0)
    acc = tree(
        x, weight, first_row, first_column, first_k, num_rows, num_columns, inner_size, segment_size, x_stride,
        ROWS, COLUMNS, DEPTH, WEIGHTS_FIRST, SEGMENTS, USE_DESCRIPTORS,
    )  # fmt: skip
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)
    columns_C = first_column + tl.arange(0, COLUMNS)
    rows_R = first_row + tl.arange(0, ROWS)
    if bias_pointer is not None:
        acc += tl.load(bias_pointer + columns_C, mask=columns_C < num_columns, other=0.0).to(tl.float32)[None, :]
    row_R = tl.program_id(1).to(tl.int64) * num_rows + rows_R
    mask_RC = (rows_R < num_rows)[:, None] & (columns_C < num_columns)[None, :]
    tl.store(
        out_pointer + row_R[:, None] * num_columns + columns_C[None, :],
        acc.to(out_pointer.dtype.element_ty),
        mask=mask_RC,
    )


@triton.jit
def _tile_of(program, num_row_tiles, num_column_tiles):
    """Tiles of 8 row tiles at a time run down the rows first, so that neighbours in time share operands in L2."""
    group_size = 8 * num_column_tiles
    first = program // group_size * 8
    height = tl.minimum(num_row_tiles - first, 8)
    return first + program % group_size % height, program % group_size // height


@triton.jit
def _prefetch(weight_pointer, first_column, first_k, num_columns, inner_size, prefetched_bytes, COLUMNS: tl.constexpr):
    """Ask the L2 cache for the first bytes of the segment of each of the program's rows of weights."""
    columns_C = tl.minimum(first_column + tl.arange(0, COLUMNS), num_columns - 1)
    address_C = weight_pointer + columns_C.to(tl.int64) * inner_size + first_k
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address_C, tl.zeros((COLUMNS,), tl.int32) + prefetched_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def tree(
    x, weight, first_row, first_column, first_k, num_rows, num_columns, inner_size, segment_size, x_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
    SEGMENTS: tl.constexpr, USE_DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """The balanced tree over ``SEGMENTS`` segments from ``first_k`` on: the halves, each a tree, then their sum."""
    if SEGMENTS == 1:
        acc = _chain(
            x, weight, first_row, first_column, first_k, num_rows, num_columns, inner_size, segment_size, x_stride,
            ROWS, COLUMNS, DEPTH, WEIGHTS_FIRST, USE_DESCRIPTORS,
        )  # fmt: skip
    else:
        left = tree(
            x, weight, first_row, first_column, first_k, num_rows, num_columns, inner_size, segment_size, x_stride,
            ROWS, COLUMNS, DEPTH, WEIGHTS_FIRST, SEGMENTS // 2, USE_DESCRIPTORS,
        )  # fmt: skip
        middle_k = first_k + SEGMENTS // 2 * segment_size
        right = tree(
            x, weight, first_row, first_column, middle_k, num_rows, num_columns, inner_size, segment_size, x_stride,
            ROWS, COLUMNS, DEPTH, WEIGHTS_FIRST, SEGMENTS // 2, USE_DESCRIPTORS,
        )  # fmt: skip
        acc = left + right
    return acc


@triton.jit
def _chain(
    x, weight, first_row, first_column, first_k, num_rows, num_columns, inner_size, segment_size, x_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
    USE_DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """One chain over a segment of K: fp32 [ROWS, COLUMNS], or its transpose."""
    acc = tl.zeros((COLUMNS, ROWS), tl.float32) if WEIGHTS_FIRST else tl.zeros((ROWS, COLUMNS), tl.float32)
    last_k = first_k + segment_size
    for k in range(first_k, last_k, DEPTH):
        if USE_DESCRIPTORS:
            x_RD = x.load([first_row, k])
            weight_CD = weight.load([first_column, k])
        else:
            x_RD = _load(x, first_row, k, num_rows, last_k, x_stride, ROWS, DEPTH)
            weight_CD = _load(weight, first_column, k, num_columns, last_k, inner_size, COLUMNS, DEPTH)
        # The accumulator goes through the matrix unit: ``acc += tl.dot(...)`` would be another order.
        acc = tl.dot(weight_CD, x_RD.T, acc) if WEIGHTS_FIRST else tl.dot(x_RD, weight_CD.T, acc)
    return acc


@triton.jit
def _load(pointer, first_row, first_k, num_rows, last_k, stride, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """A tile [ROWS, DEPTH] of rows of inputs, zero beyond the last row and input."""
    rows_R = first_row + tl.arange(0, ROWS)
    k_D = first_k + tl.arange(0, DEPTH)
    mask_RD = (rows_R < num_rows)[:, None] & (k_D < last_k)[None, :]
    return tl.load(pointer + rows_R.to(tl.int64)[:, None] * stride + k_D[None, :], mask=mask_RD, other=0.0)


@triton.jit
def _fold_segments_kernel(
    sums_pointer,
    bias_pointer,
    out_pointer,
    num_elements,
    num_columns,
    SEGMENTS: tl.constexpr,
    SIZE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Fold the segments' sums [S, T, N] as a balanced tree; add the bias; round once."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    elements_E = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask_E = elements_E < num_elements
    total_E = _fold(sums_pointer + elements_E, mask_E, num_elements, SEGMENTS)
    if bias_pointer is not None:
        total_E += tl.load(bias_pointer + elements_E % num_columns, mask=mask_E, other=0.0).to(tl.float32)
    tl.store(out_pointer + elements_E, total_E.to(out_pointer.dtype.element_ty), mask=mask_E)


@triton.jit
def _fold(pointers_E, mask_E, num_elements, SEGMENTS: tl.constexpr):
    """The balanced tree over ``SEGMENTS`` sums that stand ``num_elements`` apart."""
    if SEGMENTS == 1:
        total_E = tl.load(pointers_E, mask=mask_E, other=0.0)
    else:
        left_E = _fold(pointers_E, mask_E, num_elements, SEGMENTS // 2)
        right_E = _fold(pointers_E + SEGMENTS // 2 * num_elements, mask_E, num_elements, SEGMENTS // 2)
        total_E = left_E + right_E
    return total_E
