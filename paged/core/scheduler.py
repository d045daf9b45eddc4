"""Decides every step: whom to compute, admit, preempt and finish, and which blocks they use."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from paged.core.blocks import BlockPool
from paged.core.lengths import LengthHistory
from paged.core.limits import SchedulerConfig
from paged.core.memory import num_blocks_for
from paged.core.metrics import Counters
from paged.core.plan import NO_LOGITS, SAMPLE, SCORE, Started, StepPlan, StepResult
from paged.core.policy import Fifo, Load, Policy
from paged.core.request import Request
from paged.core.reuse import PrefixReuse
from paged.core.sequence import COMPLETE, FinishReason, Sequence, Status
from paged.core.steady import SteadyDecode


class NonFiniteLogitsError(FloatingPointError):
    """Logits of some sequences held a NaN; nothing was committed.

    The same result can be committed once these sequences are aborted.

    Attributes:
        requests: the requests concerned, in row order.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = tuple(requests)
        names = ", ".join(f"{request.id!r} sample {request.sample}" for request in self.requests)
        super().__init__(f"NaN in the logits of request {names}")


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a sequence.

    Attributes:
        request: what was asked for.
        reason: why it ended.
        num_output: committed output tokens.
        num_preemptions: times it was preempted.
        num_cached_tokens: tokens that its first admission took over from the cache.
    """

    request: Request
    reason: FinishReason
    num_output: int
    num_preemptions: int
    num_cached_tokens: int


class Commit(NamedTuple):
    """What committing a result changed; a tuple, because it is made for every step.

    Attributes:
        step: the result's.
        accepted: for each sampled row the request whose output grew by that token, or None if the row was dropped.
        finished: sequences that ended with this step, in row order.
    """

    step: int
    accepted: Seq[Request | None]
    finished: Seq[Finished]


# A plan handed out, the sequences of its rows, and the steady decoding that it belongs to, if any.
_InFlight = tuple[StepPlan, Seq[Sequence], SteadyDecode | None]


@dataclass(slots=True)
class _Draft:
    """Columns of the plan being made.

    Attributes:
        budget: tokens that may still be scheduled.
    """

    budget: int
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    logits: list[int] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    appended: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """Owner of all sequences and of the block pool; turns arrivals into plans and results into progress.

    The loop around it is: ``add`` and ``abort`` what arrived, ``plan``, submit the plan, and once ``depth`` plans
    are in flight, ``commit`` the result of the oldest. It never looks at a clock and draws no random numbers: the
    same calls give the same plans.

    While every running sequence decodes and nothing else happens, plans differ only in their starts. Such a stretch
    is a ``SteadyDecode``, which counts steps instead of touching every sequence; ``_settle`` brings the sequences up
    to date before anybody looks at them. It makes the same plans as ``_plan_running``, at a fraction of the cost.
    """

    def __init__(self, config: SchedulerConfig, policy: Policy | None = None) -> None:
        self.config = config
        self.policy = policy if policy is not None else Fifo()
        self.pool = BlockPool(config.num_blocks)
        self.counters = Counters()
        self.weight_version = 0
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._in_flight: deque[_InFlight] = deque()
        self._live: dict[str, dict[int, Sequence]] = {}
        self._reuse = PrefixReuse(self.pool, config.block_size, config.prefix_reuse)
        self._load = Load(self._running, self.pool, config.block_size, LengthHistory())
        self._steady: SteadyDecode | None = None
        # `num_leads_ended` of the reuse when every waiting sequence was found to wait for a leader: until it changes,
        # nobody can be admitted. -1 if that is not known, because the queue has changed since.
        self._all_follow_at = -1
        # The head of the queue, if the policy has refused it, and the number of blocks that it could adopt then. The
        # refusal holds until a running sequence leaves.
        self._refused: tuple[Sequence, int] | None = None
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._released: list[int] = []
        self._preempted: list[tuple[str, int]] = []

    # What is there

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for admission, preempted ones included."""
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans handed out and not committed."""
        return len(self._in_flight)

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence has not finished."""
        return bool(self._live)

    def is_live(self, request_id: str) -> bool:
        """Whether a sample of this request has not finished."""
        return request_id in self._live

    # What arrives

    def add(self, requests: Iterable[Request]) -> None:
        """Queue the samples of one request, all or none.

        Raises:
            ValueError: a prompt is empty, has an id outside the vocabulary or can never fit, or an (id, sample) is
                live already; nothing has changed.
        """
        batch = list(requests)
        for request in batch:
            self._check_request(request)
        if len({request.key for request in batch}) < len(batch):
            raise ValueError(f"id {batch[0].id!r} is given twice for the same sample")
        self._all_follow_at = -1
        for request in batch:
            sequence = Sequence(request)
            self.counters.num_added += 1
            self._live.setdefault(request.id, {})[request.sample] = sequence
            self._waiting.append(sequence)

    def abort(
        self, request_id: str, sample: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> list[Finished]:
        """End all samples of a request, or one of them, now; its tokens in flight are dropped.

        An unknown or finished request is no error and gives an empty list.
        """
        samples = self._live.get(request_id, {})
        chosen = list(samples.values()) if sample is None else [samples[sample]] if sample in samples else []
        return [self._finish(sequence, reason) for sequence in chosen]

    # The loop

    def plan(self) -> StepPlan | None:
        """Decide the next step; None if there is nothing to compute until a result is committed or a request added.

        Decodes come first, oldest first, then chunks of what is partly computed, then admissions.

        Raises:
            RuntimeError: unfinished sequences exist, but neither this plan nor one in flight advances any.
        """
        assert len(self._in_flight) < self.config.depth, "commit a result before planning on"
        steady = self._steady or self._begin_steady()
        plan = self._plan_steadily(steady) if steady is not None else None
        return plan if plan is not None else self._plan_anew()

    def commit(self, result: StepResult) -> Commit:
        """Take in the result of the oldest plan in flight: append tokens, publish blocks, finish what ended.

        Raises:
            NonFiniteLogitsError: a live sequence's logits held a NaN; nothing has changed, the plan is still in
                flight, and the same result can be committed once the sequences named are aborted.
        """
        plan, sequences, steady = self._in_flight[0]
        assert result.step == plan.step, f"result of step {result.step}, expected {plan.step}"
        tokens, stopped = result.tokens, result.stopped
        if result.nan_rows:
            rows = (sequences[row] for row in result.nan_rows)
            failed = [sequence.request for sequence in rows if sequence.status is not Status.FINISHED]
            if failed:
                raise NonFiniteLogitsError(failed)
        elif steady is not None and steady is self._steady and True not in stopped:
            assert len(stopped) == len(sequences), "one stop flag for each sampled row"
            self._in_flight.popleft()
            for sequence in steady.commit(tokens):
                if self._reuse.is_enabled:
                    self._reuse.publish(sequence, steady.num_computed_of(sequence))
            return Commit(plan.step, steady.requests, ())
        self._in_flight.popleft()
        self._settle()
        if steady is self._steady:
            self._steady = None
        accepted: list[Request | None] = []
        finished: list[Finished] = []
        row = 0
        for sequence, length, logits in zip(sequences, plan.lengths, plan.logits, strict=True):
            sequence.num_in_flight -= 1
            status = sequence.status
            if status is Status.RUNNING:
                sequence.num_computed += length
                if logits & SCORE and sequence.num_computed >= sequence.num_prompt - 1:
                    sequence.is_scored = True
                if sequence.num_computed >= sequence.publish_at:
                    self._reuse.publish(sequence, sequence.num_computed)
            if logits & SAMPLE:
                if status is Status.FINISHED:
                    accepted.append(None)
                    self.counters.dropped_tokens += 1
                else:
                    if tokens is not None:
                        sequence.output_ids.append(tokens[row])
                    sequence.num_output += 1
                    accepted.append(sequence.request)
                    if stopped[row]:
                        finished.append(self._finish(sequence, FinishReason.STOP))
                    elif sequence.num_committed == sequence.max_tokens_total:
                        finished.append(self._finish(sequence, FinishReason.LENGTH))
                row += 1
        assert row == len(stopped), "one stop flag for each sampled row"
        assert tokens is None or row == len(tokens), "one token for each sampled row"
        return Commit(plan.step, accepted, finished)

    def abandon(self) -> None:
        """Drop every plan in flight after an executor failed; running sequences wait again, in order, as committed."""
        self._end_steady()
        self._in_flight.clear()
        for samples in self._live.values():
            for sequence in samples.values():
                sequence.num_in_flight = 0
        for sequence in reversed(self._running[:]):
            self._evict(sequence)
        for sequence in self._waiting:
            sequence.num_tokens = sequence.num_committed

    def check(self) -> None:
        """Prove that the books are consistent; AssertionError says what is not. For tests and idle moments."""
        self._settle()
        self.pool.check(sequence.blocks for sequence in self._running)
        live = [sequence for samples in self._live.values() for sequence in samples.values()]
        assert len(live) == len(self._waiting) + len(self._running), "a sequence is lost"
        for sequence in live:
            waiting = sequence.status is Status.WAITING
            assert sequence in (self._waiting if waiting else self._running), f"{sequence} is in the wrong list"
            assert waiting == (sequence.slot < 0), f"{sequence} and its slot disagree"
            assert not (waiting and sequence.blocks), f"{sequence} waits and holds blocks"
            assert sequence.num_computed <= sequence.num_scheduled <= sequence.num_tokens < sequence.max_tokens_total
            assert waiting or sequence.num_scheduled <= len(sequence.blocks) * self.config.block_size
        taken = [sequence.slot for sequence in self._running]
        assert sorted(taken + self._free_slots) == list(range(self.config.max_num_seqs)), "slots disagree"
        self._reuse.check(self._running)

    def change_weights(self) -> None:
        """Count up the weight version: nothing computed so far is used again.

        Running sequences wait again, in order, with the tokens they have, and are computed anew when they are
        admitted. To be called with no plan in flight.
        """
        assert not self._in_flight, "commit what is in flight before the weights change"
        self._end_steady()
        self.weight_version += 1
        for sequence in reversed(self._running[:]):
            self._evict(sequence)
        for sequence in self._waiting:
            sequence.keys = []
            sequence.waits_for = None
        self._all_follow_at = -1
        self._reuse.forget(self.weight_version)

    # Planning

    def _plan_anew(self) -> StepPlan | None:
        """The next step by a look at every running sequence; None if there is nothing to compute now."""
        draft = _Draft(self.config.max_step_tokens)
        # An earlier attempt that came to nothing may have preempted; only this one's victims forbid admissions.
        num_preempted = len(self._preempted)
        self._plan_running(draft)
        if self._waiting and len(self._preempted) == num_preempted:
            self._admit(draft)
        if draft.slots:
            return self._hand_out_draft(draft)
        if self._live and not self._in_flight:
            raise RuntimeError(f"no sequence can make progress: {self._describe()}")
        return None

    def _plan_running(self, draft: _Draft) -> None:
        """Rows of running sequences: decodes, then chunks. Only decodes can need a block and so preempt."""
        block_size = self.config.block_size
        references = self.pool.references
        partly_computed: list[Sequence] = []
        for sequence in self._running[:]:
            position = sequence.num_scheduled
            remaining = sequence.num_tokens - position
            if remaining != 1:
                if remaining > 1:
                    partly_computed.append(sequence)
                continue
            if draft.budget == 0:
                return
            if self._preempted and sequence.status is not Status.RUNNING:
                continue
            if position == len(sequence.blocks) * block_size and not self._grow(sequence, draft):
                continue
            if references[sequence.blocks[-1]] != 1:
                self.pool.check_writable(sequence.blocks[-1:])
            if position < sequence.num_forwarded or position < sequence.num_prompt:
                self._add_chunk(sequence, draft)
                continue
            # A plain decode; `_add_chunk` spelled out for a row of one token.
            draft.budget -= 1
            draft.slots.append(sequence.slot)
            draft.starts.append(position)
            draft.lengths.append(1)
            draft.logits.append(SAMPLE)
            draft.sequences.append(sequence)
            sequence.num_scheduled = sequence.num_forwarded = position + 1
            sequence.num_in_flight += 1
            if position + 2 < sequence.max_tokens_total:
                sequence.num_tokens = position + 2
        for sequence in partly_computed:
            if draft.budget == 0:
                return
            if sequence.status is Status.RUNNING:
                self._add_chunk(sequence, draft)

    def _add_chunk(self, sequence: Sequence, draft: _Draft) -> None:
        """Schedule the next tokens of ``sequence``, whose blocks are there; the chunk that reaches the end samples."""
        start = sequence.num_scheduled
        length = min(sequence.num_tokens - start, self.config.chunk_size, draft.budget)
        end = start + length
        block_size = self.config.block_size
        self.pool.check_writable(sequence.blocks[start // block_size : num_blocks_for(end, block_size)])
        logits = NO_LOGITS
        if end == sequence.num_tokens:
            logits |= SAMPLE
            if end + 1 < sequence.max_tokens_total:
                sequence.num_tokens = end + 1
        # A prompt's tokens are scored at the positions before them, once unless that is interrupted.
        last = sequence.num_prompt - 1
        if sequence.request.params.prompt_logprobs is not None and start < last and not sequence.is_scored:
            logits |= SCORE
        draft.budget -= length
        draft.slots.append(sequence.slot)
        draft.starts.append(start)
        draft.lengths.append(length)
        draft.logits.append(logits)
        draft.sequences.append(sequence)
        self.counters.recomputed_tokens += max(0, min(end, sequence.num_forwarded) - start)
        sequence.num_scheduled = end
        sequence.num_forwarded = max(sequence.num_forwarded, end)
        sequence.num_in_flight += 1

    def _grow(self, sequence: Sequence, draft: _Draft) -> bool:
        """Give ``sequence`` one more block, preempting if need be; False if it was its own victim."""
        while self.pool.num_free == 0:
            scheduled = set(draft.slots)
            candidates = [other for other in self._running[1:] if other.slot not in scheduled]
            assert candidates, f"the oldest sequence does not fit, though it was admitted: {sequence}"
            victim = self.policy.choose_victim(candidates)
            assert victim in candidates, f"the policy chose {victim}, which is not a candidate"
            self._preempted.append(victim.request.key)
            self.counters.num_preemptions += 1
            victim.num_preemptions += 1
            self._evict(victim)
            if victim is sequence:
                return False
        block = self.pool.allocate(1)[0]
        sequence.blocks.append(block)
        draft.appended.append((sequence.slot, block))
        return True

    def _admit(self, draft: _Draft) -> None:
        """Start waiting sequences in order while slots, budget and blocks last.

        A sequence whose prefix a running leader is computing lets those behind it pass until that is done.
        """
        pool, policy, load = self.pool, self.policy, self._load
        if self._all_follow_at == self._reuse.num_leads_ended:
            return
        passed: list[Sequence] = []
        try:
            while self._waiting and draft.budget and self._free_slots:
                sequence = self._waiting[0]
                if sequence.num_in_flight:
                    break
                adopted = self._reuse.match(sequence)
                if adopted is None:
                    passed.append(self._waiting.popleft())
                    continue
                available = pool.num_free - sum(1 for block in adopted if pool.references[block] == 0)
                if num_blocks_for(sequence.num_tokens, load.block_size) - len(adopted) > available:
                    break
                # Until somebody leaves, the policy would see the same sequences with more blocks.
                if self._refused == (sequence, len(adopted)):
                    break
                self._settle()
                margin = policy.blocks_kept_free(sequence, load) if self._running else 0
                if policy.blocks_to_admit(sequence, load) - len(adopted) + margin > available:
                    self._refused = sequence, len(adopted)
                    break
                self._waiting.popleft()
                self._start(sequence, adopted, draft)
            if not self._waiting:
                self._all_follow_at = self._reuse.num_leads_ended
        finally:
            # Also when a policy raises: nobody may fall out of the queue.
            self._waiting.extendleft(reversed(passed))

    def _start(self, sequence: Sequence, adopted: list[int], draft: _Draft) -> None:
        """Admit ``sequence``: adopt, allocate the blocks of all its tokens, and schedule the first chunk."""
        self._end_steady()
        block_size = self.config.block_size
        self.pool.adopt(adopted)
        missing = num_blocks_for(sequence.num_tokens, block_size) - len(adopted)
        sequence.blocks = adopted + self.pool.allocate(missing)
        num_cached = len(adopted) * block_size
        sequence.num_scheduled = sequence.num_computed = num_cached
        sequence.num_published = len(adopted)
        sequence.status = Status.RUNNING
        sequence.slot = self._free_slots.pop()
        if sequence.num_forwarded == 0:
            sequence.num_cached_tokens = num_cached
        # What is taken over again after a preemption is neither recomputed nor saved from the minimum.
        self.counters.cached_tokens += max(0, num_cached - sequence.num_forwarded)
        self._running.append(sequence)
        self._reuse.lead(sequence)
        draft.started.append(
            Started(
                sequence.slot,
                sequence.request,
                tuple(sequence.output_ids),
                sequence.num_output,
                tuple(sequence.blocks),
                num_cached,
            )
        )
        self._add_chunk(sequence, draft)

    # Steady decoding

    def _plan_steadily(self, steady: SteadyDecode) -> StepPlan | None:
        """The next step of a steady decoding; None if it cannot go on, and has ended."""
        appended = steady.grow(self.pool)
        if appended is None:
            self._end_steady()
            return None
        starts = steady.advance()
        if self._waiting:
            draft = self._admit_beside(steady, starts, appended)
            if draft is not None:
                return self._hand_out_draft(draft)
        columns = steady.slots, starts, steady.lengths, steady.logits
        return self._hand_out(columns, steady.sequences, (), appended, len(starts))

    def _begin_steady(self) -> SteadyDecode | None:
        """A steady decoding of all that runs, if it may begin now."""
        if 0 < len(self._running) <= self.config.max_step_tokens:
            self._steady = SteadyDecode.begin(self._running, self.pool, self.config.block_size)
        return self._steady

    def _admit_beside(self, steady: SteadyDecode, starts: Seq[int], appended: Seq[tuple[int, int]]) -> _Draft | None:
        """The plan of a steady decoding's rows and of admissions, which end it; None if nobody is admitted."""
        draft = _Draft(self.config.max_step_tokens - len(starts))
        self._admit(draft)
        if not draft.slots:
            return None
        return _Draft(
            draft.budget,
            [*steady.slots, *draft.slots],
            [*starts, *draft.starts],
            [*steady.lengths, *draft.lengths],
            [*steady.logits, *draft.logits],
            [*steady.sequences, *draft.sequences],
            draft.started,
            list(appended),
        )

    def _settle(self) -> None:
        """Bring the sequences of a steady decoding up to date."""
        if self._steady is not None:
            self._steady.settle()

    def _end_steady(self) -> None:
        """Go on step by step: what is in flight is committed row by row."""
        if self._steady is not None:
            self._steady.settle()
            self._steady = None

    # Handing out

    def _hand_out_draft(self, draft: _Draft) -> StepPlan:
        columns = draft.slots, draft.starts, draft.lengths, draft.logits
        num_tokens = self.config.max_step_tokens - draft.budget
        return self._hand_out(columns, draft.sequences, draft.started, draft.appended, num_tokens)

    def _hand_out(
        self,
        columns: tuple[Seq[int], Seq[int], Seq[int], Seq[int]],
        sequences: Seq[Sequence],
        started: Seq[Started],
        appended: Seq[tuple[int, int]],
        num_tokens: int,
    ) -> StepPlan:
        """Make the plan, count it and put it in flight; what it holds is never changed again."""
        released: Seq[int] = ()
        preempted: Seq[tuple[str, int]] = ()
        if self._released:
            released, self._released = self._released, []
        if self._preempted:
            preempted, self._preempted = self._preempted, []
        counters = self.counters
        plan = StepPlan(counters.num_steps, self.weight_version, released, started, appended, *columns, preempted)
        counters.num_steps += 1
        counters.forward_tokens += num_tokens
        if appended or started:
            counters.peak_blocks = max(counters.peak_blocks, self.pool.num_used)
        self._in_flight.append((plan, sequences, self._steady))
        return plan

    # Leaving

    def _evict(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue's front with its tokens, without its blocks."""
        self._leave(sequence)
        self._all_follow_at = -1
        sequence.status = Status.WAITING
        sequence.num_scheduled = sequence.num_computed = sequence.num_published = 0
        self._waiting.appendleft(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Finished:
        """End a sequence, running or waiting, and take it out of the books."""
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
        else:
            self._waiting.remove(sequence)
            self._all_follow_at = -1
        sequence.status = Status.FINISHED
        request = sequence.request
        samples = self._live[request.id]
        del samples[request.sample]
        if not samples:
            del self._live[request.id]
        counters = self.counters
        counters.num_finished += 1
        counters.prompt_tokens += sequence.num_prompt
        counters.output_tokens += sequence.num_output
        counters.minimal_forward_tokens += sequence.num_committed - 1
        if reason in COMPLETE:
            self._load.lengths.add(sequence.num_output, reason is FinishReason.STOP)
        return Finished(request, reason, sequence.num_output, sequence.num_preemptions, sequence.num_cached_tokens)

    def _leave(self, sequence: Sequence) -> None:
        """Give back the blocks and the slot of a running sequence."""
        self._end_steady()
        self._refused = None
        self._running.remove(sequence)
        self.pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.publish_at = math.inf
        self._released.append(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        self._reuse.leave(sequence)

    # Refusals and reports

    def _check_request(self, request: Request) -> None:
        if request.sample in self._live.get(request.id, {}):
            raise ValueError(f"id {request.id!r} is in use by a request that has not finished")
        self.config.check(request)

    def _describe(self) -> str:
        return (
            f"{len(self._running)} running, {len(self._waiting)} waiting, "
            f"{self.pool.num_free} of {self.pool.num_blocks} blocks free"
        )
