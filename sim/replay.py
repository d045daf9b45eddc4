"""Replays a real run's step log on a fresh scheduler: every plan must come out again, block by block."""

from __future__ import annotations

import time
import typing
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from paged.core.limits import SchedulerConfig
from paged.core.metrics import Counters
from paged.core.plan import SAMPLE, SCORE, StepPlan, StepResult
from paged.core.policy import Policy
from paged.core.prompt import Prompt
from paged.core.request import Request, SamplingParams
from paged.core.scheduler import Scheduler
from paged.sim.calibration import ErrorSummary
from paged.sim.latency import LatencyModel
from paged.sim.measured import MeasuredStep, StepTimes
from paged.sim.step_log import (
    AbandonEvent,
    AbortEvent,
    AddEvent,
    CommitEvent,
    ConfigEvent,
    EmptyPlanEvent,
    Event,
    PlanEvent,
    StepLogReader,
    WeightsEvent,
    step_log_of,
)

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay left the log.

    Attributes:
        session: which of the log's processes, from 0.
        line: line of the log.
        step: number of the step in that process that differs, or before which something does.
        what: the plan's column that differs (``slots``, ``lengths``, ``started``, ...), or the event's name.
        expected: what the log says.
        found: what the scheduler did.
        sentence: all of it in words.
    """

    session: int
    line: int
    step: int
    what: str
    expected: Any
    found: Any
    sentence: str


@dataclass(slots=True, kw_only=True)
class ReplayReport:
    """What came of a replay; decisions and times are told apart.

    Attributes:
        source: name of the run's folder.
        first_difference: where the replay ended early, None if every plan came out again.
        num_sessions: processes in the log: 1, and one more for each time that it was resumed.
        num_steps: plans compared and found equal.
        num_empty_plans: times that there was nothing to plan, in the log and in the replay.
        counters: the schedulers' own counts, summed over the processes; ``peak_blocks`` is the largest.
        torn_line: number of a last line that was cut off by a crash and left out.
        recorded_step_s: the steps' own durations in the log, summed.
        recorded_span_s: from the start of the first step to the end of the last, summed over the processes.
        predicted: how a latency model's step times compare with those of the log; None without a model.
        notes: what else is to be said of the predicted times.
        wall_s: how long the replay took.
    """

    source: str
    first_difference: Difference | None = None
    num_sessions: int = 0
    num_steps: int = 0
    num_empty_plans: int = 0
    counters: Counters = field(default_factory=Counters)
    torn_line: int | None = None
    recorded_step_s: float = 0.0
    recorded_span_s: float = 0.0
    predicted: ErrorSummary | None = None
    notes: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether every plan of the log came out again."""
        return self.first_difference is None

    def summary(self) -> dict[str, Any]:
        """What `summary.json` says of it."""
        counters = asdict(self.counters)
        counters["num_steps"] = self.num_steps
        counters["preemptions"] = counters.pop("num_preemptions")
        return {
            "replay": self.source,
            "exact": self.exact,
            "first_difference": None if self.first_difference is None else asdict(self.first_difference),
            "num_sessions": self.num_sessions,
            "num_empty_plans": self.num_empty_plans,
            "torn_line": self.torn_line,
            **counters,
            "recorded_step_s": self.recorded_step_s,
            "recorded_span_s": self.recorded_span_s,
            "predicted_step_error": None if self.predicted is None else asdict(self.predicted),
            "notes": list(self.notes),
            "wall_s": self.wall_s,
        }

    def table(self) -> str:
        """A few lines for people."""
        counters = self.counters
        processes = f" in {self.num_sessions} processes" if self.num_sessions > 1 else ""
        lines = [
            f"replay       {self.source}: {self.num_steps:,} plans came out again{processes}",
            f"decisions    {'exact' if self.exact else 'not exact'}",
            f"sequences    {counters.num_finished:,} finished of {counters.num_added:,} added",
            f"preemptions  {counters.num_preemptions:,}, {counters.recomputed_tokens:,} tokens recomputed, "
            f"{counters.cached_tokens:,} taken from the cache",
            f"recorded     {self.recorded_step_s:.3f} s in steps, {self.recorded_span_s:.3f} s from first to last",
        ]
        if self.predicted is not None and self.predicted.num_steps:
            error = self.predicted
            lines.append(
                f"predicted    steps {error.total:+.1%} in sum, {error.mape:.1%} off on average, "
                f"median {error.p50:.1%}, p90 {error.p90:.1%}"
            )
        lines += [f"note         {note}" for note in self.notes]
        if self.torn_line is not None:
            lines.append(f"left out     line {self.torn_line}, which was cut off")
        if self.first_difference is not None:
            lines.append(f"difference   {self.first_difference.sentence}")
        return "\n".join(lines)


