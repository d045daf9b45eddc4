"""Checks the history of output lengths against a plain list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paged.core.lengths import LengthHistory


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 20), st.integers(0, 60))
def test_the_last_lengths_are_kept_in_order(lengths: list[int], capacity: int, bound: int) -> None:
    history = LengthHistory(capacity)
    for length in lengths:
        history.add(length)
    kept = lengths[-capacity:]
    assert history.ordered == sorted(kept)
    assert len(history) == len(kept)
    assert history.num_seen == len(lengths)
    assert history.num_longer(bound) == sum(length > bound for length in kept)
