"""Malformed checkpoints and configs of every family: each gets one sentence that names the file and the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged import Engine
from paged.core.model_spec import ModelSpec
from paged.model.checkpoint import INDEX_FILE, SINGLE_FILE, CheckpointError

COMMON: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 3,
    "torch_dtype": "float32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": COMMON | {"model_type": "qwen3", "head_dim": 8},
    "mistral": COMMON | {"model_type": "mistral", "sliding_window": None},
    "llama": COMMON | {"model_type": "llama", "attention_bias": False, "mlp_bias": False},
    "olmoe": COMMON | {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": None},
}
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def write(folder: Path, family: str, *, shards: bool = False) -> Path:
    """A well-formed checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    tensors = {
        name: torch.ones(shape) for name, shape in ModelSpec.from_config(CONFIGS[family]).parameter_shapes().items()
    }
    if not shards:
        save_file(tensors, folder / SINGLE_FILE)
        return folder
    weight_map = {name: SHARDS[index % 2] for index, name in enumerate(tensors)}
    for file in SHARDS:
        save_file({name: tensor for name, tensor in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def refusal(folder: Path, **fields: Any) -> ValueError:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the table says what it must hold)
        Engine.from_pretrained(folder, num_blocks=4, **fields)
    return error.value


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_untouched_checkpoint_loads(tmp_path: Path, family: str, shards: bool) -> None:
    """The control."""
    engine = Engine.from_pretrained(write(tmp_path, family, shards=shards), num_blocks=4)
    assert engine.scheduler.config.vocab_size == 40


# (family, fields of config.json; ``...`` leaves one out, what the sentence must hold)
BAD_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "llama4"}, "model_type 'llama4' is not supported; known: qwen3, mistral, llama, olmoe"),
    ("mistral", {"model_type": "mixtral"}, "model_type 'mixtral'"),
    ("olmoe", {"model_type": "olmo2"}, "model_type 'olmo2'"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config is not supported"),
    ("mistral", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config is not supported"),
    ("olmoe", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling of type 'llama3'"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_parameters of type 'llama3'"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear'"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling of type 'dynamic'"),
    ("mistral", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling of type 'yarn'"),
    ("mistral", {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters of type 'longrope'"),
    ("olmoe", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
    ("olmoe", {"rope_theta": 0}, "rope_theta must be a positive number"),
    ("qwen3", {"rope_theta": ...}, "rope_theta is missing"),
    ("mistral", {"sliding_window": 32}, "sliding_window 32 is not supported, because it is shorter than"),
    ("mistral", {"sliding_window": 63, "use_sliding_window": False}, "sliding_window 63"),
    ("mistral", {"sliding_window": 63, "layer_types": ["full_attention"] * 2}, "sliding_window 63"),
    ("mistral", {"sliding_window": "all"}, "sliding_window must be a whole number"),
    ("llama", {"sliding_window": 8}, "sliding_window 8"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding_window 8"),
    ("llama", {"layer_types": ["chunked_attention"] * 2}, "layer_types holds 'chunked_attention'"),
    ("mistral", {"attention_bias": True}, "attention_bias must be false for mistral"),
    ("mistral", {"mlp_bias": True}, "mlp_bias must be false for mistral"),
    ("llama", {"mlp_bias": "yes"}, "mlp_bias must be true or false"),
    ("llama", {"attention_bias": 1}, "attention_bias must be true or false"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act must be silu, not 'gelu'"),
    ("olmoe", {"hidden_act": "swiglu"}, "hidden_act must be silu"),
    ("llama", {"head_dim": 7}, "head_dim must be even"),
    ("mistral", {"num_attention_heads": 3, "num_key_value_heads": 1}, "head_dim is missing and hidden_size 16"),
    ("mistral", {"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
    ("llama", {"num_hidden_layers": "2"}, "num_hidden_layers must be a whole number"),
    ("llama", {"vocab_size": ...}, "vocab_size is missing"),
    ("mistral", {"max_position_embeddings": -1}, "max_position_embeddings must be a whole number"),
    ("mistral", {"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a positive number"),
    ("olmoe", {"num_experts": ...}, "num_experts is missing"),
    ("olmoe", {"num_experts": 0}, "num_experts must be a whole number, at least 1"),
    ("olmoe", {"num_experts_per_tok": ...}, "num_experts_per_tok is missing"),
    ("olmoe", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 must be at most num_experts 4"),
    ("olmoe", {"num_experts_per_tok": True}, "num_experts_per_tok must be a whole number"),
    ("olmoe", {"norm_topk_prob": "no"}, "norm_topk_prob must be true or false"),
    ("olmoe", {"clip_qkv": -1.0}, "clip_qkv must be a positive number or null"),
    ("olmoe", {"clip_qkv": "8"}, "clip_qkv must be a positive number or null"),
    ("olmoe", {"eos_token_id": 50279}, "eos_token_id must be a token id below vocab_size 40"),
    ("mistral", {"torch_dtype": "int4"}, "torch_dtype must be one of"),
    ("llama", {"dtype": "bfloat16"}, "dtype 'bfloat16' contradicts torch_dtype 'float32'"),
    ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
]


@pytest.mark.parametrize(("family", "fields", "message"), BAD_CONFIGS, ids=[f"{f}: {m}" for f, _, m in BAD_CONFIGS])
def test_a_malformed_config(tmp_path: Path, family: str, fields: dict[str, Any], message: str) -> None:
    write(tmp_path, family)
    config = {name: value for name, value in (CONFIGS[family] | fields).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sentence = str(refusal(tmp_path))
    assert sentence.startswith("config.json: ")
    assert message in sentence
    assert "\n" not in sentence


Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1."
EXPERT = LAYER + "mlp.experts.3."


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensor}


# (family, what is done to the tensors, what the one violation must hold)
BAD_TENSORS: list[tuple[str, Callable[[Tensors], Tensors], str]] = [
    ("olmoe", without(EXPERT + "up_proj.weight"), f"tensor {EXPERT}up_proj.weight is missing"),
    ("olmoe", without(LAYER + "mlp.gate.weight"), f"tensor {LAYER}mlp.gate.weight is missing"),
    ("olmoe", without(LAYER + "self_attn.k_norm.weight"), f"tensor {LAYER}self_attn.k_norm.weight is missing"),
    (
        "olmoe",
        with_tensor(LAYER + "mlp.experts.4.up_proj.weight", torch.ones(24, 16)),
        "experts.4.up_proj.weight in model.safetensors is not part of the model",
    ),
    (
        "olmoe",
        with_tensor(EXPERT + "down_proj.weight", torch.ones(24, 16)),
        f"tensor {EXPERT}down_proj.weight in model.safetensors has shape [24, 16], the model needs [16, 24]",
    ),
    (
        "olmoe",
        with_tensor(LAYER + "self_attn.k_norm.weight", torch.ones(4)),
        "k_norm.weight in model.safetensors has shape [4], the model needs [8]",
    ),
    (
        "olmoe",
        with_tensor(EXPERT + "up_proj.weight", torch.ones(24, 16, dtype=torch.int8)),
        "up_proj.weight in model.safetensors has dtype I8",
    ),
    ("mistral", without("lm_head.weight"), "tensor lm_head.weight is missing"),
    (
        "mistral",
        with_tensor(LAYER + "self_attn.q_norm.weight", torch.ones(4)),
        "q_norm.weight in model.safetensors is not part of the model",
    ),
    (
        "mistral",
        with_tensor("model.embed_tokens.weight", torch.ones(41, 16)),
        "embed_tokens.weight in model.safetensors has shape [41, 16], the model needs [40, 16]",
    ),
    (
        "llama",
        with_tensor(LAYER + "mlp.up_proj.bias", torch.ones(24)),
        "mlp.up_proj.bias in model.safetensors is not part of the model",
    ),
    (
        "llama",
        with_tensor(LAYER + "self_attn.q_proj.bias", torch.ones(16)),
        "self_attn.q_proj.bias in model.safetensors is not part of the model",
    ),
    (
        "llama",
        with_tensor("model.layers.2.input_layernorm.weight", torch.ones(16)),
        "model.layers.2.input_layernorm.weight in model.safetensors is not part of the model",
    ),
    (
        "llama",
        with_tensor(LAYER + "self_attn.q_proj.weight_scale", torch.ones(1)),
        "q_proj.weight_scale in model.safetensors is not part of the model",
    ),
    ("qwen3", without(LAYER + "self_attn.q_norm.weight"), f"tensor {LAYER}self_attn.q_norm.weight is missing"),
]


@pytest.mark.parametrize(("family", "change", "message"), BAD_TENSORS, ids=[f"{f}: {m}" for f, _, m in BAD_TENSORS])
def test_malformed_tensors(tmp_path: Path, family: str, change: Callable[[Tensors], Tensors], message: str) -> None:
    write(tmp_path, family)
    save_file(change(load_file(tmp_path / SINGLE_FILE)), tmp_path / SINGLE_FILE)
    error = refusal(tmp_path)
    assert isinstance(error, CheckpointError)
    (violation,) = error.violations
    assert message in violation
    assert str(tmp_path) in str(error)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


# (name, what is done to the files of a sharded checkpoint, what the sentence must hold)
BAD_FILES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("no config", lambda f: (f / "config.json").unlink(), "holds no config.json"),
    ("half a config", lambda f: (f / "config.json").write_text('{"model_type": '), "config.json is not JSON"),
    ("a list", lambda f: (f / "config.json").write_text("[]"), "config.json must hold a JSON object"),
    (
        "a broken generation_config",
        lambda f: (f / "generation_config.json").write_text("{"),
        "generation_config.json is not JSON",
    ),
    (
        "end tokens",
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": [3, 40]}'),
        "generation_config.json: eos_token_id",
    ),
    ("no index", lambda f: (f / INDEX_FILE).unlink(), f"neither {SINGLE_FILE} nor {INDEX_FILE} is there"),
    ("half an index", lambda f: cut(f / INDEX_FILE), f"file {INDEX_FILE} is damaged"),
    ("no weight_map", lambda f: (f / INDEX_FILE).write_text("{}"), f"file {INDEX_FILE} holds no weight_map"),
    ("an absent shard", lambda f: (f / SHARDS[1]).unlink(), f"shard {SHARDS[1]}, named by {INDEX_FILE}, is absent"),
    ("an empty shard", lambda f: (f / SHARDS[0]).write_bytes(b""), f"file {SHARDS[0]} is damaged"),
    ("a truncated shard", lambda f: cut(f / SHARDS[1]), f"file {SHARDS[1]} is damaged"),
    ("two kinds", lambda f: save_file({"a": torch.ones(1)}, f / SINGLE_FILE), f"both {SINGLE_FILE} and {INDEX_FILE}"),
]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(("change", "message"), [case[1:] for case in BAD_FILES], ids=[case[0] for case in BAD_FILES])
def test_malformed_files(tmp_path: Path, change: Callable[[Path], Any], message: str, family: str) -> None:
    change(write(tmp_path, family, shards=True))
    error = refusal(tmp_path)
    sentence = error.violations[0] if isinstance(error, CheckpointError) else str(error)
    assert message in sentence
    assert "\n" not in sentence
    assert not isinstance(error, CheckpointError) or len(error.violations) == 1


def test_there_are_enough_of_them() -> None:
    assert len(BAD_CONFIGS) + len(BAD_TENSORS) + len(BAD_FILES) >= 30
    for family in CONFIGS:
        assert sum(case[0] == family for case in (*BAD_CONFIGS, *BAD_TENSORS)) + len(BAD_FILES) >= 14


def test_experts_in_both_forms_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "olmoe")
    tensors = load_file(tmp_path / SINGLE_FILE)
    fused = {LAYER + "mlp.experts.gate_up_proj": torch.ones(4, 48, 16)}
    save_file(tensors | fused, tmp_path / SINGLE_FILE)
    error = refusal(tmp_path)
    assert isinstance(error, CheckpointError)
    assert f"tensor {EXPERT}up_proj.weight in {SINGLE_FILE} is not part of the model" in error.violations
    assert f"tensor {LAYER}mlp.experts.down_proj is missing" in error.violations


@pytest.mark.parametrize(("max_seq_len", "accepted"), [(None, False), (33, False), (32, True), (8, True)])
def test_a_window_no_shorter_than_every_text_is_accepted(
    tmp_path: Path, max_seq_len: int | None, accepted: bool
) -> None:
    """Mistral-7B-v0.1 has a window of 4,096 and 32,768 positions: it is right for texts up to the window."""
    write(tmp_path, "mistral")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["mistral"] | {"sliding_window": 32}))
    if accepted:
        engine = Engine.from_pretrained(tmp_path, num_blocks=4, max_seq_len=max_seq_len)
        assert engine.scheduler.config.max_seq_len == max_seq_len
    else:
        sentence = str(refusal(tmp_path, max_seq_len=max_seq_len))
        assert sentence.startswith("config.json: sliding_window 32 is not supported")
        assert ("max_seq_len=32 would keep" if max_seq_len is None else "max_seq_len 33") in sentence
