"""Fits a calibration to measured steps: which features the data supports, their costs, and the error on other steps."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged.sim.calibration import (
    CLASSES,
    FEATURES,
    Calibration,
    ErrorSummary,
    HostTime,
    Memory,
    Provenance,
    Range,
    step_class,
)
from paged.sim.measured import MeasuredStep
from paged.sim.shape import StepShape

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Names = npt.NDArray[np.str_]

MIN_STEPS: Final = 20
"""Fewer steps are refused, and a run of fewer is not predicted from the others."""

_MIN_SUPPORT: Final = 8  # steps in which a feature must be there, for its cost to be fitted
_MIN_OWN_SHARE: Final = 1e-3  # of a feature that the earlier ones must leave unexplained
_NEIGHBOURS: Final = 4  # steps before and after one, with which it is compared
_OUTLIER_SPREADS: Final = 6.0  # a step further off than so many robust standard deviations is an outlier...
_OUTLIER_LEAST: Final = 0.02  # ... if it is also off by this share
_FIRST_LEAST: Final = 1.0  # and a process's first step if it takes twice as long as expected
_ROUNDS: Final = 20
_FLOOR: Final = 0.1  # of the shortest step measured: what is predicted at least


@dataclass(frozen=True, slots=True)
class Fit:
    """Costs of named columns.

    Attributes:
        costs: seconds a unit, those above 0.
        kept: which of the rows the last round followed.
    """

    costs: dict[str, float]
    kept: Flags

    def predict(self, columns: Mapping[str, Floats]) -> Floats:
        """The sum of the columns times their costs."""
        return sum((cost * columns[name] for name, cost in self.costs.items()), np.zeros(len(columns["step"])))


@dataclass(frozen=True, slots=True)
class UsedSteps:
    """The steps of some runs that count.

    Attributes:
        runs: by the run's name.
        num_first: how many first steps of their process do not count, because they were slow.
    """

    runs: dict[str, list[MeasuredStep]]
    num_first: int

    @classmethod
    def of(cls, runs: Mapping[str, Sequence[MeasuredStep]]) -> UsedSteps:
        """All steps but those without a duration, and but the first ones that warmed up."""
        rows = _Rows.of({name: [step for step in steps if step.step_s > 0] for name, steps in runs.items()})
        slow = _slow_firsts(rows) if len(rows.steps) >= MIN_STEPS else np.zeros(len(rows.steps), bool)
        used: dict[str, list[MeasuredStep]] = {name: [] for name in runs}
        for name, step, left_out in zip(rows.names, rows.steps, slow, strict=True):
            if not left_out:
                used[name].append(step)
        return cls(used, int(slow.sum()))


@dataclass(frozen=True, slots=True)
class _Rows:
    """The steps of some runs, one after the other, as arrays [N]; ``names`` are those of the runs."""

    names: list[str]
    steps: list[MeasuredStep]
    shape: StepShape
    columns: dict[str, Floats]
    measured: Floats
    kinds: Names
    groups: Names

    @classmethod
    def of(cls, runs: Mapping[str, Sequence[MeasuredStep]]) -> _Rows:
        names = [name for name, some in runs.items() for _ in some]
        steps = [step for some in runs.values() for step in some]
        shape = _columns([step.shape for step in steps])
        kinds = [step_class(step.shape) for step in steps]
        return cls(
            names=names,
            steps=steps,
            shape=shape,
            columns={key: np.asarray(feature(shape), np.float64) for key, feature in FEATURES.items()},
            measured=np.array([step.step_s for step in steps]),
            kinds=np.array(kinds),
            groups=np.array([f"{k} {name} {s.session}" for k, name, s in zip(kinds, names, steps, strict=True)]),
        )


def fit_calibration(used: UsedSteps, *, name: str, memory: Memory, provenance: Provenance) -> Calibration:
    """Fit the step times of some runs, which must be of one model on one device.

    Raises:
        ValueError: there are too few steps.
    """
    rows = _Rows.of(used.runs)
    steps, shape, columns, measured, kinds, groups = (
        *(rows.steps, rows.shape, rows.columns),
        *(rows.measured, rows.kinds, rows.groups),
    )
    if len(steps) < MIN_STEPS:
        raise ValueError(f"{len(steps)} measured steps are too few, at least {MIN_STEPS} are needed")
    held_out = is_held_out(np.arange(len(steps)))

    fit = robust_fit(_rows(columns, ~held_out), measured[~held_out], groups[~held_out])
    kept = ~held_out
    kept[kept] = fit.kept
    floor_s = _FLOOR * float(measured[kept].min())
    predicted = np.maximum(fit.predict(columns), floor_s)
    errors = {"all": ErrorSummary.of(predicted[held_out], measured[held_out])}
    ranges = {}
    for kind in CLASSES:
        chosen = kinds == kind
        if (chosen & held_out).any():
            errors[kind] = ErrorSummary.of(predicted[chosen & held_out], measured[chosen & held_out])
        if (chosen & (kept | held_out)).any():
            ranges[kind] = _range(shape, chosen & (kept | held_out))
    return Calibration(
        name=name,
        coefficients=fit.costs,
        floor_s=floor_s,
        host=_fit_host(steps),
        ranges=ranges,
        held_out=errors,
        other_runs=_errors_of_other_runs(used.runs, columns, measured, groups),
        noise=_noise(steps),
        num_steps=len(steps),
        num_first=used.num_first,
        num_trimmed=int((~fit.kept).sum()),
        memory=memory,
        provenance=provenance,
    )


def is_held_out(index: Any) -> Any:
    """Whether the step of this index (or array of them) among those used is kept from the fit: every fifth."""
    return index % 5 == 4


def robust_fit(columns: Mapping[str, Floats], measured: Floats, groups: Names) -> Fit:
    """Costs, none below 0, that make the columns' sum follow the times, relative to their size, but for outliers.

    Each round weighs a time by the last prediction (by the time itself, sums would come out too small), and leaves out
    those that are far from their neighbours.

    Args:
        columns: by name, ``step`` (all ones) among them, each [N].
        measured: [N], seconds, positive.
        groups: [N], names; the rows of one name are neighbours in order.
    """
    from scipy.optimize import nnls

    kept = np.ones(len(measured), bool)
    predicted = measured
    costs: dict[str, float] = {}
    for _ in range(_ROUNDS):
        weights = 1 / predicted[kept]
        names = supported(_rows(columns, kept), weights)
        matrix = np.stack([columns[name][kept] * weights for name in names], axis=1)
        scales = np.linalg.norm(matrix, axis=0)
        solution, _ = nnls(matrix / scales, measured[kept] * weights)
        costs = {name: float(cost) for name, cost in zip(names, solution / scales, strict=True) if cost > 0}
        before, kept_before = predicted, kept
        predicted = np.maximum(Fit(costs, kept).predict(columns), _FLOOR * measured[kept].min())
        kept = ~_outliers(measured / predicted - 1, groups)
        if (kept == kept_before).all() and np.allclose(predicted, before, rtol=1e-6):
            break
    return Fit(costs, kept_before)


def supported(columns: Mapping[str, Floats], weights: Floats) -> list[str]:
    """Names of the columns whose costs the rows can tell apart, in order.

    A column counts if enough rows have it, and if those chosen before it do not already say the same.
    """
    chosen: list[str] = []
    basis: list[Floats] = []
    for name, column in columns.items():
        if name != "step" and np.count_nonzero(column) < _MIN_SUPPORT:
            continue
        own = column * weights
        size = np.linalg.norm(own)
        for _ in range(2):  # once is not enough for nearly parallel columns
            for direction in basis:
                own = own - (own @ direction) * direction
        left = np.linalg.norm(own)
        if left > _MIN_OWN_SHARE * size:
            chosen.append(name)
            basis.append(own / left)
    return chosen


def _outliers(relative: Floats, groups: Names) -> Flags:
    """Rows whose relative error is far from that of the rows around them in their group.

    A stretch of rows that are all off is no outlier, but something that the model does not know or a machine that was
    busy: to leave it out would flatter the fit.
    """
    found = np.zeros(len(relative), bool)
    for group in np.unique(groups):
        chosen = groups == group
        if chosen.sum() < _MIN_SUPPORT:
            continue
        padded = np.pad(relative[chosen], _NEIGHBOURS, mode="edge")
        around = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * _NEIGHBOURS + 1), axis=1)
        distance = np.abs(relative[chosen] - around)
        limit = max(_OUTLIER_SPREADS * 1.4826 * np.median(distance), _OUTLIER_LEAST)
        found[chosen] = distance > limit
    return found


def _slow_firsts(rows: _Rows) -> Flags:
    """The first steps of their process that take far longer than a fit of all the others expects.

    Of a class that has too few others to be fitted, but enough with its first steps, these stay: they are all that is
    known of it.
    """
    first = np.array([step.step == 0 for step in rows.steps], bool)
    found = np.zeros(len(first), bool)
    if first.all():
        return found
    fit = robust_fit(_rows(rows.columns, ~first), rows.measured[~first], rows.groups[~first])
    floor_s = _FLOOR * float(rows.measured[~first].min())
    relative = rows.measured / np.maximum(fit.predict(rows.columns), floor_s) - 1
    for kind in CLASSES:
        chosen = rows.kinds == kind
        others = relative[chosen & ~first]
        if len(others) < _MIN_SUPPORT <= chosen.sum():
            continue
        spread = 1.4826 * float(np.median(np.abs(others))) if len(others) >= _MIN_SUPPORT else 0.0
        found |= chosen & first & (relative > max(_OUTLIER_SPREADS * spread, _FIRST_LEAST))
    return found


def _errors_of_other_runs(
    timed: Mapping[str, Sequence[MeasuredStep]],
    columns: Mapping[str, Floats],
    measured: Floats,
    groups: Names,
) -> dict[str, ErrorSummary]:
    """For each run that is long enough the error on it of a fit to the others, if these are."""
    errors = {}
    first = 0
    for source, steps in timed.items():
        ours = np.zeros(len(measured), bool)
        ours[first : first + len(steps)] = True
        first += len(steps)
        if min(ours.sum(), (~ours).sum()) >= MIN_STEPS:
            fit = robust_fit(_rows(columns, ~ours), measured[~ours], groups[~ours])
            predicted = np.maximum(fit.predict(_rows(columns, ours)), _FLOOR * measured[~ours][fit.kept].min())
            errors[source] = ErrorSummary.of(predicted, measured[ours])
    return errors


def _fit_host(steps: Sequence[MeasuredStep]) -> HostTime | None:
    """The host's time between steps, from those that show it."""
    pairs = [(step.shape.num_seqs, step.host_s) for step in steps if step.host_s is not None and step.host_s > 0]
    if len(pairs) < MIN_STEPS:
        return None
    num_seqs, measured = np.array(pairs, np.float64).T
    columns = {"step": np.ones(len(pairs)), "sequences": num_seqs}
    held_out = is_held_out(np.arange(len(pairs)))
    fit = robust_fit(_rows(columns, ~held_out), measured[~held_out], np.full(int((~held_out).sum()), "host"))
    error = ErrorSummary.of(fit.predict(columns)[held_out], measured[held_out])
    return HostTime(step_s=fit.costs.get("step", 0.0), seq_s=fit.costs.get("sequences", 0.0), error=error)


