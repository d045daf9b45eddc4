"""What a prompt can be: token ids, an opaque name with a length, or hashes of blocks; and the keys of its blocks."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Protocol

Key = Hashable
"""Tells a block's content, and all that came before it, from any other: a digest, or a number made from one."""


class AnyPrompt(Protocol):
    """What the scheduler asks of a prompt, whatever its form."""

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """The tokens, or None if they are not known."""

    def __len__(self) -> int: ...

    def check(self, vocab_size: int | None) -> None:
        """Refuse what lies outside the vocabulary with a ``ValueError``; None allows any id."""

    def block_keys(self, block_size: int, salt: bytes) -> Sequence[Key]:
        """One key for each full block of ``block_size`` tokens; other salts give other keys."""


class Prompt:
    """Token ids of a prompt, shared by all samples of a request, with the keys of its full blocks.

    Immutable. The keys are computed once for a block size and salt and kept, because every sample and
    every admission asks for them.
    """

    __slots__ = ("_keys", "token_ids")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids: tuple[int, ...] = tuple(token_ids)
        self._keys: dict[tuple[int, bytes], tuple[bytes, ...]] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def check(self, vocab_size: int | None) -> None:
        """Refuse ids outside the vocabulary, ``0 .. vocab_size - 1``."""
        tokens = self.token_ids
        if vocab_size is not None and tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            bad = next(token for token in tokens if not 0 <= token < vocab_size)
            raise ValueError(f"prompt token id {bad} is outside the vocabulary, 0 to {vocab_size - 1}")

    def block_keys(self, block_size: int, salt: bytes) -> tuple[bytes, ...]:
        """One 128-bit digest for each full block, chained from ``salt``."""
        known = self._keys.get((block_size, salt))
        if known is None:
            keys: list[bytes] = []
            parent = salt
            for end in range(block_size, len(self.token_ids) + 1, block_size):
                parent = chained_key(parent, self.token_ids[end - block_size : end])
                keys.append(parent)
            known = self._keys[(block_size, salt)] = tuple(keys)
        return known


class OpaquePrompt:
    """A prompt of which only a name and a length are known; equal names share their blocks.

    Immutable. For simulation: nothing can be computed from it.
    """

    __slots__ = ("_length", "id")

    token_ids = None

    def __init__(self, id: str, length: int) -> None:
        self.id = id
        self._length = length

    def __len__(self) -> int:
        return self._length

    def check(self, vocab_size: int | None) -> None:
        """Nothing to refuse."""

    def block_keys(self, block_size: int, salt: bytes) -> range:
        """Consecutive numbers from one that the name and the salt give."""
        first = numbered_key(salt, "prompt", self.id, str(block_size))
        return range(first, first + self._length // block_size)


class HashedPrompt:
    """A prompt given as one hash for each block of ``hash_block_size`` tokens, as in Mooncake's traces.

    Immutable. Equal hashes at the same place mean equal tokens up to that block's end.

    Args:
        hash_ids: one for each block, the last of which may be partly filled.
        length: tokens.
        hash_block_size: tokens that one hash stands for.

    Raises:
        ValueError: the number of hashes is not that of the blocks.
    """

    __slots__ = ("_length", "hash_block_size", "hash_ids")

    token_ids = None

    def __init__(self, hash_ids: Sequence[int], length: int, hash_block_size: int = 512) -> None:
        self.hash_ids = tuple(hash_ids)
        self._length = length
        self.hash_block_size = hash_block_size
        if len(self.hash_ids) != -(-length // hash_block_size):
            raise ValueError(
                f"hash_ids must hold one hash for each {hash_block_size} of {length} tokens, not {len(self.hash_ids)}"
            )

    def __len__(self) -> int:
        return self._length

    def check(self, vocab_size: int | None) -> None:
        """Nothing to refuse."""

    def block_keys(self, block_size: int, salt: bytes) -> list[int]:
        """A number for each full block, from its place and the hash of the block that holds its last token."""
        keys: list[int] = []
        hashed, first = -1, 0
        for index in range(self._length // block_size):
            at = ((index + 1) * block_size - 1) // self.hash_block_size
            if at != hashed:
                hashed, first = at, numbered_key(salt, "hash", str(self.hash_ids[at]), str(block_size))
            keys.append(first + index)
        return keys


def chained_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a block of known tokens after the one with the key ``parent`` (the salt for the first).

    Equal keys mean equal tokens from position 0 on, under the same weights.
    """
    return blake2b(parent + array("i", token_ids).tobytes(), digest_size=16).digest()


def numbered_key(salt: bytes, *names: str) -> int:
    """A 62-bit number that ``salt`` and ``names`` determine; those that follow it are keys of the blocks after.

    It fits a machine word, because an hour of trace makes millions of them. They stand for content that nobody
    computes: if two of a million prompts ever collided (one chance in ten thousand), a simulation would count one hit
    too many.
    """
    text = "\0".join(names).encode()
    return int.from_bytes(blake2b(salt + b"\0" + text, digest_size=8).digest(), "little") >> 2
