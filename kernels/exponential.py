"""Owns the exponential that masses are made of: one sequence of fp64 operations, the same bits on every device.

A library's exponential differs between CPU and card, between versions and often between a vector's body and its tail.
This one is products, sums and one rounding to a whole number, each rounded once by IEEE 754 and none fused, so that a
kernel that repeats them in this order gives these bits (``paged.kernels.sampling_triton`` does).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

LOWEST: Final = -64.0
"""Arguments below count as this one; its exponential times 2^52 is far below one half."""

LOG2_E: Final = 1.4426950408889634

# (2^(f / 4) - 1) / f on [-1/2, 1/2] as a polynomial, interpolated at Chebyshev's nodes: constant term first.
COEFFICIENTS: Final = (
    0.17328679513998632,
    0.015014156684943795,
    0.000867251697889354,
    3.757081682670002e-05,
    1.3021052574003661e-06,
    3.760627484878113e-08,
    9.311471407728417e-10,
    2.016859683599216e-11,
)


def scaled_exponential(x: Tensor, bits: int) -> Tensor:
    """``exp(x) * 2**bits`` in fp64 for x <= 0, to about eight units in the last place; exactly ``2**bits`` at 0.

    With y = x * log2(e) split into a whole number n and the rest f, 2^f is the fourth power of 2^(f / 4), a polynomial.

    Args:
        x: float64; NaN gives an arbitrary number.
        bits: exponent of the factor, so that no result is subnormal: -900 or more.
    """
    assert x.dtype == torch.float64, x.dtype
    y = x.clamp_min(LOWEST).mul_(LOG2_E)
    whole = y.round()
    rest = y.sub_(whole)
    root = torch.full_like(rest, COEFFICIENTS[-1])
    for coefficient in reversed(COEFFICIENTS[:-1]):
        root.mul_(rest).add_(coefficient)
    root.mul_(rest).add_(1.0)
    root.mul_(root)
    root.mul_(root)
    power = whole.to(torch.int64).add_(1023 + bits).bitwise_left_shift_(52).view(torch.float64)
    return root.mul_(power)
