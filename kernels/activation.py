"""The gated activation of the MLP.

Contract, with I the MLP's width: silu(gate) * up, silu in fp32 (fp64 for fp64 models) and rounded to the input's
dtype before the product, as Hugging Face does.
"""

from __future__ import annotations

import torch

from paged.kernels.numerics import compute_dtype


def silu_mul(gate_up_TI: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up as [T, I], from [T, 2 I] that holds the gates and then the ups of each row."""
    assert gate_up_TI.dim() == 2, gate_up_TI.shape
    assert gate_up_TI.shape[1] % 2 == 0, gate_up_TI.shape
    if gate_up_TI.is_cuda and gate_up_TI.dtype != torch.float64:
        from paged.kernels import rowwise_triton

        return rowwise_triton.silu_mul(gate_up_TI)
    gate_TI, up_TI = gate_up_TI.chunk(2, dim=1)
    wide_TI = gate_TI.to(compute_dtype(gate_TI.dtype))
    # torch's silu gives other bits in the vector loop's tail than in its body; these operations do not.
    return (wide_TI / (1 + torch.exp(-wide_TI))).to(gate_TI.dtype) * up_TI
