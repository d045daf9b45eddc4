"""Owns what a run leaves behind: `results.jsonl` line by line, the numbers of `summary.json`, and their table."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from paged.core.metrics import percentile
from paged.core.sequence import COMPLETE
from paged.writing import UnwritableError, writing

if TYPE_CHECKING:
    from paged.engine import CompletionOutput

_NEEDED: Final = {"id", "sample", "finish_reason", "prompt_token_ids", "token_ids"}

Row = dict[str, Any]


class ResultsFile:
    """`results.jsonl` open for appending; a row has left the process when `write` returns.

    Its methods raise `UnwritableError` if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Append one line of strict JSON (a number that is not finite becomes null)."""
        with writing(self._path):
            self._file.write(json.dumps(_jsonable(row), allow_nan=False) + "\n")
            self._file.flush()

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError as unwritable:
            # A row that could not be written is tried once more; that was told already.
            if error is None:
                raise UnwritableError.of(unwritable, self._path) from unwritable


def result_row(output: CompletionOutput, solved: bool | None) -> Row:
    """The line of one sample; `solved` is None where the workload cannot score."""
    row: Row = {
        "id": output.request_id,
        "sample": output.sample,
        "prompt_token_ids": list(output.prompt_token_ids),
        "token_ids": list(output.token_ids),
        "text": output.text,
        "logprobs": list(output.logprobs),
        "behavior_logprobs": list(output.behavior_logprobs),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "reason": None,
        "num_preemptions": output.num_preemptions,
        "num_cached_tokens": output.num_cached_tokens,
        "numerics_id": output.numerics_id,
    }
    if output.top_logprobs is not None:
        row["top_logprobs"] = output.top_logprobs
    if output.prompt_logprobs is not None:
        row["prompt_logprobs"] = [asdict(score) for score in output.prompt_logprobs]
    if solved is not None:
        row["solved"] = solved
    return row


def refused_row(request_id: str, reason: str) -> Row:
    """The line of a request that was refused: all of its samples at once, so `sample` is null."""
    return {
        "id": request_id,
        "sample": None,
        "prompt_token_ids": [],
        "token_ids": [],
        "text": "",
        "logprobs": [],
        "behavior_logprobs": [],
        "finish_reason": "refused",
        "stop_reason": None,
        "reason": reason,
        "num_preemptions": 0,
        "num_cached_tokens": 0,
        "numerics_id": None,
    }


def read_results(path: Path) -> Iterator[Row]:
    """The rows of a results file, one at a time; a last line that was torn by a crash is left out.

    Raises:
        ValueError: for any other line that is not a row, with its number.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                if not isinstance(row, dict) or not row.keys() >= _NEEDED or not isinstance(row["id"], str):
                    raise ValueError("not a result")
            except ValueError as error:
                if not file.read(1):
                    return
                raise ValueError(f"{path}, line {number}: {error}") from error
            yield row


def keep_finished(path: Path) -> None:
    """Rewrite a results file without the rows that resuming samples again, and without a torn line.

    Rows of refusals go too, because resuming looks at them again.
    The old file stands until the new one is complete.
    """
    with replacing(path) as fresh, fresh.open("w", encoding="utf-8") as file:
        for row in read_results(path):
            if row["finish_reason"] in COMPLETE:
                file.write(json.dumps(row) + "\n")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write a file to that takes the place of `path` at the end; if it cannot be written, nothing changes.

    Raises:
        UnwritableError: it cannot be written.
    """
    fresh = path.with_suffix(".tmp")
    try:
        with writing(path):
            yield fresh
            with fresh.open("rb") as file:
                os.fsync(file.fileno())
            fresh.replace(path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise


def drop_torn_line(path: Path) -> None:
    """Cut a file of lines, if there is one, after its last newline, so that whole lines can be appended."""
    if path.is_file():
        with writing(path), path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            while end and file.seek(end - 1) >= 0 and file.read(1) != b"\n":
                end -= 1
            file.truncate(end)


class Tally:
    """Counts over the rows of a run; it keeps a few bytes a row, never the row."""

    def __init__(self) -> None:
        self.finish_reasons: Counter[str] = Counter()
        self.num_scored = 0
        self.num_solved = 0
        self.prompt_tokens = 0
        self.unfinished_tokens = 0
        self._lengths: list[int] = []

    def add(self, row: Row) -> None:
        """Count one row; lengths and scores are those of finished samples only."""
        self.finish_reasons[row["finish_reason"]] += 1
        if row["finish_reason"] in COMPLETE:
            self.prompt_tokens += len(row["prompt_token_ids"])
            self._lengths.append(len(row["token_ids"]))
            if "solved" in row:
                self.num_scored += 1
                self.num_solved += row["solved"]
        else:
            self.unfinished_tokens += len(row["token_ids"])

    def summary(self) -> dict[str, Any]:
        """Counts, lengths in tokens, and the share solved of the scored samples (null if none was scored)."""
        lengths = sorted(self._lengths)
        return {
            "num_samples": len(lengths),
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": sum(lengths),
            "unfinished_tokens": self.unfinished_tokens,
            "len_p50": percentile(lengths, 0.5),
            "len_p90": percentile(lengths, 0.9),
            "len_max": lengths[-1] if lengths else None,
            "solved": self.num_solved / self.num_scored if self.num_scored else None,
        }


def read_summary(path: Path) -> dict[str, Any] | None:
    """The summary of a run that went to its end; None if there is none."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) and summary.get("interrupted") is False else None


def versions(*names: str) -> dict[str, str]:
    """The versions of Python and of the packages `names`."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json`; if that fails (`UnwritableError`), neither half of it is left nor an older one."""
    text = json.dumps(_jsonable(summary), indent=2, allow_nan=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise UnwritableError.of(error, path) from error


def summary_table(summary: Mapping[str, Any]) -> str:
    """The lines that a person reads at the end of a run."""
    counts = sorted(summary["finish_reasons"].items(), key=lambda item: -item[1])
    samples = f"{summary['num_samples']:,} finished, {summary['output_tokens']:,} tokens"
    # The throughput counts these, too. The summary of an older run lacks the key.
    if summary.get("unfinished_tokens"):
        samples += f"; {summary['unfinished_tokens']:,} tokens of unfinished ones"
    rows = [
        ("samples", samples),
        ("reasons", ", ".join(f"{reason} {count:,}" for reason, count in counts) or "none"),
        ("throughput", "{tokens_per_s_end_to_end:,.0f} tokens/s over {elapsed_s:.1f} s".format(**summary)),
    ]
    if summary["num_samples"]:
        rows.append(("length", "p50 {len_p50:,}, p90 {len_p90:,}, max {len_max:,} tokens".format(**summary)))
    rows.append(("preemptions", "{preemptions:,}, {recomputed_tokens:,} tokens recomputed".format(**summary)))
    if summary["solved"] is not None:
        rows.append(("solved", f"{summary['solved']:.1%}"))
    if summary["interrupted"]:
        rows.append(("interrupted", "yes"))
    return "\n".join(f"{name:<12} {value}" for name, value in rows)


def _jsonable(value: Any) -> Any:
    """`value` in JSON's terms: strict JSON has neither infinities nor NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value
