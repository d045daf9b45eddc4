"""Engines with random weights for benchmarks of bits, requests that come and go at their steps, and logits seen."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from engine_runs import build, drain, read_model

from paged import CompletionOutput, Engine, SamplingParams
from paged.core.model_spec import ModelSpec
from paged.core.plan import StepPlan

MAX_SEQ_LEN = 1024

Logits = dict[str, dict[int, torch.Tensor]]


def model_specs(small: bool) -> dict[str, ModelSpec]:
    """The models; for a CPU the same kinds with fewer and narrower layers."""

    def named(name: str, **sizes: Any) -> ModelSpec:
        spec = read_model(name)[1]
        assert spec is not None
        return replace(spec, eos_token_ids=(), **sizes)

    if not small:
        return {
            "Qwen3-0.6B": named("qwen3_0_6b"),
            "Qwen3-8B, 4 layers": named("qwen3_8b", num_layers=4),
            "OLMoE, 2 layers": named("olmoe", num_layers=2),
        }
    sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "head_dim": 16}
    heads = {"num_heads": 4, "num_kv_heads": 2}
    return {
        "Qwen3-0.6B, small": named("qwen3_0_6b", **sizes, **heads),
        "OLMoE, small": named("olmoe", **sizes, **heads, num_experts=8, num_experts_per_token=2),
    }


def build_random(spec: ModelSpec, device: str, **fields: Any) -> Engine:
    """An engine with the random bf16 weights that all engines of this spec have."""
    return build("random/model", spec, device=device, dtype="bfloat16", max_seq_len=MAX_SEQ_LEN, **fields)


def read_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command's options, with those that all benchmarks of bits have; says where it runs."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.small:
        torch.set_num_threads(1)
    print(f"{torch.cuda.get_device_name() if options.device == 'cuda' else 'cpu'}, torch {torch.__version__}")
    return options


@dataclass(frozen=True)
class Arrival:
    """A request and the steps before which it comes and, if it does, is aborted."""

    id: str
    prompt: list[int]
    params: SamplingParams
    at_step: int
    aborted_at: int | None = None


def serve(engine: Engine, arrivals: Sequence[Arrival], awaited: Sequence[str]) -> dict[str, CompletionOutput]:
    """Add requests at their steps and step until those awaited have finished; the others are aborted then."""
    waiting = sorted(arrivals, key=lambda arrival: arrival.at_step)
    aborts = sorted((a.aborted_at, a.id) for a in arrivals if a.aborted_at is not None)
    outputs: dict[str, CompletionOutput] = {}
    step = 0
    while not all(request_id in outputs for request_id in awaited):
        while waiting and waiting[0].at_step <= step:
            arrival = waiting.pop(0)
            engine.add_request(arrival.prompt, arrival.params, arrival.id)
        while aborts and aborts[0][0] <= step:
            outputs |= {output.request_id: output for output in engine.abort(aborts.pop(0)[1])}
        for update in engine.step():
            if update.output is not None:
                outputs[update.request_id] = update.output
        step += 1
        assert step < 20_000, "the engine does not come to an end"
    for arrival in arrivals:
        engine.abort(arrival.id)
    drain(engine)
    return outputs


@contextmanager
def observed_logits(engine: Engine, request_ids: Sequence[str]) -> Iterator[Logits]:
    """Collects the raw logits that requests' tokens are drawn from, by the position of the token.

    To be entered while the engine is idle, because slots are known from the plans that start them.
    """
    executor: Any = engine.executor
    logits: Logits = {request_id: {} for request_id in request_ids}
    slots: dict[int, str] = {}

    def observe(plan: StepPlan, rows: Sequence[int], logits_RV: torch.Tensor) -> None:
        slots.update((started.slot, started.request.id) for started in plan.started)
        for index, row in enumerate(rows):
            if (seen := logits.get(slots[plan.slots[row]])) is not None:
                seen[plan.starts[row] + plan.lengths[row]] = logits_RV[index].clone()

    executor.observe_logits = observe
    try:
        yield logits
    finally:
        executor.observe_logits = None
