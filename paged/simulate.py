"""The job of `python -m paged sim`: a workload through the scheduler on a simulated clock, into a folder."""

from __future__ import annotations

import contextlib
import csv
import logging
import re
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from paged.config.calibrate import CalibratedSchema
from paged.config.groups import RooflineSchema, with_given_sources
from paged.config.sim import (
    MEASURED_KEYS,
    PREDICTED_KEYS,
    REPLAY_KEYS,
    Setting,
    SimConfig,
    provenance_facts,
    sim_config,
)
from paged.core.hardware import Figure
from paged.core.scheduler import Scheduler
from paged.interrupts import InterruptRequest
from paged.outcome import INTERNAL, INTERRUPTED, MISTAKE, OK, UserError, folder_key, in_sweep, of_job, used_folder
from paged.results import replacing, versions, write_summary
from paged.run_facts import RunFacts, differences
from paged.sim.calibration import Calibrated
from paged.sim.chrome_trace import write_trace
from paged.sim.driver import simulate
from paged.sim.latency import LatencyModel
from paged.sim.plots import write_plots
from paged.sim.record import SimRecord
from paged.sim.replay import replay
from paged.sim.report import SCALARS, Summary, combine, refusals, seed_rows, summarize, summary_table
from paged.sim.sweep import Comparison, Goal
from paged.workload.job import Job, reseeded
from paged.workload.prompts import PromptsWorkload
from paged.workload.trace import TraceWorkload
from paged.writing import writing

logger = logging.getLogger(__name__)

FIGURES: Final = (
    "makespan_s",
    "recomputed_share",
    "tokens_per_s_end_to_end",
    "preemptions",
    "kv_utilization",
    "ttft_s.p50",
    "tpot_s.mean",
    "e2e_s.p99",
    "tail_share",
)
"""What the table of a sweep shows."""

ONLY_OF_A_RUN: Final = (
    "solved",
    "startup_s",
    "peak_device_bytes",
    "peak_device_bytes_by_rank",
    "memory",
    "device",
    "numerics_id",
    "resumed",
)
"""Names of a run's summary for which a simulation has nothing: it samples nothing, and has no device."""

_NO_REPLAY_IN_SWEEP: Final = "replay must not be given in a sweep: replay one run's folder at a time"


class _StuckError(Exception):
    """A simulation that leads nowhere: the fault of a policy or a latency model, not of the user."""


def job(cfg: DictConfig, folder: Path, overrides: Sequence[str]) -> int:
    """Simulate the workload that `cfg` describes, or replay a run, and write what came of it into `folder`.

    Standard output gets a table and, on its last line, the folder; in a sweep nothing, because its end has the table.

    Returns:
        The exit code: 0; 2 if a request was refused; 130 if interrupted; 1 if a replay differs or the simulation gets
        nowhere. In a sweep a request that is refused is an answer, and 0.

    Raises:
        UserError: if nothing could be simulated for a mistake in the config or the inputs.
        UnwritableError: if the folder cannot be written.
    """
    if (made := folder / "summary.json").exists():
        raise used_folder(folder_key(), made)
    try:
        config = sim_config(cfg, overrides)
        _save_sources(cfg, folder, overrides)
        if config.replay is not None:
            if in_sweep():
                raise UserError(_NO_REPLAY_IN_SWEEP)
            return _replay(config, config.replay, folder, _given(overrides), _changed(cfg))
        return _simulate(config, folder)
    except _StuckError as error:
        # Raised here, it would end a sweep whose other points are fine.
        write_summary(folder / "summary.json", {"feasible": False, "reason": str(error)})
        print(f"paged: {of_job()}{error}", file=sys.stderr)
        return INTERNAL


def _save_sources(cfg: DictConfig, folder: Path, overrides: Sequence[str]) -> None:
    """Let the folder's config say of figures that `overrides` replace who gave them, for when it is repeated."""
    path = folder / ".hydra" / "config.yaml"
    marked = with_given_sources(cfg, overrides)
    # Hydra saved what it composed, with the sources of the old figures.
    if marked != cfg and path.is_file():
        with replacing(path) as fresh:
            OmegaConf.save(marked, fresh)


