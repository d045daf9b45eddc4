"""Checks that `run` and `sim` take one description: the same keys, refusals, decisions and names of results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

import paged.results
from command_tools import Cli, commands, folder_of
from paged.config.convert import conf_folder
from paged.config.run import run_config
from paged.config.sim import sim_config
from paged.outcome import UserError

CONF = conf_folder()
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
HERE = ("model=tiny", "hardware=cpu", "tp=1")
COUNTS = ("num_steps", "forward_tokens", "minimal_forward_tokens", "cached_tokens", "preemptions", "recomputed_tokens")


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Runs `python -m paged` in this process and in an empty folder; exit code, output, errors."""
    with commands(tmp_path, monkeypatch, capsys) as call:
        yield call


def composed(command: str, *overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        values = OmegaConf.to_container(compose(command, list(overrides)), resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def counts(folder: Path) -> dict[str, int]:
    summary = summary_of(folder)
    return {name: summary[name] for name in COUNTS}


# Experiments


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_the_same_to_both_commands(name: str) -> None:
    """The defaults of `run` and `sim` differ: what differs there, an experiment must choose."""
    run, sim = composed("run", f"experiment={name}"), composed("sim", f"experiment={name}")
    assert {"model", "workload", "policy", "tp", "sampling", "hardware", "depth"} <= run.keys() & sim.keys()
    assert {key: run[key] for key in run if key in sim} == {key: sim[key] for key in sim if key in run}


def test_the_defaults_do_differ() -> None:
    """Otherwise the test above would show nothing."""
    run, sim = composed("run"), composed("sim")
    assert {key for key in run.keys() & sim.keys() if run[key] != sim[key]} >= {"model", "workload", "tp", "depth"}


def test_an_experiment_of_a_card_is_simulated_with_the_limits_of_a_card() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = sim_config(compose("sim", ["experiment=h200_nano"]))
        limits = config.setting().limits
        on_cpu = ["depth=null", "max_step_tokens=null", "chunk_size=null", *HERE, "workload=random"]
        cpu_limits = sim_config(compose("sim", on_cpu)).setting().limits
    assert (config.model, config.deployment.hardware.name, config.deployment.tp) == ("Qwen/Qwen3-8B", "h200", 1)
    assert (limits.depth, limits.max_step_tokens, limits.chunk_size) == (2, 8192, 8192)
    assert (cpu_limits.depth, cpu_limits.max_step_tokens, cpu_limits.chunk_size) == (1, 2048, 512)


def test_a_card_with_a_fixed_pool_is_a_card() -> None:
    """Whatever had `pool_gib` counted as a CPU: `device=cuda` was refused, and null limits were those of a CPU."""
    limits = ["depth=null", "max_step_tokens=null", "chunk_size=null"]
    pool = "+hardware.pool_gib={value: 40, source: a test, assumed: true}"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = sim_config(compose("sim", ["hardware=h200", "tp=1", "device=cuda", *limits, pool]))
        made = config.setting().limits
        with pytest.raises(UserError, match="device must be auto or cuda beside hardware h200, not cpu"):
            sim_config(compose("sim", ["hardware=h200", "tp=1", "device=cpu", pool]))
    assert (made.depth, made.max_step_tokens, made.chunk_size) == (2, 8192, 8192)
    assert made.kv_tokens * config.deployment.pool().kv_bytes_per_token <= 40 * 2**30


def test_one_experiment_is_run_and_simulated(cli: Cli) -> None:
    """An experiment that asks for a latency, and for how `sim` tells what it found."""
    given = ("experiment=preemption_bill", "num_blocks=26", "workload.interval_s=0")
    code, out, err = cli("run", *given)
    assert code == 0
    assert "not used of the experiment, because only sim reads it: optimize, plots, trace_file\n" in err
    real = counts(folder_of(out))
    code, out, _ = cli("sim", *given)
    assert code == 0
    assert real == counts(folder_of(out))
    assert real["preemptions"] > 0


def test_an_experiment_that_cannot_be_simulated_says_why(cli: Cli) -> None:
    code, out, err = cli("sim", "experiment=pressure")
    assert (code, out) == (2, "")
    assert err.startswith("paged: workload must be one that knows its lengths")
    assert err.endswith("not arithmetic, whose answers are as long as the model makes them\n")


# What decides something does so in both


SHARED = list(range(40, 72))
LINES: tuple[dict[str, Any], ...] = (
    {"prompt_token_ids": [*SHARED, 1], "output_len": 30},
    {"prompt_token_ids": [*SHARED, 2, 3], "output_len": 9, "max_tokens": 60},
    {"prompt_token_ids": [4, 5], "output_len": 25, "n": 1},
    {"prompt_token_ids": [*SHARED, 6], "output_len": 40, "n": 3, "max_tokens": 12},
    {"prompt_token_ids": [7] * 50, "output_len": 35},
)


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        (None, set()),
        ("sampling.n=2", set(COUNTS)),
        ("sampling.max_tokens=20", {"num_steps", "forward_tokens", "minimal_forward_tokens"}),
        ("sampling.prompt_logprobs=0", {"forward_tokens", "cached_tokens"}),
        ("policy=reserve", {"num_steps", "preemptions", "recomputed_tokens"}),
        ("depth=2", {"num_steps"}),
        ("max_step_tokens=16", {"num_steps"}),
    ],
)
def test_a_key_decides_the_same_in_both(cli: Cli, tmp_path: Path, override: str | None, changed: set[str]) -> None:
    """Lines that leave to the sampling how many samples there are, and to `max_seq_len` how long they may be."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    workload = ("workload=prompts", f"workload.path={path}", "num_blocks=40", "block_size=4", "max_seq_len=120")
    # Drawn so evenly, samples do not happen to write equal blocks, which the engine would share.
    base = (*HERE, *workload, "max_step_tokens=64", "chunk_size=32", "depth=1", "sampling.temperature=1000")
    given = base if override is None else (*base, override)
    folders = {command: folder_of(cli(command, *given)[1]) for command in ("run", "sim")}
    real = counts(folders["run"])
    assert real == counts(folders["sim"])
    plain = counts(folder_of(cli("sim", *base)[1]))
    assert {name for name in COUNTS if real[name] != plain[name]} >= changed
    assert plain["preemptions"] > 0
    assert plain["cached_tokens"] > 0


def test_scored_prompts_of_a_workload_with_lengths_take_nothing_from_the_cache(cli: Cli) -> None:
    given = (
        *HERE,
        "workload=rollout",
        "workload.num_prompts=3",
        "workload.prompt=70",
        "workload.output=5",
        "workload.cap=5",
    )
    limits = ("max_step_tokens=64", "chunk_size=32", "depth=1")
    folders = [folder_of(cli(command, *given, *limits)[1]) for command in ("run", "sim")]
    assert counts(folders[0]) == counts(folders[1])
    assert counts(folders[0])["cached_tokens"] > 0
    folders = [folder_of(cli(command, *given, *limits, "sampling.prompt_logprobs=1")[1]) for command in ("run", "sim")]
    assert counts(folders[0]) == counts(folders[1])
    assert counts(folders[0])["cached_tokens"] == 0


def test_ids_outside_the_vocabulary_are_refused_by_both(cli: Cli, tmp_path: Path) -> None:
    given = (*HERE, "workload=random", "workload.num_prompts=2", "sampling.logit_bias={99999: 1}", "sampling.n=1")
    for command in ("run", "sim"):
        code, out, err = cli(command, *given)
        assert code == 2
        assert "the first is random-0: logit_bias holds 99999, outside the vocabulary, 0 to 319" in err
        assert summary_of(folder_of(out))["finish_reasons"] == {"refused": 2}


# What only one of them reads, the other takes and checks


@pytest.mark.parametrize(
    "overrides",
    [
        ("verify=false",),
        ("tp_timeout_s=5",),
        ("weights=dummy",),
        ("device=cpu",),
        ("sampling.temperature=0.5", "sampling.top_p=0.9", "sampling.logprobs=2"),
        ("numerics.reduce_dtype=float32",),
        ("memory.activation_gib=2",),
        ("latency=constant", "latency.seconds=3"),
        ("latency=roofline", "latency.host=false"),
        ("hardware.memory_gib.value=40",),
    ],
)
def test_both_commands_take_the_keys_of_each(overrides: tuple[str, ...]) -> None:
    for command, config in (("run", run_config), ("sim", sim_config)):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            assert config(compose(command, [*HERE, "workload=random", *overrides]), overrides) is not None


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("sampling.temperature=-1",), "sampling.temperature must be a number between 0 and 10000, not -1.0"),
        (("sampling.temperature=0",), "sampling.n must be 1 when temperature is 0"),
        (("sampling.stop=null",), "sampling.stop must be a text or a list of texts, not null"),
        (("sampling.topp=1",), "sampling.topp is not a key of this config; did you mean sampling.top_p?"),
        (("sampling.max_tokens=5",), "sampling.max_tokens must be null beside this workload"),
        (("sampling.seed=5",), "sampling.seed must be null beside this workload"),
        (("sampling.stop=x",), "sampling.stop must be empty beside this workload"),
        (("sampling.n=8",), "sampling.n must be 1 beside this workload"),
        (("numerics=exact",), "numerics must be one of fast, invariant, not 'exact'"),
        (("numerics.k_segments=0",), "numerics.k_segments must be a whole number, at least 1, not 0"),
        (("numerics.k_segments=3",), "numerics.k_segments must be a power of two, not 3"),
        (("numerics.k_segments=2", "tp=4"), "numerics.k_segments must be a multiple of tp 4, not 2"),
        (("numerics.reduce_dtype=half",), "numerics.reduce_dtype must be one of model, float32, not 'half'"),
        (("tp_timeout_s=0",), "tp_timeout_s must be 0.1 to 31536000, not 0.0"),
        (("verify=3",), "verify must be true or false, not 3"),
        (("device=gpu",), "device must be one of auto, cpu, cuda, not 'gpu'"),
        (("weights=none",), "weights must be one of auto, dummy, not 'none'"),
        (("max_step_tokens=x",), "max_step_tokens must be a whole number or null, not 'x'"),
        (("depth=0",), "depth must be a whole number, at least 1, not 0"),
        (("hardware=abacus",), "hardware must be one of"),
        (("hardware.memory_gib.value=-1",), "hardware.memory_gib.value must be above 0, not -1.0"),
        (("memory.activation_gib=-1",), "memory.activation_gib must be a number, at least 0, not -1.0"),
        (("memory.weight_gib=1",), "memory.weight_gib is not a key of this config; did you mean memory.weights_gib?"),
        (("latency=constant", "latency.seconds=0"), "latency.seconds must be above 0, not 0.0"),
        (("latency=calibrated",), "latency.path must be given: a calibration.json"),
    ],
)
def test_a_mistake_gets_the_same_sentence_from_both(cli: Cli, overrides: tuple[str, ...], sentence: str) -> None:
    told = []
    for command in ("run", "sim"):
        code, out, err = cli(command, *HERE, "workload=random", *overrides)
        assert (code, out) == (2, "")
        told.append(err)
    assert told[0].startswith(f"paged: {sentence}")
    assert told[0] == told[1]
    assert told[0].count("\n") == 1


def test_what_is_given_of_a_group_that_may_be_absent_is_checked(cli: Cli) -> None:
    """`run memory=null` was accepted, which `sim` refused."""
    for command in ("run", "sim"):
        code, out, err = cli(command, *HERE, "workload=random", "memory=null")
        assert (code, out, err) == (2, "", "paged: memory must hold keys and values, not null\n")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("run")
    assert not {"hardware", "latency"} & {str(key) for key in cfg}
    assert run_config(cfg) is not None


@pytest.mark.parametrize("override", ["hardware.memory_gib.value=40", "latency.seconds=3", "latency.second=3"])
def test_a_key_of_a_group_of_which_nothing_is_chosen_asks_for_a_choice(cli: Cli, override: str) -> None:
    """`run` called such a key none "of the hardware that is chosen", where none was."""
    code, out, err = cli("run", override)
    key, group = override.partition("=")[0], override.partition(".")[0]
    assert (code, out) == (2, "")
    assert err == f"paged: {key} can only be set beside {group}=NAME, because no {group} is chosen\n"


@pytest.mark.parametrize(
    "overrides",
    [
        *(("seeds=3",), ("optimize=makespan_s",), ("plots=false",), ("trace_file=false",), ("replay=x",)),
        *(("+seeds=3",), ("++plots=false",), ("trace_file=true", "experiment=preemption_bill")),
    ],
)
def test_run_refuses_keys_of_sims_report_on_the_command_line(cli: Cli, overrides: tuple[str, ...]) -> None:
    """`+seeds=3` was taken, and an experiment that was none was said to have it."""
    code, out, err = cli("run", *overrides)
    assert (code, out) == (2, "")
    assert err == f"paged: run takes no {overrides[0].lstrip('+').partition('=')[0]}, which only sim reads\n"


def test_keys_of_sims_report_in_an_experiment_are_checked(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "own" / "experiment" / "mine.yaml"
    path.parent.mkdir(parents=True)
    for text, sentence in {
        "plots: 3": "plots must be true or false, not 3",
        "seeds: many": "seeds must be a whole number, not 'many'",
        "plot: true": "plot is not a key of this config; ",
    }.items():
        path.write_text(f"# @package _global_\n{text}\n")
        code, out, err = cli("run", "--config-dir", "own", "experiment=mine")
        assert (code, out) == (2, "")
        assert err.startswith(f"paged: {sentence}")


def test_a_config_of_an_older_run_lacks_what_is_only_predicted_from() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("run")
    with open_dict(cfg):
        del cfg["memory"]
        assert "hardware" not in cfg
        assert run_config(cfg) is not None
        del cfg["sampling"]
    with pytest.raises(UserError, match="sampling must hold keys and values, not null"):
        run_config(cfg)


# Results


def test_a_simulations_summary_has_the_names_of_a_runs(cli: Cli) -> None:
    given = (*HERE, "workload=random", "workload.num_prompts=2", "chunk_size=16")
    code, out, _ = cli("run", *given)
    assert code == 0
    real = summary_of(folder_of(out))
    code, out, _ = cli("sim", *given)
    assert code == 0
    simulated = summary_of(folder_of(out))
    on_gpus = {"memory", "peak_device_bytes_by_rank"}
    assert real.keys() | on_gpus <= simulated.keys()
    # What neither the clock nor the machine decides.
    same = ("tp", "chunk_size", "num_samples", "output_tokens", "prompt_tokens", "finish_reasons", "interrupted")
    assert {name: real[name] for name in same} == {name: simulated[name] for name in same}
    nothing = {name for name in real.keys() | on_gpus if simulated[name] is None}
    assert nothing == {
        *on_gpus,
        "solved",
        "reason",
        "startup_s",
        "peak_device_bytes",
        "device",
        "numerics_id",
        "resumed",
    }


def rows_of(folder: Path) -> list[Any]:
    rows = list(paged.results.read_results(folder / "results.jsonl"))
    return sorted(([row["id"], row["sample"], row["token_ids"], row["logprobs"]] for row in rows), key=repr)


def test_a_run_is_repeated_from_its_folder(cli: Cli, tmp_path: Path) -> None:
    """The repeated run could not be resumed: its config is named `config`, which was taken for another command's."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1\\n"}\n{"prompt": "7-2*3\\n", "n": 3}\n')
    given = ("workload=prompts", f"workload.path={prompts}", "seed=5", "sampling.n=2", "sampling.max_tokens=9")
    first = folder_of(cli("run", *given, "policy=reserve")[1])
    prompts.unlink()
    again = ("--config-dir", f"{first}/.hydra", "--config-name", "config", "+hydra=outputs")
    code, out, err = cli("run", *again, f"workload.path={first}/inputs/prompts.jsonl")
    second = folder_of(out)
    assert code == 0
    assert second != first
    assert "samples to come" in err
    assert len(rows_of(first)) == 5
    assert rows_of(second) == rows_of(first)
    saved = OmegaConf.load(second / ".hydra" / "config.yaml")
    assert (saved.policy.name, saved.seed) == ("reserve", 5)
    results = second / "results.jsonl"
    results.write_text("".join(results.read_text().splitlines(keepends=True)[:2]))
    code, out, err = cli("run", f"resume={second}")
    assert code == 0, err
    assert folder_of(out) == second
    assert rows_of(second) == rows_of(first)


