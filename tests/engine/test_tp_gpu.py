"""Two cards: what one gives, the same bits on both, a lost rank that hangs nobody. Needs two GPUs and NCCL."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_tools import essences
from paged import Engine, SamplingParams
from paged.core.agreement import TPError
from tp_tools import QWEN3, is_there, pids, run, save_model, state_dict, workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
# Heads and widths that the kernels for cards take.
SPEC = replace(QWEN3, hidden_size=512, intermediate_size=1024, head_dim=64, num_layers=4)
FIELDS: dict[str, Any] = {"device": "cuda", "num_blocks": 64, "max_num_seqs": 6, "max_step_tokens": 64}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model", SPEC)


def engine_of(folder: Path, tp: int, **fields: Any) -> Engine:
    return Engine.from_pretrained(folder, tp=tp, **{**FIELDS, **fields})


def test_two_cards_give_what_one_gives(folder: Path) -> None:
    """fp32: decisions and tokens alike, log-probabilities to rounding; both ranks prove that their bits agree."""
    made = []
    for tp in (1, 2):
        engine = engine_of(folder, tp, dtype="float32")
        try:
            made.append(run(engine, workload()))
            part = engine.executor.cache.bytes_per_block * tp  # type: ignore[attr-defined]
            assert part == 4 * 2 * 4 * 64 * 16 * 4
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


def test_new_weights_reach_both_cards(folder: Path) -> None:
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
def test_a_rank_that_is_lost_hangs_nobody(folder: Path, number: signal.Signals) -> None:
    """Kernels of NCCL wait for ever for a rank that is gone: rank 0 has to end them."""
    engine = engine_of(folder, 2, tp_timeout_s=5)
    others = pids(engine)
    threading.Timer(0.5, os.kill, (others[0], number)).start()
    start_s = time.monotonic()
    with pytest.raises(TPError, match="rank 1"):
        generate_for(engine, 60)
    assert time.monotonic() - start_s < 20
    engine.close()
    assert not any(map(is_there, others))


def test_more_ranks_than_cards_are_one_sentence(folder: Path) -> None:
    if torch.cuda.device_count() >= 4:
        pytest.skip("needs fewer than four GPUs")
    with pytest.raises(ValueError, match=r"^tp must be at most the number of GPUs here, \d, not 4; or use device=cpu$"):
        engine_of(folder, 4)
