"""Options that all launches of our Triton kernels share."""

from __future__ import annotations

import functools

import torch


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
