"""Faults that users of other engines met, each told and tested; where a wider test exists, the story points to it."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_tools import (
    FAST,
    GREEDY,
    INVARIANT,
    SEEDED,
    SPEC,
    Arrival,
    alone,
    assert_idle,
    drive,
    essence,
    essences,
    make_engine,
    only,
    random_decoder,
    record_logits,
    runner_of,
    save_tokenizer,
    script_logits,
    with_fields,
)
from oracles import random_qwen3_folder
from paged import Engine, EngineConfig, SamplingParams
from paged.kernels.numerics import Numerics
from paged.model.decoder import Decoder
from paged.runner import runner as runner_module
from paged.runner.text import Tokenizer

PROMPT = [(3 * i * i + 7 * i + 1) % 99 for i in range(40)]
LONG_SPEC = replace(SPEC, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for 64 positions."""
    path = tmp_path_factory.mktemp("qwen3")
    return random_qwen3_folder(path, max_position_embeddings=64, num_hidden_layers=1, hidden_size=32)


# Fault 2


def scored_and_decoded(numerics: Numerics, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    decoder = random_decoder(numerics, dtype, LONG_SPEC)
    settings: dict[str, Any] = {"chunk_size": 512, "max_step_tokens": 512, "block_size": 16}
    params = with_fields(SEEDED, temperature=1.0, top_p=1.0, max_tokens=300)
    decoded = only(drive(make_engine(decoder, **settings), [Arrival("decoded", PROMPT[:3], params)]).outputs)
    text = decoded.prompt_token_ids + decoded.token_ids
    scoring = with_fields(params, max_tokens=1, prompt_logprobs=0)
    scored = only(drive(make_engine(decoder, **settings), [Arrival("scored", text, scoring)]).outputs)
    assert scored.prompt_logprobs is not None
    return [score.logprob for score in scored.prompt_logprobs][2:], decoded.logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fault_2_scoring_hundreds_of_rows_at_once_gives_the_bits_of_decoding(dtype: torch.dtype) -> None:
    """A norm kernel changed its reduction at 256 rows, so that scoring a text did not give the logprobs of its decode.

    Here 303 tokens go through the network in one step, past 256 rows and past a split of attention, and every
    logprob equals the one that was reported when that token was drawn in a step of a single row.
    """
    scored, decoded = scored_and_decoded(INVARIANT, dtype)
    assert len(decoded) == 300
    assert scored == decoded


def test_fault_2_is_seen_where_it_is_there() -> None:
    """The control: `fast` sums a row differently in a large step, which only shows in the last bits."""
    scored, decoded = scored_and_decoded(FAST, torch.float32)
    assert scored != decoded
    assert max(abs(ours - theirs) for ours, theirs in zip(scored, decoded, strict=True)) < 1e-3


# Fault 3 (also tests/engine/test_invariance.py, every setting)

OLMOE = replace(SPEC, model_type="olmoe", qk_norm="full", num_experts=6, num_experts_per_token=3, intermediate_size=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fault_3_a_mixture_of_experts_gives_a_warm_prefix_the_bits_of_a_cold_one(dtype: torch.dtype) -> None:
    """A rerun over a cached prefix computes fewer rows, so its experts saw other batches, and its tokens differed."""
    engine = make_engine(random_decoder(INVARIANT, dtype, OLMOE))
    logits = record_logits(engine)
    cold = only(drive(engine, [Arrival("cold", PROMPT, SEEDED)]).outputs)
    warm = only(drive(engine, [Arrival("warm", PROMPT, SEEDED)]).outputs)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 36)
    assert essence(warm) == essence(cold)
    positions = logits["cold", 0].keys()
    assert positions == logits["warm", 0].keys()
    assert all(torch.equal(logits["cold", 0][p], logits["warm", 0][p]) for p in positions)


# Faults 5 and 6


@pytest.mark.parametrize("block_size", [4, 8])
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fault_5_a_prefix_hit_flips_no_greedy_output(dtype: torch.dtype, offset: int, block_size: int) -> None:
    """A request answered partly from the cache took other tokens, above all at multiples of the block size and beside.

    Cold and warm runs must agree in every bit of every logit, at exactly k blocks and one token less or more.
    """
    for num_blocks in (1, 2, 4):
        prompt = PROMPT[: num_blocks * block_size + offset]
        engine = make_engine(dtype=dtype, block_size=block_size)
        logits = record_logits(engine)
        cold, warm = (only(drive(engine, [Arrival(name, prompt, GREEDY)]).outputs) for name in ("cold", "warm"))
        assert cold.num_cached_tokens == 0
        assert warm.num_cached_tokens == (len(prompt) - 1) // block_size * block_size
        assert essence(warm) == essence(cold)
        first, second = logits[("cold", 0)], logits[("warm", 0)]
        assert first.keys() == second.keys()
        assert all(torch.equal(first[position], second[position]) for position in first)


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_fault_6_a_fully_cached_prompt_still_computes_its_last_token(num_blocks: int) -> None:
    """A prompt of exactly k blocks, sent again, was a full hit: zero tokens scheduled, a crash or corrupt output.

    The last block is never taken over, so that there is a row to sample from; also when the copies run at once, and
    when a third one comes while the cached blocks are in use.
    """
    prompt = PROMPT[: 4 * num_blocks]
    engine = make_engine()
    names = ("first", "second", "third", "fourth")
    arrivals = [Arrival(name, prompt, SEEDED, step) for name, step in zip(names, (0, 0, 3, 40), strict=True)]
    outputs = drive(engine, arrivals).outputs
    expected = only(alone(prompt, SEEDED))
    for name in names:
        assert essence(outputs[(name, 0)]) == essence(expected)
        cached = 0 if name == "first" else 4 * (num_blocks - 1)
        assert outputs[(name, 0)].num_cached_tokens == cached


# Fault 9


def test_fault_9_what_the_pool_can_never_hold_is_refused_and_the_queue_goes_on(folder: Path) -> None:
    """A request longer than the pool, though not longer than the model allows, waited for ever, all others behind it.

    It is refused when it is added. What fits exactly is served, preempting nobody for good.
    """
    engine = Engine.from_pretrained(folder, num_blocks=6, block_size=4)
    engine.add_request(PROMPT[:10], with_fields(SEEDED, max_tokens=10), "before")
    for prompt, max_tokens in ((PROMPT[:20], 6), (PROMPT[:25], 1), (PROMPT[:1], 25), (PROMPT[:25], None)):
        with pytest.raises(ValueError, match="24 tokens"):
            engine.add_request(prompt, with_fields(SEEDED, max_tokens=max_tokens), "too long")
    engine.add_request(PROMPT[:20], with_fields(SEEDED, max_tokens=5), "exactly")
    engine.add_request(PROMPT[:3], with_fields(SEEDED, max_tokens=4), "after")
    outputs = drive(engine, []).outputs
    lengths = {key: len(output.token_ids) for key, output in outputs.items()}
    assert lengths == {("before", 0): 10, ("exactly", 0): 5, ("after", 0): 4}
    assert engine.metrics()["peak_blocks"] <= 6


# Fault 11


def test_fault_11_a_seeded_stream_survives_preemption_beside_unseeded_neighbours() -> None:
    """A seeded stream began anew after a preemption, its output was cut short, and unseeded neighbours disturbed it.

    Wider: test_sampling, with a preemption at every possible step.
    """
    params = with_fields(SEEDED, n=3, max_tokens=20)
    expected = essences(alone(PROMPT[:9], params, request_id="seeded"))
    neighbours = [
        Arrival(f"unseeded-{i}", PROMPT[i : i + 7], with_fields(SEEDED, seed=None, max_tokens=30)) for i in range(4)
    ]
    engine = make_engine(num_blocks=15)
    result = drive(engine, [*neighbours, Arrival("seeded", PROMPT[:9], params, 1)])
    outputs = {key: output for key, output in result.outputs.items() if key[0] == "seeded"}
    assert sum(output.num_preemptions for output in outputs.values()) >= 3
    assert essences(outputs) == expected
    assert all(len(output.token_ids) == 20 for output in outputs.values())
    for key, output in outputs.items():
        updates = [update for update in result.updates if (update.request_id, update.sample) == key]
        assert [token for update in updates for token in update.token_ids] == output.token_ids, (
            "no token is delivered twice"
        )


# Fault 12


def test_fault_12_prompt_logprobs_do_not_hang_on_the_order_of_requests() -> None:
    """With a prefix in the cache only the tokens behind it were scored, so that results hung on who came first.

    A request that asks for scores takes nothing over from the cache: in every order, together or one after the
    other, all of its prompt is scored, with the same bits. What it computes is still offered to the others.
    """
    plain = Arrival("plain", PROMPT[:17], SEEDED)
    scored = Arrival("scored", PROMPT[:17], with_fields(SEEDED, prompt_logprobs=2))
    longer = Arrival("longer", PROMPT[:23], with_fields(SEEDED, prompt_logprobs=0))
    expected = {a.id: essence(only(alone(a.prompt, a.params, request_id=a.id))) for a in (plain, scored, longer)}
    for order in itertools.permutations((plain, scored, longer)):
        for gap in (0, 1, 40):
            engine = make_engine(chunk_size=6)
            arrivals = [Arrival(a.id, a.prompt, a.params, gap * place) for place, a in enumerate(order)]
            outputs = drive(engine, arrivals).outputs
            assert {key[0]: essence(output) for key, output in outputs.items()} == expected
            scores = outputs[("longer", 0)].prompt_logprobs
            assert scores is not None
            assert [score.token_id for score in scores] == PROMPT[1:23]
            if order[0] is not plain and gap:
                assert outputs[("plain", 0)].num_cached_tokens == 16


def test_fault_12_scores_survive_preemption_and_small_chunks() -> None:
    """A prompt that is scored in pieces, thrown out in between, is scored once and completely."""
    params = with_fields(SEEDED, prompt_logprobs=1, max_tokens=6)
    expected = only(alone(PROMPT, params))
    for step in range(1, 18):
        engine = make_engine(chunk_size=4)

        def interfere(number: int, step: int = step, engine: Engine = engine) -> None:
            if number == step:
                engine.scheduler.abandon()

        assert essence(only(drive(engine, [Arrival("victim", PROMPT, params)], interfere).outputs)) == essence(expected)


# Fault 13


def test_fault_13_the_importance_ratio_of_a_replayed_text_is_one() -> None:
    """Logprobs of the processed and of the raw distribution were confused: ratios of 2.0 at a temperature of 0.6.

    A trainer computes log_softmax(logits / T) over the whole vocabulary. That is what `logprobs` hold, whatever
    truncation, penalties and bias did to the draw; those are in `behavior_logprobs`. Wider: test_sampling.
    """
    params = with_fields(
        SEEDED, temperature=0.6, top_p=0.7, top_k=10, presence_penalty=0.5, repetition_penalty=1.2, logit_bias={4: 1.5}
    )
    drawn = only(alone(PROMPT[:9], params))
    trainer = SamplingParams(temperature=0.6, max_tokens=1, prompt_logprobs=0)
    scores = only(alone(drawn.prompt_token_ids + drawn.token_ids, trainer)).prompt_logprobs
    assert scores is not None
    replayed = [score.logprob for score in scores][8:]
    ratios = [math.exp(new - old) for new, old in zip(replayed, drawn.logprobs, strict=True)]
    assert ratios == [1.0] * 24
    wrong = [math.exp(new - old) for new, old in zip(replayed, drawn.behavior_logprobs, strict=True)]
    assert min(wrong) < 0.8, "the control: the other logprobs would have done harm"


# Fault 16


def test_fault_16_a_stop_text_leaves_no_surplus(tokenizer: Tokenizer) -> None:
    """Tokens and logprobs beyond the stop were returned, as many as a deeper pipeline had in flight."""
    script = tokenizer.encode("abc STOP and more")
    for depth in (1, 2, 3):
        engine = make_engine(tokenizer=tokenizer, depth=depth)
        script_logits(engine, {"victim": script})
        params = with_fields(SEEDED, stop=["STOP"], logprobs=1)
        longer = Arrival("longer", PROMPT[:5], SEEDED)
        output = drive(engine, [longer, Arrival("victim", PROMPT, params)]).outputs[("victim", 0)]
        assert output.text == "abc "
        assert tokenizer.decode(output.token_ids) == "abc STOP"
        assert output.top_logprobs is not None
        counts = {len(output.token_ids), len(output.logprobs), len(output.behavior_logprobs), len(output.top_logprobs)}
        assert counts == {7}
        assert (engine.metrics()["dropped_tokens"] > 0) == (depth > 1)


def test_fault_16_positions_past_the_rope_table_are_refused_unless_allowed(folder: Path) -> None:
    """Longer texts than the model was made for read past the table of rotations, in silence."""
    with pytest.raises(ValueError, match=r"max_seq_len 65 .*max_position_embeddings 64.*allow_long_context"):
        Engine.from_pretrained(folder, max_seq_len=65)
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    limited = Engine.from_pretrained(folder, max_seq_len=64, num_blocks=64)
    (result,) = limited.generate(PROMPT, params, use_tqdm=False)
    assert len(PROMPT) + len(result.outputs[0].token_ids) == 64 + 1, "the last token is never fed back"
    with pytest.raises(ValueError, match="max_seq_len, 64"):
        limited.add_request(PROMPT, with_fields(params, max_tokens=26))
    longer = Engine.from_pretrained(folder, max_seq_len=100, allow_long_context=True, num_blocks=64)
    (more,) = longer.generate(PROMPT, params, use_tqdm=False)
    assert len(PROMPT) + len(more.outputs[0].token_ids) == 101
    assert more.outputs[0].token_ids[:25] == result.outputs[0].token_ids
    unset = Engine.from_pretrained(folder, num_blocks=64)
    assert unset.scheduler.config.max_seq_len == 64, "unset, the model's own limit holds"


def test_fault_16_scoring_holds_few_rows_of_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring a 16k prompt with 150k tokens of vocabulary made 10 GB of logits that no budget had counted."""
    decoder = random_decoder(spec=LONG_SPEC)
    rows: list[int] = []
    logits = Decoder.logits

    def counted(self: Decoder, hidden_RN: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden_RN))
        return logits(self, hidden_RN)

    monkeypatch.setattr(Decoder, "logits", counted)
    text = [(i * i + 3) % 99 for i in range(500)]
    params = with_fields(GREEDY, max_tokens=1, prompt_logprobs=2)
    settings: dict[str, Any] = {"chunk_size": 512, "max_step_tokens": 512, "num_blocks": 200}
    sliced = only(drive(make_engine(decoder, **settings), [Arrival("victim", text, params)]).outputs)
    assert runner_module.SCORE_ROWS <= 64
    assert max(rows) == runner_module.SCORE_ROWS
    assert sum(rows) >= 500, "all were scored, in one step"
    monkeypatch.setattr(runner_module, "SCORE_ROWS", 7)
    assert essence(only(drive(make_engine(decoder, **settings), [Arrival("victim", text, params)]).outputs)) == essence(
        sliced
    )


# For each field of the parameters: what is changed from the base, and what must then differ.
CHANGES: dict[str, dict[str, Any]] = {
    "n": {"n": 2},
    "max_tokens": {"max_tokens": 5},
    "temperature": {"temperature": 1.9},
    "top_p": {"top_p": 0.2},
    "top_k": {"top_k": 1},
    "min_p": {"min_p": 0.9},
    "seed": {"seed": 8},
    "stop": {"stop": ["R@", "zz"]},
    "stop_token_ids": {"stop_token_ids": list(range(0, 99, 2))},
    "ignore_eos": {"ignore_eos": True},
    "logprobs": {"logprobs": 1},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "logit_bias": {"logit_bias": {50: 1000.0}},
}


@pytest.mark.parametrize("name", CHANGES)
def test_fault_16_no_sampling_parameter_is_silently_ignored(name: str, tokenizer: Tokenizer) -> None:
    """Parameters that an engine did not support were accepted and dropped: each one here changes the result."""
    base = SamplingParams(temperature=1.2, seed=7, max_tokens=24)
    # Where ignoring end tokens is tried, half of the vocabulary ends a text.
    settings: dict[str, Any] = {
        "tokenizer": tokenizer,
        "eos_token_ids": range(1, 99, 2) if name == "ignore_eos" else (),
    }
    before, after = (alone(PROMPT[:9], params, **settings) for params in (base, replace(base, **CHANGES[name])))
    assert essences(after) != essences(before)
    if name in ("stop", "stop_token_ids"):
        assert only(after).finish_reason == "stop"


def test_fault_16_every_parameter_is_known_or_refused(tokenizer: Tokenizer) -> None:
    assert set(CHANGES) == {field.name for field in fields(SamplingParams)}
    for unknown in ({"best_of": 2}, {"use_beam_search": True}, {"max_new_tokens": 3}):
        (name,) = unknown
        with pytest.raises(ValueError, match=name):
            SamplingParams.from_mapping(unknown)
        with pytest.raises(TypeError, match=name):
            SamplingParams(**unknown)
        with pytest.raises(ValueError, match=name):
            Engine.from_pretrained("tiny", **unknown)
        with pytest.raises(TypeError, match=name):
            EngineConfig(**unknown)
    engine = make_engine(tokenizer=tokenizer)
    with pytest.raises(TypeError, match="priority"):
        engine.add_request(PROMPT, SEEDED, priority=3)  # type: ignore[call-arg]
    assert_idle(engine)
    assert runner_of(engine).slots.tokenizer is tokenizer
