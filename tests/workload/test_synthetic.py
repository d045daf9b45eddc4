"""Checks drawn workloads: pinned lengths, shared prompts, arrivals, prefixes, and the same draws in every process."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.core.prompt import HashedPrompt, OpaquePrompt, Prompt
from paged.workload.arithmetic import ArithmeticWorkload
from paged.workload.job import Job, SizedWorkload, prompt_lines, reseeded
from paged.workload.lengths import Empirical, Fixed, LogNormal, Uniform
from paged.workload.synthetic import (
    LongWorkload,
    NanoWorkload,
    ProverWorkload,
    RandomWorkload,
    RolloutWorkload,
    StreamWorkload,
)
from paged.workload.trace import TraceWorkload

REPOSITORY = Path(__file__).resolve().parents[2]
QWEN_VOCABULARY = 151_936
NANO = NanoWorkload(num_prompts=256, seed=0)
PROVER = ProverWorkload(num_prompts=16, num_samples=4, seed=0)
LONG = LongWorkload(num_prompts=64, seed=0)
ROLLOUT = RolloutWorkload(
    num_prompts=12,
    num_samples=3,
    prompt=Uniform(low=5, high=40),
    output=LogNormal(median=60, sigma=1.0),
    cap=100,
    rate=None,
    seed=0,
)
STREAM = StreamWorkload(
    name="poisson",
    rate=4.0,
    cv=None,
    num_prompts=50,
    duration_s=None,
    prompt=Uniform(low=5, high=40),
    output=LogNormal(median=60, sigma=1.0),
    cap=None,
    seed=0,
)
RANDOM = RandomWorkload(num_prompts=3, input_len=16, output_len=24, seed=0)
DRAWN: list[SizedWorkload] = [NANO, PROVER, LONG, ROLLOUT, STREAM, RANDOM]


def facts(jobs: list[Job]) -> list[tuple[object, ...]]:
    """Everything that is said of jobs; prompt objects compare by identity."""
    return [
        (job.id, *fact(job), len(job.prompt), job.output_len, job.max_tokens, job.arrival_s, job.seed) for job in jobs
    ]


def fact(job: Job) -> tuple[object, ...]:
    prompt = job.prompt
    if isinstance(prompt, HashedPrompt):
        return prompt.hash_ids
    return (prompt.id,) if isinstance(prompt, OpaquePrompt) else (prompt.token_ids,)


# What other engines are given, too


@pytest.mark.parametrize(
    ("workload", "first", "last", "num_prompt", "num_output", "digest"),
    [
        (NANO, ("nano-0", 964, 931, 0), ("nano-255", 1008, 112, 255), 149_627, 151_007, "6a3288706f0edffb"),
        (PROVER, ("prover-0-0", 582, 90, 0), ("prover-15-3", 190, 1992, 15003), 25_792, 85_979, "6b6ade8cf1d9ca37"),
        (LONG, ("long-0", 512, 2782, 0), ("long-63", 512, 6906, 63), 32_768, 341_594, "e84eb98f5969f8d2"),
    ],
)
def test_compared_workloads_are_pinned(
    workload: SizedWorkload,
    first: tuple[object, ...],
    last: tuple[object, ...],
    num_prompt: int,
    num_output: int,
    digest: str,
) -> None:
    """Every engine is measured on these; the digest covers ids, token ids, lengths and seeds in order."""
    jobs = workload.jobs()
    assert [(job.id, len(job.prompt), job.output_len, job.seed) for job in (jobs[0], jobs[-1])] == [first, last]
    assert sum(len(job.prompt) for job in jobs) == num_prompt
    assert sum(job.output_len for job in jobs) == num_output
    lines = list(workload.lines(QWEN_VOCABULARY))
    assert [line["id"] for line in lines] == [job.id for job in jobs]
    rows = [[line["id"], line["prompt_token_ids"], line["output_len"], line["seed"]] for line in lines]
    assert lines[0]["prompt_token_ids"][:3] == [101_089, 110_350, 10_712]
    assert blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest() == digest


def test_compared_workloads_have_their_caps_and_another_seed_other_lengths() -> None:
    for workload, cap in ((NANO, 1024), (PROVER, 4096), (LONG, 16384)):
        assert {job.max_tokens for job in workload.jobs()} == {cap}
        others = replace(workload, seed=1).jobs()
        assert [job.output_len for job in others] != [job.output_len for job in workload.jobs()]
    assert max(job.output_len for job in PROVER.jobs()) == 4096


def test_samples_of_a_prompt_share_the_prompt_and_its_ids() -> None:
    jobs = PROVER.jobs()
    assert [job.id for job in jobs[:5]] == ["prover-0-0", "prover-0-1", "prover-0-2", "prover-0-3", "prover-1-0"]
    assert jobs[0].prompt is jobs[3].prompt
    assert jobs[0].prompt is not jobs[4].prompt
    for workload in (PROVER, ROLLOUT):
        lines = list(workload.lines(260))
        ids = Counter(tuple(line["prompt_token_ids"]) for line in lines)
        assert set(ids.values()) == {workload.num_samples}


# What holds for all of them


@pytest.mark.parametrize("workload", DRAWN, ids=lambda workload: type(workload).__name__)
@pytest.mark.parametrize("vocab_size", [2, 260, QWEN_VOCABULARY])
def test_lines_are_the_jobs_with_ids_of_the_vocabulary(workload: SizedWorkload, vocab_size: int) -> None:
    jobs, lines = workload.jobs(), list(workload.lines(vocab_size))
    assert len({job.id for job in jobs}) == len(jobs)
    for job, line in zip(jobs, lines, strict=True):
        assert (line["id"], line["n"], line["max_tokens"]) == (job.id, 1, job.max_tokens)
        assert (line["output_len"], line["arrival_s"], line.get("seed")) == (job.output_len, job.arrival_s, job.seed)
        assert len(line["prompt_token_ids"]) == len(job.prompt)
        assert 0 <= min(line["prompt_token_ids"]) <= max(line["prompt_token_ids"]) < vocab_size
        assert 1 <= job.output_len <= job.max_tokens
    assert [job.arrival_s for job in jobs] == sorted(job.arrival_s for job in jobs)


@pytest.mark.parametrize("workload", DRAWN, ids=lambda workload: type(workload).__name__)
def test_fewer_prompts_are_a_prefix(workload: SizedWorkload) -> None:
    fewer = replace(workload, num_prompts=2)
    jobs, lines = fewer.jobs(), list(fewer.lines(260))
    assert 2 <= len(jobs) < len(workload.jobs())
    assert facts(jobs) == facts(workload.jobs()[: len(jobs)])
    assert lines == list(workload.lines(260))[: len(jobs)]


def test_nothing_depends_on_the_process() -> None:
    """`hash()` of a text differs between processes; nothing drawn may hang on it."""
    script = (
        "import sys; sys.path.insert(0, 'tests/workload')\n"
        "from hashlib import blake2b\n"
        "from test_synthetic import DRAWN, facts\n"
        "told = repr([(facts(each.jobs()), list(each.lines(260))) for each in DRAWN])\n"
        "print(blake2b(told.encode(), digest_size=8).hexdigest())"
    )
    told = repr([(facts(each.jobs()), list(each.lines(260))) for each in DRAWN])
    here = blake2b(told.encode(), digest_size=8).hexdigest()
    for salt in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, env={"PYTHONHASHSEED": salt}
        )
        assert done.stdout.strip() == here, done.stderr


def test_reseeding_changes_the_seed_and_nothing_else() -> None:
    assert reseeded(ROLLOUT, 3) == replace(ROLLOUT, seed=3)
    assert reseeded(ROLLOUT, 0) is ROLLOUT
    assert facts(reseeded(ROLLOUT, 1).jobs()) != facts(ROLLOUT.jobs())
    assert list(reseeded(RANDOM, 1).lines(260)) != list(RANDOM.lines(260))


# Rollouts


def test_the_default_rollouts_are_as_long_as_the_measured_ones() -> None:
    """1,952 samples were measured: 4,918 tokens on average, 114 of them (5.8%) cut at 16,384."""
    from hydra import compose, initialize_config_dir

    from paged.config.convert import conf_folder
    from paged.config.run import run_config

    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        workload = run_config(compose("run", ["workload=rollout", "workload.num_prompts=40000"])).workload
    assert isinstance(workload, RolloutWorkload)
    jobs = workload.jobs()
    assert len(jobs) == 160_000
    outputs = [job.output_len for job in jobs]
    assert statistics.fmean(outputs) == pytest.approx(4918, rel=0.02)
    assert outputs.count(16384) / len(outputs) == pytest.approx(114 / 1952, abs=0.005)
    assert max(outputs) == 16384
    assert statistics.median(len(job.prompt) for job in jobs) == pytest.approx(350, rel=0.02)
    assert (min(outputs), {job.max_tokens for job in jobs}, {job.arrival_s for job in jobs}) == (
        min(max(16, length) for length in outputs),
        {16384},
        {0.0},
    )


def test_a_cap_cuts_outputs_and_is_what_policies_know() -> None:
    free, cut = replace(ROLLOUT, cap=None).jobs(), ROLLOUT.jobs()
    assert [job.output_len for job in cut] == [min(100, job.output_len) for job in free]
    assert {job.max_tokens for job in cut} == {100}
    assert all(job.max_tokens == job.output_len for job in free)
    assert any(job.output_len > 100 for job in free)


def test_prompts_of_a_rollout_can_arrive_one_by_one() -> None:
    slow, fast = replace(ROLLOUT, rate=2.0).jobs(), replace(ROLLOUT, rate=4.0).jobs()
    times = [job.arrival_s for job in slow]
    assert times[0] == 0
    assert all(len(set(times[3 * index : 3 * index + 3])) == 1 for index in range(12))
    assert len(set(times)) == 12
    assert [job.arrival_s for job in fast] == pytest.approx([time / 2 for time in times])
    assert [(job.output_len, len(job.prompt)) for job in slow] == [
        (job.output_len, len(job.prompt)) for job in ROLLOUT.jobs()
    ]


def test_what_is_drawn_for_different_purposes_is_independent() -> None:
    """Streams that began with one seed would give the longest prompts the longest outputs after the longest gaps."""
    wide = replace(STREAM, num_prompts=20_000, prompt=Uniform(low=1, high=1000), output=Uniform(low=1, high=1000))
    jobs = wide.jobs()
    gaps = [later.arrival_s - earlier.arrival_s for earlier, later in pairwise(jobs)]
    prompts, outputs = [len(job.prompt) for job in jobs[1:]], [job.output_len for job in jobs[1:]]
    before = [len(job.prompt) for job in jobs[:-1]]
    for left, right in ((prompts, outputs), (gaps, prompts), (gaps, outputs), (gaps, before)):
        assert abs(statistics.correlation(left, right)) < 0.03


def test_drawn_workloads_are_pinned() -> None:
    """The same on any machine: whoever changes a draw changes every published simulation."""
    told = [(len(job.prompt), job.output_len) for job in ROLLOUT.jobs()[:4]]
    assert told == [(5, 47), (5, 58), (5, 96), (37, 34)]
    assert [round(job.arrival_s, 9) for job in STREAM.jobs()[:4]] == [0.0, 0.001618318, 0.051262711, 0.219675285]
    assert next(ROLLOUT.lines(260))["prompt_token_ids"][:4] == [17, 161, 215, 60]


# Streams


def test_a_stream_has_its_rate_and_the_scatter_of_its_gaps() -> None:
    for cv, expected in ((None, 1.0), (1.0, 1.0), (0.25, 0.25), (3.0, 3.0), (0.0, 0.0)):
        times = [job.arrival_s for job in replace(STREAM, cv=cv, num_prompts=40_000).jobs()]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert times[0] == 0
        assert 1 / statistics.fmean(gaps) == pytest.approx(4.0, rel=0.05)
        assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(expected, rel=0.05, abs=1e-6)


def test_lengths_do_not_depend_on_how_requests_arrive() -> None:
    lengths = [[(len(job.prompt), job.output_len) for job in each.jobs()] for each in (STREAM, replace(STREAM, cv=2.0))]
    assert lengths[0] == lengths[1]
    assert facts(replace(STREAM, cv=2.0).jobs()) != facts(STREAM.jobs())


def test_a_stream_can_be_bounded_by_time() -> None:
    by_time = replace(STREAM, num_prompts=None, duration_s=5.0)
    jobs = by_time.jobs()
    assert 5 < len(jobs) < 50
    assert facts(jobs) == facts(STREAM.jobs()[: len(jobs)])
    assert jobs[-1].arrival_s < 5.0 <= STREAM.jobs()[len(jobs)].arrival_s


@given(
    st.integers(0, 2**63),
    st.integers(1, 30),
    st.integers(1, 5),
    st.none() | st.floats(1e-3, 1e3),
    st.none() | st.integers(1, 300),
)
def test_any_rollout_keeps_its_promises(
    seed: int, num_prompts: int, num_samples: int, rate: float | None, cap: int | None
) -> None:
    workload = replace(ROLLOUT, seed=seed, num_prompts=num_prompts, num_samples=num_samples, rate=rate, cap=cap)
    jobs = workload.jobs()
    assert len(jobs) == num_prompts * num_samples
    assert all(1 <= job.output_len <= job.max_tokens <= (cap or 10**7) for job in jobs)
    assert [job.arrival_s for job in jobs] == sorted(job.arrival_s for job in jobs)
    assert Counter(job.prompt for job in jobs) == Counter({job.prompt: num_samples for job in jobs})


# Token ids


def test_ids_follow_from_what_is_said_to_be_equal() -> None:
    def job(name: str, prompt: Prompt | OpaquePrompt | HashedPrompt) -> Job:
        return Job(id=name, prompt=prompt, output_len=1, max_tokens=1)

    jobs = [
        job("a", OpaquePrompt("p", 30)),
        job("b", OpaquePrompt("p", 20)),
        job("c", OpaquePrompt("q", 30)),
        job("d", HashedPrompt([5, 6, 7], 1100)),
        job("e", HashedPrompt([5, 6, 8], 1100)),
        job("f", HashedPrompt([5], 512)),
        job("g", Prompt([9, 1, 4])),
    ]
    ids = [line["prompt_token_ids"] for line in prompt_lines(jobs, 260, seed=0)]
    assert ids[1] == ids[0][:20]
    assert ids[2] != ids[0]
    assert ids[3][:1024] == ids[4][:1024]
    assert ids[3][1024:] != ids[4][1024:]
    assert ids[5] == ids[3][:512] != ids[3][512:1024]
    assert ids[6] == [9, 1, 4]
    assert [len(each) for each in ids] == [30, 20, 30, 1100, 1100, 512, 3]
    again = [line["prompt_token_ids"] for line in prompt_lines(jobs, 260, seed=1)]
    assert all(new != old for new, old in zip(again[:6], ids[:6], strict=True))


def test_the_built_in_problems_do_not_know_their_lengths() -> None:
    with pytest.raises(ValueError, match=r"workload must be one that knows its lengths \(bill, .* not arithmetic"):
        ArithmeticWorkload(num_prompts=1, seed=0).jobs()


def test_a_workload_looks_at_files_only_when_it_is_asked_for_jobs(tmp_path: Path) -> None:
    """So a run is resumed where the files it was made from are gone."""
    absent = Empirical(path=tmp_path / "absent")
    trace = TraceWorkload(path=tmp_path / "absent", format="auto", speedup=1.0, max_requests=None, cap=None, seed=0)
    for workload in (replace(ROLLOUT, output=absent), replace(STREAM, prompt=Fixed(length=3), output=absent), trace):
        with pytest.raises(ValueError, match="cannot be read"):
            workload.jobs()
