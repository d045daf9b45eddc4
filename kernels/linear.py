"""Matrix products of activations with weights, and the head's product that ends in logits.

Contract, with T rows, K inputs, N outputs: a row of the result is a function of that row of the input and of the
weights; under ``invariant`` to the bit, whatever T and whoever the neighbours are. One sum over ascending K
(``k_segments`` sums, folded as a balanced tree, where a caller asks for it), the bias added before the one rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paged.kernels.numerics import Numerics, compute_dtype, fold_tree


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
        k_segments: parts of K summed apart in fp32 (fp64), then folded as a balanced tree; ``fast`` has no use for it.
    """
    _check(x_TK, weight_NK, bias_N)
    if is_canonical(x_TK, numerics):
        from paged.kernels import gemm_dispatch

        return gemm_dispatch.product(x_TK, weight_NK, bias_N, k_segments=k_segments)
    if k_segments != 1 and numerics.is_invariant:
        return add_bias(partial_linear(x_TK, weight_NK, numerics=numerics, k_segments=k_segments), bias_N, x_TK.dtype)
    return _in_tiles(x_TK, weight_NK, bias_N, numerics)


def partial_linear(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, *, numerics: Numerics, k_segments: int = 1
) -> torch.Tensor:
    """``x @ weight.T`` [T, N] over the part of K that is given, left in fp32 (fp64): a term of a longer sum.

    Args:
        x_TK: activations; rows may be apart, elements of a row adjoin.
        weight_NK: weights, contiguous, of the same dtype.
        numerics: how sums are formed.
        k_segments: parts of this K summed apart, then folded as a balanced tree.
    """
    _check(x_TK, weight_NK, None)
    if is_canonical(x_TK, numerics):
        from paged.kernels import gemm_dispatch

        return gemm_dispatch.product(x_TK, weight_NK, k_segments=k_segments, out_dtype=torch.float32)
    if not numerics.is_invariant:
        return _wide_product(x_TK, weight_NK, numerics)
    size, rest = divmod(x_TK.shape[1], k_segments)
    if rest:
        raise ValueError(f"the product's inner size {x_TK.shape[1]} must be a multiple of k_segments {k_segments}")
    parts = zip(x_TK.split(size, dim=1), weight_NK.split(size, dim=1), strict=True)
    return fold_tree([_wide_product(x_part, weight_part.contiguous(), numerics) for x_part, weight_part in parts])


def add_bias(total_TN: torch.Tensor, bias_N: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The finished sum of ``partial_linear``'s terms: with the bias, rounded to ``dtype``."""
    return (total_TN if bias_N is None else total_TN + bias_N).to(dtype)


def head_logits(x_TK: torch.Tensor, weight_NK: torch.Tensor, *, numerics: Numerics) -> torch.Tensor:
    """Logits [T, N] in fp32 (fp64 for fp64 models), straight from the product's accumulator: never rounded to less."""
    _check(x_TK, weight_NK, None)
    if x_TK.is_cuda or x_TK.dtype == compute_dtype(x_TK.dtype):
        return _wide_product(x_TK, weight_NK, numerics)
    # An upcast copy of a whole vocabulary would be larger than the model's other transients.
    parts = [_wide_product(x_TK, part, numerics) for part in weight_NK.split(numerics.head_rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def is_canonical(x_TK: torch.Tensor, numerics: Numerics) -> bool:
    """Whether products of ``x`` are formed by our CUDA kernel, or by what has its bits."""
    return x_TK.is_cuda and numerics.is_invariant and x_TK.dtype in (torch.bfloat16, torch.float16)


def _wide_product(x_TK: torch.Tensor, weight_NK: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """``x @ weight.T`` [T, N] in the dtype that sums are formed in."""
    dtype = compute_dtype(x_TK.dtype)
    if x_TK.dtype == dtype or not x_TK.is_cuda:
        return linear(x_TK.to(dtype), weight_NK.to(dtype), numerics=numerics)
    if numerics.is_invariant:
        return partial_linear(x_TK, weight_NK, numerics=numerics)
    return torch.mm(x_TK, weight_NK.t(), out_dtype=dtype)


def _in_tiles(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, numerics: Numerics
) -> torch.Tensor:
    """The product in tiles of rows, and of columns where their number must not show either."""
    if not numerics.is_invariant:
        return F.linear(x_TK, weight_NK, bias_N)
    if x_TK.is_cuda or not numerics.is_tp_invariant:
        return _in_row_tiles(x_TK, weight_NK, bias_N, numerics.gemm_rows)
    size = numerics.gemm_columns
    outputs = []
    for first in range(0, weight_NK.shape[0], size):
        part_NK, part_N = weight_NK[first : first + size], None if bias_N is None else bias_N[first : first + size]
        count = part_NK.shape[0]
        if count < size:
            part_NK = F.pad(part_NK, (0, 0, 0, size - count))
            part_N = None if part_N is None else F.pad(part_N, (0, size - count))
        outputs.append(_in_row_tiles(x_TK, part_NK, part_N, numerics.gemm_rows)[:, :count])
    return torch.cat(outputs, dim=1)


def _in_row_tiles(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, num_rows: int
) -> torch.Tensor:
    """The product in tiles of exactly ``num_rows`` rows: the library never sees how many there really are."""
    total = x_TK.shape[0]
    assert total > 0
    padding = -total % num_rows
    tiles = (F.pad(x_TK, (0, 0, 0, padding)) if padding else x_TK).split(num_rows)
    outputs = [F.linear(tile_RK, weight_NK, bias_N) for tile_RK in tiles]
    out_TN = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out_TN[:total]


def _check(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
    assert x_TK.dim() == weight_NK.dim() == 2, (x_TK.shape, weight_NK.shape)
    assert x_TK.shape[1] == weight_NK.shape[1], (x_TK.shape, weight_NK.shape)
    assert x_TK.dtype == weight_NK.dtype, (x_TK.dtype, weight_NK.dtype)
    assert x_TK.stride(1) == 1, x_TK.stride()
    assert weight_NK.is_contiguous(), weight_NK.stride()
    assert bias_N is None or (bias_N.shape == weight_NK.shape[:1] and bias_N.dtype == x_TK.dtype)
