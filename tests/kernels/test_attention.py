"""Attention: right against fp64, and to the bit the same however rows are batched, chunked and placed."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from oracles import dense_attention
from paged.kernels import attention as attention_module
from paged.kernels.attention import attention
from paged.kernels.batch_layout import WHOLE, BatchLayout, decode_arrays, most_split_rows, tile_arrays
from paged.kernels.kv_cache import FP8, LayerCache, store
from paged.kernels.numerics import Numerics

INVARIANT, FAST = Numerics(), Numerics(mode="fast")
HEAD_DIM = 16


class Text:
    """Queries, keys and values of one sequence, and what attention gives for all rows in one chunk, alone."""

    def __init__(self, seed: int, length: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.length, self.dtype = length, dtype
        self.q = (3 * torch.randn(length, heads, HEAD_DIM, generator=generator)).to(dtype)
        self.k = torch.randn(length, kv_heads, HEAD_DIM, generator=generator).to(dtype)
        self.v = torch.randn(length, kv_heads, HEAD_DIM, generator=generator).to(dtype)

    def exact(self) -> torch.Tensor:
        return dense_attention(self.q, self.k, self.v, HEAD_DIM**-0.5)


class Paged:
    """Several texts in one cache at random blocks; every other block is full of NaN."""

    def __init__(self, texts: list[Text], block_size: int, seed: int = 0, cache_dtype: torch.dtype | None = None):
        self.texts, self.block_size = texts, block_size
        kv_heads = texts[0].k.shape[1]
        needed = [-(-text.length // block_size) for text in texts]
        num_blocks = sum(needed) + 3
        dtype = cache_dtype or texts[0].dtype
        shape = (num_blocks, block_size, kv_heads, HEAD_DIM)
        tensors = [torch.full(shape, float("nan")).to(dtype) for _ in range(2)]
        scales = [torch.full(shape[:3], float("nan")) for _ in range(2)] if dtype == FP8 else []
        self.cache = LayerCache(*tensors, *scales)
        blocks = np.random.default_rng(seed).permutation(num_blocks)
        # Entries beyond a table's end are no blocks at all: they must not be read.
        self.tables = np.full((len(texts), max(needed)), 2**30, dtype=np.int32)
        for i, count in enumerate(needed):
            self.tables[i, :count], blocks = blocks[:count], blocks[count:]
        for i, text in enumerate(texts):
            layout = BatchLayout.build([0], [text.length], self.tables[[i]], block_size)
            store(self.cache, text.k, text.v, layout.cells_T)

    def attend(self, chunks: list[tuple[int, int, int]], numerics: Numerics = INVARIANT) -> list[torch.Tensor]:
        """Outputs of one step of chunks (text, start, length)."""
        which, starts, lengths = zip(*chunks, strict=True)
        layout = BatchLayout.build(starts, lengths, self.tables[list(which)], self.block_size)
        q = torch.cat([self.texts[i].q[start : start + length] for i, start, length in chunks])
        out = attention(q, self.cache, layout, scale=HEAD_DIM**-0.5, numerics=numerics)
        return list(out.split(lengths))


TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("numerics", [INVARIANT, FAST], ids=lambda n: n.mode)
def test_matches_dense_fp64(dtype: torch.dtype, numerics: Numerics) -> None:
    texts = [Text(i, length, 4, 2, dtype) for i, length in enumerate((1, 64, 65, 300, 700))]
    paged = Paged(texts, 16)
    exact = [text.exact() for text in texts]
    # As chunks, and (the last rows) as decodes beside a chunk.
    whole = paged.attend([(i, 0, text.length) for i, text in enumerate(texts)], numerics)
    last = paged.attend([(i, text.length - 1, 1) for i, text in enumerate(texts)] + [(4, 100, 77)], numerics)
    for i in range(len(texts)):
        torch.testing.assert_close(whole[i].double(), exact[i], atol=TOLERANCE[dtype], rtol=0)
        torch.testing.assert_close(last[i].double(), exact[i][-1:], atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(last[-1].double(), exact[4][100:177], atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (8, 1), (1, 1)])
def test_a_rows_bits_are_its_own(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    lengths = (1, 3, 63, 64, 65, 130, 255, 256, 257, 520, 40, 41)
    texts = [Text(i, length, heads, kv_heads, dtype) for i, length in enumerate(lengths)]
    alone = [Paged([text], 16).attend([(0, 0, text.length)])[0] for text in texts]
    rng = np.random.default_rng(heads)
    for trial, block_size in enumerate((1, 4, 7, 16, 64, 100)):
        paged = Paged(texts, block_size, seed=trial)
        chunks = []
        for i in rng.permutation(len(texts)):
            start = int(rng.integers(0, texts[i].length))
            # Half of the rows are decodes, the rest are chunks of every length.
            length = 1 if rng.random() < 0.5 else int(rng.integers(1, texts[i].length - start + 1))
            chunks.append((int(i), start, length))
        for (i, start, length), out in zip(chunks, paged.attend(chunks), strict=True):
            assert torch.equal(out, alone[i][start : start + length]), (block_size, lengths[i], start, length)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_decoding_row_by_row_equals_one_chunk(dtype: torch.dtype) -> None:
    text = Text(5, 530, 4, 2, dtype)
    paged = Paged([text], 16)
    whole = paged.attend([(0, 0, text.length)])[0]
    # 530 decodes of one text in one step: also more rows than share their library calls.
    together = torch.cat(paged.attend([(0, position, 1) for position in range(text.length)]))
    assert torch.equal(together, whole)
    for position in (0, 1, 62, 63, 64, 255, 256, 257, 319, 320, 511, 512, 529):
        assert torch.equal(paged.attend([(0, position, 1)])[0], whole[position : position + 1]), position


def test_equality_would_catch_another_tree() -> None:
    """The bitwise tests have teeth: another tile or split gives other bits for the same rows."""
    text = Text(6, 520, 4, 2, torch.float32)
    paged = Paged([text], 16)
    whole = paged.attend([(0, 0, text.length)])[0]
    for numerics in (Numerics(kv_tile=32), Numerics(kv_split=128)):
        assert not torch.equal(paged.attend([(0, 0, text.length)], numerics)[0], whole)


def test_a_later_chunk_sees_only_the_past() -> None:
    text = Text(7, 200, 4, 2, torch.float32)
    paged = Paged([text], 16)
    before = paged.attend([(0, 90, 20)])[0]
    table = torch.from_numpy(paged.tables[0])
    slots = (table[:, None] * 16 + torch.arange(16)).flatten()[110:200].long()
    noise = torch.randn(90, 2, HEAD_DIM)
    store(paged.cache, noise, noise, slots)
    assert torch.equal(paged.attend([(0, 90, 20)])[0], before)


@pytest.mark.parametrize("numerics", [INVARIANT, FAST], ids=lambda n: n.mode)
@pytest.mark.parametrize("length", [1, 40, 200])
def test_neighbours_that_are_nan_do_not_leak(numerics: Numerics, length: int) -> None:
    good, bad = Text(8, 200, 4, 2, torch.float32), Text(9, 220, 4, 2, torch.float32)
    bad.k[:], bad.v[:], bad.q[:] = float("nan"), float("nan"), float("nan")
    paged = Paged([good, bad], 16)
    chunk = (0, 200 - length, length)
    out = paged.attend([(1, 219, 1), chunk, (1, 0, 30)], numerics)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
    if numerics.is_invariant:
        assert torch.equal(out[1], paged.attend([chunk])[0])


@pytest.mark.parametrize(("cache_dtype", "bound"), [(torch.bfloat16, 2e-2), (FP8, 0.2)])
@pytest.mark.parametrize("numerics", [INVARIANT, FAST], ids=lambda n: n.mode)
def test_narrow_caches(cache_dtype: torch.dtype, bound: float, numerics: Numerics) -> None:
    texts = [Text(10 + i, length, 4, 2, torch.float32) for i, length in enumerate((30, 300))]
    paged = Paged(texts, 16, cache_dtype=cache_dtype)
    whole = paged.attend([(0, 0, 30), (1, 0, 300)], numerics)
    for text, out in zip(texts, whole, strict=True):
        error = (out.double() - text.exact()).abs().max()
        assert bound / 100 < error < bound
    if numerics.is_invariant:
        assert torch.equal(paged.attend([(1, 299, 1), (0, 4, 5)])[0], whole[1][-1:])


def test_layout_matches_a_loop() -> None:
    tables = np.array([[5, 2, 9, 0], [1, 3, 0, 0], [7, 8, 6, 4]], dtype=np.int32)
    starts, lengths = [3, 0, 9], [1, 5, 4]
    for given in (tables, torch.from_numpy(tables), tables.tolist()):
        layout = BatchLayout.build(starts, lengths, given, 4)
        positions, slots, row = [], [], 0
        for b in range(3):
            assert layout.offsets[b] == row
            for position in range(starts[b], starts[b] + lengths[b]):
                positions.append(position)
                slots.append(tables[b, position // 4] * 4 + position % 4)
                row += 1
            assert layout.last_rows_B[b] == row - 1
        assert layout.positions_T.tolist() == positions
        assert layout.cells_T.tolist() == slots
        assert layout.num_rows == row
        assert layout.positions_T.dtype == layout.cells_T.dtype == torch.int64
        assert layout.block_tables_BN.dtype == torch.int32


def test_layout_refuses_a_short_table() -> None:
    with pytest.raises(AssertionError, match="too short"):
        BatchLayout.build([8], [1], [[0, 1]], 4)


@pytest.mark.parametrize("numerics", [INVARIANT, FAST], ids=lambda n: n.mode)
def test_a_table_of_more_rows_gives_the_same(numerics: Numerics) -> None:
    """A sequence's blocks may be any row of the tables; the others are never looked up."""
    texts = [Text(20 + i, length, 4, 2, torch.float32) for i, length in enumerate((90, 300, 33, 70))]
    paged = Paged(texts, 16)
    chunks = [(0, 80, 10), (1, 299, 1), (2, 0, 33), (3, 69, 1)]
    expected = torch.cat(paged.attend(chunks, numerics))
    rows = [5, 0, 7, 2]
    tables = np.full((8, paged.tables.shape[1]), 2**30, dtype=np.int32)
    tables[rows] = paged.tables
    slots = torch.from_numpy(tables)
    which, starts, lengths = zip(*chunks, strict=True)
    layout = BatchLayout.build(starts, lengths, slots, 16, table_rows=rows)
    assert layout.block_tables_BN is slots
    own = BatchLayout.build(starts, lengths, paged.tables[list(which)], 16)
    assert torch.equal(layout.cells_T, own.cells_T)
    q = torch.cat([texts[i].q[start : start + length] for i, start, length in chunks])
    out = attention(q, paged.cache, layout, scale=HEAD_DIM**-0.5, numerics=numerics)
    assert torch.equal(out, expected)


