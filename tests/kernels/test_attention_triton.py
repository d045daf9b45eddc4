"""The card's attention: its programs in Triton's interpreter, and on a card to the bit the same however rows come."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from card_tools import ON_CARD, needs_card, needs_hopper
from oracles import dense_attention
from paged.kernels import attention_hopper, attention_hopper_decode
from paged.kernels import attention_triton as attention_triton_module
from paged.kernels.attention import attention
from paged.kernels.attention_hopper import span_of
from paged.kernels.attention_triton import attention_triton, positions_per_tile, unsupported
from paged.kernels.batch_layout import WHOLE, BatchLayout, ChunkTiles, DecodeWork, decode_arrays, tile_arrays
from paged.kernels.kv_cache import FP8, LayerCache, store
from paged.kernels.numerics import Numerics

INVARIANT = Numerics()
INTERPRETED = not ON_CARD


class Step:
    """Texts in a paged cache whose other blocks are full of NaN, and chunks of them attended to in one step."""

    def __init__(
        self, lengths: list[int], heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype,
        device: str, seed: int, cache_dtype: torch.dtype | None = None, tables_seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.block_size, self.device, self.scale = block_size, device, head_dim**-0.5

        # Values of both signs and of very different sizes, so that another order of the sums shows in the bits.
        def draw(length: int, heads: int, spread: float) -> torch.Tensor:
            sizes = torch.exp2(spread * torch.randn(length, heads, 1, generator=generator))
            return (sizes * torch.randn(length, heads, head_dim, generator=generator)).to(dtype)

        self.q = [draw(length, heads, 0.7) for length in lengths]
        self.k = [draw(length, kv_heads, 0.5) for length in lengths]
        self.v = [draw(length, kv_heads, 3.0) for length in lengths]
        needed = [-(-length // block_size) for length in lengths]
        num_blocks = sum(needed) + 5
        shape = (num_blocks, block_size, kv_heads, head_dim)
        self.cache = LayerCache(
            *(torch.full(shape, float("nan"), dtype=cache_dtype or dtype, device=device) for _ in range(2))
        )
        blocks = np.random.default_rng(tables_seed).permutation(num_blocks)
        self.tables = np.full((len(lengths), max(needed) + 1), 2**30, dtype=np.int32)
        for i, count in enumerate(needed):
            self.tables[i, :count], blocks = blocks[:count], blocks[count:]
        layout = BatchLayout.build([0] * len(lengths), lengths, self.tables, block_size, device)
        store(self.cache, torch.cat(self.k).to(device), torch.cat(self.v).to(device), layout.cells_T)

    def attend(self, chunks: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Outputs of one step of chunks (text, start, length)."""
        which, starts, lengths = zip(*chunks, strict=True)
        layout = BatchLayout.build(starts, lengths, self.tables[list(which)], self.block_size, self.device)
        q = torch.cat([self.q[i][start : start + length] for i, start, length in chunks]).to(self.device)
        if self.device == "cpu":
            out = attention_triton(q, self.cache, layout, scale=self.scale, numerics=INVARIANT)
        else:
            out = attention(q, self.cache, layout, scale=self.scale, numerics=INVARIANT)
        return list(out.cpu().split(lengths))

    def exact(self, i: int) -> torch.Tensor:
        return dense_attention(self.q[i], self.k[i], self.v[i], self.scale)


@pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"), [(4, 2, 16, 16), (3, 1, 32, 7), (2, 2, 64, 32)]
)
def test_programs_match_dense_fp64(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    """Indexing, masks, splits and folds; NaN lies in every place that must not be read."""
    step = Step([300, 65, 1], heads, kv_heads, head_dim, block_size, torch.float16, "cpu", seed=heads)
    chunks = [(0, 0, 300), (0, 299, 1), (1, 3, 62), (2, 0, 1), (1, 0, 1), (0, 255, 2), (0, 256, 1)]
    for (i, start, length), out in zip(chunks, step.attend(chunks), strict=True):
        exact = step.exact(i)[start : start + length]
        assert ((out.double() - exact).abs() <= 4e-3 * exact.abs().max()).all(), (i, start, length)


@pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")
def test_a_wider_cache_gives_the_same() -> None:
    """A model's keys fit an fp32 cache exactly, so that the programs must give the same numbers."""
    narrow = Step([70], 2, 1, 16, 16, torch.float16, "cpu", seed=1)
    wide = Step([70], 2, 1, 16, 16, torch.float16, "cpu", seed=1, cache_dtype=torch.float32)
    chunks = [(0, 0, 70), (0, 69, 1)]
    for ours, theirs in zip(narrow.attend(chunks), wide.attend(chunks), strict=True):
        assert torch.equal(ours, theirs)


def programs_for(most_keys: int, chunks: list[tuple[int, int, int]], kv_heads: int) -> int:
    """How many programs at once make decode rows of up to ``most_keys`` keys whole, and the longer ones split."""
    keys = sum(start + 1 for _, start, length in chunks if length == 1)
    return max(1, keys * kv_heads // most_keys)


# Decode rows of up to so many keys are whole, where a row has up to 3,000: none but those of one split, some, all.
MOST_KEYS = (256, 700, 10**9)


@pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), [(4, 2, 16, 16), (3, 1, 32, 7)])
def test_whole_rows_and_splits_give_the_same(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    """A program that folds a row's splits in registers does what the kernel does that folds what programs wrote."""
    step = Step([2600, 700, 65, 257, 1], heads, kv_heads, head_dim, block_size, torch.float16, "cpu", seed=heads)
    ends = (2600, 2561, 2049, 1024, 701, 700, 513, 257, 256, 255, 64, 65, 1)
    chunks = [(next(i for i in (4, 2, 3, 1, 0) if end <= len(step.q[i])), end - 1, 1) for end in ends]
    items, outs = [], []
    for most_keys in MOST_KEYS:
        num_programs = programs_for(most_keys, chunks, kv_heads)
        monkeypatch.setattr(attention_triton_module, "programs_at_once", lambda *_, found=num_programs: found)
        outs.append(step.attend(chunks))
        column = np.arange(len(chunks))
        arrays = decode_arrays(
            np.array(ends) - 1, column * 0 + 1, column, column, split=INVARIANT.kv_split,
            num_kv_heads=kv_heads, num_programs=num_programs,
        )  # fmt: skip
        items.append(arrays[0][:, 2] == WHOLE)
    num_short = sum(end <= INVARIANT.kv_split for end in ends)
    num_whole = [int(whole.sum()) for whole in items]
    assert num_whole[0] == num_short < num_whole[1] < num_whole[2] == len(items[2]) == len(ends)
    for (i, start, _), split, mixed, whole in zip(chunks, *outs, strict=True):
        exact = step.exact(i)[start : start + 1]
        assert ((split.double() - exact).abs() <= 4e-3 * exact.abs().max()).all(), (i, start)
        assert torch.equal(mixed, split), (i, start)
        assert torch.equal(whole, split), (i, start)


class Lists:
    """The work of steps of at most 8 rows in device memory that is rewritten for each; what does not count is junk."""

    def __init__(self, step: Step, heads: int, kv_heads: int, dtype: torch.dtype, most_splits: int = 40) -> None:
        self.kv_heads, self.most_splits = kv_heads, most_splits
        self.step, self.per_tile = step, positions_per_tile(heads, step.cache, dtype, INVARIANT)
        sizes = {"positions": 8, "cells": 8, "last": 8, "items": (40, 4), "rows": (8, 3), "num_items": 1}
        sizes |= {"tiles": (20, 4), "num_tiles": 1, "tables": step.tables.shape}
        wide = ("positions", "cells", "last")
        self.tensors = {
            name: torch.zeros(size, dtype=torch.int64 if name in wide else torch.int32, device=step.device)
            for name, size in sizes.items()
        }
        self.q = torch.zeros(8, heads, step.cache.head_dim, dtype=dtype, device=step.device)
        t = self.tensors
        self.layout = BatchLayout.planned(
            t["positions"],
            t["cells"],
            t["last"],
            t["tables"],
            step.block_size,
            DecodeWork(t["items"], t["rows"], t["num_items"], most_splits),
            ChunkTiles(t["tiles"], t["num_tiles"]),
        )

    def write(self, chunks: list[tuple[int, int, int]], most_keys: int) -> None:
        """Put a step of ``chunks`` into the lists."""
        table_rows, starts, lengths = (np.array(column) for column in zip(*chunks, strict=True))
        offsets = np.cumsum(lengths) - lengths
        numbers = (starts, lengths, offsets, table_rows)
        num_programs = programs_for(most_keys, chunks, self.kv_heads)
        items, rows, most_splits = decode_arrays(
            *numbers, split=INVARIANT.kv_split, num_kv_heads=self.kv_heads, num_programs=num_programs
        )
        assert most_splits <= self.most_splits
        tiles = tile_arrays(*numbers, num_positions=self.per_tile)
        rows = np.concatenate((rows, np.full((8 - len(rows), 3), -1)))
        for name, array in (("items", items), ("rows", rows), ("tiles", tiles)):
            tensor = self.tensors[name]
            assert len(array) <= len(tensor), name
            tensor.fill_(2**29)
            tensor[: len(array)] = torch.from_numpy(array.astype(np.int32)).to(tensor.device)
        self.tensors["num_items"].fill_(len(items))
        self.tensors["num_tiles"].fill_(len(tiles))
        self.tensors["tables"].copy_(torch.from_numpy(self.step.tables))
        self.q.fill_(torch.nan)
        self.q[: int(lengths.sum())] = torch.cat(
            [self.step.q[i][start : start + length] for i, start, length in chunks]
        ).to(self.q.device)

    def attend(self) -> torch.Tensor:
        run = attention_triton if self.step.device == "cpu" else attention
        return run(self.q, self.step.cache, self.layout, scale=self.step.scale, numerics=INVARIANT)


STEPS = [
    [(0, 299, 1), (1, 64, 1), (3, 799, 1), (2, 0, 1), (0, 10, 1), (3, 255, 1), (3, 256, 1), (3, 700, 1)],
    [(3, 799, 1)],
    [(0, 100, 3), (1, 64, 1), (3, 500, 2)],
    [(3, 790, 8)],
    [(1, 3, 1), (2, 0, 1), (0, 255, 2), (1, 0, 3)],
]


def check_step(lists: Lists, chunks: list[tuple[int, int, int]], out: torch.Tensor) -> None:
    expected = torch.cat(lists.step.attend(chunks))
    assert torch.equal(out.cpu()[: len(expected)], expected)


@pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")
def test_work_is_read_from_the_device() -> None:
    """One set of lists of fixed length serves every step: the same numbers as lists of the step's own."""
    step = Step([300, 65, 1, 800], 4, 2, 16, 16, torch.float16, "cpu", seed=0)
    lists = Lists(step, 4, 2, torch.float16)
    most = 0
    for most_keys in MOST_KEYS:
        for chunks in STEPS:
            lists.write(chunks, most_keys)
            most = max(most, int(lists.tensors["num_items"]) * 2)
            check_step(lists, chunks, lists.attend())
    # Programs must have had to take a second and a third item.
    assert most > 3 * attention_triton_module._decode_programs(torch.device("cpu"))


@pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")
def test_where_all_rows_are_whole_nothing_is_folded_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step([300, 65, 1, 800], 4, 2, 16, 16, torch.float16, "cpu", seed=0)
    lists = Lists(step, 4, 2, torch.float16, most_splits=0)
    expected = [torch.cat(step.attend(chunks)) for chunks in STEPS]
    monkeypatch.setattr(attention_triton_module, "_fold_kernel", None)
    for chunks, out in zip(STEPS, expected, strict=True):
        lists.write(chunks, 10**9)
        assert torch.equal(lists.attend()[: len(out)], out)


@pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")
@pytest.mark.parametrize("programs", [1, 7, 1000])
def test_any_number_of_programs_gives_the_same(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    step = Step([300, 65, 800], 4, 2, 16, 16, torch.float16, "cpu", seed=0)
    chunks = [(0, 299, 1), (1, 30, 1), (2, 799, 1)]
    expected = step.attend(chunks)
    monkeypatch.setattr(attention_triton_module, "_decode_programs", lambda device: programs)
    for ours, theirs in zip(step.attend(chunks), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_reasons_to_refuse() -> None:
    def reason(
        dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int = 64, shared: int = 2, **numbers: int
    ) -> str | None:
        tensors = [torch.zeros(1, 16, 1, head_dim, dtype=cache_dtype) for _ in range(2)]
        scales = [torch.zeros(1, 16, 1) for _ in range(2)] if cache_dtype == FP8 else []
        q = torch.zeros(1, shared, head_dim, dtype=dtype)
        return unsupported(q, LayerCache(*tensors, *scales), Numerics(**numbers))

    assert reason(torch.bfloat16, torch.bfloat16) is None
    assert reason(torch.float16, torch.float32, 256, 64) is None
    assert "the model is in torch.float32" in str(reason(torch.float32, torch.float32))
    assert "the cache is in torch.float8" in str(reason(torch.bfloat16, FP8))
    assert "the cache is in torch.float16" in str(reason(torch.bfloat16, torch.float16))
    assert "head size is 80" in str(reason(torch.bfloat16, torch.bfloat16, 80))
    assert "65 query heads" in str(reason(torch.bfloat16, torch.bfloat16, 64, 65))
    assert "kv_tile is 32" in str(reason(torch.bfloat16, torch.bfloat16, kv_tile=32))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "expected"), [(4, 2, 16, 64), (6, 2, 256, 16), (8, 8, 64, 128)]
)
def test_positions_per_tile(heads: int, kv_heads: int, head_dim: int, expected: int) -> None:
    """A program's rows are positions times the next power of two of the heads that share a kv head."""
    cache = LayerCache(*(torch.zeros(1, 16, kv_heads, head_dim, dtype=torch.float16) for _ in range(2)))
    assert positions_per_tile(heads, cache, torch.float16, INVARIANT) == expected


@pytest.mark.parametrize(
    ("block_size", "expected"), [(1, 0), (4, 0), (7, 0), (12, 0), (8, 8), (24, 8), (16, 16), (48, 16), (64, 16)]
)
def test_the_copy_engine_fetches_keys_of_one_block(block_size: int, expected: int) -> None:
    """A span may not reach into the next block, nor be shorter than the pattern of shared memory."""
    assert span_of(block_size) == expected


def test_the_copy_engine_is_told_once_where_a_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step asks for it in every layer; what one cache's launch is told must neither serve nor keep another."""
    told = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda q, key, value, engine_keys, engine_values, *_, **__: told.append((engine_keys, engine_values))

    monkeypatch.setattr(attention_hopper, "_kernel", Kernel())
    caches = [LayerCache(*(torch.zeros(9, 16, 2, 128, dtype=torch.float16) for _ in range(2))) for _ in range(2)]
    layout = BatchLayout.build([0], [130], np.arange(9, dtype=np.int32)[None], 16, "cpu")
    tiles = layout.chunk_tiles(32)
    assert tiles is not None
    q = torch.zeros(130, 8, 128, dtype=torch.float16)
    for cache in (*caches, *caches):
        attention_hopper.chunk_attention_hopper(q, cache, layout, tiles, q, factor=1.0, numerics=INVARIANT)
    for i, cache in enumerate(caches):
        for engine, again, tensor in zip(told[i], told[i + 2], (cache.key, cache.value), strict=True):
            assert engine is again
            assert engine.base.data_ptr() == tensor.data_ptr()
            assert list(engine.shape) == [9 * 16, 2 * 128]
            assert list(engine.block_shape) == [16, 64]
    gone = [weakref.ref(tensor) for tensor in (caches[0].key, caches[0].value)]
    del cache, tensor, engine, again
    told.clear()
    caches.clear()
    assert [tensor() for tensor in gone] == [None, None]


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (4, 2, 64), (16, 8, 32)])
def test_a_graph_replays_steps_that_it_did_not_see(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    step = Step([300, 65, 1, 800], heads, kv_heads, head_dim, 16, dtype, "cuda", seed=0)
    for most_splits, all_most_keys in ((40, MOST_KEYS), (0, MOST_KEYS[-1:])):
        lists = Lists(step, heads, kv_heads, dtype, most_splits)
        lists.write(STEPS[0], all_most_keys[0])
        lists.attend()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = lists.attend()
        for most_keys in all_most_keys * 3:
            for chunks in STEPS:
                lists.write(chunks, most_keys)
                out.fill_(torch.nan)
                graph.replay()
                check_step(lists, chunks, out)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(32, 8, 128, 16), (2, 2, 128, 7), (16, 2, 64, 256), (6, 2, 64, 1), (32, 2, 128, 64)],
)
@pytest.mark.parametrize(("stages", "programs_per_sm"), [(3, 2), (6, 1), (2, 1)])
def test_decode_on_hopper_has_the_bits_of_the_triton_kernel(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int,
    stages: int, programs_per_sm: int,
) -> None:  # fmt: skip
    """Also whole rows, where programs take several items each, and call after call: the claims are counted anew."""
    step = Step([1, 63, 64, 65, 255, 256, 257, 700, 3000], heads, kv_heads, head_dim, block_size, dtype, "cuda", seed=2)
    chunks = [(i, len(step.q[i]) - 1, 1) for i in range(9)] + [(8, position, 1) for position in range(2000, 3000, 16)]
    split_all = programs_for(MOST_KEYS[0], chunks, kv_heads)
    with monkeypatch.context() as patch:
        patch.setattr(attention_triton_module, "suits_hopper_decode", lambda *_: False)
        patch.setattr(attention_triton_module, "programs_at_once", lambda *_: split_all)
        expected = torch.cat(step.attend(chunks))
    assert expected.isfinite().all()
    monkeypatch.setattr(attention_hopper_decode, "STAGES", stages)
    monkeypatch.setattr(attention_hopper_decode, "PROGRAMS_PER_SM", programs_per_sm)
    places = sum(-(-(start + 1) // INVARIANT.kv_split) for _, start, _ in chunks) * kv_heads, len(chunks) * kv_heads
    assert places[0] > 3 * 2 * 132
    assert places[1] > 132
    for most_keys in (MOST_KEYS[0], 2500, MOST_KEYS[-1]):
        num_programs = programs_for(most_keys, chunks, kv_heads)
        monkeypatch.setattr(attention_triton_module, "programs_at_once", lambda *_, found=num_programs: found)
        for _ in range(3):
            assert torch.equal(torch.cat(step.attend(chunks)), expected), most_keys
            assert int(attention_hopper_decode.claimed(step.cache.key.device)) == 0


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        (32, 8, 128, 16, torch.bfloat16),
        (32, 8, 128, 7, torch.float16),
        (6, 2, 128, 8, torch.float16),
        (16, 2, 64, 64, torch.bfloat16),
        (2, 2, 64, 24, torch.bfloat16),
        (8, 1, 64, 1, torch.float16),
    ],
)
def test_chunks_on_hopper_have_the_bits_of_the_triton_kernel(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Ends inside of blocks, tiles and splits, over a cache that is full of NaN where nothing is stored."""
    step = Step(
        [2, 9, 63, 64, 65, 72, 128, 129, 255, 256, 257, 700, 1300], heads, kv_heads, head_dim, block_size, dtype,
        "cuda", seed=4,
    )  # fmt: skip
    chunks = [(i, start, len(step.q[i]) - start) for i in range(13) for start in (0, len(step.q[i]) // 2)]
    chunks += [(12, 640, 64), (12, 100, 100), (11, 511, 2), (11, 255, 9)]
    chunks = [chunk for chunk in chunks if chunk[2] > 1]
    ours = torch.cat(step.attend(chunks))
    assert ours.isfinite().all()
    monkeypatch.setattr(attention_triton_module, "suits_hopper", lambda *_: False)
    assert torch.equal(ours, torch.cat(step.attend(chunks)))


@pytest.mark.gpu
@needs_card
def test_the_card_tells_why_its_kernels_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    step = Step([70], 2, 1, 16, 16, torch.float32, "cuda", seed=1)
    for _ in range(2):
        step.attend([(0, 0, 70)])
    assert len(caplog.records) <= 1
    assert all("the model is in torch.float32" in record.getMessage() for record in caplog.records)


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (4, 4, 64), (4, 2, 64), (8, 1, 128), (16, 8, 32)]
)
def test_bits_are_a_rows_own(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    """Whole prompts, chunks, decodes, neighbours, blocks and their places: 0 differing elements."""
    lengths = [1, 63, 64, 65, 255, 256, 257, 700, 1300]
    rng = np.random.default_rng(heads)
    expected = None
    for trial, block_size in enumerate((16, 32, 16, 7)):
        step = Step(lengths, heads, kv_heads, head_dim, block_size, dtype, "cuda", seed=3, tables_seed=trial)
        if expected is None:
            expected = [step.attend([(i, 0, length)])[0] for i, length in enumerate(lengths)]
            for i, out in enumerate(expected):
                exact = step.exact(i)
                assert ((out.double() - exact).abs() <= 2e-2 * exact.abs().max()).all()
        chunks = []
        for i in rng.permutation(len(lengths)):
            start = int(rng.integers(0, lengths[i]))
            chunks.append((int(i), start, 1 if rng.random() < 0.5 else int(rng.integers(1, lengths[i] - start + 1))))
        for (i, start, length), out in zip(chunks, step.attend(chunks), strict=True):
            assert torch.equal(out, expected[i][start : start + length]), (block_size, lengths[i], start, length)
    decoded = torch.cat(step.attend([(7, position, 1) for position in range(700)]))
    assert torch.equal(decoded, expected[7])
