"""Trains the embedded model `tiny` on derivations and writes its checkpoint.

From the repository's root, on one card:

    python -m tools.train_tiny --out paged/assets/tiny

The checkpoint is a Qwen3 of about 3.3 M parameters in bf16 with a byte-level tokenizer: a byte's value is its token id,
and two special tokens follow. An answer ends with `<|im_end|>`; `generation_config.json` lists `<|endoftext|>` as well.
The chat template is the last message's content, stripped, and a newline: exactly the prompt that training used.

Training, prompts and evaluation draw from the same distribution, `paged.workload.arithmetic.generate`. The data, the
initial weights and the order of batches follow from `--seed` alone; the bits of the result also depend on the card and
the versions. Evaluation runs on the weights as saved, rounded to bf16, over prompts of another seed; the shorter of
those occur in training, so shares are also printed by number of operators. All that is measured goes to `--report`.
"""

import argparse
import collections
import json
import math
import multiprocessing
import multiprocessing.pool
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paged.workload.arithmetic import builtin_prompts, derivation, generate, is_derivation, is_solved

END_OF_TEXT, END_OF_MESSAGE = "<|endoftext|>", "<|im_end|>"
END_OF_TEXT_ID, END_OF_MESSAGE_ID = 256, 257
VOCABULARY_SIZE = 320  # rounded up to 64 like a large model's; the surplus rows stand for no token
CONTEXT_LENGTH = 1024
CHAT_TEMPLATE = "{{ (messages[-1]['content'] | trim) + '\\n' }}"

CHUNK_SIZE = 16384  # derivations that are drawn, sorted by length and batched together
IGNORED = -100
WARMUP_STEPS = 200

Batch = tuple[np.ndarray, np.ndarray]  # inputs, targets


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE without merges, in which the id of a byte is its value."""
    # The tokenizers library names each byte by a printable character; the table is GPT-2's: printable Latin-1 bytes
    # stand for themselves, the others take the code points from 256 up, in order.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(shifted)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True), AddedToken(END_OF_MESSAGE, special=True)])
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    assert tokenizer.token_to_id(END_OF_MESSAGE) == END_OF_MESSAGE_ID
    assert tokenizer.encode("1+\n\0\x7fé").ids == list("1+\n\0\x7fé".encode())
    return tokenizer


def build_model(seed: int) -> transformers.Qwen3ForCausalLM:
    """The untrained network in fp32."""
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_MESSAGE_ID,
        pad_token_id=END_OF_TEXT_ID,
    )
    return transformers.Qwen3ForCausalLM(config)


def draw_batches(seed: int, chunk: int, tokens_per_step: int) -> list[Batch]:
    """The batches of one chunk: inputs [B, T] and targets [B, T], padded on the right, in int16.

    Rows of a batch are of similar length, so little is padding and, since attention is causal, no mask is needed.
    """
    generator = random.Random(f"{seed}/{chunk}")
    rows: list[tuple[list[int], int]] = []
    while len(rows) < CHUNK_SIZE:
        expression = generate(generator)
        ids = [*f"{expression}\n{derivation(expression, generator)}".encode(), END_OF_MESSAGE_ID]
        if len(ids) <= CONTEXT_LENGTH:
            rows.append((ids, len(expression) + 1))
    rows.sort(key=lambda row: len(row[0]))
    batches: list[Batch] = []
    start = 0
    while start < len(rows):
        stop = start + 1
        while stop < len(rows) and (stop + 1 - start) * len(rows[stop][0]) <= tokens_per_step:
            stop += 1
        width = len(rows[stop - 1][0]) - 1
        inputs = np.full((stop - start, width), END_OF_TEXT_ID, dtype=np.int16)
        targets = np.full((stop - start, width), IGNORED, dtype=np.int16)
        for index, (ids, prompt_length) in enumerate(rows[start:stop]):
            inputs[index, : len(ids) - 1] = ids[:-1]
            targets[index, prompt_length - 1 : len(ids) - 1] = ids[prompt_length:]
        batches.append((inputs, targets))
        start = stop
    generator.shuffle(batches)
    return batches


def stream_batches(pool: multiprocessing.pool.Pool, seed: int, tokens_per_step: int, ahead: int) -> Iterator[Batch]:
    """All batches in an order that the number of processes does not change; `ahead` chunks are prepared in advance."""
    pending: collections.deque[multiprocessing.pool.AsyncResult[list[Batch]]] = collections.deque()
    chunk = 0
    while True:
        while len(pending) < ahead:
            pending.append(pool.apply_async(draw_batches, (seed, chunk, tokens_per_step)))
            chunk += 1
        yield from pending.popleft().get()


def train(model: transformers.Qwen3ForCausalLM, batches: Iterator[Batch], num_steps: int, peak_rate: float) -> None:
    """Changes the model's fp32 weights in place by `num_steps` of AdamW, linear warm-up and cosine decay to zero."""
    device = model.device
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak_rate, betas=(0.9, 0.95), fused=device.type == "cuda")

    def rate(step: int) -> float:
        warm_up = min(1.0, (step + 1) / WARMUP_STEPS)
        return warm_up * 0.5 * (1.0 + math.cos(math.pi * step / num_steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model.train()
    started = time.perf_counter()
    num_positions = 0
    for step in range(num_steps):
        inputs, targets = next(batches)
        num_positions += inputs.size
        inputs_BT = torch.from_numpy(inputs.astype(np.int64)).to(device)
        targets_BT = torch.from_numpy(targets.astype(np.int64)).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
        loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0 or step == num_steps - 1:
            elapsed = time.perf_counter() - started
            print(f"step {step} loss {loss.item():.5f} positions {num_positions:,} after {elapsed:.1f} s", flush=True)


@torch.inference_mode()
def evaluate(
    model: transformers.Qwen3ForCausalLM, tokenizer: Tokenizer, prompts: list[str], temperature: float, seed: int
) -> dict[str, object]:
    """Completes every prompt (temperature 0 is greedy), and returns the share solved and how the lengths spread."""
    device = model.device
    torch.manual_seed(seed)
    prompt_ids = [tokenizer.encode(prompt).ids for prompt in prompts]
    width = max(map(len, prompt_ids))
    padded_BT = torch.tensor([[END_OF_TEXT_ID] * (width - len(ids)) + ids for ids in prompt_ids], device=device)
    mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids], device=device)
    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    settings = transformers.GenerationConfig(
        max_new_tokens=CONTEXT_LENGTH - width,
        eos_token_id=[END_OF_MESSAGE_ID, END_OF_TEXT_ID],
        pad_token_id=END_OF_TEXT_ID,
        **(sampled if temperature else {"do_sample": False}),
    )
    completed = model.generate(padded_BT, attention_mask=mask_BT, generation_config=settings)[:, width:].tolist()
    lengths: list[int] = []
    solved: list[bool] = []
    valid: list[bool] = []
    for prompt, ids in zip(prompts, completed, strict=True):
        ends = [position for position, token in enumerate(ids) if token in (END_OF_MESSAGE_ID, END_OF_TEXT_ID)]
        text = tokenizer.decode(ids[: ends[0]]) if ends else ""
        lengths.append(ends[0] + 1 if ends else len(ids))
        solved.append(is_solved(prompt, text))
        valid.append(is_derivation(prompt, text))
    by_size: dict[str, list[bool]] = {"1-3": [], "4-8": [], "9-20": []}
    for prompt, is_right in zip(prompts, solved, strict=True):
        num_operators = derivation(prompt.strip()).count("\n")
        by_size["1-3" if num_operators <= 3 else "4-8" if num_operators <= 8 else "9-20"].append(is_right)
    return {
        "temperature": temperature,
        "num_prompts": len(prompts),
        "share_solved": sum(solved) / len(prompts),
        "share_valid_derivation": sum(valid) / len(prompts),
        "share_solved_by_operators": {name: sum(some) / max(len(some), 1) for name, some in by_size.items()},
        "num_unfinished": sum(length == CONTEXT_LENGTH - width for length in lengths),
        "lengths": {f"p{q}": int(np.quantile(lengths, q / 100, method="nearest")) for q in (10, 50, 90, 99)}
        | {"mean": sum(lengths) / len(lengths), "max": max(lengths)},
    }


