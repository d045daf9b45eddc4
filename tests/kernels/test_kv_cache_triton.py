"""The card's store: every row in its cell, rounded once, and nothing else touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from card_tools import DEVICE, needs_card
from paged.kernels import kv_cache_triton
from paged.kernels.kv_cache_triton import store_triton


@pytest.mark.parametrize("model_dtype", [torch.float16, torch.float32, torch.bfloat16])
# The interpreter cuts fp32 to bf16 instead of rounding it.
@pytest.mark.parametrize(
    "cache_dtype",
    [torch.float16, torch.float32, pytest.param(torch.bfloat16, marks=[pytest.mark.gpu, needs_card])],
)
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 64), (3, 8)])
def test_rows_come_to_their_cells(
    model_dtype: torch.dtype, cache_dtype: torch.dtype, heads: int, head_dim: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    before = [torch.randn(6, 4, heads, head_dim, generator=generator).to(cache_dtype) for _ in range(2)]
    caches = [x.to(DEVICE, copy=True) for x in before]
    # Keys and values as they come out of one product: rows lie apart.
    width = heads * head_dim
    both = torch.randn(9, 2 * width, generator=generator).to(model_dtype)
    key, value = (x.reshape(9, heads, head_dim) for x in both.to(DEVICE).split(width, dim=1))
    cells = torch.tensor([23, 0, 5, 7, 22, 11, 12, 1, 2])
    store_triton(*caches, key, value, cells.to(DEVICE))
    for rows, expected, stored in zip(both.split(width, dim=1), before, caches, strict=True):
        expected.flatten(0, 1)[cells] = rows.reshape(9, heads, head_dim).to(cache_dtype)
        assert torch.equal(stored.cpu(), expected)


def test_rows_of_padding_are_not_stored() -> None:
    before = torch.randn(3, 4, 2, 8)
    caches = [before.to(DEVICE, copy=True) for _ in range(2)]
    key, value = (torch.randn(5, 2, 8, device=DEVICE) for _ in range(2))
    key[2:4], value[2:4] = torch.nan, torch.nan
    cells = torch.tensor([7, 0, -1, -(2**40), 11])
    store_triton(*caches, key, value, cells.to(DEVICE))
    for rows, stored in ((key, caches[0]), (value, caches[1])):
        expected = before.clone()
        expected.flatten(0, 1)[cells[[0, 1, 4]]] = rows.cpu()[[0, 1, 4]]
        assert torch.equal(stored.cpu(), expected)


def test_no_rows() -> None:
    caches = [torch.zeros(1, 4, 2, 8, device=DEVICE) for _ in range(2)]
    none = torch.zeros(0, 2, 8, device=DEVICE)
    store_triton(*caches, none, none, torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert not caches[0].any()


@pytest.mark.parametrize("width", [24, 768, 1280, 1536, 2048])
def test_any_width_can_be_launched(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """A card wants a power of two of warps; the interpreter does not look."""
    asked: list[int] = []
    kernel = kv_cache_triton._store_kernel

    class Recorded:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                asked.append(options["num_warps"])
                kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(kv_cache_triton, "_store_kernel", Recorded())
    cache = torch.zeros(2, 4, 1, width, device=DEVICE)
    rows = torch.randn(3, 1, width, device=DEVICE)
    store_triton(cache, cache.clone(), rows, rows, torch.tensor([1, 6, 3], device=DEVICE))
    assert asked[0].bit_count() == 1
    assert torch.equal(cache.flatten(0, 1)[[1, 6, 3]], rows)
