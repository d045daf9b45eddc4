"""What the runner keeps of the sequence in each slot: tokens, blocks and how it samples, where it is needed.

Tokens, blocks and sampling parameters lie on the device and are changed there by a plan's differences; a sampled token
never leaves it on its way to the next step. The host keeps what ends a sequence.

Shapes: S slots and one more, which rows of padding use; P positions; N blocks of a sequence; R rows that sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import torch

from paged.core.memory import num_blocks_for
from paged.core.plan import Started, StepPlan
from paged.core.request import Request, SamplingParams
from paged.kernels.sampling_columns import SamplingColumns
from paged.runner.text import TextStream, Tokenizer
from paged.runner.transfers import upload

UNTRUNCATED = SamplingParams(temperature=0)


class Asks(IntFlag):
    """What a row asks of sampling beyond a temperature."""

    TOP_K = 1
    TOP_P = 2
    MIN_P = 4
    ADJUSTED = 8
    """Penalties or biases."""
    LISTED = 16
    """The likeliest tokens, too."""


LIMITS = Asks.TOP_K | Asks.TOP_P | Asks.MIN_P


@dataclass(slots=True)
class TokenCounts:
    """For penalties: how often the output holds each token (int32 [V]), and whether the prompt does (bool [V])."""

    output_V: torch.Tensor
    prompt_V: torch.Tensor


@dataclass(slots=True)
class SlotState:
    """What the host remembers of the sequence in a slot."""

    request: Request
    stop_ids: frozenset[int]
    stream: TextStream | None = None
    counts: TokenCounts | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token and its log-probability are all that is wanted of the raw logits."""
        params = self.request.params
        return params.is_greedy and self.counts is None and not params.biases and params.logprobs is None


