"""The small work around a step's rows: against plain indexing, and the card's kernels against that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from card_tools import DEVICE, needs_card
from paged.kernels.step_rows import keep_draws, keep_last_rows, step_inputs
from paged.kernels.step_rows_triton import keep_draws_triton, keep_last_rows_triton, step_inputs_triton

PADDING = 8


def on_card(*values: int) -> Any:
    """Parameters for a card alone: sizes as they are there."""
    return pytest.param(*values, marks=[pytest.mark.gpu, needs_card])


def drawn_int(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, dtype=torch.int32, device=DEVICE)


def by_kernel(
    slot_T: torch.Tensor,
    position_T: torch.Tensor,
    tokens_SP: torch.Tensor,
    blocks_SN: torch.Tensor,
    *,
    block_size: int,
    padding_slot: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return step_inputs_triton(slot_T, position_T, tokens_SP, blocks_SN, block_size, padding_slot)


@pytest.mark.parametrize("function", [step_inputs, by_kernel])
@pytest.mark.parametrize(("num_rows", "block_size"), [(1, 16), (130, 7), (300, 32), on_card(8192, 16)])
def test_step_inputs(function: Callable[..., tuple[torch.Tensor, ...]], num_rows: int, block_size: int) -> None:
    torch.manual_seed(num_rows)
    tokens_SP, blocks_SN = drawn_int(1000, PADDING + 1, 65), drawn_int(500, PADDING + 1, -(-65 // block_size))
    slot_T, position_T = drawn_int(PADDING + 1, num_rows), drawn_int(65, num_rows)
    slot_T[-1] = PADDING
    tokens, positions, cells = function(
        slot_T, position_T, tokens_SP, blocks_SN, block_size=block_size, padding_slot=PADDING
    )
    assert tokens.dtype == positions.dtype == cells.dtype == torch.int64
    for row, (slot, position) in enumerate(zip(slot_T.tolist(), position_T.tolist(), strict=True)):
        cell = blocks_SN[slot, position // block_size].item() * block_size + position % block_size
        assert positions[row] == position
        assert tokens[row] == tokens_SP[slot, position]
        assert cells[row] == (-1 if slot == PADDING else cell)


@pytest.mark.parametrize("function", [keep_last_rows, keep_last_rows_triton])
@pytest.mark.parametrize("width", [32, 130, on_card(4096)])
def test_keep_last_rows(function: Callable[..., None], width: int) -> None:
    hidden_TN = torch.randn(9, width, device=DEVICE).to(torch.float16)
    hidden_TN[2, width - 1], hidden_TN[4, 0], hidden_TN[6, 3] = torch.nan, torch.inf, -torch.inf
    hidden_TN[7, 1] = 65504
    row_B = torch.tensor([2, 8, 4, 6, 7, 0], dtype=torch.int32, device=DEVICE)
    kept_BN, not_finite_B = hidden_TN.new_zeros(6, width), torch.zeros(6, dtype=torch.bool, device=DEVICE)
    function(hidden_TN, row_B, kept_BN, not_finite_B)
    assert torch.equal(kept_BN.view(torch.int16), hidden_TN[row_B.long()].view(torch.int16))
    assert not_finite_B.tolist() == [True, False, True, True, False, False]


@pytest.mark.parametrize("function", [keep_draws, keep_draws_triton])
@pytest.mark.parametrize("num_rows", [1, 5, on_card(8)])
def test_keep_draws(function: Callable[..., None], num_rows: int) -> None:
    tokens_SP, results_4S = drawn_int(10, PADDING + 1, 40), torch.full((4, 8), -7, dtype=torch.int32, device=DEVICE)
    expected_SP = tokens_SP.clone()
    drawn = (
        torch.arange(100, 100 + num_rows, device=DEVICE),
        torch.linspace(-3, -1, num_rows, device=DEVICE),
        torch.linspace(-2, -1, num_rows, device=DEVICE),
        torch.arange(num_rows, device=DEVICE) % 2 == 1,
    )
    slot_R = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    position_R = 39 - slot_R
    function(drawn, slot_R, position_R, tokens_SP, results_4S)
    for row in range(num_rows):
        expected_SP[row, 39 - row] = 100 + row
    assert torch.equal(tokens_SP, expected_SP)
    assert torch.equal(results_4S[0, :num_rows].long(), drawn[0])
    assert torch.equal(results_4S[1, :num_rows].view(torch.float32), drawn[1])
    assert torch.equal(results_4S[2, :num_rows].view(torch.float32), drawn[2])
    assert torch.equal(results_4S[3, :num_rows].bool(), drawn[3])
    assert (results_4S[:, num_rows:] == -7).all(), "what lies beyond the rows is left alone"
