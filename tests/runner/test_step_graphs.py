"""Steps padded to a graph's size give what plain steps give: on a CPU, kernels interpreted and nothing captured."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from engine_tools import (
    SPEC,
    VOCAB,
    Arrival,
    Drive,
    drive,
    essences,
    make_engine,
    random_prompt,
    runner_of,
    save_tokenizer,
)
from paged import CompletionOutput, Engine, SamplingParams
from paged.core.plan import StepPlan, StepResult
from paged.kernels import heads
from paged.kernels.attention_triton import attention_triton
from paged.kernels.kv_cache import LayerCache
from paged.kernels.kv_cache_triton import store_triton
from paged.kernels.numerics import Numerics
from paged.model import layers
from paged.model.decoder import Decoder
from paged.runner.step_graphs import StepGraphs
from paged.runner.text import Tokenizer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

# As small as the kernels take, since a program costs the interpreter milliseconds; short texts have two splits.
HALF_SPEC = replace(SPEC, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, max_position_embeddings=128)
NUMERICS = Numerics(kv_split=64)


class PlainGraphs(StepGraphs):
    """Graphs that are not captured: each step does its work on the padded inputs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.keys: list[Hashable] = []

    def _run(self, key: Hashable, work: Callable[[], None]) -> None:
        self.keys.append(key)
        work()

    @property
    def num_computed(self) -> int:
        """Steps whose network was run padded."""
        return sum(key[0] == "compute" for key in self.keys)  # type: ignore[index]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layers use the card's kernels, which are interpreted."""

    def store(cache: LayerCache, *rows: torch.Tensor) -> None:
        store_triton(cache.key, cache.value, *rows)

    monkeypatch.setattr(layers, "attention", attention_triton)
    monkeypatch.setattr(heads, "store", store)


def fresh_decoder(seed: int = 1) -> Decoder:
    """A model of a test's own, whose weights may be written to."""
    decoder = Decoder.random(HALF_SPEC, seed, numerics=NUMERICS, dtype=torch.float16)
    decoder.tensors()["lm_head.weight"].mul_(4)
    return decoder


def build(**settings: Any) -> Engine:
    decoder = fresh_decoder()
    return make_engine(decoder, **{"max_num_seqs": 6, "max_step_tokens": 40, "chunk_size": 24, **settings})


def with_graphs(**settings: Any) -> tuple[Engine, PlainGraphs]:
    engine = build(**settings)
    runner = runner_of(engine)
    max_step_tokens = engine.scheduler.config.max_step_tokens
    runner.graphs = graphs = PlainGraphs(runner.decoder, runner.cache, runner.slots, max_step_tokens)
    return engine, graphs


Prepare = Callable[[Engine], dict[str, Any]]


def drive_both(
    arrivals: Sequence[Arrival], prepare: Prepare = lambda engine: {}, **settings: Any
) -> tuple[Drive, Drive, PlainGraphs]:
    """The same requests in plain steps and in padded ones, which must have the same outputs.

    The plans are the same on both sides: interpreted, a row's bits do hang on the tile that it lies in.

    Args:
        arrivals: the requests.
        prepare: is given each engine first, and returns further arguments of ``drive``.
        settings: of both engines.
    """
    engine = build(**settings)
    plain = drive(engine, arrivals, **prepare(engine))
    engine, graphs = with_graphs(**settings)
    padded = drive(engine, arrivals, **prepare(engine))
    assert essences(padded.outputs) == essences(plain.outputs)
    assert padded.num_steps == plain.num_steps
    assert graphs.num_computed > 5
    return plain, padded, graphs


