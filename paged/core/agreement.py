"""What ranks that decide alike compare before a step: a short statement of each one's plan and of its past."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from paged.core.plan import StepPlan

Column = Sequence[int] | Sequence[float] | Sequence[str]

_DIGEST_BYTES: Final = 8


class TPError(RuntimeError):
    """A rank of a tensor-parallel engine died, stalled or failed; the engine can't go on."""


class TPDesyncError(TPError):
    """Ranks have decided or computed differently; nothing of what they disagree on was handed out.

    Attributes:
        ranks: those that are known to have raised it.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class Statement(NamedTuple):
    """What one rank says before it computes a step; equal on all ranks that agree.

    Attributes:
        step: of the plan; None if there is nothing to compute.
        sequences: digest of who starts (ids, seed, parameters and all known tokens), leaves and is preempted.
        rows: digest of the columns: slots, tokens computed before, new tokens, and what is wanted of the logits.
        blocks: digest of the block tables that start or grow, and of the weights' version.
        events: digest of all that was committed so far.
    """

    step: int | None
    sequences: bytes
    rows: bytes
    blocks: bytes
    events: bytes


_WORDS: Final = {
    "step": "the step",
    "sequences": "the sequences that start or leave (their tokens or seeds)",
    "rows": "the rows of the plan",
    "blocks": "the blocks of the plan",
    "events": "the tokens and log-probabilities of the steps before",
}


class Ledger:
    """A running digest of events: equal on ranks that have seen equal events in the same order.

    Attributes:
        digest: of all events so far.
    """

    __slots__ = ("digest",)

    def __init__(self) -> None:
        self.digest = bytes(_DIGEST_BYTES)

    def note(self, name: str, *columns: Column) -> None:
        """Take in an event: its name and columns of whole numbers, of floats (their bits count) or of texts."""
        self.digest = _digest((name,), *columns, key=self.digest)


def statement_of(plan: StepPlan | None, events: bytes) -> Statement:
    """What a rank says whose next plan is ``plan`` (None: there is nothing to compute) after some ``events``."""
    if plan is None:
        return Statement(None, b"", b"", b"", events)
    started: list[Column] = []
    tables: list[Column] = []
    for start in plan.started:
        request = start.request
        limits = (start.slot, start.num_cached, start.num_output, request.sample, request.max_tokens)
        # A seed has 64 bits, more than a signed number holds.
        started += [limits, (request.id, str(request.seed), str(request.output_len), str(request.params))]
        started += [request.prompt.token_ids or (), start.output_ids]
        tables.append(start.blocks)
    left = [text for request_id, sample in plan.preempted for text in (request_id, str(sample))]
    appended = [number for pair in plan.appended for number in pair]
    return Statement(
        plan.step,
        _digest(plan.released, left, *started),
        _digest(plan.slots, plan.starts, plan.lengths, plan.logits),
        _digest((plan.weight_version,), appended, *tables),
        events,
    )


def difference(statements: Sequence[Statement]) -> str | None:
    """One sentence on how the statements of ranks 0, 1, ... differ from rank 0's; None if they do not."""
    first = statements[0]
    if all(statement == first for statement in statements):
        return None
    ranks = [rank for rank, statement in enumerate(statements) if statement != first]
    differing = [name for name in first._fields if any(getattr(s, name) != getattr(first, name) for s in statements)]
    noun = "ranks" if len(ranks) > 1 else "rank"
    where = "after the last step" if first.step is None else f"at step {first.step}"
    what = " and ".join(_WORDS[name] for name in differing)
    return f"{noun} {', '.join(map(str, ranks))} and rank 0 disagree {where} on {what}"


def _digest(*columns: Column, key: bytes = b"") -> bytes:
    """A digest of columns in order; their kinds and lengths count."""
    digest = blake2b(digest_size=_DIGEST_BYTES, key=key)
    for column in columns:
        if column and isinstance(column[0], str):
            data = "\0".join(map(str, column)).encode()
        else:
            data = array("d" if column and isinstance(column[0], float) else "q", column).tobytes()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
