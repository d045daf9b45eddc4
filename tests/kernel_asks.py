"""What an engine's start and its steps ask Triton to build, seen without a card: ``python -m tests.kernel_asks RANKS``.

Tensors are fake ones of a Hopper, torch's own operations give shapes alone, and a hook notes each build that is asked
for and refuses it, so that nothing is launched either. Of several ranks it is the first. Prints JSON: the kernels that
``build_kernels`` asks for, and those that only what follows asks for. Must have a process of its own: most of torch's
card is replaced.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget

from paged import engine_parts
from paged.core.model_spec import ModelSpec
from paged.engine_config import EngineConfig
from paged.engine_parts import Blueprint, build_parts, warm_up
from paged.kernels import gemm_dispatch, launch
from paged.kernels.batch_layout import BatchLayout
from paged.kernels.collectives import SINGLE, RankGroup
from paged.kernels.gemm import gemm
from paged.kernels.gemm_gate import Product, Verdict
from paged.kernels.sampling import sample
from paged.kernels.vocab_parallel import sample_greedy
from paged.model.decoder import Decoder
from paged.model.parallel import build_decoder
from paged.other_ranks import OtherRanks
from paged.runner import kernel_builds, memory_profile, step_graphs

DEVICE = torch.device("cuda", 0)
MAX_NUM_SEQS, MAX_STEP_TOKENS, MAX_SEQ_LEN, BLOCK_SIZE = 40, 300, 1000, 16
SPEC = ModelSpec(
    vocab_size=40_960,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    qk_norm="head",
    max_position_embeddings=1024,
)


class FakeDriver:
    """What Triton asks of a driver before it builds."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class FakeRecorder:
    """Stands for what captures graphs: the work is done once more."""

    def __init__(self, device: torch.device) -> None:
        pass

    def record(self, work: Callable[[], None]) -> Any:
        work()
        return SimpleNamespace(replay=lambda: None)


def verdicts(
    products: list[Product], rows: list[int], dtype: torch.dtype, device: torch.device
) -> dict[Product, list[Verdict]]:
    """As the gate, which compares and times our products; the library then makes those of more than 128 rows."""
    for product in products:
        x_TK = torch.empty((max(rows), product.inner_size), dtype=dtype, device=device)
        weight_NK = torch.empty((product.num_columns, product.inner_size), dtype=dtype, device=device)
        for num_rows in (max(rows), *(num_rows for num_rows in rows if num_rows <= 256)):
            gemm(x_TK[:num_rows], weight_NK, out_dtype=product.out_dtype)
    return {product: [Verdict(count, 0, 1.0, 1.0 + 9.0 * (count > 128)) for count in rows] for product in products}


def library_product(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """The shape of a product."""
    return torch.empty((x_TK.shape[0], weight_NK.shape[0]), dtype=out_dtype or x_TK.dtype, device=x_TK.device)


def unwritten_decoder(spec: ModelSpec, seed: int, **placed: Any) -> Decoder:
    """The shape of a network."""
    return build_decoder(spec, **placed)


def group_of(num_ranks: int) -> RankGroup:
    """Ranks that write to each other's memory."""
    if num_ranks == 1:
        return SINGLE
    memory: Any = SimpleNamespace(rank=0, size=num_ranks, own=2**40, stop_address=2**30, most_programs=128)
    memory.peers, memory.counters = (torch.zeros(size, dtype=torch.int64, device=DEVICE) for size in (num_ranks, 128))
    return RankGroup(0, num_ranks, memory=memory)


class Others(OtherRanks):
    """Ranks that agree with this one."""

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group, num_sharing=1)

    def least(self, number: int) -> int:
        return number


