"""Ranks on cards, a card each or sharing one: what one rank gives, graphs, a lost rank that hangs nobody.

On one card ranks take turns, some milliseconds an exchange, each kind of model builds kernels of its own, and each rank
is a process that has to start: engines are few, models and steps small, texts short.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from card_tools import needs_card
from engine_tools import essences, runner_of
from paged import Engine, SamplingParams
from paged.core.agreement import TPError
from paged.core.model_spec import ModelSpec
from paged.core.plan import StepPlan
from parallel_tools import OLMOE
from tp_tools import QWEN3, Came, is_there, pids, run, save_model, state_dict, workload

pytestmark = [pytest.mark.gpu, needs_card]
# Heads and widths that the kernels for cards take. Of four ranks each pair has a copy of a key/value head.
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_layers": 2}
SPEC = replace(QWEN3, **{**SIZES, "num_kv_heads": 2})
WITH_EXPERTS = replace(OLMOE, **{**SIZES, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 256})
FIELDS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "k_segments": 4,
    "num_blocks": 64,
    "max_num_seqs": 6,
    "max_step_tokens": 16,
    "tp_timeout_s": 20,
}
TIGHT: dict[str, Any] = {"num_blocks": 4, "max_seq_len": 32, "chunk_size": 3, "max_step_tokens": 8, "depth": 1}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 6]


@dataclass
class Made:
    """What an engine made of the workload, and the raw logits of a few texts' steps."""

    came: Came
    logits: list[torch.Tensor] = field(default_factory=list)


def made_by(engine: Engine) -> Made:
    """What an engine makes, by graphs; and the logits where those are looked at."""
    graphs = runner_of(engine).graphs
    assert graphs is not None
    num_graphs = len(graphs._graphs)
    made = Made(run(engine, workload()))
    assert len(graphs._graphs) > num_graphs, "steps with chunks are graphs, too"

    def look(plan: StepPlan, rows: Sequence[int], logits_RV: torch.Tensor) -> None:
        made.logits.append(logits_RV.cpu())

    runner_of(engine).observe_logits = look
    engine.generate(PROMPTS, SamplingParams(max_tokens=3), use_tqdm=False)
    runner_of(engine).observe_logits = None
    assert made.logits
    return made


def generate_for(engine: Engine, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        engine.generate(PROMPTS, SamplingParams(max_tokens=24), use_tqdm=False)


def lose_a_rank(engine: Engine, number: signal.Signals) -> None:
    """Kernels wait for ever for a rank that is gone: rank 0 has to end them, and can go on with its card."""
    assert engine._leader is not None
    engine._leader._limit_s = engine._leader._watch._limit_s = 4.0
    others = pids(engine)
    threading.Timer(0.5, os.kill, (others[-1], number)).start()
    start_s = time.monotonic()
    with pytest.raises(TPError, match=f"rank {len(others)}"):
        generate_for(engine, 20)
    assert time.monotonic() - start_s < 20
    engine.close()
    assert not any(map(is_there, others))
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """Engines of random weights by model, number of ranks and fields; all are closed in the end."""
    folder: Path = save_model(tmp_path_factory.mktemp("model") / "model", SPEC)
    with ExitStack() as stack:

        def call(spec: ModelSpec, tp: int, **fields: Any) -> Engine:
            named = {**FIELDS, "tp": tp, **fields}
            if spec is SPEC:
                engine = Engine.from_pretrained(folder, **named)
            else:
                engine = Engine.from_pretrained("random/weights", spec=spec, weights="dummy", **named)
            stack.callback(engine.close)
            return engine

        yield call


@pytest.fixture(scope="module")
def of_one_rank(make: Callable[..., Engine]) -> tuple[Engine, Made]:
    """One rank's engine, and what it makes."""
    engine = make(SPEC, 1)
    return engine, made_by(engine)


@pytest.fixture(scope="module")
def two_ranks(make: Callable[..., Engine]) -> Iterator[Engine]:
    """In the end they are closed with steps that nobody collects."""
    engine = make(SPEC, 2)
    yield engine
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, SamplingParams(max_tokens=30), f"r{number}")
    for _ in range(5):
        engine.step()
    others = pids(engine)
    engine.close()
    assert not any(map(is_there, others))


def check_equal(several: Made, one: Made) -> None:
    """Tokens, log-probabilities, alternatives, scores, decisions and whole rows of logits, to the bit."""
    assert essences(several.came.outputs) == essences(one.came.outputs)
    assert several.came.counters == one.came.counters
    assert len(several.logits) == len(one.logits)
    assert all(torch.equal(a, b) for a, b in zip(several.logits, one.logits, strict=True))


def test_k_segments_make_two_ranks_agree_with_one_to_the_bit(
    two_ranks: Engine, of_one_rank: tuple[Engine, Made]
) -> None:
    one, made = of_one_rank
    check_equal(made_by(two_ranks), made)
    for engine, tp in ((one, 1), (two_ranks, 2)):
        part = engine.executor.cache.bytes_per_block * tp  # type: ignore[attr-defined]
        assert part == SPEC.num_layers * 2 * SPEC.num_kv_heads * 64 * 16 * 2
        peaks = engine.peak_bytes_by_rank()
        assert len(peaks) == tp
        assert min(peaks) > 0


def test_four_ranks_agree_with_one_and_lose_one(make: Callable[..., Engine], of_one_rank: tuple[Engine, Made]) -> None:
    """With chunks and a pool of their own."""
    several = make(SPEC, 4, **TIGHT)
    came = made_by(several).came
    assert came.counters["num_preemptions"] > 0
    assert essences(came.outputs) == essences(of_one_rank[1].came.outputs)
    lose_a_rank(several, signal.SIGKILL)


def test_new_weights_reach_all_ranks(two_ranks: Engine, of_one_rank: tuple[Engine, Made]) -> None:
    """Afterwards the engines have the weights again that they were made with: other tests use them, too."""
    engines = of_one_rank[0], two_ranks
    params = SamplingParams(temperature=0, max_tokens=10)

    def load(seed: int) -> None:
        for engine in engines:
            engine.load_weights({name: tensor.cuda() for name, tensor in state_dict(SPEC, seed).items()})

    def texts() -> list[list[list[int]]]:
        results = [engine.generate(PROMPTS, params, use_tqdm=False) for engine in engines]
        return [[result.outputs[0].token_ids for result in of_engine] for of_engine in results]

    own = texts()
    try:
        load(2)
        others = texts()
    finally:
        load(1)
    assert own[0] == own[1]
    assert others[0] == others[1]
    assert own != others
    assert texts() == own


def test_without_segments_two_ranks_with_experts_agree_with_each_other_and_lose_one(
    make: Callable[..., Engine],
) -> None:
    """What they say of every step is compared."""
    several = make(WITH_EXPERTS, 2, k_segments=1, numerics="fast")
    assert runner_of(several).graphs is not None
    outputs = run(several, workload()).outputs
    assert all(output.token_ids for output in outputs.values())
    lose_a_rank(several, signal.SIGSTOP)
