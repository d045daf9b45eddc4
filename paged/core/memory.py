"""How many cache blocks fit: the arithmetic of a device's memory."""

from __future__ import annotations

GIB = 2**30


def kv_budget_bytes(device_bytes: int, utilization: float, weights_bytes: int, other_bytes: int) -> int:
    """Bytes left for keys and values on a device of ``device_bytes``, of which ``utilization`` may be used.

    Args:
        device_bytes: the device's memory.
        utilization: share of it that the engine may use, in (0, 1].
        weights_bytes: parameters that lie on this device.
        other_bytes: activations, the runtime's context and whatever else is there.

    Returns:
        bytes; negative if the rest alone is too much.
    """
    return int(device_bytes * utilization) - weights_bytes - other_bytes


def num_blocks_in(budget_bytes: int, block_bytes: int) -> int:
    """Whole blocks of ``block_bytes`` in a budget."""
    return max(0, budget_bytes) // block_bytes
