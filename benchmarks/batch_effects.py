"""Does company change a sequence? The bf16 experiment of the design study, on random and on trained weights.

    python benchmarks/batch_effects.py

Each trial generates for a victim prompt twice, alone and beside companions that arrive with it, and compares its tokens
and its raw logits at every step up to the first differing token. Prints one row for each model, numerics and way of
sampling.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from paged import Engine, EngineConfig, SamplingParams
from paged.core.model_spec import ModelSpec
from paged.core.plan import StepPlan
from paged.core.scheduler import Scheduler
from paged.kernels.numerics import Numerics
from paged.model.decoder import Decoder
from paged.model.locate import checkpoint_folder
from paged.runner.kv_cache import KVCache
from paged.runner.runner import TorchRunner
from paged.workload.arithmetic import builtin_prompts


def random_engine(numerics: str) -> Engine:
    """A random bf16 model of the tiny checkpoint's shape, 4 layers and hidden size 256, with a vocabulary of 512."""
    spec = replace(ModelSpec.from_folder(checkpoint_folder("tiny")), vocab_size=512, eos_token_ids=())
    decoder = Decoder.random(spec, 0, numerics=Numerics(mode=numerics), dtype=torch.bfloat16)
    cache = KVCache(spec, 256, 16, dtype=torch.bfloat16)
    runner = TorchRunner(decoder, cache, None, max_num_seqs=16, max_seq_len=1024, eos_token_ids=())
    config = EngineConfig(max_num_seqs=16).resolved(cache.device)
    limits = config.limits(num_blocks=256, max_seq_len=1024, vocab_size=512)
    return Engine(runner, Scheduler(limits))


@contextmanager
def logits_of(engine: Engine, request_id: str) -> Iterator[list[torch.Tensor]]:
    """Collects the raw logits that a request's tokens are sampled from."""
    runner = engine.executor
    assert isinstance(runner, TorchRunner)
    seen: list[torch.Tensor] = []
    slots: dict[int, str] = {}

    def observe(plan: StepPlan, rows: Sequence[int], logits_RV: torch.Tensor) -> None:
        slots.update((started.slot, started.request.id) for started in plan.started)
        seen.extend(logits_RV[index].clone() for index, row in enumerate(rows) if slots[plan.slots[row]] == request_id)

    runner.observe_logits = observe
    try:
        yield seen
    finally:
        runner.observe_logits = None


def generate(
    engine: Engine, prompts: list[list[int] | str], params: list[SamplingParams]
) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens and logits of the first prompt."""
    with logits_of(engine, "victim") as logits:
        engine.add_request(prompts[0], params[0], "victim")
        for prompt, one in zip(prompts[1:], params[1:], strict=True):
            engine.add_request(prompt, one)
        tokens: list[int] = []
        while engine.has_unfinished:
            for update in engine.step():
                if update.request_id == "victim":
                    tokens += update.token_ids
    return tokens, logits


def experiment(engine: Engine, temperature: float, trials: int, companions: int, on_text: bool) -> tuple[int, float]:
    """Trials in which the victim's tokens differ, and the largest difference of its logits."""
    rng = random.Random(0)
    num_different, largest = 0, 0.0
    texts = builtin_prompts(trials * (companions + 1), 1)
    for trial in range(trials):
        prompts: list[list[int] | str] = [
            texts[trial * (companions + 1) + i] if on_text else [rng.randrange(512) for _ in range(rng.randint(2, 30))]
            for i in range(companions + 1)
        ]
        params = [
            SamplingParams(max_tokens=64, temperature=temperature, seed=rng.randrange(2**31))
            for _ in range(companions + 1)
        ]
        alone, alone_logits = generate(engine, prompts[:1], params[:1])
        beside, beside_logits = generate(engine, prompts, params)
        num_different += alone != beside
        for one, other, token, other_token in zip(alone_logits, beside_logits, alone, beside, strict=False):
            largest = max(largest, (one - other).abs().max().item())
            if token != other_token:
                break
    return num_different, largest


def main() -> None:
    """Run all rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--companions", type=int, default=7)
    options = parser.parse_args()
    print(f"{options.trials} trials, {options.companions} companions, bf16, torch {torch.__version__}")
    print("| model | numerics | sampling | sequences that differ | max abs dlogit |\n|---|---|---|---|---|")
    for name in ("random", "trained"):
        for numerics in ("invariant", "fast"):
            if name == "random":
                engine = random_engine(numerics)
            else:
                config = EngineConfig(numerics=numerics, dtype="bfloat16", num_blocks=1024, prefix_reuse=False)
                engine = Engine.from_pretrained("tiny", config=config)
            for sampling, temperature in (("greedy", 0.0), ("T=1", 1.0)):
                different, largest = experiment(
                    engine, temperature, options.trials, options.companions, on_text=name == "trained"
                )
                print(
                    f"| {name} | {numerics} | {sampling} | {different}/{options.trials} | {largest:.3g} |", flush=True
                )


if __name__ == "__main__":
    main()
