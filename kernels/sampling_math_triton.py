"""Owns what the sampling kernels compute of single tokens and groups: masses, noise, rough and exact scores.

Shapes: G groups of four tokens, B groups of a quarter of a part, P parts.
"""

from __future__ import annotations

import math
from typing import Final

import triton
import triton.language as tl

from paged.kernels.exponential import (
    COEFFICIENTS,
    LOG2_E,
    SHORT_COEFFICIENTS,
    SHORT_ROUNDER,
    SHORT_ROUNDER_BITS,
)
from paged.kernels.philox import KEY_STEPS, MIN_ONE_MINUS_U, MULTIPLIERS, NUM_ROUNDS

PART: Final = 8192
"""Tokens of a program's part of a row."""

# Exponents below this have mass 0, whatever the number of binary digits.
_NO_MASS = tl.constexpr(-50.0)
LEAST_LOGIT = tl.constexpr(-3e38)
_LOG2_E = tl.constexpr(LOG2_E)
_MIN_ONE_MINUS_U = tl.constexpr(MIN_ONE_MINUS_U)
MARGIN = tl.constexpr(2.0**-11)
"""Scores closer to each other than this are told apart in fp64."""
_NUM_ROUNDS = tl.constexpr(NUM_ROUNDS)
_MULTIPLIER_0, _MULTIPLIER_1 = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)
_KEY_STEP_0, _KEY_STEP_1 = (tl.constexpr(step) for step in KEY_STEPS)
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7 = (tl.constexpr(coefficient) for coefficient in COEFFICIENTS)
_S0, _S1, _S2, _S3, _S4, _S5, _S6 = (tl.constexpr(coefficient) for coefficient in SHORT_COEFFICIENTS)
_SHORT_ROUNDER = tl.constexpr(SHORT_ROUNDER)
_SHORT_ROUNDER_WORD = tl.constexpr(SHORT_ROUNDER_BITS >> 32)
# Exponent's bits of a power of two that is rounded to mass 0.
_LEAST_EXPONENT = tl.constexpr(1023 - 50)
# Adding it to a small number and taking it away again rounds to a whole one; its low bits are then that number.
_ROUNDER = tl.constexpr(1.5 * 2.0**52)
# A number up to 2^52 plus this has the nearest whole number in its low bits, and above them those of 2^52.
_WHOLE = tl.constexpr(2.0**52)
_WHOLE_BITS = tl.constexpr(1075 << 52)
# Tokens whose 1 - u is less get the noise of this, which is higher: fp32 cannot tell theirs well enough.
_ROUGH_ONE_MINUS_U = tl.constexpr(2.0**-12)
ALL = tl.constexpr(2**31 - 1)
# Beyond this reciprocal of a temperature fp32 scores are not to be trusted.
STEEPEST = tl.constexpr(1e30)
_WORD_UNIT = tl.constexpr(2.0**-32)
_HALF_WORD_BELOW_1 = tl.constexpr(1 - 2.0**-33)
_LN_2 = tl.constexpr(math.log(2))
_LOG_LOG_2 = tl.constexpr(-math.log(math.log(2)))


@triton.jit
def inverse_of(temperature_ptr, row):
    """1 / T in fp64; temperature 0 counts as 1."""
    temperature = tl.load(temperature_ptr + row)
    return 1.0 / tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def highest_of_row(max_ptr, row, num_parts, PARTS: tl.constexpr):
    """Highest logit of a row; +inf if it has a NaN."""
    part_P = tl.arange(0, PARTS)
    return tl.max(tl.load(max_ptr + row * PARTS + part_P, part_P < num_parts, float("-inf")))


@triton.jit
def is_number(x):
    """Whether a number is finite."""
    return (x == x) & (x < float("inf")) & (x > float("-inf"))


@triton.jit
def _long_power(y, BITS: tl.constexpr):
    """2^y * 2^BITS in fp64, as the long one of ``scaled_exponential``."""
    shifted = y + _ROUNDER
    rest = y - (shifted - _ROUNDER)
    whole = shifted.to(tl.int64, bitcast=True).to(tl.int32)
    root = rest * _C7 + _C6
    root = root * rest + _C5
    root = root * rest + _C4
    root = root * rest + _C3
    root = root * rest + _C2
    root = root * rest + _C1
    root = root * rest + _C0
    root = root * rest + 1.0
    root = root * root
    root = root * root
    # The product with a power of two, by the exponent's bits.
    return (root.to(tl.int64, bitcast=True) + ((whole + BITS).to(tl.int64) << 52)).to(tl.float64, bitcast=True)


