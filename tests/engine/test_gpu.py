"""The torch runner on a card: against the CPU, and its graphs of whole steps against plain launches."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from card_tools import needs_card
from engine_tools import Arrival, Drive, drive, essences, random_prompt, runner_of
from paged import CompletionOutput, Engine, SamplingParams, engine_parts
from paged.core.model_spec import ModelSpec
from paged.kernels.numerics import Numerics
from paged.model.decoder import Decoder
from paged.runner.kernel_builds import build_kernels
from paged.runner.memory_profile import CardMemory
from paged.runner.slots import LIMITS
from paged.runner.step_graphs import StepGraphs
from paged.workload.arithmetic import builtin_prompts

pytestmark = [pytest.mark.gpu, needs_card]


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


# Graphs of whole steps

# Random weights that the kernels for the card take; heads of 128 have kernels of their own on Hopper.
SPEC = ModelSpec(
    vocab_size=1000,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    max_position_embeddings=2048,
)
SPECS = {"heads of 64": SPEC, "heads of 128": replace(SPEC, head_dim=128, num_kv_heads=2)}


def random_engine(spec: ModelSpec = SPEC, **fields: Any) -> Engine:
    """An engine on random bf16 weights, the same for the same spec."""
    sizes = {"num_blocks": 1024, "max_num_seqs": 8, "max_step_tokens": 256, "chunk_size": 200, "max_seq_len": 1500}
    named: dict[str, Any] = {"weights": "dummy", "dtype": "bfloat16", "device": "cuda", **sizes, **fields}
    return Engine.from_pretrained("random/weights", spec=spec, **named)


def graphs_of(engine: Engine) -> StepGraphs:
    graphs = runner_of(engine).graphs
    assert graphs is not None, "steps of such a model can be graphs"
    return graphs


def state_dict(seed: int, spec: ModelSpec = SPEC) -> dict[str, torch.Tensor]:
    decoder = Decoder.random(spec, seed, numerics=Numerics(), dtype=torch.bfloat16, device="cuda")
    return decoder.tensors()


def mixed(seed: int) -> list[Arrival]:
    """Requests of all kinds, a few at a time, with prompts of 1 to 700 tokens: up to three splits and four chunks.

    Those whose tokens are drawn by plain launches come later: a step has one way of drawing for all of its rows.
    """
    rng = random.Random(seed)
    stops = {"stop_token_ids": range(0, SPEC.vocab_size, 9)}
    graphed: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 0.4, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 0.5, "top_k": 20},
        {"temperature": 0.0, "top_p": 0.5, **stops},
        {"temperature": 0.8, "n": 3, **stops},
    ]
    plain: list[dict[str, Any]] = [
        {"presence_penalty": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0.6, "logprobs": 3},
        {"temperature": 0.5, "prompt_logprobs": 1, "logit_bias": {5: 2.0}},
    ]
    made = [Arrival("long", random_prompt(rng, 700, 700), SamplingParams(max_tokens=120, seed=1))]
    for kinds, steps in ((2 * graphed, (0, 40)), (2 * plain, (50, 80))):
        for kind in kinds:
            name = f"r{len(made)}"
            params = SamplingParams(max_tokens=rng.randint(2, 60), seed=len(made), **kind)
            prompt = random_prompt(rng, 1, rng.choice((4, 40, 400)), vocab=SPEC.vocab_size)
            made.append(Arrival(name, prompt, params, at_step=rng.randint(*steps)))
    return made


Prepare = Callable[[Engine], dict[str, Any]]


def drive_both(
    arrivals: Sequence[Arrival], prepare: Prepare = lambda engine: {}, **fields: Any
) -> tuple[Drive, Drive, Engine]:
    """The same requests on an engine with graphs and on one that launches every kernel by itself: equal to the bit.

    Args:
        arrivals: the requests.
        prepare: is given the engine with graphs and then the one without, and returns further arguments of ``drive``.
        fields: of both engines.

    Returns:
        What came with graphs, what came without, and the engine with graphs.
    """
    engine = random_engine(**fields)
    num_made = len(graphs_of(engine)._graphs)
    with_graphs = drive(engine, arrivals, **prepare(engine))
    assert len(graphs_of(engine)._graphs) > num_made, "graphs of steps with chunks"
    plain = random_engine(**fields)
    runner_of(plain).graphs = None
    without = drive(plain, arrivals, **prepare(plain))
    assert essences(with_graphs.outputs) == essences(without.outputs)
    return with_graphs, without, engine


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(("depth", "num_blocks"), [(1, 1024), (2, 1024), (3, 60)])
def test_graphs_give_the_bits_of_plain_launches(spec: ModelSpec, depth: int, num_blocks: int) -> None:
    with_graphs, _, engine = drive_both(mixed(depth), spec=spec, depth=depth, num_blocks=num_blocks)
    keys = set(graphs_of(engine)._graphs)
    assert {key[2] for key in keys if key[0] == "compute"} == {False, True}  # type: ignore[index]
    assert len({key[1] for key in keys if key[0] == "compute"}) > 6, "steps of several sizes"  # type: ignore[index]
    assert len({key[2] for key in keys if key[0] == "sample"}) >= 3, "several limits"  # type: ignore[index]
    assert {output.finish_reason for output in with_graphs.outputs.values()} == {"stop", "length"}
    if num_blocks == 60:
        assert engine.metrics()["preemptions"] > 0


def test_graphs_read_new_weights() -> None:
    """Those that came in the middle, under steps in flight, and after all is done; both as plain launches do."""
    new, newest = state_dict(2), state_dict(3)

    def prepare(engine: Engine) -> dict[str, Any]:
        def before_step(number: int) -> None:
            if number == 25:
                assert engine.num_running > 2
                engine.load_weights(new)

        return {"before_step": before_step}

    first, _, engine = drive_both(mixed(4), prepare, depth=2)
    engine.load_weights(newest)
    again = essences(drive(engine, mixed(4)).outputs)
    plain = random_engine(depth=2)
    runner_of(plain).graphs = None
    plain.load_weights(newest)
    assert again == essences(drive(plain, mixed(4)).outputs)
    old = {key: output.token_ids for key, output in first.outputs.items()}
    assert all(again[key][1] != tokens for key, tokens in old.items() if len(tokens) > 10), "the weights are others"


class PlantedError(Exception):
    """What these tests let fail."""


def past_errors(engine: Engine, errors: list[str]) -> Callable[[], list[Any]]:
    """``engine.step`` that notes a planted error in ``errors``, and brings nothing then."""

    def step() -> list[Any]:
        try:
            return engine.step()
        except PlantedError as error:
            errors.append(str(error))
            return []

    return step


@pytest.mark.parametrize("part", ["forward", "logits"])
def test_an_error_in_the_middle_of_a_capture_leaves_no_graph(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is given up, the stream and the graphs' memory serve on, and the next such step is captured anew."""
    errors: list[str] = []
    failed: list[set[Any]] = []

    def prepare(engine: Engine) -> dict[str, Any]:
        runner = runner_of(engine)
        if runner.graphs is None:
            return {}
        graphs, method = graphs_of(engine), getattr(runner.decoder, part)

        def failing(*args: Any) -> torch.Tensor:
            made: torch.Tensor = method(*args)
            # In the first and in the third capture, when its kernels have been launched.
            if torch.cuda.is_current_stream_capturing():
                failed.append(set(graphs._graphs))
                if len(failed) in (1, 3):
                    raise PlantedError(part)
            return made

        monkeypatch.setattr(runner.decoder, part, failing)
        return {"step": past_errors(engine, errors)}

    _, _, engine = drive_both(mixed(5), prepare, depth=2)
    assert errors == [part] * 2
    assert len(failed) > 3, "captures that went well"
    assert failed[1] >= failed[0], "the graphs that there were are there still"
    assert len(graphs_of(engine)._graphs) >= len(failed[0]) + len(failed) - 2
    assert not torch.cuda.is_current_stream_capturing()


