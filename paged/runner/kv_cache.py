"""The keys and values of all sequences on the device: allocated once, in blocks, one pair of tensors a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paged.core.model_spec import ModelSpec
from paged.kernels.kv_cache import FP8, LayerCache, read_keys, read_values


class KVCache:
    """Storage for ``num_blocks`` blocks of ``block_size`` tokens; which block is whose is the scheduler's affair.

    Its tensors live as long as the object and are only ever written by ``paged.kernels.kv_cache.store``.

    Args:
        spec: the model, or one rank's part of it.
        num_blocks: blocks, at least 1.
        block_size: tokens in a block, at least 1.
        dtype: of keys and values; ``torch.float8_e4m3fn`` adds one fp32 scale for each token and kv head.
        device: where the tensors lie.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.spec = spec
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.layers: tuple[LayerCache, ...] = tuple(self._layer() for _ in range(spec.num_layers))

    def _layer(self) -> LayerCache:
        shape = (self.num_blocks, self.block_size, self.spec.num_kv_heads, self.spec.head_dim)
        key, value = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        if self.dtype != FP8:
            return LayerCache(key, value)
        key_scale, value_scale = (torch.ones(shape[:3], dtype=torch.float32, device=self.device) for _ in range(2))
        return LayerCache(key, value, key_scale, value_scale)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, scales included."""
        layer = self.layers[0]
        tensors = (layer.key, layer.value, layer.key_scale, layer.value_scale)
        return len(self.layers) * sum(t[0].numel() * t.element_size() for t in tensors if t is not None)

    def gather(self, layer: int, block_table: Sequence[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [length, K, D] of a sequence's first ``length`` positions, contiguous copies, for tests.

        They have the cache's dtype, or fp32 if that is fp8.
        """
        cache = self.layers[layer]
        if length > len(block_table) * self.block_size:
            raise ValueError(f"length {length} exceeds the {len(block_table)} blocks of the table")
        position_T = torch.arange(length, device=self.device)
        table = torch.as_tensor(block_table, dtype=torch.int64, device=self.device)
        cell_T = table[position_T // self.block_size] * self.block_size + position_T % self.block_size
        num_heads = cache.num_kv_heads
        row_TK = cell_T[:, None] * num_heads + torch.arange(num_heads, device=self.device)
        dtype = torch.float32 if self.dtype == FP8 else self.dtype
        shape = (length, num_heads, cache.head_dim)
        return (
            read_keys(cache, row_TK.flatten(), dtype).view(shape),
            read_values(cache, row_TK.flatten(), dtype).view(shape),
        )
