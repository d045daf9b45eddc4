"""The layers of a decoder: modules that hold weights and call kernels.

Sizes come from a ``ModelSpec`` alone. A rank's part of a sharded model is built from a spec with fewer heads and a
narrower MLP; what ranks exchange is added from outside, by ``paged.model.parallel``, which replaces a module (an
attention's ``output``, an MLP's ``down``) with one that communicates. ``tensors`` names the weights as checkpoints do.

Shapes: T rows of the step, R rows whose logits are wanted, N outputs and K inputs of a product (N alone: the width of
the residual stream), H query heads, D head size, E experts, L columns of the logits that are computed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from paged.core.model_spec import ModelSpec
from paged.kernels.activation import silu_mul
from paged.kernels.attention import attention
from paged.kernels.batch_layout import BatchLayout
from paged.kernels.collectives import SINGLE, RankGroup
from paged.kernels.heads import norm_rope_store
from paged.kernels.kv_cache import LayerCache
from paged.kernels.linear import head_logits, linear
from paged.kernels.moe import route, run_experts
from paged.kernels.norm import add_rms_norm, rms_norm, scale_rows, sum_of_squares
from paged.kernels.numerics import Numerics

NamedTensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Placement:
    """What all layers of a decoder share: how sums are formed, the dtype of the weights and where they lie."""

    numerics: Numerics
    dtype: torch.dtype
    device: torch.device

    def weight(self, *shape: int) -> nn.Parameter:
        """A weight whose numbers are still to be written."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