def check_sweep(overrides: Sequence[str]) -> None:
    """Refuse, before any job of a sweep, what would be wrong in each of them.

    Raises:
        UserError: for an `optimize` that is no number of the summary, or a `replay`.
    """
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key == "replay" and value != "null":
            raise UserError(_NO_REPLAY_IN_SWEEP)
        if key == "optimize" and "," not in value:
            try:
                Goal.parse(value.strip("'\""), SCALARS)
            except ValueError as error:
                raise UserError(error) from error


def finish_sweep(folder: Path, jobs: Sequence[Path]) -> None:
    """Print the comparison of a sweep's jobs and write it into the sweep's folder."""
    goal = Goal(FIGURES[0], largest=False)
    # A mistake in it every job has told already.
    with contextlib.suppress(OSError, ValueError):
        config = OmegaConf.load(jobs[0] / ".hydra" / "config.yaml")
        goal = Goal.parse(str(OmegaConf.select(config, "optimize")), SCALARS)
    comparison = Comparison.of(jobs, goal, FIGURES)
    print(comparison.table())
    print("optimize=NAME sorts by another number of summary.json, optimize=-NAME puts the largest first")
    with writing(folder):
        comparison.write(folder)


@dataclass(slots=True)
class _Outcome:
    """What came of the simulations, one a seed.

    Attributes:
        record: of the first.
        summaries: of all that went to their end, or of the only one if that did not.
        reason: what the first that refused a request says of it.
        interrupted: whether the last was ended early.
    """

    record: SimRecord
    summaries: list[Summary] = field(default_factory=list)
    reason: str | None = None
    interrupted: bool = False

    def add(self, record: SimRecord) -> None:
        """Take in the next simulation."""
        self.interrupted = record.interrupted
        if not self.summaries or not record.interrupted:
            self.summaries.append(summarize(record))
        refused = refusals(record)
        if self.reason is None and refused:
            count = f"{len(refused)} of {len(record.requests)} requests were refused"
            self.reason = f"{count}, the first is {refused[0].key[0]}: {refused[0].reason}"


def _simulate(config: SimConfig, folder: Path) -> int:
    setting = config.setting()
    outcome = _run(config, setting, folder)
    summary = combine(outcome.summaries) | _facts(config, setting, len(outcome.summaries))
    summary |= {"feasible": True, "reason": outcome.reason, "interrupted": outcome.interrupted}
    write_summary(folder / "summary.json", summary)
    with writing(folder):
        _write_tables(config, outcome, summary, folder)
    if not in_sweep():
        print(_table(config, summary))
        print(folder, flush=True)
    if outcome.interrupted:
        print(f"paged: {of_job()}interrupted; the numbers are of what was simulated until then", file=sys.stderr)
        return INTERRUPTED
    if outcome.reason is None:
        return OK
    if in_sweep():
        logger.warning("%s", outcome.reason)
        return OK
    print(f"paged: {outcome.reason}", file=sys.stderr)
    return MISTAKE


