"""How rank 0 gathers the other ranks of an engine, and builds its own parts together with them."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence

import torch

from paged.consensus import Leader
from paged.engine_parts import Assignment, Blueprint, Parts, build_parts, warm_up
from paged.kernels.peer_memory import SIZES, SIZES_IN_WORDS
from paged.other_ranks import RanksOfLeader
from paged.runner.launched import Launch
from paged.runner.processors import num_processors
from paged.runner.ranks import START_S, Ranks, card_id, make_group, serve_store

_LOG = logging.getLogger(__name__)


def build_with_ranks(blueprint: Blueprint, device: torch.device, launch: Launch | None) -> tuple[Parts, Leader]:
    """Rank 0's parts, and its lead of the other ranks, which have built theirs and wait for orders.

    Args:
        blueprint: what to build; its ``tp`` is above 1.
        device: the kind of device.
        launch: the processes that were started together, where this one is rank 0; None starts them.

    Raises:
        ValueError: one sentence naming the field or file that does not suit, on whatever rank.
        TPError: a rank did not come, or was lost.
    """
    config = blueprint.config
    size, limit_s = config.tp, config.tp_timeout_s
    devices = _devices(device, size, launch)
    num_local = size if launch is None else launch.num_local
    is_one_host = num_local == size
    ranks = Ranks.start(size) if launch is None else launch.gather(max(limit_s, START_S))
    leader: Leader | None = None
    try:
        ranks.hosts = ranks.hear_start(limit_s)
        store = serve_store(ranks.host, START_S)
        num_threads = _num_threads(num_local)
        assignments = [
            Assignment(
                rank=rank,
                size=size,
                blueprint=blueprint,
                device=str(devices[rank]),
                is_one_host=is_one_host,
                host=ranks.host,
                port=store.port,
                num_threads=num_threads,
            )
            for rank in range(1, size)
        ]
        ranks.tell_each(assignments, limit_s)
        # Who can't make sense of its assignment says so now: whoever waits for the group does not hear it.
        num_sharing = _num_sharing([card_id(devices[0]), *ranks.hear_start(limit_s)])
        ranks.tell(num_sharing, limit_s)
        # Stopped processes of another launcher's can't be ended, so that the exchange itself needs the limit.
        group = make_group(
            0,
            size,
            store,
            devices[0],
            ranks.host,
            None if launch is None else limit_s,
            num_sharing=num_sharing,
            is_one_host=is_one_host,
        )
        leader = Leader(ranks, group, devices[0], is_verifying=config.verify, limit_s=limit_s, num_threads=num_threads)
        parts = build_parts(blueprint, devices[0], RanksOfLeader(leader, group, num_sharing))
        leader.runner = parts.runner
        leader.check_equal("numerics_id", parts.numerics_id)
        with leader.computing():
            warm_up(parts)
        return parts, leader
    except BaseException as error:
        if leader is None:
            failure = ranks.cause(error, limit_s) or error
            ranks.end()
        else:
            failure = leader.fail(error)
        if failure is error:
            raise
        raise failure from error


def _devices(device: torch.device, size: int, launch: Launch | None) -> list[torch.device]:
    """The device of each rank, as it sees the cards: the current one for rank 0, and those after it, in turn.

    A launcher may show each process a card of its own, which has the same number in all of them.
    """
    if device.type == "cpu":
        return [device] * size
    num_cards = torch.cuda.device_count()
    if launch is None and num_cards < size and size not in SIZES:
        raise ValueError(
            f"tp must be at most the number of GPUs here, {num_cards} (or {SIZES_IN_WORDS}: ranks then "
            f"share GPUs), not {size}; or use device=cpu"
        )
    first, num_local = (torch.cuda.current_device(), size) if launch is None else (0, launch.num_local)
    return [torch.device("cuda", (first + rank % num_local) % num_cards) for rank in range(size)]


def _num_sharing(cards: Sequence[str | None]) -> int:
    """Most ranks that have one card; says it where that is more than one."""
    found = max(Counter(card for card in cards if card is not None).values(), default=1)
    if found > 1:
        _LOG.warning(
            "%d ranks share the GPUs, up to %d each: they take turns, which costs milliseconds an exchange",
            len(cards),
            found,
        )
    return found


def _num_threads(num_local: int) -> int:
    """Threads of torch for each of the ranks on this machine, unless the environment says how many."""
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    return min(torch.get_num_threads(), max(1, num_processors() // num_local))
