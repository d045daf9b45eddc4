"""Checks the executor that predicts against one that looks at every row of every plan."""

from __future__ import annotations

from unittest.mock import ANY

import pytest

from loop_tools import Ticks, random_case
from paged.core.plan import SAMPLE, StepPlan, StepResult
from paged.core.request import Request, SamplingParams
from paged.core.scheduler import Scheduler
from paged.sim.executor import SimExecutor
from paged.sim.shape import StepShape
from paged.workload.job import Job

ANY_TIMES = (ANY, ANY)


class Naive:
    """What a plan means, worked out from all plans before it, row by row."""

    def __init__(self, jobs: list[Job], block_size: int) -> None:
        self.jobs = {job.id: job for job in jobs}
        self.block_size = block_size
        self.ids: dict[int, str] = {}
        self.outputs: dict[int, int] = {}
        self.blocks: dict[int, int] = {}
        self.held: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> tuple[StepShape, list[bool], int]:
        """Shape, stop flags and unfilled places."""
        for slot in plan.released:
            for table in (self.ids, self.outputs, self.blocks, self.held):
                # After `abandon` slots may be told that are empty by now.
                table.pop(slot, None)  # type: ignore[attr-defined]
        for started in plan.started:
            self.ids[started.slot] = started.request.id
            self.outputs[started.slot] = started.num_output
            self.blocks[started.slot] = len(started.blocks)
            self.held[started.slot] = started.num_cached
        for slot, _ in plan.appended:
            self.blocks[slot] += 1
        stopped = []
        for slot, start, length, logits in zip(plan.slots, plan.starts, plan.lengths, plan.logits, strict=True):
            self.held[slot] = start + length
            if logits & SAMPLE:
                job = self.jobs[self.ids[slot]]
                self.outputs[slot] += 1
                stopped.append(self.outputs[slot] == job.output_len < job.max_tokens)
        waste = sum(self.blocks[slot] * self.block_size - self.held[slot] for slot in self.blocks)
        return StepShape.of(plan), stopped, waste


@pytest.mark.parametrize("abandons", [False, True])
def test_shapes_stops_and_waste_are_those_of_every_row(abandons: bool) -> None:
    num_steady = num_stops = num_preempted = 0
    for seed in range(250):
        config, policy, jobs = random_case(seed)
        scheduler = Scheduler(config, policy)
        latency = Ticks()
        executor = SimExecutor(latency, config.block_size)
        naive = Naive(jobs, config.block_size)
        to_come = list(jobs)
        turn = 0
        last = None
        while to_come or scheduler.has_unfinished or scheduler.num_in_flight:
            while to_come and to_come[0].arrival_s <= turn:
                job = to_come.pop(0)
                request = Request(job.id, 0, job.prompt, SamplingParams(), 0, job.max_tokens, job.output_len)
                scheduler.add([request])
            if abandons and turn in (9, 23):
                scheduler.abandon()
                executor.abandon()
                naive = Naive(jobs, config.block_size)
            plan = scheduler.plan()
            if plan is not None:
                expected, stopped, waste = naive.execute(plan)
                executor.submit(plan)
                assert latency.shapes[-1] == executor.shape == expected
                assert executor._results[-1] == StepResult(plan.step, None, stopped, (), *ANY_TIMES)
                assert executor.waste_tokens == waste
                assert isinstance(executor.shape, StepShape)
                assert isinstance(executor._results[-1], StepResult)
                num_steady += last is not None and plan.slots is last.slots
                num_stops += sum(stopped)
                num_preempted += len(plan.preempted)
                last = plan
            turn += 1
            if scheduler.num_in_flight and (plan is None or scheduler.num_in_flight == config.depth):
                result: StepResult = executor.collect()
                scheduler.commit(result)
        assert executor.waste_tokens == 0 or scheduler._released, "what the last plans left is released by the next one"
    assert num_steady > 500
    assert num_stops > 500
    assert num_preempted > 50
