"""A device without tensors that checks every KV read, and the loop that drives a scheduler against it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from paged.core.blocks import BlockPool
from paged.core.limits import SchedulerConfig
from paged.core.plan import SAMPLE, SCORE, StepPlan, StepResult
from paged.core.policy import Policy
from paged.core.prompt import Prompt
from paged.core.request import Request, SamplingParams, sample_seed
from paged.core.scheduler import Commit, Finished, NonFiniteLogitsError, Scheduler
from paged.core.sequence import FinishReason, Status
from paged.core.sequence import Sequence as Seq

_MASK = 2**64 - 1
ROOT = 0x243F6A8885A308D3  # the identity of the empty prefix
POISON = -1  # an identity that no prefix has

Key = tuple[str, int]


def mix(a: int, b: int) -> int:
    """64 bits that depend on both numbers and their order (splitmix64's finalizer); the same everywhere."""
    x = (a ^ ((b + 1) * 0x9E3779B97F4A7C15)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@dataclass(frozen=True)
class MockModel:
    """A language model made of hashes: the next token depends on the whole prefix, the seed and the position alone.

    Attributes:
        vocab_size: sampled ids lie below it.
        stop_every: a token stops its sequence with probability 1 / stop_every; 0 for never.
    """

    vocab_size: int = 50
    stop_every: int = 0

    def next_token(self, identity: int, seed: int, position: int) -> int:
        return mix(mix(identity, seed), position) % self.vocab_size

    def stops(self, identity: int, seed: int) -> bool:
        """Whether the sampled token, the last one of the prefix with this identity, ends the sequence."""
        return self.stop_every > 0 and mix(mix(identity, seed), 0x5709) % self.stop_every == 0

    def reference(self, request: Request) -> tuple[list[int], FinishReason]:
        """Output and finish reason of ``request`` computed alone, without any cache."""
        identity = ROOT
        for token in request.prompt.token_ids or ():
            identity = mix(identity, token)
        output: list[int] = []
        while True:
            token = self.next_token(identity, request.seed, len(request.prompt) + len(output))
            identity = mix(identity, token)
            output.append(token)
            if self.stops(identity, request.seed):
                return output, FinishReason.STOP
            if len(output) == request.max_tokens:
                return output, FinishReason.LENGTH


@dataclass
class _Slot:
    """What the device knows of a sequence: ``identities[i]`` is the one that position i must hold in the cache."""

    request: Request
    blocks: list[int]
    computed: int
    tokens: list[int] = field(default_factory=list)
    identities: list[int] = field(default_factory=list)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.identities.append(mix(self.identities[-1] if self.identities else ROOT, token))


class MockDevice:
    """An ``Executor`` whose KV cells hold the identity of the prefix that they were computed from.

    The cell of (block, offset) is ``cells[block * block_size + offset]``. A row reads the cells of all earlier
    positions and demands its own prefix in them, then derives what it writes from the cell before. A block that is
    wrong, stale, not computed yet or handed out too early thus fails at the read, and the tokens that come out
    equal ``MockModel.reference`` only if every read was right. Nothing is cleaned when blocks are freed.

    Args:
        eager: execute at ``submit``, as soon as possible, instead of at ``collect``, as late as possible.
        poison: overwrite a block's cells when it comes into a table without being taken over from the cache.
    """

    def __init__(
        self, model: MockModel, num_blocks: int, block_size: int, *, eager: bool = False, poison: bool = False
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.eager = eager
        self.poison = poison
        self.cells = [POISON] * (num_blocks * block_size)
        self.slots: dict[int, _Slot] = {}
        self.nan_requests: set[Key] = set()
        self.num_rows = 0
        self._holders: Counter[int] = Counter()
        self._plans: deque[StepPlan] = deque()
        self._results: deque[StepResult] = deque()
        self._forgotten: set[int] = set()
        self._last_step = -1

    # Executor

    def submit(self, plan: StepPlan) -> None:
        # What the scheduler does to its lists later must not matter.
        plan = StepPlan(*(list(value) if isinstance(value, list) else value for value in plan))
        if self.eager:
            self._results.append(self._execute(plan))
        else:
            self._plans.append(plan)

    def collect(self) -> StepResult:
        return self._results.popleft() if self.eager else self._execute(self._plans.popleft())

    def abandon(self) -> None:
        """Forget plans and slots, and leave garbage wherever the forgotten plans wrote or were about to write."""
        self._forgotten.update(self.slots)
        for plan in self._plans:
            self._forgotten.update(started.slot for started in plan.started)
        for slot in self.slots.values():
            for position in range(slot.computed, len(slot.blocks) * self.block_size):
                self.cells[self._cell(slot, position)] = POISON
        self._plans.clear()
        self._results.clear()
        self.slots.clear()
        self._holders.clear()

    # Execution

    def _cell(self, slot: _Slot, position: int) -> int:
        return slot.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _execute(self, plan: StepPlan) -> StepResult:
        assert plan.step > self._last_step, "steps out of order"
        self._last_step = plan.step
        self._apply_differences(plan)
        assert plan.slots, "an empty step"
        assert len(set(plan.slots)) == len(plan.slots), "two rows of one slot"
        tokens: list[int] = []
        stopped: list[bool] = []
        nan_rows: list[int] = []
        scored: list[tuple[Key, int, int]] = []
        columns = zip(plan.slots, plan.starts, plan.lengths, plan.logits, strict=True)
        for row, (number, start, length, logits) in enumerate(columns):
            slot = self.slots[number]
            end = start + length
            assert length >= 1, f"row {row} computes nothing"
            assert start == slot.computed, f"row {row} starts at {start}, computed are {slot.computed}"
            assert end <= len(slot.tokens), f"row {row} feeds a token that nobody knows"
            assert bool(logits & SAMPLE) == (end == len(slot.tokens)), f"row {row} samples at the wrong place"
            self._read(slot, start)
            identity = self._write(slot, start, end)
            slot.computed = end
            self.num_rows += 1
            if logits & SCORE:
                scored.append((slot.request.key, start, length))
            if slot.request.key in self.nan_requests:
                nan_rows.append(row)
            if logits & SAMPLE:
                token = self.model.next_token(identity, slot.request.seed, end)
                slot.append(token)
                tokens.append(token)
                stopped.append(self.model.stops(slot.identities[-1], slot.request.seed))
        return StepResult(plan.step, tokens, stopped, nan_rows, float(plan.step), plan.step + 1.0, scored)

    def _apply_differences(self, plan: StepPlan) -> None:
        for number in plan.released:
            # A failed executor has forgotten its slots; the scheduler cannot know and releases them once.
            if number not in self.slots:
                assert number in self._forgotten, f"slot {number} is released, but holds nothing"
            else:
                self._holders.subtract(self.slots.pop(number).blocks)
        self._forgotten.clear()
        for started in plan.started:
            assert started.slot not in self.slots, f"slot {started.slot} is started twice"
            slot = _Slot(started.request, list(started.blocks), started.num_cached)
            for token in (*(started.request.prompt.token_ids or ()), *started.output_ids):
                slot.append(token)
            assert started.num_cached % self.block_size == 0, "a partial block was adopted"
            assert started.num_cached < len(slot.tokens), "nothing is left to compute"
            assert len(slot.blocks) == -(-len(slot.tokens) // self.block_size), "not the blocks of all tokens"
            for block in slot.blocks[started.num_cached // self.block_size :]:
                self._take(block)
            self._holders.update(slot.blocks)
            self.slots[started.slot] = slot
        for number, block in plan.appended:
            self._take(block)
            self._holders[block] += 1
            self.slots[number].blocks.append(block)

    def _take(self, block: int) -> None:
        assert self._holders[block] == 0, f"block {block} is handed out, but a live table holds it"
        if self.poison:
            self.cells[block * self.block_size : (block + 1) * self.block_size] = [POISON] * self.block_size

    def _read(self, slot: _Slot, end: int) -> None:
        size = self.block_size
        for first in range(0, end, size):
            count = min(size, end - first)
            cell = slot.blocks[first // size] * size
            assert self.cells[cell : cell + count] == slot.identities[first : first + count], (
                f"request {slot.request.key} reads foreign keys and values in block {slot.blocks[first // size]}, "
                f"positions {first} to {first + count - 1}"
            )

    def _write(self, slot: _Slot, start: int, end: int) -> int:
        """Compute positions from the cell before them; the identity of the last one."""
        identity = self.cells[self._cell(slot, start - 1)] if start else ROOT
        for position in range(start, end):
            block = slot.blocks[position // self.block_size]
            assert self._holders[block] == 1, f"block {block} is written, but more than one table holds it"
            identity = mix(identity, slot.tokens[position])
            self.cells[self._cell(slot, position)] = identity
        return identity


def ask(request_id: str, prompt: Prompt | Sequence[int], max_tokens: int, *, sample: int = 0, **params: Any) -> Request:
    """One request as an engine would make it."""
    prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
    seed = sample_seed(request_id, None, sample)
    return Request(request_id, sample, prompt, SamplingParams(max_tokens=max_tokens, **params), seed, max_tokens)


def setup(
    num_blocks: int,
    block_size: int,
    *,
    policy: Policy | None = None,
    stop_every: int = 0,
    eager: bool = False,
    poison: bool = True,
    **limits: Any,
) -> tuple[Scheduler, MockDevice]:
    """A scheduler and a device of the same size."""
    config = SchedulerConfig(num_blocks=num_blocks, block_size=block_size, **limits)
    device = MockDevice(MockModel(stop_every=stop_every), num_blocks, block_size, eager=eager, poison=poison)
    return Scheduler(config, policy), device


def snapshot(scheduler: Scheduler) -> dict[str, Any]:
    """Everything that a scheduler knows, as a value that does not change with it."""
    scheduler._settle()
    live = [sequence for samples in scheduler._live.values() for sequence in samples.values()]
    state = {name: value for name, value in vars(scheduler).items() if name not in ("_live", "config", "policy")}
    frozen = {name: _freeze(value) for name, value in state.items()}
    return frozen | {"live": [_freeze(sequence, deep=True) for sequence in live]}


def _freeze(value: Any, *, deep: bool = False) -> Any:
    if isinstance(value, Seq) and not deep:
        return id(value)
    if isinstance(value, Seq | BlockPool) or (is_dataclass(value) and not isinstance(value, Request)):
        return [(name, _freeze(getattr(value, name, None))) for name in getattr(type(value), "__slots__")]  # noqa: B009
    if isinstance(value, Mapping):
        return [(key, _freeze(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return [_freeze(item) for item in value]
    return value


@dataclass
class Outcome:
    """A request that was added, the tokens that commits reported for it, and how it ended."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def reason(self) -> FinishReason | None:
        return self.finished.reason if self.finished else None


@dataclass
class Run:
    """What driving a scheduler gave.

    Attributes:
        outcomes: of all requests, in the order they were added; an id may come again after its end.
        plans: all plans in order, those abandoned included.
        results: those committed.
        states: where each aborted request was at that moment.
        num_abandoned: plans dropped in flight.
        num_ticks: turns of the loop.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    states: list[tuple[int, Key, str]] = field(default_factory=list)
    num_abandoned: int = 0
    num_ticks: int = 0
    _current: dict[Key, Outcome] = field(default_factory=dict)

    def of(self, request_id: str, sample: int = 0) -> Outcome:
        """The latest outcome of an id."""
        return self._current[request_id, sample]

    def outputs(self) -> dict[Key, list[int]]:
        return {key: outcome.tokens for key, outcome in self._current.items()}

    def add(self, request: Request) -> None:
        outcome = Outcome(request)
        self.outcomes.append(outcome)
        self._current[request.key] = outcome

    def finish(self, finished: Finished) -> None:
        outcome = self._current[finished.request.key]
        assert outcome.finished is None, f"{finished.request.key} finished twice"
        assert finished.num_output == len(outcome.tokens), "a token was not reported, or reported twice"
        outcome.finished = finished


def drive(
    scheduler: Scheduler,
    device: MockDevice,
    arrivals: Mapping[int, Sequence[Sequence[Request]]],
    *,
    aborts: Mapping[int, Sequence[tuple[str, int | None]]] | None = None,
    late_aborts: Mapping[int, Sequence[tuple[str, int | None]]] | None = None,
    abandons: Collection[int] = (),
    before_plan: Callable[[int, Scheduler], None] | None = None,
    max_ticks: int = 20_000,
) -> Run:
    """Run until everything has ended, with ``check()`` after every event, and prove that nothing is left over.

    Args:
        arrivals: by turn of the loop, the batches given to ``add``.
        aborts: by turn, whom to abort before the arrivals.
        late_aborts: the same, but between submitting a plan and collecting a result.
        abandons: turns that begin with a failed executor.
        before_plan: called in every turn, for what a test wants to look at.
    """
    run = Run()
    aborts, late_aborts = aborts or {}, late_aborts or {}
    last = max([-1, *arrivals, *aborts, *late_aborts, *abandons])
    config = scheduler.config
    tick = -1
    while scheduler.has_unfinished or scheduler.num_in_flight or tick < last:
        tick += 1
        assert tick < max_ticks, f"no end in sight: {scheduler._describe()}"
        if tick in abandons:
            run.num_abandoned += scheduler.num_in_flight
            device.abandon()
            scheduler.abandon()
            scheduler.check()
            assert not scheduler.num_in_flight
            assert not scheduler.num_running
        _abort(scheduler, run, tick, aborts.get(tick, ()))
        for batch in arrivals.get(tick, ()):
            scheduler.add(batch)
            scheduler.check()
            for request in batch:
                run.add(request)
        if before_plan is not None:
            before_plan(tick, scheduler)
        plan = scheduler.plan()
        scheduler.check()
        if plan is not None:
            assert 0 < plan.num_tokens <= config.max_step_tokens
            assert max(plan.lengths) <= config.chunk_size
            assert len(plan.slots) <= config.max_num_seqs
            # (A deeper pipeline may name in a plan whom an attempt to plan, which came to nothing, preempted before.)
            assert config.depth > 1 or not (plan.started and plan.preempted), "a plan that preempts admits nobody"
            run.plans.append(plan)
            device.submit(plan)
        _abort(scheduler, run, tick, late_aborts.get(tick, ()))
        if scheduler.num_in_flight == config.depth or (plan is None and scheduler.num_in_flight):
            result = device.collect()
            run.results.append(result)
            take_in(scheduler, run, result)
    run.num_ticks = tick + 1
    assert_idle(scheduler)
    assert all(outcome.finished for outcome in run.outcomes)
    return run


def take_in(scheduler: Scheduler, run: Run, result: StepResult) -> Commit:
    """Commit a result; requests with NaN end as errors, as an engine does it."""
    try:
        commit = scheduler.commit(result)
    except NonFiniteLogitsError as error:
        for request in error.requests:
            for finished in scheduler.abort(request.id, request.sample, FinishReason.ERROR):
                run.finish(finished)
        commit = scheduler.commit(result)
    scheduler.check()
    assert len(commit.accepted) == len(result.tokens)
    for token, taker in zip(result.tokens, commit.accepted, strict=True):
        if taker is not None:
            run.of(taker.id, taker.sample).tokens.append(token)
    for finished in commit.finished:
        run.finish(finished)
    return commit


def assert_idle(scheduler: Scheduler) -> None:
    """Nothing runs, waits or holds anything."""
    scheduler.check()
    assert not scheduler.has_unfinished
    assert scheduler.num_running == scheduler.num_waiting == scheduler.num_in_flight == 0
    assert scheduler.pool.num_free == scheduler.pool.num_blocks, "a block did not come back"
    assert not any(scheduler.pool.references)
    assert not scheduler._reuse._leaders, "a leader was not removed"
    assert scheduler.counters.num_added == scheduler.counters.num_finished


def verify(run: Run, model: MockModel) -> None:
    """Every output is what the request gives alone; of those cut short a beginning of it."""
    for outcome in run.outcomes:
        tokens, reason = model.reference(outcome.request)
        if outcome.reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert outcome.tokens == tokens[: len(outcome.tokens)], f"{outcome.request.key} is no beginning"
        else:
            assert outcome.tokens == tokens, f"{outcome.request.key} differs"
            assert outcome.reason == reason


def state_of(scheduler: Scheduler, request_id: str, sample: int = 0) -> str:
    """Where a live request is: waiting, preempted, prefill or decode, with ' in flight' where rows of it are."""
    sequence = scheduler._live[request_id][sample]
    if sequence.status is Status.WAITING:
        name = "preempted" if sequence.num_forwarded else "waiting"
    else:
        name = "prefill" if sequence.num_scheduled < sequence.num_prompt else "decode"
    return name + " in flight" * (sequence.num_in_flight > 0)


def _abort(scheduler: Scheduler, run: Run, tick: int, whom: Iterable[tuple[str, int | None]]) -> None:
    for request_id, sample in whom:
        samples = list(scheduler._live.get(request_id, {})) if sample is None else [sample]
        for number in samples:
            if number in scheduler._live.get(request_id, {}):
                run.states.append((tick, (request_id, number), state_of(scheduler, request_id, number)))
        for finished in scheduler.abort(request_id, sample):
            run.finish(finished)
        scheduler.check()