@triton.jit
def _short_power(y, BITS: tl.constexpr):
    """2^y * 2^BITS in fp64, as the short one of ``scaled_exponential``."""
    fixed = (y + _SHORT_ROUNDER).to(tl.int64, bitcast=True)
    # Far below it is not a fixed-point number any more, but its upper word still falls with y, below 0 in the end.
    exponent = tl.maximum((fixed >> 32).to(tl.int32) + (1023 + BITS - _SHORT_ROUNDER_WORD), _LEAST_EXPONENT)
    fraction = fixed.to(tl.uint32)
    rise = tl.umulhi(fraction, fraction * 0 + _S6) + _S5
    rise = tl.umulhi(fraction, rise) + _S4
    rise = tl.umulhi(fraction, rise) + _S3
    rise = tl.umulhi(fraction, rise) + _S2
    rise = tl.umulhi(fraction, rise) + _S1
    rise = tl.umulhi(fraction, rise) + _S0
    rise = (fraction.to(tl.uint64) * rise.to(tl.uint64)) >> 11
    return (rise.to(tl.int64) + (exponent.to(tl.int64) << 52)).to(tl.float64, bitcast=True)


@triton.jit
def masses_of(logits, row_max, inverse, BITS: tl.constexpr, SHORT: tl.constexpr):
    """Masses int64 of logits; the twin's operations one by one (``scaled_exponential`` and what stands around it)."""
    if not SHORT:
        # What weighs nothing counts as the highest logit that surely does; the twin bounds the exponent instead.
        nothing = (row_max.to(tl.float64) + 1.0 / inverse * _NO_MASS).to(logits.dtype)
        logits = tl.maximum(logits, tl.maximum(nothing, LEAST_LOGIT))
    y = (logits.to(tl.float64) - row_max.to(tl.float64)) * inverse * _LOG2_E
    scaled = _short_power(y, BITS) if SHORT else _long_power(y, BITS)
    return (scaled + _WHOLE).to(tl.int64, bitcast=True) - _WHOLE_BITS


@triton.jit
def _log2(x, FAST_LOG: tl.constexpr):
    if FAST_LOG:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def rough_score(x, word, FAST_LOG: tl.constexpr):
    """``x`` plus the Gumbel noise of a random word in fp32, less log(log(2)).

    Higher than with the noise of the contract, or lower by less than MARGIN / 8.
    """
    u = tl.fma(word.to(tl.float32), _WORD_UNIT, 0.5 * _WORD_UNIT)
    # -log2(1 - u). 1 - u cannot be told from 1 where u is small; there it is a series, 1.4427 being log2(e).
    small = u * tl.fma(u, tl.fma(u, 0.48089835, 0.72134752), 1.44269504)
    large = -_log2(tl.maximum(1.0 - u, _ROUGH_ONE_MINUS_U), FAST_LOG)
    # -log(-log(1 - u)) = -log(2) * log2(-log2(1 - u)) - log(log(2))
    return tl.fma(_log2(tl.where(u < 0.03125, small, large), FAST_LOG), -_LN_2, x)


@triton.jit
def exact_noise(word):
    """The noise of ``gumbel_noise``, operation by operation."""
    one_minus_u = tl.maximum(word.to(tl.float64) * -_WORD_UNIT + _HALF_WORD_BELOW_1, _MIN_ONE_MINUS_U)
    return -tl.log(-tl.log(one_minus_u))


@triton.jit
def words_of(seeds_ptr, positions_ptr, row, group_G):
    """Philox's four words of each group of tokens; ``tl.philox`` gives the same by twice as many products."""
    seed = tl.load(seeds_ptr + row)
    key_0 = seed.to(tl.uint32)
    key_1 = (seed >> 32).to(tl.uint32)
    word_0 = group_G.to(tl.uint32)
    word_1 = (group_G * 0).to(tl.uint32) + tl.load(positions_ptr + row).to(tl.uint32)
    word_2 = word_0 * 0
    word_3 = word_2
    for _ in tl.static_range(_NUM_ROUNDS):
        product_0 = word_0.to(tl.uint64) * _MULTIPLIER_0
        product_2 = word_2.to(tl.uint64) * _MULTIPLIER_1
        word_0 = (product_2 >> 32).to(tl.uint32) ^ word_1 ^ key_0
        word_2 = (product_0 >> 32).to(tl.uint32) ^ word_3 ^ key_1
        word_1 = product_2.to(tl.uint32)
        word_3 = product_0.to(tl.uint32)
        key_0 = key_0 + _KEY_STEP_0
        key_1 = key_1 + _KEY_STEP_1
    return word_0, word_1, word_2, word_3


