"""The engine on one card, end to end: output tokens/s of the compared workloads, decode steps, prefill.

    python benchmarks/engine_h200.py [--model qwen3_8b] [--lines nano,nano_logprobs,nano_top_p,prover]
        [--numerics invariant,fast] [--steps] [--set depth=1 ...] [--json FILE]
    python benchmarks/engine_h200.py --device cpu --model tiny --small --steps

A line runs what `python -m paged run experiment=h200_LINE` runs, with random weights and without result files; all
lines of one kind of numerics share an engine, whose cache of prefixes is emptied in between, and each is preceded by
its own requests in short, which compile what it needs. Tokens/s are output tokens over all seconds but start-up,
prefill included. "host" is time of a step outside of the executor's `collect`, which waits; "device" its length on the
executor's clock. Last in a row stands what vLLM 0.25.1 reached on the same kind of card. With `--small` a few short
requests check the script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine_runs import (
    Line,
    StepWatch,
    abort_all,
    add_jobs,
    build,
    decode_steadily,
    drain,
    random_prompts,
    read_line,
    read_model,
    timed_steps,
)
from settings import setting

from paged import Engine, SamplingParams
from paged.model.locate import find_model

HEADS = (
    *("line", "numerics", "tokens/s", "s", "steps", "preempted", "kv tokens", "start-up s", "peak GiB"),
    *("host us", "device us", "vLLM"),
)
LINES = ("nano", "nano_logprobs", "nano_top_p", "prover")
NUM_WHOLE = 8
MOST_WARM = 32
POINTS = ((256, 1024), (64, 1024), (8, 1024), (1, 1024), (64, 4096))
NUM_STEPS = 100
PREFILL = (64, 1024)
# vLLM 0.25.1 on one H200: output tokens/s, milliseconds of a decode step, prefilled tokens/s.
OTHERS: dict[str, dict[Any, float]] = {
    "qwen3_8b": {
        **{"nano": 9_716, "nano_logprobs": 9_530, "nano_top_p": 6_866, "prover": 2_957},
        **{(1, 1024): 5.3, (8, 1024): 5.9, (64, 1024): 8.2, (256, 1024): 19.5, (64, 4096): 14.6},
        "prefill": 42_800,
    },
    "qwen3_0_6b": {"nano": 23_908, "nano_logprobs": 22_079, "nano_top_p": 11_518},
}


def shortened(line: Line) -> Line:
    """The first requests of a line, cut to a few tokens."""
    jobs = [
        {**job, "prompt_token_ids": job["prompt_token_ids"][:24], "output_len": 8, "max_tokens": 8}
        for job in line.jobs[:6]
    ]
    return replace(line, jobs=jobs)


def in_short(line: Line) -> Line:
    """All requests of a line with few tokens, but for the first prompts, which end one after the other.

    Batches then pass through all sizes that the whole line's have, so that what an engine makes for each is there.
    """
    jobs = [
        {
            **job,
            "prompt_token_ids": job["prompt_token_ids"][: None if index < NUM_WHOLE else 16],
            "output_len": 1 + index * MOST_WARM // len(line.jobs),
        }
        for index, job in enumerate(line.jobs)
    ]
    return replace(line, jobs=jobs)


def run_line(engine: Engine, watch: StepWatch, line: Line) -> dict[str, float]:
    """All requests of a line from their queueing to the last token."""
    add_jobs(engine, in_short(line))
    drain(engine)
    engine.scheduler.pool.forget()
    watch.clear()
    before = engine.metrics()
    start_s = time.perf_counter()
    add_jobs(engine, line)
    num_tokens = drain(engine)
    elapsed_s = time.perf_counter() - start_s
    after = engine.metrics()
    assert num_tokens == sum(job["output_len"] for job in line.jobs), "each output has the length it was given"
    return {
        "tokens_per_s": num_tokens / elapsed_s,
        "elapsed_s": elapsed_s,
        "num_steps": after["num_steps"] - before["num_steps"],
        "preemptions": after["preemptions"] - before["preemptions"],
        "kv_tokens": after["kv_tokens"],
        "peak_gib": after["peak_device_bytes"] / 2**30,
        "startup_s": engine.startup_s,
        "host_us": (elapsed_s - sum(step.collect_s for step in watch.steps)) / len(watch.steps) * 1e6,
        "device_us": statistics.fmean(step.end_s - step.start_s for step in watch.steps) * 1e6,
    }


def time_decode(engine: Engine, watch: StepWatch, batch: int, context: int, num_steps: int) -> dict[str, float]:
    """A decode step of ``batch`` sequences that have about ``context`` tokens halfway through ``num_steps`` steps."""
    params = SamplingParams(temperature=0.6)
    ids = decode_steadily(engine, watch, batch, context - num_steps // 2, num_steps, params)
    elapsed_s, steps = timed_steps(engine, watch, num_steps)
    assert len(steps) == num_steps, "a call of step is one step"
    assert all((step.num_rows, step.num_tokens) == (batch, batch) for step in steps), "all of them only decode"
    abort_all(engine, ids)
    return {
        "step_ms": elapsed_s / num_steps * 1e3,
        "device_ms": statistics.median(step.end_s - step.start_s for step in steps) * 1e3,
        "host_ms": (elapsed_s - sum(step.collect_s for step in steps)) / num_steps * 1e3,
    }


def time_prefill(engine: Engine, watch: StepWatch, count: int, length: int) -> float:
    """Prompt tokens a second of ``count`` prompts of ``length`` that each want one token."""
    vocab_size = engine.scheduler.config.vocab_size
    assert vocab_size is not None
    for name, num_prompts in (("warm", 8), ("prefill", count)):
        start_s = time.perf_counter()
        for prompt in random_prompts(name, min(num_prompts, count), length, vocab_size):
            engine.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        drain(engine)
        elapsed_s = time.perf_counter() - start_s
    watch.clear()
    return count * length / elapsed_s


def show(cells: Sequence[object]) -> None:
    """A row of a table, at once."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def measure(options: argparse.Namespace, numerics: str) -> list[dict[str, Any]]:
    """All that was asked for, with one engine."""
    path, spec = read_model(options.model)
    vocab_size = find_model(path, spec, need_weights=False)[1].vocab_size
    lines = {name: read_line(name, vocab_size) for name in options.lines}
    points: Sequence[tuple[int, int]] = POINTS
    prefill, num_steps = PREFILL, NUM_STEPS
    # The lines' experiments agree in what they ask of the engine, but for what they are sampled with.
    fields = read_line(LINES[0], vocab_size).engine
    if options.small:
        lines = {name: shortened(line) for name, line in lines.items()}
        points, prefill, num_steps = ((4, 24), (1, 24)), (4, 24), 5
        fields |= {"max_num_seqs": 8, "max_seq_len": 128}
    fields |= {"numerics": numerics, "device": options.device, **options.set}
    others = {} if options.small else OTHERS.get(options.model, {})
    engine = build(path, spec, **fields)
    watch = StepWatch(engine)
    rows: list[dict[str, Any]] = []
    try:
        for name, line in lines.items():
            row = run_line(engine, watch, line)
            rows.append({"model": options.model, "numerics": numerics, "line": name, **row})
            show(
                (
                    *(name, numerics, f"{row['tokens_per_s']:,.0f}", f"{row['elapsed_s']:.2f}", row["num_steps"]),
                    *(row["preemptions"], f"{row['kv_tokens']:,}", f"{row['startup_s']:.1f}", f"{row['peak_gib']:.1f}"),
                    *(f"{row['host_us']:.0f}", f"{row['device_us']:.0f}", others.get(name, "-")),
                )
            )
        for batch, context in points if options.steps else ():
            row = time_decode(engine, watch, batch, context, num_steps)
            rows.append({"model": options.model, "numerics": numerics, "batch": batch, "context": context, **row})
            times = " ".join(f"{key} {value:.2f}" for key, value in row.items())
            other = others.get((batch, context), "-")
            print(f"decode {batch} x {context}, {numerics}: {times} (vLLM {other})", flush=True)
        if options.steps:
            engine.scheduler.pool.forget()
            rate = time_prefill(engine, watch, *prefill)
            rows.append({"model": options.model, "numerics": numerics, "prefill_tokens_per_s": rate})
            print(f"prefill, {numerics}: {rate:,.0f} tokens/s (vLLM {others.get('prefill', '-')})", flush=True)
    finally:
        engine.close()
    return rows


def main() -> None:
    """Measure, one kind of numerics after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3_8b", help="an entry of conf/model")
    parser.add_argument("--lines", type=lambda text: [name for name in text.split(",") if name], default=LINES)
    parser.add_argument("--numerics", type=lambda text: text.split(","), default=("invariant", "fast"))
    parser.add_argument("--steps", action="store_true", help="decode steps at fixed sizes, and prefill")
    parser.add_argument("--set", type=setting, nargs="*", default=(), help="fields of EngineConfig, as depth=1")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.set = dict(options.set)
    if options.small:
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(f"{options.model}, {name}, torch {torch.__version__} {options.set or ''}")
    if options.lines:
        show(HEADS)
        show(["---"] * len(HEADS))
    rows = [row for numerics in options.numerics for row in measure(options, numerics)]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
