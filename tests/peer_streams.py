"""Ranks that exchange through each other's memory, all on streams of one process: bits, delays, replays of graphs.

    python tests/peer_streams.py NUM_RANKS [SECONDS]

Ends with exit code 1 and a line for every kind of exchange that gave a wrong bit; with 2 if nothing came to an end for
so long that ranks must hang. A process of its own, because streams must not share the queues of the card, which is said
before CUDA starts. Between two exchanges of a rank there is a kernel that is not a dependent one: of a row of those,
each lets the next onto the card at once, and one rank's would leave no room for another's, which they wait for. And
whatever is launched was launched before, when nothing waited: to load a kernel, CUDA waits for those that run.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"

import torch

from paged.kernels.collectives import RankGroup
from paged.kernels.numerics import fold_tree
from paged.kernels.peer_memory import NUM_BYTES, PeerMemory

CARD = torch.device("cuda", 0)
SUMMED = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32)
SUMMED_LARGE = (torch.bfloat16, torch.float32, torch.int64)
GATHERED = (torch.float32, torch.bfloat16, torch.bool)
SMALL = ((1, 1), (1, 3), (1, 4096), (7, 513), (64, 4096))
LARGE = ((200, 4096), (1, 2_000_003), (5, 151_936))
# Programs of all ranks must be on the card at once, or some would wait for those that never come.
MOST_PROGRAMS = 16
DELAYS = (1000, 20_000, 200_000)
# What torch may keep for the results of a stream.
STREAM_BYTES = 2**28
# Longest time between two looks at the card.
LIMIT_S = 20.0


@dataclass
class Exchange:
    """What ranks do together: sum (``dim`` None) or gather, each rank's operand, and what all must get."""

    parts: list[torch.Tensor]
    dim: int | None

    def __post_init__(self) -> None:
        self.expected = fold_tree(self.parts) if self.dim is None else torch.cat(self.parts, self.dim)

    def __str__(self) -> str:
        return (
            f"{'sum' if self.dim is None else f'gather {self.dim}'} {list(self.parts[0].shape)} {self.parts[0].dtype}"
        )

    def run(self, group: RankGroup, part: torch.Tensor) -> torch.Tensor:
        """One rank's part of it."""
        return group.all_reduce(part) if self.dim is None else group.all_gather(part, self.dim)


class Ranks:
    """All ranks of one process.

    Attributes:
        num_wrong: by rank, elements of results that were not what they must be, since it was last asked.
        at: what is being done.
    """

    def __init__(self, size: int) -> None:
        buffers = [torch.zeros(NUM_BYTES, dtype=torch.uint8, device=CARD) for _ in range(size)]
        self._buffers = buffers
        self.memories = [PeerMemory(rank, [buffer.data_ptr() for buffer in buffers], CARD) for rank in range(size)]
        self.groups = [RankGroup(rank, size, memory=memory) for rank, memory in enumerate(self.memories)]
        self.streams = [torch.cuda.Stream() for _ in range(size)]
        self.num_wrong = [torch.zeros((), dtype=torch.int64, device=CARD) for _ in range(size)]
        self.set_programs(MOST_PROGRAMS)
        self.at, self._last_s = "start", time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """End the process if the card hangs."""
        while time.monotonic() - self._last_s < LIMIT_S:
            time.sleep(0.2)
        print(f"{len(self.groups)} ranks hang: {self.at}", flush=True)
        for memory in self.memories:
            memory.stop()
        time.sleep(2)
        os._exit(2)

    def wait(self) -> None:
        """For all that was launched."""
        torch.cuda.synchronize()
        self._last_s = time.monotonic()

    def set_programs(self, number: int) -> None:
        """Let launches have at most so many programs."""
        for memory in self.memories:
            memory.most_programs = number

    def load(self, exchanges: list[Exchange]) -> None:
        """Build and load all kernels and let streams have memory.

        Both may wait for kernels that run.
        """
        with self.waiting_for_nothing():
            for rank, stream in enumerate(self.streams):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(DELAYS[0])
                    torch.empty(STREAM_BYTES, dtype=torch.uint8, device=CARD)
                    for exchange in exchanges:
                        self.at = f"load {exchange}"
                        self.check(rank, exchange.run(self.groups[rank], exchange.parts[rank]), exchange.expected)
                        self.wait()

    @contextmanager
    def waiting_for_nothing(self) -> Iterator[None]:
        """While entered, ranks compute what means nothing, and it is not counted; nothing has been counted before."""
        self.wait()
        assert not any(map(int, self.num_wrong))
        for memory in self.memories:
            memory.stop()
        yield
        self.wrong()
        for memory in self.memories:
            memory._stop.zero_()

    def check(self, rank: int, result: torch.Tensor, expected: torch.Tensor) -> None:
        """Count what is wrong, without waiting for it."""
        assert result.shape == expected.shape
        assert result.dtype == expected.dtype
        self.num_wrong[rank].add_((result != expected).sum())

    def wrong(self) -> list[int]:
        """The counts, which start anew."""
        self.wait()
        counts = [int(count) for count in self.num_wrong]
        for count in self.num_wrong:
            count.zero_()
        # The streams of the ranks do not wait for this one.
        self.wait()
        return counts


