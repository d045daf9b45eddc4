"""Which cache blocks are free, referenced, or kept for reuse; it knows integers and keys, no sequences."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from paged.core.prompt import Key


class BlockPool:
    """Reference-counted blocks ``0 .. num_blocks - 1`` with keyed reuse.

    A block is in exactly one of three places: *free* (no reference, no key), *cached* (no reference, but its
    content can be found by key), or *referenced* (held by one or more block tables). New blocks come from the
    free ones, last freed first, then from the cached ones, least recently used first, which lose their key.
    """

    __slots__ = (
        "_block_by_key",
        "_cached",
        "_free",
        "_key_by_block",
        "_num_stale",
        "num_blocks",
        "num_cached",
        "num_evictions",
        "references",
    )

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.num_cached = 0
        self.num_evictions = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        # Least recently used first. A block that is adopted stays in it as a stale entry, which is passed over later:
        # of a block's entries only the last one can be valid.
        self._cached: deque[int] = deque()
        self._num_stale = [0] * num_blocks
        self._block_by_key: dict[Key, int] = {}
        self._key_by_block: list[Key | None] = [None] * num_blocks

    @property
    def num_used(self) -> int:
        """Blocks that some table refers to."""
        return self.num_blocks - len(self._free) - self.num_cached

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those kept for reuse included."""
        return len(self._free) + self.num_cached

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, each with one reference, or none at all.

        Raises:
            RuntimeError: fewer than ``count`` are free; nothing has changed.
        """
        free = self._free
        if count == 1 and free:
            # A decode that enters a block: most allocations.
            block = free.pop()
            self.references[block] = 1
            return [block]
        if count > len(free) + self.num_cached:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free of {self.num_blocks}")
        if count <= len(free):
            first = len(free) - count
            blocks = free[first:][::-1]
            del free[first:]
        else:
            blocks = free[::-1]
            free.clear()
            self._evict(count - len(blocks), blocks)
        references = self.references
        for block in blocks:
            references[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each of ``blocks``, the last one first, so that a tail is reused before its head.

        Raises:
            RuntimeError: a block has no reference; those after it in ``blocks`` have been freed.
        """
        references, keys = self.references, self._key_by_block
        unused: list[int] = []
        try:
            for block in reversed(blocks):
                count = references[block]
                if count == 1:
                    references[block] = 0
                    unused.append(block)
                elif count:
                    references[block] = count - 1
                else:
                    raise RuntimeError(f"block {block} is freed, but nothing refers to it")
        finally:
            cached = [block for block in unused if keys[block] is not None]
            self._cached.extend(cached)
            self.num_cached += len(cached)
            if len(self._cached) > 2 * self.num_blocks:
                # Where nothing is ever evicted, nothing else would remove the stale entries.
                self._cached = deque(self._valid_cached())
                self._num_stale = [0] * self.num_blocks
            if len(cached) < len(unused):
                self._free.extend([block for block in unused if keys[block] is None])

    def adopt(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of ``blocks``, which ``lookup`` returned."""
        for block in blocks:
            if self.references[block] == 0:
                self._num_stale[block] += 1
                self.num_cached -= 1
            self.references[block] += 1

    def lookup(self, key: Key) -> int | None:
        """The block whose published content has ``key``, or None."""
        return self._block_by_key.get(key)

    def publish(self, blocks: Sequence[int], keys: Sequence[Key]) -> None:
        """Let each of ``blocks`` be found by the key at the same place, unless another one is, or it has a key."""
        references, block_by_key, key_by_block = self.references, self._block_by_key, self._key_by_block
        for block, key in zip(blocks, keys, strict=True):
            assert references[block] > 0, "only a block in use can be published"
            if key not in block_by_key and key_by_block[block] is None:
                block_by_key[key] = block
                key_by_block[block] = key

    def forget(self) -> None:
        """Take back every key: what is cached becomes free, what is referenced can no longer be found."""
        self._free.extend(self._valid_cached())
        self._cached.clear()
        self.num_cached = 0
        self._num_stale = [0] * self.num_blocks
        self._block_by_key.clear()
        self._key_by_block = [None] * self.num_blocks

    def check_writable(self, blocks: Iterable[int]) -> None:
        """Refuse to write into shared or published blocks.

        Raises:
            RuntimeError: naming the first block that has not exactly one reference, or that can be found by key.
        """
        references, keys = self.references, self._key_by_block
        for block in blocks:
            if references[block] != 1 or keys[block] is not None:
                raise RuntimeError(f"block {block} has {self.references[block]} references and must not be written")

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Prove that free + cached + referenced == total, without duplicates.

        Args:
            tables: all live block tables; the reference counts must equal what they add up to.

        Raises:
            AssertionError: saying what is inconsistent.
        """
        free, cached = set(self._free), set(self._valid_cached())
        referenced = {block for block, count in enumerate(self.references) if count > 0}
        keys = {key: block for block, key in enumerate(self._key_by_block) if key is not None}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert len(cached) == self.num_cached, "cached blocks are miscounted"
        assert not free & cached, "a block is free and cached"
        assert not referenced & (free | cached), "a referenced block is free or cached"
        assert len(free) + len(cached) + len(referenced) == self.num_blocks, "a block is lost"
        assert cached <= set(keys.values()), "a cached block has no key"
        assert not free & set(keys.values()), "a free block has a key"
        assert keys == self._block_by_key, "keys disagree"
        if tables is not None:
            counts = Counter(block for table in tables for block in table)
            assert all(self.references[block] == counts[block] for block in range(self.num_blocks)), "counts disagree"

    def _evict(self, count: int, blocks: list[int]) -> None:
        """Take ``count`` cached blocks, which lose their keys, and append them to ``blocks``."""
        cached, num_stale = self._cached, self._num_stale
        block_by_key, key_by_block = self._block_by_key, self._key_by_block
        self.num_cached -= count
        self.num_evictions += count
        take = cached.popleft
        while count:
            block = take()
            if num_stale[block]:
                num_stale[block] -= 1
            else:
                del block_by_key[key_by_block[block]]
                key_by_block[block] = None
                blocks.append(block)
                count -= 1

    def _valid_cached(self) -> list[int]:
        """Cached blocks, least recently used first."""
        num_stale = self._num_stale[:]
        valid: list[int] = []
        for block in self._cached:
            if num_stale[block]:
                num_stale[block] -= 1
            else:
                valid.append(block)
        return valid
