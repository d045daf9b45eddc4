"""Compares policies in simulation over the shipped workloads: makespan, tokens computed twice, preemptions.

    python benchmarks/policies.py                          # every policy on every workload
    python benchmarks/policies.py --what risks             # the forecast with other risks
    python benchmarks/policies.py --what victims           # who is preempted
    python benchmarks/policies.py --only nano,poisson --seeds 3
    python benchmarks/policies.py --only rollout,prover,nano --figure docs/figures/watermark.png

Workloads are those of `python -m paged sim`, in pools too small for them. Intervals are 95% ones over the seeds, or
over the pools of the bill. Differences are paired: a policy's run against the run of the same seed under the watermark
whose mean makespan is the smallest, which nobody knows beforehand. The same seeds give the same numbers.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Final, NamedTuple

from hydra import compose, initialize_config_dir
from scipy.special import stdtrit

from paged.config.convert import conf_folder
from paged.config.sim import sim_config
from paged.core.scheduler import Scheduler
from paged.sim.driver import simulate
from paged.sim.plots import new_figure, save, style
from paged.sim.report import summarize
from paged.workload.job import reseeded

Overrides = tuple[str, ...]

H200: Final = ("model=qwen3_8b", "hardware=h200", "tp=1")

WORKLOADS: Final[Mapping[str, Overrides]] = {
    "rollout": (),
    "rollout-384": ("workload.num_prompts=96",),
    "rollout-rate": ("workload.num_prompts=64", "workload.rate=0.08", "num_blocks=16000"),
    "pareto": ("workload.output=pareto:1200:1.2", "workload.num_prompts=96", "num_blocks=12000"),
    "prover": ("workload=prover", "workload.num_prompts=64", "num_blocks=2000"),
    "long": ("workload=long", "workload.num_prompts=96", "num_blocks=6000"),
    "nano": ("workload=nano", "num_blocks=3000"),
    "poisson": ("workload=poisson", "workload.rate=3", "num_blocks=1500"),
    "poisson-exact": ("workload=poisson", "workload.rate=3", "workload.cap=null", "num_blocks=1500"),
    "gamma": ("workload=gamma", "workload.rate=3", "num_blocks=1500"),
    "bill": ("experiment=preemption_bill",),
    "prover-h200": (*H200, "workload=prover", "workload.num_prompts=64", "num_blocks=3000"),
    "long-h200": (*H200, "workload=long", "workload.num_prompts=96", "num_blocks=8000"),
}
"""Overrides of the default config of `sim`, which is goedel8b on 4 x a10g."""

BILL_POOLS: Final = range(20, 41)

FRACTIONS: Final = (0.01, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
_WATERMARKS: Final[Mapping[str, Overrides]] = {
    "fifo": ("policy=fifo",),
    **{f"watermark {each:g}": ("policy=watermark", f"policy.fraction={each}") for each in FRACTIONS},
}
_RISKS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
_COLORS: Final = ("#2b6cb0", "#dd7a1b", "#2f855a", "#c53030", "#6b46c1", "#718096", "#b7791f", "#0987a0")
_VICTIMS: Final = ("youngest", "least_computed", "most_blocks")

POLICIES: Final[Mapping[str, Mapping[str, Overrides]]] = {
    "policies": {**_WATERMARKS, "reserve": ("policy=reserve",), "forecast": ("policy=forecast",)},
    "risks": {**_WATERMARKS, **{f"forecast {each:g}": ("policy=forecast", f"policy.risk={each}") for each in _RISKS}},
    "victims": {
        f"{name}, {victim}": (*overrides, f"policy.victim={victim}")
        for name, overrides in (
            ("watermark 0.1", ("policy=watermark", "policy.fraction=0.1")),
            ("forecast", ("policy=forecast",)),
        )
        for victim in _VICTIMS
    },
}
"""What is compared with each other."""


class Outcome(NamedTuple):
    """What a simulated run came to.

    Attributes:
        makespan_s: seconds from the first arrival to the end of the last step.
        recomputed: tokens computed again, percent of all that were computed.
        preemptions: how often a sequence lost its blocks.
        yielded: admissions that ended so, percent of all.
    """

    makespan_s: float
    recomputed: float
    preemptions: float
    yielded: float


class Mean(NamedTuple):
    """A mean and half of its 95% confidence interval."""

    value: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Of at least one value; of one alone nothing is known but itself."""
        if len(values) == 1:
            return cls(values[0], math.nan)
        return cls(fmean(values), float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / math.sqrt(len(values)))

    def verdict(self) -> str:
        """What is known of a difference of which less is better."""
        if math.isnan(self.half) or abs(self.value) <= self.half:
            return "same"
        return "better" if self.value < 0 else "WORSE"


def run(workload: str, policy: Overrides, replicate: int) -> Outcome:
    """Simulate a workload with a seed, or the bill in a pool."""
    overrides = [*WORKLOADS[workload], *policy]
    if workload == "bill":
        overrides.append(f"num_blocks={replicate}")
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = sim_config(compose("sim", overrides))
    setting = config.setting()
    jobs = reseeded(config.workload, replicate).jobs()
    summary = summarize(simulate(jobs, Scheduler(setting.limits, config.policy), setting.latency))
    assert summary["num_samples"] == len(jobs), "a request was refused"
    preemptions = summary["preemptions"]
    return Outcome(
        summary["makespan_s"],
        100 * summary["recomputed_share"],
        preemptions,
        100 * preemptions / (len(jobs) + preemptions),
    )


def replicates_of(workload: str, seeds: int) -> Sequence[int]:
    """The seeds of a workload, the pools of the bill."""
    return BILL_POOLS if workload == "bill" else range(seeds)


