"""The description of a decoder: both spellings of config.json, exact counts, and refusals that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paged.core.config_json import CONFIG_FIELDS
from paged.core.model_spec import ModelSpec

# Qwen3-8B's config.json, in the spelling of its release.
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def changed(**fields: Any) -> dict[str, Any]:
    """The config with some fields replaced; those given as ``...`` are left out."""
    return {name: value for name, value in (QWEN3_8B | fields).items() if value is not ...}


def test_qwen3_8b_counts() -> None:
    spec = ModelSpec.from_config(QWEN3_8B)
    assert spec.num_parameters() == 8_190_735_360
    assert spec.kv_bytes_per_token(2) == 147_456
    assert spec.kv_bytes_per_token(2, tp=4) == 36_864
    assert spec.kv_bytes_per_token(2, tp=16) == spec.kv_bytes_per_token(2, tp=8) == 18_432
    norms = sum(shape[0] for shape in spec.parameter_shapes().values() if len(shape) == 1)
    assert norms == 308_224
    assert spec.dtype == "bfloat16"
    assert spec.qk_norm == "head"


class Reads(dict[str, Any]):
    """A config that remembers which of its fields were looked at."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def test_the_known_fields_are_those_that_are_read() -> None:
    read: set[str] = set()
    for fields in (
        {"use_sliding_window": True, "sliding_window": 40960, "layer_types": None},
        {"model_type": "mistral"},
        {"model_type": "llama"},
        {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2},
    ):
        config = Reads(changed(**fields))
        ModelSpec.from_config(config)
        read |= config.names
    assert read == set(CONFIG_FIELDS)


