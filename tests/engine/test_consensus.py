"""Checks what rank 0 of several keeps for all: torch's number of threads, and a digest of what was committed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from paged.consensus import Leader, note_commit
from paged.core.agreement import Ledger
from paged.core.plan import StepResult
from paged.core.prompt import Prompt
from paged.core.request import Request, SamplingParams
from paged.runner.payload import PromptScore, StepPayload, Stop
from paged.runner.ranks import Ranks


def test_engines_that_overlap_leave_the_number_of_threads_as_it_was() -> None:
    def lead(num_threads: int) -> Leader:
        group: Any = SimpleNamespace(close=lambda *, is_lost: None)
        return Leader(Ranks([]), group, torch.device("cpu"), is_verifying=True, limit_s=1, num_threads=num_threads)

    before = torch.get_num_threads()
    first, second = lead(before + 1), lead(before + 2)
    assert torch.get_num_threads() == before + 2
    first.close()
    first.close()
    assert torch.get_num_threads() == before + 2, "the second one's"
    third = lead(before + 3)
    third.close()
    assert torch.get_num_threads() == before + 2, "the second one's again"
    second.close()
    assert torch.get_num_threads() == before


REQUEST = Request("a", 0, Prompt([3, 1]), SamplingParams(), seed=1, max_tokens=7)


def digest(alternative: int = 7, reason: int | str | None = None) -> bytes:
    payload = StepPayload(
        tokens=[5],
        logprobs=[-0.5],
        behavior_logprobs=[-0.5],
        top_logprobs={},
        stops={0: Stop(reason, is_token=True)},
        scores=[(REQUEST, 0, [PromptScore(3, -1.0, ([alternative], [-1.0]))])],
    )
    ledger = Ledger()
    note_commit(ledger, StepResult(0, [5], [True], [], 0.0, 0.0, payload))
    return ledger.digest


def test_alternatives_and_stop_reasons_count_in_the_digest() -> None:
    assert digest() == digest()
    assert len({digest(), digest(alternative=8), digest(reason="x"), digest(reason=5)}) == 4
