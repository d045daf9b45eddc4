"""A sequence's bits depend on that sequence alone: whoever else runs, however the steps are cut, whatever memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine_tools import (
    FAST,
    GREEDY,
    INVARIANT,
    SEEDED,
    SMALL_TILES,
    SPEC,
    Arrival,
    Drive,
    alone,
    drive,
    essence,
    make_engine,
    only,
    random_decoder,
    random_prompt,
    record_logits,
    runner_of,
    with_fields,
)
from paged import CompletionOutput
from paged.core.model_spec import ModelSpec
from paged.core.policy import Watermark
from paged.core.request import SamplingParams
from paged.kernels import moe
from paged.kernels.numerics import Numerics
from paged.model import layers

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
PARAMS = {"greedy": GREEDY, "seeded": SEEDED}
PROMPT = [(7 * i * i + 3 * i + 11) % 99 for i in range(13)]


@dataclass(frozen=True)
class Setting:
    """One way to run the victim among others.

    Attributes:
        num_others: companions of random lengths, admitted at random steps.
        limits: arguments of ``make_engine``.
        must_preempt: the pool is so small that the victim itself has to be preempted.
        must_share: some companions start with the victim's prompt, which it then takes over from the cache.
        victim_at: the step before which the victim is added.
        others_from: first step at which companions without the victim's prompt are added.
    """

    num_others: int
    limits: dict[str, Any] = field(default_factory=dict)
    must_preempt: bool = False
    must_share: bool = False
    victim_at: int = 3
    others_from: int = 0


SETTINGS = {
    "1 other, chunk 1": Setting(1, {"chunk_size": 1, "max_step_tokens": 8, "max_num_seqs": 2}),
    "3 others, chunk 2": Setting(3, {"chunk_size": 2, "max_step_tokens": 8, "max_num_seqs": 4}),
    "3 others, chunk 3, 2 slots": Setting(3, {"chunk_size": 3, "max_step_tokens": 16, "max_num_seqs": 2}),
    "7 others, chunk 5": Setting(7, {"chunk_size": 5, "max_step_tokens": 16, "max_num_seqs": 16}),
    "7 others, chunk 64": Setting(7, {"chunk_size": 64, "max_step_tokens": 64, "max_num_seqs": 16}),
    "7 others, budget 8": Setting(7, {"chunk_size": 64, "max_step_tokens": 8, "max_num_seqs": 16}),
    "blocks of 8": Setting(3, {"block_size": 8, "chunk_size": 5}),
    "blocks of 16": Setting(7, {"block_size": 16, "chunk_size": 3, "max_num_seqs": 4}),
    "17 blocks": Setting(7, {"num_blocks": 17}, must_preempt=True),
    "17 blocks, chunk 3": Setting(7, {"num_blocks": 17, "chunk_size": 3, "max_step_tokens": 16}, must_preempt=True),
    "17 blocks, depth 2": Setting(7, {"num_blocks": 17, "depth": 2}, must_preempt=True),
    "depth 3": Setting(3, {"depth": 3, "chunk_size": 5}),
    "shared prefix": Setting(3, {}, must_share=True, victim_at=9),
    "shared prefix, chunk 2, depth 2": Setting(3, {"chunk_size": 2, "depth": 2}, must_share=True, victim_at=20),
    "17 blocks, shared prefix": Setting(
        7, {"num_blocks": 17}, must_preempt=True, must_share=True, victim_at=2, others_from=3
    ),
    "watermark": Setting(7, {"num_blocks": 17, "policy": Watermark(0.1)}),
}


def companions(setting: Setting, seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    others = []
    for index in range(setting.num_others):
        # What follows the shared part differs from the start, so that neither sequence waits for the other.
        prefix = PROMPT if setting.must_share and index < 2 else []
        at_step = 0 if prefix else setting.others_from + rng.randint(0, 9)
        sampling = GREEDY if index % 2 else SamplingParams(temperature=1.1, top_k=20)
        params = with_fields(sampling, max_tokens=24 if setting.must_preempt else rng.randint(3, 30))
        prompt = prefix + random_prompt(rng, 1, 5) if prefix else random_prompt(rng)
        others.append(Arrival(f"other-{index}", prompt, params, at_step))
    return others


@cache
def run_alone(params_name: str, **settings: Any) -> tuple[CompletionOutput, dict[int, torch.Tensor]]:
    """The victim without companions, and its full logits by position; computed once for all tests."""
    result, logits = run(Setting(0), PARAMS[params_name], **settings)
    return only(result.outputs), logits


def run(setting: Setting, params: SamplingParams, **settings: Any) -> tuple[Drive, dict[int, torch.Tensor]]:
    engine = make_engine(**settings, **setting.limits)
    logits = record_logits(engine)
    victim = Arrival("victim", PROMPT, params, setting.victim_at if setting.num_others else 0)
    result = drive(engine, [*companions(setting, seed=3), victim])
    output = result.outputs[("victim", 0)]
    if setting.must_preempt:
        assert engine.metrics()["preemptions"] > 0
        assert output.num_preemptions > 0, "the victim itself must be met by the pressure"
    if setting.must_share:
        assert output.num_cached_tokens >= 8
    if setting.num_others:
        finished = [update.request_id for update in result.updates if update.output is not None]
        started = [update.request_id for update in result.updates]
        together = set(started[started.index("victim") : len(started) - started[::-1].index("victim")])
        assert len(together) > 1, "the victim ran alone"
        assert len(finished) == setting.num_others + 1
    return result, logits[("victim", 0)]


def differing_logits(
    output: CompletionOutput, ours: dict[int, torch.Tensor], others: dict[int, torch.Tensor]
) -> list[int]:
    """Positions of the output whose full logits are not the same bits."""
    first = len(output.prompt_token_ids)
    positions = range(first, first + len(output.token_ids))
    return [position for position in positions if not torch.equal(ours[position], others[position])]


def assert_same_bits(name: str, params_name: str, **settings: Any) -> None:
    """The victim in a setting equals the victim alone: tokens, logprobs, text, and each step's full logits."""
    expected, expected_logits = run_alone(params_name, **settings)
    result, logits = run(SETTINGS[name], PARAMS[params_name], **settings)
    output = result.outputs[("victim", 0)]
    assert output.token_ids == expected.token_ids
    assert output.logprobs == expected.logprobs
    assert essence(output) == essence(expected)
    assert differing_logits(expected, expected_logits, logits) == []


