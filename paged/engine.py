"""The loop around scheduler and executor, and the public API: generate, stream, add, step, abort."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from paged.consensus import Leader
from paged.core.model_spec import ModelSpec
from paged.core.plan import Executor, StepPlan, StepResult
from paged.core.prompt import Prompt
from paged.core.request import Request, SamplingParams, sample_seed
from paged.core.scheduler import Finished, NonFiniteLogitsError, Scheduler
from paged.core.sequence import FinishReason
from paged.core.sharding import check_k_segments, check_tp
from paged.engine_config import EngineConfig, position_limit, resolve_device
from paged.engine_parts import Blueprint, build_parts, warm_up
from paged.engine_ranks import build_with_ranks
from paged.interrupts import DeferredInterrupt
from paged.model.locate import checkpoint_folder, find_model
from paged.outputs import CompletionOutput, RequestOutput, SampleUpdate
from paged.runner.launched import Launch
from paged.runner.runner import TorchRunner
from paged.runner.text import Tokenizer, token_ids_of
from paged.samples import Brought, Samples
from paged.step_log import StepLog

__all__ = ["CompletionOutput", "Engine", "EngineConfig", "RequestOutput", "SampleUpdate"]

Prompts = str | Sequence[int] | Mapping[str, Any]


class Engine:
    """Continuous batching over a paged cache, on one device or cut over several ranks.

    Most users call ``from_pretrained``; the parts can also be given, a mock executor for instance.

    With several ranks this process is rank 0. What a step brought is handed out once all ranks agree on it, which is
    with the next step: ``step`` returns it a call later than with one rank, and decides the same. If a rank is lost,
    whatever was called raises ``TPError``, and the engine can't go on; ``abort`` still returns what all had agreed on.
    Time in which this process is stopped (Ctrl-Z) does not count towards ``tp_timeout_s``, but for an exchange that is
    going on where the processes were started from outside.

    Args:
        executor: computes plans.
        scheduler: decides them; it must know the executor's pool size.
        tokenizer: None if prompts are token ids.
        seed: start of the random streams of requests that bring none.
        numerics_id: written into every result.
        device_name: what computes, for summaries.
        step_log: receives every event; closed with the engine.
        leader: leads the other ranks, which have the same scheduler; they end with the engine.

    Attributes:
        startup_s: seconds that ``from_pretrained`` took.
        memory: what it measured of this rank's card, in bytes, for summaries; None on the CPU.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None = None,
        *,
        seed: int = 0,
        numerics_id: str = "",
        device_name: str = "",
        step_log: StepLog | None = None,
        leader: Leader | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.numerics_id = numerics_id
        self.device_name = device_name
        self._seed = seed
        self._log = step_log
        self._leader = leader
        if leader is not None:
            # An engine that nobody closes must leave no process behind.
            weakref.finalize(self, leader.close)
        self._samples = Samples(tokenizer, numerics_id)
        self._num_made_ids = 0
        self._held: StepResult | None = None
        # What other ranks have not agreed to yet, in order, and the ends that they never will agree to.
        self._unagreed: list[Brought] = []
        self._undone: list[Finished] = []
        self._streamed: set[str] = set()
        self.startup_s = 0.0
        self.memory: Mapping[str, Any] | None = None
        if step_log is not None:
            policy = scheduler.policy
            step_log.config(asdict(scheduler.config), {"name": type(policy).__name__.lower(), **asdict(policy)})

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "tiny",
        *,
        spec: ModelSpec | None = None,
        config: EngineConfig | None = None,
        step_log: Path | None = None,
        launch: Launch | None = None,
        **fields: Any,
    ) -> Engine:
        """An engine for a checkpoint. With ``tp`` above 1 it starts a process for each other rank.

        Args:
            model: ``tiny`` (embedded), a folder, or a Hub id in the local cache.
            spec: what the model should be: its checkpoint must agree, and with ``weights="dummy"`` none is needed.
            config: what to build; the defaults if absent.
            step_log: file that receives the step log.
            launch: processes that were started together and wait to be the other ranks; by default they are started.
            fields: fields of ``EngineConfig``, over those of ``config``.

        Raises:
            ValueError: one sentence naming the field or file that does not suit.
            OSError: the step log can't be written.
            TPError: a rank was lost while the engine was built.
        """
        started = time.perf_counter()
        config = (config or EngineConfig()).replaced(**fields)
        need_weights = config.weights != "dummy"
        folder, spec = find_model(model, spec, need_weights=need_weights, max_seq_len=config.max_seq_len)
        device = resolve_device(config.device)
        config = config.resolved(device)
        check_tp(spec, config.tp)
        check_k_segments(spec, config.tp, config.k_segments)
        position_limit(config, spec)
        blueprint = Blueprint(spec=spec, folder=folder, config=config)
        leader: Leader | None = None
        if launch is not None and launch.size != config.tp:
            raise ValueError(f"tp must be {launch.size}, the number of processes started together, not {config.tp}")
        with ExitStack() as undoing:
            log = undoing.enter_context(StepLog(step_log)) if step_log is not None else None
            if config.tp > 1:
                parts, leader = build_with_ranks(blueprint, device, launch)
                undoing.callback(leader.close)
            else:
                parts = build_parts(blueprint, device)
                warm_up(parts)
            engine = cls(
                parts.runner,
                parts.scheduler,
                parts.tokenizer,
                seed=config.seed,
                numerics_id=parts.numerics_id,
                device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                step_log=log,
                leader=leader,
            )
            undoing.pop_all()
        engine.memory = parts.memory
        engine.startup_s = time.perf_counter() - started
        return engine

    # Requests

    @property
    def has_unfinished(self) -> bool:
        """Whether ``step`` has anything left to do or to deliver, surplus steps in flight included."""
        kept = itertools.chain(self._samples.undelivered, self._unagreed_ids())
        waiting = any(request_id not in self._streamed for request_id in kept)
        return self.scheduler.has_unfinished or self.scheduler.num_in_flight > 0 or waiting

    @property
    def num_running(self) -> int:
        """Samples that hold blocks now."""
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Samples that wait for admission."""
        return self.scheduler.num_waiting

    def add_request(
        self,
        prompt: Prompts,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        samples: Iterable[int] | None = None,
        stream_text: bool = False,
        output_len: int | None = None,
    ) -> str:
        """Queue a prompt; its samples appear in what ``step`` returns.

        Args:
            prompt: text, token ids, or a mapping with ``prompt``, ``prompt_token_ids`` or ``messages``.
            params: sampling parameters; the defaults if absent.
            request_id: unique among live requests; counted up over the engine's life if absent.
            samples: indices of the samples wanted, all ``params.n`` if absent.
            stream_text: report text as it grows, at the price of detokenizing every step.
            output_len: for measuring: every sample ends with this many tokens (or ``max_tokens``, if that is less) and
                by nothing else. Whoever decides on admission and preemption does not know it.

        Returns:
            the request's id.

        Raises:
            ValueError: the request is refused; the engine and its other requests are as before.
            TPError: the other ranks have ended; nothing is queued.
        """
        if self._leader is not None:
            self._leader.check()
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, not {type(params).__name__}")
        token_ids = self.tokenizer.prompt_ids(prompt) if self.tokenizer is not None else _ids_without_tokenizer(prompt)
        if self.tokenizer is None and (params.stop or stream_text):
            raise ValueError("stop needs text, and this checkpoint has no tokenizer")
        self._check_ids(params)
        if not isinstance(request_id, str | None):
            raise ValueError(f"request_id must be a text, not {request_id!r}")
        number = None
        if request_id is None:
            number = next(n for n in itertools.count(self._num_made_ids) if not self._is_taken(f"request-{n}"))
            request_id = f"request-{number}"
        if self._is_taken(request_id):
            raise ValueError(f"id {request_id!r} is in use by a request that has not finished, or not been delivered")
        shared = Prompt(token_ids)
        max_tokens = self.scheduler.max_tokens_for(len(shared), params.max_tokens)
        wanted = range(params.n) if samples is None else list(samples)
        if not wanted or not all(j in range(params.n) for j in wanted):
            raise ValueError(f"samples must be indices from 0 to {params.n - 1} (n is {params.n}), not {wanted}")
        if not _is_output_len(output_len):
            raise ValueError(f"output_len must be a whole number, at least 1, or None, not {output_len!r}")
        seeds = [sample_seed(request_id, params.seed, j, self._seed) for j in wanted]
        requests = [
            Request(request_id, j, shared, params, seed, max_tokens, output_len)
            for j, seed in zip(wanted, seeds, strict=True)
        ]
        try:
            with DeferredInterrupt():
                self.scheduler.add(requests)
                if self._leader is not None:
                    self._leader.add(requests)
                self._samples.add(requests, stream_text=stream_text)
                # Only now: a refusal must not change the ids, and so the random streams, of those after it.
                self._num_made_ids = self._num_made_ids if number is None else number + 1
                if self._log is not None:
                    self._log.add(requests)
        except KeyboardInterrupt:
            # The caller never learns that the request is there.
            self._forget(request_id)
            raise
        return request_id

    def abort(self, request_id: str) -> list[CompletionOutput]:
        """End a request now; what its live samples have so far is returned. An unknown id gives an empty list.

        Updates of these samples that ``step`` has not delivered yet are dropped: the outputs returned hold them. Once a
        rank is lost they hold what all ranks had agreed on.

        Raises:
            TPError: another rank is lost, failed or disagrees, and that was not known before.
        """
        with DeferredInterrupt():
            self._agree()
            undone = [replace(end, reason=FinishReason.ABORT) for end in self._undone if end.request.id == request_id]
            self._undone = [end for end in self._undone if end.request.id != request_id]
            ended = (*undone, *self._end(request_id, None, FinishReason.ABORT))
            outputs = [self._samples.output(end) for end in ended]
            self._samples.drop_updates(request_id, {output.sample for output in outputs})
        return outputs

    def _forget(self, *request_ids: str) -> None:
        """End requests that nobody waits for any more; what they have is given to nobody."""
        with DeferredInterrupt():
            for request_id in request_ids:
                self._end(request_id, None, FinishReason.ABORT)
                self._streamed.discard(request_id)
                self._undone = [end for end in self._undone if end.request.id != request_id]
            self._samples.forget(request_ids)

    def _is_taken(self, request_id: str) -> bool:
        if request_id in self._samples.undelivered or self.scheduler.is_live(request_id):
            return True
        ends = (end.request for brought in self._unagreed for end in brought.finished)
        return any(request.id == request_id and self._samples.is_current(request) for request in ends)

    def _unagreed_ids(self) -> Iterator[str]:
        """The requests that there will be updates for once the other ranks agree."""
        for brought in self._unagreed:
            yield from (request.id for request in brought.requests if self._samples.is_current(request))

    def settle(self) -> list[SampleUpdate]:
        """What has come so far and was not delivered, without a step; before the caller ends what is unfinished.

        Raises:
            TPError: as for ``step``.
        """
        with DeferredInterrupt():
            self._agree()
        return self._take_undelivered()

    # The loop

    def step(self) -> list[SampleUpdate]:
        """Plan, execute and commit: one step of the batch.

        Returns:
            what was added to which sample; empty if nothing was to be done.

        Raises:
            NonFiniteLogitsError: a ``FloatingPointError`` naming requests whose logits held a NaN. Nothing has
                advanced; the next ``step`` goes on once they are aborted.
            TPError: another rank is lost, failed or disagrees (``TPDesyncError``).
        """
        return self._next_updates(self._advance)

    def run_step(self) -> list[SampleUpdate]:
        """``step`` that ends requests with NaN logits as ``error`` and goes on with the others."""
        return self._next_updates(self._advance_past_errors)

    def generate(
        self,
        prompts: Prompts | Sequence[Prompts],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for all prompts and wait.

        Args:
            prompts: one prompt or a list of them (a list of ids is one prompt).
            sampling_params: for all, or one for each.
            use_tqdm: show a progress bar on standard error.

        Returns:
            one result a prompt, in order. Samples whose logits held a NaN have the finish reason ``error``.

        Raises:
            ValueError: a prompt or its parameters are refused (the message says which); none is generated then.
        """
        batch = _prompt_list(prompts)
        all_params = _params_list(sampling_params, len(batch))
        ids: list[str] = []
        finished: dict[str, dict[int, CompletionOutput]] = {}
        num_samples = 0
        try:
            for index, (prompt, one) in enumerate(zip(batch, all_params, strict=True)):
                try:
                    ids.append(self.add_request(prompt, one))
                except ValueError as error:
                    raise ValueError(f"prompt {index}: {error}" if len(batch) > 1 else str(error)) from None
                finished[ids[-1]] = {}
                num_samples += one.n
            with tqdm(total=num_samples, desc="samples", disable=not use_tqdm) as bar:
                num_finished, num_tokens, began = 0, 0, time.perf_counter()
                while num_finished < num_samples:
                    for update in self._updates_of(finished):
                        num_tokens += len(update.token_ids)
                        if update.output is not None:
                            finished[update.request_id][update.sample] = update.output
                            num_finished += 1
                            bar.update()
                    rate = num_tokens / (time.perf_counter() - began)
                    bar.set_postfix_str(f"{rate:.0f} tok/s, {self.num_running} running", refresh=False)
        except BaseException:
            self._forget(*ids)
            raise
        outputs = [[finished[i][j] for j in sorted(finished[i])] for i in ids]
        return [RequestOutput(i, out[0].prompt_token_ids, out) for i, out in zip(ids, outputs, strict=True)]

    def stream(self, prompt: Prompts, sampling_params: SamplingParams | None = None) -> Iterator[SampleUpdate]:
        """Generate for one prompt and yield updates as they come; closing the iterator aborts the request.

        Other requests make progress meanwhile; their updates wait for the next ``step``.

        Raises:
            ValueError: the request is refused, at the call.
        """
        request_id = self.add_request(prompt, sampling_params, stream_text=self.tokenizer is not None)
        self._streamed.add(request_id)
        return self._stream(request_id)

    def _stream(self, request_id: str) -> Iterator[SampleUpdate]:
        try:
            while self._is_taken(request_id):
                yield from self._updates_of((request_id,))
        finally:
            self._forget(request_id)

    def load_weights(self, weights: Mapping[str, torch.Tensor] | Path | str) -> int:
        """Replace the model's weights in place, all of them or none.

        Steps in flight are finished first. Live requests keep the tokens they have and go on under the new weights,
        their keys and values computed anew; blocks of the old weights are never reused.

        Args:
            weights: a state dict with Hugging Face names (any device, rounded to the engine's dtype), or a checkpoint
                of the same model, named as for ``from_pretrained``.

        Returns:
            the new weight version, counting up from 0.

        Raises:
            ValueError: the tensors are not exactly those of the model (all violations are listed). The old weights
                serve on, as after any other failure. A Ctrl-C waits until the new ones are in place.
            NonFiniteLogitsError: a step in flight held a NaN; as for ``step``.
            TPError: a rank was lost meanwhile.
        """
        if not isinstance(self.executor, TorchRunner):
            raise ValueError(f"weights cannot be loaded into a {type(self.executor).__name__}")
        if isinstance(weights, str | Path):
            weights = checkpoint_folder(weights)
        elif not isinstance(weights, Mapping):
            raise ValueError(f"weights must be a state dict or a checkpoint folder, not {type(weights).__name__}")
        while self._held is not None or self.scheduler.num_in_flight:
            self._collect()
        with DeferredInterrupt():
            self._agree()
            if self._leader is None:
                self.executor.load_weights(weights)
            else:
                self._leader.load_weights(weights)
            self.scheduler.change_weights()
            if self._log is not None:
                self._log.change_weights(self.scheduler.weight_version)
        return self.scheduler.weight_version

    def metrics(self) -> dict[str, int | float]:
        """Counts and sizes for a summary: tokens, steps, preemptions, the pool, limits, peak memory, start-up time."""
        counters = asdict(self.scheduler.counters)
        limits = self.scheduler.config
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        counters["preemptions"] = counters.pop("num_preemptions")
        return {
            **counters,
            "kv_tokens": limits.num_blocks * limits.block_size,
            "depth": limits.depth,
            "max_step_tokens": limits.max_step_tokens,
            "chunk_size": limits.chunk_size,
            "peak_device_bytes": peak,
            "startup_s": self.startup_s,
        }

    def peak_bytes_by_rank(self) -> list[int]:
        """Peak memory of each rank's card; 0 on the CPU. Asks the other ranks: raises ``TPError`` if one is lost."""
        own = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return [own] if self._leader is None else [own, *self._leader.peak_bytes()]

    def close(self) -> None:
        """Close the step log and end the other ranks. The engine must not be used afterwards.

        May be called again, as after a Ctrl-C; from a copy of the process that made the engine it ends no ranks.
        """
        if self._leader is not None:
            self._leader.close()
            self._undo()
        if self._log is not None:
            self._log.close()
            self._log = None

    # Inside

    def _advance(self) -> None:
        """Fill the pipeline, wait for its oldest step and take its result in; nothing happens if there is none.

        New updates are in ``_samples`` afterwards. Books change under a ``DeferredInterrupt``, so that a Ctrl-C
        falls between steps or into the executor's work, which is then abandoned. With other ranks it falls between
        steps: they can't be left alone in the middle of one. A second one in the same step ends them at once.
        """
        scheduler = self.scheduler
        with DeferredInterrupt() if self._leader is not None else nullcontext():
            if self._unagreed and not scheduler.has_unfinished and not scheduler.num_in_flight:
                self._agree()
                return
            with self._abandoning():
                if self._held is None:
                    while scheduler.num_in_flight < scheduler.config.depth and (plan := self._plan()) is not None:
                        with self._computing():
                            self.executor.submit(plan)
            if self._held is not None or scheduler.num_in_flight:
                self._collect()

    def _collect(self) -> None:
        """Wait for the oldest step in flight, unless its result is held already, and take it in."""
        with self._abandoning():
            if self._held is None:
                with self._computing():
                    self._held = self.executor.collect()
            with DeferredInterrupt():
                self._commit(self._held)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Around the executor's work, in which other ranks take part."""
        with self._leader.computing() if self._leader is not None else nullcontext():
            yield

    def _agree(self) -> None:
        """Make sure that the other ranks agree to all that was committed, so that it can be handed out."""
        if self._unagreed and self._leader is not None:
            with self._abandoning():
                self._leader.agree()
            self._release()

    def _release(self) -> None:
        """Take in what the other ranks have agreed to."""
        agreed, self._unagreed = self._unagreed, []
        for brought in agreed:
            self._samples.take_in(brought)
        if self._log is not None:
            self._log.release()

    def _undo(self) -> None:
        """Drop what the other ranks will never agree to."""
        self._undone += [end for brought in self._unagreed for end in brought.finished]
        self._unagreed.clear()

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
                self.executor.abandon()
                self.scheduler.abandon()
                if self._log is not None:
                    self._log.drop()
                    self._log.abandon()
            if self._leader is not None:
                failure = self._leader.fail(error)
                self._undo()
                if failure is not error:
                    raise failure from error
            raise

    def _plan(self) -> StepPlan | None:
        with DeferredInterrupt():
            plan = self.scheduler.plan()
            if self._log is not None:
                self._log.plan(plan)
            if self._leader is not None:
                self._leader.plan(plan)
                if plan is not None:
                    self._release()
        return plan

    def _commit(self, result: StepResult) -> None:
        commit = self.scheduler.commit(result)
        self._held = None
        if self._log is not None:
            self._log.commit(result, is_agreed=self._leader is None or not self._leader.is_verifying)
        if self._leader is not None:
            self._leader.commit(result)
        self._keep(Brought(result.payload, commit.accepted, commit.finished))

    def _advance_past_errors(self) -> None:
        """``_advance`` that ends requests whose logits hold a NaN; the next call goes on with the others."""
        try:
            self._advance()
        except NonFiniteLogitsError as error:
            with DeferredInterrupt():
                for request in error.requests:
                    ended = self._end(request.id, request.sample, FinishReason.ERROR)
                    self._keep(Brought(None, (), ended))

    def _keep(self, brought: Brought) -> None:
        """Take in what came, at once or as soon as the other ranks agree to it."""
        if self._leader is None or not self._leader.is_verifying:
            self._samples.take_in(brought)
        else:
            self._unagreed.append(brought)

    def _next_updates(self, advance: Callable[[], None]) -> list[SampleUpdate]:
        """Updates that wait to be delivered, or else what one more step brings."""
        updates = self._take_undelivered()
        if not updates:
            advance()
            updates = self._take_undelivered()
        return updates

    def _updates_of(self, request_ids: Collection[str]) -> list[SampleUpdate]:
        """Updates of some requests: those that wait to be delivered, or else what one more step brings."""
        undelivered = self._samples.undelivered
        if undelivered.keys().isdisjoint(request_ids):
            self._advance_past_errors()
        return self._samples.take_updates([request_id for request_id in undelivered if request_id in request_ids])

    def _take_undelivered(self) -> list[SampleUpdate]:
        """Updates that nobody has been given yet, in order within each request, but for those a stream will ask for."""
        ids = [request_id for request_id in self._samples.undelivered if request_id not in self._streamed]
        return self._samples.take_updates(ids)

    def _end(self, request_id: str, index: int | None, reason: FinishReason) -> list[Finished]:
        """End samples from outside; the plan in flight drops their rows."""
        with DeferredInterrupt():
            ended = self.scheduler.abort(request_id, index, reason)
            if ended and self._log is not None:
                self._log.abort(request_id, index, reason.value)
            if ended and self._leader is not None:
                self._leader.abort(request_id, index, reason)
            return ended

    def _check_ids(self, params: SamplingParams) -> None:
        vocab_size = self.scheduler.config.vocab_size
        if vocab_size is None:
            return
        biased = [token_id for token_id, _ in params.biases]
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", biased)):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise ValueError(f"{name} holds {token_id}, outside the vocabulary, 0 to {vocab_size - 1}")
        for name, number in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if number is not None and number > vocab_size:
                raise ValueError(f"{name} must be at most the vocabulary's size, {vocab_size}, not {number}")


def _ids_without_tokenizer(prompt: Prompts) -> list[int]:
    if isinstance(prompt, str) or (isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt):
        raise ValueError("this checkpoint has no tokenizer.json, so the prompt must be prompt_token_ids")
    return token_ids_of(prompt)


def _is_output_len(value: int | None) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


def _prompt_list(prompts: Prompts | Sequence[Prompts]) -> list[Prompts]:
    if isinstance(prompts, str | Mapping) or (
        isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], int)
    ):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be one prompt or a list of prompts, not {type(prompts).__name__}")
    return list(prompts)  # type: ignore[arg-type]


def _params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or len(params) != count:
        raise ValueError(
            f"sampling_params must be one for all prompts or one for each, not {params!r:.60} for {count} prompts"
        )
    return list(params)
