"""Which kernels an engine needs on a card, built side by side before any of them is launched.

A build takes a second or two of one thread, and one that is missing in a running engine stalls it for as long. So all
that steps of any size launch is asked for here: products of few and of many rows, attention by plain and by planned
lists of work, each way to sample, and what a graph does around its rows.

Shapes: T rows of a step, R rows that sample, V token ids.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Final

import torch

from paged.kernels import vocab_parallel
from paged.kernels.attention import is_canonical
from paged.kernels.batch_layout import BatchLayout, ChunkTiles, DecodeWork
from paged.kernels.launch import build
from paged.kernels.sampling import log_sum_exp, sample
from paged.kernels.sampling_columns import LogitBias, Penalties, SamplingColumns
from paged.kernels.step_rows import keep_draws, keep_last_rows, step_inputs
from paged.model.decoder import Decoder
from paged.runner.kv_cache import KVCache
from paged.runner.processors import num_processors
from paged.runner.step_graphs import SMALL_SIZES, can_graph

_LOG = logging.getLogger(__name__)

MOST_THREADS: Final = 16
"""Of a process; the part of a build that is Python's own goes one at a time."""

MOST_UNLIKE_ROWS: Final = 256
"""Products of more rows are cut as those of this many, or as the largest."""


def build_kernels(
    decoder: Decoder, cache: KVCache, max_step_tokens: int, num_logits: int, num_sharing: int = 1
) -> None:
    """Build and load the kernels for steps of up to ``max_step_tokens`` rows; all ranks together.

    Args:
        decoder: the network, or a rank's part of it, on a card.
        cache: of the model, of one block or more. Nothing of meaning is written to block 0.
        max_step_tokens: most rows of a step.
        num_logits: most rows of logits that are there at once.
        num_sharing: most ranks that have one card.

    Raises:
        Exception: as a build raises.
    """
    start_s = time.perf_counter()
    num_threads = _num_threads(decoder.group.size, num_sharing)
    num_kernels = build(lambda: _launch_all(decoder, cache, max_step_tokens, num_logits), cache.device, num_threads)
    elapsed_s = time.perf_counter() - start_s
    _LOG.debug("%d kernels built or found in %.1f s, by %d threads", num_kernels, elapsed_s, num_threads)


