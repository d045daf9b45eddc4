"""Checks the links between processes: messages arrive whole, time limits are kept, and the end is noticed."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paged.runner.links import Failure, Link, LinkClosedError, wait_for_end
from paged.runner.shared_weights import shared_weights

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    left, right = (Link(each) for each in socket.socketpair())
    with left, right:
        yield left, right


def test_messages_arrive_in_order_and_whole(ends: tuple[Link, Link]) -> None:
    left, right = ends
    large = b"x" * 30_000_000
    thread = threading.Thread(target=lambda: [left.send(message) for message in (1, large, {"a": [2.5, None]})])
    thread.start()
    assert [right.receive(10) for _ in range(3)] == [1, large, {"a": [2.5, None]}]
    thread.join()
    right.send("back")
    assert left.receive(1) == "back"


def test_limits_are_kept_in_both_directions(ends: tuple[Link, Link]) -> None:
    left, right = ends
    start_s = time.monotonic()
    with pytest.raises(TimeoutError):
        left.receive(0.2)
    with pytest.raises(TimeoutError):
        left.send(b"x" * 30_000_000, 0.2)
    assert 0.4 <= time.monotonic() - start_s < 2
    assert right.is_quiet(0.0) is False


def test_the_end_is_noticed_at_once_after_what_was_sent(ends: tuple[Link, Link]) -> None:
    left, right = ends
    left.send("last words")
    left.close()
    assert right.receive(5) == "last words"
    start_s = time.monotonic()
    with pytest.raises(LinkClosedError):
        right.receive(5)
    with pytest.raises(LinkClosedError):
        right.send("anybody?", 5)
    assert time.monotonic() - start_s < 1
    with pytest.raises(LinkClosedError):
        left.receive(5)


def test_a_busy_process_is_not_taken_for_a_dead_one(ends: tuple[Link, Link]) -> None:
    left, right = ends

    def work() -> None:
        with right.beating(0.05):
            time.sleep(0.6)
        right.send("done")

    thread = threading.Thread(target=work)
    thread.start()
    assert left.receive(0.3) == "done"
    thread.join()
    with pytest.raises(TimeoutError):
        left.receive(0.1)


def test_a_thread_sees_the_end_and_takes_nothing_away(ends: tuple[Link, Link]) -> None:
    left, right = ends
    seen = threading.Event()
    thread = threading.Thread(target=lambda: (wait_for_end(right), seen.set()))
    thread.start()
    left.send("message")
    assert not seen.wait(0.1)
    left.close()
    assert seen.wait(2)
    thread.join()
    assert right.receive(1) == "message"


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    """Ctrl-Z and later on: the others are not blamed for it."""
    program = (
        "import socket, time\n"
        "from paged.runner.links import Link\n"
        "left, right = socket.socketpair()\n"
        "print('ready', flush=True)\n"
        "start = time.monotonic()\n"
        "try:\n    Link(left).receive(2.5)\n"
        "except TimeoutError:\n    print(time.monotonic() - start)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)
    waited_s = float(process.stdout.read())
    assert process.wait() == 0
    assert waited_s > 3 + 2.5 - 1.1


def test_a_failure_tells_a_mistake_of_the_users_from_others() -> None:
    assert Failure.of(ValueError("tp must be 1\n  not 2")) == Failure("ValueError", "tp must be 1\n  not 2", True)
    assert Failure.of(RuntimeError("first\nsecond")) == Failure("RuntimeError", "first", False)


OPEN = """
import pickle, sys
weights = pickle.load(sys.stdin.buffer).open()
print([(name, None if t is None else (str(t.dtype), t.flatten().tolist())) for name, t in weights.items()])
"""


def test_shared_weights_are_mapped_by_other_processes() -> None:
    import pickle

    whole = torch.arange(12, dtype=torch.float32).view(3, 4)
    weights = {
        "a": whole[:, 1:3],
        "b": torch.tensor([1.5, -2], dtype=torch.bfloat16),
        "same": whole,
        "again": whole,
        "empty": torch.empty(0, 3),
        "none": None,
        "meta": torch.empty(2, device="meta"),
    }
    with shared_weights(weights) as shared:  # type: ignore[arg-type]
        done = subprocess.run(
            [sys.executable, "-c", OPEN], input=pickle.dumps(shared), cwd=ROOT, capture_output=True, check=True
        )
        path = shared.path
    read = dict(eval(done.stdout))
    assert read["a"] == ("torch.float32", [1.0, 2.0, 5.0, 6.0, 9.0, 10.0])
    assert read["b"] == ("torch.bfloat16", [1.5, -2.0])
    assert read["same"] == read["again"] == ("torch.float32", [float(i) for i in range(12)])
    assert read["empty"] == ("torch.float32", [])
    assert read["none"] is read["meta"] is None
    assert not Path(path).exists()
