"""Causal attention over the paged cache.

Contract, with B sequences, T rows of the step, H query heads, K kv heads, G = H / K, D head size: row t of sequence b
at position p attends to the cached positions 0 .. p of b, which must be stored already, its own among them. One
definition serves prefill, chunks of it and decode. Under ``invariant`` keys are taken in tiles of ``kv_tile``, tiles
in splits of ``kv_split``, both aligned to position 0; a split is an online softmax in fp32 (fp64 for fp64 models), and
splits are folded left to right. A row visits the tiles up to its own position, so neither the chunk it comes in, nor
its neighbours, nor the blocks' size and place can touch its bits. Memory beyond a sequence's length is never read.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from paged.kernels.batch_layout import BatchLayout
from paged.kernels.kv_cache import LayerCache, read_keys, read_values
from paged.kernels.numerics import Numerics, compute_dtype

logger = logging.getLogger(__name__)

# Decode rows that share their library calls; bounds the copies of keys and values, no bits hang on it.
GROUP_ROWS = 64


def attention(
    q_THD: torch.Tensor, cache: LayerCache, layout: BatchLayout, *, scale: float, numerics: Numerics
) -> torch.Tensor:
    """Attention of all rows of a step as [T, H, D], in the dtype of ``q``.

    Args:
        q_THD: queries, contiguous; query head h reads kv head h // G.
        cache: the layer's keys and values, with this step's rows already stored.
        layout: the rows; a planned one only where the card's kernels take the queries and the cache.
        scale: factor of the scores, usually D ** -0.5.
        numerics: how sums are formed.

    A value that is not finite makes the rows of its own sequence non-finite, in part also those just before it; rows of
    other sequences are not touched.
    """
    num_rows, num_heads, head_dim = q_THD.shape
    num_kv_heads = cache.num_kv_heads
    assert q_THD.is_contiguous(), q_THD.stride()
    assert num_rows == layout.num_rows, (q_THD.shape, layout.num_rows)
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    assert head_dim == cache.head_dim, (q_THD.shape, cache.key.shape)
    assert cache.block_size == layout.block_size, (cache.block_size, layout.block_size)
    if q_THD.is_cuda:
        # Imported here because a CPU needs no Triton.
        from paged.kernels.attention_triton import attention_triton, unsupported

        reason = unsupported(q_THD, cache, numerics)
        if reason is None:
            return attention_triton(q_THD, cache, layout, scale=scale, numerics=numerics)
        _warn_once(reason)
    q_TKGD = q_THD.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out_TKGD = torch.empty_like(q_TKGD)
    decode = _decode_invariant if numerics.is_invariant else _decode_fast
    chunk = _chunk_invariant if numerics.is_invariant else _chunk_fast
    for group in _decode_groups(layout):
        out_NKGD = decode(q_TKGD.index_select(0, group.rows), cache, layout, group, scale, numerics)
        out_TKGD.index_copy_(0, group.rows, out_NKGD.to(q_THD.dtype))
    for b, length in enumerate(layout.lengths):
        if length > 1:
            rows = slice(layout.offsets[b], layout.offsets[b] + length)
            out_TKGD[rows] = chunk(q_TKGD[rows], cache, layout, b, scale, numerics).to(q_THD.dtype)
    return out_TKGD.view(num_rows, num_heads, head_dim)


def is_canonical(q_THD: torch.Tensor, cache: LayerCache, numerics: Numerics) -> bool:
    """Whether ``attention`` takes the card's kernels, in which a head's bits hang on no other head."""
    if not q_THD.is_cuda:
        return False
    from paged.kernels.attention_triton import unsupported

    return unsupported(q_THD, cache, numerics) is None


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("attention runs without its kernels for the card, and much slower, because %s", reason)


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeGroup:
    """Sequences with one row in the step, longest first, that share their library calls."""

    index: int
    contexts: tuple[int, ...]
    rows: torch.Tensor  # int64 [N], rows of the step
    table_rows: torch.Tensor  # int64 [N], rows of the block tables
    contexts_N: torch.Tensor  # int64 [N]


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeTiles:
    """The tiles of one split of a group's keys, tile by tile: the rows that reach tile j are the first counts[j]."""

    counts: tuple[int, ...]
    items: torch.Tensor  # int64 [I], the group's row that each (tile, row) item belongs to
    key_rows: torch.Tensor  # int64 [I * K * kv_tile]
    hidden: torch.Tensor | None  # bool [I, 1, 1, kv_tile], keys beyond the row's position; None where there are none


