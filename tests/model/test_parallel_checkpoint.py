"""A rank loads its part of a checkpoint: exactly that, owned, checked as a whole model, all ranks or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from memory_tools import memory_of_loading, needs_memory_counts
from oracles import random_folder, read_folder
from paged.core.model_spec import ModelSpec
from paged.kernels.collectives import RankGroup
from paged.kernels.numerics import Numerics
from paged.model.checkpoint import CheckpointError, load_decoder, update_decoder
from paged.model.decoder import Decoder
from paged.model.parallel import random_decoder
from parallel_tools import VOCAB, join, load_and_count, local_tensors
from ranks import RankPool

NUMERICS = Numerics()
LAYER = "model.layers.1.self_attn."
SIZES = {"vocab_size": VOCAB, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}


def folder_of(family: str, folder: Path, **options: Any) -> Path:
    """A checkpoint in bf16, so that what is read has the size of what is held; 99 ids, 8 heads, 2 of keys."""
    sizes = dict(SIZES)
    if family != "qwen3":
        del sizes["head_dim"]
    return random_folder(family, folder, dtype="bfloat16", **{**sizes, **options})


def whole_tensors(folder: Path) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    decoder = load_decoder(folder, numerics=NUMERICS)
    return decoder.spec, dict(decoder.tensors())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("qwen3", {"max_shard_size": "40KB"}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("olmoe", {}),
        ("olmoe", {"fused_experts": True}),
        ("mistral", {"vocab_size": 5}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_ranks_hold_the_model_and_read_no_more(
    rank_pool: RankPool, tmp_path: Path, family: str, options: dict[str, Any], size: int
) -> None:
    folder = folder_of(family, tmp_path, **options)
    spec, whole = whole_tensors(folder)
    results = rank_pool.run(load_and_count, folder, size=size)
    joined = join(spec, [tensors for tensors, _ in results])
    assert joined.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in joined.items())
    for rank, (tensors, num_bytes) in enumerate(results):
        held = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        rows = -(-spec.vocab_size // size)
        padding = min(rows, max(0, (rank + 1) * rows - spec.vocab_size))
        num_matrices = 1 if spec.tie_word_embeddings else 2
        assert num_bytes == held - padding * spec.hidden_size * 2 * num_matrices
        assert rank < size - 1 or padding > 0


def load_then_spoil(group: RankGroup, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What a rank holds before and after it overwrites its own copy of the checkpoint in place."""
    decoder = load_decoder(folder / str(group.rank), numerics=NUMERICS, group=group)
    before = local_tensors(decoder)
    file = folder / str(group.rank) / "model.safetensors"
    with open(file, "r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    return before, local_tensors(decoder)


def test_slices_are_owned(rank_pool: RankPool, tmp_path: Path) -> None:
    for rank in range(2):
        folder_of("qwen3", tmp_path / str(rank))
    for before, after in rank_pool.run(load_then_spoil, tmp_path, size=2):
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def load_with_message(group: RankGroup, folder: Path) -> str | None:
    try:
        load_decoder(folder, numerics=NUMERICS, group=group)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_faults_read_the_same_on_every_rank_of_every_number(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = folder_of("qwen3", tmp_path)
    config, weights = read_folder(folder)
    weights["lm_head.weight"] = weights["lm_head.weight"][: VOCAB - 1].clone()
    weights[f"{LAYER}o_proj.bias"] = torch.zeros(64, dtype=torch.bfloat16)
    del weights[f"{LAYER}k_norm.weight"]
    save_file(weights, folder / "model.safetensors")
    messages = [message for size in (1, 2, 4) for message in rank_pool.run(load_with_message, folder, size=size)]
    assert len(messages) == 7
    assert set(messages) == {messages[0]}
    for sentence in (
        "3 violations",
        "tensor lm_head.weight in model.safetensors has shape [98, 64], the model needs [99, 64]",
        f"tensor {LAYER}o_proj.bias in model.safetensors is not part of the model",
        f"tensor {LAYER}k_norm.weight is missing",
    ):
        assert sentence in messages[0]
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": VOCAB}))
    messages = rank_pool.run(load_with_message, folder, size=4)
    assert set(messages) == {load_with_message(RankGroup(), folder)}
    assert f"below vocab_size {VOCAB}" in messages[0]


def test_a_tied_head_is_compared_by_the_rank_that_would_hold_it(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = folder_of("qwen3", tmp_path, tie_word_embeddings=True)
    weights = read_folder(folder)[1]
    head = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors")
    assert rank_pool.run(load_with_message, folder, size=4) == [None] * 4
    head[70, 3] += 1
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors")
    messages = rank_pool.run(load_with_message, folder, size=4)
    assert [message is not None for message in messages] == [False, False, True, False]
    assert "tensor lm_head.weight differs from model.embed_tokens.weight" in messages[2]


# Updates


def update(group: RankGroup, folder: Path, weights: dict[str, torch.Tensor] | Path) -> dict[str, torch.Tensor]:
    """What a rank holds after an update, of which the state dict is then overwritten."""
    decoder = load_decoder(folder, numerics=NUMERICS, group=group)
    addresses = [tensor.data_ptr() for tensor in decoder.tensors().values()]
    update_decoder(decoder, weights)
    assert [tensor.data_ptr() for tensor in decoder.tensors().values()] == addresses
    if isinstance(weights, dict):
        for tensor in weights.values():
            tensor.zero_()
    return local_tensors(decoder)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("family", "fused"), [("qwen3", False), ("olmoe", False), ("olmoe", True)])
def test_an_update_takes_the_whole_weights(
    rank_pool: RankPool, tmp_path: Path, family: str, fused: bool, size: int
) -> None:
    folder = folder_of(family, tmp_path / "old")
    options = {"fused_experts": True} if fused else {}
    other = folder_of(family, tmp_path / "new", seed=1, **options)
    spec, whole = whole_tensors(other)
    sources: list[Any] = [other, read_folder(other)[1]]
    for source in sources:
        joined = join(spec, rank_pool.run(update, folder, source, size=size))
        assert all(torch.equal(tensor, whole[name]) for name, tensor in joined.items())


def fail_to_update(group: RankGroup, folder: Path, weights: dict[str, torch.Tensor]) -> tuple[str, bool]:
    """The error of an update of which the last rank's half-way copy fails, and whether all is as before."""
    decoder = load_decoder(folder, numerics=NUMERICS, group=group)
    before = local_tensors(decoder)
    if group.rank == group.size - 1:
        weights = {name: tensor.as_subclass(Failing) for name, tensor in weights.items()}
    try:
        update_decoder(decoder, weights)
    except (OSError, RuntimeError) as error:
        message = f"{type(error).__name__}: {error}"
    after = decoder.tensors()
    return message, all(torch.equal(tensor, after[name]) for name, tensor in before.items())


class Failing(torch.Tensor):
    """A tensor that passes every check and fails when its embedding's successor is copied."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function is torch.Tensor.copy_ and args[0].dim() == 1:
            raise OSError("the disk is gone")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_if_one_rank_fails_none_changes(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = folder_of("qwen3", tmp_path / "old")
    weights = read_folder(folder_of("qwen3", tmp_path / "new", seed=1))[1]
    results = rank_pool.run(fail_to_update, folder, weights, size=4)
    others = "RuntimeError: the weights stay as they were on all ranks, because rank 3 failed"
    assert results == [(others, True)] * 3 + [("OSError: the disk is gone", True)]


def refuse_parts(group: RankGroup, folder: Path) -> tuple[str, ...]:
    """Violations of an update that gives a rank its own parts for the whole."""
    decoder = load_decoder(folder, numerics=NUMERICS, group=group)
    with pytest.raises(CheckpointError) as caught:
        update_decoder(decoder, local_tensors(decoder))
    return caught.value.violations


def test_parts_are_not_taken_for_the_whole(rank_pool: RankPool, tmp_path: Path) -> None:
    for violations in rank_pool.run(refuse_parts, folder_of("qwen3", tmp_path), size=2):
        assert "tensor lm_head.weight has shape [50, 64], the model needs [99, 64]" in violations


# Memory


@pytest.mark.slow
@needs_memory_counts
def test_a_ranks_memory_is_a_third_of_the_whole_at_most(tmp_path: Path) -> None:
    """In processes of their own: the peak of anonymous memory while 490 MiB of fp32 are loaded as bf16."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6, "vocab_size": 25_850}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    folder = random_folder("qwen3", tmp_path, **sizes, **heads)
    assert (folder / "model.safetensors").stat().st_size == pytest.approx(490 * 2**20, rel=0.05)
    peaks = {size: memory_of_loading(folder, rank, size)[0] for rank, size in ((0, 1), (2, 4))}
    print({size: f"{peak / 2**20:.0f} MiB" for size, peak in peaks.items()})
    assert peaks[1] > 230 * 2**20
    assert peaks[4] <= peaks[1] / 3


def test_a_random_model_saved_whole_loads_as_its_parts(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = folder_of("qwen3", tmp_path)
    spec = load_decoder(folder, numerics=NUMERICS).spec
    save_file(Decoder.random(spec, 7, numerics=NUMERICS).tensors(), folder / "model.safetensors")
    for loaded, drawn in rank_pool.run(load_and_draw, folder, spec, size=4):
        assert all(torch.equal(tensor, drawn[name]) for name, tensor in loaded.items())


def load_and_draw(group: RankGroup, folder: Path, spec: ModelSpec) -> tuple[Any, Any]:
    loaded = load_decoder(folder, numerics=NUMERICS, group=group)
    return local_tensors(loaded), local_tensors(random_decoder(spec, 7, numerics=NUMERICS, group=group))
