"""Several cards of one host: collectives by size and by kind, their bits, and tp=N against tp=1 and transformers.

    python benchmarks/cards.py --ranks 2 [--out cards.yaml] [--device cpu]

Prints microseconds of an all-reduce and of the gather of logits inside CUDA graphs, and writes them as a `hardware`
group has them (`all_reduce_us`, `gather_us`), a file for each kind of all-reduce. Then generates greedily with a random
model of Qwen3-8B's shape in bf16 and tells where the texts part, and how far apart the two best logits are there. Ends
with exit code 1 if the engine's own sums differ in a bit between ranks or numbers of rows, if they are not the balanced
tree over the ranks, or if a divergence has a wider margin than 0.1; what other kinds do is printed. Ranks that share a
card take turns: nothing is timed then. With `--device cpu` the script checks itself on gloo and a small model; its
times then mean nothing.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml

from paged import Engine, EngineConfig, SamplingParams
from paged.core.model_spec import ModelSpec
from paged.kernels.collectives import RankGroup
from paged.kernels.numerics import Numerics, fold_tree
from paged.model.decoder import Decoder
from paged.runner.ranks import make_group

HIDDEN = 4096
ROWS = (1, 8, 64, 256, 1024, 2048, 8192)  # of bf16: 8 KiB to 64 MiB
GATHER_ROWS = (1, 8, 64, 256)
VOCAB = 151936
QWEN3_8B = ModelSpec(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    max_position_embeddings=40960,
    dtype="bfloat16",
)
SMALL = replace(
    QWEN3_8B,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
)
MOST_MARGIN = 0.1
NUM_TOKENS = 64

Reduce = Callable[[torch.Tensor], torch.Tensor]


def kinds_of_all_reduce(group: RankGroup, device: torch.device, *, has_own_card: bool) -> dict[str, Reduce]:
    """The all-reduces to compare: the engine's own, and on cards NCCL's and torch's over symmetric memory."""
    kinds: dict[str, Reduce] = {"engine": group.all_reduce}
    if not has_own_card:
        return kinds
    import torch.distributed._symmetric_memory as symmetric_memory

    nccl = dist.new_group(backend="nccl")
    name = nccl.group_name
    symmetric_memory.enable_symm_mem_for_group(name)
    buffer = symmetric_memory.empty(max(ROWS) * HIDDEN, dtype=torch.bfloat16, device=device)
    symmetric_memory.rendezvous(buffer, name)

    def library(x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=nccl)
        return total

    def one_shot(x: torch.Tensor) -> torch.Tensor:
        shared = buffer[: x.numel()].view_as(x)
        shared.copy_(x)
        return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name)

    def two_shot(x: torch.Tensor) -> torch.Tensor:
        shared = buffer[: x.numel()].view_as(x)
        shared.copy_(x)
        return torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name).clone()

    return {**kinds, "nccl": library, "one-shot": one_shot, "two-shot": two_shot}


def microseconds(call: Callable[[], Any], device: torch.device, repeats: int = 20) -> float:
    """Median time of ``call``: on a card inside a CUDA graph of ``repeats`` calls, else by the clock."""
    if device.type != "cuda":
        times = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return median(times) * 1e6
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(7):
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / repeats * 1e3)
    return median(times)


