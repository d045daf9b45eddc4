"""Checks the configuration: every root file with every group option, the schemas, and a sentence for each mistake."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from paged.config.convert import conf_folder, known_keys
from paged.config.groups import POLICY_SCHEMAS, EngineSchema, SamplingSchema
from paged.config.run import RunConfig
from paged.core.policy import POLICIES, Fifo, Forecast, Reserve, Watermark
from paged.core.request import SamplingParams
from paged.outcome import UserError

CONF = conf_folder()
ROOTS = sorted(path.stem for path in CONF.glob("*.yaml"))
TINY = CONF.parent / "paged" / "assets" / "tiny" / "config.json"
# What an entry leaves to be given.
GIVEN = {
    "model=local": ["model.path=somewhere"],
    "workload=prompts": ["workload.path=prompts.jsonl"],
    "workload=trace": ["workload.path=trace.csv"],
    "latency=calibrated": ["latency.path=calibration.json"],
}


def composed(*overrides: str) -> RunConfig:
    config = converted("run", *overrides)
    assert isinstance(config, RunConfig)
    return config


def converted(root: str, *overrides: str) -> Any:
    """The checked config of a command: `run_config` of what `conf/run.yaml` composes to, and so on."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(root, list(overrides))
    return getattr(importlib.import_module(f"paged.config.{root}"), f"{root}_config")(cfg)


def options_of(root: str) -> Iterator[str]:
    """The entries of every group that the command has, and the experiments that are said to be for it."""
    groups = importlib.import_module(f"paged.config.{root}").ROOT.groups
    for path in sorted(CONF.glob("*/**/*.yaml")):
        group = str(path.parent.relative_to(CONF))
        if group in groups or (group == "experiment" and f"paged {root} " in path.read_text(encoding="utf-8")):
            yield f"{group}={path.stem}"


