"""The loop around scheduler and executor: plan, execute, commit; other ranks and the step log hear of all of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from paged.consensus import Leader
from paged.core.plan import Executor, StepPlan, StepResult
from paged.core.request import Request
from paged.core.scheduler import Finished, NonFiniteLogitsError, Scheduler
from paged.core.sequence import FinishReason
from paged.interrupts import DeferredInterrupt
from paged.runner.runner import TorchRunner
from paged.samples import Samples, StepOutput
from paged.step_log import StepLog
from paged.writing import UnwritableError


class Loop:
    """Keeps up to ``depth`` steps in flight and commits them in order; ``samples`` get what all ranks agree to.

    Args:
        executor: computes plans.
        scheduler: decides them.
        samples: take in what comes.
        step_log: receives every event; closed with the loop.
        leader: leads the other ranks, which have the same scheduler; they end with the loop.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        samples: Samples,
        *,
        step_log: StepLog | None,
        leader: Leader | None,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._samples = samples
        self._log = step_log
        self._leader = leader
        if leader is not None:
            # An engine that nobody closes must leave no process behind.
            weakref.finalize(self, leader.close)
        self._held: StepResult | None = None
        # What other ranks have not agreed to yet, in order, and the ends that they never will agree to.
        self._unagreed: list[StepOutput] = []
        self._undone: list[Finished] = []
        if step_log is not None:
            policy = scheduler.policy
            step_log.config(asdict(scheduler.config), {"name": type(policy).__name__.lower(), **asdict(policy)})

    @property
    def unagreed(self) -> Iterator[Request]:
        """The requests that there will be updates for once the other ranks agree."""
        for step_output in self._unagreed:
            yield from (request for request in step_output.requests if self._samples.is_current(request))

    @property
    def unagreed_ends(self) -> Iterator[Request]:
        """Those among ``unagreed`` that have finished."""
        for step_output in self._unagreed:
            yield from (end.request for end in step_output.finished if self._samples.is_current(end.request))

    def add(self, requests: Sequence[Request], *, stream_text: bool) -> None:
        """Queue the samples of a request; ``ValueError``, and nothing is queued, if they can never fit."""
        self._scheduler.add(requests)
        if self._leader is not None:
            self._leader.add(requests)
        self._samples.add(requests, stream_text=stream_text)
        if self._log is not None:
            self._log.add(requests)

    def abort(self, request_id: str) -> list[Finished]:
        """End a request now; returned are its ends, also those that the other ranks never agreed to.

        Raises:
            TPError: another rank is lost, failed or disagrees, and that was not known before.
        """
        self.agree()
        undone = [replace(end, reason=FinishReason.ABORT) for end in self._undone if end.request.id == request_id]
        self._drop_undone(request_id)
        return [*undone, *self._end(request_id, None, FinishReason.ABORT)]

    def forget(self, request_id: str) -> None:
        """End a request whose outputs nobody waits for any more; a log that can't be written shows in the next step."""
        with suppress(UnwritableError):
            self._end(request_id, None, FinishReason.ABORT)
        self._drop_undone(request_id)

    def advance(self) -> None:
        """Fill the pipeline, wait for its oldest step and take its result in; nothing happens if there is none.

        New updates are in the samples afterwards. Books change under a ``DeferredInterrupt``, so that a Ctrl-C
        falls between steps or into the executor's work, which is then abandoned. With other ranks it falls between
        steps: they can't be left alone in the middle of one. A second one in the same step ends them at once.
        """
        scheduler = self._scheduler
        with DeferredInterrupt() if self._leader is not None else nullcontext():
            if self._unagreed and not scheduler.has_unfinished and not scheduler.num_in_flight:
                self.agree()
                return
            with self._abandoning():
                if self._held is None:
                    while scheduler.num_in_flight < scheduler.config.depth and (plan := self._plan()) is not None:
                        with self._computing():
                            self._executor.submit(plan)
            if self._held is not None or scheduler.num_in_flight:
                self._collect()

    def advance_past_errors(self) -> None:
        """``advance`` that ends requests whose logits hold a NaN; the next call goes on with the others."""
        try:
            self.advance()
        except NonFiniteLogitsError as error:
            with DeferredInterrupt():
                for request in error.requests:
                    ended = self._end(request.id, request.sample, FinishReason.ERROR)
                    self._keep(StepOutput(None, (), ended))

    def agree(self) -> None:
        """Make sure that the other ranks agree to all that was committed, so that it can be handed out."""
        if self._unagreed and self._leader is not None:
            with self._abandoning():
                self._leader.agree()
            self._release()

    def load_weights(self, runner: TorchRunner, weights: Mapping[str, torch.Tensor] | Path) -> None:
        """Finish the steps in flight and replace the weights of ``runner``, the executor, and of all other ranks."""
        while self._held is not None or self._scheduler.num_in_flight:
            self._collect()
        with DeferredInterrupt():
            self.agree()
            if self._leader is None:
                runner.load_weights(weights)
            else:
                self._leader.load_weights(weights)
            self._scheduler.change_weights()
            if self._log is not None:
                self._log.change_weights(self._scheduler.weight_version)

    def close(self) -> None:
        """Close the step log and end the other ranks; may be called again."""
        if self._leader is not None:
            self._leader.close()
            self._undo()
        if self._log is not None:
            log, self._log = self._log, None
            log.close()

    def _plan(self) -> StepPlan | None:
        with DeferredInterrupt():
            plan = self._scheduler.plan()
            if self._log is not None:
                self._log.plan(plan)
            if self._leader is not None:
                self._leader.plan(plan)
                if plan is not None:
                    self._release()
        return plan

    def _collect(self) -> None:
        """Wait for the oldest step in flight, unless its result is held already, and take it in."""
        with self._abandoning():
            if self._held is None:
                with self._computing():
                    self._held = self._executor.collect()
            with DeferredInterrupt():
                self._commit(self._held)

    def _commit(self, result: StepResult) -> None:
        commit = self._scheduler.commit(result)
        self._held = None
        if self._log is not None:
            self._log.commit(result, is_agreed=self._leader is None or not self._leader.is_verifying)
        if self._leader is not None:
            self._leader.commit(result)
        self._keep(StepOutput(result.payload, commit.accepted, commit.finished))

    def _keep(self, step_output: StepOutput) -> None:
        """Take in what came, at once or as soon as the other ranks agree to it."""
        if self._leader is None or not self._leader.is_verifying:
            self._samples.take_in(step_output)
        else:
            self._unagreed.append(step_output)

    def _release(self) -> None:
        """Take in what the other ranks have agreed to."""
        agreed, self._unagreed = self._unagreed, []
        for step_output in agreed:
            self._samples.take_in(step_output)
        if self._log is not None:
            self._log.release()

    def _undo(self) -> None:
        """Drop what the other ranks will never agree to."""
        self._undone += [end for step_output in self._unagreed for end in step_output.finished]
        self._unagreed.clear()

    def _drop_undone(self, request_id: str) -> None:
        self._undone = [end for end in self._undone if end.request.id != request_id]

    def _end(self, request_id: str, index: int | None, reason: FinishReason) -> list[Finished]:
        """End samples from outside; the plan in flight drops their rows."""
        with DeferredInterrupt():
            ended = self._scheduler.abort(request_id, index, reason)
            if ended and self._leader is not None:
                self._leader.abort(request_id, index, reason)
            if ended and self._log is not None:
                self._log.abort(request_id, index, reason.value)
            return ended

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Around the executor's work, in which other ranks take part."""
        with self._leader.computing() if self._leader is not None else nullcontext():
            yield

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """Give up whatever is in flight if it fails; sequences keep their committed tokens and start again.

        With other ranks that is the end of them: where in the step each of them is can't be known.
        """
        try:
            yield
        except NonFiniteLogitsError:
            raise
        except BaseException as error:
            with DeferredInterrupt():
                self._held = None
                self._executor.abandon()
                self._scheduler.abandon()
                if self._log is not None:
                    # It may be what failed. If not, the next event says it; the other ranks must hear of ``error``.
                    with suppress(UnwritableError):
                        self._log.drop()
                        self._log.abandon()
            if self._leader is not None:
                failure = self._leader.fail(error)
                self._undo()
                if failure is not error:
                    raise failure from error
            raise
