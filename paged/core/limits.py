"""The limits that a scheduler decides within, and the requests that can never fit them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paged.core.checks import check_whole
from paged.core.request import Request

MOST: Final = 2**31 - 1
"""What no limit may exceed: slots and positions are numbers of 32 bits on a device."""
MOST_BLOCKS: Final = 10**8
"""Most blocks of a pool, each of which takes the scheduler some tens of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits that a scheduler decides within.

    Attributes:
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
        max_num_seqs: most sequences running at once.
        max_step_tokens: most tokens computed in a step.
        chunk_size: most tokens of one sequence computed in a step.
        max_seq_len: most tokens of a sequence whose keys and values are ever held.
        vocab_size: prompt token ids must lie below it; None takes any.
        depth: most plans in flight.
        prefix_reuse: whether blocks of running and finished sequences are reused by content.

    Raises:
        ValueError: naming the field and what is allowed.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_step_tokens: int = 2048
    chunk_size: int = 512
    max_seq_len: int | None = None
    vocab_size: int | None = None
    depth: int = 1
    prefix_reuse: bool = True

    def __post_init__(self) -> None:
        names = ("num_blocks", "block_size", "max_num_seqs", "max_step_tokens", "chunk_size", "depth")
        optional = [name for name in ("max_seq_len", "vocab_size") if getattr(self, name) is not None]
        for name in (*names, *optional):
            value, most = getattr(self, name), MOST_BLOCKS if name == "num_blocks" else MOST
            # Not in one: a range would tell whoever gave 0 of a bound that nobody comes near.
            check_whole(name, value, 1)
            if value > most:
                raise ValueError(f"{name} must be a whole number, at most {most}, not {value}")

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values the pool holds."""
        return self.num_blocks * self.block_size

    def max_tokens_for(self, num_prompt: int, max_tokens: int | None) -> int:
        """``max_tokens`` of a request, or for None all that ``max_seq_len`` leaves to a prompt of this length.

        The pool's size plays no part then, so that it cannot change what is generated: a pool too small refuses. It is
        the limit only where there is no ``max_seq_len``.
        """
        if max_tokens is not None:
            return max_tokens
        limit = self.kv_tokens if self.max_seq_len is None else self.max_seq_len
        return limit + 1 - num_prompt

    def check(self, request: Request) -> None:
        """Refuse a request that is malformed or can never fit.

        Raises:
            ValueError: the prompt is empty or has an id outside the vocabulary, ``max_tokens`` is less than 1, or the
                two together are too long.
        """
        num_prompt = len(request.prompt)
        if not num_prompt:
            raise ValueError("the prompt must hold at least one token")
        request.prompt.check(self.vocab_size)
        # The last token sampled is never fed back, so a sequence of N tokens holds N - 1.
        held = num_prompt + max(request.max_tokens, 1) - 1
        wish = f"a prompt of {num_prompt} tokens"
        if request.max_tokens > 0:
            wish += f" with max_tokens {request.max_tokens}"
        if self.max_seq_len is not None and held > self.max_seq_len:
            raise ValueError(f"{wish} exceeds max_seq_len, {self.max_seq_len} tokens")
        if held > self.kv_tokens:
            pool = f"{self.kv_tokens} tokens (num_blocks {self.num_blocks} x block_size {self.block_size})"
            raise ValueError(f"{wish} can never fit the cache, {pool}")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {request.max_tokens}")


def limits_on(
    on_gpu: bool, depth: int | None, max_step_tokens: int | None, chunk_size: int | None
) -> tuple[int, int, int]:
    """``depth``, ``max_step_tokens`` and ``chunk_size`` with a GPU's numbers, or a CPU's, in place of None."""
    if depth is None:
        depth = 2 if on_gpu else 1
    if max_step_tokens is None:
        max_step_tokens = 8192 if on_gpu else 2048
    if chunk_size is None:
        chunk_size = max_step_tokens if on_gpu else 512
    return depth, max_step_tokens, chunk_size
