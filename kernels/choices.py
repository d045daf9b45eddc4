"""What a user may choose of how sums are formed, and its checks, without torch: for commands that compute nothing."""

from __future__ import annotations

from typing import Final

MODES: Final = ("invariant", "fast")
REDUCE_DTYPES: Final = ("model", "float32")


def check_choices(k_segments: object, reduce_dtype: object) -> None:
    """Refuse, as a ``ValueError`` that names the field, what no ``Numerics`` can have."""
    if reduce_dtype not in REDUCE_DTYPES:
        raise ValueError(f"reduce_dtype must be one of {', '.join(REDUCE_DTYPES)}, not {reduce_dtype!r}")
    count = check_count("k_segments", k_segments)
    if count & (count - 1):
        raise ValueError(f"k_segments must be a power of two, not {count}")


def check_count(name: str, value: object) -> int:
    """``value``, if it is a whole number of at least 1; else a ``ValueError`` that names the field."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number, at least 1, not {value!r}")
    return value
