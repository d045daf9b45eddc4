"""An engine over several ranks: what one rank gives, to rounding or to the bit, with the same decisions."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

from engine_tools import Arrival, essences, random_prompt, save_tokenizer
from oracles import random_folder
from paged import CompletionOutput, Engine, EngineConfig, SamplingParams, engine_ranks
from paged.core.agreement import TPError
from paged.core.scheduler import NonFiniteLogitsError
from paged.core.sharding import local_spec
from paged.engine_parts import Assignment, Blueprint
from paged.model.checkpoint import CheckpointError
from paged.runner.kv_cache import KVCache
from paged.runner.launched import Launch
from tp_tools import SPECS, VOCAB, Came, is_there, pids, run, save_model, state_dict, tp_engine, workload

# Fields of the engine, and whether all prompts begin alike.
VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "invariant": ({}, False),
    "fast": ({"numerics": "fast"}, False),
    "small pool": ({"num_blocks": 16}, False),
    "sharing": ({}, True),
    "small chunks": ({"chunk_size": 3, "max_step_tokens": 8}, False),
}
SHARED = 12
GREEDY = SamplingParams(temperature=0, max_tokens=10)
PROMPTS = [[1, 2, 3], [4, 5, 6, 11, 8], [9] * 6]


@dataclass
class Runs:
    """What one engine makes of several workloads, one after the other; of one only where its pool or chunks are small.

    Attributes:
        plain: of the workload.
        block_bytes: of the cache.
        sharing: of the workload with ``SHARED`` tokens before every prompt.
        alone: some requests of the workload, each without the others.
    """

    plain: Came
    block_bytes: int
    sharing: Came | None = None
    alone: dict[Any, CompletionOutput] = field(default_factory=dict)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(tmp_path_factory.mktemp(name) / "model", spec) for name, spec in SPECS.items()}


@pytest.fixture(scope="module")
def runs(folders: dict[str, Path]) -> Callable[..., Runs]:
    """What comes of the workloads: family, number of ranks, fields of the engine; each engine is made once."""

    @cache
    def stops(family: str) -> tuple[int, ...]:
        engine = tp_engine(folders[family], 1, dtype="float64")
        free, sharing = (run(engine, workload(shared=shared)).outputs for shared in (0, SHARED))
        return free["r0", 0].token_ids[5], free["r1", 0].token_ids[7], sharing["r1", 0].token_ids[9]

    @cache
    def remembered(family: str, tp: int, fields: frozenset[Any]) -> Runs:
        engine = tp_engine(folders[family], tp, **dict(fields))
        try:
            made = Runs(run(engine, workload(stop=stops(family))), engine.executor.cache.bytes_per_block)  # type: ignore[attr-defined]
            if {"num_blocks", "chunk_size"}.isdisjoint(dict(fields)):
                made.sharing = run(engine, workload(stop=stops(family), shared=SHARED))
                for arrival in workload(stop=stops(family))[:2]:
                    made.alone |= run(engine, [Arrival(arrival.id, arrival.prompt, arrival.params)]).outputs
            return made
        finally:
            engine.close()

    def call(family: str, tp: int, *, dtype: str = "float64", **fields: Any) -> Runs:
        return remembered(family, tp, frozenset({"dtype": dtype, **fields}.items()))

    return call


def worst(left: list[float], right: list[float]) -> float:
    return max((abs(a - b) for a, b in zip(left, right, strict=True)), default=0.0)


def decisions(output: CompletionOutput) -> tuple[Any, ...]:
    tops = [ids for ids, _ in output.top_logprobs or []]
    scores = [(score.token_id, score.top[0]) for score in output.prompt_logprobs or []]
    ended = (output.finish_reason, output.stop_reason, output.num_preemptions, output.num_cached_tokens)
    return (output.prompt_token_ids, output.token_ids, tops, scores, *ended)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", SPECS)
def test_several_ranks_give_what_one_gives(runs: Callable[..., Runs], family: str, variant: str, tp: int) -> None:
    fields, is_sharing = VARIANTS[variant]
    both = runs(family, 1, **fields), runs(family, tp, **fields)
    one, several = (each.sharing if is_sharing else each.plain for each in both)
    assert one is not None
    assert several is not None

    assert several.counters == one.counters
    assert several.outputs.keys() == one.outputs.keys()
    for key, expected in one.outputs.items():
        output = several.outputs[key]
        assert decisions(output) == decisions(expected), key
        assert worst(output.logprobs, expected.logprobs) < 1e-12, key
        assert worst(output.behavior_logprobs, expected.behavior_logprobs) < 1e-12, key
        scores = [[score.logprob for score in each.prompt_logprobs or []] for each in (output, expected)]
        assert worst(*scores) < 1e-12, key

    # What the variant is about was met.
    assert {output.finish_reason for output in one.outputs.values()} == {"stop", "length"}
    if variant == "small pool":
        assert one.counters["num_preemptions"] > 0
    if variant == "sharing":
        assert one.counters["cached_tokens"] >= 36
    if variant == "small chunks":
        assert one.counters["num_steps"] > runs(family, 1).plain.counters["num_steps"]


@pytest.mark.parametrize("tp", [2, 4])
def test_a_sequence_is_the_same_bits_whatever_goes_with_it(runs: Callable[..., Runs], tp: int) -> None:
    """Three pools and chunk sizes, and requests alone."""
    plain = runs("qwen3", tp).plain
    for variant in ("small pool", "small chunks"):
        other = runs("qwen3", tp, **VARIANTS[variant][0]).plain
        assert other.counters != plain.counters
        assert essences(other.outputs) == essences(plain.outputs)
    alone = essences(runs("qwen3", tp).alone)
    assert len(alone) == 2
    assert alone == {key: found for key, found in essences(plain.outputs).items() if key in alone}
    # The control: fast numerics have other bits in other company.
    fast = runs("qwen3", tp, numerics="fast")
    assert [fast.alone[key].logprobs for key in alone] != [fast.plain.outputs[key].logprobs for key in alone]


def test_four_segments_make_the_numbers_of_ranks_agree_to_the_bit(runs: Callable[..., Runs]) -> None:
    made = {tp: runs("qwen3", tp, dtype="float32", k_segments=4) for tp in (1, 2, 4)}
    for tp in (2, 4):
        assert essences(made[tp].plain.outputs) == essences(made[1].plain.outputs), "numerics_id included"
        assert essences(made[tp].alone) == essences(made[1].alone)
        assert made[tp].plain.counters == made[1].plain.counters
    # The control: with one segment they do not agree, and say so.
    plain = [runs("qwen3", tp).plain.outputs["r1", 0] for tp in (1, 2)]
    assert plain[0].logprobs != plain[1].logprobs
    assert len({output.numerics_id for output in (*plain, made[1].plain.outputs["r1", 0])}) == 3


def test_without_comparing_the_results_are_the_same(runs: Callable[..., Runs]) -> None:
    unverified, verified = runs("qwen3", 2, verify=False), runs("qwen3", 2)
    assert essences(unverified.plain.outputs) == essences(verified.plain.outputs)
    assert unverified.plain.counters == verified.plain.counters


def test_steps_in_flight_are_decided_alike(runs: Callable[..., Runs]) -> None:
    one, two = (runs("qwen3", tp, depth=2, num_blocks=16).plain for tp in (1, 2))
    assert two.counters == one.counters
    assert one.counters["num_preemptions"] > 0
    assert {key: decisions(output) for key, output in two.outputs.items()} == {
        key: decisions(output) for key, output in one.outputs.items()
    }


@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_holds_its_share_of_keys_and_values(runs: Callable[..., Runs], tp: int) -> None:
    """Exactly 1 / min(tp, kv heads) of the bytes; beyond 4 ranks the 4 heads are copied."""
    whole = 2 * 2 * 4 * 8 * 4 * 8  # layers, keys and values, heads, head_dim, block_size, bytes
    assert runs("qwen3", 1).block_bytes == whole
    assert runs("qwen3", tp).block_bytes * tp == whole
    copied = KVCache(local_spec(SPECS["qwen3"], 8), 1, 4, dtype=torch.float64)
    assert copied.bytes_per_block * 4 == whole


@pytest.fixture(scope="module")
def readable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer, of which token 7 is no number."""
    folder = save_model(tmp_path_factory.mktemp("readable") / "model")
    weights = state_dict()
    weights["model.embed_tokens.weight"][7] = torch.nan
    save_file(weights, folder / "model.safetensors")
    return save_tokenizer(folder)