def _num_threads(num_ranks: int, num_sharing: int) -> int:
    """Threads of this rank: the ranks that may be on this machine divide the processors that they may use."""
    num_local = min(num_ranks, num_sharing * max(1, torch.cuda.device_count()))
    return max(1, min(MOST_THREADS, num_processors() // num_local))


@torch.inference_mode()
def _launch_all(decoder: Decoder, cache: KVCache, max_step_tokens: int, num_logits: int) -> None:
    """Do what steps do, once for everything in which their launches differ."""
    # What takes longest to build comes first. That it is one row makes no difference to the samplers' launches.
    _launch_samplers(decoder.logits(_empty_hidden(decoder, 1)))
    for num_rows in _unlike_sizes(num_logits):
        decoder.logits(_empty_hidden(decoder, num_rows))
    for num_rows in _unlike_sizes(max_step_tokens):
        _launch_network(decoder, cache, num_rows)
    if decoder.group.size > 1:
        logits_RL = decoder.local_logits(_empty_hidden(decoder, 1))
        zero_R = torch.zeros(1, dtype=torch.float64, device=cache.device)
        vocab_size, group = decoder.spec.vocab_size, decoder.group
        vocab_parallel.sample_greedy(logits_RL, zero_R, vocab_size=vocab_size, group=group)
    if can_graph(decoder, cache):
        _launch_row_work(decoder, cache)


def _unlike_sizes(most_rows: int) -> list[int]:
    """Numbers of rows, ascending, such that products of any other up to ``most_rows`` are cut as one of them."""
    # Imported here because a CPU needs no Triton.
    from paged.kernels.gemm_gate import gated_rows

    return sorted({*SMALL_SIZES, *gated_rows(min(most_rows, MOST_UNLIKE_ROWS)), most_rows})


def _empty_hidden(decoder: Decoder, num_rows: int) -> torch.Tensor:
    return torch.empty((num_rows, decoder.spec.hidden_size), dtype=decoder.dtype, device=decoder.device)


def _launch_network(decoder: Decoder, cache: KVCache, num_rows: int) -> None:
    """The network for so many rows; attention takes some of them as decodes, split or not, and some as chunks."""
    device, spec = cache.device, decoder.local_spec
    q_THD = torch.empty((1, spec.num_heads, spec.head_dim), dtype=decoder.dtype, device=device)
    if not is_canonical(q_THD, cache.layers[0], decoder.numerics):
        # Torch computes attention, a few rows at a time: too long for the most there can be.
        num_rows = min(num_rows, MOST_UNLIKE_ROWS)
        tables_BN = torch.zeros((num_rows, 1), dtype=torch.int32)
        token_T = torch.zeros(num_rows, dtype=torch.int64, device=device)
        decoder(token_T, BatchLayout.build([0] * num_rows, [1] * num_rows, tables_BN, cache.block_size, device), cache)
        return
    token_T = torch.zeros(num_rows, dtype=torch.int64, device=device)
    list_N = torch.zeros(12, dtype=torch.int32, device=device)
    # None, few and many splits of a row.
    for most_splits in (0, 2, 2**16) if num_rows == 1 else (0,):
        decode = DecodeWork(list_N.view(-1, 4), list_N.view(-1, 3), list_N[:1], most_splits)
        layout = BatchLayout.planned(
            token_T,
            token_T,
            list_N[:1],
            list_N[:1, None],
            cache.block_size,
            decode=decode,
            chunks=ChunkTiles(list_N.view(-1, 4), list_N[:1]),
        )
        decoder(token_T, layout, cache)


def _launch_samplers(logits_RV: torch.Tensor) -> None:
    """Rows that ask for nothing, for each limit that has kernels of its own, and for penalties and biases."""
    num_rows, vocab_size = logits_RV.shape
    device = logits_RV.device
    row_R = torch.arange(num_rows, device=device)
    one_R = torch.ones(num_rows, dtype=torch.float64, device=device)
    plain = SamplingColumns(temperature_R=one_R, seeds_R=row_R, positions_R=row_R)
    all_limits = replace(plain, top_k_R=row_R, top_p_R=one_R, min_p_R=one_R)
    penalties = Penalties(
        rows_P=row_R,
        repetition_P=one_R,
        presence_P=one_R,
        frequency_P=one_R,
        output_counts_PV=torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=device),
        prompt_mask_PV=torch.zeros((num_rows, vocab_size), dtype=torch.bool, device=device),
    )
    for columns in (all_limits, replace(plain, top_k_R=row_R), plain):
        sample(logits_RV, replace(columns, penalties=penalties))
    for columns in (replace(plain, min_p_R=one_R), replace(plain, bias=LogitBias(row_R, row_R, one_R))):
        sample(logits_RV, columns)
    log_sum_exp(logits_RV, one_R)


def _launch_row_work(decoder: Decoder, cache: KVCache) -> None:
    """What a graph does before and behind network and draw."""
    device = cache.device
    index_1 = torch.zeros(1, dtype=torch.int32, device=device)
    table_11 = index_1[:, None]
    step_inputs(index_1, index_1, table_11, table_11, block_size=cache.block_size, padding_slot=1)
    flag_1 = torch.zeros(1, dtype=torch.bool, device=device)
    keep_last_rows(_empty_hidden(decoder, 1), index_1, _empty_hidden(decoder, 1), flag_1)
    number_1 = torch.zeros(1, dtype=torch.float32, device=device)
    drawn = index_1.to(torch.int64), number_1, number_1, flag_1
    keep_draws(drawn, index_1, index_1, table_11, table_11.expand(4, 1).contiguous())