def mixed(seed: int) -> list[Arrival]:
    """Requests of all kinds, a few at a time; the first is so long that it has two splits."""
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_p": 0.7, "min_p": 0.05},
        {"top_k": 5},
        {"presence_penalty": 0.9, "repetition_penalty": 1.2},
        {"logprobs": 3},
        {"prompt_logprobs": 0, "logit_bias": {5: 2.0}},
    ]
    made = [Arrival("long", random_prompt(rng, 58, 62), SamplingParams(max_tokens=12, seed=1))]
    for index, kind in enumerate(kinds):
        params = SamplingParams(max_tokens=rng.randint(2, 9), seed=index, **kind)
        made.append(Arrival(f"r{index}", random_prompt(rng, 2, 20), params, at_step=rng.randint(0, 6)))
    return made


@pytest.mark.parametrize(("depth", "num_blocks"), [(1, 200), (2, 200), (3, 22)])
def test_padded_steps_give_the_same_bits(depth: int, num_blocks: int) -> None:
    engines: list[Engine] = []

    def keep(engine: Engine) -> dict[str, Any]:
        engines.append(engine)
        return {}

    _, _, graphs = drive_both(mixed(depth), keep, depth=depth, num_blocks=num_blocks)
    kinds = {key[0] for key in graphs.keys}  # type: ignore[index]
    assert kinds == {"compute", "sample"}
    has_chunks = {key[2] for key in graphs.keys if key[0] == "compute"}  # type: ignore[index]
    assert has_chunks == {False, True}
    has_splits = {key[3] for key in graphs.keys if key[0] == "compute"}  # type: ignore[index]
    assert has_splits == {False, True}
    assert len({key[1] for key in graphs.keys}) > 3, "steps of several sizes"  # type: ignore[index]
    if num_blocks < 200:
        assert engines[1].metrics()["preemptions"] > 0


def test_the_start_makes_the_graphs_of_usual_batches() -> None:
    """Rows about as long as each other are split where they are few: one launch more."""
    _, graphs = with_graphs()
    graphs.capture_decodes()
    assert graphs._most_split_rows == 2
    expected = [
        (8, False, False),
        (8, False, True),
        (4, False, False),
        (4, False, True),
        (2, False, True),
        (1, False, True),
    ]
    assert [key[1:] for key in graphs.keys if key[0] == "compute"] == expected  # type: ignore[index]