@pytest.mark.parametrize("params_name", PARAMS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_sequence_is_the_same_bits_alone_and_among_others(name: str, dtype: torch.dtype, params_name: str) -> None:
    assert_same_bits(name, params_name, dtype=dtype)
    assert len(set(run_alone(params_name, dtype=dtype)[0].token_ids)) > 3, "a text that repeats itself shows little"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", ["7 others, chunk 5", "17 blocks, chunk 3", "shared prefix"])
def test_texts_that_cross_tiles_and_splits_of_attention(name: str, dtype: torch.dtype) -> None:
    """With tiles of 8 keys in splits of 16 a text of 36 tokens meets every fold that attention has."""
    assert_same_bits(name, "seeded", dtype=dtype, numerics=SMALL_TILES)


@pytest.mark.parametrize("numerics", [INVARIANT, SMALL_TILES], ids=["tiles of 64", "tiles of 8"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("chunk_size", [64, 5])
def test_scoring_a_finished_text_gives_the_logprobs_that_decoding_reported(
    chunk_size: int, dtype: torch.dtype, params: SamplingParams, numerics: Numerics
) -> None:
    """Scoring computes many rows of a text at once, decoding one a step; both use the request's temperature."""
    engine = make_engine(dtype=dtype, numerics=numerics, chunk_size=chunk_size)
    decoded = only(drive(engine, [Arrival("decoded", PROMPT, with_fields(params, max_tokens=60))]).outputs)
    text = decoded.prompt_token_ids + decoded.token_ids
    scoring = with_fields(params, max_tokens=1, prompt_logprobs=0)
    scored = drive(engine, [Arrival("scored", text, scoring), Arrival("other", text[:50], GREEDY)])
    scores = scored.outputs[("scored", 0)].prompt_logprobs
    assert scores is not None
    assert len(text) > numerics.kv_tile
    assert [score.token_id for score in scores] == text[1:]
    assert [score.logprob for score in scores][len(PROMPT) - 1 :] == decoded.logprobs


def test_logprobs_do_not_hang_on_what_else_is_reported() -> None:
    """Asking for alternatives or for the prompt's scores costs time, but touches no number."""
    plain = only(alone(PROMPT, SEEDED))
    asking = only(alone(PROMPT, with_fields(SEEDED, logprobs=5, prompt_logprobs=3), chunk_size=4))
    assert (asking.token_ids, asking.logprobs) == (plain.token_ids, plain.logprobs)
    assert asking.behavior_logprobs == plain.behavior_logprobs


# Other families

SIZES = {"num_experts": 6, "num_experts_per_token": 3, "intermediate_size": 16}
FAMILY_SPECS = {
    "mistral": replace(SPEC, model_type="mistral", qk_norm="none"),
    "olmoe": replace(SPEC, model_type="olmoe", qk_norm="full", clip_qkv=1.5, **SIZES),
}


@pytest.mark.parametrize("params_name", PARAMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family", FAMILY_SPECS)
def test_other_families_are_as_invariant(family: str, name: str, dtype: torch.dtype, params_name: str) -> None:
    """Rows that choose the same expert share its tiles, in numbers that change with the company: no bit may."""
    decoder = random_decoder(INVARIANT, dtype, FAMILY_SPECS[family])
    assert_same_bits(name, params_name, decoder=decoder)
    assert len(set(run_alone(params_name, decoder=decoder)[0].token_ids)) > 3


@dataclass(frozen=True)
class Case:
    """One random way to run a few requests on one of a few random OLMoE models."""

    spec: ModelSpec
    seed: int
    limits: dict[str, Any]
    arrivals: list[Arrival]


def random_case(number: int) -> Case:
    rng = random.Random(number)
    experts = rng.choice([(2, 1), (4, 2), (8, 3)])
    spec = replace(
        FAMILY_SPECS["olmoe"],
        hidden_size=16,
        intermediate_size=8,
        num_heads=2,
        num_kv_heads=rng.choice([1, 2]),
        num_experts=experts[0],
        num_experts_per_token=experts[1],
        norm_topk_prob=rng.random() < 0.5,
        clip_qkv=rng.choice([None, 1.0]),
    )
    block_size = rng.choice([2, 4, 8])
    limits = {
        "chunk_size": rng.choice([1, 2, 3, 5, 64]),
        "max_step_tokens": rng.choice([8, 16, 64]),
        "max_num_seqs": rng.choice([1, 2, 4, 8]),
        "block_size": block_size,
        # Enough for the longest text, or for a few.
        "num_blocks": rng.choice([24 // block_size, 40]),
        "depth": rng.choice([1, 2]),
    }
    arrivals = []
    for index in range(rng.randint(1, 5)):
        params = with_fields(GREEDY, max_tokens=rng.randint(1, 8))
        arrivals.append(Arrival(f"r{index}", random_prompt(rng, 1, 14), params, rng.randint(0, 4)))
    return Case(spec, rng.randrange(4), limits, arrivals)


@pytest.mark.parametrize("block", range(8))
def test_olmoe_fast_equals_invariant_in_400_random_configurations(block: int) -> None:
    """fp64 models with a router in fp32: tokens identical, logits within 1e-5. The two are run in different company."""
    drift, num_tokens, num_preemptions, num_batches = 0.0, 0, 0, 0
    for number in range(50 * block, 50 * block + 50):
        case = random_case(number)
        fast = make_engine(random_decoder(FAST, torch.float64, case.spec, case.seed), **case.limits)
        exact = make_engine(random_decoder(INVARIANT, torch.float64, case.spec, case.seed), max_num_seqs=8)
        logits, expected_logits = record_logits(fast), record_logits(exact)
        outputs = drive(fast, case.arrivals).outputs
        expected = drive(exact, [replace(arrival, at_step=0) for arrival in case.arrivals]).outputs
        for key, output in outputs.items():
            assert output.token_ids == expected[key].token_ids, number
            num_tokens += len(output.token_ids)
            first = len(output.prompt_token_ids)
            for position in range(first, first + len(output.token_ids)):
                apart = (logits[key][position] - expected_logits[key][position]).abs().max().item()
                drift = max(drift, apart)
        num_preemptions += int(fast.metrics()["preemptions"])
        num_batches += len(case.arrivals) > 1
    assert drift < 1e-5
    assert num_tokens > 400
    assert num_preemptions > 0
    assert num_batches > 25


def test_the_comparison_of_fast_and_invariant_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: one expert too few in `fast` is seen at once."""
    case = random_case(1)
    route = layers.route
    engines = [
        make_engine(random_decoder(numerics, torch.float64, FAMILY_SPECS["olmoe"])) for numerics in (FAST, INVARIANT)
    ]
    expected = record_logits(engines[1])
    drive(engines[1], case.arrivals)
    monkeypatch.setattr(layers, "route", lambda logits, count, **options: route(logits, count - 1, **options))
    spoiled = record_logits(engines[0])
    drive(engines[0], case.arrivals)
    (position, logits_V), *_ = spoiled[case.arrivals[0].id, 0].items()
    assert (logits_V - expected[case.arrivals[0].id, 0][position]).abs().max() > 1e-2


# `fast`, and that the tests above can fail


@pytest.mark.parametrize("name", SETTINGS)
def test_fast_is_equal_to_rounding(name: str) -> None:
    expected, expected_logits = run_alone("greedy", dtype=torch.float64, numerics=FAST)
    result, logits = run(SETTINGS[name], GREEDY, dtype=torch.float64, numerics=FAST)
    assert result.outputs[("victim", 0)].token_ids == expected.token_ids
    for position in range(len(PROMPT), len(PROMPT) + len(expected.token_ids)):
        assert (expected_logits[position] - logits[position]).abs().max() < 1e-9


def test_fast_and_invariant_agree_in_fp64() -> None:
    fast, fast_logits = run(SETTINGS["7 others, chunk 5"], GREEDY, dtype=torch.float64, numerics=FAST)
    exact, exact_logits = run(SETTINGS["7 others, chunk 5"], GREEDY, dtype=torch.float64)
    assert fast.outputs[("victim", 0)].token_ids == exact.outputs[("victim", 0)].token_ids
    assert all((fast_logits[position] - exact_logits[position]).abs().max() < 1e-9 for position in exact_logits)


def find_differences(dtype: torch.dtype, numerics: Numerics, spec: ModelSpec = SPEC) -> int:
    """Positions at which the harness finds other logits than alone, over a few settings."""
    decoder = random_decoder(numerics, dtype, spec)
    alone_result, expected_logits = run(Setting(0), GREEDY, decoder=decoder)
    expected = only(alone_result.outputs)
    count = 0
    for name in ("3 others, chunk 2", "7 others, chunk 5", "7 others, chunk 64"):
        result, logits = run(SETTINGS[name], GREEDY, decoder=decoder)
        same_tokens = expected.token_ids == result.outputs[("victim", 0)].token_ids
        count += len(differing_logits(expected, expected_logits, logits)) if same_tokens else 1
    return count


def test_the_harness_finds_the_differences_that_fast_makes() -> None:
    """The control: the same comparison that `invariant` passes fails with `fast` in fp32."""
    assert find_differences(torch.float32, FAST) > 0


def batched_linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: Any = None, **_: Any) -> torch.Tensor:
    """The planted fault: all rows of a step in one library call, whose order of sums may hang on their number."""
    return F.linear(x_TK, weight_NK, bias_N)


def batch_dependent_linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: Any = None, **_: Any) -> torch.Tensor:
    """The planted fault without help from a library: the inner sum is cut in two where the batch is large."""
    if x_TK.shape[0] < 4:
        return F.linear(x_TK, weight_NK, bias_N)
    half = x_TK.shape[1] // 2
    return F.linear(x_TK[:, :half], weight_NK[:, :half], bias_N) + F.linear(x_TK[:, half:], weight_NK[:, half:])


@pytest.mark.parametrize("fault", [batched_linear, batch_dependent_linear])
def test_the_harness_finds_a_linear_that_hangs_on_the_batch(
    fault: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's tile chosen by the batch is the classic fault; planted under `invariant`, it must be seen."""
    calls = 0

    def planted(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return fault(*args, **kwargs)

    assert find_differences(torch.float32, INVARIANT) == 0
    monkeypatch.setattr(layers, "linear", planted)
    assert find_differences(torch.float32, INVARIANT) > 0
    assert calls > 0


@pytest.mark.parametrize("fault", [batched_linear, batch_dependent_linear])
def test_the_harness_finds_experts_that_hang_on_who_chose_them(
    fault: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted in the experts alone: all other products keep their tiles."""
    spec = replace(FAMILY_SPECS["olmoe"], hidden_size=128, intermediate_size=128)
    calls: list[int] = []

    def planted(x_TK: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(x_TK.shape[0])
        return fault(x_TK, *args, **kwargs)

    assert find_differences(torch.float32, INVARIANT, spec) == 0
    monkeypatch.setattr(moe, "linear", planted)
    assert find_differences(torch.float32, INVARIANT, spec) > 0
    assert {1, 2, 3, 4, 5} <= set(calls)


# The cache's dtype


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_a_bf16_cache_under_an_fp32_model_gives_the_same_greedy_tokens_in_half_the_bytes(seed: int) -> None:
    decoder = random_decoder(seed=seed)
    wide, narrow = make_engine(decoder), make_engine(decoder, kv_dtype=torch.bfloat16)
    wide_logits, narrow_logits = record_logits(wide), record_logits(narrow)
    expected, output = (only(drive(engine, [Arrival("victim", PROMPT, GREEDY)]).outputs) for engine in (wide, narrow))
    assert output.token_ids == expected.token_ids
    key = ("victim", 0)
    drift = max((wide_logits[key][p] - narrow_logits[key][p]).abs().max().item() for p in wide_logits[key])
    # The logits spread over about 20 units.
    assert 0 < drift < 0.2
    assert runner_of(narrow).cache.bytes_per_block * 2 == runner_of(wide).cache.bytes_per_block


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", ["7 others, chunk 5", "17 blocks, chunk 3", "17 blocks, shared prefix", "depth 3"])
def test_a_narrow_cache_is_as_invariant_as_a_wide_one(name: str, kv_dtype: torch.dtype) -> None:
    """A token's scale is its own, so rounding to fp8 does not see the neighbours in a block either."""
    assert_same_bits(name, "seeded", kv_dtype=kv_dtype)


def test_an_fp8_cache_stays_near_the_wide_one() -> None:
    wide, narrow = make_engine(), make_engine(kv_dtype=torch.float8_e4m3fn)
    text = [(i * i + 5) % 99 for i in range(40)]
    asking = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    near, far = (
        only(drive(engine, [Arrival("scored", text, asking)]).outputs).prompt_logprobs for engine in (narrow, wide)
    )
    assert near is not None
    assert far is not None
    errors = [abs(ours.logprob - theirs.logprob) for ours, theirs in zip(near, far, strict=True)]
    assert 0 < max(errors) < 0.8
    assert sum(errors) / len(errors) < 0.2


def test_random_weights_are_not_flat() -> None:
    """Flat logits would make equal tokens cheap: the likeliest token must often stand out."""
    decoder = random_decoder()
    assert decoder.numerics == INVARIANT
    greedy = only(alone(PROMPT, GREEDY))
    assert sum(logprob > -1.0 for logprob in greedy.logprobs) > len(greedy.logprobs) // 3
