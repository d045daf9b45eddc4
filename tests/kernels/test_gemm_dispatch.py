"""The gate and the dispatcher: what the library may make, how rows are padded, and what is kept of the verdicts."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from card_tools import needs_card
from paged.kernels import gemm_dispatch, gemm_gate
from paged.kernels.gemm import gemm
from paged.kernels.gemm_gate import Product, Verdict, cancelling_numbers, gated_rows
from paged.kernels.linear import head_logits, linear
from paged.kernels.numerics import Numerics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CPU = torch.device("cpu")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def test_gated_rows_pad_little() -> None:
    sizes = gated_rows(8192)
    assert sizes[0] == 16
    assert sizes[-1] >= 8192
    assert all(size % 16 == 0 for size in sizes)
    assert all(b - a <= max(16, a / 8) for a, b in itertools.pairwise(sizes))
    assert gated_rows(1) == [16]
    assert gated_rows(100) == gated_rows(8192)[: len(gated_rows(100))]


def test_cancelling_numbers_cancel() -> None:
    for inner in (64, 101):
        x, weight = cancelling_numbers(5, 7, inner, torch.bfloat16, CPU, seed=0)
        assert x.shape == (5, inner)
        assert not (x.double() @ weight.double().T).any()
        assert (x[:, : inner // 2 * 2] != 0).float().mean() > 0.9


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What went to the library, after a gate that shows 32 rows equal and fast, 48 no faster, 64 unequal, 80 equal."""
    verdicts = [
        Verdict(16, 0, 9.0, 1.0),
        Verdict(32, 0, 1.0, 2.0),
        Verdict(48, 0, 1.5, 2.0),
        Verdict(64, 5, 0.0, 0.0),
        Verdict(80, 0, 0.0, 0.0),
    ]

    def found(products: Sequence[Product], rows: Sequence[int], *_: object) -> dict[Product, list[Verdict]]:
        assert list(rows) == [verdict.num_rows for verdict in verdicts]
        return dict.fromkeys(products, verdicts)

    given: list[torch.Tensor] = []

    def library(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: object) -> torch.Tensor:
        given.append(x)
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(gemm_dispatch, "verdicts", found)
    monkeypatch.setattr(gemm_dispatch, "library_product", library)
    monkeypatch.setattr(gemm_dispatch, "_choices", {})
    gemm_dispatch.prepare([Product(24, 32)], torch.float16, CPU, 70)
    return given


@pytest.mark.skipif(DEVICE == "cuda", reason="runs in the interpreter")
def test_library_only_where_shown_equal_and_not_slower_among_our_kernels(routed: list[torch.Tensor]) -> None:
    weight = numbers(24, 32, seed=1)
    for rows, padded in ((1, None), (16, None), (17, 32), (32, 32), (33, None), (64, None), (65, 80), (81, None)):
        routed.clear()
        x = numbers(rows, 32)
        out = gemm_dispatch.product(x, weight)
        assert [given.shape[0] for given in routed] == ([] if padded is None else [padded]), rows
        torch.testing.assert_close(out, x @ weight.T, atol=1e-2, rtol=1e-2)
        assert out.shape == (rows, 24)


@pytest.mark.skipif(DEVICE == "cuda", reason="runs in the interpreter")
def test_what_was_not_gated_is_our_own(routed: list[torch.Tensor]) -> None:
    x, weight, bias = numbers(32, 32), numbers(24, 32, seed=1), numbers(24, seed=2)
    gemm_dispatch.product(x, weight, bias)
    gemm_dispatch.product(x, weight, out_dtype=torch.float32)
    gemm_dispatch.product(x, weight, k_segments=2)
    gemm_dispatch.product(x, weight[:16])
    gemm_dispatch.product(torch.cat((x, x), dim=1)[:, :32], weight)
    assert not routed
    gemm_dispatch.product(x, weight, out_dtype=torch.float16)
    assert len(routed) == 1


@pytest.mark.skipif(DEVICE == "cuda", reason="runs in the interpreter")
def test_padding_reads_on_where_there_is_room(routed: list[torch.Tensor]) -> None:
    weight = numbers(24, 32, seed=1)
    x = gemm_dispatch.empty_rows(20, (32,), weight)
    x.copy_(numbers(20, 32))
    gemm_dispatch.product(x, weight)
    assert routed[0].data_ptr() == x.data_ptr()
    without_room = numbers(20, 32)
    gemm_dispatch.product(without_room, weight)
    assert routed[1].data_ptr() != without_room.data_ptr()
    assert torch.equal(routed[1][:20], without_room)


