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
    GREATEST_FACTOR,
    LEAST_FACTOR,
    LOG2_E,
    SHORT_COEFFICIENTS,
)
from paged.kernels.philox import KEY_STEPS, MIN_ONE_MINUS_U, MULTIPLIERS, NUM_ROUNDS

PART: Final = 8192
"""Tokens of a program's part of a row."""
COLUMNS: Final = ("temperature_ptr", "seeds_ptr", "positions_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr")
"""Parameters of kernels that have one number a row. It is read alone, so that no build hangs on where they begin."""

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
# The interpreter knows neither assembly nor fused operations. Where it rounds twice, the first time is exact.
_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
_LEAST_FACTOR = tl.constexpr(LEAST_FACTOR)
_GREATEST_FACTOR = tl.constexpr(GREATEST_FACTOR)
# Adding it to a small number and taking it away again rounds to a whole one; its low bits are then that number.
_ROUNDER = tl.constexpr(1.5 * 2.0**52)
# A number up to 2^52 plus this has the nearest whole number in its low bits, and above them those of 2^52.
_WHOLE = tl.constexpr(2.0**52)
_WHOLE_BITS = tl.constexpr(1075 << 52)
# Above numbers that are added to it, it leaves 23 or 40 binary places of their sum.
_PLACES_23 = tl.constexpr(1.5 * 2.0**29)
_PLACES_40 = tl.constexpr(1.5 * 2.0**12)
_ADD_ABOVE = (
    "{{ .reg .pred above, inside; .reg .b32 half, top; .reg .f64 weight;"
    " setp.ge.{0} above, $4, $7; setp.ge.and.{0} inside, $4, $6, !above;"
    " mov.b64 {{half, top}}, $5; selp.b32 top, top, 0, above; mov.b64 weight, {{half, top}};"
    " add.rz.f64 $0, $0, weight; @above add.s32 $1, $1, 65536; @inside add.s32 $1, $1, $8; }}"
)
_ADD_ABOVE_32, _ADD_ABOVE_64 = (tl.constexpr(_ADD_ABOVE.format(width)) for width in ("f32", "f64"))
# Tokens whose 1 - u is less get the noise of this, which is higher: fp32 cannot tell theirs well enough.
_ROUGH_ONE_MINUS_U = tl.constexpr(2.0**-12)
ALL = tl.constexpr(2**31 - 1)
# Reciprocals of temperatures count as no more where scores are bounded in fp32: distances then count for less than they
# are, so that bounds stay bounds, and a distance of 0 stays 0.
STEEPEST = tl.constexpr(1e30)
_WORD_UNIT = tl.constexpr(2.0**-32)
_HALF_WORD_BELOW_1 = tl.constexpr(1 - 2.0**-33)
_OCTAVE_BITS = tl.constexpr(18)
_NO_DISTANCE = tl.constexpr(2.0**23)
_OCTAVES_PER_UNIT = tl.constexpr(2.0**18 / math.log(2))
_UNIT_OF_KEY = tl.constexpr(math.log(2) * 2.0**-18)
# The key of distance 0 and the noise of u = 1.
_KEY_OF_ZERO = tl.constexpr(float(((127 + 23) << 23) + ((127 + 32) << 18)))
SLACK = tl.constexpr(2.0**-12)
"""Scores may be higher than their bounds by less than this, by rounding."""
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
    """2^y * 2^BITS in fp64, as ``long_exponential``; ``y`` is its product with log2(e)."""
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
def _fused(x, y, z):
    """``x * y + z`` in fp32, rounded once."""
    if _IS_COMPILED:
        return tl.fma(x, y, z)
    else:
        return (x.to(tl.float64) * y + z).to(tl.float32)


@triton.jit
def _split(distance, factor):
    """``distance * factor`` as a whole number not above it and the rest, fp32.

    Returns 1.5 * 2^23 plus the whole number, so that its last bits are that; 1 less the whole number; and the rest plus
    1. Below -128 the whole number is -128, and the rest below 0.
    """
    if _IS_COMPILED:
        # Bounded to [0, 1] and rounded down, a part of 128 octaves; then rounded down to whole octaves.
        share = tl.inline_asm_elementwise(
            "fma.rm.sat.f32 $0, $1, $2, 0f3F800000;", "=f,f,f", [distance, factor * 2.0**-7], tl.float32, True, 1
        )
        marked = tl.inline_asm_elementwise(
            "fma.rm.f32 $0, $1, 0f43000000, 0f4B3FFF80;", "=f,f", [share], tl.float32, True, 1
        )
        before = (1.5 * 2.0**23 + 1) - marked
        return marked, before, tl.fma(distance, factor, before)
    else:
        product = distance.to(tl.float64) * factor
        marked = (tl.maximum(tl.floor(product), -128.0) + 1.5 * 2.0**23).to(tl.float32)
        before = (1.5 * 2.0**23 + 1) - marked
        rounded = (tl.maximum(product, -256.0) + _PLACES_23) - _PLACES_23
        return marked, before, (rounded + before).to(tl.float32)


