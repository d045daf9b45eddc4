"""Requests that somebody recorded: Azure's and Mooncake's traces and this project's own results, as jobs."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from paged.core.prompt import AnyPrompt, HashedPrompt, OpaquePrompt, Prompt
from paged.core.request import SamplingParams
from paged.core.sequence import COMPLETE
from paged.workload.job import MAX_LENGTH, MAX_SECONDS, InputFiles, Job, SizedWorkload, capped
from paged.workload.jsonl import lines_of, parse_object
from paged.workload.prompts import PromptLine, read_prompts

logger = logging.getLogger(__name__)

HASH_BLOCK_SIZE: Final = 512
"""Tokens that one of Mooncake's hashes stands for."""

_AZURE: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE: Final = ("timestamp", "input_length", "output_length")
_RESULTS: Final = ("id", "sample", "prompt_token_ids", "token_ids", "finish_reason")
_PROMPTS: Final = "inputs/prompts.jsonl"
"""Where a run keeps its prompts, from the folder of its results."""


class Row(NamedTuple):
    """What a trace says of one request; `arrival_s` counts from any moment, `output_len` may be 0."""

    id: str
    arrival_s: float
    prompt: AnyPrompt
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWorkload(SizedWorkload):
    """The requests of a trace, the first of which arrives at 0.

    A trace that is not in order of time is sorted; an output of no token counts as one token. Both are logged.

    Attributes:
        path: the trace; for `results` a run's folder will do.
        format: `azure`, `mooncake`, `results`, or `auto`, which looks at the file.
        speedup: divides the times of arrival.
        max_requests: takes only the first ones; None for all.
        cap: most tokens of an output: longer ones are cut, and policies know this bound; None lets each output's own
            length be its bound.
        seed: of the token ids that stand for unknown prompts where they are sampled.
    """

    path: Path
    format: str
    speedup: float
    max_requests: int | None
    cap: int | None
    seed: int

    def input_files(self) -> list[InputFiles]:
        """The trace and what is read with it."""
        return [trace_files(self.path, self.format)]

    def jobs(self) -> list[Job]:
        """All jobs by time of arrival; an id is the line that holds the request, or of results its own."""
        try:
            rows = read_trace(self.path, self.format)
        except ValueError as error:
            raise ValueError(f"workload.path must be a trace: {error}") from error
        if any(earlier.arrival_s > later.arrival_s for earlier, later in itertools.pairwise(rows)):
            logger.warning("%s is not in order of time; it has been sorted", self.path)
            rows.sort(key=lambda row: row.arrival_s)
        rows = rows[: self.max_requests]
        if empty := sum(not row.output_len for row in rows):
            logger.warning("%s: %d of %d requests generated no token, which counts as one", self.path, empty, len(rows))
        first_s = rows[0].arrival_s
        jobs = []
        for row in rows:
            output_len, max_tokens = capped(row.output_len or 1, self.cap)
            arrival_s = (row.arrival_s - first_s) / self.speedup
            jobs.append(
                Job(id=row.id, prompt=row.prompt, output_len=output_len, max_tokens=max_tokens, arrival_s=arrival_s)
            )
        return jobs


def read_trace(path: Path, form: str = "auto") -> list[Row]:
    """The requests of a trace in the order of its lines.

    Raises:
        ValueError: the file cannot be read, holds no request, or has a malformed line, whose number is told.
    """
    path = _file_of(path)
    lines = lines_of(path)
    if form == "auto":
        form = _form(path, lines)
    rows = _READERS[form](path, lines)
    if not rows:
        raise ValueError(f"{str(path)!r} holds no request")
    return rows


def read_lengths(path: Path, *, outputs: bool) -> list[int]:
    """The lengths in a file: whole numbers, one a line, or those of a trace's outputs or prompts.

    Raises:
        ValueError: as for `read_trace`.
    """
    if path.is_file():
        lines = lines_of(path)
        if next((line for line in lines if line.strip()), b"").strip().isdigit():
            texts = [(number, _text(path, number, raw.strip())) for number, raw in enumerate(lines, 1) if raw.strip()]
            return [_whole(path, number, "a length", text, 1) for number, text in texts]
    rows = read_trace(path)
    return [max(1, row.output_len) if outputs else len(row.prompt) for row in rows]


