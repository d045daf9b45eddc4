"""The constants that fix the order of every reduction, and the short name of a choice of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

from paged.kernels.choices import MODES, check_choices, check_count
from paged.kernels.exponential import COEFFICIENTS, SHORT_BITS, SHORT_COEFFICIENTS

KERNEL_ORDERS = 1
"""Counts up when a kernel for the card forms a sum in another order than before."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """How sums are formed. Two runs with the same ``numerics_id`` may be compared bit by bit.

    Attributes:
        mode: ``invariant``: the bits of a row depend on that row alone; ``fast``: whatever layout is quickest,
            equal to rounding. The constants below bind ``invariant``.
        gemm_rows: rows of a tile of a matrix product on the CPU; the last tile is padded to it.
        bmm_items: items of one batched product of attention on the CPU; the last batch is padded to it.
        kv_tile: keys that attention takes at a time, aligned to position 0.
        kv_split: keys that share an online softmax, aligned to position 0; the splits are folded left to right.
        k_segments: parts of the inner dimension of row-parallel products, folded as a balanced tree; a power
            of two. 4 makes 1, 2 and 4 ranks agree to the bit: what the ranks add up is then fp32.
        gemm_columns: columns of a tile of a matrix product on the CPU where there are ``k_segments``: a column's bits
            must not hang on how many of them a rank holds.
        head_rows: rows of the vocabulary that the head upcasts at a time.
        reduce_dtype: what the ranks add up without ``k_segments``: products rounded to the ``model``'s dtype, or
            products left in ``float32`` (twice the bytes for bf16), rounded once after the sum.
    """

    mode: str = "invariant"
    gemm_rows: int = 16
    bmm_items: int = 32
    kv_tile: int = 64
    kv_split: int = 256
    k_segments: int = 1
    gemm_columns: int = 128
    head_rows: int = 16384
    reduce_dtype: str = "model"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        check_choices(self.k_segments, self.reduce_dtype)
        for name in ("gemm_rows", "bmm_items", "kv_tile", "kv_split", "gemm_columns", "head_rows"):
            check_count(name, getattr(self, name))
        if self.kv_split % self.kv_tile:
            raise ValueError(f"kv_split must be a multiple of kv_tile {self.kv_tile}, not {self.kv_split}")

    @property
    def is_invariant(self) -> bool:
        """Whether a row's bits must hang on that row alone."""
        return self.mode == "invariant"

    @property
    def reduces_wide(self) -> bool:
        """Whether what ranks add up is left as wide as it was computed."""
        return self.k_segments > 1 or self.reduce_dtype == "float32"

    @property
    def is_tp_invariant(self) -> bool:
        """Whether the bits are the same over every number of ranks that divides ``k_segments``."""
        return self.is_invariant and self.k_segments > 1

    def numerics_id(self, *, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device | str, tp: int = 1) -> str:
        """12 hexadecimal digits over the constants, the dtypes, the kind of device and the version of torch.

        The constants of masses count as well, and the number of ranks ``tp``, unless no bits hang on it.

        On the CPU what the libraries make of a few fixed products counts too: they choose their kernels by instruction
        set, number of threads and environment, which no version tells. On cards Triton's version and ``KERNEL_ORDERS``
        count.
        """
        device = torch.device(device)
        facts: dict[str, object] = {"constants": asdict(self), "dtype": str(dtype), "kv_dtype": str(kv_dtype)}
        facts["masses"] = [COEFFICIENTS, SHORT_BITS, SHORT_COEFFICIENTS]
        facts["torch"] = torch.__version__
        facts["tp"] = None if self.is_tp_invariant else tp
        if device.type == "cpu":
            facts["device"] = ["cpu", torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
            facts["bits"] = self._cpu_bits(dtype)
        else:
            # Imported here because a CPU needs no Triton.
            import triton

            facts["device"] = [device.type, list(torch.cuda.get_device_capability(device))]
            facts["kernels"] = [triton.__version__, KERNEL_ORDERS]
        text = json.dumps(facts, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def _cpu_bits(self, dtype: torch.dtype) -> str:
        """Digest of what the operations that attention and ``linear`` use give on this machine for fixed numbers."""
        digest = hashlib.blake2b(digest_size=8)
        for kind in dict.fromkeys((dtype, compute_dtype(dtype))):
            x_TK, weight_NK = _fixed_numbers(self.gemm_rows, 512, kind), _fixed_numbers(768, 512, kind)
            results = [F.linear(x_TK, weight_NK), torch.exp(x_TK)]
            if self.is_tp_invariant:
                results.append(F.linear(x_TK, weight_NK[: self.gemm_columns]))
            if kind == compute_dtype(dtype):
                left = _fixed_numbers(self.bmm_items * 2, 64, kind).view(self.bmm_items, 2, 64)
                right = _fixed_numbers(self.bmm_items * self.kv_tile, 64, kind).view(self.bmm_items, self.kv_tile, 64)
                results.append(torch.bmm(left, right.mT))
            for result in results:
                digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _fixed_numbers(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers in [-1, 1) that look random and are the same everywhere."""
    mixed = torch.arange(1, rows * columns + 1) * 2654435761 % 2**31
    return (mixed.to(torch.float64) / 2**30 - 1).to(dtype).view(rows, columns)


def fold_tree(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of ``parts`` as a balanced tree, neighbours first: ((0 + 1) + (2 + 3)); an odd last one moves up."""
    while len(parts) > 1:
        pairs = [left + right for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + list(parts[2 * len(pairs) :])
    return parts[0]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are formed in: fp64 for fp64 models, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
