"""What runs in the processes of ranks 1, 2, ...: build this rank's parts as rank 0 says, then follow it to the end."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Final

from paged.runner.launched import Launch
from paged.runner.links import Failure, Link, LinkClosedError, wait_for_end

if TYPE_CHECKING:
    from paged.engine_parts import Assignment

# Seconds between signs of life while this process imports, loads and allocates.
BEAT_S: Final = 0.5


def main() -> None:
    """Serve rank 0, which started this process and passed it one end of a link by its number."""
    _leave_signals_to_rank_0()
    code = serve(Link(socket.socket(fileno=int(sys.argv[1]))))
    # What it said goes to a temporary file; if that cannot be written, it is lost, and nothing else.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # The ordinary end takes torch a while, and there is nothing left to tidy.
    os._exit(code)


def follow_launch(launch: Launch) -> None:
    """Serve rank 0 of processes that were started together, one engine after the other.

    Whether all went well is for rank 0 to say: whoever has started the processes would end it for another's failure.
    """
    # While there is no engine, whoever has started the processes may end this one.
    end = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while (link := launch.join()) is not None:
        _leave_signals_to_rank_0()
        serve(link)
        signal.signal(signal.SIGTERM, end)


def serve(link: Link) -> int:
    """Be a rank of one engine; the exit code: 1 if it did not end well, which rank 0 is told."""
    # The thread sees that rank 0 is gone wherever this one waits: in an exchange, or for a card.
    is_over = threading.Event()
    threading.Thread(target=_end_with, args=(link, is_over), daemon=True).start()
    try:
        _serve(link)
    except LinkClosedError:
        return 1
    except BaseException as error:
        with contextlib.suppress(OSError):
            link.send(Failure.of(error), BEAT_S)
        return 1
    finally:
        is_over.set()
        link.close()
    return 0


def _serve(link: Link) -> None:
    with contextlib.ExitStack() as stack:
        with link.beating(BEAT_S):
            import torch

            from paged.consensus import Follower
            from paged.engine_parts import build_parts, warm_up
            from paged.other_ranks import RanksOfFollower
            from paged.runner.ranks import START_S, card_id, make_group, reach_store

            link.send(platform.node())
            assignment: Assignment = link.receive()
            torch.set_num_threads(assignment.num_threads)
            config = assignment.blueprint.config
            device = torch.device(assignment.device)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            store = reach_store(assignment.host, assignment.port, START_S)
            link.send(card_id(device))
            num_sharing: int = link.receive()
            # Rank 0 watches over exchanges; a limit here would count the time in which it is stopped.
            group = make_group(
                assignment.rank,
                assignment.size,
                store,
                device,
                assignment.host,
                None,
                num_sharing=num_sharing,
                is_one_host=assignment.is_one_host,
            )
            stack.enter_context(group)
            parts = build_parts(assignment.blueprint, device, RanksOfFollower(link, group, num_sharing))
            link.send(parts.numerics_id)
            link.receive()
        warm_up(parts)
        Follower(link, parts.scheduler, parts.runner, limit_s=config.tp_timeout_s).serve()


def _end_with(link: Link, is_over: threading.Event) -> None:
    wait_for_end(link)
    if not is_over.is_set():
        os._exit(1)


def _leave_signals_to_rank_0() -> None:
    """Rank 0 hears Ctrl-C and requests to end, finishes its step and lets the others go."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
