"""A fitted model of step times: its features, its file with all that is known about it, and the model that predicts."""

from __future__ import annotations

import json
import math
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from paged.core.json_files import read_json
from paged.sim.shape import StepShape

FORMAT: Final = 1
CALIBRATION_FILE: Final = "calibration.json"

CLASSES: Final = ("decode", "prefill", "mixed")
OUTSIDE: Final = ("warn", "refuse")

GOOD_ERROR: Final = 0.05
"""Median error of held-out steps, up to which a calibration is called good."""
POOR_ERROR: Final = 0.2
"""... and above which it is called poor."""
_MOST_OUTLIERS: Final = 0.1  # of the steps fitted; more, and it is called poor
_FEW_STEPS: Final = 8  # of a class, fewer than a cost needs
_FEW_HELD_OUT: Final = 4  # fewer say nothing by themselves


def step_class(shape: StepShape) -> str:
    """Whether a step has single tokens, chunks of several, or both."""
    if shape.prefill_seqs == 0:
        return "decode"
    return "prefill" if shape.prefill_seqs == shape.num_seqs else "mixed"


def _over(num_tokens: Any, knot: int) -> Any:
    return (num_tokens > knot) * (num_tokens - knot)


FEATURES: Final[Mapping[str, Callable[[Any], Any]]] = {
    "step": lambda shape: shape.num_tokens * 0 + 1,
    "tokens": lambda shape: shape.num_tokens,
    "decode_kv": lambda shape: shape.kv_tokens - shape.prefill_kv - shape.prefill_tokens,
    "attention_pairs": lambda shape: shape.attention_pairs,
    "prefill_kv": lambda shape: shape.prefill_kv,
    "tokens_over_128": lambda shape: _over(shape.num_tokens, 128),
    "tokens_over_256": lambda shape: _over(shape.num_tokens, 256),
    "tokens_over_512": lambda shape: _over(shape.num_tokens, 512),
    "sequences": lambda shape: shape.num_seqs,
    "samples": lambda shape: shape.num_samples,
    "max_kv": lambda shape: shape.max_kv,
}
"""What a step's time is a sum of, from its shape (numbers, or arrays of them). A time must not fall in any of them, so
their coefficients, seconds a unit, are never negative. Where two tell the same, a fit keeps the earlier one."""

