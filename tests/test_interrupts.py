"""Checks that a Ctrl-C stays one, whatever stands in its way."""

import contextlib
import signal

import pytest

from paged.interrupts import DeferredInterrupt, importing, is_interrupt


def interrupted_module(failure: Exception | None) -> None:
    """What a module may do when it is interrupted while it is loaded."""
    with contextlib.suppress(BaseException):
        signal.raise_signal(signal.SIGINT)
    if failure is not None:
        raise failure


def test_an_interrupt_that_a_module_swallows_is_not_lost() -> None:
    """torch looks whether there is a numpy: interrupted in that, it took the Ctrl-C for a no."""
    with pytest.raises(KeyboardInterrupt), importing():
        interrupted_module(None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_a_module_makes_of_an_interrupt_is_one_still() -> None:
    """A numpy that was interrupted cannot be imported again: the Ctrl-C ended in that traceback."""
    with pytest.raises(KeyboardInterrupt), importing():
        interrupted_module(ImportError("cannot load module more than once per process"))
    with pytest.raises(ImportError, match="of its own"), importing():
        raise ImportError("of its own")


def test_another_handler_decides() -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with importing():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt(), importing():
        signal.raise_signal(signal.SIGINT)


def test_an_error_on_the_way_of_an_interrupt_is_told_from_others() -> None:
    def fail(cause: type[BaseException]) -> None:
        try:
            raise cause
        finally:
            raise AttributeError("in the clean-up")

    for cause, expected in ((KeyboardInterrupt, True), (KeyError, False)):
        with pytest.raises(AttributeError) as caught:
            fail(cause)
        assert is_interrupt(caught.value) is expected
    assert is_interrupt(KeyboardInterrupt())
    assert not is_interrupt(None)