def replay(folder: Path, latency: LatencyModel | None = None) -> ReplayReport:
    """Give the events of a run's log to a fresh scheduler and compare every plan; ends at the first difference.

    Args:
        folder: the run's folder, or its step log.
        latency: predicts the steps' durations, to be compared with those in the log; it decides nothing.

    Raises:
        ValueError: there is no log, a line of it is malformed, or it contradicts itself; one sentence.
    """
    began_s = time.perf_counter()
    path = step_log_of(folder)
    reader = StepLogReader(path)
    run = _Replay(ReplayReport(source=path.resolve().parent.name), latency)
    try:
        for event in reader:
            run.take(event)
    except _DifferenceError as error:
        run.report.first_difference = error.difference
    run.finish()
    run.report.torn_line = reader.torn_line
    run.report.wall_s = time.perf_counter() - began_s
    return run.report


def policy_of(facts: Mapping[str, Any]) -> Policy:
    """The policy that a log names: any subclass of `Policy` that is loaded, by its name in lower case and its fields.

    Raises:
        ValueError: naming the policy or the field that is not known.
    """
    values = dict(facts)
    name = values.pop("name", None)
    known = {kind.__name__.lower(): kind for kind in _subclasses(Policy)}
    if name not in known:
        raise ValueError(f"the policy {name!r} is not one of {', '.join(sorted(known))}")
    kind = known[name]
    names = {each.name for each in fields(kind)}
    for key in values:
        if key not in names:
            raise ValueError(f"the policy {name} has no field {key}")
    return kind(**values)


