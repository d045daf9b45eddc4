"""Step logs of runs that never were: a real scheduler and a real log, on a clock that a formula drives."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from paged.core.limits import SchedulerConfig
from paged.core.plan import SAMPLE, StepResult
from paged.core.policy import Fifo
from paged.core.prompt import Prompt
from paged.core.request import Request, SamplingParams
from paged.core.scheduler import Scheduler
from paged.sim.shape import StepShape
from paged.step_log import StepLog


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests of random lengths, all there at the start but for those that ``every`` so many steps bring."""

    num_requests: int = 60
    prompt: tuple[int, int] = (1, 300)
    output: tuple[int, int] = (5, 60)
    every: int = 4
    at_start: int = 20
    max_num_seqs: int = 32
    chunk_size: int = 128
    max_step_tokens: int = 700
    depth: int = 1


def write_run(
    path: Path,
    step_s: Callable[[StepShape], float],
    host_s: Callable[[StepShape], float] = lambda shape: 0.0,
    *,
    load: Load | None = None,
    seed: int = 0,
) -> list[StepShape]:
    """Append a run to ``path``, whose steps take what ``step_s`` says; their shapes.

    The device takes up a step when the one before has ended. At depth 1 the host works ``host_s`` in between; deeper
    pipelines launch a step, which the log takes for its start, when the oldest in flight has ended.
    """
    load = load or Load()
    rng = random.Random(seed)
    limits = SchedulerConfig(
        num_blocks=4096,
        max_num_seqs=load.max_num_seqs,
        chunk_size=load.chunk_size,
        max_step_tokens=load.max_step_tokens,
        depth=load.depth,
        prefix_reuse=False,
    )
    scheduler = Scheduler(limits, Fifo())
    params = SamplingParams()
    requests = [
        Request(f"r{i}", 0, Prompt([1] * rng.randint(*load.prompt)), params, i, rng.randint(*load.output))
        for i in range(load.num_requests)
    ]
    shapes: list[StepShape] = []
    pending: list[tuple[int, float, float, int]] = []
    now_s = launch_s = 100.0
    with StepLog(path) as log:
        log.config(asdict(limits), {"name": "fifo"})
        while requests or scheduler.has_unfinished or pending:
            while requests and load.num_requests - len(requests) < load.at_start + len(shapes) // load.every:
                request = requests.pop(0)
                scheduler.add([request])
                log.add([request])
            while len(pending) < load.depth and (plan := scheduler.plan()) is not None:
                log.plan(plan)
                shape = StepShape.of(plan)
                start_s = now_s + host_s(shape) if load.depth == 1 else launch_s
                now_s = max(start_s, now_s) + step_s(shape)
                shapes.append(shape)
                pending.append((plan.step, start_s, now_s, sum(1 for flags in plan.logits if flags & SAMPLE)))
            step, start_s, end_s, num_tokens = pending.pop(0)
            result = StepResult(step, [7] * num_tokens, [False] * num_tokens, [], start_s, end_s)
            scheduler.commit(result)
            log.commit(result)
            launch_s = end_s
    return shapes
