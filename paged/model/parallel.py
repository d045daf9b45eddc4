"""Tensor parallelism, applied to the one decoder from outside: what a rank holds, and what it exchanges where.

A rank's decoder is the same ``Decoder``, built from the rank's part of the spec; the modules that must exchange
something are then replaced by those of this file, which take over their weights. A step costs one all-reduce for the
embedding and two a layer (``output`` and ``down``), plus a small one a layer for a QK norm over all heads; full rows of
logits cost one gather. None grows with the number of rows.

Shapes: see ``paged.model.layers``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paged.core.model_spec import ModelSpec
from paged.core.sharding import check_k_segments, check_tp, local_part, local_spec
from paged.kernels.attention import is_canonical
from paged.kernels.batch_layout import BatchLayout
from paged.kernels.collectives import SINGLE, RankGroup
from paged.kernels.kv_cache import LayerCache
from paged.kernels.linear import add_bias, linear, partial_linear
from paged.kernels.norm import scale_rows, sum_of_squares
from paged.kernels.numerics import Numerics
from paged.model.decoder import Decoder, random_tensors
from paged.model.layers import MLP, Embedding, Head, Heads, Layer, Linear, MoE, QKNorm

Cut = Callable[[str, Any], torch.Tensor]


def build_decoder(
    spec: ModelSpec,
    *,
    numerics: Numerics,
    group: RankGroup = SINGLE,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_positions: int | None = None,
) -> Decoder:
    """One rank's decoder; a fresh one holds arbitrary numbers.

    Its ``spec`` is the whole model's, its ``local_spec`` what this rank holds (the cache is made from that one), its
    ``group`` the ranks. ``tensors()`` are this rank's parts. ``forward`` gives the same hidden states on every rank,
    ``logits`` full rows, ``local_logits`` this rank's columns for ``paged.kernels.vocab_parallel``. All ranks call
    ``forward`` and ``logits`` together.

    Raises:
        ValueError: the model can't be cut over the group's ranks, or not with ``numerics.k_segments``.
    """
    check_tp(spec, group.size)
    check_k_segments(spec, group.size, numerics.k_segments)
    placed: dict[str, Any] = {"numerics": numerics, "dtype": dtype, "device": device, "max_positions": max_positions}
    if group.size == 1:
        return Decoder(spec, **placed)
    decoder = Decoder(local_spec(spec, group.size), **placed)
    decoder.spec, decoder.group = spec, group
    decoder.embedding = VocabParallelEmbedding(decoder.embedding, spec.vocab_size, group)
    decoder.head = VocabParallelHead(decoder.head, spec.vocab_size, group)
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        _connect(layer, spec, group)
    return decoder


def _connect(layer: Layer, spec: ModelSpec, group: RankGroup) -> None:
    attention, numerics = layer.attention, layer.attention.heads.numerics
    attention.output = RowParallel(attention.output, group)
    if attention.qk_norm is not None and spec.qk_norm == "full":
        attention.qk_norm = FullQKNorm(attention.qk_norm, spec, group)
    if numerics.is_tp_invariant and group.size > spec.num_kv_heads:
        attention.heads = PaddedHeads(attention.heads, spec, group)
    if isinstance(layer.mlp, MoE):
        layer.mlp.group = group
        layer.mlp.k_segments = local_segments(numerics, group)
    else:
        assert isinstance(layer.mlp, MLP)
        layer.mlp.down = RowParallel(layer.mlp.down, group)


def random_decoder(
    spec: ModelSpec,
    seed: int,
    *,
    numerics: Numerics,
    group: RankGroup = SINGLE,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_positions: int | None = None,
) -> Decoder:
    """One rank's parts of exactly the numbers that ``Decoder.random`` gives one rank; raises as ``build_decoder``.

    The device holds one whole tensor of the model beside the parts, in fp32.
    """
    decoder = build_decoder(
        spec, numerics=numerics, group=group, dtype=dtype, device=device, max_positions=max_positions
    )
    cut, targets = part_of(decoder), decoder.tensors()
    for name, numbers in random_tensors(spec, seed, decoder.device):
        write_part(targets[name], cut(name, numbers))
    return decoder


def part_of(decoder: Decoder) -> Cut:
    """The function from a name and a whole tensor (or what gives tensors when it is indexed) to this rank's part.

    The part may be a view of the whole.
    """
    spec, group = decoder.spec, decoder.group

    def cut(name: str, whole: Any) -> torch.Tensor:
        part: torch.Tensor = whole[local_part(spec, name, group.rank, group.size).index]
        return part

    return cut


def write_part(target: torch.Tensor, part: torch.Tensor) -> None:
    """Copy a part into a rank's own memory, rounded to its dtype there; rows that pad a vocabulary become 0.

    Raises:
        AssertionError: the part does not fit.
    """
    num_rows = part.shape[0]
    assert part.shape[1:] == target.shape[1:], (part.shape, target.shape)
    assert num_rows <= target.shape[0], (part.shape, target.shape)
    target[:num_rows].copy_(part.to(target.device))
    target[num_rows:].zero_()


def local_segments(numerics: Numerics, group: RankGroup) -> int:
    """Segments of a row-parallel product that fall to one rank."""
    return max(1, numerics.k_segments // group.size)


class RowParallel(Linear):
    """A product whose inputs are cut over the ranks: each makes a term, the sum and the bias are the same on all."""

    def __init__(self, inner: Linear, group: RankGroup) -> None:
        nn.Module.__init__(self)
        self.parts, self.numerics = inner.parts, inner.numerics
        self.weight, self.bias = inner.weight, inner.bias
        self.k_segments = local_segments(inner.numerics, group)
        self.group = group

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        """The whole product [T, N] from this rank's inputs [T, K]."""
        if self.numerics.reduces_wide:
            term_TN = partial_linear(x_TK, self.weight, numerics=self.numerics, k_segments=self.k_segments)
        else:
            term_TN = linear(x_TK, self.weight, numerics=self.numerics)
        return add_bias(self.group.all_reduce(term_TN), self.bias, x_TK.dtype)