def test_the_help_beside_a_folders_config_is_the_commands(cli: Cli) -> None:
    """The name of the config, `config`, was taken for a command word, and the file of that command was not found."""
    first = folder_of(cli("plan", "model=tiny", "tp=1", "hardware=h100")[1])
    again = ("--config-dir", f"{first}/.hydra", "--config-name", "config", "+hydra=outputs")
    code, out, err = cli("plan", *again, "--help")
    assert code == 0, err
    assert out.startswith("python -m paged plan [group=option]")
    assert "Groups of this command: model, hardware, experiment." in out


def test_a_simulation_is_repeated_from_its_folder(cli: Cli, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("70\n90\n30\n")
    given = ("workload=rollout", "workload.num_prompts=5", f"workload.output=empirical:{lengths}", "num_blocks=120")
    first = folder_of(
        cli("sim", *HERE, *given, "workload.prompt=300", "workload.cap=100", "workload.seed=4", "plots=false")[1]
    )
    again = ("--config-dir", f"{first}/.hydra", "--config-name", "config", "+hydra=outputs")
    lengths.unlink()
    code, out, _ = cli("sim", *again, f"workload.output=empirical:{first}/inputs/lengths.txt")
    second = folder_of(out)
    assert code == 0
    assert second != first
    for name in ("requests.csv", "steps.csv"):
        assert (second / name).read_bytes() == (first / name).read_bytes()
    for key in ("assumed", "notes"):
        assert summary_of(second)[key] == summary_of(first)[key]
    assert summary_of(first)["preemptions"] > 0


def test_a_simulation_repeated_from_its_folder_assumes_the_same(cli: Cli, tmp_path: Path) -> None:
    """The saved config held a figure that was given with the source of the one it replaced, so it was assumed again."""
    small = ("workload=random", "workload.num_prompts=2", "plots=false", "trace_file=false", "tp=2", "model=qwen3_8b")
    figures = ("hardware.host_step_us.value=900", "hardware.link_bytes_per_s={value: 2e10, assumed: true}")
    first = folder_of(cli("sim", *small, "hardware=a10g", *figures)[1])
    folders, summary = [first], summary_of(first)
    assert "host_step_us" not in summary["assumed"]
    assert {"link_bytes_per_s", "flops_per_s"} <= set(summary["assumed"])
    for _ in range(2):
        # The second time from the folder of the first repetition.
        again = ("--config-dir", f"{folders[-1]}/.hydra", "--config-name", "config", "+hydra=outputs")
        code, out, _ = cli("sim", *again)
        folder, repeated = folder_of(out), summary_of(folder_of(out))
        assert code == 0
        assert folder not in folders
        assert [repeated[key] for key in ("assumed", "notes")] == [summary[key] for key in ("assumed", "notes")]
        for name in ("steps.csv", ".hydra/config.yaml"):
            assert (folder / name).read_bytes() == (first / name).read_bytes()
        folders.append(folder)
    saved = OmegaConf.load(first / ".hydra" / "config.yaml")
    assert (saved.hardware.host_step_us.source, saved.hardware.host_step_us.value) == ("given on the command line", 900)
    assert saved.hardware.flops_per_s.source != "given on the command line"