@pytest.fixture(scope="module")
def pair(readable: Path) -> Iterator[Engine]:
    """An engine over two ranks that several tests share; none of them may break it."""
    engine = tp_engine(readable, 2, dtype="float32", tp_timeout_s=20)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def single(readable: Path) -> Engine:
    return tp_engine(readable, 1, dtype="float32")


def answers(engine: Engine, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in engine.generate(PROMPTS, params, use_tqdm=False)]


def test_no_whole_row_travels_for_greedy_tokens_and_scores(pair: Engine) -> None:
    """Bytes that this rank contributes: a few a row, less than a row of its logits."""
    group = pair.executor.decoder.group  # type: ignore[attr-defined]
    rows_bytes = -(-VOCAB // 2) * 4

    def bytes_of(params: SamplingParams) -> tuple[int, int]:
        before = group.num_bytes, pair.scheduler.counters.forward_tokens
        answers(pair, params)
        return group.num_bytes - before[0], pair.scheduler.counters.forward_tokens - before[1]

    plain, num_tokens = bytes_of(SamplingParams(temperature=0, max_tokens=10, prompt_logprobs=0))
    listed, same = bytes_of(SamplingParams(temperature=0, max_tokens=10, prompt_logprobs=1, logprobs=1))
    assert num_tokens == same > 30
    residual = num_tokens * 32 * 4 * (1 + 2 * 2)
    assert residual < plain < residual + num_tokens * 60
    assert listed >= residual + 30 * rows_bytes


def test_a_greedy_row_is_the_same_bits_gathered_or_not(pair: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, prompt_logprobs=0)
    listed = SamplingParams(temperature=0, max_tokens=10, prompt_logprobs=0, logprobs=0)
    plain, gathered = (pair.generate(PROMPTS, each, use_tqdm=False) for each in (params, listed))
    for left, right in zip(plain, gathered, strict=True):
        assert left.outputs[0].token_ids == right.outputs[0].token_ids
        assert left.outputs[0].logprobs == right.outputs[0].logprobs
    seen: list[torch.Tensor] = []
    runner = pair.executor
    runner.observe_logits = lambda plan, rows, logits_RV: seen.append(logits_RV.clone())  # type: ignore[attr-defined]
    try:
        watched = pair.generate(PROMPTS, params, use_tqdm=False)
    finally:
        runner.observe_logits = None  # type: ignore[attr-defined]
    assert [result.outputs[0].logprobs for result in watched] == [result.outputs[0].logprobs for result in plain]
    assert {logits.shape[1] for logits in seen} == {VOCAB}


def test_what_a_step_brought_is_handed_out_with_the_next_one(pair: Engine) -> None:
    pair.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=2), "late")
    assert pair.step() == []
    assert pair.scheduler.num_running == 1, "nothing was computed"
    (first,) = pair.step()
    assert (len(first.token_ids), first.output) == (1, None)
    assert not pair.scheduler.has_unfinished
    assert pair.has_unfinished, "the last token waits for the others' word"
    with pytest.raises(ValueError, match="'late' is in use by a request that has not finished, or not been delivered"):
        pair.add_request([1], GREEDY, "late")
    (last,) = pair.step()
    assert last.output is not None
    assert len(last.output.token_ids) == 2
    assert not pair.has_unfinished


