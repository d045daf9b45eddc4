"""Checks the group `workload` as it is composed: every entry, its common keys, and a sentence for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from paged.app import main
from paged.config.convert import conf_folder
from paged.config.run import run_config
from paged.config.workloads import WORKLOAD_SCHEMAS
from paged.outcome import UserError
from paged.workload.job import SIZED, SizedWorkload, Workload
from paged.workload.lengths import Empirical, Fixed, LogNormal, Pareto, Uniform
from paged.workload.synthetic import NanoWorkload, ProverWorkload, RolloutWorkload, StreamWorkload
from paged.workload.trace import TraceWorkload

CONF = conf_folder()


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("run", list(overrides))


def built(*overrides: str) -> Workload:
    return run_config(composed(*overrides)).workload


def test_every_entry_has_a_file_and_a_schema() -> None:
    assert {path.stem for path in (CONF / "workload").glob("*.yaml")} == WORKLOAD_SCHEMAS.keys()
    assert {*SIZED, "arithmetic", "prompts"} == WORKLOAD_SCHEMAS.keys()


@pytest.mark.parametrize("name", SIZED)
def test_the_workloads_that_know_their_lengths_are_the_sized_ones(name: str) -> None:
    workload = built(f"workload={name}", *(["workload.path=trace.csv"] if name == "trace" else []))
    assert isinstance(workload, SizedWorkload)


def test_the_entries_are_those_that_engines_are_compared_with() -> None:
    assert built("workload=nano") == NanoWorkload(num_prompts=256, seed=0)
    assert built("workload=prover") == ProverWorkload(num_prompts=16, num_samples=4, seed=0)
    nano = built("workload=nano", "workload.num_prompts=3", "workload.seed=5").jobs()
    assert [job.id for job in nano] == ["nano-0", "nano-1", "nano-2"]


def test_common_keys_reach_the_workload() -> None:
    rollout = built(
        "workload=rollout", "workload.num_prompts=3", "workload.num_samples=2", "workload.rate=2", "workload.cap=null"
    )
    assert isinstance(rollout, RolloutWorkload)
    assert (rollout.num_prompts, rollout.num_samples, rollout.rate, rollout.cap) == (3, 2, 2.0, None)
    gamma = built("workload=gamma", "workload.cv=3", "workload.duration_s=9")
    assert isinstance(gamma, StreamWorkload)
    assert (gamma.name, gamma.cv, gamma.duration_s, gamma.num_prompts) == ("gamma", 3.0, 9.0, None)
    poisson = built("workload=poisson")
    assert isinstance(poisson, StreamWorkload)
    assert (poisson.name, poisson.cv) == ("poisson", None)
    assert (poisson.num_prompts, poisson.duration_s) == (512, None)
    trace = built(
        "workload=trace", "workload.path='~/t'", "workload.speedup=2", "workload.max_requests=5", "workload.cap=7"
    )
    assert trace == TraceWorkload(
        path=Path("~/t").expanduser(), format="auto", speedup=2.0, max_requests=5, cap=7, seed=0
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("workload.output=128", Fixed(length=128)),
        ("workload.output=uniform:3:9", Uniform(low=3, high=9)),
        ("workload.output=pareto:400:1.3", Pareto(scale=400, alpha=1.3)),
        ("workload.output=empirical:runs/a/results.jsonl", Empirical(path=Path("runs/a/results.jsonl"))),
        ("workload.output.sigma=0.5", LogNormal(median=3330, sigma=0.5, low=16)),
        ("workload.output={median: 50, sigma: 0}", LogNormal(median=50, sigma=0, low=16)),
    ],
)
def test_a_distribution_is_chosen_by_key_or_as_a_text(override: str, expected: object) -> None:
    workload = built("workload=rollout", override)
    assert isinstance(workload, RolloutWorkload)
    assert workload.output == expected


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["nano", "workload.num_prompts=0"], "workload.num_prompts must be a whole number, at least 1, not 0"),
        (["nano", "workload.num_prompts=20000000"], "workload.num_prompts must be a whole number, at most 10000000"),
        (["prover", "workload.num_samples=0"], "workload.num_samples must be a whole number, at least 1, not 0"),
        (
            ["prover", "workload.num_samples=10000000"],
            "workload.num_prompts times workload.num_samples must be at most",
        ),
        (["random", "workload.input_len=0"], "workload.input_len must be a whole number, at least 1, not 0"),
        (["random", "workload.output_len=20000000"], "workload.output_len must be a whole number, at most 10000000"),
        (["rollout", "workload.cap=0"], "workload.cap must be a whole number, at least 1, not 0"),
        (["rollout", "workload.rate=0"], "workload.rate must be a number of arrivals a second from 1e-06 to 1e+06"),
        (["rollout", "workload.rate=nan"], "workload.rate must be a number of arrivals a second"),
        (["rollout", "workload.rate=fast"], "workload.rate must be a number or null, not 'fast'"),
        (
            ["rollout", "workload.prompt=0"],
            "workload.prompt.length must be a whole number, between 1 and 10000000, not 0",
        ),
        (["rollout", "workload.output=null"], "workload.output must be a whole number, a text such as"),
        (["rollout", "workload.output.dist=zipf"], "workload.output.dist must be one of fixed, uniform"),
        (["rollout", "workload.output.dist=pareto"], "workload.output.median is not a key of pareto lengths; it has"),
        (
            ["poisson", "workload.duration_s=5", "workload.num_prompts=5"],
            "one of workload.num_prompts and workload.duration_s must be given, not both",
        ),
        (["poisson", "workload.duration_s=-1"], "workload.duration_s must be a number of seconds"),
        (
            ["poisson", "workload.duration_s=1e8", "workload.rate=1"],
            "workload.rate times workload.duration_s must be at most 10000000 requests, not 1e+08",
        ),
        (["gamma", "workload.cv=-1"], "workload.cv must be 0 or a number from 0.000001 to 100, not -1.0"),
        (["trace"], "workload.path must be given: a trace, or the folder of a run"),
        (["trace", "workload.path=x", "workload.speedup=0"], "workload.speedup must be a number above 0"),
        (
            ["trace", "workload.path=x", "workload.format=csv"],
            "workload.format must be one of auto, azure, mooncake, results",
        ),
        (
            ["trace", "workload.path=x", "workload.max_requests=0"],
            "workload.max_requests must be a whole number, at least 1",
        ),
        (["nano", "sampling.max_tokens=5"], "sampling.max_tokens must be null beside this workload"),
        (["trace", "workload.path=x", "sampling.seed=5"], "sampling.seed must be null beside this workload"),
        (["rollout", "sampling.stop=x"], "sampling.stop must be empty beside this workload"),
        (["rollout", "sampling.stop_token_ids=5"], "sampling.stop_token_ids must be empty beside this workload"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_key(overrides: list[str], sentence: str) -> None:
    name, *others = overrides
    cfg = composed(f"workload={name}", *others)
    with pytest.raises(UserError) as caught:
        run_config(cfg)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "workload.output.sigmaa=3",
            "workload.output.sigmaa is not a key of this config; did you mean workload.output.sigma?",
        ),
        ("workload.output.alpha=3", "workload.output.alpha is not a key of the workload that is chosen; see --cfg job"),
        (
            "workload.output={dist: fixed, length: 3}",
            "workload.output.length is not a key of the workload that is chosen",
        ),
        ("workload.speedup=3", "workload.speedup is not a key of the workload that is chosen"),
    ],
)
def test_a_key_that_is_not_there_is_told_before_the_schema_sees_it(
    override: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "workload=rollout", override]) == 2
    assert capsys.readouterr().err.startswith(f"paged: {sentence}")
