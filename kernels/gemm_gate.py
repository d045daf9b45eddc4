"""The gate: for which products the library's bits are those of our own kernel, and which of the two is faster.

The library is cuBLASLt without split-K. It picks its algorithm by size, so equality is shown for each size: products
of exactly T rows, on numbers whose sums cancel (another order of summation then shows in most elements, where plain
random numbers would hide it under the last rounding), are compared bit by bit with ``paged.kernels.gemm``. What was
found is kept as JSON in the folder ``PAGED_CACHE`` (default ``~/.cache/paged``), under a digest of all that may change
it: the card, the versions, the libraries' environment and our kernels' sources. A change of any makes a new table.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton

from paged.kernels import gemm as own_kernel
from paged.kernels import gemm_hopper
from paged.kernels.gemm import gemm

_LOG = logging.getLogger(__name__)

# Beyond it a product fills the card whoever makes it, and the library's kernels are the faster ones.
_MAX_TIMED_ROWS = 256
# Twice the L2 cache of an H200: weights that come round again have left it.
_ROTATED_BYTES = 128 * 2**20
_NUM_REPLAYS = 4
# What a product of the library costs beside its own time. Our kernels begin while the one before ends; the library's
# let theirs end first, and those behind them wait as well. A chain of the same products shows half of that.
_LIBRARY_GAP_US = 1.0
# Variables of the environment that torch or the library chooses its algorithms by.
_ENVIRONMENT = ("CUBLAS", "TORCH_BLAS", "TORCH_CUBLAS", "DISABLE_ADDMM")


@dataclass(frozen=True, slots=True)
class Product:
    """A kind of matrix product: weights [N, K].

    Attributes:
        num_columns: N.
        inner_size: K.
        out_dtype: of the result: ``None`` for the inputs', or fp32.
        has_bias: whether a bias is added.
    """

    num_columns: int
    inner_size: int
    out_dtype: torch.dtype | None = None
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate found for one number of rows.

    Attributes:
        num_rows: T.
        num_different: elements in which the library differs from our kernel.
        library_us: microseconds of the library's product; 0 where not timed.
        own_us: the same for our kernel.
    """

    num_rows: int
    num_different: int
    library_us: float
    own_us: float

    @property
    def takes_library(self) -> bool:
        """Whether the library is to be used: only where equal, and not where it is slower among our kernels."""
        is_timed = self.own_us > 0
        return self.num_different == 0 and (not is_timed or self.library_us + _LIBRARY_GAP_US <= self.own_us)


