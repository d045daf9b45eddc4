"""Which of two equal kernels makes a matrix product on a CUDA device.

Contract: that of ``paged.kernels.gemm``, to the bit. The library makes a product only of a size for which the gate has
shown the same bits; every other product is our own kernel's. ``prepare`` asks the gate; without it all are our own.
``recorded`` tells which products a model makes, so that nobody has to list them.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from paged.kernels.gemm import DTYPES, gemm
from paged.kernels.gemm_gate import Product, gated_rows, library_product, verdicts

_LOG = logging.getLogger(__name__)

# For each device, dtype and product the gated numbers of rows, ascending, and whether the library makes them.
_choices: dict[tuple[torch.device, torch.dtype, Product], tuple[list[int], list[bool]]] = {}

_recorded: list[Product] | None = None


@contextmanager
def recorded() -> Iterator[list[Product]]:
    """Collects the products that are made meanwhile and that ``prepare`` can ask about, in order, with repetitions."""
    global _recorded
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None


def prepare(products: Iterable[Product], dtype: torch.dtype, device: torch.device, max_rows: int) -> None:
    """Ask the gate about products of up to ``max_rows`` rows; what it refuses goes to the log.

    Takes seconds the first time, and memory for one product's operands and results of ``max_rows`` rows; the table is
    cached (see ``paged.kernels.gemm_gate``). Call it while nothing else runs on the device, for it measures times.

    Raises:
        ValueError: ``dtype`` is neither bf16 nor fp16, or ``max_rows`` is less than 1.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be torch.bfloat16 or torch.float16 for the gate, not {dtype}")
    if max_rows < 1:
        raise ValueError(f"max_rows must be at least 1, not {max_rows}")
    rows = gated_rows(max_rows)
    # An index, so that a tensor's device finds the entry.
    device = torch.empty(0, device=device).device
    for product, found in verdicts(list(dict.fromkeys(products)), rows, dtype, device).items():
        _choices[device, dtype, product] = (rows, [verdict.takes_library for verdict in found])
        refused = [verdict.num_rows for verdict in found if verdict.num_different]
        if refused:
            _LOG.warning(
                "%s x %s in %s: the library's bits are others than ours at %s rows; our kernel makes these",
                *(product.num_columns, product.inner_size, dtype, ", ".join(map(str, refused))),
            )


def product(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    k_segments: int = 1,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The product [T, N]; arguments as ``paged.kernels.gemm.gemm`` takes them.

    While the library works, torch's settings of its matrix products are the gate's; they are put back at once.
    """
    num_rows, inner_size = x_TK.shape
    # What the gate has seen: operands that begin where 16 bytes do.
    is_aligned = x_TK.data_ptr() % 16 == weight_NK.data_ptr() % 16 == 0
    if k_segments == 1 and x_TK.is_contiguous() and is_aligned:
        kind = Product(weight_NK.shape[0], inner_size, _named(out_dtype, x_TK.dtype), bias_N is not None)
        if _recorded is not None:
            _recorded.append(kind)
        rows, are_library = _choices.get((x_TK.device, x_TK.dtype, kind), ((), ()))
        index = bisect.bisect_left(rows, num_rows)
        if index < len(rows) and are_library[index]:
            return library_product(_with_rows(x_TK, rows[index]), weight_NK, bias_N, out_dtype)[:num_rows]
    return gemm(x_TK, weight_NK, bias_N, k_segments=k_segments, out_dtype=out_dtype)


def empty_rows(num_rows: int, sizes: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """An uninitialized tensor [num_rows, *sizes] with room behind it for the rows that a product would pad it to."""
    room = num_rows if num_rows <= 16 else gated_rows(num_rows)[-1]
    return torch.empty(room, *sizes, dtype=like.dtype, device=like.device)[:num_rows]


def _named(out_dtype: torch.dtype | None, dtype: torch.dtype) -> torch.dtype | None:
    return None if out_dtype == dtype else out_dtype


def _with_rows(x_TK: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``x`` with more rows, of any content: a product's rows do not touch each other."""
    inner_size = x_TK.shape[1]
    end = x_TK.storage_offset() + num_rows * inner_size
    if end * x_TK.element_size() <= x_TK.untyped_storage().nbytes():
        # What lies behind it in the same storage will do, and saves a copy.
        return x_TK.as_strided((num_rows, inner_size), (inner_size, 1))
    return F.pad(x_TK, (0, 0, 0, num_rows - x_TK.shape[0]))
