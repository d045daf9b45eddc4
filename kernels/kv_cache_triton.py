"""Storing a step's keys and values in the paged cache on a card: one program a row, both tensors in one launch.

Contract: what ``paged.kernels.kv_cache.store`` says, for caches without scales. A copy with at most one rounding, so
nothing but the row itself reaches what is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paged.kernels.launch import is_dependent, launch


def store_triton(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    cell_T: torch.Tensor,
) -> None:
    """Write row t of keys and values to cell ``cell_T[t]`` of caches [num_blocks, block_size, K, D].

    A row whose cell is negative is one of padding and is not stored.

    Args:
        key_cache, value_cache: contiguous, not fp8, which needs scales.
        key_TKD, value_TKD: rows may be apart, their elements adjoin.
        cell_T: int64, distinct where they are not negative.

    Raises:
        AssertionError: on rows whose elements do not adjoin.
    """
    num_kv_heads, head_dim = key_TKD.shape[1:]
    width = num_kv_heads * head_dim
    assert key_cache.is_contiguous(), key_cache.stride()
    assert value_cache.is_contiguous(), value_cache.stride()
    assert key_TKD.stride()[1:] == value_TKD.stride()[1:] == (head_dim, 1), (key_TKD.stride(), value_TKD.stride())
    if cell_T.shape[0] == 0:
        return
    padded = triton.next_power_of_2(width)
    launch(
        _store_kernel,
        (cell_T.shape[0],),
        key_TKD,
        value_TKD,
        cell_T,
        key_cache,
        value_cache,
        key_TKD.stride(0),
        value_TKD.stride(0),
        WIDTH=width,
        PADDED=padded,
        IS_DEPENDENT=is_dependent(key_TKD),
        num_warps=max(1, min(8, padded // 256)),
        on=key_TKD,
    )


@triton.jit
def _store_kernel(
    key_ptr,
    value_ptr,
    cell_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    cell = tl.load(cell_ptr + row)
    column_W = tl.arange(0, PADDED)
    exists_W = (column_W < WIDTH) & (cell >= 0)
    key_W = tl.load(key_ptr + row * key_stride + column_W, exists_W)
    value_W = tl.load(value_ptr + row * value_stride + column_W, exists_W)
    tl.store(key_cache_ptr + cell * WIDTH + column_W, key_W.to(key_cache_ptr.dtype.element_ty), exists_W)
    tl.store(value_cache_ptr + cell * WIDTH + column_W, value_W.to(value_cache_ptr.dtype.element_ty), exists_W)
