"""Owns the arithmetic task of the embedded model `tiny`: its expressions, their derivations and the checker.

The text format, which the checkpoint was trained on:

    prompt      7-2*(3+1)\\n
    answer      7-2*4\\n
                7-8\\n
                -1\\n           and then the end-of-sequence token

Each line reduces one operation whose operands are numbers. Training picks any of them with equal chance, so a sampler
has real choices to make, and samples of one prompt differ; all orders lead to the same value.

There are no spaces. Every line, the last one too, ends with a newline: so a checker that sees only text can tell the
value `12` from the first two digits of `123`. Parentheses stand only where precedence and left association need them,
which makes text and tree equivalent. A negative number is written bare (`5--3`, `4*-2`); Python's `eval` reads every
line alike.
"""

import math
import random
from dataclasses import dataclass
from typing import Final, TypeAlias

from paged.workload.job import SIZED, InputFiles, Job

MAX_OPERATORS: Final = 20
MAX_TEXT_LENGTH: Final = 900
"""Bound on prompt and leftmost derivation together, in characters (one token each). Other orders of reduction can be
somewhat longer: this leaves them room in a context of 1,024."""
END_MARKERS: Final = ("<|im_end|>", "<|endoftext|>")
"""How an end-of-sequence token shows in text that was decoded with its special tokens."""

MAX_VALUE: Final = 99
"""Bound on the magnitude of every intermediate value, the last included."""
MAX_OPERAND: Final = 50
"""Bound on the numbers in an expression."""
MAX_SMALLER_FACTOR: Final = 9
"""Bound on the magnitude of the smaller factor of a product."""

