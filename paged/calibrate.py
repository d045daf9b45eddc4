"""The job of `python -m paged calibrate`: the step logs of real runs to a file that `latency=calibrated` loads."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig

from paged.config.calibrate import calibrate_config
from paged.core.memory import DTYPE_BYTES, KV_DTYPE_BYTES, kv_token_bytes
from paged.core.sharding import num_parameters_per_rank
from paged.outcome import OK, UserError
from paged.results import write_summary
from paged.run_facts import RunFacts
from paged.sim.calibration import (
    CALIBRATION_FILE,
    CLASSES,
    Calibrated,
    Calibration,
    ErrorSummary,
    Memory,
    Provenance,
)
from paged.sim.fitting import UsedSteps, fit_calibration, is_held_out
from paged.sim.measured import MeasuredStep, StepTimes
from paged.sim.shape import StepShape
from paged.sim.step_log import STEPS_FILE, ConfigEvent, StepLogReader, step_log_of
from paged.writing import UnwritableError, is_no_room, writing

MEASURED_FILE: Final = "measured.csv"

_SAME: Final = ("model", "dtype", "kv_dtype", "numerics", "numerics_id", "tp", "device")
"""What all runs must agree on, because a step's time hangs on it."""


def job(cfg: DictConfig, folder: Path, overrides: Sequence[str]) -> int:
    """Fit the runs that `cfg` names; `folder` gets the calibration, the steps it was fitted to, and a summary.

    Standard output gets a table and, on its last line, the folder.

    Returns:
        The exit code, 0.

    Raises:
        UserError: for a mistake in the config or in the runs.
        UnwritableError: if the folder cannot be written.
    """
    config = calibrate_config(cfg)
    try:
        runs = [_Run.read(name, path) for name, path in _named(_run_folders(config.source)).items()]
        provenance = _provenance(runs)
        used = UsedSteps.of({run.name: run.steps for run in runs})
        calibration = fit_calibration(
            used,
            name=config.name or "-".join(filter(None, (provenance.model, provenance.device))) or "calibration",
            memory=_memory(runs),
            provenance=provenance,
        )
    except ValueError as error:
        raise UserError(f"source must be folders of runs that fit together: {error}") from error
    with writing(folder):
        calibration.save(folder / CALIBRATION_FILE)
        _write_measured(folder / MEASURED_FILE, runs, used, calibration)
    write_summary(folder / "summary.json", {**asdict(calibration), "quality": calibration.quality})
    if config.output is not None:
        try:
            calibration.save(config.output)
        except OSError as error:
            if is_no_room(error):
                raise UnwritableError.of(error, config.output) from error
            raise UserError(f"output must be a file that can be written: {error}") from error
    print(_table(calibration))
    print(folder, flush=True)
    return OK


def _run_folders(given: Sequence[Path]) -> list[Path]:
    """The folders of runs among those given and below them, each once, in order."""
    found: dict[Path, None] = {}
    for folder in given:
        logs = [folder / STEPS_FILE] if (folder / STEPS_FILE).is_file() else sorted(folder.rglob(STEPS_FILE))
        # The sentence for a folder that holds no log.
        found |= dict.fromkeys(log.parent.resolve() for log in logs or [step_log_of(folder)])
    return list(found)


