"""Pictures of a simulated run: the KV cache and the queue over time, and how latencies are distributed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from paged.core.sequence import COMPLETE
from paged.sim.record import Floats, Ints, SimRecord
from paged.sim.report import LATENCIES, Summary, latencies, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_BINS: Final = 800
_DPI: Final = 130
_BLUE, _ORANGE, _RED, _GREY = "#2b6cb0", "#dd7a1b", "#c53030", "#718096"
# Margins as shares of the figure: matplotlib's own layouts take longer than the drawing.
_STACKED: Final = {"left": 0.085, "right": 0.98, "bottom": 0.1, "top": 0.87, "hspace": 0.1}
_BESIDE: Final = {"left": 0.06, "right": 0.985, "bottom": 0.13, "top": 0.76, "wspace": 0.08}
_UNITS: Final = ((1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h"))


@dataclass(frozen=True, slots=True)
class Band:
    """A step function seen through bins of time: where it ranged and what it was on average in each.

    Attributes:
        edges: bounds of the bins, ascending, one more than bins; seconds.
        low, high, mean: of the function's values in each bin, the mean weighted with time.
    """

    edges: Floats
    low: Floats
    high: Floats
    mean: Floats


def band(start_s: Floats, until_s: Floats, values: Floats | Ints, end_s: float, most_bins: int = _MOST_BINS) -> Band:
    """`values[i]` holding from `start_s[i]` to `until_s[i]`, and 0 in between, from the first start to `end_s`.

    A function of few pieces is not binned: each piece is a bin of its own.
    """
    gaps = np.flatnonzero(until_s[:-1] < start_s[1:])
    times = np.insert(start_s, gaps + 1, until_s[gaps])
    levels = np.insert(values.astype(np.float64), gaps + 1, 0.0)
    if len(times) <= most_bins:
        return Band(np.append(times, end_s), levels, levels, levels)
    edges = np.linspace(times[0], end_s, most_bins + 1)
    # With the bounds among the pieces, each piece lies in one bin.
    pieces = np.union1d(times, edges[:-1])
    level = levels[np.searchsorted(times, pieces, side="right") - 1]
    firsts = np.searchsorted(pieces, edges[:-1])
    area = np.add.reduceat(level * np.diff(np.append(pieces, end_s)), firsts)
    low, high = np.minimum.reduceat(level, firsts), np.maximum.reduceat(level, firsts)
    return Band(edges, low, high, np.clip(area / np.diff(edges), low, high))


def write_plots(record: SimRecord, summary: Summary, folder: Path, title: str = "") -> None:
    """Write `kv.png`, `queue.png` and `latency.png` of a run and its summary; nothing for a run without a step.

    `title` says what was simulated and stands above each.
    """
    if not record.num_steps:
        return
    for name, draw in (("kv", _draw_kv), ("queue", _draw_queue), ("latency", _draw_latency)):
        figure = draw(record, summary)
        headline(figure, title)
        save(figure, folder / f"{name}.png")


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches that no global state of matplotlib knows."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def headline(figure: Figure, title: str) -> None:
    """Write above all axes what a figure is about."""
    space = 0.08 / figure.get_figheight()
    figure.text(0.012, 1 - space, title, ha="left", va="top", color=_GREY, fontsize=9)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, without the date and version that would make equal pictures differ."""
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})


