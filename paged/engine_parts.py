"""What each rank of an engine builds for itself from one description: its decoder, its cache, its runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paged.core.model_spec import ModelSpec
from paged.core.scheduler import Scheduler, SchedulerConfig
from paged.engine_config import KV_DTYPES, EngineConfig, position_limit, sized_num_blocks
from paged.kernels.collectives import SINGLE, RankGroup
from paged.model.checkpoint import load_decoder
from paged.model.decoder import TORCH_DTYPES
from paged.model.parallel import random_decoder
from paged.runner.kv_cache import KVCache
from paged.runner.runner import TorchRunner
from paged.runner.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """What an engine is built from once its model is found; sent to other ranks as it is.

    Attributes:
        spec: the whole model.
        folder: of the checkpoint, None if only the spec is known.
        config: the options.
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
        host, port: of the store at which the ranks meet.
        num_threads: of torch, the same on all ranks.
    """

    rank: int
    size: int
    blueprint: Blueprint
    device: str
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
    """

    runner: TorchRunner
    scheduler: Scheduler
    tokenizer: Tokenizer | None
    numerics_id: str


def build_parts(
    blueprint: Blueprint,
    device: torch.device,
    group: RankGroup = SINGLE,
    least: Callable[[int], int] = lambda num_blocks: num_blocks,
) -> Parts:
    """Load this rank's weights, size its pool and allocate it. Ranks exchange no tensors here.

    Args:
        blueprint: what to build.
        device: this rank's.
        group: the ranks.
        least: gives all ranks the smallest of the pools that they have room for, in blocks.

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
    with _out_of_memory_as_mistake():
        if folder is None or config.weights == "dummy":
            decoder = random_decoder(spec, config.seed, group=group, **placed)
        else:
            decoder = load_decoder(folder, group=group, **placed)
        num_blocks = least(config.num_blocks or sized_num_blocks(config, spec, dtype, kv_dtype, device, limit))
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
        scheduler=Scheduler(limits, config.policy),
        tokenizer=tokenizer,
        numerics_id=numerics.numerics_id(dtype=dtype, kv_dtype=kv_dtype, device=device, tp=group.size),
    )


def warm_up(parts: Parts) -> None:
    """Compute one token, all ranks together; raises ``ValueError`` if that is more than the memory holds."""
    with _out_of_memory_as_mistake():
        parts.runner.warm_up(parts.scheduler.config.max_step_tokens)


@contextmanager
def _out_of_memory_as_mistake() -> Iterator[None]:
    """Tell a model and cache that are too large for the memory as a ``ValueError`` that says what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch has a class of its own for a full GPU, and none for a full host.
        full = isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error)
        if not full:
            raise
        raise ValueError(
            "num_blocks, max_num_seqs or max_seq_len must be smaller: the model and its tables do not fit into memory"
        ) from error
