"""The engine's loop on a simpy clock: arrivals, the engine's own scheduler, and an executor that predicts."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import pairwise
from typing import Any

import simpy

from paged.core.plan import StepPlan
from paged.core.request import Request, SamplingParams
from paged.core.scheduler import Finished, Scheduler
from paged.sim.executor import SimExecutor
from paged.sim.latency import LatencyModel
from paged.sim.record import SimRecord
from paged.workload.job import Job

WATCHDOG_STEPS = 100_000
"""Steps in which some token must be computed that never was before, or a request must end."""

Progress = Callable[[SimRecord, int], None]
"""Called now and then with the record and the number of requests that have ended."""

_STEPS_PER_CHECK = 32
_SECONDS_PER_CALL = 0.2


def simulate(
    jobs: Iterable[Job], scheduler: Scheduler, latency: LatencyModel, *, on_progress: Progress | None = None
) -> SimRecord:
    """Run `jobs` through `scheduler` on a simulated clock.

    The loop is the engine's: take in what arrived, plan, submit, and once `depth` plans are in flight, collect and
    commit the oldest. The host's time passes before a plan is submitted, beside the plans that the device computes
    meanwhile; a host that is still making a plan takes in results afterwards.

    Args:
        jobs: in order of arrival.
        scheduler: fresh, with the limits and the policy to try.
        latency: how long steps take.
        on_progress: told a few times a second.

    Returns:
        what happened. A Ctrl-C, or `on_progress` raising KeyboardInterrupt, ends it there, and it is marked so; if it
        was `on_progress`, unfinished requests end as `abort` with what they have. A request that the scheduler
        refuses is a row.

    Raises:
        RuntimeError: nothing makes progress any more, or a step has no sensible time.
        ValueError: the latency model refuses a step.
    """
    return _Simulation(scheduler, latency, on_progress).run(list(jobs))


class _Simulation:
    """One run: what arrived and waits to be taken in, and the record that grows."""

    def __init__(self, scheduler: Scheduler, latency: LatencyModel, on_progress: Progress | None) -> None:
        config = scheduler.config
        self.scheduler = scheduler
        self.latency = latency
        self.on_progress = on_progress
        self.record = SimRecord(config.num_blocks, config.block_size)
        self.index_of: dict[tuple[str, int], int] = {}
        self.executor = SimExecutor(latency, config.block_size)
        self.env = simpy.Environment()
        self.inbox: deque[Job] = deque()
        self.next_arrival_s = 0.0
        self.wake: simpy.Event | None = None
        self.num_ended = 0
        self.advanced = (0, 0)
        self.advanced_step = 0
        self.called_s = 0.0

    def run(self, jobs: list[Job]) -> SimRecord:
        start = time.perf_counter()
        assert all(job.arrival_s <= after.arrival_s for job, after in pairwise(jobs)), "jobs out of order of arrival"
        self.env.process(self._arrive(jobs))
        loop = self.env.process(self._loop())
        try:
            # Ends with the loop; an error inside is raised here.
            self.env.run(until=loop)
        except KeyboardInterrupt:
            self.record.interrupted = True
        finally:
            self.record.counters = self.scheduler.counters
            self.record.wall_s = time.perf_counter() - start
        return self.record

    def _arrive(self, jobs: list[Job]) -> Generator[simpy.Event, Any, None]:
        env, inbox = self.env, self.inbox
        for job in jobs:
            self.next_arrival_s = job.arrival_s
            while job.arrival_s > env.now:
                # simpy adds the time to its own, which may end just before the arrival.
                yield env.timeout(max(job.arrival_s - env.now, math.ulp(job.arrival_s)))
            inbox.append(job)
            if self.wake is not None:
                wake, self.wake = self.wake, None
                wake.succeed()
        self.next_arrival_s = math.inf

    def _loop(self) -> Generator[simpy.Event, Any, None]:
        env, scheduler, executor, inbox = self.env, self.scheduler, self.executor, self.inbox
        pool, append_step = scheduler.pool, self.record.append_step
        depth = scheduler.config.depth
        timeout, host_s = env.timeout, self.latency.host_s
        num_in_flight = num_steps = num_running = num_used = 0
        slots: Sequence[int] | None = None
        now_s = env.now
        while True:
            if inbox:
                self._take_in()
            # The host's clock runs ahead of the simulation's while it makes plans; it takes in results when it is done.
            executor.now_s = now_s
            while num_in_flight < depth and (plan := scheduler.plan()) is not None:
                num_in_flight += 1
                executor.now_s += host_s(len(plan.slots))
                executor.submit(plan)
                if plan.started or plan.preempted or executor.sampled_first:
                    self._note(plan)
                if plan.slots is slots:
                    # The same sequences decode on; only what they appended is new.
                    num_used += len(plan.appended)
                else:
                    slots, num_running, num_used = plan.slots, scheduler.num_running, pool.num_used
                num_tokens, num_seqs, *_ = executor.shape
                append_step(
                    executor.newest_start_s,
                    executor.newest_end_s,
                    num_seqs,
                    num_tokens,
                    num_running,
                    scheduler.num_waiting,
                    num_used,
                    executor.waste_tokens,
                    len(plan.preempted),
                )
            if num_in_flight:
                end_s = executor.oldest_end_s
                now_s = end_s if end_s > executor.now_s else executor.now_s
                if now_s >= self.next_arrival_s:
                    # Otherwise nothing else happens until then, and an event would only cost time.
                    yield timeout(now_s - env.now)
                num_in_flight -= 1
                commit = scheduler.commit(executor.collect())
                if commit.finished:
                    self._finish(commit.finished, end_s)
                num_steps += 1
                if num_steps % _STEPS_PER_CHECK == 0:
                    self._check_progress(num_steps)
            elif self.next_arrival_s < math.inf or inbox:
                if not inbox:
                    self.wake = env.event()
                    yield self.wake
                    now_s = env.now
            else:
                assert not scheduler.has_unfinished, "the scheduler plans nothing though requests are unfinished"
                return

    def _take_in(self) -> None:
        """Hand what has arrived to the scheduler; what it refuses is closed with the reason."""
        record, inbox = self.record, self.inbox
        while inbox:
            job = inbox.popleft()
            request = Request(job.id, 0, job.prompt, _PARAMS, 0, job.max_tokens, job.output_len)
            index = record.add_request(request.key, job.arrival_s, len(job.prompt), job.max_tokens)
            try:
                self.scheduler.add((request,))
            except ValueError as error:
                record.refuse(index, str(error))
                self.num_ended += 1
            else:
                self.index_of[request.key] = index

    def _note(self, plan: StepPlan) -> None:
        """Tell the record of a plan's preemptions and admissions, and of first tokens after an admission."""
        record, executor = self.record, self.executor
        for key in plan.preempted:
            # A deeper pipeline may tell of it when a token in flight has already ended the request.
            if key in self.index_of:
                record.preempt(self.index_of[key], executor.newest_start_s)
        for started in plan.started:
            record.admit(self.index_of[started.request.key], executor.newest_start_s)
        for key in executor.sampled_first:
            record.sample(self.index_of[key], executor.newest_end_s)

    def _finish(self, finished: Iterable[Finished], end_s: float) -> None:
        for end in finished:
            index = self.index_of.pop(end.request.key)
            counts = end.num_output, end.num_cached_tokens, end.num_preemptions
            self.record.finish(index, end_s, end.reason.value, *counts)
            self.num_ended += 1

    def _check_progress(self, num_steps: int) -> None:
        """Report progress, and raise if there has been none for long: a watchdog over policies."""
        counters = self.scheduler.counters
        advanced = counters.num_finished, counters.forward_tokens - counters.recomputed_tokens
        if advanced != self.advanced:
            self.advanced, self.advanced_step = advanced, num_steps
        elif num_steps - self.advanced_step >= WATCHDOG_STEPS:
            raise RuntimeError(
                f"no progress in {num_steps - self.advanced_step:,} steps: {self.scheduler.num_running} running, "
                f"{self.scheduler.num_waiting} waiting, {counters.num_preemptions:,} preemptions so far"
            )
        now = time.perf_counter()
        if self.on_progress is None or now < self.called_s + _SECONDS_PER_CALL:
            return
        self.called_s = now
        try:
            self.on_progress(self.record, self.num_ended)
        except KeyboardInterrupt:
            # Between two steps: what has been generated so far is known.
            for request_id, sample in list(self.index_of):
                self._finish(self.scheduler.abort(request_id, sample), self.record.end_s)
            raise


# Nothing is sampled, so nothing of it matters but that no prompt is scored.
_PARAMS = SamplingParams()
