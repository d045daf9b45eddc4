"""Launches, and builds of what would be launched: side by side, each once, and nothing runs meanwhile."""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime._async_compile import active_mode

from paged.kernels import launch as launching
from paged.kernels.launch import build, launch

CPU = torch.device("cpu")


class FakeKernel:
    """A kernel that notes what becomes of it; a build of it does ``compile_it``."""

    def __init__(self, compile_it: Callable[[], object] = lambda: None) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.asked: list[tuple[Any, ...]] = []
        self.num_loaded = 0
        self._compile_it = compile_it

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self.launched.append((grid, args, constants))

    def warmup(self, *args: Any, grid: tuple[int, ...], **constants: Any) -> None:
        self.asked.append((grid, args, constants))
        mode = active_mode.get()
        assert mode is not None, "Triton builds one at a time"
        mode.submit(f"{id(self)} {len(self.asked)}", self._compile, lambda kernel: None)

    def _compile(self) -> Any:
        self._compile_it()
        kernel = self

        class Compiled:
            @property
            def run(self) -> object:
                kernel.num_loaded += 1
                return SimpleNamespace()

        return Compiled()


@pytest.fixture(autouse=True)
def _no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def test_a_launch_has_the_options_of_all() -> None:
    kernel = FakeKernel()
    x = torch.zeros(4)
    launch(kernel, (3, 2), x, 5, on=x, SIZE=8, num_warps=4)
    assert kernel.launched == [((3, 2), (x, 5), {"SIZE": 8, "num_warps": 4, "enable_fp_fusion": False})]
    assert kernel.asked == []


def unread_parameters(source: str) -> Iterator[str]:
    """Functions of Triton's or Gluon's ``jit`` in a source, each with a parameter that its body does not read."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        if any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
            names = [node for line in function.body for node in ast.walk(line) if isinstance(node, ast.Name)]
            read = {name.id for name in names if isinstance(name.ctx, ast.Load)}
            parameters = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
            yield from (f"{function.name}: {each.arg}" for each in parameters if each.arg not in read)


def test_kernels_read_all_their_parameters() -> None:
    """Three were handed through and read by nobody."""
    written = "@gluon.jit\ndef _sum(x, y, SIZE: gl.constexpr):\n    return x + SIZE\ndef _other(x):\n    pass"
    assert list(unread_parameters(written)) == ["_sum: y"], "the control"
    folder = Path(launching.__file__).parent
    assert [each for path in sorted(folder.glob("*.py")) for each in unread_parameters(path.read_text("utf-8"))] == []


def test_builds_are_asked_for_once_and_loaded_and_nothing_is_launched() -> None:
    kernel, other = FakeKernel(), FakeKernel()
    x = torch.zeros(64)

    def work() -> None:
        for _ in range(3):
            launch(kernel, (1,), x, 5, on=x, SIZE=8)
        # What a build may hang on: address, type, number, constant; and what it never does: the grid.
        launch(kernel, (2,), x, 5, on=x, SIZE=8)
        launch(kernel, (1,), x[1:], 5, on=x, SIZE=8)
        launch(kernel, (1,), x.double(), 5, on=x, SIZE=8)
        launch(kernel, (1,), x, 1, on=x, SIZE=8)
        launch(kernel, (1,), x, True, on=x, SIZE=8)
        launch(kernel, (1,), x, 5, on=x, SIZE=16)
        launch(other, (1,), x, 5, on=x, SIZE=8)

    assert build(work, CPU, 2) == 7
    assert (len(kernel.asked), len(other.asked)) == (6, 1)
    assert (kernel.num_loaded, other.num_loaded) == (6, 1)
    assert kernel.launched == other.launched == []
    work()
    assert len(kernel.launched) == 9
    assert len(kernel.asked) == 6


def test_builds_go_side_by_side() -> None:
    both = threading.Barrier(2, timeout=20)
    kernels = [FakeKernel(both.wait) for _ in range(2)]
    x = torch.zeros(4)
    assert build(lambda: [launch(kernel, (1,), x, on=x) for kernel in kernels], CPU, 2) == 2


class OwnError(Exception):
    """Nobody else raises it."""


def test_a_build_that_fails_is_told_as_it_is_and_launches_are_launches_again() -> None:
    def fail() -> None:
        raise OwnError

    kernel, good = FakeKernel(fail), FakeKernel()
    x = torch.zeros(4)
    with pytest.raises(OwnError):
        build(lambda: launch(kernel, (1,), x, on=x), CPU, 2)
    launch(good, (1,), x, on=x)
    assert len(good.launched) == 1
    # Triton's own mode has ended as well: it refuses a second one.
    assert active_mode.get() is None
    assert build(lambda: launch(good, (1,), x, on=x), CPU, 2) == 1


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, OwnError])
def test_an_interrupt_leaves_what_has_not_begun(interrupt: type[BaseException]) -> None:
    kernels = [FakeKernel(lambda: time.sleep(0.2)) for _ in range(100)]
    x = torch.zeros(4)

    def work() -> None:
        for kernel in kernels:
            launch(kernel, (1,), x, on=x)
        raise interrupt

    start_s = time.perf_counter()
    with pytest.raises(interrupt):
        build(work, CPU, 2)
    assert time.perf_counter() - start_s < 5
    assert sum(kernel.num_loaded for kernel in kernels) <= 4
    assert launching._asked.get() is None


def test_other_threads_launch_while_one_builds() -> None:
    kernel, other = FakeKernel(), FakeKernel()
    x = torch.zeros(4)

    def work() -> None:
        launch(kernel, (1,), x, on=x)
        thread = threading.Thread(target=lambda: launch(other, (1,), x, on=x))
        thread.start()
        thread.join()

    assert build(work, CPU, 1) == 1
    assert len(other.launched) == 1
