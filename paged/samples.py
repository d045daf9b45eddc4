"""What has come of each live sample so far, and the updates and outputs that are made of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from paged.core.request import Request
from paged.core.scheduler import Finished
from paged.outputs import CompletionOutput, SampleUpdate
from paged.runner.payload import PromptScore, StepPayload, TopLogprobs
from paged.runner.text import TextStream, Tokenizer


@dataclass(slots=True)
class Sample:
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


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave the samples, or what an abort or an error ended without one.

    Attributes:
        payload: the runner's report; None if no step was computed.
        accepted: for each sampled row of the payload the request that got its token, None if the row was dropped.
        finished: samples that have ended.
    """

    payload: StepPayload | None
    accepted: Sequence[Request | None]
    finished: Sequence[Finished]

    @property
    def requests(self) -> Iterator[Request]:
        """Those that there will be an update for."""
        yield from (request for request in self.accepted if request is not None)
        yield from (end.request for end in self.finished)


class Samples:
    """The live samples of an engine, and the updates that have not been delivered yet.

    Args:
        tokenizer: None if there is no text.
        numerics_id: written into every output.

    Attributes:
        live: by ``id()`` of their requests: a forgotten request's name may have been taken over by another one.
        undelivered: updates by request id, in order.
    """

    def __init__(self, tokenizer: Tokenizer | None, numerics_id: str) -> None:
        self.live: dict[int, Sample] = {}
        self.undelivered: dict[str, list[SampleUpdate]] = {}
        self._tokenizer = tokenizer
        self._numerics_id = numerics_id

    def add(self, requests: Iterable[Request], *, stream_text: bool) -> None:
        """Samples begin; with ``stream_text`` their updates bring text as it grows."""
        tokenizer = self._tokenizer if stream_text else None
        for request in requests:
            stream = tokenizer.stream(request.params.stop) if tokenizer is not None else None
            self.live[id(request)] = Sample(request, stream)

    def is_current(self, request: Request) -> bool:
        """Whether the request's sample is live; a forgotten one is not, even if its name is in use again."""
        return id(request) in self.live

    def take_in(self, step_output: StepOutput) -> None:
        """Add to the samples what came, and hold the updates until somebody asks for them."""
        ending: dict[int, SampleUpdate | None] = {id(end.request): None for end in step_output.finished}
        if step_output.payload is not None:
            self._take_in_tokens(step_output.payload, step_output.accepted, ending)
        for end in step_output.finished:
            request = end.request
            sample = self.live.get(id(request))
            if sample is None:
                continue
            update = ending[id(request)]
            if update is None:
                update = SampleUpdate(request.id, request.sample, [], [])
                self.undelivered.setdefault(request.id, []).append(update)
            update.output = self.output(end)
            if sample.stream is not None and step_output.payload is not None:
                update.text += update.output.text[sample.stream.num_released :]

    def _take_in_tokens(
        self,
        payload: StepPayload,
        accepted: Sequence[Request | None],
        ending: dict[int, SampleUpdate | None],
    ) -> None:
        """Add the tokens of a step to their samples; of those in ``ending`` the updates are noted there."""
        for scored, first, scores in payload.scores:
            if (sample := self.live.get(id(scored))) is not None:
                sample.prompt_logprobs.update(enumerate(scores, first))
        for row, top in payload.top_logprobs.items():
            if (sample := self.live.get(id(accepted[row]))) is not None:
                sample.top_logprobs.append(top)
        for row, stop in payload.stops.items():
            if (sample := self.live.get(id(accepted[row]))) is not None:
                sample.stop_reason, sample.is_stopped_by_token = stop.reason, stop.is_token
        # What follows runs for every row of every step, and the device may have to wait for it.
        live, undelivered = self.live, self.undelivered
        columns = zip(accepted, payload.tokens, payload.logprobs, payload.behavior_logprobs, strict=True)
        for request, token, logprob, behavior_logprob in columns:
            if request is None or (sample := live.get(id(request))) is None:
                continue
            sample.token_ids.append(token)
            sample.logprobs.append(logprob)
            sample.behavior_logprobs.append(behavior_logprob)
            update = SampleUpdate(request.id, request.sample, [token], [logprob])
            if sample.stream is not None and not sample.is_stopped_by_token:
                sample.stream.push(token)
                update.text = sample.stream.release()
            if ending and id(request) in ending:
                ending[id(request)] = update
            if (waiting := undelivered.get(request.id)) is None:
                undelivered[request.id] = [update]
            else:
                waiting.append(update)

    def output(self, end: Finished) -> CompletionOutput:
        """The finished sample's record; forgets the sample."""
        sample = self.live.pop(id(end.request))
        request = sample.request
        text = ""
        if self._tokenizer is not None:
            text = self._tokenizer.decode(sample.token_ids[:-1] if sample.is_stopped_by_token else sample.token_ids)
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
            numerics_id=self._numerics_id,
        )

    def forget(self, request_ids: Collection[str]) -> None:
        """Drop all that there is of some requests."""
        for request_id in request_ids:
            self.undelivered.pop(request_id, None)
        for key in [key for key, sample in self.live.items() if sample.request.id in request_ids]:
            del self.live[key]

    def take_updates(self, request_ids: Iterable[str]) -> list[SampleUpdate]:
        """Hand out the updates of some requests that have any, in order within each."""
        return [update for request_id in request_ids for update in self.undelivered.pop(request_id)]

    def drop_updates(self, request_id: str, samples: Collection[int]) -> None:
        """Drop the updates of some samples of a request, because outputs that were given hold them."""
        rest = [update for update in self.undelivered.pop(request_id, []) if update.sample not in samples]
        if rest:
            self.undelivered[request_id] = rest