def test_all_that_goes_to_the_device_goes_through_upload() -> None:
    uploaded: list[torch.Tensor] = []

    def upload(array: np.ndarray) -> torch.Tensor:
        uploaded.append(torch.from_numpy(array).clone())
        return uploaded[-1]

    layout = BatchLayout.build(
        [3, 0, 9, 2], [1, 5, 1, 3], [[5, 2, 9], [1, 3, 0], [7, 8, 6], [4, 10, 11]], 4, upload=upload
    )
    assert len(uploaded) == 2
    work, tiles = layout.decode_work(4, 1, 100), layout.chunk_tiles(2)
    assert work is not None
    assert tiles is not None
    assert len(uploaded) == 4
    inside = {tensor.untyped_storage().data_ptr() for tensor in uploaded}
    given = (layout.positions_T, layout.last_rows_B, layout.block_tables_BN, work.items_I4, work.rows_N3)
    for tensor in (*given, work.num_items_1, tiles.tiles_N4, tiles.num_tiles_1):
        assert tensor.untyped_storage().data_ptr() in inside
    assert layout.decode_work(4, 1, 100) is work
    assert layout.chunk_tiles(2) is tiles
    assert (int(work.num_items_1), work.most_splits, int(tiles.num_tiles_1)) == (len(work.items_I4), 3, 5)
    assert work.items_I4.storage_offset() % 4 == tiles.tiles_N4.storage_offset() % 4 == 0
    cache = LayerCache(*(torch.randn(12, 4, 1, HEAD_DIM) for _ in range(2)))
    attention(torch.randn(10, 2, HEAD_DIM), cache, layout, scale=1.0, numerics=INVARIANT)
    # The rows alone in their sequence, and the tiles of their one split.
    assert len(uploaded) == 6


