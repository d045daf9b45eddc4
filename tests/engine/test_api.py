"""The engine as a library: generate, stream, add and step, abort, refusals, failures, and the step log."""

from __future__ import annotations

import io
import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_tools import (
    FAST,
    GREEDY,
    INVARIANT,
    SEEDED,
    VOCAB,
    Arrival,
    alone,
    assert_idle,
    drive,
    essence,
    essences,
    make_engine,
    only,
    random_decoder,
    random_prompt,
    record_logits,
    runner_of,
    save_tokenizer,
    script_logits,
    serving_calls,
    spoil_logits,
    with_fields,
)
from paged import CompletionOutput, Engine, EngineConfig, RequestOutput, SampleUpdate, SamplingParams
from paged.core.plan import StepPlan
from paged.core.policy import Reserve, Watermark
from paged.core.scheduler import NonFiniteLogitsError
from paged.model.decoder import Decoder
from paged.runner.text import Tokenizer

RNG = random.Random(9)
PROMPTS = [random_prompt(RNG) for _ in range(6)]
VICTIM = ("victim", 0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


# generate


def test_generate_is_the_same_with_and_without_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    params = with_fields(SEEDED, n=2)
    shown, hidden = (make_engine().generate(PROMPTS, params, use_tqdm=use) for use in (True, False))
    assert shown == hidden
    captured = capsys.readouterr()
    assert captured.out == "", "standard output is the caller's"
    assert "12/12" in captured.err


def test_a_progress_bar_that_cannot_be_shown_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = make_engine().generate(PROMPTS, SEEDED, use_tqdm=False)
    # Python has no standard error where it was closed from the start.
    monkeypatch.setattr(sys, "stderr", None)
    assert make_engine().generate(PROMPTS, SEEDED) == hidden
    # Unbuffered, so that nothing is left to write at the end.
    with io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True) as full:
        monkeypatch.setattr(sys, "stderr", full)
        with pytest.raises(OSError, match="No space left"):
            print("", file=sys.stderr)
        assert make_engine().generate(PROMPTS, SEEDED) == hidden


def test_results_come_in_the_order_of_the_prompts_and_are_typed() -> None:
    lengths = [9, 1, 5, 3, 12, 2]
    results = make_engine(max_num_seqs=2).generate(
        PROMPTS, [with_fields(SEEDED, max_tokens=count) for count in lengths], use_tqdm=False
    )
    assert [result.prompt_token_ids for result in results] == PROMPTS
    assert [len(result.outputs[0].token_ids) for result in results] == lengths, "each with its own parameters"
    for result in results:
        assert type(result) is RequestOutput
        for output in result.outputs:
            assert type(output) is CompletionOutput
            assert output.request_id == result.request_id
            assert all(type(token) is int for token in output.token_ids)
            assert all(type(logprob) is float for logprob in output.logprobs + output.behavior_logprobs)
            assert type(output.finish_reason) is str
            assert json.loads(json.dumps(output.token_ids)) == output.token_ids


def test_a_list_of_ids_is_one_prompt() -> None:
    engine = make_engine()
    one = engine.generate(PROMPTS[0], SEEDED, use_tqdm=False)
    listed = engine.generate([PROMPTS[0]], SEEDED, use_tqdm=False)
    mapped = engine.generate({"prompt_token_ids": PROMPTS[0]}, SEEDED, use_tqdm=False)
    assert len(one) == len(listed) == len(mapped) == 1
    assert essence(one[0].outputs[0]) == essence(listed[0].outputs[0]) == essence(mapped[0].outputs[0])
    assert engine.generate([], SEEDED, use_tqdm=False) == []


def test_text_prompts_are_tokenized(tokenizer: Tokenizer) -> None:
    engine = make_engine(tokenizer=tokenizer)
    results = engine.generate(["hello", "crab"], SEEDED, use_tqdm=False)
    assert [result.prompt_token_ids for result in results] == [tokenizer.encode("hello"), tokenizer.encode("crab")]
    assert len(tokenizer.encode("crab")) == 3
    (single,) = engine.generate("hello", SEEDED, use_tqdm=False)
    assert essence(single.outputs[0]) == essence(results[0].outputs[0])
    assert results[0].outputs[0].text == tokenizer.decode(results[0].outputs[0].token_ids)
    with pytest.raises(ValueError, match="tokenizer"):
        make_engine().generate("hello", SEEDED, use_tqdm=False)


def test_as_many_parameters_as_prompts() -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="params"):
        engine.generate(PROMPTS, [SEEDED, SEEDED], use_tqdm=False)
    assert_idle(engine)


def test_defaults_are_those_of_sampling_params() -> None:
    output = make_engine().generate(PROMPTS[0], use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) == 16
    assert_same = make_engine().generate(PROMPTS[0], SamplingParams(), use_tqdm=False)[0].outputs[0]
    assert essence(output) == essence(assert_same)


