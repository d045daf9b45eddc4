"""Checks what commands say and leave where nothing can be written: full disks, full and closed standard streams.

A file of a folder is `/dev/full` where no byte fits from the start; a limit on files' sizes stands for a disk that
fills in the middle of a run.
"""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra.core.utils
import pytest

from command_tools import Cli, commands, folder_of
from paged.streams import LenientStream
from paged.writing import UnwritableError, writing
from sim_tools import write_run

REPOSITORY = Path(__file__).resolve().parent.parent
FULL = Path("/dev/full")
NO_SPACE = "cannot be written (No space left on device)"
SMALL = ("device=cpu", "workload.num_prompts=2", "sampling.n=2", "sampling.max_tokens=6")
SIM = ("workload.num_prompts=4", "plots=false", "trace_file=false")


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Runs a command in this process and in an empty folder; exit code, output, errors."""
    with commands(tmp_path, monkeypatch, capsys) as call:
        yield call


def fill(path: Path) -> Path:
    """Let no byte fit into a file that a command will write; its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(FULL)
    return path.parent


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def told(err: str) -> list[str]:
    """The sentences of a command, without its log and its progress."""
    assert "Traceback" not in err
    assert "Logging error" not in err
    return [line for line in err.splitlines() if line.startswith("paged: ")]


