"""Reading a Hugging Face checkpoint folder into a decoder: everything is checked before anything is loaded."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paged.core.model_spec import ModelSpec
from paged.core.sharding import Part, check_k_segments, check_tp, local_parameter_shapes, local_part
from paged.kernels.collectives import SINGLE, RankGroup
from paged.kernels.numerics import Numerics
from paged.model.decoder import TORCH_DTYPES, Decoder
from paged.model.parallel import Cut, build_decoder, part_of, write_part

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Buffers that old checkpoints hold beside their parameters: tables that follow from config.json, causal masks.
IGNORED_BUFFERS = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"
    r"|model\.layers\.\d+\.(self_attn|attn)\.(bias|masked_bias)"
)
# The experts of a layer in two tensors, as transformers saves them with save_original_format=False.
FUSED_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up|down)_proj")
# Rows of a tied head that are compared with the embedding at a time.
COMPARED_ROWS = 16384

logger = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint is not what its ``config.json`` describes; ``violations`` holds one sentence for each fault."""

    def __init__(self, source: Path | str, violations: list[str]) -> None:
        self.violations = tuple(violations)
        lines = "\n".join(f"  {violation}" for violation in violations)
        noun = "violation" if len(violations) == 1 else "violations"
        super().__init__(f"{source} can't be loaded, {len(violations)} {noun}:\n{lines}")


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """Where a tensor lies, from a file's header."""

    file: str
    shape: tuple[int, ...]
    dtype: str


def load_decoder(
    folder: Path | str,
    *,
    numerics: Numerics,
    group: RankGroup = SINGLE,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_positions: int | None = None,
) -> Decoder:
    """The decoder of a checkpoint folder: ``config.json``, ``generation_config.json`` and safetensors files.

    The weights are one ``model.safetensors`` or the shards that ``model.safetensors.index.json`` names. They are
    streamed tensor by tensor into the decoder's own memory, rounded to ``dtype`` (``None``: the config's), so that
    host memory holds the model and one tensor at most. Experts may be stored one by one or fused by layer.

    Each rank of a ``group`` checks the whole model's tensors, but reads its own part of each; nothing is exchanged.

    Raises:
        ValueError: the configuration is malformed or not supported; names the file and the field. Or the model can't
            be cut over the group's ranks.
        CheckpointError: the tensors are not exactly those of the architecture; lists every violation.
    """
    folder = Path(folder)
    spec = ModelSpec.from_folder(folder, max_seq_len=max_positions)
    check_tp(spec, group.size)
    check_k_segments(spec, group.size, numerics.k_segments)
    stored = check_checkpoint(folder, spec, group)
    decoder = build_decoder(
        spec, numerics=numerics, group=group, dtype=dtype, device=device, max_positions=max_positions
    )
    targets = decoder.tensors()
    shapes = local_parameter_shapes(spec, group.size)
    assert {name: tuple(target.shape) for name, target in targets.items()} == shapes
    for name, part in _read_parts(folder, stored, targets.keys(), part_of(decoder)):
        write_part(targets[name], part)
        del part  # before the next one is read
    return decoder


def update_decoder(decoder: Decoder, weights: Mapping[str, torch.Tensor] | Path | str) -> None:
    """Write other weights into a decoder's memory, all of them or none.

    Everything is checked before anything is written. The old weights are kept on the host while the new ones are
    copied, and put back if that fails or is interrupted: host memory holds the model once more.

    All ranks of a sharded decoder call this together, each with the whole weights, of which it takes its part. If one
    rank fails, none changes.

    Args:
        decoder: its tensors keep their addresses.
        weights: tensors by Hugging Face name on any device, rounded to the decoder's dtype; or a checkpoint folder.

    Raises:
        ValueError: the folder's ``config.json`` describes another model, or other end tokens.
        CheckpointError: the tensors are not exactly those of the model; lists every violation.
        RuntimeError: another rank failed, and raises its own error.
    """
    targets = decoder.tensors()
    old: dict[str, torch.Tensor] = {}
    error: BaseException | None = None
    try:
        try:
            for name, part in _checked_parts(decoder, weights):
                assert part.shape[1:] == targets[name].shape[1:], f"{name} changed its shape after it was checked"
                old[name] = targets[name].to("cpu", copy=True)
                write_part(targets[name], part)
                del part
            assert old.keys() == targets.keys(), "tensors that were there when they were checked are gone"
        except BaseException as raised:
            error = raised
        has_failed = torch.tensor([error is not None], device=decoder.device)
        failed = decoder.group.all_gather(has_failed).nonzero().flatten().tolist()
        if error is None and failed:
            error = RuntimeError(f"the weights stay as they were on all ranks, because rank {failed[0]} failed")
        if error is not None:
            raise error
    except BaseException:
        for name, tensor in old.items():
            targets[name].copy_(tensor)
        raise


