"""The config of `sim`: the schema of `conf/sim.yaml`, and the checked objects that it describes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from omegaconf import MISSING, DictConfig

from paged.config.calibrate import CalibratedSchema
from paged.config.convert import Root
from paged.config.groups import (
    LATENCY_SCHEMAS,
    POLICY_SCHEMAS,
    ConstantSchema,
    DeploymentSchema,
    HardwareSchema,
    MemorySchema,
    ModelSchema,
    RooflineSchema,
    with_given_sources,
)
from paged.config.workloads import WORKLOAD_SCHEMAS
from paged.core.limits import SchedulerConfig
from paged.core.memory import GIB, Deployment
from paged.core.policy import Policy
from paged.outcome import InfeasibleError, UserError
from paged.run_facts import differences, model_name
from paged.sim.calibration import CALIBRATION_FILE, Calibrated, Calibration, Provenance
from paged.sim.latency import LatencyModel
from paged.sim.report import SCALARS
from paged.sim.sweep import Goal
from paged.workload.job import InputFiles, Workload

PREDICTED_KEYS: Final = ("model", "tp", "dtype", "kv_dtype", "hardware")
"""What step times hang on, beside `latency` itself."""
REPLAY_KEYS: Final = ("replay", "experiment", "latency", *PREDICTED_KEYS)
"""What a replay has a use for: all else it takes from the run."""

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
        "policy": POLICY_SCHEMAS,
        "workload": WORKLOAD_SCHEMAS,
        "latency": {**LATENCY_SCHEMAS, "calibrated": CalibratedSchema},
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
        replay: a run's folder whose plans are to be compared instead of simulating the workload.
    """

    title: str
    model: str
    deployment: Deployment
    scalars: SimSchema
    policy: Policy
    latency: RooflineSchema | ConstantSchema | CalibratedSchema
    workload: Workload
    replay: Path | None

    @property
    def inputs(self) -> list[InputFiles]:
        """The files that the simulation reads."""
        found = self.workload.input_files()
        if isinstance(self.latency, CalibratedSchema):
            path = _file_in(Path(self.latency.path).expanduser(), CALIBRATION_FILE)
            found.append({path.name: path})
        return found

    def facts(self) -> dict[str, Any]:
        """What is simulated, by the keys that a run's folder or a calibration tells the same with."""
        return {
            "model": model_name(self.model),
            "tp": self.deployment.tp,
            "dtype": self.deployment.dtype,
            "kv_dtype": self.deployment.kv_dtype,
            "hardware": self.deployment.hardware.name,
        }

    def foreign_notes(self, measured: Provenance, keys: Collection[str] = PREDICTED_KEYS) -> list[str]:
        """What to say of a calibration that was measured with other values of some keys than the config's.

        Raises:
            UserError: there is such a key, and `latency.foreign` does not allow it.
        """
        assert isinstance(self.latency, CalibratedSchema)
        here = {key: value for key, value in self.facts().items() if key in keys}
        found = differences(provenance_facts(measured), here)
        if not found:
            return []
        words = ", ".join(f"{key} {found[key][0]} (here {found[key][1]})" for key in here if key in found)
        if not self.latency.foreign:
            raise UserError(
                f"latency.path must be a calibration of what is simulated, and it was measured with {words}; "
                "latency.foreign=true uses it none the less"
            )
        return [f"the calibration is foreign: it was measured with {words}"]

    def setting(self) -> Setting:
        """The scheduler's limits and the latency model; reads the calibration, if there is one.

        Raises:
            UserError: naming the key and what is allowed; InfeasibleError if no block fits the memory.
        """
        num_blocks, notes = self.scalars.num_blocks, []
        try:
            if not isinstance(self.latency, CalibratedSchema):
                latency = self.latency.build(self.deployment)
            else:
                calibration = self.latency.load()
                latency = Calibrated(calibration, self.latency.outside.value, host=self.latency.host)
                notes.append(_measured(calibration))
                foreign = self.foreign_notes(calibration.provenance)
                notes += foreign
                if num_blocks is None and not foreign:
                    num_tokens = calibration.memory.kv_tokens
                    num_blocks = num_tokens // self.deployment.block_size
                    notes.append(
                        f"the pool is that of the runs measured, {num_tokens:,} tokens, whatever "
                        "gpu_memory_utilization and memory say"
                    )
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


def sim_config(cfg: DictConfig, overrides: Sequence[str] = ()) -> SimConfig:
    """The objects that a composed `sim` config describes, some of it by `overrides`.

    Raises:
        UserError: naming the key and what is allowed; InfeasibleError if only the combination is impossible.
    """
    scalars, groups = ROOT.read(with_given_sources(cfg, overrides))
    if not 1 <= scalars.seeds <= _MOST_SEEDS:
        raise UserError(f"seeds must be a whole number, 1 to {_MOST_SEEDS}, not {scalars.seeds}")
    try:
        Goal.parse(scalars.optimize, SCALARS)
        return SimConfig(
            title=_title(scalars, groups),
            model=groups["model"].path,
            deployment=scalars.build(groups["model"], groups["hardware"], groups["memory"]),
            scalars=scalars,
            policy=groups["policy"].build(),
            latency=groups["latency"],
            workload=groups["workload"].build(),
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


def provenance_facts(measured: Provenance) -> dict[str, Any]:
    """What was measured, by the keys of the config."""
    return {**asdict(measured), "hardware": measured.device}


def _measured(calibration: Calibration) -> str:
    """Whose step times a calibration has, in a note."""
    facts = provenance_facts(calibration.provenance)
    known = [f"{key} {facts[key]}" for key in ("numerics", "hardware") if facts[key] is not None]
    error = calibration.held_out.get("all")
    if error is not None and error.num_steps:
        known.append(f"held-out steps off by {error.p50:.1%} in the median")
    unknown = [key for key in PREDICTED_KEYS if facts[key] is None]
    if unknown:
        known.append(f"it does not say its {', '.join(unknown)}, so that is taken to be the config's")
    return f"step times are those of {calibration.name}: {'; '.join(known)}"


def _why_no_pool(deployment: Deployment) -> str:
    pool = deployment.pool()
    if deployment.hardware.pool_gib is not None:
        least_gib = pool.block_size * pool.kv_bytes_per_token / GIB
        given = f"hardware.pool_gib.value is {deployment.hardware.pool_gib.value:g} GiB"
        return f"no block of the cache fits: {given}, and a block takes {least_gib:.2g}"
    used = (pool.weights_bytes + pool.activation_bytes + pool.context_bytes) / GIB
    allowed = deployment.utilization * pool.device_bytes / GIB
    changes = [remedy.override for remedy in deployment.remedies(deployment.block_size)]
    changes.append(f"cards of {deployment.memory_gib_for(deployment.block_size)} GiB")
    why = f"weights, activations and context take {used:.2f} of the {allowed:.2f} GiB that a card may hold"
    return f"no block of the cache fits: {why}; {' or '.join(changes)} would do"
