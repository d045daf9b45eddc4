"""A state dict in memory that other processes of this machine can map: each tensor's bytes lie there once for all."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from paged.model.checkpoint import is_dense
from paged.model.decoder import TORCH_DTYPES

# Where a tensor begins: a multiple of every element's size.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies, and what it is."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """What another process needs to find the tensors; valid while ``shared_weights`` is entered in this one.

    Attributes:
        path: of the memory, as a file.
        places: of the tensors by name; None for a value that no model takes: the name is kept, so that all ranks refuse
            the same.
    """

    path: str
    places: Mapping[str, _Place | None]

    def open(self) -> dict[str, Any]:
        """The tensors by name. They are mapped, not copied, and live as long as anybody holds one."""
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # Private, because torch wants memory that it may write to.
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        return {name: None if place is None else _tensor(whole, place) for name, place in self.places.items()}


@contextmanager
def shared_weights(weights: Mapping[str, torch.Tensor]) -> Iterator[SharedWeights]:
    """Lay out the tensors of a state dict, from whatever device, for as long as this is entered."""
    places: dict[str, _Place | None] = {}
    size = 0
    for name, tensor in weights.items():
        if is_dense(tensor) and tensor.dtype in TORCH_DTYPES.values():
            places[name] = _Place(size, tuple(tensor.shape), tensor.dtype)
            size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        else:
            places[name] = None
    descriptor = os.memfd_create("paged-weights")
    try:
        os.truncate(descriptor, max(size, _ALIGNMENT))
        with mmap.mmap(descriptor, max(size, _ALIGNMENT)) as memory:
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            for name, place in places.items():
                if place is not None:
                    _tensor(whole, place).copy_(weights[name].detach())
            del whole
        yield SharedWeights(f"/proc/{os.getpid()}/fd/{descriptor}", places)
    finally:
        os.close(descriptor)


def _tensor(whole: torch.Tensor, place: _Place) -> torch.Tensor:
    num_bytes = place.dtype.itemsize
    for size in place.shape:
        num_bytes *= size
    return whole[place.offset : place.offset + num_bytes].view(place.dtype).view(place.shape)
