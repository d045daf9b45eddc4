"""Kernels that work row by row on a CUDA device: norm, residual sum and norm, norm and rotation of heads, gated SiLU.

Contract: those of ``paged.kernels.norm``, ``rope``, ``heads`` and ``activation``, with their rounding points; sums in
fp32. A row is one program's (of ``norm_rope``, eight of a token's heads), whose block and warps hang on the row's width
alone, so its bits know no neighbours and no batch. For bf16, fp16 and fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paged.kernels.gemm_dispatch import empty_rows
from paged.kernels.launch import is_dependent, launch

_HEADS_PER_PROGRAM = 8
_SILU_BLOCK = 1024


def rms_norm(x_N: torch.Tensor, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
    """As ``paged.kernels.norm.rms_norm``, for ``x`` [..., N] of up to two leading dimensions."""
    return _norm(x_N, None, weight_N, eps)[1]


def add_rms_norm(
    x_TN: torch.Tensor, delta_TN: torch.Tensor, weight_N: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``paged.kernels.norm.add_rms_norm``."""
    assert x_TN.shape == delta_TN.shape and x_TN.dim() == 2, (x_TN.shape, delta_TN.shape)  # noqa: PT018
    assert x_TN.dtype == delta_TN.dtype, (x_TN.dtype, delta_TN.dtype)
    assert delta_TN.stride(1) == 1, delta_TN.stride()
    return _norm(x_TN, delta_TN, weight_N, eps)


