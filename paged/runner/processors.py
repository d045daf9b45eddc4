"""How many processors this process may use, which may be fewer than the machine has."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
"""Where a container's share of the processors' time is told: microseconds in a period of so many, or ``max``."""


def num_processors() -> int:
    """Processors that this process may run on, or whose time it may use up, whichever is less; at least 1."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota_us, period_us = map(int, QUOTA.read_text().split())
        found = min(found, max(1, quota_us // period_us))
    return found
