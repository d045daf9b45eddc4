"""Checks `python -m paged sim` as a user meets it: folders, tables, sweeps, seeds, refusals, Ctrl-C and mistakes."""

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paged.sim.driver
import paged.simulate
from command_tools import Cli, commands, folder_of
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


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Runs `python -m paged sim` in this process and in an empty folder; exit code, output, errors."""
    with commands(tmp_path, monkeypatch, capsys, "sim") as call:
        yield call


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


def test_what_a_file_does_not_tell_is_said_once_for_all_seeds(cli: Cli, tmp_path: Path) -> None:
    """The file was read once more for the second seed, and all its warnings came twice."""
    prompts, trace = tmp_path / "prompts.jsonl", tmp_path / "trace.csv"
    prompts.write_text('{"prompt_token_ids": [3], "n": 1, "max_tokens": 4}\n')
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,100,0\n")
    for name, path, warning in (
        ("prompts", prompts, "1 of 1 lines have no output_len"),
        ("trace", trace, "1 of 1 requests generated no token"),
    ):
        code, out, err = cli(f"workload={name}", f"workload.path={path}", *QUICK, "seeds=3")
        assert code == 0
        assert err.count(warning) == 1
        assert err.count("does not depend on the seed") == 1
        assert len(summary_of(folder_of(out))["seeds"]) == 1


def calibration_file(folder: Path, **facts: Any) -> Path:
    """A calibration of decode steps of at most 8 sequences, 10 ms each, in a pool of 4,096 tokens."""
    bounds = {**dict.fromkeys(StepShape._fields, (0, 10_000)), "num_seqs": (1, 8)}
    known = {"model": "Goedel-Prover-V2-8B", "dtype": "bfloat16", "kv_dtype": "bfloat16", "tp": 4}
    known |= {"device": "NVIDIA A10G", "numerics": "invariant"}
    calibration = Calibration(
        name="made up",
        coefficients={"step": 0.01},
        floor_s=0.001,
        host=HostTime(step_s=0.002, seq_s=0.0, error=ErrorSummary.of([1.0], [1.0])),
        ranges={"decode": Range(num_steps=9, bounds=bounds)},
        held_out={"all": ErrorSummary.of([1.1], [1.0])},
        other_runs={},
        noise=None,
        num_steps=9,
        num_first=0,
        num_trimmed=0,
        memory=Memory(num_blocks=256, block_size=16, kv_tokens=4096),
        provenance=Provenance(sources=["run"], depths=[1], versions={}, **(known | facts)),
    )
    calibration.save(folder / "calibration.json")
    return folder / "calibration.json"


def test_calibrated_steps_in_the_measured_pool(cli: Cli, tmp_path: Path) -> None:
    path = calibration_file(tmp_path)
    given = ("latency=calibrated", f"latency.path={path}")
    code, out, _ = cli(*SMALL[:4], *QUICK, *given, "block_size=8", "max_step_tokens=64", "gpu_memory_utilization=0.5")
    folder = folder_of(out)
    summary = summary_of(folder)
    assert code == 0
    assert (summary["kv_tokens"], summary["num_blocks"], summary["block_size"]) == (4096, 512, 8)
    assert summary["makespan_s"] == pytest.approx(0.012 * summary["num_steps"])
    assert summary["assumed"] == []
    assert summary["calibration"] == "made up"
    assert 0 < summary["outside_range"]["share"] < 1
    step_times, pool, outside = summary["notes"]
    assert step_times == (
        "step times are those of made up: numerics invariant; hardware NVIDIA A10G; "
        "held-out steps off by 10.0% in the median"
    )
    assert pool == (
        "the pool is that of the runs measured, 4,096 tokens, whatever gpu_memory_utilization and memory say"
    )
    assert "lie outside the calibrated range: " in outside
    assert all(f"note         {note}" in out for note in summary["notes"])
    assert (folder / "inputs" / "calibration.json").read_bytes() == path.read_bytes()
    code, out, err = cli(*SMALL, *QUICK, *given, "latency.outside=refuse")
    assert (code, out) == (2, "")
    assert "latency.outside is refuse, and a step lies outside" in err


@pytest.mark.parametrize(
    ("facts", "overrides", "words"),
    [
        ({"model": "tiny"}, (), "model tiny (here Goedel-LM/Goedel-Prover-V2-8B)"),
        ({"tp": 1}, (), "tp 1 (here 4)"),
        ({"numerics": "fast"}, (), "numerics fast (here invariant)"),
        ({}, ("numerics=fast",), "numerics invariant (here fast)"),
        ({}, ("tp=2",), "tp 4 (here 2)"),
        ({"dtype": "float16"}, (), "dtype float16 (here bfloat16)"),
        ({"kv_dtype": "fp8"}, (), "kv_dtype fp8 (here bfloat16)"),
        ({"device": "cpu"}, (), "hardware cpu (here a10g)"),
        ({"device": "NVIDIA A10"}, (), "hardware NVIDIA A10 (here a10g)"),
        ({"model": "tiny", "tp": 2}, (), "model tiny (here Goedel-LM/Goedel-Prover-V2-8B), tp 2 (here 4)"),
    ],
)
def test_a_foreign_calibration_is_refused_unless_asked_for(
    facts: dict[str, Any], overrides: tuple[str, ...], words: str, cli: Cli, tmp_path: Path
) -> None:
    """Its pool was taken for that of an 8B model on four cards."""
    given = ("latency=calibrated", f"latency.path={calibration_file(tmp_path, **facts)}", *overrides)
    code, out, err = cli(*SMALL[:4], *QUICK, *given)
    assert (code, out) == (2, "")
    assert err == (
        f"paged: latency.path must be a calibration of what is simulated, and it was measured with {words}; "
        "latency.foreign=true uses it none the less\n"
    )
    code, out, _ = cli(*SMALL[:4], *QUICK, *given, "latency.foreign=true")
    summary = summary_of(folder_of(out))
    assert code == 0
    assert f"the calibration is foreign: it was measured with {words}" in summary["notes"]
    counted = summary_of(folder_of(cli(*SMALL[:4], *QUICK, *overrides)[1]))
    assert summary["kv_tokens"] == counted["kv_tokens"] != 4096
    assert not any("pool is that of the runs" in note for note in summary["notes"])
    assert summary["makespan_s"] == pytest.approx(0.012 * summary["num_steps"])


def test_what_a_calibration_does_not_say_is_told(cli: Cli, tmp_path: Path) -> None:
    path = calibration_file(tmp_path, model=None, device=None)
    code, out, _ = cli(*SMALL[:4], *QUICK, "latency=calibrated", f"latency.path={path}")
    summary = summary_of(folder_of(out))
    assert (code, summary["kv_tokens"]) == (0, 4096)
    assert "it does not say its model, hardware, so that is taken to be the config's" in summary["notes"][0]


def test_files_of_lengths_are_copied_in(cli: Cli, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("7\n9\n")
    overrides = ("workload.num_prompts=2", "workload.prompt=50", f"workload.output=empirical:{lengths}")
    folder = folder_of(cli(*overrides, *QUICK)[1])
    assert {row["output_tokens"] for row in rows_of(folder / "requests.csv")} == {"7", "9"}
    assert (folder / "inputs" / "lengths.txt").read_text() == "7\n9\n"


def test_a_simulation_of_results_is_the_same_from_its_own_copy(cli: Cli, tmp_path: Path) -> None:
    """Results alone tell neither when the prompts came nor in which order they were asked for."""
    run = tmp_path / "run"
    (run / "inputs").mkdir(parents=True)
    prompts = [
        {"id": name, "prompt_token_ids": [1, 2], "n": 1, "arrival_s": time} for name, time in (("b", 0), ("a", 9))
    ]
    (run / "inputs" / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    done = {"sample": 0, "prompt_token_ids": [1, 2], "finish_reason": "stop"}
    rows = [{"id": name, "token_ids": [3] * size, **done} for name, size in (("a", 5), ("b", 7))]
    (run / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for given in (
        "workload=trace workload.path={}",
        "workload=poisson workload.num_prompts=20 workload.output=empirical:{}",
    ):
        first = folder_of(cli(*given.format(run).split(), *QUICK)[1])
        again = folder_of(cli(*given.format(first / "inputs" / "results.jsonl").split(), *QUICK)[1])
        assert (again / "requests.csv").read_bytes() == (first / "requests.csv").read_bytes()
    arrivals = [
        float(row["arrival_s"])
        for row in rows_of(folder_of(cli("workload=trace", f"workload.path={run}", *QUICK)[1]) / "requests.csv")
    ]
    assert arrivals == [0, 9]


def test_inputs_of_one_name_are_both_copied(cli: Cli, tmp_path: Path) -> None:
    for name, text in (("prompts", "7\n"), ("outputs", "9\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lengths.txt").write_text(text)
    lengths = [f"workload.{name}=empirical:{tmp_path / f'{name}s' / 'lengths.txt'}" for name in ("prompt", "output")]
    inputs = folder_of(cli("workload.num_prompts=2", *lengths, *QUICK)[1]) / "inputs"
    assert (inputs / "lengths.txt").read_text() == "7\n"
    assert (inputs / "other" / "lengths.txt").read_text() == "9\n"


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


@pytest.fixture
def real(cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder of a run of the engine."""
    run = ("run", "device=cpu", "workload.num_prompts=1", "sampling.n=2", "sampling.max_tokens=4")
    assert main([*run, f"hydra.run.dir={tmp_path / 'real'}"]) == 0
    capsys.readouterr()
    return tmp_path / "real"


