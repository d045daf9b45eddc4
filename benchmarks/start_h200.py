"""How long an engine's start takes on a card, phase by phase, and which kernels are built in it: cold, then warm.

    python benchmarks/start_h200.py
    python benchmarks/start_h200.py --model qwen3_0_6b --set max_num_seqs=64

Each start is a process of its own; both use one new folder as Triton's cache and as ours, so that the first has
nothing. Exit code 1 if kernels are built after the start's own time for it, or the two starts draw different tokens.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from settings import setting

# What is timed, in the order of a start; each is replaced where it is called from.
PHASES = (
    ("weights", "paged.engine_parts", "random_decoder"),
    ("builds", "paged.engine_parts", "build_kernels"),
    ("gate", "paged.runner.memory_profile", "_prepare_products"),
    ("largest steps", "paged.runner.memory_profile", "run_step"),
    ("cache and tables", "paged.engine_parts", "TorchRunner"),
    ("warm-up and graphs", "paged.engine", "warm_up"),
)


@dataclass
class Watch:
    """Seconds by phase, and builds by phase and kernel: how many, and seconds of one thread.

    Attributes:
        phase: the one that goes on.
        seconds: by phase.
        builds: seconds of each build of Triton's compiler, by phase and kernel.
        launchers: of each build by the C compiler, by phase.
    """

    phase: str = "else"
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    builds: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    launchers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def timed(self, phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """``work``, whose time counts as the phase's."""

        @functools.wraps(work)
        def watched(*args: Any, **fields: Any) -> Any:
            before, self.phase = self.phase, phase
            start_s = time.perf_counter()
            try:
                return work(*args, **fields)
            finally:
                self.seconds[phase] += time.perf_counter() - start_s
                self.phase = before

        return watched

    def listen(self) -> None:
        """Hear of all builds from here on."""
        import triton
        from triton.runtime import build

        def heard(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
            if not cache_hit:
                with self.lock:
                    name = f"{src.fn.__module__.rpartition('.')[2]}.{src.name}"
                    self.builds[self.phase][name].append(times.total / 1e6)

        triton.knobs.compilation.listener = heard
        compile_c = build._build

        def timed_c(*args: Any, **fields: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return compile_c(*args, **fields)
            finally:
                with self.lock:
                    self.launchers[self.phase].append(time.perf_counter() - start_s)

        build._build = timed_c


def start(model: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Build an engine and let it draw a little, in this process; what was watched."""
    watch = Watch()
    begin_s = time.perf_counter()

    def imported() -> Any:
        import engine_runs

        watch.listen()
        return engine_runs

    runs = watch.timed("imports", imported)()
    for phase, module, name in PHASES:
        owner = importlib.import_module(module)
        # An older tree may lack one.
        if hasattr(owner, name):
            setattr(owner, name, watch.timed(phase, getattr(owner, name)))
    path, spec = runs.read_model(model)
    engine = runs.build(path, spec, **fields)
    start_s = time.perf_counter() - begin_s
    drawn = watch.timed("first draws", draw)(engine)
    return {
        "start_s": start_s,
        "seconds": watch.seconds,
        "builds": watch.builds,
        "launchers": watch.launchers,
        "drawn": drawn,
    }


def draw(engine: Any) -> str:
    """A digest of what rows of each kind draw, beside each other and alone."""
    from paged import SamplingParams

    kinds = (
        {"temperature": 0.0},
        {},
        {"top_p": 0.9},
        {"top_k": 20, "top_p": 0.95},
        {"min_p": 0.05},
        {"presence_penalty": 0.5, "repetition_penalty": 1.1},
        {"top_k": 20, "frequency_penalty": 0.2},
    )
    params = [SamplingParams(max_tokens=8, ignore_eos=True, seed=index, **kind) for index, kind in enumerate(kinds)]
    prompts = [{"prompt_token_ids": [index + 1] * (30 * index + 3)} for index in range(len(kinds))]
    outputs = [*engine.generate(prompts, params, use_tqdm=False)]
    for prompt, param in zip(prompts, params, strict=True):
        outputs += engine.generate([prompt], param, use_tqdm=False)
    found = [(sample.token_ids, sample.logprobs) for output in outputs for sample in output.outputs]
    return hashlib.blake2b(repr(found).encode(), digest_size=8).hexdigest()


def show(name: str, found: dict[str, Any]) -> int:
    """Print one start; the number of builds behind the phase that is for them."""
    print(f"\n{name}: {found['start_s']:.1f} s from the first import to an engine; draws {found['drawn']}")
    print("| phase | s | builds | their s | launchers | their s |\n|---|---|---|---|---|---|")
    num_late = 0
    for phase, seconds in found["seconds"].items():
        builds = [each for kernel in found["builds"].get(phase, {}).values() for each in kernel]
        launchers = found["launchers"].get(phase, [])
        print(
            f"| {phase} | {seconds:.1f} | {len(builds)} | {sum(builds):.1f} | {len(launchers)} | {sum(launchers):.1f} |"
        )
        if phase != "builds":
            num_late += len(builds) + len(launchers)
    by_kernel: dict[str, list[float]] = defaultdict(list)
    for kernels in found["builds"].values():
        for kernel, times in kernels.items():
            by_kernel[kernel] += times
    if by_kernel:
        print("\n| kernel | builds | s of one thread |\n|---|---|---|")
    for kernel, times in sorted(by_kernel.items(), key=lambda item: -sum(item[1])):
        print(f"| {kernel} | {len(times)} | {sum(times):.1f} |")
    return num_late


def main() -> int:
    """Start twice and print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3_8b", help="an entry of conf/model")
    parser.add_argument("--set", type=setting, nargs="*", default=(), help="fields of EngineConfig")
    parser.add_argument(
        "--json", type=Path, help="start once in this process, with the caches there are; write it here"
    )
    options = parser.parse_args()
    fields = {"max_seq_len": 20480, "max_num_seqs": 256, **dict(options.set)}
    if options.json:
        options.json.write_text(json.dumps(start(options.model, fields)))
        return 0
    found: list[dict[str, Any]] = []
    num_late = 0
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "PAGED_CACHE": f"{folder}/paged"}
        for name in ("cold", "warm"):
            path = Path(folder) / f"{name}.json"
            subprocess.run([sys.executable, *sys.argv, "--json", str(path)], env=os.environ | caches, check=True)
            found.append(json.loads(path.read_text()))
            num_late += show(name, found[-1])
    print(f"\n{num_late} builds outside of the phase that is for them")
    return int(num_late > 0 or found[0]["drawn"] != found[1]["drawn"])


if __name__ == "__main__":
    sys.exit(main())
