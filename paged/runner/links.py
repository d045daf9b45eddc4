"""Messages between two processes of an engine: framed, with exact time limits, and with a notice when one is gone."""

from __future__ import annotations

import pickle
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

_HEADER_BYTES: Final = 8
# Of a rank's number, where it introduces itself.
RANK_BYTES: Final = 4
_BEAT: Final = b""
# Longest single wait. Time in which this process itself was stopped (Ctrl-Z) counts as one of these at most.
_SLICE_S: Final = 1.0


class LinkClosedError(ConnectionError):
    """The other side has closed the link, or is gone."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank says instead of an answer, before it ends.

    Attributes:
        kind: name of the exception's class.
        text: its first line.
        is_mistake: whether it is the user's, to be told as a ``ValueError``.
    """

    kind: str
    text: str
    is_mistake: bool

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What there is to say of an exception."""
        text = str(error) if isinstance(error, ValueError) else str(error).strip().partition("\n")[0]
        return cls(type(error).__name__, text, isinstance(error, ValueError))


class Link:
    """One end of a connection to a process of our own. Messages are pickled; one thread receives, any may send.

    Args:
        sock: a connected stream socket, which the link takes over.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """The socket's number, -1 once it is closed."""
        return self._socket.fileno()

    def send(self, message: Any, limit_s: float | None = None) -> None:
        """Send a message.

        Args:
            message: anything that can be pickled.
            limit_s: seconds that the other side may take nothing; None waits as long as it lives.

        Raises:
            LinkClosedError: the other side is gone.
            TimeoutError: it takes nothing.
        """
        self.send_bytes(pack(message), limit_s)

    def send_bytes(self, data: bytes, limit_s: float | None = None) -> None:
        """``send`` of what ``pack`` made, for a message that goes to several."""
        with self._sending:
            self._write(len(data).to_bytes(_HEADER_BYTES, "little") + data, limit_s)

    def receive(self, limit_s: float | None = None) -> Any:
        """The next message.

        Args:
            limit_s: seconds without any sign of life; None waits as long as the other side lives.

        Raises:
            LinkClosedError: the other side is gone, and everything it sent has been received.
            TimeoutError: nothing came.
        """
        while True:
            size = int.from_bytes(self._read(_HEADER_BYTES, limit_s), "little")
            data = self._read(size, limit_s)
            if data != _BEAT:
                return pickle.loads(data)

    def receive_raw(self, size: int, limit_s: float) -> bytes:
        """``size`` bytes as they come, for the time before the other side is known; raises as ``receive``."""
        return self._read(size, limit_s)

    def send_raw(self, data: bytes, limit_s: float) -> None:
        """Bytes as they are, for the other side's ``receive_raw``; raises as ``send``."""
        self._write(data, limit_s)

    def is_quiet(self, limit_s: float) -> bool:
        """Whether nothing, not even the end of the link, comes within ``limit_s`` seconds."""
        try:
            self._wait(select.POLLIN, limit_s)
        except TimeoutError:
            return True
        return False

    @contextmanager
    def beating(self, every_s: float) -> Iterator[None]:
        """While entered, tell the other side every ``every_s`` seconds that this process is at work."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(every_s):
                try:
                    self.send_bytes(_BEAT)
                except OSError:
                    return

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def close(self) -> None:
        """Close this end; the other one learns it at once, and so does a thread in ``wait_for_end``."""
        self.shut()
        self._socket.close()

    def shut(self) -> None:
        """Say and hear nothing more; any thread may call it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, size: int, limit_s: float | None) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(min(size - len(parts), 1 << 20))
            except BlockingIOError:
                self._wait(select.POLLIN, limit_s)
                continue
            except OSError as error:
                raise LinkClosedError(str(error)) from error
            if not part:
                raise LinkClosedError("the other side has closed the link")
            parts += part
        return bytes(parts)

    def _write(self, data: bytes, limit_s: float | None) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, limit_s)
            except OSError as error:
                raise LinkClosedError(str(error)) from error

    def _wait(self, event: int, limit_s: float | None) -> None:
        """Wait until the socket can be read from or written to, or its other end is closed."""
        if self.fileno() < 0:
            raise LinkClosedError("this end is closed")
        poll = select.poll()
        poll.register(self._socket, event)
        left_s = limit_s
        while True:
            slice_s = _SLICE_S if left_s is None else min(_SLICE_S, left_s)
            start_s = time.monotonic()
            if poll.poll(slice_s * 1000):
                return
            if left_s is not None:
                left_s -= min(time.monotonic() - start_s, slice_s)
                if left_s <= 0:
                    raise TimeoutError(f"nothing for {limit_s:g} s")


def pack(message: Any) -> bytes:
    """A message in the form in which it travels."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def wait_for_end(link: Link) -> None:
    """Wait until either side has closed the link or is gone; takes no message away, so any thread may wait."""
    poll = select.poll()
    try:
        poll.register(link.fileno(), select.POLLRDHUP)
    except ValueError:  # closed already
        return
    poll.poll()