def test_aborting_and_streaming(pair: Engine, single: Engine) -> None:
    outcomes = []
    for engine in (pair, single):
        engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=30), "gone")
        for _ in range(4):
            engine.step()
        (output,) = engine.abort("gone")
        pieces = list(engine.stream([4, 5], SamplingParams(temperature=0, max_tokens=5)))
        outcomes.append((output.token_ids, output.finish_reason, [p.token_ids for p in pieces]))
        assert not engine.has_unfinished
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][0]) == 4


def test_a_refused_request_leaves_all_ranks_as_they_were(pair: Engine, single: Engine) -> None:
    for prompt, sentence in (([], "at least one token"), ([VOCAB], "outside the vocabulary"), ([1] * 500, "exceeds")):
        with pytest.raises(ValueError, match=sentence):
            pair.add_request(prompt, GREEDY)
    assert answers(pair) == answers(single)


def test_logits_that_are_no_numbers_end_their_requests_on_all_ranks(pair: Engine, single: Engine) -> None:
    params = [GREEDY, SamplingParams(temperature=1.0, seed=2, max_tokens=6), GREEDY]
    outcomes = []
    for engine in (pair, single):
        results = engine.generate([[1, 2, 3], [4, 7], [7, 5]], params, use_tqdm=False)
        outcomes.append([(result.outputs[0].token_ids, result.outputs[0].finish_reason) for result in results])
        engine.add_request([7, 1], GREEDY, "bad")
        engine.add_request([2, 1], GREEDY, "good")
        with pytest.raises(NonFiniteLogitsError) as caught:
            step_to_the_end(engine)
        assert [request.id for request in caught.value.requests] == ["bad"]
        engine.abort("bad")
        outcomes[-1].append((step_to_the_end(engine), "good"))
        assert not engine.has_unfinished
    assert outcomes[0] == outcomes[1]
    assert [reason for _, reason in outcomes[0]] == ["length", "error", "error", "good"]


