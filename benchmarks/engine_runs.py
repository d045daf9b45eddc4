"""What the benchmarks of the whole engine share: models by name, lines of the table, steps watched, steady decoding."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from paged import Engine, SamplingParams
from paged.core.model_spec import ModelSpec
from paged.core.plan import StepPlan, StepResult
from paged.workload.synthetic import NanoWorkload, ProverWorkload

CONF = Path(__file__).resolve().parents[1] / "conf"
WORKLOADS = {"nano": NanoWorkload, "prover": ProverWorkload}


def read_conf(group: str, name: str) -> dict[str, Any]:
    """An entry of a config group as plain data: a machine with a card may lack what composes configs."""
    path = CONF / group / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(other.stem for other in path.parent.glob("*.yaml")))
        raise SystemExit(f"{group} must be one of {known}, not {name}")
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def read_model(name: str) -> tuple[str, ModelSpec | None]:
    """Where a model of the group ``model`` is, and what it is if the config says so."""
    entry = read_conf("model", name)
    return entry["path"], ModelSpec.from_config(entry["spec"]) if "spec" in entry else None


@dataclass(frozen=True)
class Line:
    """A line of the table: what ``experiment=h200_NAME`` runs.

    Attributes:
        engine: fields of ``EngineConfig``.
        sampling: for all requests.
        jobs: the requests, as lines of a prompts file.
    """

    engine: dict[str, Any]
    sampling: SamplingParams
    jobs: list[dict[str, Any]]


def read_line(name: str, vocab_size: int) -> Line:
    """The line that ``conf/experiment/h200_NAME.yaml`` describes, with prompts of a vocabulary."""
    entry = read_conf("experiment", f"h200_{name}")
    chosen = {group.removeprefix("override /"): value for of in entry.pop("defaults") for group, value in of.items()}
    sampling = SamplingParams(**entry.pop("sampling"))
    fields = read_conf("workload", chosen["workload"])
    workload = WORKLOADS[fields.pop("name")](**fields)
    return Line(entry, sampling, list(workload.lines(vocab_size)))


def build(model: str, spec: ModelSpec | None, **fields: Any) -> Engine:
    """An engine, with random weights unless ``fields`` say otherwise; the peak of a card's memory counts from here."""
    release_memory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    engine = Engine.from_pretrained(model, spec=spec, **{"weights": "dummy", **fields})
    # As a run does: what lives as long as the engine is none of the collector's business.
    gc.collect()
    gc.freeze()
    return engine


def release_memory() -> None:
    """Give back what engines that nobody holds any more had on the card."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(slots=True)
class Step:
    """One step as its executor saw it.

    Attributes:
        num_rows, num_tokens: sequences and tokens computed.
        submit_s, collect_s: host seconds inside ``submit`` and ``collect``; the latter waits for the device.
        start_s, end_s: on the executor's clock.
    """

    num_rows: int
    num_tokens: int
    submit_s: float
    collect_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0


@dataclass(slots=True)
class StepWatch:
    """Keeps a record of every step of an engine from here on.

    Attributes:
        engine: whose executor is watched.
        steps: those submitted, in order; ``clear`` it while nothing is in flight.
    """

    engine: Engine
    steps: list[Step] = field(default_factory=list)
    _num_collected: int = 0

    def __post_init__(self) -> None:
        executor = self.engine.executor
        submit, collect = executor.submit, executor.collect

        def timed_submit(plan: StepPlan) -> None:
            start = time.perf_counter()
            submit(plan)
            self.steps.append(Step(len(plan.slots), plan.num_tokens, time.perf_counter() - start))

        def timed_collect() -> StepResult:
            start = time.perf_counter()
            result = collect()
            step = self.steps[self._num_collected]
            step.collect_s, step.start_s, step.end_s = time.perf_counter() - start, result.start_s, result.end_s
            self._num_collected += 1
            return result

        executor.submit, executor.collect = timed_submit, timed_collect  # type: ignore[method-assign]

    def clear(self) -> None:
        """Forget the steps so far."""
        assert self._num_collected == len(self.steps), "a step is in flight"
        self.steps.clear()
        self._num_collected = 0

    @property
    def collected(self) -> list[Step]:
        """The steps whose results are there."""
        return self.steps[: self._num_collected]


def drain(engine: Engine) -> int:
    """Step until nothing is left; the number of tokens that came."""
    num_tokens = 0
    while engine.has_unfinished:
        num_tokens += sum(len(update.token_ids) for update in engine.step())
    return num_tokens


def timed_steps(engine: Engine, watch: StepWatch, num_steps: int) -> tuple[float, list[Step]]:
    """Seconds that so many calls of ``step`` took, and the steps whose results they brought."""
    first = len(watch.collected)
    start_s = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    return time.perf_counter() - start_s, watch.collected[first:]


def add_jobs(engine: Engine, line: Line) -> None:
    """Queue a line's requests."""
    for job in line.jobs:
        params = replace(line.sampling, max_tokens=job["max_tokens"], seed=job["seed"])
        engine.add_request(job["prompt_token_ids"], params, job["id"], output_len=job["output_len"])


def random_prompts(name: str, count: int, length: int, vocab_size: int) -> Iterator[list[int]]:
    """Prompts of random ids. Fewer prompts of one name are a prefix of more."""
    for index in range(count):
        generator = random.Random(f"{name} {index}")
        yield [generator.randrange(vocab_size) for _ in range(length)]


def decode_steadily(
    engine: Engine, watch: StepWatch, batch: int, length: int, num_more: int, params: SamplingParams
) -> list[str]:
    """Bring ``batch`` sequences with prompts of ``length`` tokens to where each step decodes all of them.

    A smaller batch takes its prompts over from the cache where a larger one of the same length came before.

    Args:
        engine: an idle engine.
        watch: of it.
        batch, length: how many sequences, and of how many tokens to begin with.
        num_more: steps that will be asked for then.
        params: how they are sampled.

    Returns:
        The requests' ids, to be aborted at the end.
    """
    vocab_size = engine.scheduler.config.vocab_size
    assert vocab_size is not None
    watch.clear()
    # Decoding begins before the last prompt is computed, one token a step.
    num_waited = batch * length // min(engine.scheduler.config.max_step_tokens, batch * length) + batch + num_more + 8
    params = replace(params, max_tokens=num_waited, ignore_eos=True)
    ids = [
        engine.add_request(prompt, replace(params, seed=index), f"steady-{index}")
        for index, prompt in enumerate(random_prompts(f"steady {length}", batch, length, vocab_size))
    ]
    while not watch.collected or watch.collected[-1].num_tokens != batch or watch.collected[-1].num_rows != batch:
        engine.step()
        assert engine.has_unfinished, "the sequences ended before they all decoded"
    return ids


def abort_all(engine: Engine, ids: list[str]) -> None:
    """End requests, and whatever of them is in flight."""
    for request_id in ids:
        engine.abort(request_id)
    drain(engine)
