"""Sampling on a card in Triton: from logits to a token and its log-probabilities without sorting or asking the host.

Contract: what ``paged.kernels.sampling`` says. Masses are the same integers; the nucleus is the same set; the token is
the one with the highest exact score. A row is cut into parts of ``PART`` tokens, one program each, and what parts find
are maxima and sums of integers, which have no order:

1. ``scan``: the highest logit of each part. Without truncation it draws as well (4).
2. ``bracket`` (truncation): from the highest and one other token of every 32, guess between which two logits the last
   kept token lies. A guess decides how fast the answer is found, never which it is.
3. ``weigh``: sums of masses; tokens inside the bracket go to a short list. ``cut`` finds the last kept token in the list,
   two bits of its logit at a time, or, where the guess was wrong, in the whole row.
4. ``draw``: noise of all tokens in fp32, good to ``MARGIN`` / 4; a part notes its best score and whether others
   are within ``MARGIN`` of it. ``finish`` takes the best token if no other can be the winner, else it computes all scores of
   the parts in question in fp64.

Shapes: R rows, V token ids, P parts, N tokens of a part, G groups of four tokens (the unit of the noise).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged.kernels.exponential import COEFFICIENTS, LOG2_E
from paged.kernels.philox import KEY_STEPS, MIN_ONE_MINUS_U, MULTIPLIERS, NUM_ROUNDS

if TYPE_CHECKING:
    from paged.kernels.sampling import SamplingColumns

PART: Final = 8192
GROUP: Final = 32
CANDIDATES: Final = 8192
"""Tokens that a row's list holds."""
HALF_BRACKET: Final = 1536
"""Tokens that the bracket is to hold on either side of the guess."""
MARGIN: Final = 2.0**-11

# Exponents below this have mass 0, whatever the number of binary digits.
_NO_MASS = tl.constexpr(-50.0)
_LOG2_E = tl.constexpr(LOG2_E)
_MIN_ONE_MINUS_U = tl.constexpr(MIN_ONE_MINUS_U)
_MARGIN = tl.constexpr(MARGIN)
_NUM_ROUNDS = tl.constexpr(NUM_ROUNDS)
_MULTIPLIER_0, _MULTIPLIER_1 = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)
_KEY_STEP_0, _KEY_STEP_1 = (tl.constexpr(step) for step in KEY_STEPS)
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7 = (tl.constexpr(coefficient) for coefficient in COEFFICIENTS)
# Adding it to a small number and taking it away again rounds to a whole one; its low bits are then that number.
_ROUNDER = tl.constexpr(1.5 * 2.0**52)
_ALL = tl.constexpr(2**31 - 1)
# Beyond this reciprocal of a temperature fp32 scores are not to be trusted.
_STEEPEST = tl.constexpr(1e30)
_WORD_UNIT = tl.constexpr(2.0**-32)
_HALF_WORD_BELOW_1 = tl.constexpr(1 - 2.0**-33)
_LN_2 = tl.constexpr(math.log(2))


