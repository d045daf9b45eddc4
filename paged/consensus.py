"""Ranks that decide alike and prove it: rank 0 says what it did, the others do the same, and all compare before a step.

Rank 0 hears the caller and records each change of its scheduler. Before a step that record goes to the other ranks,
which repeat it on schedulers of their own, and every rank states its plan and a digest of all that was committed.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from paged.core.agreement import Ledger, Statement, TPDesyncError, TPError, difference, statement_of
from paged.core.plan import StepPlan, StepResult
from paged.core.request import Request
from paged.core.scheduler import NonFiniteLogitsError, Scheduler
from paged.core.sequence import FinishReason
from paged.interrupts import DeferredInterrupt
from paged.kernels.collectives import RankGroup
from paged.runner.links import Failure, Link
from paged.runner.payload import StepPayload
from paged.runner.ranks import LAST_WORDS_S, Ranks, is_exchange_error
from paged.runner.runner import TorchRunner
from paged.runner.shared_weights import SharedWeights, shared_weights
from paged.runner.watch import Watch


@dataclass(frozen=True, slots=True)
class Orders:
    """What rank 0 sends before a step.

    Attributes:
        record: calls of methods of ``Follower``, in order: a name and its arguments.
        is_observed: whether rank 0 looks at whole rows of logits, which all ranks then gather.
        is_verified: whether an answer is wanted: the rank's ``Statement``, which a ``Verdict`` follows.
    """

    record: list[tuple[Any, ...]]
    is_observed: bool
    is_verified: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the ranks' statements come to: None, or in what they differ."""

    difference: str | None


def note_commit(ledger: Ledger, result: StepResult) -> None:
    """Take into a ledger what a step reports: all that leaves the engine."""
    payload: StepPayload = result.payload
    tops = [payload.top_logprobs[row] for row in sorted(payload.top_logprobs)]
    scores = [score for _, _, found in payload.scores for score in found]
    stops = sorted(payload.stops.items())
    ledger.note(
        "commit",
        (result.step,),
        result.tokens or (),
        [int(flag) for flag in result.stopped],
        [f"{row} {stop.reason!r} {stop.is_token}" for row, stop in stops],
        result.nan_rows,
        payload.logprobs,
        payload.behavior_logprobs,
        [token for ids, _ in tops for token in ids],
        [logprob for _, values in tops for logprob in values],
        [score.token_id for score in scores],
        [score.logprob for score in scores],
        [token for score in scores for token in score.top[0]],
        [logprob for score in scores for logprob in score.top[1]],
    )


def _look_away(plan: StepPlan, rows: Sequence[int], logits_RV: torch.Tensor) -> None:
    """Another rank's part in an observation."""


