"""What each rank of an engine builds for itself from one description: its decoder, its cache, its runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paged.core.memory import ACTIVATION_GIB, CONTEXT_GIB, GIB, kv_budget_bytes, kv_token_bytes
from paged.core.model_spec import ModelSpec
from paged.core.scheduler import Scheduler, SchedulerConfig
from paged.core.sharding import num_parameters_per_rank
from paged.engine_config import (
    CPU_POOL_BYTES,
    KV_DTYPES,
    EngineConfig,
    dtype_name,
    position_limit,
    sized_num_blocks,
)
from paged.kernels.collectives import SINGLE, RankGroup
from paged.model.checkpoint import load_decoder
from paged.model.decoder import TORCH_DTYPES, Decoder
from paged.model.parallel import random_decoder
from paged.runner.kv_cache import KVCache
from paged.runner.memory_profile import (
    CardMemory,
    MemoryProfile,
    StepLimits,
    check_share,
    measure_profile,
    unwatched,
)
from paged.runner.runner import TorchRunner
from paged.runner.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """What an engine is built from once its model is found; sent to other ranks as it is.

    Attributes:
        spec: the whole model.
        folder: of the checkpoint, None if only the spec is known.
        config: the options, resolved for the kind of device.
    """

    spec: ModelSpec
    folder: Path | None
    config: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What rank 0 tells another rank first.

    Attributes:
        rank, size: which of how many it is.
        blueprint: what to build.
        device: what computes there: the CPU, or a card by its number.
        is_one_host: whether all ranks are on one machine.
        host, port: of the store at which the ranks meet.
        num_threads: of torch, the same on all ranks.
    """

    rank: int
    size: int
    blueprint: Blueprint
    device: str
    is_one_host: bool
    host: str
    port: int
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One rank's parts of an engine.

    Attributes:
        runner: computes plans.
        scheduler: decides them; the same on all ranks.
        tokenizer: None if the checkpoint has none.
        numerics_id: the constants that fix the bits; the same on all ranks.
        memory: for a summary, what was measured of this rank's card (``MemoryProfile``) and, as ``planned``, what
            would have been allowed for it unmeasured; None on the CPU.
    """

    runner: TorchRunner
    scheduler: Scheduler
    tokenizer: Tokenizer | None
    numerics_id: str
    memory: Mapping[str, Any] | None


def build_parts(
    blueprint: Blueprint,
    device: torch.device,
    group: RankGroup = SINGLE,
    least: Callable[[int], int] = lambda number: number,
    computing: Callable[..., AbstractContextManager[None]] = unwatched,
    num_sharing: int = 1,
) -> Parts:
    """Load this rank's weights, size its pool and allocate it.

    On cards the largest steps are computed first, all ranks together, so that the pool leaves room for them.

    Args:
        blueprint: what to build.
        device: this rank's.
        group: the ranks.
        least: gives all ranks the least of their numbers: of the pools that they have room for, in blocks.
        computing: entered around what the ranks compute together; ``is_limited=False`` where that may take any time.
        num_sharing: most ranks that have one card; each gets as much of what the engine may use of it.

    Raises:
        ValueError: one sentence naming the field or file that does not suit.
    """
    spec, folder, config = blueprint.spec, blueprint.folder, blueprint.config
    dtype = TORCH_DTYPES[config.dtype or spec.dtype]
    kv_dtype = KV_DTYPES[config.kv_dtype] if config.kv_dtype else dtype
    limit = position_limit(config, spec)
    tokenizer = Tokenizer(folder) if folder is not None and (folder / "tokenizer.json").is_file() else None
    numerics = config.build_numerics()
    placed: dict[str, Any] = {"numerics": numerics, "dtype": dtype, "device": device, "max_positions": limit}
    before = None
    if device.type == "cuda":
        before = CardMemory.read(device, num_sharing)
        # Ranks that share a card all look at it before any of them fills it.
        available_bytes = least(before.total - before.others)
    with _out_of_memory_as_mistake("dtype must be smaller or tp larger: the weights do not fit into memory"):
        if folder is None or config.weights == "dummy":
            decoder = random_decoder(spec, config.seed, group=group, **placed)
        else:
            decoder = load_decoder(folder, group=group, **placed)
    profile = None
    # What the engine may use of a card goes in equal parts to the ranks that share it.
    shared = config.replaced(gpu_memory_utilization=config.gpu_memory_utilization / num_sharing)
    if before is not None:
        # Here the ranks meet: none waits in an exchange of tensors for one that is still reading.
        least(0)
        if config.num_blocks is None:
            check_share(config.gpu_memory_utilization, before.total, available_bytes)
        profile = _measured(decoder, kv_dtype, before, shared, limit, computing, lambda: least(0))
    budget_bytes = CPU_POOL_BYTES if profile is None else profile.pool_bytes(shared.gpu_memory_utilization)
    num_blocks = least(config.num_blocks or sized_num_blocks(config, spec, kv_dtype, budget_bytes, limit))
    if num_blocks < 1:
        raise ValueError(
            f"gpu_memory_utilization {config.gpu_memory_utilization} leaves no room for the cache beside weights and "
            "steps; raise it, or lower max_step_tokens, max_num_seqs, block_size or the size of dtype"
        )
    lower = "num_blocks" if config.num_blocks or before is None else "gpu_memory_utilization"
    with _out_of_memory_as_mistake(
        f"{lower}, max_num_seqs or max_seq_len must be smaller: the cache and its tables do not fit into memory"
    ):
        cache = KVCache(decoder.local_spec, num_blocks, config.block_size, dtype=kv_dtype, device=device)
        runner = TorchRunner(
            decoder,
            cache,
            tokenizer,
            max_num_seqs=config.max_num_seqs,
            max_seq_len=min(limit, num_blocks * config.block_size),
            eos_token_ids=spec.eos_token_ids,
        )
    limits: SchedulerConfig = config.limits(num_blocks=num_blocks, max_seq_len=limit, vocab_size=spec.vocab_size)
    return Parts(
        runner=runner,
        scheduler=Scheduler(limits, config.built_policy),
        tokenizer=tokenizer,
        numerics_id=numerics.numerics_id(dtype=dtype, kv_dtype=kv_dtype, device=device, tp=group.size),
        memory=None if profile is None else _memory_summary(profile, shared, spec, dtype, kv_dtype, limit),
    )


def warm_up(parts: Parts) -> None:
    """Compute one token, all ranks together, and on cards make the graphs of decodes.

    Raises:
        ValueError: that is more than the memory holds.
    """
    with _out_of_memory_as_mistake(
        "gpu_memory_utilization (or num_blocks), max_num_seqs or max_step_tokens must be smaller: "
        "the first step does not fit into memory beside the cache"
    ):
        parts.runner.warm_up(parts.scheduler.config.max_step_tokens)


def _measured(
    decoder: Decoder,
    kv_dtype: torch.dtype,
    before: CardMemory,
    config: EngineConfig,
    limit: int,
    computing: Callable[..., AbstractContextManager[None]],
    meet: Callable[[], object],
) -> MemoryProfile:
    """What a card that held ``before`` is used for now that the decoder is there."""
    # Of the limits of a step the scheduler's own checks hold.
    step = config.limits(num_blocks=config.num_blocks or 1, max_seq_len=limit)
    pool_tokens = step.num_blocks * step.block_size
    if config.num_blocks is None:
        weights_bytes = torch.cuda.memory_allocated(decoder.device) - before.allocated
        most_bytes = kv_budget_bytes(before.total, config.gpu_memory_utilization, weights_bytes, 0)
        pool_tokens = most_bytes // kv_token_bytes(decoder.spec, dtype_name(kv_dtype), config.tp)
    limits = StepLimits(
        max_num_seqs=step.max_num_seqs,
        max_step_tokens=step.max_step_tokens,
        chunk_size=step.chunk_size,
        block_size=step.block_size,
        max_seq_len=limit,
        pool_tokens=pool_tokens,
    )
    with _out_of_memory_as_mistake(
        "max_step_tokens or max_num_seqs must be smaller or tp larger: "
        "the largest step does not fit into memory beside the weights"
    ):
        return measure_profile(decoder, kv_dtype, limits, before, decoder.device, computing, meet)


def _memory_summary(
    profile: MemoryProfile,
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    limit: int,
) -> dict[str, Any]:
    """What was measured and, as ``planned``, what ``plan`` says of the same card without measurements."""
    weights_bytes = num_parameters_per_rank(spec, config.tp) * dtype.itemsize
    activation_bytes, context_bytes = round(ACTIVATION_GIB * GIB), round(CONTEXT_GIB * GIB)
    other_bytes = activation_bytes + context_bytes
    budget_bytes = kv_budget_bytes(profile.device_bytes, config.gpu_memory_utilization, weights_bytes, other_bytes)
    num_blocks = sized_num_blocks(config, spec, kv_dtype, budget_bytes, limit)
    planned = {
        "weights_bytes": weights_bytes,
        "activation_bytes": activation_bytes,
        "context_bytes": context_bytes,
        "kv_tokens": num_blocks * config.block_size,
    }
    return {**asdict(profile), "planned": planned}


@contextmanager
def _out_of_memory_as_mistake(sentence: str) -> Iterator[None]:
    """Tell what is too large for the memory as a ``ValueError`` with a sentence that says what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch has a class of its own for a full GPU, and none for a full host; its libraries have their own words.
        words = ("allocate memory", "out of memory", "ALLOC_FAILED")
        if not isinstance(error, MemoryError) and not any(each in str(error) for each in words):
            raise
        raise ValueError(sentence) from error
