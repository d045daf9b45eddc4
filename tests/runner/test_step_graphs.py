"""Steps padded to a graph's size give what plain steps give: on a CPU, kernels interpreted and nothing captured."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from engine_tools import SPEC, Arrival, drive, essences, make_engine, random_decoder, random_prompt, runner_of
from paged import Engine, SamplingParams
from paged.kernels import heads
from paged.kernels.attention_triton import attention_triton
from paged.kernels.kv_cache import LayerCache
from paged.kernels.kv_cache_triton import store_triton
from paged.model import layers
from paged.runner.step_graphs import StepGraphs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

# What the kernels take.
HALF_SPEC = replace(SPEC, head_dim=16, max_position_embeddings=512)


class PlainGraphs(StepGraphs):
    """Graphs that are not captured: each step does its work on the padded inputs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.keys: list[Hashable] = []

    def _run(self, key: Hashable, work: Callable[[], None]) -> None:
        self.keys.append(key)
        work()


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layers use the card's kernels, which are interpreted."""

    def store(cache: LayerCache, *rows: torch.Tensor) -> None:
        store_triton(cache.key, cache.value, *rows)

    monkeypatch.setattr(layers, "attention", attention_triton)
    monkeypatch.setattr(heads, "store", store)


def build(**settings: Any) -> Engine:
    decoder = random_decoder(dtype=torch.float16, spec=HALF_SPEC)
    return make_engine(decoder, **{"max_num_seqs": 6, "max_step_tokens": 40, "chunk_size": 24, **settings})


def with_graphs(**settings: Any) -> tuple[Engine, PlainGraphs]:
    engine = build(**settings)
    runner = runner_of(engine)
    runner.graphs = graphs = PlainGraphs(runner.decoder, runner.cache, runner.slots, 40)
    return engine, graphs


def arrivals(seed: int) -> list[Arrival]:
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
    made = [Arrival("long", random_prompt(rng, 250, 260), SamplingParams(max_tokens=30, seed=1))]
    for index, kind in enumerate(kinds):
        params = SamplingParams(max_tokens=rng.randint(2, 9), seed=index, **kind)
        made.append(Arrival(f"r{index}", random_prompt(rng), params, at_step=rng.randint(0, 8)))
    return made


@pytest.mark.parametrize(("depth", "num_blocks"), [(1, 200), (2, 200), (3, 80)])
def test_padded_steps_give_the_same_bits(depth: int, num_blocks: int) -> None:
    # The same plans on both sides: interpreted, a row's bits do hang on the tile that it lies in.
    plain = drive(build(depth=depth, num_blocks=num_blocks), arrivals(depth))
    engine, graphs = with_graphs(depth=depth, num_blocks=num_blocks)
    padded = drive(engine, arrivals(depth))
    assert essences(padded.outputs) == essences(plain.outputs)
    kinds = {key[0] for key in graphs.keys}  # type: ignore[index]
    assert kinds == {"compute", "sample"}
    has_chunks = {key[2] for key in graphs.keys if key[0] == "compute"}  # type: ignore[index]
    assert has_chunks == {False, True}
    has_splits = {key[3] for key in graphs.keys if key[0] == "compute"}  # type: ignore[index]
    assert has_splits == {False, True}
    assert len({key[1] for key in graphs.keys}) > 3, "steps of several sizes"  # type: ignore[index]
    if num_blocks < 200:
        assert engine.metrics()["preemptions"] > 0


def test_the_start_makes_the_graphs_of_usual_batches() -> None:
    """Rows about as long as each other are split where they are few: one launch more."""
    _, graphs = with_graphs()
    graphs.capture_decodes()
    assert graphs._most_split_rows == 1
    expected = [(size, False, size == 1) for size in (8, 4, 2, 1)]
    assert [key[1:] for key in graphs.keys if key[0] == "compute"] == expected  # type: ignore[index]
