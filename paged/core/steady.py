"""A stretch of steps in which every running sequence decodes: counted, not visited."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paged.core.plan import SAMPLE
from paged.core.request import Request
from paged.core.sequence import Sequence


class SteadyDecode:
    """Plans that each give one token to the same sequences, until one of them may end.

    Step t = 1, 2, ... of it computes position ``first + t - 1`` of a sequence of which ``first`` tokens had been
    scheduled. What the scheduler keeps for a sequence follows from t, so it is brought up to date only when somebody
    looks (``settle``), and only sequences that fill a block are visited in between.

    Args:
        sequences: all that run, oldest first; each has one token to compute, which no plan has computed before.
        block_size: tokens in a block.

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

    def __init__(self, sequences: Seq[Sequence], block_size: int) -> None:
        self.sequences = list(sequences)
        self.slots = [sequence.slot for sequence in sequences]
        self.lengths = [1] * len(sequences)
        self.logits = [SAMPLE] * len(sequences)
        self.requests: list[Request | None] = [sequence.request for sequence in sequences]
        firsts = [sequence.num_scheduled for sequence in sequences]
        # The row at `start` samples token number `start + 2`; only rows that cannot sample the last one count.
        self.num_left = min([s.max_tokens_total - 2 - first for s, first in zip(sequences, firsts, strict=True)])
        self._starts = [first - 1 for first in firsts]
        self._first_by_slot = dict(zip(self.slots, firsts, strict=True))
        self._appends = [sequence.output_ids.append for sequence in sequences]
        self._block_size = block_size
        # The sequences whose first position leaves each remainder: they enter and fill blocks together.
        self._rows_by_residue: list[list[Sequence]] = [[] for _ in range(block_size)]
        for sequence, first in zip(sequences, firsts, strict=True):
            self._rows_by_residue[first % block_size].append(sequence)
        self._num_planned = self._num_committed = 0
        self._settled_planned = self._settled_committed = 0

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
