"""A job, which is one sample to generate and when; what every workload offers to whoever serves it."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from paged.core.prompt import AnyPrompt, HashedPrompt, OpaquePrompt
from paged.core.request import SamplingParams, stable_hash

MAX_LENGTH: Final = 10_000_000
"""Most tokens that a prompt or an output can be said to have; beyond it a number is taken for a mistake."""
MAX_JOBS: Final = 10_000_000
"""Most jobs of a workload."""
MAX_SECONDS: Final = 1e9
"""Latest time of arrival."""
SIZED: Final = ("bill", "nano", "prover", "long", "rollout", "poisson", "gamma", "trace", "random")
"""Names of the workloads that always know their lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sample to generate. Samples of one prompt are jobs of their own, which share the prompt object.

    Attributes:
        id: unique among the jobs of a workload.
        prompt: token ids, or what stands for them.
        output_len: tokens that will be generated, at least 1: known here, but to no scheduler or policy.
        max_tokens: most tokens that the sample may generate, which is what a policy knows; None for as many as fit
            `max_seq_len`. A sample of more than that ends there.
        arrival_s: when it arrives, in seconds from the start.
        seed: of its random stream, where it is sampled; None derives one from its id.
        params: its sampling parameters, if they are its own.
    """

    id: str
    prompt: AnyPrompt
    output_len: int
    max_tokens: int | None
    arrival_s: float = 0.0
    seed: int | None = None
    params: SamplingParams | None = None


InputFiles = Mapping[str, Path]
"""Files that are read together: each by its place from the folder of the first. Copies must keep these places."""


class Workload(Protocol):
    """What arrives. Whatever is random in it follows from its own seed, in every process and on every machine."""

    def input_files(self) -> list[InputFiles]:
        """The files that `jobs` reads, as they lie beside each other."""

    def jobs(self) -> list[Job]:
        """All jobs by time of arrival.

        Raises:
            ValueError: a file it needs is unusable, or lengths are not known; one sentence with the dotted key.
        """


class SizedWorkload(ABC):
    """A workload that says how long each output is, so that it can be simulated as well as sampled."""

    __slots__ = ()

    seed: int

    def input_files(self) -> list[InputFiles]:
        """No files, unless the workload says otherwise."""
        return []

    @abstractmethod
    def jobs(self) -> list[Job]:
        """All jobs by time of arrival; see `Workload`."""

    def lines(self, vocab_size: int) -> Iterator[dict[str, Any]]:
        """The same jobs as lines of a prompts file, with token ids of a vocabulary; fewer jobs give a prefix.

        Ids are drawn for what is said to be equal: samples of a prompt share them, and equal hashes their blocks.
        """
        return prompt_lines(self.jobs(), vocab_size, self.seed)


_Workload = TypeVar("_Workload")


def reseeded(workload: _Workload, by: int) -> _Workload:
    """The workload of a seed larger by `by`; one without a seed is the same whatever the seed, and is returned."""
    seed = getattr(workload, "seed", None)
    return workload if seed is None or by == 0 else replace(workload, seed=seed + by)  # type: ignore[type-var]


def capped(output_len: int, cap: int | None) -> tuple[int, int]:
    """`output_len` and `max_tokens` of a job whose output would be so long by itself."""
    return (output_len, output_len) if cap is None else (min(output_len, cap), cap)


def prompt_lines(jobs: Iterable[Job], vocab_size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Jobs as lines of a prompts file: ids for prompts that have none are drawn evenly from the vocabulary."""
    blocks: dict[int, list[int]] = {}
    for job in jobs:
        yield prompt_line(job, _token_ids(job.prompt, vocab_size, seed, blocks))


def prompt_line(job: Job, token_ids: Sequence[int]) -> dict[str, Any]:
    """One job as a line of a prompts file, which asks for one sample of exactly its length."""
    line = {
        "id": job.id,
        "prompt_token_ids": list(token_ids),
        "n": 1,
        "max_tokens": job.max_tokens,
        "output_len": job.output_len,
        "arrival_s": job.arrival_s,
    }
    return line if job.seed is None else {**line, "seed": job.seed}


def _token_ids(prompt: AnyPrompt, vocab_size: int, seed: int, blocks: dict[int, list[int]]) -> Sequence[int]:
    """A prompt's own token ids, or such as its name or its hashes determine; `blocks` keeps those of a hash."""
    if prompt.token_ids is not None:
        return prompt.token_ids
    if isinstance(prompt, OpaquePrompt):
        return _draw_ids(stable_hash("prompt", seed, prompt.id), vocab_size, len(prompt))
    assert isinstance(prompt, HashedPrompt), prompt
    size = prompt.hash_block_size
    token_ids: list[int] = []
    for hash_id in prompt.hash_ids:
        if hash_id not in blocks:
            blocks[hash_id] = _draw_ids(stable_hash("block", seed, hash_id), vocab_size, size)
        token_ids += blocks[hash_id]
    return token_ids[: len(prompt)]


def _draw_ids(seed: int, vocab_size: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=length)
