"""Checks that kernels are built without being launched where that is asked for, and launched everywhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from paged.kernels.launch import build, launch

CPU = torch.device("cpu")
X, Y = torch.zeros(2), torch.zeros(2, dtype=torch.int64)


@dataclass(eq=False)
class Kernel:
    """Notes what is asked of it."""

    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.asked.append(("launch", grid, args, options["SIZE"]))

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.asked.append(("build", grid, args, options["SIZE"]))


def test_a_kernel_is_launched_unless_it_is_to_be_built() -> None:
    kernel = Kernel()

    def ask() -> None:
        launch(kernel, (2, 3), X, 5, on=X, SIZE=4)

    ask()
    build(ask, CPU, 2)
    ask()
    asked = ((2, 3), (X, 5), 4)
    assert kernel.asked == [("launch", *asked), ("build", *asked), ("launch", *asked)]


def test_what_was_asked_for_is_not_asked_for_again_but_what_is_unlike_is() -> None:
    kernel = Kernel()
    unlike = [((X, 5), 4), ((Y, 5), 4), ((X, 6), 4), ((X, 5), 8), ((X[1:], 5), 4)]

    def ask() -> None:
        for args, size in unlike + unlike:
            launch(kernel, (1,), *args, on=X, SIZE=size)

    build(ask, CPU, 2)
    assert len(kernel.asked) == len(unlike)


def test_an_error_ends_building() -> None:
    kernel = Kernel()

    def fail() -> None:
        raise KeyError("x")

    for _ in range(2):
        with pytest.raises(KeyError):
            build(fail, CPU, 1)
    launch(kernel, (1,), on=X, SIZE=1)
    assert kernel.asked == [("launch", (1,), (), 1)]


def test_other_threads_go_on_launching() -> None:
    kernel = Kernel()

    def work() -> None:
        thread = threading.Thread(target=lambda: launch(kernel, (1,), on=X, SIZE=1))
        thread.start()
        thread.join()

    build(work, CPU, 1)
    assert [kind for kind, *_ in kernel.asked] == ["launch"]
