"""Matrix products of activations with weights, and the head's product that ends in logits.

Contract, with T rows, K inputs, N outputs: a row of the result is a function of that row of the input and of the
weights; under ``invariant`` to the bit, whatever T and whoever the neighbours are. One sum over ascending K
(``k_segments`` sums, folded as a balanced tree, where a caller asks for it), the bias added before the one rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from paged.kernels.numerics import Numerics, compute_dtype


def linear(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    numerics: Numerics,
    k_segments: int = 1,
) -> torch.Tensor:
    """``x @ weight.T + bias`` as [T, N], in the inputs' dtype.

    Args:
        x_TK: activations; rows may be apart, elements of a row adjoin.
        weight_NK: weights, contiguous, of the same dtype.
        bias_N: bias, or ``None``.
        numerics: how sums are formed.
        k_segments: parts of K summed apart in fp32 (fp64), then folded as a balanced tree.
    """
    _check(x_TK, weight_NK, bias_N)
    if _is_canonical(x_TK, numerics):
        from paged.kernels import gemm_dispatch

        return gemm_dispatch.product(x_TK, weight_NK, bias_N, k_segments=k_segments)
    if k_segments != 1:
        return _linear_segments(x_TK, weight_NK, bias_N, numerics, k_segments)
    if not numerics.is_invariant:
        return F.linear(x_TK, weight_NK, bias_N)
    return _in_row_tiles(x_TK, numerics.gemm_rows, lambda tile_RK: F.linear(tile_RK, weight_NK, bias_N))


def head_logits(x_TK: torch.Tensor, weight_NK: torch.Tensor, *, numerics: Numerics) -> torch.Tensor:
    """Logits [T, N] in fp32 (fp64 for fp64 models), straight from the product's accumulator: never rounded to less."""
    _check(x_TK, weight_NK, None)
    dtype = compute_dtype(x_TK.dtype)
    if x_TK.dtype == dtype:
        return linear(x_TK, weight_NK, numerics=numerics)
    if _is_canonical(x_TK, numerics):
        from paged.kernels import gemm_dispatch

        return gemm_dispatch.product(x_TK, weight_NK, out_dtype=dtype)
    if x_TK.is_cuda:
        return torch.mm(x_TK, weight_NK.t(), out_dtype=dtype)
    # An upcast copy of a whole vocabulary would be larger than the model's other transients.
    parts = [linear(x_TK.to(dtype), part.to(dtype), numerics=numerics) for part in weight_NK.split(numerics.head_rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _is_canonical(x_TK: torch.Tensor, numerics: Numerics) -> bool:
    """Whether our CUDA kernel's order of summation is asked for."""
    return x_TK.is_cuda and numerics.is_invariant and x_TK.dtype in (torch.bfloat16, torch.float16)


def _linear_segments(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, numerics: Numerics, k_segments: int
) -> torch.Tensor:
    size, rest = divmod(x_TK.shape[1], k_segments)
    if rest:
        raise ValueError(f"the product's inner size {x_TK.shape[1]} must be a multiple of k_segments {k_segments}")
    dtype = compute_dtype(x_TK.dtype)
    sums = [
        linear(x_part.to(dtype), weight_part.to(dtype).contiguous(), numerics=numerics)
        for x_part, weight_part in zip(x_TK.split(size, dim=1), weight_NK.split(size, dim=1), strict=True)
    ]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    total_TN = sums[0] if bias_N is None else sums[0] + bias_N
    return total_TN.to(x_TK.dtype)


def _in_row_tiles(x_TK: torch.Tensor, num_rows: int, product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply ``product`` to tiles of exactly ``num_rows`` rows: the library never sees how many there really are."""
    total = x_TK.shape[0]
    assert total > 0
    padding = -total % num_rows
    tiles = (F.pad(x_TK, (0, 0, 0, padding)) if padding else x_TK).split(num_rows)
    outputs = [product(tile_RK) for tile_RK in tiles]
    out_TN = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out_TN[:total]


def _check(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
    assert x_TK.dim() == weight_NK.dim() == 2, (x_TK.shape, weight_NK.shape)
    assert x_TK.shape[1] == weight_NK.shape[1], (x_TK.shape, weight_NK.shape)
    assert x_TK.dtype == weight_NK.dtype, (x_TK.dtype, weight_NK.dtype)
    assert x_TK.stride(1) == 1, x_TK.stride()
    assert weight_NK.is_contiguous(), weight_NK.stride()
    assert bias_N is None or (bias_N.shape == weight_NK.shape[:1] and bias_N.dtype == x_TK.dtype)
