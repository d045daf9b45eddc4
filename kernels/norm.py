"""Root-mean-square normalization of rows.

Contract, with N the width: x / sqrt(mean(x^2) + eps), formed in fp32 (fp64 for fp64 models), rounded to the input's
dtype and only then multiplied by the weight: the rounding points of Hugging Face.
"""

from __future__ import annotations

import torch

from paged.kernels.numerics import compute_dtype, fold_tree


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
    return scale_rows(x_N, weight_N, eps, sum_of_squares(x_N), x_N.shape[-1])


def sum_of_squares(x_N: torch.Tensor, k_segments: int = 1) -> torch.Tensor:
    """Sums [..., 1] of the squares of rows [..., N], in fp32 (fp64).

    Args:
        x_N: rows; elements of a row adjoin.
        k_segments: parts of N summed apart, then folded as a balanced tree.
    """
    if x_N.is_cuda and x_N.dtype != torch.float64:
        from paged.kernels import rowwise_triton

        return fold_tree(rowwise_triton.sums_of_squares(x_N, k_segments).split(1, dim=-1))
    wide_N = x_N.to(compute_dtype(x_N.dtype))
    if k_segments == 1:
        return wide_N.square().sum(-1, keepdim=True)
    sum_S = wide_N.unflatten(-1, (k_segments, -1)).square().sum(-1)
    return fold_tree(sum_S.split(1, dim=-1))


def scale_rows(x_N: torch.Tensor, weight_N: torch.Tensor, eps: float, sum_1: torch.Tensor, width: int) -> torch.Tensor:
    """``rms_norm`` of rows of which ``x`` [..., N] may be a part: their sum of squares and their width are given."""
    # In fp32 and fp64 rsqrt gives the same bits wherever an element stands; in bf16 it does not.
    scaled_N = x_N.to(sum_1.dtype) * torch.rsqrt(sum_1 / width + eps)
    return weight_N * scaled_N.to(x_N.dtype)


def add_rms_norm(
    x_TN: torch.Tensor, delta_TN: torch.Tensor, weight_N: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x + delta`` [T, N], rounded to their dtype, and its normalized rows."""
    if x_TN.is_cuda and x_TN.dtype != torch.float64:
        from paged.kernels import rowwise_triton

        return rowwise_triton.add_rms_norm(x_TN, delta_TN, weight_N, eps)
    sum_TN = x_TN + delta_TN
    return sum_TN, rms_norm(sum_TN, weight_N, eps)
