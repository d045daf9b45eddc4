"""Checks `python -m paged calibrate`: from the folders of real runs to a file, and every mistake in one line."""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_tools import Cli, commands, folder_of
from paged.config.calibrate import CalibratedSchema, Outside
from paged.core.model_spec import ModelSpec
from paged.model.locate import EMBEDDED
from paged.sim.calibration import Calibrated, Calibration
from paged.sim.shape import StepShape
from sim_tools import Load, write_run

REPOSITORY = Path(__file__).resolve().parent.parent
TINY = json.loads((EMBEDDED["tiny"] / "config.json").read_text())


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Runs a command in this process and in an empty folder; exit code, output, errors."""
    with commands(tmp_path, monkeypatch, capsys) as call:
        yield call


def cost(shape: StepShape) -> float:
    return 0.5 + 0.01 * shape.num_tokens


def make_run(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
    load: Load | None = None,
    seed: int = 0,
) -> Path:
    """A run's folder with a log whose steps take what ``cost`` says."""
    folder.mkdir(parents=True)
    write_run(folder / "steps.jsonl", cost, load=load, seed=seed)
    if config is not None:
        (folder / ".hydra").mkdir()
        # JSON is YAML.
        (folder / ".hydra" / "config.yaml").write_text(json.dumps(config))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_real_runs_of_the_tiny_model_are_fitted(cli: Cli, tmp_path: Path) -> None:
    """From a sweep of the engine to a model that predicts its steps, with nothing of this machine's paths in it."""
    lengths = ("workload.input_len=20", "workload.output_len=30", "sampling.n=1", "device=cpu", "max_step_tokens=48")
    code, out, _ = cli("run", "-m", "workload=random", "workload.num_prompts=1,6", *lengths)
    assert code == 0
    sweep = folder_of(out)
    code, out, err = cli("calibrate", f"source={sweep}")
    assert (code, err) == (0, "")
    folder = folder_of(out)
    assert folder.is_dir()
    calibration = Calibration.load(folder)
    assert calibration.name == "tiny-cpu"
    summaries = [json.loads((sweep / run / "summary.json").read_text()) for run in ("0", "1")]
    assert summaries[0]["numerics_id"] == summaries[1]["numerics_id"]
    source = calibration.provenance
    assert (source.sources, source.model, source.device, source.dtype) == (["0", "1"], "tiny", "cpu", "bfloat16")
    assert (source.kv_dtype, source.numerics, source.tp, source.depths) == ("bfloat16", "invariant", 1, [1])
    assert source.numerics_id == summaries[0]["numerics_id"]
    assert source.versions == summaries[0]["versions"]
    assert source.date is not None
    assert source.date in str(sweep)
    assert str(tmp_path) not in (folder / "calibration.json").read_text()

    memory, spec = calibration.memory, ModelSpec.from_config(TINY)
    assert memory.kv_tokens == summaries[0]["kv_tokens"] == memory.num_blocks * memory.block_size
    assert memory.weights_bytes == 2 * spec.num_parameters()
    assert memory.kv_bytes == memory.kv_tokens * 4 * 2 * 2 * 64 * 2  # layers, k and v, heads, width, bytes
    assert (memory.peak_device_bytes, memory.activation_bytes, memory.context_bytes) == (None, None, None)

    steps = summaries[0]["num_steps"] + summaries[1]["num_steps"]
    # A busy machine may slow one down.
    assert calibration.num_steps + calibration.num_first == steps
    assert calibration.num_first <= 2
    assert calibration.held_out["all"].num_steps == calibration.num_steps // 5
    assert calibration.held_out["all"].mape < 2  # the machine may be busy
    assert calibration.ranges["decode"].bounds["num_seqs"] == (1, 6)
    assert calibration.host is not None
    assert 0 < calibration.host.step_s + 6 * calibration.host.seq_s < 1
    with (folder / "measured.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == steps
    assert [row["source"] for row in rows] == ["0"] * summaries[0]["num_steps"] + ["1"] * summaries[1]["num_steps"]
    assert sum(row["used"] == "1" for row in rows) == calibration.num_steps
    assert sum(row["held_out"] == "1" for row in rows) == calibration.held_out["all"].num_steps
    model = Calibrated(calibration)
    shape = StepShape(*(int(rows[-1][name]) for name in StepShape._fields))
    assert float(rows[-1]["predicted_s"]) == pytest.approx(model.step_s(shape), abs=1e-6)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.pop("quality") == calibration.quality
    assert summary == json.loads((folder / "calibration.json").read_text())
    for word in ("held out", "unseen run", "noise", "host", "decode", "pool"):
        assert re.search(rf"^{word} ", out, re.MULTILINE), out
    assert out.splitlines()[-2] == f"quality      {calibration.quality}"


def test_logs_alone_are_enough(cli: Cli, tmp_path: Path) -> None:
    """A step log that the library wrote has neither a config nor a summary beside it."""
    make_run(tmp_path / "a" / "log", seed=1)
    make_run(tmp_path / "b" / "log", seed=2)
    code, out, _ = cli("calibrate", "source=[a/log,b,a]", "name=mine", "output=copy.json")
    assert code == 0
    found = Calibration.load(tmp_path / "copy.json")
    assert found == Calibration.load(folder_of(out))
    assert found.name == "mine"
    assert found.provenance.sources == ["a/log", "b/log"]
    assert (found.provenance.model, found.provenance.date, found.memory.weights_bytes) == (None, None, None)
    assert (found.memory.num_blocks, found.memory.block_size) == (4096, 16)
    assert Calibrated(found).step_s(StepShape.decode(8, 50)) == pytest.approx(0.58, rel=1e-4)
    assert "prefill      not measured" in out or "prefill" in found.ranges


def test_what_a_card_has_shown_of_its_memory_is_told(cli: Cli, tmp_path: Path) -> None:
    """Activations are what the peak holds beside weights and cache: numbers that a later pool is sized by."""
    spec = ModelSpec.from_config(TINY)
    config = {"model": {"path": "/models/private/big", "spec": TINY}, "dtype": "float16", "kv_dtype": "fp8", "tp": 2}
    config |= {"device": "auto", "numerics": {"name": "fast"}}
    weights = sum(2 * size for size in local_sizes(spec))
    # One of the two kv heads: for each a byte an element, and a scale of four bytes.
    kv = 4096 * 16 * (4 * 2 * 1 * 64 + 4 * 2 * 1 * 4)
    summary = {"peak_device_bytes": weights + kv + 12345, "numerics_id": "abc", "versions": {"torch": "2.11"}}
    summary["memory"] = {"context_bytes": 678}
    make_run(tmp_path / "2026-11-30" / "run", config=config, summary=summary)
    code, out, _ = cli("calibrate", "source=2026-11-30")
    assert code == 0
    found = Calibration.load(folder_of(out))
    assert found.name == "big-cuda"
    assert (found.memory.weights_bytes, found.memory.kv_bytes) == (weights, kv)
    assert (found.memory.activation_bytes, found.memory.peak_device_bytes) == (12345, weights + kv + 12345)
    assert found.memory.context_bytes == 678

    measured = {"weights_bytes": weights + 9, "activation_bytes": 100, "context_bytes": 678, "graph_bytes": 11}
    make_run(tmp_path / "other" / "run", config=config, summary={**summary, "memory": measured})
    code, out, _ = cli("calibrate", "source=other")
    assert code == 0
    memory = Calibration.load(folder_of(out)).memory
    assert (memory.weights_bytes, memory.activation_bytes, memory.context_bytes) == (weights + 9, 111, 678)
    source = found.provenance
    assert (source.model, source.dtype, source.kv_dtype, source.tp) == ("big", "float16", "fp8", 2)
    assert (source.device, source.date, source.numerics, source.numerics_id) == ("cuda", "2026-11-30", "fast", "abc")


def local_sizes(spec: ModelSpec) -> Iterator[int]:
    """Number of parameters of each tensor on one of two ranks, written out."""
    hidden, inner, width = spec.hidden_size, spec.intermediate_size, spec.head_dim
    for _ in range(spec.num_layers):
        yield from (hidden, hidden, width, width)
        yield hidden * width * (spec.num_heads // 2 + 2 * spec.num_kv_heads // 2)
        yield hidden * width * spec.num_heads // 2
        yield 3 * hidden * inner // 2
    yield from (hidden, spec.vocab_size // 2 * hidden, spec.vocab_size // 2 * hidden)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), "source must be given: folders of runs, whose step logs are read"),
        (("source=[]",), "source must name at least one folder of a run"),
        (("source=nothing",), "source must be folders of runs that fit together: nothing does not exist"),
        (("source=empty",), "source must be folders of runs that fit together: empty holds no steps.jsonl"),
        (("source=good", "output=no/where.json"), "output must be a file in a folder that exists, not 'no/where.json'"),
        (("source=good", "output=good"), "output must be a file in a folder that exists, not 'good'"),
        (("sauce=good",), "sauce is not a key of this config; did you mean source?"),
        (("source=good", "name=[1,2]"), "name must be a text or null, not [1, 2]"),
        (("source=short",), "measured steps are too few, at least 20 are needed"),
        (("source=malformed",), "malformed/steps.jsonl, line 7: not JSON"),
        (("source=swapped",), "swapped/steps.jsonl, line"),
        (("source=[good,other]",), "good has model 'tiny', other has 'small'"),
        (("source=limitless",), "limitless/steps.jsonl: the limits of event config lack a whole depth"),
        (("source=torn",), "config.yaml can't be read"),
    ],
)
def test_a_mistake_is_one_line(args: tuple[str, ...], sentence: str, cli: Cli, tmp_path: Path) -> None:
    make_run(tmp_path / "good", config={"model": {"path": "tiny"}})
    make_run(tmp_path / "other", config={"model": {"path": "small"}})
    make_run(tmp_path / "short", load=Load(num_requests=1, output=(3, 3)))
    lines = (tmp_path / "good" / "steps.jsonl").read_text().splitlines()
    for name, changed in {
        "malformed": [*lines[:6], lines[6][:-9], *lines[7:]],
        "swapped": [line for line in lines if '"plan"' not in line],
        "limitless": [lines[0].replace('"depth":1', '"deep":1'), *lines[1:]],
        "torn": lines,
    }.items():
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / "steps.jsonl").write_text("\n".join(changed) + "\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn" / ".hydra" / "config.yaml").write_text("model: {path: [")
    code, out, err = cli("calibrate", *args)
    assert code == 2
    assert out == ""
    assert err.startswith("paged: ")
    assert err.count("\n") == 1
    assert sentence in err


def test_fitting_never_imports_torch(tmp_path: Path) -> None:
    make_run(tmp_path / "run", config={"model": {"path": "tiny"}, "tp": 1})
    program = (
        "import sys; from paged.app import main; code = main(['calibrate', 'source=run'])\n"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'simpy', 'matplotlib', 'transformers')))"
    )
    env = {"PYTHONPATH": str(REPOSITORY), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


def test_the_config_names_a_calibration_that_cannot_be_read(tmp_path: Path) -> None:
    schema = CalibratedSchema(name="calibrated", path=str(tmp_path / "no.json"), outside=Outside.warn, host=True)
    with pytest.raises(ValueError, match=r"latency\.path must be a calibration: .*no\.json can't be read"):
        schema.load()
