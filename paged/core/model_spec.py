"""The description of a decoder as data: its sizes, its tensors and what a token costs in the cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paged.core.checks import check_whole, is_positive
from paged.core.config_json import CONFIG_NAMES, DTYPES, spec_fields
from paged.core.json_files import read_json_object

QK_NORMS = ("none", "head", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: rotary attention with grouped heads, gated silu MLPs, RMS norms before each.

    Attention is full: a checkpoint whose sliding window could be shorter than a text has no spec.

    One rank's part of a sharded model is described by a spec too: the same with fewer heads and a narrower MLP.

    Attributes:
        model_type: the architecture's name in ``config.json``.
        vocab_size: rows of the embedding and of the head.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP, or of each expert.
        num_layers: number of decoder layers.
        num_heads, num_kv_heads: query heads, and the key/value heads that they share evenly.
        head_dim: width of a head; even. ``num_heads * head_dim`` need not be ``hidden_size``.
        qk_norm: RMS norm of queries and keys before the rotation: ``none``, ``head`` (over each head's width,
            one weight for all heads) or ``full`` (over all heads together).
        qkv_bias, o_bias, mlp_bias: whether the projections of attention and of the MLP carry biases.
        clip_qkv: bound on the size of queries, keys and values, after their norm and before the rotation; or none.
        num_experts: gated MLPs among which a router chooses for each token; 0 means one MLP and no router.
        num_experts_per_token: experts that a token goes through.
        norm_topk_prob: whether a token's weights of its experts are scaled to a sum of 1.
        tie_word_embeddings: the head is the embedding; checkpoints then need not hold ``lm_head.weight``.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: added to the variance in every norm.
        max_position_embeddings: number of positions the model was made for.
        eos_token_ids: tokens that end a text, ascending.
        dtype: name of the dtype that the checkpoint asks for, one of ``DTYPES``.

    Raises:
        ValueError: naming the field and what is allowed.
    """

    model_type: str = "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: str = "head"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    clip_qkv: float | None = None
    num_experts: int = 0
    num_experts_per_token: int = 0
    norm_topk_prob: bool = False
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_position_embeddings"):
            check_whole(name, getattr(self, name), 1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, not {self.num_heads} over {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for the rotary embedding, not {self.head_dim}")
        for name in ("rope_theta", "rms_norm_eps"):
            if not is_positive(getattr(self, name)):
                raise ValueError(f"{name} must be a positive number, not {getattr(self, name)!r}")
        if self.clip_qkv is not None and not is_positive(self.clip_qkv):
            raise ValueError(f"clip_qkv must be a positive number or None, not {self.clip_qkv!r}")
        for name in ("num_experts", "num_experts_per_token"):
            check_whole(name, getattr(self, name), 0)
        # Without experts both are 0.
        if not min(self.num_experts, 1) <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(
                f"num_experts_per_token must be 1 to num_experts {self.num_experts}, not {self.num_experts_per_token}"
            )
        if self.num_experts and self.mlp_bias:
            raise ValueError("mlp_bias is not supported beside num_experts")
        if self.qk_norm not in QK_NORMS:
            raise ValueError(f"qk_norm must be one of {', '.join(QK_NORMS)}, not {self.qk_norm!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        for token in self.eos_token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise ValueError(f"eos_token_ids must lie in 0 .. {self.vocab_size - 1} (vocab_size), not {token!r}")

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        *,
        max_seq_len: int | None = None,
    ) -> ModelSpec:
        """The spec of a Hugging Face checkpoint, from its ``config.json`` and ``generation_config.json``.

        Reads the old spelling (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and that of transformers 5
        (``rope_parameters``, ``dtype``). End tokens are those of both files.

        Args:
            config: what ``config.json`` holds.
            generation_config: what ``generation_config.json`` holds, if there.
            max_seq_len: most tokens of a text; a sliding window that is no shorter is accepted. None stands for
                ``max_position_embeddings``.

        Raises:
            ValueError: a field is missing or malformed, or asks for something that is not supported; one
                sentence that names the file and the field.
        """
        return cls(**spec_fields(config, generation_config, max_seq_len))

    @classmethod
    def from_folder(cls, folder: Path | str, *, max_seq_len: int | None = None) -> ModelSpec:
        """The spec of a checkpoint folder: its ``config.json`` and, if there, ``generation_config.json``.

        Raises:
            ValueError: as ``from_config``, or a file is missing or is not a JSON object.
        """
        folder = Path(folder)
        config = read_json_object(folder / "config.json")
        generation = folder / "generation_config.json"
        generation_config = read_json_object(generation) if generation.exists() else None
        return cls.from_config(config, generation_config, max_seq_len=max_seq_len)

    def check_agrees(self, found: ModelSpec) -> None:
        """Refuse a checkpoint that is another model than this one; end tokens and dtype may differ.

        Raises:
            ValueError: one sentence that names every field that differs, as ``config.json`` spells it.
        """
        differences = [
            f"{CONFIG_NAMES.get(field.name, field.name)} {getattr(found, field.name)!r} "
            f"instead of {getattr(self, field.name)!r}"
            for field in fields(self)
            if field.name not in ("eos_token_ids", "dtype") and getattr(self, field.name) != getattr(found, field.name)
        ]
        if differences:
            raise ValueError(f"config.json: the checkpoint is not the model named, it has {', '.join(differences)}")

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; that of the values is the same."""
        return self.num_kv_heads * self.head_dim

    def parameter_shapes(self, *, fused_experts: bool = False) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by its Hugging Face name, in the order of the layers; a checkpoint must equal it.

        Args:
            fused_experts: name a layer's experts as two tensors, as transformers does with
                ``save_original_format=False``, instead of three for each expert, as the Hub's checkpoints do.
        """
        hidden = self.hidden_size
        norm_sizes = {"head": (self.head_dim, self.head_dim), "full": (self.q_size, self.kv_size)}.get(self.qk_norm)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            attention = prefix + "self_attn."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            for name, size in (("q", self.q_size), ("k", self.kv_size), ("v", self.kv_size)):
                shapes[f"{attention}{name}_proj.weight"] = (size, hidden)
                if self.qkv_bias:
                    shapes[f"{attention}{name}_proj.bias"] = (size,)
            if norm_sizes is not None:
                shapes[attention + "q_norm.weight"] = (norm_sizes[0],)
                shapes[attention + "k_norm.weight"] = (norm_sizes[1],)
            shapes[attention + "o_proj.weight"] = (hidden, self.q_size)
            if self.o_bias:
                shapes[attention + "o_proj.bias"] = (hidden,)
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            shapes.update(self._mlp_shapes(prefix + "mlp.", fused_experts))
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def _mlp_shapes(self, prefix: str, fused_experts: bool) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's MLP, or of its router and experts."""
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.num_experts:
            shapes[prefix + "gate.weight"] = (self.num_experts, hidden)
        if self.num_experts and fused_experts:
            shapes[prefix + "experts.gate_up_proj"] = (self.num_experts, 2 * inner, hidden)
            shapes[prefix + "experts.down_proj"] = (self.num_experts, hidden, inner)
            return shapes
        for part in [f"experts.{index}." for index in range(self.num_experts)] or [""]:
            for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                shapes[f"{prefix}{part}{name}_proj.weight"] = shape
                if self.mlp_bias:
                    shapes[f"{prefix}{part}{name}_proj.bias"] = shape[:1]
        return shapes

    def num_parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    def kv_bytes_per_token(self, element_bytes: int, tp: int = 1) -> int:
        """Bytes of one token's keys and values on one rank, for elements of ``element_bytes`` bytes over ``tp`` ranks.

        Ranks beyond the number of key/value heads hold copies of heads, so they save nothing more.
        """
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * element_bytes // min(tp, self.num_kv_heads)

    def position_limit(self, max_seq_len: int | None, *, allow_long_context: bool = False) -> int:
        """Positions that a sequence may have: ``max_seq_len`` or, if None, the model's own limit.

        Raises:
            ValueError: ``max_seq_len`` exceeds the model's limit, and that is not allowed.
        """
        limit = self.max_position_embeddings
        if max_seq_len is None:
            return limit
        if max_seq_len > limit and not allow_long_context:
            raise ValueError(
                f"max_seq_len {max_seq_len} exceeds the model's max_position_embeddings {limit}; "
                "set allow_long_context=true to do so anyway"
            )
        return max_seq_len
