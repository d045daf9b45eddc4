"""The shape of a step: the few numbers of a plan that its time depends on."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import NamedTuple, Protocol

from paged.core.plan import SAMPLE, SCORE


class Columns(Protocol):
    """What counts of a plan: these columns of a `StepPlan`, or of a plan that a log tells of."""

    @property
    def starts(self) -> Sequence[int]:
        """Positions of the rows' first tokens."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of the rows."""

    @property
    def logits(self) -> Sequence[int]:
        """Flags of the rows."""


class StepShape(NamedTuple):
    """What a step computes, in numbers; a row of more than one token counts as prefill.

    Attributes:
        num_tokens: tokens computed.
        num_seqs: rows.
        num_samples: rows that sample.
        kv_tokens: sum over the rows of the tokens that the row's last token attends to, itself included.
        max_kv: their maximum.
        prefill_tokens, prefill_seqs: tokens and rows of prefill.
        prefill_kv: sum over rows of prefill of the tokens computed before.
        attention_pairs: pairs of a token and a token that it attends to, over the rows of prefill.
    """

    num_tokens: int
    num_seqs: int
    num_samples: int
    kv_tokens: int
    max_kv: int
    prefill_tokens: int = 0
    prefill_seqs: int = 0
    prefill_kv: int = 0
    attention_pairs: int = 0

    @classmethod
    def of(cls, plan: Columns) -> StepShape:
        """The shape of a plan."""
        starts, lengths, logits = plan.starts, plan.lengths, plan.logits
        num_seqs = len(lengths)
        num_tokens = sum(lengths)
        num_samples = logits.count(SAMPLE) + logits.count(SAMPLE | SCORE)
        kv_tokens = sum(starts) + num_tokens
        if num_tokens == num_seqs:
            return cls(num_tokens, num_seqs, num_samples, kv_tokens, max(starts, default=-1) + 1)
        tokens = seqs = kv = pairs = 0
        for start, length in zip(starts, lengths, strict=True):
            if length > 1:
                tokens += length
                seqs += 1
                kv += start
                pairs += length * start + length * (length + 1) // 2
        max_kv = max(map(add, starts, lengths))
        return cls(num_tokens, num_seqs, num_samples, kv_tokens, max_kv, tokens, seqs, kv, pairs)

    @classmethod
    def decode(cls, num_seqs: int, context: int) -> StepShape:
        """A decode step of ``num_seqs`` sequences that each attend to ``context`` tokens."""
        return cls(num_seqs, num_seqs, num_seqs, num_seqs * context, context)
