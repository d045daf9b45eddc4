"""A step's queries, keys and values on their way from projection to attention: norm, rotation, storage.

Contract, with T rows, H query heads, K kv heads, D head size: ``norm_rope`` of ``paged.kernels.rope``, then ``store``
of ``paged.kernels.kv_cache``, to the bit. On a card it is one kernel, unless the model is fp64 or the cache has
scales.
"""

from __future__ import annotations

import torch

from paged.kernels.kv_cache import LayerCache, store
from paged.kernels.rope import norm_rope


def norm_rope_store(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    eps: float,
    cache: LayerCache,
    cell_T: torch.Tensor,
) -> torch.Tensor:
    """The queries [T, H, D], normalized and rotated, contiguous; keys and values are in the cache afterwards.

    Args:
        q_THD, k_TKD, cos_TD, sin_TD, q_weight_D, k_weight_D, eps: as ``norm_rope`` takes them.
        v_TKD: values of the same rows; elements of a head adjoin.
        cache, cell_T: as ``store`` takes them.
    """
    if q_THD.is_cuda and q_THD.dtype != torch.float64 and cache.key_scale is None:
        # Imported here because a CPU needs no Triton.
        from paged.kernels import rowwise_triton

        weights = q_weight_D, k_weight_D, eps
        caches = cache.key, cache.value, cell_T
        return rowwise_triton.norm_rope_store(q_THD, k_TKD, v_TKD, cos_TD, sin_TD, *weights, *caches)
    q_THD, k_TKD = norm_rope(q_THD, k_TKD, cos_TD, sin_TD, q_weight_D, k_weight_D, eps)
    store(cache, k_TKD, v_TKD, cell_T)
    return q_THD
