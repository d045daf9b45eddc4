"""The rotary position embedding: its tables and its application to heads.

Contract, with P positions, T tokens, H heads, D head size: element i and i + D/2 of a head turn by the angle
position * theta^(-2i/D). Angles are fp32; cosine and sine are rounded to fp32 and then to the model's dtype, and
applied in it: the rounding points of Hugging Face.
"""

from __future__ import annotations

import torch

from paged.kernels.norm import rms_norm


def rope_tables(
    num_positions: int, head_dim: int, theta: float, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [P, D/2] in ``dtype``.

    They are made on the CPU in fp64 from the fp32 angles and rounded to fp32, which gives the correctly rounded
    value: it depends neither on an element's place in a vector loop nor on the device.
    """
    assert head_dim % 2 == 0, head_dim
    inverse_D = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    angle_PD = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_D
    cos_PD, sin_PD = angle_PD.double().cos().float(), angle_PD.double().sin().float()
    return cos_PD.to(device, dtype), sin_PD.to(device, dtype)


def apply_rope(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotate heads [T, H, D] by cosines and sines [T, D/2] of the same dtype; the result is contiguous."""
    assert x_THD.dim() == 3, x_THD.shape
    assert cos_TD.shape == sin_TD.shape == (x_THD.shape[0], x_THD.shape[2] // 2), (x_THD.shape, cos_TD.shape)
    assert x_THD.dtype == cos_TD.dtype == sin_TD.dtype, (x_THD.dtype, cos_TD.dtype)
    cos_T1D, sin_T1D = cos_TD[:, None], sin_TD[:, None]
    first_THD, second_THD = x_THD.chunk(2, dim=-1)
    # Each product is rounded before the sum, so no fused multiply-add may be used here.
    return torch.cat((first_THD * cos_T1D - second_THD * sin_T1D, second_THD * cos_T1D + first_THD * sin_T1D), dim=-1)


def norm_rope(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, each head normalized and then rotated; both results are contiguous.

    Args:
        q_THD: queries; elements of a head adjoin.
        k_TKD: keys of the same rows.
        cos_TD: cosines [T, D/2], contiguous; ``sin_TD``: sines.
        q_weight_D: the weight of the queries' norm; ``None`` together with ``k_weight_D`` for no norm.
        k_weight_D: the weight of the keys' norm.
        eps: of the norm.
    """
    if q_THD.is_cuda and q_THD.dtype != torch.float64:
        from paged.kernels import rowwise_triton

        return rowwise_triton.norm_rope(q_THD, k_TKD, cos_TD, sin_TD, q_weight_D, k_weight_D, eps)
    if q_weight_D is not None and k_weight_D is not None:
        q_THD, k_TKD = rms_norm(q_THD, q_weight_D, eps), rms_norm(k_TKD, k_weight_D, eps)
    return apply_rope(q_THD, cos_TD, sin_TD), apply_rope(k_TKD, cos_TD, sin_TD)
