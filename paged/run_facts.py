"""What a run's folder says of itself: the model, how and where it was computed, and its memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from paged.core.json_files import read_json_object
from paged.core.memory import FP8
from paged.core.model_spec import ModelSpec
from paged.model.locate import find_model


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the files of a run's folder say, but for its logs; None what they do not.

    Attributes:
        model: its name.
        dtype, kv_dtype, numerics, numerics_id, tp: how it was computed.
        device: what computed.
        date: day of the run.
        versions: of the packages that ran.
        spec: the model's description, if it can be found.
        peak_bytes: peak memory of the device.
        weights_bytes, activation_bytes, graph_bytes: what was measured on rank 0's card: the parameters, the most that
            a step takes, and what CUDA graphs keep.
        context_bytes: what the runtime and its libraries held outside of all that.
    """

    model: str | None
    dtype: str | None
    kv_dtype: str | None
    numerics: str | None
    numerics_id: str | None
    tp: int | None
    device: str | None
    date: str | None
    versions: Mapping[str, Any] = field(default_factory=dict)
    spec: ModelSpec | None
    peak_bytes: int | None
    weights_bytes: int | None
    activation_bytes: int | None
    graph_bytes: int | None
    context_bytes: int | None

    @classmethod
    def read(cls, folder: Path) -> RunFacts:
        """Read a folder, or that of a log; nothing must be there. Raises ``ValueError`` for what is malformed."""
        folder = folder.parent if folder.is_file() else folder
        config = _config_of(folder)
        summary = read_json_object(folder / "summary.json") if (folder / "summary.json").is_file() else {}
        peak_bytes = _bytes(summary, "peak_device_bytes")
        measured = summary.get("memory")
        memory: Mapping[str, Any] = measured if isinstance(measured, Mapping) else {}
        path = _text(config, "model.path")
        spec = None if path is None else _spec(path, OmegaConf.select(config, "model.spec"))
        dtype = _text(config, "dtype") or (spec.dtype if spec is not None else None)
        device = summary.get("device") or _text(config, "device")
        if device == "auto":
            device = "cuda" if peak_bytes else "cpu"
        tp = OmegaConf.select(config, "tp")
        return cls(
            model=None if path is None else model_name(path),
            dtype=dtype,
            kv_dtype=_text(config, "kv_dtype") or dtype,
            numerics=_text(config, "numerics.name"),
            numerics_id=summary.get("numerics_id"),
            tp=tp if isinstance(tp, int) else None,
            device=device,
            date=_date(folder),
            versions=summary.get("versions") or {},
            spec=spec,
            peak_bytes=peak_bytes,
            weights_bytes=_bytes(memory, "weights_bytes"),
            activation_bytes=_bytes(memory, "activation_bytes"),
            graph_bytes=_bytes(memory, "graph_bytes"),
            context_bytes=_bytes(memory, "context_bytes"),
        )


def model_name(path: str) -> str:
    """The name of the model at a path: of a folder the last part, because the way there is a machine's own."""
    is_folder = Path(path).expanduser().is_dir() or path.startswith(("/", "~", "."))
    return Path(path).name if is_folder else path


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys of both in which what is known differs, with the two values.

    Models are compared by the last part of their names; ``hardware`` is the name of an entry of that group on one side,
    and may be that of a device on the other.
    """
    same = {"model": _same_model, "kv_dtype": _same_kv_dtype, "hardware": is_hardware}
    return {
        key: (theirs[key], ours[key])
        for key in theirs.keys() & ours.keys()
        if theirs[key] is not None
        and ours[key] is not None
        and theirs[key] != ours[key]
        and not (key in same and same[key](theirs[key], ours[key]))
    }


def is_hardware(device: str, hardware: str) -> bool:
    """Whether a device, by the name that its driver has for it, is that of an entry of the group `hardware`.

    Every part of the entry's name must be a word of the device's: `a100_80g` is an `NVIDIA A100-SXM4-80GB`. A device
    that is only known as ``cuda`` may be any card.
    """
    if device == "cuda":
        return hardware != "cpu"
    words = set(re.findall(r"[a-z0-9]+", device.lower()))
    return all(part in words or f"{part}b" in words for part in hardware.lower().split("_"))


def _same_model(theirs: str, ours: str) -> bool:
    return theirs.rpartition("/")[2] == ours.rpartition("/")[2]


def _same_kv_dtype(theirs: str, ours: str) -> bool:
    return theirs in FP8 and ours in FP8


def _config_of(folder: Path) -> DictConfig:
    """The config that Hydra left in a run's folder; empty if there is none."""
    path = folder / ".hydra" / "config.yaml"
    if not path.is_file():
        return OmegaConf.create({})
    try:
        config = OmegaConf.load(path)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} can't be read: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(config, DictConfig):
        raise ValueError(f"{path} must hold keys and values")
    return config


def _text(config: DictConfig, key: str) -> str | None:
    value = OmegaConf.select(config, key)
    return value if isinstance(value, str) else None


def _bytes(summary: Mapping[str, Any], key: str) -> int | None:
    value = summary.get(key)
    return value if type(value) is int and value > 0 else None


def _spec(path: str, described: DictConfig | None) -> ModelSpec | None:
    """The model's description from the config or from the model's own folder, if it is still there."""
    try:
        if described is None:
            return find_model(path, need_weights=False)[1]
        fields = OmegaConf.to_container(described)
        assert isinstance(fields, dict), "a run checks its config"
        return ModelSpec.from_config({str(key): value for key, value in fields.items()})
    except ValueError:
        return None


def _date(folder: Path) -> str | None:
    """The day in the path of a run's folder, where Hydra puts it."""
    days = [part for part in folder.parts if re.fullmatch(r"\d{4}-\d\d-\d\d", part)]
    return days[-1] if days else None
