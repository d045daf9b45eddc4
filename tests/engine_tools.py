"""Small engines for tests, the full logits of their steps, and loops that feed them requests at chosen steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from paged import CompletionOutput, Engine, SampleUpdate
from paged.core.limits import SchedulerConfig
from paged.core.model_spec import ModelSpec
from paged.core.plan import StepPlan
from paged.core.policy import Policy
from paged.core.request import SamplingParams
from paged.core.scheduler import Scheduler
from paged.kernels.numerics import Numerics
from paged.kernels.sampling import SampledRows
from paged.model.decoder import Decoder
from paged.runner.kv_cache import KVCache
from paged.runner.runner import TorchRunner
from paged.runner.text import Tokenizer
from paged.step_log import StepLog

VOCAB = 99
SPEC = ModelSpec(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)
INVARIANT, FAST = Numerics(), Numerics(mode="fast")
# Tiles so small that short texts cross the borders of several tiles and splits.
SMALL_TILES = Numerics(kv_tile=8, kv_split=16)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=24)

Key = tuple[str, int]
Result = dict[Key, CompletionOutput]


@cache
def random_decoder(
    numerics: Numerics = INVARIANT, dtype: torch.dtype = torch.float32, spec: ModelSpec = SPEC, seed: int = 1
) -> Decoder:
    """A random model whose logits spread over several units, so that some tokens are clearly likelier than others."""
    decoder = Decoder.random(spec, seed, numerics=numerics, dtype=dtype)
    decoder.tensors()["lm_head.weight"].mul_(4)
    return decoder


def make_engine(
    decoder: Decoder | None = None,
    *,
    numerics: Numerics = INVARIANT,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    num_blocks: int = 200,
    block_size: int = 4,
    max_num_seqs: int = 16,
    max_step_tokens: int = 64,
    chunk_size: int = 64,
    max_seq_len: int | None = None,
    depth: int = 1,
    prefix_reuse: bool = True,
    policy: Policy | None = None,
    eos_token_ids: Iterable[int] = (),
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
    step_log: Path | None = None,
    spoil: bool = True,
) -> Engine:
    """An engine on a random decoder; ``spoil`` fills the cache with NaN first, so that no stale memory can be read."""
    decoder = random_decoder(numerics, dtype) if decoder is None else decoder
    spec = decoder.spec
    kv = KVCache(spec, num_blocks, block_size, dtype=kv_dtype or decoder.dtype)
    if spoil and kv.dtype != torch.float8_e4m3fn:
        for layer in kv.layers:
            layer.key.fill_(torch.nan)
            layer.value.fill_(torch.nan)
    held = min(max_seq_len or spec.max_position_embeddings, num_blocks * block_size)
    runner = TorchRunner(
        decoder, kv, tokenizer, max_num_seqs=max_num_seqs, max_seq_len=held, eos_token_ids=eos_token_ids
    )
    limits = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_step_tokens=max_step_tokens,
        chunk_size=chunk_size,
        max_seq_len=held,
        vocab_size=spec.vocab_size,
        depth=depth,
        prefix_reuse=prefix_reuse,
    )
    return Engine(
        runner,
        Scheduler(limits, policy),
        tokenizer,
        seed=seed,
        numerics_id=decoder.numerics.numerics_id(dtype=decoder.dtype, kv_dtype=kv.dtype, device="cpu"),
        step_log=StepLog(step_log) if step_log is not None else None,
    )


def runner_of(engine: Engine) -> TorchRunner:
    """The engine's executor, which these tests look into."""
    assert isinstance(engine.executor, TorchRunner)
    return engine.executor


Logits = dict[Key, dict[int, torch.Tensor]]
Spy = Callable[[StepPlan, Sequence[int], torch.Tensor], torch.Tensor | None]


def spy_on_logits(engine: Engine, spy: Spy) -> None:
    """Let ``spy`` see the raw logits [R, V] of each step before sampling; what it returns takes their place."""
    runner = runner_of(engine)
    sample = runner._sample

    def wrapped(plan: StepPlan, rows: Sequence[int], logits_RV: torch.Tensor) -> SampledRows:
        changed_RV = spy(plan, rows, logits_RV)
        return sample(plan, rows, logits_RV if changed_RV is None else changed_RV)

    runner._sample = wrapped  # type: ignore[method-assign]


def record_logits(engine: Engine) -> Logits:
    """A dictionary that fills with each step's full logits, by sequence and by position of the token drawn."""
    logits: Logits = {}

    def record(plan: StepPlan, rows: Sequence[int], logits_RV: torch.Tensor) -> None:
        for row, logits_V in zip(rows, logits_RV, strict=True):
            key = runner_of(engine).slots.state(plan.slots[row]).request.key
            logits.setdefault(key, {})[plan.starts[row] + plan.lengths[row]] = logits_V.clone()

    spy_on_logits(engine, record)
    return logits


def spoil_logits(engine: Engine, request_id: str, from_position: int = 0) -> None:
    """Make the logits of one request NaN wherever they draw a token for ``from_position`` or beyond."""

    def spoil(plan: StepPlan, rows: Sequence[int], logits_RV: torch.Tensor) -> torch.Tensor:
        spoiled_RV = logits_RV.clone()
        for index, row in enumerate(rows):
            request = runner_of(engine).slots.state(plan.slots[row]).request
            if request.id == request_id and plan.starts[row] + plan.lengths[row] >= from_position:
                spoiled_RV[index, index % logits_RV.shape[1]] = torch.nan
        return spoiled_RV

    spy_on_logits(engine, spoil)


