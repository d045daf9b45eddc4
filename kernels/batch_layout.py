"""The layout of a step: which rows it holds, where their keys and values lie, and the lists of work that follow.

Shapes: B sequences, T rows of the step, N entries of a table of blocks or of a list that a caller looks up, I items of
decode work, K kv heads, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

Made = TypeVar("Made")
Upload = Callable[[np.ndarray], torch.Tensor]
Numbers = Sequence[int] | np.ndarray

# Stands for the number of a split in an item that is a whole row.
WHOLE = -1

# Whole rows go through the card in waves of as many as it takes at a time. Where there are at most so many waves, the
# last one is split if it is less than half full: programs without work cost more than a second kernel does
# (benchmarks/attention_h200.py --ways).
FEW_WAVES = 4
LAST_WAVE_SHARES = 2


@dataclass(frozen=True, slots=True, eq=False)
class DecodeWork:
    """Work for the rows that are alone in their sequence's part of the step, on the device.

    The lists may be longer than what counts, so that a graph of fixed launches can hold them.

    Attributes:
        items_I4: int32, one split, or a whole row whose splits one program folds: its sequence's row of the block
            tables, row of the step, number of the split or ``WHOLE``, keys of the row. A row's splits adjoin, in order.
        rows_N3: int32, one row that is not whole: row of the step, its first item, number of its items. If all three
            are negative there is none, nor is there one after it.
        num_items_1: int32 [1], how many of the items count.
        most_splits: about the most items that a row of ``rows_N3`` has; a launch is built for it, no bits hang on it.
            0: there are no such rows.
    """

    items_I4: torch.Tensor
    rows_N3: torch.Tensor
    num_items_1: torch.Tensor
    most_splits: int


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTiles:
    """Tiles of rows of the sequences with several rows, on the device; the list may be longer than what counts.

    Attributes:
        tiles_N4: int32, one tile: its sequence's row of the block tables, first row of the step, number of rows,
            position of the first. Never more rows than the kernel that takes them wants in a tile.
        num_tiles_1: int32 [1], how many of the tiles count.
    """

    tiles_N4: torch.Tensor
    num_tiles_1: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _HostRows:
    """What a layout that was built knows on the host: one number a sequence each."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    table_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BatchLayout:
    """Which rows a step holds and where their keys and values lie. Made by ``build``, for one step, or by ``planned``.

    Sequence b's rows are ``offsets[b] .. offsets[b] + lengths[b] - 1``, at positions ``starts[b] ..``; its blocks are
    row ``table_rows[b]`` of the block tables. These four are on the host, and a planned layout has none of them.

    Attributes:
        positions_T: int64, position of each row.
        cells_T: int64, where each row's keys and values are stored: block * block_size + offset; negative: nowhere.
        last_rows_B: int64, index of each sequence's last row.
        block_tables_BN: int32 [any number of rows, max_blocks]; entries beyond a sequence's blocks are never read.
        block_size: tokens in a block.
    """

    positions_T: torch.Tensor
    cells_T: torch.Tensor
    last_rows_B: torch.Tensor
    block_tables_BN: torch.Tensor
    block_size: int
    _host: _HostRows | None = field(repr=False)
    _upload: Upload | None = field(repr=False)
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        starts: Numbers,
        lengths: Numbers,
        block_tables: torch.Tensor | np.ndarray | Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
        *,
        table_rows: Numbers | None = None,
        upload: Upload | None = None,
    ) -> BatchLayout:
        """The layout of the rows ``starts[b] .. starts[b] + lengths[b] - 1`` of each sequence b.

        Args:
            starts: position of each sequence's first row; all earlier ones are cached.
            lengths: rows of each sequence, at least 1.
            block_tables: int32 [any number of rows, max_blocks], wide enough for each last row. A tensor on the device
                is taken as it is, without a copy.
            block_size: tokens in a block.
            device: where the model runs.
            table_rows: the row of ``block_tables`` of each sequence; by default row b is sequence b's, and there are no
                others.
            upload: brings an array to the device, now and for what is derived later; the caller leaves an array that it
                gives alone until the layout is done with, as the tensor may share its memory on a CPU. By default
                a transfer that the host waits for.
        """
        if upload is None:

            def upload(array: np.ndarray) -> torch.Tensor:
                return torch.from_numpy(array).to(device)

        start_B, length_B = np.asarray(starts, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        if isinstance(block_tables, torch.Tensor):
            tables_BN = block_tables.to(device=device, dtype=torch.int32)
        else:
            tables_BN = upload(np.ascontiguousarray(block_tables, dtype=np.int32))
        assert tables_BN.dim() == 2, tables_BN.shape
        num_tables = tables_BN.shape[0]
        table_row_B = np.arange(num_tables) if table_rows is None else np.asarray(table_rows, dtype=np.int64)
        assert start_B.shape == length_B.shape == table_row_B.shape, (start_B.shape, length_B.shape, table_row_B.shape)
        assert start_B.size > 0, "a step needs a row"
        assert length_B.min() >= 1, lengths
        assert start_B.min() >= 0, starts
        assert 0 <= table_row_B.min() <= table_row_B.max() < num_tables, (table_rows, num_tables)
        assert tables_BN.shape[1] * block_size >= int((start_B + length_B).max()), "a block table is too short"
        end_B = np.cumsum(length_B)
        offset_B = end_B - length_B
        table_row_T = np.repeat(table_row_B, length_B)
        position_T = np.arange(end_B[-1]) + np.repeat(start_B - offset_B, length_B)
        uploaded = upload(np.concatenate((position_T, table_row_T, end_B - 1)))
        position, table_row, last = uploaded.split([position_T.size, position_T.size, start_B.size])
        block = tables_BN[table_row, position // block_size].to(torch.int64)
        return cls(
            positions_T=position,
            cells_T=block * block_size + position % block_size,
            last_rows_B=last,
            block_tables_BN=tables_BN,
            block_size=block_size,
            _host=_HostRows(*(tuple(column.tolist()) for column in (start_B, length_B, offset_B, table_row_B))),
            _upload=upload,
        )

    @classmethod
    def planned(
        cls,
        positions_T: torch.Tensor,
        cells_T: torch.Tensor,
        last_rows_B: torch.Tensor,
        block_tables: torch.Tensor,
        block_size: int,
        decode: DecodeWork | None,
        chunks: ChunkTiles | None,
    ) -> BatchLayout:
        """A layout whose work lies in device memory that is rewritten before every replay of a graph.

        Only the kernels for the card can use it. ``decode`` and ``chunks`` must be made for the split and the tile size
        that these ask for; what they leave out of the step's rows is left unwritten. ``None``: the step never has such
        rows. Other arguments as the attributes.
        """
        assert block_tables.dtype == torch.int32, block_tables.dtype
        assert positions_T.shape == cells_T.shape, (positions_T.shape, cells_T.shape)
        given: dict[Hashable, Any] = {"decode": decode, "chunks": chunks}
        return cls(positions_T, cells_T, last_rows_B, block_tables, block_size, None, None, given)

    @property
    def starts(self) -> tuple[int, ...]:
        """Position of each sequence's first row."""
        return self._on_host.starts

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each sequence."""
        return self._on_host.lengths

    @property
    def offsets(self) -> tuple[int, ...]:
        """First row of each sequence in the step."""
        return self._on_host.offsets

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Each sequence's row of the block tables."""
        return self._on_host.table_rows

    @property
    def _on_host(self) -> _HostRows:
        assert self._host is not None, "a planned layout has no numbers on the host"
        return self._host

    @property
    def num_rows(self) -> int:
        """Rows of the step, T, with those of padding."""
        return self.positions_T.shape[0]

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """``array`` as a tensor on the device, brought there as the layout itself was."""
        assert self._upload is not None, "a planned layout brings nothing to the device"
        return self._upload(array)

    def derived(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What ``make`` makes of the layout, made once for each ``key``, because every layer asks for the same."""
        if key not in self._derived:
            self._derived[key] = make()
        made: Made = self._derived[key]
        return made

    def key_rows(self, table_row_N: torch.Tensor, position_NP: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """Rows of a cache seen as [cells * K, D]: int64 [N, K, P] for P positions of each of N rows of the tables."""
        block_NP = self.block_tables_BN[table_row_N[:, None], position_NP // self.block_size].to(torch.int64)
        cell_NP = block_NP * self.block_size + position_NP % self.block_size
        head_K1 = torch.arange(num_kv_heads, device=position_NP.device)[:, None]
        return cell_NP[:, None] * num_kv_heads + head_K1

    def decode_work(self, split: int, num_kv_heads: int, num_programs: int) -> DecodeWork | None:
        """The sequences with one row, for ``decode_arrays``' arguments; ``None`` where there is no such sequence."""
        if self._host is None:
            planned: DecodeWork | None = self._derived["decode"]
            return planned
        key = ("decode", split, num_kv_heads, num_programs)
        return self.derived(key, lambda: self._make_decode_work(split, num_kv_heads, num_programs))

    def chunk_tiles(self, num_positions: int) -> ChunkTiles | None:
        """Tiles of at most ``num_positions`` rows of the sequences with several; ``None`` where there is none."""
        if self._host is None:
            planned: ChunkTiles | None = self._derived["chunks"]
            return planned
        return self.derived(("tiles", num_positions), lambda: self._make_chunk_tiles(num_positions))

    def _make_decode_work(self, split: int, num_kv_heads: int, num_programs: int) -> DecodeWork | None:
        items_I4, rows_N3, most_splits = decode_arrays(
            self.starts,
            self.lengths,
            self.offsets,
            self.table_rows,
            split=split,
            num_kv_heads=num_kv_heads,
            num_programs=num_programs,
        )
        if items_I4.shape[0] == 0:
            return None
        num_items, items, rows = self._upload_lists(items_I4, rows_N3)
        return DecodeWork(items.view(-1, 4), rows.view(-1, 3), num_items, most_splits)

    def _make_chunk_tiles(self, num_positions: int) -> ChunkTiles | None:
        tiles_N4 = tile_arrays(self.starts, self.lengths, self.offsets, self.table_rows, num_positions=num_positions)
        if tiles_N4.shape[0] == 0:
            return None
        num_tiles, tiles = self._upload_lists(tiles_N4)
        return ChunkTiles(tiles.view(-1, 4), num_tiles)

    def _upload_lists(self, *lists: np.ndarray) -> tuple[torch.Tensor, ...]:
        """The length of the first list and all lists in one transfer, flat.

        Each starts at a multiple of 16 bytes if those before it have rows of four: a program then reads one at once,
        and a kernel is compiled once.
        """
        count = np.asarray([lists[0].shape[0], 0, 0, 0], dtype=np.int32)
        uploaded = self.upload(np.concatenate([count, *(part.ravel() for part in lists)]))
        num_first, *parts = uploaded.split([4, *(part.size for part in lists)])
        return num_first[:1], *parts


def decode_arrays(
    starts: Numbers,
    lengths: Numbers,
    offsets: Numbers,
    table_rows: Numbers,
    *,
    split: int,
    num_kv_heads: int,
    num_programs: int,
) -> tuple[np.ndarray, np.ndarray, int]:
    """``items_I4``, ``rows_N3`` and ``most_splits`` of the sequences with one row, on the host; see ``DecodeWork``.

    A row is whole if it has one split, or no more keys than a program's even share of all keys of all kv heads: then
    the others keep the card busy. Of few waves of whole rows the last, which has the shortest, is split where a row has
    more than ``LAST_WAVE_SHARES`` times its share of what is left to do with it. The longest items come first, so that
    programs that claim them end together.

    Args:
        starts, lengths, offsets, table_rows: as the attributes of ``BatchLayout``.
        split: keys of a split.
        num_kv_heads: each is a program's work of its own.
        num_programs: how many the card runs at a time.
    """
    single_N = np.flatnonzero(np.asarray(lengths) == 1)
    key_N = np.asarray(starts)[single_N] + 1
    order_N = np.argsort(-key_N, kind="stable")
    single_N, key_N = single_N[order_N], key_N[order_N]
    is_split_N = key_N > max(split, int(key_N.sum()) * num_kv_heads // num_programs)
    num_long = int(np.count_nonzero(is_split_N))
    num_places = (key_N.size - num_long) * num_kv_heads
    if num_places < FEW_WAVES * num_programs:
        last = num_long + num_places // num_programs * num_programs // num_kv_heads
        left = int(key_N[:num_long].sum() + key_N[last:].sum())
        is_split_N[last:] = key_N[last:] > max(split, LAST_WAVE_SHARES * left * num_kv_heads // num_programs)
    order_N = np.argsort(-np.where(is_split_N, split, key_N), kind="stable")
    single_N, key_N, is_split_N = single_N[order_N], key_N[order_N], is_split_N[order_N]
    count_N = np.where(is_split_N, -(-key_N // split), 1)
    first_N = np.cumsum(count_N) - count_N
    row_N = np.asarray(offsets)[single_N]
    # A row's first item, and then the rows' items all at once.
    first_N4 = np.empty((single_N.size, 4), dtype=np.int32)
    first_N4[:, 0] = np.asarray(table_rows)[single_N]
    first_N4[:, 1] = row_N
    first_N4[:, 2] = np.where(is_split_N, 0, WHOLE) - first_N
    first_N4[:, 3] = key_N
    items_I4 = np.repeat(first_N4, count_N, axis=0)
    items_I4[:, 2] += np.arange(items_I4.shape[0], dtype=np.int32)
    rows_N3 = np.stack((row_N, first_N, count_N), axis=1)[is_split_N].astype(np.int32)
    return items_I4, rows_N3, int(rows_N3[:, 2].max(initial=0))


def most_split_rows(num_kv_heads: int, num_programs: int) -> int:
    """Most rows of a step that ``decode_arrays`` splits.

    Each has more keys than its share: of all keys, or of those left for the last wave. So the first are fewer than
    their part of all keys times programs / kv heads, and the others fewer than the rest of that.
    """
    return -(-num_programs // num_kv_heads) - 1


def tile_arrays(
    starts: Numbers, lengths: Numbers, offsets: Numbers, table_rows: Numbers, *, num_positions: int
) -> np.ndarray:
    """``tiles_N4`` of the sequences with several rows, on the host; see ``ChunkTiles``.

    Those with most keys come first, so that the card is not left waiting for one that started last. Arguments as the
    attributes of ``BatchLayout``, and the most rows of a tile.
    """
    several_B = np.flatnonzero(np.asarray(lengths) > 1)
    length_B = np.asarray(lengths)[several_B]
    count_B = -(-length_B // num_positions)
    of_N = np.repeat(np.arange(several_B.size), count_B)
    skipped_N = (np.arange(of_N.size) - (np.cumsum(count_B) - count_B)[of_N]) * num_positions
    tiles_N4 = np.empty((of_N.size, 4), dtype=np.int32)
    tiles_N4[:, 0] = np.asarray(table_rows)[several_B][of_N]
    tiles_N4[:, 1] = np.asarray(offsets)[several_B][of_N] + skipped_N
    tiles_N4[:, 2] = np.minimum(length_B[of_N] - skipped_N, num_positions)
    tiles_N4[:, 3] = np.asarray(starts)[several_B][of_N] + skipped_N
    return tiles_N4[np.argsort(-tiles_N4[:, 3], kind="stable")]