def mass_sums(logits_RV: Tensor, row_max_R: Tensor, divisor_R: Tensor, bits: int) -> Tensor:
    """Sum of each row's masses, int64 [R]; the highest logits and the temperatures (none is 0) as the twin has them."""
    num_rows, vocab_size = logits_RV.shape
    num_parts = triton.cdiv(vocab_size, PART)
    mass_RP = torch.empty((num_rows, num_parts), dtype=torch.int64, device=logits_RV.device)
    if num_rows:
        _mass_kernel[(num_parts, num_rows)](
            logits_RV, row_max_R, divisor_R, mass_RP, logits_RV.stride(0), vocab_size,
            BITS=bits, PART=PART, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return mass_RP.sum(1)


def sample_triton(logits_RV: Tensor, columns: SamplingColumns, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw one token a row from logits that penalties and bias have already changed.

    Args:
        logits_RV: float32 or float64, elements of a row adjoin.
        columns: how; penalties and bias are not looked at.
        bits: binary digits of a mass.

    Returns:
        Tokens int64, log-probabilities before and after truncation float64, and whether a row has no distribution; each
        [R]. The first three are arbitrary where the last is true.
    """
    num_rows, vocab_size = logits_RV.shape
    device = logits_RV.device
    assert logits_RV.stride(1) == 1, logits_RV.stride()
    num_parts = triton.cdiv(vocab_size, PART)
    parts = triton.next_power_of_2(num_parts)
    truncates = any(column is not None for column in (columns.top_k_R, columns.top_p_R, columns.min_p_R))
    # Columns that no row asks for are never read.
    top_k_R = columns.seeds_R if columns.top_k_R is None else columns.top_k_R
    top_p_R = columns.temperature_R if columns.top_p_R is None else columns.top_p_R
    min_p_R = columns.temperature_R if columns.min_p_R is None else columns.min_p_R
    asks = {"TOP_K": columns.top_k_R is not None, "TOP_P": columns.top_p_R is not None, "MIN_P": columns.min_p_R is not None}

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    tokens_R = empty(num_rows, dtype=torch.int64)
    raw_R, behavior_R = empty(num_rows, dtype=torch.float64), empty(num_rows, dtype=torch.float64)
    nan_R = empty(num_rows, dtype=torch.bool)
    if num_rows == 0:
        return tokens_R, raw_R, behavior_R, nan_R
    max_RP, max_id_RP = empty(num_rows, parts, dtype=logits_RV.dtype), empty(num_rows, parts, dtype=torch.int32)
    best_RP, close_RP = empty(num_rows, parts, dtype=torch.float32), empty(num_rows, parts, dtype=torch.int32)
    mass_RP = empty(num_rows, parts, dtype=torch.int64)
    rows = (logits_RV, columns.temperature_R, columns.seeds_R, columns.positions_R)
    shape = (logits_RV.stride(0), vocab_size)
    grid = (num_parts, num_rows)
    common = {"PART": PART, "FAST_LOG": logits_RV.is_cuda, "enable_fp_fusion": False}
    draws = (best_RP, close_RP)
    if truncates:
        groups = num_parts * (PART // GROUP)
        high_RG, other_RG = empty(num_rows, groups, dtype=torch.float32), empty(num_rows, groups, dtype=torch.float32)
        bounds_R2 = empty(num_rows, 2, dtype=logits_RV.dtype)
        last_R, last_id_R = empty(num_rows, dtype=logits_RV.dtype), empty(num_rows, dtype=torch.int32)
        kept_R = empty(num_rows, dtype=torch.int64)
        # Above the bracket, and likely enough for min_p: how many tokens and their mass; and the least likely enough.
        counts_2RP = empty(2, num_rows, parts, dtype=torch.int32)
        masses_2RP = empty(2, num_rows, parts, dtype=torch.int64)
        least_RP = empty(num_rows, parts, dtype=logits_RV.dtype)
        listed_R = torch.zeros(num_rows, dtype=torch.int32, device=device)
        list_logit = empty(num_rows, CANDIDATES, dtype=logits_RV.dtype)
        list_id, list_mass = empty(num_rows, CANDIDATES, dtype=torch.int32), empty(num_rows, CANDIDATES, dtype=torch.int64)
        wanted = (top_k_R, top_p_R, min_p_R)
        _scan_kernel[grid](
            *rows, max_RP, max_id_RP, *draws, high_RG, other_RG, *shape,
            PARTS=parts, DRAW=False, GROUPS=True, num_warps=8, **common,
        )  # fmt: skip
        _bracket_kernel[(num_rows,)](
            max_RP, columns.temperature_R, *wanted, high_RG, other_RG, bounds_R2, num_parts, groups, vocab_size,
            PARTS=parts, GROUPS=triton.next_power_of_2(groups), MEMBERS=GROUP, HALF_BRACKET=HALF_BRACKET,
            **asks, num_warps=16, enable_fp_fusion=False,
        )  # fmt: skip
        _weigh_kernel[grid](
            logits_RV, columns.temperature_R, min_p_R, max_RP, bounds_R2, mass_RP, counts_2RP, masses_2RP, least_RP,
            listed_R, list_logit, list_id, list_mass, *shape, num_parts,
            PARTS=parts, BITS=bits, MIN_P=asks["MIN_P"], CANDIDATES=CANDIDATES, LISTS=True, PART=PART,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        _cut_kernel[(num_rows,)](
            logits_RV, columns.temperature_R, *wanted, max_RP, mass_RP, counts_2RP, masses_2RP, least_RP,
            listed_R, list_logit, list_id, list_mass, last_R, last_id_R, kept_R, *shape, num_parts,
            PARTS=parts, BITS=bits, CANDIDATES=CANDIDATES, CHUNK=min(4096, CANDIDATES), **asks,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        _draw_kernel[grid](
            *rows, max_RP, last_R, last_id_R, *draws, *shape, PARTS=parts, num_warps=8, **common
        )  # fmt: skip
    else:
        last_R, last_id_R, kept_R = max_RP, max_id_RP, mass_RP
        _scan_kernel[grid](
            *rows, max_RP, max_id_RP, *draws, max_RP, max_RP, *shape,
            PARTS=parts, DRAW=True, GROUPS=False, num_warps=8, **common,
        )  # fmt: skip
        _weigh_kernel[grid](
            logits_RV, columns.temperature_R, min_p_R, max_RP, max_RP, mass_RP, max_id_RP, mass_RP, max_RP,
            max_id_RP, max_RP, max_id_RP, mass_RP, *shape, num_parts,
            PARTS=parts, BITS=bits, MIN_P=False, CANDIDATES=CANDIDATES, LISTS=False, PART=PART,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    _finish_kernel[(num_rows,)](
        *rows, max_RP, max_id_RP, mass_RP, last_R, last_id_R, kept_R, *draws, tokens_R, raw_R, behavior_R, nan_R,
        *shape, num_parts, PARTS=parts, PART=PART, BITS=bits, TRUNCATES=truncates, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens_R, raw_R, behavior_R, nan_R


@triton.jit
def _inverse(temperature_ptr, row):
    """1 / T in fp64; temperature 0 counts as 1."""
    temperature = tl.load(temperature_ptr + row)
    return 1.0 / tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def _row_max(max_ptr, row, num_parts, PARTS: tl.constexpr):
    """Highest logit of a row; +inf if it has a NaN."""
    part_P = tl.arange(0, PARTS)
    return tl.max(tl.load(max_ptr + row * PARTS + part_P, part_P < num_parts, float("-inf")))


@triton.jit
def _is_finite(x):
    return (x == x) & (x < float("inf")) & (x > float("-inf"))


@triton.jit
def _masses(logits, row_max, inverse, BITS: tl.constexpr):
    """Masses int64 of logits; the twin's operations one by one (``scaled_exponential`` and what stands around it)."""
    x = (logits.to(tl.float64) - row_max.to(tl.float64)) * inverse
    y = x * _LOG2_E
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
    scaled = (root.to(tl.int64, bitcast=True) + ((whole + BITS).to(tl.int64) << 52)).to(tl.float64, bitcast=True)
    mass = (scaled + 0.5).to(tl.int64)
    # Far below any mass, and where the steps above would leave their range (the twin bounds its argument instead).
    return tl.where(logits - row_max >= (1.0 / inverse * _NO_MASS).to(logits.dtype), mass, 0)


@triton.jit
def _log2(x, FAST_LOG: tl.constexpr):
    if FAST_LOG:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def _rough_noise(word, FAST_LOG: tl.constexpr):
    """Gumbel noise of a random word in fp32; next to the fp64 noise of the contract it errs by less than MARGIN / 8."""
    # 1 - u cannot be told from 1 where u is small: there -log(1 - u) is its series, elsewhere 1 - u itself is formed.
    is_small = word < 2**27
    share = tl.fma(tl.where(is_small, word, word ^ 0xFFFFFFFF).to(tl.float32), _WORD_UNIT, 0.5 * _WORD_UNIT)
    small = share * tl.fma(share, tl.fma(share, 0.33333334, 0.5), 1.0)
    large = _log2(tl.maximum(share, _MIN_ONE_MINUS_U), FAST_LOG) * -_LN_2
    return _log2(tl.where(is_small, small, large), FAST_LOG) * -_LN_2


@triton.jit
def _exact_noise(word):
    """The noise of ``gumbel_noise``, operation by operation."""
    one_minus_u = tl.maximum(word.to(tl.float64) * -_WORD_UNIT + _HALF_WORD_BELOW_1, _MIN_ONE_MINUS_U)
    return -tl.log(-tl.log(one_minus_u))


@triton.jit
def _words(seeds_ptr, positions_ptr, row, group_G):
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
def _columns_of_four(x_G4, GROUPS: tl.constexpr):
    """The four columns of [G, 4], each [G]."""
    even_G2, odd_G2 = tl.split(tl.reshape(x_G4, [GROUPS, 2, 2]))
    x0, x2 = tl.split(even_G2)
    x1, x3 = tl.split(odd_G2)
    return x0, x1, x2, x3


@triton.jit
def _load_part(logits_ptr, row, part, stride, vocab_size, PART: tl.constexpr):
    """Logits and token ids of a part, [G, 4]; -inf beyond the vocabulary, and +inf for NaN."""
    group_G = part * (PART // 4) + tl.arange(0, PART // 4)
    id_G4 = group_G[:, None] * 4 + tl.arange(0, 4)[None]
    x_G4 = tl.load(logits_ptr + row.to(tl.int64) * stride + id_G4, id_G4 < vocab_size, float("-inf"))
    return tl.where(x_G4 == x_G4, x_G4, float("inf")), id_G4, group_G


@triton.jit
def _rough_draw(
    x_G4, group_G, base, row, inverse, seeds_ptr, positions_ptr, PART: tl.constexpr, FAST_LOG: tl.constexpr
):
    """Best rough score of a part above ``base``, and a sum over the scores within MARGIN of it: PART + place in the part.

    Of a single one the sum gives the place; several sum to 2 * PART or more.
    """
    steep = tl.minimum(inverse, _STEEPEST).to(tl.float32)
    x0, x1, x2, x3 = _columns_of_four(((x_G4 - base).to(tl.float32)) * steep, PART // 4)
    w0, w1, w2, w3 = _words(seeds_ptr, positions_ptr, row, group_G)
    s0 = x0 + _rough_noise(w0, FAST_LOG)
    s1 = x1 + _rough_noise(w1, FAST_LOG)
    s2 = x2 + _rough_noise(w2, FAST_LOG)
    s3 = x3 + _rough_noise(w3, FAST_LOG)
    best = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)))
    least = best - _MARGIN
    one_G = PART + tl.arange(0, PART // 4) * 4
    close_G = tl.where(s0 >= least, one_G, 0) + tl.where(s1 >= least, one_G + 1, 0)
    close_G += tl.where(s2 >= least, one_G + 2, 0) + tl.where(s3 >= least, one_G + 3, 0)
    return best, tl.sum(close_G)


@triton.jit
def _scan_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, max_ptr, max_id_ptr, best_ptr, close_ptr,
    high_ptr, other_ptr, stride, vocab_size, PARTS: tl.constexpr, PART: tl.constexpr, DRAW: tl.constexpr,
    GROUPS: tl.constexpr, FAST_LOG: tl.constexpr,
):  # fmt: skip
    """Highest logit of a part; and what it draws, or the highest and one other logit of each 32 tokens."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    x_G4, id_G4, group_G = _load_part(logits_ptr, row, part, stride, vocab_size, PART)
    place = row * PARTS + part
    part_max = tl.max(tl.max(x_G4, 1))
    tl.store(max_ptr + place, part_max)
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0:
        tl.store(max_id_ptr + place, tl.min(tl.min(tl.where(x_G4 == part_max, id_G4, _ALL), 1)))
    elif DRAW:
        base = tl.where(_is_finite(part_max), part_max, 0.0)
        inverse = _inverse(temperature_ptr, row)
        best, close = _rough_draw(x_G4, group_G, base, row, inverse, seeds_ptr, positions_ptr, PART, FAST_LOG)
        tl.store(best_ptr + place, best)
        tl.store(close_ptr + place, close)
    if GROUPS:
        # A group is 4 tokens and 7 times 4 others, all far apart: likely tokens tend to be neighbours.
        high = tl.max(tl.max(tl.reshape(x_G4, [8, PART // 32, 4]), 2), 0)
        group = part * (PART // 32) + tl.arange(0, PART // 32)
        here = row.to(tl.int64) * (tl.num_programs(0) * (PART // 32)) + group
        tl.store(high_ptr + here, high.to(tl.float32))
        other_id = part * PART + tl.arange(0, PART // 32) * 4 + 1
        other = tl.load(logits_ptr + row.to(tl.int64) * stride + other_id, other_id < vocab_size, float("-inf"))
        tl.store(other_ptr + here, other.to(tl.float32))


@triton.jit
def _draw_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, max_ptr, last_ptr, last_id_ptr, best_ptr,
    close_ptr, stride, vocab_size, PARTS: tl.constexpr, PART: tl.constexpr, FAST_LOG: tl.constexpr,
):  # fmt: skip
    """What a part draws among the tokens up to a row's last kept one."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    place = row * PARTS + part
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        part_max = tl.load(max_ptr + place)
        last = tl.load(last_ptr + row)
        if part_max < last:
            tl.store(best_ptr + place, float("-inf"))
            tl.store(close_ptr + place, 0)
        else:
            last_id = tl.load(last_id_ptr + row)
            x_G4, id_G4, group_G = _load_part(logits_ptr, row, part, stride, vocab_size, PART)
            kept_G4 = (x_G4 > last) | ((x_G4 == last) & (id_G4 <= last_id))
            x_G4 = tl.where(kept_G4, x_G4, float("-inf"))
            base = tl.where(_is_finite(part_max), part_max, 0.0)
            inverse = _inverse(temperature_ptr, row)
            best, close = _rough_draw(
                x_G4, group_G, base, row, inverse, seeds_ptr, positions_ptr, PART, FAST_LOG
            )
            tl.store(best_ptr + place, best)
            tl.store(close_ptr + place, close)


@triton.jit
def _mass_kernel(
    logits_ptr, max_ptr, divisor_ptr, mass_ptr, stride, vocab_size, BITS: tl.constexpr, PART: tl.constexpr
):
    """Sum of masses of a part, given the row's highest logit."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    x_G4, _, _ = _load_part(logits_ptr, row, part, stride, vocab_size, PART)
    inverse = 1.0 / tl.load(divisor_ptr + row)
    mass = tl.sum(tl.sum(_masses(x_G4, tl.load(max_ptr + row), inverse, BITS), 1))
    tl.store(mass_ptr + row * tl.num_programs(0) + part, mass)


@triton.jit
def _bracket_kernel(
    max_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, high_ptr, other_ptr, bounds_ptr, num_parts, num_groups,
    vocab_size, PARTS: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr, HALF_BRACKET: tl.constexpr,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """Guess the logits between which a row's last kept token lies; nothing but speed hangs on it."""
    row = tl.program_id(0)
    row_max = _row_max(max_ptr, row, num_parts, PARTS)
    inverse = _inverse(temperature_ptr, row).to(tl.float32)
    group_G = tl.arange(0, GROUPS)
    exists_G = group_G < num_groups
    place_G = row.to(tl.int64) * num_groups + group_G
    top = row_max.to(tl.float32)
    # In units of the exponent; what exp takes below this weighs nothing.
    high_G = tl.maximum((tl.load(high_ptr + place_G, exists_G, float("-inf")) - top) * inverse, -60.0)
    other_G = tl.maximum((tl.load(other_ptr + place_G, exists_G, float("-inf")) - top) * inverse, -60.0)
    high_weight_G = tl.exp(high_G)
    other_weight_G = tl.exp(other_G) * (MEMBERS - 1)
    rank = vocab_size.to(tl.float32)
    lowest = -40.0
    if MIN_P:
        lowest = tl.maximum(lowest, tl.log(tl.maximum(tl.load(min_p_ptr + row).to(tl.float32), 1e-30)))
    likely_G = (high_G >= lowest).to(tl.float32)
    other_likely_G = (other_G >= lowest).to(tl.float32) * (MEMBERS - 1)
    low_rank = tl.sum(likely_G + other_likely_G)
    high_rank = low_rank
    if TOP_K:
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < low_rank):
            low_rank = top_k.to(tl.float32)
            high_rank = low_rank
    if TOP_P:
        top_p = tl.load(top_p_ptr + row).to(tl.float32)
        if top_p < 1:
            # The exponent at the limit's rank, for its mass; then the one at the share of that mass.
            below = -60.0
            above = 0.0
            for _ in range(14):
                middle = (below + above) * 0.5
                count = tl.sum((high_G >= middle).to(tl.float32) + (other_G >= middle).to(tl.float32) * (MEMBERS - 1))
                below = tl.where(count >= low_rank, middle, below)
                above = tl.where(count >= low_rank, above, middle)
            limit = below
            mass = tl.sum(tl.where(high_G >= limit, high_weight_G, 0.0) + tl.where(other_G >= limit, other_weight_G, 0.0))
            below = -60.0
            above = 0.0
            for _ in range(14):
                middle = (below + above) * 0.5
                part = tl.sum(tl.where(high_G >= middle, high_weight_G, 0.0) + tl.where(other_G >= middle, other_weight_G, 0.0))
                below = tl.where(part >= top_p * mass, middle, below)
                above = tl.where(part >= top_p * mass, above, middle)
            high_rank = tl.sum((high_G >= below).to(tl.float32) + (other_G >= below).to(tl.float32) * (MEMBERS - 1))
            # A limit far below the nucleus is left to min_p's sums, or found in the row.
            low_rank = tl.where(low_rank - high_rank < HALF_BRACKET, low_rank, high_rank)
    low_rank = low_rank + HALF_BRACKET
    high_rank = high_rank - HALF_BRACKET
    low_below = -60.0
    low_above = 0.0
    high_below = -60.0
    high_above = 0.0
    for _ in range(14):
        low = (low_below + low_above) * 0.5
        high = (high_below + high_above) * 0.5
        low_count = tl.sum((high_G >= low).to(tl.float32) + (other_G >= low).to(tl.float32) * (MEMBERS - 1))
        high_count = tl.sum((high_G >= high).to(tl.float32) + (other_G >= high).to(tl.float32) * (MEMBERS - 1))
        low_below = tl.where(low_count >= low_rank, low, low_below)
        low_above = tl.where(low_count >= low_rank, low_above, low)
        high_below = tl.where(high_count >= high_rank, high, high_below)
        high_above = tl.where(high_count >= high_rank, high_above, high)
    element = bounds_ptr.dtype.element_ty
    # An exponent below all that weighs anything stands for every token.
    low_bound = tl.where(low_below <= -60.0, float("-inf"), top + low_below / inverse)
    high_bound = tl.where(high_rank <= 0, float("inf"), top + high_above / inverse)
    tl.store(bounds_ptr + row * 2, low_bound.to(element))
    tl.store(bounds_ptr + row * 2 + 1, high_bound.to(element))


