"""A stretch of steps in which every running sequence decodes: counted, not visited."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paged.core.plan import StepPlan
from paged.core.request import Request
from paged.core.sequence import Sequence


class SteadyDecode:
    """Plans that each give one token to the same sequences, until one of them may end.

    Step t = 1, 2, ... of it computes position ``first + t - 1`` of a sequence whose position in the plan before was
    ``first - 1``. What the scheduler keeps for a sequence follows from t, so it is brought up to date only when
    somebody looks (``settle``), and only sequences that fill a block are visited in between.

    Attributes:
        sequences, slots, lengths, logits: the columns of every plan, rows in order of admission; never changed.
        requests: of the sequences.
        num_left: plans that may follow before a sequence reaches its ``max_tokens``.
    """

    __slots__ = (
        "_appends",
        "_block_size",
        "_first_by_slot",
        "_num_committed",
        "_num_planned",
        "_rows_by_residue",
        "_settled_committed",
        "_settled_planned",
        "_starts",
        "lengths",
        "logits",
        "num_left",
        "requests",
        "sequences",
        "slots",
    )

    def __init__(self, plan: StepPlan, sequences: list[Sequence], num_left: int, block_size: int) -> None:
        self.sequences = sequences
        self.slots, self.lengths, self.logits = plan.slots, plan.lengths, plan.logits
        self.requests: list[Request | None] = [sequence.request for sequence in sequences]
        self.num_left = num_left
        self._starts: Seq[int] = plan.starts
        self._first_by_slot = {slot: start + 1 for slot, start in zip(plan.slots, plan.starts, strict=True)}
        self._appends = [sequence.output_ids.append for sequence in sequences]
        self._block_size = block_size
        # The sequences whose first position leaves each remainder: they enter and fill blocks together.
        self._rows_by_residue: list[list[Sequence]] = [[] for _ in range(block_size)]
        for sequence, start in zip(sequences, plan.starts, strict=True):
            self._rows_by_residue[(start + 1) % block_size].append(sequence)
        self._num_planned = self._num_committed = 0
        self._settled_planned = self._settled_committed = 0

    @classmethod
    def after(cls, plan: StepPlan, sequences: list[Sequence], block_size: int) -> SteadyDecode | None:
        """What follows ``plan``, in which every running sequence decoded; None if one of them is about to end."""
        # The row at `start` samples token `start + 1` (from 0); only rows that cannot sample the last one count.
        pairs = zip(sequences, plan.starts, strict=True)
        num_left = min([sequence.max_tokens_total - 3 - start for sequence, start in pairs])
        return cls(plan, sequences, num_left, block_size) if num_left > 0 else None

    def growing(self) -> Seq[Sequence]:
        """The sequences that need another block for the next plan, in order of admission."""
        return self._rows_by_residue[-self._num_planned % self._block_size]

    def advance(self) -> Seq[int]:
        """Count one more plan; the starts of its rows."""
        self._num_planned += 1
        self.num_left -= 1
        self._starts = [start + 1 for start in self._starts]
        return self._starts

    def commit(self, tokens: Seq[int] | None) -> Seq[Sequence]:
        """Take in the tokens of the oldest plan not committed; the sequences that have filled a block with it."""
        self._num_committed += 1
        if tokens is not None:
            for append, token in zip(self._appends, tokens, strict=True):
                append(token)
        return self._rows_by_residue[-self._num_committed % self._block_size]

    def num_computed_of(self, sequence: Sequence) -> int:
        """Leading tokens of ``sequence`` whose keys and values are in the cache by now."""
        return self._first_by_slot[sequence.slot] + self._num_committed

    def settle(self) -> None:
        """Bring every sequence's counts up to the plans made and committed so far."""
        planned = self._num_planned - self._settled_planned
        committed = self._num_committed - self._settled_committed
        if not planned and not committed:
            return
        self._settled_planned, self._settled_committed = self._num_planned, self._num_committed
        in_flight = planned - committed
        for sequence in self.sequences:
            sequence.num_tokens += planned
            sequence.num_scheduled += planned
            sequence.num_forwarded = sequence.num_scheduled
            sequence.num_in_flight += in_flight
            sequence.num_computed += committed
            sequence.num_output += committed
