"""Checks the block pool against books kept by hand, after every one of thousands of random events."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.core.blocks import BlockPool


class Books:
    """A pool beside a naive model of it: plain lists, recomputed from the live tables where possible.

    ``apply`` turns any three numbers into one event, so that both a seeded generator and hypothesis can drive it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.num_blocks = num_blocks
        self.tables: list[list[int]] = []
        self.free = list(range(num_blocks))[::-1]  # popped from the end
        self.cached: list[int] = []  # popped from the front
        self.key_of: dict[int, bytes] = {}
        self.num_keys = 0
        self.met: Counter[str] = Counter()

    @property
    def counts(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table)

    def apply(self, kind: int, a: int, b: int) -> None:
        events = (
            self.allocate, self.allocate, self.grow, self.give_back, self.give_back, self.adopt, self.adopt,
            self.publish, self.publish, self.misuse,
        )  # fmt: skip
        events[kind % len(events)](a, b)
        self.compare()

    def take(self, count: int) -> list[int]:
        """The blocks that an allocation must give: unkeyed ones last in first out, then the stalest keyed ones."""
        taken = []
        for _ in range(count):
            if self.free:
                taken.append(self.free.pop())
            else:
                taken.append(self.cached.pop(0))
                del self.key_of[taken[-1]]
                self.met["eviction"] += 1
        return taken

    def allocate(self, a: int, _: int) -> None:
        count = a % 7
        if count > len(self.free) + len(self.cached):
            with pytest.raises(RuntimeError, match=f"{count} blocks asked for"):
                self.pool.allocate(count)
            self.met["out of memory"] += 1
            return
        blocks = self.pool.allocate(count)
        assert blocks == self.take(count)
        self.tables.append(blocks)

    def grow(self, a: int, _: int) -> None:
        if self.tables and (self.free or self.cached):
            blocks = self.pool.allocate(1)
            assert blocks == self.take(1)
            self.tables[a % len(self.tables)] += blocks

    def give_back(self, a: int, _: int) -> None:
        if not self.tables:
            return
        table = self.tables.pop(a % len(self.tables))
        counts = self.counts
        self.pool.free(table)
        for block in reversed(table):
            if counts[block] == 0:
                (self.cached if block in self.key_of else self.free).append(block)

    def adopt(self, a: int, b: int) -> None:
        """A new table begins with some leading blocks of another table, or with blocks that only the cache holds."""
        if b % 3 == 0:
            wanted = [block for block in self.cached if block % 2 == a % 2]
        else:
            wanted = self.tables[a % len(self.tables)][: 1 + b % 4] if self.tables else []
        wanted = [block for block in wanted if block in self.key_of]
        found = [self.pool.lookup(self.key_of[block]) for block in wanted]
        assert found == wanted
        counts = self.counts
        self.pool.adopt(wanted)
        for block in wanted:
            if counts[block] == 0:
                self.cached.remove(block)
                self.met["revival"] += 1
            else:
                self.met["shared adoption"] += 1
        if wanted:
            self.tables.append(wanted)

    def publish(self, a: int, b: int) -> None:
        if not self.tables or not (table := self.tables[a % len(self.tables)]):
            return
        block = table[b % len(table)]
        if b % 5 == 0 and self.key_of:  # the content is there already: nothing changes
            key = sorted(self.key_of.values())[a % len(self.key_of)]
            self.met["published twice"] += 1
        else:
            key = self.num_keys.to_bytes(16, "big")
            self.num_keys += 1
        self.pool.publish([block], [key])
        if block not in self.key_of and key not in self.key_of.values():
            self.key_of[block] = key

    def misuse(self, a: int, b: int) -> None:
        """Events that must be refused and change nothing."""
        block = a % self.num_blocks
        if self.counts[block] == 0:
            with pytest.raises(RuntimeError, match=f"block {block} is freed"):
                self.pool.free([block])
            self.met["double free"] += 1
        if self.counts[block] == 1 and block not in self.key_of:
            self.pool.check_writable([block])
            self.met["writable"] += 1
        else:
            with pytest.raises(RuntimeError, match=f"block {block} has .* must not be written"):
                self.pool.check_writable([block])
            self.met["not writable"] += 1

    def compare(self) -> None:
        pool, counts = self.pool, self.counts
        pool.check(self.tables)
        assert pool.references == [counts[block] for block in range(self.num_blocks)]
        assert pool.num_free == len(self.free) + len(self.cached)
        assert pool.num_cached == len(self.cached)
        assert pool.num_evictions == self.met["eviction"]
        assert len(counts) + len(self.free) + len(self.cached) == self.num_blocks
        block_of = {key: block for block, key in self.key_of.items()}
        for number in range(max(0, self.num_keys - 60), self.num_keys):
            key = number.to_bytes(16, "big")
            assert pool.lookup(key) == block_of.get(key)


@pytest.mark.parametrize("num_blocks", [7, 24])
def test_ten_thousand_random_events_keep_the_books(num_blocks: int) -> None:
    rng = random.Random(num_blocks)
    books = Books(num_blocks)
    for _ in range(10_000):
        books.apply(rng.randrange(10), rng.randrange(1000), rng.randrange(1000))
    for what in ("out of memory", "shared adoption", "revival", "eviction", "double free", "not writable"):
        assert books.met[what] > 100, f"{what}: only {books.met[what]}"
    assert min(books.met["writable"], books.met["published twice"]) > 50
    while books.tables:
        books.give_back(0, 0)
        books.compare()
    assert books.pool.num_free == num_blocks


