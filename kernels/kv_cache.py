"""Keys and values in blocks: storing a step's rows by cell and reading rows back.

Contract, with T rows, K kv heads, D head size, N rows read: a cache tensor is [num_blocks, block_size, K, D], and
contiguous; cell = block * block_size + offset. A cache of fp8 e4m3 carries one fp32 scale for each token and kv head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache tensors of one layer; the scales are ``None`` unless the cache is fp8.

    Attributes:
        key, value: [num_blocks, block_size, K, D].
        key_scale, value_scale: fp32 [num_blocks, block_size, K], or ``None``.
        derived: what kernels worked out from these tensors' places and shapes, each under a name of its own. It lives
            and ends with this object, and another cache has its own.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.key.dim() == 4, self.key.shape
        assert self.key.shape == self.value.shape, (self.key.shape, self.value.shape)
        assert self.key.dtype == self.value.dtype, (self.key.dtype, self.value.dtype)
        assert self.key.is_contiguous(), self.key.stride()
        assert self.value.is_contiguous(), self.value.stride()
        for scale in (self.key_scale, self.value_scale):
            assert (scale is not None) == (self.key.dtype == FP8), "fp8 carries scales, other dtypes none"
            assert scale is None or (scale.shape == self.key.shape[:3] and scale.dtype == torch.float32)

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.key.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of a token."""
        return self.key.shape[2]

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.key.shape[3]


def store(cache: LayerCache, key_TKD: torch.Tensor, value_TKD: torch.Tensor, cell_T: torch.Tensor) -> None:
    """Write row t of keys and values to cell ``cell_T[t]`` (int64, distinct), rounded to the cache's dtype.

    On a card, without scales, a negative cell stores nothing.
    """
    shape = (cell_T.shape[0], cache.num_kv_heads, cache.head_dim)
    assert key_TKD.shape == value_TKD.shape == shape, (key_TKD.shape, value_TKD.shape, shape)
    assert cell_T.dtype == torch.int64
    if key_TKD.is_cuda and cache.key_scale is None:
        # Imported here because a CPU needs no Triton.
        from paged.kernels.kv_cache_triton import store_triton

        store_triton(cache.key, cache.value, key_TKD, value_TKD, cell_T)
        return
    _store(cache.key, cache.key_scale, key_TKD, cell_T)
    _store(cache.value, cache.value_scale, value_TKD, cell_T)


def read_keys(cache: LayerCache, row_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys [N, D] in ``dtype``, contiguous; row = cell * K + kv head, in whatever order the caller wants them."""
    return _read(cache.key, cache.key_scale, row_N, dtype)


def read_values(cache: LayerCache, row_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values [N, D] in ``dtype``, contiguous; rows as in ``read_keys``."""
    return _read(cache.value, cache.value_scale, row_N, dtype)


def _store(cache: torch.Tensor, scale: torch.Tensor | None, x_TKD: torch.Tensor, cell_T: torch.Tensor) -> None:
    if scale is None:
        cache.flatten(0, 1).index_copy_(0, cell_T, x_TKD.to(cache.dtype))
        return
    wide_TKD = x_TKD.float()
    # The smallest normal number keeps a head of zeros from a division by zero; a NaN passes through.
    scale_TK = (wide_TKD.abs().amax(-1) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    scale.flatten(0, 1).index_copy_(0, cell_T, scale_TK)
    # A quotient may round up to just beyond the largest number, which the cast would turn into NaN.
    quotient_TKD = (wide_TKD / scale_TK[..., None]).clamp(-FP8_MAX, FP8_MAX).to(cache.dtype)
    # Indexing is not defined on fp8 everywhere; bytes are.
    cache.view(torch.uint8).flatten(0, 1).index_copy_(0, cell_T, quotient_TKD.view(torch.uint8))


def _read(cache: torch.Tensor, scale: torch.Tensor | None, row_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if scale is None:
        return cache.flatten(0, 2).index_select(0, row_N).to(dtype)
    bytes_ND = cache.view(torch.uint8).flatten(0, 2).index_select(0, row_N)
    return bytes_ND.view(cache.dtype).to(dtype) * scale.flatten().index_select(0, row_N)[:, None].to(dtype)
