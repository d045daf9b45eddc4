"""Measures what a step's results cost once they are there: samples extended, updates made and handed out.

    python benchmarks/take_in.py --rows 256

Prints microseconds a step, with Python's collector as a program finds it, and with all that was there before the first
step set aside from it, as ``paged run`` does.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence

import paged.engine  # noqa: F401  The collector goes through all that it imports.
from paged.core.prompt import Prompt
from paged.core.request import Request, SamplingParams
from paged.runner.payload import StepPayload
from paged.samples import Samples, StepOutput


def live_requests(num_rows: int, num_each: int) -> list[Request]:
    """``num_rows`` samples, ``num_each`` of each request."""
    prompt, params = Prompt([1]), SamplingParams(n=num_each)
    return [Request(str(row // num_each), row % num_each, prompt, params, 0, 10**6) for row in range(num_rows)]


def measure(requests: Sequence[Request], num_steps: int) -> tuple[list[float], list[float]]:
    """Microseconds that each step's taking in and handing out take; every row gets a token and none ends."""
    samples = Samples(None, "")
    samples.add(requests, stream_text=False)
    taking, giving = [], []
    for step in range(num_steps):
        logprobs = [-1.0 / (1 + row) for row in range(len(requests))]
        payload = StepPayload([step] * len(requests), logprobs, list(logprobs), {}, {}, [])
        output = StepOutput(payload, list(requests), ())
        start_s = time.thread_time()
        samples.take_in(output)
        taken_s = time.thread_time()
        updates = samples.take_updates(list(samples.undelivered))
        giving.append(1e6 * (time.thread_time() - taken_s))
        taking.append(1e6 * (taken_s - start_s))
        assert len(updates) == len(requests)
    assert all(len(sample.token_ids) == num_steps for sample in samples.live.values())
    return taking, giving


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="samples in a step")
    parser.add_argument("--steps", type=int, default=2000, help="steps measured")
    options = parser.parse_args()
    print(f"{options.rows} rows, {options.steps} steps, us a step")
    print(f"{'collector':<12} {'samples each':>12} {'take in':>18} {'hand out':>18}")
    for name in ("as it is", "set aside"):
        if name == "set aside":
            gc.collect()
            gc.freeze()
        for num_each in (1, 8):
            columns = measure(live_requests(options.rows, num_each), options.steps)
            cells = (f"{statistics.median(times):.0f} (mean {statistics.fmean(times):.0f})" for times in columns)
            print(f"{name:<12} {num_each:>12} " + " ".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
