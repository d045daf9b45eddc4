"""What a rank's part of an engine takes of its card beside the cache: measured on the largest steps that may come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from paged.core.memory import GIB, kv_budget_bytes, num_blocks_for
from paged.kernels.batch_layout import BatchLayout
from paged.kernels.linear import is_canonical
from paged.kernels.sampling import sample
from paged.kernels.sampling_columns import Penalties, SamplingColumns
from paged.model.decoder import Decoder
from paged.runner.kv_cache import KVCache
from paged.runner.runner import SCORE_ROWS
from paged.runner.slots import TokenCounts, table_bytes
from paged.runner.step_graphs import can_graph

MOST_CONTEXT_BYTES: Final = GIB
"""What a process's context and libraries take of a card before it has computed anything: less than this."""


@dataclass(frozen=True, slots=True)
class CardMemory:
    """What a card and torch's allocator say at one moment, in bytes.

    Attributes:
        total: the card's memory.
        free: what no process holds.
        reserved: what this process's allocator holds.
        allocated: what tensors take of that.
        num_sharing: processes of ours that compute on the card.
    """

    total: int
    free: int
    reserved: int
    allocated: int
    num_sharing: int = 1

    @classmethod
    def read(cls, device: torch.device, num_sharing: int = 1) -> CardMemory:
        """Ask the card, once its work is done."""
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        return cls(total, free, reserved, allocated, num_sharing)

    @property
    def outside(self) -> int:
        """What lies outside the allocator: contexts and libraries, and all that other processes hold."""
        return self.total - self.free - self.reserved

    @property
    def others(self) -> int:
        """What others hold, if nothing has been computed yet: processes not of ours, and tensors of this one."""
        return self._foreign + self.allocated

    @property
    def _foreign(self) -> int:
        return max(0, self.outside - self.num_sharing * MOST_CONTEXT_BYTES)

    def context(self, later: CardMemory) -> int:
        """What this process's context and libraries take ``later``, once all of them have been used.

        Not negative, though others may have given back something meanwhile. Of several processes nobody knows which
        has how much: each counts as the most.
        """
        if self.num_sharing > 1:
            return MOST_CONTEXT_BYTES
        return max(0, later.outside - self._foreign)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """What one rank's card is used for, in bytes, but for the cache.

    Attributes:
        device_bytes: the card's memory.
        weights_bytes: parameters and tables, as they lie there.
        activation_bytes: the most that a step takes for moments: activations, logits, sampling, libraries' workspaces.
        context_bytes: what the context and libraries hold outside torch's allocator.
        graph_bytes: the memory of their own that CUDA graphs keep.
        table_bytes: the tables of all slots.
    """

    device_bytes: int
    weights_bytes: int
    activation_bytes: int
    context_bytes: int
    graph_bytes: int
    table_bytes: int

    def pool_bytes(self, utilization: float) -> int:
        """What is left for the cache if ``utilization`` of the card may be used; negative if the rest is too much."""
        other_bytes = self.activation_bytes + self.context_bytes + self.graph_bytes + self.table_bytes
        return kv_budget_bytes(self.device_bytes, utilization, self.weights_bytes, other_bytes)


