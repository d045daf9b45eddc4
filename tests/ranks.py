"""A pool of rank processes over gloo that run functions of test modules together, for tests of what ranks exchange.

The processes are started once and serve every test of a session. The store that they meet at listens on a port which
the system chooses and the parent keeps, so nothing can take it in between.
"""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from paged.kernels.collectives import SINGLE, RankGroup

NUM_RANKS = 4
# A rank that waits for another in vain gives up before the parent does.
EXCHANGE_S, JOB_S, START_S = 20.0, 60.0, 120.0


@dataclass(frozen=True)
class Failure:
    """What a rank raised: the type's name, the message and the traceback as text; or that it did not answer."""

    error: str
    message: str
    trace: str = ""


class RankError(Exception):
    """A rank failed; ``failures`` holds each rank's ``Failure`` or None."""

    def __init__(self, failures: Sequence[Failure | None]) -> None:
        self.failures = tuple(failures)
        lines = [f"rank {rank}: {f.error}: {f.message}\n{f.trace}" for rank, f in enumerate(failures) if f is not None]
        super().__init__("\n".join(lines))


class RankPool:
    """Processes that run functions as ranks of a group of 1, 2 or 4; they start with the first call.

    A function is module-level, takes its ``RankGroup`` first, and gives what plain pickling carries.

    Attributes:
        processes: those that are running, by rank.
    """

    def __init__(self) -> None:
        self._store: dist.TCPStore | None = None
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, size: int, time_limit_s: float = JOB_S) -> list[Any]:
        """The results of ``function(group, *args)`` by rank.

        Raises:
            RankError: a rank raised, died, or did not answer in time.
        """
        outcomes = self.outcomes(function, *args, size=size, time_limit_s=time_limit_s)
        failures = [outcome if isinstance(outcome, Failure) else None for outcome in outcomes]
        if any(failures):
            raise RankError(failures)
        return outcomes

    def outcomes(self, function: Callable[..., Any], *args: Any, size: int, time_limit_s: float = JOB_S) -> list[Any]:
        """As ``run``, but a rank's failure stands in its place as a ``Failure``; the pool goes on with fresh ranks."""
        if not self.processes:
            self._start()
        job = pickle.dumps((inspect.getfile(function), function.__qualname__, size, args))
        for pipe in self._pipes[:size]:
            pipe.send_bytes(job)
        deadline = time.monotonic() + time_limit_s
        outcomes = [self._answer(pipe, deadline) for pipe in self._pipes[:size]]
        if any(isinstance(outcome, Failure) for outcome in outcomes):
            self.close()  # they may be out of step
        return outcomes

    def close(self) -> None:
        """End the processes; the next call starts others."""
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self.processes, self._pipes, self._store = [], [], None

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)
        deadline = time.monotonic() + START_S
        failures = [self._answer(pipe, deadline) for pipe in self._pipes]
        if any(failures):
            self.close()
            raise RankError(failures)

    @staticmethod
    def _answer(pipe: Connection, deadline: float) -> Any:
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            return Failure("TimeoutError", "no answer in time")
        try:
            return pickle.loads(pipe.recv_bytes())
        except EOFError:
            return Failure("EOFError", "the process is gone")


def _serve(rank: int, port: int, pipe: Connection) -> None:
    """A rank's life: one job after the other, until the parent is gone."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=EXCHANGE_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=limit)
    pair = dist.new_group([0, 1], timeout=limit)
    pipe.send_bytes(pickle.dumps(None))
    while True:
        try:
            file, name, size, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        group = SINGLE if size == 1 else RankGroup(rank, size, dist.group.WORLD if size == NUM_RANKS else pair)
        try:
            outcome = pickle.dumps(getattr(_module(file), name)(group, *args))
        except BaseException as error:
            outcome = pickle.dumps(Failure(type(error).__name__, str(error), traceback.format_exc()))
        pipe.send_bytes(outcome)


@cache
def _module(file: str) -> ModuleType:
    """The module of a file, under its own name: test modules can't be imported by the names that pytest gives them."""
    name = Path(file).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
