"""The typed schema of every config file, and the one sentence for whatever is wrong in a composed config."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Final

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from paged.core.model_spec import CONFIG_FIELDS, ModelSpec
from paged.core.policy import Fifo, Policy, Reserve, Watermark
from paged.core.request import SamplingParams
from paged.outcome import UserError

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
)
"""What may change when a run is resumed: under `invariant` numerics none of these touches a token."""


_GIVEN: Final = {
    "model.path": "a checkpoint folder, or a Hub id that is in the local cache",
    "workload.path": "a file of prompts, one JSON object a line",
}
"""What a text that has no default must be."""


class Device(Enum):
    """Where the model computes."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Weights(Enum):
    """Where the parameters come from: the checkpoint, or random ones of its shape."""

    auto = "auto"
    dummy = "dummy"


# The schemas are mutable because a frozen one refuses Hydra's overrides. Values live in the YAML files alone.


@dataclass(slots=True, kw_only=True)
class ModelSchema:
    """An entry of the group `model`: where it is and, if it is a model known by name, what it is.

    `spec` holds fields of the checkpoint's `config.json`.
    """

    path: str = MISSING
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


@dataclass(slots=True, kw_only=True)
class NumericsSchema:
    """An entry of the group `numerics`; neither has constants to choose yet."""

    name: str = MISSING


@dataclass(slots=True, kw_only=True)
class FifoSchema:
    """`policy=fifo`."""

    name: str = MISSING

    def build(self) -> Policy:
        """The policy object."""
        return Fifo()


@dataclass(slots=True, kw_only=True)
class WatermarkSchema:
    """`policy=watermark`."""

    name: str = MISSING
    fraction: float = MISSING

    def build(self) -> Policy:
        """The policy object; raises ``ValueError`` for a fraction out of range."""
        return Watermark(fraction=self.fraction)


@dataclass(slots=True, kw_only=True)
class ReserveSchema:
    """`policy=reserve`."""

    name: str = MISSING

    def build(self) -> Policy:
        """The policy object."""
        return Reserve()


@dataclass(slots=True, kw_only=True)
class ArithmeticSchema:
    """`workload=arithmetic`."""

    name: str = MISSING
    num_prompts: int = MISSING
    seed: int = MISSING

    def build(self) -> ArithmeticWorkload:
        """The typed workload; raises ``ValueError`` for an impossible number."""
        if self.num_prompts < 1:
            raise ValueError(f"workload.num_prompts must be a whole number, at least 1, not {self.num_prompts}")
        return ArithmeticWorkload(num_prompts=self.num_prompts, seed=self.seed)


@dataclass(slots=True, kw_only=True)
class PromptsSchema:
    """`workload=prompts`."""

    name: str = MISSING
    path: str = MISSING

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
        for key in ("num_prompts", "input_len", "output_len"):
            if getattr(self, key) < 1:
                raise ValueError(f"workload.{key} must be a whole number, at least 1, not {getattr(self, key)}")
        return RandomWorkload(
            num_prompts=self.num_prompts, input_len=self.input_len, output_len=self.output_len, seed=self.seed
        )


@dataclass(slots=True, kw_only=True)
class SamplingSchema:
    """The key `sampling`: the fields of SamplingParams, which checks their values."""

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


@dataclass(slots=True, kw_only=True)
class EngineSchema:
    """The scalars that the engine is built with; EngineConfig checks their ranges."""

    dtype: str | None = MISSING
    kv_dtype: str | None = MISSING
    block_size: int = MISSING
    num_blocks: int | None = MISSING
    max_num_seqs: int = MISSING
    max_step_tokens: int = MISSING
    chunk_size: int = MISSING
    max_seq_len: int | None = MISSING
    allow_long_context: bool = MISSING
    gpu_memory_utilization: float = MISSING
    depth: int = MISSING
    seed: int = MISSING
    device: Device = MISSING
    weights: Weights = MISSING
    prefix_reuse: bool = MISSING


