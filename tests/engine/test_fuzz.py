"""Many random requests in a pool that is far too small: the books hold after every step, and nobody's tokens change."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from engine_tools import Arrival, Result, drive, essence, make_engine, save_tokenizer
from paged import CompletionOutput, SamplingParams
from paged.runner.text import Tokenizer

NUM_REQUESTS = 120
LIMITS = {"num_blocks": 14, "block_size": 4, "max_num_seqs": 6, "max_step_tokens": 24, "chunk_size": 7}


@dataclass(frozen=True)
class Case:
    """The requests of a run, and the steps before which some are aborted."""

    arrivals: tuple[Arrival, ...]
    aborts: dict[int, list[str]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@cache
def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    prefixes = [[rng.randrange(99) for _ in range(16)] for _ in range(4)]
    arrivals, aborts, step = [], {}, 0
    for index in range(NUM_REQUESTS):
        shared = rng.choice(prefixes)[: rng.choice((0, 0, 4, 8, 9, 12, 16))]
        prompt = [*shared, *(rng.randrange(99) for _ in range(rng.randint(1, 8)))]
        arrivals.append(Arrival(f"r{index}", prompt, random_params(rng), step))
        if rng.random() < 0.15:
            aborts.setdefault(step + rng.randint(0, 30), []).append(f"r{index}")
        step += rng.choice((0, 0, 0, 1, 2, 4))
    return Case(tuple(arrivals), aborts)


def random_params(rng: random.Random) -> SamplingParams:
    greedy = rng.random() < 0.25
    return SamplingParams(
        n=1 if greedy or rng.random() < 0.7 else rng.randint(2, 3),
        max_tokens=rng.randint(1, 24),
        temperature=0.0 if greedy else rng.choice((0.5, 1.0, 1.7)),
        top_p=rng.choice((1.0, 0.9, 0.5)),
        top_k=rng.choice((0, 0, 3, 20)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        seed=rng.choice((None, rng.randrange(1000))),
        stop=rng.choice(((), (), (rng.choice("abcdeXYZ019"),), ("q", "w"))),
        stop_token_ids=[rng.randrange(99) for _ in range(rng.choice((0, 0, 5)))],
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice((None, None, 0, 3)),
        prompt_logprobs=rng.choice((None, None, None, 2)),
        presence_penalty=rng.choice((0.0, 0.0, 0.7)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.4)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
        logit_bias={rng.randrange(99): rng.uniform(-5, 5)} if rng.random() < 0.2 else {},
    )


EOS = (11, 60)


@cache
def alone(seed: int, tokenizer: Tokenizer) -> Result:
    """The result of each request in an engine of its own with ample memory, without aborts."""
    outputs: Result = {}
    for arrival in random_case(seed).arrivals:
        engine = make_engine(tokenizer=tokenizer, eos_token_ids=EOS)
        outputs |= drive(engine, [Arrival(arrival.id, arrival.prompt, arrival.params)]).outputs
    return outputs


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_random_requests_in_a_small_pool(depth: int, tokenizer: Tokenizer) -> None:
    case = random_case(1)
    engine = make_engine(tokenizer=tokenizer, eos_token_ids=EOS, depth=depth, **LIMITS)
    num_aborted = 0

    def interfere(step: int) -> list[CompletionOutput]:
        nonlocal num_aborted
        ended = [output for request_id in case.aborts.get(step, ()) for output in engine.abort(request_id)]
        num_aborted += len(ended)
        return ended

    result = drive(engine, case.arrivals, interfere)
    expected = alone(1, tokenizer)
    assert result.outputs.keys() == expected.keys()
    reasons: dict[str, int] = {}
    for key, output in result.outputs.items():
        reasons[output.finish_reason] = reasons.get(output.finish_reason, 0) + 1
        if output.finish_reason == "abort":
            assert output.token_ids == expected[key].token_ids[: len(output.token_ids)]
            assert output.logprobs == expected[key].logprobs[: len(output.token_ids)]
        else:
            assert essence(output) == essence(expected[key])
    metrics = engine.metrics()
    assert metrics["preemptions"] > 10, "pressure"
    assert metrics["cached_tokens"] > 100, "sharing"
    assert metrics["peak_blocks"] == LIMITS["num_blocks"]
    assert metrics["recomputed_tokens"] > 0
    assert reasons["abort"] == num_aborted > 3
    assert reasons["stop"] > 20
    assert reasons["length"] > 20
    assert {type(output.stop_reason) for output in result.outputs.values()} == {int, str, type(None)}
    # Pool fully free at the end: `drive` asserts it, and the books after every step.


def test_the_same_run_twice(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A run is replayed to the bit, plans included: the step logs differ in their times alone."""
    import json

    logs = []
    for number in range(2):
        path = tmp_path / f"{number}.jsonl"
        engine = make_engine(tokenizer=tokenizer, eos_token_ids=EOS, depth=2, step_log=path, **LIMITS)
        drive(engine, random_case(2).arrivals[:40])
        engine.close()
        events = [json.loads(line) for line in path.read_text().splitlines()]
        logs.append([{key: value for key, value in event.items() if not key.endswith("_s")} for event in events])
    assert logs[0] == logs[1]
    assert len(logs[0]) > 100
