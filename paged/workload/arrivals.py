"""When requests arrive that come one by one: endless ascending times, in seconds from the first."""

from __future__ import annotations

import random
from collections.abc import Iterator


def poisson_times(rate: float, generator: random.Random) -> Iterator[float]:
    """A Poisson stream of `rate` a second, from the moment of its first arrival, which is 0."""
    now = 0.0
    while True:
        yield now
        now += generator.expovariate(rate)


def gamma_times(rate: float, cv: float, generator: random.Random) -> Iterator[float]:
    """Arrivals of `rate` a second on average whose gaps are gamma distributed; the first is at 0.

    `cv` is the gaps' standard deviation over their mean: 0 is regular, 1 as random as Poisson, more comes in bursts.
    """
    now = 0.0
    while True:
        yield now
        now += generator.gammavariate(1 / cv**2, cv**2 / rate) if cv else 1 / rate
