"""The exponential of masses: close to the true one, monotone where logits are, the same at every place of a vector."""

from __future__ import annotations

import numpy as np
import torch

from paged.kernels.exponential import scaled_exponential


def test_is_close_to_the_library() -> None:
    values = torch.from_numpy(np.random.default_rng(0).uniform(-40, 0, 200_000))
    ratio = scaled_exponential(values, 44) / (values.exp() * 2.0**44)
    # The product x * log2(e) is rounded once, which grows with x: 40 * log2(e) * 2^-53 of the result.
    assert (ratio - 1).abs().max() < 58 * 2.0**-53
    near = values / 40
    assert (scaled_exponential(near, 0) / near.exp() - 1).abs().max() <= 9 * 2.0**-53


def test_is_exact_at_zero_and_nothing_far_below() -> None:
    values = torch.tensor([0.0, -0.0, -64.0, -1e300, -torch.inf], dtype=torch.float64)
    assert scaled_exponential(values, 52).tolist()[:2] == [2.0**52] * 2
    assert (scaled_exponential(values, 52)[2:] < 1e-11).all()


def test_is_monotone() -> None:
    """Masses fall along the order of the logits, as min_p assumes."""
    for scale in (1e-15, 1e-9, 1e-3, 1.0, 40.0):
        values = torch.from_numpy(np.sort(np.random.default_rng(26).uniform(-scale, 0, 300_000)))
        assert (scaled_exponential(values, 52).diff() >= 0).all()


def test_knows_no_position() -> None:
    """What the equality of rows rests on: an element has the same bits at any place of any vector."""
    values = torch.from_numpy(np.random.default_rng(25).uniform(-40, 0, 3000))
    expected = torch.cat([scaled_exponential(value.view(1), 44) for value in values])
    for start in range(0, 20):
        for length in (1, 3, 7, 8, 9, 31, 33, 100, 260, 2900):
            part = slice(start, start + length)
            assert torch.equal(scaled_exponential(values[part], 44), expected[part])
        assert torch.equal(scaled_exponential(values[start::3], 44), expected[start::3])
