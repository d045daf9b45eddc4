"""Row-wise kernels on one H200: bits over batches, distance from the torch twins, then microseconds beside the floor.

    python benchmarks/rowwise_h200.py [--out FOLDER]

Times are of one launch inside a CUDA graph of sixteen, over inputs that rotate out of the L2 cache where they are large
enough to. Prints tables and writes ``rowwise_h200.json``.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
from card_times import graph_us

from paged.kernels import activation, norm, rope

MODELS = {"8B": (4096, 32, 8, 128, 12288), "0.6B": (1024, 16, 8, 128, 3072)}
ROWS = (1, 16, 64, 256, 2048)
READ_TB_S = 4.6

Inputs = tuple[torch.Tensor, ...]
Operation = Callable[..., Inputs]


def add_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> Inputs:
    """Residual sum and norm."""
    return norm.add_rms_norm(x, delta, weight, 1e-6)


def plain_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> Inputs:
    """Norm alone."""
    return (norm.rms_norm(x, weight, 1e-6),)


def heads(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *weights: torch.Tensor) -> Inputs:
    """Norm and rotation of the heads."""
    return rope.norm_rope(q, k, cos, sin, *weights, 1e-6)


def gated(gate_up: torch.Tensor) -> Inputs:
    """Gated SiLU."""
    return (activation.silu_mul(gate_up),)


def inputs(name: str, num_rows: int, model: str, dtype: torch.dtype, seed: int) -> tuple[Inputs, Inputs]:
    """Tensors with a row a token, then weights."""
    hidden, num_heads, num_kv_heads, head_dim, width = MODELS[model]
    generator = torch.Generator("cuda").manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return (2 * torch.randn(*shape, generator=generator, device="cuda")).to(dtype)

    if name in ("add_norm", "plain_norm"):
        return (numbers(num_rows, hidden), numbers(num_rows, hidden)), (numbers(hidden),)
    if name == "gated":
        return (numbers(num_rows, 2 * width),), ()
    qkv = numbers(num_rows, num_heads + 2 * num_kv_heads, head_dim)
    cos, sin = rope.rope_tables(num_rows, head_dim, 1e6, dtype=dtype, device="cuda")
    q, k = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads]
    return (q, k, cos, sin), (numbers(head_dim), numbers(head_dim))


OPERATIONS: dict[str, Operation] = {"add_norm": add_norm, "plain_norm": plain_norm, "heads": heads, "gated": gated}


def bits(count: int = 130) -> dict[str, dict[str, float]]:
    """Random rows in random company against the whole, and the whole against the twin on the CPU."""
    found = {}
    for name, operation in OPERATIONS.items():
        for dtype in (torch.bfloat16, torch.float16):
            rng = random.Random(0)
            num_different = num_elements = 0
            for model in MODELS:
                rowed, weights = inputs(name, 400, model, dtype, 0)
                whole = operation(*rowed, *weights)
                twin = operation(*(x.cpu() for x in rowed), *(x.cpu() for x in weights))
                off = max(
                    float(((a.cpu().float() - b.float()).abs() / b.float().abs().clamp(min=1e-2)).max())
                    for a, b in zip(whole, twin, strict=True)
                )
                equal = min(float((a.cpu() == b).float().mean()) for a, b in zip(whole, twin, strict=True))
                for _ in range(count):
                    rows = rng.sample(range(400), rng.choice((1, 2, rng.randint(1, 40), rng.randint(1, 400))))
                    part = operation(*(x[rows] for x in rowed), *weights)
                    for got, want in zip(part, whole, strict=True):
                        num_different += int((got != want[rows]).sum())
                        num_elements += got.numel()
            found[f"{name} {dtype}"] = {
                "configurations": 2 * count,
                "elements": num_elements,
                "different": num_different,
                "equal_to_twin": equal,
                "largest_relative": off,
            }
            print(name, dtype, found[f"{name} {dtype}"], flush=True)
    return found


def times() -> list[dict[str, object]]:
    """Each operation for each model and number of rows."""
    results = []
    for name, operation in OPERATIONS.items():
        for model in MODELS:
            for num_rows in ROWS:
                sets = [inputs(name, num_rows, model, torch.bfloat16, seed) for seed in range(16)]
                us = graph_us([lambda r=r, w=w: operation(*r, *w) for r, w in sets], replays=7)[1]  # noqa: B023
                rowed, weights = sets[0]
                moved = sum(x.numel() for x in (*rowed, *weights, *operation(*rowed, *weights))) * 2
                moved -= rowed[1].numel() * 2 if name == "plain_norm" else 0
                row = {"operation": name, "model": model, "rows": num_rows, "us": round(us, 2)}
                row["floor_us"] = round(moved / READ_TB_S / 1e6, 2)
                results.append(row)
                print(*row.values(), flush=True)
    return results


def main() -> None:
    """Bits, then times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print(torch.cuda.get_device_name(), torch.__version__)
    found = {"bits": bits(), "times": times()}
    (options.out / "rowwise_h200.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
