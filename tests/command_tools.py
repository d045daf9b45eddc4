"""Runs commands in the test's own process, as the shell would, and finds what they leave."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paged.app import main

Cli = Callable[..., tuple[int, str, str]]


@contextmanager
def commands(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *first: str
) -> Iterator[Cli]:
    """A function that runs `python -m paged FIRST...` with more arguments in ``folder``: exit code, output, errors."""
    monkeypatch.chdir(folder)
    root = logging.getLogger()
    before = list(root.handlers)

    def call(*args: str) -> tuple[int, str, str]:
        code = main([*first, *args])
        out, err = capsys.readouterr()
        return code, out, err

    yield call
    # Hydra's handlers hold this test's streams and files.
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
        handler.close()


def folder_of(out: str) -> Path:
    """The folder that a command's last line of output names."""
    return Path(out.splitlines()[-1])
