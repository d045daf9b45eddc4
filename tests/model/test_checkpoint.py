"""Loading is total and loud: every way in which a checkpoint can differ from its config is listed, all at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paged.core.model_spec import ModelSpec
from paged.kernels.numerics import Numerics
from paged.model.checkpoint import INDEX_FILE, SINGLE_FILE, CheckpointError, load_decoder
from paged.model.decoder import Decoder

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SPEC = ModelSpec.from_config(CONFIG)
NUMERICS = Numerics()
Q, UP = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"


def random_tensors(spec: ModelSpec = SPEC, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = spec.parameter_shapes()
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write(folder: Path, tensors: dict[str, torch.Tensor], **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    save_file(tensors, folder / SINGLE_FILE)
    return folder


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], count: int = 3) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    weight_map = {name: files[i % count] for i, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensor for name, tensor in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def violations(folder: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as error:
        load_decoder(folder, numerics=NUMERICS)
    assert isinstance(error.value, ValueError)
    for violation in error.value.violations:
        assert violation in str(error.value)
    return error.value.violations


@pytest.mark.parametrize("writer", [write, write_shards])
def test_every_tensor_arrives(tmp_path: Path, writer: Callable[..., Path]) -> None:
    tensors = random_tensors()
    folder = writer(tmp_path, tensors)
    decoder = load_decoder(folder, numerics=NUMERICS)
    assert decoder.spec == SPEC
    loaded = decoder.tensors()
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name
    wide = load_decoder(folder, numerics=NUMERICS, dtype=torch.float64).tensors()
    assert all(torch.equal(wide[name], tensor.double()) for name, tensor in tensors.items())


def test_weights_are_copies_of_the_file(tmp_path: Path) -> None:
    """A view of the mapped file would change (or crash) with it."""
    tensors = random_tensors()
    folder = write(tmp_path, tensors)
    decoder = load_decoder(folder, numerics=NUMERICS)
    size = (folder / SINGLE_FILE).stat().st_size
    with (folder / SINGLE_FILE).open("r+b") as file:
        file.write(b"\xff" * size)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in decoder.tensors().items())


def test_missing_extra_and_misshapen_are_listed_together(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors[UP], tensors["lm_head.weight"]
    tensors[Q] = torch.zeros(32, 17, dtype=torch.bfloat16)
    tensors["model.norm.weight"] = torch.zeros(16, dtype=torch.int64)
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(24, 16)
    found = violations(write(tmp_path, tensors))
    assert sorted(found) == sorted(
        (
            f"tensor {UP} is missing",
            "tensor lm_head.weight is missing",
            f"tensor {Q} in {SINGLE_FILE} has shape [32, 17], the model needs [32, 16]",
            f"tensor model.norm.weight in {SINGLE_FILE} has dtype I64, not one of F64, F32, F16, BF16",
            f"tensor model.layers.2.mlp.up_proj.weight in {SINGLE_FILE} is not part of the model",
        )
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = random_tensors()
    tensors[Q] = torch.zeros(32, 16).to(dtype)
    (found,) = violations(write(tmp_path, tensors))
    assert Q in found
    assert "has dtype" in found


def test_biases_that_the_config_does_not_name_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    (found,) = violations(write(tmp_path, tensors))
    assert found.startswith("tensor model.layers.0.self_attn.q_proj.bias")


def test_absent_and_damaged_shards_are_listed_together(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, random_tensors(), count=4)
    names = [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3)]
    (folder / names[0]).unlink()
    (folder / names[1]).write_bytes(b"")
    content = (folder / names[2]).read_bytes()
    (folder / names[2]).write_bytes(content[:-100])
    found = violations(folder)
    assert len(found) == 3
    assert found[0] == f"shard {names[0]}, named by {INDEX_FILE}, is absent"
    for name, violation in zip(names[1:], found[1:], strict=True):
        assert violation.startswith(f"file {name} is damaged")


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    tensors = random_tensors()
    folder = write_shards(tmp_path, tensors)
    first = "model-00001-of-00003.safetensors"
    index = json.loads((folder / INDEX_FILE).read_text())
    moved = next(name for name, file in index["weight_map"].items() if file != first)
    dropped = next(name for name, file in index["weight_map"].items() if file == first)
    home = index["weight_map"][moved]
    index["weight_map"][moved] = first
    del index["weight_map"][dropped]
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert set(violations(folder)) == {
        f"tensor {moved} is not in {first}, where {INDEX_FILE} places it",
        f"tensor {moved} is in {home}, but {INDEX_FILE} places it in {first}",
        f"tensor {dropped} is in {first}, but {INDEX_FILE} does not name it",
    }
    index["weight_map"][dropped] = first
    index["weight_map"][moved] = home
    index["weight_map"]["ghost"] = first
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert violations(folder) == (f"tensor ghost is not in {first}, where {INDEX_FILE} places it",)


def test_an_index_cannot_leave_the_folder(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, random_tensors())
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"][Q] = "../elsewhere.safetensors"
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert any("'../elsewhere.safetensors'" in violation for violation in violations(folder))


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_a_malformed_index(tmp_path: Path, content: str) -> None:
    folder = write_shards(tmp_path, random_tensors())
    (folder / INDEX_FILE).write_text(content)
    (found,) = violations(folder)
    assert INDEX_FILE in found


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"not a safetensors file", b"\xff" * 64])
def test_a_file_that_is_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path, random_tensors())
    (folder / SINGLE_FILE).write_bytes(content)
    (found,) = violations(folder)
    assert found.startswith(f"file {SINGLE_FILE} is damaged")


def test_no_weights_or_two_kinds(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (found,) = violations(tmp_path)
    assert found == f"neither {SINGLE_FILE} nor {INDEX_FILE} is there"
    folder = write(write_shards(tmp_path, random_tensors()), random_tensors())
    (found,) = violations(folder)
    assert found.startswith("both ")


def test_config_is_checked_first(tmp_path: Path) -> None:
    folder = write(tmp_path, random_tensors(), rope_scaling={"rope_type": "yarn"})
    with pytest.raises(ValueError, match="rope_scaling"):
        load_decoder(folder, numerics=NUMERICS)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    """Qwen3-0.6B ties its head and stores it as well."""
    tensors = random_tensors()
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    decoder = load_decoder(write(tmp_path, tensors, tie_word_embeddings=True), numerics=NUMERICS)
    assert decoder.head.weight is decoder.embedding.weight
    assert "lm_head.weight" not in decoder.tensors()
    del tensors["lm_head.weight"]
    load_decoder(write(tmp_path, tensors, tie_word_embeddings=True), numerics=NUMERICS)
    tensors["lm_head.weight"] = embedding.clone()
    tensors["lm_head.weight"][39, 15] += 1
    (found,) = violations(write(tmp_path, tensors, tie_word_embeddings=True))
    assert found.startswith("tensor lm_head.weight differs")


def test_random_weights_hang_on_seed_and_name() -> None:
    one, again = (Decoder.random(SPEC, 3, numerics=NUMERICS).tensors() for _ in range(2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert {name: tuple(tensor.shape) for name, tensor in one.items()} == SPEC.parameter_shapes()
    other = Decoder.random(SPEC, 4, numerics=NUMERICS).tensors()
    assert not any(torch.equal(one[name], other[name]) for name in one)
    wide = Decoder.random(SPEC, 3, numerics=NUMERICS, dtype=torch.float32).tensors()
    assert all(torch.equal(one[name], wide[name].bfloat16()) for name in one)
    keys = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    assert not torch.equal(one[keys[0]], one[keys[1]])


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype must be one of"):
        Decoder(SPEC, numerics=NUMERICS, dtype=torch.int8)
