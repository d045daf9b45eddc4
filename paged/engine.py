"""The public API: generate, stream, add, step, abort."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TextIO, TypeVar, cast

import torch
from tqdm.auto import tqdm

from paged.consensus import Leader
from paged.core.model_spec import ModelSpec
from paged.core.plan import Executor
from paged.core.prompt import Prompt
from paged.core.request import Request, SamplingParams, check_ids, sample_seed
from paged.core.scheduler import Scheduler
from paged.core.sharding import check_k_segments, check_tp
from paged.engine_config import EngineConfig, position_limit, resolve_device
from paged.engine_parts import Blueprint, build_parts, warm_up
from paged.engine_ranks import build_with_ranks
from paged.intake import Prompts, is_output_len, params_list, prompt_ids, prompt_list
from paged.interrupts import DeferredInterrupt
from paged.loop import Loop
from paged.model.locate import checkpoint_folder, find_model
from paged.other_ranks import Alone
from paged.outputs import CompletionOutput, RequestOutput, SampleUpdate
from paged.runner.launched import Launch
from paged.runner.runner import TorchRunner
from paged.runner.text import Tokenizer
from paged.samples import Samples
from paged.step_log import StepLog
from paged.streams import LenientStream
from paged.writing import UnwritableError

__all__ = ["CompletionOutput", "Engine", "EngineConfig", "RequestOutput", "SampleUpdate"]


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _serving(method: Callable[Concatenate[Engine, _P], _T]) -> Callable[Concatenate[Engine, _P], _T]:
    """A method that is refused once the engine is closed, and while another thread is in one.

    It first ends the requests of streams that were dropped while another thread was in a call.
    """

    @functools.wraps(method)
    def call(self: Engine, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self._one_thread:
            if self._is_closed:
                raise RuntimeError("the engine is closed")
            while self._left:
                self._forget(self._left.pop())
            return method(self, *args, **kwargs)

    return call


class _BusyError(RuntimeError):
    """Another thread is in a call of the engine's."""


