"""Faults that a review of this engine found, each told and tested so that it cannot come back unseen."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mock_device
from engine_tools import (
    INVARIANT,
    SEEDED,
    SPEC,
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
    with_fields,
)
from paged import Engine, SampleUpdate, SamplingParams
from paged.core.blocks import BlockPool
from paged.core.policy import Load, Policy
from paged.core.sequence import Sequence as ScheduledSequence
from paged.kernels.attention import attention
from paged.kernels.batch_layout import BatchLayout
from paged.kernels.kv_cache import LayerCache, store
from paged.kernels.numerics import Numerics
from paged.model.decoder import Decoder
from paged.runner.text import Tokenizer

REPOSITORY = Path(__file__).resolve().parent.parent.parent
RNG = random.Random(31)
PROMPTS = [random_prompt(RNG, 4, 20) for _ in range(6)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


# Many threads


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [4, 8])
@pytest.mark.parametrize("shared", [4, 8], ids=lambda shared: f"{shared} heads a kv head")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_attention_bits_do_not_hang_on_the_number_of_items(dtype: torch.dtype, shared: int, num_threads: int) -> None:
    """With 4 threads and more, a batched product of fp64 shared few items out in another way than many.

    A row decoded alone then had other bits than the same row in a chunk or beside others, at contexts of a few hundred
    tokens and usual head sizes; the tests ran on one thread with tiny heads. Products now come in constant tiles.
    """
    size, kv_heads, block_size = 64, 2, 16
    lengths = (300, 333, 384, 420, 401)
    generator = torch.Generator().manual_seed(shared)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    queries = [2 * noise(length, shared * kv_heads, size) for length in lengths]
    num_blocks = [-(-length // block_size) for length in lengths]
    shape = (sum(num_blocks), block_size, kv_heads, size)
    cache = LayerCache(torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
    tables = np.zeros((len(lengths), max(num_blocks)), dtype=np.int32)
    blocks = np.random.default_rng(0).permutation(sum(num_blocks))
    for i, length in enumerate(lengths):
        tables[i, : num_blocks[i]], blocks = blocks[: num_blocks[i]], blocks[num_blocks[i] :]
        layout = BatchLayout.build([0], [length], tables[[i]], block_size)
        store(cache, noise(length, kv_heads, size), noise(length, kv_heads, size), layout.cells_T)

    def attend(*chunks: tuple[int, int, int]) -> list[torch.Tensor]:
        """Outputs of one step of chunks (text, start, length)."""
        which, starts, counts = zip(*chunks, strict=True)
        layout = BatchLayout.build(starts, counts, tables[list(which)], block_size)
        q = torch.cat([queries[i][start : start + count] for i, start, count in chunks])
        return list(attention(q, cache, layout, scale=size**-0.5, numerics=INVARIANT).split(counts))

    with threads(num_threads):
        for i, length in enumerate(lengths):
            (chunk,) = attend((i, length - 9, 9))
            for row in range(9):
                position = length - 9 + row
                (decoded,) = attend((i, position, 1))
                assert torch.equal(decoded[0], chunk[row]), "alone"
                others = [(j, lengths[j] - 1 - row, 1) for j in range(len(lengths)) if j != i]
                for company in (others[:1], others, [*others, (i, 100, 7)]):
                    assert torch.equal(attend((i, position, 1), *company)[0][0], chunk[row]), company
            for start, count in ((length - 40, 40), (length - 9, 2), (length - 3, 3)):
                (part,) = attend((i, start, count))
                same = min(count, 9)
                first = start + count - same - (length - 9)
                assert torch.equal(part[-same:], chunk[first : first + same]), (start, count)


WIDE = replace(
    SPEC, hidden_size=256, intermediate_size=256, num_heads=8, num_kv_heads=2, head_dim=64, max_position_embeddings=512
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_a_long_text_has_its_own_bits_with_many_threads(dtype: torch.dtype) -> None:
    """The same fault seen from outside: samples of 300 tokens differed with company, at usual sizes and 4 threads."""
    decoder = random_decoder(INVARIANT, dtype, WIDE)
    rng = random.Random(2)
    prompt = random_prompt(rng, 301, 301)
    others = [Arrival(f"other-{i}", random_prompt(rng, 20 * i + 5, 20 * i + 5), SEEDED) for i in range(3)]
    params = with_fields(SEEDED, max_tokens=10)
    found, logits = [], []
    with threads(4):
        for company, chunk_size in (([], 64), ([], 5), (others, 64), (others, 5)):
            engine = make_engine(decoder, block_size=16, chunk_size=chunk_size, max_step_tokens=96)
            logits.append(record_logits(engine))
            found.append(drive(engine, [*company, Arrival("victim", prompt, params)]).outputs["victim", 0])
    for output, rows in zip(found[1:], logits[1:], strict=True):
        assert essence(output) == essence(found[0])
        for position, row in logits[0]["victim", 0].items():
            assert torch.equal(rows["victim", 0][position], row), position


# NaN in published blocks


def poisoned_decoder() -> Decoder:
    """A model in which the embedding of the last id is NaN."""
    decoder = Decoder.random(SPEC, 1, numerics=INVARIANT, dtype=torch.float32)
    decoder.tensors()["lm_head.weight"].mul_(4)
    decoder.tensors()["model.embed_tokens.weight"][VOCAB - 1] = torch.nan
    return decoder


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk_size", [1, 3, 5, 7, 14, 64])
@pytest.mark.parametrize("together", [False, True], ids=["afterwards", "together"])
def test_a_bad_request_does_not_poison_the_prefix_that_it_shares(together: bool, chunk_size: int, depth: int) -> None:
    """A chunk that ended before its prompt's end was not searched for NaN, and was published for reuse.

    NaN at one position reaches rows before it in the same chunk (zero times NaN in the products of attention), so
    blocks of clean tokens held NaN, and later requests with that prefix failed, until the blocks were evicted.
    """
    clean = [3 * i % (VOCAB - 1) for i in range(12)]
    bad = [*clean, VOCAB - 1, *range(20)]
    good = [*clean, 5, 6, 7]
    params = with_fields(SEEDED, logit_bias={VOCAB - 1: -1e4}, max_tokens=8)
    settings: dict[str, Any] = {"chunk_size": chunk_size, "depth": depth}
    expected = essence(
        only(drive(make_engine(poisoned_decoder(), **settings), [Arrival("good", good, params)]).outputs)
    )
    engine = make_engine(poisoned_decoder(), **settings)
    arrivals = [Arrival("bad", bad, params), Arrival("good", good, params, 0 if together else 60)]
    outputs = drive(engine, arrivals, step=engine.run_step).outputs
    assert outputs["bad", 0].finish_reason == "error"
    assert outputs["bad", 0].token_ids == []
    assert essence(outputs["good", 0]) == expected
    again = drive(engine, [Arrival("again", good, params)], step=engine.run_step).outputs
    assert essence(only(again)) == expected
    assert only(again).num_cached_tokens == 12


# Ctrl-C and failures in the middle of a change

SHORT = with_fields(SEEDED, n=2, max_tokens=10)
ARRIVALS = [Arrival(f"r{i}", [*PROMPTS[0][:4], *prompt], SHORT, i) for i, prompt in enumerate(PROMPTS[:5])]
PRESSED: dict[str, Any] = {"num_blocks": 14, "chunk_size": 5, "max_step_tokens": 16}


@pytest.fixture
def python_handles_ctrl_c() -> Iterator[None]:
    """A test runner may ignore SIGINT in its workers."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_inside(owner: Any, name: str, at_call: int, *, late: bool) -> list[int]:
    """Let a Ctrl-C arrive when ``owner.name`` is called for the ``at_call``-th time, before or after its work."""
    method, fired, count = getattr(owner, name), [], 0

    def wrapped(*args: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        fire = count - 1 == at_call
        if fire and not late:
            fired.append(at_call)
            signal.raise_signal(signal.SIGINT)
        result = method(*args, **named)
        if fire and late:
            fired.append(at_call)
            signal.raise_signal(signal.SIGINT)
        return result

    setattr(owner, name, wrapped)
    return fired


# What is called in the middle of planning and committing, and often enough to be met.
INNER = {
    "plan": ("scheduler", "plan"),
    "a sequence that starts": ("scheduler", "_start"),
    "a sequence that grows": ("scheduler", "_grow"),
    "an eviction": ("scheduler", "_evict"),
    "commit": ("scheduler", "commit"),
    "a slot that is left": ("scheduler", "_leave"),
    "a sequence that finishes": ("scheduler", "_finish"),
    "results that are taken in": ("samples", "take_in"),
    "an output that is made": ("samples", "output"),
}


@pytest.mark.usefixtures("python_handles_ctrl_c")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("place", INNER)
def test_ctrl_c_in_the_middle_of_a_step_waits_until_the_books_are_whole(place: str, depth: int) -> None:
    """An interrupt between two assignments of the scheduler lost blocks or sequences, or a token that was committed.

    It is now held back to the end of the block that plans or commits; whoever catches it can go on stepping, and gets
    every token of every request.
    """
    expected = drive(make_engine(**PRESSED, depth=depth), ARRIVALS)
    assert sum(output.num_preemptions for output in expected.outputs.values()) > 0
    for at_call, late in ((0, True), (2, False), (5, True)):
        engine = make_engine(**PRESSED, depth=depth)
        owner, name = INNER[place]
        fired = interrupt_inside(engine._samples if owner == "samples" else engine.scheduler, name, at_call, late=late)
        num_caught = 0

        def patient(engine: Engine = engine) -> list[SampleUpdate]:
            nonlocal num_caught
            try:
                return engine.step()
            except KeyboardInterrupt:
                num_caught += 1
                engine.scheduler.check()
                return []

        result = drive(engine, ARRIVALS, step=patient)
        assert fired == [at_call]
        assert num_caught == 1, "it is not swallowed"
        assert essences(result.outputs) == essences(expected.outputs)
        for key, output in result.outputs.items():
            told = [update for update in result.updates if (update.request_id, update.sample) == key]
            assert [token for update in told for token in update.token_ids] == output.token_ids


@pytest.mark.usefixtures("python_handles_ctrl_c")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["add", "abort", "_finish"])
def test_ctrl_c_in_add_request_or_abort_leaves_no_half_of_a_request(name: str, late: bool) -> None:
    """The scheduler knew samples that the engine did not, or the other way round: the next step was a KeyError."""
    engine = make_engine(**PRESSED)
    for arrival in ARRIVALS[:2]:
        engine.add_request(arrival.prompt, arrival.params, arrival.id)
    for _ in range(4):
        engine.step()
    fired = interrupt_inside(engine.scheduler, name, 0, late=late)
    call = partial(engine.add_request, *PROMPTS[2:3], SHORT, "r2") if name == "add" else partial(engine.abort, "r1")
    with pytest.raises(KeyboardInterrupt):
        call()
    assert fired == [0]
    engine.scheduler.check()
    assert {sample.request.id for sample in engine._samples.live.values()} == set(engine.scheduler._live)
    outputs = drive(engine, [Arrival("new", PROMPTS[3], SEEDED)]).outputs
    assert essence(outputs["new", 0]) == essence(only(alone(PROMPTS[3], SEEDED, request_id="new")))
    undisturbed = essences(drive(make_engine(**PRESSED), ARRIVALS[:2]).outputs)
    assert essence(outputs["r0", 0]) == undisturbed["r0", 0]
    assert (("r1", 0) in outputs) == (name == "add"), "an abort is done, though interrupted"
    assert not any(key[0] == "r2" for key in outputs), "whoever was interrupted does not know that it was added"
    engine.add_request(PROMPTS[2], SEEDED, "r2")
    engine.add_request(PROMPTS[2], SEEDED, "r1")
    assert len(drive(engine, []).outputs) == 2


