"""How many cache blocks fit: the arithmetic of a device's memory, on paper and for the engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from paged.core.checks import check_whole
from paged.core.config_json import DTYPES
from paged.core.hardware import Hardware
from paged.core.model_spec import ModelSpec
from paged.core.sharding import check_tp, num_parameters_per_rank

GIB: Final = 2**30

DTYPE_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
assert set(DTYPE_BYTES) == set(DTYPES)
FP8: Final = ("fp8", "float8_e4m3fn")
KV_DTYPE_BYTES: Final = {**DTYPE_BYTES, **dict.fromkeys(FP8, 1)}
"""Bytes of an element, by the names that ``dtype`` and ``kv_dtype`` may have."""

SCALE_BYTES: Final = 4
"""An fp8 cache has a float32 scale for the keys, and one for the values, of each token and head."""

SAMPLING_BYTES: Final = 48
"""Bytes of temporaries that sampling in torch makes for each element of the logits: six of 8 bytes at a time."""

ACTIVATION_GIB: Final = 0.5
CONTEXT_GIB: Final = 0.5
"""What is allowed for a step's temporaries, and for the runtime, where neither is measured or given."""

_MAX_UTILIZATION: Final = 0.98
_MAX_TP: Final = 64


def check_gib(weights_gib: float | None, activation_gib: float, context_gib: float) -> None:
    """Refuse, as a ``ValueError`` that names the config's key, what is no amount of memory."""
    given = {"weights_gib": weights_gib, "activation_gib": activation_gib, "context_gib": context_gib}
    for name, value in given.items():
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"memory.{name} must be a number, at least 0, not {value}")


def kv_token_bytes(spec: ModelSpec, kv_dtype: str, tp: int = 1) -> int:
    """Bytes that one token's keys and values, with their scales, take on one of ``tp`` ranks."""
    token_bytes = spec.kv_bytes_per_token(KV_DTYPE_BYTES[kv_dtype], tp)
    if kv_dtype in FP8:
        token_bytes += spec.kv_bytes_per_token(SCALE_BYTES, tp) // spec.head_dim
    return token_bytes


def kv_budget_bytes(device_bytes: float, utilization: float, weights_bytes: int, other_bytes: int) -> int:
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


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