# Refusals

BAD_REQUESTS: dict[str, tuple[Any, SamplingParams, str]] = {
    "empty prompt": ([], SEEDED, "prompt"),
    "id beyond the vocabulary": ([1, VOCAB], SEEDED, f"{VOCAB} is outside the vocabulary"),
    "negative id": ([1, -1], SEEDED, "-1 is outside the vocabulary"),
    "id that is no number": ([1, "2"], SEEDED, "prompt_token_ids"),
    "id that is a truth value": ([1, True], SEEDED, "prompt_token_ids"),
    "prompt that is no list": (7, SEEDED, "prompt"),
    "more tokens than can be held": ([1] * 30, with_fields(SEEDED, max_tokens=60), "max_seq_len"),
    "longer prompt than can be held": ([1] * 90, with_fields(SEEDED, max_tokens=None), "max_seq_len"),
    "stop token beyond the vocabulary": ([1], with_fields(SEEDED, stop_token_ids=[VOCAB]), "stop_token_ids"),
    "bias beyond the vocabulary": ([1], with_fields(SEEDED, logit_bias={VOCAB: 1.0}), "logit_bias"),
    "more alternatives than tokens": ([1], with_fields(SEEDED, logprobs=VOCAB + 1), "logprobs"),
    "more prompt alternatives than tokens": ([1], with_fields(SEEDED, prompt_logprobs=VOCAB + 1), "prompt_logprobs"),
    "stop text without a tokenizer": ([1], with_fields(SEEDED, stop=["x"]), "stop"),
}


@pytest.mark.parametrize(("prompt", "params", "named"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_refused_request_leaves_engine_and_neighbours_untouched(
    prompt: Any, params: SamplingParams, named: str
) -> None:
    neighbour = Arrival("neighbour", PROMPTS[0], SEEDED)
    expected = only(alone(neighbour.prompt, SEEDED, num_blocks=20))
    engine = make_engine(num_blocks=20)
    refused = []

    def interfere(number: int) -> None:
        if number in (1, 4):
            before = (engine.scheduler.counters.num_added, len(engine._samples.live), engine.num_waiting)
            with pytest.raises(ValueError, match=named):
                engine.add_request(prompt, params, f"bad-{number}")
            assert (engine.scheduler.counters.num_added, len(engine._samples.live), engine.num_waiting) == before
            refused.append(number)

    outputs = drive(engine, [neighbour], interfere).outputs
    assert refused == [1, 4]
    assert essence(only(outputs)) == essence(expected)
    assert engine.add_request([1], SEEDED, "bad-1") == "bad-1", "a refused id is free"


@pytest.mark.parametrize(("prompt", "params", "named"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_one_bad_prompt_of_a_call_and_none_is_generated(prompt: Any, params: SamplingParams, named: str) -> None:
    engine = make_engine(num_blocks=20)
    batch = [PROMPTS[0], prompt, PROMPTS[1]] if prompt != 7 else [PROMPTS[0], {"prompt_token_ids": 7}, PROMPTS[1]]
    with pytest.raises(ValueError, match=f"prompt 1: .*{named}"):
        engine.generate(batch, [SEEDED, params, SEEDED], use_tqdm=False)
    assert_idle(engine)
    assert engine.metrics()["num_steps"] == 0
    engine.generate(PROMPTS[0], SEEDED, use_tqdm=False)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"request_id": ""}, "request_id must be a text, not ''"),
        ({"request_id": 5}, "request_id must be a text, not 5"),
        ({"samples": 5}, "samples must be indices from 0 to 0"),
        ({"samples": [0.0]}, "samples must be indices from 0 to 0"),
        ({"samples": []}, "samples must be indices from 0 to 0"),
        ({"samples": 0}, r"samples must be indices from 0 to 0 \(n is 1\), not 0"),
        ({"samples": [False]}, r"samples must be indices from 0 to 0 \(n is 1\), not \[False\]"),
    ],
)
def test_what_is_given_beside_a_prompt_is_checked(fields: dict[str, Any], named: str) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=named):
        engine.add_request(PROMPTS[0], SEEDED, **fields)
    assert_idle(engine)


# Threads, and the end