_MEDIAN_OPERATORS: Final = 6.0
_LOG_SPREAD: Final = 0.65
_PRECEDENCE: Final = {"+": 1, "-": 1, "*": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticWorkload:
    """The built-in prompts, whose answers can be scored."""

    num_prompts: int
    seed: int

    def input_files(self) -> list[InputFiles]:
        """None."""
        return []

    def jobs(self) -> list[Job]:
        """Always a ``ValueError``: the answers are as long as the model makes them."""
        raise ValueError(
            f"workload must be one that knows its lengths ({', '.join(SIZED)}, or prompts with output_len), "
            "not arithmetic, whose answers are as long as the model makes them"
        )


@dataclass(frozen=True, slots=True)
class Operation:
    """A binary operation whose operands are numbers or further operations."""

    operator: str
    left: "Expression"
    right: "Expression"


Expression: TypeAlias = int | Operation


def generate(generator: random.Random) -> str:
    """Draws an expression within the bounds above with 1 to `MAX_OPERATORS` operators, log-normal in number.

    Only `generator` decides and only `generator` changes.
    """
    while True:
        drawn = generator.lognormvariate(math.log(_MEDIAN_OPERATORS), _LOG_SPREAD)
        expression, _ = _draw(generator, min(max(round(drawn), 1), MAX_OPERATORS))
        text = render(expression)
        if len(text) + 1 + len(derivation(text)) <= MAX_TEXT_LENGTH:
            return text


def builtin_prompts(n: int, seed: int) -> list[str]:
    """The first `n` prompts of the endless list that belongs to `seed`, each an expression and its newline."""
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    generator = random.Random(seed)
    return [generate(generator) + "\n" for _ in range(n)]


def derivation(expression: str, generator: random.Random | None = None) -> str:
    """An answer to `expression`: one reduction a line, down to the value; a number's derivation is the number.

    Each line reduces the leftmost operation that can be reduced, or with a `generator` any of them, all equally likely.

    Raises `ValueError` if `expression` is not of this grammar.
    """
    node = parse(expression)
    lines: list[str] = []
    while isinstance(node, Operation):
        node = reduce_once(node, generator.randrange(num_reducible(node)) if generator is not None else 0)
        lines.append(render(node))
    return "".join(line + "\n" for line in lines or [render(node)])


def is_derivation(prompt: str, text: str) -> bool:
    """Whether every line of `text` is one reduction of the line before it, from the prompt down to the value."""
    node = parse(prompt.strip())
    for line in text.splitlines():
        if not isinstance(node, Operation):
            return False
        steps = (reduce_once(node, which) for which in range(num_reducible(node)))
        following = next((step for step in steps if render(step) == line), None)
        if following is None:
            return False
        node = following
    return not isinstance(node, Operation)


def is_solved(prompt: str, text: str) -> bool:
    """Whether `text` ends, by a newline or an end marker, right after a last line that is exactly the prompt's value.

    Earlier lines are not looked at. Raises `ValueError` if the prompt is not an expression of this grammar.
    """
    value = evaluate(parse(prompt.strip()))
    for marker in END_MARKERS:
        if text.endswith(marker):
            body = text.removesuffix(marker).removesuffix("\n")
            break
    else:
        if not text.endswith("\n"):
            return False
        body = text.removesuffix("\n")
    return body.rpartition("\n")[2] == str(value)


def num_reducible(node: Expression) -> int:
    """How many operations of an expression have numbers as both operands."""
    if isinstance(node, int):
        return 0
    return num_reducible(node.left) + num_reducible(node.right) or 1


def reduce_once(operation: Operation, which: int = 0) -> Expression:
    """Replaces one operation whose operands are both numbers by its value: number `which` from the left."""
    num_left = num_reducible(operation.left)
    if which < num_left:
        assert isinstance(operation.left, Operation)
        return Operation(operation.operator, reduce_once(operation.left, which), operation.right)
    if isinstance(operation.right, Operation):
        return Operation(operation.operator, operation.left, reduce_once(operation.right, which - num_left))
    assert isinstance(operation.left, int), f"there is no reducible operation {which}"
    return _apply(operation.operator, operation.left, operation.right)


def evaluate(node: Expression) -> int:
    """The value of an expression."""
    if isinstance(node, int):
        return node
    return _apply(node.operator, evaluate(node.left), evaluate(node.right))


def render(node: Expression) -> str:
    """The text of an expression; `parse` gives the same tree back."""
    if isinstance(node, int):
        return str(node)
    precedence = _PRECEDENCE[node.operator]
    left, right = render(node.left), render(node.right)
    if isinstance(node.left, Operation) and _PRECEDENCE[node.left.operator] < precedence:
        left = f"({left})"
    # Operators associate to the left, so equal precedence on the right needs parentheses to keep the tree.
    if isinstance(node.right, Operation) and _PRECEDENCE[node.right.operator] <= precedence:
        right = f"({right})"
    return f"{left}{node.operator}{right}"


def parse(text: str) -> Expression:
    """The tree of an expression; raises `ValueError` at the first character that does not fit the grammar."""
    node, end = _parse_level(text, 0, 1)
    if end != len(text):
        raise _misfit(text, end)
    return node


def _parse_level(text: str, start: int, precedence: int) -> tuple[Expression, int]:
    """Reads a chain of operators of at least `precedence` from `start`; returns the tree and where reading stopped."""
    node, position = _parse_operand(text, start)
    while position < len(text) and _PRECEDENCE.get(text[position], 0) >= precedence:
        operator = text[position]
        right, position = _parse_level(text, position + 1, _PRECEDENCE[operator] + 1)
        node = Operation(operator, node, right)
    return node, position


def _parse_operand(text: str, start: int) -> tuple[Expression, int]:
    if text.startswith("(", start):
        node, end = _parse_level(text, start + 1, 1)
        if not text.startswith(")", end):
            raise _misfit(text, end)
        return node, end + 1
    end = start + 1 if text.startswith("-", start) else start
    first_digit = end
    while end < len(text) and text[end] in "0123456789":
        end += 1
    if end == first_digit:
        raise _misfit(text, end)
    return int(text[start:end]), end


def _misfit(text: str, position: int) -> ValueError:
    found = repr(text[position]) if position < len(text) else "its end"
    return ValueError(f"not an arithmetic expression: {text!r} has {found} at position {position}")


def _apply(operator: str, left: int, right: int) -> int:
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    assert operator == "*", operator
    return left * right


def _draw(generator: random.Random, num_operators: int) -> tuple[Expression, int]:
    """A random tree and its value."""
    if num_operators == 0:
        # Half the operands have one digit: otherwise products would rarely be allowed.
        number = generator.randint(0, 9) if generator.random() < 0.5 else generator.randint(10, MAX_OPERAND)
        return number, number
    num_left = generator.randrange(num_operators)
    while True:
        left, left_value = _draw(generator, num_left)
        right, right_value = _draw(generator, num_operators - 1 - num_left)
        allowed = [operator for operator in "+-*" if _is_allowed(operator, left_value, right_value)]
        if allowed:
            operator = generator.choice(allowed)
            return Operation(operator, left, right), _apply(operator, left_value, right_value)


def _is_allowed(operator: str, left: int, right: int) -> bool:
    if abs(_apply(operator, left, right)) > MAX_VALUE:
        return False
    return operator != "*" or min(abs(left), abs(right)) <= MAX_SMALLER_FACTOR
