"""Reads the files that workloads come in: their lines and a line's JSON object, with a sentence for any misfit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paged.core.json_files import too_many_digits


def lines_of(path: Path, *, source: Path | None = None) -> list[bytes]:
    """A file's lines without their ends (a carriage return may be left) and without a byte order mark.

    The last element is what follows the last newline: nothing, unless the file ends in the middle of a line.

    Raises:
        ValueError: the file cannot be read; `source` is the file to name then, if `path` is a copy.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{str(source or path)!r} cannot be read ({error.strerror})") from error
    return content.removeprefix(b"\xef\xbb\xbf").split(b"\n")


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object that a line holds; anything else, and a key given twice, is a ``ValueError``."""
    try:
        values = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("not valid JSON: nested too deeply") from error
    except ValueError as error:
        told = too_many_digits(error)
        if told is None:
            raise
        raise ValueError(told) from error
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
