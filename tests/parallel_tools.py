"""Small models of every family for tests of tensor parallelism, and what each rank does with its part of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paged.core.model_spec import ModelSpec
from paged.kernels.batch_layout import BatchLayout
from paged.kernels.collectives import RankGroup
from paged.kernels.numerics import Numerics
from paged.model import checkpoint
from paged.model.checkpoint import load_decoder
from paged.model.decoder import Decoder
from paged.model.parallel import random_decoder
from paged.runner.kv_cache import KVCache

VOCAB = 99
QWEN3 = ModelSpec(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    max_position_embeddings=128,
)
MISTRAL = replace(QWEN3, model_type="mistral", qk_norm="none", rope_theta=1e6)
LLAMA = replace(QWEN3, model_type="llama", qk_norm="none", qkv_bias=True, o_bias=True, mlp_bias=True)
OLMOE = replace(
    QWEN3,
    model_type="olmoe",
    qk_norm="full",
    clip_qkv=1.5,
    num_experts=6,
    num_experts_per_token=3,
    intermediate_size=48,
)
SPECS = {
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "llama with biases": LLAMA,
    "olmoe": OLMOE,
    "qwen3 tied": replace(QWEN3, tie_word_embeddings=True),
    "qwen3, 2 kv heads": replace(QWEN3, num_kv_heads=2),
    "mistral, 5 tokens": replace(MISTRAL, vocab_size=5),
    "olmoe, 1 kv head": replace(OLMOE, num_kv_heads=1, norm_topk_prob=True),
}
BLOCK = 4


def texts(vocab_size: int = VOCAB) -> list[list[int]]:
    """Texts of 5, 17, 8 and 1 tokens; the vocabulary's first and last ids occur."""
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in (5, 17, 8, 1)]
    drawn[0][0], drawn[1][3], drawn[2][-1] = 0, vocab_size - 1, vocab_size - 2
    return drawn