@pytest.mark.parametrize(("root", "option"), [(root, option) for root in ROOTS for option in options_of(root)])
def test_every_root_composes_with_every_option(root: str, option: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(TINY.read_text(encoding="utf-8"), encoding="utf-8")
    given = [f"model.path={tmp_path}"] if root != "run" and option == "model=local" else GIVEN.get(option, [])
    assert converted(root, option, *given) is not None


@pytest.mark.parametrize("root", ROOTS)
def test_the_readme_tells_every_option(root: str) -> None:
    readme = (CONF.parent / "README.md").read_text(encoding="utf-8")
    options = [option for option in options_of(root) if not option.startswith("experiment=")]
    assert [option for option in options if f"`{option.partition('=')[2]}`" not in readme] == []


def test_there_is_something_to_compose() -> None:
    assert {"run", "plan"} <= set(ROOTS)
    assert len(list(options_of("run"))) >= 20
    for path in CONF.glob("experiment/*.yaml"):
        name = f"experiment={path.stem}"
        assert any(name in options_of(root) for root in ROOTS), f"{name} does not say which command it is for"


def test_the_schemas_have_the_fields_of_what_they_build() -> None:
    from paged.engine import EngineConfig

    assert {f.name for f in fields(SamplingSchema)} == {f.name for f in fields(SamplingParams)}
    elsewhere = {"numerics", "k_segments", "reduce_dtype", "policy"}
    assert {f.name for f in fields(EngineSchema)} | elsewhere == {f.name for f in fields(EngineConfig)}


def test_the_defaults_are_the_librarys() -> None:
    from paged.engine import EngineConfig

    config = composed()
    assert EngineConfig(**config.engine) == EngineConfig()
    assert config.model == "tiny"
    assert config.sampling == SamplingParams(n=4, max_tokens=None)


def test_limits_that_are_not_given_are_the_devices() -> None:
    import torch

    from paged.engine import EngineConfig

    def limits(device: str, **given: int) -> tuple[int, int, int]:
        made = EngineConfig(**given).resolved(torch.device(device)).limits(num_blocks=1)
        return made.depth, made.max_step_tokens, made.chunk_size

    assert limits("cpu") == (1, 2048, 512)
    assert limits("cuda") == limits("cuda:1") == (2, 8192, 8192)
    assert limits("cuda", max_step_tokens=1000) == (2, 1000, 1000)
    assert limits("cpu", max_step_tokens=1000, depth=3) == (3, 1000, 512)
    for device in ("cpu", "cuda"):
        assert limits(device, depth=1, max_step_tokens=64, chunk_size=7) == (1, 64, 7)


def test_choices_arrive_as_typed_objects() -> None:
    assert composed("policy=fifo").engine["policy"] == Fifo()
    assert composed("policy=reserve").engine["policy"] == Reserve()
    assert composed("policy=watermark", "policy.fraction=0.2").engine["policy"] == Watermark(fraction=0.2)
    assert composed("policy=forecast").engine["policy"] == Forecast(risk=0.1)
    for name, policy in (("fifo", Fifo), ("watermark", Watermark), ("reserve", Reserve), ("forecast", Forecast)):
        assert composed(f"policy={name}", "policy.victim=most_blocks").engine["policy"] == policy(victim="most_blocks")
    assert composed("numerics=fast").engine["numerics"] == "fast"
    sampling = composed("sampling.stop=[a,b]", "sampling.logit_bias={3: 1}", "sampling.max_tokens=null").sampling
    assert sampling == SamplingParams(n=4, stop=("a", "b"), logit_bias={3: 1.0}, max_tokens=None)
    sampling = composed("sampling.stop=abc", "sampling.stop_token_ids=5").sampling
    assert sampling == SamplingParams(n=4, stop="abc", stop_token_ids=5, max_tokens=None)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("+block_sise=3", "block_sise is not a key of this config; did you mean block_size?"),
        ("+sampling.temprature=1", "sampling.temprature is not a key of this config; did you mean temperature?"),
        ("+policy.fraction=1", "policy.fraction is not a key of this config; allowed: name, victim"),
        ("+model.size=8", "model.size is not a key of this config; allowed: path, spec"),
        ("block_size=abc", "block_size must be a whole number, not 'abc'"),
        ("block_size=1.5", "block_size must be a whole number, not 1.5"),
        ("block_size=true", "block_size must be a whole number, not true"),
        ("block_size=[1]", "block_size must be a whole number, not [1]"),
        ("block_size=null", "block_size must be a whole number, not null"),
        ("num_blocks=x", "num_blocks must be a whole number or null, not 'x'"),
        ("gpu_memory_utilization=most", "gpu_memory_utilization must be a number, not 'most'"),
        ("prefix_reuse=perhaps", "prefix_reuse must be true or false, not 'perhaps'"),
        ("prefix_reuse=1", "prefix_reuse must be true or false, not 1"),
        ("allow_long_context=3", "allow_long_context must be true or false, not 3"),
        ("sampling.ignore_eos=0.5", "sampling.ignore_eos must be true or false, not 0.5"),
        ("verify='on'", "verify must be true or false, not 'on'"),
        ("device=gpu", "device must be one of auto, cpu, cuda, not 'gpu'"),
        ("weights=none", "weights must be one of auto, dummy, not 'none'"),
        ("sampling.stop=null", "sampling.stop must be a text or a list of texts, not null"),
        ("sampling.stop=''", "sampling.stop must not contain an empty text"),
        ("sampling.stop_token_ids=[x]", "sampling.stop_token_ids must be a whole number or a list of them, not ['x']"),
        ("sampling.stop_token_ids=x", "sampling.stop_token_ids must be a whole number or a list of them, not 'x'"),
        (
            "sampling.logit_bias={a: 1}",
            "sampling.logit_bias must be a mapping of token ids to numbers or null, not {'a': 1}",
        ),
        ("sampling.logit_bias=[1]", "sampling.logit_bias must be a mapping of token ids to numbers or null, not [1]"),
        ("sampling.temperature=-1", "sampling.temperature must be a number between 0 and 10000, not -1.0"),
        ("sampling.temperature=nan", "sampling.temperature must be a number between 0 and 10000, not nan"),
        ("sampling.temperature=0", "sampling.n must be 1 when temperature is 0"),
        ("sampling=5", "sampling must hold keys and values, not 5"),
        ("numerics.name=exact", "numerics must be one of invariant, fast, not 'exact'"),
        ("policy.victim=oldest", "policy.victim must be one of youngest, least_computed, most_blocks, not 'oldest'"),
        ("~policy", "policy must be one of fifo, watermark, reserve, forecast, not null"),
        ("~block_size", "block_size must be given: a whole number"),
        ("model=local", "model.path must be given: a checkpoint folder, or a Hub id that is in the local cache"),
        ("workload=prompts", "workload.path must be given: a file of prompts, one JSON object a line"),
        ("workload.num_prompts=0", "workload.num_prompts must be a whole number, at least 1, not 0"),
        ("block_size=${nowhere}", "block_size: Interpolation key 'nowhere' not found"),
    ],
)
def test_a_mistake_gets_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        composed(override)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