@pytest.mark.usefixtures("python_handles_ctrl_c")
@pytest.mark.parametrize("at_call", [0, 2])
@pytest.mark.parametrize("name", ["add", "plan", "commit", "_finish"])
def test_ctrl_c_in_generate_and_stream_leaves_nothing_behind(name: str, at_call: int) -> None:
    """A request whose id its caller never learnt ran on for nobody, and its updates waited for ever."""
    params = with_fields(SEEDED, n=2, max_tokens=6)
    calls: list[Callable[[Engine], Any]] = [lambda engine: engine.generate(PROMPTS[:4], params, use_tqdm=False)]
    if at_call == 0 or name in ("plan", "commit"):
        calls.append(lambda engine: list(engine.stream(PROMPTS[0], params)))
    for call in calls:
        engine = make_engine()
        interrupt_inside(engine.scheduler, name, at_call, late=True)
        with pytest.raises(KeyboardInterrupt):
            call(engine)
        assert_idle(engine)
        assert not engine._samples.undelivered
        assert not engine._streamed
        assert len(engine.generate(PROMPTS[:2], params, use_tqdm=False)) == 2


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_ctrl_c_while_a_request_ends_as_error_does_not_lose_its_end() -> None:
    """The sample was ended, and the update that tells it was not yet stored."""
    params = with_fields(SEEDED, logit_bias={VOCAB - 1: -1e4}, max_tokens=8)
    engine = make_engine(poisoned_decoder())
    interrupt_inside(engine.scheduler, "abort", 0, late=True)
    num_caught = 0

    def patient() -> list[SampleUpdate]:
        nonlocal num_caught
        try:
            return engine.run_step()
        except KeyboardInterrupt:
            num_caught += 1
            return []

    arrivals = [Arrival("bad", [1, VOCAB - 1], params), Arrival("good", [1, 2, 3], params)]
    outputs = drive(engine, arrivals, step=patient).outputs
    assert num_caught == 1
    assert {key[0]: output.finish_reason for key, output in outputs.items()} == {"bad": "error", "good": "length"}


