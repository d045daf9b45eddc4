"""`python -m paged run tp=2` as a user meets it: the tokens of one rank, one folder, one sentence, and resuming."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tp_faults
from paged import Engine, engine_ranks
from paged.app import main
from paged.runner import launched, ranks
from tp_tools import QWEN3, is_there, pids, save_model

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
GREEDY = ("device=cpu", "dtype=float32", "workload.num_prompts=3", "sampling.n=1", "sampling.temperature=0")
SHORT = (*GREEDY, "sampling.max_tokens=12")


def run(folder: Path, *overrides: str, code: int = 0, launcher: tuple[str, ...] = ()) -> tuple[str, str]:
    """`python -m paged run` in a process of its own; its two outputs."""
    command = [sys.executable, *launcher, "-m", "paged", "run", f"hydra.run.dir={folder}", *overrides]
    done = subprocess.run(command, cwd=folder.parent, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def tokens_of(folder: Path) -> dict[tuple[str, int], list[int]]:
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert len({(row["id"], row["sample"]) for row in rows}) == len(rows), "a sample has two rows"
    return {(row["id"], row["sample"]): row["token_ids"] for row in rows}


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single") / "run"
    run(folder, *SHORT)
    return folder


def test_two_ranks_give_the_tokens_of_one(single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = run(tmp_path / "two", "tp=2", *SHORT)
    assert tokens_of(tmp_path / "two") == tokens_of(single)
    assert len(tokens_of(single)) == 3
    one, two = summary_of(single), summary_of(tmp_path / "two")
    assert (one["tp"], two["tp"]) == (1, 2)
    names = ("num_steps", "preemptions", "forward_tokens", "output_tokens", "finish_reasons")
    assert [one[name] for name in names] == [two[name] for name in names]
    assert out.splitlines()[-1] == str(tmp_path / "two")
    assert err.count("samples to come") == 1, "another rank writes, too"
    assert "Warning" not in err
    # The step log is that of one rank, and the simulator makes the same plans from it.
    logs = [
        [json.loads(line)["event"] for line in (each / "steps.jsonl").open()] for each in (single, tmp_path / "two")
    ]
    assert logs[0] == logs[1]
    monkeypatch.chdir(tmp_path)
    assert main(["sim", f"replay={tmp_path / 'two'}", f"hydra.run.dir={tmp_path / 'replay'}"]) == 0
    assert summary_of(tmp_path / "replay")["exact"] is True


def test_ranks_that_torchrun_has_started_are_joined(single: Path, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    out, err = run(tmp_path / "joined", "tp=2", *SHORT, launcher=launcher)
    assert tokens_of(tmp_path / "joined") == tokens_of(single)
    assert out.count("throughput") == 1
    assert out.splitlines()[-1] == str(tmp_path / "joined")
    assert err.count("samples to come") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["joined"], "another rank made a folder, too"

    out, err = run(tmp_path / "refused", "tp=1", *SHORT, launcher=launcher, code=1)
    assert err.count("paged: tp must be 2, the number of processes started together, not 1") == 1
    assert out == ""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE in the environment must be a whole number, at least 2, not 'x'"),
        ({"RANK": "2"}, "RANK in the environment must be a whole number, 0 to 1, not '2'"),
        ({"LOCAL_WORLD_SIZE": "-1"}, "LOCAL_WORLD_SIZE in the environment must be a whole number, 1 to 2, not '-1'"),
    ],
)
def test_an_environment_that_cannot_be_is_one_sentence(
    changed: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sane = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**sane, **changed}.items():
        monkeypatch.setenv(name, value)
    launched.place.cache_clear()
    assert main(["run"]) == 2
    launched.place.cache_clear()
    assert capsys.readouterr().err == f"paged: {said}\n"


def test_a_sweep_over_numbers_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A number that the model can't be cut over is a mistake as any other: told in a line and in the row of its job."""
    monkeypatch.chdir(tmp_path)
    model = save_model(tmp_path / "model")
    lengths = ("workload=random", "workload.num_prompts=2", "workload.input_len=5", "workload.output_len=4")
    where = (f"model.path={model}", f"hydra.sweep.dir={tmp_path / 'sweep'}", "device=cpu", *lengths)
    assert main(["run", "-m", "tp=1,2,3", *where]) == 2
    assert "paged: job 2: tp must divide num_attention_heads 8, and divide" in capsys.readouterr().err
    summaries = [summary_of(tmp_path / "sweep" / point) for point in "012"]
    assert [summary.get("tp") for summary in summaries] == [1, 2, None]
    assert summaries[2]["reason"].startswith("tp must divide num_attention_heads 8, and divide")
    assert len({summary.get("num_steps") for summary in summaries[:2]}) == 1


