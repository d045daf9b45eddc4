"""Schemas of the group `workload`; each builds the workload that it describes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from omegaconf import MISSING

from paged.config.convert import GIVEN, INNER
from paged.core.request import SamplingParams
from paged.workload.arithmetic import ArithmeticWorkload
from paged.workload.job import MAX_JOBS, MAX_LENGTH, MAX_SECONDS, SizedWorkload, Workload
from paged.workload.lengths import KEYS, lengths_from
from paged.workload.prompts import PromptsWorkload
from paged.workload.synthetic import (
    BillWorkload,
    LongWorkload,
    NanoWorkload,
    ProverWorkload,
    RandomWorkload,
    RolloutWorkload,
    StreamWorkload,
)
from paged.workload.trace import TraceWorkload

_STREAM_PROMPTS: Final = 512
"""Requests of a stream whose end is not given."""
_LENGTHS: Final = {GIVEN: "a length, a text such as lognormal:1200:0.9, or keys with dist", INNER: KEYS}


@dataclass(slots=True, kw_only=True)
class ArithmeticSchema:
    """`workload=arithmetic`."""

    name: str = MISSING
    num_prompts: int = MISSING
    seed: int = MISSING

    def build(self) -> ArithmeticWorkload:
        """The typed workload; raises ``ValueError`` for an impossible number."""
        _check_counts(self, "num_prompts")
        return ArithmeticWorkload(num_prompts=self.num_prompts, seed=self.seed)


@dataclass(slots=True, kw_only=True)
class PromptsSchema:
    """`workload=prompts`."""

    name: str = MISSING
    path: str = field(default=MISSING, metadata={GIVEN: "a file of prompts, one JSON object a line"})

    def build(self) -> PromptsWorkload:
        """The typed workload; the file is looked at when it is read."""
        return PromptsWorkload(path=Path(self.path).expanduser())


@dataclass(slots=True, kw_only=True)
class RandomSchema:
    """`workload=random`."""

    name: str = MISSING
    num_prompts: int = MISSING
    input_len: int = MISSING
    output_len: int = MISSING
    seed: int = MISSING

    def build(self) -> RandomWorkload:
        """The typed workload; raises ``ValueError`` for an impossible number."""
        _check_counts(self, "num_prompts")
        _check_counts(self, "input_len", "output_len", high=MAX_LENGTH)
        return RandomWorkload(
            num_prompts=self.num_prompts, input_len=self.input_len, output_len=self.output_len, seed=self.seed
        )


@dataclass(slots=True, kw_only=True)
class BillSchema:
    """`workload=bill`."""

    name: str = MISSING
    num_prompts: int = MISSING
    interval_s: float = MISSING

    def build(self) -> BillWorkload:
        """The typed workload; raises ``ValueError`` for an impossible number."""
        _check_counts(self, "num_prompts")
        if not 0 <= self.interval_s <= MAX_SECONDS:
            raise ValueError(f"workload.interval_s must be between 0 and {MAX_SECONDS:g}, not {self.interval_s}")
        return BillWorkload(num_prompts=self.num_prompts, interval_s=self.interval_s)


@dataclass(slots=True, kw_only=True)
class NanoSchema:
    """`workload=nano`."""

    name: str = MISSING
    num_prompts: int = MISSING
    seed: int = MISSING

    def build(self) -> NanoWorkload:
        """The typed workload; raises ``ValueError`` for an impossible number."""
        _check_counts(self, "num_prompts")
        return NanoWorkload(num_prompts=self.num_prompts, seed=self.seed)


@dataclass(slots=True, kw_only=True)
class ProverSchema:
    """`workload=prover`."""

    name: str = MISSING
    num_prompts: int = MISSING
    num_samples: int = MISSING
    seed: int = MISSING

    def build(self) -> ProverWorkload:
        """The typed workload; raises ``ValueError`` for an impossible number."""
        _check_counts(self, "num_prompts", "num_samples")
        _check_product(self)
        return ProverWorkload(num_prompts=self.num_prompts, num_samples=self.num_samples, seed=self.seed)


@dataclass(slots=True, kw_only=True)
class LongSchema:
    """`workload=long`."""

    name: str = MISSING
    num_prompts: int = MISSING
    seed: int = MISSING

    def build(self) -> LongWorkload:
        """The typed workload; raises ``ValueError`` for an impossible number."""
        _check_counts(self, "num_prompts")
        return LongWorkload(num_prompts=self.num_prompts, seed=self.seed)


@dataclass(slots=True, kw_only=True)
class RolloutSchema:
    """`workload=rollout`."""

    name: str = MISSING
    num_prompts: int = MISSING
    num_samples: int = MISSING
    prompt: Any = field(default=MISSING, metadata=_LENGTHS)
    output: Any = field(default=MISSING, metadata=_LENGTHS)
    cap: int | None = MISSING
    rate: float | None = MISSING
    seed: int = MISSING

    def build(self) -> RolloutWorkload:
        """The typed workload; raises ``ValueError`` for an impossible number."""
        _check_counts(self, "num_prompts", "num_samples")
        _check_product(self)
        _check_counts(self, "cap", high=MAX_LENGTH)
        _check_rate(self.rate)
        return RolloutWorkload(
            num_prompts=self.num_prompts,
            num_samples=self.num_samples,
            prompt=lengths_from(self.prompt, "workload.prompt", outputs=False),
            output=lengths_from(self.output, "workload.output", outputs=True),
            cap=self.cap,
            rate=self.rate,
            seed=self.seed,
        )


@dataclass(slots=True, kw_only=True)
class PoissonSchema:
    """`workload=poisson`."""

    name: str = MISSING
    rate: float = MISSING
    num_prompts: int | None = MISSING
    duration_s: float | None = MISSING
    prompt: Any = field(default=MISSING, metadata=_LENGTHS)
    output: Any = field(default=MISSING, metadata=_LENGTHS)
    cap: int | None = MISSING
    seed: int = MISSING

    def build(self) -> StreamWorkload:
        """The typed workload; raises ``ValueError`` for an impossible number."""
        return _stream(self, None)


@dataclass(slots=True, kw_only=True)
class GammaSchema(PoissonSchema):
    """`workload=gamma`."""

    cv: float = MISSING

    def build(self) -> StreamWorkload:
        """The typed workload; raises ``ValueError`` for an impossible number."""
        if self.cv != 0 and not 1e-6 <= self.cv <= 100:
            raise ValueError(f"workload.cv must be 0 or a number from 0.000001 to 100, not {self.cv}")
        return _stream(self, self.cv)


class TraceFormat(Enum):
    """How a trace is written."""

    auto = "auto"
    azure = "azure"
    mooncake = "mooncake"
    results = "results"


@dataclass(slots=True, kw_only=True)
class TraceSchema:
    """`workload=trace`."""

    name: str = MISSING
    path: str = field(default=MISSING, metadata={GIVEN: "a trace, or the folder of a run"})
    format: TraceFormat = MISSING
    speedup: float = MISSING
    max_requests: int | None = MISSING
    cap: int | None = MISSING
    seed: int = MISSING

    def build(self) -> TraceWorkload:
        """The typed workload, whose file is looked at when it is read; raises ``ValueError`` for a bad number."""
        if not 0 < self.speedup <= 1e6:
            raise ValueError(f"workload.speedup must be a number above 0 and at most 1e6, not {self.speedup}")
        _check_counts(self, "max_requests")
        _check_counts(self, "cap", high=MAX_LENGTH)
        return TraceWorkload(
            path=Path(self.path).expanduser(),
            format=self.format.value,
            speedup=self.speedup,
            max_requests=self.max_requests,
            cap=self.cap,
            seed=self.seed,
        )


WORKLOAD_SCHEMAS: Final[Mapping[str, type]] = {
    "arithmetic": ArithmeticSchema,
    "prompts": PromptsSchema,
    "random": RandomSchema,
    "nano": NanoSchema,
    "bill": BillSchema,
    "prover": ProverSchema,
    "long": LongSchema,
    "rollout": RolloutSchema,
    "poisson": PoissonSchema,
    "gamma": GammaSchema,
    "trace": TraceSchema,
}


def check_sampling(workload: Workload, sampling: SamplingParams) -> None:
    """Refuse, as a ``ValueError``, what a workload that says where its samples end would have to ignore."""
    if not isinstance(workload, SizedWorkload):
        return
    why = "beside this workload, which gives each sample its own length, bound and random stream"
    for key in ("max_tokens", "seed"):
        if getattr(sampling, key) is not None:
            raise ValueError(f"sampling.{key} must be null {why}, not {getattr(sampling, key)}")
    for key in ("stop", "stop_token_ids"):
        if getattr(sampling, key):
            raise ValueError(f"sampling.{key} must be empty {why}, not {list(getattr(sampling, key))}")


def _stream(schema: PoissonSchema, cv: float | None) -> StreamWorkload:
    _check_rate(schema.rate)
    num_prompts = schema.num_prompts
    if num_prompts is not None and schema.duration_s is not None:
        raise ValueError("one of workload.num_prompts and workload.duration_s must be given, not both")
    if num_prompts is None and schema.duration_s is None:
        num_prompts = _STREAM_PROMPTS
    _check_counts(schema, "num_prompts")
    _check_counts(schema, "cap", high=MAX_LENGTH)
    if schema.duration_s is not None:
        if not 0 < schema.duration_s <= MAX_SECONDS:
            most = f"above 0 and at most {MAX_SECONDS:g}"
            raise ValueError(f"workload.duration_s must be a number of seconds {most}, not {schema.duration_s}")
        if schema.rate * schema.duration_s > MAX_JOBS:
            raise ValueError(
                f"workload.rate times workload.duration_s must be at most {MAX_JOBS} requests, "
                f"not {schema.rate * schema.duration_s:g}"
            )
    return StreamWorkload(
        name=schema.name,
        rate=schema.rate,
        cv=cv,
        num_prompts=num_prompts,
        duration_s=schema.duration_s,
        prompt=lengths_from(schema.prompt, "workload.prompt", outputs=False),
        output=lengths_from(schema.output, "workload.output", outputs=True),
        cap=schema.cap,
        seed=schema.seed,
    )


def _check_counts(schema: object, *keys: str, high: int = MAX_JOBS) -> None:
    """Refuse a number below 1 or above `high`; null is left to the schema."""
    for key in keys:
        value = getattr(schema, key)
        if value is not None and value < 1:
            raise ValueError(f"workload.{key} must be a whole number, at least 1, not {value}")
        if value is not None and value > high:
            raise ValueError(f"workload.{key} must be a whole number, at most {high}, not {value}")


def _check_product(schema: ProverSchema | RolloutSchema) -> None:
    num_jobs = schema.num_prompts * schema.num_samples
    if num_jobs > MAX_JOBS:
        raise ValueError(f"workload.num_prompts times workload.num_samples must be at most {MAX_JOBS}, not {num_jobs}")


def _check_rate(rate: float | None) -> None:
    if rate is not None and not (math.isfinite(rate) and 1e-6 <= rate <= 1e6):
        raise ValueError(f"workload.rate must be a number of arrivals a second from 1e-06 to 1e+06, not {rate}")
