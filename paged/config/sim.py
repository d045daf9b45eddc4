"""The config of `sim`: the schema of `conf/sim.yaml`, and the checked objects that it describes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from omegaconf import MISSING, DictConfig

from paged.config.calibrate import CalibratedSchema
from paged.config.convert import Root
from paged.config.groups import (
    LATENCIES,
    POLICIES,
    DeploymentSchema,
    HardwareSchema,
    MemorySchema,
    ModelSchema,
    RooflineSchema,
)
from paged.config.workloads import WORKLOADS
from paged.core.memory import GIB, Deployment
from paged.core.policy import Policy
from paged.core.scheduler import SchedulerConfig
from paged.outcome import InfeasibleError, UserError
from paged.sim.calibration import CALIBRATION_FILE, Calibrated, Calibration
from paged.sim.latency import LatencyModel
from paged.sim.report import SCALARS
from paged.sim.sweep import Goal
from paged.workload.job import Workload
from paged.workload.lengths import Empirical
from paged.workload.prompts import PromptsWorkload
from paged.workload.trace import TraceWorkload

_MOST_SEEDS: Final = 1000


@dataclass(slots=True, kw_only=True)
class SimSchema(DeploymentSchema):
    """All scalars of `conf/sim.yaml`."""

    num_blocks: int | None = MISSING
    max_step_tokens: int = MISSING
    chunk_size: int = MISSING
    depth: int = MISSING
    prefix_reuse: bool = MISSING
    seed: int = MISSING
    seeds: int = MISSING
    optimize: str = MISSING
    plots: bool = MISSING
    trace_file: bool = MISSING
    replay: str | None = MISSING


ROOT: Final = Root(
    scalars=SimSchema,
    groups={
        "model": ModelSchema,
        "hardware": HardwareSchema,
        "memory": MemorySchema,
        "policy": POLICIES,
        "workload": WORKLOADS,
        "latency": {**LATENCIES, "calibrated": CalibratedSchema},
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a simulation is made with.

    Attributes:
        limits: what the scheduler decides within.
        latency: predicts the steps' times.
        notes: what is to be said of them beside the results.
    """

    limits: SchedulerConfig
    latency: LatencyModel
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """A checked config of `sim`.

    Attributes:
        title: what is simulated, in a line.
        model: 'tiny', a checkpoint folder or a Hub id.
        deployment: the model on its cards.
        scalars: the keys that are no groups.
        policy: what the scheduler decides by.
        latency: where step times come from; a calibration has not been read.
        workload: what arrives, with its seed.
        goal: what a sweep is sorted by.
        replay: a run's folder whose plans are to be compared instead of simulating the workload.
    """

    title: str
    model: str
    deployment: Deployment
    scalars: SimSchema
    policy: Policy
    latency: RooflineSchema | CalibratedSchema
    workload: Workload
    goal: Goal
    replay: Path | None

    @property
    def inputs(self) -> list[Path]:
        """The files that the simulation reads."""
        found = []
        if isinstance(self.workload, TraceWorkload | PromptsWorkload):
            found.append(_file_in(self.workload.path, "results.jsonl"))
        for name in ("prompt", "output"):
            if isinstance(lengths := getattr(self.workload, name, None), Empirical) and lengths.path is not None:
                found.append(_file_in(lengths.path, "results.jsonl"))
        if isinstance(self.latency, CalibratedSchema):
            found.append(_file_in(Path(self.latency.path).expanduser(), CALIBRATION_FILE))
        return found

    def setting(self) -> Setting:
        """The scheduler's limits and the latency model; reads the calibration, if there is one.

        Raises:
            UserError: naming the key and what is allowed; InfeasibleError if no block fits the memory.
        """
        num_blocks, notes = self.scalars.num_blocks, []
        try:
            if isinstance(self.latency, RooflineSchema):
                latency = self.latency.build(self.deployment)
            else:
                calibration = self.latency.load()
                latency = Calibrated(calibration, self.latency.outside.value, host=self.latency.host)
                notes += _differences(calibration, self.model, self.deployment)
                if num_blocks is None:
                    num_blocks = calibration.memory.kv_tokens // self.deployment.block_size
                    notes.append(f"the pool is that of the runs measured: {calibration.memory.kv_tokens:,} tokens")
            if num_blocks is None:
                num_blocks = self.deployment.pool().num_blocks
                if num_blocks < 1:
                    raise InfeasibleError(_why_no_pool(self.deployment))
            limits = SchedulerConfig(
                num_blocks=num_blocks,
                block_size=self.deployment.block_size,
                max_num_seqs=self.deployment.max_num_seqs,
                max_step_tokens=self.scalars.max_step_tokens,
                chunk_size=self.scalars.chunk_size,
                max_seq_len=self.deployment.max_seq_len,
                vocab_size=self.deployment.spec.vocab_size,
                depth=self.scalars.depth,
                prefix_reuse=self.scalars.prefix_reuse,
            )
        except UserError:
            raise
        except ValueError as error:
            raise UserError(error) from error
        return Setting(limits=limits, latency=latency, notes=tuple(notes))


def sim_config(cfg: DictConfig) -> SimConfig:
    """The objects that a composed `sim` config describes.

    Raises:
        UserError: naming the key and what is allowed; InfeasibleError if only the combination is impossible.
    """
    scalars, groups = ROOT.read(cfg)
    if not 1 <= scalars.seeds <= _MOST_SEEDS:
        raise UserError(f"seeds must be a whole number, 1 to {_MOST_SEEDS}, not {scalars.seeds}")
    try:
        return SimConfig(
            title=_title(scalars, groups),
            model=groups["model"].path,
            deployment=scalars.build(groups["model"], groups["hardware"], groups["memory"]),
            scalars=scalars,
            policy=groups["policy"].build(),
            latency=groups["latency"],
            workload=groups["workload"].build(),
            goal=Goal.parse(scalars.optimize, SCALARS),
            replay=None if scalars.replay is None else Path(scalars.replay).expanduser(),
        )
    except UserError:
        raise
    except ValueError as error:
        raise UserError(error) from error


def _title(scalars: SimSchema, groups: dict[str, Any]) -> str:
    where = f"{groups['model'].path} on {scalars.tp} x {groups['hardware'].name}"
    return f"{where}: workload {groups['workload'].name}, policy {groups['policy'].name}, {groups['latency'].name}"


def _file_in(path: Path, name: str) -> Path:
    return path / name if path.is_dir() else path


def _differences(calibration: Calibration, model: str, deployment: Deployment) -> list[str]:
    """A note for everything that was different when the calibration's runs were measured."""
    measured = calibration.provenance
    # The way to a folder is a machine's own.
    name = Path(model).name if Path(model).expanduser().is_dir() else model
    pairs = {
        "model": (measured.model, name),
        "tp": (measured.tp, deployment.tp),
        "dtype": (measured.dtype, deployment.dtype),
        "kv_dtype": (measured.kv_dtype, deployment.kv_dtype),
    }
    return [
        f"the calibration was measured with {key} {then}, not {now}"
        for key, (then, now) in pairs.items()
        if then is not None and then != now
    ]


def _why_no_pool(deployment: Deployment) -> str:
    pool = deployment.pool()
    used = (pool.weights_bytes + pool.activation_bytes + pool.context_bytes) / GIB
    allowed = deployment.utilization * pool.device_bytes / GIB
    changes = " or ".join(remedy.override for remedy in deployment.remedies(deployment.block_size))
    why = f"weights, activations and context take {used:.2f} of the {allowed:.2f} GiB that a card may hold"
    return f"no block of the cache fits: {why}; {f'{changes} would do' if changes else 'no single change would do'}"
