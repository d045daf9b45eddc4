"""Workloads whose lengths are drawn: the three that engines are compared with, rollouts, and streams of requests."""

from __future__ import annotations

import itertools
import random
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from paged.core.prompt import OpaquePrompt
from paged.core.request import stable_hash
from paged.workload.arrivals import gamma_times, poisson_times
from paged.workload.job import MAX_JOBS, InputFiles, Job, SizedWorkload, capped, prompt_line
from paged.workload.lengths import Lengths, LogNormal

_FIRST_ID: Final = 100
_END_ID: Final = 151_643
"""Token ids of the compared workloads lie between these: the ordinary ones of Qwen3's vocabulary."""

_PROVER: Final = LogNormal(median=1200.0, sigma=0.9, low=16, high=4096)
_LONG: Final = LogNormal(median=4000.0, sigma=1.0, low=16, high=16384)


class _ComparedWorkload(SizedWorkload):
    """A workload that other engines are given, too, so that every draw is fixed, token ids included.

    One stream of draws gives it all. In a vocabulary smaller than Qwen3's the ids wrap around.
    """

    __slots__ = ()

    def jobs(self) -> list[Job]:
        """All jobs; they arrive at once."""
        return [job for job, _ in self._draw()]

    def lines(self, vocab_size: int) -> Iterator[dict[str, Any]]:
        """The jobs as lines of a prompts file."""
        for job, token_ids in self._draw():
            yield prompt_line(job, [token_id % vocab_size for token_id in token_ids])

    @abstractmethod
    def _draw(self) -> Iterator[tuple[Job, list[int]]]:
        """Each job with its prompt's token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoWorkload(_ComparedWorkload):
    """Requests with prompts and outputs of 100 to 1,024 tokens, all lengths alike."""

    num_prompts: int
    seed: int

    def _draw(self) -> Iterator[tuple[Job, list[int]]]:
        generator = random.Random(self.seed)
        for index in range(self.num_prompts):
            token_ids = _draw_ids(generator, generator.randint(100, 1024))
            prompt = OpaquePrompt(f"nano-{index}", len(token_ids))
            output_len = generator.randint(100, 1024)
            yield Job(id=prompt.id, prompt=prompt, output_len=output_len, max_tokens=1024, seed=index), token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class BillWorkload(SizedWorkload):
    """One request that decodes for long, and shorter ones that arrive beside it: nothing in it is random.

    The long one has a prompt of 4 tokens and 64 new ones, the others 24 and 40.
    """

    num_prompts: int
    interval_s: float
    seed: int = 0

    def jobs(self) -> list[Job]:
        """The long one and the first of the others at 0, then one after each interval."""
        sizes = [("long", 4, 64, 0.0)]
        sizes += [(f"short-{index}", 24, 40, index * self.interval_s) for index in range(self.num_prompts)]
        return [
            Job(id=name, prompt=OpaquePrompt(name, prompt), output_len=output, max_tokens=output, arrival_s=arrival_s)
            for name, prompt, output, arrival_s in sizes
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProverWorkload(_ComparedWorkload):
    """Prompts of 150 to 600 tokens, each sampled several times, with a long tail of outputs up to 4,096 tokens."""

    num_prompts: int
    num_samples: int
    seed: int

    def _draw(self) -> Iterator[tuple[Job, list[int]]]:
        generator = random.Random(self.seed)
        draw_output = _PROVER.sampler()
        for index in range(self.num_prompts):
            token_ids = _draw_ids(generator, generator.randint(150, 600))
            prompt = OpaquePrompt(f"prover-{index}", len(token_ids))
            for sample in range(self.num_samples):
                job_id, output_len = f"prover-{index}-{sample}", draw_output(generator)
                seed = index * 1000 + sample
                yield Job(id=job_id, prompt=prompt, output_len=output_len, max_tokens=4096, seed=seed), token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class LongWorkload(_ComparedWorkload):
    """Prompts of 512 tokens with a long tail of outputs up to 16,384 tokens."""

    num_prompts: int
    seed: int

    def _draw(self) -> Iterator[tuple[Job, list[int]]]:
        generator = random.Random(self.seed)
        draw_output = _LONG.sampler()
        for index in range(self.num_prompts):
            token_ids = _draw_ids(generator, 512)
            prompt = OpaquePrompt(f"long-{index}", len(token_ids))
            output_len = draw_output(generator)
            yield Job(id=prompt.id, prompt=prompt, output_len=output_len, max_tokens=16384, seed=index), token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWorkload(SizedWorkload):
    """Requests of one size that all come at once: for measuring, not for reading."""

    num_prompts: int
    input_len: int
    output_len: int
    seed: int

    def jobs(self) -> list[Job]:
        """All jobs; they arrive at once."""
        ids = [f"random-{index}" for index in range(self.num_prompts)]
        length = self.output_len
        return [
            Job(id=each, prompt=OpaquePrompt(each, self.input_len), output_len=length, max_tokens=length)
            for each in ids
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWorkload(SizedWorkload):
    """Prompts that are each sampled several times, as reinforcement learning does.

    Attributes:
        num_prompts: prompts.
        num_samples: samples of each, which share the prompt and arrive together.
        prompt: lengths of prompts.
        output: lengths of outputs.
        cap: most tokens of an output: longer ones are cut, and policies know this bound; None lets each sample's own
            length be its bound.
        rate: prompts a second, at random moments; None if all come at once.
        seed: of all that is drawn. Fewer prompts are a prefix of more.
    """

    num_prompts: int
    num_samples: int
    prompt: Lengths
    output: Lengths
    cap: int | None
    rate: float | None
    seed: int

    def input_files(self) -> list[InputFiles]:
        """Those of its lengths."""
        return [*self.prompt.input_files(), *self.output.input_files()]

    def jobs(self) -> list[Job]:
        """All jobs by time of arrival."""
        if self.rate is None:
            times: Iterator[float] = itertools.repeat(0.0)
        else:
            times = poisson_times(self.rate, _generator("arrivals", self.seed))
        prompts, outputs = _generator("prompts", self.seed), _generator("outputs", self.seed)
        draw_prompt, draw_output = self.prompt.sampler(), self.output.sampler()
        jobs: list[Job] = []
        for index, arrival_s in zip(range(self.num_prompts), times, strict=False):
            prompt = OpaquePrompt(f"rollout-{index}", draw_prompt(prompts))
            for sample in range(self.num_samples):
                output_len, max_tokens = capped(draw_output(outputs), self.cap)
                jobs.append(
                    Job(
                        id=f"{prompt.id}-{sample}",
                        prompt=prompt,
                        output_len=output_len,
                        max_tokens=max_tokens,
                        arrival_s=arrival_s,
                    )
                )
        return jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamWorkload(SizedWorkload):
    """Requests that come one by one, as to a server; the first comes at 0.

    Attributes:
        name: begins the jobs' ids.
        rate: requests a second, on average.
        cv: standard deviation of the gaps over their mean, which are gamma distributed; None for Poisson arrivals.
        num_prompts: requests, if their number is given.
        duration_s: seconds within which they come, if that is given.
        prompt: lengths of prompts.
        output: lengths of outputs.
        cap: most tokens of an output, as for rollouts.
        seed: of all that is drawn. Fewer requests, and a shorter time, are a prefix of more; lengths do not depend on
            how the requests arrive.
    """

    name: str
    rate: float
    cv: float | None
    num_prompts: int | None
    duration_s: float | None
    prompt: Lengths
    output: Lengths
    cap: int | None
    seed: int

    def input_files(self) -> list[InputFiles]:
        """Those of its lengths."""
        return [*self.prompt.input_files(), *self.output.input_files()]

    def jobs(self) -> list[Job]:
        """All jobs by time of arrival."""
        generator = _generator("arrivals", self.seed)
        times = poisson_times(self.rate, generator) if self.cv is None else gamma_times(self.rate, self.cv, generator)
        if self.duration_s is not None:
            duration_s = self.duration_s
            times = itertools.takewhile(lambda time: time < duration_s, times)
        times = itertools.islice(times, MAX_JOBS if self.num_prompts is None else self.num_prompts)
        prompts, outputs = _generator("prompts", self.seed), _generator("outputs", self.seed)
        draw_prompt, draw_output = self.prompt.sampler(), self.output.sampler()
        jobs: list[Job] = []
        for index, arrival_s in enumerate(times):
            prompt = OpaquePrompt(f"{self.name}-{index}", draw_prompt(prompts))
            output_len, max_tokens = capped(draw_output(outputs), self.cap)
            jobs.append(
                Job(id=prompt.id, prompt=prompt, output_len=output_len, max_tokens=max_tokens, arrival_s=arrival_s)
            )
        return jobs


def _generator(purpose: str, seed: int) -> random.Random:
    """A stream of draws of its own, so that what is drawn for one purpose does not move another's draws."""
    return random.Random(stable_hash(purpose, seed))


def _draw_ids(generator: random.Random, length: int) -> list[int]:
    return [generator.randrange(_FIRST_ID, _END_ID) for _ in range(length)]