@given(
    num_blocks=st.integers(1, 12),
    events=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40), st.integers(0, 40)), max_size=60),
)
@settings(max_examples=150, deadline=None)
def test_any_events_keep_the_books(num_blocks: int, events: list[tuple[int, int, int]]) -> None:
    books = Books(num_blocks)
    for event in events:
        books.apply(*event)


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1, not 0"):
        BlockPool(0)


def test_blocks_without_a_key_are_reused_last_freed_first() -> None:
    pool = BlockPool(6)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.free([0, 1])  # the tail, 1, is freed first
    pool.free([2])
    assert pool.allocate(4) == [2, 0, 1, 4]


def test_keyed_blocks_are_reused_after_the_others_and_least_recently_used_first() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.publish([*first, *second], [b"key %d" % block for block in (*first, *second)])
    pool.free(first)
    pool.free(second)
    assert pool.num_cached == 4
    pool.adopt(first)  # used again: now the most recently used
    pool.free(first)
    assert pool.allocate(5) == [4, 3, 2, 1, 0], "unkeyed, then by age of use, tails before heads"
    assert pool.num_evictions == 4


def test_eviction_drops_the_key() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.publish(blocks, [b"a", b"b"])
    pool.free(blocks)
    assert pool.allocate(1) == [1]
    assert pool.lookup(b"b") is None
    assert pool.lookup(b"a") == 0
    pool.publish([1], [b"c"])
    assert pool.lookup(b"c") == 1
    pool.check([[1]])


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    held = pool.allocate(3)
    pool.publish([held[2]], [b"kept"])
    pool.free(held[2:])
    with pytest.raises(RuntimeError, match="3 blocks asked for, 2 free of 4"):
        pool.allocate(3)
    pool.check([held[:2]])
    assert pool.num_free == 2
    assert pool.lookup(b"kept") == held[2], "a failed allocation evicts nothing"
    assert pool.allocate(0) == []


def test_freeing_at_count_zero_raises() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.free(blocks)
    for block in range(3):
        with pytest.raises(RuntimeError, match=f"block {block} is freed, but nothing refers to it"):
            pool.free([block])
    pool.check([])
    twice = pool.allocate(1)
    with pytest.raises(RuntimeError, match="nothing refers to it"):
        pool.free(twice * 2)


def test_a_shared_block_survives_one_owner() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.publish([blocks[0]], [b"k"])
    pool.adopt(blocks)
    assert pool.references[0] == 2
    pool.free(blocks)
    assert pool.references[0] == 1
    assert pool.num_free == 1
    pool.free(blocks)
    assert pool.num_free == 2
    assert pool.num_cached == 1


def test_only_a_private_block_may_be_written() -> None:
    pool = BlockPool(4)
    private, shared, published = pool.allocate(3)
    pool.adopt([shared])
    pool.publish([published], [b"k"])
    pool.check_writable([private])
    for block in (shared, published, 3):
        with pytest.raises(RuntimeError, match=f"block {block} has"):
            pool.check_writable([private, block])


def test_only_a_block_in_use_can_be_published() -> None:
    with pytest.raises(AssertionError, match="in use"):
        BlockPool(1).publish([0], [b"k"])


def test_the_first_block_published_under_a_key_keeps_it() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    pool.publish([0], [b"k"])
    pool.publish([1], [b"k"])
    pool.publish([0], [b"other"])
    assert pool.lookup(b"k") == 0
    assert pool.lookup(b"other") is None
    pool.free([1])
    assert pool.num_cached == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "twice"),
        (lambda pool: pool._free.pop(), "lost"),
        (lambda pool: pool._free.append(0), "free"),
        (lambda pool: pool._cached.__setitem__(0, pool._free[0]), "free and cached"),
        (lambda pool: pool._cached.append(pool._free[0]), "miscounted"),
        (lambda pool: pool._key_by_block.__setitem__(1, None), "cached block has no key"),
        (lambda pool: pool._block_by_key.pop(b"k"), "keys disagree"),
        (lambda pool: pool._key_by_block.__setitem__(pool._free[0], b"z"), "a free block has a key"),
        (lambda pool: pool.references.__setitem__(0, 2), "counts disagree"),
    ],
)
def test_check_finds_damage(damage, message: str) -> None:  # type: ignore[no-untyped-def]
    pool = BlockPool(4)
    table = pool.allocate(2)
    pool.publish([1], [b"k"])
    pool.free(table[1:])
    pool.check([[0]])
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check([[0]])


def test_entries_of_adopted_blocks_do_not_pile_up() -> None:
    """A prefix that is adopted and freed again and again, while nothing is evicted, once left an entry each time."""
    pool = BlockPool(12)
    table = pool.allocate(10)
    pool.publish(table, [b"%d" % block for block in table])
    pool.free(table)
    for _ in range(1000):
        pool.adopt(table)
        pool.free(table)
        pool.check([])
        assert len(pool._cached) <= 2 * pool.num_blocks + len(table)
    # The order of reuse is untouched: free blocks first, then the least recently used, a table's tail before its head.
    assert pool.allocate(12)[2:] == table[::-1]
