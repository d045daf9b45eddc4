"""Checks the copies between host and device, and the device's clock on events that tell what a test wants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paged.runner import transfers
from paged.runner.transfers import MOST_IDLE_S, DeviceClock, StepTimer, download, download_all, staging, upload

CPU, CARD = torch.device("cpu"), torch.device("cuda")


def test_what_goes_up_shares_the_host_s_memory_on_the_cpu() -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    tensor = upload(array, CPU)
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensor.dtype == torch.int64
    array[1, 2] = 9
    assert tensor[1, 2] == 9


def test_what_comes_down_is_a_copy() -> None:
    """What is downloaded is read when later steps may have written over the tensor."""
    first, second = torch.arange(4, dtype=torch.int32), torch.ones(2, 2)
    once, (both, other) = download(first), download_all([first, second])
    first.zero_()
    second.zero_()
    assert once.tolist() == both.tolist() == [0, 1, 2, 3]
    assert once.dtype == torch.int32
    assert other.tolist() == [[1, 1], [1, 1]]
    assert download_all([]) == ()


def test_staging_memory_is_new_each_time() -> None:
    one, other = staging(5, CPU), staging(5, CPU)
    assert one.shape == (5,)
    assert one.dtype == torch.int32
    one.fill_(1)
    other.fill_(2)
    assert one.tolist() == [1] * 5


# The clock


class Card:
    """Stands for a card: its time, the host's, and how long the host waits for it."""

    def __init__(self) -> None:
        self.card_ms = 7_000_000.0
        self.host_s = 50.0
        self.num_events = 0
        self.waited_for: list[FakeEvent] = []

    def pass_time(self, seconds: float) -> None:
        """Time that passes on both."""
        self.card_ms += 1e3 * seconds
        self.host_s += seconds


class FakeEvent:
    """An event that is dated at once when it is recorded, by the time of ``card``."""

    card: Card

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms: float | None = None
        self.card.num_events += 1

    def record(self) -> None:
        self.at_ms = self.card.card_ms

    def synchronize(self) -> None:
        assert self.at_ms is not None, "an event that was never recorded"
        self.card.waited_for.append(self)

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.at_ms is not None
        assert later.at_ms is not None
        # What a card tells is a short float.
        return float(np.float32(later.at_ms - self.at_ms))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(FakeEvent, "card", card, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(transfers, "time", SimpleNamespace(perf_counter=lambda: card.host_s))
    return card


def a_step(clock: DeviceClock, card: Card, *, waits_s: float, takes_s: float, is_idle: bool) -> StepTimer:
    """A step that begins ``waits_s`` after it was handed to the card."""
    timer = clock.start(is_idle=is_idle)
    card.pass_time(waits_s)
    assert timer.events is not None
    timer.events[0].record()
    card.pass_time(takes_s)
    timer.stop()
    return timer


def test_the_host_s_clock_dates_steps_on_the_cpu(card: Card) -> None:
    clock = DeviceClock(CPU)
    timer = clock.start(is_idle=True)
    card.pass_time(0.25)
    timer.stop()
    card.pass_time(1.0)
    assert clock.wait(timer) == (50.0, 50.25)
    assert card.num_events == 0


def test_steps_are_dated_one_by_the_other(card: Card) -> None:
    """In order, two in flight; the host's clock is asked once, and how it goes afterwards is no matter."""
    clock = DeviceClock(CARD)
    first = a_step(clock, card, waits_s=0.5, takes_s=0.25, is_idle=True)
    second = a_step(clock, card, waits_s=0.125, takes_s=1.0, is_idle=False)
    card.host_s += 3.0
    assert clock.wait(first) == (50.5, 50.75)
    third = a_step(clock, card, waits_s=2.0, takes_s=0.5, is_idle=False)
    card.host_s -= 7.0
    assert clock.wait(second) == (50.875, 51.875)
    assert clock.wait(third) == (53.875, 54.375)
    # One to set the clock and two of each step; the host has waited for each step's end.
    assert card.num_events == 7
    assert card.waited_for[1:] == [timer.events[1] for timer in (first, second, third) if timer.events]


def test_dates_stay_exact_over_many_steps(card: Card) -> None:
    """A short float of milliseconds since the first step would have lost the microseconds after some hours."""
    clock = DeviceClock(CARD)
    for number in range(4000):
        timer = a_step(clock, card, waits_s=1e-3, takes_s=9.000123, is_idle=number == 0)
        start_s, end_s = clock.wait(timer)
    assert card.host_s > 36_000
    assert end_s == pytest.approx(card.host_s, abs=1e-3)
    assert end_s - start_s == pytest.approx(9.000123, abs=2e-6)


@pytest.mark.parametrize(
    ("idle_s", "is_idle", "is_set"),
    [
        (MOST_IDLE_S - 0.5, True, False),
        (MOST_IDLE_S + 0.5, True, True),
        (MOST_IDLE_S + 0.5, False, False),
    ],
)
def test_a_long_time_without_work_sets_the_clock_anew(idle_s: float, is_idle: bool, is_set: bool, card: Card) -> None:
    """By the host's clock, which has gone two seconds more than the card's; never while a step is in flight."""
    clock = DeviceClock(CARD)
    assert clock.wait(a_step(clock, card, waits_s=0.0, takes_s=1.0, is_idle=True)) == (50.0, 51.0)
    card.pass_time(idle_s - 0.25)
    card.host_s += 0.25
    card.card_ms -= 1750
    timer = a_step(clock, card, waits_s=0.5, takes_s=1.0, is_idle=is_idle)
    start_s, end_s = clock.wait(timer)
    assert end_s - start_s == 1.0
    assert start_s == (card.host_s if is_set else card.host_s - 2.0) - 1.0
    assert card.num_events == (6 if is_set else 5)


def test_a_clock_that_was_set_anew_goes_on_from_there(card: Card) -> None:
    clock = DeviceClock(CARD)
    clock.wait(a_step(clock, card, waits_s=0.0, takes_s=1.0, is_idle=True))
    card.pass_time(3600.0)
    clock.wait(a_step(clock, card, waits_s=0.5, takes_s=1.0, is_idle=True))
    last: Any = a_step(clock, card, waits_s=0.25, takes_s=0.5, is_idle=True)
    assert clock.wait(last) == (card.host_s - 0.5, card.host_s)
    assert card.num_events == 8
