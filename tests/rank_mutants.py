"""Faults of tensor parallelism, planted inside the ranks, and the oracles that must notice them there.

An oracle runs on every rank and fails by an AssertionError of its own words. ``run_planted`` plants one fault on all
ranks of a group and says what became of an oracle, and how often the fault did its harm.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import mutants
from mutants import Fault
from paged.kernels import sampling
from paged.kernels import vocab_parallel as vocab_module
from paged.kernels.collectives import SINGLE, RankGroup
from paged.kernels.numerics import Numerics
from paged.model import checkpoint as checkpoint_module
from paged.model import parallel as parallel_module
from paged.model.checkpoint import CheckpointError
from paged.model.decoder import Decoder
from paged.model.parallel import RowParallel, VocabParallelEmbedding, VocabParallelHead
from parallel_tools import LLAMA, VOCAB, Scorer, load_and_count, local_tensors, score, score_random, texts

NUMERICS = Numerics()


def run_planted(group: RankGroup, fault: str | None, oracle: str, folder: Path | None) -> tuple[str | None, int]:
    """The words with which an oracle fails on this rank, or None, and how often the fault was reached.

    Args:
        group: the ranks.
        fault: name of a planter of this module; None plants nothing.
        oracle: name of an oracle of this module.
        folder: a bf16 checkpoint, for the oracles that need one.
    """
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        planted = Fault(patch, Path(name))
        if fault is not None:
            globals()[fault](planted)
        try:
            globals()[oracle](group, folder)
        except AssertionError as error:
            return str(error), planted.num_reached
        return None, planted.num_reached


# Faults: what is exchanged


def no_all_reduce_after_row_parallel(fault: Fault) -> None:
    @fault.replaces(RowParallel, "forward")
    def forward(original: Any, self: RowParallel, x_TK: Tensor) -> Tensor:
        fault.reach()
        group, self.group = self.group, SINGLE
        try:
            return original(self, x_TK)
        finally:
            self.group = group


def bias_of_every_rank(fault: Fault) -> None:
    @fault.replaces(RowParallel, "forward")
    def forward(original: Any, self: RowParallel, x_TK: Tensor) -> Tensor:
        fault.reach()
        assert self.bias is not None
        return original(self, x_TK) + (self.group.size - 1) * self.bias


def every_id_is_mine(fault: Fault) -> None:
    @fault.replaces(VocabParallelEmbedding, "forward")
    def forward(original: Any, self: VocabParallelEmbedding, token_ids_T: Tensor) -> Tensor:
        fault.reach()
        return self.group.all_reduce(F.embedding(token_ids_T % self.weight.shape[0], self.weight))


def logits_gathered_in_reversed_order(fault: Fault) -> None:
    @fault.replaces(VocabParallelHead, "forward")
    def forward(original: Any, self: VocabParallelHead, hidden_RN: Tensor) -> Tensor:
        fault.reach()
        parts = self.group.all_gather(self.columns(hidden_RN)).chunk(self.group.size, dim=1)
        return torch.cat(parts[::-1], dim=1)[:, : self.vocab_size]


def padding_not_cut(fault: Fault) -> None:
    @fault.replaces(VocabParallelHead, "forward")
    def forward(original: Any, self: VocabParallelHead, hidden_RN: Tensor) -> Tensor:
        fault.reach()
        return self.group.all_gather(self.columns(hidden_RN))


def log_sum_exp_with_the_local_max(fault: Fault) -> None:
    @fault.replaces(vocab_module, "sum_of_masses")
    def sum_of_masses(
        original: Any, logits_RL: Tensor, temperature_R: Tensor, row_max_R: Tensor, vocab_size: int
    ) -> Tensor:
        local_R = logits_RL.amax(-1)
        if not torch.equal(local_R, row_max_R):
            fault.reach()
        return original(logits_RL, temperature_R, local_R, vocab_size)


def padding_counts(fault: Fault) -> None:
    @fault.replaces(vocab_module, "_own_columns")
    def own_columns(original: Any, logits_RL: Tensor, vocab_size: int, group: RankGroup) -> Tensor:
        if original(logits_RL, vocab_size, group).shape != logits_RL.shape:
            fault.reach()
        return logits_RL


# Faults: what a rank holds


def _of_the_mirrored_rank(fault: Fault, projection: str) -> None:
    @fault.replaces(parallel_module, "local_part")
    def local_part(original: Any, spec: Any, name: str, rank: int, tp: int) -> Any:
        if projection in name:
            fault.reach()
            rank = tp - 1 - rank
        return original(spec, name, rank, tp)


def k_proj_of_the_mirrored_rank(fault: Fault) -> None:
    _of_the_mirrored_rank(fault, ".k_proj.")


def up_proj_of_the_mirrored_rank(fault: Fault) -> None:
    _of_the_mirrored_rank(fault, ".up_proj.")


def whole_tensor_read(fault: Fault) -> None:
    @fault.replaces(checkpoint_module, "_parts")
    def parts(original: Any, name: str, whole: Any, *rest: Any) -> Any:
        fault.reach()
        return original(name, whole[:], *rest)


def view_instead_of_a_copy(fault: Fault) -> None:
    """A weight of the decoder becomes the very memory that it is loaded from."""
    decoders: list[Decoder] = []

    @fault.replaces(checkpoint_module, "part_of")
    def part_of(original: Any, decoder: Decoder) -> Any:
        decoders.append(decoder)
        return original(decoder)

    @fault.replaces(checkpoint_module, "write_part")
    def write_part(original: Any, target: Tensor, part: Tensor) -> None:
        for parameter in decoders[-1].parameters():
            if parameter.data_ptr() == target.data_ptr() and parameter.shape == part.shape:
                fault.reach()
                parameter.data = part
                return
        original(target, part)


# Faults: what is refused


def range_check_removed(fault: Fault) -> None:
    @fault.replaces(VocabParallelEmbedding, "forward")
    def forward(original: Any, self: VocabParallelEmbedding, token_ids_T: Tensor) -> Tensor:
        clamped_T = token_ids_T.clamp(0, self.vocab_size - 1)
        if not torch.equal(clamped_T, token_ids_T):
            fault.reach()
        return original(self, clamped_T)


def ids_checked_against_the_local_vocabulary(fault: Fault) -> None:
    @fault.replaces(VocabParallelEmbedding, "forward")
    def forward(original: Any, self: VocabParallelEmbedding, token_ids_T: Tensor) -> Tensor:
        if (token_ids_T >= self.weight.shape[0]).any():
            fault.reach()
        whole, self.vocab_size = self.vocab_size, self.weight.shape[0]
        try:
            return original(self, token_ids_T)
        finally:
            self.vocab_size = whole


tensor_set_check_removed: Callable[[Fault], None] = mutants.tensor_set_check_removed


# Oracles


def check_logits(group: RankGroup, folder: Path | None) -> None:
    """Logits equal those of one rank to 1e-12 in fp64."""
    whole = score(Decoder.random(LLAMA, 1, numerics=NUMERICS, dtype=torch.float64), texts())
    logits = score_random(group, LLAMA, NUMERICS, torch.float64)
    assert logits.shape == whole.shape, f"the logits have shape {list(logits.shape)}"
    assert (logits - whole).abs().max() < 1e-12, "the logits differ"


def check_log_sum_exp(group: RankGroup, folder: Path | None) -> None:
    """Log-sum-exps and tokens over the cut vocabulary have the bits of the whole rows."""
    logits_RV = 3 * torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    temperature_R = torch.ones(9, dtype=torch.float64)
    size = -(-VOCAB // group.size)
    padded = F.pad(logits_RV, (0, size * group.size - VOCAB), value=20.0)
    mine = padded[:, group.rank * size : (group.rank + 1) * size].contiguous()
    where: dict[str, Any] = {"vocab_size": VOCAB, "group": group}
    log_sums = vocab_module.log_sum_exp(mine, temperature_R, **where)
    assert torch.equal(log_sums, sampling.log_sum_exp(logits_RV, temperature_R)), "the log-sum-exps differ"
    greedy = vocab_module.sample_greedy(mine, 0 * temperature_R, **where)
    assert torch.equal(greedy.tokens_R, logits_RV.argmax(1)), "the tokens differ"


def check_ids(group: RankGroup, folder: Path | None) -> None:
    """Ids of the whole vocabulary are taken, others refused."""
    decoder = parallel_module.random_decoder(LLAMA, 1, numerics=NUMERICS, group=group)
    for token_id in (0, 24, 25, VOCAB - 1):
        try:
            Scorer(decoder, 1, 4).hidden([[token_id]])
        except IndexError:
            raise AssertionError(f"id {token_id} of the vocabulary is refused") from None
    for token_id in (-1, VOCAB, VOCAB + 1):
        try:
            Scorer(decoder, 1, 4).hidden([[token_id]])
        except IndexError:
            continue
        raise AssertionError(f"id {token_id} outside the vocabulary is accepted")


def check_bytes(group: RankGroup, folder: Path) -> None:
    """A rank reads what it holds."""
    tensors, num_bytes = load_and_count(group, folder)
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert num_bytes <= held, f"{num_bytes} bytes are read for {held}"


def check_state_dict_is_copied(group: RankGroup, folder: Path) -> None:
    """What becomes of a state dict after an update is nothing to the model."""
    decoder = checkpoint_module.load_decoder(folder, numerics=NUMERICS, group=group)
    weights = load_file(folder / "model.safetensors")
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    checkpoint_module.update_decoder(decoder, weights)
    before = local_tensors(decoder)
    for tensor in weights.values():
        tensor.zero_()
    after = decoder.tensors()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items()), "the model changes with the dict"


def check_file_is_copied(group: RankGroup, folder: Path) -> None:
    """What becomes of a checkpoint after it is loaded is nothing to the model."""
    with TemporaryDirectory() as name:
        own = Path(name)
        for file in folder.iterdir():
            (own / file.name).write_bytes(file.read_bytes())
        decoder = checkpoint_module.load_decoder(own, numerics=NUMERICS, group=group)
        before = local_tensors(decoder)
        with open(own / "model.safetensors", "r+b") as stream:
            stream.write(bytes((own / "model.safetensors").stat().st_size))
        after = decoder.tensors()
        assert all(torch.equal(tensor, after[n]) for n, tensor in before.items()), "the model changes with the file"


def check_tensor_set(group: RankGroup, folder: Path) -> None:
    """A checkpoint with a tensor too many or too few is refused."""
    weights = load_file(folder / "model.safetensors")
    norm = "model.layers.1.self_attn.q_norm.weight"
    extra = {**weights, "model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}
    missing = {name: tensor for name, tensor in weights.items() if name != norm}
    for what, changed in (("many", extra), ("few", missing)):
        with TemporaryDirectory() as name:
            (Path(name) / "config.json").write_bytes((folder / "config.json").read_bytes())
            save_file(changed, Path(name) / "model.safetensors")
            try:
                checkpoint_module.load_decoder(name, numerics=NUMERICS, group=group)
            except CheckpointError:
                continue
        raise AssertionError(f"a checkpoint with one tensor too {what} is loaded")
