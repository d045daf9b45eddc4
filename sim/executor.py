"""An executor that predicts: it answers each plan with a time and with who stops, on the simulation's clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from paged.core.plan import SAMPLE, Started, StepPlan, StepResult
from paged.sim.latency import LatencyModel
from paged.sim.shape import StepShape

# Makes named tuples without their own constructors, whose calls would show in every step (benchmarks/trace_hour.py).
_new = tuple.__new__

NEVER = 1 << 62
"""Tokens that are left to a sample which nothing ends but its `max_tokens`."""


class SimExecutor:
    """An `Executor` without a model: plans follow each other on one device, each for as long as `latency` says.

    A sample stops with the output token that its request's `output_len` names. Tokens are not told.

    If a plan's columns are the very objects of the plan before, every row decodes one token, and only sums change. Such
    plans are counted; the rows are visited when one of them stops or the columns change.

    Args:
        latency: predicts the device's time.
        block_size: tokens in a block.

    Attributes:
        now_s: time on the host's clock; whoever drives the executor sets it before `submit`.
        waste_tokens: token places in referenced blocks that no token submitted so far fills.
        shape: of the plan submitted last.
        newest_start_s, newest_end_s: when it starts and ends.
        sampled_first: keys of the requests that get their first token since an admission with it.
    """

    def __init__(self, latency: LatencyModel, block_size: int) -> None:
        self.now_s = 0.0
        self.waste_tokens = 0
        self._latency = latency
        self._block_size = block_size
        self._results: deque[StepResult] = deque()
        self._device_free_s = 0.0
        # By slot: output tokens until the stop, token places, tokens scheduled; as of the last visit of the rows.
        self._left: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._scheduled: dict[int, int] = {}
        # Slots that have not sampled since they were taken, and whose they are.
        self._fresh: dict[int, tuple[str, int]] = {}
        self.sampled_first: Sequence[tuple[str, int]] = ()
        # The columns that stay the same, steps with them since the last visit, and how many more until a stop.
        self._columns: Sequence[int] | None = None
        self._is_decode = False
        self._num_unvisited = 0
        self._num_until_stop = 0
        self._no_stops: list[bool] = []
        self.shape = StepShape(0, 0, 0, 0, 0)
        self.newest_start_s = self.newest_end_s = 0.0

    @property
    def oldest_end_s(self) -> float:
        """When the oldest plan submitted and not collected ends."""
        return self._results[0].end_s

    def submit(self, plan: StepPlan) -> None:
        """Predict `plan`; it starts when the host has made it and the device is free."""
        if plan.slots is self._columns and self._is_decode and not plan.released:
            num_seqs, _, _, kv_tokens, max_kv, *_ = self.shape
            shape = _new(StepShape, (num_seqs, num_seqs, num_seqs, kv_tokens + num_seqs, max_kv + 1, 0, 0, 0, 0))
            self._num_unvisited += 1
            self.waste_tokens -= num_seqs
            if plan.appended:
                self._append(plan.appended)
            if self._num_unvisited == self._num_until_stop:
                self._visit()
                stopped = [self._left[slot] == 0 for slot in plan.slots]
                self._count_down(plan.slots)
            else:
                stopped = self._no_stops
        else:
            self._visit()
            self._change_slots(plan)
            shape = StepShape.of(plan)
            stopped = self._compute_rows(plan)
        self.shape = shape
        start_s = self.now_s if self.now_s > self._device_free_s else self._device_free_s
        seconds = self._latency.step_s(shape)
        if not 0.0 <= seconds < math.inf:
            raise RuntimeError(f"the latency model gives step {plan.step} {seconds} s: {shape}")
        self._device_free_s = end_s = start_s + seconds
        self.sampled_first = self._first_samples(plan) if self._fresh else ()
        self.newest_start_s, self.newest_end_s = start_s, end_s
        self._results.append(_new(StepResult, (plan.step, None, stopped, (), start_s, end_s, None)))

    def collect(self) -> StepResult:
        """The oldest result; the clock is to be moved to its end."""
        return self._results.popleft()

    def abandon(self) -> None:
        """Forget every plan and slot."""
        self._results.clear()
        for by_slot in (self._left, self._places, self._scheduled, self._fresh):
            by_slot.clear()
        self._columns = None
        self._num_unvisited = self.waste_tokens = 0

    def _visit(self) -> None:
        """Bring the slots of the steady columns up to date."""
        if self._num_unvisited:
            assert self._columns is not None
            left, scheduled, count = self._left, self._scheduled, self._num_unvisited
            for slot in self._columns:
                left[slot] -= count
                scheduled[slot] += count
            self._num_unvisited = 0

    def _count_down(self, slots: Sequence[int]) -> None:
        """Count the steps until the next of the samples in `slots` stops; one that has stopped stops no more."""
        self._num_until_stop = min((left for slot in slots if (left := self._left[slot]) > 0), default=NEVER)

    def _append(self, appended: Sequence[tuple[int, int]]) -> None:
        size = self._block_size
        self.waste_tokens += size * len(appended)
        for slot, _ in appended:
            self._places[slot] += size

    def _change_slots(self, plan: StepPlan) -> None:
        for slot in plan.released:
            # A slot may be empty after `abandon`.
            self.waste_tokens -= self._places.pop(slot, 0) - self._scheduled.pop(slot, 0)
            self._left.pop(slot, None)
            self._fresh.pop(slot, None)
        for started in plan.started:
            self._start(started)
        self._append(plan.appended)

    def _start(self, started: Started) -> None:
        slot, request = started.slot, started.request
        output_len = request.output_len
        ends_by_itself = output_len is not None and output_len < request.max_tokens
        self._left[slot] = output_len - started.num_output if ends_by_itself and output_len is not None else NEVER
        self._places[slot] = len(started.blocks) * self._block_size
        self._scheduled[slot] = started.num_cached
        self.waste_tokens += self._places[slot] - started.num_cached
        self._fresh[slot] = request.key

    def _compute_rows(self, plan: StepPlan) -> list[bool]:
        """Schedule every row; the stop flags of those that sample."""
        left, scheduled = self._left, self._scheduled
        stopped: list[bool] = []
        for slot, length, logits in zip(plan.slots, plan.lengths, plan.logits, strict=True):
            scheduled[slot] += length
            if logits & SAMPLE:
                left[slot] -= 1
                stopped.append(left[slot] == 0)
        num_rows, num_tokens = len(plan.slots), sum(plan.lengths)
        self.waste_tokens -= num_tokens
        self._columns = plan.slots
        self._is_decode = num_rows == num_tokens == len(stopped)
        if self._is_decode:
            self._no_stops = [False] * num_rows
            self._count_down(plan.slots)
        return stopped

    def _first_samples(self, plan: StepPlan) -> list[tuple[str, int]]:
        fresh = self._fresh
        rows = zip(plan.slots, plan.logits, strict=True)
        return [fresh.pop(slot) for slot, logits in rows if logits & SAMPLE and slot in fresh]
