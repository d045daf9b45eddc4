"""Watching over ranks that compute together: none of them may hang the rest, nor keep rank 0 from hearing Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Final

import torch
import torch.distributed as dist

from paged.kernels.collectives import RankGroup
from paged.runner.ranks import Ranks

# How often rank 0 looks at the clock while ranks compute. Time in which it was stopped counts as one look.
TICK_S: Final = 0.5


class Watch:
    """A thread that sees to it that what ranks compute together comes to an end, also if one of them is lost.

    On cards kernels wait for each other for ever; on the CPU an exchange has no limit of its own, because time in which
    rank 0 is stopped (Ctrl-Z) must not count. Whoever waits there hears no Ctrl-C, so the thread hears the second one.

    Args:
        ranks: the other ranks.
        group: what carries their tensors.
        device: this rank's.
        limit_s: seconds that an exchange on the CPU may take; on cards, that a step may go on after this rank has
            launched its latest exchange. A step that builds kernels may so take longer.
    """

    def __init__(self, ranks: Ranks, group: RankGroup, device: torch.device, limit_s: float) -> None:
        self._ranks = ranks
        self._group = group
        self._is_on_card = device.type == "cuda"
        self._abort = group.abort if self._is_on_card else ranks.kill
        self._limit_s = limit_s
        self._num_entered = 0
        self._is_entered = self._is_limited = False
        self._is_stopped = False
        self._reason: BaseException | None = None
        self._num_interrupts = 0
        self._previous_fd = -1
        self._signals, self._to_signals = socket.socketpair()
        self._signals.setblocking(False)
        self._to_signals.setblocking(False)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watching(self, *, is_limited: bool) -> Iterator[None]:
        """While entered, what is computed is ended by force if a rank is gone or, if ``is_limited``, it takes too long.

        Raises:
            TPError: that took longer than the limit.
            RuntimeError: a rank is gone, on cards also if that was before.
            KeyboardInterrupt: a second Ctrl-C came.
        """
        hears = threading.current_thread() is threading.main_thread()
        if hears:
            self._previous_fd = signal.set_wakeup_fd(self._to_signals.fileno(), warn_on_full_buffer=False)
        self._num_interrupts = 0
        self._num_entered += 1
        self._is_limited = is_limited
        self._is_entered = True
        try:
            yield
        finally:
            self._is_entered = False
            if hears:
                signal.set_wakeup_fd(self._previous_fd)
            if self._reason is not None:
                raise self._reason

    def stop(self) -> None:
        """Watch no more. May be called again."""
        self._is_stopped = True
        with contextlib.suppress(OSError):
            self._to_signals.send(b"\0")
        # A finalizer may run in any thread.
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._signals.close()
        self._to_signals.close()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        links = {link.fileno() for link in self._ranks.links} if self._is_on_card else set()
        for number in links:
            poll.register(number, select.POLLRDHUP)
        waited_s = 0.0
        waits_for: tuple[int, int] | None = None
        while not self._is_stopped:
            start_s = time.monotonic()
            found = {number for number, _ in poll.poll(TICK_S * 1000)}
            self._hear()
            is_same = waits_for is not None and waits_for == self._waits_for()
            waited_s = waited_s + min(time.monotonic() - start_s, TICK_S) if is_same else 0.0
            waits_for = self._waits_for()
            if self._is_entered and self._num_interrupts > 1:
                self._reason = KeyboardInterrupt()
            elif not found.isdisjoint(links):
                # Whether entered or not: the caller may wait for the card between two steps.
                self._reason = dist.DistError("a rank is gone")
            elif self._is_entered and waited_s > self._limit_s:
                self._reason = self._ranks.silence(self._limit_s)
            if self._reason is not None:
                self._abort()
                return

    def _waits_for(self) -> tuple[int, int] | None:
        """What a limit holds for now: a step's latest exchange, on cards also after it was launched."""
        if not (self._is_entered and self._is_limited and (self._is_on_card or self._group.is_exchanging)):
            return None
        return self._num_entered, self._group.num_collectives

    def _hear(self) -> None:
        """Take note of signals, and hand them on to whoever else wants to know of them."""
        with contextlib.suppress(BlockingIOError):
            numbers = self._signals.recv(64)
            self._num_interrupts += sum(number in (signal.SIGINT, signal.SIGTERM) for number in numbers)
            if self._previous_fd >= 0:
                os.write(self._previous_fd, numbers)
