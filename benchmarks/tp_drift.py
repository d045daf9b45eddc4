"""How far do the logits of a bf16 model move when it is cut over ranks? On random and on trained weights.

    python benchmarks/tp_drift.py

Scores texts on one rank and over 2 and 4 ranks (processes on the CPU), and prints one row for each model, number of
ranks and way of adding up the ranks' terms: their difference in the logits, and rows whose likeliest token is another.
Each way is compared with one rank of the same ``k_segments``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from paged.core.model_spec import ModelSpec
from paged.kernels.batch_layout import BatchLayout
from paged.kernels.collectives import SINGLE, RankGroup
from paged.kernels.numerics import Numerics
from paged.model.checkpoint import load_decoder
from paged.model.decoder import Decoder
from paged.model.locate import checkpoint_folder
from paged.model.parallel import random_decoder
from paged.runner.kv_cache import KVCache
from paged.runner.text import Tokenizer
from paged.workload.arithmetic import builtin_prompts, derivation

WAYS = {
    "reduce_dtype=model": Numerics(),
    "reduce_dtype=float32": Numerics(reduce_dtype="float32"),
    "k_segments=4": Numerics(k_segments=4),
}
NUM_TEXTS, RANDOM_LENGTH = 16, 64


def random_model(numerics: Numerics, group: RankGroup) -> Decoder:
    """A random model of the tiny checkpoint's shape, 4 layers and hidden size 256, with a vocabulary of 512."""
    spec = replace(ModelSpec.from_folder(checkpoint_folder("tiny")), vocab_size=512, eos_token_ids=())
    return random_decoder(spec, 0, numerics=numerics, group=group, dtype=torch.bfloat16)


def trained_model(numerics: Numerics, group: RankGroup) -> Decoder:
    """The tiny checkpoint."""
    return load_decoder(checkpoint_folder("tiny"), numerics=numerics, group=group, dtype=torch.bfloat16)


def random_texts() -> list[list[int]]:
    """Texts of random tokens."""
    ids = torch.randint(0, 512, (NUM_TEXTS, RANDOM_LENGTH), generator=torch.Generator().manual_seed(0))
    return [row.tolist() for row in ids]


def problem_texts() -> list[list[int]]:
    """Expressions and their reductions, which the tiny checkpoint was trained on."""
    tokenizer = Tokenizer(checkpoint_folder("tiny"))
    prompts = builtin_prompts(NUM_TEXTS, 0)
    return [tokenizer.encode(prompt + derivation(prompt.strip()))[:256] for prompt in prompts]


MODELS: dict[str, tuple[Callable[[Numerics, RankGroup], Decoder], Callable[[], list[list[int]]]]] = {
    "random": (random_model, random_texts),
    "trained": (trained_model, problem_texts),
}


def score(decoder: Decoder, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits [tokens, vocab] of all texts."""
    cache = KVCache(decoder.local_spec, len(texts), 256, dtype=torch.bfloat16)
    blocks = [[index] for index in range(len(texts))]
    layout = BatchLayout.build([0] * len(texts), [len(text) for text in texts], blocks, 256, torch.device("cpu"))
    token_ids = torch.tensor([token for text in texts for token in text])
    return decoder.logits(decoder(token_ids, layout, cache))


def measure(rank: int, size: int, port: int) -> None:
    """One rank's part; rank 0 prints."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    group = RankGroup(rank, size, dist.group.WORLD)
    for name, (make, texts) in MODELS.items():
        for way, numerics in WAYS.items():
            sharded = score(make(numerics, group), texts())
            if rank == 0:
                whole = score(make(numerics, SINGLE), texts())
                drift = (sharded - whole).double()
                other = (sharded.argmax(1) != whole.argmax(1)).sum().item()
                rms, most = drift.square().mean().sqrt().item(), drift.abs().max().item()
                print(
                    f"{name:<8} {size:>2}  {way:<21} {rms:>9.2e} {most:>9.2e}  {other:>4} of {len(whole)}", flush=True
                )
    dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    print(f"{'model':<8} tp  {'sums over ranks':<21} {'rms':>9} {'max':>9}  other argmax")
    for size in (2, 4):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(measure, (size, store.port), nprocs=size)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
