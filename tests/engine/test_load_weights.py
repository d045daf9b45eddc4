"""Weights replaced in place: nothing of the old ones is ever used again, and a failure changes nothing."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine_tools import GREEDY, SEEDED, SPEC, make_engine
from paged import Engine, SamplingParams
from paged.kernels.numerics import Numerics
from paged.model.checkpoint import CheckpointError
from paged.model.decoder import Decoder

PROMPTS = [list(range(1, 17)), list(range(5, 30)), [7] * 9]
SCORED = SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=0)


def fresh_decoder(seed: int) -> Decoder:
    """A decoder of this test's own: loading writes into it."""
    decoder = Decoder.random(SPEC, seed, numerics=Numerics(), dtype=torch.float32)
    decoder.tensors()["lm_head.weight"].mul_(4)
    return decoder


def state_dict(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in fresh_decoder(seed).tensors().items()}


def answers(engine: Engine, params: SamplingParams = GREEDY) -> list[tuple[list[int], list[float]]]:
    return [(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in engine.generate(PROMPTS, params, use_tqdm=False)]


def checkpoint(folder: Path, seed: int, **changes: object) -> Path:
    config = {
        "model_type": "qwen3",
        "vocab_size": SPEC.vocab_size,
        "hidden_size": SPEC.hidden_size,
        "intermediate_size": SPEC.intermediate_size,
        "num_hidden_layers": SPEC.num_layers,
        "num_attention_heads": SPEC.num_heads,
        "num_key_value_heads": SPEC.num_kv_heads,
        "head_dim": SPEC.head_dim,
        "max_position_embeddings": SPEC.max_position_embeddings,
        "rope_theta": SPEC.rope_theta,
        "rms_norm_eps": SPEC.rms_norm_eps,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    save_file(state_dict(seed), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("source", ["state dict", "folder"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_resubmitted_prompt_equals_a_fresh_engine_s_answer(
    source: str, params: SamplingParams, tmp_path: Path
) -> None:
    engine = make_engine(fresh_decoder(1))
    old = answers(engine, params)
    weights = state_dict(2) if source == "state dict" else checkpoint(tmp_path / "new", 2)
    assert engine.load_weights(weights) == 1
    expected = answers(make_engine(fresh_decoder(2)), params)
    assert answers(engine, params) == expected != old
    # And once more, now from the cache.
    results = engine.generate(PROMPTS, params, use_tqdm=False)
    assert [(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in results] == expected
    assert results[0].outputs[0].num_cached_tokens > 0


def test_blocks_of_the_old_weights_are_not_reused_and_free_again() -> None:
    engine = make_engine(fresh_decoder(1))
    answers(engine)
    assert engine.scheduler.pool.num_cached > 0
    engine.load_weights(state_dict(2))
    assert engine.scheduler.pool.num_cached == 0
    assert engine.scheduler.pool.num_free == engine.scheduler.config.num_blocks
    outputs = [r.outputs[0] for r in engine.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert all(output.num_cached_tokens == 0 for output in outputs)
    engine.scheduler.check()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_live_request_goes_on_under_the_new_weights_from_the_tokens_it_has(depth: int) -> None:
    """What follows equals a fresh engine's continuation of the same text; nothing of the old cache shines through."""
    engine = make_engine(fresh_decoder(1), depth=depth)
    engine.add_request(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=20), "live")
    tokens: list[int] = []
    while len(tokens) < 6:
        tokens += [token for update in engine.step() for token in update.token_ids]
    engine.load_weights(state_dict(2))
    output = None
    num_before = len(tokens)
    while engine.has_unfinished:
        for update in engine.step():
            tokens += update.token_ids
            output = update.output or output
        engine.scheduler.check()
    assert output is not None
    assert output.token_ids == tokens
    assert len(tokens) == 20
    # Tokens that were in flight when the weights came still belong to the old ones.
    for in_flight in range(depth):
        text = PROMPTS[0] + tokens[: num_before + in_flight]
        left = 20 - num_before - in_flight
        other = make_engine(fresh_decoder(2)).generate(
            text, SamplingParams(temperature=0.0, max_tokens=left), use_tqdm=False
        )
        if other[0].outputs[0].token_ids == tokens[-left:]:
            return
    pytest.fail("the rest is no continuation under the new weights")


def test_waiting_and_scored_requests_are_computed_under_the_new_weights_alone() -> None:
    engine = make_engine(fresh_decoder(1))
    engine.add_request(PROMPTS[1], SCORED, "scored")
    engine.load_weights(state_dict(2))
    outputs = [update.output for _ in iter(lambda: engine.has_unfinished, False) for update in engine.step()]
    scored = next(output for output in outputs if output is not None)
    expected = make_engine(fresh_decoder(2)).generate([PROMPTS[1]], SCORED, use_tqdm=False)[0].outputs[0]
    assert scored.prompt_logprobs == expected.prompt_logprobs
    assert scored.logprobs == expected.logprobs


MISTAKES = {
    "missing": (lambda s: s.pop("model.norm.weight"), "tensor model.norm.weight is missing"),
    "extra": (lambda s: s.update(surplus=torch.zeros(3)), "tensor surplus is not part of the model"),
    "shape": (lambda s: s.update({"model.norm.weight": torch.zeros(3)}), r"has shape \[3\], the model needs \[32\]"),
    "dtype": (
        lambda s: s.update({"model.norm.weight": torch.zeros(32, dtype=torch.int64)}),
        "has dtype torch.int64, not one of float64",
    ),
    "quantized": (
        lambda s: s.update({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}),
        "has dtype torch.float8_e4m3fn, not one of",
    ),
    "no tensor": (lambda s: s.update({"model.norm.weight": None}), "is no dense tensor with data, but NoneType"),
    "no data": (
        lambda s: s.update({"model.norm.weight": torch.empty(32, device="meta")}),
        "is no dense tensor with data",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mismatched_set_is_refused_whole(name: str) -> None:
    spoil, message = MISTAKES[name]
    engine = make_engine(fresh_decoder(1))
    before = answers(engine)
    weights = state_dict(2)
    spoil(weights)
    with pytest.raises(CheckpointError, match=message):
        engine.load_weights(weights)
    assert engine.scheduler.weight_version == 0
    results = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in results] == before
    assert results[0].outputs[0].num_cached_tokens > 0, "the cache of the old weights is still good"


def test_all_violations_are_listed_at_once() -> None:
    weights = state_dict(2)
    for spoil, _ in itertools.islice(MISTAKES.values(), 2):
        spoil(weights)
    with pytest.raises(CheckpointError, match="2 violations"):
        make_engine(fresh_decoder(1)).load_weights(weights)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    engine = make_engine(fresh_decoder(1))
    with pytest.raises(ValueError, match=r"config\.json: .*rope_theta 5\.0 instead of"):
        engine.load_weights(checkpoint(tmp_path / "other", 2, rope_theta=5.0))


def test_a_folder_with_other_end_tokens_is_refused(tmp_path: Path) -> None:
    """They were ignored without a word: the same prompt ended elsewhere than with a fresh engine."""
    with pytest.raises(ValueError, match=r"eos_token_id is \[9\] instead of \[\]"):
        make_engine(fresh_decoder(1)).load_weights(checkpoint(tmp_path / "other", 2, eos_token_id=9))


@pytest.mark.parametrize("weights", [None, [], 7, b"folder"])
def test_what_is_no_set_of_weights_is_refused(weights: object) -> None:
    with pytest.raises(ValueError, match="weights must be a state dict or a checkpoint folder, not"):
        make_engine(fresh_decoder(1)).load_weights(weights)  # type: ignore[arg-type]


def test_the_model_s_own_tensors_can_trade_places() -> None:
    """Writing the first changed what the second was given, and both ended with the same numbers."""
    one, other = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    decoder = fresh_decoder(1)
    own = decoder.tensors()
    expected = {name: tensor.clone() for name, tensor in own.items()}
    expected[one], expected[other] = expected[other], expected[one]
    own[one], own[other] = own[other], own[one]
    make_engine(decoder).load_weights(own)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in decoder.tensors().items())


def test_a_mapping_is_looked_at_once() -> None:
    """One that answered differently the second time was half loaded, and counted as loaded."""

    class Shrinking(dict):
        def items(self):  # type: ignore[no-untyped-def]
            pairs = list(super().items())
            self.clear()
            return pairs

    engine = make_engine(fresh_decoder(1))
    engine.load_weights(Shrinking(state_dict(2)))
    assert answers(engine) == answers(make_engine(fresh_decoder(2)))


def test_fused_experts_and_old_buffers_of_a_state_dict_are_understood() -> None:
    """As transformers' own OLMoE gives them; only folders were."""
    spec = replace(
        SPEC, model_type="olmoe", qk_norm="full", num_experts=4, num_experts_per_token=2, norm_topk_prob=False
    )
    old, new = (Decoder.random(spec, seed, numerics=Numerics(), dtype=torch.float32) for seed in (1, 2))
    fused = {}
    for name, shape in spec.parameter_shapes(fused_experts=True).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            fused[name] = new.tensors()[name].clone()
            continue
        prefix, part = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        experts = [torch.cat([new.tensors()[f"{prefix}.{e}.{p}.weight"] for p in parts]) for e in range(4)]
        fused[name] = torch.stack(experts)
        assert fused[name].shape == shape
    fused["model.rotary_emb.inv_freq"] = torch.zeros(4)
    make_engine(old).load_weights(fused)
    assert all(torch.equal(tensor, new.tensors()[name]) for name, tensor in old.tensors().items())


class FailingTensor(torch.Tensor):
    """A tensor that passes every check and fails when it is copied."""

    error: BaseException

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function is torch.Tensor.copy_:
            raise cls.error
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("error", [OSError("the disk is gone"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_an_exception_half_way_leaves_the_old_weights_serving(error: BaseException) -> None:
    engine = make_engine(fresh_decoder(1))
    before = answers(engine)
    old = state_dict(1)
    weights: dict[str, torch.Tensor] = state_dict(2)
    names = list(weights)
    FailingTensor.error = error
    weights[names[len(names) // 2]] = weights[names[len(names) // 2]].as_subclass(FailingTensor)
    with pytest.raises(type(error)):
        engine.load_weights(weights)
    runner = engine.executor
    assert all(torch.equal(tensor, old[name]) for name, tensor in runner.decoder.tensors().items())  # type: ignore[attr-defined]
    assert answers(engine) == before
    assert engine.load_weights(state_dict(2)) == 1
    assert answers(engine) == answers(make_engine(fresh_decoder(2)))
