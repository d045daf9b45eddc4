"""Sampling on a card in Triton: from logits to a token and its log-probabilities without sorting or asking the host.

Contract: what ``paged.kernels.sampling`` says. Masses are the same integers; the nucleus is the same set; the token is
the one with the highest exact score. A row is cut into parts of ``PART`` tokens, one program each, and what parts find
are maxima and sums of integers, which have no order:

1. ``scan``: the highest logit of each part. Without truncation it draws as well (4).
2. ``bracket`` (truncation): from the highest of every 32 tokens and every eighth token, guess between which two logits
   the last kept token lies. A guess decides how fast the answer is found, never which it is.
3. ``weigh``: sums of masses, and in the same pass a list of the tokens inside the bracket. ``cut`` finds the last kept
   token in the list, two bits of its logit at a time, or, where the guess was wrong, in the whole row. Where the list
   has all kept tokens, it draws among them in fp64.
4. ``draw``: for every other row's tokens an integer key each, which bounds the token's score from above: the logarithm
   of a Philox word is read off its fp32 bits, linearly between powers of two. A part notes the groups of four tokens
   that have its two best keys, and the third best key.
5. ``finish`` computes the noted groups' scores in fp64. If no third key allows a score as high as the best of them, no
   other token can win; else it looks at such parts anew, by fp32 noise nowhere lower than the contract's by as much as
   ``MARGIN`` / 4, and in fp64 where that comes near.

Rows with penalties or biases take the same steps a second time, apart, in fp64.

Shapes: R rows, V token ids, P parts, G groups of four tokens (the unit of the noise), B groups of a quarter of a part,
C clusters of tokens, A rows that penalties or biases adjust, N biases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged.kernels.exponential import MassScale
from paged.kernels.launch import is_dependent, launch
from paged.kernels.sampling_adjust_triton import adjusted, adjusting_rows
from paged.kernels.sampling_columns import SamplingColumns
from paged.kernels.sampling_cut_triton import (
    append_listed,
    bracket_kernel,
    cut_kernel,
    least_mass,
    listed_bits,
)
from paged.kernels.sampling_math_triton import (
    ALL,
    COLUMNS,
    MARGIN,
    PART,
    SLACK,
    STEEPEST,
    add_above,
    add_keys,
    add_masses,
    best_of_groups,
    highest_of_groups,
    highest_of_part,
    highest_of_row,
    highest_rough,
    inverse_of,
    is_number,
    key_of,
    load_part,
    logit_of,
    no_mass,
    only_kept,
    score_bound,
    slope_of,
    store_keys,
    total_mass,
    weights_of,
)

CLUSTER: Final = 32
"""Tokens of which the bracket knows the highest."""
SAMPLED: Final = 8
"""The bracket sees one token in so many."""
CANDIDATES: Final = 8192
"""Tokens that a row's list holds."""
HALF_BRACKET: Final = 1792
"""Tokens that the bracket is to hold on either side of the guess: enough that it is hardly ever wrong, and so few that
half a list holds both sides and a quarter one."""
DRAW_WARPS: Final = 4
"""Warps of the kernel that draws as it looks for the highest logits."""
WEIGH_WARPS: Final = 8
"""Warps of the kernel that forms masses."""
CUT_WARPS: Final = 8
"""Warps of the kernel that cuts, where it holds half a list or less; two programs share a multiprocessor."""


