"""The description of a decoder as data: its sizes, its tensors and what a token costs in the cache."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QK_NORMS = ("none", "head", "full")
DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: rotary attention with grouped heads, gated silu MLP, RMS norms before each.

    One rank's part of a sharded model is described by a spec too: the same with fewer heads and a narrower MLP.

    Attributes:
        model_type: the architecture's name in ``config.json``.
        vocab_size: rows of the embedding and of the head.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: number of decoder layers.
        num_heads, num_kv_heads: query heads, and the key/value heads that they share evenly.
        head_dim: width of a head; even. ``num_heads * head_dim`` need not be ``hidden_size``.
        qk_norm: RMS norm of queries and keys before the rotation: ``none``, ``head`` (over each head's width,
            one weight for all heads) or ``full`` (over all heads together).
        qkv_bias, o_bias: whether the attention's projections carry biases.
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
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_position_embeddings"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number, at least 1, not {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, not {self.num_heads} over {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for the rotary embedding, not {self.head_dim}")
        for name in ("rope_theta", "rms_norm_eps"):
            if not _is_positive(getattr(self, name)):
                raise ValueError(f"{name} must be a positive number, not {getattr(self, name)!r}")
        if self.qk_norm not in QK_NORMS:
            raise ValueError(f"qk_norm must be one of {', '.join(QK_NORMS)}, not {self.qk_norm!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        for token in self.eos_token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise ValueError(f"eos_token_ids must lie in 0 .. {self.vocab_size - 1} (vocab_size), not {token!r}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelSpec:
        """The spec of a Hugging Face checkpoint, from its ``config.json`` and ``generation_config.json``.

        Reads the old spelling (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and that of transformers 5
        (``rope_parameters``, ``dtype``). End tokens are those of both files.

        Raises:
            ValueError: a field is missing or malformed, or asks for something that is not supported; one
                sentence that names the file and the field.
        """
        model_type = config.get("model_type")
        reader = _READERS.get(model_type) if isinstance(model_type, str) else None
        if reader is None:
            raise ValueError(f"config.json: model_type {model_type!r} is not supported; known: {', '.join(_READERS)}")
        if config.get("quantization_config") is not None:
            raise ValueError("config.json: quantization_config is not supported; quantized weights can't be loaded")
        fields = reader(config)
        fields["eos_token_ids"] = _eos_token_ids(config, generation_config, fields["vocab_size"])
        return cls(**fields)

    @classmethod
    def from_folder(cls, folder: Path | str) -> ModelSpec:
        """The spec of a checkpoint folder: its ``config.json`` and, if there, ``generation_config.json``.

        Raises:
            ValueError: as ``from_config``, or a file is missing or is not a JSON object.
        """
        folder = Path(folder)
        config = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        return cls.from_config(config, _read_json(generation) if generation.exists() else None)

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; that of the values is the same."""
        return self.num_kv_heads * self.head_dim

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by its Hugging Face name, in the order of the layers; a checkpoint must equal it."""
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
            shapes[prefix + "mlp.gate_proj.weight"] = (self.intermediate_size, hidden)
            shapes[prefix + "mlp.up_proj.weight"] = (self.intermediate_size, hidden)
            shapes[prefix + "mlp.down_proj.weight"] = (hidden, self.intermediate_size)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def num_parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    def kv_bytes_per_token(self, kv_bytes: int, tp: int = 1) -> int:
        """Bytes of one token's keys and values on one rank, for elements of ``kv_bytes`` bytes over ``tp`` ranks.

        Ranks beyond the number of key/value heads hold copies of heads, so they save nothing more.
        """
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * kv_bytes // min(tp, self.num_kv_heads)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value


def _read_qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = _read_common(config)
    bias = _boolean(config, "attention_bias", False)
    fields.update(qk_norm="head", qkv_bias=bias, o_bias=bias)
    _refuse_sliding_window(config, fields["num_layers"], fields["max_position_embeddings"])
    return fields


# The architectures that are known: model_type to what turns its config.json into fields of the spec.
_READERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"qwen3": _read_qwen3}


def _read_common(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that all architectures spell alike."""
    fields: dict[str, Any] = {
        "model_type": config["model_type"],
        "vocab_size": _whole(config, "vocab_size"),
        "hidden_size": _whole(config, "hidden_size"),
        "intermediate_size": _whole(config, "intermediate_size"),
        "num_layers": _whole(config, "num_hidden_layers"),
        "num_heads": _whole(config, "num_attention_heads"),
        "max_position_embeddings": _whole(config, "max_position_embeddings"),
        "tie_word_embeddings": _boolean(config, "tie_word_embeddings", False),
    }
    heads = fields["num_heads"]
    # An older config leaves out what it shares with plain multi-head attention.
    fields["num_kv_heads"] = (
        heads if config.get("num_key_value_heads") is None else _whole(config, "num_key_value_heads")
    )
    if heads % fields["num_kv_heads"]:
        raise ValueError(
            f"config.json: num_attention_heads {heads} must be a multiple of num_key_value_heads "
            f"{fields['num_kv_heads']}"
        )
    if config.get("head_dim") is not None:
        fields["head_dim"] = _whole(config, "head_dim")
    elif fields["hidden_size"] % heads:
        raise ValueError(
            f"config.json: head_dim is missing and hidden_size {fields['hidden_size']} is not a multiple of "
            f"num_attention_heads {heads}"
        )
    else:
        fields["head_dim"] = fields["hidden_size"] // heads
    if fields["head_dim"] % 2:
        raise ValueError(f"config.json: head_dim must be even, not {fields['head_dim']}")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act must be silu, not {config['hidden_act']!r}")
    eps = config.get("rms_norm_eps")
    if not _is_positive(eps):
        raise ValueError(f"config.json: rms_norm_eps must be a positive number, not {eps!r}")
    fields["rms_norm_eps"] = float(config["rms_norm_eps"])
    fields["rope_theta"] = _rope_theta(config)
    fields["dtype"] = _dtype(config)
    return fields


def _whole(config: Mapping[str, Any], name: str) -> int:
    if name not in config:
        raise ValueError(f"config.json: {name} is missing")
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {name} must be a whole number, at least 1, not {value!r}")
    return value


def _boolean(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {name} must be true or false, not {value!r}")
    return value


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _rope_theta(config: Mapping[str, Any]) -> float:
    theta = config.get("rope_theta")
    for field in ("rope_parameters", "rope_scaling"):
        rope = config.get(field)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise ValueError(f"config.json: {field} must be an object, not {rope!r}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"config.json: {field} of type {kind!r} is not supported; only the default rotation is")
        # Whatever else an object holds would change the rotation too.
        for name in rope:
            if name not in ("rope_theta", "rope_type", "type"):
                raise ValueError(f"config.json: {field}.{name} is not supported")
        nested = rope.get("rope_theta", theta)
        if theta is not None and nested != theta:
            raise ValueError(f"config.json: rope_theta {theta!r} contradicts {field}.rope_theta {nested!r}")
        theta = nested
    if theta is None:
        raise ValueError("config.json: rope_theta is missing (also from rope_parameters)")
    if not _is_positive(theta):
        raise ValueError(f"config.json: rope_theta must be a positive number, not {theta!r}")
    return float(theta)


def _dtype(config: Mapping[str, Any]) -> str:
    new, old = config.get("dtype"), config.get("torch_dtype")
    if new is not None and old is not None and new != old:
        raise ValueError(f"config.json: dtype {new!r} contradicts torch_dtype {old!r}")
    name = new if new is not None else old
    if name is None:
        return "float32"
    if name not in DTYPES:
        field = "dtype" if new is not None else "torch_dtype"
        raise ValueError(f"config.json: {field} must be one of {', '.join(DTYPES)}, not {name!r}")
    return str(name)


def _refuse_sliding_window(config: Mapping[str, Any], num_layers: int, max_positions: int) -> None:
    """A window is refused if some layer has one that is shorter than the longest text."""
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise ValueError(f"config.json: layer_types must be a list with one entry a layer, {num_layers}")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(f"config.json: layer_types holds {kind!r}, which is not supported")
    if not _boolean(config, "use_sliding_window", False) or config.get("sliding_window") is None:
        return
    window = _whole(config, "sliding_window")
    if kinds is not None:
        slides = "sliding_attention" in kinds
    else:
        first = config.get("max_window_layers")
        slides = isinstance(first, bool) or not isinstance(first, int) or first < num_layers
    if slides and window < max_positions:
        raise ValueError(
            f"config.json: use_sliding_window with sliding_window {window} is not supported: it is shorter than "
            f"max_position_embeddings {max_positions}"
        )


def _eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, vocab_size: int
) -> tuple[int, ...]:
    tokens: set[int] = set()
    for file, source in (("config.json", config), ("generation_config.json", generation_config or {})):
        value = source.get("eos_token_id")
        if value is None:
            continue
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"{file}: eos_token_id must be a token id below vocab_size {vocab_size} or a list of them, "
                    f"not {value!r}"
                )
            tokens.add(token)
    return tuple(sorted(tokens))
