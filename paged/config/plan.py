"""The config of `plan`: the schema of `conf/plan.yaml`, and the checked objects that it describes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from omegaconf import MISSING, DictConfig

from paged.config.convert import Root
from paged.config.groups import (
    DeploymentSchema,
    HardwareSchema,
    MemorySchema,
    ModelSchema,
    given_keys,
    with_given_sources,
)
from paged.core.memory import Deployment
from paged.outcome import UserError


@dataclass(slots=True, kw_only=True)
class PlanSchema(DeploymentSchema):
    """All scalars of `conf/plan.yaml`."""

    caps: list[int] = MISSING
    batches: list[int] = MISSING
    contexts: list[int] = MISSING
    link_latencies_us: list[float] | None = MISSING


ROOT: Final = Root(
    scalars=PlanSchema, groups={"model": ModelSchema, "hardware": HardwareSchema, "memory": MemorySchema}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """A checked config of `plan`.

    Attributes:
        model: 'tiny', a checkpoint folder or a Hub id.
        deployment: the model on its cards.
        caps: lengths in tokens of which the plan says how many sequences fit.
        batches, contexts: of the table of decode steps.
        link_latencies_us: of the link, for the table; None takes the hardware's.
        given: dotted keys that were given on the command line.
    """

    model: str
    deployment: Deployment
    caps: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    link_latencies_us: tuple[float, ...] | None
    given: frozenset[str]


def plan_config(cfg: DictConfig, overrides: Sequence[str] = ()) -> PlanConfig:
    """The frozen objects that a composed `plan` config describes, some of it by `overrides`.

    Raises:
        UserError: naming the key and what is allowed; InfeasibleError if only the combination is impossible.
    """
    scalars, groups = ROOT.read(with_given_sources(cfg, overrides))
    for key in ("caps", "batches", "contexts"):
        for value in getattr(scalars, key):
            if value < 1:
                raise UserError(f"{key} must hold whole numbers, at least 1, not {value}")
    latencies = scalars.link_latencies_us
    for value in latencies or ():
        if not 0 <= value < math.inf:
            raise UserError(f"link_latencies_us must hold numbers, at least 0, not {value}")
    try:
        deployment = scalars.build(groups["model"], groups["hardware"], groups["memory"])
    except UserError:
        raise
    except ValueError as error:
        raise UserError(error) from error
    return PlanConfig(
        model=groups["model"].path,
        deployment=deployment,
        caps=tuple(scalars.caps),
        batches=tuple(scalars.batches),
        contexts=tuple(scalars.contexts),
        link_latencies_us=None if latencies is None else tuple(latencies),
        given=frozenset(given_keys(overrides)),
    )
