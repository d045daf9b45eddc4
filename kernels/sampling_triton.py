"""Sampling on a card in Triton: from logits to a token and its log-probabilities without sorting or asking the host.

Contract: what ``paged.kernels.sampling`` says. Masses are the same integers; the nucleus is the same set; the token is
the one with the highest exact score. A row is cut into parts of ``PART`` tokens, one program each, and what parts find
are maxima and sums of integers, which have no order:

1. ``scan``: the highest logit of each part. Without truncation it draws as well (4).
2. ``bracket`` (truncation): from the highest of every 32 tokens and every eighth token, guess between which two logits
   the last kept token lies. A guess decides how fast the answer is found, never which it is.
3. ``weigh``: sums of masses; ``list``: the tokens inside the bracket. ``cut`` finds the last kept token in the list,
   two bits of its logit at a time, or, where the guess was wrong, in the whole row. A list that has all kept tokens is
   drawn from at once.
4. ``draw``: noise of all tokens in fp32, nowhere lower than the contract's by as much as ``MARGIN`` / 4. A part notes
   its best score and which groups of four tokens are within ``MARGIN`` of it. ``finish`` computes the best group's
   scores in fp64; if that group was alone and bears out its rough score, no other token can win, else it computes whole
   parts.

Shapes: R rows, V token ids, P parts, G groups of four tokens (the unit of the noise), B groups of a quarter of a part
or bins of the bracket, C clusters of tokens, N candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged.kernels.exponential import (
    COEFFICIENTS,
    LOG2_E,
    SHORT_COEFFICIENTS,
    SHORT_ROUNDER,
    SHORT_ROUNDER_BITS,
    is_short,
)
from paged.kernels.philox import KEY_STEPS, MIN_ONE_MINUS_U, MULTIPLIERS, NUM_ROUNDS
from paged.kernels.sampling import SamplingColumns

PART: Final = 8192
CLUSTER: Final = 32
"""Tokens of which the bracket knows the highest."""
SAMPLED: Final = 8
"""The bracket sees one token in so many."""
CANDIDATES: Final = 8192
"""Tokens that a row's list holds."""
HALF_BRACKET: Final = 2048
"""Tokens that the bracket is to hold on either side of the guess."""
MARGIN: Final = 2.0**-11
DRAW_WARPS: Final = 8
WEIGH_WARPS: Final = 8
"""Warps of the kernel that forms masses."""
BACKWARDS = True
"""Whether that kernel takes the last row first, which was read last and may still be near."""
LISTS_WITH_MASSES = True
"""Whether the kernel that forms masses makes the lists too; else one of their own does."""
DRAWS_WITH_MASSES = True
"""Whether that kernel draws too, among the tokens above the bracket; else rows too long for a list are read again."""

# Exponents below this have mass 0, whatever the number of binary digits.
_NO_MASS = tl.constexpr(-50.0)
_LEAST_LOGIT = tl.constexpr(-3e38)
_LOG2_E = tl.constexpr(LOG2_E)
_MIN_ONE_MINUS_U = tl.constexpr(MIN_ONE_MINUS_U)
_MARGIN = tl.constexpr(MARGIN)
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
_BINS = tl.constexpr(128)
_BINS_PER_UNIT = tl.constexpr(4.0)
_ALL = tl.constexpr(2**31 - 1)
# Beyond this reciprocal of a temperature fp32 scores are not to be trusted.
_STEEPEST = tl.constexpr(1e30)
_WORD_UNIT = tl.constexpr(2.0**-32)
_HALF_WORD_BELOW_1 = tl.constexpr(1 - 2.0**-33)
_LN_2 = tl.constexpr(math.log(2))
_LOG_LOG_2 = tl.constexpr(-math.log(math.log(2)))


