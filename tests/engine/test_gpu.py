"""The torch runner on a card: the same code as on the CPU, run plainly."""

import pytest
import torch

from paged import Engine, SamplingParams
from paged.workload.arithmetic import builtin_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")]


def generate(device: str, prompts: list[str], params: SamplingParams, **fields) -> list:
    engine = Engine.from_pretrained("tiny", device=device, num_blocks=2048, **fields)
    return [output for result in engine.generate(prompts, params, use_tqdm=False) for output in result.outputs]


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
def test_greedy_tokens_equal_the_cpu_in_fp32(numerics: str) -> None:
    prompts = builtin_prompts(16, 3)
    params = SamplingParams(max_tokens=256, temperature=0)
    on_cpu = generate("cpu", prompts, params, dtype="float32", numerics=numerics)
    on_card = generate("cuda", prompts, params, dtype="float32", numerics=numerics)
    assert [output.token_ids for output in on_card] == [output.token_ids for output in on_cpu]
    for card, cpu in zip(on_card, on_cpu, strict=True):
        assert card.logprobs == pytest.approx(cpu.logprobs, abs=1e-3)


def length_of_agreement(ours: list[int], theirs: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def test_kv_dtypes_work() -> None:
    """Keys of a bf16 model fit a bf16 cache exactly; an fp8 cache may change a text only after a while.

    These texts keep 90 % of their tokens under fp8 on the CPU until the first that differs, 68 % on a card; if each
    head is read with its neighbour's scale, less than one percent.
    """
    prompts = builtin_prompts(8, 4)
    params = SamplingParams(max_tokens=256, temperature=0)
    wide = [o.token_ids for o in generate("cuda", prompts, params, dtype="bfloat16", kv_dtype="float32")]
    assert len({tuple(tokens) for tokens in wide}) == 8
    exact = generate("cuda", prompts, params, dtype="bfloat16", kv_dtype="bfloat16")
    assert [output.token_ids for output in exact] == wide
    rounded = generate("cuda", prompts, params, dtype="bfloat16", kv_dtype="fp8")
    assert all(output.finish_reason in ("stop", "length") for output in rounded)
    kept = sum(length_of_agreement(output.token_ids, tokens) for output, tokens in zip(rounded, wide, strict=True))
    assert kept >= 0.5 * sum(map(len, wide))


def test_preemption_and_reuse_give_the_same_samples() -> None:
    prompts = builtin_prompts(12, 5)
    params = SamplingParams(n=4, max_tokens=256, seed=7)
    roomy = generate("cuda", prompts, params, dtype="float32")
    engine = Engine.from_pretrained("tiny", device="cuda", num_blocks=96, dtype="float32")
    results = engine.generate(prompts, params, use_tqdm=False)
    tight = [output for result in results for output in result.outputs]
    assert engine.metrics()["preemptions"] > 0
    assert [output.token_ids for output in tight] == [output.token_ids for output in roomy]
