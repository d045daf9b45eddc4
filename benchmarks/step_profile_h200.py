"""Where a decode step's time goes on one card: kernels by kind against floors, gaps, and the host.

    python benchmarks/step_profile_h200.py [--model qwen3_8b] [--numerics invariant] [--batches 64,256] [--set depth=1]
        [--prefill]
    python benchmarks/step_profile_h200.py --device cpu --model tiny --small

Sequences with about 1,024 tokens and random weights decode steadily. Five steps are profiled for the table of kernels,
whose kind is told by the module that defines them; a floor is the least bytes that must be moved over 4.2 TB/s. Then
200 steps are timed by phase of the host, and 200 more are run under cProfile, which slows them. With ``--prefill`` a
step full of prompts of 1,024 tokens is profiled as well.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from engine_runs import StepWatch, abort_all, build, decode_steadily, random_prompts, read_model, timed_steps
from settings import setting
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from paged import Engine, SamplingParams
from paged.core.model_spec import ModelSpec
from paged.model.locate import find_model

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
BANDWIDTH = 4.2e12  # bytes a second that a kernel which only reads was seen to reach
CONTEXT = 1024
NUM_PROFILED = 5
NUM_TIMED = 200
NUM_LISTED = 15
KINDS = ("gemm", "attention", "rowwise", "exchange", "sampling", "copies", "other")
# Modules of kernels by the kind of what they compute.
MODULES = {
    "gemm": ("gemm", "gemm_hopper", "moe_triton"),
    "attention": (
        "attention_hopper",
        "attention_hopper_decode",
        "attention_hopper_fold",
        "attention_triton",
        "kv_cache_triton",
    ),
    "rowwise": ("rowwise_triton",),
    "exchange": ("peers_triton",),
    "sampling": ("sampling_triton", "sampling_cut_triton", "sampling_adjust_triton"),
    "other": ("step_rows_triton",),
}
# Kernels of libraries, by a part of their names.
LIBRARIES = {
    "gemm": ("gemm", "nvjet", "cutlass", "splitk", "gemv"),
    "copies": ("memcpy", "memset", "copy", "cat", "index", "gather", "scatter", "fill", "arange"),
}


def kinds_by_name() -> dict[str, str]:
    """The kind of each compiled function of the repository, by its name; where modules share one, all their kinds."""
    kinds: dict[str, set[str]] = {}
    for kind, modules in MODULES.items():
        for module in modules:
            source = (KERNELS / f"{module}.py").read_text(encoding="utf-8")
            for name in re.findall(r"^@(?:triton|gluon)\.jit.*\n(?:@.*\n)*def (\w+)\(", source, re.MULTILINE):
                kinds.setdefault(name, set()).add(kind)
    return {name: "/".join(sorted(of)) for name, of in kinds.items()}


def kind_of(name: str, own: dict[str, str]) -> str:
    """The kind of a kernel, the repository's ``own`` or a library's."""
    if name in own:
        return own[name]
    lower = name.lower()
    return next((kind for kind, parts in LIBRARIES.items() if any(part in lower for part in parts)), "other")


def floors_us(spec: ModelSpec, batch: int, context: int) -> dict[str, float]:
    """Microseconds that a decode step's bf16 traffic takes at ``BANDWIDTH``: weights, cache, activations, logits."""
    embedding = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size
    # Sum and norm read and write two rows each, twice a layer; heads are normed in place; gate and up make one row.
    row = spec.num_layers * (8 * spec.hidden_size + 2 * (spec.q_size + spec.kv_size) + 3 * spec.intermediate_size)
    of = {
        "gemm": 2 * (spec.num_parameters() - embedding),
        "attention": batch * context * spec.kv_bytes_per_token(2),
        "rowwise": 2 * batch * row,
        "sampling": 4 * batch * spec.vocab_size,
    }
    return {kind: size / BANDWIDTH * 1e6 for kind, size in of.items()}


Span = tuple[str, float, float]


def profiled_spans(engine: Engine, device: str) -> list[Span]:
    """Name, start and end (us) of every kernel of some steps, by start; on a CPU of every operation without others.

    What is in flight has ended at either end, so that these are the kernels of just so many steps.
    """
    on_card = device == "cuda"
    # The first profile of a process sets up what the others find there.
    for num_steps in (1, NUM_PROFILED):
        if on_card:
            torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA if on_card else ProfilerActivity.CPU]) as profiler:
            for _ in range(num_steps):
                engine.step()
            if on_card:
                torch.cuda.synchronize()
    wanted = DeviceType.CUDA if on_card else DeviceType.CPU
    events: Any = profiler.events()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == wanted and not event.cpu_children
    ]
    return sorted(spans, key=lambda span: span[1])


def prefill_spans(engine: Engine, length: int) -> list[Span]:
    """As ``profiled_spans``, of a step that computes nothing but prompts of ``length`` tokens."""
    limits = engine.scheduler.config
    assert limits.vocab_size is not None
    count = min(limits.max_num_seqs, limits.max_step_tokens // length)
    for name in ("warm", "again", "profiled"):
        for prompt in random_prompts(f"prefill {name}", count, length, limits.vocab_size):
            engine.add_request(prompt, SamplingParams(max_tokens=1))
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            while engine.has_unfinished:
                engine.step()
            torch.cuda.synchronize()
    events: Any = profiler.events()
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in events if e.device_type == DeviceType.CUDA]
    return sorted(spans, key=lambda span: span[1])