def _norm(
    x_N: torch.Tensor, delta_N: torch.Tensor | None, weight_N: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    width = x_N.shape[-1]
    assert x_N.dim() in (1, 2, 3), x_N.shape
    assert x_N.stride(-1) == 1, x_N.stride()
    assert weight_N.shape == (width,), (weight_N.shape, x_N.shape)
    assert weight_N.dtype == x_N.dtype, (weight_N.dtype, x_N.dtype)
    assert weight_N.is_contiguous(), weight_N.stride()
    x_N, delta_N = _aligned(x_N), None if delta_N is None else _aligned(delta_N)
    x_THN = x_N.view(1, 1, width) if x_N.dim() == 1 else x_N if x_N.dim() == 3 else x_N[:, None]
    num_rows, num_heads = x_THN.shape[:2]
    out_THN = empty_rows(num_rows, x_THN.shape[1:], x_N)
    sum_THN = out_THN if delta_N is None else torch.empty(x_THN.shape, dtype=x_N.dtype, device=x_N.device)
    block = triton.next_power_of_2(width)
    launch(
        _rms_norm_kernel,
        (num_rows * num_heads,),
        x_THN,
        delta_N,
        weight_N,
        sum_THN,
        out_THN,
        num_heads,
        x_THN.stride(0),
        x_THN.stride(1),
        0 if delta_N is None else delta_N.stride(0),
        width,
        eps,
        BLOCK=block,
        IS_DEPENDENT=is_dependent(x_N),
        num_warps=_num_warps(block),
        on=x_N,
    )
    return sum_THN.view(x_N.shape), out_THN.view(x_N.shape)


def sums_of_squares(x_TN: torch.Tensor, k_segments: int) -> torch.Tensor:
    """Sums [T, S], fp32, of the squares of each of the S equal parts of rows [T, N]; see ``norm.sum_of_squares``.

    A part's sum hangs on the part alone, so ranks that hold some of a row's parts form the same sums.
    """
    num_rows, width = x_TN.shape
    assert width % k_segments == 0, (width, k_segments)
    assert x_TN.stride(1) == 1, x_TN.stride()
    x_TN = _aligned(x_TN, k_segments)
    sums_TS = torch.empty(num_rows, k_segments, dtype=torch.float32, device=x_TN.device)
    block = triton.next_power_of_2(width // k_segments)
    launch(
        _sum_of_squares_kernel,
        (num_rows, k_segments),
        x_TN,
        sums_TS,
        x_TN.stride(0),
        width // k_segments,
        BLOCK=block,
        IS_DEPENDENT=is_dependent(x_TN),
        num_warps=_num_warps(block),
        on=x_TN,
    )
    return sums_TS


def norm_rope(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``paged.kernels.rope.norm_rope``."""
    k_out_TKD = torch.empty_like(k_TKD, memory_format=torch.contiguous_format)
    q_out_THD = _norm_rope(q_THD, k_TKD, cos_TD, sin_TD, q_weight_D, k_weight_D, eps, k_out_TKD, None)
    return q_out_THD, k_out_TKD


def norm_rope_store(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    eps: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cell_T: torch.Tensor,
) -> torch.Tensor:
    """As ``paged.kernels.heads.norm_rope_store``, for caches [num_blocks, block_size, K, D] without scales."""
    assert v_TKD.shape == k_TKD.shape, (v_TKD.shape, k_TKD.shape)
    assert v_TKD.dtype == k_TKD.dtype, (v_TKD.dtype, k_TKD.dtype)
    assert v_TKD.stride(2) == 1, v_TKD.stride()
    assert key_cache.shape[2:] == value_cache.shape[2:] == k_TKD.shape[1:], (key_cache.shape, k_TKD.shape)
    assert key_cache.is_contiguous() and value_cache.is_contiguous()  # noqa: PT018
    assert cell_T.shape == k_TKD.shape[:1], (cell_T.shape, k_TKD.shape)
    stored = v_TKD, value_cache, cell_T
    return _norm_rope(q_THD, k_TKD, cos_TD, sin_TD, q_weight_D, k_weight_D, eps, key_cache, stored)


def _norm_rope(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    eps: float,
    k_out: torch.Tensor,
    stored: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """The queries; keys go to ``k_out``: row by row, or cell by cell with ``stored``: values, their cache, cells."""
    num_rows, num_heads, head_dim = q_THD.shape
    num_kv_heads = k_TKD.shape[1]
    assert k_TKD.shape[::2] == (num_rows, head_dim), (q_THD.shape, k_TKD.shape)
    assert cos_TD.shape == sin_TD.shape == (num_rows, head_dim // 2), (cos_TD.shape, sin_TD.shape)
    assert head_dim % 2 == 0, head_dim
    assert (q_weight_D is None) == (k_weight_D is None)
    same = [tensor for tensor in (k_TKD, cos_TD, sin_TD, q_weight_D, k_weight_D) if tensor is not None]
    assert all(tensor.dtype == q_THD.dtype for tensor in same), [tensor.dtype for tensor in same]
    assert q_THD.stride(2) == k_TKD.stride(2) == 1, (q_THD.stride(), k_TKD.stride())
    assert cos_TD.is_contiguous() and sin_TD.is_contiguous()  # noqa: PT018
    q_THD, k_TKD = _aligned(q_THD), _aligned(k_TKD)
    q_out_THD = q_THD.new_empty(q_THD.shape)
    v_TKD, v_out, cell_T = stored or (None, None, None)
    num_written = num_heads + num_kv_heads * (1 if stored is None else 2)
    launch(
        _norm_rope_kernel,
        (num_rows, triton.cdiv(num_written, _HEADS_PER_PROGRAM)),
        q_THD,
        k_TKD,
        v_TKD,
        cos_TD,
        sin_TD,
        q_weight_D,
        k_weight_D,
        cell_T,
        q_out_THD,
        k_out,
        v_out,
        num_heads,
        num_kv_heads,
        num_written,
        q_THD.stride(0),
        q_THD.stride(1),
        k_TKD.stride(0),
        k_TKD.stride(1),
        0 if v_TKD is None else v_TKD.stride(0),
        0 if v_TKD is None else v_TKD.stride(1),
        eps,
        HALF=head_dim // 2,
        BLOCK=triton.next_power_of_2(head_dim // 2),
        HEADS=_HEADS_PER_PROGRAM,
        IS_DEPENDENT=is_dependent(q_THD),
        num_warps=4,
        on=q_THD,
    )
    return q_out_THD


def silu_mul(gate_up_TI: torch.Tensor) -> torch.Tensor:
    """As ``paged.kernels.activation.silu_mul``."""
    num_rows, width = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    assert gate_up_TI.shape[1] % 2 == 0, gate_up_TI.shape
    assert gate_up_TI.stride(1) == 1, gate_up_TI.stride()
    out_TI = empty_rows(num_rows, (width,), gate_up_TI)
    launch(
        _silu_mul_kernel,
        (num_rows, triton.cdiv(width, _SILU_BLOCK)),
        gate_up_TI,
        out_TI,
        gate_up_TI.stride(0),
        width,
        BLOCK=_SILU_BLOCK,
        IS_DEPENDENT=is_dependent(gate_up_TI),
        num_warps=4,
        on=gate_up_TI,
    )
    return out_TI


def _aligned(x_N: torch.Tensor, num_parts: int = 1) -> torch.Tensor:
    """``x`` or a copy whose place and strides are such that the compiler sums its rows as it sums all of this width.

    It gives a thread other elements if an address or a stride is no multiple of 16.
    """
    part = x_N.shape[-1] // num_parts
    strides = [*x_N.stride()[:-1], part]
    if x_N.data_ptr() % 16 == 0 and (x_N.is_contiguous() or all(stride % 16 == 0 for stride in strides)):
        return x_N
    return x_N.clone(memory_format=torch.contiguous_format)


def _num_warps(block: int) -> int:
    """Warps of a program that sums so many numbers; a part of the order of summation."""
    return max(1, min(8, block // 256))


@triton.jit
def _sum_of_squares_kernel(x_pointer, sum_pointer, row_stride, width, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """One part of one row."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns_B = tl.arange(0, BLOCK)
    x_start = x_pointer + row * row_stride + part * width
    x_B = tl.load(x_start + columns_B, mask=columns_B < width, other=0.0).to(tl.float32)
    tl.store(sum_pointer + row * tl.num_programs(1) + part, tl.sum(x_B * x_B, 0))


@triton.jit
def _rms_norm_kernel(
    x_pointer,
    delta_pointer,
    weight_pointer,
    sum_pointer,
    out_pointer,
    num_heads,
    row_stride,
    head_stride,
    delta_stride,
    width,
    eps,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Normalize one row, after adding the row of ``delta`` if there is one."""
    columns_B = tl.arange(0, BLOCK)
    mask_B = columns_B < width
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    weight_B = tl.load(weight_pointer + columns_B, mask=mask_B, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64)
    x_start = row // num_heads * row_stride + row % num_heads * head_stride
    x_B = tl.load(x_pointer + x_start + columns_B, mask=mask_B, other=0.0)
    dtype = out_pointer.dtype.element_ty
    if delta_pointer is not None:
        delta_B = tl.load(delta_pointer + row * delta_stride + columns_B, mask=mask_B, other=0.0)
        x_B = (x_B.to(tl.float32) + delta_B.to(tl.float32)).to(dtype)
        tl.store(sum_pointer + row * width + columns_B, x_B, mask=mask_B)
    wide_B = x_B.to(tl.float32)
    mean = tl.sum(wide_B * wide_B, 0) / width
    normed_B = (wide_B * tl.rsqrt(mean + eps)).to(dtype).to(tl.float32)
    tl.store(out_pointer + row * width + columns_B, (weight_B * normed_B).to(dtype), mask=mask_B)


@triton.jit
def _norm_rope_kernel(
    q_pointer,
    k_pointer,
    v_pointer,
    cos_pointer,
    sin_pointer,
    q_weight_pointer,
    k_weight_pointer,
    cell_pointer,
    q_out_pointer,
    k_out_pointer,
    v_out_pointer,
    num_heads,
    num_kv_heads,
    num_written,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    eps,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Some heads of one token: the query's first, then the keys', then, if they are stored, the values' as they are."""
    row = tl.program_id(0).to(tl.int64)
    head_H = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half_B = tl.arange(0, BLOCK)
    is_q_H = head_H < num_heads
    kv_head_H = head_H - num_heads
    mask_HB = (head_H < num_written)[:, None] & (half_B < HALF)[None, :]
    dtype = q_out_pointer.dtype.element_ty
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    q_H = q_pointer + row * q_row_stride + head_H * q_head_stride
    kv_H = k_pointer + row * k_row_stride + kv_head_H * k_head_stride
    is_v_H = head_H >= num_heads + num_kv_heads
    if v_pointer is not None:
        v_H = v_pointer + row * v_row_stride + (kv_head_H - num_kv_heads) * v_head_stride
        kv_H = tl.where(is_v_H, v_H, kv_H)
    x_HB = tl.where(is_q_H, q_H, kv_H)[:, None] + half_B[None, :]
    value_first_HB = tl.load(x_HB, mask=mask_HB, other=0.0)
    value_second_HB = tl.load(x_HB + HALF, mask=mask_HB, other=0.0)
    first_HB = value_first_HB.to(tl.float32)
    second_HB = value_second_HB.to(tl.float32)
    if q_weight_pointer is not None:
        weight_HB = tl.where(is_q_H, q_weight_pointer, k_weight_pointer)[:, None] + half_B[None, :]
        squares_HB = first_HB * first_HB + second_HB * second_HB
        scale_H1 = tl.rsqrt(tl.sum(squares_HB, 1) / (2 * HALF) + eps)[:, None]
        first_weight_HB = tl.load(weight_HB, mask=mask_HB, other=0.0).to(tl.float32)
        second_weight_HB = tl.load(weight_HB + HALF, mask=mask_HB, other=0.0).to(tl.float32)
        first_HB = (first_weight_HB * (first_HB * scale_H1).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        second_HB = (second_weight_HB * (second_HB * scale_H1).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    cos_1B = tl.load(cos_pointer + row * HALF + half_B, mask=half_B < HALF, other=0.0).to(tl.float32)[None, :]
    sin_1B = tl.load(sin_pointer + row * HALF + half_B, mask=half_B < HALF, other=0.0).to(tl.float32)[None, :]
    # Each product is rounded before the sum.
    turned_HB = (first_HB * cos_1B).to(dtype).to(tl.float32) - (second_HB * sin_1B).to(dtype).to(tl.float32)
    turned_second_HB = (second_HB * cos_1B).to(dtype).to(tl.float32) + (first_HB * sin_1B).to(dtype).to(tl.float32)
    out_HB = turned_HB.to(dtype)
    out_second_HB = turned_second_HB.to(dtype)
    q_out_H = q_out_pointer + (row * num_heads + head_H) * (2 * HALF)
    if v_pointer is None:
        k_out_H = k_out_pointer + (row * num_kv_heads + kv_head_H) * (2 * HALF)
        place_HB = tl.where(is_q_H, q_out_H, k_out_H)[:, None] + half_B[None, :]
        tl.store(place_HB, out_HB, mask=mask_HB)
        tl.store(place_HB + HALF, out_second_HB, mask=mask_HB)
    else:
        place_HB = q_out_H[:, None] + half_B[None, :]
        tl.store(place_HB, out_HB, mask=mask_HB & is_q_H[:, None])
        tl.store(place_HB + HALF, out_second_HB, mask=mask_HB & is_q_H[:, None])
        cell = tl.load(cell_pointer + row)
        k_out_H = k_out_pointer + (cell * num_kv_heads + kv_head_H) * (2 * HALF)
        v_out_H = v_out_pointer + (cell * num_kv_heads + kv_head_H - num_kv_heads) * (2 * HALF)
        place_HB = tl.where(is_v_H, v_out_H, k_out_H)[:, None] + half_B[None, :]
        is_stored_HB = mask_HB & (~is_q_H)[:, None] & (cell >= 0)
        is_v_H1 = is_v_H[:, None]
        cached = k_out_pointer.dtype.element_ty
        tl.store(place_HB, tl.where(is_v_H1, value_first_HB, out_HB).to(cached), mask=is_stored_HB)
        tl.store(place_HB + HALF, tl.where(is_v_H1, value_second_HB, out_second_HB).to(cached), mask=is_stored_HB)


@triton.jit
def _silu_mul_kernel(gate_up_pointer, out_pointer, row_stride, width, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """A part of one row."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_B = columns_B < width
    gate_B = tl.load(gate_up_pointer + row * row_stride + columns_B, mask=mask_B, other=0.0).to(tl.float32)
    up_B = tl.load(gate_up_pointer + row * row_stride + width + columns_B, mask=mask_B, other=0.0).to(tl.float32)
    dtype = out_pointer.dtype.element_ty
    silu_B = tl.div_rn(gate_B, 1.0 + tl.exp(-gate_B)).to(dtype).to(tl.float32)
    tl.store(out_pointer + row * width + columns_B, (silu_B * up_B).to(dtype), mask=mask_B)
