"""Checks that a process counts the processors that it may use, not those of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paged.runner import processors
from paged.runner.processors import num_processors


@pytest.mark.parametrize(
    ("told", "expected"),
    [("max 100000\n", 6), ("250000 100000\n", 2), ("50000 100000\n", 1), ("900000 100000\n", 6), (None, 6)],
)
def test_processors_that_may_be_used_are_counted(
    told: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a taskset or a container's, not the machine's; of a quota, whole ones."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(10, 16)))
    monkeypatch.setattr(processors, "QUOTA", tmp_path / "cpu.max")
    if told is not None:
        (tmp_path / "cpu.max").write_text(told)
    assert num_processors() == expected


def test_where_no_affinity_is_told_all_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(processors, "QUOTA", tmp_path / "cpu.max")
    assert num_processors() == 64
