"""Owns the tests of the arithmetic task: values against Python's, the tail of lengths, what the checker refuses."""

import random
import statistics

import pytest

from paged.workload import arithmetic
from paged.workload.arithmetic import builtin_prompts, derivation, is_solved, parse, render

NUM_PROMPTS = 1000


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return builtin_prompts(NUM_PROMPTS, seed=3)


def num_operators(node: arithmetic.Expression) -> int:
    return 0 if isinstance(node, int) else 1 + num_operators(node.left) + num_operators(node.right)


def test_a_derivation_reduces_leftmost_innermost_first() -> None:
    assert derivation("7-2*(3+1)") == "7-2*4\n7-8\n-1\n"
    assert derivation("1-2+3*4") == "-1+3*4\n-1+12\n11\n"
    assert derivation("5-(2-9)*-2") == "5--7*-2\n5-14\n-9\n"
    assert derivation("42") == "42\n"


def test_every_line_has_the_value_python_gives(prompts: list[str]) -> None:
    for prompt in prompts:
        value = eval(prompt)
        lines = derivation(prompt.strip()).splitlines()
        assert lines[-1] == str(value)
        assert [eval(line) for line in lines] == [value] * len(lines)


def test_every_line_has_one_operator_less_and_stays_in_bounds(prompts: list[str]) -> None:
    for prompt in prompts:
        before = parse(prompt.strip())
        assert 1 <= num_operators(before) <= arithmetic.MAX_OPERATORS
        for line in derivation(prompt.strip()).splitlines():
            after = parse(line)
            assert num_operators(after) == num_operators(before) - 1
            assert abs(arithmetic.evaluate(after)) <= arithmetic.MAX_VALUE
            before = after


def test_any_order_of_reduction_is_a_derivation_with_the_same_value(prompts: list[str]) -> None:
    generator = random.Random(5)
    different = 0
    for prompt in prompts[:300]:
        leftmost, other = derivation(prompt.strip()), derivation(prompt.strip(), generator)
        different += leftmost != other
        assert arithmetic.is_derivation(prompt, leftmost)
        assert arithmetic.is_derivation(prompt, other)
        assert is_solved(prompt, other)
        assert other.count("\n") == leftmost.count("\n")
        assert len(prompt) + len(other) < 1024
    assert different > 150


@pytest.mark.parametrize(
    "text", ["7-8\n-1\n", "7-2*4\n-1\n", "7-2*4\n7-8\n", "7-2*4\n7-8\n-1\n-1\n", "7-2*5\n7-10\n-3\n"]
)
def test_skipped_missing_surplus_and_wrong_steps_are_no_derivation(text: str) -> None:
    assert not arithmetic.is_derivation("7-2*(3+1)\n", text)


def test_text_and_tree_are_equivalent(prompts: list[str]) -> None:
    for prompt in prompts:
        assert render(parse(prompt.strip())) == prompt.strip()


def test_lengths_have_a_heavy_tail_and_fit_the_context(prompts: list[str]) -> None:
    lengths = [len(derivation(prompt.strip())) + 1 for prompt in prompts]
    median = statistics.median(lengths)
    assert 60 <= median <= 120
    assert max(lengths) > 5 * median
    assert max(len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True)) <= 1001


def test_prompts_depend_on_the_seed_alone_and_a_shorter_list_is_a_prefix() -> None:
    random.seed(1)
    first = builtin_prompts(20, seed=7)
    random.seed(2)
    assert builtin_prompts(30, seed=7)[:20] == first
    assert builtin_prompts(20, seed=8) != first
    assert builtin_prompts(0, seed=7) == []


def test_the_checker_accepts_every_true_derivation(prompts: list[str]) -> None:
    for prompt in prompts:
        answer = derivation(prompt.strip())
        assert is_solved(prompt, answer)
        assert is_solved(prompt, answer + "<|im_end|>")


def test_the_checker_refuses_every_truncated_derivation(prompts: list[str]) -> None:
    for prompt in prompts[:100]:
        answer = derivation(prompt.strip())
        assert not any(is_solved(prompt, answer[:cut]) for cut in range(len(answer)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "12",
        "12\n",
        "123",
        "123\n\n",
        "100+23\n",
        "0123\n",
        " 123\n",
        "123\n124\n",
        "<|im_end|>",
        "12<|im_end|>",
    ],
)
def test_the_checker_refuses_wrong_answers(text: str) -> None:
    assert is_solved("100+23\n", "123\n")
    assert not is_solved("100+23\n", text)


@pytest.mark.parametrize("expression", ["", "1+", "(1+2", "1+2)", "1/2", "1 + 2", "--1", "()", "1(2)", "²"])
def test_what_is_no_expression_gets_a_sentence(expression: str) -> None:
    with pytest.raises(ValueError, match="not an arithmetic expression"):
        parse(expression)
    with pytest.raises(ValueError, match="not an arithmetic expression"):
        is_solved(expression + "\n", "1\n")


def test_a_negative_count_of_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="n must not be negative"):
        builtin_prompts(-1, seed=0)
