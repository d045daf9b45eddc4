"""The fold of rows with many splits on Hopper: the bits of the Triton kernel's, and which rows it is asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from card_tools import ON_CARD, needs_hopper
from paged.kernels import attention_hopper_fold, attention_triton
from paged.kernels.attention_hopper_fold import PROGRAMS_PER_SM, SPLITS, STAGES, fold_splits_hopper
from paged.kernels.batch_layout import BatchLayout, DecodeWork
from paged.kernels.kv_cache import LayerCache
from paged.kernels.launch import is_dependent, num_sms, options
from paged.kernels.numerics import Numerics

FACTOR = 0.127
# Around a stage, all stages, and what is unrolled; few and many.
COUNTS = [1, 2, 3, 8, 9, 10, SPLITS, SPLITS + 1, SPLITS + 2, STAGES * SPLITS + 1, STAGES * SPLITS + 2, 700]


def fold_triton(
    sums_IHD: torch.Tensor, tops_IH: torch.Tensor, totals_IH: torch.Tensor, rows_N3: torch.Tensor, out_THD: torch.Tensor
) -> None:
    num_heads, head_dim = sums_IHD.shape[1:]
    attention_triton._fold_kernel[(rows_N3.shape[0] * num_heads, head_dim // 32)](
        sums_IHD, tops_IH, totals_IH, rows_N3, out_THD, FACTOR, NUM_HEADS=num_heads, HEAD_DIM=head_dim, DIMS=32,
        SPLITS=32, IS_DEPENDENT=is_dependent(out_THD), num_warps=1, **options(out_THD),
    )  # fmt: skip


def bits(x: torch.Tensor) -> torch.Tensor:
    """What must be equal: also the signs of zeros, but of NaN only that it is one."""
    return x.masked_fill(x.isnan(), 99).view(torch.int16)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(32, 128), (6, 64), (1, 64)])
def test_the_fold_has_the_bits_of_the_triton_kernel(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_heads: int, head_dim: int
) -> None:
    """Lists longer than what counts, NaN beyond the splits and some among them, and more rows than programs."""
    generator = torch.Generator("cuda").manual_seed(num_heads + head_dim)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    size = (sum(COUNTS), num_heads)
    firsts = np.cumsum([0, *COUNTS[:-1]])
    # Rows of the output in another order than the splits', with rows of others between them.
    rows = [[2 * i + 1, first, count] for i, (first, count) in enumerate(zip(firsts, COUNTS, strict=True))][::-1]
    rows_N3 = torch.tensor(rows + [[-1, -1, -1]] * 5, dtype=torch.int32, device="cuda")
    mine = rows_N3[: len(rows), 0].long()
    for spread in (0.0, 3.0, 1000.0):
        for strange in (None, float("nan"), float("inf")):
            tops_IH, totals_IH = spread * draw(*size), draw(*size).abs() + 1
            sums_IHD = torch.exp2(2 * draw(*size, 1)) * draw(*size, head_dim)
            if strange is not None:
                for numbers in (tops_IH, totals_IH, sums_IHD):
                    numbers[draw(*numbers.shape) > 2.7] = strange
            buffers = [
                torch.cat([x, torch.full((STAGES * SPLITS, *x.shape[1:]), torch.nan, device="cuda")])
                for x in (sums_IHD, tops_IH, totals_IH)
            ]
            expected_THD = torch.full((2 * len(rows) + 1, num_heads, head_dim), 7.0, dtype=dtype, device="cuda")
            nothing_THD = expected_THD.clone()
            fold_triton(*buffers, rows_N3, expected_THD)
            assert strange is not None or expected_THD.isfinite().all()
            for per_sm in (PROGRAMS_PER_SM, 1):
                monkeypatch.setattr(attention_hopper_fold, "PROGRAMS_PER_SM", per_sm)
                out_THD = nothing_THD.clone()
                fold_splits_hopper(*buffers, rows_N3, out_THD, factor=FACTOR)
                assert torch.equal(bits(out_THD), bits(expected_THD)), (spread, strange, per_sm)
            out_THD = nothing_THD.clone()
            fold_splits_hopper(*buffers, rows_N3[len(rows) :], out_THD, factor=FACTOR)
            assert torch.equal(out_THD, nothing_THD)
            assert (expected_THD[mine] != 7).flatten(1).any(1).all()
    # With one program a multiprocessor some had several rows and heads.
    assert num_heads == 1 or len(rows) * num_heads * head_dim // 32 > num_sms(rows_N3.device)


@pytest.mark.skipif(ON_CARD, reason="runs in Triton's interpreter")
@pytest.mark.parametrize(
    ("most_splits", "suits", "expected"), [(6, True, 1), (5, True, 0), (6, False, 0), (0, True, 0)]
)
def test_many_splits_alone_are_folded_by_it(
    monkeypatch: pytest.MonkeyPatch, most_splits: int, suits: bool, expected: int
) -> None:
    """A launch is built for ``most_splits``, which stays the same where a graph holds it."""
    calls = []
    monkeypatch.setattr(attention_triton, "suits_hopper_decode", lambda *_: suits)
    monkeypatch.setattr(attention_triton, "decode_items_hopper", lambda *_, **__: None)
    monkeypatch.setattr(attention_triton, "fold_splits_hopper", lambda *args, factor: calls.append((args, factor)))
    cache = LayerCache(*torch.zeros(2, 1, 16, 1, 64, dtype=torch.bfloat16))
    layout = BatchLayout.build([0], [1], np.zeros((1, 1), dtype=np.int32), 16, "cpu")
    rows_N3 = torch.full((2, 3), -1, dtype=torch.int32)
    work = DecodeWork(torch.zeros(1, 4, dtype=torch.int32), rows_N3, torch.zeros(1, dtype=torch.int32), most_splits)
    q_THD = torch.zeros(1, 2, 64, dtype=torch.bfloat16)
    out_THD = torch.zeros_like(q_THD)
    attention_triton.decode_attention(q_THD, cache, layout, work, out_THD, scale=0.5, numerics=Numerics())
    assert len(calls) == expected
    for (sums_IHD, tops_IH, totals_IH, rows, out), factor in calls:
        assert sums_IHD.shape == (1, 2, 64)
        assert tops_IH.shape == totals_IH.shape == (1, 2)
        assert rows is rows_N3
        assert out is out_THD
        assert factor == 0.5 * attention_triton.LOG2_E