def _write_tables(config: SimConfig, outcome: _Outcome, summary: Summary, folder: Path) -> None:
    outcome.record.write_requests(folder / "requests.csv")
    outcome.record.write_steps(folder / "steps.csv")
    if len(outcome.summaries) > 1:
        with (folder / "seeds.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(seed_rows(summary["seeds"], outcome.summaries))
    if config.scalars.trace_file:
        write_trace(outcome.record, folder / "trace.json")
    if config.scalars.plots:
        several = f", seed {summary['seeds'][0]}" if len(outcome.summaries) > 1 else ""
        write_plots(outcome.record, outcome.summaries[0], folder, config.title + several)


def _run(config: SimConfig, setting: Setting, folder: Path) -> _Outcome:
    """A simulation a seed, fewer if they are interrupted or if the seed makes no difference."""
    jobs = first_jobs = _jobs(config, 0)
    _copy_inputs(config, folder)
    num_seeds = config.scalars.seeds
    every_s = 0.1 if sys.stderr.isatty() else 10.0
    total = len(jobs) * num_seeds
    outcome: _Outcome | None = None
    num_before = 0
    with (
        InterruptRequest() as interrupt,
        tqdm(total=total, unit=" requests", mininterval=every_s, file=sys.stderr, dynamic_ncols=True) as bar,
    ):

        def tell(record: SimRecord, num_ended: int) -> None:
            if interrupt.requested:
                raise KeyboardInterrupt
            bar.set_postfix_str(f"{record.end_s:,.0f} s simulated, {record.num_steps:,} steps", refresh=False)
            bar.update(num_before + num_ended - bar.n)

        for index in range(num_seeds):
            if index:
                # What a file holds is no other for another seed, and is not read and warned of again.
                is_told = isinstance(config.workload, PromptsWorkload | TraceWorkload)
                jobs = first_jobs if is_told else _jobs(config, index)
                if index == 1 and list(map(_shape, jobs)) == list(map(_shape, first_jobs)):
                    logger.warning("the workload does not depend on the seed: it is simulated once, not seeds times")
                    break
            try:
                scheduler = Scheduler(setting.limits, config.policy)
                record = simulate(jobs, scheduler, setting.latency, params=config.sampling, on_progress=tell)
            except ValueError as error:
                raise UserError(error) from error
            except RuntimeError as error:
                if type(error) is not RuntimeError:
                    raise
                raise _StuckError(f"the simulation cannot go on: {error}") from error
            outcome = outcome or _Outcome(record)
            outcome.add(record)
            if record.interrupted:
                break
            num_before += len(jobs)
            bar.update(num_before - bar.n)
    assert outcome is not None
    return outcome


def _jobs(config: SimConfig, index: int) -> list[Job]:
    """The jobs of the simulation `index`, whose seed is larger by that than the first one's."""
    try:
        jobs = reseeded(config.workload, config.scalars.seed + index).jobs()
    except ValueError as error:
        raise UserError(error) from error
    if not jobs:
        raise UserError("workload must hold at least one request")
    return jobs


def _shape(job: Job) -> tuple[float, int, int, int | None]:
    """What of a job a simulation depends on, but for which prompts are shared.

    Parameters of its own, such as `prompt_logprobs`, only a job has that a file tells, and no seed changes those.
    """
    return job.arrival_s, len(job.prompt), job.output_len, job.max_tokens


def _copy_inputs(config: SimConfig, folder: Path) -> None:
    """Copy the files that the simulation reads, so that it can be repeated from its folder alone."""
    for files in config.inputs:
        target = folder / "inputs"
        # What is read together stays as it lay; what has a name that is taken gets a folder of its own.
        while any((target / place).exists() for place in files):
            target /= "other"
        for place, path in files.items():
            copy = target / place
            with writing(copy):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)


def _facts(config: SimConfig, setting: Setting, num_seeds: int) -> dict[str, Any]:
    """What the numbers of a summary rest on, and null for what a run's summary has and a simulation has not."""
    first = getattr(config.workload, "seed", 0) + config.scalars.seed
    facts: dict[str, Any] = {
        "title": config.title,
        "num_blocks": setting.limits.num_blocks,
        "block_size": setting.limits.block_size,
        "tp": config.deployment.tp,
        "depth": setting.limits.depth,
        "max_step_tokens": setting.limits.max_step_tokens,
        "chunk_size": setting.limits.chunk_size,
        **dict.fromkeys(ONLY_OF_A_RUN),
        "seeds": list(range(first, first + num_seeds)),
        "assumed": _assumed(config),
        "notes": list(setting.notes),
        "versions": versions("paged", "numpy", "simpy"),
    }
    if isinstance(setting.latency, Calibrated):
        facts["notes"] += setting.latency.notes()
        facts["outside_range"] = setting.latency.outside_range()
        facts["calibration"] = setting.latency.calibration.name
    return facts


