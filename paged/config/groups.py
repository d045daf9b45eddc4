"""Schemas that several commands share: the groups but `workload`, sampling, and the scalars of engine and pool.

`run` and `sim` take the same description. What only one of them reads is checked by the other all the same, here.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omegaconf import MISSING, DictConfig, open_dict

from paged.config.convert import GIVEN, nearest
from paged.core.checks import check_timeout, check_whole
from paged.core.config_json import CONFIG_FIELDS
from paged.core.hardware import CollectiveTable, Figure, Hardware
from paged.core.memory import Deployment, check_gib
from paged.core.model_spec import ModelSpec
from paged.core.policy import Fifo, Forecast, Policy, Reserve, Watermark
from paged.core.request import SamplingParams
from paged.core.sharding import check_k_segments, check_tp
from paged.kernels.choices import check_choices
from paged.model.locate import find_model
from paged.outcome import InfeasibleError

if TYPE_CHECKING:
    from paged.sim.latency import LatencyModel

GIVEN_SOURCE: Final = "given on the command line"
"""Who says a figure that an override replaces."""

# The schemas are mutable because a frozen one refuses Hydra's overrides. Values live in the YAML files alone.


class Device(Enum):
    """Where the model computes."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Weights(Enum):
    """Where the parameters come from: the checkpoint, or random ones of its shape."""

    auto = "auto"
    dummy = "dummy"


@dataclass(slots=True, kw_only=True)
class ModelSchema:
    """An entry of the group `model`: where it is and, if it is a model known by name, what it is.

    `spec` holds fields of the checkpoint's `config.json`.
    """

    path: str = field(default=MISSING, metadata={GIVEN: "a checkpoint folder, or a Hub id that is in the local cache"})
    spec: dict[str, Any] | None = None

    def build(self, max_seq_len: int | None) -> ModelSpec | None:
        """The model's description; raises ``ValueError`` for a field that is unknown, missing or malformed."""
        if self.spec is None:
            return None
        for key in self.spec:
            if key not in CONFIG_FIELDS:
                raise ValueError(f"model.spec.{key} is not a field that is known; {nearest(key, CONFIG_FIELDS)}")
        try:
            return ModelSpec.from_config(self.spec, max_seq_len=max_seq_len)
        except ValueError as error:
            raise ValueError(f"model.spec.{str(error).removeprefix('config.json: ')}") from error

    def find(self, max_seq_len: int | None) -> ModelSpec:
        """The model's description without its weights: that of the config, or of the folder at `path`.

        Raises:
            ValueError: a field is wrong, there is no folder, or it holds another model than the config says.
        """
        spec = self.build(max_seq_len)
        if spec is not None and not Path(self.path).expanduser().is_dir():
            return spec
        return find_model(self.path, spec, max_seq_len=max_seq_len)[1]


@dataclass(slots=True, kw_only=True)
class FigureSchema:
    """A number of the group `hardware`, and who says so."""

    value: float = MISSING
    source: str = MISSING
    assumed: bool = MISSING
    cards: int | None = None

    def build(self, key: str, *, zero: bool = False) -> Figure:
        """The figure; raises ``ValueError`` for one that is not above 0 (or 0, if that is allowed)."""
        if not (0 if zero else math.ulp(0)) <= self.value < math.inf:
            allowed = "at least 0" if zero else "above 0"
            raise ValueError(f"hardware.{key}.value must be {allowed}, not {self.value}")
        return Figure(self.value, self.source, self.assumed, self.cards)


@dataclass(slots=True, kw_only=True)
class CollectiveSchema:
    """Measured times of a collective, microseconds by number of ranks and bytes."""

    value: dict[int, dict[int, float]] = MISSING
    source: str = MISSING
    assumed: bool = MISSING

    def build(self, key: str) -> CollectiveTable:
        """The table; raises ``ValueError`` for one that has too few points or that falls."""
        points = {}
        for ranks, times in self.value.items():
            row = tuple((float(size), us) for size, us in sorted(times.items()))
            falls = any(left[1] > right[1] for left, right in itertools.pairwise(row))
            if len(row) < 2 or row[0][1] <= 0 or falls:
                raise ValueError(
                    f"hardware.{key}.value.{ranks} must be at least two times above 0 that grow with the bytes"
                )
            points[ranks] = row
        return CollectiveTable(points, self.source, self.assumed)


