"""What is drawn and reported for one sequence: its own random stream, honest log-probabilities, and where it stops."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_tools import (
    GREEDY,
    SEEDED,
    Arrival,
    Drive,
    alone,
    drive,
    essence,
    essences,
    make_engine,
    only,
    random_prompt,
    record_logits,
    save_tokenizer,
    script_logits,
    with_fields,
)
from oracles import random_qwen3_folder
from paged import CompletionOutput, Engine, SamplingParams
from paged.core.scheduler import Scheduler
from paged.runner.text import Tokenizer

PROMPT = [(5 * i * i + i + 2) % 99 for i in range(11)]
PENALIZED = with_fields(
    SEEDED,
    presence_penalty=0.8,
    frequency_penalty=0.5,
    repetition_penalty=1.3,
    logit_bias={3: 2.0, 40: -4.0},
    min_p=0.01,
    logprobs=2,
)
VICTIM = ("victim", 0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def among(params: SamplingParams, others: list[Arrival], at_step: int = 2, **settings: Any) -> Drive:
    return drive(make_engine(**settings), [*others, Arrival("victim", PROMPT, params, at_step)])


def neighbours(count: int, *, seed: int | None, rng_seed: int = 1) -> list[Arrival]:
    rng = random.Random(rng_seed)
    params = SamplingParams(temperature=1.2, max_tokens=20, seed=seed)
    # The first one comes before the victim, which therefore is not always the first row of a step.
    return [Arrival(f"n{i}", random_prompt(rng), params, rng.randint(0, 6) if i else 0) for i in range(count)]


# The random stream


@pytest.mark.parametrize("count", [2, 5, 8])
@pytest.mark.parametrize("seed", [None, 7], ids=["unseeded", "equally seeded"])
def test_a_seeded_request_draws_the_same_beside_others(count: int, seed: int | None) -> None:
    """Neighbours with the very same seed share its noise, but not a draw."""
    result = among(SEEDED, neighbours(count, seed=seed))
    assert essence(result.outputs[VICTIM]) == essence(only(alone(PROMPT, SEEDED)))
    assert len(result.outputs) == count + 1


@pytest.mark.parametrize("whom", ["everybody", "the victim"])
@pytest.mark.parametrize("params", [SEEDED, PENALIZED], ids=["plain", "with penalties"])
def test_preemption_at_every_step_disturbs_nothing(params: SamplingParams, whom: str) -> None:
    """Tokens, logprobs and penalty counts come back as they were, whichever step the sequence is sent back at."""
    scoring = with_fields(params, prompt_logprobs=1, max_tokens=14)
    expected = only(alone(PROMPT, scoring))
    others = neighbours(2, seed=None)

    def preempt(scheduler: Scheduler) -> bool:
        running = [sequence for sequence in scheduler._running if sequence.request.id == "victim"]
        if whom == "everybody":
            scheduler.abandon()
        elif running:
            scheduler._evict(running[0])
        return bool(running)

    num_met = 0
    num_steps = among(scoring, others, chunk_size=4).num_steps
    for step in range(num_steps):
        engine = make_engine(chunk_size=4)
        met = []

        def interfere(number: int, step: int = step, engine: Engine = engine, met: list[bool] = met) -> None:
            if number == step:
                met.append(preempt(engine.scheduler))

        arrivals = [*others, Arrival("victim", PROMPT, scoring, 2)]
        assert essence(drive(engine, arrivals, interfere).outputs[VICTIM]) == essence(expected)
        num_met += sum(met)
    assert num_met >= 15, "the sequence is sent back from prefill and from every decode"


def test_preemption_under_pressure_in_many_pools() -> None:
    """Real exhaustion, in pools from barely enough to ample, with counts of penalties to be built anew."""
    expected = only(alone(PROMPT, PENALIZED))
    counts = []
    for num_blocks in range(12, 40, 3):
        output = among(PENALIZED, neighbours(5, seed=None), 3, num_blocks=num_blocks).outputs[VICTIM]
        assert essence(output) == essence(expected)
        counts.append(output.num_preemptions)
    assert sum(count > 0 for count in counts) >= 3, counts
    assert counts[-1] == 0, counts


def test_a_stream_that_restarted_would_be_seen() -> None:
    """The control: another seed, or the same one at shifted positions, gives other tokens."""
    tokens = [only(alone(PROMPT, with_fields(SEEDED, seed=seed))).token_ids for seed in range(4)]
    assert len({tuple(ids) for ids in tokens}) == 4
    assert only(alone([*PROMPT[1:]], SEEDED)).token_ids != only(alone(PROMPT, SEEDED)).token_ids


UNSEEDED = with_fields(SEEDED, seed=None)


def test_an_unseeded_request_draws_by_its_id_and_not_by_its_place() -> None:
    first = drive(make_engine(), [Arrival(name, PROMPT, UNSEEDED) for name in "abc"]).outputs
    second = drive(make_engine(), [Arrival(name, PROMPT, UNSEEDED, i) for i, name in enumerate("cxba")]).outputs
    for name in "abc":
        assert essence(first[(name, 0)]) == essence(second[(name, 0)])
    assert len({tuple(output.token_ids) for output in second.values()}) == 4, "different ids, different streams"
    other_seed = drive(make_engine(seed=1), [Arrival("a", PROMPT, UNSEEDED)]).outputs
    assert other_seed[("a", 0)].token_ids != first[("a", 0)].token_ids


def test_ids_made_by_the_engine_count_over_its_life() -> None:
    """The second call of `generate` must not draw the first one's tokens again."""
    engine = make_engine()
    first, second = (engine.generate([PROMPT], UNSEEDED, use_tqdm=False)[0] for _ in range(2))
    assert first.request_id != second.request_id
    assert first.outputs[0].token_ids != second.outputs[0].token_ids
    again = make_engine().generate([PROMPT], UNSEEDED, use_tqdm=False)[0]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


