"""Between host and device: copies that nobody waits for, and the device's own clock.

On the CPU, where all is done at once, the clock is the host's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """``array`` on the device. The copy takes its place among the device's work; the host goes on at once.

    On the CPU the tensor shares the array's memory.
    """
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def staging(num_words: int, device: torch.device) -> torch.Tensor:
    """Memory of the host, int32 [num_words], for a copy to the device that nobody waits for; used once."""
    return torch.empty(num_words, dtype=torch.int32, pin_memory=device.type == "cuda")


def download(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` on the host, to be read once the device's work up to now is done."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def download_all(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """``download`` of each."""
    return tuple(download(tensor) for tensor in tensors)


# After so long without work the clock is set by the host's again: a card tells times as float32 of milliseconds, which
# tell microseconds apart up to about here.
MOST_IDLE_S: Final = 10.0


class StepTimer:
    """When a step began and ended on the device; made by ``DeviceClock.start``."""

    def __init__(self, device: torch.device) -> None:
        self.start_s = self.end_s = 0.0
        self.events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self.events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.events[0].record()
        else:
            self.start_s = time.perf_counter()

    def stop(self) -> None:
        """All of the step's work has been handed to the device."""
        if self.events is not None:
            self.events[1].record()
        else:
            self.end_s = time.perf_counter()


class DeviceClock:
    """The device's time as seconds of ``time.perf_counter``.

    A card tells only the time between two events, as a float32 of milliseconds. So each event is dated by the one
    before it; the first one, and one after a long time without work, by the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Event | None = None
        self._last_s = 0.0

    def start(self, *, is_idle: bool) -> StepTimer:
        """A step's work is about to be handed to the device; ``is_idle`` says that no other step is in flight."""
        is_stale = is_idle and time.perf_counter() - self._last_s > MOST_IDLE_S
        if self._device.type == "cuda" and (self._last is None or is_stale):
            self._last = torch.cuda.Event(enable_timing=True)
            self._last.record()
            self._last.synchronize()
            self._last_s = time.perf_counter()
        return StepTimer(self._device)

    def wait(self, timer: StepTimer) -> tuple[float, float]:
        """Wait until the step has ended; its start and end, seconds. Steps must be asked about in order."""
        if timer.events is None or self._last is None:
            return timer.start_s, timer.end_s
        start_event, end_event = timer.events
        end_event.synchronize()
        start_s = self._last_s + self._last.elapsed_time(start_event) / 1e3
        self._last, self._last_s = end_event, start_s + start_event.elapsed_time(end_event) / 1e3
        return start_s, self._last_s