def gaps_us(spans: Sequence[Span]) -> float:
    """Time between the first start and the last end in which nothing ran."""
    total, reached = 0.0, spans[0][1]
    for _, start, end in spans:
        total += max(0.0, start - reached)
        reached = max(reached, end)
    return total


def kernel_rows(spans: Sequence[Span], floors: dict[str, float], num_steps: int) -> Iterator[str]:
    """The table of kinds, microseconds a step, and a line for the largest kernels of each."""
    own = kinds_by_name()
    by_name: dict[str, dict[str, float]] = {}
    counts = Counter(kind_of(name, own) for name, _, _ in spans)
    for name, start, end in spans:
        of_kind = by_name.setdefault(kind_of(name, own), {})
        of_kind[name] = of_kind.get(name, 0.0) + end - start
    yield "| kind | kernels a step | us a step | floor us | floor/us | largest |"
    yield "|---|---|---|---|---|---|"
    for kind in (*KINDS, *sorted(by_name.keys() - set(KINDS))):
        times = sorted(by_name.get(kind, {}).items(), key=lambda item: item[1], reverse=True)
        us, floor = sum(time_us for _, time_us in times) / num_steps, floors.get(kind, 0.0)
        share = f"{floor / us:.0%}" if floor and us else ""
        largest = "; ".join(f"{name[:40]} {time_us / num_steps:.0f}" for name, time_us in times[:3])
        yield f"| {kind} | {counts[kind] / num_steps:.0f} | {us:.1f} | {floor:.0f} | {share} | {largest} |"
    busy, floor = sum(end - start for _, start, end in spans) / num_steps, sum(floors.values())
    share = f"{floor / busy:.0%}" if floor else ""
    yield f"| all | {len(spans) / num_steps:.0f} | {busy:.1f} | {floor:.0f} | {share} | |"
    yield f"gaps between kernels: {gaps_us(spans) / num_steps:.1f} us a step"


def phase_line(engine: Engine, watch: StepWatch, num_steps: int) -> str:
    """Wall time of a step and the host's share of it by phase, microseconds."""
    elapsed_s, steps = timed_steps(engine, watch, num_steps)
    # With a step in flight, the last submission of these calls belongs to a step that is collected later: much alike.
    submit_s, collect_s = (sum(getattr(step, key) for step in steps) for key in ("submit_s", "collect_s"))
    phases = {
        "step": elapsed_s,
        "submit": submit_s,
        "collect (waits)": collect_s,
        "the rest (plan, commit, delivery)": elapsed_s - submit_s - collect_s,
    }
    on_device = statistics.median(step.end_s - step.start_s for step in steps) * 1e6
    text = ", ".join(f"{name} {seconds / num_steps * 1e6:.0f}" for name, seconds in phases.items())
    return f"us a step: {text}; on the executor's clock, median {on_device:.0f}"


def print_host_profile(engine: Engine, num_steps: int) -> None:
    """The functions that most of the host's time is spent in."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        engine.step()
    profiler.disable()
    stats: Any = pstats.Stats(profiler)
    print(f"host under cProfile, {stats.total_tt / num_steps * 1e6:.0f} us a step; us a step in itself, calls a step:")
    rows = sorted(stats.stats.items(), key=lambda item: item[1][2], reverse=True)
    for (path, line, name), (_, calls, own_s, _, _) in rows[:NUM_LISTED]:
        place = f"{Path(path).name}:{line} " if line else ""
        print(f"  {own_s / num_steps * 1e6:8.1f} {calls / num_steps:8.1f}  {place}{name}")


def main() -> None:
    """Profile each batch in one engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3_8b", help="an entry of conf/model")
    parser.add_argument("--numerics", choices=("invariant", "fast"), default="invariant")
    parser.add_argument("--batches", type=lambda text: [int(batch) for batch in text.split(",")], default=(256, 64))
    parser.add_argument("--set", type=setting, nargs="*", default=(), help="fields of EngineConfig, as depth=1")
    parser.add_argument("--prefill", action="store_true", help="a step of prompts, too; on a card alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    path, named = read_model(options.model)
    spec = find_model(path, named, need_weights=False)[1]
    context, num_timed, batches = CONTEXT, NUM_TIMED, options.batches
    fields: dict[str, Any] = {"max_num_seqs": max(batches), "max_seq_len": 4096}
    if options.small:
        torch.set_num_threads(1)
        context, num_timed, batches = 40, 5, (4, 2)
        fields = {"max_num_seqs": 4, "max_seq_len": 128}
    fields |= {"dtype": "bfloat16", "device": options.device, "numerics": options.numerics, **dict(options.set)}
    engine = build(path, named, **fields)
    watch = StepWatch(engine)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(f"{options.model}, {options.numerics}, {name}, torch {torch.__version__}, start-up {engine.startup_s:.1f} s")
    num_steps = 1 + NUM_PROFILED + 2 * num_timed
    for batch in batches:
        # The profiled steps come first, at the context that the floors are for.
        ids = decode_steadily(engine, watch, batch, context, num_steps, SamplingParams(temperature=0.6))
        print(f"\n{batch} sequences of {context} tokens", flush=True)
        for line in kernel_rows(profiled_spans(engine, options.device), floors_us(spec, batch, context), NUM_PROFILED):
            print(line)
        print(phase_line(engine, watch, num_timed), flush=True)
        print_host_profile(engine, num_timed)
        abort_all(engine, ids)
    if options.prefill:
        print("\na step of prompts")
        for line in kernel_rows(prefill_spans(engine, context), {}, 1):
            print(line)
    engine.close()


if __name__ == "__main__":
    main()