def test_a_replay_predicts_times_with_the_latency_asked_for(cli: Cli, real: Path, tmp_path: Path) -> None:
    assert summary_of(folder_of(cli(f"replay={real}")[1]))["predicted_step_error"] is None
    tiny = ("model=tiny", "hardware=cpu", "tp=1")
    summary = summary_of(folder_of(cli(f"replay={real}", *tiny)[1]))
    assert summary["predicted_step_error"]["num_steps"] == summary["num_steps"] > 3
    assert summary["notes"] == []
    code, out, _ = cli(f"replay={real}", "hardware=h200")
    (note,) = summary_of(folder_of(out))["notes"]
    assert code == 0
    assert note == (
        "the times predicted are not of this run, but of model Goedel-LM/Goedel-Prover-V2-8B (the run's is tiny), "
        "tp 4 (the run's is 1), hardware h200 (the run's is cpu)"
    )
    assert f"note         {note}" in out
    same = {"model": "tiny", "tp": 1, "device": "cpu", "numerics": "invariant"}
    calibrated = ("latency=calibrated", f"latency.path={calibration_file(tmp_path, **same)}")
    outside, *others = summary_of(folder_of(cli(f"replay={real}", *calibrated)[1]))["notes"]
    assert "lie outside the calibrated range" in outside
    assert others == []
    calibration_file(tmp_path, **{**same, "numerics": "fast"})
    notes = summary_of(folder_of(cli(f"replay={real}", *calibrated)[1]))["notes"]
    assert notes[0] == "the times predicted are not of this run, but of numerics fast (the run's is invariant)"
    code, out, err = cli(f"replay={real}", *calibrated, "model=qwen3_8b")
    assert (code, out) == (2, "")
    assert "it was measured with model tiny (here Qwen/Qwen3-8B)" in err