class PlantedError(Exception):
    """Raised by what a test broke."""


@dataclass(frozen=True)
class BrokenPolicy(Policy):
    """Raises at one call of one of its methods.

    Attributes:
        method: the method's name.
        at_call: the number of the call.
        calls: the names of methods called so far.
    """

    method: str
    at_call: int
    calls: list[str]

    def _count(self, name: str) -> None:
        self.calls.append(name)
        if name == self.method and self.calls.count(name) - 1 == self.at_call:
            raise PlantedError(name)

    def blocks_to_admit(self, sequence: ScheduledSequence, load: Load) -> int:
        self._count("blocks_to_admit")
        return super().blocks_to_admit(sequence, load)

    def blocks_kept_free(self, sequence: ScheduledSequence, load: Load) -> int:
        self._count("blocks_kept_free")
        return super().blocks_kept_free(sequence, load)

    def choose_victim(self, candidates: Sequence[ScheduledSequence]) -> ScheduledSequence:
        self._count("choose_victim")
        return super().choose_victim(candidates)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("method", "at_calls"),
    [("blocks_to_admit", (0, 1, 2, 4, 7)), ("blocks_kept_free", (0, 1, 2, 5)), ("choose_victim", (0, 1))],
)
def test_a_policy_that_raises_costs_nobody_their_place(method: str, at_calls: Sequence[int], depth: int) -> None:
    """Requests that let others pass while a leader computes their prefix were out of the queue when a policy raised.

    They were never served, and never reported. Here several wait for a leader whose chunks are small, and the policy
    fails at each of its calls in turn.
    """
    stem = [7 * i % VOCAB for i in range(20)]
    params = with_fields(SHORT, n=1)
    arrivals = [Arrival(f"same-{i}", [*stem, i], params) for i in range(3)]
    arrivals += [Arrival(f"own-{i}", prompt, params, i) for i, prompt in enumerate(PROMPTS[:4])]
    settings: dict[str, Any] = {**PRESSED, "depth": depth}
    expected = drive(make_engine(**settings), arrivals).outputs
    num_passed = 0
    for at_call in at_calls:
        policy = BrokenPolicy(method, at_call, [])
        engine = make_engine(**settings, policy=policy)
        num_caught = 0

        def patient(engine: Engine = engine) -> list[SampleUpdate]:
            nonlocal num_caught, num_passed
            waiting = engine.num_waiting + engine.num_running
            try:
                return engine.step()
            except PlantedError:
                num_caught += 1
                num_passed += any(sequence.waits_for is not None for sequence in engine.scheduler._waiting)
                engine.scheduler.check()
                assert (engine.num_running, engine.num_waiting) == (0, waiting)
                return []

        outputs = drive(engine, arrivals, step=patient).outputs
        assert num_caught == 1, policy.calls
        assert essences(outputs) == essences(expected)
    assert num_passed > 0 or method == "victim"


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("method", ["submit", "collect"])
def test_an_executor_that_raises_costs_time_alone(method: str, depth: int) -> None:
    """A result that was computed, but not collected, was taken for that of the next plan."""
    expected = drive(make_engine(**PRESSED, depth=depth), ARRIVALS).outputs
    for at_call in (0, 4, 17):
        engine = make_engine(**PRESSED, depth=depth)
        runner = runner_of(engine)
        work, count, num_caught = getattr(runner, method), 0, 0

        def broken(*args: Any, work: Any = work, at_call: int = at_call) -> Any:
            nonlocal count
            count += 1
            if count - 1 == at_call:
                raise PlantedError
            return work(*args)

        def patient(engine: Engine = engine) -> list[SampleUpdate]:
            nonlocal num_caught
            try:
                return engine.step()
            except PlantedError:
                num_caught += 1
                engine.scheduler.check()
                return []

        setattr(runner, method, broken)
        assert essences(drive(engine, ARRIVALS, step=patient).outputs) == essences(expected)
        assert num_caught == 1


