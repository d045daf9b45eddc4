"""What a caller asks for: sampling parameters and requests, checked once and frozen."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any

from paged.core.checks import check_number, check_whole
from paged.core.prompt import AnyPrompt

# What a prompt can be given as.
PROMPT_FORMS = ("prompt", "prompt_token_ids", "messages")

MAX_LOGPROBS = 1024
MAX_SAMPLES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen; names and meanings follow vLLM.

    Attributes:
        n: samples drawn from one prompt, each with its own random stream.
        max_tokens: most tokens generated for a sample; ``None`` means up to ``max_seq_len``.
        temperature: divides the logits; 0 is greedy (ties go to the lowest id).
        top_p: mass of the nucleus in (0, 1], taken after ``top_k``; the smallest set that reaches it.
        top_k: number of highest logits kept; 0 or -1 keeps all.
        min_p: tokens less likely than ``min_p`` times the likeliest are dropped.
        seed: start of the random stream; ``None`` derives one from the request's id.
        stop: texts that end the sample; the result's text is cut before them, its tokens are not.
        stop_token_ids: tokens that end the sample, in addition to the model's own end tokens.
        ignore_eos: generate on past the model's own end tokens (``stop_token_ids`` still count).
        logprobs: number of most likely alternatives reported at every generated token.
        prompt_logprobs: the same for every prompt token but the first; 0 reports the prompt's tokens alone.
        presence_penalty, frequency_penalty: subtracted from logits of generated tokens, once or per occurrence.
        repetition_penalty: divides positive and multiplies negative logits of all tokens seen, prompt included.
        logit_bias: token ids and the numbers added to their logits; a mapping becomes a tuple of pairs.

    Raises:
        ValueError: naming the field and what is allowed.
    """

    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple("stop", self.stop, str))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids, int))
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        check_whole("n", self.n, 1, MAX_SAMPLES)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            check_whole("seed", self.seed, -(2**63), 2**64 - 1)
        check_whole("top_k", self.top_k, -1, 2**31 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        check_number("temperature", self.temperature, 0.0, 1e4)
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, 1e-3, 1e4)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        if any(not text for text in self.stop):
            raise ValueError("stop must not contain an empty text")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError("stop_token_ids must be token ids, 0 or more")
        if self.temperature == 0 and self.n > 1:
            raise ValueError(f"n must be 1 when temperature is 0 (greedy samples are all alike), not {self.n}")
        if 0 < self.temperature < 1e-3:
            raise ValueError(f"temperature must be 0 (greedy) or at least 0.001, not {self.temperature!r}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Parameters from a mapping such as a JSON object; an unknown key is a ``ValueError`` that names it."""
        known = {f.name for f in fields(cls)}
        for key in values:
            if key not in known:
                raise ValueError(f"{key} is not a sampling parameter; known: {', '.join(sorted(known))}")
        return cls(**values)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as the pairs that it was turned into, by ascending token id."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is drawn."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to generate: the unit that the scheduler admits, preempts and finishes.

    A caller's request with ``n`` samples becomes ``n`` of these, which share the ``prompt`` object.

    Attributes:
        id: the caller's request id; (id, sample) is unique among live requests.
        sample: index of the sample within its request.
        prompt: the prompt.
        params: the sampling parameters of the whole request.
        seed: 64-bit start of this sample's random stream.
        max_tokens: most tokens to generate, resolved against the engine's limits.
        output_len: for measuring and simulation: the sample ends with this many tokens, as if the last one were an
            end token, and no end token ends it before. The executor's business: no decision looks at it.
    """

    id: str
    sample: int
    prompt: AnyPrompt
    params: SamplingParams
    seed: int
    max_tokens: int
    output_len: int | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What tells this sample from all other live ones."""
        return (self.id, self.sample)


def check_messages(messages: object) -> None:
    """Refuse, as a ``ValueError``, what is no conversation: a list of objects with the role and the content of each.

    Content is a text or a list of parts, which are objects; beside ``tool_calls`` it may be None.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a list of at least one message, not {reprlib.repr(messages)}")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(
                f"every one of messages must be an object with role and content, not {reprlib.repr(message)}"
            )
        content = message["content"]
        is_parts = isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content)
        is_absent = content is None and bool(message.get("tool_calls"))
        if not isinstance(content, str) and not is_parts and not is_absent:
            raise ValueError(f"content in messages must be a text or a list of objects, not {reprlib.repr(content)}")


def stable_hash(*parts: str | int) -> int:
    """64-bit hash of ``parts``, the same in every process and on every machine (unlike ``hash()``)."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def sample_seed(request_id: str, seed: int | None, sample: int, engine_seed: int = 0) -> int:
    """Start of one sample's random stream: from the user's seed, or else from the engine's and the request's id."""
    if seed is not None:
        return stable_hash("seed", seed, sample)
    return stable_hash("id", engine_seed, request_id, sample)


def _as_tuple(name: str, value: object, kind: type) -> tuple[Any, ...]:
    items = (value,) if isinstance(value, kind) else value
    if isinstance(items, str | bytes) or not isinstance(items, Sequence):
        raise ValueError(f"{name} must be a list of {kind.__name__}, not {value!r}")
    for item in items:
        if not isinstance(item, kind) or isinstance(item, bool):
            raise ValueError(f"{name} must be a list of {kind.__name__}, not one with {item!r}")
    return tuple(items)


def _as_bias(value: object) -> tuple[tuple[int, float], ...]:
    if isinstance(value, tuple):
        value = dict(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, not {value!r}")
    bias: dict[int, float] = {}
    for token, number in value.items():
        # JSON object keys are texts.
        text = str(token)
        if not text.isdecimal():
            raise ValueError(f"logit_bias must map token ids to numbers, not the key {token!r}")
        check_number(f"logit_bias[{text}]", number, -1e4, 1e4)
        if int(text) in bias:
            raise ValueError(f"logit_bias holds token id {int(text)} twice")
        bias[int(text)] = float(number)
    return tuple(sorted(bias.items()))
