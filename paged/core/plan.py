"""The data that deciding and computing exchange: a step's plan, its result, and who executes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from paged.core.request import Request

# Flags of the column `logits`: what is wanted of a row's logits.
NO_LOGITS = 0
SAMPLE = 1  # sample the next token from the logits of the row's last position
SCORE = 2  # report the log-probabilities of the prompt tokens that follow each position of the row


@dataclass(frozen=True, slots=True)
class Started:
    """A sequence that takes a slot in this step: newly admitted, or again after a preemption.

    Attributes:
        slot: its place in the executor's tables until the slot is released.
        request: what was asked for; ``request.prompt`` holds the prompt's tokens.
        output_ids: tokens generated before a preemption, in order; empty at first, and if no executor tells tokens.
        num_output: how many were generated before.
        blocks: its block table; the leading ``num_cached // block_size`` blocks are already computed.
        num_cached: tokens whose keys and values are taken over from the cache.
    """

    slot: int
    request: Request
    output_ids: tuple[int, ...]
    num_output: int
    blocks: tuple[int, ...]
    num_cached: int


class StepPlan(NamedTuple):
    """One step, as differences to the executor's state and parallel columns, one row a sequence.

    An executor applies ``released``, ``started`` and ``appended`` in this order, then computes the rows:
    row i feeds the tokens at positions ``starts[i] .. starts[i] + lengths[i] - 1`` of the sequence in
    ``slots[i]``. The token at a position that no earlier result has reported is the one just sampled for it.

    A tuple, because it is made for every step. Nobody changes a column, and while every sequence decodes, ``slots``,
    ``lengths`` and ``logits`` are the very objects of the plan before: an executor may keep what it made of them.

    Attributes:
        step: counts up from 0 over the scheduler's life.
        weight_version: the weights that the step must be computed with.
        released: slots whose sequences ended or were preempted.
        started: sequences that take a slot.
        appended: (slot, block) pairs, blocks that grow a block table.
        slots, starts, lengths, logits: the columns; ``logits`` holds the flags SAMPLE and SCORE.
        preempted: keys of the requests preempted by this plan, for logs and metrics.
    """

    step: int
    weight_version: int
    released: Sequence[int]
    started: Sequence[Started]
    appended: Sequence[tuple[int, int]]
    slots: Sequence[int]
    starts: Sequence[int]
    lengths: Sequence[int]
    logits: Sequence[int]
    preempted: Sequence[tuple[str, int]]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(self.lengths)


class StepResult(NamedTuple):
    """What executing a plan gave.

    Attributes:
        step: the plan's.
        tokens: sampled token ids, one for each row with the flag SAMPLE, in row order; None if they are not told, as
            in a simulation, which knows only when samples end.
        stopped: one flag for each row that samples: whether its token ends the sequence (end token, stop token, stop
            text).
        nan_rows: indices of plan rows whose logits held a NaN; their tokens are meaningless.
        start_s, end_s: start and end of the step on the executor's clock, seconds.
        payload: whatever the executor reports beside (log-probabilities, text); the scheduler does not look at it.
    """

    step: int
    tokens: Sequence[int] | None
    stopped: Sequence[bool]
    nan_rows: Sequence[int]
    start_s: float
    end_s: float
    payload: Any = None


class Executor(Protocol):
    """Turns plans into results, in order. The engine's runner computes, the simulator predicts."""

    def submit(self, plan: StepPlan) -> None:
        """Take a plan; results come in the order of submission."""

    def collect(self) -> StepResult:
        """The result of the oldest plan submitted and not collected yet; waits for it."""

    def abandon(self) -> None:
        """Forget every plan not collected yet, and every slot, after a failure.

        What those plans released may not be told again, and the next plan may release slots that are empty by now.
        """
