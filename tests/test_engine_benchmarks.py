"""The benchmarks of the whole engine: lines are the experiments', planted faults are found, every kernel has a kind."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from paged.config.run import run_config
from paged.core.request import SamplingParams

REPOSITORY = Path(__file__).resolve().parents[1]
BENCHMARKS = REPOSITORY / "benchmarks"
LINES = ("nano", "nano_logprobs", "nano_top_p", "prover")
VOCABULARY = 151_936


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test import the benchmarks as they import each other."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(BENCHMARKS / name), "--device", "cpu", "--small", *arguments]
    return subprocess.run(command, env=environment, cwd=BENCHMARKS, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", LINES)
def test_a_line_is_its_experiment(name: str, scripts: None) -> None:
    """What the benchmark reads without Hydra is what the command composes."""
    from engine_runs import read_line

    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        config = run_config(compose("run", [f"experiment=h200_{name}"]))
    line = read_line(name, VOCABULARY)
    assert line.jobs == list(config.workload.lines(VOCABULARY))
    assert len(line.jobs) == (64 if name == "prover" else 256)
    assert {key: config.engine[key] for key in line.engine} == line.engine
    assert line.engine["max_seq_len"] == 20_480
    # The jobs bring their own number of samples and most tokens.
    given = config.sampling
    assert (line.sampling.temperature, line.sampling.top_p) == (given.temperature, given.top_p)
    assert line.sampling == SamplingParams(temperature=given.temperature, top_p=given.top_p)
    assert given.temperature == (0.6 if name == "nano" else 1.0)
    assert given.top_p == (0.95 if name in ("nano_top_p", "prover") else 1.0)


def test_lines_and_steps_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ("--model", "tiny", "--lines", "nano,prover", "--numerics", "fast", "--set", "depth=2", "--steps")
    done = run_script("engine_h200.py", *arguments, "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    lines = [row for row in rows if "line" in row]
    assert [row["line"] for row in lines] == ["nano", "prover"]
    for row in lines:
        # Six outputs of eight tokens; what a line found in the cache would save it steps.
        assert row["tokens_per_s"] * row["elapsed_s"] == pytest.approx(48)
        assert row["num_steps"] >= 8
    assert [row["batch"] for row in rows if "batch" in row] == [4, 1]
    assert sum("prefill_tokens_per_s" in row for row in rows) == 1


def test_the_fuzzer_finds_nothing_under_pressure(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = run_script("engine_bits_h200.py", "--configs", "24", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert (report["configs"], report["differing"]) == (24, 0)
    assert report["logits"] > 10_000
    assert report["met"]["preemptions of victims"] > 0


@pytest.mark.parametrize("plant", ["fast", "results"])
def test_the_fuzzer_finds_what_is_planted(plant: str) -> None:
    done = run_script("engine_bits_h200.py", "--configs", "8", "--plant", plant)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "differs: block_size" in done.stdout


def test_fast_numerics_hang_on_the_batch_and_invariant_ones_do_not(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    done = run_script("fast_distance_h200.py", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())
    assert rows["fast: together / alone"]["max_dlogit"] > 0
    assert rows["invariant: together / alone"]["max_dlogit"] == 0


def test_a_step_is_profiled() -> None:
    done = run_script("step_profile_h200.py", "--model", "tiny")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gaps between kernels") == 2
    assert re.search(r"us a step: step \d+, submit \d+", done.stdout)


def test_every_phase_of_a_start_is_there(scripts: None) -> None:
    """One that was renamed would be passed over, and its time and builds be those of `else`."""
    from start_h200 import PHASES

    assert [name for _, module, name in PHASES if not hasattr(importlib.import_module(module), name)] == []


def test_every_kernel_has_a_kind(scripts: None) -> None:
    """A new module of kernels would be counted as `other`."""
    from step_profile_h200 import KINDS, kind_of, kinds_by_name

    own = kinds_by_name()
    launched = set()
    for path in (REPOSITORY / "kernels").glob("*.py"):
        source = path.read_text(encoding="utf-8")
        launched |= set(re.findall(r"jit.*\n(?:@.*\n)*def (\w*_kernel)\(", source))
    assert len(launched) > 15
    assert launched <= own.keys()
    assert kind_of("_gemm_kernel", own) == "gemm"
    assert kind_of("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", own) == "gemm"
    assert kind_of("Memcpy HtoD (Pageable -> Device)", own) == "copies"
    assert kind_of("void at::native::reduce_kernel<512>", own) == "other"
    assert set(KINDS) >= {kind_of(name, own) for name in ("_store_kernel", "_finish_kernel", "_silu_mul_kernel")}


def test_gaps_are_where_nothing_runs(scripts: None) -> None:
    from step_profile_h200 import gaps_us

    assert gaps_us([("a", 0.0, 4.0), ("b", 1.0, 2.0), ("c", 5.0, 6.0), ("d", 5.5, 9.0), ("e", 9.0, 10.0)]) == 1.0
