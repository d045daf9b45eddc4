"""The exponentials of masses: close to the true one, monotone where logits are, the same at every place of a vector."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paged.kernels.exponential import SHORT_BITS, SHORT_COEFFICIENTS, is_short, scaled_exponential

BOTH = pytest.mark.parametrize("bits", [SHORT_BITS, SHORT_BITS + 1], ids=["short", "long"])


def test_the_long_one_is_close_to_the_library() -> None:
    values = torch.from_numpy(np.random.default_rng(0).uniform(-40, 0, 200_000))
    ratio = scaled_exponential(values, 52) / (values.exp() * 2.0**52)
    # The product x * log2(e) is rounded once, which grows with x: 40 * log2(e) * 2^-53 of the result.
    assert (ratio - 1).abs().max() < 58 * 2.0**-53
    near = values / 40
    assert (scaled_exponential(near, 52) / (near.exp() * 2.0**52) - 1).abs().max() <= 9 * 2.0**-53


def test_the_short_one_errs_by_less_than_it_says() -> None:
    """Within 8e-10 of a mass; and it leans to neither side, so that sums err by far less."""
    values = torch.from_numpy(np.random.default_rng(0).uniform(-30, 0, 400_000))
    error = scaled_exponential(values, 44) / (values.exp() * 2.0**44) - 1
    assert error.abs().max() < 8e-10
    assert error.mean().abs() < 5e-12
    assert error.abs().max() > 1e-10, "the long one was measured"


def test_products_of_the_short_one_fit_63_bits() -> None:
    """Its polynomial is highest at the end of the range, and still below 2^31."""
    fraction, rise = 2**32 - 1, SHORT_COEFFICIENTS[-1]
    for coefficient in reversed(SHORT_COEFFICIENTS[:-1]):
        rise = (rise * fraction >> 32) + coefficient
    assert 2**31 - 4 < rise < 2**31
    assert is_short(44)
    assert not is_short(52)


@BOTH
def test_is_exact_at_zero_and_nothing_far_below(bits: int) -> None:
    values = torch.tensor([0.0, -0.0, -64.0, -1e300, -torch.inf], dtype=torch.float64)
    assert scaled_exponential(values, bits).tolist()[:2] == [2.0**bits] * 2
    assert (scaled_exponential(values, bits)[2:] < 1e-11).all()


@BOTH
def test_is_monotone(bits: int) -> None:
    """Masses fall along the order of the logits, as min_p assumes."""
    for scale in (1e-15, 1e-9, 1e-3, 1.0, 40.0):
        values = torch.from_numpy(np.sort(np.random.default_rng(26).uniform(-scale, 0, 300_000)))
        assert (scaled_exponential(values, bits).diff() >= 0).all()
    steps = -torch.arange(300_000, 0, -1, dtype=torch.float64) * 2.0**-33
    assert (scaled_exponential(steps, bits).diff() >= 0).all()


@BOTH
def test_knows_no_position(bits: int) -> None:
    """What the equality of rows rests on: an element has the same bits at any place of any vector."""
    values = torch.from_numpy(np.random.default_rng(25).uniform(-40, 0, 3000))
    expected = torch.cat([scaled_exponential(value.view(1), bits) for value in values])
    for start in range(0, 20):
        for length in (1, 3, 7, 8, 9, 31, 33, 100, 260, 2900):
            part = slice(start, start + length)
            assert torch.equal(scaled_exponential(values[part], bits), expected[part])
        assert torch.equal(scaled_exponential(values[start::3], bits), expected[start::3])
