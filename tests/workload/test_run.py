"""Checks `run` on workloads with lengths: exact lengths, shared ids, arrivals on the clock, resuming, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from command_tools import commands, folder_of
from paged.workload.prompts import PromptsWorkload
from paged.workload.trace import TraceWorkload

REPOSITORY = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 12
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "torch_dtype": "float32",
    "hidden_act": "silu",
}
ROLLOUT = ("workload=rollout", "workload.num_prompts=4", "workload.num_samples=3", "workload.prompt=uniform:20:40")
ROLLOUT += ("workload.output=uniform:1:30", "workload.cap=25")

Run = Callable[..., tuple[int, Path, str]]


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A model of a small vocabulary, so that its end token is drawn often, in a small pool."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return ["run", f"model.path={tmp_path / 'model'}", "weights=dummy", "device=cpu", "num_blocks=200"]


@pytest.fixture
def run(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Runs a workload in this process; exit code, folder, errors."""
    with commands(tmp_path, monkeypatch, capsys, *arguments) as cli:

        def call(*overrides: str) -> tuple[int, Path, str]:
            code, out, err = cli(*overrides)
            return code, folder_of(out) if out else Path(), err

        yield call


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def results_of(folder: Path) -> dict[str, dict[str, Any]]:
    rows = {f"{row['id']}/{row['sample']}": row for row in lines_of(folder / "results.jsonl")}
    assert len(rows) == len(lines_of(folder / "results.jsonl"))
    return rows


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_samples_are_as_long_as_was_drawn_and_end_by_nothing_else(run: Run) -> None:
    code, folder, _ = run(*ROLLOUT)
    assert code == 0
    prompts = lines_of(folder / "inputs" / "prompts.jsonl")
    rows = results_of(folder)
    assert len(rows) == len(prompts) == 12
    for line in prompts:
        row = rows[f"{line['id']}/0"]
        assert (line["n"], line["max_tokens"], line["arrival_s"]) == (1, 25, 0.0)
        assert row["prompt_token_ids"] == line["prompt_token_ids"]
        assert set(row["prompt_token_ids"]) <= set(range(VOCAB_SIZE))
        assert len(row["token_ids"]) == line["output_len"] <= 25
        assert row["finish_reason"] == ("length" if line["output_len"] == 25 else "stop")
    assert {row["finish_reason"] for row in rows.values()} == {"length", "stop"}
    # The model's own end token was drawn on the way, and did not end the sample.
    assert sum(0 in row["token_ids"][:-1] for row in rows.values()) >= 3
    openings: list[set[tuple[int, ...]]] = []
    for prompt in range(4):
        mine = [rows[f"rollout-{prompt}-{sample}/0"] for sample in range(3)]
        assert len({tuple(row["prompt_token_ids"]) for row in mine}) == 1
        openings.append({tuple(row["token_ids"][:5]) for row in mine if len(row["token_ids"]) >= 5})
    # Each sample has noise of its own.
    assert max(map(len, openings)) > 1
    assert json.loads((folder / "summary.json").read_text())["cached_tokens"] > 0


def test_sampling_stays_the_users_and_the_noise_the_samples(run: Run) -> None:
    greedy = results_of(run(*ROLLOUT, "sampling.temperature=0", "sampling.n=1")[1])
    for prompt in range(4):
        mine = sorted((greedy[f"rollout-{prompt}-{sample}/0"]["token_ids"] for sample in range(3)), key=len)
        assert all(tokens == mine[-1][: len(tokens)] for tokens in mine)
    first, second = results_of(run(*ROLLOUT)[1]), results_of(run(*ROLLOUT, "seed=1")[1])
    assert {name: len(row["token_ids"]) for name, row in first.items()} == {
        name: len(row["token_ids"]) for name, row in second.items()
    }
    assert any(first[name]["token_ids"] != second[name]["token_ids"] for name in first)


def test_a_run_can_be_simulated_from_its_prompts_or_its_results(run: Run) -> None:
    folder = run(*ROLLOUT, "workload.rate=200")[1]
    told = {
        line["id"]: (len(line["prompt_token_ids"]), line["output_len"], line["arrival_s"])
        for line in lines_of(folder / "inputs" / "prompts.jsonl")
    }
    again = PromptsWorkload(path=folder / "inputs" / "prompts.jsonl").jobs()
    assert {job.id: (len(job.prompt), job.output_len, job.arrival_s) for job in again} == told
    trace = TraceWorkload(path=folder, format="auto", speedup=1.0, max_requests=None, cap=None, seed=0).jobs()
    assert {job.id: (len(job.prompt), job.output_len, job.arrival_s) for job in trace} == {
        f"{name}-0": lengths for name, lengths in told.items()
    }
    assert [job.id for job in trace] == [f"{job.id}-0" for job in again]


