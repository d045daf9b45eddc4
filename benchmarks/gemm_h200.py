"""Matrix products on one H200: first the bits, then microseconds beside the floor and the library.

    python benchmarks/gemm_h200.py [--parts bits gate times experts tune] [--out FOLDER]

``bits``: random products under random tilings, rows and neighbours against one reference, and how many elements differ.
``gate``: what the gate says of the library. ``times``: Qwen3-8B and 0.6B shapes at tp 1 and 2, inside CUDA graphs, the
weights rotating out of the L2 cache; read bandwidth and matrix rate are measured in the same run. ``experts``: OLMoE's.
``tune``: the tilings behind ``tiling_for``. Prints tables and writes ``gemm_h200.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from card_times import graph_us

from paged.kernels import activation, gemm_dispatch, gemm_hopper, moe, norm, rope
from paged.kernels.gemm import Tiling, gemm, tiling_for
from paged.kernels.gemm_gate import Product, cancelling_numbers, gated_rows, verdicts
from paged.kernels.gemm_hopper import HopperTiling
from paged.kernels.launch import num_sms
from paged.kernels.numerics import Numerics

SHAPES = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (24576, 4096),
    "8B down": (4096, 12288),
    "8B tp2 qkv": (3072, 4096),
    "8B tp2 o": (4096, 2048),
    "8B tp2 gate_up": (12288, 4096),
    "8B tp2 down": (4096, 6144),
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate_up": (6144, 1024),
    "0.6B down": (1024, 3072),
    "0.6B tp2 qkv": (2048, 1024),
    "0.6B tp2 o": (1024, 1024),
    "0.6B tp2 gate_up": (3072, 1024),
    "0.6B tp2 down": (1024, 1536),
}
# The parts of a layer, and the query and key heads of each model's.
PARTS = ("qkv", "o", "gate_up", "down")
MODELS = {"8B": (32, 8), "8B tp2": (16, 4), "0.6B": (16, 8), "0.6B tp2": (8, 4)}
HEADS = {"8B head": (151936, 4096), "8B tp2 head": (75968, 4096), "0.6B head": (151936, 1024)}
ROWS = (1, 16, 64, 128, 256, 512, 2048)
ROTATED_BYTES = 256 * 2**20


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["bits", "gate", "times", "experts"])
    parser.add_argument("--out", type=Path, default=Path("outputs"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}", flush=True)
    ceilings = {"read_tb_s": read_bandwidth(), "matmul_tflop_s": matrix_rate()}
    print(f"read {ceilings['read_tb_s']:.2f} TB/s, bf16 matmul {ceilings['matmul_tflop_s']:.0f} TFLOP/s", flush=True)
    found: dict[str, object] = {"ceilings": ceilings}
    for name, part in (("bits", bits), ("tune", tune), ("gate", gate), ("times", times), ("experts", experts)):
        if name in options.parts:
            start = time.monotonic()
            found[name] = part(ceilings)
            print(f"-- {name}: {time.monotonic() - start:.0f} s", flush=True)
            (options.out / "gemm_h200.json").write_text(json.dumps(found, indent=1))


@triton.jit
def _read_kernel(pointer, out_pointer, num_blocks, BLOCK: tl.constexpr):
    """Add up every block that is this program's."""
    total_B = tl.zeros((BLOCK,), tl.int32)
    for block in tl.range(tl.program_id(0), num_blocks, tl.num_programs(0), num_stages=4):
        total_B += tl.load(pointer + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_pointer + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total_B)


