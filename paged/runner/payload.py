"""What the runner reports of a step beside the tokens: log-probabilities, stops and scores, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from paged.core.request import Request

# Token ids, most likely first, and their log-probabilities.
TopLogprobs = tuple[list[int], list[float]]


@dataclass(frozen=True, slots=True)
class PromptScore:
    """Log-probability of one prompt token given those before it.

    Attributes:
        token_id: the prompt's token.
        logprob: under the untruncated distribution at the request's temperature.
        top: the most likely tokens at this position, as many as were asked for.
    """

    token_id: int
    logprob: float
    top: TopLogprobs


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a sampled token ends its sequence.

    Attributes:
        reason: the stop token's id or the stop text; None for the model's own end tokens.
        is_token: whether the last token itself is the stop, and so no part of the text.
    """

    reason: int | str | None
    is_token: bool


@dataclass(frozen=True, slots=True)
class StepPayload:
    """What a step reports beside the tokens; indices are those of the result's ``tokens``.

    Attributes:
        tokens, logprobs, behavior_logprobs: parallel to the result's tokens.
        top_logprobs: by index, for rows that asked for alternatives.
        stops: by index, for rows that stopped.
        scores: (request, position of the first scored token, scores in order), for chunks of scored prompts.
    """

    tokens: list[int]
    logprobs: list[float]
    behavior_logprobs: list[float]
    top_logprobs: dict[int, TopLogprobs]
    stops: dict[int, Stop]
    scores: list[tuple[Request, int, list[PromptScore]]]
