"""What ranks exchange: the same bits on all, in an order that does not hang on sizes, one collective a call."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from paged.kernels.collectives import SINGLE, RankGroup
from paged.kernels.numerics import fold_tree
from ranks import RankError, RankPool

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def terms(size: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """One tensor a rank, of numbers whose sum hangs on the order: large ones that cancel, and small ones."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(size, *shape, generator=generator, dtype=torch.float64)
    scales = 10.0 ** torch.randint(-3, 4, (size, *shape), generator=generator)
    return list((numbers * scales).to(dtype).unbind(0))


def reduce_rows(group: RankGroup, dtype: torch.dtype) -> list[torch.Tensor]:
    """Sums of a whole tensor of rows, of single rows, and of rows in another layout."""
    mine = terms(group.size, 37, 24, dtype=dtype)[group.rank]
    whole = group.all_reduce(mine)
    rows = torch.cat([group.all_reduce(mine[i : i + 1]) for i in range(37)])
    apart = group.all_reduce(mine.t())
    return [whole, rows, apart.t().contiguous()]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sums_order_is_the_tree_over_ranks_whatever_the_size(
    rank_pool: RankPool, size: int, dtype: torch.dtype
) -> None:
    parts = terms(size, 37, 24, dtype=dtype)
    tree = parts[0] + parts[1] if size == 2 else (parts[0] + parts[1]) + (parts[2] + parts[3])
    for sums in rank_pool.run(reduce_rows, dtype, size=size):
        assert all(total.dtype == dtype for total in sums)
        assert all(torch.equal(total, tree) for total in sums)


def test_the_order_shows_in_these_numbers() -> None:
    """A control for the test above."""
    a, b, c, d = terms(4, 37, 24)
    assert not torch.equal(((a + b) + c) + d, (a + b) + (c + d))
    assert torch.equal(fold_tree([a, b, c]), (a + b) + c)
    assert fold_tree([a]) is a


def move(group: RankGroup) -> dict[str, Any]:
    x = torch.arange(6).view(2, 3) + 10 * group.rank
    moved = {
        "last": group.all_gather(x),
        "first": group.all_gather(x, dim=0),
        "empty": group.all_gather(x[:0]),
        "flags": group.all_gather(torch.tensor([group.rank == 1])),
    }
    return {**moved, "own": x, "num_collectives": group.num_collectives, "num_bytes": group.num_bytes}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gather(rank_pool: RankPool, size: int) -> None:
    x = torch.arange(6).view(2, 3)
    for rank, moved in enumerate(rank_pool.run(move, size=size)):
        assert torch.equal(moved["last"], torch.cat([x + 10 * r for r in range(size)], dim=1))
        assert torch.equal(moved["first"], torch.cat([x + 10 * r for r in range(size)], dim=0))
        assert moved["empty"].shape == (0, 3 * size)
        assert moved["flags"].tolist() == [r == 1 for r in range(size)]
        assert torch.equal(moved["own"], x + 10 * rank)
        assert (moved["num_collectives"], moved["num_bytes"]) == ((4, 2 * 48 + 0 + 1) if size > 1 else (0, 0))


def refuse_a_gradient(group: RankGroup) -> None:
    x = torch.zeros(2, requires_grad=True)
    for exchange in (group.all_reduce, group.all_gather):
        with pytest.raises(ValueError, match="requires grad"):
            exchange(x)


def test_a_tensor_that_requires_grad_is_refused(rank_pool: RankPool) -> None:
    rank_pool.run(refuse_a_gradient, size=2)


def test_one_rank_issues_nothing() -> None:
    x = torch.ones(3)
    assert SINGLE.all_reduce(x) is SINGLE.all_gather(x) is x
    assert (SINGLE.rank, SINGLE.size, SINGLE.num_collectives, SINGLE.num_bytes) == (0, 1, 0, 0)
    for rank, size in ((1, 1), (-1, 2), (0, 2)):
        with pytest.raises(ValueError, match=r"^(rank must be|process_group or memory must carry)"):
            RankGroup(rank, size)


def fail_on_rank_1(group: RankGroup) -> int:
    if group.rank == 1:
        raise LookupError("nothing here")
    return group.rank


def test_a_failing_rank_is_told_and_the_pool_goes_on(rank_pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1: LookupError: nothing here"):
        rank_pool.run(fail_on_rank_1, size=2)
    assert [moved["own"][0, 0] for moved in rank_pool.run(move, size=2)] == [0, 10]


def stall_on_rank_1(group: RankGroup) -> None:
    time.sleep(30 * group.rank)


def test_a_stalled_rank_is_told_in_time_and_nothing_is_left_of_it(rank_pool: RankPool) -> None:
    rank_pool.run(move, size=2)
    processes = list(rank_pool.processes)
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1: TimeoutError: no answer in time"):
        rank_pool.run(stall_on_rank_1, size=2, time_limit_s=0.5)
    assert time.monotonic() - started < 5
    assert len(processes) == 4
    assert not any(process.is_alive() for process in processes)