# Refusals, ids and deliveries


def test_a_refused_request_does_not_change_the_streams_of_those_after_it() -> None:
    """Unseeded streams come from the id, and a refused request used one up: its neighbours drew other tokens."""
    params = with_fields(SEEDED, seed=None)
    expected = [make_engine().add_request(PROMPTS[0], params)]
    engine, undisturbed = make_engine(), make_engine()
    refused: list[tuple[Any, SamplingParams]] = [
        ([], params),
        ([VOCAB], params),
        ("text", params),
        ([1] * 200, with_fields(params, max_tokens=100)),
        ([1], with_fields(params, stop_token_ids=[VOCAB])),
    ]
    for prompt in PROMPTS[:3]:
        for bad, bad_params in refused:
            with pytest.raises(ValueError, match=r"."):
                engine.add_request(bad, bad_params)
        assert engine.add_request(prompt, params) == undisturbed.add_request(prompt, params)
    assert expected == ["request-0"]
    with pytest.raises(ValueError, match="samples"):
        engine.add_request(PROMPTS[0], params, samples=[1])
    assert engine.add_request(PROMPTS[3], params) == "request-3"
    undisturbed.add_request(PROMPTS[3], params)
    assert essences(drive(engine, []).outputs) == essences(drive(undisturbed, []).outputs)


