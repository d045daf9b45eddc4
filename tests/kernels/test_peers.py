"""What is launched for ranks that write into each other's memory, and how they come by it; on a card the bits as well.

Without a card the kernels are played by functions that do what the kernels' contracts say.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from card_tools import needs_card

pytest.importorskip("triton")
from paged.kernels import peer_memory, peers_triton
from paged.kernels.collectives import RankGroup
from paged.kernels.numerics import fold_tree
from paged.kernels.peer_memory import HALF_WORDS, MARKED_WORDS, NUM_BYTES, PeerMemory, connect

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]


def on_ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work(rank)`` gives on threads that stand for ranks."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


class Stage:
    """Ranks' kernels, played: they meet, take each other's words, and write what the real ones would.

    Attributes:
        launches: of rank 0, in order: a kernel's name, programs, words.
    """

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = size
        self.launches: list[tuple[str, int, int]] = []
        self._meeting = threading.Barrier(size, timeout=20)
        self._words: dict[int, torch.Tensor] = {}
        for name in ("marked", "whole", "split"):
            monkeypatch.setattr(peers_triton, f"_{name}_kernel", self._kernel(name))
        self.memories = [PeerMemory(rank, [16 * (1 + other) for other in range(size)], CPU) for rank in range(size)]

    def groups(self) -> list[RankGroup]:
        return [RankGroup(rank, self.size, memory=memory) for rank, memory in enumerate(self.memories)]

    def _kernel(self, name: str) -> Any:
        def launch(
            grid: tuple[int],
            x_words: torch.Tensor,
            out_words: torch.Tensor,
            peers: torch.Tensor,
            counters: torch.Tensor,
            stop: int,
            own: int,
            rank: int,
            num_words: int,
            part_words: int,
            *others: int,
            **constants: Any,
        ) -> None:
            self._check(name, num_words, part_words, constants)
            *first, bulk_offset, flag_offset = others or (peers_triton.BULK_OFFSET, peers_triton.FLAG_OFFSET)
            assert (bulk_offset, flag_offset) == (peers_triton.BULK_OFFSET, peers_triton.FLAG_OFFSET)
            (begin,) = first if name == "whole" else (*first, 0)
            assert x_words.shape == (num_words,)
            assert x_words.dtype == out_words.dtype == torch.int64
            assert own == int(peers[rank])
            assert stop == self.memories[rank].stop_address
            if rank == 0:
                self.launches.append((name, *grid, num_words))
            self._words[rank] = x_words
            self._meeting.wait()
            parts = [self._words[other] for other in range(self.size)]
            if constants["BITS"]:
                kind = constants["BITS"], constants["KIND"]
                dtype = next(dtype for dtype, found in peers_triton._KINDS.items() if found == kind)
                out_words[:num_words] = fold_tree([part.view(dtype) for part in parts]).view(torch.int64)
            else:
                word_N = begin + torch.arange(num_words)
                place_N = word_N // part_words * (self.size * part_words) + word_N % part_words
                for other, part in enumerate(parts):
                    out_words[place_N + other * part_words] = part
            self._meeting.wait()

        class Kernel:
            def __getitem__(self, grid: tuple[int]) -> Any:
                return lambda *args, **constants: launch(grid, *args, **constants)

        return Kernel()

    def _check(self, name: str, num_words: int, part_words: int, constants: dict[str, Any]) -> None:
        """What a launch needs room for."""
        if name == "marked":
            assert num_words <= constants["MOST_WORDS"] == MARKED_WORDS // self.size
            assert constants["MOST_WORDS"] % constants["BLOCK"] == 0
        elif name == "whole":
            assert num_words <= HALF_WORDS // self.size
            assert constants["BITS"] == 0 or self.size == 2
        else:
            assert self.size > 2
            assert num_words <= part_words * self.size <= HALF_WORDS // 2
            assert part_words % 16 == 0


def operands(size: int, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(size, *shape, generator=generator, dtype=torch.float64)
    scales = 10.0 ** torch.randint(-3, 4, (size, *shape), generator=generator)
    return list((numbers * scales).to(dtype).unbind(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_sums_of_all_shapes(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(size, monkeypatch)
    groups = stage.groups()
    for shape in ((1,), (3, 5), (2, 64), (1, 1, 7), (0, 4), ()):
        parts = operands(size, shape, dtype)
        for total in on_ranks(size, lambda rank, parts=parts: groups[rank].all_reduce(parts[rank])):
            assert total.dtype == dtype
            assert torch.equal(total, fold_tree(parts))
    assert {launch[0] for launch in stage.launches} == {"marked"}
    assert len(stage.launches) == 5, "nothing is launched for nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_gathers_along_all_dimensions(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Stage(size, monkeypatch).groups()
    for shape in ((1,), (3, 5), (2, 64), (2, 3, 8), (4, 0)):
        parts = [part > 0 if dtype == torch.bool else part for part in operands(size, shape, torch.float32)]
        parts = [part.to(dtype) for part in parts]
        for dim in range(-len(shape), len(shape)):
            for got in on_ranks(size, lambda rank, parts=parts, dim=dim: groups[rank].all_gather(parts[rank], dim)):
                assert torch.equal(got, torch.cat(parts, dim))


def test_sums_in_a_dtype_that_no_kernel_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Stage(2, monkeypatch).groups()
    parts = [torch.tensor([3, 4], dtype=torch.uint8), torch.tensor([5, 6], dtype=torch.uint8)]
    for total in on_ranks(2, lambda rank: groups[rank].all_reduce(parts[rank])):
        assert total.tolist() == [8, 10]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_long_exchanges_go_in_parts(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small buffers stand for those of megabytes: all ways are taken, and the bits do not tell."""
    monkeypatch.setattr(peers_triton, "MARKED_WORDS", 512 * size)
    monkeypatch.setattr(peers_triton, "HALF_WORDS", 4096)
    monkeypatch.setitem(globals(), "MARKED_WORDS", 512 * size)
    monkeypatch.setitem(globals(), "HALF_WORDS", 4096)
    stage = Stage(size, monkeypatch)
    groups = stage.groups()
    bulk = "whole" if size == 2 else "split"
    for num_words, counts in ((512, [512]), (513, [513]), (2048, [2048]), (5000, [2048, 2048, 904])):
        stage.launches.clear()
        parts = operands(size, (num_words,), torch.float64)
        for total in on_ranks(size, lambda rank, parts=parts: groups[rank].all_reduce(parts[rank])):
            assert torch.equal(total, fold_tree(parts))
        assert [count for _, _, count in stage.launches] == counts
        assert {name for name, _, _ in stage.launches} == {"marked" if num_words == 512 else bulk}
    stage.launches.clear()
    parts = operands(size, (7, 1000), torch.float32)
    for got in on_ranks(size, lambda rank: groups[rank].all_gather(parts[rank], 1)):
        assert torch.equal(got, torch.cat(parts, 1))
    most = 4096 // size
    assert [count for _, _, count in stage.launches] == [most] * (3500 // most) + [3500 % most]


def test_programs_are_as_many_as_are_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(2, monkeypatch)
    for memory in stage.memories:
        memory.most_programs = 100
    groups = stage.groups()
    for num_words, programs in ((1, 1), (256, 1), (257, 2), (40_000, 100), (70_000, 35), (1_000_000, 64)):
        stage.launches.clear()
        parts = operands(2, (num_words,), torch.float64)
        on_ranks(2, lambda rank, parts=parts: groups[rank].all_reduce(parts[rank]))
        assert [found for _, found, _ in stage.launches] == [programs], num_words


def test_words_are_copied_only_if_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(16, dtype=torch.float32)
    assert peers_triton._as_words(x).data_ptr() == x.data_ptr()
    for part in (x[1:], x[:3], x[2:8]):
        words = peers_triton._as_words(part)
        assert words.data_ptr() % 16 == 0
        assert words.data_ptr() != part.data_ptr()
        assert torch.equal(peers_triton._as_numbers(words, part), part)


class Driver:
    """Stands for CUDA's driver: buffers are numbers, their handles say which."""

    problems: dict[str, int]
    buffers: list[int]
    opened: list[int]

    def _fail(self, name: str) -> None:
        if self.problems.get(name, 0):
            self.problems[name] -= 1
            raise peer_memory._DriverError(f"{name}: planted")

    def allocate(self, size: int) -> int:
        self._fail("allocate")
        assert size == NUM_BYTES
        self.buffers.append(1000 * (len(self.buffers) + 1))
        return self.buffers[-1]

    def clear(self, address: int, size: int) -> None:
        assert address in self.buffers

    def export(self, address: int) -> bytes:
        self._fail("export")
        return address.to_bytes(64, "little")

    def open(self, data: bytes) -> int:
        self._fail("open")
        self.opened.append(int.from_bytes(data, "little") + 1)
        return self.opened[-1]

    def close(self, address: int) -> None:
        self.opened.remove(address)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> type[Driver]:
    """A fresh driver, and a card that needs none."""
    Driver.problems, Driver.buffers, Driver.opened = {}, [], []
    monkeypatch.setattr(peer_memory, "_Driver", Driver)
    monkeypatch.setattr(peer_memory, "_spare", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: threading.Lock())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    card = SimpleNamespace(name="a card", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    return Driver


def test_ranks_come_by_each_others_memory_and_give_it_back(driver: type[Driver]) -> None:
    def join(rank: int) -> PeerMemory | str:
        return connect(rank, 4, store, CPU)

    for _ in range(2):
        store = dist.HashStore()
        memories = on_ranks(4, join)
        own = [memory.own for memory in memories]
        assert sorted(own) == driver.buffers == [1000, 2000, 3000, 4000], "the second time they are those of the first"
        for rank, memory in enumerate(memories):
            assert (memory.rank, memory.size) == (rank, 4)
            assert memory.peers.tolist() == [address + (other != rank) for other, address in enumerate(own)]
        assert len(driver.opened) == 12
        for memory in memories:
            memory.close()
            memory.close()
        assert not driver.opened


def test_memory_that_a_lost_rank_may_write_to_is_not_used_again(driver: type[Driver]) -> None:
    store = dist.HashStore()
    memories = on_ranks(2, lambda rank: connect(rank, 2, store, CPU))
    assert not memories[0].is_stopped
    memories[0].stop()
    assert memories[0].is_stopped
    for memory in memories:
        memory.close()
    assert peer_memory._spare == {CPU: [memories[1].own]}


def test_any_thread_may_stop_what_was_made_in_inference_mode() -> None:
    """That failed in the thread that watches over ranks, so that the others waited for a lost one for ever."""
    with torch.inference_mode():
        memory = PeerMemory(0, [16, 32], CPU)
    assert not memory.is_stopped
    on_ranks(1, lambda rank: memory.stop())
    assert memory.is_stopped


def test_a_rank_that_fails_waits_for_nobody(driver: type[Driver]) -> None:
    """Under a launcher its process lives on: its kernels must not, and its buffer is not used again."""
    store = dist.HashStore()
    memories = on_ranks(2, lambda rank: connect(rank, 2, store, CPU))
    with RankGroup(0, 2, memory=memories[0]):
        assert len(driver.opened) == 2
    assert not memories[0].is_stopped
    with pytest.raises(ZeroDivisionError), RankGroup(1, 2, memory=memories[1]):
        raise ZeroDivisionError
    assert memories[1].is_stopped
    assert not driver.opened
    assert peer_memory._spare == {CPU: [memories[0].own]}


@pytest.mark.parametrize("name", ["allocate", "export", "open"])
def test_a_problem_of_one_is_said_on_all(driver: type[Driver], name: str) -> None:
    driver.problems = {name: 1}
    store = dist.HashStore()
    assert set(on_ranks(4, lambda rank: connect(rank, 4, store, CPU))) == {f"{name}: planted"}
    assert not driver.opened


def test_different_cards_share_nothing(driver: type[Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    cards = iter([SimpleNamespace(name="a card", multi_processor_count=number) for number in (132, 114)])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: next(cards))
    store = dist.HashStore()
    assert set(on_ranks(2, lambda rank: connect(rank, 2, store, CPU))) == {"the ranks have different cards"}


def test_three_ranks_share_nothing() -> None:
    assert connect(0, 3, dist.HashStore(), CPU) == "the number of ranks is not 2, 4 or 8"


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_kernels_of_all_ranks_on_one_card(size: int) -> None:
    """In a process of its own: streams must not wait for each other by accident, and a hang must end."""
    script = Path(__file__).parents[1] / "peer_streams.py"
    made = subprocess.run([sys.executable, str(script), str(size)], timeout=120, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
