"""The whole engine's bits on one card: a victim among random companions, in random engines, against itself alone.

    python benchmarks/engine_bits_h200.py [--configs 510] [--seconds N] [--jobs 6] [--plant fast]
        [--json FILE]
    python benchmarks/engine_bits_h200.py --device cpu --small --configs 24

Models with random bf16 weights: Qwen3-0.6B, four layers of Qwen3-8B's width, two of OLMoE's. Each victim runs alone on
a reference engine. Then engines of other block sizes, chunks, budgets, depths and pools serve it beside 1 to 255
companions: tokens, log-probabilities, alternatives and in every fourth configuration the full logits must be the same
bits, and so must scores of its text. Ends with exit code 1 if a bit differs or a kind of pressure was not met; with a
planted fault, if it was not found: `fast` serves with the other numerics, `results` moves a log-probability that hangs
on the neighbours.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from engine_random import MAX_SEQ_LEN, Arrival, build_random, model_specs, observed_logits, read_options, serve
from engine_runs import StepWatch

from paged import CompletionOutput, Engine, SamplingParams
from paged.core.limits import SchedulerConfig
from paged.core.memory import num_blocks_for
from paged.core.model_spec import ModelSpec
from paged.core.plan import StepResult

MODES = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(temperature=1),
    "cold": SamplingParams(temperature=0.3, logprobs=5),
    "top_p": SamplingParams(temperature=0.3, top_p=0.9),
    "top_k": SamplingParams(temperature=0.7, top_k=20),
    "min_p": SamplingParams(temperature=0.5, min_p=0.05),
    "penalties": SamplingParams(
        temperature=0.3, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2, logprobs=2
    ),
    "greedy, penalties": SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.2),
    "all": SamplingParams(
        temperature=0.6, top_p=0.95, top_k=200, min_p=0.01, presence_penalty=0.3, logit_bias={3: 2.0, 77: -1.5}
    ),
}
# What companions may ask for: steps in which nobody asks for more are drawn in CUDA graphs.
COMPANIES = {
    "temperatures": ("greedy", "plain"),
    "limits": ("greedy", "plain", "top_p", "top_k", "min_p"),
    "all": tuple(MODES),
}
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 40, 63, 64, 65, 100, 200, 255, 256, 257, 300, 513, 700)
# Each model's engines, as fields of ``EngineConfig``, first what a card has by default. Every second pool is tight.
ENGINES: tuple[dict[str, Any], ...] = (
    {"block_size": 16, "depth": 2, "max_step_tokens": 8192, "chunk_size": 8192, "max_num_seqs": 256},
    {"block_size": 8, "depth": 1, "max_step_tokens": 48, "chunk_size": 7, "max_num_seqs": 256},
    {"block_size": 32, "depth": 3, "max_step_tokens": 2048, "chunk_size": 512, "max_num_seqs": 64},
    {"block_size": 64, "depth": 2, "max_step_tokens": 160, "chunk_size": 64, "max_num_seqs": 64},
    {
        "block_size": 16,
        "depth": 1,
        "max_step_tokens": 600,
        "chunk_size": 300,
        "max_num_seqs": 256,
        "prefix_reuse": False,
    },
    {"block_size": 8, "depth": 3, "max_step_tokens": 300, "chunk_size": 16, "max_num_seqs": 7},
)
COMPANIONS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 63, 64, 100, 127, 128, 200, 255)


@dataclass(frozen=True)
class Scale:
    """How large everything is: a card's size, or one that a CPU gets through.

    Attributes:
        num_victims: of each model.
        prompt_lengths: of the victims' prompts.
        num_tokens: most that a victim or a companion generates.
        companions: how many there may be.
    """

    num_victims: int = 2 * len(MODES)
    prompt_lengths: Sequence[int] = PROMPT_LENGTHS
    num_tokens: int = 32
    companions: Sequence[int] = COMPANIONS


SMALL = Scale(
    num_victims=len(MODES),
    prompt_lengths=[length for length in PROMPT_LENGTHS if length <= 100],
    num_tokens=10,
    companions=[number for number in COMPANIONS if number <= 17],
)


@dataclass
class Victim:
    """A request, and what it gives alone.

    Attributes:
        mode: how it is sampled, a key of ``MODES``.
        prompt: token ids.
        params: with its own seed.
        expected: its result alone.
        logits: the full logits of each of its tokens, alone, by position.
    """

    mode: str
    prompt: list[int]
    params: SamplingParams
    expected: CompletionOutput
    logits: dict[int, torch.Tensor]


@dataclass
class Tally:
    """What was compared and what it met.

    Attributes:
        configs: configurations.
        compared, differing: numbers, tokens and logits that were compared, and those that were not the same.
        logits: of the compared ones, elements of full logits.
        met: how often each kind of pressure was met.
        rows: numbers of sequences in steps that only decoded, the victim among them.
        failures: the first configurations with a difference.
    """

    configs: int = 0
    compared: int = 0
    differing: int = 0
    logits: int = 0
    met: Counter[str] = field(default_factory=Counter)
    rows: set[int] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def take_in(self, other: Tally) -> None:
        """Add what another one has counted."""
        self.configs += other.configs
        self.compared += other.compared
        self.differing += other.differing
        self.logits += other.logits
        self.met += other.met
        self.rows |= other.rows
        self.failures += other.failures

    def add_values(self, ours: Sequence[float], expected: Sequence[float]) -> None:
        """Compare token ids, or numbers to the bit; what one side lacks differs."""
        self.compared += max(len(ours), len(expected))
        self.differing += abs(len(ours) - len(expected))
        # Of two numbers that are not NaN, equal texts mean equal bits, the sign of 0 included.
        self.differing += sum(repr(a) != repr(b) for a, b in zip(ours, expected, strict=False))

    def add_output(self, output: CompletionOutput, expected: CompletionOutput) -> None:
        """Compare all that must not hang on how a sample was scheduled."""
        self.add_values(output.token_ids, expected.token_ids)
        self.add_values(output.logprobs, expected.logprobs)
        self.add_values(output.behavior_logprobs, expected.behavior_logprobs)
        ours, theirs = output.top_logprobs or [], expected.top_logprobs or []
        self.add_values([x for ids, values in ours for x in (*ids, *values)], [x for i, v in theirs for x in (*i, *v)])

    def add_logits(self, ours: dict[int, torch.Tensor], expected: dict[int, torch.Tensor]) -> None:
        """Compare full logits bit for bit; surplus steps beyond the end of a text do not count."""
        for position, logits_V in expected.items():
            self.logits += logits_V.numel()
            self.compared += logits_V.numel()
            if position not in ours:
                self.differing += logits_V.numel()
            else:
                self.differing += int((ours[position].view(torch.int32) != logits_V.view(torch.int32)).sum())


def make_victims(spec: ModelSpec, scale: Scale, device: str, rng: random.Random) -> list[Victim]:
    """Victims of all modes and many lengths, run alone one after the other on a reference engine."""
    fields = {"max_num_seqs": 1, "num_blocks": MAX_SEQ_LEN // 16, "max_step_tokens": 2048, "chunk_size": 2048}
    engine = build_random(spec, device, depth=1, prefix_reuse=False, **fields)
    victims = []
    for index in range(scale.num_victims):
        mode = list(MODES)[index % len(MODES)]
        length = scale.prompt_lengths[(index * 7 + 3) % len(scale.prompt_lengths)]
        params = replace(MODES[mode], max_tokens=scale.num_tokens, ignore_eos=True, seed=rng.randrange(2**31))
        prompt = [rng.randrange(spec.vocab_size) for _ in range(length)]
        with observed_logits(engine, ["victim"]) as logits:
            output = serve(engine, [Arrival("victim", prompt, params, 0)], ["victim"])["victim"]
        positions = range(length, length + len(output.token_ids))
        assert sorted(logits["victim"]) == list(positions), "logits of each token, and of no other"
        assert all(logits_V.isfinite().all() for logits_V in logits["victim"].values())
        victims.append(Victim(mode, prompt, params, output, logits["victim"]))
    engine.close()
    return victims


def draw_arrivals(
    victim: Victim, tally: Tally, limits: SchedulerConfig, is_tight: bool, scale: Scale, rng: random.Random
) -> list[Arrival]:
    """The victim and companions in random order: some are aborted, some begin as the victim does, one may score it.

    In every other configuration of a tight pool the companions' prompts leave just room for that of the victim, who
    comes last: as they grow, it is the one to be preempted.
    """
    assert limits.vocab_size is not None
    is_crowded = is_tight and tally.configs % 2 == 0
    have_aborts, have_prefix = rng.random() < 0.4, rng.random() < 0.3
    least = next(name for name, modes in COMPANIES.items() if victim.mode in modes)
    company = least if rng.random() < 0.7 else "all"
    tally.met[f"companies of {company}"] += 1
    num_free = limits.num_blocks - num_blocks_for(len(victim.prompt) + 1, limits.block_size)
    most = limits.num_blocks if is_crowded else 63 if is_tight else max(scale.companions)
    count = most if is_crowded else rng.choice([number for number in scale.companions if number <= most])
    arrivals = [Arrival("victim", victim.prompt, victim.params, 3 if is_crowded else rng.randint(0, 6))]
    for index in range(count):
        prompt = [rng.randrange(limits.vocab_size) for _ in range(rng.randint(1, 40))]
        if have_prefix and index < 2:
            prompt = victim.prompt[: rng.randint(1, len(victim.prompt))] + prompt
        num_free -= num_blocks_for(len(prompt) + 4, limits.block_size)
        if is_crowded and num_free < 0:
            break
        num_tokens = 2 * scale.num_tokens if is_crowded else rng.randint(1, scale.num_tokens)
        params = MODES[rng.choice(COMPANIES[company])]
        params = replace(params, max_tokens=num_tokens, seed=index, ignore_eos=True)
        at_step = rng.randint(0, 1 if is_crowded else 8)
        aborted_at = at_step + rng.randint(1, 8) if have_aborts and rng.random() < 0.3 else None
        arrivals.append(Arrival(f"companion-{index}", prompt, params, at_step, aborted_at))
    if tally.configs % 5 == 0:
        text = victim.prompt + victim.expected.token_ids
        params = SamplingParams(temperature=victim.params.temperature, prompt_logprobs=0, max_tokens=1)
        arrivals.append(Arrival("scoring", text, params, rng.randint(0, 6)))
    rng.shuffle(arrivals)
    return arrivals


def run_config(
    engine: Engine, watch: StepWatch, victim: Victim, arrivals: Sequence[Arrival], tally: Tally, name: str
) -> None:
    """Serve a victim among its company once and compare."""
    before, num_differing = engine.metrics(), tally.differing
    watch.clear()
    is_scored = any(arrival.id == "scoring" for arrival in arrivals)
    awaited = ["victim", "scoring"] if is_scored else ["victim"]
    if tally.configs % 4 == 0:
        with observed_logits(engine, ["victim"]) as logits:
            outputs = serve(engine, arrivals, awaited)
        tally.add_logits(logits["victim"], victim.logits)
        tally.met["full logits"] += 1
    else:
        outputs = serve(engine, arrivals, awaited)
    output = outputs["victim"]
    tally.add_output(output, victim.expected)
    if is_scored:
        scores = outputs["scoring"].prompt_logprobs
        assert scores is not None
        tally.add_values([score.logprob for score in scores[len(victim.prompt) - 1 :]], victim.expected.logprobs)
        tally.met["scored tokens"] += len(victim.expected.logprobs)
    after = engine.metrics()
    tally.met["preemptions"] += int(after["preemptions"] - before["preemptions"])
    tally.met["preemptions of victims"] += output.num_preemptions
    tally.met["shared tokens of victims"] += output.num_cached_tokens
    tally.met["aborted companions"] += sum(other.finish_reason == "abort" for other in outputs.values())
    tally.met[f"victims, {victim.mode}"] += 1
    tally.rows |= {step.num_rows for step in watch.collected if step.num_rows == step.num_tokens}
    tally.configs += 1
    if tally.differing > num_differing and len(tally.failures) < 10:
        tally.failures.append(f"{name}, {victim.mode}, prompt of {len(victim.prompt)}, {len(arrivals) - 1} companions")


def plant_in_results(engine: Engine) -> None:
    """The fault to be found: with more than one row, the last one's log-probability is wrong by a thousandth."""
    executor = engine.executor
    collect = executor.collect

    def spoiled() -> StepResult:
        result = collect()
        if len(result.payload.logprobs) > 1:
            result.payload.logprobs[-1] += 1e-3
        return result

    executor.collect = spoiled  # type: ignore[method-assign]


