"""The cache: rows land in their slots and nowhere else; narrow dtypes lose what they must and no more."""

from __future__ import annotations

import pytest
import torch

from paged.core.model_spec import ModelSpec
from paged.kernels.batch_layout import BatchLayout
from paged.kernels.kv_cache import FP8, LayerCache, store
from paged.runner.kv_cache import KVCache

SPEC = ModelSpec(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8
)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_gather_returns_what_was_stored(dtype: torch.dtype, block_size: int) -> None:
    cache = KVCache(SPEC, 40, block_size, dtype=dtype)
    tables = [torch.randperm(40, generator=torch.Generator().manual_seed(1))[i * 13 : i * 13 + 13] for i in range(3)]
    k, v = numbers(13, 2, 8).to(dtype), numbers(13, 2, 8, seed=2).to(dtype)
    for i, table in enumerate(tables):
        for start, length in ((0, 6), (6, 1), (7, 6)):
            layout = BatchLayout.build([start], [length], table[None], block_size)
            rows = slice(start, start + length)
            store(cache.layers[1], (i + 1) * k[rows], (i + 1) * v[rows], layout.cells_T)
    for i, table in enumerate(tables):
        for length in (1, 5, 13):
            got_k, got_v = cache.gather(1, table.tolist(), length)
            assert got_k.is_contiguous()
            assert torch.equal(got_k, (i + 1) * k[:length])
            assert torch.equal(got_v, (i + 1) * v[:length])
    assert not cache.layers[0].key.any()
    assert not cache.layers[2].value.any()
    with pytest.raises(ValueError, match="length 13 exceeds"):
        cache.gather(1, tables[0][: 12 // block_size].tolist(), 13)


def test_store_touches_its_slots_only() -> None:
    cache = KVCache(SPEC, 5, 4, dtype=torch.float32)
    layer = cache.layers[0]
    layer.key.fill_(7.0)
    layer.value.fill_(8.0)
    slots = torch.tensor([19, 0, 6])
    store(layer, numbers(3, 2, 8), numbers(3, 2, 8, seed=1), slots)
    others = [slot for slot in range(20) if slot not in (19, 0, 6)]
    assert (layer.key.flatten(0, 1)[others] == 7).all()
    assert (layer.value.flatten(0, 1)[others] == 8).all()
    assert torch.equal(layer.key.flatten(0, 1)[slots], numbers(3, 2, 8))


def test_bytes_per_block() -> None:
    assert KVCache(SPEC, 2, 16, dtype=torch.float32).bytes_per_block == 16 * SPEC.kv_bytes_per_token(4)
    assert KVCache(SPEC, 2, 16, dtype=torch.bfloat16).bytes_per_block == 16 * SPEC.kv_bytes_per_token(2)
    scales = 16 * 3 * 2 * 2 * 4
    assert KVCache(SPEC, 2, 16, dtype=FP8).bytes_per_block == 16 * SPEC.kv_bytes_per_token(1) + scales


@pytest.mark.parametrize(("blocks", "size", "name"), [(0, 4, "num_blocks"), (3, 0, "block_size")])
def test_refuses_empty(blocks: int, size: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        KVCache(SPEC, blocks, size, dtype=torch.float32)


def test_fp8_scales_follow_each_token_and_head() -> None:
    """Heads a million times apart keep their relative precision: e4m3 has 3 mantissa bits, half a unit is 1/16."""
    cache = KVCache(SPEC, 4, 4, dtype=FP8)
    k = numbers(12, 2, 8) * torch.logspace(-3, 3, 24).view(12, 2, 1)
    layout = BatchLayout.build([0], [12], [[2, 0, 3]], 4)
    store(cache.layers[0], k, -k, layout.cells_T)
    got_k, got_v = cache.gather(0, [2, 0, 3], 12)
    largest = k.abs().amax(-1, keepdim=True)
    assert ((got_k - k).abs() <= k.abs() / 16 + largest * 2**-10 / 448).all()
    assert torch.equal(got_k, -got_v)
    # The largest element of each head survives: it defines the scale.
    at = k.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(got_k.gather(-1, at), k.gather(-1, at), rtol=1e-6, atol=0)
    # A token's numbers do not hang on who is stored beside it.
    other = KVCache(SPEC, 4, 4, dtype=FP8)
    store(other.layers[0], k[5:6], -k[5:6], torch.tensor([0]))
    assert torch.equal(other.gather(0, [0], 1)[0], got_k[5:6])


def test_fp8_keeps_zeros_and_nan() -> None:
    cache = KVCache(SPEC, 1, 4, dtype=FP8)
    k = torch.zeros(3, 2, 8)
    k[1, 0, 3] = float("nan")
    k[2, 1, 0] = 1e-30
    store(cache.layers[0], k, k, torch.arange(3))
    got, _ = cache.gather(0, [0], 3)
    assert torch.equal(got[0], k[0])
    assert got[1, 0].isnan().any()
    assert got[1, 1].isfinite().all()
    assert got[2].isfinite().all()


def test_scales_belong_to_fp8() -> None:
    with pytest.raises(AssertionError, match="fp8 carries scales"):
        LayerCache(torch.zeros(1, 1, 1, 2, dtype=FP8), torch.zeros(1, 1, 1, 2, dtype=FP8))
