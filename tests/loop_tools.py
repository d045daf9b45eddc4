"""What the tests of the simulated loop share: steps of given times and random workloads for schedulers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from paged.core.limits import SchedulerConfig
from paged.core.plan import StepPlan
from paged.core.policy import Fifo, Forecast, Policy, Reserve, Watermark
from paged.core.prompt import OpaquePrompt
from paged.core.scheduler import Scheduler
from paged.sim.shape import StepShape
from paged.workload.job import Job


@dataclass
class Ticks:
    """A latency model in which every step takes as long, and the host too; it keeps the shapes that it is asked."""

    seconds: float = 1.0
    host: float = 0.0
    shapes: list[StepShape] = field(default_factory=list)

    def step_s(self, shape: StepShape) -> float:
        self.shapes.append(shape)
        return self.seconds

    def host_s(self, num_seqs: int) -> float:
        return self.host


class Watched(Scheduler):
    """A scheduler that keeps the plans it made."""

    def __init__(self, config: SchedulerConfig, policy: Policy | None = None) -> None:
        super().__init__(config, policy)
        self.plans: list[StepPlan] = []

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            self.plans.append(plan)
        return plan


def random_case(seed: int, depth: int | None = None) -> tuple[SchedulerConfig, Policy, list[Job]]:
    """Limits with little room, a policy, and jobs that arrive at whole seconds and share prompts."""
    rng = random.Random(seed)
    block_size = rng.choice((2, 4, 8))
    longest = rng.choice((24, 48, 80))
    config = SchedulerConfig(
        num_blocks=-(-longest // block_size) + rng.randint(0, 16),
        block_size=block_size,
        max_num_seqs=rng.choice((3, 6, 16)),
        chunk_size=rng.choice((3, 8, 64)),
        max_step_tokens=rng.choice((8, 24, 64)),
        depth=depth or rng.choice((1, 2, 3)),
        prefix_reuse=rng.random() < 0.7,
    )
    victims = (Fifo(victim="least_computed"), Fifo(victim="most_blocks"))
    policy = rng.choice((Fifo(), Watermark(0.1), Reserve(), Forecast(), *victims))
    jobs = []
    arrival = 0
    for number in range(rng.randint(3, 10)):
        arrival += rng.choice((0, 0, 0, 1, 3, 40))
        stem = rng.randrange(3)
        length = min(longest // 2, 3 + 7 * stem)
        max_tokens = rng.randint(1, longest + 1 - length)
        output_len = rng.randint(1, max_tokens)
        prompt = OpaquePrompt(f"p{stem}", length)
        jobs.append(
            Job(id=f"r{number}", prompt=prompt, output_len=output_len, max_tokens=max_tokens, arrival_s=float(arrival))
        )
    return config, policy, jobs