def style(axes: Axes) -> None:
    """What all axes here have in common."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_kv(record: SimRecord, summary: Summary) -> Figure:
    """Above how much of the pool is referenced, with the preemptions; below how much of that is unfilled."""
    steps, until_s = record.steps, record.until_s()
    scale, unit = time_unit(record.end_s - record.start_s)
    figure = new_figure(9, 5.2)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.3), gridspec_kw=_STACKED)

    used = band(steps.start_s, until_s, 100.0 * steps.used_blocks / record.num_blocks, record.end_s)
    _draw_band(upper, used, record.start_s, scale, _BLUE)
    upper.set_ylim(0, 100)
    upper.set_ylabel("KV blocks in use, %")
    pool = f"{record.num_blocks:,} KV blocks of {record.block_size} tokens"
    upper.set_title(f"{pool}, {summary['kv_utilization']:.0%} used on average", loc="left", fontsize=11, pad=14)
    when = (steps.start_s[steps.preemptions > 0] - record.start_s) / scale
    if len(when):
        # Above the axes, where they hide nothing.
        across = upper.get_xaxis_transform()
        upper.vlines(when, 1.01, 1.05, color=_RED, linewidth=0.6, alpha=0.6, transform=across, clip_on=False)
        total = int(steps.preemptions.sum())
        count = f"{total:,} preemption{'s' if total > 1 else ''}"
        upper.text(1, 1.07, count, color=_RED, ha="right", va="bottom", transform=upper.transAxes)

    places = np.maximum(steps.used_blocks * record.block_size, 1)
    waste = band(steps.start_s, until_s, 100.0 * steps.waste_tokens / places, record.end_s)
    _draw_band(lower, waste, record.start_s, scale, _ORANGE)
    # A prompt's blocks are filled a little later than taken: steps with much prefill would flatten the rest.
    highest, usual = float(waste.high.max()), 4 * float(np.quantile(waste.mean, 0.95))
    lower.set_ylim(0, min(_headroom(waste), usual) or 1.0)
    if 0 < usual < highest:
        box = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 2}
        words = f"peak {highest:.1f}%"
        lower.text(0.99, 0.8, words, color=_ORANGE, ha="right", transform=lower.transAxes, bbox=box)
    lower.set_ylabel("empty places in\nused blocks, %")
    lower.set_xlabel(f"time since the first arrival, {unit}", loc="left")
    for axes in (upper, lower):
        style(axes)
    _explain_band(figure, used)
    return figure


def _draw_queue(record: SimRecord, summary: Summary) -> Figure:
    """Above the sequences that run, with the tail; below those that wait."""
    steps, until_s = record.steps, record.until_s()
    scale, unit = time_unit(record.end_s - record.start_s)
    figure = new_figure(9, 5.2)
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw=_STACKED)

    running = band(steps.start_s, until_s, steps.num_running, record.end_s)
    _draw_band(upper, running, record.start_s, scale, _BLUE)
    upper.set_ylim(0, _headroom(running))
    upper.set_ylabel("running sequences")
    title = f"{summary['mean_running']:,.1f} running and {summary['mean_waiting']:,.1f} waiting on average"
    upper.set_title(title, loc="left", fontsize=11)
    if summary["mean_waiting"] and summary["tail_share"] > 0.005:
        end = (record.end_s - record.start_s) / scale
        upper.axvspan(end - summary["tail_s"] / scale, end, color=_GREY, alpha=0.18, linewidth=0)
        words = f"tail: {seconds(summary['tail_s'])} ({summary['tail_share']:.0%})"
        upper.text(1, 1.01, words, color=_GREY, ha="right", va="bottom", transform=upper.transAxes)

    waiting = band(steps.start_s, until_s, steps.num_waiting, record.end_s)
    _draw_band(lower, waiting, record.start_s, scale, _ORANGE)
    lower.set_ylim(0, _headroom(waiting))
    if not waiting.high.any():
        lower.text(0.5, 0.5, "nothing waits", color=_GREY, ha="center", va="center", transform=lower.transAxes)
    lower.set_ylabel("waiting sequences")
    lower.set_xlabel(f"time since the first arrival, {unit}", loc="left")
    for axes in (upper, lower):
        style(axes)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    _explain_band(figure, running)
    return figure


def _draw_latency(record: SimRecord, summary: Summary) -> Figure:
    """The share of requests that waited at most so long: first token, time per token, end to end."""
    complete = [request for request in record.requests if request.finish_reason in COMPLETE]
    figure = new_figure(11, 3.8)
    panels = (("ttft_s", "time to first token"), ("tpot_s", "time per output token"), ("e2e_s", "end to end"))
    columns = figure.subplots(1, len(panels), sharey=True, gridspec_kw=_BESIDE)
    for axes, (name, words) in zip(columns, panels, strict=True):
        style(axes)
        values = latencies(complete, name)
        axes.set_title(f"{words} ({LATENCIES[name]})" if name != "e2e_s" else words, loc="left", fontsize=11, pad=20)
        axes.set_ylim(0, 102)
        if not len(values):
            axes.text(0.5, 0.5, "no complete request has it", ha="center", va="center", transform=axes.transAxes)
            axes.set_xticks([])
            continue
        _draw_distribution(axes, values, summary[name])
    figure.axes[0].set_ylabel("requests at or below, %")
    return figure


def _draw_distribution(axes: Axes, values: Floats, statistics: Summary) -> None:
    scale, unit = (1.0, "s") if statistics["p90"] >= 1 else (1e-3, "ms")
    axes.step([values[0] / scale, *values / scale], np.linspace(0, 100, len(values) + 1), where="post", color=_BLUE)
    for color, share in ((_GREY, 50), (_ORANGE, 90), (_RED, 99)):
        at = statistics[f"p{share}"]
        axes.plot(at / scale, share, "o", color=color, markersize=5, label=f"p{share} {seconds(at)}", clip_on=False)
    if values[0] > 0 and values[-1] > 50 * values[0]:
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel(f"time, {unit}")
    # Above the axes: wherever a curve rises, it hides nothing.
    place: dict[str, Any] = {
        "loc": "lower left",
        "bbox_to_anchor": (-0.02, 0.99),
        "ncols": 3,
        "frameon": False,
        "fontsize": 8,
    }
    axes.legend(**place, handletextpad=0.0, columnspacing=0.8, borderaxespad=0)


def _draw_band(axes: Axes, seen: Band, zero_s: float, scale: float, color: str) -> None:
    edges = (seen.edges - zero_s) / scale
    low, high, mean = (np.append(values, values[-1]) for values in (seen.low, seen.high, seen.mean))
    axes.fill_between(edges, 0, mean, step="post", color=color, alpha=0.18, linewidth=0)
    if not np.array_equal(low, high):
        axes.fill_between(edges, low, high, step="post", color=color, alpha=0.35, linewidth=0)
    axes.plot(edges, mean, drawstyle="steps-post", color=color, linewidth=1.3)
    axes.set_xlim(0, edges[-1])


def _explain_band(figure: Figure, seen: Band) -> None:
    """Say what the line and the band around it are, where a run was so long that steps are drawn together."""
    if np.array_equal(seen.low, seen.high):
        return
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    span = seconds(float(seen.edges[1] - seen.edges[0]))
    line, area = Line2D([], [], color=_BLUE, linewidth=1.3), Patch(color=_BLUE, alpha=0.35, linewidth=0)
    words = (f"average over {span}", "lowest to highest in that time")
    place: dict[str, Any] = {
        "loc": "lower right",
        "bbox_to_anchor": (0.985, 0.0),
        "ncols": 2,
        "frameon": False,
        "fontsize": 9,
    }
    figure.legend([line, area], words, **place)


def _headroom(seen: Band) -> float:
    return 1.08 * float(seen.high.max()) or 1.0


def time_unit(span_s: float) -> tuple[float, str]:
    """The largest unit of which `span_s` holds two or more, in seconds, and its name."""
    return next(((scale, unit) for scale, unit in reversed(_UNITS) if span_s >= 2 * scale), _UNITS[0])