@dataclass(slots=True, kw_only=True)
class HardwareSchema:
    """An entry of the group `hardware`; `Hardware` says what the figures mean."""

    name: str = MISSING
    memory_gib: FigureSchema = MISSING
    memory_bytes_per_s: FigureSchema = MISSING
    flops_per_s: FigureSchema = MISSING
    link_bytes_per_s: FigureSchema = MISSING
    link_latency_us: FigureSchema = MISSING
    other_link_latencies_us: list[float] = MISSING
    all_reduce_us: CollectiveSchema | None = MISSING
    gather_us: CollectiveSchema | None = MISSING
    host_step_us: FigureSchema = MISSING
    host_seq_us: FigureSchema = MISSING
    pool_gib: FigureSchema | None = MISSING

    def build(self) -> Hardware:
        """The hardware; raises ``ValueError`` for a figure out of range."""
        return Hardware(
            name=self.name,
            memory_gib=self.memory_gib.build("memory_gib"),
            memory_bytes_per_s=self.memory_bytes_per_s.build("memory_bytes_per_s"),
            flops_per_s=self.flops_per_s.build("flops_per_s"),
            link_bytes_per_s=self.link_bytes_per_s.build("link_bytes_per_s"),
            link_latency_us=self.link_latency_us.build("link_latency_us", zero=True),
            other_link_latencies_us=tuple(self.other_link_latencies_us),
            all_reduce_us=None if self.all_reduce_us is None else self.all_reduce_us.build("all_reduce_us"),
            gather_us=None if self.gather_us is None else self.gather_us.build("gather_us"),
            host_step_us=self.host_step_us.build("host_step_us", zero=True),
            host_seq_us=self.host_seq_us.build("host_seq_us", zero=True),
            pool_gib=None if self.pool_gib is None else self.pool_gib.build("pool_gib"),
        )


def given_keys(overrides: Sequence[str]) -> set[str]:
    """The dotted keys that overrides set, those inside a mapping included."""
    keys = set()
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        keys |= {key, *(f"{key}.{inner}" for inner in re.findall(r"[{,]\s*(\w+)\s*:", value))}
    return keys


