"""Prompts without meaning, of given lengths: for measuring, not for reading."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


def random_lines(
    num_prompts: int, input_len: int, output_len: int, vocab_size: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Lines of a prompts file whose tokens are drawn evenly and whose outputs have one length, stops ignored.

    Args:
        num_prompts: lines.
        input_len: tokens of a prompt.
        output_len: tokens generated for each.
        vocab_size: token ids are drawn below it.
        seed: start of the draw; a shorter list is a prefix of a longer one.
    """
    generator = random.Random(seed)
    for index in range(num_prompts):
        token_ids = [generator.randrange(vocab_size) for _ in range(input_len)]
        line = {"id": f"random-{index}", "prompt_token_ids": token_ids, "max_tokens": output_len}
        yield {**line, "ignore_eos": True}
