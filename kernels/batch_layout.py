"""The layout of a step: which rows it holds and where their keys and values lie.

Shapes: B sequences, T rows of the step, N entries of a table of blocks or items that a caller looks up, K kv heads, P
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, eq=False)
class BatchLayout:
    """Which rows a step holds and where their keys and values lie. Valid for one step; made by ``build``.

    Sequence b's rows are ``offsets[b] .. offsets[b] + lengths[b] - 1``, at positions ``starts[b] ..``.

    Attributes:
        starts, lengths, offsets: one number a sequence, on the host.
        positions_T: int64, position of each row.
        cells_T: int64, where each row's keys and values are stored: block * block_size + offset.
        last_rows_B: int64, index of each sequence's last row.
        block_tables_BN: int32 [B, max_blocks]; entries beyond a sequence's blocks are never read.
        block_size: tokens in a block.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    positions_T: torch.Tensor
    cells_T: torch.Tensor
    last_rows_B: torch.Tensor
    block_tables_BN: torch.Tensor
    block_size: int
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        starts: Sequence[int],
        lengths: Sequence[int],
        block_tables: torch.Tensor | np.ndarray | Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> BatchLayout:
        """The layout of the rows ``starts[b] .. starts[b] + lengths[b] - 1`` of each sequence b.

        Args:
            starts: position of each sequence's first row; all earlier ones are cached.
            lengths: rows of each sequence, at least 1.
            block_tables: int32 [B, max_blocks], row b for sequence b, wide enough for its last row.
            block_size: tokens in a block.
            device: where the model runs. On a card each build waits for two small transfers.
        """
        start_B, length_B = np.asarray(starts, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        tables_BN = torch.as_tensor(block_tables, dtype=torch.int32, device=device)
        assert start_B.shape == length_B.shape == tables_BN.shape[:1], (start_B.shape, length_B.shape)
        assert start_B.size > 0, "a step needs a row"
        assert length_B.min() >= 1, lengths
        assert start_B.min() >= 0, starts
        assert tables_BN.shape[1] * block_size >= int((start_B + length_B).max()), "a block table is too short"
        end_B = np.cumsum(length_B)
        offset_B = end_B - length_B
        sequence_T = np.repeat(np.arange(start_B.size), length_B)
        position_T = np.arange(end_B[-1]) + np.repeat(start_B - offset_B, length_B)
        host = torch.from_numpy(np.concatenate((position_T, sequence_T, end_B - 1)))
        position, sequence, last = host.to(device).split([position_T.size, position_T.size, start_B.size])
        block = tables_BN[sequence, position // block_size].to(torch.int64)
        return cls(
            starts=tuple(start_B.tolist()),
            lengths=tuple(length_B.tolist()),
            offsets=tuple(offset_B.tolist()),
            positions_T=position,
            cells_T=block * block_size + position % block_size,
            last_rows_B=last,
            block_tables_BN=tables_BN,
            block_size=block_size,
        )

    @property
    def num_rows(self) -> int:
        """Rows of the step, T."""
        return self.offsets[-1] + self.lengths[-1]

    def derived(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What ``make`` makes of the layout, made once for each ``key``, because every layer asks for the same."""
        if key not in self._derived:
            self._derived[key] = make()
        made: Made = self._derived[key]
        return made

    def key_rows(self, sequence_N: torch.Tensor, position_NP: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """Rows of a cache seen as [cells * K, D]: int64 [N, K, P] for P positions of each of N sequences."""
        block_NP = self.block_tables_BN[sequence_N[:, None], position_NP // self.block_size].to(torch.int64)
        cell_NP = block_NP * self.block_size + position_NP % self.block_size
        head_K1 = torch.arange(num_kv_heads, device=position_NP.device)[:, None]
        return cell_NP[:, None] * num_kv_heads + head_K1

    def chunk_tiles(self, num_positions: int) -> torch.Tensor:
        """Tiles of at most ``num_positions`` rows of sequences with several rows, int32 [N, 4] on the device.

        A tile: sequence, first row of the step, number of rows, position of the first. Those with most keys come first,
        so that the card is not left waiting for one that started last.
        """
        return self.derived(("tiles", num_positions), lambda: self._make_chunk_tiles(num_positions))

    def _make_chunk_tiles(self, num_positions: int) -> torch.Tensor:
        length_B = np.asarray(self.lengths)
        count_B = np.where(length_B > 1, -(-length_B // num_positions), 0)
        sequence_N = np.repeat(np.arange(length_B.size), count_B)
        skipped_N = (np.arange(sequence_N.size) - (np.cumsum(count_B) - count_B)[sequence_N]) * num_positions
        size_N = np.minimum(length_B[sequence_N] - skipped_N, num_positions)
        position_N = np.asarray(self.starts)[sequence_N] + skipped_N
        columns = (sequence_N, np.asarray(self.offsets)[sequence_N] + skipped_N, size_N, position_N)
        host = np.column_stack(columns)[np.argsort(-position_N, kind="stable")].astype(np.int32)
        return torch.from_numpy(host).to(self.positions_T.device)
