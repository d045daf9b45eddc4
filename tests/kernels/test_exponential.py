"""The exponentials of masses: close to the true one, monotone where logits are, the same at every place of a vector."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from paged.kernels.exponential import (
    LOG2_E,
    SHORT_BITS,
    SHORT_COEFFICIENTS,
    MassScale,
    integer_masses,
    long_exponential,
    mass_scale,
)

BOTH = pytest.mark.parametrize("bits", [SHORT_BITS, SHORT_BITS + 1], ids=["short", "long"])


def masses_below(distances: torch.Tensor, bits: int, inverse: float = 1.0) -> torch.Tensor:
    """Masses of logits ``distances`` from a highest one of 0, which are 0 or less."""
    inverse_1 = torch.tensor([inverse], dtype=torch.float64)
    scale = MassScale(bits, is_short=bits <= SHORT_BITS)
    return integer_masses(distances[None], torch.zeros(1, dtype=distances.dtype), inverse_1, scale)[0]


def around_whole_exponents(generator: np.random.Generator, inverse: float) -> torch.Tensor:
    """Distances in fp32 whose weights lie just above or below a power of two, and some between; the least first."""
    whole = (-np.arange(1, 70) / (inverse * LOG2_E)).astype(np.float32)
    near = whole.view(np.int32)[:, None] + generator.integers(-(2 ** generator.integers(1, 12)), 2**11, 40)[None]
    tiny = -(np.float32(2.0) ** generator.uniform(-60, 6, 500).astype(np.float32))
    values = np.concatenate([near.astype(np.int32).view(np.float32).ravel(), tiny, np.float32([0.0, -3e38, -np.inf])])
    return torch.from_numpy(np.sort(values[values <= 0]))


def inverse_temperatures(generator: np.random.Generator, count: int) -> list[float]:
    """Usual ones, extreme ones, and some whose product with log2(e) fp32 holds very badly."""
    usual = generator.uniform(0.3, 4, count // 3)
    extreme = 2.0 ** generator.uniform(-40, 40, count // 3)
    bad = (1 + generator.uniform(0, 1, count // 3) * 2.0 ** -generator.integers(1, 26, count // 3)) / LOG2_E
    return [*usual.tolist(), *extreme.tolist(), *bad.tolist()]


def test_the_long_one_is_close_to_the_library() -> None:
    values = torch.from_numpy(np.random.default_rng(0).uniform(-40, 0, 200_000))
    ratio = long_exponential(values.clone(), 52) / (values.exp() * 2.0**52)
    # The product x * log2(e) is rounded once, which grows with x: 40 * log2(e) * 2^-53 of the result.
    assert (ratio - 1).abs().max() < 58 * 2.0**-53
    near = values / 40
    assert (long_exponential(near, 52) / (near.exp() * 2.0**52) - 1).abs().max() <= 9 * 2.0**-53


def test_the_short_one_errs_by_less_than_it_says() -> None:
    """Within 2e-7 of a mass; and it hardly leans to a side, so that sums err by less."""
    generator = np.random.default_rng(0)
    inverses = inverse_temperatures(generator, 30)
    errors = []
    for inverse in inverses:
        distances = torch.from_numpy((generator.uniform(-15, 0, 50_000) / inverse).astype(np.float32))
        exact = (distances.double() * inverse).exp() * 2.0**SHORT_BITS
        error = masses_below(distances, SHORT_BITS, inverse) + 0.5 - exact
        assert (error.abs() <= 0.5 + 2e-7 * exact).all(), inverse
        errors.append((error / exact).mean())
    assert torch.stack(errors).abs().max() < 5e-8
    assert torch.stack(errors).mean().abs() < 1e-8
    assert torch.stack(errors).abs().max() > 1e-9, "the long one was measured"
    assert mass_scale(44, torch.float32).is_short
    assert not mass_scale(52, torch.float32).is_short


def test_logits_in_fp64_keep_the_long_one() -> None:
    """Whatever the vocabulary: the sum over a large one is then as good as fp64 asks for."""
    assert mass_scale(44, torch.float64) == MassScale(44, is_short=False)


def test_the_polynomial_of_the_short_one_rises_from_1_to_2() -> None:
    """All values that a rest can have: a step down, or a value above 2, would put likelier tokens behind others."""
    rest = torch.arange(2**24 + 1, dtype=torch.float64) * 2.0**-24
    power = torch.full_like(rest, SHORT_COEFFICIENTS[-1])
    for coefficient in reversed(SHORT_COEFFICIENTS[:-1]):
        power = power.mul_(rest).add_(coefficient).float().double()
    assert power[0] == 1
    assert power[-1] == 2
    assert (power.diff() >= 0).all()
    assert (power / rest.exp2() - 1).abs().max() < 7e-8


def to_fp32(value: Fraction) -> Fraction:
    """The nearest number of 24 binary digits, the even one of two as near."""
    if value == 0:
        return value
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 23)
    return round(value / unit) * unit


def test_the_short_one_rounds_as_fused_operations_do() -> None:
    """The definition in exact fractions, each operation rounded once, where powers of two are near."""
    generator = np.random.default_rng(28)
    for inverse in inverse_temperatures(generator, 12):
        distances = around_whole_exponents(generator, inverse)
        distances = distances[torch.isfinite(distances) & (distances * inverse > -31)][::29]
        wanted = inverse * LOG2_E
        factor = to_fp32(Fraction(wanted))
        lack = Fraction(round((wanted / float(factor) - 1) * 2**40), 2**40)
        for distance, mass in zip(
            distances.tolist(), masses_below(distances, SHORT_BITS, inverse).tolist(), strict=True
        ):
            product = Fraction(distance) * factor
            whole = product.numerator // product.denominator
            rest = to_fp32(product + 1 - whole) + to_fp32((whole - 1) * lack + to_fp32(lack * 3 / 2 - 1))
            rest = min(max(to_fp32(rest), Fraction(0)), Fraction(1))
            power = Fraction(SHORT_COEFFICIENTS[-1])
            for coefficient in reversed(SHORT_COEFFICIENTS[:-1]):
                power = to_fp32(power * rest + Fraction(coefficient))
            assert mass == power * Fraction(2) ** (whole + SHORT_BITS) // 1, (inverse, distance)


@BOTH
def test_is_exact_at_zero_and_nothing_far_below(bits: int) -> None:
    for dtype in (torch.float32, torch.float64):
        distances = torch.tensor([0.0, -0.0, -64.0, -1e38, -torch.inf], dtype=dtype)
        assert masses_below(distances, bits).tolist() == [2**bits] * 2 + [0] * 3
    assert masses_below(torch.tensor([-1e300, -1e-300]).double(), bits).tolist()[0] == 0
    for inverse in (1e-300, 1e-30, 1e30, 1e300, *inverse_temperatures(np.random.default_rng(29), 3000)):
        assert masses_below(torch.zeros(1), bits, inverse).item() == 2**bits


@BOTH
def test_is_monotone(bits: int) -> None:
    """Masses fall along the order of the logits, as min_p assumes."""
    generator = np.random.default_rng(26)
    for scale in (1e-15, 1e-9, 1e-3, 1.0, 40.0):
        distances = torch.from_numpy(np.sort(generator.uniform(-scale, 0, 300_000)))
        assert (masses_below(distances, bits).diff() >= 0).all()
        assert (masses_below(distances.float(), bits).diff() >= 0).all()
    assert (masses_below(-torch.arange(300_000, 0, -1).double() * 2.0**-33, bits).diff() >= 0).all()
    for inverse in inverse_temperatures(generator, 300):
        assert (masses_below(around_whole_exponents(generator, inverse), bits, inverse).diff() >= 0).all()


@BOTH
def test_knows_no_position(bits: int) -> None:
    """What the equality of rows rests on: an element has the same bits at any place of any vector."""
    values = torch.from_numpy(np.random.default_rng(25).uniform(-40, 0, 3000))
    expected = torch.cat([masses_below(value.view(1), bits) for value in values])
    for start in range(0, 20):
        for length in (1, 3, 7, 8, 9, 31, 33, 100, 260, 2900):
            part = slice(start, start + length)
            assert torch.equal(masses_below(values[part], bits), expected[part])
        assert torch.equal(masses_below(values[start::3], bits), expected[start::3])
