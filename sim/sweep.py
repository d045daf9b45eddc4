"""The end of a sweep: its points as one table, sorted by what was to be optimised, as files and as a picture."""

from __future__ import annotations

import csv
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from paged.sim.report import flat

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OTHER_NAMES: Final = {"throughput": "-tokens_per_s_end_to_end", "latency": "e2e_s.mean", "time": "makespan_s"}
_MOST_LINES: Final = 8
_MOST_BARS: Final = 40
_MOST_TICKS: Final = 8
_COLORS: Final = ("#2b6cb0", "#dd7a1b", "#2f855a", "#c53030", "#6b46c1", "#718096", "#b7791f", "#0987a0")

_WORDS: Final[Mapping[str, tuple[str, float]]] = {
    "makespan_s": ("makespan, s", 1),
    "elapsed_s": ("elapsed, s", 1),
    "wall_s": ("wall time, s", 1),
    "tail_s": ("tail, s", 1),
    "tokens_per_s_end_to_end": ("tokens/s, end to end", 1),
    "recomputed_share": ("recomputed tokens, %", 100),
    "tail_share": ("tail, % of the makespan", 100),
    "kv_utilization": ("KV blocks in use, %", 100),
    "block_waste": ("unfilled places in blocks, %", 100),
    "kv_tokens": ("KV cache, tokens", 1),
    **{
        f"{latency}_s.{statistic}": (f"{words} {statistic}, s", 1)
        for latency, words in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "end to end"), ("queue", "queueing"))
        for statistic in ("mean", "p50", "p90", "p99")
    },
}
"""What the axes of a picture call a number, and the factor to its unit."""


@dataclass(frozen=True, slots=True)
class Point:
    """One job of a sweep.

    Attributes:
        folder: its run folder.
        overrides: what it was given, by key.
        numbers: of its summary, by dotted name; empty if it has none.
        reason: what went wrong or short, in a sentence; None if all is well.
        title: what it was, in parts between commas.
    """

    folder: Path
    overrides: Mapping[str, str]
    numbers: Mapping[str, float | None]
    reason: str | None
    title: str = ""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a sweep is sorted by.

    Attributes:
        name: dotted name of a number of the summary.
        largest: whether the largest is best.
    """

    name: str
    largest: bool

    @classmethod
    def parse(cls, text: str, names: Sequence[str]) -> Goal:
        """The goal `makespan_s` (smallest first) or `-kv_tokens` (largest first); ``ValueError`` if not in `names`."""
        goal = cls(text.removeprefix("-"), text.startswith("-"))
        if goal.name not in names:
            near = [name for name in names if name.partition(".")[0].startswith(f"{goal.name}_")]
            near = near or difflib.get_close_matches(goal.name, names, n=1)
            if meant := _OTHER_NAMES.get(goal.name) or (near and near[0]):
                raise ValueError(f"optimize must be a number of the summary, not {text!r}; did you mean {meant}?")
            heads: dict[str, list[str]] = {}
            for name in names:
                head, _, statistic = name.partition(".")
                heads.setdefault(head, []).extend(filter(None, [statistic]))
            allowed = ", ".join(f"{head}.{'|'.join(rest)}" if rest else head for head, rest in heads.items())
            raise ValueError(f"optimize must be one of {allowed}, with - before it for the largest first, not {text!r}")
        return goal


def read_point(folder: Path) -> Point:
    """The point that a job left in its folder: `.hydra/overrides.yaml` and `summary.json`, as far as they are there."""
    overrides = {}
    path = folder / ".hydra" / "overrides.yaml"
    for text in (yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None) or ():
        key, _, value = str(text).lstrip("+~").partition("=")
        overrides[key] = value
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Point(folder, overrides, {}, "it ended without a summary")
    reason = summary.pop("reason", None) or ("it was interrupted" if summary.get("interrupted") else None)
    return Point(folder, overrides, dict(flat(summary)), reason, str(summary.get("title", "")))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The points of a sweep, best first.

    Points with something to say of what went short come after the others, and those without the goal's number last.

    Attributes:
        points: in that order.
        goal: what they are sorted by.
        keys: the overrides that are shown.
        shown: names of the numbers that are shown, the goal's first.
    """

    points: Sequence[Point]
    goal: Goal
    keys: Sequence[str]
    shown: Sequence[str]

    @classmethod
    def of(cls, jobs: Sequence[Path], goal: Goal, figures: Sequence[str]) -> Comparison:
        """Compare the jobs of a sweep.

        Args:
            jobs: their folders.
            goal: what to sort by.
            figures: names of the numbers that are shown beside the goal's, the main one first.
        """
        points = _sorted([read_point(job) for job in jobs], goal)
        shown = [goal.name, *(name for name in figures if name != goal.name)]
        shown = [name for name in shown if any(name in point.numbers for point in points)]
        return cls(points, goal, varying_keys(points), shown)

    def table(self) -> str:
        """A line a point, with the reason of what went short, and what the columns mean."""
        return _table(self.points, self.keys, self.shown, self.goal)

    def write(self, folder: Path) -> None:
        """Write `sweep.csv`, `sweep.json` and `sweep.png` into the sweep's folder."""
        _write_csv(folder / "sweep.csv", self.points)
        _write_json(folder / "sweep.json", self.points, self.goal)
        _write_plot(folder / "sweep.png", self.points, self.keys, self.shown, self.goal)


