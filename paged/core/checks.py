"""Checks of numbers that somebody gives, with the sentence that names the field and what is allowed."""

from __future__ import annotations

import sys


def check_whole(name: str, value: object, low: int, high: int | None = None) -> None:
    """Refuse, as a ``ValueError``, what is not a whole number from ``low`` to ``high``; None: there is no highest."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be a whole number, {allowed}, not {value!r}")


def check_number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    """Refuse, as a ``ValueError``, what is not a number from ``low`` to ``high``, without ``low`` if that is open."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not is_number or (open_low and value == low):
        allowed = f"above {low:g} and at most {high:g}" if open_low else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} must be a number {allowed}, not {value!r}")


def is_positive(value: object) -> bool:
    """Whether ``value`` is a number above 0 that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