def test_a_replay_uses_the_latency_of_an_experiment(cli: Cli, real: Path, tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - override /latency: roofline\n  - override /policy: reserve\n"
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(f"{text}latency: {{host: false}}\nnum_blocks: 7\n")
    extended = f"hydra.searchpath=[file://{tmp_path / 'conf'}]"
    code, out, _ = cli(f"replay={real}", "experiment=mine", extended)
    summary = summary_of(folder_of(out))
    assert code == 0
    assert summary["predicted_step_error"]["num_steps"] == summary["num_steps"]
    assert "not used of the experiment, because a replay takes it from the run: num_blocks, policy" in summary["notes"]


@pytest.mark.parametrize(
    "override",
    [
        *("policy=watermark", "policy=fifo", "num_blocks=5", "workload.seed=3", "seed=1", "memory.activation_gib=2"),
        *("numerics=fast", "sampling.n=1", "weights=dummy"),
    ],
)
def test_a_replay_refuses_what_it_has_no_use_for(override: str, cli: Cli, real: Path) -> None:
    code, out, err = cli(f"replay={real}", override)
    assert (code, out) == (2, "")
    key = override.partition("=")[0].partition(".")[0]
    assert err == (
        f"paged: {key} must not be given beside replay, which has no use for it; allowed: experiment, latency, model, "
        "tp, dtype, kv_dtype, hardware\n"
    )


def test_a_replay_without_a_plan_has_nothing_to_compare(cli: Cli, tmp_path: Path) -> None:
    run = ("run", "device=cpu", "workload=random", "workload.num_prompts=2", "workload.input_len=400", "num_blocks=3")
    assert main([*run, f"hydra.run.dir={tmp_path / 'refused'}"]) == 2
    code, _, err = cli(f"replay={tmp_path / 'refused'}")
    assert code == 2
    assert err.endswith(
        "paged: replay has nothing to compare: refused planned no step (0 samples were added to its scheduler)\n"
    )


def test_a_replay_is_no_point_of_a_sweep(cli: Cli) -> None:
    code, out, err = cli("-m", "replay=a,b")
    assert (code, out) == (2, "")
    assert err == "paged: replay must not be given in a sweep: replay one run's folder at a time\n"


def test_a_folder_that_cannot_be_replayed_is_told_plainly(cli: Cli, tmp_path: Path) -> None:
    for name in ("0", "1"):
        (tmp_path / "sweep" / name).mkdir(parents=True)
        (tmp_path / "sweep" / name / "steps.jsonl").write_text("")
    (tmp_path / "empty").mkdir()
    for name, reason in {
        "nowhere": "does not exist",
        "sweep": "is the folder of a sweep: give one of the folders in it, 0, 1",
        "empty": "holds no steps.jsonl, which every run leaves",
    }.items():
        folder = tmp_path / name
        code, out, err = cli(f"replay={folder}")
        assert (code, out, err) == (2, "", f"paged: replay must be the folder of a run: {folder} {reason}\n")


def test_refused_requests_are_rows_and_the_others_are_simulated(cli: Cli) -> None:
    mixed = ("workload.prompt={dist: uniform, low: 100, high: 3000}", "workload.num_prompts=20")
    code, out, err = cli(*SMALL, *mixed, *QUICK)
    rows = rows_of(folder_of(out) / "requests.csv")
    refused = [row for row in rows if row["finish_reason"] == "refused"]
    assert code == 2
    assert 0 < len(refused) < len(rows) == 80
    assert all("can never fit the cache" in row["reason"] for row in refused)
    assert f"paged: {len(refused)} of 80 requests were refused, the first is {refused[0]['id']}: a prompt of" in err
    assert summary_of(folder_of(out))["num_samples"] == 80 - len(refused)


def test_a_pool_without_a_block_is_one_sentence(cli: Cli) -> None:
    code, out, err = cli(*SMALL, "num_blocks=null", "tp=1", "gpu_memory_utilization=0.5")
    assert (code, out) == (2, "")
    assert err.startswith("paged: no block of the cache fits: weights, activations and context take 16.26 of the 11.03")
    assert err.endswith("tp=2 or cards of 32.52 GiB would do\n")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["memory.activation_gib=1000"], "memory.activation_gib=15.53 or cards of 1115.91 GiB would do"),
        (["hardware.memory_gib.value=0.1"], "of the 0.09 GiB that a card may hold; cards of 5.36 GiB would do"),
        (["hardware=cpu", "tp=1", "hardware.pool_gib.value=1e-7"], "hardware.pool_gib.value is 1e-07 GiB, and a block"),
    ],
)
def test_what_would_do_is_not_denied(cli: Cli, overrides: list[str], sentence: str) -> None:
    """`no single change would do`, it said of a single number that was given too large."""
    code, out, err = cli(*overrides)
    assert (code, out) == (2, "")
    assert sentence in err


