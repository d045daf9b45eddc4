"""The config of `calibrate`: the schema of `conf/calibrate.yaml`, and that of `latency=calibrated`, which uses it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from omegaconf import MISSING, DictConfig

from paged.config.convert import GIVEN, Root
from paged.outcome import UserError

if TYPE_CHECKING:
    from paged.sim.calibration import Calibration


class Outside(Enum):
    """What becomes of a step beyond what was measured."""

    warn = "warn"
    refuse = "refuse"


@dataclass(slots=True, kw_only=True)
class CalibratedSchema:
    """`latency=calibrated`."""

    name: str = MISSING
    path: str = field(default=MISSING, metadata={GIVEN: "a calibration.json, or the folder of a calibrate run"})
    foreign: bool = MISSING
    outside: Outside = MISSING
    host: bool = MISSING

    def load(self) -> Calibration:
        """What the file holds; raises ``ValueError`` if it can't be read or is no calibration."""
        from paged.sim.calibration import Calibration

        try:
            return Calibration.load(Path(self.path).expanduser())
        except ValueError as error:
            raise ValueError(f"latency.path must be a calibration: {error}") from error


@dataclass(slots=True, kw_only=True)
class CalibrateSchema:
    """All keys of `conf/calibrate.yaml`."""

    source: list[str] = field(default=MISSING, metadata={GIVEN: "folders of runs, whose step logs are read"})
    name: str | None = MISSING
    output: str | None = MISSING


ROOT: Final = Root(scalars=CalibrateSchema, groups={})


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig:
    """A checked config of `calibrate`.

    Attributes:
        source: folders of runs, or that hold such.
        name: what to call the calibration; None leaves it to the runs.
        output: file that gets a copy of it.
    """

    source: tuple[Path, ...]
    name: str | None
    output: Path | None


def calibrate_config(cfg: DictConfig) -> CalibrateConfig:
    """The frozen object that a composed `calibrate` config describes.

    Raises:
        UserError: naming the key and what is allowed.
    """
    values, _ = ROOT.read(cfg)
    if not values.source:
        raise UserError("source must name at least one folder of a run")
    output = None if values.output is None else Path(values.output).expanduser()
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise UserError(f"output must be a file in a folder that exists, not {str(output)!r}")
    source = tuple(Path(folder).expanduser() for folder in values.source)
    return CalibrateConfig(source=source, name=values.name, output=output)