def _checked_parts(
    decoder: Decoder, weights: Mapping[str, torch.Tensor] | Path | str
) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's part of every tensor, by the names of the decoder's, once all are checked."""
    spec, targets = decoder.spec, decoder.tensors()
    if isinstance(weights, Mapping):
        # One look at the mapping: it may answer differently the next time.
        return _parts_of(dict(weights.items()), spec, targets, part_of(decoder))
    folder = Path(weights)
    found = ModelSpec.from_folder(folder, max_seq_len=decoder.max_positions)
    spec.check_agrees(found)
    if found.eos_token_ids != spec.eos_token_ids:
        ends = f"{list(found.eos_token_ids)} instead of {list(spec.eos_token_ids)}"
        raise ValueError(f"{folder}: eos_token_id is {ends}; other end tokens need a new engine")
    return _read_parts(folder, check_checkpoint(folder, spec, decoder.group), targets.keys(), part_of(decoder))


def _parts_of(
    weights: Mapping[str, torch.Tensor], spec: ModelSpec, targets: Mapping[str, torch.Tensor], cut: Cut
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parts of a state dict's tensors by the names of ``targets``, once all are checked.

    Those that lie in the memory of ``targets`` are copies: writing one target must not change what another gets.
    """
    is_fused = spec.num_experts > 0 and any(FUSED_EXPERTS.fullmatch(name) for name in weights)
    expected = spec.parameter_shapes(fused_experts=True) if is_fused else spec.parameter_shapes()
    optional = {HEAD: expected[EMBEDDING]} if spec.tie_word_embeddings else {}
    violations = [f"tensor {name} is missing" for name in expected if name not in weights]
    chosen = {name: tensor for name, tensor in weights.items() if name in expected or not _is_ignored(name)}
    for name, tensor in chosen.items():
        shape = expected.get(name, optional.get(name))
        if shape is None:
            violations.append(f"tensor {name} is not part of the model")
        elif not is_dense(tensor):
            violations.append(f"tensor {name} is no dense tensor with data, but {type(tensor).__name__}")
        elif tuple(tensor.shape) != shape:
            violations.append(f"tensor {name} has shape {list(tensor.shape)}, the model needs {list(shape)}")
        elif tensor.dtype not in TORCH_DTYPES.values():
            violations.append(f"tensor {name} has dtype {tensor.dtype}, not one of {', '.join(TORCH_DTYPES)}")
    if not violations and HEAD in chosen and HEAD in optional and not torch.equal(chosen[HEAD], chosen[EMBEDDING]):
        violations.append(f"tensor {HEAD} differs from {EMBEDDING}, though the model ties them")
    if violations:
        raise CheckpointError("the state dict", violations)
    own = {target.untyped_storage().data_ptr() for target in targets.values()}
    safe = {name: t.clone() if t.untyped_storage().data_ptr() in own else t for name, t in chosen.items()}
    return (pair for name, tensor in safe.items() for pair in _parts(name, tensor, targets, cut))


