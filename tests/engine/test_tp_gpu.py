"""Ranks on cards, a card each or sharing one: what one rank gives, graphs, a lost rank that hangs nobody."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
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
# Heads and widths that the kernels for cards take.
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_layers": 2}
SPEC = replace(QWEN3, **SIZES)
SPECS = {
    "qwen3": SPEC,
    "2 kv heads": replace(SPEC, num_kv_heads=2),
    "olmoe": replace(OLMOE, **{**SIZES, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 128}),
}
FIELDS: dict[str, Any] = {
    "device": "cuda",
    "num_blocks": 64,
    "max_num_seqs": 6,
    "max_step_tokens": 64,
    "tp_timeout_s": 20,
}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model", SPEC)


def engine_of(folder: Path, tp: int, **fields: Any) -> Engine:
    return Engine.from_pretrained(folder, tp=tp, **{**FIELDS, **fields})


def random_engine(spec: ModelSpec, tp: int, **fields: Any) -> Engine:
    named = {**FIELDS, "weights": "dummy", "dtype": "bfloat16", "k_segments": 4, **fields}
    return Engine.from_pretrained("random/weights", spec=spec, tp=tp, **named)


def test_two_ranks_give_what_one_gives(folder: Path) -> None:
    """fp32: decisions and tokens alike, log-probabilities to rounding; both ranks prove that their bits agree."""
    made = []
    for tp in (1, 2):
        engine = engine_of(folder, tp, dtype="float32")
        try:
            made.append(run(engine, workload()))
            part = engine.executor.cache.bytes_per_block * tp  # type: ignore[attr-defined]
            assert part == SPEC.num_layers * 2 * 4 * 64 * 16 * 4
            peaks = engine.peak_bytes_by_rank()
            assert len(peaks) == tp
            assert min(peaks) > 0
        finally:
            engine.close()
    one, two = made
    assert two.counters == one.counters
    for key, expected in one.outputs.items():
        output = two.outputs[key]
        assert output.token_ids == expected.token_ids, key
        assert max(abs(a - b) for a, b in zip(output.logprobs, expected.logprobs, strict=True)) < 1e-4, key


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
        outputs = run(engine, workload()).outputs
        assert len(graphs._graphs) > num_made, "steps with chunks are graphs, too"
        runner_of(engine).observe_logits = look
        engine.generate(PROMPTS, SamplingParams(max_tokens=4), use_tqdm=False)
    finally:
        engine.close()
    return outputs, seen


@pytest.mark.parametrize(
    ("name", "tp", "fields"),
    [
        ("qwen3", 2, {}),
        ("qwen3", 4, {}),
        ("qwen3", 4, {"depth": 1}),
        ("2 kv heads", 4, {}),
        ("olmoe", 2, {}),
    ],
)
def test_k_segments_make_ranks_agree_to_the_bit(name: str, tp: int, fields: dict[str, Any]) -> None:
    """Tokens, log-probabilities, alternatives, scores and whole rows of logits."""
    one, one_logits = outputs_and_logits(SPECS[name], 1)
    several, logits = outputs_and_logits(SPECS[name], tp, **fields)
    assert essences(several) == essences(one)
    assert len(logits) == len(one_logits) > 0
    assert all(torch.equal(a, b) for a, b in zip(logits, one_logits, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_do_not_hang_on_pool_and_chunks(folder: Path, dtype: str) -> None:
    made = []
    for fields in ({}, {"num_blocks": 8}, {"chunk_size": 3, "max_step_tokens": 8}):
        engine = engine_of(folder, 2, dtype=dtype, block_size=16, **fields)
        try:
            came = run(engine, workload())
            made.append(essences(came.outputs))
            if "num_blocks" in fields:
                assert came.counters["num_preemptions"] > 0
        finally:
            engine.close()
    assert made[0] == made[1] == made[2]


def test_new_weights_reach_all_ranks(folder: Path) -> None:
    engine, fresh = engine_of(folder, 2, dtype="float32"), engine_of(folder, 1, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=10)
    try:
        for each in (engine, fresh):
            each.load_weights({name: tensor.cuda() for name, tensor in state_dict(SPEC, 2).items()})
        made = [
            [result.outputs[0].token_ids for result in each.generate(PROMPTS, params, use_tqdm=False)]
            for each in (engine, fresh)
        ]
    finally:
        engine.close()
    assert made[0] == made[1]


def generate_for(engine: Engine, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        engine.generate(PROMPTS, SamplingParams(max_tokens=60), use_tqdm=False)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_hangs_nobody(number: signal.Signals) -> None:
    """Kernels wait for ever for a rank that is gone: rank 0 has to end them, and can go on with another engine."""
    engine = random_engine(SPEC, 2, tp_timeout_s=5)
    others = pids(engine)
    threading.Timer(0.5, os.kill, (others[0], number)).start()
    start_s = time.monotonic()
    with pytest.raises(TPError, match="rank 1"):
        generate_for(engine, 60)
    assert time.monotonic() - start_s < 20
    engine.close()
    assert not any(map(is_there, others))
    torch.cuda.synchronize()


def test_what_was_not_collected_does_not_hang_the_end() -> None:
    engine = random_engine(SPEC, 2)
    others = pids(engine)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, SamplingParams(max_tokens=60), f"r{number}")
    for _ in range(5):
        engine.step()
    engine.close()
    assert not any(map(is_there, others))
