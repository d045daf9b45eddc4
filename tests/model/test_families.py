"""Every family through the one decoder: right against raw fp64 and transformers, however the checkpoint is stored."""

from __future__ import annotations

import json
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_tools import random_prompt
from memory_tools import memory_of_loading, needs_memory_counts
from oracles import FAMILIES, ContiguousDecoder, random_folder, raw_greedy, raw_logits, read_folder
from paged import Engine, SamplingParams
from paged.core.model_spec import ModelSpec
from paged.kernels.numerics import Numerics
from paged.model import checkpoint
from paged.model.checkpoint import CheckpointError, load_decoder
from paged.model.decoder import Decoder

VOCAB = 131
INVARIANT = Numerics()
LIMITS: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "chunk_size": 5, "max_step_tokens": 16, "max_num_seqs": 4}
# A family and fields of its config.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    **{f"{family}, tied": (family, {"tie_word_embeddings": True}) for family in FAMILIES},
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 24}),
    "mistral, wide heads": ("mistral", {"head_dim": 24}),
    "mistral, window of all positions": ("mistral", {"sliding_window": 512}),
    "olmoe, biases": ("olmoe", {"attention_bias": True}),
    "olmoe, clipped": ("olmoe", {"clip_qkv": 0.7}),
    "olmoe, scaled to 1": ("olmoe", {"norm_topk_prob": True}),
    "olmoe, one expert of one": ("olmoe", {"num_experts": 1, "num_experts_per_tok": 1}),
    "olmoe, one kv head": ("olmoe", {"num_key_value_heads": 1}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: random_folder(family, tmp_path_factory.mktemp(family), seed=4) for family in FAMILIES}


def texts(lengths: tuple[int, ...] = (2, 3, 9, 17, 21, 30)) -> list[list[int]]:
    rng = random.Random(1)
    return [random_prompt(rng, length, length, VOCAB) for length in lengths]


def scored(folder: Path, text: list[int], **fields: Any) -> torch.Tensor:
    """Log-probabilities of a text's tokens but the first."""
    engine = Engine.from_pretrained(folder, **LIMITS, **fields)
    params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    scores = engine.generate([text], params, use_tqdm=False)[0].outputs[0].prompt_logprobs
    assert scores is not None
    return torch.tensor([score.logprob for score in scores], dtype=torch.float64)


def raw_scores(folder: Path, text: list[int]) -> torch.Tensor:
    logprobs = raw_logits(*read_folder(folder), text)[:-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(text[1:])[:, None])[:, 0]


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_match_raw_fp64(tmp_path: Path, name: str) -> None:
    family, fields = VARIANTS[name]
    folder = random_folder(family, tmp_path, num_hidden_layers=2, **fields)
    text = texts((40,))[0]
    expected = raw_scores(folder, text)
    # A logprob is rounded to fp32; a router's probabilities are fp32 too.
    assert (scored(folder, text, dtype="float64") - expected).abs().max() < 5e-6
    assert (scored(folder, text, dtype="float32") - expected).abs().max() < 1e-4


