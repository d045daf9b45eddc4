"""The loop around scheduler and executor, and the public API: generate, stream, add, step, abort."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from paged.core.model_spec import ModelSpec
from paged.core.plan import Executor, StepPlan, StepResult
from paged.core.prompt import Prompt
from paged.core.request import Request, SamplingParams, sample_seed
from paged.core.scheduler import Finished, NonFiniteLogitsError, Scheduler
from paged.core.sequence import FinishReason
from paged.engine_config import KV_DTYPES, EngineConfig, position_limit, resolve_device, sized_num_blocks
from paged.interrupts import DeferredInterrupt
from paged.kernels.numerics import Numerics
from paged.model.checkpoint import load_decoder
from paged.model.decoder import TORCH_DTYPES, Decoder
from paged.model.locate import checkpoint_folder, find_model
from paged.outputs import CompletionOutput, RequestOutput, SampleUpdate
from paged.runner.kv_cache import KVCache
from paged.runner.payload import PromptScore, StepPayload, TopLogprobs
from paged.runner.runner import TorchRunner
from paged.runner.text import TextStream, Tokenizer, token_ids_of
from paged.step_log import StepLog

__all__ = ["CompletionOutput", "Engine", "EngineConfig", "RequestOutput", "SampleUpdate"]

Prompts = str | Sequence[int] | Mapping[str, Any]


@dataclass(slots=True)
class _Sample:
    """What has come of one live sample so far."""

    request: Request
    stream: TextStream | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, PromptScore] = field(default_factory=dict)
    stop_reason: int | str | None = None
    is_stopped_by_token: bool = False


class Engine:
    """Continuous batching over a paged cache, on one device.

    Most users call ``from_pretrained``; the parts can also be given, a mock executor for instance.

    Args:
        executor: computes plans.
        scheduler: decides them; it must know the executor's pool size.
        tokenizer: None if prompts are token ids.
        seed: start of the random streams of requests that bring none.
        numerics_id: written into every result.
        device_name: what computes, for summaries.
        step_log: receives every event; closed with the engine.
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
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.numerics_id = numerics_id
        self.device_name = device_name
        self._seed = seed
        self._log = step_log
        self._samples: dict[tuple[str, int], _Sample] = {}
        self._num_made_ids = 0
        self._held: StepResult | None = None
        self._undelivered: dict[str, list[SampleUpdate]] = {}
        self._streamed: set[str] = set()
        self.startup_s = 0.0
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
        **fields: Any,
    ) -> Engine:
        """An engine for a checkpoint.

        Args:
            model: ``tiny`` (embedded), a folder, or a Hub id in the local cache.
            spec: what the model should be: its checkpoint must agree, and with ``weights="dummy"`` none is needed.
            config: what to build; the defaults if absent.
            step_log: file that receives the step log.
            fields: fields of ``EngineConfig``, over those of ``config``.

        Raises:
            ValueError: one sentence naming the field or file that does not suit.
        """
        started = time.perf_counter()
        config = (config or EngineConfig()).replaced(**fields)
        need_weights = config.weights != "dummy"
        folder, spec = find_model(model, spec, need_weights=need_weights, max_seq_len=config.max_seq_len)
        device = resolve_device(config.device)
        numerics = Numerics(mode=config.numerics)
        dtype = TORCH_DTYPES[config.dtype or spec.dtype]
        kv_dtype = KV_DTYPES[config.kv_dtype] if config.kv_dtype else dtype
        limit = position_limit(config, spec)
        tokenizer = Tokenizer(folder) if folder is not None and (folder / "tokenizer.json").is_file() else None
        placed: dict[str, Any] = {"numerics": numerics, "dtype": dtype, "device": device, "max_positions": limit}
        with _out_of_memory_as_mistake():
            if folder is None or not need_weights:
                decoder = Decoder.random(spec, config.seed, **placed)
            else:
                decoder = load_decoder(folder, **placed)
            num_blocks = config.num_blocks or sized_num_blocks(config, spec, dtype, kv_dtype, device, limit)
            cache = KVCache(spec, num_blocks, config.block_size, dtype=kv_dtype, device=device)
            runner = TorchRunner(
                decoder,
                cache,
                tokenizer,
                max_num_seqs=config.max_num_seqs,
                max_seq_len=min(limit, num_blocks * config.block_size),
                eos_token_ids=spec.eos_token_ids,
            )
            runner.warm_up()
        limits = config.limits(num_blocks=num_blocks, max_seq_len=limit, vocab_size=spec.vocab_size)
        engine = cls(
            runner,
            Scheduler(limits, config.policy),
            tokenizer,
            seed=config.seed,
            numerics_id=numerics.numerics_id(dtype=dtype, kv_dtype=kv_dtype, device=device),
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            step_log=StepLog(step_log) if step_log is not None else None,
        )
        engine.startup_s = time.perf_counter() - started
        return engine

    # Requests

    @property
    def has_unfinished(self) -> bool:
        """Whether ``step`` has anything left to do or to deliver, surplus steps in flight included."""
        waiting = any(request_id not in self._streamed for request_id in self._undelivered)
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
        """
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, not {type(params).__name__}")
        token_ids = self.tokenizer.prompt_ids(prompt) if self.tokenizer is not None else _ids_without_tokenizer(prompt)
        if self.tokenizer is None and (params.stop or stream_text):
            raise ValueError("stop needs text, and this checkpoint has no tokenizer")
        self._check_ids(params)
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
                for request in requests:
                    stream = self.tokenizer.stream(params.stop) if stream_text and self.tokenizer is not None else None
                    self._samples[request.key] = _Sample(request, stream)
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

        Updates of these samples that ``step`` has not delivered yet are dropped: the outputs returned hold them.
        """
        with DeferredInterrupt():
            outputs = self._end(request_id, None, FinishReason.ABORT)
            ended = {output.sample for output in outputs}
            rest = [update for update in self._undelivered.pop(request_id, []) if update.sample not in ended]
            if rest:
                self._undelivered[request_id] = rest
        return outputs

    def _forget(self, *request_ids: str) -> None:
        """End requests that nobody waits for any more; what they have is given to nobody."""
        with DeferredInterrupt():
            for request_id in request_ids:
                self._end(request_id, None, FinishReason.ABORT)
                self._undelivered.pop(request_id, None)
                self._streamed.discard(request_id)

    def _is_taken(self, request_id: str) -> bool:
        return self.scheduler.is_live(request_id) or request_id in self._undelivered

    # The loop

    def step(self) -> list[SampleUpdate]:
        """Plan, execute and commit: one step of the batch.

        Returns:
            what was added to which sample; empty if nothing was to be done.

        Raises:
            NonFiniteLogitsError: a ``FloatingPointError`` naming requests whose logits held a NaN. Nothing has
                advanced; the next ``step`` goes on once they are aborted.
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
            self.executor.load_weights(weights)
            self.scheduler.change_weights()
            if self._log is not None:
                self._log.change_weights(self.scheduler.weight_version)
        return self.scheduler.weight_version

    def metrics(self) -> dict[str, int | float]:
        """Counts and sizes for a summary: tokens, steps, preemptions, the pool, peak device memory, start-up time."""
        counters = asdict(self.scheduler.counters)
        limits = self.scheduler.config
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        counters["preemptions"] = counters.pop("num_preemptions")
        return {
            **counters,
            "kv_tokens": limits.num_blocks * limits.block_size,
            "peak_device_bytes": peak,
            "startup_s": self.startup_s,
        }

    def close(self) -> None:
        """Close the step log. The engine must not be used afterwards."""
        if self._log is not None:
            self._log.close()
            self._log = None

    # Inside

    def _advance(self) -> None:
        """Fill the pipeline, wait for its oldest step and take its result in; nothing happens if there is none.

        New updates are in ``_undelivered`` afterwards. Books change under a ``DeferredInterrupt``, so that a Ctrl-C
        falls between steps or into the executor's work, which is then abandoned.
        """
        scheduler = self.scheduler
        with self._abandoning():
            if self._held is None:
                while scheduler.num_in_flight < scheduler.config.depth and (plan := self._plan()) is not None:
                    self.executor.submit(plan)
        if self._held is not None or scheduler.num_in_flight:
            self._collect()

    def _collect(self) -> None:
        """Wait for the oldest step in flight, unless its result is held already, and take it in."""
        with self._abandoning():
            if self._held is None:
                self._held = self.executor.collect()
            with DeferredInterrupt():
                self._commit(self._held)

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """Give up whatever is in flight if it fails; sequences keep their committed tokens and start again."""
        try:
            yield
        except NonFiniteLogitsError:
            raise
        except BaseException:
            with DeferredInterrupt():
                self._held = None
                self.executor.abandon()
                self.scheduler.abandon()
                if self._log is not None:
                    self._log.abandon()
            raise

    def _plan(self) -> StepPlan | None:
        with DeferredInterrupt():
            plan = self.scheduler.plan()
            if self._log is not None:
                self._log.plan(plan)
        return plan

    def _commit(self, result: StepResult) -> None:
        commit = self.scheduler.commit(result)
        self._held = None
        if self._log is not None:
            self._log.commit(result)
        for update in self._take_in(result.payload, commit.accepted, commit.finished):
            self._keep(update)

    def _advance_past_errors(self) -> None:
        """``_advance`` that ends requests whose logits hold a NaN; the next call goes on with the others."""
        try:
            self._advance()
        except NonFiniteLogitsError as error:
            with DeferredInterrupt():
                for request in error.requests:
                    for output in self._end(request.id, request.sample, FinishReason.ERROR):
                        self._keep(SampleUpdate(output.request_id, output.sample, [], [], output=output))

    def _keep(self, update: SampleUpdate) -> None:
        """Hold an update until somebody asks for it."""
        self._undelivered.setdefault(update.request_id, []).append(update)

    def _next_updates(self, advance: Callable[[], None]) -> list[SampleUpdate]:
        """Updates that wait to be delivered, or else what one more step brings."""
        updates = self._take_undelivered()
        if not updates:
            advance()
            updates = self._take_undelivered()
        return updates

    def _updates_of(self, request_ids: Collection[str]) -> list[SampleUpdate]:
        """Updates of some requests: those that wait to be delivered, or else what one more step brings."""
        if self._undelivered.keys().isdisjoint(request_ids):
            self._advance_past_errors()
        waiting = [request_id for request_id in self._undelivered if request_id in request_ids]
        return [update for request_id in waiting for update in self._undelivered.pop(request_id)]

    def _take_undelivered(self) -> list[SampleUpdate]:
        """Updates that nobody has been given yet, in order within each request, but for those a stream will ask for."""
        ids = [request_id for request_id in self._undelivered if request_id not in self._streamed]
        return [update for request_id in ids for update in self._undelivered.pop(request_id)]

    def _take_in(
        self, payload: StepPayload, accepted: Sequence[Request | None], finished: Sequence[Finished]
    ) -> list[SampleUpdate]:
        for scored, first, scores in payload.scores:
            # An aborted request may have left its id to another one.
            if (sample := self._samples.get(scored.key)) is not None and sample.request is scored:
                sample.prompt_logprobs.update(enumerate(scores, first))
        updates: dict[tuple[str, int], SampleUpdate] = {}
        for row, request in enumerate(accepted):
            if request is None:
                continue
            sample = self._samples[request.key]
            token, logprob = payload.tokens[row], payload.logprobs[row]
            sample.token_ids.append(token)
            sample.logprobs.append(logprob)
            sample.behavior_logprobs.append(payload.behavior_logprobs[row])
            if (top := payload.top_logprobs.get(row)) is not None:
                sample.top_logprobs.append(top)
            if (stop := payload.stops.get(row)) is not None:
                sample.stop_reason, sample.is_stopped_by_token = stop.reason, stop.is_token
            update = updates[request.key] = SampleUpdate(request.id, request.sample, [token], [logprob])
            if sample.stream is not None and not sample.is_stopped_by_token:
                sample.stream.push(token)
                update.text = sample.stream.release()
        for end in finished:
            update = updates[end.request.key]
            sample = self._samples[end.request.key]
            update.output = self._output(end)
            if sample.stream is not None:
                update.text += update.output.text[sample.stream.num_released :]
        return list(updates.values())

    def _end(self, request_id: str, index: int | None, reason: FinishReason) -> list[CompletionOutput]:
        """End samples from outside; the plan in flight drops their rows."""
        with DeferredInterrupt():
            ended = self.scheduler.abort(request_id, index, reason)
            if ended and self._log is not None:
                self._log.abort(request_id, index, reason.value)
            return [self._output(end) for end in ended]

    def _output(self, end: Finished) -> CompletionOutput:
        """The finished sample's record; forgets the sample."""
        sample = self._samples.pop(end.request.key)
        request = sample.request
        text = ""
        if self.tokenizer is not None:
            text = self.tokenizer.decode(sample.token_ids[:-1] if sample.is_stopped_by_token else sample.token_ids)
            if isinstance(sample.stop_reason, str) and sample.stop_reason in text:
                text = text[: text.index(sample.stop_reason)]
        scored = request.params.prompt_logprobs is not None
        return CompletionOutput(
            request_id=request.id,
            sample=request.sample,
            prompt_token_ids=list(request.prompt.token_ids or ()),
            token_ids=sample.token_ids,
            text=text,
            logprobs=sample.logprobs,
            behavior_logprobs=sample.behavior_logprobs,
            top_logprobs=sample.top_logprobs if request.params.logprobs is not None else None,
            prompt_logprobs=[sample.prompt_logprobs[i] for i in sorted(sample.prompt_logprobs)] if scored else None,
            finish_reason=end.reason.value,
            stop_reason=sample.stop_reason,
            num_preemptions=end.num_preemptions,
            num_cached_tokens=end.num_cached_tokens,
            numerics_id=self.numerics_id,
        )

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


@contextmanager
def _out_of_memory_as_mistake() -> Iterator[None]:
    """Tell a model and cache that are too large for the memory as a ``ValueError`` that says what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch has a class of its own for a full GPU, and none for a full host.
        full = isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error)
        if not full:
            raise
        raise ValueError(
            "num_blocks, max_num_seqs or max_seq_len must be smaller: the model and its tables do not fit into memory"
        ) from error


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
