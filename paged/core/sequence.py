"""One sequence's state: its tokens, how far they are computed, and the blocks that hold them."""

from __future__ import annotations

import math
from enum import Enum, StrEnum
from typing import Final

from paged.core.prompt import Key
from paged.core.request import Request


class Status(Enum):
    """Where a sequence is in its life; a preempted one is WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence ended, as results report it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


COMPLETE: Final = (FinishReason.STOP, FinishReason.LENGTH)
"""Why sequences end that have all the tokens they were to get."""


class Sequence:
    """A request on its way through the scheduler, which alone changes it.

    Attributes:
        request: what was asked for.
        status: where it is in its life.
        num_prompt: length of the prompt.
        output_ids: committed output, as far as executors tell tokens.
        num_output: committed output tokens, told or not.
        num_tokens: tokens to be computed as far as known: prompt, committed output and what is in flight, but never
            the last one that ``max_tokens`` allows, which is not fed back.
        num_scheduled: leading tokens whose computation is planned, committed or not.
        num_computed: leading tokens whose keys and values are in the cache.
        num_in_flight: plans in flight that contain this sequence.
        num_forwarded: most tokens ever scheduled; what is computed again below it is recomputation.
        num_preemptions: times it was sent back to wait.
        is_scored: whether the log-probabilities of the whole prompt have been reported.
        num_cached_tokens: tokens taken over from the cache at the first admission.
        max_tokens_total: prompt plus the most tokens that may be generated.
        blocks: the block table.
        keys: keys of the leading full blocks, as far as they have been computed.
        num_published: leading blocks that have been offered for reuse.
        publish_at: value of ``num_computed`` from which another block can be offered.
        waits_for: key of a block that a running leader is about to compute.
        slot: place in the executor's tables, -1 while waiting.
    """

    __slots__ = (
        "blocks",
        "is_scored",
        "keys",
        "max_tokens_total",
        "num_cached_tokens",
        "num_computed",
        "num_forwarded",
        "num_in_flight",
        "num_output",
        "num_preemptions",
        "num_prompt",
        "num_published",
        "num_scheduled",
        "num_tokens",
        "output_ids",
        "publish_at",
        "request",
        "slot",
        "status",
        "waits_for",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.status = Status.WAITING
        self.output_ids: list[int] = []
        self.num_output = 0
        self.num_prompt = self.num_tokens = len(request.prompt)
        self.max_tokens_total = self.num_prompt + request.max_tokens
        self.num_scheduled = self.num_computed = self.num_published = 0
        self.num_in_flight = 0
        self.num_forwarded = 0
        self.is_scored = False
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.blocks: list[int] = []
        self.keys: list[Key] = []
        self.publish_at: float = math.inf
        self.waits_for: Key | None = None
        self.slot = -1

    @property
    def num_committed(self) -> int:
        """Tokens of the prompt and of the committed output."""
        return self.num_prompt + self.num_output

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.id!r}, sample={self.request.sample}, {self.status.value}, "
            f"{self.num_prompt}+{self.num_output} tokens, {self.num_computed} computed)"
        )
