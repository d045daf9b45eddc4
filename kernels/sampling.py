"""Owns the step from logits to a token and its log-probabilities: processors, exact masses, truncation and the draw.

Every result of a row depends on that row alone, bit for bit: each number is either elementwise, or a maximum, or a
sum of integers, and none of these knows the size of the batch or the order in which it was walked.

**Masses.** A token's probability is held as the integer ``round(exp((logit - max) * (1 / T)) * 2^s)`` with
``s = min(52, 62 - ceil(log2 V))``, so that a row's sum fits 62 bits; for vocabularies above 32,768 it is cut instead of
rounded, and the exponential is a short one in fp32 (``paged.kernels.exponential``). Integer sums have no order: shards,
tiles and atomics agree exactly, the nucleus is decided by comparing integers, and log-sum-exp has one definition for
sampling and scoring.

**Order.** Tokens are ordered by (logit descending, id ascending).

**Processors**, in this order: penalties, bias, temperature, min_p, top_k, top_p. A temperature of 0 is greedy and
counts as 1 wherever probabilities are computed.

**Rows without a distribution** (a NaN or +inf logit, or nothing but -inf, after penalties and bias) are flagged; their
other results are token 0 and NaN. A -inf logit is legal: it has mass 0 and log-probability -inf.

Shapes: R rows, V token ids, K highest tokens, P rows with penalties, N entries of the logit biases, B rows that
truncate. Logits are float32 or float64; log-probabilities are computed in float64 and rounded once to the type of the
logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Final

import torch
from torch import Tensor

from paged.kernels.exponential import MassScale, integer_masses, mass_scale
from paged.kernels.philox import gumbel_noise
from paged.kernels.sampling_columns import Penalties, SamplingColumns

NUM_CANDIDATES: Final = 1024
"""Highest tokens that truncation of a large vocabulary looks at before it sorts the whole row."""

# Elements of a tile of float64 temporaries: what fits a core's cache, or bounds an accelerator's memory.
_CPU_TILE: Final = 2**18
_DEVICE_TILE: Final = 2**27
_LIMB_BITS: Final = 31
_LIMB: Final = 2**_LIMB_BITS - 1


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What was drawn. The two log-probabilities may be the same tensor: treat it as read-only.

    Attributes:
        tokens_R: int64.
        logprobs_R: log-probability under the raw logits at the row's temperature, before every processor but that one.
        behavior_logprobs_R: log-probability under the processed and truncated distribution (for a greedy row at
            temperature 1).
        nan_R: bool, the row has no distribution; its token is 0 and its log-probabilities are NaN.
    """

    tokens_R: Tensor
    logprobs_R: Tensor
    behavior_logprobs_R: Tensor
    nan_R: Tensor


def mass_bits(vocab_size: int) -> int:
    """Binary digits s of a mass: the likeliest token has mass 2^s, and ``vocab_size`` masses sum to at most 2^62."""
    assert 0 < vocab_size <= 2**40, vocab_size
    return min(52, 62 - (vocab_size - 1).bit_length())


def _scale_of(logits_RV: Tensor, vocab_size: int | None = None) -> MassScale:
    """The scale of masses for logits as the model gave them, of all tokens or of a part of ``vocab_size``."""
    return mass_scale(mass_bits(logits_RV.shape[1] if vocab_size is None else vocab_size), logits_RV.dtype)


def masses(
    logits_RV: Tensor, temperature_R: Tensor, *, row_max_R: Tensor | None = None, vocab_size: int | None = None
) -> Tensor:
    """Integer masses of all tokens at a temperature, int64 [R, V].

    Args:
        logits_RV: logits; a shard of the vocabulary passes its part and the two arguments below.
        temperature_R: float64; 0 counts as 1.
        row_max_R: the highest logit of the whole row, in the type of the logits, where ``logits_RV`` is a shard.
        vocab_size: size of the whole vocabulary, where ``logits_RV`` is a shard.

    Raises:
        AssertionError: on another shape or type.
    """
    _check_rows(logits_RV, temperature_R)
    row_max_R = logits_RV.amax(-1) if row_max_R is None else row_max_R
    scale = _scale_of(logits_RV, vocab_size)
    return integer_masses(logits_RV, row_max_R, _divisor(temperature_R).reciprocal(), scale)


