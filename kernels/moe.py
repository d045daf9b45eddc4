"""The mixture of experts: which experts a row goes through, and the weighted sum of what they make of it.

Contract, with T rows, E experts, C chosen ones a row, N the hidden width, I an expert's width:

* Router: probabilities are the softmax of the logits over all experts, in fp32 whatever the model's dtype. The C
  likeliest are chosen, equals by ascending id; their probabilities, divided by their sum if asked for, are rounded to
  the model's dtype.
* Slots: a row's chosen experts stand in ascending order of their ids.
* Experts: each is a gated MLP whose result is rounded to the model's dtype, multiplied by the row's weight and rounded
  again. The products are summed slot after slot in the model's dtype, as Hugging Face's block does expert after expert.
* Ranks: each holds a part of every expert's width I. Their terms of the results are added up before the weights where
  ``k_segments`` must give the bits of one rank; otherwise after the sum over the slots, which is C times fewer bytes.

A row of the result is a function of that row and of the weights; under ``invariant`` to the bit, whoever else chose the
same experts. Nothing is added atomically.
"""

from __future__ import annotations

import torch

from paged.kernels.activation import silu_mul
from paged.kernels.collectives import SINGLE, RankGroup
from paged.kernels.linear import linear, partial_linear
from paged.kernels.numerics import Numerics, compute_dtype


def route(logits_TE: torch.Tensor, num_chosen: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row [T, C], int64 and ascending, and their weights [T, C] in the dtype of the logits.

    Args:
        logits_TE: the router's logits; elements of a row adjoin.
        num_chosen: C, experts a row.
        normalize: scale a row's weights to a sum of 1.
    """
    assert logits_TE.dim() == 2, logits_TE.shape
    assert 1 <= num_chosen <= logits_TE.shape[1], (num_chosen, logits_TE.shape)
    assert logits_TE.is_contiguous(), logits_TE.stride()
    probs_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    # topk leaves the order of equals open.
    sorted_TE, ids_TE = probs_TE.sort(dim=-1, descending=True, stable=True)
    # A sum's bits may hang on the distance between rows.
    weights_TC = sorted_TE[:, :num_chosen].contiguous()
    if normalize:
        weights_TC = weights_TC / weights_TC.sum(dim=-1, keepdim=True)
    experts_TC, order_TC = ids_TE[:, :num_chosen].sort(dim=-1)
    return experts_TC, weights_TC.gather(1, order_TC).to(logits_TE.dtype)


def run_experts(
    x_TN: torch.Tensor,
    experts_TC: torch.Tensor,
    weights_TC: torch.Tensor,
    gate_up_EIN: torch.Tensor,
    down_ENI: torch.Tensor,
    *,
    numerics: Numerics,
    k_segments: int = 1,
    group: RankGroup = SINGLE,
) -> torch.Tensor:
    """The weighted sum [T, N] of what each row's experts make of it.

    Args:
        x_TN: rows; elements of a row adjoin.
        experts_TC: the experts of each row, from ``route``.
        weights_TC: their weights, of the rows' dtype.
        gate_up_EIN: [E, 2 I, N]: for each expert the gate's weight, then the other factor's.
        down_ENI: [E, N, I].
        numerics: how sums are formed. Under ``invariant`` an expert's rows go in tiles of constant size.
        k_segments: of the second product, of this rank's width; see ``paged.kernels.linear``.
        group: the ranks that hold parts of the experts; the result is whole on each.
    """
    num_rows, num_chosen = experts_TC.shape
    num_experts, inner, hidden = down_ENI.shape[0], down_ENI.shape[2], down_ENI.shape[1]
    assert x_TN.shape == (num_rows, hidden), (x_TN.shape, down_ENI.shape)
    assert gate_up_EIN.shape == (num_experts, 2 * inner, hidden), (gate_up_EIN.shape, down_ENI.shape)
    assert weights_TC.shape == experts_TC.shape, (weights_TC.shape, experts_TC.shape)
    assert x_TN.dtype == weights_TC.dtype == gate_up_EIN.dtype == down_ENI.dtype, (x_TN.dtype, weights_TC.dtype)
    is_wide = group.size > 1 and numerics.reduces_wide
    dtype = compute_dtype(x_TN.dtype) if is_wide else x_TN.dtype
    if x_TN.is_cuda and x_TN.dtype in (torch.bfloat16, torch.float16):
        # Under ``fast`` as well: a loop over the experts asks the host how many rows each has.
        from paged.kernels import moe_triton

        if group.size == 1:
            parts = (experts_TC, weights_TC, gate_up_EIN, down_ENI)
            return moe_triton.run_experts(x_TN, *parts, k_segments=k_segments)
        weights = (gate_up_EIN, down_ENI, None)
        made_TCN = moe_triton.products(x_TN, experts_TC, *weights, dtype=dtype, k_segments=k_segments)
    else:
        made_TCN = _products(x_TN, experts_TC, gate_up_EIN, down_ENI, dtype, numerics, k_segments)
    if numerics.k_segments > 1:
        made_TCN = group.all_reduce(made_TCN).to(x_TN.dtype)
    made_TCN = made_TCN * weights_TC[:, :, None]
    total_TN = made_TCN[:, 0]
    for slot in range(1, num_chosen):
        total_TN = total_TN + made_TCN[:, slot]
    if numerics.k_segments > 1:
        return total_TN
    return group.all_reduce(total_TN).to(x_TN.dtype)


def _products(
    x_TN: torch.Tensor,
    experts_TC: torch.Tensor,
    gate_up_EIN: torch.Tensor,
    down_ENI: torch.Tensor,
    dtype: torch.dtype,
    numerics: Numerics,
    k_segments: int,
) -> torch.Tensor:
    """What each row's experts make of it, [T, C, N] in ``dtype``: the rows' own, or the one that sums are formed in."""
    num_rows, num_chosen = experts_TC.shape
    num_experts, hidden = down_ENI.shape[:2]
    product = linear if dtype == x_TN.dtype else partial_linear
    expert_P = experts_TC.flatten()
    # Pairs of a row and a slot, expert by expert.
    order_P = expert_P.argsort(stable=True)
    made_PN = x_TN.new_empty(num_rows * num_chosen, hidden, dtype=dtype)
    first = 0
    for expert, count in enumerate(expert_P.bincount(minlength=num_experts).tolist()):
        if not count:
            continue
        pair_R = order_P[first : first + count]
        first += count
        gate_up_RI = linear(x_TN[pair_R // num_chosen], gate_up_EIN[expert], numerics=numerics)
        made_PN[pair_R] = product(silu_mul(gate_up_RI), down_ENI[expert], numerics=numerics, k_segments=k_segments)
    return made_PN.unflatten(0, (num_rows, num_chosen))
