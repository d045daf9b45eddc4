"""Checks the forms of a prompt: the same content has the same keys, and nothing else has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.core.prompt import AnyPrompt, HashedPrompt, OpaquePrompt, Prompt


def hashed(*ids: int, length: int, size: int = 8) -> HashedPrompt:
    return HashedPrompt(ids, length, size)


@pytest.mark.parametrize(
    "prompt", [Prompt(range(19)), OpaquePrompt("a", 19), hashed(5, 6, 7, length=19)], ids=["ids", "opaque", "hashed"]
)
def test_every_form_has_a_key_for_each_full_block(prompt: AnyPrompt) -> None:
    assert len(prompt) == 19
    for size in (1, 2, 4, 5, 16, 19, 20):
        keys = list(prompt.block_keys(size, b"s"))
        assert len(keys) == len(set(keys)) == 19 // size
        assert keys == list(prompt.block_keys(size, b"s"))
        assert not set(keys) & set(prompt.block_keys(size, b"other"))


def test_keys_of_an_opaque_prompt_depend_on_its_name_alone() -> None:
    short, long = OpaquePrompt("a", 10), OpaquePrompt("a", 90)
    assert list(short.block_keys(4, b"s")) == list(long.block_keys(4, b"s"))[:2]
    assert not set(long.block_keys(4, b"s")) & set(OpaquePrompt("b", 90).block_keys(4, b"s"))
    assert not set(long.block_keys(4, b"s")) & set(long.block_keys(5, b"s"))


def test_hashed_prompts_share_as_far_as_their_hashes_agree() -> None:
    one, other = hashed(1, 2, 3, length=24), hashed(1, 2, 9, length=20)
    ours, theirs = one.block_keys(4, b"s"), other.block_keys(4, b"s")
    assert ours[:4] == theirs[:4]
    assert not set(ours[4:]) & set(theirs[4:])


def test_a_block_across_two_hashes_needs_both() -> None:
    """Blocks of 12 tokens over hashes of 8: the first ends inside the second hash."""
    ours, theirs = hashed(1, 2, 3, length=24).block_keys(12, b"s"), hashed(1, 7, 8, length=24).block_keys(12, b"s")
    assert not set(ours) & set(theirs)


def test_the_same_hash_at_another_place_is_other_content() -> None:
    keys = hashed(1, 1, length=16).block_keys(4, b"s")
    assert len(set(keys)) == 4


@pytest.mark.parametrize(("ids", "length"), [((1, 2), 8), ((1,), 9), ((), 1)])
def test_hashes_must_be_as_many_as_the_blocks(ids: tuple[int, ...], length: int) -> None:
    with pytest.raises(ValueError, match=f"one hash for each 8 of {length} tokens, not {len(ids)}"):
        HashedPrompt(ids, length, 8)


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 30))
def test_only_known_tokens_can_lie_outside_a_vocabulary(tokens: list[int], vocab_size: int) -> None:
    for prompt in (OpaquePrompt("a", 3), hashed(99, length=3)):
        prompt.check(vocab_size)
    if all(token < vocab_size for token in tokens):
        Prompt(tokens).check(vocab_size)
    else:
        with pytest.raises(ValueError, match=f"outside the vocabulary, 0 to {vocab_size - 1}"):
            Prompt(tokens).check(vocab_size)
    Prompt([*tokens, 10**9]).check(None)