def shell(script: str, *args: str, folder: Path, **streams: Any) -> subprocess.CompletedProcess[str]:
    """`python -m paged ARGS` as `"$@"` of a shell's script."""
    return subprocess.run(
        ["bash", "-c", script, "bash", sys.executable, "-m", "paged", *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        text=True,
        timeout=120,
        **streams,
    )


# Disks


@pytest.mark.parametrize("tp", [1, 2])
def test_a_disk_that_fills_ends_a_run_that_can_be_resumed(tp: int, cli: Cli, tmp_path: Path) -> None:
    """The log of steps failed a second time while the step was given up, and a third time when it was closed."""
    folder = tmp_path / "run"
    overrides = (f"tp={tp}", "device=cpu", "workload.num_prompts=6", "sampling.n=2", "max_num_seqs=3")
    lengths = ("sampling.max_tokens=30", "sampling.ignore_eos=true", f"hydra.run.dir={folder}")
    done = shell('ulimit -f 16; exec "$@"', "run", *overrides, *lengths, folder=tmp_path, capture_output=True)
    assert done.returncode == 1
    assert done.stdout == ""
    (sentence,) = told(done.stderr)
    name = next(name for name in ("steps.jsonl", "results.jsonl") if f"/{name} " in sentence)
    assert sentence == (
        f"paged: {folder / name} cannot be written (File too large); what is finished is kept, "
        f"continue with: python -m paged run resume={folder}"
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == {"interrupted": True, "reason": f"{folder / name} cannot be written (File too large)"}
    kept = {(row["id"], row["sample"]): row["token_ids"] for row in lines_of(folder / "results.jsonl")}
    assert 0 < len(kept) < 12

    assert cli("run", f"resume={folder}")[0] == 0
    rows = {(row["id"], row["sample"]): row["token_ids"] for row in lines_of(folder / "results.jsonl")}
    assert len(rows) == 12
    assert kept.items() <= rows.items()
    assert json.loads((folder / "summary.json").read_text())["interrupted"] is False


@pytest.mark.parametrize("name", ["steps.jsonl", "summary.json"])
def test_a_disk_that_is_full_from_the_start_or_at_the_end(name: str, cli: Cli, tmp_path: Path) -> None:
    folder = fill(tmp_path / "run" / name)
    hint = f"what is finished is kept, continue with: python -m paged run resume={folder}"
    code, out, err = cli("run", *SMALL, f"hydra.run.dir={folder}")
    assert (code, out) == (1, "")
    assert told(err) == [f"paged: {folder / name} {NO_SPACE}; {hint}"]
    # No half of a summary is left, which would be taken for one.
    (folder / "summary.json").unlink(missing_ok=True)
    if name == "steps.jsonl":
        code, out, err = cli("run", f"resume={folder}")
        assert (code, out) == (1, "")
        assert told(err) == [f"paged: {folder / name} {NO_SPACE}; {hint}"]
        (folder / name).unlink()
    assert cli("run", f"resume={folder}")[0] == 0
    assert len(lines_of(folder / "results.jsonl")) == 4


def test_inputs_are_copied_whole_or_not_at_all(cli: Cli, tmp_path: Path) -> None:
    """A resumed run would take half of them for the whole workload; without them there is nothing to resume."""
    folder = fill(tmp_path / "run" / "inputs" / "prompts.tmp").parent
    code, out, err = cli("run", *SMALL, f"hydra.run.dir={folder}")
    assert (code, out) == (1, "")
    assert told(err) == [f"paged: {folder / 'inputs' / 'prompts.jsonl'} {NO_SPACE}"]
    assert list((folder / "inputs").iterdir()) == []


def test_results_stay_if_they_cannot_be_rewritten(cli: Cli, tmp_path: Path) -> None:
    folder = folder_of(cli("run", *SMALL)[1])
    results = (folder / "results.jsonl").read_bytes()
    fill(folder / "results.tmp")
    code, out, err = cli("run", f"resume={folder}")
    assert (code, out) == (1, "")
    assert told(err)[0].startswith(f"paged: {folder / 'results.jsonl'} {NO_SPACE}; what is finished is kept")
    assert (folder / "results.jsonl").read_bytes() == results
    assert cli("run", f"resume={folder}")[0] == 0
    assert json.loads((folder / "summary.json").read_text())["num_samples"] == 4


def test_ctrl_c_on_a_full_disk_is_still_told(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paged.engine import Engine

    def interrupt(self: Engine) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "run_step", interrupt)
    folder = fill(tmp_path / "run" / "summary.json")
    code, out, err = cli("run", *SMALL, f"hydra.run.dir={folder}")
    assert (code, out) == (130, "")
    assert told(err) == [
        f"paged: interrupted; what is finished is kept, continue with: python -m paged run resume={folder}"
    ]


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (("plan",), "summary.json"),
        (("sim", *SIM), "requests.csv"),
        (("sim", *SIM), "steps.csv"),
        (("sim", "workload.num_prompts=4", "plots=false"), "trace.json"),
        (("calibrate", "source=real"), "calibration.json"),
        (("calibrate", "source=real"), "measured.csv"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_other_commands_say_what_cannot_be_written(args: tuple[str, ...], name: str, cli: Cli, tmp_path: Path) -> None:
    if args[0] == "calibrate":
        (tmp_path / "real").mkdir()
        write_run(tmp_path / "real" / "steps.jsonl", lambda shape: 0.5 + 0.01 * shape.num_tokens)
    folder = fill(tmp_path / "out" / name)
    code, out, err = cli(*args, f"hydra.run.dir={folder}")
    assert (code, out) == (1, "")
    (sentence,) = told(err)
    assert sentence.startswith(f"paged: {folder}")
    assert sentence.endswith(NO_SPACE)


def test_a_calibration_that_finds_no_room_is_no_mistake(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    write_run(tmp_path / "real" / "steps.jsonl", lambda shape: 0.5 + 0.01 * shape.num_tokens)
    code, _, err = cli("calibrate", "source=real", f"output={FULL}")
    assert (code, told(err)) == (1, [f"paged: {FULL} {NO_SPACE}"])


@pytest.mark.parametrize(
    "args",
    [("run", *SMALL, "depth=1,2,3"), ("plan", "tp=1,2,4"), ("sim", *SIM, "tp=1,2,4")],
    ids=lambda args: args[0],
)
def test_a_disk_that_fills_in_a_sweep_leaves_its_table(
    args: tuple[str, ...], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra writes a job's config before the job begins: its traceback was the end, and there was no table."""
    save = hydra.core.utils._save_config
    num_jobs = 0

    def fail(config: Any, name: str, folder: Path) -> None:
        nonlocal num_jobs
        num_jobs += name == "config.yaml"
        if num_jobs == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(config, name, folder)

    monkeypatch.setattr(hydra.core.utils, "_save_config", fail)
    folder = fill(tmp_path / "sweep" / "sweep.csv")
    code, out, err = cli(args[0], "-m", *args[1:], f"hydra.sweep.dir={folder}")
    assert code == 1
    assert told(err) == [f"paged: the folder of hydra.sweep.dir {NO_SPACE}", f"paged: {folder} {NO_SPACE}"]
    jobs = sorted(line.split()[0] for line in out.splitlines() if line[:1].isdecimal())
    assert jobs == ["0", "1"]
    assert folder_of(out) == folder


def test_a_job_that_cannot_be_written_leaves_the_others_of_a_sweep(cli: Cli, tmp_path: Path) -> None:
    folder = fill(tmp_path / "sweep" / "0" / "summary.json").parent
    code, out, err = cli("plan", "-m", "tp=1,2", f"hydra.sweep.dir={folder}")
    assert code == 1
    assert told(err) == [f"paged: job 0: {folder / '0' / 'summary.json'} {NO_SPACE}"]
    assert "2" in [line.split()[1] for line in out.splitlines() if line.startswith("1 ")]


def test_a_full_disk_before_the_job_is_no_mistake(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hydra.core.utils, "_save_config", fail)
    code, out, err = cli("plan")
    assert (code, out, told(err)) == (1, "", [f"paged: the folder of hydra.run.dir {NO_SPACE}"])


def test_a_log_that_cannot_be_written_is_no_traceback(tmp_path: Path) -> None:
    """Python's logging prints one for every message."""
    folder = fill(tmp_path / "run" / "run.log")
    done = shell('exec "$@"', "run", *SMALL, f"hydra.run.dir={folder}", folder=tmp_path, capture_output=True)
    assert (done.returncode, folder_of(done.stdout), told(done.stderr)) == (0, folder, [])


def test_the_second_file_of_a_copy_is_the_one_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UnwritableError) as raised, writing(tmp_path):
        raise OSError(errno.ENOSPC, "full", "from", None, "to")
    assert str(raised.value) == "to cannot be written (full)"
    assert raised.value.errno == errno.ENOSPC


# Standard streams


def broken_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("script", "open_errors", "tp"),
    [
        ('exec "$@"', lambda: os.open(FULL, os.O_WRONLY), 1),
        ('exec "$@"', broken_pipe, 1),
        ('exec "$@" 2>&-', lambda: subprocess.DEVNULL, 2),
    ],
    ids=["full", "pipe", "closed"],
)
def test_standard_error_that_cannot_be_written_changes_nothing(
    script: str, open_errors: Callable[[], int], tp: int, tmp_path: Path
) -> None:
    """The progress bar raised what it met: exit code 1 without a word, and no result."""
    folder = tmp_path / "run"
    errors = open_errors()
    try:
        args = ("run", f"tp={tp}", *SMALL, f"hydra.run.dir={folder}")
        done = shell(script, *args, folder=tmp_path, stdout=subprocess.PIPE, stderr=errors)
    finally:
        if errors >= 0:
            os.close(errors)
    assert done.returncode == 0
    assert done.stdout.startswith("samples      4 finished")
    assert folder_of(done.stdout) == folder
    assert len(lines_of(folder / "results.jsonl")) == 4
    assert json.loads((folder / "summary.json").read_text())["interrupted"] is False


def test_sentences_do_not_go_to_standard_output_where_standard_error_is_closed(tmp_path: Path) -> None:
    """Python's `print` takes a missing standard error for standard output; files took its number."""
    done = shell('exec "$@" 2>&-', "run", "block_size=x", folder=tmp_path, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (2, "")
    done = shell('exec "$@" 2>&-', "sim", *SIM, folder=tmp_path, stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert (tmp_path / folder_of(done.stdout) / "steps.csv").is_file()


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from paged.streams import lenient_streams\n"
        "with lenient_streams(), open('file', 'w') as file:\n"
        "    os.write(1, b'strange')\n"
        "    os.write(2, b'strange')\n"
        "    print('shown nowhere')\n"
        "    print('nor this', file=sys.stderr)\n"
        "    file.write(str(file.fileno() > 2))\n"
    )
    subprocess.run(
        ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=True,
        timeout=60,
    )
    assert (tmp_path / "file").read_text() == "True"


@pytest.mark.parametrize(
    "args",
    [
        ("run", *SMALL, "hydra.run.dir=run"),
        ("plan", "-m", "tp=1,2"),
        ("run", "--cfg", "job"),
        ("--help",),
        ("run", "--version"),
    ],
    ids=lambda args: " ".join(args[:2]),
)
def test_a_full_standard_output_is_one_sentence(args: tuple[str, ...], tmp_path: Path) -> None:
    with FULL.open("w") as full:
        done = shell('exec "$@"', *args, folder=tmp_path, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert told(done.stderr) == [f"paged: standard output {NO_SPACE}"]
    if args[-1] == "hydra.run.dir=run":
        assert len(lines_of(tmp_path / "run" / "results.jsonl")) == 4
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["interrupted"] is False


def test_a_full_standard_output_hides_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1\\n"}\n{}\n')
    args = ("run", "workload=prompts", "workload.path=prompts.jsonl", "sampling.n=1", "sampling.max_tokens=3")
    with FULL.open("w") as full:
        done = shell('exec "$@"', *args, folder=tmp_path, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    refused, full_output = told(done.stderr)
    assert refused.startswith("paged: 1 of 2 lines were refused")
    assert full_output == f"paged: standard output {NO_SPACE}"


def test_a_stream_that_has_room_again_is_written_again() -> None:
    class Stream:
        is_full = True
        text = ""

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, "full")
            self.text += text
            return len(text)

    stream = Stream()
    lenient = LenientStream(stream)  # type: ignore[arg-type]
    lenient.write("lost")
    stream.is_full = False
    lenient.write("shown")
    assert stream.text == "shown"
    assert lenient.failure is not None
    assert lenient.failure.errno == errno.ENOSPC
