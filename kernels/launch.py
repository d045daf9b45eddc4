"""The way in which all of our Triton kernels are launched, or built ahead of that, several at a time."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch

# Descriptions of the launches that a thread has asked to have built; None: kernels are launched.
_asked: contextvars.ContextVar[set[tuple[Any, ...]] | None] = contextvars.ContextVar("asked", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, on: torch.Tensor, **constants: Any) -> None:
    """Launch a kernel; inside of ``build`` nothing is launched, but the kernel built that would be.

    Args:
        kernel: a function of Triton's or Gluon's ``jit``.
        grid: programs along each axis.
        args: of the kernel, in order.
        on: a tensor on the device.
        constants: what is built in, and Triton's options but for those that all launches share.
    """
    constants |= options(on)
    asked = _asked.get()
    if asked is None:
        kernel[grid](*args, **constants)
        return
    description = (kernel, *map(_described, args), *constants.items())
    # Layers ask for the same over and over, and Triton takes about a millisecond to find out.
    if description not in asked:
        asked.add(description)
        kernel.warmup(*args, grid=grid, **constants)


def build(work: Callable[[], object], device: torch.device, num_threads: int) -> int:
    """Build the kernels that ``work`` would launch, and load them onto the card; the number of different ones.

    Nothing of ours runs meanwhile, but torch's own operations do: on numbers without meaning, so that ``work`` must not
    let them index by what a kernel should have written. Kernels that lie in Triton's cache are only read.

    Args:
        work: calls ``launch``, in this thread.
        device: the card.
        num_threads: kernels that are built at a time. Triton lets other threads go on while it compiles.

    Raises:
        Exception: as ``work`` or a build raises. What has not begun to be built is then left.
    """
    import triton

    def load(compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        # Loads it, and builds what calls it from Python by the C compiler, for each signature anew.
        kernel.run  # noqa: B018
        return kernel

    class Builders(ThreadPoolExecutor):
        def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
            return super().submit(load, compile_kernel)

    def ask() -> int:
        mode = triton.AsyncCompileMode(builders)
        # It waits when it is closed: only where nothing went wrong.
        waiting = ExitStack()
        waiting.enter_context(mode)
        _asked.set(set())
        work()
        waiting.close()
        return len(mode.future_kernels)

    # Of the device with its index, which a thread of its own does not know.
    device = torch.empty(0, device=device).device
    builders = Builders(num_threads, initializer=lambda: torch.cuda.set_device(device))
    try:
        # In a context of its own, so that whatever happens launches are launches again.
        return contextvars.copy_context().run(ask)
    finally:
        builders.shutdown(cancel_futures=True)


def _described(arg: Any) -> object:
    """What a build may hang on of an argument, and its value where that is known."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if hasattr(arg, "block_shape"):
        # A descriptor for the copy engine.
        return arg.base.dtype, tuple(arg.block_shape), str(getattr(arg, "layout", None))
    return type(arg), arg


def options(tensor: torch.Tensor) -> dict[str, bool]:
    """Keyword arguments of a launch on the tensor's device; products and sums are never fused into one rounding."""
    found = {"enable_fp_fusion": False}
    if is_dependent(tensor):
        found["launch_pdl"] = True
    return found


def is_dependent(tensor: torch.Tensor) -> bool:
    """Whether a launch may begin while the kernel before it ends (programmatic dependent launch), as Hopper can.

    A kernel launched so must call ``gdc_wait`` in every program before it reads or writes what others write or read.
    """
    return tensor.is_cuda and _is_hopper(tensor.device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Processors of the card."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Whether the device has Hopper's own matrix instructions, which other generations lack."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def are_copyable(*matrices: torch.Tensor) -> bool:
    """Whether the copy engine takes tiles of matrices of 2-byte numbers: it works in multiples of 16 bytes."""
    return all(
        matrix.data_ptr() % 16 == 0
        and matrix.stride(0) % 8 == matrix.shape[1] % 8 == 0
        and matrix.stride(0) >= matrix.shape[1]
        for matrix in matrices
    )