def read_bandwidth() -> float:
    """TB/s of reading 4 GiB."""
    numbers = torch.randint(0, 100, (2**30,), dtype=torch.int32, device="cuda")
    best = float("inf")
    for programs in (132, 264, 528, 1056):
        out = torch.empty(programs * 4096, dtype=torch.int32, device="cuda")

        def read(out: torch.Tensor = out, programs: int = programs) -> None:
            _read_kernel[(programs,)](numbers, out, 2**30 // 4096, BLOCK=4096, num_warps=8, enable_fp_fusion=False)

        best = min(best, microseconds([read]))
    return 2**32 / best / 1e6


def matrix_rate() -> float:
    """TFLOP/s of an 8192 x 8192 x 8192 product in bf16."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / microseconds([lambda: x @ y] * 4) / 1e6


def microseconds(calls: Sequence[Callable[[], object]], replays: int = 5) -> float:
    """The median time of a call, at clocks that have risen."""
    return graph_us(calls, replays, settle_s=0.01)[1]


def rotated(num_columns: int, inner_size: int) -> list[torch.Tensor]:
    """Weights that together exceed the L2 cache several times, at least four of them."""
    count = max(4, ROTATED_BYTES // (num_columns * inner_size * 2))
    return list(torch.randn(count, num_columns, inner_size, device="cuda", dtype=torch.bfloat16) * inner_size**-0.5)


def candidates(num_rows: int) -> list[Tiling]:
    """Tilings worth trying for a number of rows."""
    if num_rows <= 16:
        grid = [
            *itertools.product((16,), (16, 32, 64), (128, 256, 512), (False,), (4, 8), (100, 200)),
            *itertools.product((16,), (64, 128), (64, 128, 256), (True,), (4,), (100, 200)),
        ]
    elif num_rows <= 32:
        grid = [
            *itertools.product((32,), (32, 64), (128, 256), (False,), (4, 8), (100, 200)),
            *itertools.product((32,), (64, 128), (64, 128, 256), (True,), (4,), (100, 200)),
        ]
    elif num_rows <= 64:
        grid = [
            *itertools.product((64,), (16, 32, 64, 128), (64, 128, 256), (False,), (4,), (100, 200)),
            *itertools.product((64,), (128,), (64, 128), (True,), (4, 8), (100, 200)),
        ]
    elif num_rows <= 128:
        grid = [
            *itertools.product((128,), (32, 64, 128), (64, 128), (False,), (4, 8), (100, 200)),
            *itertools.product((64,), (64, 128), (64, 128), (False,), (4,), (100, 200)),
        ]
    else:
        grid = [
            *itertools.product((128,), (128, 256), (64,), (False,), (8,), (100, 150, 200)),
            *itertools.product((128,), (128,), (64, 128), (False,), (4, 8), (100, 200)),
            *itertools.product((256,), (128,), (64,), (False,), (8,), (200,)),
            *itertools.product((64,), (128, 256), (64,), (False,), (4,), (100, 200)),
        ]
    found = []
    for rows, columns, depth, weights_first, num_warps, kilobytes in grid:
        # A stage more than there are buffers: the pipeline keeps one fewer.
        num_stages = 1 + kilobytes * 1024 // ((rows + columns) * depth * 2)
        if num_stages >= 3:
            found.append(Tiling(rows, columns, depth, weights_first, num_warps, min(num_stages, 10)))
    return list(dict.fromkeys(found))


Job = tuple[Tiling | HopperTiling, int, torch.dtype, torch.dtype | None, bool, bool]


def compile_job(job: Job) -> str:
    """Put one variant of a kernel into Triton's cache; returns the error if it cannot be made."""
    tiling, k_segments, dtype, out_dtype, has_bias, all_fetches = job
    try:
        wide = torch.zeros(16, 4097, device="cuda", dtype=dtype)
        x, far_apart = wide[:, :4096].contiguous(), wide[:, :4096]
        weight = torch.zeros(1024 if k_segments == 1 else 16384, 4096, device="cuda", dtype=dtype)
        bias = weight[:, 0].contiguous() if has_bias else None
        if isinstance(tiling, HopperTiling):
            out = torch.empty(tiling.rows, 1024, device="cuda", dtype=out_dtype or dtype)
            gemm_hopper.gemm_hopper(x.repeat(4, 1)[: tiling.rows], weight, bias, out, tiling=tiling)
        else:
            gemm(x, weight, bias, k_segments=k_segments, out_dtype=out_dtype, tiling=tiling)
        if all_fetches:
            gemm(far_apart, weight, bias, k_segments=k_segments, out_dtype=out_dtype, tiling=tiling)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def hopper_tilings(shapes: Iterable[tuple[int, int]]) -> list[HopperTiling]:
    """The Hopper kernel's tilings for weights of these shapes."""
    num_processors = num_sms(torch.device("cuda", 0))
    rows = (1, 16, 32, gemm_hopper.MAX_ROWS)
    return [gemm_hopper.tiling_for(num_rows, *shape, num_processors) for shape in shapes for num_rows in rows]


def compile_all(jobs: Sequence[Job]) -> None:
    """Compile on all cores."""
    start = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(min(os.cpu_count() or 1, 15)) as pool:
        for message in pool.imap_unordered(compile_job, list(dict.fromkeys(jobs)), chunksize=2):
            if message:
                print("not compiled:", message, flush=True)
    print(f"compiled {len(set(jobs))} variants in {time.monotonic() - start:.0f} s", flush=True)


BIT_TILINGS = (
    Tiling(16, 16, 256, False, 4, 6),
    Tiling(16, 32, 128, False, 8, 8),
    Tiling(16, 64, 64, True, 4, 8),
    Tiling(32, 64, 128, False, 4, 5),
    Tiling(32, 128, 64, True, 4, 5),
    Tiling(64, 32, 128, False, 4, 6),
    Tiling(64, 64, 64, True, 4, 5),
    Tiling(64, 128, 64, False, 8, 4),
    Tiling(128, 128, 64, False, 8, 4),
    Tiling(128, 64, 128, False, 4, 3),
)


def bits(_: dict[str, float], count: int = 520) -> dict[str, object]:
    """Products of random rows under random tilings against one reference; elements that differ, by dtype."""
    kinds = ((None, False), (torch.float32, False), (None, True))
    jobs = [
        (tiling, segments, dtype, *kind, True)
        for segments in (1, 2, 4)
        for tiling in (
            *BIT_TILINGS,
            *{tiling_for(rows, n, 4096, segments) for rows in (16, 32, 64, 128, 300) for n in (999, 6144)},
        )
        for dtype in (torch.bfloat16, torch.float16)
        for kind in kinds
    ]
    shapes = [shape for name, shape in SHAPES.items() if name not in ("8B gate_up", "8B down")] + [(1000, 1536)]
    jobs += [
        (tiling, 1, dtype, *kind, False)
        for tiling in hopper_tilings(shapes)
        for dtype in (torch.bfloat16, torch.float16)
        for kind in kinds
    ]
    compile_all(jobs)
    found: dict[str, object] = {}
    for dtype in (torch.bfloat16, torch.float16):
        rng = random.Random(0)
        num_different = num_elements = num_hidden = 0
        for index in range(count):
            if index % 20 == 0:
                num_columns, inner_size = rng.choice(shapes)
                x, weight = cancelling_numbers(300, num_columns, inner_size, dtype, torch.device("cuda"), index)
                bias = (1e-4 * torch.randn(num_columns, device="cuda")).to(dtype)
                references: dict[tuple, torch.Tensor] = {}
            segments, (out_dtype, has_bias) = rng.choice((1, 2, 4)), rng.choice(kinds)
            options = {"k_segments": segments, "out_dtype": out_dtype}
            key = (segments, out_dtype, has_bias)
            if key not in references:
                references[key] = gemm(x, weight, bias if has_bias else None, **options, tiling=BIT_TILINGS[0])
            first = rng.randrange(300)
            num_rows = rng.choice((1, 2, rng.randint(1, 40), rng.randint(1, 300)))
            rows = list(range(first, min(300, first + num_rows)))
            neighbours = torch.randn(rng.randint(0, 40), inner_size, device="cuda").to(dtype) * 1e3
            neighbours[::3] = float("nan")
            place = rng.randint(0, neighbours.shape[0])
            batch = torch.cat((neighbours[:place], x[rows], neighbours[place:]))
            if rng.random() < 0.3:
                # Rows that lie apart, which the copy engine takes or not.
                batch = F.pad(batch, (0, rng.choice((1, 8))))[:, :inner_size]
            tiling = rng.choice((*BIT_TILINGS, None))
            got = gemm(batch, weight, bias if has_bias else None, **options, tiling=tiling)
            different = int((got[place : place + len(rows)] != references[key][rows]).sum())
            if different:
                print(f"differ: {different} {num_columns}x{inner_size} {len(rows)} rows, {key}, {tiling}", flush=True)
            num_different += different
            num_elements += len(rows) * num_columns
            # The control: two segments instead of one must show in these numbers.
            if segments == 1 and (2, out_dtype, has_bias) in references:
                num_hidden += int(torch.equal(references[key], references[2, out_dtype, has_bias]))
        chain = gemm(x, weight)
        changed = float((gemm(x, weight, k_segments=2) != chain).float().mean())
        found[str(dtype)] = {"configurations": count, "elements": num_elements, "different": num_different}
        print(
            f"bits {dtype}: {count} configurations, {num_elements} elements, {num_different} differ; "
            f"another order changes {changed:.0%} of them, hidden in {num_hidden} references",
            flush=True,
        )
    return found


def tune(ceilings: dict[str, float]) -> dict[str, object]:
    """Times of all candidates, and the best few of each shape."""
    sizes = (16, 32, 64, 128, 512)
    tilings = {num_rows: candidates(num_rows) for num_rows in sizes}
    compile_all([(tiling, 1, torch.bfloat16, None, False, False) for found in tilings.values() for tiling in found])
    results: dict[str, object] = {}
    for name, (num_columns, inner_size) in (SHAPES | HEADS).items():
        weights = rotated(num_columns, inner_size)
        for num_rows in sizes if name in SHAPES else sizes[:3]:
            x = torch.randn(num_rows, inner_size, device="cuda", dtype=torch.bfloat16)
            timed = []
            for tiling in tilings[num_rows]:
                calls = [lambda w=weight, t=tiling: gemm(x, w, tiling=t) for weight in weights]  # noqa: B023
                try:
                    timed.append((round(microseconds(calls, 3), 2), tiling))
                except Exception as error:
                    print("failed:", tiling, str(error)[:100])
            timed.sort(key=lambda one: one[0])
            floor = num_columns * inner_size * 2 / ceilings["read_tb_s"] / 1e6
            results[f"{name} {num_rows}"] = [(t, *(getattr(c, s) for s in c.__slots__)) for t, c in timed]
            best = "; ".join(
                f"{t} {c.rows}x{c.columns}x{c.depth}{'w' if c.weights_first else ''} {c.num_warps}w {c.num_stages}s"
                for t, c in timed[:3]
            )
            print(f"{name:17} {num_rows:4} floor {floor:6.2f}: {best}", flush=True)
        del weights
    return results


def gate(_: dict[str, float]) -> dict[str, object]:
    """Make the gate's table for all shapes, and print what it refuses."""
    found: dict[str, object] = {}
    for dtype in (torch.bfloat16, torch.float16):
        for max_rows, products in (
            (8192, [Product(*shape) for shape in SHAPES.values()]),
            (256, [Product(*shape, out_dtype=torch.float32) for shape in HEADS.values()]),
            (2048, [Product(6144, 4096, has_bias=True)]),
        ):
            start = time.monotonic()
            table = verdicts(products, gated_rows(max_rows), dtype, torch.device("cuda"))
            print(f"{dtype}, to {max_rows} rows: {time.monotonic() - start:.1f} s", flush=True)
            for product, rows in table.items():
                refused = [verdict.num_rows for verdict in rows if verdict.num_different]
                crossing = [f"{v.num_rows}:{v.library_us}/{v.own_us}" for v in rows[:8]]
                library = sum(verdict.takes_library for verdict in rows)
                print(product, "refused", refused, "library", library, "of", len(rows), *crossing, flush=True)
                found[f"{dtype} {product}"] = refused
    return found


def times(ceilings: dict[str, float]) -> list[dict[str, object]]:
    """Our product, cuBLAS as it comes, and the floor, for each shape and number of rows; then sums over a layer."""
    compile_all(
        [(tiling, 1, torch.bfloat16, None, False, False) for tiling in hopper_tilings(SHAPES.values())]
        + [(tiling, 1, torch.bfloat16, torch.float32, False, False) for tiling in hopper_tilings(HEADS.values())]
    )
    device = torch.device("cuda")
    gemm_dispatch.prepare([Product(*shape) for shape in SHAPES.values()], torch.bfloat16, device, 2048)
    gemm_dispatch.prepare([Product(*s, out_dtype=torch.float32) for s in HEADS.values()], torch.bfloat16, device, 256)
    results = []
    print("shape, rows: us ours / our kernels alone / cuBLAS / 4 segments | floor, share of it")
    for name, (num_columns, inner_size) in (SHAPES | HEADS).items():
        weights = rotated(num_columns, inner_size)
        out_dtype = torch.float32 if name in HEADS else None
        for num_rows in ROWS:
            if name in HEADS and num_rows > 256:
                continue
            x = torch.randn(num_rows, inner_size, device="cuda", dtype=torch.bfloat16)
            kinds: dict[str, Callable[[torch.Tensor], object]] = {
                "ours": lambda w: gemm_dispatch.product(x, w, out_dtype=out_dtype),  # noqa: B023
                "own": lambda w: gemm(x, w, out_dtype=out_dtype),  # noqa: B023
                "cublas": lambda w: torch.mm(x, w.t(), out_dtype=out_dtype or torch.bfloat16),  # noqa: B023
            }
            if name.endswith((" o", "down")):
                kinds["segments"] = lambda w: gemm_dispatch.product(x, w, k_segments=4)  # noqa: B023
            row: dict[str, object] = {"shape": name, "rows": num_rows}
            for kind, call in kinds.items():
                row[kind] = round(microseconds([lambda w=w, call=call: call(w) for w in weights]), 2)
            num_bytes = 2 * (num_columns + num_rows) * inner_size + num_rows * num_columns * (4 if out_dtype else 2)
            bytes_us = num_bytes / ceilings["read_tb_s"] / 1e6
            floor = max(bytes_us, 2 * num_rows * num_columns * inner_size / ceilings["matmul_tflop_s"] / 1e6)
            row["floor"], row["share"] = round(floor, 2), round(floor / float(str(row["ours"])), 3)
            results.append(row)
            print(*(f"{key} {value}" for key, value in row.items()), flush=True)
        del weights
    print("layer, rows: sum of the four products, ours / cuBLAS | a layer in turn with its row-wise kernels, the same")
    for model, num_rows in itertools.product(MODELS, ROWS):
        names = [f"{model} {part}" for part in PARTS]
        rows = [row for row in results if row.get("shape") in names and row["rows"] == num_rows]
        ours, cublas = (sum(float(str(row[kind])) for row in rows) for kind in ("ours", "cublas"))
        chains = [layer_microseconds(model, num_rows, product) for product in (gemm_dispatch.product, F.linear)]
        results.append({"layer": model, "rows": num_rows, "ours": ours, "cublas": cublas, "chains": chains})
        print(
            f"layer {model} {num_rows}: {ours:.1f} / {cublas:.1f} {ours / cublas - 1:+.1%} | "
            f"{chains[0]:.1f} / {chains[1]:.1f} {chains[0] / chains[1] - 1:+.1%}",
            flush=True,
        )
        if num_rows <= gemm_hopper.MAX_ROWS:
            results.append({"added": model, "rows": num_rows, **added(model, num_rows, ceilings)})
            print("added to the chain, share:", results[-1], flush=True)
    return results


def layer_microseconds(model: str, num_rows: int, product: Callable[..., torch.Tensor], without: str = "") -> float:
    """A layer's products and row-wise kernels, each on the last one's result; attention and the cache left out.

    ``without`` names one of ``PARTS`` that is not computed either: the kernel behind it reads numbers that are there.
    """
    num_heads, num_kv_heads = MODELS[model]
    weights = list(zip(*(rotated(*SHAPES[f"{model} {part}"]) for part in PARTS), strict=False))
    hidden = SHAPES[f"{model} qkv"][1]
    norm_weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    cos, sin = rope.rope_tables(num_rows, 128, 1e6, dtype=torch.bfloat16, device="cuda")
    head_weight = torch.ones(128, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(num_rows, hidden, device="cuda", dtype=torch.bfloat16)
    there = torch.randn(num_rows, SHAPES[f"{model} {without}"][0], device="cuda").bfloat16() if without else x

    def part(name: str, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return there if name == without else product(inputs, weight)

    def layer(qkv: torch.Tensor, o: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        normed = norm.add_rms_norm(x, x, norm_weight, 1e-6)[1]
        heads = part("qkv", normed, qkv).unflatten(1, (-1, 128))
        q, k, _ = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        q, _ = rope.norm_rope(q, k, cos, sin, head_weight, head_weight, 1e-6)
        normed = norm.add_rms_norm(x, part("o", q.flatten(1), o), norm_weight, 1e-6)[1]
        part("down", activation.silu_mul(part("gate_up", normed, gate_up)), down)

    return microseconds([lambda four=four: layer(*four) for four in weights])


def added(model: str, num_rows: int, ceilings: dict[str, float]) -> dict[str, tuple[float, float]]:
    """What each product adds to a layer's chain, and the share of that which reading its weights takes.

    Less than the product takes alone: its weights are read while the kernels before it run.
    """
    whole = layer_microseconds(model, num_rows, gemm_dispatch.product)
    found = {}
    for part in PARTS:
        num_columns, inner_size = SHAPES[f"{model} {part}"]
        us = whole - layer_microseconds(model, num_rows, gemm_dispatch.product, without=part)
        found[part] = round(us, 2), round(2 * num_columns * inner_size / ceilings["read_tb_s"] / 1e6 / us, 3)
    return found


def experts(ceilings: dict[str, float]) -> list[dict[str, object]]:
    """A layer of OLMoE's experts (64 of width 1024, 8 a row, hidden 2048), and the torch twin's loop with a wait."""
    shape = {"device": "cuda", "dtype": torch.bfloat16}
    gate_up, down = torch.randn(2, 64, 2048, 2048, **shape) / 45, torch.randn(2, 64, 2048, 1024, **shape) / 32
    results = []
    for num_rows in (1, 16, 64, 256, 2048):
        x = torch.randn(num_rows, 2048, **shape)
        chosen, shares = moe.route(torch.randn(num_rows, 64, **shape), 8, normalize=False)

        def ours(index: int, x: torch.Tensor = x, parts: tuple = (chosen, shares)) -> object:
            return moe.run_experts(x, *parts, gate_up[index], down[index], numerics=Numerics())

        def loop(index: int, x: torch.Tensor = x, parts: tuple = (chosen, shares)) -> object:
            return moe.run_experts(x, *parts, gate_up[index], down[index], numerics=Numerics(mode="fast"))

        us = microseconds([lambda: ours(0), lambda: ours(1)])
        loop(0)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for index in (0, 1, 0, 1):
            loop(index)
        torch.cuda.synchronize()
        loop_us = (time.perf_counter() - start) / 4 * 1e6
        read_us = len(chosen.unique()) * 3 * 1024 * 2048 * 2 / ceilings["read_tb_s"] / 1e6
        floor = max(read_us, num_rows * 8 * 6 * 1024 * 2048 / ceilings["matmul_tflop_s"] / 1e6)
        row = {"rows": num_rows, "ours": round(us, 1), "loop": round(loop_us, 1), "floor": round(floor, 1)}
        results.append(row)
        print("experts", *(f"{key} {value}" for key, value in row.items()), flush=True)
    return results


if __name__ == "__main__":
    main()