def _assumed(config: SimConfig) -> list[str]:
    """The figures of the hardware that step times and pool rest on and that nobody has measured."""
    if not isinstance(config.latency, RooflineSchema):
        return []
    figures, tp = config.deployment.hardware.figures().items(), config.deployment.tp
    assumed = [name for name, figure in figures if isinstance(figure, Figure) and figure.is_assumed(tp)]
    return [name for name in assumed if tp > 1 or not name.startswith("link_")]


def _table(config: SimConfig, summary: Summary) -> str:
    lines = [config.title, summary_table(summary)]
    if len(summary["seeds"]) > 1:
        lines.append(f"{'seeds':<13}{len(summary['seeds'])}: means, and where they vary 95% intervals of the mean")
    lines += [f"{'note':<13}{note}" for note in summary["notes"]]
    if summary["assumed"]:
        lines.append(f"{'assumed':<13}{', '.join(summary['assumed'])} of the hardware")
    return "\n".join(lines)


def _given(overrides: Sequence[str]) -> list[str]:
    """The root keys that the command line sets, each once."""
    keys = [re.split(r"[.@=]", override.lstrip("+~"), maxsplit=1)[0] for override in overrides]
    return list(dict.fromkeys(keys))


def _changed(cfg: DictConfig) -> list[str]:
    """The root keys in which a config is not the default, be it by the command line or by an experiment's file."""
    if not HydraConfig.initialized():
        return []
    default = compose("sim")
    return [str(key) for key in cfg if cfg[key] != default.get(key)]


def _replay(config: SimConfig, source: Path, folder: Path, given: Sequence[str], changed: Sequence[str]) -> int:
    """Compare a run's plans with those that the scheduler makes now, and times if a latency was asked for.

    Args:
        config: whose latency may be used, and nothing else.
        source: the run's folder.
        folder: for the summary.
        given: keys of the command line.
        changed: keys that differ from the defaults.
    """
    for key in given:
        if key not in REPLAY_KEYS:
            allowed = ", ".join(REPLAY_KEYS[1:])
            raise UserError(f"{key} must not be given beside replay, which has no use for it; allowed: {allowed}")
    asked = {*given, *changed} & {"latency", *PREDICTED_KEYS}
    try:
        latency, notes = _replay_latency(config, source, asked) if asked else (None, [])
        report = replay(source, latency)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"replay must be the folder of a run: {error}") from error
    if report.exact and not report.num_steps:
        raise UserError(
            f"replay has nothing to compare: {report.source} planned no step ({report.counters.num_added} samples were "
            "added to its scheduler)"
        )
    if unused := [key for key in changed if key not in REPLAY_KEYS]:
        notes.append(f"not used of the experiment, because a replay takes it from the run: {', '.join(unused)}")
    if isinstance(latency, Calibrated):
        notes += latency.notes()
    report.notes += notes
    write_summary(folder / "summary.json", report.summary())
    print(report.table())
    print(folder, flush=True)
    return OK if report.exact else INTERNAL


def _replay_latency(config: SimConfig, source: Path, asked: Collection[str]) -> tuple[LatencyModel, list[str]]:
    """What predicts a run's step times, and in what it is not of that run.

    Args:
        config: says which.
        source: the run's folder.
        asked: keys that were given for it.

    Raises:
        ValueError: the run's folder is malformed.
        UserError: the latency is not to be had, or is of something else than the keys say.
    """
    run = asdict(RunFacts.read(source))
    run["hardware"] = run["device"]
    try:
        if not isinstance(config.latency, CalibratedSchema):
            latency: LatencyModel = config.latency.build(config.deployment)
            facts, notes = config.facts(), []
        else:
            calibration = config.latency.load()
            latency = Calibrated(calibration, config.latency.outside.value, host=False)
            notes = config.foreign_notes(calibration.provenance, asked)
            facts = provenance_facts(calibration.provenance)
    except ValueError as error:
        raise UserError(error) from error
    found = differences(run, {key: facts[key] for key in MEASURED_KEYS if key in facts})
    if found:
        told = [key for key in MEASURED_KEYS if key in found]
        words = ", ".join(f"{key} {found[key][1]} (the run's is {found[key][0]})" for key in told)
        notes.append(f"the times predicted are not of this run, but of {words}")
    return latency, notes
