"""Would the tests notice? Each fault of the table is planted, an oracle must then fail, and without it it must pass.

The faults are planted by ``mutants.py``, which also counts how often they do their harm. A row of the table holds only
if the oracle fails by its own words: a planted function that merely crashes is caught by nobody.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import mock_device
import mutants
from engine_tools import (
    GREEDY,
    SEEDED,
    SPEC,
    VOCAB,
    Arrival,
    drive,
    essence,
    make_engine,
    only,
    random_decoder,
    random_prompt,
    record_logits,
    script_logits,
    spoil_logits,
    with_fields,
)
from mutants import Fault
from oracles import raw_greedy, raw_logits
from paged import CompletionOutput, Engine, SamplingParams
from paged.core.blocks import BlockPool
from paged.core.scheduler import Scheduler
from paged.kernels.sampling import probabilities, sample
from paged.kernels.sampling_columns import SamplingColumns
from paged.model.decoder import Decoder


@dataclass(frozen=True)
class Mutant:
    """A row of the table.

    Attributes:
        fault: its name.
        plant: puts it into the program.
        oracle: what must fail then, one of ``ORACLES``.
        says: pattern of the error that it must fail with.
        error: the error's type.
    """

    fault: str
    plant: Callable[[Fault], None]
    oracle: str
    says: str
    error: type[Exception] = AssertionError


# The oracles, defined below
REFERENCE = "tokens, logprobs and ends equal a raw-weight fp64 reference"
FP8 = "logprobs over an fp8 cache are near that reference"
ALONE = "alone and among others, under preemption: the same bits"
WIDE_FP32 = "alone and among others, 512 wide, fp32: the same bits"
WIDE_FP64 = "alone and among others, 512 wide, fp64: the same bits"
DISTRIBUTION = "the distribution drawn from equals an fp64 reference"
DEVICE = "a device that checks every cache read, the scheduler's books, and who yields"
POOL = "the pool's books and guards"
REFUSALS = "what must be refused is, what fits is served"
CHECKPOINT = "a checkpoint: no tensor missing or left over, all end tokens"
PROCESSES = "two processes draw the same"

TABLE = (
    # Keys and values
    Mutant("gather drops the last key", mutants.gather_drops_the_last_key, REFERENCE, "a logprob is off"),
    Mutant("cell mapping ignores the block offset", mutants.cell_ignores_the_offset, REFERENCE, "a logprob is off"),
    Mutant("K heads flipped", mutants.key_heads_flipped, REFERENCE, "a logprob is off"),
    Mutant("causal mask off by one", mutants.causal_mask_off_by_one, REFERENCE, "a logprob is off"),
    Mutant("RoPE positions restart each step", mutants.rope_restarts_each_step, REFERENCE, "a logprob is off"),
    Mutant("KV not dequantized on read", mutants.fp8_not_dequantized, FP8, "logprobs are off"),
    # Blocks
    Mutant("free leaks", mutants.free_leaks, DEVICE, "counts disagree"),
    Mutant("free twice", mutants.free_twice, DEVICE, "nothing refers to it", RuntimeError),
    Mutant("incref removed", mutants.adopt_removed, DEVICE, "counts disagree"),
    Mutant("double-free guard removed", mutants.double_free_guard_removed, POOL, "freed twice without a word"),
    Mutant("sharing of a partial block", mutants.partial_block_shared, DEVICE, "more than one table holds it"),
    Mutant("sharing without last-token recompute", mutants.last_token_not_recomputed, DEVICE, "nothing is left"),
    # Preemption
    Mutant("preemption forgets tokens", mutants.preemption_forgets_tokens, DEVICE, "not reported, or reported twice"),
    Mutant("preemption forgets to free", mutants.preemption_forgets_to_free, DEVICE, "counts disagree"),
    Mutant("oldest victim", mutants.oldest_victim, DEVICE, "the victims are not the youngest"),
    # Sampling
    Mutant("noise keyed by row", mutants.noise_keyed_by_row, ALONE, "the results differ"),
    Mutant("noise keyed by step", mutants.noise_keyed_by_step, ALONE, "the results differ"),
    Mutant("top-p keeps one extra", mutants.top_p_keeps_one_extra, DISTRIBUTION, "another support"),
    Mutant("top-k off by one", mutants.top_k_off_by_one, DISTRIBUTION, "another support"),
    Mutant("logprob of the truncated distribution", mutants.truncated_logprob, REFERENCE, "a logprob is off"),
    Mutant("stop_token_ids ignored", mutants.stop_token_ids_ignored, REFERENCE, "the stop token does not end it"),
    Mutant("seed salted per process", mutants.seed_salted_per_process, PROCESSES, "other tokens in another process"),
    # Matrix products
    Mutant("row batching in fp32", mutants.rows_batched, WIDE_FP32, "the logits differ"),
    Mutant("row batching in fp64", mutants.rows_batched, WIDE_FP64, "the logits differ"),
    Mutant("a batched lm_head in fp32", mutants.lm_head_batched, WIDE_FP32, "the logits differ"),
    Mutant("a batched lm_head in fp64", mutants.lm_head_batched, WIDE_FP64, "the logits differ"),
    Mutant("a batched mlp in fp32", mutants.mlp_batched, WIDE_FP32, "the logits differ"),
    Mutant("a batched mlp in fp64", mutants.mlp_batched, WIDE_FP64, "the logits differ"),
    Mutant("a batched qkv in fp32", mutants.qkv_batched, WIDE_FP32, "the logits differ"),
    Mutant("a batched qkv in fp64", mutants.qkv_batched, WIDE_FP64, "the logits differ"),
    Mutant("a batched o_proj in fp32", mutants.o_proj_batched, WIDE_FP32, "the logits differ"),
    Mutant("a batched o_proj in fp64", mutants.o_proj_batched, WIDE_FP64, "the logits differ"),
    # Refusals and checkpoints
    Mutant("out-of-vocabulary check removed", mutants.vocabulary_check_removed, REFUSALS, "an id .* is accepted"),
    Mutant("guard sized on N", mutants.guard_sized_on_n, REFUSALS, "what fits exactly is refused"),
    Mutant("NaN check removed", mutants.nan_check_removed, REFUSALS, "NaN logits are sampled from"),
    Mutant("tensor-set check removed", mutants.tensor_set_check_removed, CHECKPOINT, "one tensor .* is loaded"),
    Mutant("only config.json's eos honoured", mutants.only_the_eos_of_config_json, CHECKPOINT, "goes on past the end"),
)


@pytest.mark.parametrize("mutant", TABLE, ids=lambda mutant: mutant.fault)
def test_a_planted_fault_is_caught(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = ORACLES[mutant.oracle]
    oracle()  # the control
    if mutant.oracle in WIDE_DTYPES and library_hides_the_batch(WIDE_DTYPES[mutant.oracle]):
        pytest.skip("this CPU's library gives a row the same bits in every batch")
    with monkeypatch.context() as patch:
        fault = Fault(patch, tmp_path)
        mutant.plant(fault)
        with pytest.raises(mutant.error, match=mutant.says):
            oracle()
    assert fault.num_reached > 0, "the fault was planted where the program never came"


def test_the_table_is_sound() -> None:
    """No row twice, no oracle without a row."""
    assert len({mutant.fault for mutant in TABLE}) == len(TABLE)
    assert {mutant.oracle for mutant in TABLE} == ORACLES.keys()


# The engine against a reference

NUM_TOKENS = 12
# Measured is 0.12; without the scales, of keys or of values alone, it is above 6.
FP8_TOLERANCE = 0.3
PROMPTS = [random_prompt(random.Random(length), length, length) for length in (3, 9, 17)]
CHUNKS: dict[str, Any] = {"chunk_size": 5, "max_step_tokens": 16}
RAW_CONFIG = {
    "num_hidden_layers": SPEC.num_layers,
    "num_attention_heads": SPEC.num_heads,
    "num_key_value_heads": SPEC.num_kv_heads,
    "head_dim": SPEC.head_dim,
    "hidden_size": SPEC.hidden_size,
    "rms_norm_eps": SPEC.rms_norm_eps,
    "rope_theta": SPEC.rope_theta,
}


@cache
def reference_tokens() -> list[list[int]]:
    """Greedy tokens by naive full recomputation in fp64."""
    weights = random_decoder(dtype=torch.float64).tensors()
    return [raw_greedy(RAW_CONFIG, weights, prompt, NUM_TOKENS) for prompt in PROMPTS]


def reference_logprobs(output: CompletionOutput, temperature: float = 1.0) -> torch.Tensor:
    """What the tokens of ``output`` should have as log-probabilities, from the text and the weights alone."""
    text = output.prompt_token_ids + output.token_ids
    logits = raw_logits(RAW_CONFIG, random_decoder(dtype=torch.float64).tensors(), text)
    logprobs = torch.log_softmax(logits[len(output.prompt_token_ids) - 1 : -1] / temperature, -1)
    return logprobs.gather(1, torch.tensor(output.token_ids)[:, None]).squeeze(1)


def check_against_the_reference() -> None:
    """Greedy requests, some sampled from a truncated distribution, and one that ends at a token of its own."""
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    truncated = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, max_tokens=NUM_TOKENS, seed=5)
    expected = reference_tokens()
    stop = expected[0][4]
    arrivals = [Arrival(f"greedy-{i}", prompt, greedy, i) for i, prompt in enumerate(PROMPTS)]
    arrivals += [Arrival(f"sampled-{i}", prompt, truncated, i) for i, prompt in enumerate(PROMPTS)]
    arrivals += [Arrival("stopped", PROMPTS[0], with_fields(greedy, stop_token_ids=(stop,)))]
    # A cache of NaN would end a mutant in an error of the program; here the comparison shall find it.
    engine = make_engine(dtype=torch.float64, prefix_reuse=False, spoil=False, **CHUNKS)
    outputs = {key[0]: output for key, output in drive(engine, arrivals).outputs.items()}
    for name, output in outputs.items():
        logprobs = reference_logprobs(output, 0.7 if name.startswith("sampled") else 1.0)
        error = (torch.tensor(output.logprobs) - logprobs).abs().max().item()
        assert error < 1e-5, f"{name}: a logprob is off by {error}"
    for i, tokens in enumerate(expected):
        assert outputs[f"greedy-{i}"].token_ids == tokens, f"greedy-{i} has other tokens"
    stopped = outputs["stopped"]
    end = expected[0].index(stop) + 1
    assert (stopped.token_ids, stopped.finish_reason) == (expected[0][:end], "stop"), "the stop token does not end it"


def check_fp8_cache() -> None:
    params = with_fields(GREEDY, max_tokens=NUM_TOKENS)
    engine = make_engine(kv_dtype=torch.float8_e4m3fn, **CHUNKS)
    outputs = drive(engine, [Arrival(f"{i}", prompt, params) for i, prompt in enumerate(PROMPTS)]).outputs
    errors = [(torch.tensor(o.logprobs) - reference_logprobs(o)).abs().max().item() for o in outputs.values()]
    assert max(errors) < FP8_TOLERANCE, f"logprobs are off by {errors}"


# Alone and among others


def check_alone_and_among_others(
    decoder: Decoder | None = None, *, num_tokens: int = 16, num_others: int = 5, **limits: Any
) -> None:
    """A sampled request with an engine to itself, then with companions, later, and in other slots and chunks."""
    rng = random.Random(6)
    prompt = random_prompt(rng, 11, 11)
    params = with_fields(SEEDED, max_tokens=num_tokens)
    others = [
        Arrival(f"other-{i}", random_prompt(rng, 3, 20), with_fields(SEEDED, seed=i, max_tokens=num_tokens), i)
        for i in range(num_others)
    ]
    runs = []
    for arrivals, settings in (
        ([Arrival("victim", prompt, params)], {}),
        ([*others, Arrival("victim", prompt, params, 3)], {**CHUNKS, **limits}),
    ):
        engine = make_engine(decoder, **settings)
        logits = record_logits(engine)
        runs.append((drive(engine, arrivals).outputs["victim", 0], logits["victim", 0]))
    (alone, alone_logits), (among, among_logits) = runs
    for i, position in enumerate(sorted(alone_logits)):
        # Once another token is drawn the texts differ, and so may the logits.
        if alone.token_ids[:i] == among.token_ids[:i]:
            assert torch.equal(alone_logits[position], among_logits[position]), f"the logits differ at {position}"
    assert essence(alone) == essence(among), "the results differ"
    assert not limits or among.num_preemptions, "a small pool is there to preempt"


WIDE = replace(
    SPEC, hidden_size=512, intermediate_size=512, num_heads=8, num_kv_heads=4, head_dim=64, num_layers=1, vocab_size=512
)
WIDE_DTYPES = {WIDE_FP32: torch.float32, WIDE_FP64: torch.float64}


def library_hides_the_batch(dtype: torch.dtype) -> bool:
    """Whether a row's product has the same bits among any number of rows; a batched product is no fault then."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(count, 512, generator=generator, dtype=dtype) for count in (16, 512))
    alone = F.linear(rows[:1], weight)
    return all(torch.equal(F.linear(rows[:count], weight)[:1], alone) for count in range(2, 17))