def trace_files(path: Path, form: str = "auto") -> InputFiles:
    """What `read_trace` and `read_lengths` read: the trace and, beside results, the prompts that they answer."""
    path = _file_of(path)
    files = {path.name: path}
    if form == "auto":
        with contextlib.suppress(ValueError):
            form = _form(path, lines_of(path))
    prompts = path.parent / _PROMPTS
    if form == "results" and prompts.is_file():
        files[_PROMPTS] = prompts
    return files


def _file_of(path: Path) -> Path:
    return path / "results.jsonl" if path.is_dir() else path


def _form(path: Path, lines: Sequence[bytes]) -> str:
    """The form of a trace, from its first line that is not blank."""
    first = next((line.strip() for line in lines if line.strip()), b"")
    if not first:
        raise ValueError(f"{str(path)!r} holds no request")
    if first.startswith(b"{"):
        with contextlib.suppress(ValueError):
            keys = parse_object(first).keys()
            if "input_length" in keys:
                return "mooncake"
            if "token_ids" in keys:
                return "results"
    elif set(_AZURE) <= set(first.decode("utf-8", "replace").split(",")):
        return "azure"
    raise ValueError(
        f"the first line of {str(path)!r} is none of the forms azure ({','.join(_AZURE)}), mooncake (JSON with "
        f"{', '.join(_MOONCAKE)}) and results (JSON with {', '.join(_RESULTS)})"
    )


# Azure: a CSV with a header; every line after it is a request.


def _azure(path: Path, lines: Sequence[bytes]) -> list[Row]:
    header: list[str] = []
    rows: list[Row] = []
    begin: datetime | None = None
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        cells = [cell.strip() for cell in _text(path, number, raw).split(",")]
        if not header:
            header = cells
            absent = [column for column in _AZURE if column not in header]
            if absent:
                raise _misfit(path, number, f"the header must have {','.join(_AZURE)}, and lacks {absent[0]}")
            at_time, at_prompt, at_output = (header.index(column) for column in _AZURE)
            continue
        if len(cells) != len(header):
            raise _misfit(path, number, f"must have {len(header)} columns, not {len(cells)}")
        try:
            moment = datetime.fromisoformat(cells[at_time])
            begin = begin or moment
            arrival_s = (moment - begin).total_seconds()
        except (ValueError, TypeError):
            # A TypeError: some times have a zone, some have none.
            like = "such as 2023-11-16 18:15:46.680590" if begin is None else "like that of the first request"
            what = f"TIMESTAMP must be a date and time {like}, not {cells[at_time]!r}"
            raise _misfit(path, number, what) from None
        if abs(arrival_s) > MAX_SECONDS:
            raise _misfit(
                path, number, f"TIMESTAMP must be within {MAX_SECONDS:g} s of the first, not {cells[at_time]!r}"
            )
        num_prompt = _whole(path, number, "ContextTokens", cells[at_prompt], 1)
        num_output = _whole(path, number, "GeneratedTokens", cells[at_output], 0)
        name = f"line-{number}"
        rows.append(Row(name, arrival_s, OpaquePrompt(name, num_prompt), num_output))
    return rows


# Mooncake: a JSON object a line.


def _mooncake(path: Path, lines: Sequence[bytes]) -> list[Row]:
    rows: list[Row] = []
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        values = _object(path, number, raw, _MOONCAKE)
        time_ms = values["timestamp"]
        if not _is_number(time_ms) or not 0 <= time_ms <= MAX_SECONDS * 1000:
            what = f"timestamp must be milliseconds, from 0 to {MAX_SECONDS * 1000:g}, not {reprlib.repr(time_ms)}"
            raise _misfit(path, number, what)
        num_prompt = _whole(path, number, "input_length", values["input_length"], 1)
        num_output = _whole(path, number, "output_length", values["output_length"], 0)
        name, hash_ids = f"line-{number}", values.get("hash_ids")
        prompt = OpaquePrompt(name, num_prompt) if hash_ids is None else _hashed(path, number, hash_ids, num_prompt)
        rows.append(Row(name, time_ms / 1000, prompt, num_output))
    return rows


