"""Checks what the policies answer, alone; what they do to a run is checked with the scheduler."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError

import pytest

from mock_device import ask
from paged.core.lengths import LengthHistory
from paged.core.policy import Fifo, Load, Policy, Reserve, Watermark, num_blocks_for
from paged.core.sequence import Sequence


def load(*running: Sequence, num_blocks: int = 100) -> Load:
    return Load(running, num_blocks, 4, LengthHistory())


def sequence(num_prompt: int, max_tokens: int, num_blocks: int = 0, number: int = 0) -> Sequence:
    made = Sequence(ask(f"r{number}", range(num_prompt), max_tokens))
    made.blocks = list(range(num_blocks))
    return made


@pytest.mark.parametrize(("tokens", "size", "blocks"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (7, 1, 7)])
def test_blocks_for_tokens_round_up(tokens: int, size: int, blocks: int) -> None:
    assert num_blocks_for(tokens, size) == blocks


@pytest.mark.parametrize("policy", [Fifo(), Watermark(0.5), Policy()])
def test_admission_asks_for_the_blocks_of_all_tokens(policy: Policy) -> None:
    assert policy.blocks_to_admit(sequence(9, 100), load()) == 3


def test_fifo_keeps_nothing_free() -> None:
    assert Fifo().blocks_kept_free(sequence(4, 4), load(sequence(4, 100))) == 0


@pytest.mark.parametrize(
    ("fraction", "num_blocks", "kept"), [(0.0, 40, 0), (0.1, 40, 4), (0.1, 41, 5), (0.01, 10, 1), (0.99, 10, 10)]
)
def test_the_watermark_is_rounded_up_to_whole_blocks(fraction: float, num_blocks: int, kept: int) -> None:
    assert Watermark(fraction).blocks_kept_free(sequence(4, 4), load(num_blocks=num_blocks)) == kept


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 7, float("nan")])
def test_a_watermark_must_be_a_share(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"policy\.fraction must be at least 0 and below 1"):
        Watermark(fraction)


def test_reserve_counts_what_is_held_at_most() -> None:
    """A sequence of N tokens holds N - 1: prompt 3 and 6 new ones fit 2 blocks of 4."""
    policy = Reserve()
    assert policy.blocks_to_admit(sequence(3, 6), load()) == 2
    assert policy.blocks_to_admit(sequence(3, 7), load()) == 3
    running = [sequence(3, 7, num_blocks=1), sequence(3, 6, num_blocks=2), sequence(20, 1, num_blocks=5)]
    assert policy.blocks_kept_free(sequence(1, 1), load(*running)) == 2


@pytest.mark.parametrize(("victim", "chosen"), [("youngest", 3), ("least_computed", 2), ("most_blocks", 1)])
@pytest.mark.parametrize("make", [Policy, Fifo, Watermark, Reserve])
def test_whom_to_preempt_is_part_of_every_policy(make: type[Policy], victim: str, chosen: int) -> None:
    """Among equals the youngest yields."""
    candidates = [sequence(9, 4, num_blocks=n, number=i) for i, n in enumerate((3, 5, 1, 4))]
    for candidate, computed in zip(candidates, (9, 9, 3, 5), strict=True):
        candidate.num_scheduled = computed
    assert make(victim=victim).choose_victim(candidates) is candidates[chosen]
    equals = [sequence(9, 4, num_blocks=2, number=i) for i in range(3)]
    assert make(victim=victim).choose_victim(equals) is equals[-1]


def test_a_victim_must_be_chosen_in_a_known_way() -> None:
    with pytest.raises(ValueError, match=r"policy\.victim must be one of youngest, least_computed, most_blocks, not"):
        Watermark(0.1, victim="x")


def test_the_youngest_candidate_is_the_victim() -> None:
    candidates = [sequence(4, 4, number=i) for i in range(3)]
    for policy in (Policy(), Fifo(), Watermark(), Reserve()):
        assert policy.choose_victim(candidates) is candidates[-1]
        assert policy.choose_victim(candidates[:1]) is candidates[0]


@pytest.mark.parametrize("policy", [Fifo(), Watermark(0.2), Reserve()])
def test_policies_are_frozen_and_change_nothing(policy: Policy) -> None:
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        policy.extra = 1  # type: ignore[attr-defined]
    shown = [sequence(5, 9, num_blocks=2, number=i) for i in range(3)]
    before = copy.deepcopy([(s.blocks, s.output_ids, s.status, s.num_tokens) for s in shown])
    policy.blocks_to_admit(shown[0], load(*shown))
    policy.blocks_kept_free(shown[0], load(*shown))
    policy.choose_victim(shown)
    assert [(s.blocks, s.output_ids, s.status, s.num_tokens) for s in shown] == before