def _named(folders: Sequence[Path]) -> dict[str, Path]:
    """The folders by the shortest ends of their paths that tell them apart."""
    for length in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return dict(zip(names, folders, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What a run's folder says.

    Attributes:
        name: of its folder.
        steps: its measured steps.
        limits: its scheduler's, of the last process.
        facts: what else the folder says.
    """

    name: str
    steps: list[MeasuredStep]
    limits: Mapping[str, Any]
    facts: RunFacts

    @classmethod
    def read(cls, name: str, folder: Path) -> _Run:
        """Read a folder; only its step log must be there. Raises ``ValueError`` for what is malformed."""
        steps: list[MeasuredStep] = []
        limits: Mapping[str, Any] = {}
        times = StepTimes()
        path = step_log_of(folder)
        for event in StepLogReader(path):
            if isinstance(event, ConfigEvent):
                limits = event.limits
            try:
                measured = times.see(event)
            except ValueError as error:
                raise ValueError(f"{path}, {error}") from error
            if measured is not None:
                steps.append(measured)
        for key in ("num_blocks", "block_size", "depth"):
            if type(limits.get(key)) is not int or limits[key] < 1:
                raise ValueError(f"{path}: the limits of event config lack a whole {key}")
        return cls(name=name, steps=steps, limits=limits, facts=RunFacts.read(folder))


def _provenance(runs: Sequence[_Run]) -> Provenance:
    """What the runs say of themselves; raises ``ValueError`` if they are not of one kind."""
    same: dict[str, Any] = {}
    for key in _SAME:
        for run in runs:
            value = getattr(run.facts, key)
            if value is None:
                continue
            if key in same and same[key][1] != value:
                other, theirs = same[key]
                raise ValueError(f"{other} has {key} {theirs!r}, {run.name} has {value!r}")
            same.setdefault(key, (run.name, value))
    dates = [run.facts.date for run in runs if run.facts.date]
    versions: dict[str, str] = {}
    for run in runs:
        versions |= {str(name): str(version) for name, version in run.facts.versions.items()}
    return Provenance(
        sources=[run.name for run in runs],
        date=max(dates, default=None),
        depths=sorted({run.limits["depth"] for run in runs}),
        versions=versions,
        **{key: value for key, (_, value) in same.items()},
    )


def _memory(runs: Sequence[_Run]) -> Memory:
    """The memory of the run with the largest pool."""
    run = max(runs, key=lambda run: run.limits["num_blocks"] * run.limits["block_size"])
    num_blocks, block_size = run.limits["num_blocks"], run.limits["block_size"]
    kv_bytes = weights_bytes = activation_bytes = None
    facts = run.facts
    dtype, kv_dtype, tp = facts.dtype, facts.kv_dtype, facts.tp
    if facts.spec is not None and dtype in DTYPE_BYTES and kv_dtype in KV_DTYPE_BYTES and tp is not None:
        weights_bytes = num_parameters_per_rank(facts.spec, tp) * DTYPE_BYTES[dtype]
        kv_bytes = num_blocks * block_size * kv_token_bytes(facts.spec, kv_dtype, tp)
        weights_bytes = facts.weights_bytes or weights_bytes
        if facts.activation_bytes is not None:
            activation_bytes = facts.activation_bytes + (facts.graph_bytes or 0)
        elif facts.peak_bytes is not None:
            activation_bytes = max(0, facts.peak_bytes - weights_bytes - kv_bytes)
    return Memory(
        num_blocks=num_blocks,
        block_size=block_size,
        kv_tokens=num_blocks * block_size,
        kv_bytes=kv_bytes,
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        peak_device_bytes=facts.peak_bytes,
        context_bytes=facts.context_bytes,
    )


def _write_measured(path: Path, runs: Sequence[_Run], used: UsedSteps, calibration: Calibration) -> None:
    """Every measured step with what the fit makes of it, so that its folder tells all that it came from."""
    model = Calibrated(calibration, host=False)
    index = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            [
                *("source", "session", "step"),
                *StepShape._fields,
                *("step_s", "host_s", "predicted_s", "used", "held_out"),
            ]
        )
        for run in runs:
            counted = {(step.session, step.step) for step in used.runs[run.name]}
            for step in run.steps:
                is_used = (step.session, step.step) in counted
                held_out = int(is_used and is_held_out(index))
                index += is_used
                times = [f"{step.step_s:.6f}", "" if step.host_s is None else f"{step.host_s:.6f}"]
                times.append(f"{model.step_s(step.shape):.6f}")
                writer.writerow([run.name, step.session, step.step, *step.shape, *times, int(is_used), held_out])


def _table(calibration: Calibration) -> str:
    """The lines that a person reads at the end."""
    provenance, memory = calibration.provenance, calibration.memory
    number = len(provenance.sources)
    rows = [
        ("calibration", f"{calibration.name}, {calibration.num_steps:,} steps of {number} run{'s' * (number > 1)}"),
        ("left out", f"{calibration.num_first} slow first steps, {calibration.num_trimmed} outliers"),
        *_error_rows(calibration),
        ("step", " + ".join(_cost_words(calibration.coefficients))),
    ]
    host = calibration.host
    if host is None:
        rows.append(("host", "not measured: no run shows the host alone between two steps (depth 1 does)"))
    else:
        rows.append(
            ("host", f"{host.step_s * 1e6:.0f} us + {host.seq_s * 1e6:.2f} us a sequence, off {_error(host.error)}")
        )
    for kind in CLASSES:
        if (known := calibration.ranges.get(kind)) is None:
            rows.append((kind, "not measured, so every such step lies outside the range"))
            continue
        bounds = {name: f"{low:,} to {high:,}" for name, (low, high) in known.bounds.items()}
        rows.append((kind, "{num_seqs} sequences, {num_tokens} tokens, {kv_tokens} KV tokens".format(**bounds)))
    rows.append(("pool", f"{memory.kv_tokens:,} tokens, {memory.num_blocks:,} blocks of {memory.block_size}"))
    rows.append(("quality", calibration.quality))
    return "\n".join(f"{name:<12} {value}" for name, value in rows)


def _error_rows(calibration: Calibration) -> Iterator[tuple[str, str]]:
    for kind, error in calibration.held_out.items():
        name = "held out" if kind == "all" else f"  {kind}"
        yield name, f"{error.num_steps:,} steps, off {_error(error)}"
    if calibration.other_runs:
        offs = [error.mape for error in calibration.other_runs.values()]
        mean = sum(offs) / len(offs)
        yield "unseen run", f"off {mean:.1%} on average over the runs ({min(offs):.1%} to {max(offs):.1%})"
    if calibration.noise is not None:
        yield "noise", f"{calibration.noise:.1%} between neighbouring steps of one size, which no model can predict"


def _error(error: ErrorSummary) -> str:
    return (
        f"{error.mape:.1%} on average, median {error.p50:.1%}, p90 {error.p90:.1%}; "
        f"bias {error.bias:+.1%}, {error.total:+.1%} in sum"
    )


def _cost_words(coefficients: Mapping[str, float]) -> Iterator[str]:
    for name, seconds in coefficients.items():
        unit = "" if name == "step" else f" x {name}"
        yield f"{seconds * 1e3:.3g} ms{unit}" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} us{unit}"
