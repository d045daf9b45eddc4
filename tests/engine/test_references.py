"""The engine's tokens and log-probabilities against references that share no code with it."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_tools import random_prompt
from oracles import ContiguousDecoder, random_qwen3_folder, raw_greedy, raw_logits, read_folder
from paged import CompletionOutput, Engine, SamplingParams

VOCAB = 131
NUM_TOKENS = 24
LENGTHS = (3, 9, 17)
LIMITS = {"block_size": 4, "num_blocks": 64, "chunk_size": 5, "max_step_tokens": 16, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_qwen3_folder(tmp_path_factory.mktemp("qwen3"), seed=4)


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [random_prompt(rng, length, length, VOCAB) for length in LENGTHS]


@cache
def reference_tokens(folder: Path) -> list[list[int]]:
    """Greedy tokens by naive full recomputation in fp64."""
    return [raw_greedy(*read_folder(folder), prompt, NUM_TOKENS) for prompt in prompts()]


def reference_logprobs(folder: Path, text: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities [tokens - 1, V] that follow each position of a text but its last, in fp64."""
    logits = raw_logits(*read_folder(folder), text)[:-1]
    return torch.log_softmax(logits / temperature, -1)


def generate(folder: Path, params: SamplingParams, texts: list[list[int]], **fields: Any) -> list[CompletionOutput]:
    engine = Engine.from_pretrained(folder, **LIMITS, **fields)
    results = engine.generate(texts, params, use_tqdm=False)
    assert engine.scheduler.counters.num_steps > len(texts[-1]) // LIMITS["chunk_size"], "prompts are cut into chunks"
    return [result.outputs[0] for result in results]


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_greedy_tokens_equal_naive_full_recomputation(folder: Path, numerics: str, dtype: str) -> None:
    outputs = generate(folder, GREEDY, prompts(), numerics=numerics, dtype=dtype)
    for prompt, output, expected in zip(prompts(), outputs, reference_tokens(folder), strict=True):
        assert output.token_ids == expected
        assert output.finish_reason == "length"
        logprobs = reference_logprobs(folder, prompt + expected)[len(prompt) - 1 :]
        chosen = logprobs.gather(1, torch.tensor(expected)[:, None]).squeeze(1)
        tolerance = 1e-5 if dtype == "float64" else 1e-4
        assert (torch.tensor(output.logprobs) - chosen).abs().max() < tolerance
        assert output.top_logprobs is not None
        for (ids, values), row in zip(output.top_logprobs, logprobs, strict=True):
            top = row.topk(3)
            assert ids == top.indices.tolist()
            assert torch.allclose(torch.tensor(values, dtype=torch.float64), top.values, atol=tolerance)


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_greedy_tokens_equal_a_contiguous_cache(folder: Path, numerics: str, dtype: str) -> None:
    config, weights = read_folder(folder)
    for prompt, output in zip(
        prompts(), generate(folder, GREEDY, prompts(), numerics=numerics, dtype=dtype), strict=True
    ):
        decoder = ContiguousDecoder(config, weights, getattr(torch, dtype))
        logits = [decoder.feed(prompt)[-1]]
        for token in output.token_ids[:-1]:
            logits.append(decoder.feed([token])[-1])
        assert output.token_ids == [int(row.argmax()) for row in logits]
        logprobs = torch.log_softmax(torch.stack(logits), -1).gather(1, torch.tensor(output.token_ids)[:, None])
        assert (torch.tensor(output.logprobs) - logprobs.squeeze(1)).abs().max() < 1e-4


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_prompt_logprobs_equal_the_reference_at_the_request_s_temperature(
    folder: Path, numerics: str, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=2, prompt_logprobs=4, seed=1, ignore_eos=True)
    outputs = generate(folder, params, prompts(), numerics=numerics, dtype="float64")
    for prompt, output in zip(prompts(), outputs, strict=True):
        logprobs = reference_logprobs(folder, prompt, temperature or 1.0)
        scores = output.prompt_logprobs
        assert scores is not None
        assert [score.token_id for score in scores] == prompt[1:], "all but the first, in order"
        for score, row in zip(scores, logprobs, strict=True):
            assert abs(score.logprob - row[score.token_id].item()) < 1e-5
            assert score.top[0] == row.topk(4).indices.tolist()
            assert torch.allclose(torch.tensor(score.top[1], dtype=torch.float64), row.topk(4).values, atol=1e-5)


def test_sampled_logprobs_equal_the_reference(folder: Path) -> None:
    """What an importance ratio divides by: log_softmax(raw logits / T), whatever was truncated."""
    params = SamplingParams(temperature=0.6, top_p=0.8, top_k=20, max_tokens=NUM_TOKENS, seed=5, ignore_eos=True)
    for prompt, output in zip(prompts(), generate(folder, params, prompts(), dtype="float64"), strict=True):
        logprobs = reference_logprobs(folder, prompt + output.token_ids, 0.6)[len(prompt) - 1 :]
        chosen = logprobs.gather(1, torch.tensor(output.token_ids)[:, None]).squeeze(1)
        assert (torch.tensor(output.logprobs) - chosen).abs().max() < 1e-5


@pytest.mark.oracle
@pytest.mark.parametrize("numerics", ["invariant", "fast"])
def test_greedy_tokens_equal_transformers(folder: Path, numerics: str) -> None:
    """Six prompts of 40 tokens each, in fp32, from a checkpoint that transformers saved: identical six times."""
    from transformers import Qwen3ForCausalLM

    rng = random.Random(1)
    texts = [random_prompt(rng, length, length, VOCAB) for length in (2, 3, 9, 17, 21, 30)]
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    outputs = generate(folder, params, texts, numerics=numerics, dtype="float32")
    identical = 0
    for text, output in zip(texts, outputs, strict=True):
        ids = torch.tensor([text])
        with torch.no_grad():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, min_new_tokens=40, do_sample=False
            )
        identical += made[0, len(text) :].tolist() == output.token_ids
        assert len(output.token_ids) == 40
    assert identical == 6


def test_the_comparison_can_fail(folder: Path) -> None:
    """The control: logprobs at another temperature, or of a text with one token changed, are far from the tolerance."""
    text = prompts()[2] + reference_tokens(folder)[2]
    changed = [*text[:5], (text[5] + 1) % VOCAB, *text[6:]]
    here = reference_logprobs(folder, text)[10:].max(-1)
    assert (
        here.values - reference_logprobs(folder, changed)[10:].gather(1, here.indices[:, None])[:, 0]
    ).abs().max() > 0.05
    assert (here.values - reference_logprobs(folder, text, 0.9)[10:].max(-1).values).abs().max() > 0.05
    assert len(set(reference_tokens(folder)[2])) > 3
