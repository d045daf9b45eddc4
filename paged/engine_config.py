"""What an engine is built from: the typed options, and how device, lengths and pool size follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paged.core.checks import check_timeout, check_whole, is_positive
from paged.core.limits import SchedulerConfig, limits_on
from paged.core.memory import FP8, kv_token_bytes, num_blocks_for, num_blocks_in
from paged.core.model_spec import ModelSpec
from paged.core.policy import POLICIES, Fifo, Policy
from paged.kernels.choices import MODES
from paged.kernels.numerics import Numerics
from paged.model.decoder import TORCH_DTYPES

KV_DTYPES = {**TORCH_DTYPES, **dict.fromkeys(FP8, torch.float8_e4m3fn)}

# The pool of an engine on the CPU that is not told how many blocks to have.
CPU_POOL_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is built from; names and defaults follow vLLM where it has them.

    Attributes:
        numerics: ``invariant`` (bits of a sequence depend on it alone) or ``fast`` (equal to rounding).
        policy: admission and preemption: a ``Policy``, or the name of one of ``POLICIES``, which becomes it.
        tp: ranks that the model is cut over, each on a card of its own or with its share of the CPU's cores.
        verify: with several ranks, compare plans and results in every step; what they disagree on is never handed out.
        tp_timeout_s: seconds after which a rank that does not answer ends the engine.
        k_segments: parts of the inner dimension of row-parallel products; 4 makes 1, 2 and 4 ranks agree to the bit.
        reduce_dtype: what ranks add up: products rounded to the ``model``'s dtype, or left in ``float32``.
        dtype: of weights and activations; None takes the checkpoint's.
        kv_dtype: of the cache; None takes ``dtype``; ``fp8`` is e4m3 with a scale for each token and kv head.
        block_size: tokens in a cache block.
        num_blocks: blocks in the pool; None sizes it: on a GPU from what is measured of its memory.
        max_num_seqs: most sequences in a step.
        max_step_tokens: most tokens computed in a step; None is 8192 on a GPU, 2048 on the CPU.
        chunk_size: most tokens of one sequence in a step; None is ``max_step_tokens`` on a GPU, 512 on the CPU.
        max_seq_len: most tokens of a sequence; None takes the model's limit.
        gpu_memory_utilization: share of a GPU's memory that the engine may use, cache, context and libraries included.
        depth: most steps in flight; None is 2 on a GPU, 1 on the CPU.
        seed: start of the random streams of requests without their own, and of dummy weights.
        device: ``auto``, ``cpu`` or ``cuda``.
        prefix_reuse: reuse cached blocks of equal prefixes.
        weights: ``auto`` reads the checkpoint, ``dummy`` makes random ones of the same shapes.
        allow_long_context: let ``max_seq_len`` exceed the model's position limit.

    Raises:
        ValueError: naming the field and what is allowed.
    """

    numerics: str = "invariant"
    policy: Policy | str = field(default_factory=Fifo)
    tp: int = 1
    verify: bool = True
    tp_timeout_s: float = 60.0
    k_segments: int = 1
    reduce_dtype: str = "model"
    dtype: str | None = None
    kv_dtype: str | None = None
    block_size: int = 16
    num_blocks: int | None = None
    max_num_seqs: int = 256
    max_step_tokens: int | None = None
    chunk_size: int | None = None
    max_seq_len: int | None = None
    gpu_memory_utilization: float = 0.9
    depth: int | None = None
    seed: int = 0
    device: str = "auto"
    prefix_reuse: bool = True
    weights: str = "auto"
    allow_long_context: bool = False

    def __post_init__(self) -> None:
        _check_choice("numerics", self.numerics, MODES)
        _check_choice("dtype", self.dtype, (None, *TORCH_DTYPES))
        _check_choice("kv_dtype", self.kv_dtype, (None, *KV_DTYPES))
        _check_choice("device", self.device, ("auto", "cpu", "cuda"))
        _check_choice("weights", self.weights, ("auto", "dummy"))
        for name in ("verify", "prefix_reuse", "allow_long_context"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        check_whole("tp", self.tp, 1)
        check_timeout("tp_timeout_s", self.tp_timeout_s)
        self.build_numerics()
        if isinstance(self.policy, str) and self.policy in POLICIES:
            object.__setattr__(self, "policy", POLICIES[self.policy]())
        if not isinstance(self.policy, Policy):
            raise ValueError(f"policy must be a Policy or one of {', '.join(POLICIES)}, not {self.policy!r}")
        if not is_positive(self.gpu_memory_utilization) or self.gpu_memory_utilization > 1:
            raise ValueError(
                f"gpu_memory_utilization must be above 0 and at most 1, not {self.gpu_memory_utilization!r}"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be a whole number, not {self.seed!r}")
        self.resolved(torch.device("cpu")).limits(num_blocks=1 if self.num_blocks is None else self.num_blocks)

    @property
    def built_policy(self) -> Policy:
        """``policy`` as what its name was turned into."""
        assert isinstance(self.policy, Policy)
        return self.policy

    def replaced(self, **fields: Any) -> EngineConfig:
        """This configuration with some fields changed; an unknown one is a ``ValueError`` that names it."""
        for name in fields:
            if name not in EngineConfig.__dataclass_fields__:
                known = ", ".join(EngineConfig.__dataclass_fields__)
                raise ValueError(f"{name} is not a field of EngineConfig; known: {known}")
        return replace(self, **fields)

    def resolved(self, device: torch.device) -> EngineConfig:
        """This configuration with a device's numbers for ``depth``, ``max_step_tokens`` and ``chunk_size``."""
        if None not in (self.depth, self.max_step_tokens, self.chunk_size):
            return self
        depth, max_step_tokens, chunk_size = limits_on(
            device.type == "cuda", self.depth, self.max_step_tokens, self.chunk_size
        )
        return replace(self, depth=depth, max_step_tokens=max_step_tokens, chunk_size=chunk_size)

    def build_numerics(self) -> Numerics:
        """How sums are formed."""
        return Numerics(mode=self.numerics, k_segments=self.k_segments, reduce_dtype=self.reduce_dtype)

    def limits(
        self, *, num_blocks: int, max_seq_len: int | None = None, vocab_size: int | None = None
    ) -> SchedulerConfig:
        """The scheduler's limits, once the device, the pool's size and the model are known."""
        assert self.depth is not None, "resolve it first"
        assert self.max_step_tokens is not None, "resolve it first"
        assert self.chunk_size is not None, "resolve it first"
        return SchedulerConfig(
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_step_tokens=self.max_step_tokens,
            chunk_size=self.chunk_size,
            max_seq_len=self.max_seq_len if max_seq_len is None else max_seq_len,
            vocab_size=vocab_size,
            depth=self.depth,
            prefix_reuse=self.prefix_reuse,
        )


def resolve_device(name: str) -> torch.device:
    """The device that ``auto``, ``cpu`` or ``cuda`` means here; a GPU that is not there is a ``ValueError``."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no GPU here; use device=cpu or device=auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def position_limit(config: EngineConfig, spec: ModelSpec) -> int:
    """Positions that a sequence may have: ``max_seq_len`` or else the model's own limit.

    Raises:
        ValueError: ``max_seq_len`` exceeds the model's limit, and that is not allowed.
    """
    return spec.position_limit(config.max_seq_len, allow_long_context=config.allow_long_context)


def sized_num_blocks(
    config: EngineConfig, spec: ModelSpec, kv_dtype: torch.dtype, budget_bytes: int, limit: int
) -> int:
    """Blocks of a rank's pool that fills its budget, but holds no more than ``max_num_seqs`` sequences can use.

    Args:
        config: block size, number of sequences and of ranks.
        spec: the model.
        kv_dtype: of the cache.
        budget_bytes: what is left for the pool; may be negative.
        limit: most tokens of a sequence.

    Returns:
        0 if not even one block fits.
    """
    block_bytes = config.block_size * kv_token_bytes(spec, dtype_name(kv_dtype), config.tp)
    max_blocks = num_blocks_for(limit, config.block_size)
    return num_blocks_in(budget_bytes, block_bytes, max_num_seqs=config.max_num_seqs, max_blocks=max_blocks)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as the config names it."""
    return str(dtype).removeprefix("torch.")


def _check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        choices = ", ".join("null" if item is None else str(item) for item in allowed)
        raise ValueError(f"{name} must be one of {choices}, not {value!r}")
