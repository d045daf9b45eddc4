"""How fast an hour of requests is simulated on one core, and where the time goes.

    python benchmarks/trace_hour.py [--trace AzureLLMInferenceTrace_conv.csv] [overrides of `python -m paged sim`]

Without a trace an hour of Poisson arrivals with lengths like those of the Azure conversation trace is drawn: 5.5
requests a second, about 1,150 prompt tokens and 210 output tokens each. One plain run gives the total; a second one,
with a clock around each call, gives the shares, which include the clock's own cost.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from hydra import compose, initialize_config_dir

from paged.config.convert import conf_folder
from paged.config.sim import sim_config
from paged.core.scheduler import Scheduler
from paged.sim.driver import simulate
from paged.sim.executor import SimExecutor
from paged.sim.record import SimRecord

SETTING = ["model=qwen3_8b", "hardware=h200", "tp=1", "max_num_seqs=256"]
POISSON = [
    *("workload=poisson", "workload.rate=5.53", "workload.num_prompts=19366"),
    *("workload.prompt=lognormal:800:0.85:1:14000", "workload.output=lognormal:160:0.75:1:1000"),
]


def timed(spent: Counter[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, with its seconds added to `spent`."""

    def wrapped(*args: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args)
        finally:
            spent[name] += time.perf_counter() - start  # type: ignore[assignment]

    return wrapped


def core_speed() -> float:
    """Seconds of a fixed piece of plain Python, by which figures of two machines, or moments, can be compared."""
    start = time.perf_counter()
    total = 0
    for number in range(10_000_000):
        total += number
    return time.perf_counter() - start


def main() -> None:
    """Run both simulations and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="a trace file; by default a Poisson hour is drawn")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    workload = ["workload=trace", f"workload.path={args.trace}"] if args.trace else POISSON
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = sim_config(compose("sim", [*SETTING, *workload, *args.overrides]))
    start = time.perf_counter()
    jobs = config.workload.jobs()
    read_s = time.perf_counter() - start

    def run(scheduler: Scheduler, latency: Any) -> SimRecord:
        return simulate(jobs, scheduler, latency)

    setting = config.setting()
    record = run(Scheduler(setting.limits, config.policy), setting.latency)
    span_s = record.end_s - record.start_s
    num_tokens = record.counters.output_tokens
    print(f"{len(jobs):,} requests over {span_s:,.0f} s: {record.num_steps:,} steps, {num_tokens:,} tokens")
    print(f"read in {read_s:.2f} s, simulated in {record.wall_s:.2f} s: {span_s / record.wall_s:,.0f} x real time")
    print(f"{record.num_steps / record.wall_s:,.0f} steps/s, {record.wall_s / record.num_steps * 1e6:.2f} us a step")
    print(f"this core: {core_speed():.2f} s for ten million additions in a loop")

    spent: Counter[str] = Counter()
    scheduler = Scheduler(setting.limits, config.policy)
    for name in ("plan", "commit", "add"):
        setattr(scheduler, name, timed(spent, f"scheduler: {name}", getattr(scheduler, name)))
    setting = config.setting()
    setting.latency.step_s = timed(spent, "latency model", setting.latency.step_s)  # type: ignore[method-assign]
    submit = SimExecutor.submit
    SimExecutor.submit = timed(spent, "executor, latency model included", submit)  # type: ignore[method-assign]
    try:
        again = run(scheduler, setting.latency)
    finally:
        SimExecutor.submit = submit  # type: ignore[method-assign]
    spent["executor"] = spent.pop("executor, latency model included") - spent["latency model"]  # type: ignore[assignment]
    spent["clock, record and loop"] = again.wall_s - sum(spent.values())  # type: ignore[assignment]
    print(f"where it goes ({again.wall_s:.2f} s with clocks):")
    for name, seconds in spent.most_common():
        print(f"  {name:<24} {seconds / again.wall_s:6.1%} {seconds / again.num_steps * 1e6:8.2f} us a step")


if __name__ == "__main__":
    main()
