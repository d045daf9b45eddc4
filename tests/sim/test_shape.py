"""Checks the shape of a step against a sum over its rows, written out."""

import random

from paged.core.plan import NO_LOGITS, SAMPLE, SCORE, StepPlan
from paged.sim.shape import StepShape


def plan(rows: list[tuple[int, int, int]]) -> StepPlan:
    """A plan of (start, length, logits) rows."""
    starts, lengths, logits = ([row[i] for row in rows] for i in range(3))
    return StepPlan(0, 0, (), (), (), list(range(len(rows))), starts, lengths, logits, ())


def by_hand(rows: list[tuple[int, int, int]]) -> StepShape:
    prefill = [(start, length) for start, length, _ in rows if length > 1]
    return StepShape(
        num_tokens=sum(length for _, length, _ in rows),
        num_seqs=len(rows),
        num_samples=sum(bool(flag & SAMPLE) for _, _, flag in rows),
        kv_tokens=sum(start + length for start, length, _ in rows),
        max_kv=max((start + length for start, length, _ in rows), default=0),
        prefill_tokens=sum(length for _, length in prefill),
        prefill_seqs=len(prefill),
        prefill_kv=sum(start for start, _ in prefill),
        # Token i of a row attends to the tokens before the row, to those before it in the row, and to itself.
        attention_pairs=sum(start + i + 1 for start, length in prefill for i in range(length)),
    )


def test_shapes_equal_the_sums_over_rows() -> None:
    generator = random.Random(0)
    mixed = decodes = 0
    for _ in range(300):
        longest = generator.choice([1, 1, 40])
        rows = [
            (generator.randrange(100), generator.randint(1, longest), generator.choice([NO_LOGITS, 1, 2, 3]))
            for _ in range(generator.randrange(9))
        ]
        shape = StepShape.of(plan(rows))
        assert shape == by_hand(rows)
        mixed += shape.prefill_seqs > 0
        decodes += shape.prefill_seqs == 0 and shape.num_seqs > 0
    assert min(mixed, decodes) > 50


def test_a_plan_without_rows_is_a_shape_of_zeros() -> None:
    assert StepShape.of(plan([])) == StepShape(0, 0, 0, 0, 0)


def test_scoring_rows_do_not_sample() -> None:
    assert StepShape.of(plan([(0, 5, SCORE), (0, 5, SAMPLE | SCORE), (9, 1, SAMPLE)])).num_samples == 2


def test_a_decode_shape_is_that_of_its_plan() -> None:
    rows = [(4095, 1, SAMPLE)] * 16
    assert StepShape.decode(16, 4096) == StepShape.of(plan(rows))