def mass_sums(logits_RV: Tensor, row_max_R: Tensor, inverse_R: Tensor, scale: MassScale) -> Tensor:
    """Sum of each row's masses, int64 [R]; the highest logits and 1 / T in fp64 as the twin has them."""
    num_rows, vocab_size = logits_RV.shape
    _check(logits_RV, row_max_R, inverse_R)
    num_parts = triton.cdiv(vocab_size, PART)
    mass_RP = torch.empty((num_rows, num_parts), dtype=torch.int64, device=logits_RV.device)
    if num_rows:
        launch(
            _mass_kernel, (num_parts, num_rows),
            logits_RV, row_max_R, inverse_R, mass_RP, logits_RV.stride(0), vocab_size,
            BITS=scale.bits, SHORT=scale.is_short, PART=PART, ALIGNED=vocab_size % 4 == 0,
            IS_DEPENDENT=is_dependent(logits_RV), num_warps=WEIGH_WARPS, on=logits_RV,
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


def sample_triton(
    logits_RV: Tensor, columns: SamplingColumns, scale: MassScale
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw one token a row.

    All rows are drawn from the logits as they are. Those with penalties or bias are then drawn anew, apart, from a copy
    in fp64; how many there are only the device knows, so that there is room for as many as there can be.

    Args:
        logits_RV: float32 or float64, elements of a row adjoin.
        columns: as ``sample`` has them.
        scale: of the masses.

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
    raw = _sample_rows(logits_RV, columns, scale, results)
    size = sum(len(rows) for rows in adjusting_rows(columns))
    if size:
        rows_A, adjusted_AV, columns_A = adjusted(logits_RV, columns, min(size, num_rows))
        _sample_rows(adjusted_AV, columns_A, scale, results, rows_A, raw)
    return results


def _sample_rows(
    logits_RV: Tensor,
    columns: SamplingColumns,
    scale: MassScale,
    results: tuple[Tensor, ...],
    rows_R: Tensor | None = None,
    raw: _Raw | None = None,
) -> _Raw:
    """Draw one token a row from logits that nothing changes any more, into ``results``.

    Args:
        logits_RV: float32 or float64, elements of a row adjoin.
        columns: as ``sample`` has them; penalties and bias are not looked at.
        scale: of the masses.
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
    has_limits = top_k_R is not None, top_p_R is not None, min_p_R is not None
    searches, has_min_p = top_k_R is not None or top_p_R is not None, min_p_R is not None
    truncates, bits, short = any(has_limits), scale.bits, scale.is_short
    # Columns that no row asks for are never read.
    wanted = (
        seeds_R if top_k_R is None else top_k_R,
        temperature_R if top_p_R is None else top_p_R,
        temperature_R if min_p_R is None else min_p_R,
    )

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    max_RP, max_id_RP = empty(num_rows, parts, dtype=logits_RV.dtype), empty(num_rows, parts, dtype=torch.int32)
    keys_R3P = empty(num_rows, 3, parts, dtype=torch.int32)
    mass_RP = empty(num_rows, parts, dtype=torch.int64)
    rows = (logits_RV, temperature_R, seeds_R, positions_R)
    shape = (logits_RV.stride(0), vocab_size)
    grid = (num_parts, num_rows)
    shared = {"PARTS": parts, "SOME": rows_R is not None, "IS_DEPENDENT": is_dependent(logits_RV), "on": logits_RV}
    sizes = {"PART": PART, "ALIGNED": vocab_size % 4 == 0, **shared}
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
        listed_R = empty(num_rows, dtype=torch.int32)
        list_logit = empty(num_rows, CANDIDATES, dtype=logits_RV.dtype)
        list_id = empty(num_rows, CANDIDATES, dtype=torch.int32)
        launch(
            _scan_kernel, grid,
            *rows, max_RP, max_id_RP, keys_R3P, high_RC, *shape,
            DRAW=False, CLUSTERS=True, num_warps=8, **sizes,
        )  # fmt: skip
        is_cut_R, drawn_R = empty(num_rows, dtype=torch.bool), empty(num_rows, dtype=torch.int32)
        if searches:
            launch(
                bracket_kernel, (num_rows,),
                logits_RV, max_RP, temperature_R, *wanted, high_RC, bounds_R2, listed_R, is_cut_R, *shape, num_parts,
                *has_limits, PART=PART, CLUSTER=CLUSTER, SAMPLED=SAMPLED, TOGETHER=8, HALF_BRACKET=HALF_BRACKET,
                num_warps=16, maxnreg=64, **shared,
            )  # fmt: skip
        launch(
            _weigh_kernel, grid,
            logits_RV, temperature_R, wanted[2], max_RP, bounds_R2, mass_RP, counts_2RP, masses_2RP, least_RP,
            listed_R, list_logit, list_id, *shape, num_parts, BITS=bits, SHORT=short, MIN_P=has_min_p,
            SEARCHES=searches, CANDIDATES=CANDIDATES, num_warps=WEIGH_WARPS, **sizes,
        )  # fmt: skip
        # Lists are as long as one side of the bracket or both. Passes that hold a quarter and half of a whole one take
        # less time, and so few registers that no row has to wait.
        for share, is_last in ((4, False), (2, False), (1, True)) if searches else ((4, True),):
            launch(
                cut_kernel, (num_rows,),
                *rows, *wanted[:2], max_RP, mass_RP, counts_2RP, masses_2RP, least_RP, listed_R, list_logit, list_id,
                is_cut_R, drawn_R, last_R, last_id_R, kept_R, *shape, num_parts,
                *has_limits, BITS=bits, SHORT=short, SEARCHES=searches, CANDIDATES=CANDIDATES,
                HELD=CANDIDATES // share, IS_LAST=is_last, CHUNK=4096, num_warps=16 if share == 1 else CUT_WARPS,
                maxnreg=128 if share == 1 else 1024 // CUT_WARPS, **shared,
            )  # fmt: skip
        launch(
            _draw_kernel, grid,
            *rows, max_RP, drawn_R, last_R, last_id_R, keys_R3P, *shape, num_warps=8, **sizes
        )  # fmt: skip
    else:
        drawn_R, last_R, last_id_R, kept_R = max_id_RP, max_RP, max_id_RP, mass_RP
        launch(
            _scan_kernel, grid,
            *rows, max_RP, max_id_RP, keys_R3P, max_RP, *shape,
            DRAW=True, CLUSTERS=False, num_warps=DRAW_WARPS, **sizes,
        )  # fmt: skip
        launch(
            _weigh_kernel, grid,
            logits_RV, temperature_R, wanted[2], max_RP, max_RP, mass_RP, max_id_RP, mass_RP, max_RP,
            max_id_RP, max_RP, max_id_RP, *shape, num_parts, BITS=bits, SHORT=short, MIN_P=False,
            SEARCHES=False, CANDIDATES=CANDIDATES, num_warps=WEIGH_WARPS, **sizes,
        )  # fmt: skip
    unlike = (rows_R, None, None, None) if raw is None else (rows_R, raw.logits_RV, raw.max_RP, raw.mass_RP)
    launch(
        _finish_kernel, (num_rows,),
        *rows, max_RP, max_id_RP, mass_RP, drawn_R, last_R, last_id_R, kept_R, keys_R3P, *results, *unlike,
        *shape, logits_RV.stride(0) if raw is None else raw.logits_RV.stride(0), num_parts,
        BITS=bits, TRUNCATES=truncates, FAST_LOG=logits_RV.is_cuda, num_warps=8, **sizes,
    )  # fmt: skip
    return _Raw(logits_RV, max_RP, mass_RP)


@triton.jit
def _draw_part(
    logits_ptr, row, part, stride, vocab_size, part_max, inverse, seeds_ptr, positions_ptr, last_ptr, last_id_ptr,
    keys_ptr, CUT: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Draw among a part's tokens, with CUT among those up to the row's last kept one."""
    base = tl.where(is_number(part_max), part_max, 0.0)
    slope = slope_of(inverse)
    best_B = tl.full([PART // 16], 2**32 - 1, tl.uint32)
    second_B = best_B
    if CUT:
        last, last_id = tl.load(last_ptr + row), tl.load(last_id_ptr + row)
        # Of the tokens equal to the last kept one a part has all, none or, if it has that one, some.
        is_mixed = part == last_id // PART
        bound = tl.where(part > last_id // PART, logit_of(key_of(last) + 1), last)
    # A quarter at a time: with all scores in registers few programs would fit beside each other.
    for quarter in range(4):
        x_B4, id_B4, group_B = load_part(logits_ptr, row, part * 4 + quarter, stride, vocab_size, PART // 4, ALIGNED)
        if CUT:
            if is_mixed:
                x_B4 = only_kept(x_B4, id_B4, last_ptr, last_id_ptr, row)
            else:
                x_B4 = tl.where(x_B4 >= bound, x_B4, float("-inf"))
        best_B, second_B = add_keys(
            x_B4, group_B, quarter, base, slope, row, seeds_ptr, positions_ptr, best_B, second_B, PART // 16
        )
    store_keys(keys_ptr, row, part, best_B, second_B, PARTS)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _scan_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, max_ptr, max_id_ptr, keys_ptr, high_ptr, stride,
    vocab_size, PARTS: tl.constexpr, PART: tl.constexpr, ALIGNED: tl.constexpr, DRAW: tl.constexpr,
    CLUSTERS: tl.constexpr, SOME: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Highest logit of a part; and what it draws, or the highest logit of each cluster of 32 tokens."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1)
    if SOME and tl.load(temperature_ptr + row) < 0:
        return
    x_G4, id_G4, _group_G = load_part(logits_ptr, row, part, stride, vocab_size, PART, ALIGNED)
    place = row * PARTS + part
    high_G = highest_of_groups(x_G4, PART // 4)
    part_max = highest_of_part(high_G)
    if CLUSTERS:
        # A cluster is 4 tokens and 7 times 4 others, all far apart: likely tokens tend to be neighbours.
        high_C = tl.max(tl.reshape(high_G, [8, PART // 32]), 0)
        here_C = row.to(tl.int64) * (tl.num_programs(0) * (PART // 32)) + part * (PART // 32) + tl.arange(0, PART // 32)
        tl.store(high_ptr + here_C, high_C.to(tl.float32))
    tl.store(max_ptr + place, part_max)
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0:
        tl.store(max_id_ptr + place, tl.min(tl.min(tl.where(x_G4 == part_max, id_G4, ALL), 1)))
    elif DRAW:
        _draw_part(
            logits_ptr, row, part, stride, vocab_size, part_max, inverse_of(temperature_ptr, row), seeds_ptr,
            positions_ptr, max_ptr, max_id_ptr, keys_ptr, False, PARTS, PART, ALIGNED,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _draw_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, max_ptr, drawn_ptr, last_ptr, last_id_ptr, keys_ptr,
    stride, vocab_size, PARTS: tl.constexpr, PART: tl.constexpr, ALIGNED: tl.constexpr, SOME: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """What a part draws among the tokens up to a row's last kept one."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1)
    if SOME and tl.load(temperature_ptr + row) < 0:
        return
    if (tl.load(temperature_ptr + row) > 0) & (tl.load(drawn_ptr + row) < 0):
        part_max = tl.load(max_ptr + row * PARTS + part)
        if part_max < tl.load(last_ptr + row):
            nothing = tl.full([PART // 16], 2**32 - 1, tl.uint32)
            store_keys(keys_ptr, row, part, nothing, nothing, PARTS)
        else:
            _draw_part(
                logits_ptr, row, part, stride, vocab_size, part_max, inverse_of(temperature_ptr, row), seeds_ptr,
                positions_ptr, last_ptr, last_id_ptr, keys_ptr, True, PARTS, PART, ALIGNED,
            )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["max_ptr", "inverse_ptr"])
def _mass_kernel(
    logits_ptr, max_ptr, inverse_ptr, mass_ptr, stride, vocab_size, BITS: tl.constexpr, SHORT: tl.constexpr,
    PART: tl.constexpr, ALIGNED: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Sum of masses of a part, given the row's highest logit."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1)
    inverse = tl.load(inverse_ptr + row)
    row_max = tl.load(max_ptr + row)
    mass_B = no_mass(PART // 16, BITS, SHORT)
    # A quarter at a time: with all masses in registers few programs would fit beside each other.
    for quarter in range(4):
        x_B4, _id_B4, _group_B = load_part(logits_ptr, row, part * 4 + quarter, stride, vocab_size, PART // 4, ALIGNED)
        weight_B4 = weights_of(x_B4, row_max, inverse, BITS, SHORT)
        mass_B = add_masses(mass_B, weight_B4, PART // 16, BITS, SHORT)
    tl.store(mass_ptr + row * tl.num_programs(0) + part, total_mass(mass_B, BITS, SHORT))


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _weigh_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, max_ptr, bounds_ptr, mass_ptr, counts_ptr, masses_ptr, least_ptr,
    listed_ptr, list_logit_ptr, list_id_ptr, stride, vocab_size, num_parts, PARTS: tl.constexpr, PART: tl.constexpr,
    ALIGNED: tl.constexpr, BITS: tl.constexpr, SHORT: tl.constexpr, MIN_P: tl.constexpr, SEARCHES: tl.constexpr,
    CANDIDATES: tl.constexpr, SOME: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Sums of a part's masses: all; those that min_p keeps; and with SEARCHES those above the bracket.

    With SEARCHES it lists the part's tokens inside the bracket too.
    """
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    # The row that was read last comes first: it may still be near.
    row = tl.num_programs(1) - 1 - tl.program_id(1)
    if SOME and tl.load(temperature_ptr + row) < 0:
        return
    place = row * PARTS + part
    row_max = highest_of_row(max_ptr, row, num_parts, PARTS)
    inverse = inverse_of(temperature_ptr, row)
    mass_B = no_mass(PART // 16, BITS, SHORT)
    above_mass_B = mass_B
    above_count_B = tl.zeros([PART // 16], tl.int32)
    listed_B = above_count_B
    likely_mass_B = mass_B
    likely_count_B = above_count_B
    least_B = tl.full([PART // 16], float("inf"), logits_ptr.dtype.element_ty)
    if SEARCHES:
        low = tl.load(bounds_ptr + row * 2)
        high = tl.load(bounds_ptr + row * 2 + 1)
    # A quarter at a time: with all masses in registers few programs would fit beside each other.
    for quarter in range(4):
        x_B4, id_B4, _group_B = load_part(
            logits_ptr, row, part * 4 + quarter, stride, vocab_size, PART // 4, ALIGNED, SEARCHES
        )  # fmt: skip
        weight_B4 = weights_of(x_B4, row_max, inverse, BITS, SHORT)
        mass_B = add_masses(mass_B, weight_B4, PART // 16, BITS, SHORT)
        if SEARCHES and SHORT:
            above_mass_B, listed_B = add_above(
                above_mass_B, listed_B, x_B4, weight_B4, quarter, low, high, PART // 16, BITS
            )
        elif SEARCHES:
            listed_B += listed_bits(x_B4, quarter, low, high)
            if high < float("inf"):
                above_B4 = x_B4 >= high
                above_count_B += tl.sum(above_B4.to(tl.int32), 1)
                above_mass_B += tl.sum(tl.where(above_B4, weight_B4, 0), 1)
        if MIN_P:
            least = least_mass(min_p_ptr, row, BITS)
            if SHORT:
                least = least.to(tl.float64) * (2.0 ** (-BITS))
            likely_B4 = (weight_B4 >= least) & (id_B4 < vocab_size)
            likely_count_B += tl.sum(likely_B4.to(tl.int32), 1)
            likely_mass_B = add_masses(likely_mass_B, tl.where(likely_B4, weight_B4, 0), PART // 16, BITS, SHORT)
            inf = tl.full([], float("inf"), logits_ptr.dtype.element_ty)
            least_B = tl.minimum(least_B, tl.min(tl.where(likely_B4, x_B4, inf), 1))
    tl.store(mass_ptr + place, total_mass(mass_B, BITS, SHORT))
    if SEARCHES:
        if SHORT:
            above_count_B = listed_B >> 16
            listed_B = listed_B & 0xFFFF
        tl.store(counts_ptr + place, tl.sum(above_count_B))
        tl.store(masses_ptr + place, total_mass(above_mass_B, BITS, SHORT))
        append_listed(
            listed_B, logits_ptr, row, part, stride, listed_ptr, list_logit_ptr, list_id_ptr, PART, CANDIDATES
        )  # fmt: skip
    if MIN_P:
        rows_apart = tl.num_programs(1) * PARTS
        tl.store(counts_ptr + rows_apart + place, tl.sum(likely_count_B))
        tl.store(masses_ptr + rows_apart + place, total_mass(likely_mass_B, BITS, SHORT))
        tl.store(least_ptr + place, tl.min(least_B))


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _finish_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, max_ptr, max_id_ptr, mass_ptr, drawn_ptr, last_ptr,
    last_id_ptr, kept_ptr, keys_ptr, tokens_ptr, raw_ptr, behavior_ptr, nan_ptr, rows_ptr, raw_logits_ptr,
    raw_max_ptr, raw_mass_ptr, stride, vocab_size, raw_stride, num_parts, PARTS: tl.constexpr, PART: tl.constexpr,
    ALIGNED: tl.constexpr, BITS: tl.constexpr, TRUNCATES: tl.constexpr, FAST_LOG: tl.constexpr, SOME: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Token of a row and its log-probabilities."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if SOME and tl.load(temperature_ptr + row) < 0:
        return
    row_max = highest_of_row(max_ptr, row, num_parts, PARTS)
    is_finite = is_number(row_max)
    inverse = inverse_of(temperature_ptr, row)
    part_P = tl.arange(0, PARTS)
    exists_P = part_P < num_parts
    place_P = row * PARTS + part_P
    max_P = tl.load(max_ptr + place_P, exists_P, float("-inf"))
    total = tl.sum(tl.load(mass_ptr + place_P, exists_P, 0))
    token = tl.zeros([], tl.int32)
    drawn = tl.full([], -1, tl.int32)
    if TRUNCATES:
        drawn = tl.load(drawn_ptr + row)
    if is_finite:
        if tl.load(temperature_ptr + row) == 0:
            token = tl.min(tl.where(max_P == row_max, tl.load(max_id_ptr + place_P, exists_P, ALL), ALL))
        elif drawn >= 0:
            token = drawn
        else:
            # The two groups of each part that can score highest are computed. Seldom can others score as high.
            two_2 = tl.arange(0, 2)[None]
            keys_P2_ptr = keys_ptr + row * (3 * PARTS) + part_P[:, None] + two_2 * PARTS
            key_P2 = tl.load(keys_P2_ptr, exists_P[:, None], -1)
            group_G = tl.reshape(part_P[:, None] * (PART // 4) + (key_P2 & (PART // 4 - 1)), [2 * PARTS])
            id_G4 = group_G[:, None] * 4 + tl.arange(0, 4)[None]
            x_G4 = tl.load(logits_ptr + row.to(tl.int64) * stride + id_G4, id_G4 < vocab_size, float("-inf"))
            if TRUNCATES:
                x_G4 = only_kept(x_G4, id_G4, last_ptr, last_id_ptr, row)
            best_score, token = best_of_groups(
                x_G4, group_G, row_max, row, inverse, seeds_ptr, positions_ptr, 2 * PARTS
            )  # fmt: skip
            third_P = tl.load(keys_ptr + row * (3 * PARTS) + 2 * PARTS + part_P, exists_P, -1)
            shift_P = (tl.where(is_number(max_P), max_P, row_max).to(tl.float64) - row_max.to(tl.float64)) * inverse
            bound_P = shift_P + score_bound(third_P.to(tl.uint32, bitcast=True), PART)
            bound_P = tl.where(exists_P, bound_P, float("-inf"))
            if tl.max(bound_P) >= best_score - SLACK:
                steep = tl.minimum(inverse, STEEPEST).to(tl.float32)
                for part in range(num_parts):
                    if tl.max(tl.where(part_P == part, bound_P, float("-inf"))) >= best_score - SLACK:
                        for quarter in range(4):
                            x_B4, id_B4, group_B = load_part(
                                logits_ptr, row, part * 4 + quarter, stride, vocab_size, PART // 4, ALIGNED
                            )
                            if TRUNCATES:
                                x_B4 = only_kept(x_B4, id_B4, last_ptr, last_id_ptr, row)
                            rough = highest_rough(
                                x_B4, group_B, row_max, steep, row, seeds_ptr, positions_ptr, PART // 16, FAST_LOG
                            )
                            if rough >= best_score - MARGIN:
                                score, found = best_of_groups(
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
        raw_max = highest_of_row(raw_max_ptr, own, num_parts, PARTS)
        raw_logit = tl.load(raw_logits_ptr + own.to(tl.int64) * raw_stride + token)
        raw_total = tl.sum(tl.load(raw_mass_ptr + own * PARTS + part_P, exists_P, 0))
        raw = (raw_logit.to(tl.float64) - raw_max.to(tl.float64)) * inverse
        raw = raw - tl.log(raw_total.to(tl.float64) * (2.0 ** (-BITS)))
        has_raw = is_finite & is_number(raw_max)
    tl.store(tokens_ptr + own, token.to(tl.int64))
    tl.store(raw_ptr + own, tl.where(has_raw, raw, nan).to(raw_ptr.dtype.element_ty))
    tl.store(behavior_ptr + own, tl.where(is_finite, behavior, nan).to(behavior_ptr.dtype.element_ty))
    tl.store(nan_ptr + own, ~is_finite)