def _decode_groups(layout: BatchLayout) -> tuple[_DecodeGroup, ...]:
    return layout.derived("groups", lambda: tuple(_make_decode_groups(layout)))


def _make_decode_groups(layout: BatchLayout) -> list[_DecodeGroup]:
    length_B = np.asarray(layout.lengths)
    single = np.flatnonzero(length_B == 1)
    context_N = np.asarray(layout.starts)[single] + 1
    order = np.argsort(-context_N, kind="stable")
    single, context_N = single[order], context_N[order]
    offset_N, table_row_N = (np.asarray(column)[single] for column in (layout.offsets, layout.table_rows))
    groups: list[_DecodeGroup] = []
    for first in range(0, single.size, GROUP_ROWS):
        part = slice(first, first + GROUP_ROWS)
        columns = layout.upload(np.stack((offset_N[part], table_row_N[part], context_N[part])))
        groups.append(_DecodeGroup(len(groups), tuple(context_N[part].tolist()), *columns.unbind()))
    return groups


def _decode_tiles(
    layout: BatchLayout, group: _DecodeGroup, num_kv_heads: int, numerics: Numerics
) -> tuple[_DecodeTiles, ...]:
    key = (group.index, num_kv_heads, numerics.kv_tile, numerics.kv_split)
    return layout.derived(key, lambda: tuple(_make_decode_tiles(layout, group, num_kv_heads, numerics)))


def _make_decode_tiles(
    layout: BatchLayout, group: _DecodeGroup, num_kv_heads: int, numerics: Numerics
) -> list[_DecodeTiles]:
    size = numerics.kv_tile
    context_N = np.asarray(group.contexts)
    device = group.rows.device
    splits = []
    for split_start in range(0, group.contexts[0], numerics.kv_split):
        starts = range(split_start, min(split_start + numerics.kv_split, group.contexts[0]), size)
        counts = [int((context_N > start).sum()) for start in starts]
        item_I = np.concatenate([np.arange(count) for count in counts])
        start_I = np.repeat(np.asarray(starts), counts)
        items, first = layout.upload(np.stack((item_I, start_I)))
        position_IP = first[:, None] + torch.arange(size, device=device)
        last_I1 = group.contexts_N[items, None] - 1
        # Places beyond the row's position read its last key again and are then masked: no stale memory is read.
        key_rows = layout.key_rows(group.table_rows[items], position_IP.minimum(last_I1), num_kv_heads)
        full = bool((context_N[item_I] >= start_I + size).all())
        hidden = None if full else (position_IP > last_I1)[:, None, None]
        splits.append(_DecodeTiles(tuple(counts), items, key_rows.flatten(), hidden))
    return splits


def _decode_invariant(
    q_NKGD: torch.Tensor,
    cache: LayerCache,
    layout: BatchLayout,
    group: _DecodeGroup,
    scale: float,
    numerics: Numerics,
) -> torch.Tensor:
    dtype, size = compute_dtype(q_NKGD.dtype), numerics.kv_tile
    num_kv_heads, num_shared, head_dim = q_NKGD.shape[1:]
    wide_NKGD = q_NKGD.to(dtype) * scale
    folded: _Softmax | None = None
    for tiles in _decode_tiles(layout, group, num_kv_heads, numerics):
        num_items = len(tiles.items) * num_kv_heads
        # One item is a (row, tile, kv head) with contiguous keys: only so are its bits free of the other items.
        key_IPD = read_keys(cache, tiles.key_rows, dtype).view(num_items, size, head_dim)
        value_IPD = read_values(cache, tiles.key_rows, dtype).view(num_items, size, head_dim)
        q_IGD = wide_NKGD.index_select(0, tiles.items).view(num_items, num_shared, head_dim)
        score_IGP = _bmm_in_tiles(q_IGD, key_IPD.transpose(1, 2), numerics.bmm_items)
        score_IKGP = score_IGP.view(-1, num_kv_heads, num_shared, size)
        if tiles.hidden is not None:
            score_IKGP.masked_fill_(tiles.hidden, -torch.inf)
        # The running maximum at each tile, known before any exponential, lets all tiles share the calls that follow.
        tops = list(score_IKGP.amax(-1, keepdim=True).split(tiles.counts))
        for j in range(1, len(tops)):
            tops[j] = torch.maximum(tops[j - 1][: tiles.counts[j]], tops[j])
        weight_IKGP = torch.exp(score_IKGP - torch.cat(tops))
        sums = weight_IKGP.sum(-1, keepdim=True).split(tiles.counts)
        product = _bmm_in_tiles(weight_IKGP.view(num_items, num_shared, size), value_IPD, numerics.bmm_items)
        products = product.view(-1, num_kv_heads, num_shared, head_dim).split(tiles.counts)
        split = _Softmax(tops[0], sums[0], products[0])
        for j in range(1, len(tops)):
            split.add_tile(slice(0, tiles.counts[j]), tops[j], sums[j], products[j])
        if folded is None:
            folded = split
        else:
            folded.add_split(slice(0, tiles.counts[0]), split)
    assert folded is not None
    return folded.result()


