"""The processes of an engine's ranks as rank 0 sees them: how they start or join, what they say, and how they end."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import IO, Any, Final

import torch
import torch.distributed as dist

from paged.core.agreement import TPError
from paged.kernels.collectives import RankGroup
from paged.kernels.peer_memory import PeerMemory, connect
from paged.runner.links import RANK_BYTES, Failure, Link, LinkClosedError, pack

_LOG = logging.getLogger(__name__)

FOLLOWER: Final = "paged.follower"
"""The module that a rank's process runs."""

LOOPBACK: Final = "127.0.0.1"

# A process may take so long to start, to import what it needs and to meet the others, whatever the limit afterwards.
START_S: Final = 60.0
# The name of the limit afterwards.
LIMIT: Final = "tp_timeout_s"

# For exchanges that others watch over.
_FOREVER: Final = timedelta(days=1000)

# A rank that joins says who it is within this time of its call.
TOKEN_S: Final = 2.0

# How long rank 0 listens for what the others have to say once something went wrong, and for their end.
LAST_WORDS_S: Final = 2.0


@dataclass(slots=True)
class _Peer:
    """One other rank: its link and, if rank 0 has started it, its process and what that writes."""

    link: Link
    process: subprocess.Popen[bytes] | None = None
    written: IO[bytes] | None = None

    def last_line(self) -> str:
        """The last line that the process wrote."""
        if self.written is None:
            return ""
        self.written.seek(0, os.SEEK_END)
        self.written.seek(max(0, self.written.tell() - 2000))
        lines = self.written.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class Ranks:
    """Rank 0's hold on ranks 1, 2, ...; whoever made it must ``end`` it.

    Args:
        peers: the other ranks in order.
        host: this machine's address for them.

    Attributes:
        size: number of ranks, this one included.
        host: this machine's address for the others.
        hosts: names of the machines of ranks 1, 2, ..., once they have said them.
    """

    def __init__(self, peers: Sequence[_Peer], host: str = LOOPBACK) -> None:
        self._peers = list(peers)
        self.size = len(self._peers) + 1
        self.host = host
        self.hosts: list[str] = []

    @classmethod
    def start(cls, size: int) -> Ranks:
        """Start a process for each other rank. They write nothing to the terminal, and Ctrl-C does not reach them."""
        ranks = cls([])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        try:
            for _ in range(1, size):
                ours, theirs = socket.socketpair()
                link, written = Link(ours), tempfile.TemporaryFile()  # noqa: SIM115 (read when the process has ended)
                with theirs:
                    process = subprocess.Popen(
                        [sys.executable, "-P", "-m", FOLLOWER, str(theirs.fileno())],
                        pass_fds=[theirs.fileno()],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=written,
                        stderr=written,
                        process_group=0,
                    )
                ranks._peers.append(_Peer(link, process, written))
        except BaseException:
            ranks.end()
            raise
        ranks.size = size
        return ranks

    @classmethod
    def await_launched(cls, size: int, store: dist.Store, key: str, host: str, limit_s: float) -> Ranks:
        """Wait for the other ranks where all of them were started from outside; they look for this one in ``store``.

        Raises:
            TPError: they do not come.
        """
        token = secrets.token_bytes(16)
        links: dict[int, Link] = {}
        with socket.create_server((host, 0)) as server:
            store.set(key, pack((host, server.getsockname()[1], token)).hex())
            until_s = time.monotonic() + limit_s
            while len(links) < size - 1:
                server.settimeout(max(0.01, until_s - time.monotonic()))
                try:
                    link = Link(server.accept()[0])
                except TimeoutError as error:
                    missing = [rank for rank in range(1, size) if rank not in links]
                    raise TPError(f"rank {missing[0]} did not join within {limit_s:g} s") from error
                # A stranger may knock: nothing of it is unpickled, and it says nothing that is waited for long.
                with contextlib.suppress(TimeoutError, LinkClosedError):
                    if link.receive_raw(len(token), TOKEN_S) == token:
                        links[int.from_bytes(link.receive_raw(RANK_BYTES, TOKEN_S), "little")] = link
                        continue
                link.close()
        return cls([_Peer(links[rank]) for rank in range(1, size)], host)

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """The processes of ranks 1, 2, ..., if rank 0 has started them."""
        return [peer.process for peer in self._peers if peer.process is not None]

    @property
    def links(self) -> list[Link]:
        """The links to ranks 1, 2, ..."""
        return [peer.link for peer in self._peers]

    def tell(self, message: Any, limit_s: float) -> None:
        """Send a message to every other rank.

        Raises:
            TPError: one of them is gone or takes nothing.
        """
        data = pack(message)
        for rank in range(1, self.size):
            self._send(rank, data, limit_s)

    def tell_each(self, messages: Sequence[Any], limit_s: float) -> None:
        """Send every other rank, in order, a message of its own; raises as ``tell``."""
        for rank, message in enumerate(messages, 1):
            self._send(rank, pack(message), limit_s)

    def _send(self, rank: int, data: bytes, limit_s: float) -> None:
        try:
            self._peers[rank - 1].link.send_bytes(data, limit_s)
        except LinkClosedError as error:
            raise self._loss(rank) from error
        except TimeoutError as error:
            raise _silence([rank], limit_s) from error

    def hear_start(self, limit_s: float) -> list[Any]:
        """As ``hear``, while ranks start and import what they need, which may leave no time for signs of life.

        They may be silent for ``limit_s`` or for ``START_S``, whichever is longer; the error names the one that held.
        """
        if limit_s >= START_S:
            return self.hear(limit_s)
        return [self._hear(rank, START_S, "the time for a start") for rank in range(1, self.size)]

    def hear(self, limit_s: float) -> list[Any]:
        """The next message of every other rank, in order.

        Raises:
            TPError: one of them is gone, failed or says nothing.
            ValueError: one of them met a mistake of the user's.
        """
        return [self._hear(rank, limit_s) for rank in range(1, self.size)]

    def listen(self, limit_s: float) -> list[Any]:
        """As ``hear``, but a ``Failure`` stands for itself."""
        return [self._listen(rank, limit_s) for rank in range(1, self.size)]

    def _hear(self, rank: int, limit_s: float, limit: str = LIMIT) -> Any:
        return _unless_failed(rank, self._listen(rank, limit_s, limit))

    def _listen(self, rank: int, limit_s: float, limit: str = LIMIT) -> Any:
        try:
            return self._receive(rank, limit_s)
        except TimeoutError as error:
            raise _silence([rank], limit_s, limit) from error

    def _receive(self, rank: int, limit_s: float) -> Any:
        """The next message of a rank; raises ``TPError`` if it is gone, and ``TimeoutError``."""
        try:
            return self._peers[rank - 1].link.receive(limit_s)
        except LinkClosedError as error:
            raise self._loss(rank) from error

    def cause(self, error: BaseException, limit_s: float) -> TPError | None:
        """Which rank an exception of rank 0's comes from, if it comes from one.

        When one rank is gone, those that it computed with fail as well: who is gone without a word, or failed for a
        reason of its own, comes first.
        """
        if isinstance(error, TPError):
            return error
        if isinstance(error, KeyboardInterrupt):
            return None
        is_exchange = is_exchange_error(error)
        until_s = time.monotonic() + (LAST_WORDS_S if is_exchange else 0)
        gone: list[TPError] = []
        failed: list[TPError] = []
        silent: list[int] = []
        for rank, peer in enumerate(self._peers, 1):
            try:
                # Signs of life say nothing of what happened.
                while not peer.link.is_quiet(max(0.0, until_s - time.monotonic())):
                    with contextlib.suppress(TimeoutError):
                        _unless_failed(rank, self._receive(rank, 0.0))
                        break
                else:
                    silent.append(rank)
            except TPError as found:
                own = isinstance(found.__cause__, LinkClosedError) or not is_exchange_text(str(found))
                (gone if own else failed).append(found)
            except ValueError as found:
                gone.append(TPError(f"rank {rank} failed: {found}"))
        if gone:
            return gone[0]
        if is_exchange and silent:
            return _silence(self._stopped(silent) or silent, limit_s)
        # What the library says of it tells a user nothing.
        return TPError("the ranks have lost each other in a step") if is_exchange or failed else None

    def silence(self, limit_s: float) -> TPError:
        """Who keeps the others waiting. Takes no message away, so any thread may ask."""
        silent = [rank for rank, peer in enumerate(self._peers, 1) if peer.link.is_quiet(0.0)]
        return _silence(self._stopped(silent) or silent or range(1, self.size), limit_s)

    def _stopped(self, ranks: Sequence[int]) -> list[int]:
        """Those of the ranks whose processes are known to be stopped."""
        processes = {rank: self._peers[rank - 1].process for rank in ranks}
        return [rank for rank, process in processes.items() if process is not None and _is_stopped(process.pid)]

    def kill(self) -> None:
        """Let the others end at once, whatever they do; ``end`` tidies up. Any thread may call it."""
        for peer in self._peers:
            if peer.process is not None:
                peer.process.kill()
            else:
                peer.link.shut()

    def last_words(self, kind: str) -> list[int]:
        """The ranks that end with an exception of the class named ``kind``."""
        found = []
        for rank, peer in enumerate(self._peers, 1):
            with contextlib.suppress(OSError):
                message = peer.link.receive(LAST_WORDS_S)
                if isinstance(message, Failure) and message.kind == kind:
                    found.append(rank)
        return found

    def _loss(self, rank: int) -> TPError:
        process = self._peers[rank - 1].process
        if process is None:
            return TPError(f"rank {rank} is gone")
        try:
            code = process.wait(LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            return TPError(f"rank {rank} has closed its link")
        if code < 0:
            return TPError(f"rank {rank} was killed by {signal.Signals(-code).name}")
        said = self._peers[rank - 1].last_line()
        return TPError(f"rank {rank} ended with exit code {code}{': ' + said if said else ''}")

    def end(self, grace_s: float = 0.0) -> None:
        """Close the links and end the processes that were started, by force if they do not within ``grace_s`` seconds.

        May be called again, and from a finalizer.
        """
        until_s = time.monotonic() + grace_s
        for peer in self._peers:
            # A rank that was told to leave closes its end first.
            with contextlib.suppress(OSError):
                while grace_s and peer.link.fileno() >= 0:
                    peer.link.receive(max(0.0, until_s - time.monotonic()))
            peer.link.close()
        for peer in self._peers:
            if peer.process is not None and peer.process.returncode is None:
                try:
                    peer.process.wait(max(0.0, until_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    peer.process.kill()
                    peer.process.wait()
            if peer.written is not None:
                peer.written.close()


def serve_store(host: str, limit_s: float) -> dist.TCPStore:
    """A store at which ranks find each other, on a free port of ``host`` alone."""
    with socket.create_server((host, 0)) as server:
        port = server.getsockname()[1]
        return dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=limit_s),
            master_listen_fd=server.detach(),
        )


def reach_store(host: str, port: int, limit_s: float) -> dist.TCPStore:
    """The store that another rank serves."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit_s))


def card_id(device: torch.device) -> str | None:
    """What tells a card from all others, whichever number a process knows it by; None for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def make_group(
    rank: int,
    size: int,
    store: dist.Store,
    device: torch.device,
    host: str,
    limit_s: float | None,
    *,
    num_sharing: int,
    is_one_host: bool,
) -> RankGroup:
    """The group that carries the tensors of all ranks, which call this together.

    On the CPU that is gloo, on cards memory that all ranks write to, or NCCL where there is none. It is nobody's
    default group, and a process may have several.

    Args:
        rank, size: which of how many.
        store: where the ranks find each other.
        device: this rank's.
        host: this machine's address for the others.
        limit_s: seconds that an exchange may take on the CPU; None, and on cards: whoever waits for it sets the limit.
        num_sharing: most ranks that have one card.
        is_one_host: whether all ranks are on this machine.

    Raises:
        ValueError: ranks would share a card, and can't share memory.
    """
    if device.type == "cuda":
        memory = connect(rank, size, store, device) if is_one_host else "the ranks are on several machines"
        if isinstance(memory, PeerMemory):
            return RankGroup(rank, size, memory=memory)
        if num_sharing > 1:
            raise ValueError(f"tp must be at most the number of GPUs, not {size}: ranks can't share them, as {memory}")
        if rank == 0:
            _LOG.warning("steps are launched one by one, and NCCL carries what ranks exchange: %s", memory)
    kinds = dist.ProcessGroup.BackendType
    backend: dist.ProcessGroupGloo | dist.ProcessGroupNCCL
    if device.type == "cpu":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=START_S)
        kind, backend = kinds.GLOO, dist.ProcessGroupGloo(store, rank, size, options)
        backend._set_default_timeout(_FOREVER if limit_s is None else timedelta(seconds=limit_s))
    else:
        with _quiet_nccl():
            kind, backend = kinds.NCCL, dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    return RankGroup(rank, size, group)


@contextlib.contextmanager
def _quiet_nccl() -> Iterator[None]:
    """Make groups that do not end the process when another rank is gone: rank 0 notices, and says it."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def is_exchange_error(error: BaseException) -> bool:
    """Whether an exception comes from an exchange of tensors that another rank did not take part in."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and is_exchange_text(str(error)))


def is_exchange_text(text: str) -> bool:
    """``is_exchange_error`` of what is left of an exception in another process."""
    return any(word in text.lower() for word in ("gloo", "nccl"))


def _unless_failed(rank: int, message: Any) -> Any:
    """A message of a rank's; a ``Failure`` is raised, a mistake of the user's as ``ValueError``."""
    if isinstance(message, Failure):
        if message.is_mistake:
            raise ValueError(message.text)
        raise TPError(f"rank {rank} failed: {message.kind}: {message.text}")
    return message


def _silence(ranks: Sequence[int], limit_s: float, limit: str = LIMIT) -> TPError:
    who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
    return TPError(f"{who} not answered within {limit_s:g} s ({limit})")


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