@pytest.mark.parametrize("command", ["run", "plan", "sim"])
@pytest.mark.parametrize("tp", [3, 5, 0])
def test_an_impossible_number_is_refused_with_the_same_sentence(
    command: str, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    where = ["device=cpu"] if command == "run" else ["hardware=cpu"]
    assert main([command, f"model.path={save_model(tmp_path / 'model')}", "model=local", f"tp={tp}", *where]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    both = f"divide num_attention_heads {QWEN3.num_heads}, and divide or be a multiple of num_key_value_heads "
    both += str(QWEN3.num_kv_heads)
    words = {
        3: f"tp must {both}, not 3",
        5: f"tp must {both}, and divide intermediate_size {QWEN3.intermediate_size}, not 5",
        0: "tp must be a whole number, at least 1, not 0",
    }
    assert said == f"paged: {words[tp]}"


def test_a_lost_rank_ends_the_run_which_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    options = ("tp=2", "device=cpu", "dtype=float32", "workload.num_prompts=4", "sampling.n=2", "max_num_seqs=3")
    length = "sampling.max_tokens=40"
    whole = tmp_path / "whole"
    assert main(["run", *options, length, f"hydra.run.dir={whole}"]) == 0

    build = Engine.from_pretrained
    others: list[int] = []

    def built(*args: Any, **fields: Any) -> Engine:
        engine = build(*args, **fields)
        assert engine._leader is not None
        (process,) = engine._leader.ranks.processes
        others.append(process.pid)

        def kill_later() -> None:
            while not (folder / "results.jsonl").is_file() or not (folder / "results.jsonl").read_text().count("\n"):
                time.sleep(0.005)
            os.kill(process.pid, signal.SIGKILL)

        threading.Thread(target=kill_later, daemon=True).start()
        return engine

    monkeypatch.setattr(Engine, "from_pretrained", built)
    capsys.readouterr()
    assert main(["run", *options, length, f"hydra.run.dir={folder}"]) == 1
    err = capsys.readouterr().err
    say = "paged: rank 1 was killed by SIGKILL; what is finished is kept, continue with: python -m paged run resume="
    assert say in err
    assert "Traceback" not in err
    assert not any(map(is_there, others))
    kept = tokens_of(folder)
    assert 0 < len(kept) < 8
    assert summary_of(folder) == {"interrupted": True, "reason": "rank 1 was killed by SIGKILL"}

    monkeypatch.setattr(Engine, "from_pretrained", build)
    assert main(["run", f"resume={folder}"]) == 0
    assert tokens_of(folder) == tokens_of(whole)
    assert summary_of(folder)["interrupted"] is False


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("num_blocks must be smaller"), 2, "paged: num_blocks must be smaller"),
        (KeyboardInterrupt(), 130, "paged: interrupted; what is finished is kept"),
    ],
    ids=["mistake", "Ctrl-C"],
)
def test_what_rank_0_meets_while_others_load_is_not_theirs(
    error: BaseException,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(tp_faults.FAULT, "slow_to_load")
    monkeypatch.setenv(tp_faults.MARKS, str(tmp_path))
    monkeypatch.setattr(ranks, "FOLLOWER", "tp_faults")

    def build(*args: Any) -> Any:
        # A second without a message: signs of life have come.
        time.sleep(1)
        raise error

    monkeypatch.setattr(engine_ranks, "build_parts", build)
    assert main(["run", "tp=2", *SHORT, f"hydra.run.dir={tmp_path / 'run'}"]) == code
    assert said in capsys.readouterr().err
    assert (tmp_path / "rank1").exists()


def test_a_rank_that_is_lost_after_the_last_sample_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ask = Engine.peak_bytes_by_rank
    killed: list[int] = []

    def kill_and_ask(engine: Engine) -> list[int]:
        killed.extend(pids(engine))
        os.kill(killed[0], signal.SIGKILL)
        return ask(engine)

    monkeypatch.setattr(Engine, "peak_bytes_by_rank", kill_and_ask)
    assert main(["run", "tp=2", *SHORT, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    assert len(killed) == 1
    assert summary_of(tmp_path / "run")["interrupted"] is False
    assert len(tokens_of(tmp_path / "run")) == 3


def test_ctrl_c_in_the_step_that_finishes_a_sample_keeps_it(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    step = Engine.run_step

    def interrupted(engine: Engine) -> list[Any]:
        updates = step(engine)
        if engine.scheduler.counters.num_finished == 1:
            os.kill(os.getpid(), signal.SIGINT)
            assert not any(update.output for update in updates), "the sample has been handed out already"
        return updates

    monkeypatch.setattr(Engine, "run_step", interrupted)
    folder = tmp_path / "run"
    assert main(["run", "tp=2", *SHORT, "max_num_seqs=1", f"hydra.run.dir={folder}"]) == 130
    summary = summary_of(folder)
    (key,) = tokens_of(folder)
    assert tokens_of(folder)[key] == tokens_of(single)[key]
    assert (summary["num_samples"], summary["output_tokens"]) == (1, len(tokens_of(single)[key]))
    counted = summary["tokens_per_s_end_to_end"] * summary["elapsed_s"]
    assert counted == pytest.approx(len(tokens_of(single)[key]))


def started_run(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """`python -m paged run` into ``folder``, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "paged", "run", *overrides, f"hydra.run.dir={folder}"],
        cwd=folder.parent,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def num_commits(folder: Path) -> int:
    steps = folder / "steps.jsonl"
    return steps.read_text().count('"commit"') if steps.is_file() else 0


def wait_for_commits(process: subprocess.Popen[str], folder: Path, number: int) -> None:
    deadline = time.monotonic() + 60
    while num_commits(folder) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_time_in_which_rank_0_is_stopped_does_not_count(tmp_path: Path) -> None:
    """Ctrl-Z for longer than tp_timeout_s, and fg."""
    folder = tmp_path / "run"
    process = started_run(folder, "tp=2", "tp_timeout_s=2", "device=cpu", "workload.num_prompts=40")
    try:
        wait_for_commits(process, folder, 3)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(4)
        before = num_commits(folder)
        os.kill(process.pid, signal.SIGCONT)
        wait_for_commits(process, folder, before + 5)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, err


def test_ctrl_c_ends_all_ranks_after_a_step(tmp_path: Path) -> None:
    """As a terminal sends it: to the whole process group."""
    folder = tmp_path / "run"
    process = started_run(folder, "tp=2", "device=cpu", "workload.num_prompts=100")
    wait_for_commits(process, folder, 3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "paged: interrupted; what is finished is kept" in err
    assert "Traceback" not in err
    assert not any(is_there(int(pid)) for pid in children)