class Leader:
    """Rank 0's side. Its methods are told what the engine does, in order; ``plan`` and ``agree`` exchange.

    Args:
        ranks: the other ranks, which it ends.
        group: what carries their tensors.
        device: this rank's.
        is_verifying: whether statements are compared.
        limit_s: seconds within which a rank must answer, a step on cards be computed, and an exchange on the CPU end.
        num_threads: of torch in this process until the ranks end, as in theirs. Of several engines the last one counts.

    Attributes:
        is_verifying: whether statements are compared.
        runner: this rank's, once it is built.
        failure: why the ranks have ended; None while they serve.
    """

    # torch's number of threads is the process's: that of the latest leader alive; after the last, what the first found.
    _live: ClassVar[dict[Leader, int]] = {}
    _num_threads_before: ClassVar[int] = 0

    def __init__(
        self,
        ranks: Ranks,
        group: RankGroup,
        device: torch.device,
        *,
        is_verifying: bool,
        limit_s: float,
        num_threads: int,
    ) -> None:
        self.ranks = ranks
        self.is_verifying = is_verifying
        self.runner: TorchRunner | None = None
        self.failure: TPError | None = None
        self._limit_s = limit_s
        self._process = os.getpid()
        self._ledger = Ledger()
        self._record: list[tuple[Any, ...]] = []
        self._group = group
        self._device = device
        self._watch = Watch(ranks, group, device, limit_s)
        if not self._live:
            Leader._num_threads_before = torch.get_num_threads()
        self._live[self] = num_threads
        torch.set_num_threads(num_threads)

    def add(self, requests: Sequence[Request]) -> None:
        """Samples of one request were queued."""
        self._record.append(("add", list(requests)))

    def abort(self, request_id: str, sample: int | None, reason: FinishReason) -> None:
        """A request, or one sample of it, was ended from outside."""
        self._record.append(("abort", request_id, sample, reason))

    def plan(self, plan: StepPlan | None) -> None:
        """A step was decided (the others are about to compute it) or found empty.

        Raises:
            TPDesyncError: the ranks have decided differently, now or in a step before.
            TPError: a rank is gone, failed or does not answer.
        """
        if plan is None:
            self._record.append(("look",))
        else:
            self._record.append(("plan",))
            self._exchange(plan)

    def commit(self, result: StepResult) -> None:
        """A result was taken in."""
        self._record.append(("commit",))
        note_commit(self._ledger, result)

    def agree(self) -> None:
        """Compare what was committed, without a step; raises as ``plan``."""
        self._exchange(None)

    def least(self, number: int) -> int:
        """The least of all ranks' numbers, which all of them get; raises as ``Ranks.hear``."""
        least: int = min(number, *self.ranks.hear(self._limit_s))
        self.ranks.tell(least, self._limit_s)
        return least

    def check_equal(self, name: str, value: str) -> None:
        """Let the ranks go on if they all say ``value``; raises ``TPError``, or as ``Ranks.hear``."""
        for rank, other in enumerate(self.ranks.hear(self._limit_s), 1):
            if other != value:
                raise TPError(f"rank {rank} has another {name} than rank 0, {other} instead of {value}")
        self.ranks.tell(None, self._limit_s)

    def load_weights(self, weights: Mapping[str, torch.Tensor] | Path) -> None:
        """Replace the weights of all ranks, or of none; no step may be in flight.

        Raises:
            ValueError: the weights are not the model's, or a rank can't read them; all ranks go on with the old ones.
            TPError: as for ``plan``.
        """
        if isinstance(weights, Path):
            self._load_together(weights, weights)
            return
        for rank, host in enumerate(self.ranks.hosts, 1):
            if host != platform.node():
                raise ValueError(
                    f"weights must be a checkpoint folder, not a state dict: rank {rank} is on another machine, {host}"
                )
        # One look at the mapping: it may answer differently the next time. What fails here is no other rank's concern.
        weights = dict(weights.items())
        with shared_weights(weights) as shared:
            self._load_together(weights, shared)

    def _load_together(self, weights: Mapping[str, torch.Tensor] | Path, source: SharedWeights | Path) -> None:
        """``load_weights`` of what the other ranks find at ``source``; a failure, but for a refusal, ends them."""
        try:
            refusal = self._refusal(weights, source)
        except BaseException as error:
            if (failure := self.fail(error)) is error:
                raise
            raise failure from error
        if refusal is not None:
            raise refusal

    def _refusal(self, weights: Mapping[str, torch.Tensor] | Path, source: SharedWeights | Path) -> Exception | None:
        assert self.runner is not None, "the engine is being built"
        self._record.append(("load", source))
        self._send(is_verified=False)
        refusal: Exception | None = None
        try:
            # However long a checkpoint takes to read.
            with self._watch.watching(is_limited=False):
                self.runner.load_weights(weights)
        except Exception as error:
            if is_exchange_error(error):
                raise
            refusal = error
        failures = [answer for answer in self.ranks.listen(self._limit_s) if isinstance(answer, Failure)]
        if isinstance(refusal, RuntimeError):
            # Another rank's doing: what it says of a mistake is said here.
            return next((ValueError(failure.text) for failure in failures if failure.is_mistake), refusal)
        return refusal

    def peak_bytes(self) -> list[int]:
        """Peak memory of each other rank's device; 0 where it is not counted."""
        self._record.append(("report",))
        self._send(is_verified=False)
        peaks: list[int] = self.ranks.hear(self._limit_s)
        return peaks

    @contextlib.contextmanager
    def computing(self, *, is_limited: bool = True) -> Iterator[None]:
        """Around what all ranks compute together, so that a rank that is lost does not hang the rest.

        Unless ``is_limited``, it may take longer than the limit.
        """
        with self._watch.watching(is_limited=is_limited):
            yield

    def check(self) -> None:
        """Raise ``TPError`` if the ranks have ended."""
        if self.failure is not None:
            raise TPError(f"the ranks of this engine have ended: {self.failure}")

    def fail(self, error: BaseException) -> BaseException:
        """End the ranks, because rank 0 met ``error`` in the middle of a step; what is to be raised."""
        if self.failure is not None:
            return error
        found = self.ranks.cause(error, self._limit_s)
        self._end(found or TPError(f"rank 0 failed: {type(error).__name__}: {error}"))
        return found or error

    def close(self) -> None:
        """End the ranks, but not from a copy of the process that made them. What was interrupted is made up for."""
        if os.getpid() != self._process:
            return
        grace_s = 0.0
        if self.failure is None:
            with contextlib.suppress(TPError, RuntimeError):
                if self._device.type == "cuda":
                    # Steps that nobody collected: who leaves now would be waited for.
                    with self.computing():
                        torch.cuda.synchronize(self._device)
                # Who leaves from now on is not lost.
                self._watch.stop()
                self._record.append(("leave",))
                self._send(is_verified=False)
                grace_s = LAST_WORDS_S
        self._end(self.failure or TPError("the engine is closed"), grace_s)

    def _end(self, failure: TPError, grace_s: float = 0.0) -> None:
        with DeferredInterrupt():
            self.failure = failure
            self._watch.stop()
            self.ranks.end(grace_s)
            # A card that met an error gives nothing back, and says that error again.
            with contextlib.suppress(RuntimeError):
                self._group.close(is_lost=not grace_s)
            if self._live.pop(self, None) is not None:
                torch.set_num_threads(next(reversed(self._live.values()), self._num_threads_before))

    def _exchange(self, plan: StepPlan | None) -> None:
        # Links have limits of their own.
        with self._watch.watching(is_limited=False):
            self._compare(plan)

    def _compare(self, plan: StepPlan | None) -> None:
        self._send(is_verified=self.is_verifying)
        if not self.is_verifying:
            return
        mine = statement_of(plan, self._ledger.digest)
        found = difference([mine, *self.ranks.hear(self._limit_s)])
        self.ranks.tell(Verdict(found), self._limit_s)
        if found is not None:
            raise TPDesyncError(found, [0, *self.ranks.last_words(TPDesyncError.__name__)])

    def _send(self, *, is_verified: bool) -> None:
        self.check()
        record, self._record = self._record, []
        is_observed = self.runner is not None and self.runner.observe_logits is not None
        self.ranks.tell(Orders(record, is_observed, is_verified), self._limit_s)