@triton.jit
def columns_of_four(x_G4, GROUPS: tl.constexpr):
    """The four columns of [G, 4], each [G]."""
    even_G2, odd_G2 = tl.split(tl.reshape(x_G4, [GROUPS, 2, 2]))
    x0, x2 = tl.split(even_G2)
    x1, x3 = tl.split(odd_G2)
    return x0, x1, x2, x3


@triton.jit
def load_part(logits_ptr, row, part, stride, vocab_size, PART: tl.constexpr, ALIGNED: tl.constexpr):
    """Logits and token ids of a part, [G, 4], and its groups' numbers; -inf beyond the vocabulary."""
    group_G = part * (PART // 4) + tl.arange(0, PART // 4)
    id_G4 = group_G[:, None] * 4 + tl.arange(0, 4)[None]
    exists_G4 = (group_G * 4 < vocab_size)[:, None] if ALIGNED else id_G4 < vocab_size
    return tl.load(logits_ptr + row.to(tl.int64) * stride + id_G4, exists_G4, float("-inf")), id_G4, group_G


@triton.jit
def highest_of_groups(x_G4, GROUPS: tl.constexpr):
    """Highest logit of each group; +inf where one is NaN: either says that the row has no distribution."""
    x0, x1, x2, x3 = columns_of_four(x_G4, GROUPS)
    high_G = tl.maximum(x0, x1, propagate_nan=tl.PropagateNan.ALL)
    high_G = tl.maximum(high_G, x2, propagate_nan=tl.PropagateNan.ALL)
    high_G = tl.maximum(high_G, x3, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(high_G == high_G, high_G, float("inf"))


@triton.jit
def only_kept(x_G4, id_G4, last_ptr, last_id_ptr, row):
    """Logits with -inf for the tokens after the row's last kept one."""
    last = tl.load(last_ptr + row)
    kept_G4 = (x_G4 > last) | ((x_G4 == last) & (id_G4 <= tl.load(last_id_ptr + row)))
    return tl.where(kept_G4, x_G4, float("-inf"))


@triton.jit
def add_rough(
    x_B4, group_B, quarter, base, steep, row, seeds_ptr, positions_ptr, best_B, second_B, place_B,
    GROUPS: tl.constexpr, FAST_LOG: tl.constexpr,
):  # fmt: skip
    """Rough scores of a quarter's groups above ``base``, added to the best and second best of those before."""
    x0, x1, x2, x3 = columns_of_four((x_B4 - base).to(tl.float32) * steep, GROUPS)
    w0, w1, w2, w3 = words_of(seeds_ptr, positions_ptr, row, group_B)
    score_B = tl.maximum(
        tl.maximum(rough_score(x0, w0, FAST_LOG), rough_score(x1, w1, FAST_LOG)),
        tl.maximum(rough_score(x2, w2, FAST_LOG), rough_score(x3, w3, FAST_LOG)),
    )
    second_B = tl.maximum(second_B, tl.minimum(best_B, score_B))
    place_B = tl.where(score_B > best_B, quarter * GROUPS, place_B)
    return tl.maximum(best_B, score_B), second_B, place_B


@triton.jit
def store_rough(best_ptr, close_ptr, place, best_B, second_B, place_B, PART: tl.constexpr):
    """Best rough score of a part, and a sum over the groups within MARGIN of it: PART / 4 + their place.

    Of a single one the sum gives the place; several sum to PART / 2 or more.
    """
    best = tl.max(best_B)
    close_B = tl.where(best_B >= best - MARGIN, PART // 4 + place_B + tl.arange(0, PART // 16), 0)
    close_B += tl.where(second_B >= best - MARGIN, PART // 2, 0)
    tl.store(best_ptr + place, best + _LOG_LOG_2)
    tl.store(close_ptr + place, tl.sum(close_B))


@triton.jit
def best_of_groups(x_G4, group_G, row_max, row, inverse, seeds_ptr, positions_ptr, GROUPS: tl.constexpr):
    """Best exact score among the tokens of some groups, and the lowest id that has it."""
    x0, x1, x2, x3 = columns_of_four((x_G4.to(tl.float64) - row_max.to(tl.float64)) * inverse, GROUPS)
    w0, w1, w2, w3 = words_of(seeds_ptr, positions_ptr, row, group_G)
    s0 = exact_noise(w0) + x0
    s1 = exact_noise(w1) + x1
    s2 = exact_noise(w2) + x2
    s3 = exact_noise(w3) + x3
    score = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)))
    place_G = tl.where(s2 == score, 2, tl.where(s3 == score, 3, ALL))
    place_G = tl.where(s0 == score, 0, tl.where(s1 == score, 1, place_G))
    return score, tl.min(tl.where(place_G == ALL, ALL, group_G * 4 + place_G))