def wait_for_delivery(engine: Engine, request_id: str, params: SamplingParams) -> None:
    """Leave updates of a request undelivered, by generating for another one."""
    engine.add_request(PROMPTS[1], params, request_id)
    engine.generate(PROMPTS[0], with_fields(SEEDED, max_tokens=6), use_tqdm=False)
    assert engine._samples.undelivered[request_id]


def test_abort_drops_updates_that_its_outputs_hold() -> None:
    """Updates of an aborted request came with the next step: tokens of a request that its owner had seen the end of.

    What finished before the abort is another matter: nobody has been given it, so it is still delivered.
    """
    engine = make_engine()
    wait_for_delivery(engine, "mine", with_fields(SEEDED, n=2, max_tokens=30))
    engine.add_request(PROMPTS[2], SEEDED, "other")
    ended = engine.abort("mine")
    assert [output.sample for output in ended] == [0, 1]
    assert all(len(output.token_ids) >= 5 for output in ended)
    assert {update.request_id for update in drive(engine, []).updates} == {"other"}

    wait_for_delivery(engine, "short", with_fields(SEEDED, max_tokens=3))
    assert engine.abort("short") == []
    (output,) = drive(engine, []).outputs.values()
    assert (output.request_id, output.finish_reason, len(output.token_ids)) == ("short", "length", 3)


def test_an_id_is_taken_until_its_last_update_is_delivered() -> None:
    """A second request under the id of one whose end was not delivered yet: updates of both came mixed."""
    engine = make_engine()
    wait_for_delivery(engine, "mine", with_fields(SEEDED, max_tokens=3))
    assert not engine.scheduler.is_live("mine")
    with pytest.raises(ValueError, match=r"'mine' is in use .*not been delivered"):
        engine.add_request(PROMPTS[2], SEEDED, "mine")
    assert len(drive(engine, []).outputs["mine", 0].token_ids) == 3
    engine.add_request(PROMPTS[2], SEEDED, "mine")
    assert len(drive(engine, []).outputs["mine", 0].token_ids) == 24