def fuzz_engine(
    index: int,
    spec: ModelSpec,
    victims: Sequence[Victim],
    options: argparse.Namespace,
    tally: Tally,
    limits: tuple[int, float],
    rng: random.Random,
) -> None:
    """Configurations in the ``index``-th engine: ``limits`` are their number and the moment to stop at."""
    scale = SMALL if options.small else Scale()
    longest = max(len(victim.prompt) for victim in victims) + 2 * scale.num_tokens + 40
    is_tight = index % 2 == 1
    num_tokens = longest * 5 // 4 if is_tight else longest + 256 * 128
    fields = {
        **ENGINES[index],
        "num_blocks": num_blocks_for(num_tokens, ENGINES[index]["block_size"]),
        "numerics": "fast" if options.plant == "fast" else "invariant",
    }
    start_s = time.perf_counter()
    engine = build_random(spec, options.device, **fields)
    if options.plant == "results":
        plant_in_results(engine)
    watch = StepWatch(engine)
    built_s, first = time.perf_counter() - start_s, tally.configs
    name = ", ".join(f"{key} {value}" for key, value in fields.items())
    num_configs, stop_s = limits
    while tally.configs - first < num_configs and (tally.configs == first or time.perf_counter() < stop_s):
        victim = rng.choice(victims)
        if rng.random() < 0.5:
            engine.scheduler.pool.forget()
        arrivals = draw_arrivals(victim, tally, engine.scheduler.config, is_tight, scale, rng)
        run_config(engine, watch, victim, arrivals, tally, name)
    engine.close()
    for key in ("block_size", "depth"):
        tally.met[f"{key} {fields[key]}"] += tally.configs - first
    print(
        f"  {tally.configs - first} in {time.perf_counter() - start_s:.1f} s, {built_s:.1f} of them to build: {name}; "
        f"{tally.differing} differ so far",
        flush=True,
    )