# Published numbers of parameters, and bytes of a token's keys and values in bf16.
NAMED = {
    "goedel8b": (8_190_735_360, 147_456),
    "qwen3_8b": (8_190_735_360, 147_456),
    "qwen3_0_6b": (596_049_920, 114_688),
    "mistral7b": (7_248_023_552, 131_072),
    "olmoe": (6_919_161_856, 131_072),
    "llama3_8b": (8_030_261_248, 131_072),
}


@pytest.mark.parametrize("name", NAMED)
def test_models_known_by_name_have_exact_sizes(name: str) -> None:
    config = composed(f"model={name}")
    spec = config.spec
    assert spec is not None
    assert (spec.num_parameters(), spec.kv_bytes_per_token(2)) == NAMED[name]
    assert spec.dtype == "bfloat16"
    assert spec.eos_token_ids
    assert config.model.count("/") == 1


def test_models_without_a_name_bring_their_own_config() -> None:
    assert composed().spec is None
    assert composed("model=local", "model.path=somewhere").spec is None


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("+model.spec.hiden_size=8", "model.spec.hiden_size is not a field that is known; did you mean hidden_size?"),
        ("model.spec.hidden_size=x", "model.spec.hidden_size must be a whole number, at least 1, not 'x'"),
        ("~model.spec.num_experts", "model.spec.num_experts is missing"),
        ("model.spec.num_experts_per_tok=65", "model.spec.num_experts_per_tok 65 must be at most num_experts 64"),
        ("model.spec.model_type=gpt2", "model.spec.model_type 'gpt2' is not supported"),
        ("+model.spec.rope_scaling={type: yarn}", "model.spec.rope_scaling of type 'yarn' is not supported"),
        ("model.spec=8", "model.spec must be a mapping of config.json's fields to values or null, not 8"),
    ],
)
def test_a_mistake_in_a_models_sizes_gets_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        composed("model=olmoe", override)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_the_library_knows_policies_by_the_configs_names() -> None:
    assert {name: type(composed(f"policy={name}").engine["policy"]) for name in POLICY_SCHEMAS} == dict(POLICIES)


def test_a_policys_own_range_is_checked() -> None:
    with pytest.raises(UserError, match=r"policy\.fraction must be at least 0 and below 1, not 2\.0"):
        composed("policy=watermark", "policy.fraction=2")
    with pytest.raises(UserError, match=r"policy\.risk must be above 0 and below 1, not 1\.0"):
        composed("policy=forecast", "policy.risk=1")


@pytest.mark.parametrize("root", ROOTS)
def test_the_keys_named_in_hints_are_the_composed_ones(root: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(root)
    known = set(known_keys(root))
    assert set(map(str, cfg)) <= known
    for group in ("sampling", "hardware", "memory"):
        assert {f"{group}.{key}" for key in cfg.get(group, {})} <= known
    assert ("hardware.memory_gib.value" in known) == ("hardware" in cfg)
    assert ("resume" in known) == (root == "run")


def test_configuration_and_workloads_import_no_torch() -> None:
    code = (
        "import sys, paged.app, paged.config.run, paged.run, paged.workload.prompts; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=CONF.parent).returncode == 0