@dataclass(slots=True, kw_only=True)
class RunSchema(EngineSchema):
    """All scalars of `conf/run.yaml`."""

    tp: int = MISSING
    resume: str | None = MISSING


NUMERICS: Final[Mapping[str, type]] = {"invariant": NumericsSchema, "fast": NumericsSchema}
POLICIES: Final[Mapping[str, type]] = {"fifo": FifoSchema, "watermark": WatermarkSchema, "reserve": ReserveSchema}
WORKLOADS: Final[Mapping[str, type]] = {
    "arithmetic": ArithmeticSchema,
    "prompts": PromptsSchema,
    "random": RandomSchema,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticWorkload:
    """The built-in prompts, whose answers can be scored."""

    num_prompts: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsWorkload:
    """A file of prompts."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWorkload:
    """Random token ids of given lengths."""

    num_prompts: int
    input_len: int
    output_len: int
    seed: int


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
    workload: ArithmeticWorkload | PromptsWorkload | RandomWorkload


def run_config(cfg: DictConfig) -> RunConfig:
    """The frozen objects that a composed `run` config describes.

    Raises:
        UserError: naming the key and what is allowed.
    """
    try:
        container = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {_first_line(error)}") from error
    assert isinstance(container, dict)
    values = {str(key): value for key, value in container.items()}
    model = _convert(ModelSchema, _group(values, "model"), "model.")
    numerics = _choose(NUMERICS, values, "numerics")
    policy = _choose(POLICIES, values, "policy")
    workload = _choose(WORKLOADS, values, "workload")
    sampling = _convert(SamplingSchema, _group(values, "sampling"), "sampling.")
    scalars = _convert(RunSchema, values, "", others=("model", "numerics", "policy", "workload", "sampling"))
    if scalars.tp != 1:
        raise UserError(f"tp must be 1, because this version runs on one device, not {scalars.tp}")
    try:
        given = {field.name: getattr(sampling, field.name) for field in fields(SamplingSchema)}
        # In YAML it is null: Hydra would merge an override into a mapping instead of setting it.
        params = SamplingParams(**{**given, "logit_bias": given["logit_bias"] or {}})
    except ValueError as error:
        raise UserError(f"sampling.{error}") from error
    try:
        engine = {field.name: getattr(scalars, field.name) for field in fields(EngineSchema)}
        engine |= {"numerics": numerics.name, "policy": policy.build()}
        engine |= {"device": scalars.device.value, "weights": scalars.weights.value}
        spec = model.build(scalars.max_seq_len)
        return RunConfig(model=model.path, spec=spec, engine=engine, sampling=params, workload=workload.build())
    except ValueError as error:
        raise UserError(error) from error


def conf_folder() -> Path:
    """Where the YAML files are: beside the package in a clone, inside it once installed."""
    import paged.conf

    return Path(next(iter(paged.conf.__path__))).resolve()


def nearest(key: str, known: Iterable[str]) -> str:
    """`did you mean X?` for a misspelt key, or else what there is."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"allowed: {', '.join(names)}"


def known_keys() -> list[str]:
    """Every key that some config of `run` has, dotted."""
    keys = ["model", "numerics", "policy", "workload", "sampling", "experiment"]
    keys += [field.name for field in fields(RunSchema)]
    for group, schemas in (
        ("model", [ModelSchema]),
        ("numerics", NUMERICS.values()),
        ("policy", POLICIES.values()),
        ("workload", WORKLOADS.values()),
        ("sampling", [SamplingSchema]),
    ):
        keys += [f"{group}.{field.name}" for schema in schemas for field in fields(schema)]
    return list(dict.fromkeys(keys))


def hydra_sentence(error: Exception) -> str:
    """One sentence for an error of Hydra's or OmegaConf's, which name their own remedies over several lines."""
    from hydra.errors import MissingConfigException, OverrideParseException

    message = str(error) or str(error.__cause__)
    if isinstance(error, OverrideParseException):
        return f"cannot read the override {error.override!r}: it must be KEY=VALUE or GROUP=OPTION"
    if isinstance(error, MissingConfigException):
        if error.options is not None and error.missing_cfg_file is not None:
            group, _, option = error.missing_cfg_file.rpartition("/")
            return f"{group} must be one of {', '.join(error.options)}, not {option!r}"
        return _first_line(message)
    first = _first_line(message)
    if first.startswith("Could not override '") or first.startswith("Could not delete"):
        key = first.split("'")[1].split("@")[0]
        known = known_keys()
        if key in known and "." in key:
            return f"{key} is not a key of the {key.partition('.')[0]} that is chosen; see --cfg job"
        if key.startswith("hydra"):
            return f"{key} is not a key of Hydra's config; see --cfg hydra"
        parent = key.rpartition(".")[0]
        siblings = [name for name in known if name.rpartition(".")[0] == parent] or known
        return f"{key} is not a key of this config; {nearest(key, siblings)}"
    if first.startswith("Ambiguous value for argument"):
        override = first.split("'")[1]
        return f"{override!r} gives several values: add -m for a sweep, or write a list as KEY=[A,B]"
    if first.startswith("Error merging override") and error.__cause__ is not None:
        return f"{first}: {_first_line(error.__cause__)}"
    return first


def _group(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    group = values.get(key)
    if not isinstance(group, dict):
        raise UserError(f"{key} must hold keys and values, not {_shown(group)}")
    return group


def _choose(schemas: Mapping[str, type], values: Mapping[str, Any], key: str) -> Any:
    """The schema object of a group whose entries differ, chosen by the entry's `name`."""
    group = values.get(key)
    name = group.get("name") if isinstance(group, dict) else group
    if not isinstance(group, dict) or not isinstance(name, str) or name not in schemas:
        raise UserError(f"{key} must be one of {', '.join(schemas)}, not {_shown(name)}")
    return _convert(schemas[name], group, f"{key}.")


def _convert(schema: type, values: Mapping[str, Any], prefix: str, others: tuple[str, ...] = ()) -> Any:
    """`values` as an object of `schema`, types checked, nothing unknown and nothing missing; `others` are skipped."""
    hints = typing.get_type_hints(schema)
    target = OmegaConf.structured(schema)
    for key, value in values.items():
        if key in others:
            continue
        if key not in hints:
            raise UserError(f"{prefix}{key} is not a key of this config; {nearest(str(key), (*hints, *others))}")
        if value != MISSING:
            try:
                target[key] = _listed(value, hints[key])
            except OmegaConfBaseException as error:
                raise UserError(f"{prefix}{key} must be {_allowed(hints[key])}, not {_shown(value)}") from error
    for key in hints:
        if OmegaConf.is_missing(target, key):
            raise UserError(f"{prefix}{key} must be given: {_GIVEN.get(prefix + key) or _allowed(hints[key])}")
    return OmegaConf.to_object(target)


def _allowed(hint: Any) -> str:
    """What a value of a schema's type may be, in words."""
    if isinstance(hint, UnionType):
        words = [_allowed(part) for part in typing.get_args(hint) if part is not type(None)]
        return " or ".join([*words, "null"])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(hint.__members__)
    known = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    known |= {list[int]: "a whole number or a list of them", list[str]: "a text or a list of texts"}
    known |= {dict[str, Any]: "a mapping of config.json's fields to values"}
    return known.get(hint) or "a mapping of token ids to numbers"


def _listed(value: Any, hint: Any) -> Any:
    """`value`, or a list of it where one is wanted, as in the library."""
    single = isinstance(value, str | int) and not isinstance(value, bool)
    return [value] if single and typing.get_origin(hint) is list else value


def _shown(value: object) -> str:
    """`value` as it is written in YAML, where that differs from Python."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _first_line(message: object) -> str:
    return str(message).strip().partition("\n")[0]
