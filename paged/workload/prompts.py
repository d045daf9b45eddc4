"""Owns the file format of prompts: one JSON object a line, read into requests and, for broken lines, refusals."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from paged.core.request import PROMPT_FORMS, SamplingParams

_SAMPLING_FIELDS: Final = tuple(field.name for field in fields(SamplingParams))
_FIELDS: Final = (*PROMPT_FORMS, "id", *_SAMPLING_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """A line that asks for samples.

    Attributes:
        number: the line's number, counting from 1.
        id: the line's own `id` as text, or else `line-<number>`; unique in its file.
        prompt: text, token ids, or `{"messages": chat}`.
        params: the job's sampling parameters with the line's own in their place.
    """

    number: int
    id: str
    prompt: str | list[int] | dict[str, Any]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedLine:
    """A line that cannot be served, for a `reason` told in one sentence."""

    number: int
    id: str
    reason: str


def read_prompts(path: Path, defaults: SamplingParams, *, source: Path | None = None) -> list[PromptLine | RefusedLine]:
    """The lines of a prompts file in order; blank lines are skipped (but counted).

    Raises:
        ValueError: if there is no such file, it cannot be read, or it holds no line at all; `source` is the
            file to name then, if `path` is a copy.
    """
    source = source or path
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{str(source)!r} cannot be read ({error.strerror})") from error
    lines: list[PromptLine | RefusedLine] = []
    owners: dict[str, int] = {}
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        line_id = f"line-{number}"
        try:
            values = _parse(raw)
            line_id = _own_id(values, line_id)
            if line_id in owners:
                taken, line_id = line_id, f"line-{number}"
                raise ValueError(f"id {taken!r} was already used by line {owners[taken]}")
            line: PromptLine | RefusedLine = _request(values, number, line_id, defaults)
        except ValueError as error:
            line = RefusedLine(number=number, id=line_id, reason=str(error))
        owners[line_id] = number
        lines.append(line)
    if not lines:
        raise ValueError(f"{str(source)!r} holds no prompt")
    return lines


def write_prompts(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write lines, given as what their JSON objects hold, as a prompts file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        values = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("not valid JSON: nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError("must be a JSON object")
    return values


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{twice} is given twice")
    return values


def _own_id(values: dict[str, Any], default: str) -> str:
    own = values.get("id")
    if own is None:
        return default
    if isinstance(own, bool) or not isinstance(own, str | int) or own == "":
        raise ValueError(f"id must be a text or a whole number, not {reprlib.repr(own)}")
    return str(own)


def _request(values: dict[str, Any], number: int, line_id: str, defaults: SamplingParams) -> PromptLine:
    given = [form for form in PROMPT_FORMS if form in values]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        raise ValueError(f"exactly one of {', '.join(PROMPT_FORMS)} must be given, not {found}")
    for key in values:
        if key not in _FIELDS:
            near = get_close_matches(key, _FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_FIELDS)}"
            raise ValueError(f"{key} is not a field of a prompt; {hint}")
    form = given[0]
    _CHECKS[form](values[form])
    params = {name: values.get(name, getattr(defaults, name)) for name in _SAMPLING_FIELDS}
    prompt = {form: values[form]} if form == "messages" else values[form]
    return PromptLine(number=number, id=line_id, prompt=prompt, params=SamplingParams.from_mapping(params))


def _check_text(value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"prompt must be a text of at least one character, not {reprlib.repr(value)}")


def _check_ids(value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise ValueError(f"prompt_token_ids must be a list of at least one token id, not {reprlib.repr(value)}")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(f"prompt_token_ids must be whole numbers, 0 or more, not {reprlib.repr(token)}")


def _check_messages(value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages must be a list of at least one message, not {reprlib.repr(value)}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(
                f"every one of messages must be an object with role and content, not {reprlib.repr(message)}"
            )


_CHECKS: Final = {"prompt": _check_text, "prompt_token_ids": _check_ids, "messages": _check_messages}
