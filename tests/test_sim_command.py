"""Checks `python -m paged sim` as a user meets it: folders, tables, sweeps, seeds, refusals, Ctrl-C and mistakes."""

import csv
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paged.sim.driver
import paged.simulate
from paged.app import main
from paged.interrupts import InterruptRequest
from paged.sim.calibration import Calibration, ErrorSummary, HostTime, Memory, Provenance, Range
from paged.sim.shape import StepShape

REPOSITORY = Path(__file__).resolve().parents[1]
# 24 samples of at most 300 tokens in a pool of 2,000: `fifo` preempts.
SMALL = (
    "workload.num_prompts=6",
    "workload.prompt=200",
    "workload.output={dist: lognormal, median: 100, sigma: 1.0}",
    "workload.cap=300",
    "num_blocks=125",
)
QUICK = ("plots=false", "trace_file=false")

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Runs `python -m paged sim` in this process and in an empty folder; exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    before = list(root.handlers)

    def call(*overrides: str) -> tuple[int, str, str]:
        code = main(["sim", *overrides])
        out, err = capsys.readouterr()
        return code, out, err

    yield call
    # Hydra's handlers hold this test's streams and files.
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
        handler.close()


def folder_of(out: str) -> Path:
    return Path(out.splitlines()[-1])


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_what_a_simulation_leaves(cli: Cli) -> None:
    code, out, err = cli(*SMALL)
    folder = folder_of(out)
    assert code == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        *(".hydra", "kv.png", "latency.png", "queue.png", "requests.csv", "sim.log", "steps.csv", "summary.json"),
        "trace.json",
    ]
    summary = summary_of(folder)
    assert summary["preemptions"] > 0
    assert summary["num_samples"] == 24
    assert summary["kv_tokens"] == 2000
    assert summary["seeds"] == [0]
    assert "memory_bytes_per_s" in summary["assumed"]
    assert "preemptions" in out
    assert "assumed" in out
    assert "100%" in err, "the progress bar belongs to standard error"


def test_the_tables_agree_with_the_summary(cli: Cli) -> None:
    folder = folder_of(cli(*SMALL, *QUICK)[1])
    summary, requests, steps = summary_of(folder), rows_of(folder / "requests.csv"), rows_of(folder / "steps.csv")
    assert len(steps) == summary["num_steps"]
    assert sum(int(step["num_tokens"]) for step in steps) == summary["forward_tokens"]
    assert sum(int(step["preemptions"]) for step in steps) == summary["preemptions"]
    assert sum(int(request["num_preemptions"]) for request in requests) == summary["preemptions"]
    assert sum(int(request["output_tokens"]) for request in requests) == summary["output_tokens"]
    assert max(float(request["finish_s"]) for request in requests) == pytest.approx(summary["elapsed_s"], abs=1e-6)
    assert max(int(step["num_running"]) for step in steps) == summary["peak_running"]
    waste = {int(step["used_blocks"]) * 16 - int(step["waste_tokens"]) >= 0 for step in steps}
    assert waste == {True}


def test_what_is_computed_is_what_is_needed_and_what_was_lost(cli: Cli) -> None:
    summary = summary_of(folder_of(cli(*SMALL, *QUICK)[1]))
    needed = summary["minimal_forward_tokens"] - summary["cached_tokens"] + summary["recomputed_tokens"]
    assert summary["recomputed_tokens"] > 0
    assert summary["cached_tokens"] > 0
    assert summary["forward_tokens"] == needed


def test_littles_law(cli: Cli) -> None:
    """L = lambda W, but for the part of a step that each request waits before a step can see it."""
    stream = ("workload=poisson", "workload.rate=4", "workload.num_prompts=200", "workload.cap=200")
    folder = folder_of(cli(*stream, *QUICK)[1])
    summary, steps = summary_of(folder), rows_of(folder / "steps.csv")
    in_system = summary["mean_running"] + summary["mean_waiting"]
    rate = summary["num_samples"] / summary["makespan_s"]
    longest_s = max(float(step["end_s"]) - float(step["start_s"]) for step in steps)
    expected = rate * summary["e2e_s"]["mean"]
    assert in_system > 5
    assert expected - rate * longest_s <= in_system <= expected * (1 + 1e-9)