def is_dense(value: object) -> bool:
    """Whether a value of a state dict is a tensor whose elements lie in memory, each at its place."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.layout == torch.strided and not value.is_meta and not value.is_nested


def _is_ignored(name: str) -> bool:
    return IGNORED_BUFFERS.fullmatch(name) is not None


def _read_parts(
    folder: Path, stored: Mapping[str, _StoredTensor], wanted: Collection[str], cut: Cut
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parts of the tensors that ``check_checkpoint`` found, one at a time, file by file.

    They lie in the file's own pages: copy them before the iterator goes on.
    """
    by_file: dict[str, list[str]] = {}
    for name, place in stored.items():
        by_file.setdefault(place.file, []).append(name)
    for file, names in by_file.items():
        with safe_open(folder / file, framework="pt") as reader:
            for name in names:
                yield from _parts(name, reader.get_slice(name), wanted, cut)


def _parts(name: str, whole: Any, wanted: Collection[str], cut: Cut) -> Iterator[tuple[str, torch.Tensor]]:
    """The part of a tensor, or of each expert's tensors where a layer's are fused; nothing for a name not ``wanted``.

    ``whole`` gives tensors when it is indexed: a tensor, or a file's slice, which reads no more than is asked for.
    """
    fused = FUSED_EXPERTS.fullmatch(name)
    if fused is None:
        if name in wanted:
            yield name, cut(name, whole)
        return
    prefix, part = fused.groups()
    names = ("gate", "up") if part == "gate_up" else ("down",)
    num_experts, num_rows = (whole.shape if isinstance(whole, torch.Tensor) else whole.get_shape())[:2]
    size = num_rows // len(names)
    for expert in range(num_experts):
        for index, matrix in enumerate(names):
            one = f"{prefix}{expert}.{matrix}_proj.weight"
            yield one, cut(one, _Matrix(whole, expert, index * size, (index + 1) * size))


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Rows ``start`` to ``stop - 1`` of one expert's matrix in a fused tensor ``whole`` [E, rows, columns]."""

    whole: Any
    expert: int
    start: int
    stop: int

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        first, last, _ = index[0].indices(self.stop - self.start)
        part: torch.Tensor = self.whole[(self.expert, slice(self.start + first, self.start + last), *index[1:])]
        return part


def check_checkpoint(folder: Path | str, spec: ModelSpec, group: RankGroup = SINGLE) -> Mapping[str, _StoredTensor]:
    """Compare the headers of a folder's files with ``spec``; where each tensor of the model lies, if they agree.

    A model with a tied head may store it all the same, provided that it equals the embedding; each rank of ``group``
    compares the rows that it will hold. Buffers of ``IGNORED_BUFFERS`` are left out of the result.

    Raises:
        CheckpointError: listing every violation.
    """
    folder = Path(folder)
    violations: list[str] = []
    expected = spec.parameter_shapes()
    stored, unreadable = _read_headers(folder, expected, violations)
    ignored = [name for name in stored if name not in expected and _is_ignored(name)]
    if ignored:
        logger.info("%s: %d buffers of an old checkpoint ignored, %s first", folder, len(ignored), ignored[0])
    for name in ignored:
        del stored[name]
    if spec.num_experts and any(FUSED_EXPERTS.fullmatch(name) for name in (*stored, *unreadable)):
        expected = spec.parameter_shapes(fused_experts=True)
    optional = {HEAD: expected[EMBEDDING]} if spec.tie_word_embeddings else {}
    violations += [f"tensor {name} is missing" for name in expected if name not in stored and name not in unreadable]
    for name, tensor in stored.items():
        shape = expected.get(name, optional.get(name))
        if shape is None:
            violations.append(f"tensor {name} in {tensor.file} is not part of the model")
            continue
        if tensor.shape != shape:
            violations.append(
                f"tensor {name} in {tensor.file} has shape {list(tensor.shape)}, the model needs {list(shape)}"
            )
        if tensor.dtype not in FLOAT_DTYPES:
            violations.append(
                f"tensor {name} in {tensor.file} has dtype {tensor.dtype}, not one of {', '.join(FLOAT_DTYPES)}"
            )
    part = local_part(spec, HEAD, group.rank, group.size)
    if not violations and HEAD in stored and HEAD in optional and not _equals_embedding(folder, stored, part):
        violations.append(f"tensor {HEAD} differs from {EMBEDDING}, though config.json has tie_word_embeddings true")
    if violations:
        raise CheckpointError(folder, violations)
    return stored