def test_another_thread_is_refused_while_one_is_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads in `generate` changed one scheduler's books: an AssertionError or an IndexError in either."""
    engine = make_engine()
    submit, entered, leave = engine.executor.submit, threading.Event(), threading.Event()

    def wait(plan: StepPlan) -> None:
        entered.set()
        assert leave.wait(60)
        submit(plan)

    monkeypatch.setattr(engine.executor, "submit", wait)
    found: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: found.extend(engine.generate(PROMPTS, SEEDED, use_tqdm=False)))
    thread.start()
    assert entered.wait(60)
    calls = [*serving_calls(engine, PROMPTS[0], SEEDED), engine.settle, lambda: engine.abort("request-0")]
    calls.append(engine.peak_bytes_by_rank)
    try:
        for call in calls:
            with pytest.raises(RuntimeError, match=r"^an engine is for one thread at a time"):
                call()
    finally:
        leave.set()
        thread.join()
    expected = make_engine().generate(PROMPTS, SEEDED, use_tqdm=False)
    assert [essence(result.outputs[0]) for result in found] == [essence(result.outputs[0]) for result in expected]
    assert_idle(engine)
    engine.generate(PROMPTS[0], SEEDED, use_tqdm=False)


@pytest.mark.parametrize("is_closed", [False, True], ids=["asked", "closed"])
def test_a_stream_that_ends_while_another_thread_is_in_a_call_ends_its_request_afterwards(
    is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request was ended in the scheduler's books while the other thread was changing them."""
    engine = make_engine()
    submit, entered, leave = engine.executor.submit, threading.Event(), threading.Event()
    stream = engine.stream(PROMPTS[0], SEEDED)
    next(stream)
    request_id = engine.add_request(PROMPTS[1], SEEDED)

    def wait(plan: StepPlan) -> None:
        entered.set()
        assert leave.wait(60)
        submit(plan)

    monkeypatch.setattr(engine.executor, "submit", wait)
    thread = threading.Thread(target=engine.step)
    thread.start()
    assert entered.wait(60)
    try:
        if is_closed:
            stream.close()
        else:
            with pytest.raises(RuntimeError, match=r"^an engine is for one thread at a time"):
                next(stream)
        # Until the other thread is done.
        assert engine.scheduler.is_live("request-0")
    finally:
        leave.set()
        thread.join()
    assert {update.request_id for update in engine.step()} == {request_id}
    assert not engine.scheduler.is_live("request-0")
    engine.abort(request_id)
    while engine.has_unfinished:
        engine.step()
    assert_idle(engine)


def test_threads_may_take_turns() -> None:
    engine = make_engine()
    expected = list(make_engine().stream(PROMPTS[0], SEEDED))
    stream = engine.stream(PROMPTS[0], SEEDED)
    found = [next(stream)]
    thread = threading.Thread(target=lambda: found.extend(stream))
    thread.start()
    thread.join()
    assert [update.token_ids for update in found] == [update.token_ids for update in expected]
    engine.generate(PROMPTS[0], SEEDED, use_tqdm=False)
    assert_idle(engine)


def test_a_closed_engine_serves_nobody() -> None:
    """With one rank it went on, without its step log."""
    engine = make_engine()
    stream = engine.stream(PROMPTS[0], SEEDED)
    next(stream)
    engine.add_request(PROMPTS[0], SEEDED, "first")
    engine.close()
    engine.close()
    for call in (*serving_calls(engine, PROMPTS[1], SEEDED), lambda: next(stream)):
        with pytest.raises(RuntimeError, match=r"^the engine is closed$"):
            call()
    assert [output.finish_reason for output in engine.abort("first")] == ["abort"]


# add_request and step


def test_updates_add_up_to_the_result() -> None:
    arrivals = [Arrival(f"r{i}", prompt, with_fields(SEEDED, n=2), i) for i, prompt in enumerate(PROMPTS)]
    result = drive(make_engine(num_blocks=24), arrivals)
    tokens: dict[Any, list[int]] = {}
    logprobs: dict[Any, list[float]] = {}
    for update in result.updates:
        assert type(update) is SampleUpdate
        key = (update.request_id, update.sample)
        tokens.setdefault(key, []).extend(update.token_ids)
        logprobs.setdefault(key, []).extend(update.logprobs)
    assert tokens == {key: output.token_ids for key, output in result.outputs.items()}
    assert logprobs == {key: output.logprobs for key, output in result.outputs.items()}


def test_step_with_nothing_to_do() -> None:
    engine = make_engine()
    assert engine.step() == []
    assert engine.run_step() == []
    assert not engine.has_unfinished


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = make_engine()
    engine.add_request(PROMPTS[0], SEEDED, "mine")
    engine.step()
    with pytest.raises(ValueError, match="'mine' is in use"):
        engine.add_request(PROMPTS[1], SEEDED, "mine")
    with pytest.raises(ValueError, match="'mine' is in use"):
        engine.add_request(PROMPTS[1], with_fields(SEEDED, n=2), "mine", samples=[1])
    first = drive(engine, []).outputs
    again = drive(engine, [Arrival("mine", PROMPTS[0], SEEDED)]).outputs
    assert len(first[("mine", 0)].token_ids) == 24
    assert essences(again) == essences(first)


@pytest.mark.parametrize("request_id", [5, ("a", 1)])
def test_an_id_that_is_no_text_is_refused(request_id: Any) -> None:
    """Ranks send ids to each other, so what one device would take must not end an engine of several."""
    engine = make_engine()
    with pytest.raises(ValueError, match="request_id must be a text"):
        engine.add_request(PROMPTS[0], SEEDED, request_id)
    assert not engine.has_unfinished


def test_made_ids_avoid_those_in_use() -> None:
    engine = make_engine()
    engine.add_request(PROMPTS[0], SEEDED, "request-0")
    engine.add_request(PROMPTS[0], SEEDED, "request-2")
    assert [engine.add_request(PROMPTS[0], SEEDED) for _ in range(2)] == ["request-1", "request-3"]
    assert len(drive(engine, []).outputs) == 4


# stream


def test_stream_yields_token_by_token_and_ends_with_the_result(tokenizer: Tokenizer) -> None:
    engine = make_engine(tokenizer=tokenizer)
    updates = list(engine.stream(PROMPTS[0], SEEDED))
    assert [len(update.token_ids) for update in updates] == [1] * 24
    assert [update.output is None for update in updates] == [True] * 23 + [False]
    output = updates[-1].output
    assert output is not None
    assert [token for update in updates for token in update.token_ids] == output.token_ids
    assert "".join(update.text for update in updates) == output.text
    assert essence(output) == essence(only(alone(PROMPTS[0], SEEDED, tokenizer=tokenizer)))
    assert_idle(engine)


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("caf\u00e9 crab", ()),
        ("caf\u00e9 crab STOP it", ("STOP",)),
        ("go STO STOPS", ("STOP",)),
        ("ends on STO", ("STOP",)),
        ("ab STOPab", ("STOPa", "zz")),
    ],
)
def test_pieces_of_text_concatenate_to_the_final_text(tokenizer: Tokenizer, text: str, stop: tuple[str, ...]) -> None:
    """What could be the start of a stop text is held back until it is certain; half a character too."""
    engine = make_engine(tokenizer=tokenizer)
    ids = tokenizer.encode(text)
    script_logits(engine, {"request-0": ids})
    pieces, output = [], None
    for update in engine.stream(PROMPTS[0], with_fields(SEEDED, stop=stop, max_tokens=len(ids))):
        pieces.append(update.text)
        output = update.output
    assert output is not None
    assert "".join(pieces) == output.text
    assert output.text == (text.partition("STOP")[0] if stop and stop[0] in text else text)
    assert sum(bool(piece) for piece in pieces) > 1, "not all at once"