class Scorer:
    """Feeds texts to a decoder, over a cache of its own."""

    def __init__(self, decoder: Decoder, num_texts: int, max_tokens: int) -> None:
        self.decoder = decoder
        self.num_blocks = -(-max_tokens // BLOCK)
        self.cache = KVCache(decoder.local_spec, num_texts * self.num_blocks, BLOCK, dtype=decoder.dtype)
        for layer in self.cache.layers:
            layer.key.fill_(torch.nan)
            layer.value.fill_(torch.nan)
        self.lengths = [0] * num_texts

    def hidden(self, chunks: Sequence[Sequence[int]]) -> torch.Tensor:
        """Hidden states of the next tokens of every text, text by text; a text without any sits this step out."""
        active = [index for index, chunk in enumerate(chunks) if chunk]
        blocks = [[index * self.num_blocks + block for block in range(self.num_blocks)] for index in active]
        starts = [self.lengths[index] for index in active]
        layout = BatchLayout.build(starts, [len(chunks[index]) for index in active], blocks, BLOCK, torch.device("cpu"))
        token_ids = torch.tensor([token for index in active for token in chunks[index]])
        hidden: torch.Tensor = self.decoder(token_ids, layout, self.cache)
        for index in active:
            self.lengths[index] += len(chunks[index])
        return hidden

    def logits(self, chunks: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits of the same rows."""
        return self.decoder.logits(self.hidden(chunks))


def score(decoder: Decoder, which: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits [tokens, vocab] of all texts: one chunk of most of each, then one token a step."""
    scorer = Scorer(decoder, len(which), max(map(len, which)))
    rows = [scorer.logits([text[: max(1, len(text) - 4)] for text in which])]
    for _ in range(4):
        chunks = [text[length : length + 1] for text, length in zip(which, scorer.lengths, strict=True)]
        rows.append(scorer.logits(chunks))
    return torch.cat(rows)


def score_random(
    group: RankGroup, spec: ModelSpec, numerics: Numerics, dtype: torch.dtype, alone: bool = False
) -> torch.Tensor:
    """Logits of a random model's texts; ``alone``: of the second text without the others."""
    decoder = random_decoder(spec, 1, numerics=numerics, group=group, dtype=dtype)
    which = texts(spec.vocab_size)
    return score(decoder, which[1:2] if alone else which)


def score_folder(group: RankGroup, folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """Logits of a checkpoint's texts."""
    decoder = load_decoder(folder, numerics=Numerics(), group=group, dtype=dtype)
    return score(decoder, texts(decoder.spec.vocab_size))


def local_tensors(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Copies of what this rank holds."""
    return {name: tensor.clone() for name, tensor in decoder.tensors().items()}


def join(spec: ModelSpec, parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Whole tensors from those of all ranks, by rules written apart from the program's; padding must be 0.

    Copies of a key/value head must be equal, and so must what every rank holds whole.
    """
    joined: dict[str, torch.Tensor] = {}
    tp = len(parts)
    for name, shape in spec.parameter_shapes().items():
        pieces = [part[name] for part in parts]
        last = name.split(".")[-2]
        if last in ("k_proj", "v_proj") or (last == "k_norm" and spec.qk_norm == "full"):
            copies = max(1, tp // spec.num_kv_heads)
            assert all(torch.equal(pieces[i], pieces[i - i % copies]) for i in range(tp)), name
            joined[name] = torch.cat(pieces[::copies])
        elif last in ("o_proj", "down_proj") and name.endswith(".weight"):
            joined[name] = torch.cat(pieces, dim=1)
        elif last in ("embed_tokens", "lm_head"):
            rows = torch.cat(pieces)
            assert not rows[shape[0] :].any(), f"{name} has padding that is not 0"
            joined[name] = rows[: shape[0]]
        elif last in ("q_proj", "gate_proj", "up_proj") or (last == "q_norm" and spec.qk_norm == "full"):
            joined[name] = torch.cat(pieces)
        else:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces), name
            joined[name] = pieces[0]
    return joined


def greedy(group: RankGroup, folder: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The ``count`` likeliest next tokens of each prompt, in fp32, all prompts together."""
    decoder: Any = load_decoder(folder, numerics=Numerics(), group=group, dtype=torch.float32)
    scorer = Scorer(decoder, len(prompts), max(map(len, prompts)) + count)
    chunks = [list(prompt) for prompt in prompts]
    made: list[list[int]] = [[] for _ in prompts]
    for _ in range(count):
        logits = scorer.logits(chunks)
        last = torch.tensor([len(chunk) for chunk in chunks]).cumsum(0) - 1
        chunks = [[token] for token in logits[last].argmax(1).tolist()]
        for text, chunk in zip(made, chunks, strict=True):
            text += chunk
    return made


class RecordingReader:
    """safetensors' reader of a file, which counts the bytes of all tensors that it gives."""

    def __init__(self, inner: Any, sizes: list[int]) -> None:
        self.inner = inner
        self.sizes = sizes

    def __enter__(self) -> RecordingReader:
        return RecordingReader(self.inner.__enter__(), self.sizes)

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._count(self.inner[index])

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._count(self.inner.get_tensor(name))

    def get_slice(self, name: str) -> RecordingReader:
        return RecordingReader(self.inner.get_slice(name), self.sizes)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sizes.append(tensor.numel() * tensor.element_size())
        return tensor


@contextmanager
def recorded_reads() -> Iterator[list[int]]:
    """The bytes of every tensor that is read from a checkpoint file meanwhile."""
    sizes: list[int] = []
    original = checkpoint.safe_open
    checkpoint.safe_open = lambda *args, **options: RecordingReader(original(*args, **options), sizes)
    try:
        yield sizes
    finally:
        checkpoint.safe_open = original


def load_and_count(group: RankGroup, folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    """What a rank holds of a checkpoint, and the bytes that it read."""
    with recorded_reads() as sizes:
        decoder = load_decoder(folder, numerics=Numerics(), group=group)
    return local_tensors(decoder), sum(sizes)