def gated_rows(max_rows: int) -> list[int]:
    """The numbers of rows that products are padded to, up to the first that holds ``max_rows``.

    Multiples of 16 to 128, then eight to an octave: at most an eighth of a product's rows is padding.
    """
    sizes = [16]
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + max(16, (1 << sizes[-1].bit_length() - 1) // 8))
    return sizes


def library_product(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """The product by cuBLASLt without split-K, [T, N]."""
    with _library_flags(x_TK.dtype):
        if out_dtype is None or out_dtype == x_TK.dtype:
            return F.linear(x_TK, weight_NK, bias_N)
        assert bias_N is None
        return torch.mm(x_TK, weight_NK.t(), out_dtype=out_dtype)


@contextmanager
def _library_flags(dtype: torch.dtype) -> Iterator[None]:
    """Torch's global settings as the gate has seen them; the user's come back at the end."""
    matmul = torch.backends.cuda.matmul
    name = "allow_bf16_reduced_precision_reduction"
    accumulation = matmul.allow_fp16_accumulation
    if dtype == torch.float16:
        name = "allow_fp16_reduced_precision_reduction"
        matmul.allow_fp16_accumulation = False
    reduction = (getattr(matmul, name), getattr(matmul, f"{name}_split_k"))
    library = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    setattr(matmul, name, (False, False))
    try:
        yield
    finally:
        setattr(matmul, name, reduction)
        torch.backends.cuda.preferred_blas_library(library)
        if dtype == torch.float16:
            matmul.allow_fp16_accumulation = accumulation


def verdicts(
    products: Sequence[Product], rows: Sequence[int], dtype: torch.dtype, device: torch.device
) -> dict[Product, list[Verdict]]:
    """The verdict for each product and number of rows, in order; made where the cached table has none."""
    facts = _facts(device)
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
    path = _cache_folder() / f"gemm-{digest}.json"
    entries = _read(path)
    found: dict[Product, list[Verdict]] = {}
    is_new = False
    for product in products:
        name = f"{product.num_columns}x{product.inner_size} {dtype} to {product.out_dtype or dtype}"
        name += " with bias" if product.has_bias else ""
        known = {int(one["num_rows"]): Verdict(**one) for one in entries.get(name, [])}
        missing = [num_rows for num_rows in rows if num_rows not in known]
        if missing:
            is_new = True
            known.update((verdict.num_rows, verdict) for verdict in _examine(product, missing, dtype, device))
            entries[name] = [asdict(known[num_rows]) for num_rows in sorted(known)]
        found[product] = [known[num_rows] for num_rows in rows]
    if is_new:
        _write(path, json.dumps({"facts": facts, "entries": entries}, indent=1))
    return found


def cancelling_numbers(
    num_rows: int, num_columns: int, inner_size: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [T, K] and weights [N, K] whose exact products are 0: a result is the sum's rounding error alone.

    Each number of a row stands there twice, far apart, against weights of opposite sign. An odd input is 0.
    """
    generator = torch.Generator(device).manual_seed(seed)
    half = inner_size // 2
    order_K = torch.randperm(2 * half, generator=generator, device=device) % half
    sign_K = torch.ones(2 * half, dtype=dtype, device=device)
    # The second of each pair, in the order in which they stand.
    _, first_K = torch.sort(order_K, stable=True)
    sign_K[first_K[1::2]] = -1
    x_TK = 8 * torch.randn(num_rows, half, generator=generator, device=device, dtype=dtype)
    weight_NK = 8 * torch.randn(num_columns, half, generator=generator, device=device, dtype=dtype)
    padding = (0, inner_size - 2 * half)
    return F.pad(x_TK[:, order_K], padding), F.pad(weight_NK[:, order_K] * sign_K, padding)


def _examine(product: Product, rows: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Verdict]:
    most = max(rows)
    size = (most, product.num_columns, product.inner_size)
    bias_N = None
    if product.has_bias:
        # As small as the rounding errors, which it would hide otherwise.
        bias_N = (1e-4 * torch.randn(product.num_columns, device=device)).to(dtype)
    different: dict[int, list[torch.Tensor]] = {num_rows: [] for num_rows in rows}
    for seed in (0, 1):
        x_TK, weight_NK = cancelling_numbers(*size, dtype, device, seed)
        # A row's bits do not hang on the number of rows, so one product of ours serves all.
        want_TN = gemm(x_TK, weight_NK, bias_N, out_dtype=product.out_dtype)
        for num_rows in rows:
            got_TN = library_product(x_TK[:num_rows], weight_NK, bias_N, product.out_dtype)
            different[num_rows].append((got_TN != want_TN[:num_rows]).sum())
    # Looked at once: asking for each would have the host wait for the card each time.
    counts = torch.stack([torch.stack(different[num_rows]).sum() for num_rows in rows]).tolist()
    num_different: dict[int, int] = dict(zip(rows, counts, strict=True))
    timed = [num_rows for num_rows in rows if num_rows <= _MAX_TIMED_ROWS and not num_different[num_rows]]
    weight_bytes = weight_NK.numel() * weight_NK.element_size()
    weights = [weight_NK] + [weight_NK.clone() for _ in range(_ROTATED_BYTES // weight_bytes)] if timed else []
    times: dict[int, tuple[float, float]] = dict.fromkeys(rows, (0.0, 0.0))
    stopwatch = _Stopwatch(device)
    for num_rows in timed:
        part_TK = x_TK[:num_rows]

        def by_library(weight_NK: torch.Tensor, part_TK: torch.Tensor = part_TK) -> object:
            return library_product(part_TK, weight_NK, bias_N, product.out_dtype)

        def by_us(weight_NK: torch.Tensor, part_TK: torch.Tensor = part_TK) -> object:
            return gemm(part_TK, weight_NK, bias_N, out_dtype=product.out_dtype)

        times[num_rows] = (stopwatch.microseconds(by_library, weights), stopwatch.microseconds(by_us, weights))
    return [Verdict(num_rows, num_different[num_rows], *times[num_rows]) for num_rows in rows]


class _Stopwatch:
    """Times calls inside CUDA graphs, whose memory is the same for all that are timed.

    ``torch.cuda.graph`` would empty the allocator's cache before each, which took longer than what is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # The pool ends with the last graph that has it.
        self._last: torch.cuda.CUDAGraph | None = None

    def microseconds(self, call: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor]) -> float:
        """The best time of a call inside a graph that goes through ``weights``."""
        call(weights[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                for _ in range(max(1, 8 // len(weights))):
                    for weight_NK in weights:
                        call(weight_NK)
            finally:
                graph.capture_end()
        self._last = graph
        best = float("inf")
        for _ in range(_NUM_REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end))
        return round(best * 1e3 / (max(1, 8 // len(weights)) * len(weights)), 2)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all, because the library keeps a workspace for each."""
    return torch.cuda.Stream(device)


def _cache_folder() -> Path:
    named = os.environ.get("PAGED_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "paged"


def _read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The table's entries; none if there is no table, or none that can be read."""
    try:
        entries = json.loads(path.read_text())["entries"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _write(path: Path, table: str) -> None:
    """Keep the table for the next start; one that cannot be written is made again then, in seconds."""
    # Several processes may write at once: each renames a whole file.
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(table)
        part.replace(path)
    except OSError as error:
        _LOG.warning("the verdicts on products are not kept, %s cannot be written (%s)", path, error.strerror)
        with suppress(OSError):
            part.unlink()


def _facts(device: torch.device) -> dict[str, object]:
    """All that may change a verdict."""
    card = torch.cuda.get_device_properties(device)
    libraries = {}
    for name in ("nvidia-cublas", "nvidia-cublas-cu12"):
        with suppress(metadata.PackageNotFoundError):
            libraries[name] = metadata.version(name)
    source = "".join(Path(file).read_text() for file in (__file__, own_kernel.__file__, gemm_hopper.__file__) if file)
    return {
        "card": [card.name, card.major, card.minor, card.multi_processor_count],
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__, **libraries},
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_ENVIRONMENT)},
        "source": hashlib.blake2b(source.encode(), digest_size=8).hexdigest(),
    }
