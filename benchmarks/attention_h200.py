"""Attention on one card: bits over many ways to batch the same rows, accuracy, then microseconds against floors.

    python benchmarks/attention_h200.py [--configs 512] [--ways | --beside] [--json FILE]

Bits come first and a differing element makes the run fail. Times are those of CUDA graphs over caches that rotate out
of the second-level cache; fractions are of the read bandwidth and of the matrix product rate measured in the same run.
`--ways` only times decode: rows split or whole as the rule says, all split, and all whole; and compares their bits.
`--beside` times PyTorch's own attention beside ours: over dense keys and values, so without a table of blocks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from card_times import graph_us, host_us
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from paged.kernels import attention_triton
from paged.kernels.attention import attention
from paged.kernels.batch_layout import BatchLayout
from paged.kernels.kv_cache import LayerCache, store
from paged.kernels.numerics import Numerics

INVARIANT = Numerics()
DEVICE = "cuda"
DECODES = ((1, 1024), (64, 1024), (256, 1024), (64, 4096), (8, 16384), (1, 40960))
# Beside those: rows that would fill the card's programs once and a bit if all were whole, and one row much longer than
# the others.
SPECIAL_DECODES = {"40 x 1024": [1024] * 40, "44 x 4096": [4096] * 44, "1 x 16384, 127 x 500": [16384] + [500] * 127}
NO_HOPPER: dict[str, Any] = {"suits_hopper_decode": lambda *_: False}
SPLITS: dict[str, Any] = {"programs_at_once": lambda *_: 1 << 30}
WHOLE: dict[str, Any] = {"programs_at_once": lambda *_: 1}
WAYS: dict[str, dict[str, Any]] = {
    "Triton, splits alone": NO_HOPPER | SPLITS,
    "Triton, by the rule": NO_HOPPER,
    "splits alone": SPLITS,
    "by the rule": {},
    "whole rows alone": WHOLE,
}
PREFILLS = (1024, 8192)
SDPA_BACKENDS = {"SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION, "SDPA, flash": SDPBackend.FLASH_ATTENTION}
# Greatest error of PyTorch's attention, relative to the norm, with which it counts as the same thing: bf16 makes 2e-3.
MOST_ERROR = 5e-3
SHAPES = ((32, 8, 128), (16, 8, 128), (4, 4, 64), (4, 2, 64), (8, 2, 64), (8, 1, 128), (16, 2, 64))


@triton.jit
def _read_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * SIZE
    tl.store(out_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + first + tl.arange(0, SIZE))))


def read_bandwidth() -> float:
    """Bytes a second of a kernel that only reads."""
    x = torch.ones(2**30, dtype=torch.int32, device=DEVICE)
    size = 8192
    out = torch.empty(x.numel() // size, dtype=torch.int32, device=DEVICE)
    best, _ = graph_us([lambda: _read_kernel[(x.numel() // size,)](x, out, SIZE=size, num_warps=8)])
    return x.numel() * 4 / best * 1e6


def matmul_rate() -> float:
    """Operations a second of an 8192 x 8192 x 8192 product in bf16."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    _, median = graph_us([lambda: a @ b] * 4)
    return 2 * 8192**3 / median * 1e6