class _DifferenceError(Exception):
    """Ends a replay."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.sentence)
        self.difference = difference


class _Replay:
    """The scheduler of the process at hand, and what has been found so far."""

    def __init__(self, report: ReplayReport, latency: LatencyModel | None) -> None:
        self.report = report
        self._latency = latency
        self._times = StepTimes()
        self._scheduler: Scheduler | None = None
        self._in_flight: deque[PlanEvent] = deque()
        # Who took each slot last, for sentences.
        self._keys: dict[int, Key] = {}
        self._next_step = 0
        self._first_start_s: float | None = None
        self._last_end_s = 0.0
        self._measured, self._predicted = array("d"), array("d")

    def take(self, event: Event) -> None:
        """Do what the event says and compare; raises _DifferenceError, or ValueError for a log that can't be."""
        if isinstance(event, ConfigEvent):
            self._begin(event)
        else:
            scheduler = self._scheduler
            assert scheduler is not None, "the reader lets nothing come before a config"
            if isinstance(event, PlanEvent | EmptyPlanEvent):
                self._plan(event, scheduler)
            elif isinstance(event, CommitEvent):
                self._commit(event, scheduler)
            elif isinstance(event, AddEvent):
                self._add(event, scheduler)
            elif isinstance(event, AbortEvent):
                self._abort(event, scheduler)
            elif isinstance(event, WeightsEvent):
                self._change_weights(event, scheduler)
            else:
                assert isinstance(event, AbandonEvent), event
                scheduler.abandon()
                self._in_flight.clear()
        if (measured := self._times.see(event)) is not None:
            self._measure(measured)

    def finish(self) -> None:
        """Bring the report up to what has been replayed."""
        self._end()
        if self._latency is not None:
            self.report.predicted = ErrorSummary.of(self._predicted, self._measured)

    def _begin(self, event: ConfigEvent) -> None:
        """Another process: a scheduler that knows nothing of what the one before left behind."""
        self._end()
        self.report.num_sessions += 1
        known = {each.name for each in fields(SchedulerConfig)}
        for key in event.limits:
            if key not in known:
                raise ValueError(f"line {event.line}: {key} is not a limit that is known: {', '.join(sorted(known))}")
        try:
            self._scheduler = Scheduler(SchedulerConfig(**event.limits), policy_of(event.policy))
        except (TypeError, ValueError) as error:
            raise ValueError(f"line {event.line}: {error}") from error
        self._in_flight.clear()
        self._keys.clear()
        self._next_step = 0
        self._first_start_s = None

    def _end(self) -> None:
        """Take what the process at hand did into the report."""
        if self._scheduler is not None:
            total = self.report.counters
            for name, count in asdict(self._scheduler.counters).items():
                before = getattr(total, name)
                setattr(total, name, max(before, count) if name.startswith("peak_") else before + count)
        if self._first_start_s is not None:
            self.report.recorded_span_s += self._last_end_s - self._first_start_s
        self._scheduler = self._first_start_s = None

    # Events

    def _add(self, event: AddEvent, scheduler: Scheduler) -> None:
        prompt = Prompt(event.prompt_token_ids)
        # No decision looks at anything else that a request asks for.
        params = SamplingParams(prompt_logprobs=0 if event.is_scored else None)
        requests = [
            Request(event.id, sample, prompt, params, seed, event.max_tokens)
            for sample, seed in zip(event.samples, event.seeds, strict=True)
        ]
        try:
            scheduler.add(requests)
        except ValueError as error:
            say = f"the log adds request {event.id!r}, which the scheduler refuses: {error}"
            self._differ(event, "add", event.id, None, say)

    def _abort(self, event: AbortEvent, scheduler: Scheduler) -> None:
        if not scheduler.abort(event.id, event.sample, event.reason):
            whose = f"request {event.id!r}" if event.sample is None else _named((event.id, event.sample))
            self._differ(event, "abort", whose, None, f"the log ends {whose}, which the scheduler does not hold")

    def _change_weights(self, event: WeightsEvent, scheduler: Scheduler) -> None:
        if self._in_flight:
            self._differ(event, "weights", 0, len(self._in_flight), "the log changes the weights under steps in flight")
        scheduler.change_weights()
        found = scheduler.weight_version
        if found != event.version:
            say = f"the weights have version {event.version} in the log, {found} in the replay"
            self._differ(event, "weights", event.version, found, say)

    def _plan(self, event: PlanEvent | EmptyPlanEvent, scheduler: Scheduler) -> None:
        depth = scheduler.config.depth
        if len(self._in_flight) >= depth:
            say = f"the log plans with {len(self._in_flight)} steps in flight, the depth is {depth}"
            self._differ(event, "in_flight", len(self._in_flight), depth, say)
        try:
            plan = scheduler.plan()
        except (RuntimeError, AssertionError) as error:
            self._differ(event, "plan", _size(event), None, f"the log has {_size(event)}, the scheduler fails: {error}")
        if isinstance(event, PlanEvent) and plan is not None:
            self._compare(event, plan)
            self._next_step += 1
            self._in_flight.append(event)
            self.report.num_steps += 1
        elif plan is not None or isinstance(event, PlanEvent):
            found = "nothing to compute" if plan is None else f"a step of {len(plan.slots)} sequences"
            self._differ(event, "plan", _size(event), found, f"the log has {_size(event)}, the scheduler {found}")
        else:
            self.report.num_empty_plans += 1

    def _commit(self, event: CommitEvent, scheduler: Scheduler) -> None:
        oldest = self._in_flight[0].step if self._in_flight else None
        if event.step != oldest:
            known = "none is in flight" if oldest is None else f"step {oldest} is the oldest in flight"
            self._differ(event, "commit", event.step, oldest, f"the log commits step {event.step}, but {known}")
        plan = self._in_flight.popleft()
        num_sampled = plan.logits.count(SAMPLE) + plan.logits.count(SAMPLE | SCORE)
        if num_sampled != len(event.tokens):
            raise ValueError(
                f"line {event.line} commits {len(event.tokens)} tokens, but line {plan.line} planned {num_sampled}"
            )
        scheduler.commit(StepResult(event.step, event.tokens, event.stopped, [], event.start_s, event.end_s))

    def _measure(self, step: MeasuredStep) -> None:
        self.report.recorded_step_s += step.step_s
        if self._first_start_s is None:
            self._first_start_s = step.start_s
        self._last_end_s = step.end_s
        if self._latency is not None and step.step_s > 0:
            self._measured.append(step.step_s)
            self._predicted.append(self._latency.step_s(step.shape))

    # Comparing

    def _compare(self, event: PlanEvent, plan: StepPlan) -> None:
        """Raise _DifferenceError for the first column in which the plans differ; what decides comes first."""
        if plan.step != event.step:
            self._differ(event, "step", event.step, plan.step, f"the scheduler calls it step {plan.step}")
        if plan.weight_version != event.weight_version:
            say = f"the weights have version {event.weight_version} in the log, {plan.weight_version} in the replay"
            self._differ(event, "weight_version", event.weight_version, plan.weight_version, say)
        started = [[s.slot, s.request.id, s.request.sample, s.num_cached, list(s.blocks)] for s in plan.started]
        lists: list[tuple[str, Sequence[Any], Sequence[Any]]] = [
            ("preempted", event.preempted, [list(key) for key in plan.preempted]),
            ("released", event.released, list(plan.released)),
            ("started", event.started, started),
        ]
        for what, expected, found in lists:
            if expected != found:
                self._differ_in(event, what, expected, found)
        self._keys.update((slot, (request_id, sample)) for slot, request_id, sample, _, _ in event.started)
        for what in ("slots", "starts", "lengths", "logits"):
            expected, found = getattr(event, what), getattr(plan, what)
            if expected != found and expected != list(found):
                self._differ_in(event, what, expected, list(found))
        appended = [list(pair) for pair in plan.appended]
        if event.appended != appended:
            self._differ_in(event, "appended", event.appended, appended)

    def _differ_in(self, event: PlanEvent, what: str, expected: Sequence[Any], found: Sequence[Any]) -> typing.NoReturn:
        """Report two lists that differ, by the first item that does."""
        row = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
        row = min(len(expected), len(found)) if row is None else row
        ours, theirs = (items[row] if row < len(items) else None for items in (expected, found))
        self._differ(event, what, ours, theirs, self._sentence(event, what, row, ours, theirs))

    def _sentence(self, event: PlanEvent, what: str, row: int, expected: Any, found: Any) -> str:
        """What differs in a column, in words; the items are None beyond the end of a list."""
        if what in ("starts", "lengths", "logits"):
            verb = {"starts": "starts at position", "lengths": "computes tokens:", "logits": "has the logits flags"}[
                what
            ]
            return f"{self._owner(event.slots[row])} {verb} {expected} in the log, {found} in the replay"
        if what == "started" and expected is not None and found is not None and expected[:3] == found[:3]:
            whose = _named((expected[1], expected[2]))
            if expected[3] != found[3]:
                return f"{whose} takes {expected[3]} tokens from the cache in the log, {found[3]} in the replay"
            if len(expected[4]) != len(found[4]):
                return f"{whose} starts with {len(expected[4])} blocks in the log, {len(found[4])} in the replay"
            place = next(i for i, (a, b) in enumerate(zip(expected[4], found[4], strict=True)) if a != b)
            return (
                f"{whose} starts with {expected[4][place]} as block {place} in the log, {found[4][place]} in the replay"
            )
        words: dict[str, Callable[[Any], str]] = {
            "preempted": lambda item: f"preempts {_named(item)}",
            "released": lambda item: f"releases slot {item}",
            "started": lambda item: f"starts {_named(item[1:3])} in slot {item[0]}",
            "slots": lambda item: f"computes {self._owner(item)}",
            "appended": lambda item: f"gives block {item[1]} to {self._owner(item[0])}",
        }
        none = {"preempted": "preempts", "released": "releases", "started": "starts", "slots": "computes"}
        ours, theirs = (
            f"{none.get(what, 'gives')} no more" if item is None else words[what](item) for item in (expected, found)
        )
        return f"the log {ours}, the scheduler {theirs}"

    def _owner(self, slot: int) -> str:
        return _named(self._keys[slot]) if slot in self._keys else f"slot {slot}"

    def _differ(self, event: Event, what: str, expected: Any, found: Any, sentence: str) -> typing.NoReturn:
        step = event.step if isinstance(event, PlanEvent | CommitEvent) else self._next_step
        process = f" of process {self.report.num_sessions}" if self.report.num_sessions > 1 else ""
        where = f"step {step}{process} (line {event.line})"
        session = self.report.num_sessions - 1
        raise _DifferenceError(Difference(session, event.line, step, what, expected, found, f"{where}: {sentence}"))


def _size(event: PlanEvent | EmptyPlanEvent) -> str:
    return f"a step of {len(event.slots)} sequences" if isinstance(event, PlanEvent) else "nothing to compute"


def _named(key: Sequence[Any]) -> str:
    return f"{key[0]!r} sample {key[1]}"


def _subclasses(kind: type[Policy]) -> Iterator[type[Policy]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)