def mass_sums(logits_RV: Tensor, row_max_R: Tensor, divisor_R: Tensor, bits: int) -> Tensor:
    """Sum of each row's masses, int64 [R]; the highest logits and the temperatures (none is 0) as the twin has them."""
    num_rows, vocab_size = logits_RV.shape
    _check(logits_RV, row_max_R, divisor_R)
    num_parts = triton.cdiv(vocab_size, PART)
    mass_RP = torch.empty((num_rows, num_parts), dtype=torch.int64, device=logits_RV.device)
    if num_rows:
        _mass_kernel[(num_parts, num_rows)](
            logits_RV, row_max_R, divisor_R, mass_RP, logits_RV.stride(0), vocab_size,
            BITS=bits, SHORT=is_short(bits), PART=PART, ALIGNED=vocab_size % 4 == 0, num_warps=WEIGH_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return mass_RP.sum(1)


def _check(logits_RV: Tensor, *columns: Tensor | None) -> None:
    assert logits_RV.stride(1) == 1, logits_RV.stride()
    # The second axis of a grid has no room for more.
    assert logits_RV.shape[0] < 2**16, logits_RV.shape
    assert all(column is None or column.is_contiguous() for column in columns)


@dataclass(frozen=True, slots=True)
class _Raw:
    """Rows before penalties and bias, and what was found out about them."""

    logits_RV: Tensor
    max_RP: Tensor
    mass_RP: Tensor


def sample_triton(logits_RV: Tensor, columns: SamplingColumns, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw one token a row.

    All rows are drawn from the logits as they are. Those with penalties or bias are then drawn anew, apart, from a copy
    in fp64; how many there are only the device knows, so that there is room for as many as there can be.

    Args:
        logits_RV: float32 or float64, elements of a row adjoin.
        columns: as ``sample`` has them.
        bits: binary digits of a mass.

    Returns:
        Tokens int64, log-probabilities before and after processing in the type of the logits, and whether a row has no
        distribution; each [R].
    """
    num_rows = logits_RV.shape[0]

    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, dtype=dtype, device=logits_RV.device)

    results = empty(torch.int64), empty(logits_RV.dtype), empty(logits_RV.dtype), empty(torch.bool)
    if num_rows == 0:
        return results
    raw = _sample_rows(logits_RV, columns, bits, results)
    size = sum(len(rows) for rows in adjusting_rows(columns))
    if size:
        rows_A, adjusted_AV, columns_A = _adjusted(logits_RV, columns, min(size, num_rows))
        _sample_rows(adjusted_AV, columns_A, bits, results, rows_A, raw)
    return results


def adjusting_rows(columns: SamplingColumns) -> list[Tensor]:
    """Numbers of the rows that have penalties and of those that have biases, the latter once for each."""
    rows = [] if columns.penalties is None else [columns.penalties.rows_P]
    return rows if columns.bias is None else [*rows, columns.bias.rows_N]


def _adjusted(logits_RV: Tensor, columns: SamplingColumns, size: int) -> tuple[Tensor, Tensor, SamplingColumns]:
    """Rows after penalties and bias as ``processed_logits`` has them: their numbers, logits and columns.

    There is room for ``size`` rows; what is left over has the number R and a temperature below 0.
    """
    num_rows, vocab_size = logits_RV.shape
    device, penalties, bias = logits_RV.device, columns.penalties, columns.bias
    is_adjusted_R = torch.zeros(num_rows, dtype=torch.bool, device=device)
    for rows in adjusting_rows(columns):
        is_adjusted_R.index_fill_(0, rows, True)
    number_R = is_adjusted_R.cumsum(0)
    rows_A = torch.searchsorted(number_R, torch.arange(1, size + 1, device=device))
    adjusted_AV = torch.empty((size, vocab_size), dtype=torch.float64, device=device)
    entry_A, changes = rows_A, [logits_RV] * 5
    if penalties is not None:
        entries_P = torch.arange(len(penalties.rows_P), device=device)
        entry_A = torch.full_like(rows_A, -1)
        entry_A.index_copy_(0, number_R.index_select(0, penalties.rows_P) - 1, entries_P)
        changes = [penalties.repetition_P, penalties.presence_P, penalties.frequency_P]
        changes += [penalties.output_counts_PV.contiguous(), penalties.prompt_mask_PV.contiguous()]
    _penalty_kernel[(triton.cdiv(vocab_size, PART), size)](
        logits_RV, rows_A, entry_A, *changes, adjusted_AV, logits_RV.stride(0), vocab_size, num_rows,
        PENALIZES=penalties is not None, PART=PART, ALIGNED=vocab_size % 4 == 0, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    if bias is not None and len(bias.rows_N):
        _bias_kernel[(triton.cdiv(len(bias.rows_N), 128),)](
            adjusted_AV, number_R, bias.rows_N, bias.token_ids_N, bias.values_N, vocab_size, len(bias.rows_N),
            BLOCK=128, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    some_A = rows_A.clamp_max(num_rows - 1)

    def chosen(column_R: Tensor | None) -> Tensor | None:
        return None if column_R is None else column_R.index_select(0, some_A)

    temperature_A = columns.temperature_R.index_select(0, some_A).masked_fill_(rows_A == num_rows, -1.0)
    columns_A = SamplingColumns(
        temperature_R=temperature_A,
        seeds_R=columns.seeds_R.index_select(0, some_A),
        positions_R=columns.positions_R.index_select(0, some_A),
        top_k_R=chosen(columns.top_k_R),
        top_p_R=chosen(columns.top_p_R),
        min_p_R=chosen(columns.min_p_R),
    )
    return rows_A, adjusted_AV, columns_A


def _sample_rows(
    logits_RV: Tensor,
    columns: SamplingColumns,
    bits: int,
    results: tuple[Tensor, ...],
    rows_R: Tensor | None = None,
    raw: _Raw | None = None,
) -> _Raw:
    """Draw one token a row from logits that nothing changes any more, into ``results``.

    Args:
        logits_RV: float32 or float64, elements of a row adjoin.
        columns: as ``sample`` has them; penalties and bias are not looked at.
        bits: binary digits of a mass.
        results: what ``sample_triton`` returns.
        rows_R: rows of ``results`` and ``raw``, where these have others. A row with a temperature below 0 is left out.
        raw: what log-probabilities before processing are taken from, if not from ``logits_RV``.
    """
    num_rows, vocab_size = logits_RV.shape
    device = logits_RV.device
    temperature_R, seeds_R, positions_R = columns.temperature_R, columns.seeds_R, columns.positions_R
    top_k_R, top_p_R, min_p_R = columns.top_k_R, columns.top_p_R, columns.min_p_R
    _check(logits_RV, temperature_R, seeds_R, positions_R, top_k_R, top_p_R, min_p_R)
    num_parts = triton.cdiv(vocab_size, PART)
    parts = triton.next_power_of_2(num_parts)
    asks = {"TOP_K": top_k_R is not None, "TOP_P": top_p_R is not None, "MIN_P": min_p_R is not None}
    truncates, short = any(asks.values()), is_short(bits)
    # Columns that no row asks for are never read.
    wanted = (
        seeds_R if top_k_R is None else top_k_R,
        temperature_R if top_p_R is None else top_p_R,
        temperature_R if min_p_R is None else min_p_R,
    )

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    max_RP, max_id_RP = empty(num_rows, parts, dtype=logits_RV.dtype), empty(num_rows, parts, dtype=torch.int32)
    best_RP, close_RP = empty(num_rows, parts, dtype=torch.float32), empty(num_rows, parts, dtype=torch.int32)
    mass_RP = empty(num_rows, parts, dtype=torch.int64)
    rows = (logits_RV, temperature_R, seeds_R, positions_R)
    shape = (logits_RV.stride(0), vocab_size)
    grid = (num_parts, num_rows)
    sizes = {"PARTS": parts, "PART": PART, "ALIGNED": vocab_size % 4 == 0, "enable_fp_fusion": False}
    sizes["SOME"] = rows_R is not None
    draws = (best_RP, close_RP)
    if truncates:
        clusters = num_parts * (PART // CLUSTER)
        high_RC = empty(num_rows, clusters, dtype=torch.float32)
        bounds_R2 = empty(num_rows, 2, dtype=logits_RV.dtype)
        last_R, last_id_R = empty(num_rows, dtype=logits_RV.dtype), empty(num_rows, dtype=torch.int32)
        kept_R = empty(num_rows, dtype=torch.int64)
        # Above the bracket, and likely enough for min_p: how many tokens and their mass; and the least likely enough.
        counts_2RP = empty(2, num_rows, parts, dtype=torch.int32)
        masses_2RP = empty(2, num_rows, parts, dtype=torch.int64)
        least_RP = empty(num_rows, parts, dtype=logits_RV.dtype)
        listed_R = torch.zeros(num_rows, dtype=torch.int32, device=device)
        list_logit = empty(num_rows, CANDIDATES, dtype=logits_RV.dtype)
        list_id = empty(num_rows, CANDIDATES, dtype=torch.int32)
        _scan_kernel[grid](
            *rows, max_RP, max_id_RP, *draws, high_RC, *shape,
            DRAW=False, CLUSTERS=True, FAST_LOG=logits_RV.is_cuda, num_warps=8, **sizes,
        )  # fmt: skip
        searches = asks["TOP_K"] or asks["TOP_P"]
        draws_above = searches and DRAWS_WITH_MASSES
        if searches:
            _bracket_kernel[(num_rows,)](
                logits_RV, max_RP, temperature_R, *wanted, high_RC, bounds_R2, *shape, num_parts,
                PARTS=parts, PART=PART, CLUSTER=CLUSTER, SAMPLED=SAMPLED, TOGETHER=8, HALF_BRACKET=HALF_BRACKET,
                SOME=rows_R is not None, **asks, num_warps=16, maxnreg=64, enable_fp_fusion=False,
            )  # fmt: skip
        _weigh_kernel[grid](
            *rows, wanted[2], max_RP, bounds_R2, mass_RP, counts_2RP, masses_2RP, least_RP, listed_R, list_logit,
            list_id, *draws, *shape, num_parts, BITS=bits, SHORT=short, MIN_P=asks["MIN_P"], SEARCHES=searches,
            LISTS=searches and LISTS_WITH_MASSES, DRAWS=draws_above, BACKWARDS=BACKWARDS, CANDIDATES=CANDIDATES,
            FAST_LOG=logits_RV.is_cuda,
            num_warps=WEIGH_WARPS, **sizes,
        )  # fmt: skip
        if searches and not LISTS_WITH_MASSES:
            _list_kernel[grid](
                logits_RV, temperature_R, bounds_R2, listed_R, list_logit, list_id, *shape,
                CANDIDATES=CANDIDATES, num_warps=8, **sizes,
            )  # fmt: skip
        # Most lists are short: a first pass that holds half of one needs so few registers that no row has to wait.
        is_cut_R, drawn_R = empty(num_rows, dtype=torch.bool), empty(num_rows, dtype=torch.int32)
        score_R = empty(num_rows, dtype=torch.float64)
        for held, is_last in ((CANDIDATES // 2, False), (CANDIDATES, True))[: 2 if searches else 1]:
            _cut_kernel[(num_rows,)](
                *rows, *wanted, max_RP, mass_RP, counts_2RP, masses_2RP, least_RP, bounds_R2, listed_R, list_logit,
                list_id, is_cut_R, drawn_R, score_R, last_R, last_id_R, kept_R, *shape, num_parts,
                PARTS=parts, BITS=bits, SHORT=short, CANDIDATES=CANDIDATES, HELD=held, IS_LAST=is_last, CHUNK=4096,
                SOME=rows_R is not None, DRAWS=draws_above, **asks, num_warps=16 if is_last else 8, maxnreg=128,
                enable_fp_fusion=False,
            )  # fmt: skip
        _draw_kernel[grid](
            *rows, max_RP, drawn_R, last_R, last_id_R, *draws, *shape,
            FAST_LOG=logits_RV.is_cuda, num_warps=DRAW_WARPS, **sizes,
        )  # fmt: skip
    else:
        drawn_R, score_R, last_R, last_id_R, kept_R = max_id_RP, temperature_R, max_RP, max_id_RP, mass_RP
        _scan_kernel[grid](
            *rows, max_RP, max_id_RP, *draws, max_RP, *shape,
            DRAW=True, CLUSTERS=False, FAST_LOG=logits_RV.is_cuda, num_warps=DRAW_WARPS, **sizes,
        )  # fmt: skip
        _weigh_kernel[grid](
            *rows, wanted[2], max_RP, max_RP, mass_RP, max_id_RP, mass_RP, max_RP, max_id_RP, max_RP, max_id_RP,
            *draws, *shape, num_parts, BITS=bits, SHORT=short, MIN_P=False, SEARCHES=False, LISTS=False, DRAWS=False,
            BACKWARDS=BACKWARDS, CANDIDATES=CANDIDATES, FAST_LOG=logits_RV.is_cuda, num_warps=WEIGH_WARPS, **sizes,
        )  # fmt: skip
    unlike = (rows_R, None, None, None) if raw is None else (rows_R, raw.logits_RV, raw.max_RP, raw.mass_RP)
    _finish_kernel[(num_rows,)](
        *rows, max_RP, max_id_RP, mass_RP, drawn_R, score_R, last_R, last_id_R, kept_R, *draws, *results, *unlike,
        *shape, logits_RV.stride(0) if raw is None else raw.logits_RV.stride(0), num_parts,
        BITS=bits, TRUNCATES=truncates, num_warps=8, **sizes,
    )  # fmt: skip
    return _Raw(logits_RV, max_RP, mass_RP)


@triton.jit
def _penalty_kernel(
    logits_ptr, rows_ptr, entry_ptr, repetition_ptr, presence_ptr, frequency_ptr, counts_ptr, prompt_ptr, adjusted_ptr,
    stride, vocab_size, num_rows, PENALIZES: tl.constexpr, PART: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A part of a row in fp64 after its penalties, if it has any."""
    part = tl.program_id(0)
    place = tl.program_id(1)
    row = tl.load(rows_ptr + place)
    if row < num_rows:
        for quarter in range(4):
            x_B4, id_B4, _group_B = _load_part(
                logits_ptr, row, part * 4 + quarter, stride, vocab_size, PART // 4, ALIGNED
            )
            x_B4 = x_B4.to(tl.float64)
            exists_B4 = id_B4 < vocab_size
            if PENALIZES:
                entry = tl.load(entry_ptr + place)
                if entry >= 0:
                    count_B4 = tl.load(counts_ptr + entry * vocab_size + id_B4, exists_B4, 0)
                    in_prompt_B4 = tl.load(prompt_ptr + entry * vocab_size + id_B4, exists_B4, 0) != 0
                    repetition = tl.load(repetition_ptr + entry)
                    repeated_B4 = tl.where(x_B4 > 0, x_B4 / repetition, x_B4 * repetition)
                    x_B4 = tl.where((count_B4 > 0) | in_prompt_B4, repeated_B4, x_B4)
                    x_B4 -= tl.load(frequency_ptr + entry) * count_B4.to(tl.float64)
                    x_B4 -= tl.load(presence_ptr + entry) * (count_B4 > 0).to(tl.float64)
            tl.store(adjusted_ptr + place.to(tl.int64) * vocab_size + id_B4, x_B4, exists_B4)


@triton.jit
def _bias_kernel(
    adjusted_ptr, number_ptr, rows_ptr, ids_ptr, values_ptr, vocab_size, num_biases, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add biases to the adjusted rows, whose numbers count from 1."""
    bias_N = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists_N = bias_N < num_biases
    place_N = tl.load(number_ptr + tl.load(rows_ptr + bias_N, exists_N, 0), exists_N, 1) - 1
    logit_N_ptr = adjusted_ptr + place_N * vocab_size + tl.load(ids_ptr + bias_N, exists_N, 0)
    biased_N = tl.load(logit_N_ptr, exists_N, 0.0) + tl.load(values_ptr + bias_N, exists_N, 0.0)
    tl.store(logit_N_ptr, biased_N, exists_N)


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
def _masses(logits, row_max, inverse, BITS: tl.constexpr, SHORT: tl.constexpr):
    """Masses int64 of logits; the twin's operations one by one (``scaled_exponential`` and what stands around it)."""
    if not SHORT:
        # What weighs nothing counts as the highest logit that surely does; the twin bounds the exponent instead.
        nothing = (row_max.to(tl.float64) + 1.0 / inverse * _NO_MASS).to(logits.dtype)
        logits = tl.maximum(logits, tl.maximum(nothing, _LEAST_LOGIT))
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
def _rough_score(x, word, FAST_LOG: tl.constexpr):
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
def _load_part(logits_ptr, row, part, stride, vocab_size, PART: tl.constexpr, ALIGNED: tl.constexpr):
    """Logits and token ids of a part, [G, 4], and its groups' numbers; -inf beyond the vocabulary."""
    group_G = part * (PART // 4) + tl.arange(0, PART // 4)
    id_G4 = group_G[:, None] * 4 + tl.arange(0, 4)[None]
    exists_G4 = (group_G * 4 < vocab_size)[:, None] if ALIGNED else id_G4 < vocab_size
    return tl.load(logits_ptr + row.to(tl.int64) * stride + id_G4, exists_G4, float("-inf")), id_G4, group_G


@triton.jit
def _highest_of_groups(x_G4, GROUPS: tl.constexpr):
    """Highest logit of each group; +inf where one is NaN: either says that the row has no distribution."""
    x0, x1, x2, x3 = _columns_of_four(x_G4, GROUPS)
    high_G = tl.maximum(x0, x1, propagate_nan=tl.PropagateNan.ALL)
    high_G = tl.maximum(high_G, x2, propagate_nan=tl.PropagateNan.ALL)
    high_G = tl.maximum(high_G, x3, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(high_G == high_G, high_G, float("inf"))


@triton.jit
def _only_kept(x_G4, id_G4, last_ptr, last_id_ptr, row):
    """Logits with -inf for the tokens after the row's last kept one."""
    last = tl.load(last_ptr + row)
    kept_G4 = (x_G4 > last) | ((x_G4 == last) & (id_G4 <= tl.load(last_id_ptr + row)))
    return tl.where(kept_G4, x_G4, float("-inf"))


@triton.jit
def _add_rough(
    x_B4, group_B, quarter, base, steep, row, seeds_ptr, positions_ptr, best_B, second_B, place_B,
    GROUPS: tl.constexpr, FAST_LOG: tl.constexpr,
):  # fmt: skip
    """Rough scores of a quarter's groups above ``base``, added to the best and second best of those before."""
    x0, x1, x2, x3 = _columns_of_four((x_B4 - base).to(tl.float32) * steep, GROUPS)
    w0, w1, w2, w3 = _words(seeds_ptr, positions_ptr, row, group_B)
    score_B = tl.maximum(
        tl.maximum(_rough_score(x0, w0, FAST_LOG), _rough_score(x1, w1, FAST_LOG)),
        tl.maximum(_rough_score(x2, w2, FAST_LOG), _rough_score(x3, w3, FAST_LOG)),
    )
    second_B = tl.maximum(second_B, tl.minimum(best_B, score_B))
    place_B = tl.where(score_B > best_B, quarter * GROUPS, place_B)
    return tl.maximum(best_B, score_B), second_B, place_B


@triton.jit
def _store_rough(best_ptr, close_ptr, place, best_B, second_B, place_B, PART: tl.constexpr):
    """Best rough score of a part, and a sum over the groups within MARGIN of it: PART / 4 + their place.

    Of a single one the sum gives the place; several sum to PART / 2 or more.
    """
    best = tl.max(best_B)
    close_B = tl.where(best_B >= best - _MARGIN, PART // 4 + place_B + tl.arange(0, PART // 16), 0)
    close_B += tl.where(second_B >= best - _MARGIN, PART // 2, 0)
    tl.store(best_ptr + place, best + _LOG_LOG_2)
    tl.store(close_ptr + place, tl.sum(close_B))


@triton.jit
def _rough_draw(
    logits_ptr, row, part, stride, vocab_size, part_max, inverse, seeds_ptr, positions_ptr, last_ptr, last_id_ptr,
    best_ptr, close_ptr, place, CUT: tl.constexpr, PART: tl.constexpr, ALIGNED: tl.constexpr, FAST_LOG: tl.constexpr,
):  # fmt: skip
    """Draw among a part's tokens, with CUT among those up to the row's last kept one."""
    base = tl.where(_is_finite(part_max), part_max, 0.0)
    steep = tl.minimum(inverse, _STEEPEST).to(tl.float32)
    best_B = tl.full([PART // 16], float("-inf"), tl.float32)
    second_B = best_B
    place_B = tl.zeros([PART // 16], tl.int32)
    # A quarter at a time: with all scores in registers few programs would fit beside each other.
    for quarter in range(4):
        x_B4, id_B4, group_B = _load_part(logits_ptr, row, part * 4 + quarter, stride, vocab_size, PART // 4, ALIGNED)
        if CUT:
            x_B4 = _only_kept(x_B4, id_B4, last_ptr, last_id_ptr, row)
        best_B, second_B, place_B = _add_rough(
            x_B4, group_B, quarter, base, steep, row, seeds_ptr, positions_ptr, best_B, second_B, place_B, PART // 16,
            FAST_LOG,
        )  # fmt: skip
    _store_rough(best_ptr, close_ptr, place, best_B, second_B, place_B, PART)


@triton.jit
def _best_of_groups(x_G4, group_G, row_max, row, inverse, seeds_ptr, positions_ptr, GROUPS: tl.constexpr):
    """Best exact score among the tokens of some groups, and the lowest id that has it."""
    x0, x1, x2, x3 = _columns_of_four((x_G4.to(tl.float64) - row_max.to(tl.float64)) * inverse, GROUPS)
    w0, w1, w2, w3 = _words(seeds_ptr, positions_ptr, row, group_G)
    s0 = _exact_noise(w0) + x0
    s1 = _exact_noise(w1) + x1
    s2 = _exact_noise(w2) + x2
    s3 = _exact_noise(w3) + x3
    score = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)))
    place_G = tl.where(s2 == score, 2, tl.where(s3 == score, 3, _ALL))
    place_G = tl.where(s0 == score, 0, tl.where(s1 == score, 1, place_G))
    return score, tl.min(tl.where(place_G == _ALL, _ALL, group_G * 4 + place_G))


@triton.jit
def _scan_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, max_ptr, max_id_ptr, best_ptr, close_ptr, high_ptr, stride,
    vocab_size, PARTS: tl.constexpr, PART: tl.constexpr, ALIGNED: tl.constexpr, DRAW: tl.constexpr,
    CLUSTERS: tl.constexpr, FAST_LOG: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Highest logit of a part; and what it draws, or the highest logit of each cluster of 32 tokens."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    if SOME and tl.load(temperature_ptr + row) < 0:
        return
    x_G4, id_G4, _group_G = _load_part(logits_ptr, row, part, stride, vocab_size, PART, ALIGNED)
    place = row * PARTS + part
    high_G = _highest_of_groups(x_G4, PART // 4)
    part_max = tl.max(high_G)
    if CLUSTERS:
        # A cluster is 4 tokens and 7 times 4 others, all far apart: likely tokens tend to be neighbours.
        high_C = tl.max(tl.reshape(high_G, [8, PART // 32]), 0)
        here_C = row.to(tl.int64) * (tl.num_programs(0) * (PART // 32)) + part * (PART // 32) + tl.arange(0, PART // 32)
        tl.store(high_ptr + here_C, high_C.to(tl.float32))
    tl.store(max_ptr + place, part_max)
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0:
        tl.store(max_id_ptr + place, tl.min(tl.min(tl.where(x_G4 == part_max, id_G4, _ALL), 1)))
    elif DRAW:
        _rough_draw(
            logits_ptr, row, part, stride, vocab_size, part_max, _inverse(temperature_ptr, row), seeds_ptr,
            positions_ptr, max_ptr, max_id_ptr, best_ptr, close_ptr, place, False, PART, ALIGNED, FAST_LOG,
        )  # fmt: skip


@triton.jit
def _draw_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, max_ptr, drawn_ptr, last_ptr, last_id_ptr, best_ptr,
    close_ptr, stride, vocab_size, PARTS: tl.constexpr, PART: tl.constexpr, ALIGNED: tl.constexpr,
    FAST_LOG: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """What a part draws among the tokens up to a row's last kept one."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    if SOME and tl.load(temperature_ptr + row) < 0:
        return
    place = row * PARTS + part
    if (tl.load(temperature_ptr + row) > 0) & (tl.load(drawn_ptr + row) < 0):
        part_max = tl.load(max_ptr + place)
        if part_max < tl.load(last_ptr + row):
            tl.store(best_ptr + place, float("-inf"))
            tl.store(close_ptr + place, 0)
        else:
            _rough_draw(
                logits_ptr, row, part, stride, vocab_size, part_max, _inverse(temperature_ptr, row), seeds_ptr,
                positions_ptr, last_ptr, last_id_ptr, best_ptr, close_ptr, place, True, PART, ALIGNED, FAST_LOG,
            )  # fmt: skip


@triton.jit
def _mass_kernel(
    logits_ptr, max_ptr, divisor_ptr, mass_ptr, stride, vocab_size, BITS: tl.constexpr, SHORT: tl.constexpr,
    PART: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Sum of masses of a part, given the row's highest logit."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    inverse = 1.0 / tl.load(divisor_ptr + row)
    row_max = tl.load(max_ptr + row)
    mass_B = tl.zeros([PART // 16], tl.int64)
    # A quarter at a time: with all masses in registers few programs would fit beside each other.
    for quarter in range(4):
        x_B4, _id_B4, _group_B = _load_part(logits_ptr, row, part * 4 + quarter, stride, vocab_size, PART // 4, ALIGNED)
        mass_B += tl.sum(_masses(x_B4, row_max, inverse, BITS, SHORT), 1)
    tl.store(mass_ptr + row * tl.num_programs(0) + part, tl.sum(mass_B))


@triton.jit
def _bin(x, top, inverse):
    """Bin of a logit by its distance from the highest; the last one takes what weighs nothing."""
    below = (top - x).to(tl.float32) * inverse * _BINS_PER_UNIT
    return tl.where(below < _BINS - 1, below, _BINS - 1.0).to(tl.int32)


@triton.jit
def _sum_before(values_B, bins):
    """Sum of a density over the first ``bins`` bins, of which the last may be a part of one."""
    share_B = tl.minimum(tl.maximum(bins - tl.arange(0, _BINS).to(tl.float32), 0.0), 1.0)
    return tl.sum(values_B * share_B)


@triton.jit
def _bins_holding(values_B, total):
    """How many bins hold ``total``, with a share of the last; all if even these do not."""
    before_B = tl.cumsum(values_B, 0) - values_B
    share_B = tl.minimum(tl.maximum((total - before_B) / tl.maximum(values_B, 1e-30), 0.0), 1.0)
    return tl.sum(
        tl.where(before_B < total, share_B, 0.0) + tl.where((before_B < total) & (values_B == 0), 1.0 - share_B, 0.0)
    )


@triton.jit
def _bracket_kernel(
    logits_ptr, max_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, high_ptr, bounds_ptr, stride, vocab_size,
    num_parts, PARTS: tl.constexpr, PART: tl.constexpr, CLUSTER: tl.constexpr, SAMPLED: tl.constexpr,
    TOGETHER: tl.constexpr, HALF_BRACKET: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    """Guess the logits between which a row's last kept token lies; nothing but speed hangs on it.

    The highest of a cluster stand for themselves, every eighth of the others for eight.
    """
    row = tl.program_id(0)
    if SOME and tl.load(temperature_ptr + row) < 0:
        return
    top = _row_max(max_ptr, row, num_parts, PARTS)
    inverse = _inverse(temperature_ptr, row).to(tl.float32)
    num_clusters = num_parts * (PART // CLUSTER)
    part_T1 = tl.arange(0, TOGETHER)[:, None]
    place_1S = tl.arange(0, PART // SAMPLED)[None]
    cluster_1C = tl.arange(0, PART // CLUSTER)[None]
    high_count_B = tl.zeros([_BINS], tl.int32)
    other_count_B = tl.zeros([_BINS], tl.int32)
    high_row_ptr = high_ptr + row.to(tl.int64) * num_clusters
    for first in range(0, num_parts, TOGETHER):
        cluster_TC = (first + part_T1) * (PART // CLUSTER) + cluster_1C
        high_TC = tl.load(high_row_ptr + cluster_TC, cluster_TC < num_clusters, float("-inf"))
        bin_TC = _bin(high_TC, top.to(tl.float32), inverse)
        high_count_B += tl.histogram(tl.reshape(bin_TC, [TOGETHER * (PART // CLUSTER)]), _BINS)
        # The first eighth of a part has 4 tokens of each cluster.
        id_TS = (first + part_T1) * PART + place_1S
        exists_TS = (first + part_T1 < num_parts) & (id_TS < vocab_size)
        x_TS = tl.load(logits_ptr + row.to(tl.int64) * stride + id_TS, exists_TS, float("-inf")).to(tl.float32)
        own_TS = (first + part_T1) * (PART // CLUSTER) + place_1S // 4
        own_high_TS = tl.load(high_row_ptr + own_TS, exists_TS, float("-inf"))
        bin_TS = tl.where(x_TS < own_high_TS, _bin(x_TS, top.to(tl.float32), inverse), _BINS - 1)
        other_count_B += tl.histogram(tl.reshape(bin_TS, [TOGETHER * (PART // SAMPLED)]), _BINS)
    bin_B = tl.arange(0, _BINS)
    count_B = (high_count_B + other_count_B * SAMPLED).to(tl.float32)
    count_B = tl.where(bin_B < _BINS - 1, count_B, 0.0)
    weight_B = count_B * tl.exp((bin_B.to(tl.float32) + 0.5) * (-1.0 / _BINS_PER_UNIT))
    limit_bins = tl.zeros([], tl.float32) + _BINS
    if MIN_P:
        min_p = tl.maximum(tl.load(min_p_ptr + row).to(tl.float32), 1e-30)
        limit_bins = tl.minimum(limit_bins, tl.log(min_p) * -_BINS_PER_UNIT)
    low_rank = _sum_before(count_B, limit_bins)
    if TOP_K:
        top_k = tl.load(top_k_ptr + row).to(tl.float32)
        low_rank = tl.where((top_k > 0) & (top_k < low_rank), top_k, low_rank)
    high_rank = low_rank
    if TOP_P:
        top_p = tl.load(top_p_ptr + row).to(tl.float32)
        if top_p < 1:
            mass = _sum_before(weight_B, _bins_holding(count_B, low_rank))
            high_rank = _sum_before(count_B, _bins_holding(weight_B, top_p * mass))
            # Where top_k cuts far below the nucleus, the list can hold but one of the two ends.
            low_rank = tl.where(low_rank - high_rank < HALF_BRACKET, low_rank, high_rank)
    low_rank = low_rank + HALF_BRACKET
    high_rank = high_rank - HALF_BRACKET
    unit = inverse * _BINS_PER_UNIT
    # Where the bins do not hold so many, all that weighs anything is listed.
    low = top.to(tl.float32) - tl.minimum(_bins_holding(count_B, low_rank), _BINS - 1.0) / unit
    high = top.to(tl.float32) - _bins_holding(count_B, tl.maximum(high_rank, 0.0)) / unit
    element = bounds_ptr.dtype.element_ty
    # -inf is never inside: it stands for what lies beyond the vocabulary.
    tl.store(bounds_ptr + row * 2, tl.maximum(low, _LEAST_LOGIT).to(element))
    tl.store(bounds_ptr + row * 2 + 1, tl.where(high_rank > 0, high, float("inf")).to(element))


@triton.jit
def _listed(x_B4, quarter, low, high):
    """For each group of a quarter, a bit for each of its tokens inside the bracket: bits 4 ``quarter`` and up."""
    bit_14 = 1 << (quarter * 4 + tl.arange(0, 4)[None])
    return tl.sum(tl.where((x_B4 >= low) & (x_B4 < high), bit_14, 0), 1)


@triton.jit
def _append(
    bits_B, logits_ptr, row, part, stride, listed_ptr, list_logit_ptr, list_id_ptr, PART: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Append a part's tokens, given by their bits, to the row's list in no certain order, and count them all."""
    # How many of 16 bits are set.
    count_B = bits_B - ((bits_B >> 1) & 0x5555)
    count_B = (count_B & 0x3333) + ((count_B >> 2) & 0x3333)
    count_B = (count_B + (count_B >> 4)) & 0x0F0F
    count_B = (count_B + (count_B >> 8)) & 0x1F
    count = tl.sum(count_B)
    if count > 0:
        slot_B = tl.atomic_add(listed_ptr + row, count) + tl.cumsum(count_B, 0) - count_B
        first_of_row = row.to(tl.int64) * CANDIDATES
        id_B = part * PART + tl.arange(0, PART // 16) * 4
        # One token of each group at a time: few have more than two.
        for _ in range(tl.max(count_B)):
            lowest_B = bits_B & -bits_B
            place_B = (lowest_B.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            exists_B = (bits_B != 0) & (slot_B < CANDIDATES)
            token_B = id_B + (place_B >> 2) * (PART // 4) + (place_B & 3)
            x_B = tl.load(logits_ptr + row.to(tl.int64) * stride + token_B, exists_B, 0.0)
            tl.store(list_logit_ptr + first_of_row + slot_B, x_B, exists_B)
            tl.store(list_id_ptr + first_of_row + slot_B, token_B, exists_B)
            bits_B = bits_B ^ lowest_B
            slot_B += 1


@triton.jit
def _weigh_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, min_p_ptr, max_ptr, bounds_ptr, mass_ptr, counts_ptr,
    masses_ptr, least_ptr, listed_ptr, list_logit_ptr, list_id_ptr, best_ptr, close_ptr, stride, vocab_size, num_parts,
    PARTS: tl.constexpr, PART: tl.constexpr, ALIGNED: tl.constexpr, BITS: tl.constexpr, SHORT: tl.constexpr,
    MIN_P: tl.constexpr, SEARCHES: tl.constexpr, LISTS: tl.constexpr, BACKWARDS: tl.constexpr, DRAWS: tl.constexpr,
    CANDIDATES: tl.constexpr, FAST_LOG: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Sums of a part's masses: all; with SEARCHES also those above the bracket; and those that min_p keeps.

    With LISTS it lists the part's tokens inside the bracket too, as ``_list_kernel`` else does. With DRAWS it draws
    among those above, all of which will be kept if the bracket is right.
    """
    part = tl.program_id(0)
    row = tl.program_id(1)
    if BACKWARDS:
        row = tl.num_programs(1) - 1 - row
    if SOME and tl.load(temperature_ptr + row) < 0:
        return
    place = row * PARTS + part
    row_max = _row_max(max_ptr, row, num_parts, PARTS)
    inverse = _inverse(temperature_ptr, row)
    zero_B = tl.zeros([PART // 16], tl.int64)
    mass_B = zero_B
    above_mass_B = zero_B
    above_count_B = zero_B.to(tl.int32)
    listed_B = zero_B.to(tl.int32)
    likely_mass_B = zero_B
    likely_count_B = zero_B.to(tl.int32)
    least_B = zero_B.to(logits_ptr.dtype.element_ty) + float("inf")
    best_B = tl.full([PART // 16], float("-inf"), tl.float32)
    second_B = best_B
    place_B = tl.zeros([PART // 16], tl.int32)
    if DRAWS:
        part_max = tl.load(max_ptr + place)
        base = tl.where(_is_finite(part_max), part_max, 0.0)
        steep = tl.minimum(inverse, _STEEPEST).to(tl.float32)
    low = tl.full([], float("inf"), logits_ptr.dtype.element_ty)
    high = low
    if SEARCHES:
        low = tl.load(bounds_ptr + row * 2)
        high = tl.load(bounds_ptr + row * 2 + 1)
    # A quarter at a time: with all masses in registers few programs would fit beside each other.
    for quarter in range(4):
        x_B4, id_B4, group_B = _load_part(logits_ptr, row, part * 4 + quarter, stride, vocab_size, PART // 4, ALIGNED)
        mass_B4 = _masses(x_B4, row_max, inverse, BITS, SHORT)
        mass_B += tl.sum(mass_B4, 1)
        if high < float("inf"):
            above_B4 = x_B4 >= high
            above_count_B += tl.sum(above_B4.to(tl.int32), 1)
            above_mass_B += tl.sum(tl.where(above_B4, mass_B4, 0), 1)
            if DRAWS:
                best_B, second_B, place_B = _add_rough(
                    tl.where(above_B4, x_B4, float("-inf")), group_B, quarter, base, steep, row, seeds_ptr,
                    positions_ptr, best_B, second_B, place_B, PART // 16, FAST_LOG,
                )  # fmt: skip
        if LISTS:
            listed_B += _listed(x_B4, quarter, low, high)
        if MIN_P:
            likely_B4 = (mass_B4 >= _least_mass(min_p_ptr, row, BITS)) & (id_B4 < vocab_size)
            likely_count_B += tl.sum(likely_B4.to(tl.int32), 1)
            likely_mass_B += tl.sum(tl.where(likely_B4, mass_B4, 0), 1)
            inf = tl.full([], float("inf"), logits_ptr.dtype.element_ty)
            least_B = tl.minimum(least_B, tl.min(tl.where(likely_B4, x_B4, inf), 1))
    tl.store(mass_ptr + place, tl.sum(mass_B))
    rows_apart = tl.num_programs(1) * PARTS
    if SEARCHES:
        tl.store(counts_ptr + place, tl.sum(above_count_B))
        tl.store(masses_ptr + place, tl.sum(above_mass_B))
    if DRAWS:
        _store_rough(best_ptr, close_ptr, place, best_B, second_B, place_B, PART)
    if MIN_P:
        tl.store(counts_ptr + rows_apart + place, tl.sum(likely_count_B))
        tl.store(masses_ptr + rows_apart + place, tl.sum(likely_mass_B))
        tl.store(least_ptr + place, tl.min(least_B))
    if LISTS:
        _append(
            listed_B, logits_ptr, row, part, stride, listed_ptr, list_logit_ptr, list_id_ptr, PART, CANDIDATES
        )  # fmt: skip


@triton.jit
def _list_kernel(
    logits_ptr, temperature_ptr, bounds_ptr, listed_ptr, list_logit_ptr, list_id_ptr, stride, vocab_size,
    PARTS: tl.constexpr, PART: tl.constexpr, ALIGNED: tl.constexpr, CANDIDATES: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """List a part's tokens inside the bracket."""
    part = tl.program_id(0)
    row = tl.program_id(1)
    if SOME and tl.load(temperature_ptr + row) < 0:
        return
    low = tl.load(bounds_ptr + row * 2)
    high = tl.load(bounds_ptr + row * 2 + 1)
    listed_B = tl.zeros([PART // 16], tl.int32)
    for quarter in range(4):
        x_B4, _id_B4, _group_B = _load_part(logits_ptr, row, part * 4 + quarter, stride, vocab_size, PART // 4, ALIGNED)
        listed_B += _listed(x_B4, quarter, low, high)
    _append(listed_B, logits_ptr, row, part, stride, listed_ptr, list_logit_ptr, list_id_ptr, PART, CANDIDATES)


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
def _sums_from(key_N, value_N, key, unit):
    """Sums of the values whose key is not below ``key`` plus 1, 2 and 3 units."""
    sum1 = tl.sum(tl.where(key_N >= key + unit, value_N, 0))
    sum2 = tl.sum(tl.where(key_N >= key + 2 * unit, value_N, 0))
    sum3 = tl.sum(tl.where(key_N >= key + 3 * unit, value_N, 0))
    return sum1, sum2, sum3


@triton.jit
def _taken(needed, count, mass, tie_mass, BY_MASS: tl.constexpr):
    """How many of the equal tokens at the end of a prefix belong to it, given what lies before them."""
    if BY_MASS:
        return (needed - mass + tie_mass - 1) // tl.maximum(tie_mass, 1)
    else:
        return needed - count


@triton.jit
def _search_list(needed, above_count, above_mass, BY_MASS: tl.constexpr, key_N, mass_N, exists_N, id_N_ptr):
    """The shortest prefix of the order with ``needed`` tokens, or that mass: its last logit, last id and mass.

    It must end among the N candidates, whose ids are read where equal ones need them; ``above_count`` and
    ``above_mass`` are those of the tokens above all of them.
    """
    wide: tl.constexpr = key_N.dtype == tl.uint64
    value_N = mass_N if BY_MASS else exists_N.to(tl.int64)
    start = above_mass if BY_MASS else above_count.to(tl.int64)
    # The greatest key such that what is not below it suffices, two bits at a time.
    ones = tl.full([], 2**64 - 1 if wide else 2**32 - 1, key_N.dtype)
    highest = tl.max(tl.where(exists_N, key_N, 0))
    differ = highest ^ tl.min(tl.where(exists_N, key_N, ones))
    unit = tl.full([], 1 << (62 if wide else 30), key_N.dtype)
    while (unit > differ) & (unit > 1):
        unit = unit >> 2
    # All candidates agree above the digit of ``unit``.
    key = highest & (ones ^ (unit * 4 - 1))
    while unit > 0:
        sum1, sum2, sum3 = _sums_from(key_N, value_N, key, unit)
        digit = (start + sum1 >= needed).to(key_N.dtype) + (start + sum2 >= needed) + (start + sum3 >= needed)
        key += unit * digit
        unit = unit >> 2
    higher_N = (key_N > key) & exists_N
    equal_N = (key_N == key) & exists_N
    mass = above_mass + tl.sum(tl.where(higher_N, mass_N, 0))
    tie_mass = tl.max(tl.where(equal_N, mass_N, 0))
    taken = _taken(needed, above_count + tl.sum(higher_N.to(tl.int64)), mass, tie_mass, BY_MASS)
    last_id = tl.zeros([], tl.int32) + _ALL
    if taken < tl.sum(equal_N.to(tl.int64)):
        # The lowest id up to which there are enough of the equal ones.
        id_N = tl.load(id_N_ptr, exists_N, 0)
        last_id = tl.zeros([], tl.int32)
        step = tl.full([], 1 << 30, tl.int32)
        while step > 0:
            found = tl.sum((equal_N & (id_N < last_id + step)).to(tl.int64))
            last_id = tl.where(found < taken, last_id + step, last_id)
            step = step >> 1
    return _logit(key), last_id, mass + taken * tie_mass


@triton.jit
def _row_chunk(
    first, logits_ptr, row, stride, vocab_size, row_max, inverse, BITS: tl.constexpr, SHORT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Keys, ids and masses of CHUNK tokens of a row from ``first`` on, and whether they exist."""
    id_N = first + tl.arange(0, CHUNK)
    exists_N = id_N < vocab_size
    x_N = tl.load(logits_ptr + row.to(tl.int64) * stride + id_N, exists_N, float("-inf"))
    return _key(x_N), id_N, tl.where(exists_N, _masses(x_N, row_max, inverse, BITS, SHORT), 0), exists_N


@triton.jit
def _search_row(
    needed, BY_MASS: tl.constexpr, logits_ptr, row, stride, vocab_size, row_max, inverse, BITS: tl.constexpr,
    SHORT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """``_search_list`` with all tokens of the row as candidates: for the rows whose bracket was wrong."""
    wide: tl.constexpr = logits_ptr.dtype.element_ty == tl.float64
    key_type: tl.constexpr = tl.uint64 if wide else tl.uint32
    key = tl.zeros([], key_type)
    unit = tl.full([], 1 << (62 if wide else 30), key_type)
    for _ in range(32 if wide else 16):
        sum1 = needed * 0
        sum2 = needed * 0
        sum3 = needed * 0
        for first in range(0, vocab_size, CHUNK):
            key_N, id_N, mass_N, exists_N = _row_chunk(
                first, logits_ptr, row, stride, vocab_size, row_max, inverse, BITS, SHORT, CHUNK
            )
            value_N = mass_N if BY_MASS else exists_N.to(tl.int64)
            more1, more2, more3 = _sums_from(key_N, value_N, key, unit)
            sum1 += more1
            sum2 += more2
            sum3 += more3
        key += unit * ((sum1 >= needed).to(key_type) + (sum2 >= needed) + (sum3 >= needed))
        unit = unit >> 2
    count = needed * 0
    mass = needed * 0
    ties = needed * 0
    tie_mass = needed * 0
    for first in range(0, vocab_size, CHUNK):
        key_N, id_N, mass_N, exists_N = _row_chunk(
            first, logits_ptr, row, stride, vocab_size, row_max, inverse, BITS, SHORT, CHUNK
        )
        count += tl.sum(((key_N > key) & exists_N).to(tl.int64))
        mass += tl.sum(tl.where(key_N > key, mass_N, 0))
        ties += tl.sum(((key_N == key) & exists_N).to(tl.int64))
        tie_mass = tl.maximum(tie_mass, tl.max(tl.where(key_N == key, mass_N, 0)))
    taken = _taken(needed, count, mass, tie_mass, BY_MASS)
    last_id = tl.zeros([], tl.int32) + _ALL
    if taken < ties:
        last_id = tl.zeros([], tl.int32)
        step = tl.full([], 1 << 30, tl.int32)
        while step > 0:
            found = needed * 0
            for first in range(0, vocab_size, CHUNK):
                key_N, id_N, mass_N, exists_N = _row_chunk(
                    first, logits_ptr, row, stride, vocab_size, row_max, inverse, BITS, SHORT, CHUNK
                )
                found += tl.sum(((key_N == key) & exists_N & (id_N < last_id + step)).to(tl.int64))
            last_id = tl.where(found < taken, last_id + step, last_id)
            step = step >> 1
    return _logit(key), last_id, mass + taken * tie_mass


@triton.jit
def _cut_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, top_k_ptr, top_p_ptr, min_p_ptr, max_ptr, mass_ptr,
    counts_ptr, masses_ptr, least_ptr, bounds_ptr, listed_ptr, list_logit_ptr, list_id_ptr, is_cut_ptr, drawn_ptr,
    score_ptr, last_ptr, last_id_ptr, kept_ptr, stride, vocab_size, num_parts, PARTS: tl.constexpr, BITS: tl.constexpr,
    SHORT: tl.constexpr, CANDIDATES: tl.constexpr, HELD: tl.constexpr, IS_LAST: tl.constexpr, CHUNK: tl.constexpr,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, DRAWS: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Last kept token of a row and the mass of all kept ones, from a list of up to HELD; or IS_LAST, from the row.

    Where the list has all kept tokens that weigh anything, the row is drawn here, which a score of +inf tells. With
    DRAWS that holds for the list's share of a row too, if all tokens above the bracket are kept. Others are marked by
    -1.
    """
    row = tl.program_id(0)
    if SOME and tl.load(temperature_ptr + row) < 0:
        return
    listed = tl.load(listed_ptr + row)
    is_open = True
    if IS_LAST:
        is_open = ~tl.load(is_cut_ptr + row)
    if is_open:
        row_max = _row_max(max_ptr, row, num_parts, PARTS)
        inverse = _inverse(temperature_ptr, row)
        part_P = tl.arange(0, PARTS)
        exists_P = part_P < num_parts
        place_P = row * PARTS + part_P
        rows_apart = tl.num_programs(0) * PARTS
        last = tl.full([], float("-inf"), logits_ptr.dtype.element_ty)
        last_id = tl.zeros([], tl.int32) + _ALL
        total = tl.sum(tl.load(mass_ptr + place_P, exists_P, 0))
        kept = total
        is_cut = kept == kept
        drawn = tl.full([], -1, tl.int32)
        drawn_score = tl.full([], float("inf"), tl.float64)
        if _is_finite(row_max):
            limit = vocab_size.to(tl.int64)
            if MIN_P:
                limit = tl.sum(tl.load(counts_ptr + rows_apart + place_P, exists_P, 0)).to(tl.int64)
                kept = tl.sum(tl.load(masses_ptr + rows_apart + place_P, exists_P, 0))
                last = tl.min(tl.load(least_ptr + place_P, exists_P, float("inf")))
            if TOP_K or TOP_P:
                above_count = tl.sum(tl.load(counts_ptr + place_P, exists_P, 0)).to(tl.int64)
                above_mass = tl.sum(tl.load(masses_ptr + place_P, exists_P, 0))
                # A list that is not held with all tokens of its bracket is of no use.
                listed = tl.where(listed <= HELD, listed, 0)
                place_N = tl.arange(0, HELD)
                exists_N = place_N < listed
                first_of_row = row.to(tl.int64) * CANDIDATES
                x_N = tl.load(list_logit_ptr + first_of_row + place_N, exists_N, float("-inf"))
                id_N_ptr = list_id_ptr + first_of_row + place_N
                key_N = _key(x_N)
                mass_N = tl.where(exists_N, _masses(x_N, row_max, inverse, BITS, SHORT), 0)
                reached = above_mass + tl.sum(mass_N)
                is_listed = reached == total
                if TOP_K:
                    top_k = tl.load(top_k_ptr + row)
                    if (top_k > 0) & (top_k < limit):
                        if (above_count < top_k) & (top_k <= above_count + listed):
                            last, last_id, kept = _search_list(
                                top_k, above_count, above_mass, False, key_N, mass_N, exists_N, id_N_ptr
                            )
                            is_listed = is_cut
                        # More tokens than weigh anything take nothing away.
                        elif (reached != total) | (top_k <= above_count):
                            if IS_LAST:
                                last, last_id, kept = _search_row(
                                    top_k,
                                    False,
                                    logits_ptr,
                                    row,
                                    stride,
                                    vocab_size,
                                    row_max,
                                    inverse,
                                    BITS,
                                    SHORT,
                                    CHUNK,
                                )
                            else:
                                is_cut = kept != kept
                if TOP_P:
                    top_p = tl.load(top_p_ptr + row)
                    if top_p < 1:
                        needed = _nucleus_mass(kept, top_p)
                        if (above_mass < needed) & (needed <= reached):
                            last, last_id, kept = _search_list(
                                needed, above_count, above_mass, True, key_N, mass_N, exists_N, id_N_ptr
                            )
                            is_listed = kept == kept
                        elif IS_LAST:
                            last, last_id, kept = _search_row(
                                needed, True, logits_ptr, row, stride, vocab_size, row_max, inverse, BITS, SHORT, CHUNK
                            )
                        else:
                            is_cut = kept != kept
                is_whole = above_count == 0
                if DRAWS:
                    is_listed = is_listed & (is_whole | (last < tl.load(bounds_ptr + row * 2 + 1)))
                else:
                    is_listed = is_listed & is_whole
                if is_listed & is_cut & (tl.load(temperature_ptr + row) > 0):
                    id_N = tl.load(id_N_ptr, exists_N, 0)
                    w0, w1, w2, w3 = _words(seeds_ptr, positions_ptr, row, id_N // 4)
                    word_N = tl.where(id_N % 2 == 0, tl.where(id_N % 4 == 0, w0, w2), tl.where(id_N % 4 == 1, w1, w3))
                    score_N = _exact_noise(word_N) + (x_N.to(tl.float64) - row_max.to(tl.float64)) * inverse
                    kept_N = exists_N & ((x_N > last) | ((x_N == last) & (id_N <= last_id)))
                    score_N = tl.where(kept_N, score_N, float("-inf"))
                    best_score = tl.max(score_N)
                    drawn = tl.min(tl.where(kept_N & (score_N == best_score), id_N, _ALL))
                    drawn_score = tl.where(is_whole, drawn_score, best_score)
        tl.store(drawn_ptr + row, drawn)
        tl.store(score_ptr + row, drawn_score)
        tl.store(is_cut_ptr + row, is_cut)
        tl.store(last_ptr + row, last)
        tl.store(last_id_ptr + row, last_id)
        tl.store(kept_ptr + row, kept)


@triton.jit
def _finish_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, max_ptr, max_id_ptr, mass_ptr, drawn_ptr, score_ptr,
    last_ptr, last_id_ptr, kept_ptr, best_ptr, close_ptr, tokens_ptr, raw_ptr, behavior_ptr, nan_ptr, rows_ptr,
    raw_logits_ptr, raw_max_ptr, raw_mass_ptr, stride, vocab_size, raw_stride, num_parts, PARTS: tl.constexpr,
    PART: tl.constexpr, ALIGNED: tl.constexpr, BITS: tl.constexpr, TRUNCATES: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Token of a row and its log-probabilities."""
    row = tl.program_id(0)
    if SOME and tl.load(temperature_ptr + row) < 0:
        return
    row_max = _row_max(max_ptr, row, num_parts, PARTS)
    is_finite = _is_finite(row_max)
    inverse = _inverse(temperature_ptr, row)
    part_P = tl.arange(0, PARTS)
    exists_P = part_P < num_parts
    place_P = row * PARTS + part_P
    max_P = tl.load(max_ptr + place_P, exists_P, float("-inf"))
    total = tl.sum(tl.load(mass_ptr + place_P, exists_P, 0))
    token = tl.zeros([], tl.int32)
    best_score = tl.full([], float("-inf"), tl.float64)
    drawn = tl.full([], -1, tl.int32)
    if TRUNCATES:
        drawn = tl.load(drawn_ptr + row)
    if is_finite:
        if tl.load(temperature_ptr + row) == 0:
            token = tl.min(tl.where(max_P == row_max, tl.load(max_id_ptr + place_P, exists_P, _ALL), _ALL))
            best_score = tl.full([], float("inf"), tl.float64)
        elif drawn >= 0:
            token = drawn
            best_score = tl.load(score_ptr + row)
        if best_score < float("inf"):
            # Scores of parts are above their own highest logit; a part without a finite one has none.
            steep = tl.minimum(inverse, _STEEPEST).to(tl.float32)
            shift_P = ((tl.where(_is_finite(max_P), max_P, row_max) - row_max).to(tl.float32)) * steep
            best_P = tl.where(exists_P, tl.load(best_ptr + place_P, exists_P, float("-inf")) + shift_P, float("-inf"))
            best = tl.max(best_P)
            near_P = best_P >= best - _MARGIN
            close = tl.sum(tl.where(near_P, tl.load(close_ptr + place_P, exists_P, 0), 0))
            is_told = (close < PART // 2) & (inverse <= _STEEPEST)
            if is_told:
                group_1 = tl.sum(tl.where(near_P, part_P * (PART // 4), 0)) + close - PART // 4 + tl.arange(0, 1)
                id_14 = group_1[:, None] * 4 + tl.arange(0, 4)[None]
                x_14 = tl.load(logits_ptr + row.to(tl.int64) * stride + id_14, id_14 < vocab_size, float("-inf"))
                if TRUNCATES:
                    x_14 = _only_kept(x_14, id_14, last_ptr, last_id_ptr, row)
                score, found = _best_of_groups(x_14, group_1, row_max, row, inverse, seeds_ptr, positions_ptr, 1)
                # Rough noise may be too high; then another token may have won.
                is_told = score >= best - _MARGIN / 4
                wins = (score > best_score) | ((score == best_score) & (found < token))
                token = tl.where(wins, found, token)
                best_score = tl.maximum(score, best_score)
            if not is_told:
                best_part = tl.min(tl.where(best_P == best, part_P, _ALL))
                # The part that looks best comes first, so that few of the others can still hold the winner.
                for step in range(num_parts + 1):
                    part = tl.where(step == 0, best_part, step - 1)
                    if tl.max(tl.where(part_P == part, best_P, float("-inf"))) >= best_score - _MARGIN / 4:
                        for quarter in range(4):
                            x_B4, id_B4, group_B = _load_part(
                                logits_ptr, row, part * 4 + quarter, stride, vocab_size, PART // 4, ALIGNED
                            )
                            if TRUNCATES:
                                x_B4 = _only_kept(x_B4, id_B4, last_ptr, last_id_ptr, row)
                            score, found = _best_of_groups(
                                x_B4, group_B, row_max, row, inverse, seeds_ptr, positions_ptr, PART // 16
                            )
                            wins = (score > best_score) | ((score == best_score) & (found < token))
                            token = tl.where(wins, found, token)
                            best_score = tl.maximum(score, best_score)
    logit = tl.load(logits_ptr + row.to(tl.int64) * stride + token)
    scaled = (logit.to(tl.float64) - row_max.to(tl.float64)) * inverse
    nan = float("nan")
    raw = scaled - tl.log(total.to(tl.float64) * (2.0 ** (-BITS)))
    behavior = raw
    if TRUNCATES:
        behavior = scaled - tl.log(tl.load(kept_ptr + row).to(tl.float64) * (2.0 ** (-BITS)))
    own = row
    has_raw = is_finite
    if SOME:
        # The same numbers from the row as it was before it was adjusted.
        own = tl.load(rows_ptr + row).to(tl.int32)
        raw_max = _row_max(raw_max_ptr, own, num_parts, PARTS)
        raw_logit = tl.load(raw_logits_ptr + own.to(tl.int64) * raw_stride + token)
        raw_total = tl.sum(tl.load(raw_mass_ptr + own * PARTS + part_P, exists_P, 0))
        raw = (raw_logit.to(tl.float64) - raw_max.to(tl.float64)) * inverse
        raw = raw - tl.log(raw_total.to(tl.float64) * (2.0 ** (-BITS)))
        has_raw = is_finite & _is_finite(raw_max)
    tl.store(tokens_ptr + own, token.to(tl.int64))
    tl.store(raw_ptr + own, tl.where(has_raw, raw, nan).to(raw_ptr.dtype.element_ty))
    tl.store(behavior_ptr + own, tl.where(is_finite, behavior, nan).to(behavior_ptr.dtype.element_ty))
    tl.store(nan_ptr + own, ~is_finite)
