"""Checks the noise against Random123's published words, an implementation in Python integers, and its own slices."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from paged.kernels.philox import gumbel_noise, philox_4x32

U64 = 2**64


def philox_in_integers(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        product_0, product_2 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (product_2 >> 32) ^ counter[1] ^ key[0],
            product_2 % 2**32,
            (product_0 >> 32) ^ counter[3] ^ key[1],
            product_0 % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def noise_in_python(seed: int, position: int, token: int) -> float:
    word = philox_in_integers([token // 4, position, 0, 0], [seed % 2**32, seed // 2**32])[token % 4]
    return -math.log(-math.log1p(-min((word + 0.5) / 2**32, 1 - 2**-24)))


def signed(seed: int) -> int:
    return seed - U64 if seed >= U64 // 2 else seed


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_published_words(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox_4x32([column(word) for word in counter], [column(word) for word in key])
    assert [int(word) for word in words] == expected
    assert philox_in_integers(counter, key) == expected


def test_words_of_many_counters_equal_those_of_each() -> None:
    generator = np.random.default_rng(1)
    counters, keys = generator.integers(0, 2**32, (4, 50)), generator.integers(0, 2**32, (2, 50))
    words = torch.stack(philox_4x32(list(torch.from_numpy(counters)), list(torch.from_numpy(keys))))
    for i in range(50):
        assert words[:, i].tolist() == philox_in_integers(counters[:, i].tolist(), keys[:, i].tolist())


def test_noise_is_a_function_of_seed_position_and_token() -> None:
    """Seeds with the top bit set come in as negative numbers."""
    seeds = [0, 1, 2**32, 2**63, U64 - 1, 0x0123456789ABCDEF]
    positions = [0, 1, 7, 40_000, 2**31, 2**32 - 1]
    noise = gumbel_noise(column(*map(signed, seeds)), column(*positions), 103)
    expected = [
        [noise_in_python(seed, position, token) for token in range(103)]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    np.testing.assert_allclose(noise.numpy(), expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("vocab_size", [1, 2, 5, 99, 260, 151_936])
def test_a_shard_equals_its_slice_of_the_row(vocab_size: int) -> None:
    seeds, positions = column(3, -4, 5), column(9, 8, 7)
    row = gumbel_noise(seeds, positions, vocab_size)
    assert row.shape == (3, vocab_size)
    for num_shards in (2, 3, 4, 7):
        edges = [vocab_size * shard // num_shards for shard in range(num_shards + 1)]
        for start, end in pairwise(edges):
            if start < end:
                assert torch.equal(gumbel_noise(seeds, positions, end - start, start), row[:, start:end])


@pytest.mark.parametrize("vocab_size", [5, 260, 4099])
def test_a_row_is_the_same_in_any_company(vocab_size: int) -> None:
    seeds, positions = torch.arange(37) * 977 - 5, torch.arange(37) ** 3
    together = gumbel_noise(seeds, positions, vocab_size)
    order = torch.from_numpy(np.random.default_rng(2).permutation(37))
    assert torch.equal(gumbel_noise(seeds[order], positions[order], vocab_size), together[order])
    for row in range(0, 37, 5):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], vocab_size)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(
    "other",
    [
        lambda seeds, positions: (seeds + 1, positions),
        lambda seeds, positions: (seeds + 2**32, positions),
        lambda seeds, positions: (seeds, positions + 1),
    ],
)
def test_streams_differ(other: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    seeds, positions = torch.full((20,), 11), torch.arange(20)
    here, there = gumbel_noise(seeds, positions, 500), gumbel_noise(*other(seeds, positions), 500)
    assert (here == there).sum() <= 1
    assert abs(np.corrcoef(here.flatten(), there.flatten())[0, 1]) < 0.04


def test_noise_is_gumbel_and_bounded() -> None:
    noise = gumbel_noise(torch.arange(100), torch.arange(100), 2000).flatten().numpy()
    assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > 1e-3
    assert stats.kstest(noise, stats.gumbel_l.cdf).pvalue < 1e-9
    assert noise.min() > -2.82
    assert noise.max() < 22.88


def test_extreme_words_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Word 0 gives the highest noise; the highest word would give u = 1 in single precision, hence the bound on u."""
    words = [
        column(0).view(1, 1),
        column(2**32 - 1).view(1, 1),
        column(2**32 - 256).view(1, 1),
        column(2**31).view(1, 1),
    ]
    monkeypatch.setattr("paged.kernels.philox.philox_4x32", lambda counter, key: words)
    noise = gumbel_noise(column(0), column(0), 4)[0].tolist()
    bound = -math.log(24 * math.log(2))
    assert noise[0] == pytest.approx(33 * math.log(2), rel=1e-9)
    assert noise[1:3] == pytest.approx([bound, bound], rel=1e-14)
    assert noise[3] == pytest.approx(-math.log(math.log(2)), rel=1e-9)


def test_wrong_arguments_are_caught() -> None:
    with pytest.raises(AssertionError):
        gumbel_noise(column(1).to(torch.int32), column(1), 5)
    with pytest.raises(AssertionError):
        gumbel_noise(column(1, 2), column(1), 5)
    with pytest.raises(AssertionError):
        gumbel_noise(column(1), column(1), 0)
    with pytest.raises(AssertionError):
        philox_4x32([column(1)] * 3, [column(1)] * 2)
    assert gumbel_noise(column(), column(), 5).shape == (0, 5)
