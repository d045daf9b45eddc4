"""Checks what callers may ask for, and the hashes that must be the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.core.prompt import Prompt
from paged.core.request import MAX_LOGPROBS, MAX_SAMPLES, SamplingParams, sample_seed, stable_hash

NAN, INF = float("nan"), float("inf")

MISTAKES: list[tuple[str, Any, str]] = [
    ("n", 0, "a whole number, between 1 and 4096, not 0"),
    ("n", MAX_SAMPLES + 1, "between 1 and 4096"),
    ("n", 1.0, "not 1.0"),
    ("n", True, "not True"),
    ("n", None, "not None"),
    ("n", "2", "not '2'"),
    ("max_tokens", 0, "a whole number, at least 1, not 0"),
    ("max_tokens", -5, "not -5"),
    ("max_tokens", 2.5, "not 2.5"),
    ("max_tokens", True, "not True"),
    ("temperature", -0.1, "a number between 0 and 10000, not -0.1"),
    ("temperature", 1e5, "between 0 and 10000"),
    ("temperature", 1e-4, "0 (greedy) or at least 0.001, not 0.0001"),
    ("temperature", NAN, "not nan"),
    ("temperature", INF, "not inf"),
    ("temperature", 10**400, "between 0 and 10000"),
    ("temperature", "1", "not '1'"),
    ("temperature", False, "not False"),
    ("temperature", None, "not None"),
    ("top_p", 0, "a number above 0 and at most 1, not 0"),
    ("top_p", 1.01, "above 0 and at most 1"),
    ("top_p", -0.5, "not -0.5"),
    ("top_p", NAN, "not nan"),
    ("top_p", [0.9], "not [0.9]"),
    ("top_k", -2, "a whole number, between -1 and 2147483647, not -2"),
    ("top_k", 5.0, "not 5.0"),
    ("top_k", True, "not True"),
    ("min_p", -0.01, "a number between 0 and 1, not -0.01"),
    ("min_p", 1.5, "between 0 and 1"),
    ("min_p", NAN, "not nan"),
    ("seed", 2**64, "between -9223372036854775808 and 18446744073709551615"),
    ("seed", -(2**63) - 1, "between"),
    ("seed", 1.0, "not 1.0"),
    ("seed", "7", "not '7'"),
    ("seed", False, "not False"),
    ("stop", "", "must not contain an empty text"),
    ("stop", ["a", ""], "must not contain an empty text"),
    ("stop", ["a", 3], "a list of str, not one with 3"),
    ("stop", 3, "a list of str, not 3"),
    ("stop", None, "a list of str, not None"),
    ("stop", b"x", "a list of str"),
    ("stop", {"a"}, "a list of str"),
    ("stop_token_ids", [-1], "token ids, 0 or more"),
    ("stop_token_ids", [1, "2"], "a list of int, not one with '2'"),
    ("stop_token_ids", [True], "not one with True"),
    ("stop_token_ids", True, "a list of int"),
    ("stop_token_ids", "12", "a list of int, not '12'"),
    ("stop_token_ids", 1.5, "a list of int, not 1.5"),
    ("ignore_eos", 1, "true or false, not 1"),
    ("ignore_eos", None, "true or false, not None"),
    ("ignore_eos", "yes", "true or false, not 'yes'"),
    ("logprobs", -1, "a whole number, between 0 and 1024, not -1"),
    ("logprobs", MAX_LOGPROBS + 1, "between 0 and 1024"),
    ("logprobs", True, "not True"),
    ("prompt_logprobs", -1, "between 0 and 1024, not -1"),
    ("prompt_logprobs", MAX_LOGPROBS + 1, "between 0 and 1024"),
    ("prompt_logprobs", 0.0, "not 0.0"),
    ("presence_penalty", 2.1, "a number between -2 and 2, not 2.1"),
    ("presence_penalty", -2.1, "not -2.1"),
    ("presence_penalty", NAN, "not nan"),
    ("frequency_penalty", 2.1, "a number between -2 and 2, not 2.1"),
    ("frequency_penalty", -INF, "not -inf"),
    ("frequency_penalty", "0", "not '0'"),
    ("repetition_penalty", 0, "a number between 0.001 and 10000, not 0"),
    ("repetition_penalty", -1.0, "between 0.001 and 10000"),
    ("repetition_penalty", 1e5, "between 0.001 and 10000"),
    ("repetition_penalty", NAN, "not nan"),
    ("logit_bias", [1], "must map token ids to numbers, not [1]"),
    ("logit_bias", None, "must map token ids to numbers, not None"),
    ("logit_bias", {"a": 1.0}, "not the key 'a'"),
    ("logit_bias", {-1: 1.0}, "not the key -1"),
    ("logit_bias", {True: 1.0}, "not the key True"),
    ("logit_bias", {"\u00b2": 1.0}, "not the key '\u00b2'"),
    ("logit_bias", {5: NAN}, "logit_bias[5] must be a number"),
    ("logit_bias", {5: "1"}, "logit_bias[5] must be a number"),
    ("logit_bias", {"5": 2e4}, "logit_bias[5] must be a number between -10000 and 10000"),
]


@pytest.mark.parametrize(("name", "value", "fragment"), MISTAKES, ids=lambda value: repr(value)[:30])
def test_every_mistake_is_one_sentence_that_names_the_field(name: str, value: Any, fragment: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert fragment in message
    assert "\n" not in message
    with pytest.raises(ValueError, match=name):
        SamplingParams.from_mapping({name: value})


def test_every_field_has_its_mistakes_in_the_table() -> None:
    assert {name for name, _, _ in MISTAKES} == set(SamplingParams.__dataclass_fields__)


def test_greedy_samples_are_all_alike() -> None:
    with pytest.raises(ValueError, match="n must be 1 when temperature is 0"):
        SamplingParams(n=2, temperature=0)
    assert SamplingParams(n=1, temperature=0).is_greedy
    assert not SamplingParams(n=2, temperature=0.5).is_greedy


@pytest.mark.parametrize(
    "values",
    [
        {"n": 1}, {"n": MAX_SAMPLES}, {"max_tokens": None}, {"max_tokens": 1}, {"temperature": 0},
        {"temperature": 1e-3}, {"temperature": 10_000}, {"top_p": 1}, {"top_p": 1e-9}, {"top_k": -1}, {"top_k": 10**9},
        {"min_p": 0}, {"min_p": 1}, {"seed": 0}, {"seed": 2**64 - 1}, {"seed": -(2**63)}, {"seed": None}, {"stop": "x"},
        {"stop": ["x", "y"]}, {"stop_token_ids": 0}, {"stop_token_ids": [1, 2]}, {"ignore_eos": True}, {"logprobs": 0},
        {"logprobs": MAX_LOGPROBS}, {"prompt_logprobs": 0}, {"presence_penalty": -2}, {"frequency_penalty": 2},
        {"repetition_penalty": 0.1}, {"logit_bias": {}}, {"logit_bias": {3: 1, "4": -2.5}},
    ],
    ids=str,
)  # fmt: skip
def test_the_ends_of_every_range_are_allowed(values: dict[str, Any]) -> None:
    assert SamplingParams.from_mapping(values) == SamplingParams(**values)


def test_values_are_normalised_and_frozen() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[7], logit_bias={"3": 1})  # type: ignore[arg-type, dict-item]
    assert params.stop == ("end",)
    assert params.stop_token_ids == (7,)
    assert params.logit_bias == ((3, 1.0),)
    with pytest.raises(FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    mine = {1: 1.0}
    params = SamplingParams(logit_bias=mine)
    mine[1] = 99.0
    assert params.logit_bias == ((1, 1.0),), "what the caller changes later must not matter"


def test_an_unknown_key_is_named_beside_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"topp is not a sampling parameter; known: frequency_penalty, .*top_p"):
        SamplingParams.from_mapping({"temperature": 1.0, "topp": 0.9})


# Seeds


def test_seeds_are_pinned() -> None:
    """Runs recorded with one version must replay with the next: these values may never change."""
    assert stable_hash("a", 1) == 4734373591355134036
    assert sample_seed("request-0", None, 0) == 11348812808525129962
    assert sample_seed("request-0", None, 1) == 16326610052684340528
    assert sample_seed("request-0", None, 0, 7) == 17122290559947259266
    assert sample_seed("request-0", 42, 0) == 6395860104414084151
    assert sample_seed("another", 42, 3) == 901017077946068826


def test_seeds_are_the_same_in_a_process_that_hashes_differently() -> None:
    program = (
        "from paged.core.prompt import Prompt\n"
        "from paged.core.request import sample_seed, stable_hash\n"
        "print(stable_hash('a', 1), sample_seed('x', None, 2), sample_seed('x', 5, 2), hash('x'),"
        " Prompt(range(8)).block_keys(4, b's')[1].hex())"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert outputs[0][3] != outputs[1][3], "the two processes do hash differently"
    here = [stable_hash("a", 1), sample_seed("x", None, 2), sample_seed("x", 5, 2)]
    for output in outputs:
        assert [int(text) for text in output[:3]] == here
        assert output[4] == Prompt(range(8)).block_keys(4, b"s")[1].hex()


def test_seeds_differ_between_samples_ids_and_kinds() -> None:
    seeds = [sample_seed(name, seed, j) for name in ("a", "b") for seed in (None,) for j in range(50)]
    seeds += [sample_seed("a", seed, j) for seed in (0, 1, -1) for j in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sample_seed("a", 7, 0) == sample_seed("b", 7, 0), "a user's seed does not depend on the id"
    assert sample_seed("a", 7, 0, 1) == sample_seed("a", 7, 0, 2), "nor on the engine's seed"
    assert sample_seed("a", None, 0, 1) != sample_seed("a", None, 0, 2)
    assert stable_hash("1") != stable_hash(1)
    assert stable_hash("a", "b") != stable_hash("ab")


# Block keys


def test_block_keys_are_pinned() -> None:
    keys = Prompt(range(9)).block_keys(4, b"weights:0")
    assert [key.hex() for key in keys] == ["10f434666176f23598868b8d914a448b", "27821fb69131df09d51b7413288028a0"]


@given(
    st.lists(st.integers(0, 2), max_size=14),
    st.lists(st.integers(0, 2), max_size=14),
    st.integers(1, 4),
)
def test_keys_are_equal_exactly_where_the_prefixes_are(first: list[int], second: list[int], size: int) -> None:
    keys, others = (Prompt(tokens).block_keys(size, b"salt") for tokens in (first, second))
    assert len(keys) == len(first) // size
    for index, (key, other) in enumerate(zip(keys, others, strict=False)):
        end = (index + 1) * size
        assert (key == other) == (first[:end] == second[:end])
    assert len(set(keys)) == len(keys), "the same tokens at another place are another block"


def test_the_salt_changes_every_key() -> None:
    prompt = Prompt(range(32))
    assert not set(prompt.block_keys(4, b"weights:0")) & set(prompt.block_keys(4, b"weights:1"))
    assert prompt.block_keys(4, b"weights:0") == Prompt(list(range(32))).block_keys(4, b"weights:0")


def test_keys_are_128_bits_and_kept() -> None:
    prompt = Prompt(range(100))
    keys = prompt.block_keys(8, b"")
    assert {len(key) for key in keys} == {16}
    assert prompt.block_keys(8, b"") is keys
    assert prompt.block_keys(4, b"") != keys


def test_a_prompt_keeps_its_own_tokens() -> None:
    tokens = [1, 2, 3]
    prompt = Prompt(tokens)
    tokens.append(4)
    assert prompt.token_ids == (1, 2, 3)
    assert len(prompt) == 3
