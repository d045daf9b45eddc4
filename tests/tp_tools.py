"""Engines over several ranks for tests: checkpoints of small models, a mixed workload, and what came of it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine_tools import Arrival, Result, drive
from paged import Engine, SamplingParams
from paged.core.model_spec import ModelSpec
from paged.kernels.numerics import Numerics
from paged.model.decoder import Decoder

VOCAB = 99
QWEN3 = ModelSpec(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    max_position_embeddings=128,
)
MISTRAL = replace(QWEN3, model_type="mistral", qk_norm="none", rope_theta=1e6)
SPECS = {"qwen3": QWEN3, "mistral": MISTRAL}
SMALL = {"device": "cpu", "block_size": 4, "num_blocks": 64, "max_num_seqs": 6, "max_step_tokens": 32}


def save_model(folder: Path, spec: ModelSpec = QWEN3, seed: int = 1) -> Path:
    """A checkpoint with random weights in fp32 whose logits spread over several units."""
    folder.mkdir(parents=True)
    config = {
        "model_type": spec.model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": spec.rms_norm_eps,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state_dict(spec, seed), folder / "model.safetensors")
    return folder


def state_dict(spec: ModelSpec = QWEN3, seed: int = 1) -> dict[str, torch.Tensor]:
    """The weights of ``save_model``."""
    weights = Decoder.random(spec, seed, numerics=Numerics(), dtype=torch.float32).tensors()
    weights["lm_head.weight"].mul_(4)
    return {name: tensor.clone() for name, tensor in weights.items()}


def workload(*, shared: int = 0, stop: Iterable[int] = ()) -> list[Arrival]:
    """Eight prompts that arrive over six steps: greedy, seeded, unseeded, truncated, with alternatives and scores.

    ``shared`` tokens begin every prompt; ``stop`` ends samples.
    """
    rng = random.Random(5)
    prefix = [rng.randrange(VOCAB) for _ in range(shared)]
    ends = tuple(stop)
    kinds = [
        SamplingParams(temperature=0, max_tokens=14, stop_token_ids=ends),
        SamplingParams(temperature=0.9, seed=3, max_tokens=12, stop_token_ids=ends),
        SamplingParams(temperature=1.0, max_tokens=11, stop_token_ids=ends),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=20, max_tokens=9, stop_token_ids=ends, n=2),
        SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0),
        SamplingParams(temperature=0, max_tokens=8, repetition_penalty=1.3, logit_bias={5: 2.0}),
        SamplingParams(temperature=0, max_tokens=14, stop_token_ids=ends),
    ]
    prompts = [prefix + [rng.randrange(VOCAB) for _ in range(rng.randint(2, 10))] for _ in kinds]
    made = zip(prompts, kinds, strict=True)
    return [Arrival(f"r{index}", prompt, params, at_step=index) for index, (prompt, params) in enumerate(made)]


@dataclass
class Came:
    """What came of a workload: each sample's output, and the scheduler's counts."""

    outputs: Result
    counters: dict[str, int]


def run(engine: Engine, arrivals: Iterable[Arrival]) -> Came:
    """Drive an engine through a workload; the counts are those of this workload alone."""
    before = asdict(engine.scheduler.counters)
    outputs = drive(engine, arrivals).outputs
    after = asdict(engine.scheduler.counters)
    peaks = {"peak_blocks"}
    return Came(outputs, {name: after[name] - (0 if name in peaks else before[name]) for name in after})


def tp_engine(folder: Path, tp: int, **fields: Any) -> Engine:
    """An engine over ``tp`` ranks on the CPU."""
    return Engine.from_pretrained(folder, tp=tp, **{**SMALL, **fields})


def pids(engine: Engine) -> list[int]:
    """The processes of ranks 1, 2, ..."""
    return [] if engine._leader is None else [process.pid for process in engine._leader.ranks.processes]


def is_there(pid: int) -> bool:
    """Whether a process runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and os.path.exists(f"/proc/{pid}")