def _chunk_invariant(
    q_NKGD: torch.Tensor, cache: LayerCache, layout: BatchLayout, b: int, scale: float, numerics: Numerics
) -> torch.Tensor:
    dtype, size = compute_dtype(q_NKGD.dtype), numerics.kv_tile
    num_rows = q_NKGD.shape[0]
    start, end = layout.starts[b], layout.starts[b] + num_rows
    key_SKPD, value_SKPD = _read_tiles(cache, layout, b, end, size, dtype)
    q_NKGD = q_NKGD.to(dtype) * scale
    q_KNGD = q_NKGD.transpose(0, 1).contiguous()
    position_N1 = layout.positions_T[layout.offsets[b] : layout.offsets[b] + num_rows, None]
    folded: _Softmax | None = None
    for split_start in range(0, end, numerics.kv_split):
        split: _Softmax | None = None
        split_row = max(0, split_start - start)
        for tile_start in range(split_start, min(split_start + numerics.kv_split, end), size):
            tile = tile_start // size
            # Rows before this one do not reach the tile.
            first = max(0, tile_start - start)
            num_active = num_rows - first
            scores = [
                _bmm_in_tiles(q_NGD, key_PD.t().expand(num_active, -1, -1), numerics.bmm_items)
                for q_NGD, key_PD in zip(q_KNGD[:, first:], key_SKPD[tile], strict=True)
            ]
            score_KNGP = torch.stack(scores)
            if tile_start + size > start + first + 1:
                key_position_P = torch.arange(tile_start, tile_start + size, device=q_KNGD.device)
                score_KNGP.masked_fill_((key_position_P > position_N1[first:])[:, None], -torch.inf)
            top = score_KNGP.amax(-1, keepdim=True)
            if split is not None:
                rows = slice(first - split_row, None)
                top = torch.maximum(split.top[:, rows], top)
            weight_KNGP = torch.exp(score_KNGP - top)
            products = [
                _bmm_in_tiles(weight_NGP, value_PD.expand(num_active, -1, -1), numerics.bmm_items)
                for weight_NGP, value_PD in zip(weight_KNGP, value_SKPD[tile], strict=True)
            ]
            product_KNGD = torch.stack(products)
            total = weight_KNGP.sum(-1, keepdim=True)
            if split is None:
                split = _Softmax(top, total, product_KNGD)
            else:
                split.add_tile((slice(None), rows), top, total, product_KNGD)
        assert split is not None
        if folded is None:
            folded = split
        else:
            folded.add_split((slice(None), slice(split_row, None)), split)
    assert folded is not None
    return folded.result().transpose(0, 1)


@dataclass(slots=True)
class _Softmax:
    """A softmax in progress: per row the greatest score, the sum of exp(score - top), the same sum with values.

    Owns its tensors and updates them in place; the same operations, element by element, for decode and chunks.
    """

    top: torch.Tensor
    total: torch.Tensor
    product: torch.Tensor

    def add_tile(self, rows: Any, top: torch.Tensor, total: torch.Tensor, product: torch.Tensor) -> None:
        """Add to ``rows`` a tile whose ``top`` is already the running maximum, and its sums relative to that."""
        decay = torch.exp(self.top[rows] - top)
        self.total[rows] = self.total[rows] * decay + total
        self.product[rows] = self.product[rows] * decay + product
        self.top[rows] = top

    def add_split(self, rows: Any, other: _Softmax) -> None:
        """Fold into ``rows`` the split to the right of all that is here."""
        top = torch.maximum(self.top[rows], other.top)
        left, right = torch.exp(self.top[rows] - top), torch.exp(other.top - top)
        self.total[rows] = self.total[rows] * left + other.total * right
        self.product[rows] = self.product[rows] * left + other.product * right
        self.top[rows] = top

    def result(self) -> torch.Tensor:
        return self.product / self.total


