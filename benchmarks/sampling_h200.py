"""Sampling on one card: rows compared with the torch twin, then microseconds at the vocabulary of Qwen3.

    python benchmarks/sampling_h200.py [--rounds 8] [--json FILE]

A difference of a token or a bit of a log-probability makes the run fail. Times are those of CUDA graphs over logits
that rotate out of the second-level cache: ``peaked`` looks like a trained model's rows (a few dozen tokens high above
the rest), ``wide`` and ``flat`` are normal numbers with deviation 3 and 1 (a nucleus of 10,000 and 100,000 tokens).
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from attention_h200 import read_bandwidth
from card_times import graph_us

from paged.kernels.sampling import SamplingColumns, sample, sample_by_torch, token_logprobs

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


def compare(rounds: int) -> dict[str, int]:
    """Rows drawn by the kernels and by the twin, and how many differ in anything."""
    rows = differing = 0
    for seed in range(rounds):
        for kind in (*KINDS, "ties"):
            logits_RV = logits_of(kind, 64, seed)
            logits_RV[3, 5], logits_RV[7] = torch.nan, -torch.inf
            for values in MODES.values():
                columns = columns_of(64, seed, **values)
                ours, twin = sample(logits_RV, columns), sample_by_torch(logits_RV, columns)
                same_R = (ours.tokens_R == twin.tokens_R) & (ours.nan_R == twin.nan_R)
                for mine, theirs in (
                    (ours.logprobs_R, twin.logprobs_R),
                    (ours.behavior_logprobs_R, twin.behavior_logprobs_R),
                ):
                    same_R &= (mine == theirs) | (mine.isnan() & theirs.isnan())
                rows += 64
                differing += int((~same_R).sum())
    return {"rows": rows, "differing": differing}


def main() -> None:
    """Run all parts; a difference ends the run with status 1."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    report["rows"] = compare(arguments.rounds)
    print(f"against the twin: {report['rows']}")
    report["read_bytes_per_s"] = read_bandwidth()
    report["times"] = []
    for num_rows in (256, 64, 1):
        pass_us = num_rows * VOCAB * 4 / report["read_bytes_per_s"] * 1e6
        for kind in KINDS:
            logits = [logits_of(kind, num_rows, seed) for seed in range(2 if num_rows > 100 else 4)]
            for mode, values in MODES.items():
                columns = columns_of(num_rows, 1, **values)
                best, median = graph_us([partial(sample, x, columns) for x in logits] * 2)
                report["times"].append(
                    {"rows": num_rows, "kind": kind, "mode": mode, "us": median, "best_us": best, "pass_us": pass_us}
                )
                print(f"{num_rows:4d} rows {kind:7s} {mode:13s} {median:7.1f} us (a pass {pass_us:.1f} us)")
        scored = columns_of(num_rows, 1, temperature=1.0)
        _, median = graph_us([partial(token_logprobs, x, scored.temperature_R, scored.positions_R) for x in logits] * 2)
        report["times"].append({"rows": num_rows, "mode": "token_logprobs", "us": median, "pass_us": pass_us})
        print(f"{num_rows:4d} rows token_logprobs {median:7.1f} us")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    sys.exit(1 if report["rows"]["differing"] else 0)


if __name__ == "__main__":
    main()
