"""Owns the search for the last token that a row keeps: a guess of two logits around it, the list between, the cut.

Shapes: P parts, C clusters of tokens, S sampled tokens of a cluster, T parts taken together, B bins of the bracket or
groups of a quarter of a part, N candidates.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from paged.kernels.sampling_math_triton import (
    ALL,
    COLUMNS,
    LEAST_LOGIT,
    exact_noise,
    highest_of_row,
    inverse_of,
    is_number,
    key_of,
    logit_of,
    masses_of,
    words_of,
)

LIMITS: Final = ("has_top_k", "has_top_p", "has_min_p")
"""Parameters of kernels that say whether a column is there; one that is not must not be read."""

_BINS = tl.constexpr(128)
_BINS_PER_UNIT = tl.constexpr(4.0)


@triton.jit
def _bin(x, counts, top, inverse):
    """Bin of a logit by its distance from the highest: the last if it does not count, the one before for no weight."""
    below = (top - x) * inverse * _BINS_PER_UNIT
    return tl.where(counts, tl.where(below < _BINS - 2, below, _BINS - 2.0), _BINS - 1.0).to(tl.int32)


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


# Which limits a batch has is not built in: a running engine would wait for seconds when others come.
@triton.jit(do_not_specialize=LIMITS, do_not_specialize_on_alignment=COLUMNS)
def bracket_kernel(
    logits_ptr, max_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, high_ptr, bounds_ptr, listed_ptr, is_cut_ptr,
    stride, vocab_size, num_parts, has_top_k, has_top_p, has_min_p, PARTS: tl.constexpr, PART: tl.constexpr,
    CLUSTER: tl.constexpr, SAMPLED: tl.constexpr, TOGETHER: tl.constexpr, HALF_BRACKET: tl.constexpr,
    SOME: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Guess the logits between which a row's last kept token lies, and begin an empty list for those between.

    Nothing but speed hangs on the guess. The highest of a cluster stand for themselves, an eighth of the others for all
    of these.
    """
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if SOME and tl.load(temperature_ptr + row) < 0:
        return
    top = highest_of_row(max_ptr, row, num_parts, PARTS).to(tl.float32)
    inverse = inverse_of(temperature_ptr, row).to(tl.float32)
    num_clusters = num_parts * (PART // CLUSTER)
    part_T1 = tl.arange(0, TOGETHER)[:, None]
    cluster_1C = tl.arange(0, PART // CLUSTER)[None]
    each: tl.constexpr = CLUSTER // SAMPLED
    token_11S = tl.arange(0, each)[None, None]
    high_count_B = tl.zeros([_BINS], tl.int32)
    other_count_B = tl.zeros([_BINS], tl.int32)
    high_weight_TC = tl.zeros([TOGETHER, PART // CLUSTER], tl.float32)
    high_row_ptr = high_ptr + row.to(tl.int64) * num_clusters
    for first in range(0, num_parts, TOGETHER):
        cluster_TC = (first + part_T1) * (PART // CLUSTER) + cluster_1C
        # The first eighth of a part has 4 tokens of each cluster.
        id_TC = (first + part_T1) * PART + cluster_1C * each
        exists_TC = id_TC < vocab_size
        high_TC = tl.load(high_row_ptr + cluster_TC, exists_TC, float("-inf"))
        bin_TC = _bin(high_TC, exists_TC, top, inverse)
        high_weight_TC += tl.where(exists_TC, tl.exp(tl.minimum((high_TC - top) * inverse, 0.0)), 0.0)
        high_count_B += tl.histogram(tl.reshape(bin_TC, [TOGETHER * (PART // CLUSTER)]), _BINS)
        id_TCS = id_TC[:, :, None] + token_11S
        exists_TCS = id_TCS < vocab_size
        x_TCS = tl.load(logits_ptr + row.to(tl.int64) * stride + id_TCS, exists_TCS, float("-inf")).to(tl.float32)
        bin_TCS = _bin(x_TCS, exists_TCS & (x_TCS < high_TC[:, :, None]), top, inverse)
        other_count_B += tl.histogram(tl.reshape(bin_TCS, [TOGETHER * (PART // SAMPLED)]), _BINS)
    bin_B = tl.arange(0, _BINS)
    counts_B = bin_B < _BINS - 1
    num_others = tl.sum(tl.where(counts_B, other_count_B, 0)).to(tl.float32)
    share = (vocab_size - tl.sum(tl.where(counts_B, high_count_B, 0))).to(tl.float32) / tl.maximum(num_others, 1.0)
    count_B = tl.where(bin_B < _BINS - 2, high_count_B.to(tl.float32) + other_count_B.to(tl.float32) * share, 0.0)
    unit_weight_B = tl.exp((bin_B.to(tl.float32) + 0.5) * (-1.0 / _BINS_PER_UNIT))
    weight_B = count_B * unit_weight_B
    limit_bins = tl.zeros([], tl.float32) + _BINS
    if has_min_p:
        min_p = tl.maximum(tl.load(min_p_ptr + row).to(tl.float32), 1e-30)
        limit_bins = tl.minimum(limit_bins, tl.log(min_p) * -_BINS_PER_UNIT)
    low_rank = _sum_before(count_B, limit_bins)
    if has_top_k:
        top_k = tl.load(top_k_ptr + row).to(tl.float32)
        low_rank = tl.where((top_k > 0) & (top_k < low_rank), top_k, low_rank)
    high_rank = low_rank
    if has_top_p:
        top_p = tl.load(top_p_ptr + row).to(tl.float32)
        if top_p < 1:
            mass = _sum_before(weight_B, _bins_holding(count_B, low_rank))
            # The few that weigh most are among the highest; the middles of their bins say too little of them.
            missed = tl.sum(tl.sum(high_weight_TC, 1)) - tl.sum(high_count_B.to(tl.float32) * unit_weight_B)
            bins = _bins_holding(weight_B, top_p * (mass + missed) - missed)
            # Within a bin the first tokens weigh more than the last, so that fewer of them reach a part of its mass.
            last = bins - tl.floor(bins)
            high_rank = _sum_before(count_B, bins - last * (1 - last) * (0.5 / _BINS_PER_UNIT))
            # Where top_k cuts far below the nucleus, the list can hold but one of the two ends.
            low_rank = tl.where(low_rank - high_rank < HALF_BRACKET, low_rank, high_rank)
    low_rank = low_rank + HALF_BRACKET
    high_rank = high_rank - HALF_BRACKET
    unit = inverse * _BINS_PER_UNIT
    # Where the bins do not hold so many, all that weighs anything is listed.
    low = top - tl.minimum(_bins_holding(count_B, low_rank), _BINS - 2.0) / unit
    high = top - _bins_holding(count_B, tl.maximum(high_rank, 0.0)) / unit
    element = bounds_ptr.dtype.element_ty
    # -inf is never inside: it stands for what lies beyond the vocabulary.
    tl.store(bounds_ptr + row * 2, tl.maximum(low, LEAST_LOGIT).to(element))
    tl.store(bounds_ptr + row * 2 + 1, tl.where(high_rank > 0, high, float("inf")).to(element))
    tl.store(listed_ptr + row, 0)
    tl.store(is_cut_ptr + row, False)


@triton.jit
def listed_bits(x_B4, quarter, low, high):
    """For each group of a quarter, a bit for each of its tokens inside the bracket: bits 4 ``quarter`` and up."""
    bit_14 = 1 << (quarter * 4 + tl.arange(0, 4)[None])
    return tl.sum(tl.where((x_B4 >= low) & (x_B4 < high), bit_14, 0), 1)


@triton.jit
def append_listed(
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
def least_mass(min_p_ptr, row, BITS: tl.constexpr):
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
    value_N = mass_N if BY_MASS else exists_N.to(tl.int32)
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
    last_id = tl.zeros([], tl.int32) + ALL
    if taken < tl.sum(equal_N.to(tl.int64)):
        # The lowest id up to which there are enough of the equal ones.
        id_N = tl.load(id_N_ptr, exists_N, 0)
        last_id = tl.zeros([], tl.int32)
        step = tl.full([], 1 << 30, tl.int32)
        while step > 0:
            found = tl.sum((equal_N & (id_N < last_id + step)).to(tl.int64))
            last_id = tl.where(found < taken, last_id + step, last_id)
            step = step >> 1
    return logit_of(key), last_id, mass + taken * tie_mass


@triton.jit
def _row_chunk(
    first, logits_ptr, row, stride, vocab_size, row_max, inverse, BITS: tl.constexpr, SHORT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Keys, ids and masses of CHUNK tokens of a row from ``first`` on, and whether they exist."""
    id_N = first + tl.arange(0, CHUNK)
    exists_N = id_N < vocab_size
    x_N = tl.load(logits_ptr + row.to(tl.int64) * stride + id_N, exists_N, float("-inf"))
    return key_of(x_N), id_N, tl.where(exists_N, masses_of(x_N, row_max, inverse, BITS, SHORT), 0), exists_N


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
    last_id = tl.zeros([], tl.int32) + ALL
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
    return logit_of(key), last_id, mass + taken * tie_mass


@triton.jit(do_not_specialize=LIMITS, do_not_specialize_on_alignment=COLUMNS)
def cut_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, top_k_ptr, top_p_ptr, max_ptr, mass_ptr, counts_ptr,
    masses_ptr, least_ptr, listed_ptr, list_logit_ptr, list_id_ptr, is_cut_ptr, drawn_ptr, last_ptr, last_id_ptr,
    kept_ptr, stride, vocab_size, num_parts, has_top_k, has_top_p, has_min_p, PARTS: tl.constexpr, BITS: tl.constexpr,
    SHORT: tl.constexpr, SEARCHES: tl.constexpr, CANDIDATES: tl.constexpr, HELD: tl.constexpr, IS_LAST: tl.constexpr,
    CHUNK: tl.constexpr, SOME: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Last kept token of a row and the mass of all kept ones, from a list of up to HELD; or IS_LAST, from the row.

    Rows with a longer list are left to the next pass, and before the last one those whose bracket was wrong. Where the
    list has all kept tokens that weigh anything, the row is drawn here; others are marked by -1.
    """
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if SOME and tl.load(temperature_ptr + row) < 0:
        return
    listed = tl.zeros([], tl.int32)
    is_open = listed == 0
    if SEARCHES:
        listed = tl.load(listed_ptr + row)
        is_open = ~tl.load(is_cut_ptr + row)
        if not IS_LAST:
            is_open = is_open & (listed <= HELD)
    if is_open:
        row_max = highest_of_row(max_ptr, row, num_parts, PARTS)
        inverse = inverse_of(temperature_ptr, row)
        part_P = tl.arange(0, PARTS)
        exists_P = part_P < num_parts
        place_P = row * PARTS + part_P
        rows_apart = tl.num_programs(0) * PARTS
        last = tl.full([], float("-inf"), logits_ptr.dtype.element_ty)
        last_id = tl.zeros([], tl.int32) + ALL
        total = tl.sum(tl.load(mass_ptr + place_P, exists_P, 0))
        kept = total
        is_cut = kept == kept
        drawn = tl.full([], -1, tl.int32)
        if is_number(row_max):
            limit = vocab_size.to(tl.int64)
            if has_min_p:
                limit = tl.sum(tl.load(counts_ptr + rows_apart + place_P, exists_P, 0)).to(tl.int64)
                kept = tl.sum(tl.load(masses_ptr + rows_apart + place_P, exists_P, 0))
                last = tl.min(tl.load(least_ptr + place_P, exists_P, float("inf")))
            if SEARCHES:
                above_count = tl.sum(tl.load(counts_ptr + place_P, exists_P, 0)).to(tl.int64)
                above_mass = tl.sum(tl.load(masses_ptr + place_P, exists_P, 0))
                # A list that does not hold all tokens of its bracket is of no use.
                listed = tl.where(listed <= HELD, listed, 0)
                place_N = tl.arange(0, HELD)
                exists_N = place_N < listed
                first_of_row = row.to(tl.int64) * CANDIDATES
                x_N = tl.load(list_logit_ptr + first_of_row + place_N, exists_N, float("-inf"))
                id_N_ptr = list_id_ptr + first_of_row + place_N
                key_N = key_of(x_N)
                mass_N = tl.where(exists_N, masses_of(x_N, row_max, inverse, BITS, SHORT), 0)
                reached = above_mass + tl.sum(mass_N)
                is_listed = reached == total
                if has_top_k:
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
                if has_top_p:
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
                if is_listed & (above_count == 0) & is_cut & (tl.load(temperature_ptr + row) > 0):
                    id_N = tl.load(id_N_ptr, exists_N, 0)
                    w0, w1, w2, w3 = words_of(seeds_ptr, positions_ptr, row, id_N // 4)
                    word_N = tl.where(id_N % 2 == 0, tl.where(id_N % 4 == 0, w0, w2), tl.where(id_N % 4 == 1, w1, w3))
                    score_N = exact_noise(word_N) + (x_N.to(tl.float64) - row_max.to(tl.float64)) * inverse
                    kept_N = exists_N & ((x_N > last) | ((x_N == last) & (id_N <= last_id)))
                    score_N = tl.where(kept_N, score_N, float("-inf"))
                    drawn = tl.min(tl.where(kept_N & (score_N == tl.max(score_N)), id_N, ALL))
        tl.store(drawn_ptr + row, drawn)
        tl.store(is_cut_ptr + row, is_cut)
        tl.store(last_ptr + row, last)
        tl.store(last_id_ptr + row, last_id)
        tl.store(kept_ptr + row, kept)