def test_sweep(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = ("num_blocks=null", "tp=1,4", "gpu_memory_utilization=0.5,0.9")
    code, out, err = cli("-m", *SMALL[:4], *cores, *QUICK, "optimize=-tokens_per_s_end_to_end")
    *table, order, how, last = out.splitlines()
    assert code == 0, "what cannot be is an answer"
    assert table[0].split()[:4] == ["job", "tp", "gpu_memory_utilization", "tokens_per_s_end_to_end"]
    rates = [float(line.split()[3].replace(",", "")) for line in table[1:4]]
    assert rates == sorted(rates, reverse=True)
    assert table[4].split()[:3] == ["0", "1", "0.5"]
    assert "no block of the cache fits" in table[4]
    assert len(table) == 5
    assert order == "best first: the largest tokens_per_s_end_to_end; job is the folder"
    assert how.startswith("optimize=NAME sorts by another number")
    assert "paged: job" not in err
    assert {"sweep.csv", "sweep.json", "sweep.png", "0", "3"} <= {path.name for path in Path(last).iterdir()}
    assert summary_of(Path(last) / "0")["feasible"] is False
    assert "Traceback" not in err


def test_a_sweep_goes_on_after_a_mistake_and_the_table_names_it(cli: Cli) -> None:
    code, out, err = cli("-m", *SMALL, *QUICK, "policy=watermark", "policy.fraction=2,0.1")
    assert code == 2
    assert "job 0: policy.fraction must be" in err
    assert out.splitlines()[1].startswith("1    0.1 ")
    assert "policy.fraction must be" in out.splitlines()[2]


def test_ctrl_c_outside_of_a_simulation_leaves_the_table_of_a_sweep(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in its pictures, a job took the table of those before it away."""
    write, folders = paged.simulate._write_tables, []

    def interrupting(*args: Any) -> None:
        folders.append(args[-1])
        if len(folders) == 2:
            signal.raise_signal(signal.SIGINT)
        write(*args)

    monkeypatch.setattr(paged.simulate, "_write_tables", interrupting)
    code, out, err = cli("-m", *SMALL[:4], *QUICK, "num_blocks=124,125,126")
    assert code == 130
    assert err.endswith("paged: job 1: interrupted\n")
    assert sorted(line.split()[0] for line in out.splitlines()[1:3]) == ["0", "1"]
    assert (folder_of(out) / "sweep.csv").is_file()


def test_a_length_that_is_left_out_is_named(cli: Cli) -> None:
    """It was a traceback."""
    code, out, err = cli("workload.output.median=???")
    assert (code, out, err) == (2, "", "paged: workload.output.median must be given\n")


def test_a_sweep_by_no_number_is_refused_once_and_at_once(cli: Cli) -> None:
    code, out, err = cli("-m", *SMALL, *QUICK, "num_blocks=100,125", "optimize=throughput")
    sentence = "optimize must be a number of the summary, not 'throughput'; did you mean -tokens_per_s_end_to_end?"
    assert (code, out, err) == (2, "", f"paged: {sentence}\n")


def test_a_figure_that_is_given_is_not_assumed(cli: Cli) -> None:
    assumed = summary_of(folder_of(cli(*SMALL, *QUICK, "hardware.memory_bytes_per_s.value=5e11", "tp=8")[1]))["assumed"]
    assert "memory_bytes_per_s" not in assumed
    assert {"flops_per_s", "link_bytes_per_s"} <= set(assumed), "the link was measured on 4 cards"


def test_refusals_in_a_sweep_are_rows_that_say_why(cli: Cli) -> None:
    code, out, _ = cli("-m", *SMALL[:4], *QUICK, "num_blocks=10,125")
    lines = out.splitlines()
    assert code == 0
    assert lines[1].startswith("1    125 ")
    assert "24 of 24 requests were refused" in lines[2]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["optimize=speed"], "optimize must be one of makespan_s, elapsed_s, tokens_per_s_end_to_end"),
        (["plots=3"], "plots must be true or false, not 3"),
        (["hardware.memory_gib.assumed=1"], "hardware.memory_gib.assumed must be true or false, not 1"),
        (["seeds=0"], "seeds must be a whole number, 1 to 1000, not 0"),
        (["num_blocks=0"], "num_blocks must be a whole number, at least 1, not 0"),
        (["tp=3"], "tp must divide num_attention_heads 32"),
        (["optimize=ttft"], "optimize must be a number of the summary, not 'ttft'; did you mean ttft_s.mean?"),
        (["sampling.n=8"], "sampling.n must be 1 beside this workload, whose samples have their own number, lengths"),
        (["device=cpu"], "device must be auto or cuda beside hardware a10g, not cpu"),
        (["hardware=cpu", "device=cuda"], "device must be auto or cpu beside hardware cpu, not cuda"),
        (["sampling=5"], "sampling must hold keys and values, not 5"),
        (["num_prompts=500"], "num_prompts is not a key of this config; did you mean workload.num_prompts?"),
        (["workload.n=8"], "workload.n is not a key of this config; did you mean workload.num_samples?"),
        (
            ["workload.output=[1,2]"],
            "workload.output must be a length, a text such as lognormal:1200:0.9, or keys with dist, not [1,2]",
        ),
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
    # The first look comes when some requests have ended.
    monkeypatch.setattr(paged.sim.driver, "_STEPS_PER_CHECK", 2048)
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
    code, _, err = cli("-m", "workload.num_prompts=4", *QUICK)
    assert code == 130
    assert "paged: job 0: interrupted; the numbers are of what was simulated until then\n" in err


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


@pytest.mark.parametrize("override", ["num_blocks=100000000000000", "hardware.memory_gib.value=1e300"])
def test_a_number_too_large_is_one_line(cli: Cli, override: str) -> None:
    code, _, err = cli(override)
    assert code == 2
    assert err.splitlines()[-1].startswith("paged: ")
    assert "Traceback" not in err