@dataclass(frozen=True)
class Arrival:
    """A request and the step before which it is added."""

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    at_step: int = 0
    samples: Sequence[int] | None = None


@dataclass
class Drive:
    """What came of driving an engine until nothing was left.

    Attributes:
        outputs: each sample's result.
        updates: all updates in order.
        num_steps: calls of ``step``.
    """

    outputs: Result = field(default_factory=dict)
    updates: list[SampleUpdate] = field(default_factory=list)
    num_steps: int = 0


def drive(
    engine: Engine,
    arrivals: Iterable[Arrival],
    before_step: Callable[[int], Iterable[CompletionOutput] | None] | None = None,
    *,
    step: Callable[[], list[SampleUpdate]] | None = None,
) -> Drive:
    """Add requests at their steps and step until all have ended, checking the books after every step.

    Args:
        engine: the engine; other live requests are driven too.
        arrivals: the requests.
        before_step: called before each step with its number; the results it returns (of aborts) are kept too.
        step: called instead of ``engine.step``.
    """
    waiting = sorted(arrivals, key=lambda arrival: arrival.at_step)
    result = Drive()
    while waiting or engine.has_unfinished:
        while waiting and waiting[0].at_step <= result.num_steps:
            arrival = waiting.pop(0)
            engine.add_request(arrival.prompt, arrival.params, arrival.id, samples=arrival.samples)
        for output in (before_step(result.num_steps) if before_step is not None else None) or ():
            result.outputs[(output.request_id, output.sample)] = output
        for update in (step or engine.step)():
            result.updates.append(update)
            if update.output is not None:
                result.outputs[(update.request_id, update.sample)] = update.output
        engine.scheduler.check()
        result.num_steps += 1
        assert result.num_steps < 20_000, "the engine does not come to an end"
    assert_idle(engine)
    return result


def assert_idle(engine: Engine) -> None:
    """Nothing is live, every block is free and nothing is remembered of finished samples."""
    assert not engine.has_unfinished
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    engine.scheduler.check()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    assert not engine._samples.live


def alone(prompt: Sequence[int], params: SamplingParams, *, request_id: str = "victim", **settings: Any) -> Result:
    """The results of a request that has a fresh engine to itself."""
    return drive(make_engine(**settings), [Arrival(request_id, prompt, params)]).outputs


def random_prompt(rng: random.Random, low: int = 2, high: int = 30, vocab: int = VOCAB) -> list[int]:
    """Between ``low`` and ``high`` token ids."""
    return [rng.randrange(vocab) for _ in range(rng.randint(low, high))]


def essence(output: CompletionOutput) -> tuple[Any, ...]:
    """What must not hang on how a sample was scheduled."""
    return (
        output.prompt_token_ids,
        output.token_ids,
        output.text,
        output.logprobs,
        output.behavior_logprobs,
        output.top_logprobs,
        output.prompt_logprobs,
        output.finish_reason,
        output.stop_reason,
        output.numerics_id,
    )


def essences(outputs: Mapping[Key, CompletionOutput]) -> dict[Key, tuple[Any, ...]]:
    """``essence`` of each."""
    return {key: essence(output) for key, output in outputs.items()}


def serving_calls(engine: Engine, prompt: list[int], params: SamplingParams) -> list[Callable[[], Any]]:
    """A call of each method with which an engine serves requests."""
    return [
        lambda: engine.generate(prompt, params, use_tqdm=False),
        lambda: engine.generate([], params, use_tqdm=False),
        lambda: engine.stream(prompt, params),
        lambda: engine.add_request(prompt, params),
        engine.step,
        engine.run_step,
        lambda: engine.load_weights({}),
    ]


def only(outputs: Mapping[Key, CompletionOutput]) -> CompletionOutput:
    """The one output that there is."""
    (output,) = outputs.values()
    return output


def with_fields(params: SamplingParams, **fields: Any) -> SamplingParams:
    """The same parameters with some fields changed."""
    return replace(params, **fields)


EOS_ID = VOCAB - 1


def save_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer of 99 ids: 94 printable characters and the space, "é" in two bytes, "ab", and an end."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = ["Ġ", *map(chr, range(33, 127)), "Ã", "©", "ab"]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = FastTokenizer(BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    assert tokenizer.get_vocab_size() == VOCAB
    assert tokenizer.token_to_id("<end>") == EOS_ID
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def script_logits(engine: Engine, texts: Mapping[str, Sequence[int]]) -> None:
    """Let the requests named draw given tokens one after the other: all other tokens become very unlikely."""

    def write(plan: StepPlan, rows: Sequence[int], logits_RV: torch.Tensor) -> torch.Tensor:
        written_RV = logits_RV.clone()
        for index, row in enumerate(rows):
            request = runner_of(engine).slots.state(plan.slots[row]).request
            if request.id in texts:
                place = plan.starts[row] + plan.lengths[row] - len(request.prompt)
                script = texts[request.id]
                written_RV[index] = -1e4
                written_RV[index, script[min(place, len(script) - 1)]] = 0
        return written_RV

    spy_on_logits(engine, write)