def test_traces_with_hashes_share_blocks_in_the_engine(run: Run, tmp_path: Path) -> None:
    shared = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}
    path = write(tmp_path / "mooncake.jsonl", shared, {**shared, "hash_ids": [7, 9]}, {**shared, "output_length": 0})
    code, folder, err = run("workload=trace", f"workload.path={path}", "prefix_reuse=true")
    assert code == 0
    assert "1 of 3 requests generated no token, which counts as one" in err
    rows = results_of(folder)
    prompts = [rows[f"line-{number}/0"]["prompt_token_ids"] for number in (1, 2, 3)]
    assert prompts[0] == prompts[2]
    assert prompts[0][:512] == prompts[1][:512]
    assert prompts[0][512:] != prompts[1][512:]
    assert [len(rows[f"line-{number}/0"]["token_ids"]) for number in (1, 2, 3)] == [3, 3, 1]
    assert json.loads((folder / "summary.json").read_text())["cached_tokens"] >= 512 + 592


def test_a_users_own_lines_can_have_lengths(run: Run, tmp_path: Path) -> None:
    lines = [
        {"id": "a", "prompt_token_ids": [1, 2], "output_len": 20, "n": 2},
        {"id": "b", "prompt_token_ids": [1, 2], "output_len": 20, "max_tokens": 6, "n": 1},
        {"id": "c", "prompt_token_ids": [1, 2], "output_len": 0},
    ]
    path = write(tmp_path / "p.jsonl", *lines)
    code, folder, err = run("workload=prompts", f"workload.path={path}", "sampling.max_tokens=50")
    assert code == 2
    assert "1 of 3 lines were refused, the first is c: line 3: output_len must be a whole number from 1" in err
    rows = results_of(folder)
    assert [len(rows[name]["token_ids"]) for name in ("a/0", "a/1", "b/0")] == [20, 20, 6]
    assert [rows[name]["finish_reason"] for name in ("a/0", "b/0", "c/None")] == ["stop", "length", "refused"]


# Arrivals


def test_lines_are_added_when_their_time_has_come(run: Run, tmp_path: Path) -> None:
    """Not in the file's order, never before their time, and the run goes on when nothing is left meanwhile."""
    times = {"late": 0.3, "now": 0.0, "soon": 0.1, "again": 0.1}
    lines = [{"id": name, "prompt_token_ids": [1], "output_len": 2, "arrival_s": time} for name, time in times.items()]
    path = write(tmp_path / "p.jsonl", *lines, {"id": "lost", "prompt_token_ids": [99], "arrival_s": 0.2})
    code, folder, err = run("workload=prompts", f"workload.path={path}", "sampling.n=1")
    assert code == 2
    assert "1 of 5 lines were refused, the first is lost: line 5: " in err
    adds = {event["id"]: event["time_s"] for event in lines_of(folder / "steps.jsonl") if event["event"] == "add"}
    assert list(adds) == ["now", "soon", "again", "late"]
    assert adds["late"] - adds["now"] >= 0.25
    rows = results_of(folder)
    assert {name.split("/")[0] for name, row in rows.items() if row["finish_reason"] == "stop"} == set(times)
    assert rows["lost/None"]["finish_reason"] == "refused"
    assert json.loads((folder / "summary.json").read_text())["interrupted"] is False


def test_ctrl_c_ends_a_run_that_waits_and_resuming_does_not_wait_again(arguments: list[str], tmp_path: Path) -> None:
    lines = [{"id": str(time), "prompt_token_ids": [1], "output_len": 2, "arrival_s": time} for time in (0, 10_000)]
    path = write(tmp_path / "p.jsonl", *lines)
    folder = tmp_path / "waits"
    given = [*arguments, "workload=prompts", f"workload.path={path}", "sampling.n=1", f"hydra.run.dir={folder}"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "paged"]
    process = subprocess.Popen(
        [*command, *given], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 120
        while not (results := folder / "results.jsonl").is_file() or not results.stat().st_size:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert list(results_of(folder)) == ["0/0"]
    assert json.loads((folder / "summary.json").read_text())["interrupted"] is True
    done = subprocess.run([*command, "run", f"resume={folder}"], cwd=tmp_path, env=environment, timeout=120)
    assert done.returncode == 0
    assert list(results_of(folder)) == ["0/0", "10000/0"]
