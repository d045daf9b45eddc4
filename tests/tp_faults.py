"""Faults planted in the ranks of an engine. Run as a module it is a rank's process that plants one before it serves.

The environment says which, and a folder in which each rank leaves a mark when its fault is reached.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

FAULT, MARKS = "PAGED_TEST_FAULT", "PAGED_TEST_MARKS"
# The step at which a rank's trouble begins.
AT_STEP = 3


def reach(rank: int) -> None:
    """Leave the mark that a fault was reached."""
    (Path(os.environ[MARKS]) / f"rank{rank}").touch()


def seed_by_rank(patch: pytest.MonkeyPatch) -> None:
    """Each rank draws from another random stream."""
    from paged.runner.runner import TorchRunner

    sample = TorchRunner._sample

    def wrapped(self: Any, plan: Any, rows: Any, logits_RV: Any) -> Any:
        rank = self.decoder.group.rank
        reach(rank)
        seeds_S = self.slots._sampling_5S[1]
        seeds_S ^= rank
        try:
            return sample(self, plan, rows, logits_RV)
        finally:
            seeds_S ^= rank

    patch.setattr(TorchRunner, "_sample", wrapped)


def constant_statement(patch: pytest.MonkeyPatch) -> None:
    """Every rank says the same, whatever it plans and has committed."""
    from paged import consensus
    from paged.core.agreement import Statement

    patch.setattr(consensus, "statement_of", lambda plan, events: Statement(0, b"", b"", b"", b""))


def constant_statement_and_seed_by_rank(patch: pytest.MonkeyPatch) -> None:
    constant_statement(patch)
    seed_by_rank(patch)


def nothing_compared(patch: pytest.MonkeyPatch) -> None:
    """Statements are exchanged, and nobody looks at them."""
    from paged import consensus

    patch.setattr(consensus, "difference", lambda statements: None)


def nothing_compared_and_seed_by_rank(patch: pytest.MonkeyPatch) -> None:
    nothing_compared(patch)
    seed_by_rank(patch)


def other_chunks(patch: pytest.MonkeyPatch) -> None:
    """Other ranks compute prompts in smaller chunks."""
    _of_followers(patch, "plan", lambda self: object.__setattr__(self._scheduler.config, "chunk_size", 2))


def other_requests(patch: pytest.MonkeyPatch) -> None:
    """Other ranks take in requests with another seed."""
    from paged.consensus import Follower

    add = Follower.add

    def wrapped(self: Any, requests: Any) -> None:
        reach(_rank(self))
        for request in requests:
            object.__setattr__(request, "seed", request.seed ^ 1)
        add(self, requests)

    patch.setattr(Follower, "add", wrapped)


def lost_request(patch: pytest.MonkeyPatch) -> None:
    """Other ranks never hear of a request."""
    from paged.consensus import Follower

    patch.setattr(Follower, "add", lambda self, requests: reach(_rank(self)))


def other_logprobs(patch: pytest.MonkeyPatch) -> None:
    """Other ranks compute a log-probability that is off by its last bit."""
    from paged.runner.runner import TorchRunner

    result = TorchRunner._result

    def wrapped(self: Any, *args: Any) -> Any:
        import math

        made = result(self, *args)
        if self.decoder.group.rank:
            reach(self.decoder.group.rank)
            values = made.payload.logprobs
            values[:] = [math.nextafter(value, 0.0) for value in values]
        return made

    patch.setattr(TorchRunner, "_result", wrapped)


def fails_in_a_step(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 meets an error while it computes."""

    def act() -> None:
        raise RuntimeError("planted")

    _in_step(patch, act)


def sleeps_in_a_step(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 leaves the others waiting in the middle of a step, and lives."""
    _in_step(patch, lambda: time.sleep(60))


def dies_in_a_step(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 is killed in the middle of a step."""
    _in_step(patch, lambda: os.kill(os.getpid(), signal.SIGKILL))


def stops_in_a_step(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 is stopped in the middle of a step."""
    _in_step(patch, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def cannot_load(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 meets a mistake of the user's while it builds its parts."""
    from paged import engine_parts

    def load(*args: Any, group: Any, **options: Any) -> Any:
        reach(group.rank)
        raise ValueError("the checkpoint has gone")

    if FAULT in os.environ and __name__ == "__main__":
        patch.setattr(engine_parts, "load_decoder", load)


def cannot_meet(patch: pytest.MonkeyPatch) -> None:
    """Another rank meets an error where the ranks form their group."""

    def meet(rank: int, *args: Any, **named: Any) -> Any:
        reach(rank)
        raise RuntimeError("planted")

    if __name__ == "__main__":
        patch.setattr("paged.runner.ranks.make_group", meet)


def slow_to_load(patch: pytest.MonkeyPatch) -> None:
    """Other ranks take their time to build their parts, and give signs of life."""
    from paged import engine_parts

    if __name__ == "__main__":
        reach(1)
        patch.setattr(engine_parts, "load_decoder", lambda *args, **options: time.sleep(60))


def less_room(patch: pytest.MonkeyPatch) -> None:
    """Other ranks have room for 20 blocks only."""
    from paged import engine_parts

    if __name__ == "__main__":
        reach(1)
        patch.setattr(engine_parts, "sized_num_blocks", lambda *args: 20)


def dies_at_once(patch: pytest.MonkeyPatch) -> None:
    """The process of another rank can't even begin."""
    if __name__ == "__main__":
        reach(1)
        raise SystemExit("no such library")


def _in_step(patch: pytest.MonkeyPatch, act: Any) -> None:
    from paged.model.decoder import Decoder

    forward = Decoder.forward
    calls = [0]

    def wrapped(self: Any, *args: Any) -> Any:
        calls[0] += 1
        # The first call warms up.
        if self.group.rank == 1 and calls[0] == AT_STEP + 1:
            reach(1)
            act()
        return forward(self, *args)

    patch.setattr(Decoder, "forward", wrapped)


def _of_followers(patch: pytest.MonkeyPatch, name: str, act: Any) -> None:
    from paged.consensus import Follower

    method = getattr(Follower, name)

    def wrapped(self: Any, *args: Any) -> Any:
        reach(_rank(self))
        act(self)
        return method(self, *args)

    patch.setattr(Follower, name, wrapped)


def _rank(follower: Any) -> int:
    rank: int = follower._runner.decoder.group.rank
    return rank


if __name__ == "__main__":
    assert threading.current_thread() is threading.main_thread()
    globals()[os.environ[FAULT]](pytest.MonkeyPatch())
    from paged.follower import main

    main()
