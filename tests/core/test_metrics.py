"""Checks percentiles against values found by counting."""

from __future__ import annotations

import pytest

from paged.core.metrics import percentile


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 10), (0.2, 10), (0.21, 20), (0.5, 30), (0.8, 40), (0.81, 50), (1.0, 50)]
)
def test_a_percentile_is_one_of_the_values(share: float, expected: int) -> None:
    assert percentile([10, 20, 30, 40, 50], share) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 10, 99, 100, 101])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_a_percentile_is_the_least_that_enough_values_do_not_exceed(size: int, share: float) -> None:
    values = [each * each for each in range(size)]
    enough = [value for value in values if sum(other <= value for other in values) >= share * size]
    assert percentile(values, share) == enough[0]


def test_nothing_has_no_percentile() -> None:
    assert percentile([], 0.5) is None
