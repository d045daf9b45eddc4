"""How far `fast` is from `invariant`, and both from fp32; and how often batching changes texts of the trained `tiny`.

    python benchmarks/fast_distance_h200.py [--json FILE]
    python benchmarks/fast_distance_h200.py --device cpu --small

Greedy texts of Qwen3-0.6B with random bf16 weights, alone and together. Ends with exit code 1 if a text that
`invariant` gives hangs on the batch.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine_random import MAX_SEQ_LEN, Arrival, Logits, build_random, model_specs, observed_logits, read_options, serve
from engine_runs import build

from paged import Engine, SamplingParams
from paged.core.model_spec import ModelSpec
from paged.workload.arithmetic import builtin_prompts


@dataclass(frozen=True)
class Scale:
    """How large everything is: a card's size, or one that a CPU gets through.

    Attributes:
        num_prompts: of the random model.
        num_tokens: of each of their texts.
        batches: sizes of the groups of ``tiny``'s prompts.
        tiny_tokens: most that ``tiny`` generates.
    """

    num_prompts: int = 32
    num_tokens: int = 48
    batches: Sequence[int] = (1, 8, 64)
    tiny_tokens: int = 96


SMALL = Scale(num_prompts=8, num_tokens=16, batches=(1, 4, 8), tiny_tokens=30)


@dataclass
class Texts:
    """Greedy texts of some prompts and, by request, the logits of each token by position."""

    token_ids: list[list[int]]
    logits: Logits


def greedy_texts(engine: Engine, prompts: Sequence[Any], num_tokens: int, batch: int, *, observe: bool) -> Texts:
    """Texts of prompts that are given to the engine ``batch`` at a time."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    names = [f"text-{index}" for index in range(len(prompts))]
    texts: list[list[int]] = []
    logits: Logits = {}
    for first in range(0, len(prompts), batch):
        group = [
            Arrival(name, prompt, params, 0)
            for name, prompt in zip(names[first : first + batch], prompts[first : first + batch], strict=True)
        ]
        ids = [arrival.id for arrival in group]
        with observed_logits(engine, ids if observe else []) as seen:
            outputs = serve(engine, group, ids)
        texts += [outputs[request_id].token_ids for request_id in ids]
        logits |= seen
    return Texts(texts, logits)


def compare_texts(ours: Texts, theirs: Texts) -> dict[str, float]:
    """How many texts differ, and how far the logits are apart while the texts before them are the same."""
    largest = total = count = 0.0
    for left, right, mine, others in zip(
        ours.token_ids, theirs.token_ids, ours.logits.values(), theirs.logits.values(), strict=True
    ):
        num_same = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), len(left))
        for position in sorted(mine)[: num_same + 1]:
            apart_V = (mine[position].float() - others[position].float()).abs()
            largest, total, count = max(largest, float(apart_V.max())), total + float(apart_V.mean()), count + 1
    different = sum(left != right for left, right in zip(ours.token_ids, theirs.token_ids, strict=True))
    return {
        "texts": len(ours.token_ids),
        "different": different,
        "max_dlogit": largest,
        "mean_dlogit": total / count if count else 0.0,
        "positions": count,
    }


def compare_fast(spec: ModelSpec, scale: Scale, device: str) -> dict[str, dict[str, float]]:
    """Greedy texts of a random model: both kinds of numerics, alone and together, and fp32 with the same weights."""
    rng = random.Random(5)
    count = scale.num_prompts
    prompts = [[rng.randrange(spec.vocab_size) for _ in range(rng.randint(4, 90))] for _ in range(count)]
    fields: dict[str, Any] = {"max_num_seqs": count, "num_blocks": 16 * count, "prefix_reuse": False}
    texts: dict[tuple[str, str], Texts] = {}
    for numerics in ("invariant", "fast"):
        engine = build_random(spec, device, numerics=numerics, **fields)
        for company, batch in (("alone", 1), ("together", count)):
            texts[numerics, company] = greedy_texts(engine, prompts, scale.num_tokens, batch, observe=True)
        engine.close()
    runner: Any = engine.executor
    rounded = runner.decoder.tensors()
    wide = build("random/model", spec, device=device, dtype="float32", max_seq_len=MAX_SEQ_LEN, **fields)
    wide.load_weights(rounded)
    exact = greedy_texts(wide, prompts, scale.num_tokens, count, observe=True)
    wide.close()
    return {
        "invariant: together / alone": compare_texts(texts["invariant", "together"], texts["invariant", "alone"]),
        "fast: together / alone": compare_texts(texts["fast", "together"], texts["fast", "alone"]),
        "fast / invariant, together": compare_texts(texts["fast", "together"], texts["invariant", "together"]),
        "invariant / fp32": compare_texts(texts["invariant", "together"], exact),
        "fast / fp32": compare_texts(texts["fast", "together"], exact),
    }


def compare_trained(scale: Scale, device: str) -> dict[str, dict[str, float]]:
    """How many greedy texts of the trained ``tiny`` in bf16 change with the number of prompts served together."""
    most = max(scale.batches)
    prompts = builtin_prompts(most, 3)
    rows: dict[str, dict[str, float]] = {}
    fields: dict[str, Any] = {"max_num_seqs": most, "num_blocks": 16 * most, "max_seq_len": 256, "prefix_reuse": False}
    for numerics in ("invariant", "fast"):
        engine = build("tiny", None, weights="auto", device=device, dtype="bfloat16", numerics=numerics, **fields)
        texts = [
            greedy_texts(engine, prompts, scale.tiny_tokens, batch, observe=False).token_ids for batch in scale.batches
        ]
        engine.close()
        for batch, others in zip(scale.batches[1:], texts[1:], strict=True):
            different = sum(left != right for left, right in zip(texts[0], others, strict=True))
            rows[f"tiny, {numerics}: {batch} together / alone"] = {"texts": most, "different": different}
    return rows


def main() -> None:
    """Compare and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options = read_options(parser)
    scale = SMALL if options.small else Scale()
    rows = compare_fast(next(iter(model_specs(options.small).values())), scale, options.device)
    rows |= compare_trained(scale, options.device)
    for name, row in rows.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    hang = [
        name for name, row in rows.items() if name.startswith(("invariant: ", "tiny, invariant")) and row["different"]
    ]
    sys.exit(1 if hang else 0)


if __name__ == "__main__":
    main()