def test_plots_and_trace_can_be_left_out(cli: Cli) -> None:
    folder = folder_of(cli(*SMALL, *QUICK)[1])
    assert not list(folder.glob("*.png"))
    assert not (folder / "trace.json").exists()


def test_equal_in_every_process(tmp_path: Path) -> None:
    made = []
    for name in ("1", "2"):
        command = [sys.executable, "-m", "paged", "sim", *SMALL, *QUICK, f"hydra.run.dir={tmp_path / name}"]
        env = {**os.environ, "PYTHONHASHSEED": name}
        subprocess.run(command, cwd=REPOSITORY, env=env, check=True, capture_output=True)
        made.append([(tmp_path / name / file).read_bytes() for file in ("requests.csv", "steps.csv")])
    assert made[0] == made[1]


def test_neither_torch_nor_matplotlib_without_need(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom paged.app import main\n"
        f"code = main(['sim', *{[*SMALL, *QUICK]!r}, 'hydra.run.dir={tmp_path}'])\n"
        "loaded = {'torch', 'triton', 'transformers', 'matplotlib', 'scipy'} & sys.modules.keys()\n"
        "sys.exit(f'{code} {loaded}' if code or loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_seeds_give_intervals(cli: Cli) -> None:
    code, out, _ = cli(*SMALL, *QUICK, "seed=3", "seeds=3")
    folder = folder_of(out)
    summary, rows = summary_of(folder), rows_of(folder / "seeds.csv")
    assert code == 0
    assert summary["seeds"] == [3, 4, 5]
    assert [row["seed"] for row in rows] == ["3", "4", "5"]
    values = [float(row["makespan_s"]) for row in rows]
    assert len(set(values)) == 3
    assert summary["makespan_s"] == pytest.approx(sum(values) / 3)
    assert summary["ci95"]["makespan_s"] > 0
    assert "±" in out
    alone = summary_of(folder_of(cli(*SMALL, *QUICK, "seed=4")[1]))
    assert alone["makespan_s"] == values[1], "a seed means the same alone"
    assert "ci95" not in alone


def test_seeds_of_a_workload_without_chance(cli: Cli, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,100,20\n2023-11-16 18:00:01,50,30\n")
    code, out, err = cli("workload=trace", f"workload.path={trace}", *QUICK, "seeds=5")
    folder = folder_of(out)
    assert code == 0
    assert "does not depend on the seed" in err
    assert len(summary_of(folder)["seeds"]) == 1
    assert summary_of(folder)["output_tokens"] == 50
    assert (folder / "inputs" / "trace.csv").read_bytes() == trace.read_bytes()


def calibration_file(folder: Path) -> Path:
    """A calibration of decode steps of at most 8 sequences, 10 ms each, in a pool of 4,096 tokens."""
    bounds = {**dict.fromkeys(StepShape._fields, (0, 10_000)), "num_seqs": (1, 8)}
    calibration = Calibration(
        name="made up",
        coefficients={"step": 0.01},
        floor_s=0.001,
        host=HostTime(step_s=0.002, seq_s=0.0, error=ErrorSummary.of([1.0], [1.0])),
        ranges={"decode": Range(num_steps=9, bounds=bounds)},
        held_out={},
        other_runs={},
        noise=None,
        num_steps=9,
        num_first=0,
        num_trimmed=0,
        memory=Memory(num_blocks=256, block_size=16, kv_tokens=4096),
        provenance=Provenance(sources=["run"], tp=1, depths=[1], versions={}),
    )
    calibration.save(folder / "calibration.json")
    return folder / "calibration.json"


def test_calibrated_steps_in_the_measured_pool(cli: Cli, tmp_path: Path) -> None:
    path = calibration_file(tmp_path)
    given = ("latency=calibrated", f"latency.path={path}")
    code, out, _ = cli(*SMALL[:4], *QUICK, *given, "block_size=8", "max_step_tokens=64")
    folder = folder_of(out)
    summary = summary_of(folder)
    assert code == 0
    assert (summary["kv_tokens"], summary["num_blocks"], summary["block_size"]) == (4096, 512, 8)
    assert summary["makespan_s"] == pytest.approx(0.012 * summary["num_steps"])
    assert summary["assumed"] == []
    assert summary["calibration"] == "made up"
    assert 0 < summary["outside_range"]["share"] < 1
    assert "the calibration was measured with tp 1, not 4" in summary["notes"]
    assert any("lie outside the calibrated range" in note for note in summary["notes"])
    assert all(f"note         {note}" in out for note in summary["notes"])
    assert (folder / "inputs" / "calibration.json").read_bytes() == path.read_bytes()
    code, out, err = cli(*SMALL, *QUICK, *given, "latency.outside=refuse")
    assert (code, out) == (2, "")
    assert "latency.outside is refuse, and a step lies outside" in err


def test_files_of_lengths_are_copied_in(cli: Cli, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("7\n9\n")
    overrides = ("workload.num_prompts=2", "workload.prompt=50", f"workload.output=empirical:{lengths}")
    folder = folder_of(cli(*overrides, *QUICK)[1])
    assert {row["output_tokens"] for row in rows_of(folder / "requests.csv")} == {"7", "9"}
    assert (folder / "inputs" / "lengths.txt").read_text() == "7\n9\n"


def test_replay_of_a_real_run(cli: Cli, tmp_path: Path) -> None:
    run = ("run", "device=cpu", "workload.num_prompts=3", "sampling.n=2", "sampling.max_tokens=8", "num_blocks=8")
    assert main([*run, f"hydra.run.dir={tmp_path / 'real'}"]) == 0
    capacity = json.loads((tmp_path / "real" / "summary.json").read_text())
    code, out, _ = cli(f"replay={tmp_path / 'real'}")
    summary = summary_of(folder_of(out))
    assert code == 0
    assert summary["exact"] is True
    assert summary["num_steps"] == capacity["num_steps"] > 5
    assert "exact" in out

    log = tmp_path / "real" / "steps.jsonl"
    lines = log.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if '"step":3,' in line and '"plan"' in line)
    event = json.loads(lines[number])
    event["lengths"][0] += 1
    lines[number] = json.dumps(event)
    log.write_text("\n".join(lines) + "\n")
    code, out, _ = cli(f"replay={tmp_path / 'real'}")
    assert code == 1
    assert summary_of(folder_of(out))["first_difference"]["step"] == 3


def test_refused_requests_are_rows_and_the_others_are_simulated(cli: Cli) -> None:
    mixed = ("workload.prompt={dist: uniform, low: 100, high: 3000}", "workload.num_prompts=20")
    code, out, err = cli(*SMALL, *mixed, *QUICK)
    rows = rows_of(folder_of(out) / "requests.csv")
    refused = [row for row in rows if row["finish_reason"] == "refused"]
    assert code == 2
    assert 0 < len(refused) < len(rows) == 80
    assert all("can never fit the cache" in row["reason"] for row in refused)
    assert f"paged: {len(refused)} of 80 requests were refused, the first is a prompt of" in err
    assert summary_of(folder_of(out))["num_samples"] == 80 - len(refused)


def test_a_pool_without_a_block_is_one_sentence(cli: Cli) -> None:
    code, out, err = cli(*SMALL, "num_blocks=null", "tp=1", "gpu_memory_utilization=0.5")
    assert (code, out) == (2, "")
    assert err.startswith("paged: no block of the cache fits: weights, activations and context take 16.26 of the 11.03")
    assert "tp=2 would do" in err


def test_sweep(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = ("num_blocks=null", "tp=1,4", "gpu_memory_utilization=0.5,0.9")
    code, out, err = cli("-m", *SMALL[:4], *cores, *QUICK, "optimize=-tokens_per_s_end_to_end")
    *table, last = out.splitlines()
    assert code == 0, "what cannot be is an answer"
    assert table[0].split()[:3] == ["tp", "gpu_memory_utilization", "tokens_per_s_end_to_end"]
    rates = [float(line.split()[2].replace(",", "")) for line in table[1:4]]
    assert rates == sorted(rates, reverse=True)
    assert table[4].startswith("1   0.5 ")
    assert "no block of the cache fits" in table[4]
    assert len(table) == 5
    assert {"sweep.csv", "sweep.json", "sweep.png", "0", "3"} <= {path.name for path in Path(last).iterdir()}
    assert summary_of(Path(last) / "0")["feasible"] is False
    assert "Traceback" not in err


def test_a_sweep_goes_on_after_a_mistake_and_the_table_names_it(cli: Cli) -> None:
    code, out, err = cli("-m", *SMALL, *QUICK, "policy=watermark", "policy.fraction=2,0.1")
    assert code == 2
    assert "job 0: policy.fraction must be" in err
    assert out.splitlines()[1].startswith("0.1 ")
    assert "policy.fraction must be" in out.splitlines()[2]


def test_refusals_in_a_sweep_are_rows_that_say_why(cli: Cli) -> None:
    code, out, _ = cli("-m", *SMALL[:4], *QUICK, "num_blocks=10,125")
    lines = out.splitlines()
    assert code == 0
    assert lines[1].startswith("125 ")
    assert "24 of 24 requests were refused" in lines[2]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["optimize=speed"], "optimize must be one of makespan_s, elapsed_s, tokens_per_s_end_to_end"),
        (["seeds=0"], "seeds must be a whole number, 1 to 1000, not 0"),
        (["num_blocks=0"], "num_blocks must be a whole number, at least 1, not 0"),
        (["tp=3"], "tp must divide num_attention_heads 32"),
        (["depht=2"], "depht is not a key of this config; did you mean depth?"),
        (["workload=arithmetic"], "workload must be one that knows its lengths"),
        (
            ["workload=trace", "workload.path=nowhere.csv"],
            "workload.path must be a trace: 'nowhere.csv' cannot be read",
        ),
        (["replay=nowhere"], "replay must be the folder of a run"),
    ],
)
def test_mistakes_are_one_sentence(cli: Cli, overrides: list[str], sentence: str) -> None:
    code, out, err = cli(*overrides)
    assert (code, out) == (2, "")
    assert err.startswith(f"paged: {sentence}")
    assert err.count("\n") == 1


