"""Standard output and standard error of a command: what cannot be shown does not end the work."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast


class LenientStream:
    """A text stream that notes a failure to write instead of raising it, and tries again with the next text.

    Args:
        stream: where the text goes; None, as Python has it for a stream that was closed from the start: nowhere.
        is_piped: raise it if the reader of a pipe has gone, so that work for nobody can end.

    Attributes:
        failure: the first one; None if all could be written.
    """

    def __init__(self, stream: TextIO | None, *, is_piped: bool = False) -> None:
        self._stream = stream
        self._is_piped = is_piped
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        """Write ``text``, if that can be; its length."""
        if self._stream is not None:
            with self._noting():
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered, if that can be."""
        if self._stream is not None:
            with self._noting():
                self._stream.flush()

    def give_up(self) -> None:
        """Throw away what is buffered and cannot be written: at its end Python would try once more, and complain."""
        if self.failure is not None and self._stream is not None:
            try:
                self._stream.flush()
            except OSError:
                # A stream without a file of its own has nothing that Python would write.
                with suppress(OSError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
            if self._is_piped and isinstance(error, BrokenPipeError):
                raise


@contextmanager
def lenient_streams() -> Iterator[LenientStream]:
    """While entered, the standard streams are ``LenientStream``s; standard output is handed out, for its failure.

    Of standard output a ``BrokenPipeError`` is raised. Log messages that cannot be written are dropped: logging would
    print a traceback for each.
    """
    _open_closed_streams()
    output, errors = LenientStream(sys.stdout, is_piped=True), LenientStream(sys.stderr)
    complains, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        with redirect_stdout(cast(TextIO, output)), redirect_stderr(cast(TextIO, errors)):
            yield output
    finally:
        logging.raiseExceptions = complains
        output.give_up()
        errors.give_up()


def _open_closed_streams() -> None:
    """Lead standard streams that were closed from the start nowhere.

    The next file that is opened would get the number of one, and all that libraries write to it. And `print` takes a
    missing standard error for standard output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 (it is the process's from here on)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
