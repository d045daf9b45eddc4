"""Checks what ranks compare: a statement changes with everything that it stands for, and a difference is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paged.core.agreement import Ledger, Statement, TPDesyncError, TPError, difference, statement_of
from paged.core.plan import SAMPLE, SCORE, Started, StepPlan
from paged.core.prompt import Prompt
from paged.core.request import Request, SamplingParams

REQUEST = Request("a", 0, Prompt([3, 1, 4]), SamplingParams(seed=5), seed=2**64 - 1, max_tokens=7)
STARTED = Started(slot=2, request=REQUEST, output_ids=(9, 8), num_output=2, blocks=(4, 6), num_cached=2)
PLAN = StepPlan(
    step=3,
    weight_version=1,
    released=[0],
    started=[STARTED],
    appended=[(1, 5)],
    slots=[1, 2],
    starts=[10, 2],
    lengths=[1, 3],
    logits=[SAMPLE, SAMPLE],
    preempted=[("b", 1)],
)


def started(**fields: Any) -> list[Started]:
    return [replace(STARTED, **fields)]


def requested(**fields: Any) -> list[Started]:
    return started(request=replace(REQUEST, **fields))


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("step", {"step": 4}),
        ("blocks", {"weight_version": 2}),
        ("blocks", {"appended": [(1, 6)]}),
        ("blocks", {"started": started(blocks=(4, 7))}),
        ("rows", {"slots": [1, 3]}),
        ("rows", {"starts": [11, 2]}),
        ("rows", {"lengths": [1, 2]}),
        ("rows", {"logits": [SAMPLE, SAMPLE | SCORE]}),
        ("rows", {"slots": [1], "starts": [10], "lengths": [1], "logits": [SAMPLE]}),
        ("sequences", {"released": []}),
        ("sequences", {"preempted": [("b", 2)]}),
        ("sequences", {"started": started(slot=3)}),
        ("sequences", {"started": started(num_cached=0)}),
        ("sequences", {"started": started(output_ids=(9, 7))}),
        ("sequences", {"started": requested(id="c")}),
        ("sequences", {"started": requested(sample=1)}),
        ("sequences", {"started": requested(seed=2**64 - 2)}),
        ("sequences", {"started": requested(max_tokens=8)}),
        ("sequences", {"started": requested(output_len=3)}),
        ("sequences", {"started": requested(prompt=Prompt([3, 1, 5]))}),
        ("sequences", {"started": requested(params=SamplingParams(seed=5, top_p=0.5))}),
    ],
)
def test_a_statement_changes_with_each_part_of_a_plan(part: str, change: dict[str, Any]) -> None:
    before, after = statement_of(PLAN, b"e"), statement_of(PLAN._replace(**change), b"e")
    assert [name for name in Statement._fields if getattr(before, name) != getattr(after, name)] == [part]


def test_equal_plans_make_equal_statements_whatever_holds_their_columns() -> None:
    same = PLAN._replace(slots=(1, 2), started=(replace(STARTED),), released=(0,))
    assert statement_of(same, b"e") == statement_of(PLAN, b"e")
    assert statement_of(None, b"e") == statement_of(None, b"e") != statement_of(None, b"f")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("commit", [1, 2]), ("commit", [1, 3])),
        (("commit", [1, 2]), ("commit", [1], [2])),
        (("commit", [1, 2]), ("commit", [2, 1])),
        (("commit", []), ("commit", [], [])),
        (("commit", [0.5]), ("commit", [0.5 + 2**-53])),
        (("commit", [0.0]), ("commit", [-0.0])),
        (("commit", ["a", "b"]), ("commit", ["ab"])),
        (("commit", []), ("look", [])),
    ],
)
def test_a_ledger_tells_events_apart(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    ledgers = Ledger(), Ledger(), Ledger()
    for ledger, event in zip(ledgers, (one, other, one), strict=True):
        ledger.note(*event)
    assert ledgers[0].digest == ledgers[2].digest != ledgers[1].digest
    for ledger in ledgers:
        ledger.note("same")
    assert ledgers[0].digest != ledgers[1].digest, "what differed once differs for ever"


def test_nan_is_an_event_like_any_other() -> None:
    left, right = Ledger(), Ledger()
    for ledger in (left, right):
        ledger.note("commit", [float("nan")])
    assert left.digest == right.digest


def test_a_difference_names_step_ranks_and_what_differs() -> None:
    said = statement_of(PLAN, b"e")
    assert difference([said, said, said]) is None
    text = difference([said, said, said._replace(rows=b"x"), said._replace(events=b"y")])
    assert text == (
        "ranks 2, 3 and rank 0 disagree at step 3 on the rows of the plan and the tokens and log-probabilities of the "
        "steps before"
    )
    idle = statement_of(None, b"e")
    text = difference([idle, idle._replace(events=b"x")])
    assert text is not None
    assert text.startswith("rank 1 and rank 0 disagree after the last step on the tokens")


def test_disagreement_is_a_failure_of_the_ranks() -> None:
    error = TPDesyncError("they differ", ranks=[0, 1])
    assert isinstance(error, TPError)
    assert isinstance(error, RuntimeError)
    assert error.ranks == (0, 1)
