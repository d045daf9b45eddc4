"""What a checkpoint's ``config.json`` says, read into the fields of a ``ModelSpec``, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from paged.core.checks import check_whole, is_positive

DTYPES: Final = ("float64", "float32", "bfloat16", "float16")
"""Names that the dtype of a model may have."""


def spec_fields(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, max_seq_len: int | None
) -> dict[str, Any]:
    """Fields of a ``ModelSpec`` by name; arguments and errors are those of ``ModelSpec.from_config``."""
    model_type = config.get("model_type")
    reader = _READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        raise ValueError(f"config.json: model_type {model_type!r} is not supported; known: {', '.join(_READERS)}")
    if config.get("quantization_config") is not None:
        raise ValueError("config.json: quantization_config is not supported; quantized weights can't be loaded")
    values = reader(config)
    _refuse_sliding_window(config, values["num_layers"], values["max_position_embeddings"], max_seq_len)
    values["eos_token_ids"] = _eos_token_ids(config, generation_config, values["vocab_size"])
    return values


def _read_qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = _boolean(config, "attention_bias", False)
    return _read_common(config) | {"qk_norm": "head", "qkv_bias": bias, "o_bias": bias}


def _read_llama(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = _boolean(config, "attention_bias", False)
    values = _read_common(config, rope_theta=10000.0)
    return values | {
        "qk_norm": "none",
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": _boolean(config, "mlp_bias", False),
    }


def _read_mistral(config: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("attention_bias", "mlp_bias"):
        if _boolean(config, name, False):
            raise ValueError(f"config.json: {name} must be false for mistral, which has no biases")
    return _read_common(config, rope_theta=10000.0) | {"qk_norm": "none"}


def _read_olmoe(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = _boolean(config, "attention_bias", False)
    values = _read_common(config, rope_theta=10000.0) | {"qk_norm": "full", "qkv_bias": bias, "o_bias": bias}
    clip = config.get("clip_qkv")
    if clip is not None and not is_positive(clip):
        raise ValueError(f"config.json: clip_qkv must be a positive number or null, not {clip!r}")
    num_experts, per_token = _whole(config, "num_experts"), _whole(config, "num_experts_per_tok")
    if per_token > num_experts:
        raise ValueError(f"config.json: num_experts_per_tok {per_token} must be at most num_experts {num_experts}")
    return values | {
        "clip_qkv": None if clip is None else float(clip),
        "num_experts": num_experts,
        "num_experts_per_token": per_token,
        "norm_topk_prob": _boolean(config, "norm_topk_prob", False),
    }


# The architectures that are known: model_type to what turns its config.json into fields of the spec.
_READERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "qwen3": _read_qwen3,
    "mistral": _read_mistral,
    "llama": _read_llama,
    "olmoe": _read_olmoe,
}

# Fields of config.json that some reader looks at.
CONFIG_FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "clip_qkv"),
    *("num_experts", "num_experts_per_tok", "norm_topk_prob"),
    *("rope_theta", "rope_scaling", "rope_parameters", "use_sliding_window", "sliding_window", "max_window_layers"),
    *("layer_types", "eos_token_id", "dtype", "torch_dtype", "quantization_config"),
)

# What config.json calls a field of the spec, where the names differ.
CONFIG_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_experts_per_token": "num_experts_per_tok",
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
}


def _read_common(config: Mapping[str, Any], *, rope_theta: float | None = None) -> dict[str, Any]:
    """Fields that all architectures spell alike; ``rope_theta`` is for old checkpoints that leave it out."""
    values: dict[str, Any] = {
        "model_type": config["model_type"],
        "vocab_size": _whole(config, "vocab_size"),
        "hidden_size": _whole(config, "hidden_size"),
        "intermediate_size": _whole(config, "intermediate_size"),
        "num_layers": _whole(config, "num_hidden_layers"),
        "num_heads": _whole(config, "num_attention_heads"),
        "max_position_embeddings": _whole(config, "max_position_embeddings"),
        "tie_word_embeddings": _boolean(config, "tie_word_embeddings", False),
    }
    heads = values["num_heads"]
    # An older config leaves out what it shares with plain multi-head attention.
    values["num_kv_heads"] = (
        heads if config.get("num_key_value_heads") is None else _whole(config, "num_key_value_heads")
    )
    if heads % values["num_kv_heads"]:
        raise ValueError(
            f"config.json: num_attention_heads {heads} must be a multiple of num_key_value_heads "
            f"{values['num_kv_heads']}"
        )
    if config.get("head_dim") is not None:
        values["head_dim"] = _whole(config, "head_dim")
    elif values["hidden_size"] % heads:
        raise ValueError(
            f"config.json: head_dim is missing and hidden_size {values['hidden_size']} is not a multiple of "
            f"num_attention_heads {heads}"
        )
    else:
        values["head_dim"] = values["hidden_size"] // heads
    if values["head_dim"] % 2:
        raise ValueError(f"config.json: head_dim must be even, not {values['head_dim']}")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act must be silu, not {config['hidden_act']!r}")
    eps = config.get("rms_norm_eps")
    if not is_positive(eps):
        raise ValueError(f"config.json: rms_norm_eps must be a positive number, not {eps!r}")
    values["rms_norm_eps"] = float(config["rms_norm_eps"])
    values["rope_theta"] = _rope_theta(config, rope_theta)
    values["dtype"] = _dtype(config)
    return values


def _whole(config: Mapping[str, Any], name: str) -> int:
    if name not in config:
        raise ValueError(f"config.json: {name} is missing")
    value: int = config[name]
    check_whole(f"config.json: {name}", value, 1)
    return value


def _boolean(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {name} must be true or false, not {value!r}")
    return value


def _rope_theta(config: Mapping[str, Any], default: float | None) -> float:
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
    theta = default if theta is None else theta
    if theta is None:
        raise ValueError("config.json: rope_theta is missing (also from rope_parameters)")
    if not is_positive(theta):
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


def _refuse_sliding_window(
    config: Mapping[str, Any], num_layers: int, max_positions: int, max_seq_len: int | None
) -> None:
    """A window is refused if some layer has one that is shorter than the longest text."""
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise ValueError(f"config.json: layer_types must be a list with one entry a layer, {num_layers}")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(f"config.json: layer_types holds {kind!r}, which is not supported")
    switch = _boolean(config, "use_sliding_window", False)
    if config.get("sliding_window") is None:
        return
    window = _whole(config, "sliding_window")
    if config["model_type"] != "qwen3":
        # Only Qwen chooses by a switch and by layers; elsewhere a window that is there is meant.
        slides = True
    elif kinds is not None:
        slides = switch and "sliding_attention" in kinds
    else:
        first = config.get("max_window_layers")
        slides = switch and (isinstance(first, bool) or not isinstance(first, int) or first < num_layers)
    longest = max_positions if max_seq_len is None else max_seq_len
    if slides and window < longest:
        reason = (
            f"max_position_embeddings {max_positions}; max_seq_len={window} would keep every text within it"
            if max_seq_len is None
            else f"max_seq_len {max_seq_len}"
        )
        raise ValueError(f"config.json: sliding_window {window} is not supported, because it is shorter than {reason}")


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