def operands(size: int, shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> list[torch.Tensor]:
    """Numbers whose sum hangs on the order."""
    if dtype == torch.bool:
        return [torch.rand(shape, device=CARD, generator=generator) < 0.5 for _ in range(size)]
    if not dtype.is_floating_point:
        return [torch.randint(-(2**30), 2**30, shape, device=CARD, generator=generator).to(dtype) for _ in range(size)]
    parts = []
    for _ in range(size):
        scales = 10.0 ** torch.randint(-3, 4, shape, device=CARD, generator=generator)
        parts.append((torch.randn(shape, device=CARD, dtype=torch.float64, generator=generator) * scales).to(dtype))
    return parts


def sleep_sometimes(rng: random.Random) -> None:
    """Let the current stream come late now and then."""
    if rng.random() < 0.3:
        torch.cuda._sleep(rng.choice(DELAYS))


def fuzz(ranks: Ranks, exchanges: list[Exchange], rng: random.Random, until_s: float) -> int:
    """Exchanges of random kinds, ranks coming late at random; how many."""
    rounds = 0
    ranks.at = "late ranks"
    while time.monotonic() < until_s:
        ranks.set_programs(rng.choice((1, 3, 8, MOST_PROGRAMS)))
        for exchange in rng.choices(exchanges, k=20):
            for rank in rng.sample(range(len(ranks.groups)), len(ranks.groups)):
                with torch.cuda.stream(ranks.streams[rank]):
                    sleep_sometimes(rng)
                    ranks.check(rank, exchange.run(ranks.groups[rank], exchange.parts[rank]), exchange.expected)
            rounds += 1
        ranks.wait()
    ranks.set_programs(MOST_PROGRAMS)
    return rounds


def replay(ranks: Ranks, exchanges: list[Exchange], rng: random.Random, until_s: float) -> int:
    """Graphs of some exchanges each, whose operands change their sign with every replay; how many replays."""
    chosen = [exchange for exchange in rng.sample(exchanges, 16) if exchange.parts[0].dtype != torch.bool]
    graphs, signs = [], []
    for rank, (group, stream) in enumerate(zip(ranks.groups, ranks.streams, strict=True)):
        sign = torch.ones((), dtype=torch.int32, device=CARD)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for exchange in chosen:
                part = exchange.parts[rank]
                result = exchange.run(group, part * sign.to(part.dtype))
                ranks.check(rank, result, exchange.expected * sign.to(part.dtype))
            sign.neg_()
        graphs.append(graph)
        signs.append(sign)
    ranks.at = "first replays"
    with ranks.waiting_for_nothing():
        for graph, stream in zip(graphs, ranks.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    replays = 0
    ranks.at = "graphs"
    while time.monotonic() < until_s:
        for _ in range(5):
            for rank in rng.sample(range(len(graphs)), len(graphs)):
                with torch.cuda.stream(ranks.streams[rank]):
                    sleep_sometimes(rng)
                    graphs[rank].replay()
            replays += 1
        ranks.wait()
    return replays


def main(size: int, seconds: float) -> int:
    """All kinds once, then at random, then in graphs; the exit code."""
    torch.cuda.set_device(CARD)
    ranks, rng = Ranks(size), random.Random(size)
    generator = torch.Generator(device=CARD).manual_seed(size)
    sums = [*product(SMALL, SUMMED), *product(LARGE, SUMMED_LARGE)]
    exchanges = [Exchange(operands(size, shape, dtype, generator), None) for shape, dtype in sums]
    gathers = product((*SMALL, *LARGE), GATHERED, (0, 1))
    exchanges += [Exchange(operands(size, shape, dtype, generator), dim) for shape, dtype, dim in gathers]
    ranks.load(exchanges)
    failed = False
    for exchange in exchanges:
        ranks.at = str(exchange)
        for rank, group in enumerate(ranks.groups):
            with torch.cuda.stream(ranks.streams[rank]):
                ranks.check(rank, exchange.run(group, exchange.parts[rank]), exchange.expected)
        if any(wrong := ranks.wrong()):
            print(f"{exchange}: {wrong} elements are wrong", flush=True)
            failed = True
    small = [exchange for exchange in exchanges if exchange.expected.numel() < 2**21]
    made = {}
    for name, make in (("exchanges of late ranks", fuzz), ("replays", replay)):
        made[name] = make(ranks, small, rng, time.monotonic() + seconds / 2)
        if any(wrong := ranks.wrong()):
            print(f"{name}: {wrong} elements are wrong", flush=True)
            failed = True
    print(f"{size} ranks: {len(exchanges)} kinds once, {made}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 10.0))