def sum_of_masses(logits_RV: Tensor, temperature_R: Tensor, row_max_R: Tensor, vocab_size: int) -> Tensor:
    """Sum of the masses over a row or a shard of it, int64 [R]; the arguments are those of ``masses``.

    A few rows at a time: the temporaries stay small, and integers add up the same. A shard may have no columns.
    """
    scale = _scale_of(logits_RV, vocab_size)
    columns = (logits_RV, row_max_R, _divisor(temperature_R).reciprocal())
    if logits_RV.is_cuda and logits_RV.numel():
        # Imported here because a CPU needs no Triton.
        from paged.kernels.sampling_triton import mass_sums

        return mass_sums(*columns, scale)
    return _sum_of_masses(*columns, scale)


def log_of_mass(mass_R: Tensor, vocab_size: int) -> Tensor:
    """Natural logarithm of a sum of masses relative to the likeliest token's, float64; -inf for 0."""
    return torch.log(mass_R.to(torch.float64) * 2.0 ** -mass_bits(vocab_size))


def log_sum_exp(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """``log(sum(exp(logits / T)))`` less its largest term ``max / T``, float64 [R].

    This is what a log-probability subtracts from ``(logit - max) / T``. Temperature 0 counts as 1. NaN for a row
    without a distribution.
    """
    _check_rows(logits_RV, temperature_R)
    row_max_R, vocab_size = logits_RV.amax(-1), logits_RV.shape[1]
    mass_R = sum_of_masses(logits_RV, temperature_R, row_max_R, vocab_size)
    return log_sum_exp_of_mass(mass_R, row_max_R, vocab_size)


def log_sum_exp_of_mass(mass_R: Tensor, row_max_R: Tensor, vocab_size: int) -> Tensor:
    """``log_sum_exp`` of rows whose whole mass and highest logit are known."""
    return log_of_mass(mass_R, vocab_size).masked_fill_(~torch.isfinite(row_max_R), torch.nan)


def logprobs_of_logits(logits_RK: Tensor, temperature_R: Tensor, row_max_R: Tensor, log_sum_exp_R: Tensor) -> Tensor:
    """Log-probabilities [R, K] of tokens whose raw logits are given, in the type of these.

    Args:
        logits_RK: logits of K tokens of each row.
        temperature_R: float64; 0 counts as 1.
        row_max_R: highest logit of the whole row, in the type of the logits.
        log_sum_exp_R: of the whole row, from ``log_sum_exp``.
    """
    scaled_RK = _scale(logits_RK, row_max_R, _divisor(temperature_R))
    return (scaled_RK - log_sum_exp_R.unsqueeze(1)).to(logits_RK.dtype)


def token_logprobs(logits_RV: Tensor, temperature_R: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probabilities of given tokens under the untruncated distribution at a temperature.

    Args:
        logits_RV: raw logits.
        temperature_R: float64; 0 counts as 1.
        token_ids: int64 [R] or [R, K], in [0, V).

    Returns:
        The shape of ``token_ids`` in the type of the logits; NaN in a row without a distribution.

    Raises:
        AssertionError: on another shape or type.
    """
    _check_rows(logits_RV, temperature_R)
    assert token_ids.dtype == torch.int64, token_ids.dtype
    assert token_ids.ndim in (1, 2), token_ids.shape
    assert token_ids.shape[0] == logits_RV.shape[0], (token_ids.shape, logits_RV.shape)
    ids_RK = token_ids if token_ids.ndim == 2 else token_ids.unsqueeze(1)
    row_max_R, vocab_size = logits_RV.amax(-1), logits_RV.shape[1]
    mass_R = sum_of_masses(logits_RV, temperature_R, row_max_R, vocab_size)
    totals = row_max_R, log_sum_exp_of_mass(mass_R, row_max_R, vocab_size)
    return logprobs_of_logits(logits_RV.gather(1, ids_RK), temperature_R, *totals).view(token_ids.shape)


def top_logprobs(logits_RV: Tensor, temperature_R: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``min(k, V)`` highest tokens in order, and their log-probabilities as ``token_logprobs`` gives them.

    Returns:
        ids int64 [R, K] and log-probabilities [R, K] in the type of the logits.

    Raises:
        AssertionError: on another shape or type, or a negative ``k``.
    """
    _check_rows(logits_RV, temperature_R)
    ids_RK = highest(logits_RV, min(k, logits_RV.shape[1]))
    return ids_RK, token_logprobs(logits_RV, temperature_R, ids_RK)


def highest(logits_RV: Tensor, k: int) -> Tensor:
    """Ids of the first ``k`` tokens in the order (logit descending, id ascending), int64 [R, k].

    Raises:
        AssertionError: if ``k`` is not in [0, V].
    """
    num_rows, vocab_size = logits_RV.shape
    assert 0 <= k <= vocab_size, (k, vocab_size)
    if 4 * k >= vocab_size:
        return torch.sort(logits_RV, dim=1, descending=True, stable=True).indices[:, :k]
    if k == 0 or num_rows == 0:
        return torch.empty((num_rows, k), dtype=torch.int64, device=logits_RV.device)
    # topk promises nothing about ties. Inside its choice they are put in order here; where the choice itself was
    # arbitrary, because the last value occurs outside too, the row is sorted.
    values_RK, ids_RK = torch.topk(logits_RV, k, dim=1)
    ambiguous_R = (logits_RV >= values_RK[:, -1:]).sum(1) != k
    ids_RK = ids_RK.sort(1).values
    order_RK = torch.sort(logits_RV.gather(1, ids_RK), dim=1, descending=True, stable=True).indices
    ids_RK = ids_RK.gather(1, order_RK)
    rows = ambiguous_R.nonzero().squeeze(1)
    if rows.numel():
        full = torch.sort(logits_RV.index_select(0, rows), dim=1, descending=True, stable=True).indices[:, :k]
        ids_RK.index_copy_(0, rows, full)
    return ids_RK


def processed_logits(logits_RV: Tensor, columns: SamplingColumns) -> Tensor:
    """Logits after penalties and bias, which is all that comes before the temperature.

    Repetition divides positive logits of tokens in prompt or output and multiplies negative ones (Keskar et al. 2019,
    as in Hugging Face); frequency is then subtracted once an occurrence in the output, presence once if there is any.

    Returns:
        ``logits_RV`` itself where no row has any of these, else float64 [R, V].
    """
    penalties, bias = columns.penalties, columns.bias
    if penalties is None and bias is None:
        return logits_RV
    processed_RV = logits_RV.to(torch.float64, copy=True)
    if penalties is not None:
        processed_RV.index_copy_(0, penalties.rows_P, _penalized(processed_RV, penalties))
    if bias is not None:
        processed_RV.index_put_((bias.rows_N, bias.token_ids_N), bias.values_N, accumulate=True)
    return processed_RV


def nucleus_mass(total_R: Tensor, top_p_R: Tensor) -> Tensor:
    """The least integer that is not below ``top_p * total``, and at least 1; exact.

    Args:
        total_R: int64 in [1, 2^62].
        top_p_R: float64 in [0, 1]; taken as the binary fraction that it is.

    Returns:
        int64 [R] in [1, total].
    """
    # top_p = digits / 2^shift with a 53-bit integer; the product with the total has up to 115 bits, held as
    # high * 2^62 + low. No partial product below reaches 2^63.
    fraction_R, exponent_R = torch.frexp(top_p_R)
    digits_R = (fraction_R * 2.0**53).to(torch.int64)
    shift_R = 53 - exponent_R.to(torch.int64)
    digits_high, digits_low = digits_R >> _LIMB_BITS, digits_R & _LIMB
    total_high, total_low = total_R >> _LIMB_BITS, total_R & _LIMB
    bottom = digits_low * total_low
    middle = digits_high * total_low + digits_low * total_high + (bottom >> _LIMB_BITS)
    high = digits_high * total_high + (middle >> _LIMB_BITS)
    low = ((middle & _LIMB) << _LIMB_BITS) | (bottom & _LIMB)
    # Divide by 2^shift, rounding up. As top_p <= 1 the shift is at least 52.
    low_shift = shift_R.clamp(max=62)
    high_shift = (shift_R - 62).clamp(0, 62)
    quotient = ((high >> high_shift) << (62 - low_shift)) + (low >> low_shift)
    remainder = (low & ((1 << low_shift) - 1)) | (high & ((1 << high_shift) - 1))
    return (quotient + (remainder != 0)).clamp_min(1)


def probabilities(logits_RV: Tensor, columns: SamplingColumns) -> Tensor:
    """The distribution that ``sample`` draws from, float64 [R, V]: its exponentiated ``behavior_logprobs_R``.

    A greedy row shows its distribution at temperature 1; a row without one is NaN.
    """
    _check_columns(logits_RV, columns)
    state = _distribution(logits_RV, columns)
    inverse_R = _divisor(columns.temperature_R).reciprocal()
    scale = _scale_of(logits_RV)
    mass_RV = integer_masses(state.processed_RV, state.row_max_R, inverse_R, scale)
    if state.truncated_B is not None:
        kept = mass_RV.index_select(0, state.truncated_B).masked_fill_(~state.keep_BV, 0)
        mass_RV.index_copy_(0, state.truncated_B, kept)
    probabilities_RV = mass_RV.to(torch.float64) / state.kept_mass_R.to(torch.float64).unsqueeze(1)
    return probabilities_RV.masked_fill_(state.nan_R.unsqueeze(1), torch.nan)


def sample(logits_RV: Tensor, columns: SamplingColumns) -> SampledRows:
    """Draw one token a row.

    A greedy row takes the first token of its order. Any other takes the maximum over its kept tokens of
    ``(logit - max) / T + noise`` in float64, ties to the lowest id, with the noise of ``gumbel_noise``.

    Args:
        logits_RV: raw logits, float32 or float64; not changed.
        columns: how, one entry a row, on the device of the logits.

    Returns:
        Tokens and log-probabilities [R], the latter in the type of the logits.

    Raises:
        AssertionError: on another shape or type. Values are the caller's to check: looking would stall a device.
    """
    _check_columns(logits_RV, columns)
    return (sample_on_card if logits_RV.is_cuda else sample_by_torch)(logits_RV, columns)


def sample_by_torch(logits_RV: Tensor, columns: SamplingColumns) -> SampledRows:
    """``sample`` in plain torch: what a CPU runs, and the definition that the kernels repeat."""
    vocab_size = logits_RV.shape[1]
    state = _distribution(logits_RV, columns)
    tokens_R = _draw(state, columns).masked_fill_(state.nan_R, 0)
    scaled_R = state.scaled_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1)
    behavior_R = _finish(scaled_R - log_of_mass(state.kept_mass_R, vocab_size), state.nan_R, logits_RV.dtype)
    logprobs_R = behavior_R
    if state.truncated_B is not None:
        logprobs_R = _finish(scaled_R - log_of_mass(state.mass_R, vocab_size), state.nan_R, logits_RV.dtype)
    adjusted = _adjusted_rows(columns)
    if adjusted is not None:
        raw_rows = (column.index_select(0, adjusted) for column in (logits_RV, columns.temperature_R, tokens_R))
        logprobs = _finish(token_logprobs(*raw_rows), state.nan_R.index_select(0, adjusted), logits_RV.dtype)
        logprobs_R = logprobs_R.index_copy(0, adjusted, logprobs)
    return SampledRows(tokens_R, logprobs_R, behavior_R, state.nan_R)


def sample_on_card(logits_RV: Tensor, columns: SamplingColumns) -> SampledRows:
    """``sample`` by Triton kernels, which never wait for the host."""
    # Imported here because a CPU needs no Triton.
    from paged.kernels.sampling_triton import sample_triton

    return SampledRows(*sample_triton(logits_RV, columns, _scale_of(logits_RV)))


@dataclass(frozen=True, slots=True)
class _Distribution:
    """Rows on their way to a draw: ``scaled_RV`` is (``processed_RV`` - ``row_max_R``) / T.

    Rows ``truncated_B`` keep ``keep_BV``. ``mass_R`` is the mass of the whole row, ``kept_mass_R`` of what stays.
    """

    processed_RV: Tensor
    row_max_R: Tensor
    scaled_RV: Tensor
    nan_R: Tensor
    mass_R: Tensor
    kept_mass_R: Tensor
    truncated_B: Tensor | None
    keep_BV: Tensor


def _distribution(logits_RV: Tensor, columns: SamplingColumns) -> _Distribution:
    processed_RV = processed_logits(logits_RV, columns)
    row_max_R = processed_RV.amax(-1)
    # The maximum alone tells: it is NaN if any logit is, +inf or -inf if there is no distribution.
    nan_R = ~torch.isfinite(row_max_R)
    divisor_R = _divisor(columns.temperature_R)
    scaled_RV = _scale(processed_RV, row_max_R, divisor_R)
    weighed = processed_RV, row_max_R, divisor_R.reciprocal()
    scale = _scale_of(logits_RV)
    mass_R = _sum_of_masses(*weighed, scale)
    rows = _truncated_rows(columns, logits_RV.shape[1])
    state = processed_RV, row_max_R, scaled_RV, nan_R, mass_R
    if rows is None:
        return _Distribution(*state, mass_R, None, nan_R)
    logits_BV, max_B, inverse_B = (column.index_select(0, rows) for column in weighed)
    keep_BV, kept_mass_B = _truncate(logits_BV, max_B, inverse_B, scale, rows, columns)
    return _Distribution(*state, mass_R.index_copy(0, rows, kept_mass_B), rows, keep_BV)


def _draw(state: _Distribution, columns: SamplingColumns) -> Tensor:
    """Chosen token of each row, int64 [R]."""
    num_rows, vocab_size = state.scaled_RV.shape
    sampled = (columns.temperature_R > 0).nonzero().squeeze(1)
    if sampled.numel() == 0:
        # Truncation keeps the first token, so greedy rows need not look at it.
        return state.scaled_RV.argmax(1)
    scores_RV: Tensor
    if sampled.numel() == num_rows:
        scores_RV = gumbel_noise(columns.seeds_R, columns.positions_R, vocab_size).add_(state.scaled_RV)
    else:
        seeds, positions = columns.seeds_R.index_select(0, sampled), columns.positions_R.index_select(0, sampled)
        scores_RV = state.scaled_RV.index_add(0, sampled, gumbel_noise(seeds, positions, vocab_size))
    rows = state.truncated_B
    if rows is not None and rows.numel() == num_rows:
        scores_RV.masked_fill_(~state.keep_BV, -torch.inf)
    elif rows is not None:
        scores_RV.index_copy_(0, rows, scores_RV.index_select(0, rows).masked_fill_(~state.keep_BV, -torch.inf))
    return scores_RV.argmax(1)


def _truncated_rows(columns: SamplingColumns, vocab_size: int) -> Tensor | None:
    """Rows that min_p, top_k or top_p may shorten, or ``None``."""
    wanted: list[Tensor] = []
    if columns.min_p_R is not None:
        wanted.append(columns.min_p_R > 0)
    if columns.top_k_R is not None:
        wanted.append((columns.top_k_R > 0) & (columns.top_k_R < vocab_size))
    if columns.top_p_R is not None:
        wanted.append(columns.top_p_R < 1)
    if not wanted:
        return None
    rows = reduce(torch.logical_or, wanted).nonzero().squeeze(1)
    return rows if rows.numel() else None


def _truncate(
    processed_BV: Tensor,
    row_max_B: Tensor,
    inverse_B: Tensor,
    scale: MassScale,
    rows: Tensor,
    columns: SamplingColumns,
) -> tuple[Tensor, Tensor]:
    """Tokens that min_p, top_k and top_p keep, bool [B, V], and their mass, int64 [B].

    Each of the three keeps a prefix of the order, at least its first token. min_p's is as long as there are masses of
    at least ``min_p`` times the highest, 2^s (masses fall along the order, because exp is monotone); top_k shortens it
    to k; top_p to the shortest one whose mass reaches ``top_p`` times the mass of what those two kept.
    """
    vocab_size = processed_BV.shape[1]
    mass_BV = integer_masses(processed_BV, row_max_B, inverse_B, scale)
    limit_B = torch.full_like(rows, vocab_size)
    limit_mass_B = mass_BV.sum(1)
    if columns.min_p_R is not None:
        least_B1 = (
            (columns.min_p_R.index_select(0, rows).clamp(0, 1) * 2.0**scale.bits).ceil_().to(torch.int64).unsqueeze(1)
        )
        likely_BV = mass_BV >= least_B1
        limit_B = likely_BV.sum(1)
        limit_mass_B = mass_BV.masked_fill(~likely_BV, 0).sum(1)
    num_likely_B = limit_B
    if columns.top_k_R is not None:
        top_k_B = columns.top_k_R.index_select(0, rows)
        limit_B = torch.where(top_k_B > 0, torch.minimum(limit_B, top_k_B), limit_B)
    # The lower bound matters to rows with NaN only, which must not break their neighbours.
    limit_B = limit_B.clamp_min(1)
    if columns.top_p_R is None:
        top_p_B = torch.ones_like(rows, dtype=torch.float64)
    else:
        top_p_B = columns.top_p_R.index_select(0, rows)

    num_candidates = NUM_CANDIDATES if vocab_size > 4 * NUM_CANDIDATES else vocab_size
    # Above the candidates the mass of the limit is known only where min_p alone set it.
    settled_B = (limit_B <= num_candidates) | (limit_B == num_likely_B)
    arguments = (processed_BV, mass_BV, limit_B, limit_mass_B, top_p_B)
    keep_BV, kept_mass_B, length_B = _shorten(num_candidates, *arguments)
    if num_candidates < vocab_size:
        # Flat rows, whose prefix is longer than the candidates, are sorted in full. Others would get the same from it.
        again = (~settled_B | (length_B > num_candidates)).nonzero().squeeze(1)
        if again.numel():
            keep, kept_mass, _ = _shorten(vocab_size, *(argument.index_select(0, again) for argument in arguments))
            keep_BV.index_copy_(0, again, keep)
            kept_mass_B.index_copy_(0, again, kept_mass)
    return keep_BV, kept_mass_B


def _shorten(
    num_candidates: int, processed_BV: Tensor, mass_BV: Tensor, limit_B: Tensor, limit_mass_B: Tensor, top_p_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The prefix of at most ``limit_B`` tokens that top_p keeps, looked for among the first ``num_candidates`` tokens.

    ``limit_mass_B`` is the mass within the limit, used where the limit exceeds the candidates. Returns the tokens kept,
    bool [B, V], their mass and their number; a number above ``num_candidates`` says that the other two are not to be
    used.
    """
    ids_BK = highest(processed_BV, num_candidates)
    mass_BK = mass_BV.gather(1, ids_BK)
    reached_BK = mass_BK.cumsum(1)
    within_B1 = reached_BK.gather(1, (limit_B.clamp(max=num_candidates) - 1).unsqueeze(1))
    needed_B = nucleus_mass(torch.where(limit_B <= num_candidates, within_B1.squeeze(1), limit_mass_B), top_p_B)
    # A token belongs to the nucleus if those before it do not reach the mass. If all candidates do not, the length is
    # one more than their number.
    shortest_B = ((reached_BK - mass_BK) < needed_B.unsqueeze(1)).sum(1) + (reached_BK[:, -1] < needed_B)
    length_B = torch.where(top_p_B < 1, torch.minimum(limit_B, shortest_B), limit_B).clamp_min(1)
    last_B1 = (length_B.clamp(max=num_candidates) - 1).unsqueeze(1)
    kept_BK = torch.arange(num_candidates, device=ids_BK.device) <= last_B1
    keep_BV = torch.zeros_like(mass_BV, dtype=torch.bool).scatter_(1, ids_BK, kept_BK)
    return keep_BV, reached_BK.gather(1, last_B1).squeeze(1), length_B


def _penalized(processed_RV: Tensor, penalties: Penalties) -> Tensor:
    """Rows ``penalties.rows_P`` after their penalties, float64 [P, V]."""
    logits_PV = processed_RV.index_select(0, penalties.rows_P)
    repetition_P1 = penalties.repetition_P.unsqueeze(1)
    generated_PV = penalties.output_counts_PV > 0
    repeated_PV = torch.where(logits_PV > 0, logits_PV / repetition_P1, logits_PV * repetition_P1)
    logits_PV = torch.where(generated_PV | penalties.prompt_mask_PV, repeated_PV, logits_PV)
    # Product and difference are separate calls: a fused one rounds once in a vector's lanes and twice in its tail.
    logits_PV -= penalties.frequency_P.unsqueeze(1) * penalties.output_counts_PV
    logits_PV -= penalties.presence_P.unsqueeze(1) * generated_PV
    return logits_PV


def _adjusted_rows(columns: SamplingColumns) -> Tensor | None:
    """Rows whose logits ``processed_logits`` may change, or ``None``."""
    if columns.penalties is None and columns.bias is None:
        return None
    adjusted_R = torch.zeros_like(columns.temperature_R, dtype=torch.bool)
    if columns.penalties is not None:
        adjusted_R.index_fill_(0, columns.penalties.rows_P, True)
    if columns.bias is not None:
        adjusted_R.index_fill_(0, columns.bias.rows_N, True)
    return adjusted_R.nonzero().squeeze(1)


def _divisor(temperature_R: Tensor) -> Tensor:
    return torch.where(temperature_R > 0, temperature_R, 1.0)


def _scale(logits_RV: Tensor, row_max_R: Tensor, divisor_R: Tensor) -> Tensor:
    """(logit - max) * (1 / T) in float64: subtracting first keeps the likeliest token at 0 exactly."""
    inverse_R1 = divisor_R.reciprocal().unsqueeze(1)
    return (logits_RV.to(torch.float64) - row_max_R.to(torch.float64).unsqueeze(1)).mul_(inverse_R1)


def _sum_of_masses(logits_RV: Tensor, row_max_R: Tensor, inverse_R: Tensor, scale: MassScale) -> Tensor:
    """Sum over the row, int64 [R], a few rows at a time: the temporaries stay small, and integers add up the same."""
    rows = _tile_rows(logits_RV)
    tiles = zip(*(torch.split(column, rows) for column in (logits_RV, row_max_R, inverse_R)), strict=True)
    sums = [integer_masses(logits, row_max, inverse, scale).sum(1) for logits, row_max, inverse in tiles]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def _tile_rows(values_RV: Tensor) -> int:
    return max(1, (_CPU_TILE if values_RV.device.type == "cpu" else _DEVICE_TILE) // max(1, values_RV.shape[1]))


def _finish(logprobs_R: Tensor, nan_R: Tensor, dtype: torch.dtype) -> Tensor:
    return logprobs_R.masked_fill_(nan_R, torch.nan).to(dtype)


def _check_rows(logits_RV: Tensor, temperature_R: Tensor) -> None:
    assert logits_RV.ndim == 2, logits_RV.shape
    assert logits_RV.shape[1] > 0, logits_RV.shape
    assert logits_RV.dtype in (torch.float32, torch.float64), logits_RV.dtype
    _check_column("temperature_R", temperature_R, logits_RV.shape[:1], torch.float64, logits_RV.device)


def _check_columns(logits_RV: Tensor, columns: SamplingColumns) -> None:
    _check_rows(logits_RV, columns.temperature_R)
    shape, device = logits_RV.shape, logits_RV.device
    for name, dtype in (
        ("seeds_R", torch.int64),
        ("positions_R", torch.int64),
        ("top_k_R", torch.int64),
        ("top_p_R", torch.float64),
        ("min_p_R", torch.float64),
    ):
        column = getattr(columns, name)
        if column is not None:
            _check_column(name, column, shape[:1], dtype, device)
    if columns.penalties is not None:
        size = columns.penalties.rows_P.shape
        _check_column("rows_P", columns.penalties.rows_P, size[:1], torch.int64, device)
        for name in ("repetition_P", "presence_P", "frequency_P"):
            _check_column(name, getattr(columns.penalties, name), size, torch.float64, device)
        counts_shape = torch.Size((*size, shape[1]))
        _check_column("output_counts_PV", columns.penalties.output_counts_PV, counts_shape, torch.int32, device)
        _check_column("prompt_mask_PV", columns.penalties.prompt_mask_PV, counts_shape, torch.bool, device)
    if columns.bias is not None:
        size = columns.bias.rows_N.shape
        for name, dtype in (("rows_N", torch.int64), ("token_ids_N", torch.int64), ("values_N", torch.float64)):
            _check_column(name, getattr(columns.bias, name), size, dtype, device)


def _check_column(name: str, column: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    wanted, given = (dtype, shape, device), (column.dtype, column.shape, column.device)
    assert given == wanted, f"{name} must be {wanted}, not {given}"
