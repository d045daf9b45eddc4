"""Measures what loading a checkpoint takes of a process's own memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_memory_counts = pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="needs Linux's count of anonymous memory"
)

_PROGRAM = """
import sys, threading, time, torch
from paged.kernels.collectives import SINGLE, RankGroup
from paged.kernels.numerics import Numerics
from paged.model.checkpoint import load_decoder
def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))
peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)
folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
# Loading exchanges nothing, so the other ranks need not be there.
group = SINGLE if size == 1 else RankGroup(rank, size, object())
before = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
decoder = load_decoder(folder, numerics=Numerics(), group=group, dtype=torch.bfloat16)
done = True
watcher.join()
print(peak - before, sum(p.numel() * p.element_size() for p in decoder.parameters()))
"""


def memory_of_loading(folder: Path, rank: int = 0, size: int = 1) -> tuple[int, int]:
    """In a process of its own: how far anonymous memory rises while a rank loads in bf16, and its parameters' bytes."""
    command = [sys.executable, "-c", _PROGRAM, str(folder), str(rank), str(size)]
    growth, model_bytes = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(growth), int(model_bytes)
