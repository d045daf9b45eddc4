"""Owns the random numbers: Gumbel noise as a function of (seed, position, token id) and of nothing else.

There is no generator state. A token's noise is computed from its coordinates, so neither batching, preemption, replay
nor a split of the vocabulary can disturb a sequence's stream.

Shapes: R rows (one sequence at one position each), G groups of four token ids, V token ids.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Philox-4x32 with 10 rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

NUM_ROUNDS: Final = 10
MIN_ONE_MINUS_U: Final = 2.0**-24
"""Least value of 1 - u: bounds the noise from below, where single precision could not tell u from 1."""

_WORD: Final = 2**32 - 1
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
# Both multipliers have their top bit set. Taken minus 2^32 they fit 32 signed bits, so that no product overflows int64;
# the missing 2^32 times x is put back when the high word is formed.
_SIGNED_MULTIPLIERS: Final = tuple(multiplier - 2**32 for multiplier in MULTIPLIERS)
# Groups of one pass: the dozen temporaries of a round then stay in a core's cache, twice as fast as one pass over a
# vocabulary of 150,000. An accelerator wants few launches instead.
_CPU_TILE: Final = 2**14
_DEVICE_TILE: Final = 2**25


def philox_4x32(counter_words: Sequence[Tensor], key_words: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for each counter and key.

    Args:
        counter_words: four int64 tensors with values in [0, 2^32), low word first; they broadcast with each other.
        key_words: two of the same kind.

    Returns:
        Four int64 tensors with values in [0, 2^32), of the broadcast shape.

    Raises:
        AssertionError: on another number of words or another type.
    """
    assert (len(counter_words), len(key_words)) == (4, 2), (len(counter_words), len(key_words))
    assert all(word.dtype == torch.int64 for word in (*counter_words, *key_words)), "words must be int64"
    word_0, word_1, word_2, word_3 = counter_words
    rounds = torch.arange(NUM_ROUNDS, device=word_0.device)
    keys_0, keys_1 = (
        ((word.unsqueeze(-1) + rounds * step) & _WORD).unbind(-1)
        for word, step in zip(key_words, KEY_STEPS, strict=True)
    )
    for key_0, key_1 in zip(keys_0, keys_1, strict=True):
        product_0, product_2 = word_0 * _SIGNED_MULTIPLIERS[0], word_2 * _SIGNED_MULTIPLIERS[1]
        word_0, word_2 = (
            ((product_2 >> 32) + word_2) ^ word_1 ^ key_0,
            ((product_0 >> 32) + word_0) ^ word_3 ^ key_1,
        )
        word_1, word_3 = product_2 & _WORD, product_0 & _WORD
    return word_0, word_1, word_2, word_3


def gumbel_noise(seeds_R: Tensor, positions_R: Tensor, vocab_size: int, token_offset: int = 0) -> Tensor:
    """Standard Gumbel noise of the token ids ``token_offset`` to ``token_offset + vocab_size - 1``.

    The key is the seed, low word first; the counter is (id // 4, position, 0, 0), and the id takes word id % 4 of the
    four that come out. With u = min((word + 0.5) / 2^32, 1 - 2^-24) the noise is -log(-log1p(-u)): large noise, which
    decides the draw, belongs to u near 0, where floating point is finest. It lies in [-2.82, 22.88].

    Args:
        seeds_R: int64, the bit pattern of an unsigned 64-bit seed.
        positions_R: int64 in [0, 2^32): the position that the drawn token will have in its sequence.
        vocab_size: number of token ids, 1 or more.
        token_offset: first token id, 0 or more; a shard of the vocabulary gets exactly its slice of the full row.

    Returns:
        float64 [R, vocab_size].

    Raises:
        AssertionError: on another shape, type or range of the sizes.
    """
    assert seeds_R.dtype == positions_R.dtype == torch.int64, (seeds_R.dtype, positions_R.dtype)
    assert seeds_R.ndim == 1, seeds_R.shape
    assert seeds_R.shape == positions_R.shape, (seeds_R.shape, positions_R.shape)
    assert vocab_size > 0, vocab_size
    assert token_offset >= 0, token_offset
    num_rows = seeds_R.shape[0]
    first_group, last_group = token_offset // 4, (token_offset + vocab_size - 1) // 4
    num_groups = last_group - first_group + 1
    key_words = ((seeds_R & _WORD).unsqueeze(1), ((seeds_R >> 32) & _WORD).unsqueeze(1))
    positions_R1 = positions_R.unsqueeze(1)
    zero = torch.zeros((1, 1), dtype=torch.int64, device=seeds_R.device)
    groups = torch.arange(first_group, last_group + 1, device=seeds_R.device).unsqueeze(0)
    tile = max(1, (_CPU_TILE if seeds_R.device.type == "cpu" else _DEVICE_TILE) // max(1, num_rows))
    tiles = [
        _noise_of_words(philox_4x32((some_groups, positions_R1, zero, zero), key_words))
        for some_groups in torch.split(groups, tile, 1)
    ]
    noise = tiles[0] if len(tiles) == 1 else torch.cat(tiles, 1)
    skipped = token_offset - 4 * first_group
    return noise if 4 * num_groups == vocab_size else noise[:, skipped : skipped + vocab_size]


def _noise_of_words(words: tuple[Tensor, ...]) -> Tensor:
    """Noise float64 [R, 4 G] of four words [R, G]."""
    word_RG4 = torch.stack(words, -1).to(torch.float64)
    # 1 - u takes 33 bits, so it is exact in float64 and its plain logarithm is log1p(-u).
    one_minus_u = word_RG4.mul_(-(2.0**-32)).add_(1 - 2.0**-33).clamp_min_(MIN_ONE_MINUS_U)
    return one_minus_u.log_().neg_().log_().neg_().flatten(1)
