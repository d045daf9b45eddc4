"""Log-sum-exp, log-probabilities and the likeliest token over a cut vocabulary: the bits of the whole row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paged.kernels import sampling, vocab_parallel
from paged.kernels.collectives import SINGLE, RankGroup
from paged.kernels.sampling import SampledRows
from paged.kernels.sampling_columns import SamplingColumns
from ranks import RankPool

# Rows a vocabulary: NaN and infinities among them where asked for.
NUM_ROWS = 11
FAULTY = {1: torch.nan, 3: torch.inf, 6: -torch.inf}


def rows(vocab_size: int, dtype: torch.dtype, *, faulty: bool = False) -> torch.Tensor:
    """Logits [R, V]; the last two rows have ties at the top, one row a likeliest token far above the rest."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (3 * torch.randn(NUM_ROWS, vocab_size, generator=generator, dtype=torch.float64)).to(dtype)
    logits[0, vocab_size // 2] = 40
    logits[5, : vocab_size // 2] = -torch.inf
    logits[-1] = 0.5
    logits[-2, -3:] = logits[-2].max() + 1
    if faulty:
        logits[1, vocab_size - 1] = torch.nan
        logits[3, 0] = torch.inf
        logits[6] = -torch.inf
    return logits


def wanted_ids(vocab_size: int) -> torch.Tensor:
    """Tokens [R, K] all over the vocabulary, its first and last among them."""
    ids = torch.randint(0, vocab_size, (NUM_ROWS, 4), generator=torch.Generator().manual_seed(1))
    ids[:, 0], ids[:, 1] = 0, vocab_size - 1
    return ids


def temperatures() -> torch.Tensor:
    return torch.tensor([0.0, 1.0, 0.7] * 4, dtype=torch.float64)[:NUM_ROWS]


def local_columns(group: RankGroup, logits_RV: torch.Tensor) -> torch.Tensor:
    """This rank's columns, padded with what would win if it counted."""
    size = -(-logits_RV.shape[1] // group.size)
    padded = F.pad(logits_RV, (0, size * group.size - logits_RV.shape[1]), value=1e30)
    return padded[:, group.rank * size : (group.rank + 1) * size].contiguous()


def compute(group: RankGroup, vocab_size: int, dtype: torch.dtype, faulty: bool) -> dict[str, Any]:
    """All results from this rank's columns, and the bytes that each costs a row."""
    mine = local_columns(group, rows(vocab_size, dtype, faulty=faulty))
    where: dict[str, Any] = {"vocab_size": vocab_size, "group": group}
    ids = wanted_ids(vocab_size)
    log_sums = vocab_parallel.log_sum_exp(mine, temperatures(), **where)
    before = group.num_bytes
    one = vocab_parallel.token_logprobs(mine, temperatures(), ids[:, 2], **where)
    between = group.num_bytes
    greedy = vocab_parallel.sample_greedy(mine, torch.zeros(NUM_ROWS, dtype=torch.float64), **where)
    costs = {"score": (between - before) / NUM_ROWS, "greedy": (group.num_bytes - between) / NUM_ROWS}
    return {
        "log_sum_exp": log_sums,
        "one": one,
        "several": vocab_parallel.token_logprobs(mine, temperatures(), ids, **where),
        "greedy": (greedy.tokens_R, greedy.logprobs_R, greedy.behavior_logprobs_R, greedy.nan_R),
        "none": vocab_parallel.token_logprobs(mine[:0], temperatures()[:0], ids[:0], **where),
        "costs": costs,
    }


def whole_row_greedy(logits: torch.Tensor) -> SampledRows:
    zero = torch.zeros(len(logits), dtype=torch.int64)
    return sampling.sample(logits, SamplingColumns(temperature_R=zero.double(), seeds_R=zero, positions_R=zero))


@pytest.mark.parametrize("faulty", [False, True], ids=["finite", "not finite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("vocab_size", "size"), [(99, 2), (99, 4), (100, 4), (5, 4), (5, 2), (100, 1)])
def test_the_bits_are_those_of_the_whole_row(
    rank_pool: RankPool, vocab_size: int, size: int, dtype: torch.dtype, faulty: bool
) -> None:
    logits, ids = rows(vocab_size, dtype, faulty=faulty), wanted_ids(vocab_size)
    logprobs = sampling.token_logprobs(logits, temperatures(), ids)
    greedy = whole_row_greedy(logits)
    for result in rank_pool.run(compute, vocab_size, dtype, faulty, size=size):
        same(result["log_sum_exp"], sampling.log_sum_exp(logits, temperatures()))
        same(result["several"], logprobs)
        same(result["one"], logprobs[:, 2])
        expected = (greedy.tokens_R, greedy.logprobs_R, greedy.behavior_logprobs_R, greedy.nan_R)
        for mine, whole in zip(result["greedy"], expected, strict=True):
            same(mine, whole)
        assert result["none"].shape == (0, 4)
        # The whole row would be 4 or 8 bytes a token.
        assert result["costs"] == ({"score": 32, "greedy": 24} if size > 1 else {"score": 0, "greedy": 0})
    assert greedy.nan_R.tolist() == [faulty and row in FAULTY for row in range(NUM_ROWS)]
    # Equals go to the lowest id, which another rank than the last one holds.
    assert greedy.tokens_R[-2:].tolist() == [vocab_size - 3, 0]


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == other.dtype
    torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("vocab_size", "size", "tolerance"), [(99, 4, 1e-12), (100, 4, 1e-12), (5, 4, 1e-12), (151_936, 4, 1e-8)]
)
def test_close_to_a_log_softmax_in_fp64(rank_pool: RankPool, vocab_size: int, size: int, tolerance: float) -> None:
    ids = wanted_ids(vocab_size)
    divisor = temperatures().masked_fill(temperatures() == 0, 1).unsqueeze(1)
    for dtype in (torch.float64, torch.float32):
        logits = rows(vocab_size, dtype)
        exact = torch.log_softmax(logits.double() / divisor, dim=1).gather(1, ids)
        is_possible = exact > -torch.inf
        for result in rank_pool.run(compute, vocab_size, dtype, False, size=size):
            logprobs = result["several"].double()
            assert torch.equal(logprobs > -torch.inf, is_possible)
            error = (logprobs - exact)[is_possible].abs()
            bound = tolerance if dtype == torch.float64 else 1e-6 * exact[is_possible].abs().clamp_min(1)
            assert (error <= bound).all(), error.max()
            assert torch.equal(result["greedy"][0], logits.argmax(1))


def test_another_width_than_the_vocabularys_part_is_refused() -> None:
    with pytest.raises(AssertionError):
        vocab_parallel.log_sum_exp(rows(99, torch.float32), temperatures(), vocab_size=98, group=SINGLE)