def test_a_group_can_be_streamed() -> None:
    engine = make_engine()
    updates = list(engine.stream(PROMPTS[0], with_fields(SEEDED, n=3)))
    finished = {update.sample: update.output for update in updates if update.output is not None}
    assert sorted(finished) == [0, 1, 2]
    assert_idle(engine)


def test_closing_a_stream_aborts_and_frees_blocks() -> None:
    engine = make_engine()
    stream = engine.stream(PROMPTS[0], SEEDED)
    for _ in range(5):
        next(stream)
    assert engine.num_running == 1
    stream.close()
    assert_idle(engine)
    with pytest.raises(ValueError, match="vocabulary"):
        next(engine.stream([VOCAB], SEEDED))
    assert_idle(engine)


# Requests beside generate and stream


def collect(engine: Engine) -> dict[Any, CompletionOutput]:
    """Step to the end; every update's tokens must arrive, before the result that holds them."""
    outputs: dict[Any, CompletionOutput] = {}
    while engine.has_unfinished:
        for update in engine.step():
            if update.output is not None:
                outputs[(update.request_id, update.sample)] = update.output
    return outputs


def test_updates_of_other_requests_survive_generate() -> None:
    engine = make_engine()
    expected = essences(drive(make_engine(), [Arrival("foreign", PROMPTS[1], with_fields(SEEDED, n=2))]).outputs)
    engine.add_request(PROMPTS[1], with_fields(SEEDED, n=2), "foreign")
    num_taken = sum(len(update.token_ids) for update in engine.step())
    engine.generate(PROMPTS[0], with_fields(SEEDED, max_tokens=60), use_tqdm=False)
    assert not engine.scheduler.has_unfinished
    assert engine.has_unfinished, "results wait to be delivered"
    tokens: dict[int, int] = {}
    outputs: dict[Any, CompletionOutput] = {}
    while engine.has_unfinished:
        for update in engine.step():
            tokens[update.sample] = tokens.get(update.sample, 0) + len(update.token_ids)
            if update.output is not None:
                outputs[("foreign", update.sample)] = update.output
    assert sum(tokens.values()) == 48 - num_taken, "each token is delivered once"
    assert essences(outputs) == expected


