"""All kernels are asked for before the first is launched: by fakes without a card, by a listener with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paged.runner import kernel_builds

pytest.importorskip("triton")
REPOSITORY = Path(__file__).resolve().parents[2]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands for a card where there is none")
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_start_and_steps_ask_for_no_kernel_that_was_not_built_first(num_ranks: int) -> None:
    """A build in a running engine stalls it for seconds; so did one row alone, other limits and wider tables once."""
    done = run_python("-W", "ignore", "-m", "tests.kernel_asks", str(num_ranks))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["late"] == []
    built = found["built"]
    # Nothing in which they differ but what is built in: types of logits, lengths of lists, with and without limits.
    assert built.count("sampling_cut_triton.cut_kernel") == 7
    assert built.count("sampling_cut_triton.bracket_kernel") == 2
    assert built.count("attention_hopper_decode._kernel") == built.count("attention_hopper._kernel") == 1


@pytest.mark.parametrize(
    ("num_ranks", "num_sharing", "num_cards", "num_cores", "expected"),
    [(1, 1, 1, 4, 4), (1, 1, 8, 64, 16), (4, 1, 4, 32, 8), (4, 2, 2, 32, 8), (8, 1, 2, 32, 16), (4, 1, 4, 2, 1)],
)
def test_ranks_of_a_machine_divide_its_processors(
    num_ranks: int, num_sharing: int, num_cards: int, num_cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_cards)
    monkeypatch.setattr(kernel_builds, "num_processors", lambda: num_cores)
    assert kernel_builds._num_threads(num_ranks, num_sharing) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_a_listener_hears_of_no_build_behind_the_builds() -> None:
    """Neither in a cold start nor in the first draws, or the script fails; as it does if a warm one draws otherwise."""
    done = run_python("benchmarks/start_h200.py", "--model", "tiny", "--set", "max_seq_len=256", "max_num_seqs=20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| builds |" in done.stdout
