"""A stretch of steps in which every running sequence decodes: counted, not visited."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paged.core.blocks import BlockPool
from paged.core.memory import num_blocks_for
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

    @classmethod
    def begin(cls, running: Seq[Sequence], pool: BlockPool, block_size: int) -> SteadyDecode | None:
        """A steady decoding of all that runs; None if anything but a plain decode is next for some sequence."""
        references = pool.references
        # The youngest are the likeliest to have something else to do.
        for sequence in reversed(running):
            position, blocks = sequence.num_scheduled, sequence.blocks
            is_decode = sequence.num_tokens == position + 1 and position >= sequence.num_forwarded
            # Such a row may sample no last token, and the last token of a recomputed text may have its block already.
            if (
                not is_decode
                or not sequence.num_prompt <= position < sequence.max_tokens_total - 2
                or len(blocks) != num_blocks_for(position, block_size)
            ):
                return None
            # What is begun is written on; a block that is full is followed by a new one.
            if position % block_size and references[blocks[-1]] != 1:
                pool.check_writable(blocks[-1:])
        return cls(running, block_size)

    def grow(self, pool: BlockPool) -> Seq[tuple[int, int]] | None:
        """Allocate the blocks that the next plan appends, (slot, block) in order of admission.

        None, and nothing has changed, if it cannot go on: a sequence may end, or the blocks do not suffice.
        """
        if self.num_left == 0:
            return None
        growing = self._rows_by_residue[-self._num_planned % self._block_size]
        if not growing:
            return ()
        if len(growing) > pool.num_free:
            return None
        appended: list[tuple[int, int]] = []
        for sequence, block in zip(growing, pool.allocate(len(growing)), strict=True):
            sequence.blocks.append(block)
            appended.append((sequence.slot, block))
        return appended

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