def fuzz_part(options: argparse.Namespace, number: int, index: int) -> Tally:
    """Configurations of one model in one engine; a process draws a model's victims once."""
    name, spec = list(model_specs(options.small).items())[number]
    victims = _victims.get(name)
    if victims is None:
        began = time.perf_counter()
        victims = make_victims(spec, SMALL if options.small else Scale(), options.device, random.Random(number))
        _victims[name] = victims
        print(f"{name}: {len(victims)} victims alone in {time.perf_counter() - began:.1f} s", flush=True)
    tally, num_parts = Tally(), len(parts(options.small))
    stop_s = time.perf_counter() + options.seconds * options.jobs / num_parts
    limits = (-(-options.configs // num_parts), stop_s)
    fuzz_engine(index, spec, victims, options, tally, limits, random.Random(f"{number} {index}"))
    return tally


# What each model's victims give alone, for the parts that one process computes.
_victims: dict[str, list[Victim]] = {}


def parts(small: bool) -> list[tuple[int, int]]:
    """Models and engines by number."""
    return list(itertools.product(range(len(model_specs(small))), range(4 if small else len(ENGINES))))


def fuzz(options: argparse.Namespace) -> Tally:
    """All models in all engines, in as many processes as wished."""
    if options.jobs == 1:
        tallies = [fuzz_part(options, *part) for part in parts(options.small)]
    else:
        # Most of the time the host builds kernels and graphs; the card has room for several engines.
        with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            tallies = list(pool.map(fuzz_part, *zip(*((options, *part) for part in parts(options.small)), strict=True)))
    total = Tally()
    for tally in tallies:
        total.take_in(tally)
    return total


def pressures(small: bool) -> list[str]:
    """What must have been met."""
    counted = ["preemptions", "preemptions of victims", "shared tokens of victims", "aborted companions"]
    kinds = sorted({f"{key} {engine[key]}" for engine in ENGINES for key in ("block_size", "depth")})
    modes = [] if small else [f"victims, {mode}" for mode in MODES]
    companies = [f"companies of {company}" for company in COMPANIES]
    return [*counted, "scored tokens", "full logits", *kinds, *modes, *companies]


def main() -> None:
    """Fuzz and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=int, default=510)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop fuzzing after about so long")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the card")
    parser.add_argument("--plant", choices=("fast", "results"), help="a fault that must be found")
    options = read_options(parser)
    tally = fuzz(options)
    print(
        f"{tally.configs} configurations, {tally.compared:,} elements ({tally.logits:,} of full logits), "
        f"{tally.differing} differ"
    )
    rows = sorted(tally.rows)
    print(f"decoding steps of {rows[0]} to {rows[-1]} sequences, {len(rows)} different numbers of them")
    print("met: " + "; ".join(f"{name} {count}" for name, count in sorted(tally.met.items())))
    for failure in tally.failures:
        print(f"differs: {failure}")
    missing = [name for name in pressures(options.small) if not tally.met[name]]
    if missing:
        print(f"not met: {', '.join(missing)}")
    found = tally.differing > 0
    fine = found if options.plant else not (found or missing)
    report: dict[str, Any] = {
        "configs": tally.configs,
        "elements": tally.compared,
        "logits": tally.logits,
        "differing": tally.differing,
        "met": dict(tally.met),
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
