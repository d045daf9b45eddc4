"""Between text and token ids: the checkpoint's tokenizer and chat template, and text that grows token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from paged.core.json_files import read_json_object
from paged.core.request import PROMPT_FORMS, check_messages


class Tokenizer:
    """A checkpoint's ``tokenizer.json`` and, if it has one, its chat template.

    Args:
        folder: the checkpoint's folder.

    Raises:
        ValueError: ``tokenizer.json`` is absent or unreadable.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path} does not exist; without a tokenizer prompts must be prompt_token_ids")
        try:
            self._tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from None
        config = folder / "tokenizer_config.json"
        self._config = read_json_object(config) if config.is_file() else {}
        self._template_text = _chat_template(folder, self._config)
        self._folder = folder

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, with the special tokens that the tokenizer adds by itself unless told otherwise."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the prompt must be text that UTF-8 can hold: {error.reason}") from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids`` without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Prompt text for a conversation, as the checkpoint's own template writes it.

        Raises:
            ValueError: there is no template, ``messages`` are none (see ``check_messages``), or the template refuses.
        """
        if self._template_text is None:
            raise ValueError(f"messages needs a chat template, and {self._folder} has none")
        check_messages(messages)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        special = {name: _token_text(self._config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        try:
            template = environment.from_string(self._template_text)
            return template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **special)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ValueError(f"messages do not suit the chat template: {error}") from None

    def prompt_ids(self, prompt: str | Sequence[int] | Mapping[str, Any]) -> list[int]:
        """Token ids of a prompt given as text, as ids, or as an object with one of the keys below.

        Args:
            prompt: text, token ids, or a mapping with ``prompt``, ``prompt_token_ids`` or ``messages``.

        Raises:
            ValueError: it is none of these.
        """
        if isinstance(prompt, str):
            return self.encode(prompt)
        if isinstance(prompt, Mapping):
            check_prompt_form(prompt)
            if "messages" in prompt:
                # The template has written the special tokens.
                return self.encode(self.apply_chat_template(prompt["messages"]), add_special_tokens=False)
            if "prompt" in prompt:
                if not isinstance(prompt["prompt"], str):
                    raise ValueError(f"prompt must be text, not {type(prompt['prompt']).__name__}")
                return self.encode(prompt["prompt"])
        return token_ids_of(prompt)

    def stream(self, stop: Sequence[str] = ()) -> TextStream:
        """A fresh stream of text, empty so far, that watches for the texts ``stop``."""
        return TextStream(self, stop)

    def _decode_stream(self) -> DecodeStream:
        return DecodeStream(skip_special_tokens=True)


class TextStream:
    """Text of one sample as its tokens come, watched for stop texts.

    Attributes:
        text: everything readable so far; a character whose bytes are incomplete is not in it yet.
        stopped_by: the stop text found first, or None.
        num_released: characters that ``release`` has handed out.
    """

    __slots__ = ("_decoder", "_stop", "_tokenizer", "num_released", "stopped_by", "text")

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = tokenizer._decode_stream()
        self.num_released = 0
        self.text = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> bool:
        """Append a token; whether the text now holds a stop text."""
        try:
            piece = self._decoder.step(self._tokenizer._tokenizer, token_id)
        except Exception:  # bytes that can't be joined to what came before: start over from this token
            self._decoder = self._tokenizer._decode_stream()
            piece = self._decoder.step(self._tokenizer._tokenizer, token_id)
        if piece:
            searched = len(self.text)
            self.text += piece
            self.stopped_by = self.stopped_by or first_stop(self.text, self._stop, searched)
        return self.stopped_by is not None

    def release(self) -> str:
        """Text that has become certain since the last call: what could be the start of a stop text is held back."""
        end = len(self.text)
        if self.stopped_by is not None:
            end = self.text.index(self.stopped_by)
        else:
            for length in range(min(end, max(map(len, self._stop), default=1) - 1), 0, -1):
                if any(text.startswith(self.text[end - length :]) for text in self._stop):
                    end -= length
                    break
        piece = self.text[self.num_released : end]
        self.num_released = max(self.num_released, end)
        return piece


def first_stop(text: str, stop: Sequence[str], num_searched: int = 0) -> str | None:
    """The text of ``stop`` that occurs first in ``text``; the first ``num_searched`` characters held none."""
    found = [(text.find(item, max(0, num_searched - len(item) + 1)), item) for item in stop]
    return min(((at, item) for at, item in found if at >= 0), key=lambda hit: hit[0], default=(0, None))[1]


def check_prompt_form(prompt: Mapping[str, Any]) -> None:
    """Refuse a mapping that is not exactly one of ``PROMPT_FORMS``."""
    if len(prompt) != 1 or not prompt.keys() <= set(PROMPT_FORMS):
        forms, keys = ", ".join(PROMPT_FORMS), ", ".join(map(str, prompt)) or "nothing"
        raise ValueError(f"the prompt must hold exactly one of {forms}, not {keys}")


def token_ids_of(prompt: object) -> list[int]:
    """Token ids of a prompt that needs no tokenizer: a list of ids, or a mapping with ``prompt_token_ids``."""
    if isinstance(prompt, Mapping):
        check_prompt_form(prompt)
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise ValueError(f"the prompt must be text, prompt_token_ids or messages, not {type(prompt).__name__}")
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ValueError(f"prompt_token_ids must be whole numbers, not {token_id!r}")
    return list(ids)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next((entry.get("template") for entry in named), None)
    return template if isinstance(template, str) else None


def _token_text(token: object) -> str:
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token or "")


def _refuse(message: str) -> None:
    raise TemplateError(message)
