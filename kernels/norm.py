"""Root-mean-square normalization of rows.

Contract, with N the width: x / sqrt(mean(x^2) + eps), formed in fp32 (fp64 for fp64 models), rounded to the input's
dtype and only then multiplied by the weight: the rounding points of Hugging Face.
"""

from __future__ import annotations

import torch

from paged.kernels.numerics import compute_dtype


def rms_norm(x_N: torch.Tensor, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize the last dimension of ``x`` [..., N]; the result has its dtype and shape and is contiguous.

    Args:
        x_N: rows of any leading shape; elements of a row adjoin.
        weight_N: the weight [N], of the same dtype.
        eps: added to the mean of squares.
    """
    assert weight_N.shape == x_N.shape[-1:], (x_N.shape, weight_N.shape)
    assert weight_N.dtype == x_N.dtype, (x_N.dtype, weight_N.dtype)
    assert x_N.stride(-1) == 1, x_N.stride()
    if x_N.is_cuda and x_N.dtype != torch.float64:
        from paged.kernels import rowwise_triton

        return rowwise_triton.rms_norm(x_N, weight_N, eps)
    wide_N = x_N.to(compute_dtype(x_N.dtype))
    mean_1 = wide_N.square().mean(-1, keepdim=True)
    # In fp32 and fp64 rsqrt gives the same bits wherever an element stands; in bf16 it does not.
    return weight_N * (wide_N * torch.rsqrt(mean_1 + eps)).to(x_N.dtype)


def add_rms_norm(
    x_TN: torch.Tensor, delta_TN: torch.Tensor, weight_N: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x + delta`` [T, N], rounded to their dtype, and its normalized rows."""
    if x_TN.is_cuda and x_TN.dtype != torch.float64:
        from paged.kernels import rowwise_triton

        return rowwise_triton.add_rms_norm(x_TN, delta_TN, weight_N, eps)
    sum_TN = x_TN + delta_TN
    return sum_TN, rms_norm(sum_TN, weight_N, eps)
