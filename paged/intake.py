"""What a caller asks for, in the forms that the engine goes on with; a ``ValueError`` says what does not suit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paged.core.request import SamplingParams
from paged.runner.text import Tokenizer, token_ids_of

Prompts = str | Sequence[int] | Mapping[str, Any]


def prompt_list(prompts: Prompts | Sequence[Prompts]) -> list[Prompts]:
    """One prompt or several as a list; a list of ids is one prompt."""
    if isinstance(prompts, str | Mapping) or (
        isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], int)
    ):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be one prompt or a list of prompts, not {type(prompts).__name__}")
    return list(prompts)  # type: ignore[arg-type]


def params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Parameters for each of ``count`` prompts: the defaults, the same for all, or one each."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or len(params) != count:
        raise ValueError(
            f"sampling_params must be one for all prompts or one for each, not {params!r:.60} for {count} prompts"
        )
    return list(params)


def prompt_ids(prompt: Prompts, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a prompt; without a tokenizer it must hold them."""
    if tokenizer is not None:
        return tokenizer.prompt_ids(prompt)
    if isinstance(prompt, str) or (isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt):
        raise ValueError("this checkpoint has no tokenizer.json, so the prompt must be prompt_token_ids")
    return token_ids_of(prompt)


def is_output_len(value: int | None) -> bool:
    """Whether ``value`` can be the number of tokens of a sample, or says nothing of it."""
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
