"""Log-sum-exp, log-probabilities and the likeliest token over a vocabulary that is cut over ranks.

Contract: every result equals that of ``paged.kernels.sampling`` on the whole rows to the bit, on every rank. What is
exchanged is a few bytes a row: the highest logits first, so that all ranks form masses relative to the same maximum and
with the whole vocabulary's scale; then sums of masses, which are integers and have no order. Columns that pad a rank's
part never count. All ranks of a group call these functions together, with the same rows.

Shapes: R rows, L columns of one rank (the vocabulary cut in equal parts, the last ones padded), K tokens a row. Logits
are float32 or float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged.kernels.collectives import RankGroup
from paged.kernels.sampling import SampledRows, log_sum_exp_of_mass, logprobs_of_logits, sum_of_masses


def log_sum_exp(logits_RL: Tensor, temperature_R: Tensor, *, vocab_size: int, group: RankGroup) -> Tensor:
    """``paged.kernels.sampling.log_sum_exp`` of whole rows, float64 [R].

    Args:
        logits_RL: this rank's columns.
        temperature_R: float64; 0 counts as 1.
        vocab_size: columns of all ranks, without padding.
        group: the ranks.
    """
    own_RL = _own_columns(logits_RL, vocab_size, group)
    row_max_R, _ = _highest(own_RL, vocab_size, group)
    mass_R = group.all_reduce(sum_of_masses(own_RL, temperature_R, row_max_R, vocab_size))
    return log_sum_exp_of_mass(mass_R, row_max_R, vocab_size)


def token_logprobs(
    logits_RL: Tensor, temperature_R: Tensor, token_ids: Tensor, *, vocab_size: int, group: RankGroup
) -> Tensor:
    """``paged.kernels.sampling.token_logprobs`` of whole rows, for tokens of the whole vocabulary.

    Args:
        logits_RL: this rank's columns.
        temperature_R: float64; 0 counts as 1.
        token_ids: int64 [R] or [R, K], in [0, vocab_size).
        vocab_size: columns of all ranks, without padding.
        group: the ranks.
    """
    ids_RK = token_ids if token_ids.ndim == 2 else token_ids.unsqueeze(1)
    own_RL = _own_columns(logits_RL, vocab_size, group)
    row_max_R, _ = _highest(own_RL, vocab_size, group)
    # One exchange carries the masses and the tokens' logits: as integers, of which each has one owner.
    mass_R = sum_of_masses(own_RL, temperature_R, row_max_R, vocab_size)
    wide_RK = _logits_of(ids_RK - group.rank * logits_RL.shape[1], own_RL)
    sums = group.all_reduce(torch.cat((mass_R.unsqueeze(1), wide_RK.view(torch.int64)), dim=1))
    logits_RK = sums[:, 1:].contiguous().view(torch.float64).to(logits_RL.dtype)
    log_sum_exp_R = log_sum_exp_of_mass(sums[:, 0], row_max_R, vocab_size)
    return logprobs_of_logits(logits_RK, temperature_R, row_max_R, log_sum_exp_R).view(token_ids.shape)


def sample_greedy(logits_RL: Tensor, temperature_R: Tensor, *, vocab_size: int, group: RankGroup) -> SampledRows:
    """What ``paged.kernels.sampling.sample`` gives whole rows that are all greedy, with nothing to process them.

    Args:
        logits_RL: this rank's columns.
        temperature_R: float64, 0 in every row.
        vocab_size: columns of all ranks, without padding.
        group: the ranks.
    """
    own_RL = _own_columns(logits_RL, vocab_size, group)
    row_max_R, token_ids_R = _highest(own_RL, vocab_size, group)
    mass_R = group.all_reduce(sum_of_masses(own_RL, temperature_R, row_max_R, vocab_size))
    log_sum_exp_R = log_sum_exp_of_mass(mass_R, row_max_R, vocab_size)
    logprobs_R = logprobs_of_logits(row_max_R.unsqueeze(1), temperature_R, row_max_R, log_sum_exp_R).squeeze(1)
    nan_R = ~torch.isfinite(row_max_R)
    return SampledRows(token_ids_R.masked_fill(nan_R, 0), logprobs_R, logprobs_R, nan_R)


def _own_columns(logits_RL: Tensor, vocab_size: int, group: RankGroup) -> Tensor:
    """The columns that belong to the vocabulary; the last ranks may have none."""
    size = logits_RL.shape[1]
    assert size == -(-vocab_size // group.size), (size, vocab_size, group.size)
    return logits_RL[:, : max(0, min(size, vocab_size - group.rank * size))]


def _highest(own_RL: Tensor, vocab_size: int, group: RankGroup) -> tuple[Tensor, Tensor]:
    """The highest logit of each whole row (NaN if any is) and the lowest id that has it."""
    num_rows, num_own = own_RL.shape
    if num_own:
        top_R, id_R = own_RL.max(-1)
    else:
        top_R = own_RL.new_full((num_rows,), -torch.inf)
        id_R = torch.zeros_like(top_R, dtype=torch.int64)
    size = -(-vocab_size // group.size)
    # float64 holds logits and ids exactly.
    pair_R2 = torch.stack((top_R.to(torch.float64), (id_R + group.rank * size).to(torch.float64)), dim=1)
    pairs_RW2 = group.all_gather(pair_R2).view(num_rows, group.size, 2)
    best_R1 = pairs_RW2[:, :, 0].argmax(1, keepdim=True)
    top_R, id_R = pairs_RW2.gather(1, best_R1.unsqueeze(2).expand(-1, -1, 2)).squeeze(1).unbind(1)
    return top_R.to(own_RL.dtype).contiguous(), id_R.to(torch.int64)


def _logits_of(column_RK: Tensor, own_RL: Tensor) -> Tensor:
    """The logits of given columns in float64 [R, K]; 0 for those of other ranks."""
    if not own_RL.shape[1]:
        return torch.zeros(column_RK.shape, dtype=torch.float64, device=own_RL.device)
    is_own_RK = (column_RK >= 0) & (column_RK < own_RL.shape[1])
    logits_RK = own_RL.gather(1, column_RK.clamp(0, own_RL.shape[1] - 1))
    return logits_RK.to(torch.float64).masked_fill(~is_own_RK, 0)
