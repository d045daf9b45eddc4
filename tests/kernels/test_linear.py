"""Matrix products: a row's bits hang on that row alone; the head never rounds below fp32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paged.kernels.linear import add_bias, head_logits, linear, partial_linear
from paged.kernels.numerics import Numerics, fold_tree

INVARIANT, FAST = Numerics(), Numerics(mode="fast")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_size", "out_size"), [(64, 96), (512, 512), (100, 60), (256, 1000)])
@pytest.mark.parametrize("k_segments", [1, 4])
def test_a_rows_bits_are_its_own(dtype: torch.dtype, in_size: int, out_size: int, k_segments: int) -> None:
    x, weight = numbers(70, in_size, dtype=dtype), numbers(out_size, in_size, seed=1, dtype=dtype)
    bias = numbers(out_size, seed=2, dtype=dtype)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, weight, bias, numerics=INVARIANT, k_segments=k_segments)

    whole = product(x)
    assert whole.dtype == dtype
    for first, count in ((0, 1), (5, 1), (69, 1), (0, 16), (3, 17), (1, 33), (7, 63)):
        assert torch.equal(product(x[first : first + count]), whole[first : first + count]), (first, count)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    assert torch.equal(product(x[order]), whole[order])
    # Rows that lie apart, as a slice of a wider tensor does.
    wide = torch.cat((x, x), dim=1)
    assert torch.equal(product(wide[:, :in_size]), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_plain_product_does_depend_on_the_batch(dtype: torch.dtype) -> None:
    """A control for the test above: without tiles of rows, the library's choice by size shows in the bits."""
    x, weight = numbers(70, 512, dtype=dtype), numbers(512, 512, seed=1, dtype=dtype)
    whole = F.linear(x, weight)
    if all(torch.equal(F.linear(x[i : i + 1], weight), whole[i : i + 1]) for i in range(70)):
        pytest.skip("this CPU's library gives the same bits at every size")
    tiled = linear(x, weight, numerics=INVARIANT)
    assert torch.equal(linear(x[:1], weight, numerics=INVARIANT), tiled[:1])


@pytest.mark.parametrize("numerics", [INVARIANT, FAST], ids=lambda n: n.mode)
@pytest.mark.parametrize("k_segments", [1, 2, 4])
def test_close_to_fp64(numerics: Numerics, k_segments: int) -> None:
    x, weight, bias = numbers(37, 128), numbers(50, 128, seed=1), numbers(50, seed=2)
    exact = x.double() @ weight.double().T + bias.double()
    out = linear(x, weight, bias, numerics=numerics, k_segments=k_segments)
    torch.testing.assert_close(out.double(), exact, atol=2e-5, rtol=0)


def test_segments_fold_as_a_balanced_tree() -> None:
    x, weight = numbers(3, 64), numbers(8, 64, seed=1)
    parts = [linear(x[:, i : i + 16], weight[:, i : i + 16].contiguous(), numerics=INVARIANT) for i in (0, 16, 32, 48)]
    whole = linear(x, weight, numerics=INVARIANT, k_segments=4)
    assert torch.equal(whole, (parts[0] + parts[1]) + (parts[2] + parts[3]))
    with pytest.raises(ValueError, match="k_segments 3"):
        linear(x, weight, numerics=INVARIANT, k_segments=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_segments_a_columns_bits_are_its_own(dtype: torch.dtype) -> None:
    """A rank has some columns of the product that one rank has whole; thin ones take another path in the library."""
    segments = Numerics(k_segments=4)
    x, weight = numbers(20, 64, dtype=dtype), numbers(300, 64, seed=1, dtype=dtype)
    bias = numbers(300, seed=2, dtype=dtype)
    whole = linear(x, weight, bias, numerics=segments), head_logits(x, weight, numerics=segments)
    for first, count in ((0, 1), (7, 2), (100, 4), (90, 8), (290, 10), (0, 150), (130, 128), (128, 128)):
        columns = slice(first, first + count)
        part = linear(x, weight[columns], bias[columns], numerics=segments)
        assert torch.equal(part, whole[0][:, columns]), (first, count)
        assert torch.equal(head_logits(x, weight[columns], numerics=segments), whole[1][:, columns]), (first, count)
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(whole[0].double(), exact, atol=2e-5 if dtype == torch.float32 else 0.1, rtol=0)


def test_the_terms_of_all_ranks_make_the_product_in_segments() -> None:
    segments = Numerics(k_segments=4)
    x, weight = numbers(20, 64, dtype=torch.bfloat16), numbers(50, 64, seed=1, dtype=torch.bfloat16)
    bias = numbers(50, seed=2, dtype=torch.bfloat16)
    whole = linear(x, weight, bias, numerics=segments, k_segments=4)
    for tp in (1, 2, 4):
        cuts = zip(x.chunk(tp, 1), weight.chunk(tp, 1), strict=True)
        terms = [
            partial_linear(rows, columns.contiguous(), numerics=segments, k_segments=4 // tp) for rows, columns in cuts
        ]
        assert all(term.dtype == torch.float32 for term in terms)
        assert torch.equal(add_bias(fold_tree(terms), bias, torch.bfloat16), whole)


@pytest.mark.parametrize("numerics", [Numerics(head_rows=48), FAST], ids=lambda n: n.mode)
def test_head_is_not_rounded_to_bf16(numerics: Numerics) -> None:
    hidden, head = numbers(20, 64, dtype=torch.bfloat16), numbers(131, 64, seed=1, dtype=torch.bfloat16)
    logits = head_logits(hidden, head, numerics=numerics)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), hidden.double() @ head.double().T, atol=1e-5, rtol=0)
    if numerics.is_invariant:
        assert torch.equal(head_logits(hidden[4:5], head, numerics=numerics), logits[4:5])


def test_head_keeps_fp64() -> None:
    hidden, head = numbers(2, 64, dtype=torch.float64), numbers(9, 64, seed=1, dtype=torch.float64)
    assert head_logits(hidden, head, numerics=INVARIANT).dtype == torch.float64


def test_launcher_checks() -> None:
    x, weight = numbers(2, 8), numbers(3, 8)
    for bad_x, bad_weight in ((x.double(), weight), (x[:, :4], weight), (x, weight[:, ::2]), (x[0], weight)):
        with pytest.raises(AssertionError):
            linear(bad_x, bad_weight, numerics=INVARIANT)


def test_numerics_id() -> None:
    where = {"dtype": torch.float32, "kv_dtype": torch.float32, "device": "cpu"}
    name = INVARIANT.numerics_id(**where)
    assert len(name) == 12
    assert int(name, 16) >= 0
    assert name == Numerics().numerics_id(**where)
    others = [FAST, Numerics(gemm_rows=8), Numerics(kv_tile=32), Numerics(kv_split=512), Numerics(k_segments=4)]
    names = {numerics.numerics_id(**where) for numerics in others}
    names.add(INVARIANT.numerics_id(**(where | {"dtype": torch.bfloat16})))
    names.add(INVARIANT.numerics_id(**(where | {"kv_dtype": torch.bfloat16})))
    assert len(names | {name}) == 8


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"mode": "exact"}, "mode"),
        ({"gemm_rows": 0}, "gemm_rows"),
        ({"kv_split": 100}, "kv_split"),
        ({"k_segments": 3}, "k_segments"),
    ],
)
def test_numerics_refuses(fields: dict, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        Numerics(**fields)