def check_share(utilization: float, total_bytes: int, available_bytes: int) -> None:
    """Raise ``ValueError`` if an engine may not have its share of a card because others hold too much of it.

    Args:
        utilization: the share.
        total_bytes: the card's memory.
        available_bytes: what others leave of it.
    """
    if utilization * total_bytes > available_bytes:
        most = math.floor(100 * available_bytes / total_bytes) / 100
        raise ValueError(
            f"gpu_memory_utilization must be at most {most} here, because {(total_bytes - available_bytes) / GIB:.1f} "
            f"of the card's {total_bytes / GIB:.1f} GiB are in use already, not {utilization}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """How large steps may become.

    Attributes:
        max_num_seqs, max_step_tokens, chunk_size, block_size: as ``SchedulerConfig`` has them.
        max_seq_len: positions of a sequence.
        pool_tokens: about as many tokens as all sequences together may have in the cache.
    """

    max_num_seqs: int
    max_step_tokens: int
    chunk_size: int
    block_size: int
    max_seq_len: int
    pool_tokens: int

    @property
    def num_logits(self) -> int:
        """Rows of logits that are there at once."""
        return max(self.max_num_seqs, SCORE_ROWS)

    def chunks(self) -> tuple[list[int], list[int]]:
        """First positions and lengths of the sequences in a step of ``max_step_tokens`` rows, or as many as can be."""
        most = min(self.chunk_size, self.max_seq_len)
        num_tokens = min(self.max_step_tokens, most * self.max_num_seqs)
        lengths = [min(most, num_tokens - first) for first in range(0, num_tokens, most)]
        return [0] * len(lengths), lengths

    def decodes(self) -> tuple[list[int], list[int]]:
        """The same of a step of ``max_num_seqs`` sequences that decode, as long as the pool lets them all be."""
        num_seqs = min(self.max_num_seqs, self.max_step_tokens)
        num_keys = min(self.max_seq_len, max(1, self.pool_tokens // num_seqs))
        return [num_keys - 1] * num_seqs, [1] * num_seqs


def measure_profile(
    decoder: Decoder,
    kv_dtype: torch.dtype,
    limits: StepLimits,
    before: CardMemory,
    loaded: CardMemory,
) -> MemoryProfile:
    """Run the largest steps on a card that holds the weights and not yet the cache; all ranks together.

    Takes as long as these steps, and the first time as long as the comparison of the library's products with ours.
    Kernels that were not built before are built one by one. Starts torch's count of the peak anew.

    Args:
        decoder: the network, or a rank's part of it.
        kv_dtype: of the cache.
        limits: of the steps.
        before: the card, before the decoder was there.
        loaded: the card, once the decoder was there and nothing had been computed.
    """
    device = decoder.device
    # Where keys and values lie is no matter: one block serves all.
    cache = KVCache(decoder.local_spec, 1, limits.block_size, dtype=kv_dtype, device=device)
    step_bytes, decode_bytes, penalized_bytes = _step_bytes(decoder, cache, limits)
    makes_graphs = can_graph(decoder, cache)
    del cache
    torch.cuda.empty_cache()
    after = CardMemory.read(device)
    return MemoryProfile(
        device_bytes=after.total,
        weights_bytes=loaded.allocated - before.allocated,
        # What stays allocated is the libraries' workspaces.
        activation_bytes=max(step_bytes, decode_bytes, penalized_bytes) + after.allocated - loaded.allocated,
        context_bytes=before.context(after),
        # A step of any size may be a graph, and is launched plainly before it becomes one; penalties are in none.
        graph_bytes=max(step_bytes, decode_bytes) if makes_graphs else 0,
        table_bytes=table_bytes(limits.max_num_seqs, limits.max_seq_len, limits.block_size),
    )


def _step_bytes(decoder: Decoder, cache: KVCache, limits: StepLimits) -> tuple[int, int, int]:
    """The most that tensors take during some steps, beside those that were there.

    They are the largest step, the largest of decodes, and the largest with penalties, whose counts are among what it
    takes.
    """
    device = cache.device
    _prepare_products(decoder, cache, limits.max_step_tokens, limits.num_logits)

    def peak(starts: Sequence[int], lengths: Sequence[int], *, has_penalties: bool = False) -> int:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
        run_step(decoder, cache, starts, lengths, limits.num_logits, has_penalties=has_penalties)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - allocated

    return peak(*limits.chunks()), peak(*limits.decodes()), peak(*limits.chunks(), has_penalties=True)


@torch.inference_mode()
def _prepare_products(decoder: Decoder, cache: KVCache, most_rows: int, most_logits: int) -> None:
    """Compare the library's products with ours where they may take their place; needs room for a product's operands.

    Args:
        decoder: whose products.
        cache: of the model; block 0 is written to.
        most_rows: of a step.
        most_logits: rows of logits.
    """
    if not is_canonical(decoder.norm.weight, decoder.numerics):
        return
    from paged.kernels import gemm_dispatch

    layout = BatchLayout.build([0], [1], [[0]], cache.block_size, cache.device)
    with gemm_dispatch.recorded() as products:
        hidden_TD = decoder(torch.zeros_like(layout.positions_T), layout, cache)
    with gemm_dispatch.recorded() as head_products:
        decoder.logits(hidden_TD)
    for asked, num_rows in ((products, most_rows), (head_products, most_logits)):
        gemm_dispatch.prepare(asked, decoder.dtype, cache.device, num_rows)


@torch.inference_mode()
def run_step(
    decoder: Decoder,
    cache: KVCache,
    starts: Sequence[int],
    lengths: Sequence[int],
    num_logits: int,
    *,
    has_penalties: bool = False,
) -> torch.Tensor:
    """Compute a step whose sequences all have their keys and values in block 0, and draw ``num_logits`` tokens.

    Args:
        decoder: the network.
        cache: of the model.
        starts, lengths: positions of the first rows of each sequence, and how many.
        num_logits: rows of logits; their sampling is limited in every way.
        has_penalties: whether each of them has penalties, and so counts of all tokens.

    Returns:
        tokens int64 [num_logits] of no meaning.
    """
    device = cache.device
    vocab_size = decoder.spec.vocab_size
    # A slot keeps its own, and a step puts those of its rows together.
    counts = [
        TokenCounts(*(torch.zeros(vocab_size, dtype=dtype, device=device) for dtype in (torch.int32, torch.bool)))
        for _ in range(num_logits if has_penalties else 0)
    ]
    most = max(start + length for start, length in zip(starts, lengths, strict=True))
    blocks_BN = torch.zeros((len(starts), num_blocks_for(most, cache.block_size)), dtype=torch.int32)
    layout = BatchLayout.build(starts, lengths, blocks_BN, cache.block_size, device)
    hidden_TD = decoder(torch.zeros_like(layout.positions_T), layout, cache)
    row_R = torch.arange(num_logits, device=device)
    logits_RV = decoder.logits(hidden_TD.index_select(0, row_R % len(hidden_TD)))
    one_R = torch.ones(num_logits, dtype=torch.float64, device=device)
    penalties = None
    if has_penalties:
        penalties = Penalties(
            rows_P=row_R,
            repetition_P=2 * one_R,
            presence_P=one_R,
            frequency_P=one_R,
            output_counts_PV=torch.stack([row.output_V for row in counts]),
            prompt_mask_PV=torch.stack([row.prompt_V for row in counts]),
        )
    columns = SamplingColumns(
        temperature_R=one_R,
        seeds_R=row_R,
        positions_R=row_R,
        top_k_R=torch.full_like(row_R, 50),
        top_p_R=0.95 * one_R,
        min_p_R=0.01 * one_R,
        penalties=penalties,
    )
    return sample(logits_RV, columns).tokens_R