def test_made_ids_avoid_those_that_wait_for_delivery() -> None:
    """A user's own 'request-1' had finished, undelivered; the engine made that id again and mixed the two."""
    engine = make_engine()
    wait_for_delivery(engine, "request-1", with_fields(SEEDED, max_tokens=3))
    assert engine.add_request(PROMPTS[0], SEEDED) == "request-2"
    outputs = drive(engine, []).outputs
    assert {key[0]: len(output.token_ids) for key, output in outputs.items()} == {"request-1": 3, "request-2": 24}


@pytest.mark.parametrize("depth", [1, 3])
def test_stepping_inside_a_stream_loses_nothing(depth: int) -> None:
    """``step`` inside the loop over a stream was given the stream's updates: the loop lost tokens, or the end."""
    engine = make_engine(depth=depth)
    engine.add_request(PROMPTS[1], with_fields(SEEDED, max_tokens=40), "other")
    streamed: list[SampleUpdate] = []
    stepped: list[SampleUpdate] = []
    for update in engine.stream(PROMPTS[0], SEEDED):
        streamed.append(update)
        stepped += [*engine.step(), *engine.step()]
    stepped += drive(engine, []).updates
    assert {update.request_id for update in streamed} == {"request-0"}
    assert {update.request_id for update in stepped} == {"other"}
    for updates, length in ((streamed, 24), (stepped, 40)):
        output = updates[-1].output
        assert output is not None
        assert [token for update in updates for token in update.token_ids] == output.token_ids
        assert len(output.token_ids) == length
    assert_idle(engine)


# What a request may be


def test_unknown_keys_of_a_prompt_are_refused(tokenizer: Tokenizer) -> None:
    """A misspelt or second key was ignored: parameters that a user believed in had no effect."""
    for engine in (make_engine(), make_engine(tokenizer=tokenizer)):
        for prompt in (
            {"prompt_token_ids": [1, 2], "temperature": 0.5},
            {"prompt_token_ids": [1, 2], "prompt": "ab"},
            {"prompt_tokens": [1, 2]},
            {},
        ):
            with pytest.raises(ValueError, match="prompt"):
                engine.add_request(prompt, SEEDED)
        engine.add_request({"prompt_token_ids": [1, 2]}, SEEDED)
        assert len(drive(engine, []).outputs) == 1


def test_text_prompts_in_a_mapping_and_text_that_no_tokenizer_takes(tokenizer: Tokenizer) -> None:
    """``{"prompt": text}`` was refused, and half a surrogate pair was a TypeError from inside the tokenizer."""
    engine = make_engine(tokenizer=tokenizer)
    mapped, plain = engine.generate([{"prompt": "crab"}, "crab"], SEEDED, use_tqdm=False)
    assert mapped.prompt_token_ids == plain.prompt_token_ids == tokenizer.encode("crab")
    assert essence(mapped.outputs[0]) == essence(plain.outputs[0])
    for prompt in ("a\ud800b", {"prompt": "\udfff"}):
        with pytest.raises(ValueError, match="prompt must be text"):
            engine.add_request(prompt, SEEDED)
    with pytest.raises(ValueError, match="prompt must be text, not list"):
        engine.add_request({"prompt": ["a"]}, SEEDED)
    assert_idle(engine)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (5, "messages must be a list of at least one message, not 5"),
        ([{"role": "user", "content": 5}], "content in messages must be a text or a list of objects, not 5"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, reason: str, tmp_path: Path) -> None:
    """A number as content was written into the prompt as a text, and sampled."""
    folder = save_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    engine = make_engine(tokenizer=Tokenizer(folder))
    with pytest.raises(ValueError, match=reason):
        engine.add_request({"messages": messages}, SEEDED)
    assert_idle(engine)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[0].content.absent.deep }}",
        "{{ messages[5] + 'x' }}",
        "{% if %}",
    ],
    ids=["type", "attribute", "index", "syntax"],
)
def test_a_chat_template_that_fails_refuses_its_request(template: str, tmp_path: Path) -> None:
    """Content that is a list of parts met a template that adds it to text: a TypeError ended the run of all others."""
    folder = save_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    engine = make_engine(tokenizer=Tokenizer(folder))
    with pytest.raises(ValueError, match="messages do not suit the chat template"):
        engine.add_request({"messages": [{"role": "user", "content": "hi"}]}, SEEDED)
    assert_idle(engine)


