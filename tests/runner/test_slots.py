"""Checks the tables of all slots by themselves: what plans bring into them, and what steps read and write there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_tools import EOS_ID, VOCAB, save_tokenizer
from paged import SamplingParams
from paged.core.plan import Started, StepPlan
from paged.core.prompt import Prompt
from paged.core.request import Request
from paged.runner.slots import Asks, SlotTables, table_bytes
from paged.runner.text import Tokenizer

CPU = torch.device("cpu")


def tables(tokenizer: Tokenizer | None = None, **sizes: Any) -> SlotTables:
    """Four slots for 11 cached tokens, in blocks of four."""
    sizes = {"max_num_seqs": 4, "max_seq_len": 11, "block_size": 4, **sizes}
    return SlotTables(vocab_size=VOCAB, eos_token_ids=[EOS_ID], tokenizer=tokenizer, device=CPU, **sizes)


def started(
    slot: int,
    prompt: Sequence[int],
    output: Sequence[int] = (),
    blocks: Sequence[int] = (0,),
    *,
    seed: int = 0,
    **params: Any,
) -> Started:
    request = Request(f"in {slot}", 0, Prompt(tuple(prompt)), SamplingParams(**params), seed, 16)
    return Started(slot, request, tuple(output), len(output), tuple(blocks), 0)


def plan(
    *started: Started, released: Sequence[int] = (), appended: Sequence[tuple[int, int]] = (), step: int = 0
) -> StepPlan:
    """A plan of these differences; its rows are no matter here."""
    return StepPlan(step, 0, released, started, appended, (), (), (), (), ())


def columns_of(slots: SlotTables, numbers: Sequence[int], asks: int) -> dict[str, list[Any] | None]:
    """The columns of sampling of some slots, as lists."""
    slot_R = torch.tensor(numbers, dtype=torch.int64)
    found = slots.columns(slot_R, 10 + slot_R, asks)
    names = ("temperature_R", "seeds_R", "positions_R", "top_k_R", "top_p_R", "min_p_R")
    return {name: None if (column := getattr(found, name)) is None else column.tolist() for name in names}


# What plans bring


def test_a_start_writes_tokens_and_blocks_into_its_own_rows() -> None:
    slots = tables()
    slots.tokens_SP.fill_(-7)
    slots.blocks_SN.fill_(-7)
    slots.apply(plan(started(2, [5, 6, 7], [8, 9], [3, 1]), started(0, [4], [], [2])))
    assert slots.tokens_SP.tolist() == [
        [4, *[-7] * 11],
        [-7] * 12,
        [5, 6, 7, 8, 9, *[-7] * 7],
        [-7] * 12,
        [-7] * 12,
    ]
    assert slots.blocks_SN.tolist() == [[2, -7, -7], [-7] * 3, [3, 1, -7], [-7] * 3, [-7] * 3]
    assert slots.state(2).request.id == "in 2"
    assert slots.num_slots == slots.padding_slot == 4


def test_blocks_are_appended_where_the_table_ends() -> None:
    """Several at once, in order; also to what starts in the same plan, over what the slot held before."""
    slots = tables()
    slots.apply(plan(started(1, [1, 2], [], [9, 8, 7]), started(3, [1], [], [6])))
    slots.apply(plan(appended=[(3, 5)]))
    slots.apply(plan(started(1, [3], [], [4]), released=[1], appended=[(1, 3), (3, 2), (1, 1)], step=2))
    assert slots.blocks_SN[1].tolist() == [4, 3, 1]
    assert slots.blocks_SN[3].tolist() == [6, 5, 2]
    assert slots.tokens_SP[1, :2].tolist() == [3, 2], "what lies beyond the tokens is never read"


def test_a_released_slot_is_empty() -> None:
    slots = tables()
    slots.apply(plan(started(1, [1]), started(2, [2])))
    slots.apply(plan(released=[1]))
    assert slots.state(2).request.id == "in 2"
    with pytest.raises(AssertionError, match="slot 1 is empty"):
        slots.state(1)
    # After a failure a plan may release what is empty by now.
    slots.apply(plan(started(1, [3], [4]), released=[1, 3]))
    assert slots.state(1).request.prompt.token_ids == (3,)
    slots.clear()
    for slot in (1, 2):
        with pytest.raises(AssertionError, match="is empty"):
            slots.state(slot)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (plan(started(0, range(10), [1, 2, 3])), None),
        (plan(started(0, [1], [], [1, 2, 3, 4])), None),
        (plan(started(0, [1], [], [1, 2, 3])), plan(appended=[(0, 4)])),
        (plan(started(0, [1], [], [1])), plan(appended=[(0, 2), (0, 3), (0, 4)])),
    ],
    ids=["tokens", "blocks", "one more block", "several more blocks"],
)
def test_a_row_that_is_too_short_spills_into_no_other(first: StepPlan, second: StepPlan | None) -> None:
    slots = tables()
    if second is not None:
        slots.apply(first)
    before = slots.tokens_SP.clone(), slots.blocks_SN.clone()
    with pytest.raises(AssertionError, match="a row of a table is too short"):
        slots.apply(second or first)
    if second is not None:
        assert torch.equal(slots.tokens_SP, before[0])
    assert torch.equal(slots.blocks_SN, before[1])


def test_the_longest_sequence_fits() -> None:
    """As many tokens as can be cached, and the last one sampled."""
    slots = tables()
    slots.apply(plan(started(3, range(10), [10, 11], [5, 6, 7])))
    assert slots.tokens_SP[3].tolist() == list(range(12))
    assert slots.blocks_SN[3].tolist() == [5, 6, 7]
    assert not slots.tokens_SP[4].any()


def test_the_tables_take_as_many_bytes_as_is_said() -> None:
    for num_slots, max_seq_len, block_size in ((4, 11, 4), (7, 33, 16)):
        slots = tables(max_num_seqs=num_slots, max_seq_len=max_seq_len, block_size=block_size)
        num_bytes = slots.tokens_SP.nbytes + slots.blocks_SN.nbytes
        assert num_bytes == table_bytes(num_slots, max_seq_len, block_size)


# What ends a sequence


def test_what_ends_a_sequence_is_kept_on_the_host(tmp_path: Path) -> None:
    slots = tables(Tokenizer(save_tokenizer(tmp_path / "tokenizer")))
    slots.apply(
        plan(
            started(0, [1], stop_token_ids=[7]),
            started(1, [1], stop_token_ids=[7], ignore_eos=True),
            # "a" and "b" are tokens of their own.
            started(2, [1], [ord("a") - 32], stop=["ab"]),
            started(3, [5, 5, 6], [8, 9, 8], frequency_penalty=0.5),
        )
    )
    assert [slots.state(slot).stop_ids for slot in range(3)] == [{7, EOS_ID}, {7}, {EOS_ID}]
    assert slots.state(0).stream is None
    stream = slots.state(2).stream
    assert stream is not None
    assert stream.push(ord("b") - 32), "the output before a preemption is part of the text"
    assert stream.stopped_by == "ab"
    counts = slots.state(3).counts
    assert counts is not None
    assert counts.output_V.nonzero().flatten().tolist() == [8, 9]
    assert counts.output_V[8:10].tolist() == [2, 1]
    assert counts.prompt_V.nonzero().flatten().tolist() == [5, 6]
    assert [slots.state(slot).counts for slot in range(3)] == [None] * 3


# Rows of a step


def test_sampled_tokens_are_stored_at_their_places() -> None:
    slots = tables()
    slots.apply(plan(started(0, [4, 5]), started(3, [6, 7, 8])))
    slot_R, position_R = torch.tensor([3, 0, 4]), torch.tensor([3, 2, 11])
    slots.store_tokens(slot_R, position_R, torch.tensor([98, 97, 96]))
    assert slots.tokens_SP[0].tolist() == [4, 5, 97, *[0] * 9]
    assert slots.tokens_SP[3].tolist() == [6, 7, 8, 98, *[0] * 8]
    assert slots.tokens_SP[4].tolist() == [*[0] * 11, 96]
    assert not slots.tokens_SP[1:3].any()


ALL: dict[str, Any] = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05}


@pytest.mark.parametrize("numbers", [[1], [1, 2], [2, 0, 1], [0, 3, 2, 1], [3, 3, 0, 2, 1]])
def test_columns_of_even_and_odd_numbers_of_rows(numbers: list[int]) -> None:
    """Columns are contiguous; of odd numbers of rows some begin at 8 bytes, for which no kernel is built anew."""
    slots = tables()
    slots.apply(
        plan(
            started(0, [1], seed=2**64 - 1),
            started(1, [1], seed=2**63, **ALL),
            started(2, [1], seed=5, **{**ALL, "temperature": 0.0}),
            started(3, [1], seed=0, temperature=1.5, top_k=-1),
        )
    )
    found = columns_of(slots, numbers, Asks.TOP_K | Asks.TOP_P | Asks.MIN_P)
    given: dict[str, list[Any]] = {
        "temperature_R": [1.0, 0.7, 0.0, 1.5],
        "seeds_R": [-1, -(2**63), 5, 0],
        "positions_R": [10, 11, 12, 13],
        "top_k_R": [0, 20, 0, -1],
        "top_p_R": [1.0, 0.9, 1.0, 1.0],
        "min_p_R": [0.0, 0.05, 0.0, 0.0],
    }
    assert found == {name: [values[number] for number in numbers] for name, values in given.items()}
    columns = slots.columns(torch.tensor(numbers), torch.tensor(numbers), 7)
    for column in (columns.temperature_R, columns.seeds_R, columns.top_k_R, columns.top_p_R, columns.min_p_R):
        assert column is not None
        assert column.is_contiguous()
        assert column.dtype in (torch.int64, torch.float64)


@pytest.mark.parametrize("asks", range(8))
def test_columns_that_nobody_asks_for_are_left_out(asks: int) -> None:
    slots = tables()
    slots.apply(plan(started(1, [1], **ALL)))
    found = columns_of(slots, [1], asks)
    assert found["top_k_R"] == ([20] if asks & Asks.TOP_K else None)
    assert found["top_p_R"] == ([0.9] if asks & Asks.TOP_P else None)
    assert found["min_p_R"] == ([0.05] if asks & Asks.MIN_P else None)


@pytest.mark.parametrize(
    ("params", "asks"),
    [
        ({}, 0),
        ({"temperature": 0.0}, 0),
        ({"top_k": 3}, Asks.TOP_K),
        ({"top_k": -1}, 0),
        ({"top_p": 0.99}, Asks.TOP_P),
        ({"min_p": 0.01}, Asks.MIN_P),
        (ALL, Asks.TOP_K | Asks.TOP_P | Asks.MIN_P),
        ({**ALL, "temperature": 0.0}, 0),
        ({**ALL, "temperature": 0.0, "logprobs": 1}, Asks.LISTED),
        ({"presence_penalty": 0.1}, Asks.ADJUSTED),
        ({"frequency_penalty": 0.1}, Asks.ADJUSTED),
        ({"repetition_penalty": 1.1}, Asks.ADJUSTED),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, Asks.ADJUSTED),
        ({"logprobs": 0}, Asks.LISTED),
        ({"prompt_logprobs": 2}, 0),
    ],
)
def test_what_a_request_asks_of_sampling(params: dict[str, Any], asks: int) -> None:
    """Truncation is nothing to a greedy row: it keeps the likeliest token in any case."""
    slots = tables()
    slots.apply(plan(started(2, [1], **params)))
    assert slots.asks([2]) == asks
    assert slots.state(2).is_plain == (params.get("temperature") == 0.0 and not asks)


def test_slots_together_ask_for_what_one_of_them_asks_for() -> None:
    slots = tables()
    slots.apply(plan(started(0, [1], top_k=3), started(1, [1], logprobs=2), started(3, [1])))
    assert slots.asks([]) == 0
    assert slots.asks([3]) == 0
    assert slots.asks([0, 3]) == Asks.TOP_K
    assert slots.asks([3, 1, 0]) == Asks.TOP_K | Asks.LISTED
    slots.apply(plan(started(0, [1], min_p=0.1), released=[0]))
    assert slots.asks([0, 1]) == Asks.MIN_P | Asks.LISTED, "nothing of the sequence before is left"
