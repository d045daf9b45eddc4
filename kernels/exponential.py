"""Owns the exponential that masses are made of: the same bits on every device, in one of two widths.

A library's exponential differs between CPU and card, between versions and often between a vector's body and its tail.
These two are steps that IEEE 754 defines to the last bit, so that a kernel that takes the same steps gives the same
bits (``paged.kernels.sampling_math_triton`` does).

**Long**: the fp64 product x * log2(e) is split into a whole number and the rest f; 2^f is the fourth power of
2^(f / 4), a polynomial in fp64, no operation of it fused.

**Short**, where masses have few binary digits because the vocabulary is large, unless the model's logits are fp64: the
same in fp32, because a multiprocessor has 128 lanes for fused fp32 multiply-adds and 64 for fp64 and for integers. A
card's fused operation rounds once; here products and sums are exact in fp64 and are then rounded to fp32, which is the
same number. For a logit d below the highest (d in fp32) and c = log2(e) / T (in fp32, with what it lacks apart):

1. d * c is split into a whole number k, not above it, and a rest, rounded to 23 binary places;
2. the rest takes in (k + 1/2) * c's lack, so that likely and unlikely tokens are all as good, and is bounded to [0, 1];
3. 2^rest is a polynomial of degree 6; times 2^k it is the weight, and the mass its ``bits`` binary places.

It cannot fall as d rises: the rest and all coefficients are positive, and products, sums and roundings of such numbers
keep their order; nor from one k to the next, because the polynomial has no values but those from 1 to 2.
"""

from __future__ import annotations

from dataclasses import dataclass
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

SHORT_COEFFICIENTS: Final = (
    1.0,
    0.6931470036506653,
    0.2402295172214508,
    0.05548415333032608,
    0.009678063914179802,
    0.00124408770352602,
    0.00021715024195145816,
)
"""2^f on [0, 1] as a polynomial in fp32, constant term first, chosen for the least error and to be 2 at 1."""

LEAST_FACTOR: Final = 2.0**-100
GREATEST_FACTOR: Final = 2.0**110
"""log2(e) / T counts as no less and no more, so that fp32 holds it and its products with distances in sight."""

OCTAVES: Final = 128.0
"""Tokens this many powers of two below the highest weigh nothing, whatever the number of binary digits."""


@dataclass(frozen=True, slots=True)
class MassScale:
    """What masses are: the likeliest token's is ``2**bits``, and which exponential makes them.

    Attributes:
        bits: 0 to 52.
        is_short: whether it is the short one, which has ``SHORT_BITS`` binary digits at most.
    """

    bits: int
    is_short: bool


def mass_scale(bits: int, dtype: torch.dtype) -> MassScale:
    """The scale of masses of ``bits`` binary digits, for logits that the model gave in ``dtype``.

    fp64 logits keep the long exponential; what penalties make of fp32 ones in fp64 does not count.
    """
    return MassScale(bits, bits <= SHORT_BITS and dtype != torch.float64)


def integer_masses(logits_RV: Tensor, row_max_R: Tensor, inverse_R: Tensor, scale: MassScale) -> Tensor:
    """``exp((logit - max) * inverse) * 2**bits`` as whole numbers, int64 [R, V]; exactly ``2**bits`` at the maximum.

    They do not fall as the logits rise. The long exponential errs by about eight units in the last place before it is
    rounded to the nearest; the short one by less than 2e-7 of the mass before it is cut, and by what rounding
    ``logit - max`` to float32 changes.

    Args:
        logits_RV: float32 or float64; a row with NaN or infinite ``row_max_R`` gives arbitrary numbers.
        row_max_R: highest logits, in the type of the logits.
        inverse_R: 1 / T, float64.
        scale: their number of binary digits, and the exponential.
    """
    row_max_R1, inverse_R1 = row_max_R.unsqueeze(1), inverse_R.unsqueeze(1)
    if scale.is_short:
        return _short_masses(logits_RV, row_max_R1, inverse_R1, scale.bits)
    scaled_RV = (logits_RV.to(torch.float64) - row_max_R1.to(torch.float64)).mul_(inverse_R1)
    return long_exponential(scaled_RV, scale.bits).round_().to(torch.int64)


def long_exponential(x: Tensor, bits: int) -> Tensor:
    """``exp(x) * 2**bits`` in fp64 for x <= 0; exactly ``2**bits`` at 0, and nowhere falling as x rises.

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


def _short_masses(logits_RV: Tensor, row_max_R1: Tensor, inverse_R1: Tensor, bits: int) -> Tensor:
    wanted_R1 = (inverse_R1 * LOG2_E).clamp(LEAST_FACTOR, GREATEST_FACTOR)
    factor_R1 = wanted_R1.to(torch.float32).to(torch.float64)
    # What the factor lacks, to 40 binary places.
    lack_R1 = ((wanted_R1 / factor_R1 - 1.0) * 2.0**40).round_() * 2.0**-40
    distance_RV = (logits_RV - row_max_R1).to(torch.float32).to(torch.float64)
    # Exact, and so are all sums and products below but for the roundings that are spelt out.
    power_RV = distance_RV.mul_(factor_R1).clamp_min_(-OCTAVES)
    whole_RV = power_RV.floor()
    rest_RV = power_RV.mul_(2.0**23).round_().mul_(2.0**-23).sub_(whole_RV)
    # (whole + 1/2) * lack - 1 in float32, for a rest plus 1: one fused operation.
    start_R1 = (lack_R1 * 1.5 - 1.0).to(torch.float32).to(torch.float64)
    rest_RV.add_((((whole_RV - 1.0) * lack_R1).add_(start_R1)).to(torch.float32)).add_(1.0).clamp_(0.0, 1.0)
    power = torch.full_like(rest_RV, SHORT_COEFFICIENTS[-1])
    for coefficient in reversed(SHORT_COEFFICIENTS[:-1]):
        power = power.mul_(rest_RV).add_(coefficient).to(torch.float32).to(torch.float64)
    scale = whole_RV.add_(1023 + bits).to(torch.int64).bitwise_left_shift_(52).view(torch.float64)
    return power.mul_(scale).to(torch.int64)