@pytest.mark.parametrize(("num_slots", "max_seq_len", "num_blocks"), [(40, 20, 200), (24, None, 4)])
def test_graphs_of_decodes_are_made_at_position_0(
    num_slots: int, max_seq_len: int | None, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of the padding's slot was written where positions go: beyond the tables if slots are more than these.

    A small pool has few positions, too. Nothing but the padding's own row of the tables may be written to.
    """
    settings = {"max_num_seqs": num_slots, "max_seq_len": max_seq_len, "num_blocks": num_blocks}
    engine, graphs = with_graphs(**settings)
    runner = runner_of(engine)
    assert runner.slots.tokens_SP.shape[1] <= num_slots, "fewer positions than slots"
    fed: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    forward = runner.decoder.forward

    def record(token_T: torch.Tensor, layout: Any, cache: Any) -> torch.Tensor:
        fed.append((len(token_T), layout.positions_T.clone(), layout.cells_T.clone()))
        return forward(token_T, layout, cache)

    monkeypatch.setattr(runner.decoder, "forward", record)
    with torch.inference_mode():
        graphs.capture_decodes()
    sizes = {40: [48, 32, 16, 8, 4, 2, 1], 24: [32, 16, 8, 4, 2, 1]}[num_slots]
    assert list(dict.fromkeys(size for size, _, _ in fed)) == sizes
    for _, position_T, cell_T in fed:
        assert position_T.tolist() == [0] * len(position_T)
        assert cell_T.tolist() == [-1] * len(cell_T)
    assert not runner.slots.tokens_SP[:num_slots].any()
    assert all(tensor.isnan().all() for layer in runner.cache.layers for tensor in (layer.key, layer.value))


# What is not finite

SICK = VOCAB - 1


def sicken(engine: Engine, fault: str) -> dict[str, Any]:
    """Plant something that is not finite; what ``drive`` needs to go on after it.

    ``embedding``: NaN for one token, which reaches the hidden states of prompts that hold it.
    ``cache``: NaN in what is kept of the request ``long``.
    ``head``: infinite logits for one token, of those hidden states that lie on one side; the states are sound.
    """
    runner = runner_of(engine)
    if fault == "embedding":
        runner.decoder.tensors()["model.embed_tokens.weight"][SICK] = torch.nan
    elif fault == "head":
        runner.decoder.tensors()["lm_head.weight"][SICK, 3] = torch.inf

    def before_step(number: int) -> None:
        if fault == "cache" and number == 8:
            slots = runner.slots
            (slot,) = (s for s in range(slots.num_slots) if slots._states[s] and slots.state(s).request.id == "long")
            runner.cache.layers[0].value[int(slots.blocks_SN[slot, 0]), 0] = torch.nan

    return {"before_step": before_step, "step": engine.run_step}


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("fault", ["embedding", "cache", "head"])
def test_rows_that_are_not_finite_are_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same step as without graphs: also a chunk that ends before its prompt's end, of which nothing is drawn."""
    named: list[list[tuple[int, Sequence[int]]]] = []

    def prepare(engine: Engine) -> dict[str, Any]:
        seen: list[tuple[int, Sequence[int]]] = []
        named.append(seen)
        collect = runner_of(engine).collect

        def keep() -> StepResult:
            result = collect()
            seen.append((result.step, result.nan_rows))
            return result

        monkeypatch.setattr(runner_of(engine), "collect", keep)
        return sicken(engine, fault)

    rng = random.Random(4)
    params = SamplingParams(max_tokens=9, seed=1)
    requests = [Arrival("long", random_prompt(rng, 50, 50, vocab=SICK), params)]
    for index in range(5):
        prompt = random_prompt(rng, 2, 9, vocab=SICK)
        requests.append(Arrival(f"r{index}", prompt, replace(params, max_tokens=1 + index // 2), at_step=2 * index))
    if fault == "embedding":
        requests[3] = replace(requests[3], prompt=[*range(6), SICK, *range(45)])
    _, padded, _ = drive_both(requests, prepare, depth=2)
    assert named[0] == named[1]
    failed = {key[0] for key, output in padded.outputs.items() if output.finish_reason == "error"}
    if fault == "head":
        assert 0 < len(failed) < len(requests)
    else:
        assert failed == {"r2" if fault == "embedding" else "long"}
    assert all(output.finish_reason == "length" for key, output in padded.outputs.items() if key[0] not in failed)


# Off the beaten path


def test_steps_with_more_work_than_a_graph_holds_are_launched_plainly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost on the way from one path to the other and back, and the log says it once."""
    went: list[bool] = []

    def prepare(engine: Engine) -> dict[str, Any]:
        graphs = runner_of(engine).graphs
        if graphs is not None:
            compute = graphs.compute

            def record(plan: StepPlan, rows: Sequence[int]) -> bool:
                went.append(compute(plan, rows))
                return went[-1]

            monkeypatch.setattr(graphs, "_most_items", 4)
            monkeypatch.setattr(graphs, "compute", record)
        return {}

    with caplog.at_level(logging.WARNING, "paged.runner.step_graphs"):
        drive_both(mixed(5), prepare, depth=2)
    assert {(True, False), (False, True)} <= set(itertools.pairwise(went)), "there and back"
    (record,) = caplog.records
    assert record.getMessage() == "steps are launched one by one while their attention is more than 4 pieces of work"


def test_an_observer_of_logits_sees_those_of_plain_steps() -> None:
    seen: list[list[tuple[int, list[int], torch.Tensor]]] = []

    def prepare(engine: Engine) -> dict[str, Any]:
        mine: list[tuple[int, list[int], torch.Tensor]] = []
        seen.append(mine)

        def observe(plan: StepPlan, rows: Sequence[int], logits_RV: torch.Tensor) -> None:
            mine.append((plan.step, list(rows), logits_RV.clone()))

        runner_of(engine).observe_logits = observe
        return {}

    drive_both(mixed(6), prepare, depth=2)
    plain, padded = seen
    assert [(step, rows) for step, rows, _ in padded] == [(step, rows) for step, rows, _ in plain]
    assert len(plain) > 10
    for (_, rows, ours_RV), (_, _, theirs_RV) in zip(padded, plain, strict=True):
        assert ours_RV.shape == (len(rows), VOCAB)
        assert torch.equal(ours_RV, theirs_RV)


class PlantedError(Exception):
    """What these tests let fail."""


class Storm:
    """What happens to an engine beside its requests: aborts, new weights, and errors in submitting and collecting.

    Attributes:
        log: what happened, by the number of plans submitted before.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, int]] = []
        self._engine = engine
        self._num_submitted = 0
        runner = runner_of(engine)
        # In a step that was handed over, in its middle, and on the way back.
        self._errors = {"apply": 4, "logits": 9, "_result": 14}
        for owner, name in ((runner.slots, "apply"), (runner.decoder, "logits"), (runner, "_result")):
            monkeypatch.setattr(owner, name, self._failing(name, getattr(owner, name)))

    def _failing(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            self._num_submitted += name == "apply"
            result = method(*args)
            if self._errors.get(name, 1000) <= self._num_submitted:
                del self._errors[name]
                self.log.append((name, self._num_submitted))
                raise PlantedError
            return result

        return called

    def step(self) -> list[Any]:
        try:
            return self._engine.step()
        except PlantedError:
            return []

    def before_step(self, number: int) -> list[CompletionOutput]:
        if number == 7:
            weights = {name: tensor.clone() for name, tensor in fresh_decoder(2).tensors().items()}
            self._engine.load_weights(weights)
            self.log.append(("load", self._num_submitted))
        return self._engine.abort({5: "long", 11: "r6"}.get(number, "nobody"))


@pytest.mark.parametrize(("depth", "num_blocks"), [(1, 200), (2, 30), (3, 200)])
def test_stops_aborts_new_weights_and_errors(
    depth: int, num_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends or disturbs a step, what padded steps go on with is what plain ones do."""
    storms: list[Storm] = []

    def prepare(engine: Engine) -> dict[str, Any]:
        storms.append(Storm(engine, monkeypatch))
        return {"before_step": storms[-1].before_step, "step": storms[-1].step}

    rng = random.Random(depth)
    tokens, texts = list(range(0, VOCAB, 4)), [chr(letter) for letter in range(36, 126, 4)]
    kinds: list[dict[str, Any]] = [
        {"stop_token_ids": tokens, "temperature": 1.5},
        {"stop": texts, "temperature": 1.5},
        {"n": 2, "stop_token_ids": tokens[:6]},
        {"stop": texts[:6], "frequency_penalty": 0.5},
        {"temperature": 0.0, "stop_token_ids": tokens[:6]},
        {"logprobs": 2, "top_p": 0.8, "stop": texts},
        {"max_tokens": 30},
    ]
    requests = [Arrival("long", random_prompt(rng, 30, 40), SamplingParams(max_tokens=30, seed=9))]
    for index, kind in enumerate(kinds):
        params = SamplingParams(**{"max_tokens": 14, "seed": index, **kind})
        requests.append(Arrival(f"r{index}", random_prompt(rng, 2, 12), params, at_step=index))
    tokenizer = Tokenizer(save_tokenizer(tmp_path / "tokenizer"))
    plain, _, _ = drive_both(requests, prepare, depth=depth, num_blocks=num_blocks, tokenizer=tokenizer)
    assert storms[0].log == storms[1].log
    assert {name for name, _ in storms[0].log} == {"load", "apply", "logits", "_result"}
    reasons = Counter(output.finish_reason for output in plain.outputs.values())
    assert reasons["abort"] >= 1
    stops = {type(output.stop_reason) for output in plain.outputs.values() if output.finish_reason == "stop"}
    assert stops == {int, str}
