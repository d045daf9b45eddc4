"""Settings that all tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from ranks import RankPool


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models lose time to threads, and the bits of a library call may hang on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """Tests that press Ctrl-C must hear it, also where whoever started them in the background has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Processes that run functions as ranks."""
    pool = RankPool()
    yield pool
    pool.close()