def _sorted(points: Sequence[Point], goal: Goal) -> list[Point]:
    def rank(point: Point) -> tuple[bool, bool, float]:
        value = point.numbers.get(goal.name)
        # What refused requests or was cut short did less than the others.
        is_short = point.reason is not None
        return (True, is_short, 0.0) if value is None else (False, is_short, -value if goal.largest else value)

    return sorted(points, key=rank)


def varying_keys(points: Sequence[Point]) -> list[str]:
    """The overrides that are not the same everywhere, in the order given; all of them if there is no difference."""
    keys = list(dict.fromkeys(key for point in points for key in point.overrides))
    return [key for key in keys if len({point.overrides.get(key) for point in points}) > 1] or keys


def _table(points: Sequence[Point], keys: Sequence[str], shown: Sequence[str], goal: Goal) -> str:
    header = ["job", *keys, *shown]
    rows = []
    for point in points:
        overrides = [point.overrides.get(key, "") for key in keys]
        rows.append([point.folder.name, *overrides, *(_cell(point, name, goal) for name in shown)])
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: Sequence[str], note: str) -> str:
        cells = [
            text.ljust(width) if column <= len(keys) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join([*cells, note]).rstrip()

    lines = [line(header, "note" if any(point.reason for point in points) else "")]
    for point, row in zip(points, rows, strict=True):
        lines.append(line(row, point.reason or ""))
    order = f"best first: the {'largest' if goal.largest else 'smallest'} {goal.name}"
    intervals = (
        "; ± is half of a 95% interval of the mean over seeds"
        if any("±" in cell for row in rows for cell in row)
        else ""
    )
    return "\n".join([*lines, f"{order}; job is the folder{intervals}"])


def _cell(point: Point, name: str, goal: Goal) -> str:
    value = point.numbers.get(name)
    # Without the goal's number nothing was computed; zeros would look like a result.
    if value is None or point.numbers.get(goal.name) is None:
        return "-"
    half = point.numbers.get(f"ci95.{name}")
    if not half:
        return _number(value)
    return f"{_number(value)} ± {f'{half:,.0f}' if half >= 100 else f'{half:.2g}'}"


def _number(value: float) -> str:
    """Four figures or so; whole numbers in full."""
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _write_csv(path: Path, points: Sequence[Point]) -> None:
    """A line a point: its folder, all overrides, all numbers that any point has, the reason."""
    keys = list(dict.fromkeys(key for point in points for key in point.overrides))
    names = list(dict.fromkeys(name for point in points for name in point.numbers))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["folder", *keys, *names, "reason"])
        for point in points:
            numbers = ("" if point.numbers.get(name) is None else point.numbers[name] for name in names)
            overrides = (point.overrides.get(key, "") for key in keys)
            writer.writerow([point.folder.name, *overrides, *numbers, point.reason or ""])