class SlotTables:
    """The tables of all slots.

    Args:
        max_num_seqs: slots.
        max_seq_len: most tokens of a sequence whose keys and values are held.
        block_size: tokens in a block.
        vocab_size: of the model.
        eos_token_ids: tokens that end a sequence unless it ignores them.
        tokenizer: needed for stop texts only.
        device: where the model runs.

    Attributes:
        tokens_SP: int32 [S + 1, max_seq_len + 1], known and sampled tokens.
        blocks_SN: int32 [S + 1, most blocks], block tables.
        padding_slot: the slot of rows that pad a step; it stays empty.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_seq_len: int,
        block_size: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        tokenizer: Tokenizer | None,
        device: torch.device,
    ) -> None:
        self.device = device
        self.padding_slot = max_num_seqs
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self.tokenizer = tokenizer
        num_slots = max_num_seqs + 1
        # The last token sampled is stored, though never fed back.
        self.tokens_SP = torch.zeros((num_slots, max_seq_len + 1), dtype=torch.int32, device=device)
        most_blocks = num_blocks_for(max_seq_len, block_size)
        self.blocks_SN = torch.zeros((num_slots, most_blocks), dtype=torch.int32, device=device)
        # Temperature, seed, top_k, top_p and min_p, fractions as the bits of a float64.
        self._sampling_5S = torch.zeros((5, num_slots), dtype=torch.int64, device=device)
        self._asks_S = np.zeros(num_slots, dtype=np.uint8)
        self._states: list[SlotState | None] = [None] * max_num_seqs
        self._num_blocks = [0] * max_num_seqs

    @property
    def num_slots(self) -> int:
        """Slots, without that of the padding."""
        return len(self._states)

    def state(self, slot: int) -> SlotState:
        """What is in a slot, which must not be empty."""
        state = self._states[slot]
        assert state is not None, f"slot {slot} is empty"
        return state

    def clear(self) -> None:
        """Empty all slots."""
        self._states = [None] * len(self._states)

    def asks(self, slots: Sequence[int]) -> int:
        """All that the sequences in some slots ask for, taken together."""
        return int(np.bitwise_or.reduce(self._asks_S[slots], initial=0))

    def apply(self, plan: StepPlan) -> None:
        """Bring the slots up to the plan."""
        for slot in plan.released:
            self._states[slot] = None
        blocks: list[tuple[int, int, Sequence[int]]] = []
        if plan.started:
            self._start(plan.started)
            for started in plan.started:
                blocks.append((started.slot, 0, started.blocks))
                self._num_blocks[started.slot] = len(started.blocks)
        for slot, block in plan.appended:
            blocks.append((slot, self._num_blocks[slot], (block,)))
            self._num_blocks[slot] += 1
        self._write(self.blocks_SN, blocks)

    def _start(self, batch: Sequence[Started]) -> None:
        tokens = [(started.slot, 0, known_tokens(started.request) + started.output_ids) for started in batch]
        self._write(self.tokens_SP, tokens)
        columns = []
        for started in batch:
            request, slot = started.request, started.slot
            self._states[slot] = self._state_of(started)
            # Truncation keeps the likeliest token, so a greedy row has no use for it.
            params = UNTRUNCATED if request.params.is_greedy else request.params
            self._asks_S[slot] = _asks(request.params, params)
            columns.append((params.temperature, request.seed, params.top_k, params.top_p, params.min_p))
        temperature, seed, top_k, top_p, min_p = zip(*columns, strict=True)
        values = np.stack(
            [
                np.asarray([started.slot for started in batch], dtype=np.int64),
                np.asarray(temperature, dtype=np.float64).view(np.int64),
                # The seed as the signed number with the same 64 bits, which is what torch can hold.
                np.asarray(seed, dtype=np.uint64).view(np.int64),
                np.asarray(top_k, dtype=np.int64),
                np.asarray(top_p, dtype=np.float64).view(np.int64),
                np.asarray(min_p, dtype=np.float64).view(np.int64),
            ]
        )
        sent = upload(values, self.device)
        self._sampling_5S.index_copy_(1, sent[0], sent[1:])

    def _state_of(self, started: Started) -> SlotState:
        request, output = started.request, started.output_ids
        params = request.params
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        state = SlotState(request, stop_ids)
        if params.stop:
            assert self.tokenizer is not None, "stop texts need a tokenizer"
            state.stream = self.tokenizer.stream(params.stop)
            for token in output:
                state.stream.push(token)
        if params.has_penalties:
            counts = np.bincount(np.asarray(output, dtype=np.int64), minlength=self._vocab_size).astype(np.int32)
            seen = np.bincount(np.asarray(known_tokens(request)), minlength=self._vocab_size) > 0
            state.counts = TokenCounts(upload(counts, self.device), upload(seen, self.device))
        return state

    def _write(self, table: torch.Tensor, rows: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Write values into rows of a table, each from a column on: (row, column, values)."""
        if not rows:
            return
        width = table.shape[1]
        assert all(column + len(values) <= width for _, column, values in rows), "a row of a table is too short"
        places = [np.arange(row * width + column, row * width + column + len(values)) for row, column, values in rows]
        values = np.concatenate([np.asarray(values, dtype=np.int64) for _, _, values in rows])
        sent = upload(np.stack((np.concatenate(places), values)), self.device)
        table.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))

    def store_tokens(self, slot_R: torch.Tensor, position_R: torch.Tensor, token_R: torch.Tensor) -> None:
        """Keep sampled tokens, int64, at their positions for the steps that follow."""
        place_R = slot_R * self.tokens_SP.shape[1] + position_R
        self.tokens_SP.view(-1).index_copy_(0, place_R, token_R.to(torch.int32))

    def columns(self, slot_R: torch.Tensor, position_R: torch.Tensor, asks: int) -> SamplingColumns:
        """How rows sample, but for penalties and biases.

        Args:
            slot_R: int64, on the device.
            position_R: int64, of the tokens to be drawn.
            asks: all that the rows ask for, taken together.
        """
        temperature_R, seeds_R, top_k_R, top_p_R, min_p_R = self._sampling_5S.index_select(1, slot_R)
        return SamplingColumns(
            temperature_R=temperature_R.view(torch.float64),
            seeds_R=seeds_R,
            positions_R=position_R,
            top_k_R=top_k_R if asks & Asks.TOP_K else None,
            top_p_R=top_p_R.view(torch.float64) if asks & Asks.TOP_P else None,
            min_p_R=min_p_R.view(torch.float64) if asks & Asks.MIN_P else None,
        )


def table_bytes(max_num_seqs: int, max_seq_len: int, block_size: int) -> int:
    """What the tables of tokens and blocks take on the device."""
    return 4 * (max_num_seqs + 1) * (max_seq_len + 1 + num_blocks_for(max_seq_len, block_size))


def _asks(params: SamplingParams, drawn: SamplingParams) -> Asks:
    """What a request asks for; ``drawn`` are its parameters as far as they matter to the draw."""
    asks = Asks(0)
    if drawn.top_k > 0:
        asks |= Asks.TOP_K
    if drawn.top_p < 1:
        asks |= Asks.TOP_P
    if drawn.min_p > 0:
        asks |= Asks.MIN_P
    if params.has_penalties or params.biases:
        asks |= Asks.ADJUSTED
    if params.logprobs is not None:
        asks |= Asks.LISTED
    return asks


def known_tokens(request: Request) -> tuple[int, ...]:
    """The prompt's tokens; only a simulation knows none."""
    assert request.prompt.token_ids is not None, f"request {request.id!r} has no tokens to compute"
    return request.prompt.token_ids
