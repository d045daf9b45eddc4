"""The numbers of a simulated run: its summary, means and intervals over seeds, and the table that a person reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any, Final

import numpy as np

from paged.core.metrics import percentile
from paged.core.sequence import COMPLETE
from paged.sim.record import REFUSED, Floats, Ints, RequestRecord, SimRecord

Summary = dict[str, Any]

LATENCIES: Final[Mapping[str, str]] = {
    "queue_s": "queueing",
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "e2e_s": "end to end",
}
"""The latencies of a request, which `RequestRecord` defines, and what the table calls them."""

STATISTICS: Final = ("mean", "p50", "p90", "p99")
"""What is told of every latency."""

SCALARS: Final = (
    "makespan_s",
    "elapsed_s",
    "tokens_per_s_end_to_end",
    "num_samples",
    "prompt_tokens",
    "output_tokens",
    "unfinished_tokens",
    "len_p50",
    "len_p90",
    "len_max",
    "kv_tokens",
    "num_steps",
    "num_added",
    "num_finished",
    "preemptions",
    "forward_tokens",
    "minimal_forward_tokens",
    "recomputed_tokens",
    "recomputed_share",
    "cached_tokens",
    "dropped_tokens",
    "peak_blocks",
    "kv_utilization",
    "block_waste",
    "mean_running",
    "mean_waiting",
    "peak_running",
    "tail_s",
    "tail_share",
    "wall_s",
    "steps_per_wall_s",
    *(f"{latency}.{statistic}" for latency in LATENCIES for statistic in STATISTICS),
)
"""Every number of a summary by its dotted name, but for the counts of `finish_reasons`."""

_CONFIDENCE: Final = 0.95
_LONG_S: Final = 7200.0
"""From here on a duration is told in hours, too."""


def summarize(record: SimRecord) -> Summary:
    """The summary of one simulated run; a number that nothing defines (a latency of no request) is None.

    Seconds are on the simulation's clock, but for `wall_s` and `steps_per_wall_s`. The keys:

    * `makespan_s`: first arrival to the end of the last step. `elapsed_s`: the clock at that end.
    * `tokens_per_s_end_to_end`: all tokens generated over the makespan.
    * `num_samples`, `prompt_tokens`, `output_tokens`, `len_p50`, `len_p90`, `len_max`: of the requests that are
      complete (`stop`, `length`); lengths are those of outputs. `unfinished_tokens`: output tokens of all others.
    * `finish_reasons`: requests by how they ended; `refused` ones never ran.
    * `queue_s`: arrival to the first step that computes any of it; `ttft_s`: arrival to first token; `tpot_s`: (last -
      first token) / (tokens - 1), of requests with two tokens or more; `e2e_s`: arrival to last token. Each `mean`,
      `p50`, `p90`, `p99` over the complete requests.
    * `preemptions`, `forward_tokens`, ...: the scheduler's `Counters`. `recomputed_share`: of the forward tokens.
    * `kv_utilization`: share of the pool's blocks that are referenced, averaged over the makespan.
    * `block_waste`: share of unfilled token places in the referenced blocks, averaged over the time when there are any.
    * `mean_running`, `mean_waiting`: sequences, averaged over the makespan; what arrives during a step counts from the
      next one on. `peak_running`: the most at once.
    * `tail_s`: the end of the run in which nothing waits any more and fewer than half of `peak_running` run: from the
      end of the last step that is not so. `tail_share`: of the makespan.
    * `wall_s`: what simulating took. `interrupted`: whether that was cut short.
    """
    steps = record.steps
    held_s = record.until_s() - steps.start_s
    complete = [request for request in record.requests if request.finish_reason in COMPLETE]
    makespan_s = record.end_s - record.start_s if record.num_steps else None
    output_tokens = sum(request.output_tokens for request in complete)
    unfinished_tokens = sum(request.output_tokens for request in record.requests) - output_tokens
    counters = asdict(record.counters)
    lengths = sorted(request.output_tokens for request in complete)
    reasons = Counter(request.finish_reason or "unfinished" for request in record.requests)
    tail_s = _tail_s(record)
    return {
        "makespan_s": makespan_s,
        "elapsed_s": record.end_s,
        "tokens_per_s_end_to_end": _ratio(output_tokens + unfinished_tokens, makespan_s),
        "num_samples": len(complete),
        "finish_reasons": dict(sorted(reasons.items())),
        "prompt_tokens": sum(request.prompt_tokens for request in complete),
        "output_tokens": output_tokens,
        "unfinished_tokens": unfinished_tokens,
        "len_p50": percentile(lengths, 0.5),
        "len_p90": percentile(lengths, 0.9),
        "len_max": percentile(lengths, 1.0),
        **{name: _statistics(name, complete) for name in LATENCIES},
        "kv_tokens": record.num_blocks * record.block_size,
        "num_steps": record.num_steps,
        "num_added": counters["num_added"],
        "num_finished": counters["num_finished"],
        "preemptions": counters["num_preemptions"],
        "forward_tokens": counters["forward_tokens"],
        "minimal_forward_tokens": counters["minimal_forward_tokens"],
        "recomputed_tokens": counters["recomputed_tokens"],
        "recomputed_share": _ratio(counters["recomputed_tokens"], counters["forward_tokens"]),
        "cached_tokens": counters["cached_tokens"],
        "dropped_tokens": counters["dropped_tokens"],
        "peak_blocks": counters["peak_blocks"],
        "kv_utilization": _ratio(_total(held_s * steps.used_blocks), makespan_s and makespan_s * record.num_blocks),
        "block_waste": _block_waste(held_s, steps.waste_tokens, steps.used_blocks * record.block_size),
        "mean_running": _ratio(_total(held_s * steps.num_running), makespan_s),
        "mean_waiting": _ratio(_total(held_s * steps.num_waiting), makespan_s),
        "peak_running": int(steps.num_running.max(initial=0)),
        "tail_s": tail_s,
        "tail_share": _ratio(tail_s, makespan_s),
        "wall_s": record.wall_s,
        "steps_per_wall_s": _ratio(record.num_steps, record.wall_s),
        "interrupted": record.interrupted,
    }


def latencies(requests: Sequence[RequestRecord], name: str) -> Floats:
    """The latency `name` of the requests that have it, ascending, in seconds."""
    values = np.array([getattr(request, name) for request in requests], np.float64)
    return np.sort(values[~np.isnan(values)])


def _statistics(name: str, complete: Sequence[RequestRecord]) -> dict[str, float | None]:
    ordered = latencies(complete, name).tolist()
    return {
        "mean": _ratio(math.fsum(ordered), len(ordered)),
        **{f"p{share}": percentile(ordered, share / 100) for share in (50, 90, 99)},
    }


def _block_waste(held_s: Floats, waste_tokens: Ints, places: Ints) -> float | None:
    return _ratio(_total(held_s * waste_tokens / np.maximum(places, 1)), _total(held_s[places > 0]))


def _total(values: Floats) -> float:
    """The exact sum, rounded once: numpy's depends on the processor in its last digits."""
    return math.fsum(values.tolist())