def outcomes(
    workloads: Sequence[str], policies: Mapping[str, Overrides], seeds: int, processes: int
) -> Iterator[tuple[str, dict[str, list[Outcome]]]]:
    """Each workload with the outcomes of each policy, one a replicate."""
    with ProcessPoolExecutor(processes) as executor:
        for workload in workloads:
            replicates = replicates_of(workload, seeds)
            futures = {
                name: [executor.submit(run, workload, overrides, each) for each in replicates]
                for name, overrides in policies.items()
            }
            yield workload, {name: [future.result() for future in row] for name, row in futures.items()}


def difference(rows: Sequence[Outcome], base: Sequence[Outcome]) -> tuple[Mean, Mean]:
    """Makespan in percent of the base's, and points of recomputed share, paired by replicate."""
    pairs = list(zip(rows, base, strict=True))
    return (
        Mean.of([100 * (row.makespan_s / other.makespan_s - 1) for row, other in pairs]),
        Mean.of([row.recomputed - other.recomputed for row, other in pairs]),
    )


def best_watermark(rows: Mapping[str, Sequence[Outcome]]) -> str:
    """The policy that others are measured against: the watermark, 0 included, with the smallest mean makespan."""
    names = [name for name in rows if name in _WATERMARKS] or list(rows)
    return min(names, key=lambda name: fmean(row.makespan_s for row in rows[name]))


def table(workload: str, rows: Mapping[str, Sequence[Outcome]], base: str) -> str:
    """A line a policy."""
    width = max(map(len, rows))
    columns = f"{'makespan, s':>16} {'vs best, %':>14} {'recomputed, %':>15} {'preempted':>10} {'of all, %':>10}"
    lines = [f"{workload}: sim {' '.join(WORKLOADS[workload]) or '(the default)'}", f"  {'':<{width}} {columns}"]
    for name, row in rows.items():
        makespan, recomputed = Mean.of([each.makespan_s for each in row]), Mean.of([each.recomputed for each in row])
        against = "best" if name == base else shown(difference(row, rows[base])[0], "+.1f")
        lines.append(
            f"  {name:<{width}} {shown(makespan, ',.1f'):>16} {against:>14} {shown(recomputed, '.1f'):>15}"
            f" {fmean(each.preemptions for each in row):>10,.1f} {fmean(each.yielded for each in row):>10.1f}"
        )
    return "\n".join(lines)


def verdicts(name: str, found: Mapping[str, Mapping[str, Sequence[Outcome]]]) -> str:
    """A line a workload: a policy against the best watermark."""
    lines = [f"{name} against each workload's best watermark (95% intervals of paired differences)"]
    header = f"  {'':<14} {'best':<15} {'makespan, %':>14} {'':<7} {'recomputed, points':>19}"
    lines.append(header)
    for workload, rows in found.items():
        base = best_watermark(rows)
        makespan, recomputed = difference(rows[name], rows[base])
        lines.append(
            f"  {workload:<14} {base:<15} {shown(makespan, '+.1f'):>14} {makespan.verdict():<7}"
            f" {shown(recomputed, '+.1f'):>19} {recomputed.verdict()}"
        )
    return "\n".join(lines)


def draw(found: Mapping[str, Mapping[str, Sequence[Outcome]]], path: Path) -> None:
    """Curves over the watermark and, dashed, the forecast: makespan against the best watermark's, and what is computed
    again."""
    figure = new_figure(9.5, 4.2)
    left, right = figure.subplots(1, 2, gridspec_kw={"left": 0.07, "right": 0.99, "bottom": 0.13, "top": 0.93})
    fractions = (0.0, *FRACTIONS)
    for color, (workload, rows) in zip(_COLORS, found.items(), strict=False):
        base = rows[best_watermark(rows)]
        for axes, column in ((left, 0), (right, 1)):
            points = [
                difference(rows[name], base)[0] if column == 0 else Mean.of([each.recomputed for each in rows[name]])
                for name in (*_WATERMARKS, "forecast")
            ]
            *curve, forecast = (point.value for point in points)
            label = workload if column == 0 else None
            axes.plot(fractions, curve, color=color, marker="o", markersize=4, label=label)
            axes.axhline(forecast, color=color, linestyle="--", linewidth=1.2)
    for axes, words in ((left, "makespan, % above the best watermark's"), (right, "tokens computed again, %")):
        style(axes)
        axes.set_xlabel("share of the pool kept free at admission")
        axes.set_ylabel(words)
        axes.set_xlim(-0.01, FRACTIONS[-1] + 0.01)
    left.plot([], [], color="0.4", linestyle="--", linewidth=1.2, label="forecast, which has no such share")
    left.legend(framealpha=0.9, fontsize=9)
    save(figure, path)


def shown(mean: Mean, kind: str) -> str:
    """A mean with its interval."""
    return format(mean.value, kind) + ("" if math.isnan(mean.half) else f" ± {format(mean.half, kind.lstrip('+'))}")


def main() -> int:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=POLICIES, default="policies", help="what is compared")
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, between commas")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--figure", type=Path, help="a PNG of watermarks and forecast, with --what policies")
    options = parser.parse_args()
    workloads = options.only.split(",")
    for workload in workloads:
        if workload not in WORKLOADS:
            parser.error(f"--only must hold names of {', '.join(WORKLOADS)}, not {workload!r}")
    found = {}
    for workload, rows in outcomes(workloads, POLICIES[options.what], options.seeds, options.processes):
        found[workload] = rows
        print(table(workload, rows, best_watermark(rows)), flush=True)
    if options.figure is not None:
        draw(found, options.figure)
    if options.what != "victims":
        for name in POLICIES[options.what]:
            if name.startswith("forecast"):
                print(verdicts(name, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