def check_wide_alone_and_among_others(dtype: torch.dtype) -> None:
    check_alone_and_among_others(random_decoder(dtype=dtype, spec=WIDE), num_tokens=8)


# The distribution


def reference_distribution(logits: Sequence[float], temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Softmax in fp64, the ``top_k`` likeliest, and of these the fewest that hold ``top_p`` of their mass."""
    weights = torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, 0).tolist()
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: top_k or len(logits)]
    total = sum(weights[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    distribution = torch.zeros(len(logits), dtype=torch.float64)
    for token in kept:
        distribution[token] = weights[token] / mass
    return distribution


CUTS = [(top_k, top_p) for top_k in (0, 1, 5, 40) for top_p in (1.0, 0.95, 0.6)]


def check_the_distribution() -> None:
    generator = torch.Generator().manual_seed(2)
    logits_RV = 3 * torch.randn(len(CUTS), VOCAB, generator=generator)
    columns = SamplingColumns(
        temperature_R=torch.full((len(CUTS),), 0.7, dtype=torch.float64),
        seeds_R=torch.arange(len(CUTS)),
        positions_R=torch.full((len(CUTS),), 9),
        top_k_R=torch.tensor([top_k for top_k, _ in CUTS]),
        top_p_R=torch.tensor([top_p for _, top_p in CUTS], dtype=torch.float64),
    )
    rows = zip(logits_RV.tolist(), CUTS, strict=True)
    expected_RV = torch.stack([reference_distribution(logits, 0.7, *cut) for logits, cut in rows])
    found_RV = probabilities(logits_RV, columns)
    assert torch.equal(found_RV > 0, expected_RV > 0), "another support"
    assert (found_RV - expected_RV).abs().max() < 1e-6, "another distribution"
    drawn = sample(logits_RV, columns)
    logprobs_R = expected_RV.gather(1, drawn.tokens_R[:, None]).squeeze(1).log()
    assert (drawn.behavior_logprobs_R - logprobs_R).abs().max() < 1e-5, "another token or logprob than drawn from"


# Scheduler and pool


def check_on_the_device() -> None:
    """Requests with common beginnings under pressure: every cache read, every output, and who has to yield."""
    scheduler, device = mock_device.setup(16, 4, max_num_seqs=8, max_step_tokens=32, chunk_size=8)
    rng = random.Random(8)
    begin = [rng.randrange(50) for _ in range(10)]
    whole = begin + [rng.randrange(50) for _ in range(6)]
    running: dict[int, list[tuple[str, int]]] = {}

    def note(tick: int, scheduler: Scheduler) -> None:
        running[scheduler.counters.num_steps] = [sequence.request.key for sequence in scheduler._running]

    arrivals = {
        0: [[mock_device.ask("begun", begin, 14)]],
        2: [[mock_device.ask("whole", whole, 10)]],
        # A text of whole blocks that are all published by now.
        5: [[mock_device.ask("again", whole, 10)]],
        6: [[mock_device.ask(f"new-{i}", random_prompt(rng, 3, 9, 50), 20)] for i in range(5)],
    }
    run = mock_device.drive(scheduler, device, arrivals, before_plan=note)
    mock_device.verify(run, device.model)
    counters = scheduler.counters
    assert counters.num_preemptions > 2, "the pool is there to be too small"
    assert counters.cached_tokens > 0, "the beginnings are there to be shared"
    for plan in run.plans:
        youngest = running[plan.step][len(running[plan.step]) - len(plan.preempted) :]
        assert list(plan.preempted) == youngest[::-1], "the victims are not the youngest"


def check_the_pool() -> None:
    pool = BlockPool(4)
    first = pool.allocate(2)
    pool.publish([first[0]], [b"key"])
    pool.adopt(first[:1])
    pool.check([first, first[:1]])
    pool.free(first)
    pool.check([first[:1]])
    with refusal(RuntimeError, "nothing refers to it", "a block is freed twice without a word"):
        pool.free(first[1:])
    pool.check([first[:1]])
    pool.free(first[:1])
    pool.check([])
    assert pool.num_free == pool.num_blocks


# Refusals


@contextmanager
def refusal(error: type[Exception], word: str, otherwise: str) -> Iterator[None]:
    """The body must raise ``error`` with ``word`` in it; an AssertionError says ``otherwise``."""
    try:
        yield
    except error as refused:
        if word not in str(refused):
            raise AssertionError(f"refused for another reason: {refused}") from refused
        return
    raise AssertionError(otherwise)


def check_refusals() -> None:
    engine = make_engine(num_blocks=3, block_size=4)
    short = with_fields(GREEDY, max_tokens=3)
    for token in (-1, VOCAB):
        with refusal(ValueError, f"{token} is outside the vocabulary", "an id outside the vocabulary is accepted"):
            engine.add_request([1, token], short)
    # The last token is not fed back: 5 + 8 tokens hold 12 cells, which is all there are.
    prompt = [1, 2, 3, 4, 5]
    try:
        output = only(drive(engine, [Arrival("exact", prompt, with_fields(GREEDY, max_tokens=8))]).outputs)
    except ValueError as error:
        raise AssertionError(f"what fits exactly is refused: {error}") from error
    assert len(output.token_ids) == 8
    with refusal(ValueError, "max_tokens 9", "what can never fit is accepted"):
        engine.add_request(prompt, with_fields(GREEDY, max_tokens=9))
    spoil_logits(engine, "spoiled")
    engine.add_request(prompt, short, "spoiled")
    with refusal(FloatingPointError, "'spoiled'", "NaN logits are sampled from"):
        engine.step()
    assert not engine.abort("spoiled")[0].token_ids, "a token was drawn from NaN"


# Checkpoints


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of these tensors; ``config.json`` knows one of two end tokens."""
    config = {"model_type": "qwen3", "vocab_size": VOCAB, "intermediate_size": SPEC.intermediate_size, **RAW_CONFIG}
    config |= {"max_position_embeddings": SPEC.max_position_embeddings, "eos_token_id": 5, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def check_checkpoints() -> None:
    tensors = {name: tensor.clone() for name, tensor in random_decoder().tensors().items()}
    load = partial(Engine.from_pretrained, num_blocks=8, device="cpu")
    with TemporaryDirectory() as name:
        engine = load(write_checkpoint(Path(name), tensors))
        scripts = {"five": [1, 5, 2], "seven": [1, 7, 2]}
        script_logits(engine, scripts)
        short = with_fields(GREEDY, max_tokens=3)
        for output in drive(engine, [Arrival(script, [1, 2, 3], short) for script in scripts]).outputs.values():
            wanted = scripts[output.request_id][:2]
            assert output.token_ids == wanted, f"{output.request_id} goes on past the end token {wanted[-1]}"
        norm = "model.layers.1.self_attn.q_norm.weight"
        extra = {**tensors, "model.layers.1.self_attn.q_proj.bias": torch.zeros(SPEC.q_size)}
        missing = {other: tensor for other, tensor in tensors.items() if other != norm}
        for what, changed in (("too many", extra), ("too few", missing)):
            (changed_name,) = changed.keys() ^ tensors.keys()
            with refusal(ValueError, changed_name, f"a checkpoint with one tensor {what} is loaded"):
                load(write_checkpoint(Path(name), changed))


# Processes

CHILD = """
import json
from mock_device import ask, drive, setup
scheduler, device = setup(32, 4)
outputs = drive(scheduler, device, {0: [[ask("a", [1, 2, 3], 8)], [ask("b", [1, 2, 3], 8)]]}).outputs()
print(json.dumps(sorted(outputs.items())))
"""


def check_two_processes() -> None:
    """Unseeded requests in two interpreters whose ``hash()`` differs."""
    tests = Path(__file__).parent
    path = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    outputs = []
    for salt in ("1", "2"):
        places = os.pathsep.join([*path, str(tests.parent), str(tests)])
        environment = {**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": places}
        done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"the child failed: {done.stderr}"
        outputs.append(json.loads(done.stdout))
    assert outputs[0] == outputs[1], "other tokens in another process"
    (_, first), (_, second) = outputs[0]
    assert first != second, "two requests draw the same"


ORACLES: dict[str, Callable[[], None]] = {
    REFERENCE: check_against_the_reference,
    FP8: check_fp8_cache,
    ALONE: partial(check_alone_and_among_others, num_blocks=16),
    WIDE_FP32: partial(check_wide_alone_and_among_others, WIDE_DTYPES[WIDE_FP32]),
    WIDE_FP64: partial(check_wide_alone_and_among_others, WIDE_DTYPES[WIDE_FP64]),
    DISTRIBUTION: check_the_distribution,
    DEVICE: check_on_the_device,
    POOL: check_the_pool,
    REFUSALS: check_refusals,
    CHECKPOINT: check_checkpoints,
    PROCESSES: check_two_processes,
}
