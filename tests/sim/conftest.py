"""A simulated run small enough to do in one's head."""

from __future__ import annotations

import pytest

from paged.core.metrics import Counters
from paged.sim.record import SimRecord


@pytest.fixture
def record() -> SimRecord:
    """Ten blocks of 4: A and B overlap, nothing happens from 4 to 6 s, C preempts D; E was refused.

    A step takes 1 s, but for two slower ones.
    """
    made = SimRecord(num_blocks=10, block_size=4)
    a = made.add_request(("a", 0), 0.0, prompt_tokens=5, max_tokens=9)
    b = made.add_request(("b", 0), 0.5, prompt_tokens=4, max_tokens=1)
    c = made.add_request(("c", 0), 6.0, prompt_tokens=3, max_tokens=9)
    d = made.add_request(("d", 1), 6.0, prompt_tokens=4, max_tokens=2)
    e = made.add_request(("e, the long", 0), 6.0, prompt_tokens=99, max_tokens=9)

    made.admit(a, 0.0)
    made.append_step(0.0, 1.0, 1, 5, 1, 0, 2, 3, 0)
    made.sample(a, 1.0)
    made.admit(b, 1.0)
    made.append_step(1.0, 2.0, 2, 5, 2, 0, 3, 2, 0)
    made.sample(b, 2.0)
    made.finish(b, 2.0, "length", output_tokens=1, cached_tokens=0)
    made.append_step(2.0, 4.0, 1, 1, 1, 0, 2, 1, 0)
    made.finish(a, 4.0, "stop", output_tokens=3, cached_tokens=0)
    made.refuse(e, "it can never fit")
    made.admit(c, 6.0)
    made.admit(d, 6.0)
    made.append_step(6.0, 7.0, 2, 7, 2, 0, 2, 1, 0)
    made.sample(c, 7.0)
    made.sample(d, 7.0)
    made.preempt(d, 7.0)
    made.append_step(7.0, 8.0, 1, 1, 1, 1, 1, 0, 1)
    made.finish(c, 8.0, "stop", output_tokens=2, cached_tokens=0)
    made.admit(d, 8.0)
    made.append_step(8.0, 9.5, 1, 5, 1, 0, 2, 3, 0)
    made.sample(d, 9.5)
    made.finish(d, 9.5, "length", output_tokens=2, cached_tokens=0, num_preemptions=1)
    made.counters = Counters(
        num_steps=6,
        num_added=4,
        num_finished=4,
        num_preemptions=1,
        forward_tokens=24,
        recomputed_tokens=4,
        minimal_forward_tokens=20,
        prompt_tokens=16,
        output_tokens=8,
        peak_blocks=3,
    )
    made.wall_s = 0.5
    return made