_OF_TOKENS: Final = ("step", "tokens", "tokens_over_128", "tokens_over_256", "tokens_over_512")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """How far predicted times are from measured ones; relative errors are shares of the measured time.

    Attributes:
        num_steps: steps compared.
        mape, p50, p90: mean, median and 90th percentile of the relative error's size.
        bias: mean relative error, positive where too much is predicted.
        total: relative error of the sum of all times.
    """

    num_steps: int
    mape: float
    p50: float
    p90: float
    bias: float
    total: float

    @classmethod
    def of(cls, predicted: Sequence[float] | Any, measured: Sequence[float] | Any) -> ErrorSummary:
        """The summary of times in seconds, those measured positive; zeros if there are none."""
        there, real = np.asarray(predicted, np.float64), np.asarray(measured, np.float64)
        if not len(real):
            return cls(num_steps=0, mape=0.0, p50=0.0, p90=0.0, bias=0.0, total=0.0)
        relative = there / real - 1
        p50, p90 = np.quantile(np.abs(relative), (0.5, 0.9))
        return cls(
            num_steps=len(real),
            mape=float(np.abs(relative).mean()),
            p50=float(p50),
            p90=float(p90),
            bias=float(relative.mean()),
            total=float(there.sum() / real.sum() - 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """The host's work between two steps when nothing hides it: committing, planning, logging, handing out.

    Attributes:
        step_s: seconds a step.
        seq_s: seconds a sequence in it.
        error: on steps that were held out.
    """

    step_s: float
    seq_s: float
    error: ErrorSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """What steps of one class were measured.

    Attributes:
        num_steps: how many, outliers left out.
        bounds: the lowest and the highest value of each field of `StepShape`.
    """

    num_steps: int
    bounds: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of the runs measured; bytes are those of one rank, None what is not known.

    Attributes:
        num_blocks, block_size: the pool.
        kv_tokens: tokens that it holds.
        kv_bytes: its size.
        weights_bytes: the parameters.
        activation_bytes: what steps and their CUDA graphs take beside both; if unmeasured, the rest of the peak.
        peak_device_bytes: the most that was allocated at once.
        context_bytes: what the runtime and its libraries hold beside that.
    """

    num_blocks: int
    block_size: int
    kv_tokens: int
    kv_bytes: int | None = None
    weights_bytes: int | None = None
    activation_bytes: int | None = None
    peak_device_bytes: int | None = None
    context_bytes: int | None = None

    def __post_init__(self) -> None:
        if min(self.num_blocks, self.block_size) < 1 or self.kv_tokens != self.num_blocks * self.block_size:
            raise ValueError(
                f"memory.kv_tokens must be num_blocks x block_size of the pool measured, above 0, not {self.kv_tokens}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the measurements come from; None what the runs do not say.

    Attributes:
        sources: names of the runs' folders, without the way there.
        date: day of the last run.
        device: what computed.
        model, dtype, kv_dtype, numerics, numerics_id, tp: what was computed, and how.
        depths: pipeline depths of the runs.
        versions: of the packages that ran.
    """

    sources: list[str]
    date: str | None = None
    device: str | None = None
    model: str | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    numerics: str | None = None
    numerics_id: str | None = None
    tp: int | None = None
    depths: list[int]
    versions: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a calibration file holds.

    Attributes:
        format: version of the file's layout.
        name: what to call it.
        coefficients: seconds a unit, by the name of the feature; those that the data does not support are absent.
        floor_s: a small part of the shortest step measured; nothing shorter is predicted, however small the step.
        host: the host's time between steps; None if no run shows it (a deeper pipeline hides it).
        ranges: what was measured, by class of step.
        held_out: error on every fifth step, which the fit has not seen, over ``all`` and by class of step.
        other_runs: error on each run of a fit to all the others.
        noise: share by which equal steps differ, which no model can predict; None if there are no such pairs.
        num_steps: steps measured, those held out included.
        num_first: further steps left out: the first of their process, and far slower than the others let expect.
        num_trimmed: outliers that the fit was not to follow; the held-out steps keep theirs.
        memory: the runs' memory.
        provenance: where it comes from.
    """

    format: int = FORMAT
    name: str
    coefficients: dict[str, float]
    floor_s: float
    host: HostTime | None
    ranges: dict[str, Range]
    held_out: dict[str, ErrorSummary]
    other_runs: dict[str, ErrorSummary]
    noise: float | None
    num_steps: int
    num_first: int
    num_trimmed: int
    memory: Memory
    provenance: Provenance

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format must be {FORMAT}, not {self.format}")
        for key, seconds in self.coefficients.items():
            if key not in FEATURES:
                raise ValueError(f"coefficients must be of {', '.join(FEATURES)}, not {key}")
            if seconds < 0:
                raise ValueError(f"coefficients.{key} must be 0 or more, not {seconds!r}")
        if self.floor_s <= 0:
            raise ValueError(f"floor_s must be above 0, not {self.floor_s!r}")
        if self.host is not None and min(self.host.step_s, self.host.seq_s) < 0:
            raise ValueError("host.step_s and host.seq_s must be 0 or more")
        if not self.ranges or not set(CLASSES).issuperset(self.ranges):
            raise ValueError(f"ranges must be of {', '.join(CLASSES)}, not {', '.join(self.ranges) or 'nothing'}")
        for name, measured in self.ranges.items():
            if list(measured.bounds) != list(StepShape._fields):
                raise ValueError(f"ranges.{name}.bounds must be of {', '.join(StepShape._fields)}, in this order")
            for field, (low, high) in measured.bounds.items():
                if not low <= high:
                    raise ValueError(f"ranges.{name}.bounds.{field} must be ascending, not {low!r}, {high!r}")

    @property
    def quality(self) -> str:
        """A verdict in a line: ``good``, ``fair`` or ``poor``, and what is wrong."""
        if not (error := self.held_out.get("all")) or not error.num_steps:
            return "not known: no step was held out"
        outliers = self.num_trimmed / max(1, self.num_steps - error.num_steps)
        bad = [
            (kind, each.p50)
            for kind, each in self.held_out.items()
            if each.p50 > POOR_ERROR and (kind == "all" or each.num_steps >= _FEW_HELD_OUT)
        ]
        # Where all are bad, the classes are no news.
        faults = [
            f"held-out {'' if kind == 'all' else f'{kind} '}steps are off by {median:.0%} in the median"
            for kind, median in ([one for one in bad if one[0] == "all"] or bad)
        ]
        if outliers > _MOST_OUTLIERS:
            faults.append(f"{outliers:.0%} of the steps are outliers")
        if faults:
            return f"poor: {' and '.join(faults)}; was the machine busy?"
        verdict = f"held-out steps are off by {error.p50:.1%} in the median"
        few = [f"{known.num_steps} {kind}" for kind, known in self.ranges.items() if known.num_steps < _FEW_STEPS]
        few += [f"no {kind}" for kind in CLASSES if kind not in self.ranges]
        seen = f"; it has seen {' and '.join(few)} steps" if few else ""
        return f"{'good' if error.p50 <= GOOD_ERROR and not few else 'fair'}: {verdict}{seen}"

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text(json.dumps(asdict(self), indent=2, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a file, or the one in a folder that `calibrate` made.

        Raises:
            ValueError: it can't be read or is no calibration; one sentence that names the file and the key.
        """
        path = path / CALIBRATION_FILE if path.is_dir() else path
        value = read_json(path)
        # First, because another layout has other keys.
        if isinstance(value, dict) and value.get("format", FORMAT) != FORMAT:
            raise ValueError(f"{path}: format must be {FORMAT}, not {value['format']!r}")
        try:
            loaded = _read(cls, value, "")
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        assert isinstance(loaded, Calibration)
        return loaded


class Calibrated:
    """Predicts step times from a calibration and counts the steps that lie outside what was measured.

    Args:
        calibration: the fit.
        outside: ``warn`` to extrapolate and count, ``refuse`` to raise at the first such step.
        host: whether the host takes the time measured, or none.

    Attributes:
        calibration: the fit.
        num_steps: steps predicted so far.
        num_outside: those of them outside the range.
    """

    def __init__(self, calibration: Calibration, outside: str = "warn", *, host: bool = True) -> None:
        if outside not in OUTSIDE:
            raise ValueError(f"latency.outside must be one of {', '.join(OUTSIDE)}, not {outside!r}")
        self.calibration = calibration
        self.num_steps = 0
        self.num_outside = 0
        self._refuse = outside == "refuse"
        self._counts: Counter[str] = Counter()
        self._class_counts: Counter[str] = Counter()
        self._furthest: dict[str, tuple[float, str, int]] = {}
        self._bounds = {name: tuple(known.bounds.values()) for name, known in calibration.ranges.items()}
        get = calibration.coefficients.get
        self._pair_s, self._prefill_kv_s = get("attention_pairs", 0.0), get("prefill_kv", 0.0)
        self._decode_kv_s, self._max_kv_s = get("decode_kv", 0.0), get("max_kv", 0.0)
        self._seq_s, self._sample_s = get("sequences", 0.0), get("samples", 0.0)
        self._floor_s = calibration.floor_s
        self._counts_host = host
        known_host = calibration.host if host else None
        self._host_step_s = known_host.step_s if known_host is not None else 0.0
        self._host_seq_s = known_host.seq_s if known_host is not None else 0.0
        # What a step costs for its tokens, whoever they belong to; few different numbers occur.
        self._tokens_s: dict[int, float] = {}

    def step_s(self, shape: StepShape) -> float:
        """Predicted seconds of a step on the device.

        Raises:
            ValueError: the step lies outside the calibrated range, and that is to be refused.
        """
        tokens, seqs, samples, kv, max_kv, prefill_tokens, prefill_seqs, prefill_kv, pairs = shape
        self.num_steps += 1
        kind = step_class(shape)
        bounds = self._bounds.get(kind)
        if bounds is None:
            self._leave(shape, kind)
        else:
            for (low, high), value in zip(bounds, shape, strict=True):
                if not low <= value <= high:
                    self._leave(shape, kind)
                    break
        step_s = self._tokens_s.get(tokens)
        if step_s is None:
            get = self.calibration.coefficients.get
            step_s = self._tokens_s[tokens] = sum(get(name, 0.0) * FEATURES[name](shape) for name in _OF_TOKENS)
        step_s += self._seq_s * seqs + self._sample_s * samples + self._max_kv_s * max_kv
        step_s += self._decode_kv_s * (kv - prefill_kv - prefill_tokens)
        if prefill_seqs:
            step_s += self._prefill_kv_s * prefill_kv + self._pair_s * pairs
        return step_s if step_s > self._floor_s else self._floor_s

    def host_s(self, num_seqs: int) -> float:
        """Seconds that the host works for a step of ``num_seqs`` sequences before the device can begin it."""
        return self._host_step_s + self._host_seq_s * num_seqs

    def outside_range(self) -> dict[str, Any]:
        """What was asked outside the calibrated range, for a summary.

        ``steps`` and ``share`` of all steps, and ``classes``, how many of each; ``worst`` names the entry of ``by``
        that lies furthest outside, as a share of the highest value measured; there, by class and field of the shape
        (or the class alone, if it was never measured), are the ``steps``, the ``furthest`` value and the ``measured``
        bounds.
        """
        by: dict[str, Any] = {}
        for key, (_, field, value) in sorted(self._furthest.items(), key=lambda item: -item[1][0]):
            kind = key.partition(".")[0]
            known = self.calibration.ranges.get(kind)
            measured = None if known is None else list(known.bounds[field])
            by[key] = {"steps": self._counts[key], "furthest": value, "measured": measured}
        share = self.num_outside / self.num_steps if self.num_steps else 0.0
        classes = dict(self._class_counts.most_common())
        return {
            "steps": self.num_outside,
            "share": share,
            "classes": classes,
            "worst": next(iter(by), None),
            "by": by,
        }

    def notes(self) -> list[str]:
        """Sentences that a report must show: a poor fit, steps outside the range, a host time that is not known."""
        notes = []
        if self.calibration.quality.startswith("poor"):
            notes.append(f"the calibration is {self.calibration.quality}")
        if self.num_outside:
            found = self.outside_range()
            reasons = []
            for kind, steps in found["classes"].items():
                # The entries are sorted: this is the class's furthest.
                key, entry = next((key, entry) for key, entry in found["by"].items() if key.partition(".")[0] == kind)
                reasons.append(f"{steps:,} {kind} ({_beyond(key.partition('.')[2], **entry)})")
            notes.append(
                f"{self.num_outside:,} of {self.num_steps:,} steps lie outside the calibrated range: "
                f"{', '.join(reasons)}"
            )
        if self._counts_host and self.calibration.host is None:
            notes.append("the calibration knows no host time, so the time between steps is taken as 0")
        return notes

    def _leave(self, shape: StepShape, kind: str) -> None:
        """Count a step outside the range, or refuse it."""
        self.num_outside += 1
        self._class_counts[kind] += 1
        measured = self.calibration.ranges.get(kind)
        if measured is None:
            found = [(math.inf, kind, "num_seqs", shape.num_seqs)]
        else:
            found = []
            for (field, (low, high)), value in zip(measured.bounds.items(), shape, strict=True):
                if not low <= value <= high:
                    excess = max(value - high, low - value) / max(high, 1)
                    found.append((excess, f"{kind}.{field}", field, value))
        if self._refuse:
            _, key, field, value = max(found)
            bounds = None if measured is None else measured.bounds[field]
            raise ValueError(f"latency.outside is refuse, and a step lies outside: {_outside(key, value, bounds)}")
        for excess, key, field, value in found:
            self._counts[key] += 1
            if excess >= self._furthest.get(key, (0.0,))[0]:
                self._furthest[key] = (excess, field, value)


def _outside(key: str, value: int, bounds: Sequence[int] | None) -> str:
    """A value outside its bounds, in words."""
    kind, _, field = key.partition(".")
    if bounds is None:
        return f"a {kind} step, of which none was measured"
    return f"a {kind} step with {field} {value:,}, measured from {bounds[0]:,} to {bounds[1]:,}"


def _beyond(field: str, *, steps: int, furthest: int, measured: Sequence[int] | None) -> str:
    """How far beyond its bounds a field has been, in a few words."""
    if measured is None:
        return "none measured"
    low, high = measured
    return f"{field} {'up' if furthest > high else 'down'} to {furthest:,}, measured {low:,}-{high:,}"


# Reading the file


def _read(hint: Any, value: Any, where: str) -> Any:
    """``value``, as JSON gives it, as an object of the type ``hint``; ``ValueError`` names the key."""
    if is_dataclass(hint):
        return _read_object(typing.cast(type, hint), value, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return None if value is None else _read(args[0], value, where)
    if origin is dict and isinstance(value, dict):
        return {key: _read(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin in (list, tuple) and isinstance(value, list) and (origin is list or len(value) == len(args)):
        return origin(_read(args[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    if (hint is float and number) or (hint is int and number and isinstance(value, int)):
        return hint(value)
    if hint is str and isinstance(value, str):
        return value
    allowed = {float: "a number", int: "a whole number", str: "a text", dict: "an object", list: "a list"}
    allowed[tuple] = "a list of two whole numbers"
    raise ValueError(f"{where} must be {allowed[origin or hint]}, not {json.dumps(value)[:60]}")


def _read_object(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'a calibration'} must be an object, not {json.dumps(value)[:60]}")
    hints = typing.get_type_hints(kind)
    prefix = f"{where}." if where else ""
    for key in value:
        if key not in hints:
            raise ValueError(f"{prefix}{key} is not a key of a calibration; allowed: {', '.join(hints)}")
    for field in fields(kind):
        if field.name not in value:
            raise ValueError(f"{prefix}{field.name} is missing")
    return kind(**{key: _read(hints[key], item, f"{prefix}{key}") for key, item in value.items()})
