"""Sampling on one card: rows compared with the torch twin, then microseconds at the vocabulary of Qwen3.

    python benchmarks/sampling_h200.py [--rounds 8] [--json FILE]
    python benchmarks/sampling_h200.py --variants [NAME ...] [--json FILE]

A difference of a token or a bit of a log-probability makes the run fail. Times are those of CUDA graphs over logits
that rotate out of the second-level cache: ``peaked`` looks like a trained model's rows (a few dozen tokens high above
the rest), ``wide`` and ``flat`` are normal numbers with deviation 3 and 1 (a nucleus of 10,000 and 100,000 tokens).

With ``--variants`` the kernels are timed as they are and with one thing done otherwise at a time (all of them, or those
named), the bits of each compared as well; then what each kernel takes in a call.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from attention_h200 import read_bandwidth
from card_times import graph_us

from paged.kernels import exponential, sampling_triton
from paged.kernels.sampling import sample, sample_by_torch, token_logprobs
from paged.kernels.sampling_columns import LogitBias, Penalties, SamplingColumns

VOCAB = 151_936
DEVICE = "cuda"
KINDS = ("peaked", "wide", "flat")
MODES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "top_k, top_p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
}
# What is set in which module.
VARIANTS: dict[str, dict[str, int]] = {
    "as it is": {},
    "long exponential": {"SHORT_BITS": 0},
    "masses by 4 warps": {"WEIGH_WARPS": 4},
    "masses by 16 warps": {"WEIGH_WARPS": 16},
    "draws by 8 warps": {"DRAW_WARPS": 8},
    "draws by 16 warps": {"DRAW_WARPS": 16},
    "cuts by 16 warps": {"CUT_WARPS": 16},
    "narrow bracket": {"HALF_BRACKET": 1536},
    "wide bracket": {"HALF_BRACKET": 2048},
}
VARIANT_MODES = ("greedy", "temperature", "top_p", "top_k")


def logits_of(kind: str, num_rows: int, seed: int) -> torch.Tensor:
    """Rows of one kind, fp32 [R, V]."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    logits_RV = torch.randn(num_rows, VOCAB, generator=generator, device=DEVICE)
    if kind == "peaked":
        high_RK = torch.randint(VOCAB, (num_rows, 40), generator=generator, device=DEVICE)
        logits_RV.mul_(2.5).scatter_(1, high_RK, 12 + 4 * torch.randn(num_rows, 40, generator=generator, device=DEVICE))
    elif kind == "wide":
        logits_RV.mul_(3)
    elif kind == "ties":
        logits_RV.mul_(3).round_()
    return logits_RV


def columns_of(num_rows: int, seed: int, **values: float) -> SamplingColumns:
    """The same values in every row; seeds and positions differ."""
    dtypes = {"top_k": torch.int64}
    columns: dict[str, torch.Tensor] = {
        f"{name}_R": torch.full((num_rows,), value, dtype=dtypes.get(name, torch.float64), device=DEVICE)
        for name, value in values.items()
    }
    generator = torch.Generator(DEVICE).manual_seed(seed)
    seeds_R = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator, device=DEVICE)
    return SamplingColumns(seeds_R=seeds_R, positions_R=torch.arange(num_rows, device=DEVICE), **columns)


def adjusted_columns(num_rows: int, num_adjusted: int, **values: float) -> SamplingColumns:
    """As ``columns_of``; the first rows have penalties and a bias each."""
    plain = columns_of(num_rows, 1, **values)
    rows = torch.arange(num_adjusted, device=DEVICE)
    some = torch.full((num_adjusted,), 1.1, dtype=torch.float64, device=DEVICE)
    counts = torch.zeros(num_adjusted, VOCAB, dtype=torch.int32, device=DEVICE)
    counts[:, ::97] = 2
    return SamplingColumns(
        temperature_R=plain.temperature_R,
        seeds_R=plain.seeds_R,
        positions_R=plain.positions_R,
        top_p_R=plain.top_p_R,
        penalties=Penalties(rows, some, some, some, counts, counts > 1),
        bias=LogitBias(rows, rows + 7, some),
    )


def differing(logits_RV: torch.Tensor, columns: SamplingColumns) -> int:
    """Rows in which the kernels differ from the twin in anything."""
    ours, twin = sample(logits_RV, columns), sample_by_torch(logits_RV, columns)
    same_R = (ours.tokens_R == twin.tokens_R) & (ours.nan_R == twin.nan_R)
    for mine, theirs in ((ours.logprobs_R, twin.logprobs_R), (ours.behavior_logprobs_R, twin.behavior_logprobs_R)):
        same_R &= (mine == theirs) | (mine.isnan() & theirs.isnan())
    return int((~same_R).sum())


