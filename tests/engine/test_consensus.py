"""Checks what rank 0 of several keeps for all: torch's number of threads, and a digest of what was committed."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paged.consensus import Leader, note_commit
from paged.core.agreement import Ledger
from paged.core.plan import StepResult
from paged.core.prompt import Prompt
from paged.core.request import Request, SamplingParams
from paged.kernels.collectives import SINGLE
from paged.other_ranks import RanksOfFollower, RanksOfLeader
from paged.runner.links import Link
from paged.runner.payload import PromptScore, StepPayload, Stop
from paged.runner.ranks import Ranks, _Peer
from paged.runner.watch import TICK_S


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


class Card:
    """Stands for a group of ranks on cards; ``problem`` is what its card says in the end."""

    num_collectives = 0

    def __init__(self, problem: str = "") -> None:
        self.problem = problem
        self.done: list[str] = []

    def abort(self) -> None:
        self.done.append("abort")

    def close(self, *, is_lost: bool) -> None:
        self.done.append("lost" if is_lost else "close")
        if self.problem:
            raise RuntimeError(self.problem)


def lead_one(card: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Leader, Link]:
    """The leader of one other rank on a card, and that one's link."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    ours, theirs = (Link(each) for each in socket.socketpair())
    ranks, device = Ranks([_Peer(ours)]), torch.device("cuda")
    return Leader(ranks, card, device, is_verifying=True, limit_s=5, num_threads=torch.get_num_threads()), theirs


def test_ranks_agree_and_meet_while_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, link = lead_one(Card(), monkeypatch)
    first, second = RanksOfLeader(leader, SINGLE, 1), RanksOfFollower(link, SINGLE, 1)
    with ThreadPoolExecutor(1) as pool:
        for ours, theirs in ((7, 5), (3, 5)):
            agreed = pool.submit(second.least, theirs)
            assert first.least(ours) == min(ours, theirs) == agreed.result(5)
        met = pool.submit(second.meet)
        time.sleep(0.2)
        assert not met.done(), "nobody goes on alone"
        first.meet()
        met.result(5)
    for is_limited in (False, True):
        with first.computing(is_limited=is_limited):
            assert leader._watch._is_entered
            assert leader._watch._is_limited == is_limited
        with second.computing(is_limited=is_limited):
            assert not leader._watch._is_entered
    link.close()
    leader.close()


def test_ranks_that_leave_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card()
    leader, other = lead_one(card, monkeypatch)
    tell = Ranks.tell

    def tell_and_wait(self: Ranks, message: Any, limit_s: float) -> None:
        tell(self, message, limit_s)
        assert other.receive(1).record == [("leave",)]
        other.close()
        time.sleep(2 * TICK_S)

    monkeypatch.setattr(Ranks, "tell", tell_and_wait)
    leader.close()
    assert card.done == ["close"]


def test_a_card_that_met_an_error_ends_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says again as its memory is given back took the error's place, and left torch's threads as they were."""
    before = torch.get_num_threads()
    card = Card("illegal memory access")
    leader, other = lead_one(card, monkeypatch)
    torch.set_num_threads(before + 1)
    error = RuntimeError("illegal memory access, the first time")
    with other:
        assert leader.fail(error) is error
    assert card.done == ["lost"]
    assert torch.get_num_threads() == before
    leader.close()


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