def num_blocks_in(budget_bytes: int, block_bytes: int, *, max_num_seqs: int, max_blocks: int) -> int:
    """Whole blocks of ``block_bytes`` in a budget, but no more than ``max_num_seqs`` of ``max_blocks`` can use."""
    return min(max(0, budget_bytes) // block_bytes, max_num_seqs * max_blocks)


def logits_bytes(spec: ModelSpec, num_rows: int) -> int:
    """Bytes of the float32 logits of ``num_rows`` rows over the whole vocabulary."""
    return num_rows * spec.vocab_size * 4


def padded_attention_bytes(spec: ModelSpec, num_seqs: int, context: int, dtype: str, tp: int = 1) -> int:
    """Bytes of a copy of a layer's keys and values for ``num_seqs`` sequences, each padded to ``context`` tokens."""
    return num_seqs * context * spec.kv_bytes_per_token(KV_DTYPE_BYTES[dtype], tp) // spec.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What one rank's memory is used for.

    Attributes:
        device_bytes: the device's memory.
        weights_bytes, activation_bytes, context_bytes: parts that are not the pool's.
        kv_budget_bytes: what is left for the pool; negative if nothing is.
        kv_bytes_per_token: of keys and values with their scales.
        block_size: tokens in a block.
        num_blocks: whole blocks in the budget.
    """

    device_bytes: int
    weights_bytes: int
    activation_bytes: int
    context_bytes: int
    kv_budget_bytes: int
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values the pool holds."""
        return self.num_blocks * self.block_size

    def num_seqs(self, length: int) -> int:
        """Sequences of ``length`` tokens that fit at once; the last token of each is never in the cache."""
        return self.num_blocks // num_blocks_for(max(1, length - 1), self.block_size)


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that lets a sequence fit: an override of the config, and the pool's tokens with it."""

    override: str
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model on a number of cards: all that the size of the pool follows from.

    Attributes:
        spec: the model.
        hardware: the card.
        tp: ranks, one a card.
        dtype, kv_dtype: names of the dtypes of weights and cache, keys of ``DTYPE_BYTES`` and ``KV_DTYPE_BYTES``.
        block_size: tokens in a block.
        utilization: share of a card's memory that may be used, in (0, 1].
        weights_gib: of one rank; None counts the parameters.
        activation_gib, context_gib: of one rank: temporaries of a step; the runtime and its libraries.
        max_num_seqs, max_seq_len: the pool is no larger than that many sequences of that many tokens can use.

    Raises:
        ValueError: naming the field and what is allowed; the model can't be cut over ``tp`` ranks.
    """

    spec: ModelSpec
    hardware: Hardware
    tp: int = 1
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    block_size: int = 16
    utilization: float = 0.9
    weights_gib: float | None = None
    activation_gib: float = ACTIVATION_GIB
    context_gib: float = CONTEXT_GIB
    max_num_seqs: int = 256
    max_seq_len: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}")
        if self.kv_dtype not in KV_DTYPE_BYTES:
            raise ValueError(f"kv_dtype must be one of {', '.join(KV_DTYPE_BYTES)}, not {self.kv_dtype!r}")
        for name in ("block_size", "max_num_seqs", "max_seq_len"):
            check_whole(name, getattr(self, name), 1)
        if not 0 < self.utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, not {self.utilization}")
        check_gib(self.weights_gib, self.activation_gib, self.context_gib)
        check_tp(self.spec, self.tp)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the parameters on one rank."""
        if self.weights_gib is not None:
            return round(self.weights_gib * GIB)
        return num_parameters_per_rank(self.spec, self.tp) * DTYPE_BYTES[self.dtype]

    def pool(self) -> Pool:
        """The size of the pool, the same on every rank."""
        activation, context = round(self.activation_gib * GIB), round(self.context_gib * GIB)
        device = round(self.hardware.memory_gib.value * GIB)
        budget = kv_budget_bytes(device, self.utilization, self.weights_bytes, activation + context)
        if self.hardware.pool_gib is not None:
            budget = round(self.hardware.pool_gib.value * GIB)
        token_bytes = kv_token_bytes(self.spec, self.kv_dtype, self.tp)
        num_blocks = num_blocks_in(
            budget,
            token_bytes * self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_blocks=num_blocks_for(self.max_seq_len, self.block_size),
        )
        return Pool(
            device_bytes=device,
            weights_bytes=self.weights_bytes,
            activation_bytes=activation,
            context_bytes=context,
            kv_budget_bytes=budget,
            kv_bytes_per_token=token_bytes,
            block_size=self.block_size,
            num_blocks=num_blocks,
        )

    def memory_gib_for(self, length: int) -> float:
        """Device memory, in hundredths of a GiB, in which a sequence of ``length`` tokens just fits."""
        pool = self.pool()
        blocks = num_blocks_for(max(1, length - 1), self.block_size)
        used = pool.weights_bytes + pool.activation_bytes + pool.context_bytes
        used += blocks * self.block_size * pool.kv_bytes_per_token
        return math.ceil(100 * (used + 1) / self.utilization / GIB) / 100

    def remedies(self, length: int) -> list[Remedy]:
        """Single changes with which a sequence of ``length`` tokens fits; each is the least of its kind that does."""
        found = []
        allowances = self._smaller_allowances(length)
        for changes in (self._higher_utilizations(), self._other_kv_dtypes(), *allowances, self._higher_tps()):
            for override, deployment in changes:
                pool = deployment.pool()
                if pool.num_seqs(length):
                    found.append(Remedy(override, pool.kv_tokens))
                    break
        return found

    def _higher_utilizations(self) -> Iterator[tuple[str, Deployment]]:
        for percent in range(int(self.utilization * 100) + 1, round(_MAX_UTILIZATION * 100) + 1):
            yield f"gpu_memory_utilization={percent / 100}", replace(self, utilization=percent / 100)

    def _other_kv_dtypes(self) -> Iterator[tuple[str, Deployment]]:
        if self.kv_dtype not in FP8:
            yield "kv_dtype=fp8", replace(self, kv_dtype="fp8")

    def _smaller_allowances(self, length: int) -> Iterator[Iterator[tuple[str, Deployment]]]:
        """Smaller values of what is given for other things than the cache, but never below the default allowance."""
        pool = self.pool()
        missing = num_blocks_for(max(1, length - 1), self.block_size) * self.block_size * pool.kv_bytes_per_token
        missing -= pool.kv_budget_bytes
        for name, least in (("activation_gib", ACTIVATION_GIB), ("context_gib", CONTEXT_GIB)):
            # Rounded down to hundredths.
            gib = math.floor(100 * (getattr(self, name) - (missing + 1) / GIB)) / 100
            if gib >= least:
                yield iter([(f"memory.{name}={gib}", replace(self, **{name: gib}))])
        if self.weights_gib is not None:
            yield iter([("memory.weights_gib=null", replace(self, weights_gib=None))])

    def _higher_tps(self) -> Iterator[tuple[str, Deployment]]:
        for tp in range(self.tp + 1, _MAX_TP + 1):
            # What is given is one rank's part: with more ranks each holds less.
            weights = None if self.weights_gib is None else self.weights_gib * self.tp / tp
            try:
                yield f"tp={tp}", replace(self, tp=tp, weights_gib=weights)
            except ValueError:
                continue