def _read_headers(
    folder: Path, expected: Collection[str], violations: list[str]
) -> tuple[dict[str, _StoredTensor], Collection[str]]:
    """The tensors of all weight files, and the names that no file could be asked about.

    Appends what is wrong with the files and the index to ``violations``. The tensors of an unreadable file are not
    reported as missing too: that would hide the fault in a flood.
    """
    has_index, has_single = (folder / INDEX_FILE).exists(), (folder / SINGLE_FILE).exists()
    if has_index and has_single:
        violations.append(f"both {SINGLE_FILE} and {INDEX_FILE} are there; which one counts is not clear")
        return {}, expected
    if not has_index and not has_single:
        violations.append(f"neither {SINGLE_FILE} nor {INDEX_FILE} is there")
        return {}, expected
    weight_map = _read_index(folder, violations) if has_index else dict.fromkeys(expected, SINGLE_FILE)
    if weight_map is None:
        return {}, expected
    stored: dict[str, _StoredTensor] = {}
    unreadable: set[str] = set()
    for file in sorted(set(weight_map.values())):
        placed = [name for name, home in weight_map.items() if home == file]
        fault = _read_header(folder, file, stored, weight_map if has_index else None, violations)
        if fault is not None:
            violations.append(fault)
            unreadable.update(placed)
        elif has_index:
            absent = [name for name in placed if name not in stored]
            violations += [f"tensor {name} is not in {file}, where {INDEX_FILE} places it" for name in absent]
            unreadable.update(absent)
    return stored, unreadable


def _read_header(
    folder: Path,
    file: str,
    stored: dict[str, _StoredTensor],
    weight_map: Mapping[str, str] | None,
    violations: list[str],
) -> str | None:
    """Add one file's tensors to ``stored``; a sentence if the file can't be read."""
    if Path(file).name != file:
        return f"shard {file!r}, named by {INDEX_FILE}, is not a file of the folder"
    if not (folder / file).is_file():
        return f"shard {file}, named by {INDEX_FILE}, is absent"
    try:
        with safe_open(folder / file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (a file is not iterable)
                header = reader.get_slice(name)
                if weight_map is not None and weight_map.get(name) != file:
                    place = f"places it in {weight_map[name]}" if name in weight_map else "does not name it"
                    violations.append(f"tensor {name} is in {file}, but {INDEX_FILE} {place}")
                stored.setdefault(name, _StoredTensor(file, tuple(header.get_shape()), header.get_dtype()))
    except (SafetensorError, OSError) as error:
        return f"file {file} is damaged or can't be read ({error})"
    return None


def _read_index(folder: Path, violations: list[str]) -> dict[str, str] | None:
    """The index's map of tensor names to files, or ``None`` and a violation."""
    try:
        index: Any = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        violations.append(f"file {INDEX_FILE} is damaged or can't be read ({error})")
        return None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        violations.append(f"file {INDEX_FILE} holds no weight_map of tensor names to files")
        return None
    return weight_map


def _equals_embedding(folder: Path, stored: Mapping[str, _StoredTensor], part: Part) -> bool:
    """Whether the part's rows of the stored head equal those of the embedding bit by bit, read a few at a time."""
    head, embedding = stored[HEAD], stored[EMBEDDING]
    if head.dtype != embedding.dtype:
        return False
    with (
        safe_open(folder / head.file, framework="pt") as left,
        safe_open(folder / embedding.file, framework="pt") as right,
    ):
        head_rows, embedding_rows = left.get_slice(HEAD), right.get_slice(EMBEDDING)
        for first in range(part.start, part.stop, COMPARED_ROWS):
            rows = slice(first, min(first + COMPARED_ROWS, part.stop))
            if not torch.equal(head_rows[rows], embedding_rows[rows]):
                return False
    return True
