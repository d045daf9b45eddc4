"""How long an engine takes to start on one card, by phase, and which kernels are built when.

    python benchmarks/start_h200.py [--model qwen3_8b] [--set max_num_seqs=64 ...]

Starts it in two processes, one after the other: the first finds no built kernels and no table of products, the second
what the first has left. Weights are random. "built" and "s of building" count kernels that the compiler made, on all
threads; "loaded" those that it found.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

PHASES = ("random_decoder", "build_kernels", "measure_profile", "warm_up")


@dataclass
class Builds:
    """What Triton's compiler reports."""

    built: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    num_loaded: int = 0

    def __call__(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        """Count one kernel."""
        if cache_hit:
            self.num_loaded += 1
        else:
            self.built[src.name] += 1
            self.seconds[src.name] += times.total / 1e6


def main() -> None:
    """Start twice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3_8b", help="an entry of conf/model")
    parser.add_argument("--set", nargs="*", default=[], help="fields of EngineConfig, as depth=1")
    parser.add_argument("--once", action="store_true", help="start in this process, with the caches that it has")
    options = parser.parse_args()
    if options.once:
        start(options.model, options.set)
        return
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "PAGED_CACHE": f"{folder}/paged"}
        for name in ("nothing is there yet", "kernels and table are there"):
            print(f"\n{name}", flush=True)
            command = [sys.executable, __file__, "--once", "--model", options.model]
            subprocess.run([*command, *(["--set", *options.set] if options.set else [])], env={**os.environ, **caches})


def start(model: str, fields: list[str]) -> None:
    """Start an engine, sample a token, and print where the time went."""
    began_s = time.perf_counter()
    import torch
    from engine_h200 import setting
    from engine_runs import build, read_model
    from triton import knobs

    from paged import SamplingParams, engine, engine_parts
    from paged.runner import memory_profile

    builds = Builds()
    knobs.compilation.listener = builds
    rows: list[tuple[str, float, int, float, int]] = []

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*args: Any, **options: Any) -> Any:
            before = time.perf_counter(), builds.built.total(), builds.seconds.total(), builds.num_loaded
            made = call(*args, **options)
            torch.cuda.synchronize()
            after = time.perf_counter(), builds.built.total(), builds.seconds.total(), builds.num_loaded
            rows.append((name, *(b - a for a, b in zip(before, after, strict=True))))  # type: ignore[arg-type]
            return made

        return timed

    for name in PHASES:
        for module in (engine, engine_parts, memory_profile):
            if hasattr(module, name):
                setattr(module, name, counted(name, getattr(module, name)))
    config = {"max_seq_len": 20480, "max_num_seqs": 256, **dict(map(setting, fields))}
    path, spec = read_model(model)
    imported_s = time.perf_counter()
    made = counted("the engine, all in all", build)(path, spec, **config)
    counted("the first token", made.generate)([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
    print(f"{model}, {torch.cuda.get_device_name()}, torch {torch.__version__}: imports {imported_s - began_s:.1f} s")
    print("| phase | s | built | s of building | loaded |\n|---|---|---|---|---|")
    for name, seconds, num_built, building_s, num_loaded in rows:
        print(f"| {name} | {seconds:.1f} | {num_built} | {building_s:.1f} | {num_loaded} |")
    for name, seconds in builds.seconds.most_common(8):
        print(f"{name}: {builds.built[name]} built in {seconds:.1f} s")


if __name__ == "__main__":
    main()
