"""Processes that were started from outside, as by torchrun: how they tell it, and how they find each other."""

from __future__ import annotations

import os
import pickle
import socket
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from paged.runner.links import RANK_BYTES, Link, pack

if TYPE_CHECKING:
    from torch.distributed import Store

    from paged.runner.ranks import Ranks

# Processes that were started together meet within this time.
MEETING_S: Final = 60.0
# How long the others wait for rank 0 to say that there is an engine, or none any more: a job may take days.
PATIENCE: Final = timedelta(days=1000)


@dataclass(slots=True)
class Launch:
    """This process's place among those that were started together.

    Attributes:
        rank, size: which of how many.
        num_local: how many of them are on this machine.
        num_engines: engines that the processes have built together so far.
    """

    rank: int
    size: int
    num_local: int
    num_engines: int = 0
    _store: Store | None = None

    @property
    def _host(self) -> str:
        """The address at which the others reach rank 0."""
        return "127.0.0.1" if self.num_local == self.size else os.environ["MASTER_ADDR"]

    def gather(self, limit_s: float) -> Ranks:
        """Rank 0's hold on the others for one more engine; raises ``TPError`` if they do not come."""
        from paged.runner.ranks import Ranks

        key = self._next_key()
        return Ranks.await_launched(self.size, self._meeting_store(), key, self._host, limit_s)

    def join(self) -> Link | None:
        """Wait for rank 0's next engine; None if there will be none."""
        store = self._meeting_store()
        store.set_timeout(PATIENCE)
        try:
            found: Any = pickle.loads(bytes.fromhex(store.get(self._next_key()).decode()))
        except RuntimeError:
            # Who served the store is gone.
            return None
        if found is None:
            return None
        host, port, token = found
        link = Link(socket.create_connection((host, port), MEETING_S))
        link.send_raw(token + self.rank.to_bytes(RANK_BYTES, "little"), MEETING_S)
        return link

    def dismiss(self) -> None:
        """Rank 0's word to the others that it will build no more engines."""
        self._meeting_store().set(self._next_key(), pack(None).hex())

    def _next_key(self) -> str:
        self.num_engines += 1
        return f"paged/engine/{self.num_engines}"

    def _meeting_store(self) -> Store:
        if self._store is None:
            import torch.distributed as dist

            rendezvous = dist.rendezvous("env://", self.rank, self.size, timeout=timedelta(seconds=MEETING_S))
            self._store = next(rendezvous)[0]
        return self._store


@cache
def place() -> Launch | None:
    """This process's place as the environment tells it, where torchrun leaves it; None if it stands alone.

    Raises:
        ValueError: a variable is not a number that can be.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(os.environ.get(name) for name in names) or os.environ["WORLD_SIZE"] == "1":
        return None
    size = _number("WORLD_SIZE", 2)
    num_local = _number("LOCAL_WORLD_SIZE", 1, size) if "LOCAL_WORLD_SIZE" in os.environ else size
    return Launch(_number("RANK", 0, size - 1), size, num_local)


def _number(name: str, least: int, most: int | None = None) -> int:
    text = os.environ[name]
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        allowed = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} in the environment must be a whole number, {allowed}, not {text!r}")
    return int(text)
