"""Checks the keys of blocks as a sequence grows: by content where tokens are known, else by place."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mock_device import ask
from paged.core.blocks import BlockPool
from paged.core.prompt import AnyPrompt, OpaquePrompt, Prompt
from paged.core.request import Request, SamplingParams
from paged.core.reuse import PrefixReuse
from paged.core.sequence import Sequence


def grown(prompt: AnyPrompt, output: list[int] | int, sample: int = 0, name: str = "a") -> Sequence:
    """A sequence that has committed ``output``: tokens, or only so many."""
    sequence = Sequence(Request(name, sample, prompt, SamplingParams(), 0, 1000))
    if isinstance(output, int):
        sequence.num_output = output
    else:
        sequence.output_ids = list(output)
        sequence.num_output = len(output)
    return sequence


def keys_of(sequence: Sequence, block_size: int, reuse: PrefixReuse | None = None) -> list[object]:
    (reuse or PrefixReuse(BlockPool(1), block_size, True)).match(sequence)
    return list(sequence.keys)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30), st.integers(1, 5), st.data())
def test_keys_grow_with_the_tokens(tokens: list[int], size: int, data: st.DataObject) -> None:
    """Keys extended as tokens come in are those of a prompt that holds them all."""
    num_prompt = data.draw(st.integers(1, len(tokens)))
    cuts = sorted(data.draw(st.lists(st.integers(num_prompt, len(tokens)), max_size=4)))
    reuse = PrefixReuse(BlockPool(1), size, True)
    sequence = grown(Prompt(tokens[:num_prompt]), [])
    for start, end in pairwise([num_prompt, *cuts, len(tokens)]):
        sequence.output_ids += tokens[start:end]
        sequence.num_output += end - start
        keys = keys_of(sequence, size, reuse)
    assert tuple(keys) == Prompt(tokens).block_keys(size, b"weights:0")


@pytest.mark.parametrize("prompt", [OpaquePrompt("p", 10), Prompt(range(10))], ids=["opaque", "ids"])
def test_unknown_output_has_keys_of_its_own(prompt: AnyPrompt) -> None:
    """Two samples share the prompt's blocks and no block that holds a sampled token."""
    one, other = keys_of(grown(prompt, 10), 4), keys_of(grown(prompt, 10, sample=1), 4)
    third = keys_of(grown(prompt, 10, name="b"), 4)
    assert len(one) == len(other) == 5
    assert one[:2] == other[:2] == third[:2]
    assert len({*one[2:], *other[2:], *third[2:]}) == 9


def test_keys_of_unknown_output_are_the_same_in_whatever_steps_they_come() -> None:
    reuse = PrefixReuse(BlockPool(1), 4, True)
    at_once = keys_of(grown(OpaquePrompt("p", 9), 30), 4)
    sequence = grown(OpaquePrompt("p", 9), 0)
    for _ in range(30):
        sequence.num_output += 1
        keys = keys_of(sequence, 4, reuse)
    assert keys == at_once


def test_other_weights_give_other_keys() -> None:
    reuse = PrefixReuse(BlockPool(1), 4, True)
    for prompt, output in ((OpaquePrompt("p", 9), 8), (Prompt(range(9)), [1] * 8)):
        before = keys_of(grown(prompt, output), 4, reuse)
        reuse.forget(weight_version=1)
        after = keys_of(grown(prompt, output), 4, reuse)
        assert not set(before) & set(after)
        reuse.forget(weight_version=0)


def test_nothing_is_matched_when_reuse_is_off() -> None:
    sequence = Sequence(ask("a", range(20), 3))
    assert PrefixReuse(BlockPool(1), 4, False).match(sequence) == []
    assert not sequence.keys
