"""What it costs that ranks prove to each other that they agree: milliseconds a step, compared and not, in one run.

PYTHONPATH=. python benchmarks/consensus_cost.py [--tp 2 4] [--batch 16] [--steps 200] [--device cpu]
"""

from __future__ import annotations

import argparse
import statistics
import time

from paged import Engine, SamplingParams
from paged.core.model_spec import ModelSpec

SPEC = ModelSpec(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=768,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    max_position_embeddings=1024,
)


def step_ms(engine: Engine, batch: int, steps: int) -> list[float]:
    """Milliseconds of each of ``steps`` decoding steps of ``batch`` sequences."""
    for index in range(batch):
        engine.add_request([1 + index] * 8, SamplingParams(temperature=0, max_tokens=steps + 8, ignore_eos=True))
    for _ in range(4):
        engine.step()
    times = []
    for _ in range(steps):
        start_s = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - start_s) * 1e3)
    while engine.has_unfinished:
        engine.step()
    return times


def exchange_us(engine: Engine, count: int) -> float:
    """Microseconds of an exchange alone, with nothing to compute between."""
    assert engine._leader is not None
    start_s = time.perf_counter()
    for _ in range(count):
        engine._leader.agree()
    return (time.perf_counter() - start_s) / count * 1e6


def main() -> None:
    """Print one line for each number of ranks; the two engines take turns, so that both see the same machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    for tp in options.tp:
        fields = {"spec": SPEC, "weights": "dummy", "device": options.device, "tp": tp, "num_blocks": 2048}
        engines = {is_on: Engine.from_pretrained("a/model", verify=is_on, **fields) for is_on in (True, False)}
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(options.rounds):
            for is_on, engine in engines.items():
                times[is_on] += step_ms(engine, options.batch, options.steps)
        alone_us = exchange_us(engines[True], 1000)
        on, off = (statistics.median(times[is_on]) for is_on in (True, False))
        print(
            f"tp={tp} batch={options.batch}: step {on:.2f} ms compared, {off:.2f} ms not: {on - off:+.2f} ms, "
            f"{(on / off - 1) * 100:+.1f}%; an exchange alone {alone_us:.0f} us"
        )
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    main()
