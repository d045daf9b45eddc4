"""CUDA graphs of whole steps: one launch for the network, one for the head and the draw.

A graph repeats launches on fixed memory, so whatever changes from step to step is in one buffer that is rewritten
before each replay: which slots and positions the rows have, and what the attention kernels are to work through. Steps
are padded to a few sizes. Rows of padding belong to an empty slot; they are stored nowhere and attended by nobody, and
as no row's bits hang on another row, they change nothing.

Shapes: T rows of a step, B rows of its plan, R of these that sample, S slots.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from paged.core.plan import StepPlan
from paged.interrupts import DeferredInterrupt
from paged.kernels.batch_layout import (
    FEW_WAVES,
    BatchLayout,
    ChunkTiles,
    DecodeWork,
    decode_arrays,
    most_split_rows,
    tile_arrays,
)
from paged.kernels.sampling import sample
from paged.kernels.step_rows import keep_draws, keep_last_rows, step_inputs
from paged.model.decoder import Decoder
from paged.runner.kv_cache import KVCache
from paged.runner.slots import SlotTables
from paged.runner.transfers import download, staging

_LOG = logging.getLogger(__name__)

# What a graph does, the number of its rows, and what it is made for.
_Key = tuple[str | int | bool, ...]

# Sizes that steps of a few rows are padded to; larger ones are those that products are padded to.
SMALL_SIZES = (1, 2, 4, 8)


def can_graph(decoder: Decoder, cache: KVCache) -> bool:
    """Whether steps of this model can be graphs: on cards, with attention and exchanges by our kernels."""
    if cache.device.type != "cuda" or not decoder.group.fits_graphs:
        return False
    from paged.kernels.attention_triton import unsupported

    spec = decoder.local_spec
    q_THD = torch.empty((1, spec.num_heads, spec.head_dim), dtype=decoder.dtype, device=cache.device)
    return unsupported(q_THD, cache.layers[0], decoder.numerics) is None


class _Columns(NamedTuple):
    """A plan's columns as arrays, int32 [B]; row b's tokens are rows ``offsets_B[b] .. ends_B[b] - 1`` of the step."""

    slots_B: np.ndarray
    starts_B: np.ndarray
    lengths_B: np.ndarray
    offsets_B: np.ndarray
    ends_B: np.ndarray

    @classmethod
    def of(cls, plan: StepPlan) -> _Columns:
        slots, starts, lengths = (
            np.asarray(column, dtype=np.int32) for column in (plan.slots, plan.starts, plan.lengths)
        )
        ends = np.cumsum(lengths, dtype=np.int32)
        return cls(slots, starts, lengths, ends - lengths, ends)


class StepGraphs:
    """The graphs of one decoder over one cache. A graph is made when a step of its size comes for the first time.

    Args:
        decoder: the network, or a rank's part of it, on a card. Ranks make and replay the same graphs in one order.
        cache: the block pool's storage.
        slots: the tables of all slots.
        max_step_tokens: most rows of a step.

    Attributes:
        last_BD: the final hidden state of each plan row's last position, after ``compute``.
        nan_B: bool [S], which of them are not finite.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, slots: SlotTables, max_step_tokens: int) -> None:
        from paged.kernels.attention_triton import positions_per_tile, programs_at_once
        from paged.kernels.gemm_gate import gated_rows

        self._decoder, self._cache, self._slots = decoder, cache, slots
        spec, device, num_slots = decoder.local_spec, cache.device, slots.num_slots
        self._split = decoder.numerics.kv_split
        attended = spec.num_heads, cache.layers[0], decoder.dtype, decoder.numerics
        self._tile_positions = positions_per_tile(*attended)
        self._num_kv_heads, self._num_programs = spec.num_kv_heads, programs_at_once(*attended)
        self._most_split_rows = most_split_rows(self._num_kv_heads, self._num_programs)
        self._sizes = [*SMALL_SIZES, *gated_rows(max_step_tokens)]
        # No more splits can be full than the pool has room for, unless blocks are shared: then up to four times.
        most_splits = -(-slots.tokens_SP.shape[1] // self._split)
        pool_splits = cache.num_blocks * cache.block_size // self._split + num_slots
        most_items = num_slots + min(num_slots, self._most_split_rows) * most_splits
        self._most_items = min(most_items, 4 * pool_splits)
        self._num_slots = num_slots
        # Sizes of what the inputs hold, in 32-bit words: the first part has a fixed place in all graphs.
        self._counts = slice(0, 4)
        places = np.cumsum([4, *[_words(num_slots)] * 4, _words(3 * self._most_split_rows)])
        self._last, self._row, self._slot, self._position, self._decoded = (
            slice(int(first), int(last)) for first, last in itertools.pairwise(places)
        )
        self._front = int(places[-1])
        largest = self._sizes[-1]
        most_words = self._front + 2 * _words(largest) + 4 * (self._most_tiles(largest) + self._most_items)
        self._inputs = torch.zeros(most_words, dtype=torch.int32, device=device)
        self.last_BD = torch.zeros((num_slots, spec.hidden_size), dtype=decoder.dtype, device=device)
        self.nan_B = torch.zeros(num_slots, dtype=torch.bool, device=device)
        # Tokens, log-probabilities before and after truncation, NaN flags of rows, and of plan rows.
        self._results = torch.zeros((5, num_slots), dtype=torch.int32, device=device)
        self._graphs: dict[_Key, torch.cuda.CUDAGraph] = {}
        self._recorder: _Recorder | None = None
        self._num_rows = self._num_sampled = 0
        self._has_warned = False

    def capture_decodes(self) -> None:
        """Make the graphs of steps of decodes, about as long as each other, that ask for nothing but a temperature."""
        padding = self._slots.padding_slot
        for size in reversed(self._sizes[: self._size_index(self._num_slots) + 1]):
            self._inputs.zero_()
            self._inputs[self._slot] = padding
            self._inputs[self._decoded] = -1
            self._inputs[self._front : self._front + size] = padding
            if size > self._most_split_rows:
                self._run_compute(size, has_chunks=False, has_splits=False)
            # The more rows, the fewer batches have one that is split.
            if size <= FEW_WAVES * self._most_split_rows:
                self._run_compute(size, has_chunks=False, has_splits=True)
            self._run(("sample", size, 0), partial(self._sample, size, 0))

    def compute(self, plan: StepPlan, rows: Sequence[int]) -> bool:
        """Run the network over a plan's rows; False, and nothing is done, if its decodes are too many pieces of work.

        Args:
            plan: without scores of prompts.
            rows: of the plan, those that ``sample`` will be asked for.
        """
        columns = _Columns.of(plan)
        num_tokens = int(columns.ends_B[-1])
        assert num_tokens <= self._sizes[-1], (num_tokens, self._sizes[-1])
        size = self._sizes[self._size_index(num_tokens)]
        has_chunks = num_tokens > len(columns.slots_B)
        places = columns.starts_B, columns.lengths_B, columns.offsets_B, columns.slots_B
        items_I4, decoded_N3, most_splits = decode_arrays(
            *places, split=self._split, num_kv_heads=self._num_kv_heads, num_programs=self._num_programs
        )
        if len(items_I4) > self._most_items:
            self._warn_of_plain_launches()
            return False
        tiles_N4 = tile_arrays(*places, num_positions=self._tile_positions) if has_chunks else None
        self._rewrite_inputs(size, columns, rows, items_I4, decoded_N3, tiles_N4)
        self._num_rows, self._num_sampled = len(columns.slots_B), len(rows)
        # With few rows the graph for splits is there already, and does for whole rows, too.
        has_splits = most_splits > 0 or size <= self._most_split_rows
        self._run_compute(size, has_chunks=has_chunks, has_splits=has_splits)
        return True

    def _warn_of_plain_launches(self) -> None:
        if not self._has_warned:
            _LOG.warning(
                "steps are launched one by one while their attention is more than %d pieces of work", self._most_items
            )
        self._has_warned = True

    def _rewrite_inputs(
        self,
        size: int,
        columns: _Columns,
        rows: Sequence[int],
        items_I4: np.ndarray,
        decoded_N3: np.ndarray,
        tiles_N4: np.ndarray | None,
    ) -> None:
        """Send what the graphs of ``size`` rows read for this step to the device, in one copy; ``rows`` sample."""
        slots, starts = columns.slots_B, columns.starts_B
        slot_T, position_T, tiles, items = self._sections(size, has_chunks=tiles_N4 is not None)
        num_words = items.start + items_I4.size
        host = staging(num_words, self._inputs.device)
        words = host.numpy()
        words[: self._front] = 0
        words[self._counts] = len(items_I4), 0 if tiles_N4 is None else len(tiles_N4), 0, 0
        _put(words, self._last, columns.ends_B - 1)
        _put(words, self._row, rows)
        words[self._slot] = self._slots.padding_slot
        _put(words, self._slot, slots[rows])
        _put(words, self._position, (starts + columns.lengths_B)[rows])
        words[self._decoded] = -1
        _put(words, self._decoded, decoded_N3.ravel())
        words[slot_T] = self._slots.padding_slot
        words[position_T] = 0
        if tiles_N4 is None:
            _put(words, slot_T, slots)
            _put(words, position_T, starts)
        else:
            sequence_T = np.repeat(np.arange(len(slots)), columns.lengths_B)
            first_T = (starts - columns.offsets_B)[sequence_T]
            _put(words, slot_T, slots[sequence_T])
            _put(words, position_T, np.arange(len(sequence_T), dtype=np.int32) + first_T)
            _put(words, tiles, tiles_N4.ravel())
        words[items.start :] = items_I4.ravel()
        self._inputs[:num_words].copy_(host, non_blocking=True)

    def sample(self, asks: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Draw the tokens of the rows given to ``compute``, and keep them for the next step.

        Args:
            asks: ``Asks`` of the rows, of limits alone.

        Returns:
            NaN flags of the plan's rows, and tokens, log-probabilities before and after truncation and NaN flags of the
            rows that sample, on the host once the device's work is done.
        """
        num_rows, num_sampled = self._num_rows, self._num_sampled
        # Without rows to sample the flags still come.
        size = self._sizes[self._size_index(max(1, num_sampled))]
        self._run(("sample", size, asks), partial(self._sample, size, asks))
        tokens_S, logprobs_S, behavior_S, nan_S, nan_B = download(self._results)
        sampled = tokens_S, logprobs_S.view(torch.float32), behavior_S.view(torch.float32), nan_S
        return nan_B[:num_rows], tuple(column[:num_sampled] for column in sampled)

    def _size_index(self, num_rows: int) -> int:
        return bisect.bisect_left(self._sizes, num_rows)

    def _most_tiles(self, size: int) -> int:
        """Tiles that chunks of ``size`` rows in all can have: at most one of each chunk is not full."""
        return size // self._tile_positions + min(self._num_slots, size // 2 + 1)

    def _sections(self, size: int, has_chunks: bool) -> tuple[slice, slice, slice, slice]:
        """Where the inputs of a step of ``size`` rows have slots, positions, tiles and items."""
        first = self._front
        slices = []
        for num_words in (size, size, 4 * self._most_tiles(size) if has_chunks else 0, 4 * self._most_items):
            slices.append(slice(first, first + num_words))
            first += _words(num_words)
        slot_T, position_T, tiles, items = slices
        return slot_T, position_T, tiles, items

    def _run_compute(self, size: int, *, has_chunks: bool, has_splits: bool) -> None:
        """Run the network for ``size`` rows; without splits of decode rows no kernel is launched that folds them."""
        work = partial(self._compute, size, has_chunks=has_chunks, has_splits=has_splits)
        self._run(("compute", size, has_chunks, has_splits), work)

    def _compute(self, size: int, *, has_chunks: bool, has_splits: bool) -> None:
        """What a graph of the network does, for ``size`` rows."""
        inputs, slots, cache = self._inputs, self._slots, self._cache
        sections = self._sections(size, has_chunks)
        token_T, position_T, cell_T = step_inputs(
            inputs[sections[0]],
            inputs[sections[1]],
            slots.tokens_SP,
            slots.blocks_SN,
            block_size=cache.block_size,
            padding_slot=slots.padding_slot,
        )
        num_rows = min(size, self._num_slots)
        num_split = min(num_rows, self._most_split_rows)
        most_splits = 0
        if has_splits:
            # Where most rows are split, they have few splits each; among more rows, those that are split may be long.
            most_splits = 2 if 16 < size <= self._most_split_rows else self._most_items
        decode = DecodeWork(
            items_I4=inputs[sections[3]].view(-1, 4),
            rows_N3=inputs[self._decoded][: 3 * num_split].view(-1, 3),
            num_items_1=inputs[:1],
            most_splits=most_splits,
        )
        chunks = ChunkTiles(inputs[sections[2]].view(-1, 4), inputs[1:2]) if has_chunks else None
        last_B = inputs[self._last][:num_rows]
        layout = BatchLayout.planned(
            position_T, cell_T, last_B, slots.blocks_SN, cache.block_size, decode=decode, chunks=chunks
        )
        hidden_TD = self._decoder(token_T, layout, cache)
        keep_last_rows(hidden_TD, last_B, self.last_BD[:num_rows], self.nan_B[:num_rows])

    def _sample(self, size: int, asks: int) -> None:
        """What a graph of the draw does, for ``size`` rows."""
        size = min(size, self._num_slots)
        row_R = self._inputs[self._row][:size]
        slot_R, position_R = (self._inputs[section][:size] for section in (self._slot, self._position))
        logits_RV = self._decoder.logits(self.last_BD.index_select(0, row_R))
        columns = self._slots.columns(slot_R.to(torch.int64), position_R.to(torch.int64), asks)
        drawn = sample(logits_RV, columns)
        found = drawn.tokens_R, drawn.logprobs_R, drawn.behavior_logprobs_R, drawn.nan_R
        keep_draws(found, slot_R, position_R, self._slots.tokens_SP, self._results[:4])
        self._results[4].copy_(self.nan_B)

    def _run(self, key: _Key, work: Callable[[], None]) -> None:
        """Replay the graph of ``work``; the first time do the work plainly, which also builds kernels, then capture."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        start_s = time.perf_counter()
        work()
        worked_s = time.perf_counter()
        if self._recorder is None:
            self._recorder = _Recorder(self._inputs.device)
        self._graphs[key] = self._recorder.record(work)
        times_ms = (worked_s - start_s) * 1e3, (time.perf_counter() - worked_s) * 1e3
        _LOG.debug("graph %s: launched in %.0f ms, captured in %.0f ms", key, *times_ms)


class _Recorder:
    """Makes graphs that share their memory, because they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The graph of what ``work`` launches, which is not done; its kernels must have been built."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with DeferredInterrupt(), torch.cuda.stream(self._stream):
            # Other threads may go on with what they do.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph


def _words(number: int) -> int:
    """``number`` rounded up, so that what follows begins where 16 bytes do."""
    return -(-number // 4) * 4


def _put(words: np.ndarray, section: slice, values: np.ndarray | Sequence[int]) -> None:
    """Write values at the start of a section, whose rest is as it was."""
    words[section.start : section.start + len(values)] = values
