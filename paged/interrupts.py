"""Ctrl-C at a safe moment: an interrupt that arrives while books are being changed waits until they are whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def is_interrupt(error: BaseException | None) -> bool:
    """Whether ``error`` is a ``KeyboardInterrupt``, or what came of one on its way."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _has_default_handler() -> bool:
    """Whether a Ctrl-C would be a ``KeyboardInterrupt`` of Python's own here."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@contextmanager
def importing() -> Iterator[None]:
    """While entered, modules are imported; a Ctrl-C is a ``KeyboardInterrupt`` in any case when it is left.

    Some modules swallow one, or what they made of it is another error: torch looks whether there is a numpy, and an
    interrupted numpy cannot be imported again.
    """
    is_interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        raise KeyboardInterrupt

    if not _has_default_handler():
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if is_interrupted:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_interrupted:
        raise KeyboardInterrupt


class DeferredInterrupt:
    """While entered, a Ctrl-C is noted; the ``KeyboardInterrupt`` follows when it is left.

    Does nothing outside the main thread, where signals do not arrive, or if SIGINT has another handler than Python's
    own, which then decides.

    Attributes:
        is_pending: whether an interrupt is being held back.
    """

    __slots__ = ("_is_armed", "is_pending")

    def __init__(self) -> None:
        self.is_pending = False
        self._is_armed = False

    def __enter__(self) -> DeferredInterrupt:
        self._is_armed = _has_default_handler()
        if self._is_armed:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_armed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.is_pending:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_pending = True


class InterruptRequest:
    """While entered, the first Ctrl-C or SIGTERM only sets `requested`; the second interrupts at once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> InterruptRequest:
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        if self._in_main_thread:
            self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_main_thread:
            for number, previous in self._previous.items():
                signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
