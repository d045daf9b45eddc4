"""Ranks on cards, a card each or sharing one: what one rank gives, graphs, a lost rank that hangs nobody.

On one card ranks take turns, some milliseconds an exchange, and each kind of model builds kernels of its own: models
are few and small, texts short.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_tools import Result, essences, runner_of
from paged import Engine, SamplingParams
from paged.core.agreement import TPError
from paged.core.model_spec import ModelSpec
from paged.core.plan import StepPlan
from parallel_tools import OLMOE
from tp_tools import QWEN3, is_there, pids, run, save_model, state_dict, workload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")]
# Heads and widths that the kernels for cards take. Of four ranks each pair has a copy of a key/value head.
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_layers": 2}
SPEC = replace(QWEN3, **{**SIZES, "num_kv_heads": 2})
SPECS = {
    "qwen3": SPEC,
    "olmoe": replace(OLMOE, **{**SIZES, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 256}),
}
FIELDS: dict[str, Any] = {
    "device": "cuda",
    "num_blocks": 64,
    "max_num_seqs": 6,
    "max_step_tokens": 64,
    "tp_timeout_s": 20,
}
TIGHT: dict[str, Any] = {"num_blocks": 4, "max_seq_len": 32, "chunk_size": 3, "max_step_tokens": 8, "depth": 1}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 6]


def random_engine(spec: ModelSpec, tp: int, **fields: Any) -> Engine:
    named = {**FIELDS, "weights": "dummy", "dtype": "bfloat16", "k_segments": 4, **fields}
    return Engine.from_pretrained("random/weights", spec=spec, tp=tp, **named)


def outputs_and_logits(spec: ModelSpec, tp: int, **fields: Any) -> tuple[Result, list[torch.Tensor]]:
    """What the workload gives by graphs; then raw logits of a few texts, which are looked at."""
    engine = random_engine(spec, tp, **fields)
    seen: list[torch.Tensor] = []

    def look(plan: StepPlan, rows: Sequence[int], logits_RV: torch.Tensor) -> None:
        seen.append(logits_RV.cpu())

    try:
        graphs = runner_of(engine).graphs
        assert graphs is not None
        num_made = len(graphs._graphs)
        came = run(engine, workload())
        assert len(graphs._graphs) > num_made, "steps with chunks are graphs, too"
        if fields == TIGHT:
            assert came.counters["num_preemptions"] > 0
            return came.outputs, seen
        runner_of(engine).observe_logits = look
        engine.generate(PROMPTS, SamplingParams(max_tokens=3), use_tqdm=False)
        assert seen
    finally:
        engine.close()
    return came.outputs, seen


@cache
def of_one_rank(name: str) -> tuple[Result, list[torch.Tensor]]:
    return outputs_and_logits(SPECS[name], 1)


@pytest.mark.parametrize(
    ("name", "tp", "fields"),
    [("qwen3", 2, {}), ("qwen3", 2, TIGHT), ("qwen3", 4, {}), ("olmoe", 2, {})],
    ids=["2", "tight pool", "4", "olmoe"],
)
def test_k_segments_make_ranks_agree_to_the_bit(name: str, tp: int, fields: dict[str, Any]) -> None:
    """Tokens, log-probabilities, alternatives, scores and whole rows of logits, whatever the pool and the chunks.

    Rows of logits come step by step, and a tight pool has steps of its own.
    """
    one, one_logits = of_one_rank(name)
    several, logits = outputs_and_logits(SPECS[name], tp, **fields)
    assert essences(several) == essences(one)
    if fields != TIGHT:
        assert len(logits) == len(one_logits)
        assert all(torch.equal(a, b) for a, b in zip(logits, one_logits, strict=True))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """One rank and two with a checkpoint in fp32; in the end the two are closed with steps that nobody collects."""
    folder: Path = save_model(tmp_path_factory.mktemp("model") / "model", SPEC)
    one, two = (Engine.from_pretrained(folder, tp=tp, dtype="float32", **FIELDS) for tp in (1, 2))
    try:
        yield one, two
        for number, prompt in enumerate(PROMPTS):
            two.add_request(prompt, SamplingParams(max_tokens=30), f"r{number}")
        for _ in range(5):
            two.step()
    finally:
        others = pids(two)
        two.close()
        assert not any(map(is_there, others))


def test_two_ranks_give_what_one_gives(engines: tuple[Engine, Engine]) -> None:
    """fp32: decisions and tokens alike, log-probabilities to rounding; both ranks prove that their bits agree."""
    one, two = (run(engine, workload()) for engine in engines)
    assert two.counters == one.counters
    for key, expected in one.outputs.items():
        output = two.outputs[key]
        assert output.token_ids == expected.token_ids, key
        assert max(abs(a - b) for a, b in zip(output.logprobs, expected.logprobs, strict=True)) < 1e-4, key
    for engine, tp in zip(engines, (1, 2), strict=True):
        part = engine.executor.cache.bytes_per_block * tp  # type: ignore[attr-defined]
        assert part == SPEC.num_layers * 2 * SPEC.num_kv_heads * 64 * 16 * 4
        peaks = engine.peak_bytes_by_rank()
        assert len(peaks) == tp
        assert min(peaks) > 0


def test_new_weights_reach_all_ranks(engines: tuple[Engine, Engine]) -> None:
    params = SamplingParams(temperature=0, max_tokens=10)
    made = []
    for seed in (1, 2):
        for engine in engines:
            engine.load_weights({name: tensor.cuda() for name, tensor in state_dict(SPEC, seed).items()})
            results = engine.generate(PROMPTS, params, use_tqdm=False)
            made.append([result.outputs[0].token_ids for result in results])
    assert made[0] == made[1]
    assert made[2] == made[3]
    assert made[0] != made[2]


def generate_for(engine: Engine, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        engine.generate(PROMPTS, SamplingParams(max_tokens=60), use_tqdm=False)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_hangs_nobody(number: signal.Signals) -> None:
    """Kernels wait for ever for a rank that is gone: rank 0 has to end them, and can go on with its card."""
    engine = random_engine(SPEC, 2, tp_timeout_s=4)
    others = pids(engine)
    threading.Timer(0.5, os.kill, (others[0], number)).start()
    start_s = time.monotonic()
    with pytest.raises(TPError, match="rank 1"):
        generate_for(engine, 60)
    assert time.monotonic() - start_s < 20
    engine.close()
    assert not any(map(is_there, others))
    assert torch.ones(3, device="cuda").sum().item() == 3