class Texts:
    """Queries, keys and values of some texts; cancelling data, so that another order of sums shows in the bits."""

    def __init__(self, lengths: list[int], shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
        self.lengths, self.shape, self.dtype = lengths, shape, dtype
        self.heads, self.kv_heads, self.head_dim = shape
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def draw(length: int, heads: int, spread: float) -> torch.Tensor:
            size = torch.exp2(spread * torch.randn(length, heads, 1, generator=generator, device=DEVICE))
            return (size * torch.randn(length, heads, self.head_dim, generator=generator, device=DEVICE)).to(dtype)

        self.q = [draw(length, self.heads, 0.7) for length in lengths]
        self.k = [draw(length, self.kv_heads, 0.5) for length in lengths]
        self.v = [draw(length, self.kv_heads, 3.0) for length in lengths]

    def paged(self, block_size: int, seed: int) -> tuple[LayerCache, np.ndarray]:
        """A cache with the texts at random blocks, NaN in all others, and the table of blocks."""
        needed = [-(-length // block_size) for length in self.lengths]
        num_blocks = sum(needed) + 7
        shape = (num_blocks, block_size, self.kv_heads, self.head_dim)
        cache = LayerCache(*(torch.full(shape, float("nan"), dtype=self.dtype, device=DEVICE) for _ in range(2)))
        blocks = np.random.default_rng(seed).permutation(num_blocks)
        tables = np.full((len(needed), max(needed) + 2), 2**30, dtype=np.int32)
        for i, count in enumerate(needed):
            tables[i, :count], blocks = blocks[:count], blocks[count:]
        layout = BatchLayout.build([0] * len(needed), self.lengths, tables, block_size, DEVICE)
        store(cache, torch.cat(self.k), torch.cat(self.v), layout.cells_T)
        return cache, tables

    def attend(self, cache: LayerCache, tables: np.ndarray, chunks: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Outputs of one step of chunks (text, start, length)."""
        which, starts, lengths = zip(*chunks, strict=True)
        layout = BatchLayout.build(starts, lengths, tables[list(which)], cache.block_size, DEVICE)
        q = torch.cat([self.q[i][start : start + length] for i, start, length in chunks])
        out = attention(q, cache, layout, scale=self.head_dim**-0.5, numerics=INVARIANT)
        return list(out.split(lengths))


def compare_bits(num_configs: int) -> tuple[int, int, int]:
    """Rows of texts come whole first, then in ``num_configs`` other ways, or a few more.

    Returns:
        Configurations, elements compared, elements that differ. Each pair of shape and dtype has its own process,
        because most of the time goes into compiling.
    """
    tasks = [(shape, dtype, -(-num_configs // 14)) for shape in SHAPES for dtype in (torch.bfloat16, torch.float16)]
    with torch.multiprocessing.get_context("spawn").Pool(8) as pool:
        counts = pool.starmap(compare_shape, tasks, chunksize=1)
    return (sum(task[2] for task in tasks), *(sum(column) for column in zip(*counts, strict=True)))


def compare_shape(shape: tuple[int, int, int], dtype: torch.dtype, num_configs: int) -> tuple[int, int]:
    """``compare_bits`` for one shape and dtype: elements compared, elements that differ."""
    rng = np.random.default_rng(sum(shape) + (dtype == torch.float16))
    lengths = [1, 17, 63, 64, 65, 200, 255, 256, 257, 511, 513, 900, 1500, 2100]
    compared = differing = 0
    texts = Texts(lengths, shape, dtype, sum(shape))
    cache, tables = texts.paged(16, 0)
    whole = [texts.attend(cache, tables, [(i, 0, length)])[0] for i, length in enumerate(lengths)]
    assert all(out.isfinite().all() for out in whole)
    ways: list[list[tuple[int, int, int]]] = [[(11, position, 1) for position in range(lengths[11])]]
    for _ in range(num_configs - 1):
        decode_share = rng.choice([0.0, 0.5, 1.0])
        chunks = []
        for i in rng.permutation(len(lengths))[: rng.integers(1, len(lengths) + 1)]:
            start = int(rng.integers(0, lengths[i]))
            length = 1 if rng.random() < decode_share else int(rng.integers(1, lengths[i] - start + 1))
            chunks.append((int(i), start, length))
        ways.append(chunks)
    for chunks in ways:
        out = torch.cat(texts.attend(cache, tables, chunks))
        expected = torch.cat([whole[i][start : start + length] for i, start, length in chunks])
        compared += out.numel()
        differing += int((out.view(torch.int16) != expected.view(torch.int16)).sum())
        if rng.random() < 0.7:
            cache, tables = texts.paged(int(rng.choice([16, 32, 64, 7])), int(rng.integers(1 << 30)))
    return compared, differing


def compare_accuracy() -> list[dict[str, Any]]:
    """Relative error against fp64 of ours and of PyTorch's SDPA on the same numbers."""
    rows = []
    for dtype in (torch.bfloat16, torch.float16):
        texts = Texts([2048], (32, 8, 128), dtype, 5)
        q, k, v = texts.q[0], texts.k[0], texts.v[0]
        wide = [x.double().transpose(0, 1)[None] for x in (q, k, v)]
        exact = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        theirs = F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        cache, tables = texts.paged(16, 0)
        ours = texts.attend(cache, tables, [(0, 0, 2048)])[0]
        errors = [float((x.double() - exact).norm() / exact.norm()) for x in (ours, theirs)]
        rows.append({"dtype": str(dtype), "ours": errors[0], "sdpa": errors[1]})
    return rows


def filled_cache(num_blocks: int, block_size: int, kv_heads: int, head_dim: int) -> LayerCache:
    """A cache of random numbers."""
    shape = (num_blocks, block_size, kv_heads, head_dim)
    return LayerCache(*(torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)))


@dataclass(frozen=True, slots=True, eq=False)
class Decodes:
    """Calls that decode the same rows over caches that take turns, and what they read."""

    q_THD: torch.Tensor
    caches: list[LayerCache]
    calls: list[Callable[[], torch.Tensor]]
    size_bytes: int


def decodes(contexts: list[int]) -> Decodes:
    """Decoding a row at each of ``contexts`` keys, Qwen3-8B's heads, block 16, random blocks."""
    heads, kv_heads, head_dim, block_size = 32, 8, 128, 16
    needed = [-(-context // block_size) for context in contexts]
    blocks = sum(needed)
    size_bytes = 2 * sum(contexts) * kv_heads * head_dim * 2
    caches = [filled_cache(blocks, block_size, kv_heads, head_dim) for _ in range(max(2, int(5e8 / size_bytes)))]
    free = np.random.default_rng(0).permutation(blocks)
    tables = np.zeros((len(contexts), max(needed)), dtype=np.int32)
    for row, count in enumerate(needed):
        tables[row, :count], free = free[:count], free[count:]
    starts = [context - 1 for context in contexts]
    layout = BatchLayout.build(starts, [1] * len(contexts), tables, block_size, DEVICE)
    q = torch.randn(len(contexts), heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
    calls = [partial(attention, q, cache, layout, scale=head_dim**-0.5, numerics=INVARIANT) for cache in caches]
    return Decodes(q, caches, calls, size_bytes)


def time_decode(batch: int, context: int, bandwidth: float) -> dict[str, Any]:
    """Microseconds of ``decodes``."""
    work = decodes([context] * batch)
    best, median = graph_us(work.calls * 2)
    row = {
        "shape": f"{batch} x {context}",
        "us": median,
        "best_us": best,
        "floor_us": work.size_bytes / bandwidth * 1e6,
    }
    row["fraction"] = row["floor_us"] / median
    return row


def time_ways(shape: str, contexts: list[int], bandwidth: float) -> dict[str, Any]:
    """Median microseconds of ``decodes`` in each of ``WAYS``, and how many elements differ from the first one's."""
    work = decodes(contexts)
    floor_us = work.size_bytes / bandwidth * 1e6
    row: dict[str, Any] = {"shape": shape, "floor_us": floor_us, "us": {}, "fraction": {}, "differing": 0}
    expected = None
    for name, replaced in WAYS.items():
        with patch.multiple(attention_triton, **replaced) if replaced else nullcontext():
            row["us"][name] = graph_us(work.calls * 2)[1]
            out = work.calls[0]()
        row["fraction"][name] = floor_us / row["us"][name]
        expected = out if expected is None else expected
        row["differing"] += int((out.view(torch.int16) != expected.view(torch.int16)).sum())
    return row


def time_prefill(tokens: int, rate: float) -> dict[str, Any]:
    """Microseconds of one prompt of ``tokens``, Qwen3-8B's heads, and what starting it takes the host."""
    heads, kv_heads, head_dim, block_size = 32, 8, 128, 16
    cache = filled_cache(tokens // block_size, block_size, kv_heads, head_dim)
    tables = np.random.default_rng(0).permutation(tokens // block_size)[None].astype(np.int32)
    layout = BatchLayout.build([0], [tokens], tables, block_size, DEVICE)
    q = torch.randn(tokens, heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
    call = partial(attention, q, cache, layout, scale=head_dim**-0.5, numerics=INVARIANT)
    _, median = graph_us([call])
    flops = 2 * tokens * tokens * heads * head_dim
    return {
        "tokens": tokens,
        "us": median,
        "host_us": host_us(call),
        "tflops": flops / median / 1e6,
        "fraction": flops / median * 1e6 / rate,
    }


def dense_ways(num_rows: int) -> dict[str, Callable[..., torch.Tensor]]:
    """PyTorch's own attention of dense queries [B, H, ``num_rows``, D] and keys and values [B, K, L, D] by name.

    One row sees all keys; several are causal and as many as there are keys.
    """
    causal = num_rows > 1

    def sdpa(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, num_rows, num_rows, DEVICE) if causal else None
    flex = torch.compile(flex_attention, dynamic=False)
    ways: dict[str, Callable[..., torch.Tensor]] = {name: partial(sdpa, way) for name, way in SDPA_BACKENDS.items()}
    return ways | {"FlexAttention": partial(flex, block_mask=mask, enable_gqa=True)}


def time_dense(batch: int, num_rows: int, context: int) -> dict[str, float | str]:
    """Microseconds of each of ``dense_ways``, Qwen3-8B's heads, or why there are none."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    sizes = ((32, num_rows), (8, context), (8, context))
    num_sets = max(2, int(5e8 / (batch * context * 4096))) if num_rows == 1 else 1
    sets = [
        [
            torch.randn(batch, heads, rows, 128, dtype=torch.bfloat16, device=DEVICE, generator=generator)
            for heads, rows in sizes
        ]
        for _ in range(num_sets)
    ]
    # The last sequence's last rows are enough to tell whether it was the same attention.
    checked = slice(max(0, num_rows - 64), num_rows)
    q, k, v = (x[-1:].double() for x in sets[0])
    sees = torch.ones(num_rows, context, dtype=torch.bool, device=DEVICE).tril(context - num_rows)[checked]
    exact = F.scaled_dot_product_attention(q[:, :, checked], k, v, attn_mask=sees, enable_gqa=True)
    times: dict[str, float | str] = {}
    for name, way in dense_ways(num_rows).items():
        try:
            error = float((way(*sets[0])[-1:, :, checked].double() - exact).norm() / exact.norm())
            times[name] = graph_us([partial(way, *x) for x in sets])[1] if error < MOST_ERROR else f"error {error:.1e}"
        except Exception as reason:  # Which of them run hangs on the card, the shape and PyTorch's version.
            times[name] = f"{type(reason).__name__}: {str(reason)[:80]}"
    return times


def report_beside(report: dict[str, Any]) -> None:
    """Print the times of ours and of PyTorch's own attention, and put them into ``report``."""
    bandwidth, rate = read_bandwidth(), matmul_rate()
    report["read_bytes_per_s"], report["matmul_flops_per_s"] = bandwidth, rate
    print(f"read {bandwidth / 1e12:.2f} TB/s, matrix product {rate / 1e12:.0f} TFLOP/s")
    report["beside"] = []
    shapes = [("prefill", 1, tokens, tokens) for tokens in PREFILLS]
    shapes += [("decode", batch, 1, context) for batch, context in DECODES]
    for kind, batch, num_rows, context in shapes:
        row = time_prefill(context, rate) if kind == "prefill" else time_decode(batch, context, bandwidth)
        times = {"ours": row["us"]} | time_dense(batch, num_rows, context)
        report["beside"].append({"shape": f"{kind} {batch} x {context}", "us": times})
        print(f"{kind} {batch} x {context}")
        for name, us in times.items():
            print(f"  {us if isinstance(us, str) else format(us, '8.1f') + ' us'}  {name}", flush=True)


def report_ways(report: dict[str, Any]) -> int:
    """Print the times of decode in all ways and put them into ``report``; the number of differing elements."""
    bandwidth = report["read_bytes_per_s"] = read_bandwidth()
    print(f"read {bandwidth / 1e12:.2f} TB/s")
    report["ways"] = []
    batches = {f"{batch} x {context}": [context] * batch for batch, context in DECODES} | SPECIAL_DECODES
    for shape, contexts in batches.items():
        row = time_ways(shape, contexts, bandwidth)
        report["ways"].append(row)
        print(f"{row['shape']}, floor {row['floor_us']:.1f} us, {row['differing']} elements differ")
        for name, median in row["us"].items():
            print(f"  {median:8.1f} us {row['fraction'][name]:6.1%}  {name}", flush=True)
    return sum(row["differing"] for row in report["ways"])


def report_all(report: dict[str, Any], num_configs: int) -> int:
    """Print accuracy, bits and times, and put them into ``report``; the number of differing elements."""
    report["accuracy"] = compare_accuracy()
    print(f"accuracy {report['accuracy']}")
    configs, compared, differing = compare_bits(num_configs)
    report["bits"] = {"configs": configs, "elements": compared, "differing": differing}
    print(f"bits: {configs} configurations, {compared} elements, {differing} differ")
    bandwidth, rate = read_bandwidth(), matmul_rate()
    report["read_bytes_per_s"], report["matmul_flops_per_s"] = bandwidth, rate
    print(f"read {bandwidth / 1e12:.2f} TB/s, matrix product {rate / 1e12:.0f} TFLOP/s")
    report["prefill"] = []
    for tokens in PREFILLS:
        report["prefill"].append(time_prefill(tokens, rate))
        print(report["prefill"][-1])
    report["decode"] = []
    for batch, context in DECODES:
        report["decode"].append(time_decode(batch, context, bandwidth))
        print(report["decode"][-1])
    return differing


def main() -> None:
    """Run the parts asked for; a difference of bits ends the run with status 1."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--configs", type=int, default=512)
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--ways", action="store_true", help="only time decode, with whole rows and with splits")
    parts.add_argument("--beside", action="store_true", help="only time ours and PyTorch's own attention")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    differing = 0
    if arguments.beside:
        report_beside(report)
    else:
        differing = report_ways(report) if arguments.ways else report_all(report, arguments.configs)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
