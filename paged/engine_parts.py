"""What each rank of an engine builds for itself from one description: its decoder, its cache, its runner."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paged.core.memory import ACTIVATION_GIB, CONTEXT_GIB, GIB, kv_budget_bytes, kv_token_bytes
from paged.core.model_spec import ModelSpec
from paged.core.scheduler import Scheduler
from paged.core.sharding import num_parameters_per_rank
from paged.engine_config import (
    CPU_POOL_BYTES,
    KV_DTYPES,
    EngineConfig,
    dtype_name,
    position_limit,
    sized_num_blocks,
)
from paged.kernels.collectives import RankGroup
from paged.kernels.numerics import Numerics
from paged.model.checkpoint import load_decoder
from paged.model.decoder import TORCH_DTYPES, Decoder
from paged.model.parallel import random_decoder
from paged.other_ranks import OtherRanks
from paged.runner.kernel_builds import build_kernels
from paged.runner.kv_cache import KVCache
from paged.runner.memory_profile import (
    CardMemory,
    MemoryProfile,
    StepLimits,
    check_share,
    measure_profile,
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


def build_parts(blueprint: Blueprint, device: torch.device, ranks: OtherRanks) -> Parts:
    """Load this rank's weights, size its pool and allocate it; all ranks together.

    On cards the kernels are built and the largest steps computed first, so that the pool leaves room for them.

    Args:
        blueprint: what to build.
        device: this rank's.
        ranks: the others.

    Raises:
        ValueError: one sentence naming the field or file that does not suit.
    """
    terms = _Terms.of(blueprint, device, ranks.num_sharing)
    folder, config = blueprint.folder, blueprint.config
    tokenizer = Tokenizer(folder) if folder is not None and (folder / "tokenizer.json").is_file() else None
    before = profile = None
    if device.type == "cuda":
        # What earlier engines left would else be freed while this one measures, and count as room that it has made.
        gc.collect()
        torch.cuda.empty_cache()
        before = CardMemory.read(device, ranks.num_sharing)
        # Ranks that share a card all look at it before any of them fills it.
        available_bytes = ranks.least(before.total - before.others)
    decoder = _load(terms, folder, ranks.group)
    if before is not None:
        # None waits in an exchange of tensors for one that is still reading.
        ranks.meet()
        if config.num_blocks is None:
            check_share(config.gpu_memory_utilization, before.total, available_bytes)
        loaded = CardMemory.read(device)
        limits = _step_limits(terms, before, loaded)
        with _out_of_memory_as_mistake(
            "max_step_tokens or max_num_seqs must be smaller or tp larger: "
            "the largest step does not fit into memory beside the weights"
        ):
            with ranks.computing(is_limited=False):
                _build_kernels(terms, decoder, limits, ranks.num_sharing)
            # Nor in a step for one that still builds, which may take longer than a step may.
            ranks.meet()
            with ranks.computing():
                profile = measure_profile(decoder, terms.kv_dtype, limits, before, loaded)
    num_blocks = _size(terms, profile, ranks)
    return Parts(
        runner=_allocate(terms, decoder, tokenizer, num_blocks),
        scheduler=_scheduler(terms, num_blocks),
        tokenizer=tokenizer,
        numerics_id=terms.numerics_id(ranks.group.size),
        memory=None if profile is None else _memory_summary(terms, profile),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """What a blueprint comes to on one rank's device.

    Attributes:
        spec, config: the blueprint's.
        device: the rank's.
        utilization: what it may use of its card, of which ranks that share one have equal parts.
        dtype: of weights and activations.
        kv_dtype: of the cache.
        max_positions: of a sequence.
        numerics: how sums are formed.
    """

    spec: ModelSpec
    config: EngineConfig
    device: torch.device
    utilization: float
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_positions: int
    numerics: Numerics

    @classmethod
    def of(cls, blueprint: Blueprint, device: torch.device, num_sharing: int) -> _Terms:
        """Those of a rank on ``device``, which up to ``num_sharing`` ranks have."""
        spec, config = blueprint.spec, blueprint.config
        dtype = TORCH_DTYPES[config.dtype or spec.dtype]
        return cls(
            spec=spec,
            config=config,
            device=device,
            utilization=config.gpu_memory_utilization / num_sharing,
            dtype=dtype,
            kv_dtype=KV_DTYPES[config.kv_dtype] if config.kv_dtype else dtype,
            max_positions=position_limit(config, spec),
            numerics=config.build_numerics(),
        )

    def numerics_id(self, tp: int) -> str:
        """The constants that fix the bits of ``tp`` ranks."""
        return self.numerics.numerics_id(dtype=self.dtype, kv_dtype=self.kv_dtype, device=self.device, tp=tp)

    def num_blocks_in(self, budget_bytes: int) -> int:
        """Blocks of a pool that fills a budget, or that all sequences can use."""
        return sized_num_blocks(self.config, self.spec, self.kv_dtype, budget_bytes, self.max_positions)


def _load(terms: _Terms, folder: Path | None, group: RankGroup) -> Decoder:
    """The network, or a rank's part of it, with the checkpoint's weights or random ones."""
    placed: dict[str, Any] = {
        "group": group,
        "numerics": terms.numerics,
        "dtype": terms.dtype,
        "device": terms.device,
        "max_positions": terms.max_positions,
    }
    with _out_of_memory_as_mistake("dtype must be smaller or tp larger: the weights do not fit into memory"):
        if folder is None or terms.config.weights == "dummy":
            return random_decoder(terms.spec, terms.config.seed, **placed)
        return load_decoder(folder, **placed)


def _step_limits(terms: _Terms, before: CardMemory, loaded: CardMemory) -> StepLimits:
    """How large steps may become on a card that held ``before``, and holds the weights now that it is ``loaded``."""
    config = terms.config
    # Of the limits of a step the scheduler's own checks hold.
    step = config.limits(num_blocks=config.num_blocks or 1, max_seq_len=terms.max_positions)
    pool_tokens = step.num_blocks * step.block_size
    if config.num_blocks is None:
        weights_bytes = loaded.allocated - before.allocated
        most_bytes = kv_budget_bytes(before.total, terms.utilization, weights_bytes, 0)
        pool_tokens = most_bytes // kv_token_bytes(terms.spec, dtype_name(terms.kv_dtype), config.tp)
    return StepLimits(
        max_num_seqs=step.max_num_seqs,
        max_step_tokens=step.max_step_tokens,
        chunk_size=step.chunk_size,
        block_size=step.block_size,
        max_seq_len=terms.max_positions,
        pool_tokens=pool_tokens,
    )


def _build_kernels(terms: _Terms, decoder: Decoder, limits: StepLimits, num_sharing: int) -> None:
    """Build the kernels of all steps within ``limits``, before there is the cache that they are for."""
    cache = KVCache(decoder.local_spec, 1, limits.block_size, dtype=terms.kv_dtype, device=decoder.device)
    build_kernels(decoder, cache, limits.max_step_tokens, limits.num_logits, num_sharing)


def _size(terms: _Terms, profile: MemoryProfile | None, ranks: OtherRanks) -> int:
    """Blocks of the pool: as many as asked for, or as all ranks have room for."""
    budget_bytes = CPU_POOL_BYTES if profile is None else profile.pool_bytes(terms.utilization)
    num_blocks = ranks.least(terms.config.num_blocks or terms.num_blocks_in(budget_bytes))
    if num_blocks < 1:
        raise ValueError(
            f"gpu_memory_utilization {terms.config.gpu_memory_utilization} leaves no room for the cache beside weights "
            "and steps; raise it, or lower max_step_tokens, max_num_seqs, block_size or the size of dtype"
        )
    return num_blocks


def _allocate(terms: _Terms, decoder: Decoder, tokenizer: Tokenizer | None, num_blocks: int) -> TorchRunner:
    """The cache, and what computes with it."""
    config = terms.config
    lower = "num_blocks" if config.num_blocks or terms.device.type != "cuda" else "gpu_memory_utilization"
    with _out_of_memory_as_mistake(
        f"{lower}, max_num_seqs or max_seq_len must be smaller: the cache and its tables do not fit into memory"
    ):
        cache = KVCache(decoder.local_spec, num_blocks, config.block_size, dtype=terms.kv_dtype, device=terms.device)
        return TorchRunner(
            decoder,
            cache,
            tokenizer,
            max_num_seqs=config.max_num_seqs,
            max_seq_len=min(terms.max_positions, num_blocks * config.block_size),
            eos_token_ids=terms.spec.eos_token_ids,
        )


def _scheduler(terms: _Terms, num_blocks: int) -> Scheduler:
    """What decides the steps of a pool of ``num_blocks``."""
    limits = terms.config.limits(
        num_blocks=num_blocks, max_seq_len=terms.max_positions, vocab_size=terms.spec.vocab_size
    )
    return Scheduler(limits, terms.config.built_policy)


def _memory_summary(terms: _Terms, profile: MemoryProfile) -> dict[str, Any]:
    """What was measured and, as ``planned``, what ``plan`` says of the same card without measurements."""
    weights_bytes = num_parameters_per_rank(terms.spec, terms.config.tp) * terms.dtype.itemsize
    activation_bytes, context_bytes = round(ACTIVATION_GIB * GIB), round(CONTEXT_GIB * GIB)
    other_bytes = activation_bytes + context_bytes
    budget_bytes = kv_budget_bytes(profile.device_bytes, terms.utilization, weights_bytes, other_bytes)
    planned = {
        "weights_bytes": weights_bytes,
        "activation_bytes": activation_bytes,
        "context_bytes": context_bytes,
        "kv_tokens": terms.num_blocks_in(budget_bytes) * terms.config.block_size,
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