def test_updates_of_other_requests_survive_a_refused_generate() -> None:
    engine = make_engine()
    engine.add_request(PROMPTS[1], SEEDED, "foreign")
    next(engine.stream(PROMPTS[0], with_fields(SEEDED, max_tokens=1)))
    with pytest.raises(ValueError, match="vocabulary"):
        engine.generate([VOCAB], SEEDED, use_tqdm=False)
    assert len(collect(engine)[("foreign", 0)].token_ids) == 24


def test_a_stream_closed_in_the_middle_of_a_step_loses_no_other_update() -> None:
    """The step that yields the stream's token may have finished a neighbour whose row comes after it."""
    engine = make_engine()
    stream = engine.stream(PROMPTS[0], SEEDED)
    next(stream)
    engine.add_request(PROMPTS[1], with_fields(SEEDED, max_tokens=1), "foreign")
    next(stream)
    stream.close()
    assert list(collect(engine)) == [("foreign", 0)]
    assert_idle(engine)


def test_streams_can_be_read_in_turns() -> None:
    """Steps that one stream takes advance the other; what they bring must wait for its reader, the end included."""
    engine = make_engine()
    params = [with_fields(SEEDED, max_tokens=count, seed=count) for count in (5, 20)]
    expected = [only(alone(PROMPTS[0], one)).token_ids for one in params]
    streams = [engine.stream(PROMPTS[0], one) for one in params]
    read: list[list[int]] = [[], []]
    outputs: list[CompletionOutput | None] = [None, None]
    # The longer one is read first, to its end, after both have started.
    for index in (0, 1, 1, 0):
        update = next(streams[index])
        read[index] += update.token_ids
    for index in (1, 0):
        for update in streams[index]:
            read[index] += update.token_ids
            outputs[index] = update.output
    assert read == expected
    assert all(output is not None for output in outputs)
    assert_idle(engine)


def test_generate_inside_a_stream() -> None:
    """The streamed request finishes while `generate` runs; its reader still gets all of it."""
    engine = make_engine()
    read: list[int] = []
    finished = None
    for number, update in enumerate(engine.stream(PROMPTS[0], with_fields(SEEDED, max_tokens=9))):
        if number == 2:
            (result,) = engine.generate(PROMPTS[1], with_fields(SEEDED, max_tokens=30), use_tqdm=False)
            assert essence(result.outputs[0]) == essence(only(alone(PROMPTS[1], with_fields(SEEDED, max_tokens=30))))
        read += update.token_ids
        finished = update.output
    assert finished is not None
    assert read == finished.token_ids
    assert len(read) == 9
    assert_idle(engine)


# abort


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("num_blocks", [16, 200], ids=["under pressure", "ample"])
def test_abort_at_any_step_gives_a_prefix_and_all_blocks(num_blocks: int, depth: int) -> None:
    """The victim shares its prompt's blocks with a bystander that goes on; waiting and preempted ones abort too."""
    params = with_fields(SEEDED, n=2, max_tokens=14)
    arrivals = [
        Arrival("bystander", PROMPTS[0] + [3], with_fields(SEEDED, max_tokens=20)),
        Arrival("victim", PROMPTS[0], params, 1),
        Arrival("other", PROMPTS[1], with_fields(SEEDED, max_tokens=20), 2),
    ]
    settings = {"num_blocks": num_blocks, "depth": depth, "chunk_size": 5}
    whole = drive(make_engine(**settings), arrivals)
    lengths = set()
    for step in range(2, whole.num_steps, 1 if depth == 1 else 2):
        engine = make_engine(**settings)

        def interfere(number: int, step: int = step, engine: Engine = engine) -> list[CompletionOutput]:
            return engine.abort("victim") if number == step else []

        outputs = drive(engine, arrivals, interfere).outputs
        assert outputs.keys() == whole.outputs.keys()
        for key, output in outputs.items():
            expected = whole.outputs[key]
            if output.finish_reason == "abort":
                assert key[0] == "victim"
                assert output.token_ids == expected.token_ids[: len(output.token_ids)]
                assert output.logprobs == expected.logprobs[: len(output.token_ids)]
                assert len(output.behavior_logprobs) == len(output.token_ids)
                lengths.add(len(output.token_ids))
            else:
                assert essence(output) == essence(expected)
    assert len(lengths) >= 6, lengths
    assert engine.abort("victim") == engine.abort("nobody") == []