@pytest.mark.parametrize(
    ("part", "calls"),
    [("slots.apply", (5, 30, 31)), ("graphs.sample", (1, 12)), ("graphs.compute", (3, 20)), ("_result", (6, 7, 40))],
)
def test_an_error_in_a_step_is_forgotten(part: str, calls: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in flight are given up while the card may still be at them; sequences start again with the same bits."""
    errors: list[str] = []
    num_called = 0

    def prepare(engine: Engine) -> dict[str, Any]:
        if runner_of(engine).graphs is None:
            return {}
        *path, name = part.split(".")
        owner: Any = runner_of(engine)
        for attribute in path:
            owner = getattr(owner, attribute)
        method = getattr(owner, name)

        def failing(*args: Any) -> Any:
            nonlocal num_called
            num_called += 1
            made = method(*args)
            if num_called in calls:
                raise PlantedError(part)
            return made

        monkeypatch.setattr(owner, name, failing)
        return {"step": past_errors(engine, errors)}

    drive_both(mixed(6), prepare, depth=3)
    assert errors == [part] * len(calls)


def test_after_kernels_were_built_a_start_builds_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs
    asked: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **_: asked.append(src.name))
    num_first = []

    def build_first(*args: Any) -> None:
        build_kernels(*args)
        num_first.append(len(asked))
        asked.clear()

    monkeypatch.setattr(engine_parts, "build_kernels", build_first)
    # Of sizes that no other test has, as a process builds a kernel once.
    spec = replace(
        SPEC, hidden_size=384, intermediate_size=640, vocab_size=777, num_heads=6, num_kv_heads=2, head_dim=64
    )
    engine = random_engine(spec, num_blocks=64, max_num_seqs=9, max_step_tokens=96, chunk_size=64, depth=2)
    engine.generate([[1, 2, 3], [4] * 70], SamplingParams(max_tokens=20), use_tqdm=False)
    assert num_first[0] > 10, "the control: something was built"
    assert not asked


def test_all_graphs_take_hardly_more_than_the_engine_s_share_of_the_card() -> None:
    """A pool as large as the share allows, then every graph that there can be: hardly more is taken than was allowed.

    What the driver itself keeps for graphs, and what torch's allocator can't hand out again, is not measured ahead: for
    all of these graphs it was once seen to be 210 MB.
    """
    gc.collect()
    torch.cuda.empty_cache()
    device = torch.device("cuda")
    before = CardMemory.read(device)
    share = 0.3
    # Keys and values so large that the pool is bounded by memory.
    spec = replace(SPEC, hidden_size=1024, num_layers=8, num_kv_heads=8, head_dim=128, max_position_embeddings=32768)
    num_slots, max_step_tokens = 64, 4096
    engine = random_engine(
        spec,
        num_blocks=None,
        max_num_seqs=num_slots,
        max_step_tokens=max_step_tokens,
        chunk_size=max_step_tokens,
        max_seq_len=None,
        gpu_memory_utilization=share,
        prefix_reuse=False,
        depth=2,
    )
    assert engine.scheduler.config.num_blocks < num_slots * 32768 // 16, "the pool is as large as it may be useful"
    graphs = graphs_of(engine)
    sizes = graphs._sizes
    rng = random.Random(1)
    expected: set[tuple[Any, ...]] = {("compute", size, False) for size in sizes if size <= num_slots}
    for size in sizes[1:]:
        prompt = random_prompt(rng, min(size, max_step_tokens), min(size, max_step_tokens))
        engine.generate([prompt], SamplingParams(max_tokens=2), use_tqdm=False)
        expected.add(("compute", size, True))
    for asks in range(LIMITS + 1):
        limits = {"top_k": 5 * (asks & 1), "top_p": 0.9 if asks & 2 else 1.0, "min_p": 0.1 if asks & 4 else 0.0}
        params = SamplingParams(max_tokens=2, **limits)  # type: ignore[arg-type]
        for size in sizes[: sizes.index(num_slots) + 1]:
            results = engine.generate([[number] for number in range(size)], params, use_tqdm=False)
            outputs: list[CompletionOutput] = [output for result in results for output in result.outputs]
            assert all(output.finish_reason == "length" for output in outputs)
            expected.add(("sample", size, asks))
    # Of steps of the network with splits or without, whatever the batches had.
    assert {key[:3] for key in graphs._graphs} >= expected
    after = CardMemory.read(device)
    used = after.total - after.free - before.others
    assert used <= share * after.total + 2**28
    assert used > 0.9 * share * after.total, "the control: the share is made use of"
