"""The small work around a step's rows: what is fed, what is kept of the result, and where the tokens drawn go.

Contract, with T rows of a step, B sequences, R rows that sample, S slots, P positions, N blocks or hidden size:
integers and copies alone, so that there is nothing to round. On a card each function is one kernel, because a step in
which little is computed would else be a tenth of such launches.
"""

from __future__ import annotations

import torch


def step_inputs(
    slot_T: torch.Tensor,
    position_T: torch.Tensor,
    tokens_SP: torch.Tensor,
    blocks_SN: torch.Tensor,
    *,
    block_size: int,
    padding_slot: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each row feeds, and where its keys and values go.

    Args:
        slot_T, position_T: int32, of each row.
        tokens_SP: int32, tokens by slot.
        blocks_SN: int32, block tables by slot.
        block_size: tokens in a block.
        padding_slot: the slot of rows that pad the step.

    Returns:
        Tokens, positions, and cells (block * block_size + offset; -1 for padding), each int64 [T].
    """
    assert slot_T.shape == position_T.shape, (slot_T.shape, position_T.shape)
    _check(slot_T, position_T, tokens_SP, blocks_SN)
    if slot_T.is_cuda:
        # Imported here because a CPU needs no Triton.
        from paged.kernels.step_rows_triton import step_inputs_triton

        return step_inputs_triton(slot_T, position_T, tokens_SP, blocks_SN, block_size, padding_slot)
    slot_T, position_T = slot_T.long(), position_T.long()
    cell_T = blocks_SN[slot_T, position_T // block_size].long() * block_size + position_T % block_size
    cell_T.masked_fill_(slot_T == padding_slot, -1)
    return tokens_SP[slot_T, position_T].long(), position_T, cell_T


def keep_last_rows(
    hidden_TN: torch.Tensor, row_B: torch.Tensor, kept_BN: torch.Tensor, not_finite_B: torch.Tensor
) -> None:
    """Copy rows ``row_B`` (int32) of ``hidden_TN`` to ``kept_BN`` and note in ``not_finite_B`` (bool) which are not."""
    assert kept_BN.shape == (row_B.shape[0], hidden_TN.shape[1]), (kept_BN.shape, row_B.shape, hidden_TN.shape)
    assert kept_BN.dtype == hidden_TN.dtype, (kept_BN.dtype, hidden_TN.dtype)
    assert not_finite_B.shape == row_B.shape, (not_finite_B.shape, row_B.shape)
    assert not_finite_B.dtype == torch.bool, not_finite_B.dtype
    assert hidden_TN.is_contiguous(), hidden_TN.stride()
    _check(row_B, kept_BN, not_finite_B)
    if hidden_TN.is_cuda:
        # Imported here because a CPU needs no Triton.
        from paged.kernels.step_rows_triton import keep_last_rows_triton

        keep_last_rows_triton(hidden_TN, row_B, kept_BN, not_finite_B)
        return
    kept_BN.copy_(hidden_TN[row_B.long()])
    not_finite_B.copy_(~kept_BN.isfinite().all(-1))


def keep_draws(
    drawn: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    slot_R: torch.Tensor,
    position_R: torch.Tensor,
    tokens_SP: torch.Tensor,
    results_4S: torch.Tensor,
) -> None:
    """Store tokens for the step that feeds them, and what the host wants to know of them in one place.

    Args:
        drawn: tokens int64, two log-probabilities fp32 and NaN flags, each [R].
        slot_R, position_R: int32, where each token goes; no two alike, but for rows of padding.
        tokens_SP: int32, tokens by slot.
        results_4S: int32, at least R columns: tokens, the bits of the log-probabilities, flags.
    """
    tokens_R, logprobs_R, behavior_R, nan_R = drawn
    assert logprobs_R.dtype == behavior_R.dtype == torch.float32, (logprobs_R.dtype, behavior_R.dtype)
    assert all(column.shape == slot_R.shape == position_R.shape for column in drawn)
    _check(slot_R, position_R, tokens_SP, results_4S, *drawn)
    if slot_R.is_cuda:
        # Imported here because a CPU needs no Triton.
        from paged.kernels.step_rows_triton import keep_draws_triton

        keep_draws_triton(drawn, slot_R, position_R, tokens_SP, results_4S)
        return
    tokens_SP[slot_R.long(), position_R.long()] = tokens_R.int()
    columns = tokens_R.int(), logprobs_R.view(torch.int32), behavior_R.view(torch.int32), nan_R.int()
    results_4S[:, : len(slot_R)] = torch.stack(columns)


def _check(*tensors: torch.Tensor) -> None:
    assert all(tensor.is_contiguous() for tensor in tensors), [tensor.stride() for tensor in tensors]