class Follower:
    """The side of ranks 1, 2, ...: repeats what rank 0 did, with a scheduler and a runner of its own."""

    def __init__(self, link: Link, scheduler: Scheduler, runner: TorchRunner, *, limit_s: float) -> None:
        self._link = link
        self._scheduler = scheduler
        self._runner = runner
        self._limit_s = limit_s
        self._ledger = Ledger()
        self._held: StepResult | None = None
        self._plan: StepPlan | None = None
        self._is_leaving = False

    def serve(self) -> None:
        """Follow rank 0 until it lets this rank go.

        Raises:
            TPDesyncError: the ranks have decided differently.
            LinkClosedError: rank 0 is gone.
        """
        while not self._is_leaving:
            # Between steps rank 0 may take its time: the caller has the word.
            orders: Orders = self._link.receive()
            self._plan = None
            self._runner.observe_logits = _look_away if orders.is_observed else None
            for name, *arguments in orders.record:
                getattr(self, name)(*arguments)
            if orders.is_verified:
                said: Statement = statement_of(self._plan, self._ledger.digest)
                self._link.send(said)
                # Rank 0 may be stopped: its end is noticed, and there is no limit.
                verdict: Verdict = self._link.receive()
                if verdict.difference is not None:
                    raise TPDesyncError(verdict.difference)
            if self._plan is not None:
                self._runner.submit(self._plan)

    def add(self, requests: list[Request]) -> None:
        """Queue the samples of a request."""
        self._scheduler.add(requests)

    def abort(self, request_id: str, sample: int | None, reason: FinishReason) -> None:
        """End a request, or one sample of it."""
        self._scheduler.abort(request_id, sample, reason)

    def look(self) -> None:
        """Find that there is nothing to compute, as rank 0 did."""
        if self._scheduler.plan() is not None:
            self._ledger.note("a plan where rank 0 had none")

    def plan(self) -> None:
        """Decide a step; it is computed once all ranks agree."""
        self._plan = self._scheduler.plan()

    def commit(self) -> None:
        """Take in the oldest result."""
        if self._held is None:
            self._held = self._runner.collect()
        try:
            self._scheduler.commit(self._held)
        except NonFiniteLogitsError:
            self._ledger.note("NaN where rank 0 had none")
            return
        note_commit(self._ledger, self._held)
        self._held = None

    def load(self, source: SharedWeights | Path) -> None:
        """Replace the weights, together with all other ranks, and say what came of it."""
        answer: Failure | None = None
        with self._link.beating(self._limit_s / 4):
            try:
                self._runner.load_weights(source.open() if isinstance(source, SharedWeights) else source)
            except Exception as error:
                answer = Failure.of(error)
        if answer is None:
            self._scheduler.change_weights()
        self._link.send(answer)

    def report(self) -> None:
        """Say the peak memory of this rank's device."""
        self._link.send(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)

    def leave(self) -> None:
        """End after these orders."""
        self._is_leaving = True