def test_refusals_are_logged(routed: list[torch.Tensor], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        gemm_dispatch.prepare([Product(8, 16)], torch.float16, CPU, 70)
    assert "8 x 16" in caplog.text
    assert "at 64 rows" in caplog.text
    for dtype, rows, name in ((torch.float32, 70, "dtype"), (torch.float16, 0, "max_rows")):
        with pytest.raises(ValueError, match=name):
            gemm_dispatch.prepare([Product(8, 16)], dtype, CPU, rows)


def test_table_is_made_once_and_again_when_facts_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts, examined = {"torch": "1"}, []

    def examine(product: Product, rows: Sequence[int], *_: object) -> list[Verdict]:
        examined.append((product, list(rows)))
        return [Verdict(num_rows, 0, 1.5, 2.5) for num_rows in rows]

    monkeypatch.setenv("PAGED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gemm_gate, "_facts", lambda device: facts)
    monkeypatch.setattr(gemm_gate, "_examine", examine)
    products = [Product(8, 16), Product(8, 16, has_bias=True), Product(8, 16, torch.float32)]
    first = gemm_gate.verdicts(products, [16, 32], torch.float16, CPU)
    assert len(examined) == 3
    assert gemm_gate.verdicts(products, [16, 32], torch.float16, CPU) == first
    assert len(examined) == 3
    # More rows and another dtype are examined; what is known is not.
    gemm_gate.verdicts(products[:1], [16, 32, 48], torch.float16, CPU)
    assert examined[3:] == [(products[0], [48])]
    gemm_gate.verdicts(products[:1], [16], torch.bfloat16, CPU)
    assert len(examined) == 5
    facts["torch"] = "2"
    gemm_gate.verdicts(products[:1], [16], torch.float16, CPU)
    assert len(examined) == 6
    tables = sorted((tmp_path / "cache").iterdir())
    assert len(tables) == 2
    assert {json.loads(table.read_text())["facts"]["torch"] for table in tables} == {"1", "2"}
    # A table that cannot be read is made anew.
    for table in tables:
        table.write_text('{"entries": ')
    gemm_gate.verdicts(products[:1], [16], torch.float16, CPU)
    assert len(examined) == 7


def test_a_table_that_cannot_be_kept_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk, or a home folder that is read-only, ended every start."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGED_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(gemm_gate, "_facts", lambda device: {})
    monkeypatch.setattr(gemm_gate, "_examine", lambda *_: [Verdict(16, 0, 1.5, 2.5)])
    product = Product(8, 16)
    assert gemm_gate.verdicts([product], [16], torch.float16, CPU) == {product: [Verdict(16, 0, 1.5, 2.5)]}
    assert "cannot be written (Not a directory)" in caplog.text


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dispatched_products_have_our_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also that the user's settings of torch are as they were."""
    monkeypatch.setenv("PAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(gemm_dispatch, "_choices", {})
    matmul = torch.backends.cuda.matmul
    names = [
        f"allow_{kind}_reduced_precision_reduction{part}" for kind in ("bf16", "fp16") for part in ("", "_split_k")
    ]
    before = [getattr(matmul, name) for name in names], torch.backends.cuda.preferred_blas_library()
    device = torch.device(DEVICE)
    kinds = [Product(1024, 1536), Product(1024, 1536, has_bias=True), Product(1024, 1536, torch.float32)]
    gemm_dispatch.prepare(kinds, dtype, device, 300)
    x, weight = cancelling_numbers(300, 1024, 1536, dtype, device, seed=3)
    bias = (1e-4 * torch.randn(1024, device=device)).to(dtype)
    used = 0
    library = gemm_dispatch.library_product

    def counted(*arguments: object) -> torch.Tensor:
        nonlocal used
        used += 1
        return library(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(gemm_dispatch, "library_product", counted)
    for kind in kinds:
        terms = (weight, bias if kind.has_bias else None)
        want = gemm(x, *terms, out_dtype=kind.out_dtype)
        for rows in (1, 16, 17, 40, 64, 100, 128, 129, 200, 257, 300):
            assert torch.equal(gemm_dispatch.product(x[:rows], *terms, out_dtype=kind.out_dtype), want[:rows]), rows
    assert used > 0
    assert ([getattr(matmul, name) for name in names], torch.backends.cuda.preferred_blas_library()) == before


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_and_head_take_the_canonical_order(dtype: torch.dtype) -> None:
    x, weight = cancelling_numbers(40, 512, 1024, dtype, torch.device(DEVICE), seed=5)
    assert torch.equal(linear(x, weight, numerics=Numerics()), gemm(x, weight))
    assert torch.equal(linear(x, weight, numerics=Numerics(), k_segments=4), gemm(x, weight, k_segments=4))
    assert torch.equal(head_logits(x, weight, numerics=Numerics()), gemm(x, weight, out_dtype=torch.float32))


def test_recorded_products_are_those_that_the_gate_can_judge() -> None:
    x, weight, bias = numbers(3, 32).to(DEVICE), numbers(24, 32, seed=1).to(DEVICE), numbers(24, seed=2).to(DEVICE)
    with gemm_dispatch.recorded() as products:
        gemm_dispatch.product(x, weight, bias)
        gemm_dispatch.product(x, weight, out_dtype=torch.float32)
        gemm_dispatch.product(x, weight, k_segments=2)
    gemm_dispatch.product(x, weight)
    assert products == [Product(24, 32, None, True), Product(24, 32, torch.float32, False)]