def test_ctrl_c_keeps_what_there_is(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pressed(InterruptRequest):
        def __init__(self) -> None:
            self.requested = True

    monkeypatch.setattr(paged.simulate, "InterruptRequest", Pressed)
    code, out, err = cli("workload.num_prompts=4", "seeds=2")
    folder = folder_of(out)
    summary = summary_of(folder)
    assert code == 130
    assert "paged: interrupted" in err
    assert summary["interrupted"] is True
    assert len(summary["seeds"]) == 1
    assert 0 < summary["num_samples"] < 16 == len(rows_of(folder / "requests.csv"))
    assert summary["num_steps"] == len(rows_of(folder / "steps.csv"))
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_what_is_cut_short_is_not_in_the_means(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second of three seeds."""
    simulated = []

    def simulate(*given: Any, **options: Any) -> Any:
        simulated.append(paged.sim.driver.simulate(*given, **options))
        simulated[-1].interrupted = len(simulated) == 2
        return simulated[-1]

    monkeypatch.setattr(paged.simulate, "simulate", simulate)
    code, out, _ = cli(*SMALL, *QUICK, "seeds=3")
    folder = folder_of(out)
    assert (code, len(simulated)) == (130, 2)
    assert summary_of(folder)["interrupted"] is True
    assert summary_of(folder)["seeds"] == [0]
    assert not (folder / "seeds.csv").exists()


def test_a_folder_is_never_written_over(cli: Cli) -> None:
    folder = folder_of(cli(*SMALL, *QUICK)[1])
    code, out, err = cli(*SMALL, *QUICK, f"hydra.run.dir={folder}")
    assert (code, out) == (2, "")
    assert err.startswith("paged: hydra.run.dir must be a new folder")


def test_a_simulation_that_gets_nowhere_says_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(*_: Any, **__: Any) -> None:
        raise RuntimeError("no progress in 100,000 steps")

    monkeypatch.setattr(paged.simulate, "simulate", stuck)
    code, out, err = cli(*SMALL)
    assert (code, out) == (1, "")
    assert "paged: the simulation cannot go on: no progress in 100,000 steps\n" in err