@triton.jit
def _weigh_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, max_ptr, bounds_ptr, mass_ptr, counts_ptr, masses_ptr, least_ptr,
    listed_ptr, list_logit_ptr, list_id_ptr, list_mass_ptr, stride, vocab_size, num_parts, PARTS: tl.constexpr,
    BITS: tl.constexpr, MIN_P: tl.constexpr, CANDIDATES: tl.constexpr, LISTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Sums of a part's masses: all; with LISTS also those above the bracket and those min_p keeps, and the list."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    place = row * PARTS + part
    x_G4, id_G4, _ = _load_part(logits_ptr, row, part, stride, vocab_size, PART)
    mass_G4 = _masses(x_G4, _row_max(max_ptr, row, num_parts, PARTS), _inverse(temperature_ptr, row), BITS)
    tl.store(mass_ptr + place, tl.sum(tl.sum(mass_G4, 1)))
    if LISTS:
        element: tl.constexpr = logits_ptr.dtype.element_ty
        low = tl.load(bounds_ptr + row * 2)
        high = tl.load(bounds_ptr + row * 2 + 1)
        rows_apart = tl.num_programs(1) * PARTS
        exists_G4 = id_G4 < vocab_size
        above_G4 = (x_G4 >= high) & exists_G4
        tl.store(counts_ptr + place, tl.sum(tl.sum(above_G4.to(tl.int32), 1)))
        tl.store(masses_ptr + place, tl.sum(tl.sum(tl.where(above_G4, mass_G4, 0), 1)))
        if MIN_P:
            least_mass = _least_mass(min_p_ptr, row, BITS)
            likely_G4 = (mass_G4 >= least_mass) & exists_G4
            tl.store(counts_ptr + rows_apart + place, tl.sum(tl.sum(likely_G4.to(tl.int32), 1)))
            tl.store(masses_ptr + rows_apart + place, tl.sum(tl.sum(tl.where(likely_G4, mass_G4, 0), 1)))
            least_G4 = tl.where(likely_G4, x_G4, tl.full([], float("inf"), element))
            tl.store(least_ptr + place, tl.min(tl.min(least_G4, 1)))
        listed_G4 = (x_G4 >= low) & (x_G4 < high) & exists_G4
        listed_G = tl.sum(listed_G4.to(tl.int32), 1)
        count = tl.sum(listed_G)
        if count > 0:
            first = tl.atomic_add(listed_ptr + row, count)
            before_G = tl.cumsum(listed_G, 0) - listed_G
            within_G4 = tl.cumsum(listed_G4.to(tl.int32), 1) - listed_G4.to(tl.int32)
            slot_G4 = first + before_G[:, None] + within_G4
            stored_G4 = listed_G4 & (slot_G4 < CANDIDATES)
            here_G4 = row.to(tl.int64) * CANDIDATES + slot_G4
            tl.store(list_logit_ptr + here_G4, x_G4, stored_G4)
            tl.store(list_id_ptr + here_G4, id_G4, stored_G4)
            tl.store(list_mass_ptr + here_G4, mass_G4, stored_G4)


