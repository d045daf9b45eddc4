"""Norm, rotation and activation: the rounding points of Hugging Face, and rows that know no neighbours."""

from __future__ import annotations

import pytest
import torch

from paged.kernels.activation import silu_mul
from paged.kernels.norm import rms_norm
from paged.kernels.rope import apply_rope, rope_tables

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [6, 32, 64, 257])
def test_rows_know_no_neighbours(dtype: torch.dtype, width: int) -> None:
    """torch's silu fails this: its bits differ between a vector loop's body and its tail."""
    x, weight = numbers(41, 4 * width, dtype=dtype), numbers(2 * width, seed=1, dtype=dtype)
    norm_x = x[:, : 2 * width]
    heads = x.view(41, 2, 2 * width)
    cos, sin = rope_tables(64, 2 * width, 1e4, dtype=dtype)
    whole = (rms_norm(norm_x, weight, 1e-6), silu_mul(x), apply_rope(heads, cos[:41], sin[:41]))
    for first, count in ((0, 1), (1, 1), (40, 1), (3, 2), (5, 30)):
        rows = slice(first, first + count)
        part = (
            rms_norm(norm_x[rows].clone(), weight, 1e-6),
            silu_mul(x[rows].clone()),
            apply_rope(heads[rows].clone(), cos[rows], sin[rows]),
        )
        for got, want in zip(part, whole, strict=True):
            assert torch.equal(got, want[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_against_formulas(dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    x, weight = numbers(9, 4, 32, dtype=dtype), numbers(32, seed=1, dtype=dtype)
    wide = x.double()
    norm = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), norm, atol=tolerance, rtol=0)
    gate_up = x.flatten(1)
    gate, up = gate_up.double().chunk(2, dim=1)
    torch.testing.assert_close(
        silu_mul(gate_up).double(), torch.nn.functional.silu(gate) * up, atol=tolerance, rtol=1e-6
    )
    cos, sin = rope_tables(100, 32, 1e4, dtype=dtype)
    turned = apply_rope(x, cos[50:59], sin[50:59]).double()
    exponent = torch.arange(0, 32, 2, dtype=torch.float64) / 32
    angle = torch.arange(50, 59, dtype=torch.float64)[:, None] / 1e4**exponent
    spin = torch.complex(angle.cos(), angle.sin())[:, None]
    pairs = torch.complex(wide[..., :16], wide[..., 16:]) * spin
    torch.testing.assert_close(turned, torch.cat((pairs.real, pairs.imag), -1), atol=1e-4, rtol=0)


def test_extremes() -> None:
    gate = torch.tensor([[-1e4, -100.0, -0.0, 100.0, 1e4, float("nan")]])
    out = silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))[0]
    assert out[:5].tolist() == [0.0, -0.0, 0.0, 100.0, 1e4] or abs(out[1]) < 1e-40
    assert out[5].isnan()
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


def test_a_rotation_table_is_a_prefix_of_a_longer_one() -> None:
    short, long = rope_tables(50, 32, 1e6, dtype=torch.float32), rope_tables(1000, 32, 1e6, dtype=torch.float32)
    for a, b in zip(short, long, strict=True):
        assert torch.equal(a, b[:50])
    assert rope_tables(50, 32, 1e6, dtype=torch.bfloat16)[0].dtype == torch.bfloat16


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_points_are_those_of_transformers(dtype: torch.dtype) -> None:
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import (
        Qwen3MLP,
        Qwen3RMSNorm,
        Qwen3RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    x, weight = numbers(30, 64, dtype=dtype), numbers(64, seed=1, dtype=dtype)
    norm = Qwen3RMSNorm(64, eps=1e-6).to(dtype)
    norm.weight.data.copy_(weight)
    assert torch.equal(norm(x), rms_norm(x, weight, 1e-6))

    config = Qwen3Config(hidden_size=64, intermediate_size=32, num_attention_heads=2, head_dim=32)
    config.rope_parameters["rope_theta"] = 1e6
    cos, sin = Qwen3RotaryEmbedding(config)(x, torch.arange(30)[None])
    own = rope_tables(30, 32, 1e6, dtype=dtype)
    for theirs, ours in zip((cos, sin), own, strict=True):
        # The library's fp32 cosine may be off by a unit in the last place; ours is rounded from fp64.
        ulp = 1.2e-7 if dtype == torch.float32 else 4e-3
        assert (theirs[0, :, :16].float() - ours.float()).abs().max() <= ulp
    q = x.view(1, 30, 2, 32).transpose(1, 2)
    tables = (torch.cat((table, table), -1)[None] for table in own)
    turned, _ = apply_rotary_pos_emb(q, q, *tables)
    assert torch.equal(turned[0].transpose(0, 1), apply_rope(x.view(30, 2, 32), *own))

    mlp = Qwen3MLP(config).to(dtype)
    gated = mlp.act_fn(x[:, :32]) * x[:, 32:]
    unit = 2e-7 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(silu_mul(x).double(), gated.double(), rtol=2 * unit, atol=unit)