def test_work_lists_match_a_loop() -> None:
    rng = np.random.default_rng(0)
    seen = set()
    in_last = 0
    for trial in range(300):
        num = int(rng.integers(1, 13))
        # Every other time only decodes, about as long as each other.
        lengths = rng.choice([1, 1, 2, 7, 16, 17, 40] if trial % 2 else [1], num)
        first, end = [(0, 300), (0, 700), (0, 3000)][rng.integers(3)] if trial % 2 else (800, 1000)
        starts = rng.choice(np.arange(first, end), num, replace=False)
        offsets = np.cumsum(lengths) - lengths
        table_rows = rng.permutation(20)[:num]
        kv_heads, programs = int(rng.integers(1, 9)), int(rng.integers(1, 60))
        sorted_keys = sorted((int(starts[b]) + 1 for b in range(num) if lengths[b] == 1), reverse=True)
        long = [keys for keys in sorted_keys if keys > 256 and keys * programs > sum(sorted_keys) * kv_heads]
        short = sorted_keys[len(long) :]
        waves = len(short) * kv_heads // programs
        last = short[waves * programs // kv_heads :] if waves < 4 else []
        works, tiles = [], []
        for b in range(num):
            keys, offset, table_row = int(starts[b]) + 1, int(offsets[b]), int(table_rows[b])
            if lengths[b] == 1:
                is_whole = keys not in long
                if keys in last and keys > 256 and keys * programs > 2 * (sum(long) + sum(last)) * kv_heads:
                    is_whole = False
                    in_last += 1
                works.append((keys if is_whole else 256, is_whole, table_row, offset, keys))
            else:
                for skipped in range(0, int(lengths[b]), 16):
                    size = min(16, int(lengths[b]) - skipped)
                    tiles.append((table_row, offset + skipped, size, keys - 1 + skipped))
        items, rows = [], []
        works.sort(key=lambda work: (-work[0], -work[4]))
        for _, is_whole, table_row, offset, keys in works:
            numbers = [WHOLE] if is_whole else list(range(-(-keys // 256)))
            if not is_whole:
                rows.append((offset, len(items), len(numbers)))
            items += [(table_row, offset, number, keys) for number in numbers]
        tiles.sort(key=lambda tile: -tile[3])
        items_I4, rows_N3, most_splits = decode_arrays(
            starts, lengths, offsets, table_rows, split=256, num_kv_heads=kv_heads, num_programs=programs
        )
        tiles_N4 = tile_arrays(starts, lengths, offsets, table_rows, num_positions=16)
        assert [tuple(x) for x in items_I4.tolist()] == items, trial
        assert [tuple(x) for x in rows_N3.tolist()] == rows, trial
        assert most_splits == max((count for _, _, count in rows), default=0)
        assert len(rows) <= most_split_rows(kv_heads, programs)
        assert [tuple(x) for x in tiles_N4.tolist()] == tiles, trial
        assert items_I4.dtype == rows_N3.dtype == tiles_N4.dtype == np.int32
        assert items_I4.shape[1:] == tiles_N4.shape[1:] == (4,)
        seen.add((any(work[1] and work[4] > 256 for work in works), len(rows) > 0))
    assert len(seen) == 4, "long rows whole, rows split, both and neither"
    assert in_last > 5


@pytest.mark.parametrize(("kv_heads", "programs"), [(8, 264), (8, 132), (1, 264), (3, 100), (4, 2)])
def test_equal_rows_are_whole_from_some_number_on(kv_heads: int, programs: int) -> None:
    most = most_split_rows(kv_heads, programs)
    for num in (1, max(1, most), 2 * programs // kv_heads):
        assert split_rows(num, kv_heads, programs) == (num if num <= most else 0), num


def split_rows(num: int, kv_heads: int, programs: int) -> int:
    """How many of ``num`` rows of 1,024 keys are split, into four each."""
    column = np.arange(num)
    _, rows_N3, most_splits = decode_arrays(
        column * 0 + 1023, column * 0 + 1, column, column, split=256, num_kv_heads=kv_heads, num_programs=programs
    )
    assert most_splits == (4 if len(rows_N3) else 0)
    return len(rows_N3)


def test_the_last_wave_is_split_where_it_is_small_and_waves_are_few() -> None:
    """40 rows of 8 kv heads left most of 264 programs without work while the last 7 rows were read: 52 us, not 46."""
    found = {num: split_rows(num, 8, 264) for num in (33, 34, 40, 49, 50, 64, 66, 67, 82, 83, 99, 115, 116, 132, 133)}
    expected = {34: 1, 40: 7, 49: 16, 67: 1, 82: 16, 115: 16}
    assert found == {num: expected.get(num, 0) for num in found}


def test_a_planned_layout_has_nothing_on_the_host() -> None:
    cells = torch.zeros(2, dtype=torch.int64)
    layout = BatchLayout.planned(cells, cells, cells, torch.zeros(2, 1, dtype=torch.int32), 4, None, None)
    assert layout.num_rows == 2
    assert layout.decode_work(256, 1, 1) is layout.chunk_tiles(16) is None
    for name in ("starts", "lengths", "offsets", "table_rows"):
        with pytest.raises(AssertionError, match="no numbers on the host"):
            getattr(layout, name)
    with pytest.raises(AssertionError, match="brings nothing"):
        layout.upload(np.zeros(1))


def test_a_reason_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for reason in ("the sky is green", "the sky is green", "the sky is red"):
            attention_module._warn_once(reason)
    assert [record.args for record in caplog.records] == [("the sky is green",), ("the sky is red",)]