def test_sampling_params_cannot_change_after_they_were_checked() -> None:
    """``logit_bias`` kept the caller's own dictionary: parameters could be changed, unchecked, while they were used."""
    bias = {3: 1.5, 1: -2.0}
    params = SamplingParams(logit_bias=bias, stop=["x"], stop_token_ids=[4])
    same = SamplingParams(logit_bias={1: -2.0, 3: 1.5}, stop="x", stop_token_ids=(4,))
    bias[7] = float("nan")
    assert params.logit_bias == ((1, -2.0), (3, 1.5))
    assert params == same
    assert hash(params) == hash(same)
    assert len({params, same, replace(params, seed=1)}) == 2
    assert replace(params, max_tokens=3).logit_bias == params.logit_bias
    with pytest.raises(AttributeError):
        params.logit_bias = ()  # type: ignore[misc]


def test_max_tokens_none_does_not_hang_on_the_pool() -> None:
    """Without ``max_tokens`` a text went on for as long as the pool was large, so that memory changed the samples."""
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    prompt = list(range(10))
    found = []
    for num_blocks, block_size in ((16, 4), (200, 4), (4, 16), (22, 3)):
        engine = Engine.from_pretrained("tiny", max_seq_len=64, num_blocks=num_blocks, block_size=block_size)
        found.append(engine.generate(prompt, params, use_tqdm=False)[0].outputs[0])
    assert len(found[0].token_ids) == 64 + 1 - 10, "the last token is never fed back"
    assert all(essence(output) == essence(found[0]) for output in found)
    for num_blocks, block_size in ((15, 4), (21, 3)):
        engine = Engine.from_pretrained("tiny", max_seq_len=64, num_blocks=num_blocks, block_size=block_size)
        with pytest.raises(ValueError, match="max_tokens 55 can never fit the cache"):
            engine.add_request(prompt, params)
        assert_idle(engine)


# Counts