class _OneThread:
    """Entered by one thread at a time, which may enter again; another one is refused, a ``_BusyError``."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise _BusyError("an engine is for one thread at a time, and another one is in a call of this engine's")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Engine:
    """Continuous batching over a paged cache, on one device or cut over several ranks.

    Most users call ``from_pretrained``; the parts can also be given, a mock executor for instance. One thread at a time
    may use an engine, and nobody once it is closed: other calls are a ``RuntimeError``, and change nothing.

    With several ranks this process is rank 0. What a step brought is handed out once all ranks agree on it, which is
    with the next step: ``step`` returns it a call later than with one rank, and decides the same. If a rank is lost,
    whatever was called raises ``TPError``, and the engine can't go on; ``abort`` still returns what all had agreed on.
    Time in which this process is stopped (Ctrl-Z) does not count towards ``tp_timeout_s``. One exception: an exchange
    that is going on at that moment, if the processes were started from outside, as by torchrun.

    If the step log can't be written, whatever was called raises ``UnwritableError``, an ``OSError``, and so does every
    later step.

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
        self._is_closed = False
        self._one_thread = _OneThread()
        # Requests of streams that were dropped while another thread was in a call.
        self._left: list[str] = []
        self._leader = leader
        self._samples = Samples(tokenizer, numerics_id)
        self._loop = Loop(executor, scheduler, self._samples, step_log=step_log, leader=leader)
        self._num_made_ids = 0
        self._streamed: set[str] = set()
        self.startup_s = 0.0
        self.memory: Mapping[str, Any] | None = None

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "tiny",
        *,
        spec: ModelSpec | None = None,
        config: EngineConfig | None = None,
        step_log: Path | str | None = None,
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
            UnwritableError: the step log can't be written.
            TPError: a rank was lost while the engine was built.
        """
        started = time.perf_counter()
        if not isinstance(model, str | Path):
            raise ValueError(f"model must be tiny, a checkpoint folder or a Hub id, not {model!r}")
        for name, value, kind in (("spec", spec, ModelSpec), ("config", config, EngineConfig)):
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{name} must be of type {kind.__name__}, not {value!r}")
        if step_log is not None and not isinstance(step_log, str | Path):
            raise ValueError(f"step_log must be a file, not {step_log!r}")
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
            log = undoing.enter_context(StepLog(Path(step_log))) if step_log is not None else None
            if config.tp > 1:
                parts, leader = build_with_ranks(blueprint, device, launch)
                undoing.callback(leader.close)
            else:
                parts = build_parts(blueprint, device, Alone())
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
        kept = itertools.chain(self._samples.undelivered, (request.id for request in self._loop.unagreed))
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

    @_serving
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
        if not isinstance(request_id, str | None) or request_id == "":
            raise ValueError(f"request_id must be a text, not {request_id!r}")
        number = None
        if request_id is None:
            number = next(n for n in itertools.count(self._num_made_ids) if not self._is_taken(f"request-{n}"))
            request_id = f"request-{number}"
        if self._is_taken(request_id):
            raise ValueError(f"id {request_id!r} is in use by a request that has not finished, or not been delivered")
        requests = self._requests(prompt, params, request_id, samples, stream_text, output_len)
        try:
            with DeferredInterrupt():
                self._loop.add(requests, stream_text=stream_text)
                # Only now: a refusal must not change the ids, and so the random streams, of those after it.
                self._num_made_ids = self._num_made_ids if number is None else number + 1
        except (KeyboardInterrupt, UnwritableError):
            # The caller never learns that the request is there.
            self._forget(request_id)
            raise
        return request_id

    @_serving
    def check_request(
        self, prompt: Prompts, params: SamplingParams | None = None, *, output_len: int | None = None
    ) -> None:
        """Refuse, as a ``ValueError``, what ``add_request`` would refuse whenever it comes."""
        for request in self._requests(prompt, params, "checked", None, False, output_len):
            self.scheduler.config.check(request)

    def _requests(
        self,
        prompt: Prompts,
        params: SamplingParams | None,
        request_id: str,
        samples: Iterable[int] | None,
        stream_text: bool,
        output_len: int | None,
    ) -> list[Request]:
        """What ``add_request`` asks for, a request a sample; a ``ValueError`` says what does not suit."""
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, not {type(params).__name__}")
        token_ids = prompt_ids(prompt, self.tokenizer)
        if self.tokenizer is None and (params.stop or stream_text):
            raise ValueError("stop needs text, and this checkpoint has no tokenizer")
        check_ids(params, self.scheduler.config.vocab_size)
        shared = Prompt(token_ids)
        max_tokens = self.scheduler.config.max_tokens_for(len(shared), params.max_tokens)
        samples = range(params.n) if samples is None else samples
        wanted = list(samples) if isinstance(samples, Iterable) else []
        if not wanted or not all(type(j) is int and j in range(params.n) for j in wanted):
            told = wanted or samples
            raise ValueError(f"samples must be indices from 0 to {params.n - 1} (n is {params.n}), not {told!r}")
        if not is_output_len(output_len):
            raise ValueError(f"output_len must be a whole number, at least 1, or None, not {output_len!r}")
        seeds = [sample_seed(request_id, params.seed, j, self._seed) for j in wanted]
        return [
            Request(request_id, j, shared, params, seed, max_tokens, output_len)
            for j, seed in zip(wanted, seeds, strict=True)
        ]

    def abort(self, request_id: str) -> list[CompletionOutput]:
        """End a request now; what its live samples have so far is returned. An unknown id gives an empty list.

        Updates of these samples that ``step`` has not delivered yet are dropped: the outputs returned hold them. Once a
        rank is lost they hold what all ranks had agreed on.

        Raises:
            TPError: another rank is lost, failed or disagrees, and that was not known before.
        """
        with self._one_thread, DeferredInterrupt():
            outputs = [self._samples.output(end) for end in self._loop.abort(request_id)]
            self._samples.drop_updates(request_id, {output.sample for output in outputs})
        return outputs

    def _forget(self, *request_ids: str) -> None:
        """End requests that nobody waits for any more; what they have is given to nobody."""
        with DeferredInterrupt():
            for request_id in request_ids:
                self._loop.forget(request_id)
                self._streamed.discard(request_id)
            self._samples.forget(request_ids)

    def _is_taken(self, request_id: str) -> bool:
        if request_id in self._samples.undelivered or self.scheduler.is_live(request_id):
            return True
        return any(request.id == request_id for request in self._loop.unagreed_ends)

    def settle(self) -> list[SampleUpdate]:
        """What has come so far and was not delivered, without a step; before the caller ends what is unfinished.

        Raises:
            TPError: as for ``step``.
        """
        with self._one_thread:
            with DeferredInterrupt():
                self._loop.agree()
            return self._take_undelivered()

    # The loop

    @_serving
    def step(self) -> list[SampleUpdate]:
        """Plan, execute and commit: one step of the batch.

        Returns:
            what was added to which sample; empty if nothing was to be done.

        Raises:
            NonFiniteLogitsError: a ``FloatingPointError`` naming requests whose logits held a NaN. Nothing has
                advanced; the next ``step`` goes on once they are aborted.
            TPError: another rank is lost, failed or disagrees (``TPDesyncError``).
        """
        return self._next_updates(self._loop.advance)

    @_serving
    def run_step(self) -> list[SampleUpdate]:
        """``step`` that ends requests with NaN logits as ``error`` and goes on with the others."""
        return self._next_updates(self._loop.advance_past_errors)

    @_serving
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
        batch = prompt_list(prompts)
        all_params = params_list(sampling_params, len(batch))
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
            shown = cast(TextIO, LenientStream(sys.stderr))
            with tqdm(total=num_samples, desc="samples", disable=not use_tqdm, file=shown) as bar:
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

    @_serving
    def stream(self, prompt: Prompts, sampling_params: SamplingParams | None = None) -> Iterator[SampleUpdate]:
        """Generate for one prompt and yield updates as they come; closing the iterator aborts the request.

        Other requests make progress meanwhile; their updates wait for the next ``step``. An iterator that is refused
        because another thread is in a call has ended, and its request with it.

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
            try:
                with self._one_thread:
                    self._forget(request_id)
            except _BusyError:
                # What another thread is at must not change under it: the next call ends the request.
                self._left.append(request_id)

    @_serving
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
        self._loop.load_weights(self.executor, weights)
        return self.scheduler.weight_version

    def metrics(self) -> dict[str, int | float]:
        """Counts and sizes for a summary: tokens, steps, preemptions, the pool, limits, peak memory, start-up time."""
        counters = asdict(self.scheduler.counters)
        limits = self.scheduler.config
        counters["preemptions"] = counters.pop("num_preemptions")
        return {
            **counters,
            "kv_tokens": limits.kv_tokens,
            "depth": limits.depth,
            "max_step_tokens": limits.max_step_tokens,
            "chunk_size": limits.chunk_size,
            "peak_device_bytes": _peak_bytes(),
            "startup_s": self.startup_s,
        }

    def peak_bytes_by_rank(self) -> list[int]:
        """Peak memory of each rank's card; 0 on the CPU. Asks the other ranks: raises ``TPError`` if one is lost."""
        with self._one_thread:
            return [_peak_bytes(), *(self._leader.peak_bytes() if self._leader is not None else ())]

    def close(self) -> None:
        """Close the step log and end the other ranks; what serves requests is then a ``RuntimeError``.

        May be called again, as after a Ctrl-C; from a copy of the process that made the engine it ends no ranks. No
        thread may be in a call meanwhile, which is not checked.
        """
        self._is_closed = True
        self._loop.close()

    # Inside

    def _next_updates(self, advance: Callable[[], None]) -> list[SampleUpdate]:
        """Updates that wait to be delivered, or else what one more step brings."""
        updates = self._take_undelivered()
        if not updates:
            advance()
            updates = self._take_undelivered()
        return updates

    @_serving
    def _updates_of(self, request_ids: Collection[str]) -> list[SampleUpdate]:
        """Updates of some requests: those that wait to be delivered, or else what one more step brings."""
        undelivered = self._samples.undelivered
        if undelivered.keys().isdisjoint(request_ids):
            self._loop.advance_past_errors()
        return self._samples.take_updates([request_id for request_id in undelivered if request_id in request_ids])

    def _take_undelivered(self) -> list[SampleUpdate]:
        """Updates that nobody has been given yet, in order within each request, but for those a stream will ask for."""
        ids = [request_id for request_id in self._samples.undelivered if request_id not in self._streamed]
        return self._samples.take_updates(ids)


def _peak_bytes() -> int:
    """The most memory of this process's card that was allocated at once; 0 without a card."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
