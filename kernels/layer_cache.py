"""The cache tensors of one layer: keys and values in blocks, for K kv heads of size D."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache tensors of one layer; the scales are ``None`` unless the cache is fp8.

    Attributes:
        key, value: [num_blocks, block_size, K, D].
        key_scale, value_scale: fp32 [num_blocks, block_size, K], or ``None``.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

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