def with_given_sources(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """A copy of a config in which a figure of the hardware that `overrides` replace no longer has its old source."""
    keys, marked = given_keys(overrides), copy.deepcopy(cfg)
    hardware = marked.get("hardware")
    # Not resolved: what is missing or refers to nothing is told when the config is read.
    for name, figure in hardware.items_ex(resolve=False) if isinstance(hardware, DictConfig) else ():
        key = f"hardware.{name!s}"
        replaced = any(each == f"{key}.value" or each.startswith(f"{key}.value.") for each in keys)
        if isinstance(figure, DictConfig) and replaced and f"{key}.source" not in keys:
            figure.source = GIVEN_SOURCE
            figure.assumed = figure.assumed if f"{key}.assumed" in keys else False
            with open_dict(figure):
                figure.pop("cards", None)
    return marked


@dataclass(slots=True, kw_only=True)
class NumericsSchema:
    """An entry of the group `numerics`; `Numerics` says what its constants mean."""

    name: str = MISSING
    k_segments: int = MISSING
    reduce_dtype: str = MISSING

    def check(self, spec: ModelSpec, tp: int) -> None:
        """Refuse, without torch, what an engine of `tp` ranks would refuse.

        Raises:
            ValueError: a constant is none that can be chosen.
            InfeasibleError: the model's products can't be cut into `k_segments`.
        """
        try:
            check_choices(self.k_segments, self.reduce_dtype)
        except ValueError as error:
            raise ValueError(f"numerics.{error}") from error
        try:
            check_k_segments(spec, tp, self.k_segments)
        except ValueError as error:
            raise InfeasibleError(f"numerics.{error}") from error


class Victim(Enum):
    """Whom a policy preempts; `Policy` says what the words mean."""

    youngest = "youngest"
    least_computed = "least_computed"
    most_blocks = "most_blocks"


@dataclass(slots=True, kw_only=True)
class FifoSchema:
    """`policy=fifo`, and what all policies have."""

    name: str = MISSING
    victim: Victim = MISSING

    def build(self) -> Policy:
        """The policy object; raises ``ValueError`` for a number out of range."""
        return Fifo(victim=self.victim.value)


@dataclass(slots=True, kw_only=True)
class WatermarkSchema(FifoSchema):
    """`policy=watermark`."""

    fraction: float = MISSING

    def build(self) -> Policy:
        """The policy object; raises ``ValueError`` for a fraction out of range."""
        return Watermark(fraction=self.fraction, victim=self.victim.value)


@dataclass(slots=True, kw_only=True)
class ReserveSchema(FifoSchema):
    """`policy=reserve`."""

    def build(self) -> Policy:
        """The policy object."""
        return Reserve(victim=self.victim.value)


@dataclass(slots=True, kw_only=True)
class ForecastSchema(FifoSchema):
    """`policy=forecast`."""

    risk: float = MISSING

    def build(self) -> Policy:
        """The policy object; raises ``ValueError`` for a risk out of range."""
        return Forecast(risk=self.risk, victim=self.victim.value)


@dataclass(slots=True, kw_only=True)
class SamplingSchema:
    """The key `sampling`: the fields of SamplingParams, which says what they mean."""

    n: int = MISSING
    max_tokens: int | None = MISSING
    temperature: float = MISSING
    top_p: float = MISSING
    top_k: int = MISSING
    min_p: float = MISSING
    seed: int | None = MISSING
    stop: list[str] = MISSING
    stop_token_ids: list[int] = MISSING
    ignore_eos: bool = MISSING
    logprobs: int | None = MISSING
    prompt_logprobs: int | None = MISSING
    presence_penalty: float = MISSING
    frequency_penalty: float = MISSING
    repetition_penalty: float = MISSING
    logit_bias: dict[int, float] | None = MISSING

    def build(self) -> SamplingParams:
        """The parameters; raises ``ValueError`` for a value out of range."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        try:
            # In YAML it is null: Hydra would merge an override into a mapping instead of setting it.
            return SamplingParams(**{**given, "logit_bias": given["logit_bias"] or {}})
        except ValueError as error:
            raise ValueError(f"sampling.{error}") from error


@dataclass(slots=True, kw_only=True)
class MemorySchema:
    """The key `memory`: what one rank's memory holds beside the cache, GiB."""

    weights_gib: float | None = MISSING
    activation_gib: float = MISSING
    context_gib: float = MISSING

    def check(self) -> None:
        """Refuse, as a ``ValueError``, what is no amount of memory."""
        check_gib(self.weights_gib, self.activation_gib, self.context_gib)


@dataclass(slots=True, kw_only=True)
class DeploymentSchema:
    """The scalars that the size of the pool follows from; `Deployment` checks their ranges."""

    tp: int = MISSING
    dtype: str | None = MISSING
    kv_dtype: str | None = MISSING
    block_size: int = MISSING
    max_num_seqs: int = MISSING
    max_seq_len: int | None = MISSING
    allow_long_context: bool = MISSING
    gpu_memory_utilization: float = MISSING

    def build(self, model: ModelSchema, hardware: HardwareSchema, memory: MemorySchema) -> Deployment:
        """The model on its cards.

        Raises:
            ValueError: naming the key and what is allowed.
            InfeasibleError: the model can't be cut over `tp` ranks, or has fewer positions than `max_seq_len`.
        """
        check_whole("tp", self.tp, 1)
        spec = model.find(self.max_seq_len)
        try:
            check_tp(spec, self.tp)
            max_seq_len = spec.position_limit(self.max_seq_len, allow_long_context=self.allow_long_context)
        except ValueError as error:
            raise InfeasibleError(error) from error
        dtype = self.dtype or spec.dtype
        return Deployment(
            spec=spec,
            hardware=hardware.build(),
            tp=self.tp,
            dtype=dtype,
            kv_dtype=self.kv_dtype or dtype,
            block_size=self.block_size,
            utilization=self.gpu_memory_utilization,
            weights_gib=memory.weights_gib,
            activation_gib=memory.activation_gib,
            context_gib=memory.context_gib,
            max_num_seqs=self.max_num_seqs,
            max_seq_len=max_seq_len,
        )


@dataclass(slots=True, kw_only=True)
class EngineSchema(DeploymentSchema):
    """The scalars that an engine is built with, for `run` and `sim` alike; EngineConfig checks their ranges.

    `sim` computes nothing: to it `verify`, `tp_timeout_s`, `weights` and, beside `hardware`, `device` say nothing.
    """

    verify: bool = MISSING
    tp_timeout_s: float = MISSING
    num_blocks: int | None = MISSING
    max_step_tokens: int | None = MISSING
    chunk_size: int | None = MISSING
    depth: int | None = MISSING
    seed: int = MISSING
    device: Device = MISSING
    weights: Weights = MISSING
    prefix_reuse: bool = MISSING

    def check(self, hardware: Hardware) -> None:
        """Refuse, as a ``ValueError``, a timeout out of range and a device that is not the hardware's."""
        check_timeout("tp_timeout_s", self.tp_timeout_s)
        kind = Device.cpu if hardware.is_cpu else Device.cuda
        if self.device not in (Device.auto, kind):
            raise ValueError(
                f"device must be auto or {kind.value} beside hardware {hardware.name}, not {self.device.value}"
            )


# Without slots, because a class can't have two bases with slots.
@dataclass(kw_only=True)
class ReportSchema:
    """The scalars that say how `sim` tells what it found; an experiment that has them serves `run` as well."""

    seeds: int = MISSING
    optimize: str = MISSING
    plots: bool = MISSING
    trace_file: bool = MISSING


@dataclass(slots=True, kw_only=True)
class RooflineSchema:
    """`latency=roofline`."""

    name: str = MISSING
    host: bool = MISSING

    def build(self, deployment: Deployment) -> LatencyModel:
        """The latency model of a deployment."""
        from paged.sim.latency import Roofline

        return Roofline(
            deployment.spec,
            deployment.hardware,
            tp=deployment.tp,
            dtype=deployment.dtype,
            kv_dtype=deployment.kv_dtype,
            host=self.host,
        )


@dataclass(slots=True, kw_only=True)
class ConstantSchema:
    """`latency=constant`."""

    name: str = MISSING
    seconds: float = MISSING

    def check(self) -> None:
        """Refuse, as a ``ValueError``, seconds out of range."""
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"latency.seconds must be above 0, not {self.seconds}")

    def build(self, deployment: Deployment) -> LatencyModel:
        """The latency model, the same for every deployment; raises ``ValueError`` as `check` does."""
        from paged.sim.latency import Constant

        self.check()
        return Constant(self.seconds)


NUMERICS_SCHEMAS: Final[Mapping[str, type]] = {"invariant": NumericsSchema, "fast": NumericsSchema}
POLICY_SCHEMAS: Final[Mapping[str, type]] = {
    "fifo": FifoSchema,
    "watermark": WatermarkSchema,
    "reserve": ReserveSchema,
    "forecast": ForecastSchema,
}
LATENCY_SCHEMAS: Final[Mapping[str, type]] = {"roofline": RooflineSchema, "constant": ConstantSchema}
