"""Faults to plant in the program, and how each is planted: a patch that also counts how often its harm is done.

A planter takes a ``Fault`` and replaces something through it. The replacement gets the original as its first argument
and calls ``fault.reach()`` wherever it deviates from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged.core import config_json
from paged.core.blocks import BlockPool
from paged.core.model_spec import ModelSpec
from paged.core.plan import Started, StepResult
from paged.core.policy import Policy
from paged.core.request import Request
from paged.core.reuse import PrefixReuse
from paged.core.scheduler import Commit, Scheduler
from paged.core.sequence import Sequence as Seq
from paged.core.sequence import Status
from paged.kernels import attention as attention_module
from paged.kernels import heads as heads_module
from paged.kernels import kv_cache as kv_cache_module
from paged.kernels import linear as linear_module
from paged.kernels import sampling as sampling_module
from paged.kernels.batch_layout import BatchLayout
from paged.kernels.rope import rope_tables
from paged.kernels.sampling import SampledRows
from paged.kernels.sampling_columns import SamplingColumns
from paged.model import checkpoint as checkpoint_module
from paged.model import layers as layers_module
from paged.model.layers import Layer, Linear
from paged.runner import runner as runner_module
from paged.runner.slots import SlotState, SlotTables


class Fault:
    """A planted fault: undone with ``patch``; ``num_reached`` counts how often it did its harm.

    Args:
        patch: what undoes it.
        folder: an empty folder, for faults of child processes.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self._patch = patch
        self._tally = folder / "reached"
        self._folder = folder
        self._num_reached = 0

    @property
    def num_reached(self) -> int:
        """Calls of ``reach``, those of child processes included."""
        return self._num_reached + (self._tally.stat().st_size if self._tally.exists() else 0)

    def reach(self) -> None:
        """To be called where the planted code deviates from the original."""
        self._num_reached += 1

    def replaces(self, owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
        """Decorator that puts a function in the place of ``owner.name``, which becomes its first argument."""
        original = getattr(owner, name)

        def plant(function: Callable[..., Any]) -> None:
            self._patch.setattr(owner, name, lambda *args, **options: function(original, *args, **options))

        return plant

    def runs_in_children(self, source: str) -> None:
        """Let Python processes started from now on run ``source``, which may call ``reach()``, before anything else."""
        reach = f"def reach():\n    with open({str(self._tally)!r}, 'a') as file:\n        file.write('x')\n"
        (self._folder / "sitecustomize.py").write_text(reach + source)
        self._patch.setenv("PYTHONPATH", str(self._folder))


# Keys and values


def gather_drops_the_last_key(fault: Fault) -> None:
    @fault.replaces(attention_module, "_make_decode_tiles")
    def make(original: Any, layout: BatchLayout, group: Any, *rest: Any) -> Any:
        fault.reach()
        contexts = tuple(max(1, context - 1) for context in group.contexts)
        shorter = replace(group, contexts=contexts, contexts_N=torch.tensor(contexts))
        return original(layout, shorter, *rest)


def cell_ignores_the_offset(fault: Fault) -> None:
    @fault.replaces(BatchLayout, "build")
    def build(original: Any, *args: Any, **options: Any) -> BatchLayout:
        layout = original(*args, **options)
        if (layout.cells_T % layout.block_size).any():
            fault.reach()
        return replace(layout, cells_T=layout.cells_T - layout.cells_T % layout.block_size)


def key_heads_flipped(fault: Fault) -> None:
    @fault.replaces(heads_module, "store")
    def store(original: Any, cache: Any, key_TKD: Tensor, value_TKD: Tensor, cell_T: Tensor) -> None:
        fault.reach()
        original(cache, key_TKD.flip(1), value_TKD, cell_T)


def causal_mask_off_by_one(fault: Fault) -> None:
    @fault.replaces(attention_module, "_chunk_invariant")
    def chunk(original: Any, q_NKGD: Tensor, cache: Any, layout: BatchLayout, *rest: Any) -> Tensor:
        fault.reach()
        return original(q_NKGD, cache, replace(layout, positions_T=layout.positions_T + 1), *rest)


def rope_restarts_each_step(fault: Fault) -> None:
    @fault.replaces(Layer, "forward")
    def forward(
        original: Any,
        self: Layer,
        x_TN: Tensor,
        delta_TN: Any,
        cos_TD: Tensor,
        _: Tensor,
        layout: BatchLayout,
        cache: Any,
    ) -> tuple[Tensor, Tensor]:
        if any(layout.starts):
            fault.reach()
        spec = self.attention.spec
        within_T = torch.cat([torch.arange(length) for length in layout.lengths])
        tables = rope_tables(int(within_T.max()) + 1, spec.head_dim, spec.rope_theta, dtype=cos_TD.dtype)
        return original(self, x_TN, delta_TN, *(table[within_T] for table in tables), layout, cache)


def fp8_not_dequantized(fault: Fault) -> None:
    @fault.replaces(kv_cache_module, "_read")
    def read(original: Any, cache: Tensor, scale: Tensor | None, row_N: Tensor, dtype: torch.dtype) -> Tensor:
        if scale is None:
            return original(cache, scale, row_N, dtype)
        fault.reach()
        return original(cache, torch.ones_like(scale), row_N, dtype)


# Blocks


def free_leaks(fault: Fault) -> None:
    @fault.replaces(BlockPool, "free")
    def free(original: Any, self: BlockPool, blocks: Sequence[int]) -> None:
        fault.reach()
        original(self, blocks[:-1])


def free_twice(fault: Fault) -> None:
    @fault.replaces(BlockPool, "free")
    def free(original: Any, self: BlockPool, blocks: Sequence[int]) -> None:
        fault.reach()
        original(self, blocks)
        original(self, blocks)


def adopt_removed(fault: Fault) -> None:
    @fault.replaces(BlockPool, "adopt")
    def adopt(original: Any, self: BlockPool, blocks: Sequence[int]) -> None:
        if blocks:
            fault.reach()


def double_free_guard_removed(fault: Fault) -> None:
    @fault.replaces(BlockPool, "free")
    def free(original: Any, self: BlockPool, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if self.references[block] == 0:
                fault.reach()
                self.references[block] -= 1
            else:
                original(self, [block])


def tokens_of(sequence: Seq) -> list[int]:
    return [*(sequence.request.prompt.token_ids or ()), *sequence.output_ids]


def partial_block_shared(fault: Fault) -> None:
    """A sequence takes over a block of a running one of which only the beginning is its own text."""

    started: list[Seq] = []

    @fault.replaces(PrefixReuse, "lead")
    def lead(original: Any, self: PrefixReuse, sequence: Seq) -> None:
        original(self, sequence)
        started.append(sequence)

    @fault.replaces(PrefixReuse, "match")
    def match(original: Any, self: PrefixReuse, sequence: Seq) -> list[int] | None:
        adopted = original(self, sequence)
        if adopted is None:
            return None
        first, size = len(adopted) * self._block_size, self._block_size
        for other in started:
            if other.status is not Status.RUNNING:
                continue
            pairs = zip(tokens_of(other)[: other.num_computed], tokens_of(sequence), strict=False)
            num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if first < num_common < first + size < sequence.num_committed:
                fault.reach()
                return [*adopted, other.blocks[len(adopted)]]
        return adopted


def last_token_not_recomputed(fault: Fault) -> None:
    """A text of whole blocks is taken over to its very end."""

    @fault.replaces(PrefixReuse, "match")
    def match(original: Any, self: PrefixReuse, sequence: Seq) -> list[int] | None:
        adopted = original(self, sequence)
        if adopted is not None and (len(adopted) + 1) * self._block_size == sequence.num_committed:
            block = self._pool.lookup(sequence.keys[len(adopted)])
            if block is not None:
                fault.reach()
                return [*adopted, block]
        return adopted


# Preemption


def preemption_forgets_tokens(fault: Fault) -> None:
    @fault.replaces(Scheduler, "_evict")
    def evict(original: Any, self: Scheduler, sequence: Seq) -> None:
        original(self, sequence)
        if sequence.num_output:
            fault.reach()
        sequence.output_ids.clear()
        sequence.num_output = 0
        sequence.num_tokens = sequence.num_prompt


def preemption_forgets_to_free(fault: Fault) -> None:
    @fault.replaces(Scheduler, "_evict")
    def evict(original: Any, self: Scheduler, sequence: Seq) -> None:
        fault.reach()
        sequence.blocks = []
        original(self, sequence)


def oldest_victim(fault: Fault) -> None:
    @fault.replaces(Policy, "choose_victim")
    def victim(original: Any, self: Policy, candidates: Sequence[Seq]) -> Seq:
        if len(candidates) > 1:
            fault.reach()
        return candidates[0]


# Sampling


def noise_keyed_by_row(fault: Fault) -> None:
    @fault.replaces(sampling_module, "gumbel_noise")
    def noise(original: Any, seeds_R: Tensor, positions_R: Tensor, vocab_size: int) -> Tensor:
        fault.reach()
        return original(torch.arange(len(seeds_R)), positions_R, vocab_size)


def noise_keyed_by_step(fault: Fault) -> None:
    @fault.replaces(sampling_module, "gumbel_noise")
    def noise(original: Any, seeds_R: Tensor, positions_R: Tensor, vocab_size: int) -> Tensor:
        fault.reach()
        return original(seeds_R, torch.full_like(positions_R, fault.num_reached), vocab_size)


def top_p_keeps_one_extra(fault: Fault) -> None:
    @fault.replaces(sampling_module, "_truncate")
    def truncate(original: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *weighed, rows, columns = arguments
        processed_BV = weighed[0]
        keep_BV, kept_mass_B = original(*arguments)
        if columns.top_p_R is None:
            return keep_BV, kept_mass_B
        fault.reach()
        masses_BV = sampling_module.integer_masses(*weighed)
        next_B1 = processed_BV.masked_fill(keep_BV, -torch.inf).argmax(1, keepdim=True)
        cut_B1 = columns.top_p_R.index_select(0, rows).unsqueeze(1) < 1
        extra_BV = torch.zeros_like(keep_BV).scatter_(1, next_B1, cut_B1) & ~keep_BV
        return keep_BV | extra_BV, kept_mass_B + (masses_BV * extra_BV).sum(1)


def top_k_off_by_one(fault: Fault) -> None:
    @fault.replaces(sampling_module, "_truncate")
    def truncate(original: Any, *arguments: Any) -> Any:
        *weighed, columns = arguments
        if columns.top_k_R is not None:
            fault.reach()
            columns = replace(columns, top_k_R=columns.top_k_R + (columns.top_k_R > 0))
        return original(*weighed, columns)


def truncated_logprob(fault: Fault) -> None:
    @fault.replaces(runner_module, "sample")
    def sample(original: Any, logits_RV: Tensor, columns: SamplingColumns) -> SampledRows:
        drawn = original(logits_RV, columns)
        if not torch.equal(drawn.logprobs_R, drawn.behavior_logprobs_R):
            fault.reach()
        return replace(drawn, logprobs_R=drawn.behavior_logprobs_R)


def stop_token_ids_ignored(fault: Fault) -> None:
    @fault.replaces(SlotTables, "_state_of")
    def state_of(original: Any, self: SlotTables, started: Started) -> SlotState:
        state: SlotState = original(self, started)
        if started.request.params.stop_token_ids:
            fault.reach()
        state.stop_ids = self._eos
        return state


def nan_check_removed(fault: Fault) -> None:
    @fault.replaces(Scheduler, "commit")
    def commit(original: Any, self: Scheduler, result: StepResult) -> Commit:
        if result.nan_rows:
            fault.reach()
        return original(self, result._replace(nan_rows=[]))


def seed_salted_per_process(fault: Fault) -> None:
    fault.runs_in_children(
        "from paged.core import request\n"
        "def stable_hash(*parts):\n"
        "    reach()\n"
        "    return hash(parts) % 2**64\n"
        "request.stable_hash = stable_hash\n"
    )


# Matrix products


def rows_batched(fault: Fault) -> None:
    """What would be tiles of a fixed number of rows is one call."""

    @fault.replaces(linear_module, "_in_row_tiles")
    def in_one_call(original: Any, x_TK: Tensor, weight_NK: Tensor, bias_N: Any, num_rows: int) -> Tensor:
        fault.reach()
        return F.linear(x_TK, weight_NK, bias_N)


def lm_head_batched(fault: Fault) -> None:
    @fault.replaces(layers_module, "head_logits")
    def head_logits(original: Any, x_TK: Tensor, weight_NK: Tensor, **options: Any) -> Tensor:
        fault.reach()
        return F.linear(x_TK, weight_NK)


def mlp_batched(fault: Fault) -> None:
    _batch_projections(fault, "gate_proj", "down_proj")


def qkv_batched(fault: Fault) -> None:
    _batch_projections(fault, "q_proj")


def o_proj_batched(fault: Fault) -> None:
    _batch_projections(fault, "o_proj")


def _batch_projections(fault: Fault, *names: str) -> None:
    """One call for the weights whose first part has one of these names."""

    @fault.replaces(Linear, "forward")
    def forward(original: Any, self: Linear, x_TK: Tensor) -> Tensor:
        if self.parts[0][0].split(".")[-1] not in names:
            return original(self, x_TK)
        fault.reach()
        return F.linear(x_TK, self.weight, self.bias)


# Refusals and checkpoints


def vocabulary_check_removed(fault: Fault) -> None:
    @fault.replaces(Scheduler, "_check_request")
    def check(original: Any, self: Scheduler, request: Request) -> None:
        config = self.config
        assert config.vocab_size is not None
        if not all(0 <= token < config.vocab_size for token in request.prompt.token_ids or ()):
            fault.reach()
        self.config = replace(config, vocab_size=None)
        try:
            original(self, request)
        finally:
            self.config = config


def guard_sized_on_n(fault: Fault) -> None:
    """As if the last token sampled were fed back."""

    @fault.replaces(Scheduler, "_check_request")
    def check(original: Any, self: Scheduler, request: Request) -> None:
        fault.reach()
        original(self, replace(request, max_tokens=request.max_tokens + 1))


def tensor_set_check_removed(fault: Fault) -> None:
    """Whatever the files hold is taken."""

    @fault.replaces(checkpoint_module, "check_checkpoint")
    def check(original: Any, folder: Path, spec: ModelSpec, *rest: Any) -> Any:
        fault.reach()
        stored, _ = checkpoint_module._read_headers(folder, spec.parameter_shapes(), [])
        return stored


def only_the_eos_of_config_json(fault: Fault) -> None:
    @fault.replaces(config_json, "_eos_token_ids")
    def eos(original: Any, config: Any, generation_config: Any, vocab_size: int) -> tuple[int, ...]:
        if generation_config is not None:
            fault.reach()
        return original(config, None, vocab_size)