@triton.jit
def _least_mass(min_p_ptr, row, BITS: tl.constexpr):
    """Least mass that min_p keeps."""
    scaled = tl.minimum(tl.maximum(tl.load(min_p_ptr + row), 0.0), 1.0) * (2.0**BITS)
    down = scaled.to(tl.int64)
    return down + (down.to(tl.float64) < scaled).to(tl.int64)


@triton.jit
def _nucleus_mass(total, top_p):
    """``nucleus_mass`` of one row, in the twin's steps."""
    pattern = top_p.to(tl.int64, bitcast=True)
    exponent = pattern >> 52
    digits = (pattern & ((1 << 52) - 1)) | (1 << 52)
    shift = 1075 - exponent
    limb = (1 << 31) - 1
    digits_high = digits >> 31
    digits_low = digits & limb
    total_high = total >> 31
    total_low = total & limb
    bottom = digits_low * total_low
    middle = digits_high * total_low + digits_low * total_high + (bottom >> 31)
    high = digits_high * total_high + (middle >> 31)
    low = ((middle & limb) << 31) | (bottom & limb)
    low_shift = tl.minimum(shift, 62)
    high_shift = tl.minimum(tl.maximum(shift - 62, 0), 62)
    one = total * 0 + 1
    quotient = ((high >> high_shift) << (62 - low_shift)) + (low >> low_shift)
    remainder = (low & ((one << low_shift) - 1)) | (high & ((one << high_shift) - 1))
    needed = tl.maximum(quotient + (remainder != 0).to(tl.int64), 1)
    # A subnormal share of any total is less than one.
    return tl.where(exponent == 0, one, needed)


