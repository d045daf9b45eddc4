"""Owns the file format of prompts: one JSON object a line, read into requests and, for broken lines, refusals."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from paged.core.prompt import Prompt
from paged.core.request import PROMPT_FORMS, SamplingParams, check_messages
from paged.workload.job import MAX_LENGTH, MAX_SECONDS, InputFiles, Job
from paged.workload.jsonl import lines_of, parse_object

_SAMPLING_FIELDS: Final = tuple(field.name for field in fields(SamplingParams))
_FIELDS: Final = (*PROMPT_FORMS, "id", "output_len", "arrival_s", *_SAMPLING_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """A line that asks for samples.

    Attributes:
        number: the line's number, counting from 1.
        id: the line's own `id` as text, or else `line-<number>`; unique in its file.
        prompt: text, token ids, or `{"messages": chat}`.
        params: the job's sampling parameters with the line's own in their place.
        output_len: tokens to generate, whatever they are; None if the sample ends where the model ends it.
        arrival_s: when the line arrives, in seconds from the start.
    """

    number: int
    id: str
    prompt: str | list[int] | dict[str, Any]
    params: SamplingParams
    output_len: int | None = None
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedLine:
    """A line that cannot be served, for a `reason` told in one sentence."""

    number: int
    id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsWorkload:
    """A file of prompts."""

    path: Path

    def input_files(self) -> list[InputFiles]:
        """The file."""
        return [{self.path.name: self.path}]

    def jobs(self) -> list[Job]:
        """The samples of every line by time of arrival: a line's own `n`, or else one.

        A line must have `prompt_token_ids`, and `output_len` or `max_tokens`, which is then taken for the length.
        Lines with one sample each keep their ids; otherwise all ids get the number of the sample.

        Raises:
            ValueError: the file cannot be read, or a line is broken or does not tell its lengths.
        """
        must = "workload.path must be a file of prompts"
        try:
            lines = read_prompts(self.path, SamplingParams(max_tokens=None))
        except ValueError as error:
            raise ValueError(f"{must}: {error}") from error
        served: list[PromptLine] = []
        for line in lines:
            if isinstance(line, RefusedLine):
                raise ValueError(f"{must}: {str(self.path)!r}, line {line.number}: {line.reason}")
            if not isinstance(line.prompt, list) or (line.output_len is None and line.params.max_tokens is None):
                needs = "prompt_token_ids, and output_len or max_tokens"
                raise ValueError(
                    f"{must} whose lengths are told: {str(self.path)!r}, line {line.number}: must have {needs}"
                )
            served.append(line)
        served.sort(key=lambda line: line.arrival_s)
        is_numbered = any(line.params.n > 1 for line in served)
        jobs: list[Job] = []
        for line in served:
            assert isinstance(line.prompt, list)
            prompt = Prompt(line.prompt)
            bounds = [bound for bound in (line.output_len, line.params.max_tokens) if bound is not None]
            for sample in range(line.params.n):
                jobs.append(
                    Job(
                        id=f"{line.id}-{sample}" if is_numbered else line.id,
                        prompt=prompt,
                        output_len=min(bounds),
                        max_tokens=bounds[-1],
                        arrival_s=line.arrival_s,
                    )
                )
        return jobs


def read_prompts(path: Path, defaults: SamplingParams, *, source: Path | None = None) -> list[PromptLine | RefusedLine]:
    """The lines of a prompts file in order; blank lines are skipped (but counted).

    Raises:
        ValueError: if there is no such file, it cannot be read, or it holds no line at all; `source` is the
            file to name then, if `path` is a copy.
    """
    source = source or path
    lines: list[PromptLine | RefusedLine] = []
    owners: dict[str, int] = {}
    for number, raw in enumerate(lines_of(path, source=source), start=1):
        if not raw.strip():
            continue
        line_id = f"line-{number}"
        try:
            values = parse_object(raw)
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
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")


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
    line = PromptLine(
        number=number,
        id=line_id,
        prompt=prompt,
        params=SamplingParams.from_mapping(params),
        output_len=values.get("output_len"),
        arrival_s=values.get("arrival_s", 0.0),
    )
    _check_course(line)
    return line


def _check_course(line: PromptLine) -> None:
    """Refuse a length or a time of arrival that cannot be, and a length beside something else that ends a sample."""
    length: object = line.output_len
    if length is not None:
        if type(length) is not int or not 1 <= length <= MAX_LENGTH:
            raise ValueError(f"output_len must be a whole number from 1 to {MAX_LENGTH}, not {reprlib.repr(length)}")
        for field in ("stop", "stop_token_ids"):
            if getattr(line.params, field):
                raise ValueError(f"{field} must be empty beside output_len, which alone ends the samples")
    time: object = line.arrival_s
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time <= MAX_SECONDS:
        raise ValueError(f"arrival_s must be a number of seconds from 0 to {MAX_SECONDS:g}, not {reprlib.repr(time)}")


def _check_text(value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"prompt must be a text of at least one character, not {reprlib.repr(value)}")


def _check_ids(value: object) -> None:
    if not isinstance(value, list) or not value:
        raise ValueError(f"prompt_token_ids must be a list of at least one token id, not {reprlib.repr(value)}")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(f"prompt_token_ids must be whole numbers, 0 or more, not {reprlib.repr(token)}")


_CHECKS: Final = {"prompt": _check_text, "prompt_token_ids": _check_ids, "messages": check_messages}