def _write_json(path: Path, points: Sequence[Point], goal: Goal) -> None:
    content: dict[str, Any] = {
        "optimize": f"{'-' if goal.largest else ''}{goal.name}",
        "points": [
            {
                "folder": point.folder.name,
                "overrides": dict(point.overrides),
                "numbers": dict(point.numbers),
                "reason": point.reason,
            }
            for point in points
        ],
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_plot(path: Path, points: Sequence[Point], keys: Sequence[str], shown: Sequence[str], goal: Goal) -> None:
    """The goal and the figure after it: over a number that was swept, or as bars; nothing if no point has the goal."""
    from paged.sim.plots import headline, new_figure, save, style

    there = [point for point in points if point.numbers.get(goal.name) is not None]
    if not there:
        return
    names = shown[:2]
    across = _number_key(there, keys)
    curves = _curves(there, keys, across) if across is not None else {}
    is_curve = 0 < len(curves) <= _MOST_LINES
    if is_curve:
        figure = new_figure(8, 6)
        margins = {"left": 0.13, "right": 0.97, "bottom": 0.09, "top": 0.89, "hspace": 0.1}
        panels = figure.subplots(len(names), 1, sharex=True, squeeze=False, gridspec_kw=margins)[:, 0]
    else:
        labels = [_label(point, keys) for point in there[:_MOST_BARS]]
        height = 1.6 + 0.3 * len(labels)
        figure = new_figure(11, height)
        left = min(0.45, 0.02 + 0.0075 * max(map(len, labels)))
        margins = {"left": left, "right": 0.97, "bottom": 0.6 / height, "top": 1 - 0.7 / height, "wspace": 0.06}
        panels = figure.subplots(1, len(names), sharey=True, squeeze=False, gridspec_kw=margins)[0]
    for axes, name in zip(panels, names, strict=True):
        style(axes)
        words, scale = _words(name)
        if is_curve:
            assert across is not None
            _draw_curves(axes, curves, across, name, scale)
            axes.set_ylabel(words)
        else:
            _draw_bars(axes, there[:_MOST_BARS], labels, name, scale)
            axes.set_xlabel(words)
    if is_curve:
        panels[-1].set_xlabel(across)
        if len(curves) > 1:
            panels[0].legend(framealpha=0.9)
    missing = len(points) - len(there)
    title = f"{len(there)} points, {'largest' if goal.largest else 'smallest'} {goal.name} is best"
    title += f"; {missing} without a result" if missing else ""
    if len(there) > _MOST_BARS and not is_curve:
        title += f"; the best {_MOST_BARS} are shown"
    if any(point.numbers.get(f"ci95.{name}") for point in there for name in names):
        title += "; bars are 95% intervals over seeds"
    panels[0].set_title(title, loc="left", fontsize=10)
    headline(figure, _common_title(points))
    save(figure, path)


def _words(name: str) -> tuple[str, float]:
    """What an axis calls a number, and the factor to its unit."""
    head, _, length = name.partition(".")
    if head == "max_concurrency":
        return f"sequences of {int(length):,} tokens", 1
    return _WORDS.get(name, (name.replace("_", " "), 1))


def _common_title(points: Sequence[Point]) -> str:
    """The parts of the titles that all points with one share."""
    titles = [re.split(r", |: | on ", point.title) for point in points if point.title]
    return ", ".join(part for part in titles[0] if all(part in title for title in titles)) if titles else ""


def _number_key(points: Sequence[Point], keys: Sequence[str]) -> str | None:
    """The override to draw over: of those that are numbers everywhere, the one with most values, at least three."""
    best, most = None, 2
    for key in keys:
        values = {_as_number(point.overrides.get(key)) for point in points}
        if None not in values and len(values) > most:
            best, most = key, len(values)
    return best


def _as_number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _curves(points: Sequence[Point], keys: Sequence[str], across: str) -> dict[str, list[Point]]:
    """The points of each combination of the other overrides, in the order of `across`."""
    curves: dict[str, list[Point]] = {}
    others = [key for key in keys if key != across]
    for point in sorted(points, key=lambda point: float(point.overrides[across])):
        curves.setdefault(_label(point, others), []).append(point)
    return dict(sorted(curves.items()))


def _label(point: Point, keys: Sequence[str]) -> str:
    return ", ".join(f"{key}={point.overrides[key]}" for key in keys if key in point.overrides)


def _draw_curves(axes: Axes, curves: Mapping[str, Sequence[Point]], across: str, name: str, scale: float) -> None:
    lowest = 0.0
    for (label, points), color in zip(curves.items(), _COLORS, strict=False):
        there = [point for point in points if point.numbers.get(name) is not None]
        x = [float(point.overrides[across]) for point in there]
        y = [scale * _value(point, name) for point in there]
        halves = [scale * (point.numbers.get(f"ci95.{name}") or 0.0) for point in there]
        axes.errorbar(x, y, yerr=halves if any(halves) else None, color=color, marker="o", capsize=3, label=label)
        lowest = min(lowest, *y) if y else lowest
    if lowest == 0:
        # From 0, so that a difference looks as large as it is; the margin shows points that lie on the axis.
        top = axes.get_ylim()[1]
        axes.set_ylim(-0.03 * top, 1.05 * top)
    places = sorted({float(point.overrides[across]) for points in curves.values() for point in points})
    if len(places) <= _MOST_TICKS and all(place.is_integer() for place in places):
        axes.set_xticks(places)
    if min(places) > 0 and max(places) > 30 * min(places):
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.6g}")
    axes.yaxis.set_major_formatter("{x:,.6g}")


def _draw_bars(axes: Axes, points: Sequence[Point], labels: Sequence[str], name: str, scale: float) -> None:
    values = [scale * (point.numbers.get(name) or 0.0) for point in points]
    halves = [scale * (point.numbers.get(f"ci95.{name}") or 0.0) for point in points]
    places = range(len(points))
    axes.barh(places, values, xerr=halves if any(halves) else None, color=_COLORS[0], alpha=0.8, capsize=3)
    axes.set_yticks(places, labels)
    axes.set_ylim(len(points) - 0.4, -0.6)
    axes.set_xlim(0, 1.18 * max(map(sum, zip(values, halves, strict=True))) or 1.0)
    for place, point in zip(places, points, strict=True):
        value = point.numbers.get(name)
        text = "none" if value is None else _number(scale * value)
        axes.text(values[place] + halves[place], place, f" {text}", va="center", fontsize=8)
    axes.grid(False, axis="y")
    axes.xaxis.set_major_formatter("{x:,.6g}")


def _value(point: Point, name: str) -> float:
    value = point.numbers[name]
    assert value is not None
    return value
