"""Owns the exponential that masses are made of: the same bits on every device, in one of two widths.

A library's exponential differs between CPU and card, between versions and often between a vector's body and its tail.
These two are steps that IEEE 754 or integer arithmetic define to the last bit, none of them fused, so that a kernel
that repeats them in this order gives these bits (``paged.kernels.sampling_math_triton`` does).

**Long**: the fp64 product x * log2(e) is split into a whole number and the rest f; 2^f is the fourth power of
2^(f / 4), a polynomial in fp64.

**Short**, where masses have few binary digits because the vocabulary is large: the product is rounded to 32 binary
places, and 2^f - 1 is a polynomial in integers, each product of two words cut to a word. It cannot fall as x rises: f
and all coefficients are positive, and products, sums and cuts of such numbers keep their order.
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

SHORT_BITS: Final = 46
"""Most binary digits of masses that the short exponential makes: those of vocabularies above 32,768."""

SHORT_COEFFICIENTS: Final = (1488522244, 515882278, 119196130, 20646517, 2881712, 308748, 46022)
"""(2^f - 1) / f on [0, 1) times 2^31 as a polynomial, constant term first, chosen for the least error of 2^f.

Its values stay below 2^31, so that no product with a word exceeds 63 bits.
"""

SHORT_ROUNDER: Final = 1.5 * 2.0**20
"""Added to a number below 2^19 it leaves 32 binary places of it."""

SHORT_ROUNDER_BITS: Final = (1023 + 20) << 52 | 1 << 51


def is_short(bits: int) -> bool:
    """Whether masses of ``bits`` binary digits are made by the short exponential."""
    return bits <= SHORT_BITS


def scaled_exponential(x: Tensor, bits: int) -> Tensor:
    """``exp(x) * 2**bits`` in fp64 for x <= 0; exactly ``2**bits`` at 0, and nowhere falling as x rises.

    The long one errs by about eight units in the last place; the short one by less than 8e-10 of the result.

    Args:
        x: float64; NaN gives an arbitrary number.
        bits: exponent of the factor, so that no result is subnormal: -900 or more.
    """
    assert x.dtype == torch.float64, x.dtype
    y = x.clamp_min(LOWEST).mul_(LOG2_E)
    return _short_power(y, bits) if is_short(bits) else _long_power(y, bits)


def _long_power(y: Tensor, bits: int) -> Tensor:
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


def _short_power(y: Tensor, bits: int) -> Tensor:
    fixed = y.add_(SHORT_ROUNDER).view(torch.int64).sub_(SHORT_ROUNDER_BITS)
    fraction = fixed & (2**32 - 1)
    rise = torch.full_like(fraction, SHORT_COEFFICIENTS[-1])
    for coefficient in reversed(SHORT_COEFFICIENTS[:-1]):
        rise.mul_(fraction).bitwise_right_shift_(32).add_(coefficient)
    # 2^f - 1 has 63 binary places, of which a float64 takes 52 behind its exponent.
    rise.mul_(fraction).bitwise_right_shift_(11)
    exponent = fixed.bitwise_right_shift_(32).add_(1023 + bits).bitwise_left_shift_(52)
    return rise.add_(exponent).view(torch.float64)