def _tail_s(record: SimRecord) -> float:
    steps = record.steps
    busy = np.flatnonzero((steps.num_waiting > 0) | (2 * steps.num_running >= steps.num_running.max(initial=1)))
    return record.end_s - float(steps.end_s[busy[-1]]) if len(busy) else 0.0


def _ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None


def flat(summary: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    """The numbers of a summary (or None in their place) by their dotted names, in order."""
    for key, value in summary.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield prefix + key, value


def combine(summaries: Sequence[Summary]) -> Summary:
    """One summary of several that differ in their seed: means in place of the numbers, and their `ci95`.

    `ci95` repeats the shape of the summary and holds the half width of the 95% confidence interval of each mean
    (Student's t over the seeds). A number that one of them lacks is None. Everything else is the first one's; it is
    `interrupted` if any is. A single summary is returned as it is.
    """
    if len(summaries) == 1:
        return summaries[0]
    from scipy.special import stdtrit

    quantile = float(stdtrit(len(summaries) - 1, (1 + _CONFIDENCE) / 2))
    reasons = sorted({reason for summary in summaries for reason in summary["finish_reasons"]})
    counted = [
        {**summary, "finish_reasons": {reason: summary["finish_reasons"].get(reason, 0) for reason in reasons}}
        for summary in summaries
    ]
    means, halves = _combine(counted, quantile)
    means["interrupted"] = any(summary["interrupted"] for summary in summaries)
    return {**means, "ci95": halves}


def _combine(summaries: Sequence[Mapping[str, Any]], quantile: float) -> tuple[Summary, Summary]:
    means: Summary = {}
    halves: Summary = {}
    for key, first in summaries[0].items():
        values = [summary[key] for summary in summaries]
        if isinstance(first, Mapping):
            means[key], halves[key] = _combine(values, quantile)
        elif any(value is None for value in values):
            means[key] = halves[key] = None
        elif isinstance(first, int | float) and not isinstance(first, bool):
            means[key] = fmean(values)
            halves[key] = quantile * stdev(values) / math.sqrt(len(values))
        else:
            means[key] = first
    return means, halves


def seed_rows(seeds: Sequence[int], summaries: Sequence[Summary]) -> list[list[object]]:
    """The lines of `seeds.csv`: the names of all numbers, then those of each seed."""
    header: list[object] = ["seed", *SCALARS]
    return [header, *([seed, *_chosen(summary)] for seed, summary in zip(seeds, summaries, strict=True))]


def _chosen(summary: Summary) -> list[object]:
    numbers = dict(flat(summary))
    return ["" if numbers[name] is None else numbers[name] for name in SCALARS]


def summary_table(summary: Summary) -> str:
    """The lines that a person reads at the end of a simulation; intervals are 95% ones over the seeds."""
    half = dict(flat(summary.get("ci95", {})))

    def number(name: str, kind: str = ",.0f") -> str:
        return "-" if summary[name] is None else format(summary[name], kind) + _interval(half.get(name), kind)

    def duration(name: str) -> str:
        value = summary[name]
        hours = f" ({value / 3600:,.1f} h)" if value is not None and value >= _LONG_S else ""
        return "-" if value is None else f"{seconds(value, half.get(name))}{hours}"

    rows = [("samples", f"{number('num_samples')} finished{_reasons(summary)}, {number('output_tokens')} tokens")]
    if summary["num_samples"]:
        lengths = (f"{name} {number(f'len_{name}')}" for name in ("p50", "p90", "max"))
        rows.append(("length", f"{', '.join(lengths)} tokens"))
    if summary["num_steps"]:
        digits = ",.0f" if summary["tokens_per_s_end_to_end"] >= 100 else ",.4g"
        rate = number("tokens_per_s_end_to_end", digits)
        rows.append(("makespan", f"{duration('makespan_s')}, {rate} tokens/s"))
    if summary["num_samples"]:
        rows += _latency_rows(summary, half)
    if summary["num_steps"]:
        lost = f"{number('recomputed_tokens')} tokens recomputed, {number('recomputed_share', '.1%')} of all computed"
        rows.append(("preemptions", f"{number('preemptions')}, {lost}"))
        if summary["cached_tokens"]:
            rows.append(("reuse", f"{number('cached_tokens')} prompt tokens taken from the cache"))
        used = f"{number('kv_utilization', '.1%')} used on average, {number('block_waste', '.2%')} of that unfilled"
        rows.append(("KV cache", f"{number('kv_tokens')} tokens, {used}"))
        # Where nothing ever waits, there is no crowd whose end it could be.
        if summary["mean_waiting"]:
            few = f"nothing waiting and fewer than half of {number('peak_running')} running"
            rows.append(("tail", f"{duration('tail_s')} ({number('tail_share', '.1%')} of the makespan) with {few}"))
    if summary["num_steps"] and summary["wall_s"]:
        times = summary["elapsed_s"] / summary["wall_s"]
        speed = f"{summary['steps_per_wall_s']:,.0f} steps/s, {times:,.0f}x real time"
        rows.append(("simulated", f"{number('num_steps')} steps in {seconds(summary['wall_s'])} ({speed})"))
    if summary["interrupted"]:
        rows.append(("interrupted", "yes"))
    return "\n".join(f"{name:<13}{value}" for name, value in rows)


def _reasons(summary: Summary) -> str:
    """How the finished requests ended, and how many others ended otherwise."""
    counts = sorted(summary["finish_reasons"].items(), key=lambda item: -item[1])
    complete = ", ".join(f"{reason} {count:,.0f}" for reason, count in counts if count and reason in COMPLETE)
    others = ", ".join(f"{count:,.0f} {reason}" for reason, count in counts if count and reason not in COMPLETE)
    return f"{f' ({complete})' if complete else ''}{f', {others}' if others else ''}"


def _latency_rows(summary: Summary, half: Mapping[str, float | None]) -> Iterator[tuple[str, str]]:
    """A header and a row a latency, in columns."""
    table = [list(STATISTICS)]
    for name in LATENCIES:
        values = ((summary[name][statistic], half.get(f"{name}.{statistic}")) for statistic in STATISTICS)
        table.append(["-" if value is None else seconds(value, interval) for value, interval in values])
    width = 2 + max(8, *(len(cell) for row in table for cell in row))
    for words, row in zip(("", *LATENCIES.values()), table, strict=True):
        yield words, "".join(f"{cell:>{width}}" for cell in row)


def seconds(value: float, half: float | None = None) -> str:
    """A duration in three figures or so and a unit that suits it, with its interval if it has one."""
    scale, unit = (1.0, "s") if abs(value) >= 1 or not value else (1e3, "ms") if abs(value) >= 1e-3 else (1e6, "us")
    size = abs(value * scale)
    kind = ",.0f" if size >= 1000 or not size else ",.1f" if size >= 100 else ",.2f"
    interval = _interval(None if half is None else half * scale, kind)
    return f"{format(value * scale, kind)}{interval} {unit}"


def _interval(half: float | None, kind: str) -> str:
    return "" if half is None or half == 0 else f" ± {format(half, kind)}"


def refusals(record: SimRecord) -> list[RequestRecord]:
    """The requests that the scheduler did not take."""
    return [request for request in record.requests if request.finish_reason == REFUSED]
