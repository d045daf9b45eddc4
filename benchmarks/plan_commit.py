"""Measures what deciding costs: ``plan()`` + ``commit()`` for many running decodes with long contexts.

    python benchmarks/plan_commit.py --sequences 256 --context 16384

Prints microseconds a step and fails if their mean exceeds the limit.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time

from paged.core.limits import SchedulerConfig
from paged.core.plan import SAMPLE, StepPlan, StepResult
from paged.core.prompt import Prompt
from paged.core.request import Request, SamplingParams, sample_seed
from paged.core.scheduler import Scheduler

VOCAB_SIZE = 150_000


def running_decodes(num_seqs: int, context: int, steps: int, block_size: int, prefix_reuse: bool) -> Scheduler:
    """A scheduler with ``num_seqs`` sequences whose prompts of ``context`` tokens have just been computed."""
    rng = random.Random(0)
    blocks_each = -(-(context + steps + 2) // block_size)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_seqs * blocks_each,
            block_size=block_size,
            max_num_seqs=num_seqs,
            max_step_tokens=num_seqs * context,
            chunk_size=context,
            prefix_reuse=prefix_reuse,
        )
    )
    params = SamplingParams(max_tokens=steps + 2)
    for number in range(num_seqs):
        prompt = Prompt([rng.randrange(VOCAB_SIZE) for _ in range(context)])
        name = str(number)
        scheduler.add([Request(name, 0, prompt, params, sample_seed(name, None, 0), steps + 2)])
    plan = scheduler.plan()
    assert plan is not None
    assert len(plan.slots) == num_seqs
    scheduler.commit(answer(plan, rng))
    return scheduler


def answer(plan: StepPlan, rng: random.Random) -> StepResult:
    """A result with random tokens and no stops."""
    count = sum(1 for logits in plan.logits if logits & SAMPLE)
    return StepResult(plan.step, [rng.randrange(VOCAB_SIZE) for _ in range(count)], [False] * count, [], 0.0, 0.0)


def measure(scheduler: Scheduler, num_seqs: int, steps: int) -> list[float]:
    """Seconds of ``plan()`` and ``commit()`` together in each of ``steps`` steps."""
    rng = random.Random(1)
    times = []
    for _ in range(steps):
        start = time.thread_time()
        plan = scheduler.plan()
        planned = time.thread_time()
        assert plan is not None
        assert len(plan.slots) == num_seqs
        assert plan.num_tokens == num_seqs
        result = answer(plan, rng)
        resumed = time.thread_time()
        scheduler.commit(result)
        times.append(time.thread_time() - resumed + planned - start)
    scheduler.check()
    assert scheduler.counters.num_preemptions == 0
    return times


def main() -> int:
    """Measure, print, and say with the exit code whether the mean keeps the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256, help="running decodes")
    parser.add_argument("--context", type=int, default=16_384, help="tokens that each holds at the start")
    parser.add_argument("--steps", type=int, default=512, help="steps measured")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--no-prefix-reuse", action="store_true")
    parser.add_argument("--limit-us", type=float, default=500.0, help="largest mean allowed, microseconds a step")
    options = parser.parse_args()
    scheduler = running_decodes(
        options.sequences, options.context, options.steps, options.block_size, not options.no_prefix_reuse
    )
    times = sorted(1e6 * seconds for seconds in measure(scheduler, options.sequences, options.steps))
    mean = statistics.fmean(times)
    p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
    print(f"{options.sequences} decodes at {options.context} tokens, {options.steps} steps, us a step:")
    print(f"median {statistics.median(times):.0f}  mean {mean:.0f}  p99 {p99:.0f}  limit {options.limit_us:.0f}")
    return 0 if mean <= options.limit_us else 1


if __name__ == "__main__":
    sys.exit(main())
