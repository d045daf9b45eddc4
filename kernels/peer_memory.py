"""Memory on cards that several processes write to: a buffer a rank, which the driver maps into every other rank.

The ranks of one host exchange handles of their buffers (CUDA's interprocess memory), whether each has a card of its
own, linked so that one can write to another's memory, or several share a card. What the buffers are used for, and why
nobody overwrites what another still reads, is told in ``paged.kernels.peers_triton``.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

SIZES: Final = (2, 4, 8)
"""Numbers of ranks that can share memory."""

SIZES_IN_WORDS: Final = f"{', '.join(map(str, SIZES[:-1]))} or {SIZES[-1]}"

NUM_COUNTERS: Final = 128
"""Most programs of a launch."""

MARKED_WORDS: Final = 131072
"""Words of 8 bytes that all ranks together may send marked: of more, the marks cost more than flags do."""

HALF_WORDS: Final = 4 << 20
"""Words of 8 bytes in each of the two halves that longer exchanges use."""

BULK_OFFSET: Final = 2 * MARKED_WORDS * 16
"""Bytes before these halves in a buffer; marked words come first."""

FLAG_OFFSET: Final = BULK_OFFSET + 2 * HALF_WORDS * 8
"""Bytes before the flags, which come last: two for each program and rank."""

NUM_BYTES: Final = FLAG_OFFSET + 2 * NUM_COUNTERS * SIZES[-1] * 8
"""Bytes of a buffer."""

_HANDLE_BYTES: Final = 64
_OPENS_PEER_ACCESS: Final = 1

# Buffers that no engine uses any more. They are kept, because a buffer must outlast the others' views of it.
_spare: dict[torch.device, list[int]] = {}


class PeerMemory:
    """One rank's view of the buffers of all ranks, which use them together from the start, by the same operations.

    Args:
        rank: this rank.
        addresses: of the buffers of all ranks, each of ``NUM_BYTES`` bytes that were 0 once, as this process sees them.
        device: this rank's card.
        close: gives back what is held for it.

    Attributes:
        rank, size: which of how many ranks.
        device: this rank's card.
        own: address of this rank's buffer.
        peers: int64 [size], addresses of all buffers, on the card.
        counters: int64 [NUM_COUNTERS], epochs by program, on the card.
        most_programs: of a launch; the same on all ranks.
    """

    def __init__(
        self, rank: int, addresses: Sequence[int], device: torch.device, close: Callable[[], None] | None = None
    ) -> None:
        assert len(addresses) in SIZES, len(addresses)
        self.rank, self.size, self.device = rank, len(addresses), device
        self.own = addresses[rank]
        self.peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=device)
        self.most_programs = NUM_COUNTERS
        # The caller may be in inference mode, and a thread that stops this is not.
        with torch.inference_mode(False):
            self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._close = close

    @property
    def stop_address(self) -> int:
        """Where kernels look whether to go on waiting."""
        return self._stop.data_ptr()

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is waited for any more."""
        return bool(self._stop[0])

    def stop(self) -> None:
        """Let this rank's kernels wait for nothing any more, for good; any thread may call it."""
        self._stop[0] = 1

    def close(self) -> None:
        """Give the buffers back once this rank's kernels are done. May be called again."""
        close, self._close = self._close, None
        if close is not None:
            close()


def connect(rank: int, size: int, store: dist.Store, device: torch.device) -> PeerMemory | str:
    """Share memory with the other ranks, which call this together; or, the same on all ranks, why that can't be.

    Args:
        rank, size: which of how many, all on this machine.
        store: where the ranks find each other; its time limit holds.
        device: this rank's card.
    """
    if size not in SIZES:
        return f"the number of ranks is not {SIZES_IN_WORDS}"
    with torch.cuda.device(device):
        # The driver is asked about the context that this makes the current one.
        torch.cuda.synchronize()
        driver, own, opened = _Driver(), 0, list[int]()
        said: dict[str, Any] = {"card": _card_name(device)}
        try:
            own = _spare[device].pop() if _spare.get(device) else driver.allocate(NUM_BYTES)
            driver.clear(own, NUM_BYTES)
            said["handle"] = driver.export(own).hex()
        except _DriverError as error:
            said["problem"] = str(error)
        found = [json.loads(answer) for answer in _exchange(store, "peer", rank, size, json.dumps(said))]
        problem = next((other["problem"] for other in found if "problem" in other), "")
        if not problem and len({other["card"] for other in found}) > 1:
            problem = "the ranks have different cards"
        addresses = [own] * size
        try:
            for other in range(size):
                if other != rank and not problem:
                    addresses[other] = driver.open(bytes.fromhex(found[other]["handle"]))
                    opened.append(addresses[other])
        except _DriverError as error:
            problem = str(error)
        problem = next(filter(None, _exchange(store, "peer-opened", rank, size, problem)), "")

        def close() -> None:
            with torch.cuda.device(device):
                torch.cuda.synchronize()
                for address in opened:
                    driver.close(address)
            # A rank that was lost may still write into it.
            if own and not memory.is_stopped:
                _spare.setdefault(device, []).append(own)

        memory = PeerMemory(rank, addresses, device, close)
        if problem:
            memory.close()
            return problem
        return memory


def _exchange(store: dist.Store, name: str, rank: int, size: int, text: str) -> list[str]:
    """Every rank's text."""
    store.set(f"{name}/{rank}", text)
    return [store.get(f"{name}/{other}").decode() for other in range(size)]


def _card_name(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.multi_processor_count} processors"


class _DriverError(RuntimeError):
    """CUDA's driver can't do what was asked of it."""


class _Handle(ctypes.Structure):
    """What the driver knows a buffer of another process by."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Driver:
    """The calls of CUDA's driver that torch has no names for; on the card that is the current one."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def allocate(self, size: int) -> int:
        """An address of ``size`` bytes."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def clear(self, address: int, size: int) -> None:
        """Set bytes to 0, and wait for it."""
        self._call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(size))
        torch.cuda.synchronize()

    def export(self, address: int) -> bytes:
        """A handle of what was allocated, for other processes."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, data: bytes) -> int:
        """The address at which this process sees what another has exported."""
        address = ctypes.c_uint64()
        handle = _Handle.from_buffer_copy(data)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_OPENS_PEER_ACCESS))
        return address.value

    def close(self, address: int) -> None:
        """Undo ``open``."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise _DriverError(f"{name}: {(text.value or b'').decode() or f'error {code}'}")
