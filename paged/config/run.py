"""The config of `run`: the schema of `conf/run.yaml`, and the checked objects that it describes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from omegaconf import MISSING, DictConfig

from paged.config.calibrate import CalibratedSchema
from paged.config.convert import Root
from paged.config.groups import (
    LATENCY_SCHEMAS,
    NUMERICS_SCHEMAS,
    POLICY_SCHEMAS,
    ConstantSchema,
    EngineSchema,
    HardwareSchema,
    MemorySchema,
    ModelSchema,
    ReportSchema,
    SamplingSchema,
    given_keys,
)
from paged.config.workloads import WORKLOAD_SCHEMAS, check_sampling
from paged.core.model_spec import ModelSpec
from paged.core.request import SamplingParams
from paged.outcome import UserError
from paged.workload.job import Workload

logger = logging.getLogger(__name__)

RESUMABLE_KEYS: Final = (
    "block_size",
    "num_blocks",
    "max_num_seqs",
    "max_step_tokens",
    "chunk_size",
    "gpu_memory_utilization",
    "depth",
    "prefix_reuse",
    "policy",
    "verify",
    "tp_timeout_s",
)
"""What may change when a run is resumed: under `invariant` numerics none of these touches a token."""

NUMERICS_FIELDS: Final = ("k_segments", "reduce_dtype")
"""Fields of the engine whose keys are below `numerics`."""


@dataclass(slots=True, kw_only=True)
class RunSchema(EngineSchema):
    """All scalars of `conf/run.yaml`."""

    resume: str | None = MISSING


ROOT: Final = Root(
    scalars=RunSchema,
    groups={
        "model": ModelSchema,
        "numerics": NUMERICS_SCHEMAS,
        "policy": POLICY_SCHEMAS,
        "workload": WORKLOAD_SCHEMAS,
        "sampling": SamplingSchema,
        "hardware": HardwareSchema,
        "memory": MemorySchema,
        "latency": {**LATENCY_SCHEMAS, "calibrated": CalibratedSchema},
    },
    optional=("hardware", "memory", "latency"),
    ignored=ReportSchema,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A checked config of `run`.

    Attributes:
        model: 'tiny', a checkpoint folder or a Hub id.
        spec: what the model should be, if the config says so.
        engine: fields of EngineConfig. A mapping, because that class needs torch and this module does not.
        sampling: what a line of the workload may override.
        workload: what to sample.
    """

    model: str
    spec: ModelSpec | None
    engine: Mapping[str, Any]
    sampling: SamplingParams
    workload: Workload


def with_key(error: Exception) -> str:
    """What the engine says of one of its fields, with the config's key for it."""
    text = str(error)
    return f"numerics.{text}" if text.startswith(NUMERICS_FIELDS) else text


def run_config(cfg: DictConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """The frozen objects that a composed `run` config describes, some of it by `overrides`.

    What only `sim` reads is checked, and not in them. Scalars of its report serve an experiment alone.

    Raises:
        UserError: naming the key and what is allowed.
    """
    scalars, groups = ROOT.read(cfg)
    unused = [each.name for each in fields(ReportSchema) if each.name in cfg]
    given = given_keys(overrides)
    if refused := [name for name in unused if name in given]:
        raise UserError(f"run takes no {refused[0]}, which only sim reads")
    if unused:
        logger.info("not used of the experiment, because only sim reads it: %s", ", ".join(unused))
    try:
        params = groups["sampling"].build()
        model = groups["model"]
        engine = {field.name: getattr(scalars, field.name) for field in fields(EngineSchema)}
        numerics = groups["numerics"]
        engine |= {"numerics": numerics.name, **{name: getattr(numerics, name) for name in NUMERICS_FIELDS}}
        engine |= {"policy": groups["policy"].build()}
        engine |= {"device": scalars.device.value, "weights": scalars.weights.value}
        spec = model.build(scalars.max_seq_len)
        workload = groups["workload"].build()
        check_sampling(workload, params, given)
        _check_prediction(groups)
        return RunConfig(model=model.path, spec=spec, engine=engine, sampling=params, workload=workload)
    except ValueError as error:
        raise UserError(error) from error


def _check_prediction(groups: Mapping[str, Any]) -> None:
    """Refuse, as a ``ValueError``, what `sim` would refuse of the groups that only it reads."""
    if "hardware" in groups:
        groups["hardware"].build()
    if "memory" in groups:
        groups["memory"].check()
    if isinstance(groups.get("latency"), ConstantSchema):
        groups["latency"].check()
