"""Which cache blocks are free, referenced, or kept for reuse; it knows integers and keys, no sequences."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference-counted blocks ``0 .. num_blocks - 1`` with keyed reuse.

    A block is in exactly one of three places: *free* (no reference, no key), *cached* (no reference, but its
    content can be found by key), or *referenced* (held by one or more block tables). New blocks come from the
    free ones, last freed first, then from the cached ones, least recently used first, which lose their key.
    """

    __slots__ = ("_block_by_key", "_cached", "_free", "_key_by_block", "num_blocks", "num_evictions", "references")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.num_evictions = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_by_key: dict[bytes, int] = {}
        self._key_by_block: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those kept for reuse included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that are kept for reuse."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, each with one reference, or none at all.

        Raises:
            RuntimeError: fewer than ``count`` are free; nothing has changed.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free of {self.num_blocks}")
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self.references[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each of ``blocks``, the last one first, so that a tail is reused before its head.

        Raises:
            RuntimeError: a block has no reference; those after it in ``blocks`` have been freed.
        """
        references = self.references
        for block in reversed(blocks):
            if references[block] == 0:
                raise RuntimeError(f"block {block} is freed, but nothing refers to it")
            references[block] -= 1
            if references[block] == 0:
                if block in self._key_by_block:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def adopt(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of ``blocks``, which ``lookup`` returned."""
        for block in blocks:
            if self.references[block] == 0:
                del self._cached[block]
            self.references[block] += 1

    def lookup(self, key: bytes) -> int | None:
        """The block whose published content has ``key``, or None."""
        return self._block_by_key.get(key)

    def publish(self, block: int, key: bytes) -> None:
        """Let ``block`` be found by ``key``; if another block already is, nothing changes."""
        assert self.references[block] > 0, "only a block in use can be published"
        if key in self._block_by_key or block in self._key_by_block:
            return
        self._block_by_key[key] = block
        self._key_by_block[block] = key

    def forget(self) -> None:
        """Take back every key: what is cached becomes free, what is referenced can no longer be found."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._block_by_key.clear()
        self._key_by_block.clear()

    def check_writable(self, blocks: Iterable[int]) -> None:
        """Refuse to write into shared or published blocks.

        Raises:
            RuntimeError: naming the first block that has not exactly one reference, or that can be found by key.
        """
        for block in blocks:
            if self.references[block] != 1 or block in self._key_by_block:
                raise RuntimeError(f"block {block} has {self.references[block]} references and must not be written")

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Prove that free + cached + referenced == total, without duplicates.

        Args:
            tables: all live block tables; the reference counts must equal what they add up to.

        Raises:
            AssertionError: saying what is inconsistent.
        """
        free, cached = set(self._free), set(self._cached)
        referenced = {block for block, count in enumerate(self.references) if count > 0}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & cached, "a block is free and cached"
        assert not referenced & (free | cached), "a referenced block is free or cached"
        assert len(free) + len(cached) + len(referenced) == self.num_blocks, "a block is lost"
        assert cached <= self._key_by_block.keys(), "a cached block has no key"
        assert not free & self._key_by_block.keys(), "a free block has a key"
        assert {key: block for block, key in self._key_by_block.items()} == self._block_by_key, "keys disagree"
        if tables is not None:
            counts = Counter(block for table in tables for block in table)
            assert all(self.references[block] == counts[block] for block in range(self.num_blocks)), "counts disagree"

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._cached.popitem(last=False)
        del self._block_by_key[self._key_by_block.pop(block)]
        self.num_evictions += 1
        return block