def test_the_counts_add_up_with_preemption_and_reuse() -> None:
    """Tokens found in the cache again after a preemption counted as saved though they were not recomputed either.

    What is computed is the minimum, and what was computed twice, less what the cache saved, and what a deeper pipeline
    ran beyond a stop.
    """
    met: dict[str, int] = {"preemptions": 0, "cached": 0, "recomputed": 0, "both": 0, "dropped": 0}
    for seed in range(150):
        rng = random.Random(seed)
        depth = 1 + seed % 3
        block_size, longest = rng.choice((1, 2, 4, 5)), rng.randint(12, 36)
        scheduler, device = mock_device.setup(
            -(-longest // block_size) + rng.randint(0, 6),
            block_size,
            depth=depth,
            stop_every=rng.choice((0, 12, 40)),
            max_num_seqs=rng.choice((3, 8)),
            chunk_size=rng.choice((2, 5, 64)),
            max_step_tokens=rng.choice((8, 64)),
        )
        stem = [rng.randrange(50) for _ in range(longest)]
        arrivals: dict[int, list[Any]] = {}
        for number in range(rng.randint(4, 9)):
            prompt = [*stem[: rng.randint(0, longest // 2)], *(rng.randrange(50) for _ in range(rng.randint(1, 4)))]
            scoring = {"prompt_logprobs": 0} if rng.random() < 0.1 else {}
            most = rng.randint(1, longest + 1 - len(prompt))
            batch = [
                mock_device.ask(f"r{number}", prompt, most, sample=j, **scoring) for j in range(rng.choice((1, 3)))
            ]
            arrivals.setdefault(rng.randint(0, 12), []).append(batch)
        run = mock_device.drive(scheduler, device, arrivals)
        mock_device.verify(run, device.model)
        counters = scheduler.counters
        assert counters.forward_tokens == sum(plan.num_tokens for plan in run.plans)
        surplus = counters.dropped_tokens
        assert surplus == 0 or depth > 1
        assert (
            counters.forward_tokens
            == counters.minimal_forward_tokens + counters.recomputed_tokens - counters.cached_tokens + surplus
        ), seed
        met["preemptions"] += counters.num_preemptions
        met["cached"] += counters.cached_tokens
        met["recomputed"] += counters.recomputed_tokens
        met["both"] += counters.num_preemptions > 0 and counters.cached_tokens > 0
        met["dropped"] += counters.dropped_tokens
    assert met["preemptions"] > 200, met
    assert met["cached"] > 1000, met
    assert met["recomputed"] > 100, met
    assert met["both"] > 40, met
    assert met["dropped"] > 20, met


# numerics_id


def test_the_numerics_id_tells_machines_whose_products_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines with the same torch chose other kernels, and samples with equal ids differed in their last bits."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16)

    def ids() -> list[str]:
        return [Numerics().numerics_id(dtype=dtype, kv_dtype=dtype, device="cpu") for dtype in dtypes]

    before = ids()
    assert ids() == before
    for name in ("linear", "bmm", "exp"):
        owner = torch.nn.functional if name == "linear" else torch
        right = getattr(owner, name)

        def perturbed(*args: Any, right: Any = right) -> torch.Tensor:
            result = right(*args).clone()
            bits = result.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[result.element_size()])
            bits.view(-1)[-1] ^= 1
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, perturbed)
            changed = ids()
        assert all(one != other for one, other in zip(changed, before, strict=True)), name
    assert ids() == before
    with threads(torch.get_num_threads() + 1):
        assert not set(ids()) & set(before)


FINGERPRINT = """
import hashlib, torch
from paged.kernels.numerics import Numerics
torch.set_num_threads(1)
for dtype in (torch.float64, torch.float32, torch.bfloat16):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    digest = hashlib.sha256()
    for kind in dict.fromkeys((dtype, wide)):
        def draw(*shape):
            generator = torch.Generator().manual_seed(1)
            return torch.rand(*shape, generator=generator, dtype=torch.float64).to(kind)
        results = [torch.nn.functional.linear(draw(16, 512) - 0.5, draw(768, 512) - 0.5), torch.exp(draw(16, 512))]
        if kind == wide:
            results.append(torch.bmm(draw(32, 2, 64) - 0.5, (draw(32, 64, 64) - 0.5).mT))
        for result in results:
            digest.update(result.view(torch.uint8).numpy().tobytes())
    print(Numerics().numerics_id(dtype=dtype, kv_dtype=dtype, device="cpu"), digest.hexdigest())
"""


def test_the_numerics_id_follows_the_bits_under_other_instruction_sets() -> None:
    """oneDNN's and MKL's environment variables change bits, and nothing of torch's own report tells it.

    Whether they do depends on this machine: the ids must be equal exactly where the bits are.
    """
    found = []
    for extra in ({}, {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}):
        done = subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", **extra},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append([line.split() for line in done.stdout.splitlines()])
    for other in found[1:]:
        for (first_id, first_bits), (other_id, other_bits) in zip(found[0], other, strict=True):
            assert (first_id == other_id) == (first_bits == other_bits)


# Followers of a leader


@pytest.mark.parametrize("depth", [1, 2])
def test_followers_do_not_walk_a_long_leader_s_keys_at_every_step(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 requests that waited for a chunked leader looked every published block up again in every step.

    A long prompt with many followers took quadratic time on the host. They now remember the block that they wait for.
    """
    num_blocks, followers = 100, 64
    scheduler, device = mock_device.setup(
        num_blocks + 4 * followers, 4, depth=depth, chunk_size=8, max_step_tokens=512, max_num_seqs=100
    )
    lookup, count = BlockPool.lookup, 0

    def counted(self: BlockPool, key: bytes) -> int | None:
        nonlocal count
        count += 1
        return lookup(self, key)

    monkeypatch.setattr(BlockPool, "lookup", counted)
    prompt = [(i * i) % 50 for i in range(4 * num_blocks)]
    arrivals = {0: [[mock_device.ask(f"r{i}", [*prompt, i % 50, i // 50], 3)] for i in range(1 + followers)]}
    counts: list[int] = []
    run = mock_device.drive(scheduler, device, arrivals, before_plan=lambda *_: counts.append(count))
    mock_device.verify(run, device.model)
    assert scheduler.counters.cached_tokens == 4 * num_blocks * followers
    assert sum(length == 8 for plan in run.plans for length in plan.lengths) >= 50, "the leader is chunked"
    assert counts[45] <= 2 * followers, "nothing is looked up while the leader computes"
    # Once at first, and once to take over what the leader has computed.
    assert count <= (followers + 1) * (num_blocks + 4)