def _bmm_in_tiles(left_IGP: torch.Tensor, right_IPN: torch.Tensor, tile_items: int) -> torch.Tensor:
    """``torch.bmm`` in calls of exactly ``tile_items`` items: the library never sees how many there really are.

    It shares fewer items than threads out in another way than many (fp64, 4 threads and more), with other bits.
    """
    num_items = left_IGP.shape[0]
    out_IGN = left_IGP.new_empty(-(-num_items // tile_items) * tile_items, left_IGP.shape[1], right_IPN.shape[2])
    for first in range(0, num_items, tile_items):
        left, right = left_IGP[first : first + tile_items], right_IPN[first : first + tile_items]
        missing = tile_items - left.shape[0]
        if missing:
            left = torch.cat((left, left[:1].expand(missing, -1, -1)))
            filler = right[:1].expand(missing, -1, -1)
            if right_IPN.stride(0) == 0:
                right = right[:1].expand(tile_items, -1, -1)
            elif right.stride(1) == 1:  # keys, seen transposed: their memory must keep its order
                right = torch.cat((right.mT, filler.mT)).mT
            else:
                right = torch.cat((right, filler))
        torch.bmm(left, right, out=out_IGN[first : first + tile_items])
    return out_IGN[:num_items]


def _read_tiles(
    cache: LayerCache, layout: BatchLayout, b: int, end: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions 0 .. end - 1 of sequence b as contiguous tiles [tiles, K, size, D]."""
    num_tiles = -(-end // size)

    def make_rows() -> torch.Tensor:
        device = layout.positions_T.device
        # As for decode: what lies beyond the end is the last key again.
        position_SP = torch.arange(num_tiles * size, device=device).clamp_max(end - 1).view(num_tiles, size)
        table_row_S = torch.full((num_tiles,), layout.table_rows[b], device=device)
        return layout.key_rows(table_row_S, position_SP, cache.num_kv_heads).flatten()

    rows = layout.derived(("chunk", b, size, cache.num_kv_heads), make_rows)
    shape = (num_tiles, cache.num_kv_heads, size, cache.head_dim)
    return read_keys(cache, rows, dtype).view(shape), read_values(cache, rows, dtype).view(shape)


def _decode_fast(
    q_NKGD: torch.Tensor,
    cache: LayerCache,
    layout: BatchLayout,
    group: _DecodeGroup,
    scale: float,
    numerics: Numerics,
) -> torch.Tensor:
    num_rows, num_kv_heads, _, head_dim = q_NKGD.shape
    longest = group.contexts[0]

    def make_rows() -> tuple[torch.Tensor, torch.Tensor | None]:
        position_P = torch.arange(longest, device=q_NKGD.device)
        last_N1 = group.contexts_N[:, None] - 1
        rows = layout.key_rows(group.table_rows, position_P.minimum(last_N1), num_kv_heads).flatten()
        return rows, None if group.contexts[-1] == longest else (position_P <= last_N1)[:, None, None]

    rows, visible = layout.derived(("padded", group.index, num_kv_heads), make_rows)
    shape = (num_rows, num_kv_heads, longest, head_dim)
    key, value = (read(cache, rows, q_NKGD.dtype).view(shape) for read in (read_keys, read_values))
    # The heads that share a kv head stand where a single row leaves the query dimension free.
    return F.scaled_dot_product_attention(q_NKGD, key, value, attn_mask=visible, scale=scale)


def _chunk_fast(
    q_NKGD: torch.Tensor, cache: LayerCache, layout: BatchLayout, b: int, scale: float, numerics: Numerics
) -> torch.Tensor:
    num_rows, num_kv_heads, num_shared, head_dim = q_NKGD.shape
    end = layout.starts[b] + num_rows
    key, value = (x[0, :, :end] for x in _read_tiles(cache, layout, b, end, end, q_NKGD.dtype))
    position_N1 = layout.positions_T[layout.offsets[b] : layout.offsets[b] + num_rows, None]
    visible = torch.arange(end, device=q_NKGD.device) <= position_N1
    q = q_NKGD.transpose(0, 1).reshape(1, num_kv_heads, num_rows * num_shared, head_dim)
    visible = visible.repeat_interleave(num_shared, dim=0)
    out = F.scaled_dot_product_attention(q, key[None], value[None], attn_mask=visible, scale=scale)
    return out.view(num_kv_heads, num_rows, num_shared, head_dim).transpose(0, 1)