def compare(rounds: int) -> dict[str, int]:
    """Rows drawn by the kernels and by the twin, and how many differ in anything."""
    rows = differ = 0
    for seed in range(rounds):
        for kind in (*KINDS, "ties"):
            logits_RV = logits_of(kind, 64, seed)
            logits_RV[3, 5], logits_RV[7] = torch.nan, -torch.inf
            for values in MODES.values():
                differ += differing(logits_RV, columns_of(64, seed, **values))
                rows += 64
            differ += differing(logits_RV, adjusted_columns(64, 9, **MODES["top_p"]))
            rows += 64
    return {"rows": rows, "differing": differ}


@contextmanager
def changed(constants: dict[str, int]) -> Iterator[None]:
    """The constants of the kernels, changed for a while."""
    before = {}
    for name, value in constants.items():
        module = exponential if name == "SHORT_BITS" else sampling_triton
        before[module, name] = getattr(module, name)
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


def kernel_us(logits_RV: torch.Tensor, columns: SamplingColumns, calls: int = 6) -> dict[str, float]:
    """Mean microseconds of each kernel in one call; empty where the profiler sees none."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            sample(logits_RV, columns)
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in profile.events():
        times[event.name] += event.device_time_total / calls
    return {name: us for name, us in times.items() if us > 0.5}


def time_variants(names: list[str], report: dict[str, Any]) -> None:
    """Bits and times of each variant, then of each kernel as it is."""
    report["variants"] = []
    logits = {kind: [logits_of(kind, 256, seed) for seed in range(2)] for kind in ("peaked", "wide")}
    few = {kind: logits_of(kind, 64, 5) for kind in ("peaked", "wide", "flat", "ties")}
    for name in names:
        start_s = time.monotonic()
        with changed(VARIANTS[name]):
            modes = [columns_of(64, 5, **MODES[mode]) for mode in VARIANT_MODES]
            differ = sum(differing(x, columns) for columns in modes for x in few.values())
            entry: dict[str, Any] = {"variant": name, "differing": differ, "us": {}}
            for kind, rows in logits.items():
                for mode in VARIANT_MODES:
                    columns = columns_of(256, 1, **MODES[mode])
                    _, median = graph_us([partial(sample, x, columns) for x in rows] * 2, replays=8)
                    entry["us"][f"{kind} {mode}"] = round(median, 1)
        entry["seconds"] = round(time.monotonic() - start_s, 1)
        report["variants"].append(entry)
        report["rows"]["differing"] += differ
        print(f"{name:20s} differing {differ}  {entry['us']}  ({entry['seconds']} s)", flush=True)
    report["kernels"] = {}
    for kind, rows in logits.items():
        for mode in VARIANT_MODES:
            times = kernel_us(rows[0], columns_of(256, 1, **MODES[mode]))
            report["kernels"][f"{kind} {mode}"] = times
            print(kind, mode, {kernel: round(us, 1) for kernel, us in times.items()}, flush=True)


def time_modes(report: dict[str, Any]) -> None:
    """Times of all modes and kinds at three sizes."""
    report["times"] = []
    for num_rows in (256, 64, 1):
        pass_us = num_rows * VOCAB * 4 / report["read_bytes_per_s"] * 1e6
        for kind in KINDS:
            logits = [logits_of(kind, num_rows, seed) for seed in range(2 if num_rows > 100 else 4)]
            all_columns = {mode: columns_of(num_rows, 1, **values) for mode, values in MODES.items()}
            if num_rows == 256:
                all_columns["8 penalized"] = adjusted_columns(num_rows, 8, **MODES["top_p"])
            for mode, columns in all_columns.items():
                best, median = graph_us([partial(sample, x, columns) for x in logits] * 2)
                report["times"].append(
                    {"rows": num_rows, "kind": kind, "mode": mode, "us": median, "best_us": best, "pass_us": pass_us}
                )
                print(f"{num_rows:4d} rows {kind:7s} {mode:13s} {median:7.1f} us (a pass {pass_us:.1f} us)")
        scored = columns_of(num_rows, 1, temperature=1.0)
        _, median = graph_us([partial(token_logprobs, x, scored.temperature_R, scored.positions_R) for x in logits] * 2)
        report["times"].append({"rows": num_rows, "mode": "token_logprobs", "us": median, "pass_us": pass_us})
        print(f"{num_rows:4d} rows token_logprobs {median:7.1f} us")


def main() -> None:
    """Run all parts; a difference ends the run with status 1."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "read_bytes_per_s": read_bandwidth(),
    }
    if arguments.variants is None:
        report["rows"] = compare(arguments.rounds)
        print(f"against the twin: {report['rows']}")
        time_modes(report)
    else:
        report["rows"] = {"differing": 0}
        time_variants(arguments.variants or list(VARIANTS), report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    sys.exit(1 if report["rows"]["differing"] else 0)


if __name__ == "__main__":
    main()