class Embedding(nn.Module):
    """The vectors of the token ids."""

    def __init__(self, spec: ModelSpec, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.weight(spec.vocab_size, spec.hidden_size)

    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Rows [T, hidden]; raises IndexError for an id outside the vocabulary (on the CPU; a CUDA device asserts)."""
        return F.embedding(token_ids_T, self.weight)


class Head(nn.Module):
    """The product that ends in logits, in fp32 (fp64 for fp64 models).

    Args:
        weight: one row a token id; a tied head is given the embedding's.
        numerics: how sums are formed.
    """

    def __init__(self, weight: nn.Parameter, numerics: Numerics) -> None:
        super().__init__()
        self.weight = weight
        self.numerics = numerics

    def forward(self, hidden_RN: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab]."""
        return self.columns(hidden_RN)

    def columns(self, hidden_RN: torch.Tensor) -> torch.Tensor:
        """Logits [R, L] of the tokens whose rows ``weight`` holds."""
        return head_logits(hidden_RN, self.weight, numerics=self.numerics)


class Linear(nn.Module):
    """One matrix product; several projections of the same input may stand in one weight, row range by row range.

    Args:
        parts: (checkpoint name, rows) of the projections that the weight holds, in order.
        in_size: inputs.
        placement: numerics, dtype, device.
        bias: whether each part has a bias.
        k_segments: see ``paged.kernels.linear``.
    """

    def __init__(
        self,
        parts: tuple[tuple[str, int], ...],
        in_size: int,
        placement: Placement,
        *,
        bias: bool = False,
        k_segments: int = 1,
    ) -> None:
        super().__init__()
        self.parts = parts
        self.numerics = placement.numerics
        self.k_segments = k_segments
        out_size = sum(rows for _, rows in parts)
        self.weight = placement.weight(out_size, in_size)
        self.bias = placement.weight(out_size) if bias else None

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        """The product [T, N]."""
        return linear(x_TK, self.weight, self.bias, numerics=self.numerics, k_segments=self.k_segments)

    def tensors(self) -> NamedTensors:
        """Each part's weight (and bias) as a view, by checkpoint name."""
        first = 0
        for name, rows in self.parts:
            yield f"{name}.weight", self.weight[first : first + rows]
            if self.bias is not None:
                yield f"{name}.bias", self.bias[first : first + rows]
            first += rows


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, with a weight."""

    def __init__(self, name: str, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.weight = placement.weight(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normalized rows, contiguous."""
        return rms_norm(x, self.weight, self.eps)

    def of_sum(self, x_TN: torch.Tensor, delta_TN: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``x + delta`` (``x`` if there is none) and its normalized rows."""
        if delta_TN is None:
            return x_TN, self(x_TN)
        return add_rms_norm(x_TN, delta_TN, self.weight, self.eps)

    def tensors(self) -> NamedTensors:
        """The weight, by checkpoint name."""
        yield f"{self.name}.weight", self.weight


class QKNorm(nn.Module):
    """The norms of queries and keys before the rotation: of each head, or of all heads of a row together."""

    def __init__(self, spec: ModelSpec, prefix: str, placement: Placement) -> None:
        super().__init__()
        per_head = spec.qk_norm == "head"
        q_width, k_width = (spec.head_dim, spec.head_dim) if per_head else (spec.q_size, spec.kv_size)
        # The sums over all heads must not hang on how many of them a rank holds.
        self.k_segments = 1 if per_head else placement.numerics.k_segments
        self.q_norm = RMSNorm(f"{prefix}q_norm", q_width, spec.rms_norm_eps, placement)
        self.k_norm = RMSNorm(f"{prefix}k_norm", k_width, spec.rms_norm_eps, placement)

    def forward(self, q_TK: torch.Tensor, k_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed queries and keys, each [T, its heads * D], contiguous."""
        return self._normed(self.q_norm, q_TK), self._normed(self.k_norm, k_TK)

    def _normed(self, norm: RMSNorm, x_TK: torch.Tensor) -> torch.Tensor:
        if self.k_segments == 1:
            normed_THD: torch.Tensor = norm(x_TK.unflatten(-1, (-1, norm.weight.shape[0])))
            return normed_THD.flatten(1)
        return scale_rows(x_TK, norm.weight, norm.eps, sum_of_squares(x_TK, self.k_segments), x_TK.shape[1])

    def tensors(self) -> NamedTensors:
        """Both weights, by checkpoint name."""
        yield from self.q_norm.tensors()
        yield from self.k_norm.tensors()


class Heads(nn.Module):
    """The heads' softmax over the keys and values in the cache."""

    def __init__(self, spec: ModelSpec, numerics: Numerics) -> None:
        super().__init__()
        self.scale = spec.head_dim**-0.5
        self.numerics = numerics

    def forward(self, q_THD: torch.Tensor, cache: LayerCache, layout: BatchLayout) -> torch.Tensor:
        """[T, H, D], see ``paged.kernels.attention``."""
        return attention(q_THD, cache, layout, scale=self.scale, numerics=self.numerics)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions over the paged cache."""

    def __init__(self, spec: ModelSpec, prefix: str, placement: Placement) -> None:
        super().__init__()
        self.spec = spec
        parts = (
            (f"{prefix}q_proj", spec.q_size),
            (f"{prefix}k_proj", spec.kv_size),
            (f"{prefix}v_proj", spec.kv_size),
        )
        out_parts = ((f"{prefix}o_proj", spec.hidden_size),)
        segments = placement.numerics.k_segments
        self.qkv = Linear(parts, spec.hidden_size, placement, bias=spec.qkv_bias)
        self.output = Linear(out_parts, spec.q_size, placement, bias=spec.o_bias, k_segments=segments)
        self.qk_norm = None if spec.qk_norm == "none" else QKNorm(spec, prefix, placement)
        self.heads = Heads(spec, placement.numerics)

    def forward(
        self, x_TN: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor, layout: BatchLayout, cache: LayerCache
    ) -> torch.Tensor:
        """Store the rows' keys and values in ``cache``, then attend; [T, hidden]."""
        spec = self.spec
        q, k, v = self.qkv(x_TN).split((spec.q_size, spec.kv_size, spec.kv_size), dim=-1)
        num_rows = x_TN.shape[0]
        q_weight_D: torch.Tensor | None = None
        k_weight_D: torch.Tensor | None = None
        if self.qk_norm is not None:
            if spec.qk_norm == "head" and spec.clip_qkv is None:
                # Normed together with the rotation.
                q_weight_D, k_weight_D = self.qk_norm.q_norm.weight, self.qk_norm.k_norm.weight
            else:
                q, k = self.qk_norm(q, k)
        if spec.clip_qkv is not None:
            q, k, v = (x.clamp(-spec.clip_qkv, spec.clip_qkv) for x in (q, k, v))
        q_THD = norm_rope_store(
            q.reshape(num_rows, -1, spec.head_dim),
            k.reshape(num_rows, -1, spec.head_dim),
            v.reshape(num_rows, -1, spec.head_dim),
            cos_TD,
            sin_TD,
            q_weight_D,
            k_weight_D,
            spec.rms_norm_eps,
            cache,
            layout.cells_T,
        )
        out_THD: torch.Tensor = self.heads(q_THD, cache, layout)
        projected_TN: torch.Tensor = self.output(out_THD.flatten(1))
        return projected_TN

    def tensors(self) -> NamedTensors:
        """All weights, by checkpoint name."""
        for module in (self.qkv, self.qk_norm, self.output):
            if module is not None:
                yield from module.tensors()


class MLP(nn.Module):
    """The gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec, prefix: str, placement: Placement) -> None:
        super().__init__()
        size = spec.intermediate_size
        parts = ((f"{prefix}gate_proj", size), (f"{prefix}up_proj", size))
        out_parts = ((f"{prefix}down_proj", spec.hidden_size),)
        self.gate_up = Linear(parts, spec.hidden_size, placement, bias=spec.mlp_bias)
        segments = placement.numerics.k_segments
        self.down = Linear(out_parts, size, placement, bias=spec.mlp_bias, k_segments=segments)

    def forward(self, x_TN: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        down_TN: torch.Tensor = self.down(silu_mul(self.gate_up(x_TN)))
        return down_TN

    def tensors(self) -> NamedTensors:
        """All weights, by checkpoint name."""
        yield from self.gate_up.tensors()
        yield from self.down.tensors()


class MoE(nn.Module):
    """A router and its experts, each a gated MLP; all experts of the layer stand in two weights.

    ``group`` is the ranks that hold parts of the experts, ``k_segments`` those of this rank's part.
    """

    def __init__(self, spec: ModelSpec, prefix: str, placement: Placement) -> None:
        super().__init__()
        self.spec = spec
        self.prefix = prefix
        self.numerics = placement.numerics
        self.k_segments = placement.numerics.k_segments
        self.group: RankGroup = SINGLE
        num_experts, size, hidden = spec.num_experts, spec.intermediate_size, spec.hidden_size
        self.router = Linear(((f"{prefix}gate", num_experts),), hidden, placement)
        self.gate_up_EIN = placement.weight(num_experts, 2 * size, hidden)
        self.down_ENI = placement.weight(num_experts, hidden, size)

    def forward(self, x_TN: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        spec = self.spec
        logits_TE = self.router(x_TN)
        experts_TC, weights_TC = route(logits_TE, spec.num_experts_per_token, normalize=spec.norm_topk_prob)
        weights = (weights_TC, self.gate_up_EIN, self.down_ENI)
        return run_experts(
            x_TN, experts_TC, *weights, numerics=self.numerics, k_segments=self.k_segments, group=self.group
        )

    def tensors(self) -> NamedTensors:
        """The router's weight, then each expert's three as views, by checkpoint name."""
        yield from self.router.tensors()
        for expert in range(self.spec.num_experts):
            gate_IN, up_IN = self.gate_up_EIN[expert].chunk(2)
            for name, weight in (("gate", gate_IN), ("up", up_IN), ("down", self.down_ENI[expert])):
                yield f"{self.prefix}experts.{expert}.{name}_proj.weight", weight


class Layer(nn.Module):
    """One decoder layer: attention and MLP (or experts), each after a norm and added to the residual stream."""

    def __init__(self, spec: ModelSpec, index: int, placement: Placement) -> None:
        super().__init__()
        prefix = f"model.layers.{index}."
        size, eps = spec.hidden_size, spec.rms_norm_eps
        self.input_norm = RMSNorm(f"{prefix}input_layernorm", size, eps, placement)
        self.attention = Attention(spec, f"{prefix}self_attn.", placement)
        self.mlp_norm = RMSNorm(f"{prefix}post_attention_layernorm", size, eps, placement)
        self.mlp = (MoE if spec.num_experts else MLP)(spec, f"{prefix}mlp.", placement)

    def forward(
        self,
        x_TN: torch.Tensor,
        delta_TN: torch.Tensor | None,
        cos_TD: torch.Tensor,
        sin_TD: torch.Tensor,
        layout: BatchLayout,
        cache: LayerCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream and what is still to be added to it; writes the rows' keys and values into ``cache``.

        Args:
            x_TN: the residual stream without the last MLP's result.
            delta_TN: that result; ``None`` for the first layer.
            cos_TD: cosines of the rows' positions; ``sin_TD``: sines.
            layout: positions, slots and bounds of the rows.
            cache: this layer's.
        """
        x_TN, normed_TN = self.input_norm.of_sum(x_TN, delta_TN)
        x_TN, normed_TN = self.mlp_norm.of_sum(x_TN, self.attention(normed_TN, cos_TD, sin_TD, layout, cache))
        return x_TN, self.mlp(normed_TN)

    def tensors(self) -> NamedTensors:
        """All weights, by checkpoint name."""
        for module in (self.input_norm, self.attention, self.mlp_norm, self.mlp):
            yield from module.tensors()