@pytest.mark.parametrize("field", ["clip_qkv", "norm_topk_prob", "num_experts_per_tok", "rope_theta", "rms_norm_eps"])
def test_every_field_of_olmoe_matters(tmp_path: Path, field: str) -> None:
    """The control: were a field ignored on both sides, the comparison above would show nothing."""
    folder = random_folder("olmoe", tmp_path, clip_qkv=0.7, num_hidden_layers=2)
    text = texts((40,))[0]
    before = scored(folder, text)
    config = json.loads((folder / "config.json").read_text())
    changed = {"clip_qkv": None, "norm_topk_prob": True, "num_experts_per_tok": 2, "rms_norm_eps": 0.1}
    if field == "rope_theta":
        config["rope_parameters"]["rope_theta"] = 500.0
    else:
        config[field] = changed[field]
    (folder / "config.json").write_text(json.dumps(config))
    assert (scored(folder, text) - before).abs().max() > 1e-3


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("family", ["mistral", "olmoe", "llama"])
def test_greedy_equals_the_raw_references(folders: dict[str, Path], family: str, numerics: str) -> None:
    """Naive full recomputation in fp64, and a contiguous cache."""
    config, weights = read_folder(folders[family])
    engine = Engine.from_pretrained(folders[family], **LIMITS, numerics=numerics, dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = texts((3, 9, 17))
    for prompt, result in zip(prompts, engine.generate(prompts, params, use_tqdm=False), strict=True):
        assert result.outputs[0].token_ids == raw_greedy(config, weights, prompt, 16)
        assert result.outputs[0].token_ids == ContiguousDecoder(config, weights, torch.float32).greedy(prompt, 16)


@pytest.mark.oracle
@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logprobs_equal_transformers(folders: dict[str, Path], family: str, numerics: str) -> None:
    """Six prompts of 40 tokens each, in fp32, from a checkpoint that transformers saved: identical six times."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32).eval()
    engine = Engine.from_pretrained(folders[family], **LIMITS, numerics=numerics)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    results = engine.generate(texts(), params, use_tqdm=False)
    identical, seen = 0, set()
    for prompt, result in zip(texts(), results, strict=True):
        output = result.outputs[0]
        ids = torch.tensor([prompt])
        with torch.no_grad():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
            logprobs = model(made).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        assert len(output.token_ids) == 40
        identical += made[0, len(prompt) :].tolist() == output.token_ids
        chosen = logprobs.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert (torch.tensor(output.logprobs, dtype=torch.float64) - chosen).abs().max() < 1e-4
        seen.update(output.token_ids)
    assert identical == 6
    assert len(seen) > 20, "a text that repeats itself shows little"


# However it is stored


def equal(left: Decoder, right: Decoder) -> bool:
    ours, theirs = left.tensors(), right.tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shards_a_single_file_and_raw_tensors_are_the_same_model(tmp_path: Path, family: str, tied: bool) -> None:
    single = random_folder(family, tmp_path / "single", tie_word_embeddings=tied, dtype="bfloat16")
    sharded = random_folder(
        family, tmp_path / "sharded", tie_word_embeddings=tied, dtype="bfloat16", max_shard_size="40KB"
    )
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert (sharded / checkpoint.INDEX_FILE).exists()
    decoder = load_decoder(single, numerics=INVARIANT)
    assert decoder.dtype == torch.bfloat16
    assert (decoder.head.weight is decoder.embedding.weight) == tied
    assert equal(decoder, load_decoder(sharded, numerics=INVARIANT))
    raw = read_folder(single)[1]
    assert decoder.tensors().keys() == raw.keys()
    assert all(torch.equal(tensor, raw[name]) for name, tensor in decoder.tensors().items())
    assert decoder.spec.num_parameters() == sum(tensor.numel() for tensor in raw.values())


@pytest.mark.parametrize("max_shard_size", [None, "40KB"], ids=["single file", "shards"])
def test_experts_fused_by_layer_are_the_same_model(tmp_path: Path, max_shard_size: str | None) -> None:
    """What transformers 5 writes with save_original_format=False."""
    apart = random_folder("olmoe", tmp_path / "apart")
    fused = random_folder("olmoe", tmp_path / "fused", fused_experts=True, max_shard_size=max_shard_size)
    names = read_folder(fused)[1]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert not any(".experts.0." in name for name in names)
    assert equal(load_decoder(apart, numerics=INVARIANT), load_decoder(fused, numerics=INVARIANT))
    assert ModelSpec.from_folder(fused).parameter_shapes(fused_experts=True).keys() == names.keys()


def test_experts_stand_in_one_weight_a_layer(folders: dict[str, Path]) -> None:
    decoder = load_decoder(folders["olmoe"], numerics=INVARIANT)
    storages = {t.untyped_storage().data_ptr() for n, t in decoder.tensors().items() if ".0.mlp.experts." in n}
    assert len(storages) == 2
    for tensor in decoder.tensors().values():
        tensor.zero_()
    assert not any(parameter.any() for parameter in decoder.parameters())


BUFFERS = {
    "model.rotary_emb.inv_freq": (8,),
    "model.layers.0.self_attn.rotary_emb.inv_freq": (8,),
    "model.layers.2.self_attn.rotary_emb.inv_freq": (8,),
    "model.layers.1.attn.bias": (1, 1, 8, 8),
    "model.layers.1.attn.masked_bias": (),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_of_old_checkpoints_are_ignored_by_name(
    tmp_path: Path, folders: dict[str, Path], family: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = folders[family]
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    buffers = {name: torch.zeros(shape) for name, shape in BUFFERS.items()}
    save_file(tensors | buffers, tmp_path / "model.safetensors")
    with caplog.at_level("INFO"):
        decoder = load_decoder(tmp_path, numerics=INVARIANT)
    assert "5 buffers of an old checkpoint ignored" in caplog.text
    assert equal(decoder, load_decoder(source, numerics=INVARIANT))
    near = {"model.layers.0.self_attn.rotary_emb.freq": torch.zeros(8), "rotary_emb.inv_freq": torch.zeros(8)}
    save_file(tensors | near, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is not part of the model") as error:
        load_decoder(tmp_path, numerics=INVARIANT)
    assert len(error.value.violations) == 2


@pytest.mark.parametrize("fused_experts", [False, True])
def test_no_more_than_one_tensor_is_alive_beside_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused_experts: bool
) -> None:
    folder = random_folder("olmoe", tmp_path, max_shard_size="100KB", fused_experts=fused_experts)
    alive, most, read = 0, 0, 0
    largest = max(tensor.numel() for tensor in read_folder(folder)[1].values())

    def born(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal alive, most, read
        assert tensor.numel() <= largest
        alive, read = alive + 1, read + 1
        most = max(most, alive)
        weakref.finalize(tensor, died)
        return tensor

    def died() -> None:
        nonlocal alive
        alive -= 1

    class Slice:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def __getitem__(self, index: Any) -> torch.Tensor:
            return born(self.inner[index])

    class Reader:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.inner = open_file(*args, **kwargs)

        def __enter__(self) -> Reader:
            self.inner.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self.inner.__exit__(*args)

        def keys(self) -> list[str]:
            return self.inner.keys()

        def get_tensor(self, name: str) -> torch.Tensor:
            return born(self.inner.get_tensor(name))

        def get_slice(self, name: str) -> Slice:
            return Slice(self.inner.get_slice(name))

    open_file = checkpoint.safe_open
    monkeypatch.setattr(checkpoint, "safe_open", Reader)
    load_decoder(folder, numerics=INVARIANT)
    assert read >= 20
    assert most == 1
    assert alive == 0


@pytest.mark.slow
@needs_memory_counts
@pytest.mark.parametrize("fused_experts", [False, True])
def test_anonymous_memory_is_the_model_and_one_tensor(tmp_path: Path, fused_experts: bool) -> None:
    """In a process of its own: the peak of anonymous memory while 200 MB of fp32 are loaded as bf16."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_experts": 8, "vocab_size": 2000}
    folder = random_folder("olmoe", tmp_path, fused_experts=fused_experts, num_hidden_layers=6, **sizes)
    growth, model_bytes = memory_of_loading(folder)
    assert model_bytes > 80e6
    largest = max(tensor.numel() * 4 for tensor in read_folder(folder)[1].values())
    assert growth < model_bytes + largest + 24e6