def step_to_the_end(engine: Engine) -> list[int]:
    tokens = []
    while engine.has_unfinished:
        tokens += [token for update in engine.step() for token in update.token_ids]
    return tokens


def test_a_stop_text_ends_a_sample_on_all_ranks(pair: Engine, single: Engine) -> None:
    (free,) = single.generate("abc", SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    stop = free.outputs[0].text[4:6]
    params = SamplingParams(temperature=0, max_tokens=12, stop=stop)
    one, two = (engine.generate("abc", params, use_tqdm=False)[0].outputs[0] for engine in (single, pair))
    assert decisions(one) == decisions(two)
    assert (two.finish_reason, two.stop_reason) == ("stop", stop)
    assert 0 < len(two.token_ids) < 12


def test_new_weights_reach_all_ranks(folders: dict[str, Path], tmp_path: Path) -> None:
    """A state dict and a folder; what does not suit changes no rank; requests go on under the new ones."""
    other = save_model(tmp_path / "other", SPECS["qwen3"], seed=2)
    expected = {1: answers(tp_engine(folders["qwen3"], 1)), 2: answers(tp_engine(other, 1))}
    assert expected[1] != expected[2]
    engine = tp_engine(folders["qwen3"], 2)
    try:
        assert answers(engine) == expected[1]
        assert engine.load_weights(state_dict(SPECS["qwen3"], 2)) == 1
        assert answers(engine) == expected[2]
        assert engine.load_weights(folders["qwen3"]) == 2
        assert answers(engine) == expected[1]
        wrong = {**state_dict(SPECS["qwen3"], 2), "model.norm.weight": None}
        del wrong["lm_head.weight"]
        with pytest.raises(CheckpointError) as caught:
            engine.load_weights(wrong)  # type: ignore[arg-type]
        assert len(caught.value.violations) == 2
        assert answers(engine) == expected[1]
        engine.add_request([1, 2, 3], GREEDY, "live")
        tokens = [token for _ in range(3) for update in engine.step() for token in update.token_ids]
        assert engine.load_weights(other) == 3
        assert len(tokens + step_to_the_end(engine)) == 10
    finally:
        engine.close()
    engine.close()
    assert not any(is_there(pid) for pid in pids(engine))
    assert engine._leader is not None
    assert [process.returncode for process in engine._leader.ranks.processes] == [0]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"tp": 3},
            "tp must divide num_attention_heads 8, and divide or be a multiple of num_key_value_heads 4, not 3",
        ),
        ({"tp": 0}, "tp must be a whole number, at least 1, not 0"),
        ({"tp": 2, "k_segments": 3}, "k_segments must be a power of two, not 3"),
        ({"tp": 4, "k_segments": 2}, "k_segments must be a multiple of tp 4, not 2"),
        ({"tp_timeout_s": 0}, "tp_timeout_s must be 0.1 to 31536000, not 0"),
        ({"verify": "no"}, "verify must be true or false, not 'no'"),
        ({"reduce_dtype": "int8"}, "reduce_dtype must be one of model, float32, not 'int8'"),
    ],
)
def test_a_mistake_is_one_sentence(folders: dict[str, Path], fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        tp_engine(folders["qwen3"], **{"tp": 2, **fields})
    assert str(caught.value) == sentence


def test_each_rank_has_a_card_of_its_own_or_shares_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    allowed = re.escape("the number of GPUs here, 3 (or 2, 4 or 8: ranks then share GPUs)")
    with pytest.raises(ValueError, match=rf"^tp must be at most {allowed}, not 16; or use device=cpu$"):
        engine_ranks._devices(torch.device("cuda"), 16, None)
    shared = engine_ranks._devices(torch.device("cuda"), 4, None)
    assert shared == [torch.device("cuda", number) for number in (2, 0, 1, 2)]
    cards = engine_ranks._devices(torch.device("cuda"), 2, None)
    assert cards == [torch.device("cuda:2"), torch.device("cuda:0")], "the current one is rank 0's"
    launched = engine_ranks._devices(torch.device("cuda"), 6, Launch(0, 6, 3))
    assert launched == [torch.device("cuda", number) for number in (0, 1, 2, 0, 1, 2)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    alone = engine_ranks._devices(torch.device("cuda"), 8, Launch(0, 8, 8))
    assert alone == [torch.device("cuda:0")] * 8, "a launcher may show each process its own card alone"


@pytest.mark.parametrize(
    ("num_local", "cards", "num_sharing"),
    [(2, "ab", 1), (4, "abab", 2), (4, "abca", 2), (3, "abcdef", 1), (2, "ababcd", 2)],
    ids=str,
)
def test_ranks_share_a_card_only_if_it_is_the_same_one(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, num_local: int, cards: str, num_sharing: int
) -> None:
    """Ranks whose cards had the same numbers, on two machines or each shown its own, were taken to share them."""
    size = len(cards)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found: list[Any] = []

    def meet(*args: Any, num_sharing: int, is_one_host: bool) -> Any:
        found.append((num_sharing, is_one_host))
        raise TPError("enough is known")

    class Peers:
        host = "127.0.0.1"
        answers: ClassVar = [["there"] * (size - 1), list(cards[1:])]

        def hear_start(self, limit_s: float) -> list[Any]:
            return self.answers.pop(0)

        def tell_each(self, assignments: Sequence[Assignment], limit_s: float) -> None:
            assert {each.is_one_host for each in assignments} == {num_local == size}

        def tell(self, message: Any, limit_s: float) -> None:
            found.append(message)

        def cause(self, error: BaseException, limit_s: float) -> None:
            return None

        def end(self) -> None:
            pass

    launch = Launch(0, size, num_local)
    monkeypatch.setattr(Launch, "gather", lambda self, limit_s: Peers())
    monkeypatch.setattr(engine_ranks, "make_group", meet)
    monkeypatch.setattr(engine_ranks, "card_id", lambda device: cards[0])
    blueprint = Blueprint(spec=SPECS["qwen3"], folder=folders["qwen3"], config=EngineConfig(tp=size))
    with pytest.raises(TPError, match="enough is known"):
        engine_ranks.build_with_ranks(blueprint, torch.device("cuda"), launch)
    assert found == [num_sharing, (num_sharing, num_local == size)]


def test_ranks_share_the_cores_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(engine_ranks, "num_processors", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [engine_ranks._num_threads(ranks) for ranks in (2, 3, 16)] == [4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert engine_ranks._num_threads(2) == 8


@pytest.mark.oracle
@pytest.mark.parametrize("tp", [2, 4])
def test_greedy_tokens_equal_transformers(tmp_path: Path, tp: int) -> None:
    """Six prompts of 40 tokens each, in fp32: identical six times."""
    from transformers import Qwen3ForCausalLM

    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": VOCAB}
    folder = random_folder("qwen3", tmp_path, **sizes)
    rng = random.Random(1)
    texts = [random_prompt(rng, length, length, VOCAB) for length in (2, 3, 9, 17, 21, 30)]
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = tp_engine(folder, tp, num_blocks=128)
    try:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        results = engine.generate(texts, params, use_tqdm=False)
    finally:
        engine.close()
    identical = 0
    for text, result in zip(texts, results, strict=True):
        ids = torch.tensor([text])
        with torch.no_grad():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, min_new_tokens=40, do_sample=False
            )
        identical += made[0, len(text) :].tolist() == result.outputs[0].token_ids
    assert identical == 6