@triton.jit
def _key(x):
    """Unsigned number that orders as the logits do; -0 counts as +0."""
    if x.dtype == tl.float64:
        signed = (x + 0.0).to(tl.int64, bitcast=True)
        return (signed ^ ((signed >> 63) | (-1 << 63))).to(tl.uint64, bitcast=True)
    else:
        narrow = (x + 0.0).to(tl.int32, bitcast=True)
        return (narrow ^ ((narrow >> 31) | (-1 << 31))).to(tl.uint32, bitcast=True)


@triton.jit
def _logit(key):
    """The logit of a key."""
    if key.dtype == tl.uint64:
        signed = key.to(tl.int64, bitcast=True)
        return (signed ^ ((~signed >> 63) | (-1 << 63))).to(tl.float64, bitcast=True)
    else:
        narrow = key.to(tl.int32, bitcast=True)
        return (narrow ^ ((~narrow >> 31) | (-1 << 31))).to(tl.float32, bitcast=True)


@triton.jit
def _candidates(
    first, listed, in_list, logits_ptr, row, stride, vocab_size, row_max, inverse, list_logit_ptr, list_id_ptr,
    list_mass_ptr, BITS: tl.constexpr, CANDIDATES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Keys, ids and masses of CHUNK tokens from ``first`` on, of the list or the row, and whether they exist."""
    place_N = first + tl.arange(0, CHUNK)
    if in_list:
        exists_N = place_N < listed
        here_N = row.to(tl.int64) * CANDIDATES + place_N
        x_N = tl.load(list_logit_ptr + here_N, exists_N, 0.0)
        id_N = tl.load(list_id_ptr + here_N, exists_N, 0)
        mass_N = tl.load(list_mass_ptr + here_N, exists_N, 0)
    else:
        exists_N = place_N < vocab_size
        x_N = tl.load(logits_ptr + row.to(tl.int64) * stride + place_N, exists_N, float("-inf"))
        id_N = place_N
        mass_N = _masses(x_N, row_max, inverse, BITS)
    return _key(x_N), id_N, mass_N, exists_N


@triton.jit
def _search(
    needed, above_count, above_mass, BY_MASS: tl.constexpr, in_list, listed, logits_ptr, row, stride, vocab_size,
    row_max, inverse, list_logit_ptr, list_id_ptr, list_mass_ptr, BITS: tl.constexpr, CANDIDATES: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The shortest prefix of the order with ``needed`` tokens, or that mass: its last logit, last id and mass.

    ``above_count`` and ``above_mass`` are those of the tokens above all candidates; the prefix must end among these.
    """
    num = tl.where(in_list, listed, vocab_size)
    wide: tl.constexpr = logits_ptr.dtype.element_ty == tl.float64
    key_type: tl.constexpr = tl.uint64 if wide else tl.uint32
    digits: tl.constexpr = 32 if wide else 16
    start = above_mass if BY_MASS else above_count.to(tl.int64)
    # The greatest key such that what is not below it suffices, two bits at a time.
    key = tl.zeros([], key_type)
    unit = tl.full([], 1 << 2 * (digits - 1), key_type)
    for _ in range(digits):
        key1 = key + unit
        key2 = key1 + unit
        key3 = key2 + unit
        sum1 = start
        sum2 = start
        sum3 = start
        for first in range(0, num, CHUNK):
            key_N, id_N, mass_N, exists_N = _candidates(
                first, listed, in_list, logits_ptr, row, stride, vocab_size, row_max, inverse, list_logit_ptr,
                list_id_ptr, list_mass_ptr, BITS, CANDIDATES, CHUNK,
            )  # fmt: skip
            value_N = tl.where(exists_N, mass_N if BY_MASS else mass_N * 0 + 1, 0)
            sum1 += tl.sum(tl.where(key_N >= key1, value_N, 0))
            sum2 += tl.sum(tl.where(key_N >= key2, value_N, 0))
            sum3 += tl.sum(tl.where(key_N >= key3, value_N, 0))
        key = tl.where(sum3 >= needed, key3, tl.where(sum2 >= needed, key2, tl.where(sum1 >= needed, key1, key)))
        unit = unit >> 2
    count = above_count.to(tl.int64)
    mass = above_mass
    ties = tl.zeros([], tl.int64)
    tie_mass = tl.zeros([], tl.int64)
    for first in range(0, num, CHUNK):
        key_N, id_N, mass_N, exists_N = _candidates(
            first, listed, in_list, logits_ptr, row, stride, vocab_size, row_max, inverse, list_logit_ptr,
            list_id_ptr, list_mass_ptr, BITS, CANDIDATES, CHUNK,
        )  # fmt: skip
        count += tl.sum(((key_N > key) & exists_N).to(tl.int64))
        mass += tl.sum(tl.where((key_N > key) & exists_N, mass_N, 0))
        ties += tl.sum(((key_N == key) & exists_N).to(tl.int64))
        tie_mass = tl.maximum(tie_mass, tl.max(tl.where((key_N == key) & exists_N, mass_N, 0)))
    if BY_MASS:
        taken = (needed - mass + tie_mass - 1) // tl.maximum(tie_mass, 1)
    else:
        taken = needed - count
    last_id = tl.zeros([], tl.int32) + _ALL
    if taken < ties:
        # The lowest id up to which there are enough of the equal ones.
        last_id = tl.zeros([], tl.int32)
        step = tl.full([], 1 << 30, tl.int32)
        while step > 0:
            found = tl.zeros([], tl.int64)
            for first in range(0, num, CHUNK):
                key_N, id_N, mass_N, exists_N = _candidates(
                    first, listed, in_list, logits_ptr, row, stride, vocab_size, row_max, inverse, list_logit_ptr,
                    list_id_ptr, list_mass_ptr, BITS, CANDIDATES, CHUNK,
                )  # fmt: skip
                found += tl.sum(((key_N == key) & exists_N & (id_N < last_id + step)).to(tl.int64))
            last_id = tl.where(found < taken, last_id + step, last_id)
            step = step >> 1
    return _logit(key), last_id, mass + taken * tie_mass


@triton.jit
def _cut_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, max_ptr, mass_ptr, counts_ptr, masses_ptr, least_ptr,
    listed_ptr, list_logit_ptr, list_id_ptr, list_mass_ptr, last_ptr, last_id_ptr, kept_ptr, stride, vocab_size,
    num_parts, PARTS: tl.constexpr, BITS: tl.constexpr, CANDIDATES: tl.constexpr, CHUNK: tl.constexpr,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """Last kept token of a row and the mass of all kept ones."""
    row = tl.program_id(0)
    row_max = _row_max(max_ptr, row, num_parts, PARTS)
    inverse = _inverse(temperature_ptr, row)
    part_P = tl.arange(0, PARTS)
    exists_P = part_P < num_parts
    place_P = row * PARTS + part_P
    rows_apart = tl.num_programs(0) * PARTS
    total = tl.sum(tl.load(mass_ptr + place_P, exists_P, 0))
    last = tl.full([], float("-inf"), logits_ptr.dtype.element_ty)
    last_id = tl.zeros([], tl.int32) + _ALL
    kept = total
    if _is_finite(row_max):
        limit = vocab_size.to(tl.int64)
        if MIN_P:
            limit = tl.sum(tl.load(counts_ptr + rows_apart + place_P, exists_P, 0)).to(tl.int64)
            kept = tl.sum(tl.load(masses_ptr + rows_apart + place_P, exists_P, 0))
            last = tl.min(tl.load(least_ptr + place_P, exists_P, float("inf")))
        above_count = tl.sum(tl.load(counts_ptr + place_P, exists_P, 0))
        above_mass = tl.sum(tl.load(masses_ptr + place_P, exists_P, 0))
        listed = tl.load(listed_ptr + row)
        fits = listed <= CANDIDATES
        zero32 = above_count * 0
        zero64 = above_mass * 0
        if TOP_K:
            top_k = tl.load(top_k_ptr + row)
            if (top_k > 0) & (top_k < limit):
                in_list = fits & (above_count < top_k) & (top_k <= above_count + listed)
                last, last_id, kept = _search(
                    top_k, tl.where(in_list, above_count, zero32), tl.where(in_list, above_mass, zero64), False,
                    in_list, listed, logits_ptr, row, stride, vocab_size, row_max, inverse, list_logit_ptr,
                    list_id_ptr, list_mass_ptr, BITS, CANDIDATES, CHUNK,
                )  # fmt: skip
        if TOP_P:
            top_p = tl.load(top_p_ptr + row)
            if top_p < 1:
                needed = _nucleus_mass(kept, top_p)
                listed_mass = zero64
                for first in range(0, tl.where(fits, listed, 0), CHUNK):
                    place_N = first + tl.arange(0, CHUNK)
                    here_N = row.to(tl.int64) * CANDIDATES + place_N
                    listed_mass += tl.sum(tl.load(list_mass_ptr + here_N, place_N < listed, 0))
                in_list = fits & (above_mass < needed) & (needed <= above_mass + listed_mass)
                last, last_id, kept = _search(
                    needed, tl.where(in_list, above_count, zero32), tl.where(in_list, above_mass, zero64), True,
                    in_list, listed, logits_ptr, row, stride, vocab_size, row_max, inverse, list_logit_ptr,
                    list_id_ptr, list_mass_ptr, BITS, CANDIDATES, CHUNK,
                )  # fmt: skip
    tl.store(last_ptr + row, last)
    tl.store(last_id_ptr + row, last_id)
    tl.store(kept_ptr + row, kept)


@triton.jit
def _finish_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, max_ptr, max_id_ptr, mass_ptr, last_ptr, last_id_ptr,
    kept_ptr, best_ptr, close_ptr, tokens_ptr, raw_ptr, behavior_ptr, nan_ptr, stride, vocab_size,
    num_parts, PARTS: tl.constexpr, PART: tl.constexpr, BITS: tl.constexpr, TRUNCATES: tl.constexpr,
):  # fmt: skip
    """Token of a row and its log-probabilities."""
    row = tl.program_id(0)
    row_max = _row_max(max_ptr, row, num_parts, PARTS)
    is_finite = _is_finite(row_max)
    inverse = _inverse(temperature_ptr, row)
    part_P = tl.arange(0, PARTS)
    exists_P = part_P < num_parts
    place_P = row * PARTS + part_P
    max_P = tl.load(max_ptr + place_P, exists_P, float("-inf"))
    total = tl.sum(tl.load(mass_ptr + place_P, exists_P, 0))
    token = tl.zeros([], tl.int32)
    if is_finite:
        if tl.load(temperature_ptr + row) == 0:
            token = tl.min(tl.where(max_P == row_max, tl.load(max_id_ptr + place_P, exists_P, _ALL), _ALL))
        else:
            # Scores of parts are above their own highest logit; a part without a finite one has none.
            steep = tl.minimum(inverse, _STEEPEST).to(tl.float32)
            shift_P = ((tl.where(_is_finite(max_P), max_P, row_max) - row_max).to(tl.float32)) * steep
            best_P = tl.where(exists_P, tl.load(best_ptr + place_P, exists_P, float("-inf")) + shift_P, float("-inf"))
            best = tl.max(best_P)
            near_P = best_P >= best - _MARGIN
            close = tl.sum(tl.where(near_P, tl.load(close_ptr + place_P, exists_P, 0), 0))
            token = tl.sum(tl.where(near_P, part_P * PART, 0)) + close - PART
            if (close >= 2 * PART) | (inverse > _STEEPEST):
                best_score = tl.full([], float("-inf"), tl.float64)
                for part in range(num_parts):
                    part_best = tl.max(tl.where(part_P == part, best_P, float("-inf")))
                    if (part_best >= best - _MARGIN) | (inverse > _STEEPEST):
                        x_G4, id_G4, group_G = _load_part(logits_ptr, row, part, stride, vocab_size, PART)
                        if TRUNCATES:
                            last = tl.load(last_ptr + row)
                            kept_G4 = (x_G4 > last) | ((x_G4 == last) & (id_G4 <= tl.load(last_id_ptr + row)))
                            x_G4 = tl.where(kept_G4, x_G4, float("-inf"))
                        scaled_G4 = (x_G4.to(tl.float64) - row_max.to(tl.float64)) * inverse
                        w0, w1, w2, w3 = _words(seeds_ptr, positions_ptr, row, group_G)
                        x0, x1, x2, x3 = _columns_of_four(scaled_G4, PART // 4)
                        s0 = _exact_noise(w0) + x0
                        s1 = _exact_noise(w1) + x1
                        s2 = _exact_noise(w2) + x2
                        s3 = _exact_noise(w3) + x3
                        score = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)))
                        if score > best_score:
                            best_score = score
                            place_G = tl.where(s2 == score, 2, tl.where(s3 == score, 3, _ALL))
                            place_G = tl.where(s0 == score, 0, tl.where(s1 == score, 1, place_G))
                            token = tl.min(tl.where(place_G == _ALL, _ALL, group_G * 4 + place_G))
    token = tl.minimum(token, vocab_size - 1)
    logit = tl.load(logits_ptr + row.to(tl.int64) * stride + token)
    scaled = (logit.to(tl.float64) - row_max.to(tl.float64)) * inverse
    raw = scaled - tl.log(total.to(tl.float64) * (2.0 ** (-BITS)))
    behavior = raw
    if TRUNCATES:
        behavior = scaled - tl.log(tl.load(kept_ptr + row).to(tl.float64) * (2.0 ** (-BITS)))
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(raw_ptr + row, raw)
    tl.store(behavior_ptr + row, behavior)
    tl.store(nan_ptr + row, ~is_finite)