def _hashed(path: Path, number: int, hash_ids: Any, num_prompt: int) -> HashedPrompt:
    count = -(-num_prompt // HASH_BLOCK_SIZE)
    listed = isinstance(hash_ids, list) and len(hash_ids) == count
    if not listed or not all(type(each) is int for each in hash_ids):
        what = f"hash_ids must be {count} whole numbers, one for each {HASH_BLOCK_SIZE} tokens of the input"
        raise _misfit(path, number, f"{what}, not {reprlib.repr(hash_ids)}")
    return HashedPrompt(hash_ids, num_prompt, HASH_BLOCK_SIZE)


# Results: a JSON object a sample, in the order in which the samples finished.


def _results(path: Path, lines: Sequence[bytes]) -> list[Row]:
    """Samples that finished, in the order in which they were asked for, and when, if the run's prompts are there.

    Without them samples are put in the order of their ids, numbers in them by value, and come at once.
    """
    asked = _asked(path.parent / _PROMPTS)
    prompts: dict[tuple[int, ...], Prompt] = {}
    found: dict[tuple[str, int], Row] = {}
    num_unfinished = 0
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        try:
            values = _object(path, number, raw, _RESULTS)
        except ValueError:
            if number == len(lines):
                # The file ends in the middle of a line: the run was killed while it wrote.
                num_unfinished += 1
                break
            raise
        if values["finish_reason"] not in COMPLETE:
            num_unfinished += 1
            continue
        request_id, sample = values["id"], values["sample"]
        if not isinstance(request_id, str) or type(sample) is not int or sample < 0:
            what = f"id must be a text and sample a whole number, not {reprlib.repr([request_id, sample])}"
            raise _misfit(path, number, what)
        if (request_id, sample) in found:
            raise _misfit(path, number, f"id {request_id!r} has sample {sample} for the second time")
        token_ids = tuple(_ids(path, number, "prompt_token_ids", values))
        prompt = prompts.setdefault(token_ids, Prompt(token_ids))
        output_len = len(_ids(path, number, "token_ids", values))
        arrival_s = asked[request_id][1] if request_id in asked else 0.0
        found[request_id, sample] = Row(f"{request_id}-{sample}", arrival_s, prompt, output_len)
    if num_unfinished:
        logger.warning("%s: %d rows are left out, because they did not finish", path, num_unfinished)
    last = (len(asked), 0.0)
    keys = sorted(found, key=lambda key: (asked.get(key[0], last)[0], _by_number(key[0]), key[1]))
    return sorted((found[key] for key in keys), key=lambda row: row.arrival_s)


def _asked(path: Path) -> dict[str, tuple[int, float]]:
    """Place and time of arrival, by id, of the prompts that a run was given; empty if they are not there."""
    if not path.is_file():
        return {}
    lines = read_prompts(path, SamplingParams())
    return {line.id: (line.number, line.arrival_s) for line in lines if isinstance(line, PromptLine)}


def _by_number(text: str) -> list[tuple[int, int, str]]:
    """Sorts a text with its numbers by their value: `nano-9` before `nano-10`."""
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in re.split(r"(\d+)", text)]


def _ids(path: Path, number: int, field: str, values: Mapping[str, Any]) -> list[int]:
    ids = values[field]
    if not isinstance(ids, list) or not ids or not all(type(each) is int and each >= 0 for each in ids):
        raise _misfit(path, number, f"{field} must be a list of token ids, at least one, not {reprlib.repr(ids)}")
    return ids


# What all forms share


def _text(path: Path, number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _misfit(path, number, f"not UTF-8 text (byte {error.start + 1})") from None


def _object(path: Path, number: int, raw: bytes, needed: Sequence[str]) -> dict[str, Any]:
    try:
        values = parse_object(raw)
    except ValueError as error:
        raise _misfit(path, number, str(error)) from None
    for field in needed:
        if field not in values:
            raise _misfit(path, number, f"{field} is missing")
    return values


def _whole(path: Path, number: int, field: str, value: object, low: int) -> int:
    """A length, given as a number or as its digits."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if type(value) is not int or not low <= value <= MAX_LENGTH:
        what = f"{field} must be a whole number from {low} to {MAX_LENGTH}, not {reprlib.repr(value)}"
        raise _misfit(path, number, what)
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _misfit(path: Path, number: int, what: str) -> ValueError:
    return ValueError(f"{str(path)!r}, line {number}: {what}")


_READERS: Final[Mapping[str, Callable[[Path, Sequence[bytes]], list[Row]]]] = {
    "azure": _azure,
    "mooncake": _mooncake,
    "results": _results,
}