def test_an_aborted_request_can_come_again_at_once() -> None:
    """Cancel and retry: at depth 3 the first one's rows are still in flight, under the same id."""
    prompt = [*PROMPTS[0], *PROMPTS[1]]
    again = with_fields(SEEDED, prompt_logprobs=0, max_tokens=6)
    expected, other = only(alone(prompt[:10], again)), only(alone(prompt, SEEDED))
    for depth in (1, 2, 3):
        for step in range(1, 9):
            engine = make_engine(depth=depth, chunk_size=4)
            outputs = []

            def interfere(number: int, step: int = step, engine: Engine = engine, kept: Any = outputs) -> None:
                if number == step:
                    kept += engine.abort("victim")
                    engine.add_request(prompt[:10], again, "victim")

            result = drive(engine, [Arrival("victim", prompt, again), Arrival("other", prompt, SEEDED)], interfere)
            assert len(outputs) == 1
            assert essence(result.outputs[VICTIM]) == essence(expected)
            assert essence(result.outputs[("other", 0)]) == essence(other)


# Failures


class Broken(Exception):
    """What the planted failures raise."""


def break_at(engine: Engine, step: int, error: BaseException, *, late: bool) -> list[int]:
    """Let the executor fail once, at its step number ``step``, before or after computing; notes that it did."""
    runner = runner_of(engine)
    submit, failed, count = runner.submit, [], 0

    def broken(plan: StepPlan) -> None:
        nonlocal count
        count += 1
        if count - 1 == step:
            failed.append(step)
            if late:
                submit(plan)
            raise error
        submit(plan)

    runner.submit = broken  # type: ignore[method-assign]
    return failed


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("error", [Broken("planted"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_a_failed_step_costs_time_and_nothing_else(depth: int, error: BaseException) -> None:
    """What was in flight is dropped, sequences wait again with their committed tokens, and the bits are the same."""
    params = with_fields(SEEDED, frequency_penalty=0.4, prompt_logprobs=1, logprobs=1)
    arrivals = [Arrival(f"r{i}", prompt, params, i) for i, prompt in enumerate(PROMPTS[:4])]
    settings = {"num_blocks": 26, "depth": depth, "chunk_size": 5}
    expected = drive(make_engine(**settings), arrivals)
    assert sum(output.num_preemptions for output in expected.outputs.values()) > 0
    num_failed = 0
    for step in random.Random(depth).sample(range(expected.num_steps), 8):
        engine = make_engine(**settings)
        failed = break_at(engine, step, error, late=bool(step % 2))

        def patient(engine: Engine = engine) -> list[SampleUpdate]:
            try:
                return engine.step()
            except (Broken, KeyboardInterrupt):
                engine.scheduler.check()
                assert engine.num_running == 0
                return []

        outputs = drive(engine, arrivals, step=patient).outputs
        assert essences(outputs) == essences(expected.outputs)
        num_failed += len(failed)
    assert num_failed >= 6


@pytest.mark.parametrize("error", [Broken("planted"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_generate_that_fails_leaves_nothing_behind(error: BaseException) -> None:
    engine = make_engine()
    engine.add_request(PROMPTS[3], SEEDED, "foreign")
    break_at(engine, 6, error, late=False)
    with pytest.raises(type(error)):
        engine.generate(PROMPTS[:3], SEEDED, use_tqdm=False)
    outputs = collect(engine)
    assert list(outputs) == [("foreign", 0)]
    assert essence(only(outputs)) == essence(only(alone(PROMPTS[3], SEEDED)))
    assert_idle(engine)
    engine.generate(PROMPTS[:3], SEEDED, use_tqdm=False)


# NaN


def test_step_raises_for_nan_logits_and_nothing_has_advanced() -> None:
    arrivals = [Arrival(name, PROMPTS[i], with_fields(SEEDED, n=1 + i % 2)) for i, name in enumerate(("a", "b", "c"))]
    expected = essences(drive(make_engine(), [arrivals[0], arrivals[2]]).outputs)
    engine = make_engine()
    spoil_logits(engine, "b", len(PROMPTS[1]) + 5)
    for arrival in arrivals:
        engine.add_request(arrival.prompt, arrival.params, arrival.id)
    outputs: dict[Any, CompletionOutput] = {}
    raised: list[NonFiniteLogitsError] = []
    while engine.has_unfinished:
        before = {key: list(sample.token_ids) for key, sample in engine._samples.live.items()}
        try:
            for update in engine.step():
                if update.output is not None:
                    outputs[(update.request_id, update.sample)] = update.output
        except NonFiniteLogitsError as error:
            raised.append(error)
            assert {key: sample.token_ids for key, sample in engine._samples.live.items()} == before
            engine.scheduler.check()
            if len(raised) == 3:
                for output in engine.abort("b"):
                    outputs[("b", output.sample)] = output
    assert len(raised) == 3, "it is raised again until the request is gone"
    for error in raised:
        assert isinstance(error, FloatingPointError)
        assert "'b'" in str(error)
        assert {request.id for request in error.requests} == {"b"}
    assert all(len(outputs.pop(("b", sample)).token_ids) == 5 for sample in (0, 1))
    assert essences(outputs) == expected
    assert_idle(engine)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_generate_ends_requests_with_nan_as_errors_and_goes_on(depth: int) -> None:
    expected = make_engine().generate(PROMPTS, SEEDED, use_tqdm=False)
    engine = make_engine(num_blocks=26, depth=depth)
    spoil_logits(engine, "request-2", len(PROMPTS[2]) + 3)
    results = engine.generate(PROMPTS, SEEDED, use_tqdm=False)
    for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        (output,), (right,) = result.outputs, wanted.outputs
        if index == 2:
            assert output.finish_reason == "error"
            assert output.token_ids == right.token_ids[:3]
            assert len(output.logprobs) == 3
        else:
            assert essence(output) == essence(right)
    assert_idle(engine)


def poisoned_decoder() -> Decoder:
    """A model in which the embedding of the last id is NaN, so that keys and values become NaN as well."""
    decoder = Decoder.random(random_decoder().spec, 1, numerics=INVARIANT, dtype=torch.float32)
    decoder.tensors()["lm_head.weight"].mul_(4)
    decoder.tensors()["model.embed_tokens.weight"][VOCAB - 1] = torch.nan
    return decoder


@pytest.mark.parametrize("chunk_size", [3, 64])
def test_nan_in_one_request_s_keys_stays_there(chunk_size: int) -> None:
    """Its blocks, full of NaN, go to the next request; memory beyond a sequence's own length must not be read."""
    params = with_fields(SEEDED, logit_bias={VOCAB - 1: -1e4}, prompt_logprobs=0)
    clean = [[token % (VOCAB - 1) for token in prompt] for prompt in PROMPTS]
    bad = [*clean[1][:2], VOCAB - 1, *clean[1]]
    expected = make_engine(poisoned_decoder()).generate(clean, params, use_tqdm=False)
    engine = make_engine(poisoned_decoder(), num_blocks=20, chunk_size=chunk_size)
    results = engine.generate([clean[0], bad, *clean[1:]], params, use_tqdm=False)
    assert results[1].outputs[0].finish_reason == "error"
    assert results[1].outputs[0].token_ids == []
    del results[1]
    for result, wanted in zip(results, expected, strict=True):
        assert essence(result.outputs[0]) == essence(wanted.outputs[0])


# The step log


def test_the_step_log_tells_the_run_in_order_and_agrees_with_the_metrics(tmp_path: Path) -> None:
    engine = make_engine(num_blocks=20, chunk_size=6, step_log=tmp_path / "steps.jsonl")
    failed = break_at(engine, 9, Broken("planted"), late=False)

    def patient() -> list[SampleUpdate]:
        try:
            return engine.step()
        except Broken:
            return []

    def interfere(number: int) -> list[CompletionOutput]:
        return engine.abort("r1") if number == 6 else []

    arrivals = [Arrival(f"r{i}", prompt, SEEDED, i) for i, prompt in enumerate(PROMPTS)]
    outputs = drive(engine, arrivals, interfere, step=patient).outputs
    metrics = engine.metrics()
    engine.close()
    events = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(event["event"], []).append(event)
    assert failed == [9]
    assert events[0]["event"] == "config"
    assert events[0]["limits"]["num_blocks"] == 20
    assert [event["id"] for event in by_kind["add"]] == [arrival.id for arrival in arrivals]
    assert [event["prompt_token_ids"] for event in by_kind["add"]] == PROMPTS
    assert [(event["id"], event["reason"]) for event in by_kind["abort"]] == [("r1", "abort")]
    assert len(by_kind["abandon"]) == 1
    plans, commits = by_kind["plan"], by_kind["commit"]
    assert [plan["step"] for plan in plans] == list(range(metrics["num_steps"]))
    assert [commit["step"] for commit in commits] == [plan["step"] for plan in plans if plan["step"] != 9]
    assert sum(sum(plan["lengths"]) for plan in plans) == metrics["forward_tokens"]
    assert sum(len(plan["preempted"]) for plan in plans) == metrics["preemptions"] > 0
    assert sum(len(commit["tokens"]) for commit in commits) == metrics["output_tokens"]
    assert metrics["output_tokens"] == sum(len(output.token_ids) for output in outputs.values())
    assert metrics["prompt_tokens"] == sum(map(len, PROMPTS))
    assert metrics["num_finished"] == metrics["num_added"] == len(PROMPTS)
    assert metrics["kv_tokens"] == 80
    assert all(commit["start_s"] <= commit["end_s"] for commit in commits)
    starts = [commit["start_s"] for commit in commits]
    assert starts == sorted(starts)
    # A commit follows its plan, and every request is added before its first plan.
    order = [(event["event"], event.get("step")) for event in events]
    assert all(order.index(("plan", c["step"])) < order.index(("commit", c["step"])) for c in commits)
    first_started = next(i for i, event in enumerate(events) if event["event"] == "plan" and event["started"])
    assert events[first_started]["started"][0][1] in [event["id"] for event in events[:first_started] if "id" in event]


# numerics_id


def test_every_result_names_the_numerics_that_fixed_its_bits() -> None:
    """Results with equal ids may be compared bit by bit; anything that fixes bits must change the id."""
    settings: list[dict[str, Any]] = [
        {},
        {"numerics": FAST},
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16},
        {"kv_dtype": torch.bfloat16},
        {"kv_dtype": torch.float8_e4m3fn},
    ]
    ids = [only(alone(PROMPTS[0], with_fields(SEEDED, max_tokens=1), **setting)).numerics_id for setting in settings]
    assert len(set(ids)) == len(settings)
    assert all(len(one) == 12 and int(one, 16) >= 0 for one in ids)
    elsewhere = {"block_size": 8, "num_blocks": 40, "chunk_size": 3, "max_num_seqs": 2, "depth": 2, "seed": 5}
    assert only(alone(PROMPTS[0], with_fields(SEEDED, n=1, max_tokens=1), **elsewhere)).numerics_id == ids[0]


# from_pretrained


def test_what_an_engine_is_built_from_is_checked() -> None:
    for fields, named in (
        ({"numerics": "exact"}, "numerics"),
        ({"dtype": "int8"}, "dtype"),
        ({"kv_dtype": "int4"}, "kv_dtype"),
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": -1}, "num_blocks"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"depth": 0}, "depth"),
        ({"max_step_tokens": 0}, "max_step_tokens"),
        ({"chunk_size": 1.5}, "chunk_size"),
        ({"policy": "lifo"}, "policy must be a Policy or one of fifo, watermark, reserve, forecast, not 'lifo'"),
        ({"model": None}, "model must be tiny, a checkpoint folder or a Hub id, not None"),
        ({"config": 5}, "config must be of type EngineConfig, not 5"),
        ({"spec": "qwen3"}, "spec must be of type ModelSpec, not 'qwen3'"),
        ({"step_log": 5}, "step_log must be a file, not 5"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": "x"}, "gpu_memory_utilization"),
        ({"verify": 1}, "verify must be true or false, not 1"),
        ({"prefix_reuse": 3}, "prefix_reuse must be true or false, not 3"),
        ({"allow_long_context": 3}, "allow_long_context must be true or false, not 3"),
        ({"seed": "x"}, "seed"),
        ({"device": "tpu"}, "device"),
        ({"weights": "some"}, "weights"),
        ({"blocksize": 4}, "blocksize"),
    ):
        with pytest.raises(ValueError, match=named):
            Engine.from_pretrained(**{"model": "tiny", **fields})


def test_a_policy_may_be_given_by_its_name() -> None:
    assert EngineConfig(policy="watermark") == EngineConfig(policy=Watermark())
    engine = Engine.from_pretrained("tiny", policy="reserve", num_blocks=8)
    assert engine.scheduler.policy == Reserve()


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ([], {}),
        ([10**6], {}),
        ([1, 2], {"max_tokens": 10**6}),
        ([1, 2], {"max_tokens": 4, "stop_token_ids": [10**6]}),
        ([1, 2], {"max_tokens": 4, "logprobs": 1000}),
    ],
)
def test_a_request_is_checked_as_it_would_be_added_and_is_not(prompt: list[int], fields: dict[str, Any]) -> None:
    engine = Engine.from_pretrained("tiny", num_blocks=8)
    params = SamplingParams(**fields)
    with pytest.raises(ValueError) as added:  # noqa: PT011 (compared below)
        engine.add_request(prompt, params)
    with pytest.raises(ValueError) as checked:  # noqa: PT011
        engine.check_request(prompt, params)
    assert str(checked.value) == str(added.value)
    engine.check_request([1, 2], SamplingParams(max_tokens=4))
    assert not engine.has_unfinished
    assert engine.add_request([1, 2], SamplingParams(max_tokens=4)) == "request-0"


def test_the_public_names() -> None:
    import paged

    for name in paged.__all__:
        assert getattr(paged, name).__doc__, name
    assert EngineConfig().numerics == "invariant"
    with pytest.raises(AttributeError):
        paged.Enigne  # noqa: B018


def test_logits_are_recorded_for_every_token() -> None:
    """The tests' own instrument: as many rows as tokens, and the greedy token is their highest entry."""
    engine = make_engine(chunk_size=5)
    logits = record_logits(engine)
    output = only(drive(engine, [Arrival("victim", PROMPTS[0], GREEDY)]).outputs)
    positions = range(len(PROMPTS[0]), len(PROMPTS[0]) + 24)
    assert sorted(logits[VICTIM]) == list(positions)
    assert output.token_ids == [int(logits[VICTIM][position].argmax()) for position in positions]
