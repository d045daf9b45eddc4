"""Times calls on a card: a CUDA graph that makes all of them in turn, replayed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 12, settle_s: float = 0.0) -> tuple[float, float]:
    """Least and median microseconds of one call.

    Args:
        calls: what each replay of the graph does; several, so that their operands leave the L2 cache in between.
        replays: timed ones.
        settle_s: seconds of replays before that; the clocks take some milliseconds to rise.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    start_s = time.monotonic()
    while time.monotonic() - start_s < settle_s:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return min(times), statistics.median(times)


def host_us(call: Callable[[], object], calls: int = 40) -> float:
    """Median microseconds until ``call`` returns, which only tells the card what to do."""
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(calls):
        start_s = time.perf_counter()
        call()
        times.append((time.perf_counter() - start_s) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)