def save(model: transformers.Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the checkpoint's five files; the model's weights should be bf16 by now."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = transformers.GenerationConfig(
        do_sample=True,
        temperature=1.0,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=[END_OF_MESSAGE_ID, END_OF_TEXT_ID],
        pad_token_id=END_OF_TEXT_ID,
    )
    model.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_MESSAGE,
        "model_max_length": CONTEXT_LENGTH,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    (out / "model.safetensors").chmod(0o644)  # save_pretrained leaves it readable by its owner alone


def best_device() -> torch.device:
    """The card if there is one; asking may start CUDA."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    """Trains, saves, then evaluates what was saved: a run that falls short still leaves its checkpoint."""
    parser = argparse.ArgumentParser(description="Trains the embedded model `tiny` and writes its checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--report", type=Path, help="file for what was measured (JSON)")
    parser.add_argument("--steps", type=int, default=6500, help="0 only evaluates the checkpoint in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens-per-step", type=int, default=32768, help="padding included")
    parser.add_argument("--peak-rate", type=float, default=2e-3)
    parser.add_argument("--num-eval-prompts", type=int, default=1000, help="0 skips evaluation")
    arguments = parser.parse_args()

    tokenizer = build_tokenizer()
    report: dict[str, object] = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    if arguments.steps == 0:
        model = transformers.Qwen3ForCausalLM.from_pretrained(arguments.out, dtype=torch.bfloat16).to(best_device())
    else:
        # Forked before CUDA starts: spawned processes would each import torch first, forked ones cannot follow CUDA.
        num_processes = max(1, min(12, (os.cpu_count() or 2) - 2))
        with multiprocessing.get_context("fork").Pool(num_processes) as pool:
            model = build_model(arguments.seed).to(best_device())
            batches = stream_batches(pool, arguments.seed, arguments.tokens_per_step, ahead=num_processes + 4)
            started = time.perf_counter()
            train(model, batches, arguments.steps, arguments.peak_rate)
            report |= {
                "training_s": time.perf_counter() - started,
                "steps": arguments.steps,
                "seed": arguments.seed,
                "tokens_per_step": arguments.tokens_per_step,
                "peak_rate": arguments.peak_rate,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
            }
        model = model.to(torch.bfloat16)
        save(model, tokenizer, arguments.out)

    report["device"] = torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"
    model.eval()
    prompts = builtin_prompts(arguments.num_eval_prompts, seed=arguments.seed + 1_000_000)
    if prompts:
        report["evaluations"] = [evaluate(model, tokenizer, prompts, t, arguments.seed) for t in (0.0, 1.0)]
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.report:
        arguments.report.write_text(text + "\n")


if __name__ == "__main__":
    main()
