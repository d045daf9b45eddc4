"""The card's attention: its programs in Triton's interpreter, and on a card to the bit the same however rows come."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from oracles import dense_attention
from paged.kernels.attention import BatchLayout, attention
from paged.kernels.kv_cache import LayerCache, store
from paged.kernels.numerics import Numerics

INVARIANT = Numerics()
ON_CARD = torch.cuda.is_available()
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
        which, starts, lengths = zip(*chunks, strict=True)
        layout = BatchLayout.build(starts, lengths, self.tables[list(which)], self.block_size, self.device)
        q = torch.cat([self.q[i][start : start + length] for i, start, length in chunks]).to(self.device)
        if self.device == "cpu":
            from paged.kernels.attention_triton import attention_triton

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


@pytest.mark.gpu
@pytest.mark.skipif(not ON_CARD, reason="needs a card")
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
