"""Reading files of JSON: what is wrong with one is a sentence that names the file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """What a file holds; one that can't be read or is no JSON is a ``ValueError`` that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """A file's JSON object; anything else there is a ``ValueError`` that names the file."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value


def too_many_digits(error: Exception) -> str | None:
    """What is asked of numbers, where an error is Python's refusal to read one from its digits; else None."""
    if not str(error).startswith("Exceeds the limit"):
        return None
    return f"must hold whole numbers of at most {sys.get_int_max_str_digits()} digits"