class VocabParallelEmbedding(Embedding):
    """The vectors of all token ids, of which each rank holds a range."""

    def __init__(self, inner: Embedding, vocab_size: int, group: RankGroup) -> None:
        nn.Module.__init__(self)
        self.weight = inner.weight
        self.vocab_size = vocab_size
        self.group = group

    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Rows [T, hidden]; raises IndexError on every rank for an id outside the whole vocabulary."""
        num_rows = self.weight.shape[0]
        local_T = token_ids_T - self.group.rank * num_rows
        is_mine_T = (local_T >= 0) & (local_T < num_rows)
        is_outside_T = (token_ids_T < 0) | (token_ids_T >= self.vocab_size)
        # What is outside stays outside here, so that the look-up refuses it before anything is exchanged.
        row_T = torch.where(is_mine_T, local_T, 0).masked_fill(is_outside_T, num_rows)
        mine_TN = F.embedding(row_T, self.weight).masked_fill(~is_mine_T[:, None], 0)
        return self.group.all_reduce(mine_TN)


class VocabParallelHead(Head):
    """The head, of whose columns each rank computes a range."""

    def __init__(self, inner: Head, vocab_size: int, group: RankGroup) -> None:
        super().__init__(inner.weight, inner.numerics)
        self.vocab_size = vocab_size
        self.group = group

    def forward(self, hidden_RN: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab], contiguous, the same on every rank."""
        return self.group.all_gather(self.columns(hidden_RN))[:, : self.vocab_size].contiguous()


class FullQKNorm(QKNorm):
    """Norms over all heads of queries and keys, of which each rank holds some: one exchange of two sums a row."""

    def __init__(self, inner: QKNorm, spec: ModelSpec, group: RankGroup) -> None:
        nn.Module.__init__(self)
        self.q_norm, self.k_norm = inner.q_norm, inner.k_norm
        self.q_width, self.k_width = spec.q_size, spec.kv_size
        self.q_segments = max(1, inner.k_segments // group.size)
        self.k_segments = max(1, inner.k_segments // min(group.size, spec.num_kv_heads))
        # Of the ranks with copies of one key head the first alone contributes; adding the others' 0 rounds nothing.
        self.is_copy = group.size > spec.num_kv_heads and group.rank * spec.num_kv_heads % group.size != 0
        self.group = group

    def forward(self, q_TK: torch.Tensor, k_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's normed queries and keys."""
        q_sum_T1, k_sum_T1 = sum_of_squares(q_TK, self.q_segments), sum_of_squares(k_TK, self.k_segments)
        if self.is_copy:
            k_sum_T1 = torch.zeros_like(k_sum_T1)
        sums_T2 = self.group.all_reduce(torch.cat((q_sum_T1, k_sum_T1), dim=1))
        q_sum_T1, k_sum_T1 = sums_T2.split(1, dim=1)
        return (
            scale_rows(q_TK, self.q_norm.weight, self.q_norm.eps, q_sum_T1, self.q_width),
            scale_rows(k_TK, self.k_norm.weight, self.k_norm.eps, k_sum_T1, self.k_width),
        )


class PaddedHeads(Heads):
    """Some of the query heads that share a key/value head, computed in their places among all of them.

    A batched product's bits hang on the number of query heads that share a key (fewer than 4, on the CPU); those of the
    card's kernels do not. Where ranks hold copies of a key/value head, each has fewer of its query heads than one rank
    has.
    """

    def __init__(self, inner: Heads, spec: ModelSpec, group: RankGroup) -> None:
        nn.Module.__init__(self)
        self.scale, self.numerics = inner.scale, inner.numerics
        num_shared, self.num_heads = spec.num_heads // spec.num_kv_heads, spec.num_heads // group.size
        self.first = group.rank * self.num_heads % num_shared
        self.num_missing = num_shared - self.num_heads

    def forward(self, q_THD: torch.Tensor, cache: LayerCache, layout: BatchLayout) -> torch.Tensor:
        """[T, H, D], see ``paged.kernels.attention``."""
        if is_canonical(q_THD, cache, self.numerics):
            return super().forward(q_THD, cache, layout)
        padded_THD = F.pad(q_THD, (0, 0, self.first, self.num_missing - self.first))
        return super().forward(padded_THD, cache, layout)[:, self.first : self.first + self.num_heads]