# A family's published config and its number of parameters.
PUBLISHED = {
    "Mistral-7B-v0.1": (
        {"model_type": "mistral", "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32000}
        | {"sliding_window": 4096, "max_position_embeddings": 4096, "head_dim": ..., "eos_token_id": 2},
        7_241_732_096,
    ),
    "Meta-Llama-3-8B": (
        {"model_type": "llama", "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
        | {"rope_theta": 500000.0, "head_dim": ..., "eos_token_id": 128001, "max_position_embeddings": 8192},
        8_030_261_248,
    ),
    "OLMoE-1B-7B-0924": (
        {"model_type": "olmoe", "intermediate_size": 1024, "num_hidden_layers": 16, "vocab_size": 50304}
        | {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": ...}
        | {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "clip_qkv": None}
        | {"eos_token_id": 50279},
        6_919_161_856,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    fields, count = PUBLISHED[name]
    spec = ModelSpec.from_config(changed(**fields))
    assert spec.num_parameters() == count
    assert spec.kv_bytes_per_token(2) == 131_072
    assert spec.head_dim == 128


def test_rope_theta_of_old_llamas_is_implied() -> None:
    assert ModelSpec.from_config(changed(model_type="llama", rope_theta=...)).rope_theta == 10000.0


def test_another_model_is_named_by_its_fields() -> None:
    spec = ModelSpec.from_config(QWEN3_8B)
    spec.check_agrees(ModelSpec.from_config(changed(eos_token_id=7, torch_dtype="float32")))
    other = ModelSpec.from_config(changed(num_hidden_layers=28, rope_theta=1e4))
    with pytest.raises(ValueError, match=r"config\.json: .* num_hidden_layers 28 instead of 36, rope_theta") as error:
        spec.check_agrees(other)
    assert "\n" not in str(error.value)


def test_both_spellings_agree() -> None:
    old = ModelSpec.from_config(QWEN3_8B)
    rope = {"rope_theta": 1000000, "rope_type": "default"}
    new = changed(
        rope_theta=..., rope_scaling=..., torch_dtype=..., rope_parameters=rope, dtype="bfloat16", sliding_window=...
    )
    assert ModelSpec.from_config(new | {"layer_types": ["full_attention"] * 36}) == old
    assert ModelSpec.from_config(changed(head_dim=...)) == old
    assert ModelSpec.from_config(changed(head_dim=None, rope_scaling={"type": "default"})) == old
    assert ModelSpec.from_config(changed(torch_dtype=...)).dtype == "float32"


def test_a_tied_head_counts_once() -> None:
    tied = ModelSpec.from_config(changed(tie_word_embeddings=True))
    assert tied.num_parameters() == 8_190_735_360 - 151_936 * 4096
    assert "lm_head.weight" not in tied.parameter_shapes()


def test_biases_and_full_norm_have_shapes() -> None:
    shapes = ModelSpec.from_config(changed(attention_bias=True)).parameter_shapes()
    assert shapes["model.layers.35.self_attn.k_proj.bias"] == (1024,)
    assert shapes["model.layers.0.self_attn.o_proj.bias"] == (4096,)
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 4}
    full = ModelSpec(**sizes, num_kv_heads=2, head_dim=2, qk_norm="full").parameter_shapes()
    assert full["model.layers.0.self_attn.q_norm.weight"] == (8,)
    assert full["model.layers.0.self_attn.k_norm.weight"] == (4,)
    none = ModelSpec(**sizes, num_kv_heads=2, head_dim=2, qk_norm="none").parameter_shapes()
    assert not any("q_norm" in name for name in none)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (151645, [151645, 151643], (151643, 151645)),
        (151645, None, (151645,)),
        (None, 151643, (151643,)),
        ([7, 5], {}, (5, 7)),
        (151645, 151643, (151643, 151645)),
        (None, None, ()),
    ],
)
def test_end_tokens_come_from_both_files(config: Any, generation: Any, expected: tuple[int, ...]) -> None:
    """Goedel-Prover lists 151645 and 151643 in generation_config.json; its config.json names only the first."""
    other = {"eos_token_id": generation} if generation != {} else {}
    assert ModelSpec.from_config(changed(eos_token_id=config), other).eos_token_ids == expected


REFUSED = [
    ({"model_type": "gpt2"}, "model_type 'gpt2'"),
    ({"model_type": ...}, "model_type None"),
    ({"model_type": ["qwen3"]}, "model_type"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling of type 'yarn'"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6}}, "rope_parameters of type 'linear'"),
    ({"rope_parameters": {"rope_theta": 5.0}}, "contradicts rope_parameters.rope_theta"),
    ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
    ({"rope_theta": ...}, "rope_theta is missing"),
    ({"rope_theta": -1}, "rope_theta must be a positive number"),
    ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}, "sliding_window 4096"),
    ({"use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"layer_types": ["linear_attention"] * 36}, "layer_types holds 'linear_attention'"),
    ({"hidden_size": ...}, "hidden_size is missing"),
    ({"num_hidden_layers": 36.0}, "num_hidden_layers must be a whole number"),
    ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
    ({"vocab_size": 0}, "vocab_size must be a whole number"),
    ({"intermediate_size": "12288"}, "intermediate_size must be a whole number"),
    ({"num_key_value_heads": 5}, "num_attention_heads 32 must be a multiple of num_key_value_heads 5"),
    ({"head_dim": ..., "num_attention_heads": 24}, "head_dim is missing"),
    ({"head_dim": 127}, "head_dim must be even"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ({"rms_norm_eps": ...}, "rms_norm_eps"),
    ({"torch_dtype": "int8"}, "torch_dtype must be one of"),
    ({"dtype": "float16"}, "dtype 'float16' contradicts torch_dtype"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ({"attention_bias": "no"}, "attention_bias"),
    ({"eos_token_id": 151936}, "config.json: eos_token_id"),
    ({"eos_token_id": "</s>"}, "config.json: eos_token_id"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refusals_name_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"config.json") as error:
        ModelSpec.from_config(changed(**fields))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_end_tokens_name_their_file() -> None:
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id"):
        ModelSpec.from_config(QWEN3_8B, {"eos_token_id": [1, -1]})


@pytest.mark.parametrize(
    "fields",
    [
        {"use_sliding_window": True, "sliding_window": 40960, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 36},
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None},
    ],
)
def test_windows_that_do_not_bite_are_accepted(fields: dict[str, Any]) -> None:
    assert ModelSpec.from_config(changed(**fields)).num_layers == 36


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3}, "num_heads must be a multiple"),
        ({"head_dim": 3}, "head_dim must be even"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_layers": 1.5}, "num_layers"),
        ({"qk_norm": "rows"}, "qk_norm"),
        ({"dtype": "int8"}, "dtype"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"eos_token_ids": (9,)}, "eos_token_ids"),
        ({"clip_qkv": 0.0}, "clip_qkv"),
        ({"num_experts": -1}, "num_experts"),
        ({"num_experts": 4}, "num_experts_per_token must be 1 to num_experts 4, not 0"),
        ({"num_experts_per_token": 1}, "num_experts_per_token"),
        ({"num_experts": 4, "num_experts_per_token": 2, "mlp_bias": True}, "mlp_bias"),
    ],
)
def test_direct_construction_is_checked(fields: dict[str, Any], message: str) -> None:
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 4}
    with pytest.raises(ValueError, match=message):
        ModelSpec(**(sizes | {"num_kv_heads": 2, "head_dim": 2} | fields))


def test_from_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json can't be read"):
        ModelSpec.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        ModelSpec.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json must hold a JSON object"):
        ModelSpec.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    assert ModelSpec.from_folder(tmp_path).eos_token_ids == (151645,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    assert ModelSpec.from_folder(str(tmp_path)).eos_token_ids == (151643, 151645)