def _noise(steps: Sequence[MeasuredStep]) -> float | None:
    """Mean share by which neighbours differ that decode the same sequences, one token further; None if there are none.

    Divided by the root of 2, because both of a pair are off: what a perfect model would be off by.
    """
    shares = [
        2 * abs(a.step_s - b.step_s) / (a.step_s + b.step_s)
        for a, b in itertools.pairwise(steps)
        if a.session == b.session
        and a.step + 1 == b.step
        and a.shape.prefill_seqs == b.shape.prefill_seqs == 0
        and a.shape.num_seqs == b.shape.num_seqs
        and b.shape.kv_tokens - a.shape.kv_tokens == b.shape.num_seqs
    ]
    return float(np.mean(shares)) / 2**0.5 if shares else None


def _columns(shapes: Sequence[StepShape]) -> StepShape:
    """The shapes as one shape of arrays [N]."""
    return StepShape(*np.array(shapes, np.float64).T)


def _rows(columns: Mapping[str, Floats], chosen: Flags) -> dict[str, Floats]:
    return {name: column[chosen] for name, column in columns.items()}


def _range(shape: StepShape, chosen: Flags) -> Range:
    """The bounds of the rows chosen of a shape of arrays."""
    columns = {field: np.asarray(column)[chosen] for field, column in zip(StepShape._fields, shape, strict=True)}
    bounds = {field: (int(column.min()), int(column.max())) for field, column in columns.items()}
    return Range(num_steps=int(chosen.sum()), bounds=bounds)