CHILD = """
import json, sys
import torch
torch.set_num_threads(1)
from engine_tools import Arrival, SEEDED, alone, drive, make_engine, with_fields
prompt = json.loads(sys.argv[1])
drawn = drive(make_engine(), [Arrival(name, prompt, with_fields(SEEDED, seed=seed, n=2)) for name, seed in
                              (("victim", 7), ("unseeded", None))]).outputs
print(json.dumps([[*key, output.token_ids, output.logprobs] for key, output in sorted(drawn.items())]))
"""


def test_another_process_draws_the_same(pytestconfig: pytest.Config) -> None:
    """Python salts `hash()` anew in every process; seeds must not come from it."""
    params = {"victim": with_fields(SEEDED, n=2), "unseeded": with_fields(UNSEEDED, n=2)}
    drawn = drive(make_engine(), [Arrival(name, PROMPT, one) for name, one in params.items()]).outputs
    expected = [[*key, output.token_ids, output.logprobs] for key, output in sorted(drawn.items())]
    root = pytestconfig.rootpath
    path = os.pathsep.join([str(root), str(root / "tests")])
    for salt in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": path}
        command = [sys.executable, "-c", CHILD, json.dumps(PROMPT)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == expected


# Groups


@pytest.mark.parametrize("seed", [7, None], ids=["seeded", "unseeded"])
def test_a_sample_of_a_group_hangs_on_its_index_alone(seed: int | None) -> None:
    params = with_fields(SEEDED, n=6, seed=seed)
    whole = drive(make_engine(), [Arrival("victim", PROMPT, params)]).outputs
    assert len({tuple(output.token_ids) for output in whole.values()}) == 6
    for subset in ([0], [4], [5, 1, 3]):
        some = drive(make_engine(), [Arrival("victim", PROMPT, params, samples=subset)]).outputs
        assert [sample for _, sample in sorted(some)] == sorted(subset)
        for key, output in some.items():
            assert essence(output) == essence(whole[key])
    larger = drive(make_engine(), [Arrival("victim", PROMPT, with_fields(params, n=8), samples=[2])]).outputs
    assert essence(larger[("victim", 2)]) == essence(whole[("victim", 2)])
    if seed is not None:
        single = only(alone(PROMPT, SEEDED, request_id="another id"))
        assert single.token_ids == whole[VICTIM].token_ids, "sample 0 is what n=1 gives"


def test_sixty_four_samples_share_their_prompt() -> None:
    engine = make_engine(num_blocks=300)
    (result,) = engine.generate(PROMPT, with_fields(SEEDED, n=64, max_tokens=12), use_tqdm=False)
    assert [output.sample for output in result.outputs] == list(range(64))
    assert len({tuple(output.token_ids) for output in result.outputs}) > 60
    assert sum(output.num_cached_tokens for output in result.outputs) == 63 * 8
    assert all(len(output.token_ids) == len(output.logprobs) == 12 for output in result.outputs)


def test_indices_outside_the_group_are_refused() -> None:
    engine = make_engine()
    for samples in ([2], [-1], [0, 5], []):
        with pytest.raises(ValueError, match="samples"):
            engine.add_request(PROMPT, with_fields(SEEDED, n=2), samples=samples)
    assert not engine.has_unfinished


# Log-probabilities


def processed_distribution(logits_V: torch.Tensor, params: SamplingParams, text: list[int], num_prompt: int) -> Any:
    """The distribution that is drawn from, in fp64: penalties, bias, temperature, min_p, top_k, top_p."""
    logits = logits_V.double().clone()
    output = text[num_prompt:]
    for token in set(text):
        logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
    for token in set(output):
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, value in params.logit_bias:
        logits[token] += value
    probabilities = torch.softmax(logits / (params.temperature or 1.0), -1)
    kept = probabilities >= params.min_p * probabilities.max()
    order = torch.sort(logits, descending=True, stable=True).indices.tolist()
    ranked = [token for token in order if kept[token]][: params.top_k if params.top_k > 0 else None]
    total, needed, nucleus = sum(probabilities[ranked].tolist()), 0.0, []
    for token in ranked:
        nucleus.append(token)
        needed += probabilities[token].item()
        if needed >= params.top_p * total:
            break
    truncated = torch.zeros_like(probabilities)
    truncated[nucleus] = probabilities[nucleus]
    return truncated / truncated.sum()


@pytest.mark.parametrize(
    "params",
    [
        with_fields(PENALIZED, temperature=0.6, top_p=0.8),
        with_fields(SEEDED, temperature=0.6, top_k=5, top_p=1.0),
        with_fields(SEEDED, temperature=1.4, top_k=30, top_p=0.7, min_p=0.05),
        with_fields(GREEDY, presence_penalty=1.5, logit_bias={5: 3.0}, logprobs=2),
    ],
    ids=["all processors", "top_k", "min_p and top_p", "greedy"],
)
def test_logprobs_are_of_the_raw_distribution_and_behavior_logprobs_of_the_one_drawn_from(
    params: SamplingParams,
) -> None:
    """The importance ratio divides by the first; confusing the two gave ratios of 2 at a temperature of 0.6."""
    engine = make_engine(dtype=torch.float64)
    logits = record_logits(engine)
    output = only(drive(engine, [Arrival("victim", PROMPT, params)]).outputs)
    text = list(PROMPT)
    differing = 0
    for token, logprob, behavior in zip(output.token_ids, output.logprobs, output.behavior_logprobs, strict=True):
        raw = logits[VICTIM][len(text)]
        assert abs(logprob - torch.log_softmax(raw / (params.temperature or 1.0), -1)[token].item()) < 1e-12
        drawn_from = processed_distribution(raw, params, text, len(PROMPT))
        assert abs(behavior - drawn_from[token].log().item()) < 1e-9
        differing += abs(behavior - logprob) > 0.01
        text.append(token)
    assert differing > 5, "truncation and penalties changed the distribution"


@pytest.mark.parametrize(
    "limits", [{"top_p": 0.2}, {"top_k": 1}, {"min_p": 0.9}, {"top_k": 3, "top_p": 0.5, "min_p": 0.4}]
)
def test_limits_change_nothing_of_a_greedy_request(limits: dict[str, Any]) -> None:
    """No limit takes the likeliest token away, so the distribution that is drawn from is not said to be cut.

    Alone, and in one step with a request that the same limits do cut.
    """
    plain = only(alone(PROMPT, GREEDY))
    assert plain.behavior_logprobs == plain.logprobs
    assert min(plain.behavior_logprobs) < -0.5, "tokens that limits would make more certain"
    assert essence(only(alone(PROMPT, with_fields(GREEDY, **limits)))) == essence(plain)
    drawn = Arrival("drawn", PROMPT, with_fields(SEEDED, **{"top_p": 1.0, **limits}))
    outputs = among(with_fields(GREEDY, **limits), [drawn]).outputs
    assert essence(outputs[VICTIM]) == essence(plain)
    cut = outputs[("drawn", 0)]
    assert cut.behavior_logprobs != cut.logprobs


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_alternatives_are_ordered_and_agree_with_the_chosen_token(temperature: float) -> None:
    params = with_fields(SEEDED, temperature=temperature, seed=3, logprobs=6, top_p=1.0)
    engine = make_engine()
    logits = record_logits(engine)
    plain = Arrival("plain", PROMPT, GREEDY)
    output = drive(engine, [Arrival("victim", PROMPT, params), plain]).outputs[VICTIM]
    assert output.top_logprobs is not None
    assert len(output.top_logprobs) == len(output.token_ids)
    for index, (ids, values) in enumerate(output.top_logprobs):
        row = torch.log_softmax(logits[VICTIM][len(PROMPT) + index].double() / (temperature or 1.0), -1)
        assert ids == torch.sort(row, descending=True, stable=True).indices[:6].tolist()
        assert values == sorted(values, reverse=True)
        assert torch.allclose(torch.tensor(values, dtype=torch.float64), row[ids], atol=1e-5)
        if output.token_ids[index] in ids:
            assert values[ids.index(output.token_ids[index])] == output.logprobs[index]
    if temperature == 0:
        assert [ids[0] for ids, _ in output.top_logprobs] == output.token_ids


def test_only_what_was_asked_for_is_reported() -> None:
    plain, none, one = (
        only(alone(PROMPT, with_fields(SEEDED, logprobs=count, prompt_logprobs=count))) for count in (None, 0, 1)
    )
    assert (plain.top_logprobs, plain.prompt_logprobs) == (None, None)
    assert none.top_logprobs == [([], [])] * len(none.token_ids)
    assert none.prompt_logprobs is not None
    assert [(score.token_id, score.top) for score in none.prompt_logprobs] == [(t, ([], [])) for t in PROMPT[1:]]
    assert one.prompt_logprobs is not None
    assert all(len(score.top[0]) == 1 for score in one.prompt_logprobs)
    assert [s.logprob for s in none.prompt_logprobs] == [s.logprob for s in one.prompt_logprobs]


# Where a sequence ends


def assert_equal_lengths(output: CompletionOutput) -> None:
    assert len(output.token_ids) == len(output.logprobs) == len(output.behavior_logprobs)
    if output.top_logprobs is not None:
        assert len(output.top_logprobs) == len(output.token_ids)


def test_one_token() -> None:
    output = only(alone(PROMPT, with_fields(SEEDED, max_tokens=1, logprobs=1)))
    assert len(output.token_ids) == 1
    assert_equal_lengths(output)
    assert output.finish_reason == "length"
    assert output.token_ids == only(alone(PROMPT, SEEDED)).token_ids[:1]


def test_a_prompt_of_one_token() -> None:
    output = only(alone([5], with_fields(SEEDED, max_tokens=3, prompt_logprobs=2)))
    assert output.prompt_logprobs == [], "the first token has no score"
    assert len(output.token_ids) == 3


@pytest.mark.parametrize("max_seq_len", [None, 37])
def test_without_max_tokens_a_sequence_fills_what_the_engine_can_hold(max_seq_len: int | None) -> None:
    """The last token is never fed back, so `max_seq_len` cached tokens allow one more."""
    engine = make_engine(num_blocks=12, max_seq_len=max_seq_len)
    output = only(drive(engine, [Arrival("victim", PROMPT, with_fields(SEEDED, max_tokens=None))]).outputs)
    held = max_seq_len or 12 * 4
    assert len(PROMPT) + len(output.token_ids) - 1 == held
    assert output.finish_reason == "length"
    assert engine.metrics()["peak_blocks"] == -(-held // 4)
    with pytest.raises(ValueError, match="max_tokens"):
        engine.add_request(PROMPT, with_fields(SEEDED, max_tokens=len(output.token_ids) + 1))


def test_a_stop_token_may_be_the_first(tokenizer: Tokenizer) -> None:
    params = with_fields(SEEDED, stop_token_ids=[42], logit_bias={42: 1000.0}, logprobs=1)
    output = only(alone(PROMPT, params, tokenizer=tokenizer))
    assert output.token_ids == [42]
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", 42, "")
    assert_equal_lengths(output)
    ignored = only(alone(PROMPT, with_fields(params, stop_token_ids=[]), tokenizer=tokenizer))
    assert ignored.token_ids == [42] * 24, "the control: without the stop it goes on"


def test_a_stop_token_ends_the_text_before_itself(tokenizer: Tokenizer) -> None:
    free = only(alone(PROMPT, SEEDED, tokenizer=tokenizer))
    stop = free.token_ids[10]
    first = free.token_ids.index(stop)
    output = only(alone(PROMPT, with_fields(SEEDED, stop_token_ids=[stop]), tokenizer=tokenizer))
    assert output.token_ids == free.token_ids[: first + 1]
    assert output.logprobs == free.logprobs[: first + 1]
    assert output.text == tokenizer.decode(free.token_ids[:first])
    assert output.stop_reason == stop


def scripted(tokenizer: Tokenizer, text: str, params: SamplingParams, **settings: Any) -> CompletionOutput:
    """The result of a request that draws the tokens of ``text``."""
    engine = make_engine(tokenizer=tokenizer, **settings)
    script_logits(engine, {"victim": tokenizer.encode(text)})
    return only(drive(engine, [Arrival("victim", PROMPT, with_fields(params, max_tokens=24))]).outputs)


@pytest.mark.parametrize(
    ("text", "stop", "kept", "num_tokens", "reason"),
    [
        ("one STOP two", ("STOP",), "one ", 8, "STOP"),
        ("STOP at once", ("STOP",), "", 4, "STOP"),
        ("a cab ride", ("b",), "a ca", 4, "b"),
        ("a cab ride", ("ca",), "a ", 4, "ca"),
        ("aaab", ("aab",), "a", 3, "aab"),
        ("caf\u00e9! more", ("\u00e9",), "caf", 5, "\u00e9"),
        ("caf\u00e9! more", ("\u00e9!",), "caf", 6, "\u00e9!"),
        ("x END y STOP", ("STOP", "END"), "x ", 5, "END"),
        ("xyzzy", ("zzy", "yz"), "x", 3, "yz"),
    ],
)
def test_a_stop_text_is_found_wherever_tokens_end(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...], kept: str, num_tokens: int, reason: str
) -> None:
    """The text is cut before it; the tokens and logprobs keep the one that completed it, and not one more."""
    output = scripted(tokenizer, text, with_fields(SEEDED, stop=stop))
    assert output.text == kept
    assert output.token_ids == tokenizer.encode(text)[:num_tokens]
    assert_equal_lengths(output)
    assert (output.finish_reason, output.stop_reason) == ("stop", reason)


def test_a_stop_text_survives_preemption_in_its_middle(tokenizer: Tokenizer) -> None:
    """What the text stream has seen is rebuilt from the tokens kept; at every step, within characters too."""
    text, params = "caf\u00e9 au lait STOP", with_fields(SEEDED, stop=["it STOP"])
    for step in range(1, len(tokenizer.encode(text))):
        engine = make_engine(tokenizer=tokenizer)
        script_logits(engine, {"victim": tokenizer.encode(text)})

        def interfere(number: int, step: int = step, engine: Engine = engine) -> None:
            if number == step:
                assert engine.num_running == 1
                engine.scheduler.abandon()

        output = only(drive(engine, [Arrival("victim", PROMPT, params)], interfere).outputs)
        assert (output.text, output.stop_reason) == ("caf\u00e9 au la", "it STOP")
        assert output.token_ids == tokenizer.encode(text)


def test_text_without_a_stop_is_whole(tokenizer: Tokenizer) -> None:
    output = scripted(tokenizer, "caf\u00e9 crab, done", with_fields(SEEDED, stop=["nowhere"], stop_token_ids=[12]))
    assert output.text == "caf\u00e9 crab", "all before the comma"
    assert output.stop_reason == 12


def test_half_a_character_at_the_end(tokenizer: Tokenizer) -> None:
    params = with_fields(SEEDED, max_tokens=4)
    engine = make_engine(tokenizer=tokenizer)
    script_logits(engine, {"victim": tokenizer.encode("caf\u00e9")})
    output = only(drive(engine, [Arrival("victim", PROMPT, params)]).outputs)
    assert output.text == "caf\ufffd"
    assert len(output.token_ids) == 4


# The model's own end tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose config.json knows one end token and whose generation_config.json knows two."""
    path = tmp_path_factory.mktemp("qwen3")
    return random_qwen3_folder(path, eos_token_ids=(7, 5), num_hidden_layers=1, eos_token_id=5)


def first_token(engine: Engine, token: int, **fields: Any) -> CompletionOutput:
    params = SamplingParams(temperature=0.0, max_tokens=3, logit_bias={token: 1000.0}, **fields)
    return engine.generate([1, 2, 3], params, use_tqdm=False)[0].outputs[0]


def test_every_end_token_of_generation_config_ends_a_sequence(folder: Path) -> None:
    """Goedel-Prover ends a turn with the second entry of that list; config.json names the other one alone."""
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 5
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [7, 5]
    engine = Engine.from_pretrained(folder, num_blocks=16)
    for token in (5, 7):
        output = first_token(engine, token)
        assert (output.token_ids, output.finish_reason, output.stop_reason) == ([token], "stop", None)
    assert first_token(engine, 9).finish_reason == "length", "the control"


def test_with_config_json_alone_its_one_end_token_counts(folder: Path, tmp_path: Path) -> None:
    """The control to the test above: without generation_config.json the second token goes on."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    engine = Engine.from_pretrained(tmp_path, num_blocks=16)
    assert first_token(engine, 5).finish_reason == "stop"
    assert first_token(engine, 7).finish_reason == "length"


def test_ignore_eos_generates_on_but_not_past_stop_token_ids(folder: Path) -> None:
    engine = Engine.from_pretrained(folder, num_blocks=16)
    for token in (5, 7):
        output = first_token(engine, token, ignore_eos=True)
        assert (output.token_ids, output.finish_reason) == ([token] * 3, "length")
        stopped = first_token(engine, token, ignore_eos=True, stop_token_ids=[token])
        assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == ([token], "stop", token)


def test_penalties_count_the_prompt_and_the_output(tokenizer: Tokenizer) -> None:
    """With the heaviest penalties no token comes a second time, until all have come."""
    params = SamplingParams(temperature=0.0, repetition_penalty=1e4, presence_penalty=2.0, max_tokens=40)
    output = only(alone(PROMPT, params))
    assert len(set(output.token_ids)) == 40
    assert not set(output.token_ids) & set(PROMPT)
    assert len(set(only(alone(PROMPT, with_fields(GREEDY, max_tokens=40))).token_ids)) < 40, "the control"


def test_results_do_not_share_what_a_caller_may_change() -> None:
    outputs: Mapping[Any, CompletionOutput] = alone(PROMPT, with_fields(SEEDED, n=2))
    before = essences(outputs)
    outputs[VICTIM].prompt_token_ids.append(0)
    assert essence(outputs[("victim", 1)]) == before[("victim", 1)]