def operand(rows: int, rank: int, device: torch.device) -> torch.Tensor:
    """bf16 [rows, HIDDEN] of one rank; the leading rows are the same whatever ``rows``."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, HIDDEN, generator=generator).to(torch.bfloat16).to(device)


def measure_collectives(rank: int, ranks: int, port: int, device_name: str, sizes: Sequence[int], out: Any) -> None:
    """One rank's part of the first table; rank 0 puts times and the numbers of differing elements into ``out``."""
    device, num_sharing = torch.device("cpu"), 1
    if device_name == "cuda":
        num_cards = torch.cuda.device_count()
        device, num_sharing = torch.device("cuda", rank % num_cards), -(-ranks // num_cards)
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    meeting = dist.PrefixStore("meeting", store)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    group = make_group(
        rank,
        ranks,
        dist.PrefixStore("engine", store),
        device,
        "127.0.0.1",
        120.0,
        num_sharing=num_sharing,
        is_one_host=True,
    )
    is_timed = num_sharing == 1
    kinds = kinds_of_all_reduce(group, device, has_own_card=is_timed and device.type == "cuda")
    times: dict[str, dict[int, float]] = {kind: {} for kind in kinds}
    differing = {kind: dict.fromkeys(("ranks", "rows", "tree"), 0) for kind in kinds}
    single = operand(1, rank, device)
    for rows in sizes:
        x = operand(rows, rank, device)
        sums = {kind: reduce(x) for kind, reduce in kinds.items()}
        tree = fold_tree([operand(rows, other, device) for other in range(ranks)])
        for kind, reduce in kinds.items():
            everywhere = group.all_gather(sums[kind][None], dim=0)
            differing[kind]["ranks"] += int((everywhere != everywhere[:1]).sum())
            differing[kind]["rows"] += int((sums[kind][:1] != reduce(single)).sum())
            differing[kind]["tree"] += int((sums[kind] != tree).sum())
            if not is_timed:
                continue
            times[kind][rows * HIDDEN * 2] = microseconds(lambda reduce=reduce, x=x: reduce(x), device)  # type: ignore[misc]
    gathers = {}
    for rows in GATHER_ROWS if is_timed else ():
        logits = torch.zeros(rows, VOCAB // ranks, device=device)
        gathers[rows * VOCAB * 4] = microseconds(lambda logits=logits: group.all_gather(logits), device)  # type: ignore[misc]
    if rank == 0:
        out.put((times, gathers, differing))
    dist.barrier()
    group.close()
    dist.destroy_process_group()


def collectives(
    ranks: int, device_name: str
) -> tuple[dict[str, dict[int, float]], dict[int, float], dict[str, dict[str, int]]]:
    """Times by kind and bytes, times of the gather by bytes, and by kind how many elements differ, and from what."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    out = context.SimpleQueue()
    sizes = ROWS if device_name == "cuda" else ROWS[:3]
    arguments = (ranks, store.port, device_name, sizes, out)
    mp.spawn(measure_collectives, arguments, nprocs=ranks)  # type: ignore[no-untyped-call]
    return out.get()


def hardware_table(ranks: int, times: dict[int, float], source: str) -> dict[str, Any]:
    """Microseconds by bytes as a `hardware` group has them, which wants times that grow with the bytes."""
    points = dict(zip(times, accumulate((round(us, 2) for us in times.values()), max), strict=True))
    return {"value": {ranks: points}, "source": source, "assumed": False}


def generate(spec: ModelSpec, prompts: list[list[int]], tp: int, device: str) -> list[list[int]]:
    """Greedy tokens of every prompt; prints the throughput and the most memory that each rank held."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    config = EngineConfig(weights="dummy", device=device, max_num_seqs=8, max_seq_len=1024, num_blocks=512)
    engine = Engine.from_pretrained("random/model", spec=spec, config=config, tp=tp)
    try:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        start = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        elapsed_s = time.perf_counter() - start
        peaks = ", ".join(f"{peak / 1e9:.2f}" for peak in engine.peak_bytes_by_rank())
        print(f"tp={tp}: {8 * NUM_TOKENS / elapsed_s:.0f} tokens/s, peak GB by rank {peaks}")
        return [output.outputs[0].token_ids for output in outputs]
    finally:
        engine.close()


def reference(spec: ModelSpec, device: str) -> Any:
    """The same random model in transformers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=False,
        dtype="bfloat16",
        attn_implementation="eager",
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    weights = Decoder.random(spec, 0, numerics=Numerics(), dtype=torch.bfloat16, device=device).tensors()
    model.load_state_dict(weights, strict=True)
    return model


@torch.inference_mode()
def greedy(model: Any, prompts: list[list[int]], device: str) -> list[list[int]]:
    """What transformers generates, one prompt at a time."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )
        texts.append(text[0, len(prompt) :].tolist())
    return texts


@torch.inference_mode()
def margin(model: Any, ids: list[int], device: str) -> float:
    """How far the best logit is above the next one after ``ids``, by transformers' hidden state and an fp32 head."""
    hidden = model.model(torch.tensor([ids], device=device)).last_hidden_state[0, -1].float()
    logits = torch.cat([part.float() @ hidden for part in model.lm_head.weight.split(16384)])
    top = logits.topk(2).values
    return float(top[0] - top[1])


def compare(name: str, ours: list[list[int]], theirs: list[list[int]], prompts: list[list[int]], model: Any) -> bool:
    """Print where two sets of texts part; whether every margin there is small."""
    device = str(model.lm_head.weight.device)
    firsts, margins = [], []
    for prompt, left, right in zip(prompts, ours, theirs, strict=True):
        first = next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)
        firsts.append(NUM_TOKENS if first is None else first)
        if first is not None:
            margins.append(margin(model, prompt + left[:first], device))
    widest = max(margins, default=0.0)
    print(
        f"{name}: {len(margins)} of {len(prompts)} texts differ; first divergence, median {median(firsts):g} of "
        f"{NUM_TOKENS}, all {firsts}; widest margin there {widest:.4f}"
    )
    return widest < MOST_MARGIN


def main() -> int:
    """Both parts; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("cards.yaml"))
    arguments = parser.parse_args()
    ranks, device = arguments.ranks, arguments.device
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(f"{ranks} x {name}, torch {torch.__version__}")

    times, gathers, differing = collectives(ranks, device)
    for kind, found in differing.items():
        print(f"{kind}, differing elements: " + ", ".join(f"{name} {number}" for name, number in found.items()))
    if gathers:
        print("all-reduce of bf16, us: " + " | ".join(("bytes", *times)))
    for size in times["engine"]:
        print(f"{size} | " + " | ".join(f"{of[size]:.1f}" for of in times.values()))
    if gathers:
        print("gather of fp32 logits, us by bytes: " + ", ".join(f"{size}: {us:.1f}" for size, us in gathers.items()))
    source = f"benchmarks/cards.py --ranks {ranks}, {name}, torch {torch.__version__}, inside a CUDA graph"
    for kind, of in times.items() if gathers else ():
        path = arguments.out.with_stem(f"{arguments.out.stem}_{kind}")
        tables = {
            "all_reduce_us": hardware_table(ranks, of, f"{source}, {kind}"),
            "gather_us": hardware_table(ranks, gathers, f"{source}, engine"),
        }
        path.write_text(yaml.safe_dump(tables, sort_keys=False))
    sys.stdout.flush()

    spec = QWEN3_8B if device == "cuda" else SMALL
    numbers = random.Random(0)
    prompts = [[numbers.randrange(spec.vocab_size) for _ in range(numbers.randrange(16, 129))] for _ in range(8)]
    sharded = generate(spec, prompts, ranks, device)
    whole = generate(spec, prompts, 1, device)
    model = reference(spec, device)
    theirs = greedy(model, prompts, device)
    agree = [
        compare(f"tp={ranks} and tp=1", sharded, whole, prompts, model),
        compare(f"tp={ranks} and transformers", sharded, theirs, prompts, model),
        compare("tp=1 and transformers", whole, theirs, prompts, model),
    ]
    return 0 if all(agree) and not any(differing["engine"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
