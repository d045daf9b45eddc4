"""Which sequence can take over which blocks: keys of blocks, leaders that still compute them, and their publication."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import takewhile

from paged.core.blocks import BlockPool
from paged.core.prompt import Key, chained_key, numbered_key
from paged.core.sequence import Sequence


class PrefixReuse:
    """Lets sequences adopt the computed blocks of others with the same beginning, and wait for those to come.

    A *leader* is the running sequence that will compute the block of a key.

    Args:
        pool: where blocks are published and looked up.
        block_size: tokens in a block.
        is_enabled: whether anything is reused at all.

    Attributes:
        num_leads_ended: counts up whenever a key loses its leader. As long as it has not changed, every sequence that
            was found to wait for a leader still waits.
    """

    def __init__(self, pool: BlockPool, block_size: int, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self._pool = pool
        self._block_size = block_size
        self._salt = _salt_of(weight_version=0)
        self._leaders: dict[Key, Sequence] = {}
        self.num_leads_ended = 0

    def match(self, sequence: Sequence) -> list[int] | None:
        """Published blocks that ``sequence`` can adopt, or None if it waits for a leader to compute the next one.

        At most ``(tokens - 1) // block_size``, so that the last token, which is sampled from, is always computed.
        """
        if not self.is_enabled:
            return []
        leaders = self._leaders
        if sequence.waits_for is not None and sequence.waits_for in leaders:
            return None
        sequence.waits_for = None
        block_size = self._block_size
        self._extend_keys(sequence, sequence.num_committed // block_size)
        if sequence.request.params.prompt_logprobs is not None:
            return []
        lookup = self._pool.lookup
        adopted: list[int] = []
        limit = (sequence.num_committed - 1) // block_size
        for index in range(limit):
            key = sequence.keys[index]
            block = lookup(key)
            if block is None:
                if key in leaders:
                    # Wait for the last of the blocks to come, so that the way there is not walked at every step.
                    awaited = list(takewhile(leaders.__contains__, sequence.keys[index:limit]))
                    sequence.waits_for = awaited[-1]
                    return None
                break
            adopted.append(block)
        return adopted

    def lead(self, sequence: Sequence) -> None:
        """Let others wait for the blocks that ``sequence``, just admitted, has yet to compute."""
        if self.is_enabled:
            sequence.publish_at = (sequence.num_published + 1) * self._block_size
            leaders = self._leaders
            keys = sequence.keys[sequence.num_published :]
            if leaders.keys().isdisjoint(keys):
                leaders.update(dict.fromkeys(keys, sequence))
            else:
                for key in keys:
                    leaders.setdefault(key, sequence)

    def publish(self, sequence: Sequence, num_computed: int) -> None:
        """Offer the blocks of ``sequence`` that its leading ``num_computed`` tokens, all committed, have filled."""
        full = num_computed // self._block_size
        if len(sequence.keys) < full:
            self._extend_keys(sequence, full)
        first = sequence.num_published
        filled = sequence.keys[first:full]
        self._pool.publish(sequence.blocks[first:full], filled)
        self._end_leads(sequence, filled)
        sequence.num_published = full
        sequence.publish_at = (full + 1) * self._block_size

    def leave(self, sequence: Sequence) -> None:
        """Forget ``sequence`` as a leader: it gives up its blocks."""
        self._end_leads(sequence, sequence.keys[sequence.num_published :])

    def _end_leads(self, sequence: Sequence, keys: Seq[Key]) -> None:
        """Take from ``sequence`` those of ``keys`` that it leads: their blocks are there, or will not come from it."""
        leaders = self._leaders
        if leaders:
            for key in keys:
                if leaders.get(key) is sequence:
                    del leaders[key]
                    self.num_leads_ended += 1

    def forget(self, weight_version: int) -> None:
        """Let nothing computed so far be found again; keys made from now on are those of other weights.

        The caller takes from the sequences the keys that they have.
        """
        self._salt = _salt_of(weight_version)
        self._pool.forget()

    def check(self, running: list[Sequence]) -> None:
        """Prove that every leader runs."""
        assert all(leader in running for leader in self._leaders.values()), "a leader does not run"

    def _extend_keys(self, sequence: Sequence, num_keys: int) -> None:
        """Bring ``sequence.keys`` up to those of its first ``num_keys`` blocks, full of committed tokens.

        Beyond a prompt whose tokens are known the keys are digests of content, if the output's tokens are known too;
        else they are numbers that the request, the sample and the block's place give.
        """
        keys, block_size = sequence.keys, self._block_size
        if not keys:
            keys.extend(sequence.request.prompt.block_keys(block_size, self._salt))
        if len(keys) >= num_keys:
            return
        num_prompt, token_ids, output_ids = sequence.num_prompt, sequence.request.prompt.token_ids, sequence.output_ids
        if token_ids is None or num_prompt + len(output_ids) < num_keys * block_size:
            last = keys[-1] if len(keys) > num_prompt // block_size else None
            if isinstance(last, int):
                first = last + 1
            else:
                names = ("output", sequence.request.id, str(sequence.request.sample), str(block_size))
                first = numbered_key(self._salt, *names) + len(keys)
            keys.extend(range(first, first + num_keys - len(keys)))
            return
        parent = keys[-1] if keys else self._salt
        for start in range(len(keys) * block_size, num_keys * block_size, block_size):
            end = start + block_size
            if start >= num_prompt:
                block = output_ids[start - num_prompt : end - num_prompt]
            else:
                block = [*token_ids[start:end], *output_ids[: max(0, end - num_prompt)]]
            assert isinstance(parent, bytes)
            parent = chained_key(parent, block)
            keys.append(parent)


def _salt_of(weight_version: int) -> bytes:
    return f"weights:{weight_version}".encode()
