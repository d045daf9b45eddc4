"""Checks rank 0's hold on the others: who is let in, who is blamed, and who watches while it can't look itself."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paged.core.agreement import TPError
from paged.runner.links import Failure, Link, pack
from paged.runner.ranks import Ranks, _Peer
from paged.runner.watch import Watch


@pytest.fixture
def pair() -> Iterator[tuple[Ranks, Link]]:
    """Rank 0's side of two ranks, and the other's link."""
    ours, theirs = (Link(each) for each in socket.socketpair())
    with ours, theirs:
        yield Ranks([_Peer(ours)]), theirs


@pytest.mark.parametrize("error", [ValueError("own"), KeyboardInterrupt()])
def test_signs_of_life_are_no_cause(pair: tuple[Ranks, Link], error: BaseException) -> None:
    ranks, other = pair
    other.send_bytes(b"")
    assert ranks.cause(error, 1) is None


def test_a_failure_after_signs_of_life_is_a_cause(pair: tuple[Ranks, Link]) -> None:
    ranks, other = pair
    other.send_bytes(b"")
    other.send(Failure("RuntimeError", "planted", is_mistake=False))
    assert str(ranks.cause(ValueError("own"), 1)) == "rank 1 failed: RuntimeError: planted"


def test_what_the_library_says_is_no_reason(pair: tuple[Ranks, Link]) -> None:
    ranks, other = pair
    other.send(Failure("RuntimeError", "[gloo/transport/tcp/pair.cc] Connection reset", is_mistake=False))
    assert str(ranks.cause(RuntimeError("Gloo failed"), 1)) == "the ranks have lost each other in a step"


def test_a_rank_that_is_gone_is_told_as_one_whatever_is_said_to_it(pair: tuple[Ranks, Link]) -> None:
    ranks, other = pair
    other.close()
    for say in (lambda: ranks.tell(1, 1), lambda: ranks.tell_each([1], 1)):
        with pytest.raises(TPError, match=r"^rank 1 is gone$"):
            say()


@pytest.mark.parametrize("kind", ["closes", "silent", "wrong"])
def test_strangers_are_passed_over(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged.runner.ranks.TOKEN_S", 0.3)
    store = dist.HashStore()
    made: list[socket.socket] = []

    def call() -> None:
        host, port, token = pickle.loads(bytes.fromhex(store.get("key").decode()))
        made.append(socket.create_connection((host, port)))
        if kind == "closes":
            made[0].close()
        elif kind == "wrong":
            made[0].sendall(bytes(len(token)))
        made.append(socket.create_connection((host, port)))
        made[1].sendall(token + (1).to_bytes(4, "little"))

    thread = threading.Thread(target=call)
    thread.start()
    ranks = Ranks.await_launched(2, store, "key", "127.0.0.1", 5)
    thread.join()
    message = pack(7)
    made[1].sendall(len(message).to_bytes(8, "little") + message)
    assert ranks.hear(2) == [7]
    ranks.end()
    for each in made:
        each.close()


def test_a_rank_that_does_not_join_is_named() -> None:
    with pytest.raises(TPError, match=r"^rank 1 did not join within 0.1 s$"):
        Ranks.await_launched(2, dist.HashStore(), "key", "127.0.0.1", 0.1)


@pytest.mark.parametrize(
    ("limit_s", "said"), [(0.1, r"0.3 s \(the time for a start\)"), (0.4, r"0.4 s \(tp_timeout_s\)")]
)
def test_a_rank_that_is_silent_while_it_starts_is_told_with_the_limit_that_held(
    pair: tuple[Ranks, Link], limit_s: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start may take longer than `tp_timeout_s`, and the sentence once gave the longer time that name."""
    ranks, _ = pair
    monkeypatch.setattr("paged.runner.ranks.START_S", 0.3)
    with pytest.raises(TPError, match=rf"^rank 1 has not answered within {said}$"):
        ranks.hear_start(limit_s)


class Card:
    """Stands for a group of ranks on cards."""

    def __init__(self) -> None:
        self.process_group = self
        self.num_collectives = 0
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()

    def close(self, *, is_lost: bool) -> None:
        self.aborted.set()


def watch_over(ranks: Ranks, limit_s: float) -> tuple[Watch, Card]:
    card: Any = Card()
    return Watch(ranks, card, torch.device("cuda"), limit_s), card


def test_on_cards_a_rank_that_is_gone_ends_what_has_no_limit(pair: tuple[Ranks, Link]) -> None:
    ranks, other = pair
    watch, card = watch_over(ranks, 0.1)
    with watch.watching(is_limited=False):
        assert not card.aborted.wait(1.5), "there is no limit"
    with pytest.raises(RuntimeError, match="a rank is gone"), watch.watching(is_limited=False):  # noqa: PT012
        other.close()
        assert card.aborted.wait(5)
    watch.stop()


def test_on_cards_a_rank_that_is_gone_between_steps_hangs_nobody(pair: tuple[Ranks, Link]) -> None:
    """Steps in flight wait for it, and the caller, in no call of ours, may wait for them."""
    ranks, other = pair
    watch, card = watch_over(ranks, 60)
    other.close()
    assert card.aborted.wait(5)
    with pytest.raises(RuntimeError, match="a rank is gone"), watch.watching(is_limited=False):
        pass
    watch.stop()


def test_on_cards_a_step_may_take_longer_while_exchanges_are_launched(pair: tuple[Ranks, Link]) -> None:
    """The first steps build kernels."""
    ranks, _ = pair
    watch, card = watch_over(ranks, 1.0)
    until_s = time.monotonic() + 2.5
    with pytest.raises(TPError), watch.watching(is_limited=True):  # noqa: PT012
        while time.monotonic() < until_s:
            card.num_collectives += 1
            assert not card.aborted.wait(0.1)
        assert card.aborted.wait(5)
    watch.stop()


def test_on_cards_a_step_has_a_limit(pair: tuple[Ranks, Link]) -> None:
    ranks, _ = pair
    watch, card = watch_over(ranks, 0.1)
    time.sleep(1)
    said = r"^rank 1 has not answered within 0.1 s \(tp_timeout_s\)$"
    with pytest.raises(TPError, match=said), watch.watching(is_limited=True):
        assert card.aborted.wait(5)
    watch.stop()
