"""The loop around scheduler and executor, and the public API: generate, stream, add, step, abort."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from paged.core.model_spec import ModelSpec
from paged.core.plan import Executor, StepResult
from paged.core.request import Prompt, Request, SamplingParams, sample_seed
from paged.core.scheduler import Finished, NonFiniteLogitsError, Scheduler
from paged.core.sequence import FinishReason
from paged.engine_config import DTYPES, KV_DTYPES, EngineConfig, position_limit, resolve_device, sized_num_blocks
from paged.kernels.numerics import Numerics
from paged.model.checkpoint import load_decoder
from paged.model.decoder import Decoder
from paged.model.locate import find_model
from paged.outputs import CompletionOutput, RequestOutput, SampleUpdate
from paged.runner.kv_cache import KVCache
from paged.runner.runner import PromptScore, StepPayload, TopLogprobs, TorchRunner
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
        step_log: StepLog | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.numerics_id = numerics_id
        self._seed = seed
        self._log = step_log
        self._samples: dict[tuple[str, int], _Sample] = {}
        self._num_made_ids = 0
        self._held: StepResult | None = None
        self._undelivered: dict[str, list[SampleUpdate]] = {}
        self.startup_s = 0.0
        if step_log is not None:
            step_log.config(asdict(scheduler.config), repr(scheduler.policy))

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
        dtype = DTYPES[config.dtype or spec.dtype]
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
        limits = config.limits(num_blocks=num_blocks, max_seq_len=limit, vocab_size=spec.vocab_size)
        engine = cls(
            runner,
            Scheduler(limits, config.policy),
            tokenizer,
            seed=config.seed,
            numerics_id=numerics.numerics_id(dtype=dtype, kv_dtype=kv_dtype, device=device),
            step_log=StepLog(step_log) if step_log is not None else None,
        )
        engine.startup_s = time.perf_counter() - started
        return engine

    # Requests

    @property
    def has_unfinished(self) -> bool:
        """Whether ``step`` has anything left to do or to deliver, surplus steps in flight included."""
        return self.scheduler.has_unfinished or self.scheduler.num_in_flight > 0 or bool(self._undelivered)

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
    ) -> str:
        """Queue a prompt; its samples appear in what ``step`` returns.

        Args:
            prompt: text, token ids, or a mapping with ``prompt``, ``prompt_token_ids`` or ``messages``.
            params: sampling parameters; the defaults if absent.
            request_id: unique among live requests; counted up over the engine's life if absent.
            samples: indices of the samples wanted, all ``params.n`` if absent.
            stream_text: report text as it grows, at the price of detokenizing every step.

        Returns:
            the request's id.

        Raises:
            ValueError: the request is refused; the engine and its other requests are as before.
        """
        params = params if params is not None else SamplingParams()
        token_ids = self.tokenizer.prompt_ids(prompt) if self.tokenizer is not None else _ids_without_tokenizer(prompt)
        if self.tokenizer is None and (params.stop or stream_text):
            raise ValueError("stop needs text, and this checkpoint has no tokenizer")
        self._check_ids(params)
        if request_id is None:
            request_id = self._make_id()
        elif self.scheduler.is_live(request_id):
            raise ValueError(f"id {request_id!r} is in use by a request that has not finished")
        shared = Prompt(token_ids)
        max_tokens = self.scheduler.max_tokens_for(len(shared), params.max_tokens)
        wanted = range(params.n) if samples is None else list(samples)
        if not wanted or not all(j in range(params.n) for j in wanted):
            raise ValueError(f"samples must be indices from 0 to {params.n - 1} (n is {params.n}), not {wanted}")
        requests = [
            Request(request_id, j, shared, params, sample_seed(request_id, params.seed, j, self._seed), max_tokens)
            for j in wanted
        ]
        self.scheduler.add(requests)
        for request in requests:
            stream = self.tokenizer.stream(params.stop) if stream_text and self.tokenizer is not None else None
            self._samples[request.key] = _Sample(request, stream)
        if self._log is not None:
            self._log.add(requests)
        return request_id

    def abort(self, request_id: str) -> list[CompletionOutput]:
        """End a request now; what its live samples have so far is returned. An unknown id gives an empty list."""
        return self._end(request_id, None, FinishReason.ABORT)

    # The loop

    def step(self) -> list[SampleUpdate]:
        """Plan, execute and commit: one step of the batch.

        Returns:
            what was added to which sample; empty if nothing was to be done.

        Raises:
            NonFiniteLogitsError: a ``FloatingPointError`` naming requests whose logits held a NaN. Nothing has
                advanced; the next ``step`` goes on once they are aborted.
        """
        return self._take_undelivered() or self._fresh_step()

    def run_step(self) -> list[SampleUpdate]:
        """``step`` that ends requests with NaN logits as ``error`` and goes on with the others."""
        return self._take_undelivered() or self._run_fresh_step()

    def generate(
        self,
        prompts: Prompts | Sequence[Prompts],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for all prompts and wait.

        Args:
            prompts: one prompt or a list of them (a list of ids is one prompt).
            params: for all, or one for each.
            use_tqdm: show a progress bar on standard error.

        Returns:
            one result a prompt, in order. Samples whose logits held a NaN have the finish reason ``error``.

        Raises:
            ValueError: a prompt or its parameters are refused (the message says which); none is generated then.
        """
        batch = _prompt_list(prompts)
        all_params = _params_list(params, len(batch))
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
            for request_id in ids:
                self.abort(request_id)
            raise
        outputs = [[finished[i][j] for j in sorted(finished[i])] for i in ids]
        return [RequestOutput(i, out[0].prompt_token_ids, out) for i, out in zip(ids, outputs, strict=True)]

    def stream(self, prompt: Prompts, params: SamplingParams | None = None) -> Iterator[SampleUpdate]:
        """Generate for one prompt and yield updates as they come; closing the iterator aborts the request.

        Other requests make progress meanwhile; their updates wait for the next ``step``.

        Raises:
            ValueError: the request is refused, at the call.
        """
        return self._stream(self.add_request(prompt, params, stream_text=self.tokenizer is not None))

    def _stream(self, request_id: str) -> Iterator[SampleUpdate]:
        try:
            while self.scheduler.is_live(request_id) or request_id in self._undelivered:
                yield from self._updates_of((request_id,))
        finally:
            self.abort(request_id)
            self._undelivered.pop(request_id, None)

    def metrics(self) -> dict[str, int | float]:
        """Counts and sizes for a summary: tokens, steps, preemptions, the pool, peak device memory, start-up time."""
        counters = asdict(self.scheduler.counters)
        limits = self.scheduler.config
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return {
            **counters,
            "preemptions": counters["num_preemptions"],
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

    def _advance(self) -> StepResult | None:
        """Fill the pipeline, then wait for its oldest step; None if there is nothing to do."""
        scheduler = self.scheduler
        try:
            while scheduler.num_in_flight < scheduler.config.depth and (plan := scheduler.plan()) is not None:
                if self._log is not None:
                    self._log.plan(plan)
                self.executor.submit(plan)
            return self.executor.collect() if scheduler.num_in_flight else None
        except BaseException:
            # Whatever was in flight is lost; sequences keep their committed tokens and start again.
            self.executor.abandon()
            scheduler.abandon()
            if self._log is not None:
                self._log.abandon()
            raise

    def _updates_of(self, request_ids: Container[str]) -> list[SampleUpdate]:
        """Updates of some requests: those that wait to be delivered, or else what one more step brings.

        Those of all other requests wait for whoever asks next, and are in place before anything is handed out.
        """
        waiting = [request_id for request_id in self._undelivered if request_id in request_ids]
        if waiting:
            return [update for request_id in waiting for update in self._undelivered.pop(request_id)]
        updates = self._run_fresh_step()
        for update in updates:
            if update.request_id not in request_ids:
                self._undelivered.setdefault(update.request_id, []).append(update)
        return [update for update in updates if update.request_id in request_ids]

    def _take_undelivered(self) -> list[SampleUpdate]:
        """Updates that ``generate`` and ``stream`` met and were not theirs, in order within each request."""
        waiting, self._undelivered = self._undelivered, {}
        return [update for updates in waiting.values() for update in updates]

    def _fresh_step(self) -> list[SampleUpdate]:
        """``step``, when nothing waits to be delivered."""
        if self._held is None:
            self._held = self._advance()
        if self._held is None:
            return []
        result = self._held
        commit = self.scheduler.commit(result)
        self._held = None
        if self._log is not None:
            self._log.commit(result)
        return self._take_in(result.payload, commit.accepted, commit.finished)

    def _run_fresh_step(self) -> list[SampleUpdate]:
        """``run_step``, when nothing waits to be delivered."""
        try:
            return self._fresh_step()
        except NonFiniteLogitsError as error:
            updates = []
            for request in error.requests:
                ended = self._end(request.id, request.sample, FinishReason.ERROR)
                updates += [SampleUpdate(o.request_id, o.sample, [], [], output=o) for o in ended]
            return updates

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
            prompt_token_ids=list(request.prompt.token_ids),
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
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise ValueError(f"{name} holds {token_id}, outside the vocabulary, 0 to {vocab_size - 1}")
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if count is not None and count > vocab_size:
                raise ValueError(f"{name} must be at most the vocabulary's size, {vocab_size}, not {count}")

    def _make_id(self) -> str:
        while True:
            request_id = f"request-{self._num_made_ids}"
            self._num_made_ids += 1
            if not self.scheduler.is_live(request_id):
                return request_id


@contextmanager
def _out_of_memory_as_mistake() -> Iterator[None]:
    """Tell a model and cache that are too large for the memory as a ``ValueError`` that says what to lower."""
    try:
        yield
    except RuntimeError as error:
        # torch has a class of its own for a full GPU, and none for a full host.
        if "allocate memory" not in str(error) and "out of memory" not in str(error):
            raise
        raise ValueError("num_blocks must be smaller: the model and its cache do not fit into memory") from error


def _ids_without_tokenizer(prompt: Prompts) -> list[int]:
    if isinstance(prompt, str) or (isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt):
        raise ValueError("this checkpoint has no tokenizer.json, so the prompt must be prompt_token_ids")
    return token_ids_of(prompt)


def _prompt_list(prompts: Prompts | Sequence[Prompts]) -> list[Prompts]:
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"params must be one for all prompts or one for each, not {len(params)} for {count}")
    return list(params)