@triton.jit
def _sum_in_0_1(x, y):
    """``x + y`` in fp32, bounded to [0, 1]."""
    if _IS_COMPILED:
        return tl.inline_asm_elementwise("add.rn.sat.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1)
    else:
        return tl.minimum(tl.maximum(x + y, 0.0), 1.0)


@triton.jit
def _short_weights(logits, row_max, inverse):
    """exp((logit - max) * inverse) in fp64 by the short exponential; its masses are these, cut to ``BITS`` places."""
    wanted = tl.minimum(tl.maximum(inverse * _LOG2_E, _LEAST_FACTOR), _GREATEST_FACTOR)
    factor = wanted.to(tl.float32)
    lack = (((wanted / factor.to(tl.float64) - 1.0) + _PLACES_40) - _PLACES_40).to(tl.float32)
    marked, before, rest = _split((logits - row_max).to(tl.float32), factor)
    rest = _sum_in_0_1(rest, _fused(before, -lack, lack * 1.5 - 1.0))
    power = _fused(rest, _S6, _S5)
    power = _fused(power, rest, _S4)
    power = _fused(power, rest, _S3)
    power = _fused(power, rest, _S2)
    power = _fused(power, rest, _S1)
    power = _fused(power, rest, _S0)
    # The whole number goes to the exponent by integers, and so does the change of format: a conversion takes four times
    # as long. The mark's other bits are shifted out.
    bits = power.to(tl.int32, bitcast=True) + (marked.to(tl.int32, bitcast=True) << 23)
    return ((bits.to(tl.int64) << 29) + (896 << 52)).to(tl.float64, bitcast=True)


@triton.jit
def _add_cut(total, weights, BITS: tl.constexpr):
    """Sum of a number from 2^(52 - BITS) up to twice that and weights, cut to BITS binary places, its last ones."""
    if _IS_COMPILED:
        return tl.inline_asm_elementwise("add.rz.f64 $0, $1, $2;", "=d,d,d", [total, weights], tl.float64, True, 1)
    else:
        return total + (weights * (2.0**BITS)).to(tl.int64).to(tl.float64) * (2.0 ** (-BITS))


@triton.jit
def _whole(total, BITS: tl.constexpr):
    """What ``_add_cut`` has added to 2^(52 - BITS), in units of its last place, int64."""
    return total.to(tl.int64, bitcast=True) - ((1023 + 52 - BITS) << 52)


@triton.jit
def weights_of(logits, row_max, inverse, BITS: tl.constexpr, SHORT: tl.constexpr):
    """What ``add_masses`` adds up: with SHORT fp64 weights, of which a mass is the whole part, else masses int64."""
    if SHORT:
        return _short_weights(logits, row_max, inverse)
    else:
        return masses_of(logits, row_max, inverse, BITS, False)


@triton.jit
def masses_of(logits, row_max, inverse, BITS: tl.constexpr, SHORT: tl.constexpr):
    """Masses int64 of logits; the twin's operations one by one (``integer_masses``)."""
    if SHORT:
        weights = _short_weights(logits, row_max, inverse)
        return _whole(_add_cut(2.0 ** (52 - BITS) + weights * 0.0, weights, BITS), BITS)
    else:
        # In the logits' own type such a bound would round up to the highest logit where that is large and T small.
        x = tl.maximum((logits.to(tl.float64) - row_max.to(tl.float64)) * inverse, _NO_MASS)
        return (_long_power(x * _LOG2_E, BITS) + _WHOLE).to(tl.int64, bitcast=True) - _WHOLE_BITS


@triton.jit
def no_mass(B: tl.constexpr, BITS: tl.constexpr, SHORT: tl.constexpr):
    """Sums [B] to which ``add_masses`` has added nothing; they have room for 2^(52 - BITS) - 1 tokens."""
    if SHORT:
        return tl.full([B], 2.0 ** (52 - BITS), tl.float64)
    else:
        return tl.zeros([B], tl.int64)


@triton.jit
def add_masses(sum_B, weight_B4, B: tl.constexpr, BITS: tl.constexpr, SHORT: tl.constexpr):
    """Sums and the masses of four tokens each, given their ``weights_of``."""
    if SHORT:
        w0, w1, w2, w3 = columns_of_four(weight_B4, B)
        return _add_cut(_add_cut(_add_cut(_add_cut(sum_B, w0, BITS), w1, BITS), w2, BITS), w3, BITS)
    else:
        return sum_B + tl.sum(weight_B4, 1)


@triton.jit
def total_mass(sum_B, BITS: tl.constexpr, SHORT: tl.constexpr):
    """All that was added to some sums, int64."""
    if SHORT:
        return tl.sum(_whole(sum_B, BITS))
    else:
        return tl.sum(sum_B)


@triton.jit
def _add_above(sum_B, marks_B, x_B, weight_B, low, high, bit, BITS: tl.constexpr):
    if _IS_COMPILED:
        # Two predicates serve all. A weight whose high half is zero is as good as zero.
        if x_B.dtype == tl.float64:
            return tl.inline_asm_elementwise(
                _ADD_ABOVE_64, "=d,=r,0,1,d,d,d,d,r", [sum_B, marks_B, x_B, weight_B, low, high, bit],
                (tl.float64, tl.int32), True, 1,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _ADD_ABOVE_32, "=d,=r,0,1,f,d,f,f,r", [sum_B, marks_B, x_B, weight_B, low, high, bit],
                (tl.float64, tl.int32), True, 1,
            )  # fmt: skip
    else:
        is_above_B = x_B >= high
        sum_B = _add_cut(sum_B, tl.where(is_above_B, weight_B, 0.0), BITS)
        return sum_B, marks_B + tl.where(is_above_B, 2**16, tl.where(x_B >= low, bit, 0))


@triton.jit
def add_above(sum_B, marks_B, x_B4, weight_B4, quarter, low, high, B: tl.constexpr, BITS: tl.constexpr):
    """As ``add_masses`` with SHORT of the tokens not below ``high``, and their number times 2^16 to the marks.

    Of the others not below ``low`` each adds its bit: bits 4 ``quarter`` and up.
    """
    x0, x1, x2, x3 = columns_of_four(x_B4, B)
    w0, w1, w2, w3 = columns_of_four(weight_B4, B)
    bit = 1 << (quarter * 4)
    sum_B, marks_B = _add_above(sum_B, marks_B, x0, w0, low, high, bit, BITS)
    sum_B, marks_B = _add_above(sum_B, marks_B, x1, w1, low, high, bit * 2, BITS)
    sum_B, marks_B = _add_above(sum_B, marks_B, x2, w2, low, high, bit * 4, BITS)
    return _add_above(sum_B, marks_B, x3, w3, low, high, bit * 8, BITS)


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
def load_part(
    logits_ptr, row, part, stride, vocab_size, PART: tl.constexpr, ALIGNED: tl.constexpr, BRANCH: tl.constexpr = False
):  # fmt: skip
    """Logits and token ids of a part, [G, 4], and its groups' numbers; -inf beyond the vocabulary.

    With BRANCH a whole part is loaded without a mask, which pays where registers are left.
    """
    group_G = part * (PART // 4) + tl.arange(0, PART // 4)
    id_G4 = group_G[:, None] * 4 + tl.arange(0, 4)[None]
    exists_G4 = (group_G * 4 < vocab_size)[:, None] if ALIGNED else id_G4 < vocab_size
    x_G4_ptr = logits_ptr + row.to(tl.int64) * stride + id_G4
    if BRANCH:
        x_G4 = tl.load(x_G4_ptr) if (part + 1) * PART <= vocab_size else tl.load(x_G4_ptr, exists_G4, float("-inf"))
    else:
        x_G4 = tl.load(x_G4_ptr, exists_G4, float("-inf"))
    return x_G4, id_G4, group_G


@triton.jit
def highest_of_groups(x_G4, GROUPS: tl.constexpr):
    """Highest logit of each group; NaN where one is."""
    x0, x1, x2, x3 = columns_of_four(x_G4, GROUPS)
    return _higher_or_nan(_higher_or_nan(_higher_or_nan(x0, x1), x2), x3)


@triton.jit
def _higher_or_nan(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def highest_of_part(high_G):
    """Highest logit; +inf if one is NaN: either says that the row has no distribution."""
    high = tl.reduce(high_G, 0, _higher_or_nan)
    return tl.where(high == high, high, float("inf"))


@triton.jit
def only_kept(x_G4, id_G4, last_ptr, last_id_ptr, row):
    """Logits with -inf for the tokens after the row's last kept one."""
    last = tl.load(last_ptr + row)
    kept_G4 = (x_G4 > last) | ((x_G4 == last) & (id_G4 <= tl.load(last_id_ptr + row)))
    return tl.where(kept_G4, x_G4, float("-inf"))


@triton.jit
def key_of(x):
    """Unsigned number that orders as the logits do; -0 counts as +0."""
    if x.dtype == tl.float64:
        signed = (x + 0.0).to(tl.int64, bitcast=True)
        return (signed ^ ((signed >> 63) | (-1 << 63))).to(tl.uint64, bitcast=True)
    else:
        narrow = (x + 0.0).to(tl.int32, bitcast=True)
        return (narrow ^ ((narrow >> 31) | (-1 << 31))).to(tl.uint32, bitcast=True)


@triton.jit
def logit_of(key):
    """The logit of a key."""
    if key.dtype == tl.uint64:
        signed = key.to(tl.int64, bitcast=True)
        return (signed ^ ((~signed >> 63) | (-1 << 63))).to(tl.float64, bitcast=True)
    else:
        narrow = key.to(tl.int32, bitcast=True)
        return (narrow ^ ((~narrow >> 31) | (-1 << 31))).to(tl.float32, bitcast=True)


@triton.jit
def _token_key(x, word, slope):
    """Bound of a token's score above that of another place: the less, the higher the score can be.

    In 2^-_OCTAVE_BITS of a factor of 2: ``x``, at most 0, times ``slope`` to a negative number of them, and the
    logarithm of the word, which is linear between powers of two and nowhere above the true one.
    """
    distance = tl.fma(x, -slope, _NO_DISTANCE).to(tl.uint32, bitcast=True)
    return distance + (word.to(tl.float32).to(tl.uint32, bitcast=True) >> (23 - _OCTAVE_BITS))


@triton.jit
def slope_of(inverse):
    """Units of a key's score to one of the logits."""
    return tl.minimum(inverse, STEEPEST).to(tl.float32) * _OCTAVES_PER_UNIT


@triton.jit
def score_bound(key, PART: tl.constexpr):
    """A number in fp64 that the scores with this key, less those of the base, do not exceed but by rounding."""
    steps = (key & (2**32 - PART // 4)).to(tl.float64)
    return (steps - _KEY_OF_ZERO) * -_UNIT_OF_KEY


@triton.jit
def add_keys(
    x_B4, group_B, quarter, base, slope, row, seeds_ptr, positions_ptr, best_B, second_B, GROUPS: tl.constexpr,
):  # fmt: skip
    """Keys of a quarter's groups, added to the least and second least of those before.

    A key's last digits are the group's place in its part.
    """
    x0, x1, x2, x3 = columns_of_four((x_B4 - base).to(tl.float32), GROUPS)
    w0, w1, w2, w3 = words_of(seeds_ptr, positions_ptr, row, group_B)
    key_B = tl.minimum(
        tl.minimum(_token_key(x0, w0, slope), _token_key(x1, w1, slope)),
        tl.minimum(_token_key(x2, w2, slope), _token_key(x3, w3, slope)),
    )
    place_B = (quarter * GROUPS + tl.arange(0, GROUPS)).to(tl.uint32)
    key_B = (key_B & (2**32 - GROUPS * 4)) | place_B
    second_B = tl.minimum(second_B, tl.maximum(best_B, key_B))
    return tl.minimum(best_B, key_B), second_B


@triton.jit
def store_keys(keys_ptr, row, part, best_B, second_B, PARTS: tl.constexpr):
    """The two least keys of a part, and one that no other is below."""
    best = tl.min(best_B)
    rest_B = tl.where(best_B == best, second_B, best_B)
    second = tl.min(rest_B)
    # Where a lane had both, its third is not known.
    third = tl.min(tl.where(best_B == second, second_B, rest_B))
    first_ptr = keys_ptr + row * (3 * PARTS) + part
    tl.store(first_ptr, best.to(tl.int32, bitcast=True))
    tl.store(first_ptr + PARTS, second.to(tl.int32, bitcast=True))
    tl.store(first_ptr + 2 * PARTS, third.to(tl.int32, bitcast=True))


@triton.jit
def highest_rough(
    x_G4, group_G, row_max, steep, row, seeds_ptr, positions_ptr, GROUPS: tl.constexpr, FAST_LOG: tl.constexpr
):  # fmt: skip
    """Highest rough score among the tokens of some groups."""
    x0, x1, x2, x3 = columns_of_four((x_G4 - row_max).to(tl.float32) * steep, GROUPS)
    w0, w1, w2, w3 = words_of(seeds_ptr, positions_ptr, row, group_G)
    score_G = tl.maximum(
        tl.maximum(rough_score(x0, w0, FAST_LOG), rough_score(x1, w1, FAST_LOG)),
        tl.maximum(rough_score(x2, w2, FAST_LOG), rough_score(x3, w3, FAST_LOG)),
    )
    return tl.max(score_G) + _LOG_LOG_2


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
