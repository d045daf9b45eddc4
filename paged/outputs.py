"""What an engine hands out: finished samples, finished requests, and the updates of one step."""

from __future__ import annotations

from dataclasses import dataclass

from paged.runner.payload import PromptScore, TopLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One finished sample.

    Attributes:
        request_id, sample: whose it is.
        prompt_token_ids: the prompt as the model saw it.
        token_ids: what was generated, the token that completed a stop included.
        text: readable text of it, cut before a stop text; empty without a tokenizer.
        logprobs: log-probability of each of ``token_ids``, untruncated, at the request's temperature.
        behavior_logprobs: the same under the distribution that was sampled from (penalties, bias, truncation); for a
            greedy sample that of the processed logits at temperature 1.
        top_logprobs: most likely tokens at each position, ids and logprobs, if asked for.
        prompt_logprobs: for each prompt token but the first, its logprob and the alternatives, if asked for.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``.
        stop_reason: the stop token or text, None for the model's own end tokens.
        num_preemptions: times it was preempted and computed again.
        num_cached_tokens: prompt tokens taken over from the cache.
        numerics_id: constants that fixed the bits.
    """

    request_id: str
    sample: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    logprobs: list[float]
    behavior_logprobs: list[float]
    top_logprobs: list[TopLogprobs] | None
    prompt_logprobs: list[PromptScore] | None
    finish_reason: str
    stop_reason: int | str | None
    num_preemptions: int
    num_cached_tokens: int
    numerics_id: str

    @property
    def cumulative_logprob(self) -> float:
        """Sum of ``logprobs``."""
        return sum(self.logprobs)


@dataclass(slots=True)
class RequestOutput:
    """All samples of one request, in the order of their indices."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


@dataclass(slots=True)
class SampleUpdate:
    """What one step added to one sample.

    Attributes:
        request_id, sample: whose it is.
        token_ids, logprobs: new tokens, none if the step only ended the sample.
        text: new text that a stop text can no longer take back; only for requests added with ``stream_text``.
        output: the whole sample once it has finished.
    """

    request_id: str
    sample: int
    token_ids: list[int]
    logprobs: list[float]
    text: str = ""
    output: CompletionOutput | None = None