def patched(stack: ExitStack) -> None:
    """Replace what there is of a card, and what looks at numbers."""
    triton.runtime.driver.set_active(FakeDriver())
    new_empty = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **fields: Any) -> torch.Tensor:
        return new_empty(*size, **fields)

    def from_numpy(array: np.ndarray) -> torch.Tensor:
        return new_empty(array.shape, dtype=getattr(torch, array.dtype.name))

    properties = SimpleNamespace(multi_processor_count=132)
    nothing = {name: lambda *args: None for name in ("synchronize", "empty_cache", "reset_peak_memory_stats")}
    zero = {name: lambda *args: 0 for name in ("memory_allocated", "memory_reserved", "max_memory_allocated")}
    stack.enter_context(patch.multiple(torch, empty=empty, from_numpy=from_numpy))
    stack.enter_context(
        patch.multiple(
            torch.cuda,
            get_device_capability=lambda device: (9, 0),
            get_device_properties=lambda device: properties,
            is_current_stream_capturing=lambda: False,
            mem_get_info=lambda *args: (2**36, 2**37),
            **nothing,
            **zero,
        )
    )
    # Fake tensors lie where 16 bytes begin, and their parts where these do.
    address = lambda tensor: tensor.storage_offset() * tensor.element_size()  # noqa: E731
    stack.enter_context(patch.object(FakeTensor, "data_ptr", address, create=True))
    stack.enter_context(patch.object(step_graphs, "_Recorder", FakeRecorder))
    stack.enter_context(patch.object(engine_parts, "random_decoder", unwritten_decoder))
    stack.enter_context(patch.multiple(gemm_dispatch, verdicts=verdicts, library_product=library_product))


def main(num_ranks: int) -> None:
    """Start, compute steps of all sizes and kinds, and print what was asked for."""
    asked: dict[tuple[str, str], str] = {}
    phase = ["start"]

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        asked.setdefault((f"{fn.module.rpartition('.')[2]}.{fn.name}", str(key)), phase[0])
        return True

    def ask(work: Callable[[], object], device: torch.device, num_threads: int) -> int:
        """``launch.build`` without builds."""
        phase[0] = "build"
        launch._asked.set(set())
        work()
        launch._asked.set(None)
        phase[0] = "start"
        return len(asked)

    triton.knobs.runtime.jit_cache_hook = note
    with ExitStack() as stack:
        stack.enter_context(patch.object(kernel_builds, "build", ask))
        patched(stack)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.inference_mode())
        ranks = Others(group_of(num_ranks))
        # The width of tables is another than in the largest steps, and no multiple of 16.
        config = EngineConfig(
            tp=num_ranks,
            dtype="bfloat16",
            num_blocks=700,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_step_tokens=MAX_STEP_TOKENS,
            chunk_size=MAX_STEP_TOKENS,
            max_seq_len=MAX_SEQ_LEN,
        )
        parts = build_parts(Blueprint(spec=SPEC, folder=None, config=config.resolved(DEVICE)), DEVICE, ranks)
        warm_up(parts)
        runner, decoder, cache = parts.runner, parts.runner.decoder, parts.runner.cache
        dtype = decoder.dtype
        phase[0] = "steps"
        graphs = runner.graphs
        assert graphs is not None
        for size in graphs._sizes:
            for has_chunks in (False, True):
                graphs._run_compute(size, has_chunks=has_chunks, has_splits=True)
            for asks in range(8):
                graphs._sample(size, asks)
        for num_rows in (1, 2, 3, 17, MAX_NUM_SEQS):
            starts = [50] * num_rows
            layout = BatchLayout.build(
                starts, [1] * num_rows, runner.slots.blocks_SN, BLOCK_SIZE, DEVICE, table_rows=list(range(num_rows))
            )
            logits_RV = decoder.logits(decoder(torch.zeros_like(layout.positions_T), layout, cache))
            slot_R = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
            for asks in range(8):
                sample(logits_RV, runner.slots.columns(slot_R, slot_R, asks))
            if num_ranks > 1:
                logits_RL = decoder.local_logits(torch.empty((num_rows, 256), dtype=dtype, device=DEVICE))
                temperature_R = torch.zeros(num_rows, dtype=torch.float64, device=DEVICE)
                sample_greedy(logits_RL, temperature_R, vocab_size=SPEC.vocab_size, group=ranks.group)
            memory_profile.run_step(decoder, cache, starts, [1] * num_rows, num_rows, has_penalties=True)
    built = [kernel for (kernel, _), when in asked.items() if when == "build"]
    late = [f"{kernel}, {when}" for (kernel, _), when in asked.items() if when != "build"]
    print(json.dumps({"built": built, "late": late}))


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ, "the interpreter builds nothing"
    main(int(sys.argv[1]))
