"""The decoder: from token ids to hidden states over a paged cache, and from hidden states to logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from paged.core.model_spec import ModelSpec
from paged.core.request import stable_hash
from paged.kernels.batch_layout import BatchLayout
from paged.kernels.collectives import SINGLE, RankGroup
from paged.kernels.kv_cache import LayerCache
from paged.kernels.numerics import Numerics
from paged.kernels.rope import rope_tables
from paged.model.layers import Embedding, Head, Layer, Placement, RMSNorm

TORCH_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Cache(Protocol):
    """What the decoder needs of a cache: the tensors of each layer."""

    @property
    def layers(self) -> Sequence[LayerCache]:
        """One entry a decoder layer."""


class Decoder(nn.Module):
    """A decoder-only transformer for inference, described by a ``ModelSpec``. Keeps no state between calls.

    A fresh one holds arbitrary numbers: use ``Decoder.random`` or ``paged.model.checkpoint.load_decoder``, or write
    to ``tensors()``.

    Args:
        spec: sizes and architecture.
        numerics: how sums are formed.
        dtype: of weights and activations; ``None`` takes the spec's.
        device: where the weights lie.
        max_positions: positions that can be asked for; ``None`` takes the spec's.

    Attributes:
        spec: the whole model.
        local_spec: what this decoder holds of it; the cache is made from this one.
        group: the ranks that hold the model together. One rank's decoder comes from ``paged.model.parallel``.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        numerics: Numerics,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        max_positions: int | None = None,
    ) -> None:
        super().__init__()
        dtype = TORCH_DTYPES[spec.dtype] if dtype is None else dtype
        if dtype not in TORCH_DTYPES.values():
            raise ValueError(f"dtype must be one of {', '.join(TORCH_DTYPES)}, not {dtype}")
        device = torch.device(device)
        self.spec = self.local_spec = spec
        self.group: RankGroup = SINGLE
        self.numerics = numerics
        self.dtype = dtype
        self.device = device
        self.max_positions = spec.max_position_embeddings if max_positions is None else max_positions
        placement = Placement(numerics, dtype, device)
        self.embedding = Embedding(spec, placement)
        self.layers = nn.ModuleList(Layer(spec, index, placement) for index in range(spec.num_layers))
        self.norm = RMSNorm("model.norm", spec.hidden_size, spec.rms_norm_eps, placement)
        tied = spec.tie_word_embeddings
        rows = self.embedding.weight if tied else placement.weight(spec.vocab_size, spec.hidden_size)
        self.head = Head(rows, numerics)
        cos_PD, sin_PD = rope_tables(self.max_positions, spec.head_dim, spec.rope_theta, dtype=dtype, device=device)
        self.cos_PD: torch.Tensor
        self.sin_PD: torch.Tensor
        self.register_buffer("cos_PD", cos_PD, persistent=False)
        self.register_buffer("sin_PD", sin_PD, persistent=False)

    @classmethod
    def random(
        cls,
        spec: ModelSpec,
        seed: int,
        *,
        numerics: Numerics,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        max_positions: int | None = None,
    ) -> Decoder:
        """A decoder with random weights that keep activations near 1 in size.

        Each tensor hangs on (seed, its name, its shape) and the kind of device; dtypes round the same numbers.
        """
        decoder = cls(spec, numerics=numerics, dtype=dtype, device=device, max_positions=max_positions)
        targets = decoder.tensors()
        for name, numbers in random_tensors(spec, seed, decoder.device):
            targets[name].copy_(numbers)
        return decoder

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights by their Hugging Face names, as views: writing to them changes the model."""
        named: dict[str, torch.Tensor] = {"model.embed_tokens.weight": self.embedding.weight}
        for layer in self.layers:
            assert isinstance(layer, Layer)
            named.update(layer.tensors())
        named.update(self.norm.tensors())
        if not self.spec.tie_word_embeddings:
            named["lm_head.weight"] = self.head.weight
        # Detached, so that callers may write in place whatever the gradient mode.
        return {name: tensor.detach() for name, tensor in named.items()}

    @torch.no_grad()
    def forward(self, token_ids_T: torch.Tensor, layout: BatchLayout, cache: Cache) -> torch.Tensor:
        """Hidden states [T, hidden] after the final norm; stores the rows' keys and values in ``cache``.

        Args:
            token_ids_T: int64, one id a row of ``layout``.
            layout: positions, slots and bounds of the rows.
            cache: ``cache.layers[i]`` is layer i's.

        Raises:
            IndexError: an id outside the vocabulary or a position beyond ``max_positions`` (on the CPU; a CUDA
                device asserts, so callers check first).
        """
        assert token_ids_T.shape == layout.positions_T.shape, (token_ids_T.shape, layout.positions_T.shape)
        x_TN = self.embedding(token_ids_T)
        cos_TD, sin_TD = self.cos_PD[layout.positions_T], self.sin_PD[layout.positions_T]
        delta_TN: torch.Tensor | None = None
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            x_TN, delta_TN = layer(x_TN, delta_TN, cos_TD, sin_TD, layout, layer_cache)
        normed_TN: torch.Tensor = self.norm.of_sum(x_TN, delta_TN)[1]
        return normed_TN

    @torch.no_grad()
    def logits(self, hidden_RN: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab] of rows of ``forward``'s result, in fp32 (fp64 for fp64 models)."""
        logits_RV: torch.Tensor = self.head(hidden_RN)
        return logits_RV

    @torch.no_grad()
    def local_logits(self, hidden_RN: torch.Tensor) -> torch.Tensor:
        """This rank's columns [R, ceil(vocab / ranks)] of ``logits``; those past the vocabulary's end mean nothing.

        ``paged.kernels.vocab_parallel`` takes them.
        """
        return self.head.columns(hidden_RN)


def random_tensors(spec: ModelSpec, seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The numbers of ``Decoder.random`` in fp32, one tensor at a time, by checkpoint name."""
    for name, shape in spec.parameter_shapes().items():
        generator = torch.Generator(device=device)
        generator.manual_seed(stable_hash("weights", seed, name) >> 1)
        # fp64 models round nothing, but start from the same fp32 numbers as the rest.
        numbers = torch.empty(shape, dtype=torch.float32, device=device).normal_(generator=generator)
        if name.endswith(".bias"):
            numbers *= 0.02
        elif len(shape) == 1:
            numbers = 1 + 0.1 * numbers
        else:
            numbers *= shape[1] ** -0.5
        yield name, numbers
