"""Checks the command line as a user meets it: folders, results, sweeps, mistakes, Ctrl-C and resuming."""

import fcntl
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from command_tools import Cli, commands, folder_of
from paged.app import COMMANDS, main
from paged.config.convert import groups_of

REPOSITORY = Path(__file__).resolve().parent.parent
CHARACTERS = ["<eos>", "?", *"0123456789+-*()\n abcdefghijklmnopqrstuvwxyz:"]
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": len(CHARACTERS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "torch_dtype": "float32",
    "hidden_act": "silu",
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
SMALL = ("device=cpu", "workload.num_prompts=2", "sampling.n=2", "sampling.max_tokens=6")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a character tokenizer and no weights: they are random ones."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(CHARACTERS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def cli(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Cli]:
    """Runs `python -m paged run` with the small checkpoint in this process; exit code, output, errors."""
    with commands(tmp_path, monkeypatch, capsys, "run") as run:

        def call(*overrides: str, model: bool = True) -> tuple[int, str, str]:
            given = [f"model.path={checkpoint}", "weights=dummy"] if model else []
            return run(*given, *overrides)

        yield call


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def tokens_of(folder: Path) -> dict[tuple[str, int], tuple[Any, ...]]:
    rows = rows_of(folder)
    samples = {(row["id"], row["sample"]): (row["token_ids"], row["logprobs"], row["finish_reason"]) for row in rows}
    assert len(samples) == len(rows), "a sample has two rows"
    return samples


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


# The command word


def test_help_lists_the_commands_without_importing_torch_or_hydra() -> None:
    code = (
        "import sys; from paged.app import main; code = main(['--help'])\n"
        "sys.exit(code or 'torch' in sys.modules or 'hydra' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0
    assert re.search(r"^  run  ", done.stdout, re.MULTILINE)


def test_no_command_shows_the_usage_and_an_unknown_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: python -m paged COMMAND" in capsys.readouterr().err
    assert main(["rum"]) == 2
    assert capsys.readouterr().err == "paged: there is no command 'rum'; did you mean run?\n"
    assert main(["block_size=3"]) == 2
    assert capsys.readouterr().err == (
        f"paged: there is no command 'block_size=3'; the commands are: {', '.join(COMMANDS)}\n"
    )


def test_hydras_help_and_config_are_there(cli: Cli) -> None:
    code, out, _ = cli("--help")
    assert code == 0
    assert "policy: fifo, forecast, reserve, watermark" in out
    assert "Groups of this command: model, numerics, policy, workload, hardware, latency, experiment." in out
    code, out, _ = cli("--cfg", "job", "block_size=8")
    assert code == 0
    assert "block_size: 8" in out


def test_the_help_tells_whose_groups_are_whose() -> None:
    assert groups_of("plan") == ["model", "hardware", "experiment"]
    assert groups_of("calibrate") == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("paged ", list(COMMANDS)),
        ("paged ru", list(COMMANDS)),
        ("paged run policy=", ["policy=fifo", "policy=forecast", "policy=reserve", "policy=watermark"]),
        ("paged run numerics=fast block_s", ["block_size="]),
        ("paged plan hardware=h", ["hardware=h100", "hardware=h200"]),
        ("paged unknown ", []),
    ],
)
def test_the_shell_completes_commands_groups_and_keys(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, expected: list[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.split() == expected


def test_the_completion_is_installed_for_the_console_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COMP_LINE", raising=False)
    assert main(["-sc", "install=bash"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("-F hydra_bash_completion paged")


# A run


def test_a_run_leaves_a_folder_with_everything(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli(*SMALL)
    assert code == 0
    folder = folder_of(out)
    assert re.fullmatch(r"outputs/run/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d\.\d{6}", str(folder.relative_to(tmp_path)))
    for name in (".hydra/config.yaml", "inputs/prompts.jsonl", "results.jsonl", "steps.jsonl", "summary.json"):
        assert (folder / name).is_file()
    rows = rows_of(folder)
    expected = {(f"arithmetic-{i}", j) for i in range(2) for j in range(2)}
    assert {(row["id"], row["sample"]) for row in rows} == expected
    for row in rows:
        assert row["finish_reason"] in ("stop", "length")
        assert 1 <= len(row["token_ids"]) == len(row["logprobs"]) <= 6
        assert isinstance(row["solved"], bool)
        assert row["num_preemptions"] == 0
        assert "top_logprobs" not in row
    summary = summary_of(folder)
    assert summary["num_samples"] == 4
    assert summary["output_tokens"] == sum(len(row["token_ids"]) for row in rows)
    assert summary["len_max"] == max(len(row["token_ids"]) for row in rows)
    assert summary["interrupted"] is False
    assert {row["numerics_id"] for row in rows} == {summary["numerics_id"]}
    names = "tokens_per_s_end_to_end prompt_tokens len_p50 finish_reasons kv_tokens num_steps preemptions solved"
    names += " recomputed_tokens forward_tokens minimal_forward_tokens peak_device_bytes startup_s elapsed_s versions"
    assert set(names.split()) <= summary.keys()
    assert "tokens/s" in out
    assert "4/4" in err
    assert "running" in err


def test_the_seed_changes_the_samples_and_nothing_else_does(cli: Cli) -> None:
    first = tokens_of(folder_of(cli(*SMALL)[1]))
    pressed = folder_of(cli(*SMALL, "block_size=4", "num_blocks=20", "chunk_size=3", "max_num_seqs=3")[1])
    assert tokens_of(pressed) == first
    assert tokens_of(folder_of(cli(*SMALL, "sampling.seed=1")[1])) != first


def test_a_sweep_gives_each_point_its_own_folder(cli: Cli) -> None:
    code, out, _ = cli("numerics=invariant,fast", "-m", *SMALL)
    assert code == 0
    sweep = folder_of(out)
    assert "multirun" in sweep.parts
    ids = [summary_of(sweep / point)["numerics_id"] for point in ("0", "1")]
    assert ids[0] != ids[1]
    assert [len(rows_of(sweep / point)) for point in ("0", "1")] == [4, 4]
    header, *points, order = out.splitlines()[-5:-1]
    assert header.split()[:3] == ["job", "numerics", "tokens_per_s_end_to_end"]
    assert {point.split()[1] for point in points} == {"invariant", "fast"}
    assert order == "best first: the largest tokens_per_s_end_to_end; job is the folder"
    assert (sweep / "sweep.csv").is_file()


def test_a_mistake_in_one_point_leaves_the_others_of_a_sweep(cli: Cli) -> None:
    code, out, err = cli("-m", "num_blocks=0,40", *SMALL)
    assert code == 2
    assert "paged: job 0: num_blocks must be a whole number, at least 1, not 0" in err
    assert out.splitlines()[-3].endswith("-  num_blocks must be a whole number, at least 1, not 0")
    assert len(rows_of(folder_of(out) / "1")) == 4


def test_refusals_in_one_point_of_a_sweep_name_its_job_and_stand_in_its_row(cli: Cli) -> None:
    code, out, err = cli("-m", "num_blocks=1,40", *SMALL)
    assert code == 2
    sentence = "2 of 2 prompts were refused, the first is arithmetic-0: "
    assert f"paged: job 0: {sentence}" in err
    header, *points = out.splitlines()[-5:-2]
    assert header.endswith("note")
    assert [(point.split()[0], sentence in point) for point in points] == [("1", False), ("0", True)]
    assert summary_of(folder_of(out) / "0")["reason"].startswith(sentence)
    assert summary_of(folder_of(out) / "1")["reason"] is None


def test_a_results_file_is_never_written_over(cli: Cli) -> None:
    folder = folder_of(cli(*SMALL)[1])
    code, _, err = cli(*SMALL, f"hydra.run.dir={folder}")
    assert code == 2
    assert err.startswith("paged: hydra.run.dir must be a new folder")


def test_a_refused_folder_keeps_the_config_that_its_results_were_made_with(cli: Cli, tmp_path: Path) -> None:
    folder = folder_of(cli(*SMALL)[1])
    sweep = folder_of(cli("-m", *SMALL, f"hydra.sweep.dir={tmp_path / 'sweep'}")[1])
    configs = [(each / ".hydra" / "overrides.yaml").read_text() for each in (folder, sweep / "0")]
    for args, key in (((f"hydra.run.dir='{folder}'",), "run"), (("-m", f"hydra.sweep.dir={sweep}"), "sweep")):
        code, _, err = cli(*SMALL, "block_size=8", *args)
        assert code == 2
        assert err.startswith(f"paged: hydra.{key}.dir must be a new folder (or resume=FOLDER be given): ")
    assert [(each / ".hydra" / "overrides.yaml").read_text() for each in (folder, sweep / "0")] == configs


# Prompts from a file


def test_all_forms_of_prompts_and_their_own_parameters(cli: Cli, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "prompts.jsonl",
        {"id": "text", "prompt": "1+1\n"},
        {
            "id": "ids",
            "prompt_token_ids": [3, 12, 3, 17],
            "n": 1,
            "temperature": 0,
            "logprobs": 2,
            "prompt_logprobs": 1,
        },
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "n": 1},
    )
    code, out, _ = cli("workload=prompts", f"workload.path={path}", "sampling.n=2", "sampling.max_tokens=5")
    assert code == 0
    folder = folder_of(out)
    rows = {(row["id"], row["sample"]): row for row in rows_of(folder)}
    assert rows.keys() == {("text", 0), ("text", 1), ("ids", 0), ("line-3", 0)}
    assert rows["text", 0]["prompt_token_ids"] == rows["ids", 0]["prompt_token_ids"] == [3, 12, 3, 17]
    assert len(rows["ids", 0]["top_logprobs"]) == len(rows["ids", 0]["token_ids"])
    assert len(rows["ids", 0]["prompt_logprobs"]) == 3
    chat = "".join(CHARACTERS[token] for token in rows["line-3", 0]["prompt_token_ids"])
    assert chat == "user: hi\na:"
    assert len(rows["line-3", 0]["token_ids"]) <= 2
    assert not any("solved" in row for row in rows.values())
    assert (folder / "inputs" / "prompts.jsonl").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_run_may_read_the_copy_in_its_own_folder(cli: Cli, tmp_path: Path, is_linked: bool) -> None:
    """The folder of a run that came to nothing holds a copy of its inputs. Given as the inputs of the next run there,
    it was deleted before it was read, and may have been all that the user had."""
    path = write_lines(tmp_path / "prompts.jsonl", {"id": "only", "prompt": "1+1"})
    given = ("device=cpu", "workload=prompts", "sampling.n=1", "sampling.max_tokens=3", "hydra.run.dir=a")
    assert cli(*given, f"workload.path={path}", "num_blocks=1000000000")[0] == 2
    copy = Path("a/inputs/prompts.jsonl")
    content = copy.read_bytes()
    path.unlink()
    if is_linked:
        path.symlink_to(copy.absolute())
    code, out, err = cli(*given, f"workload.path={path if is_linked else copy}")
    assert code == 0, err
    assert copy.read_bytes() == content
    assert tokens_of(folder_of(out)).keys() == {("only", 0)}


def test_bad_lines_are_refused_in_the_results_and_the_rest_completes(cli: Cli, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "prompts.jsonl",
        {"id": "good", "prompt": "1+1"},
        '{"prompt": "1',
        {"id": "unknown", "prompt": "1", "temprature": 1},
        {"id": "contradiction", "prompt": "1", "temperature": 0, "n": 2},
        {"id": "vocabulary", "prompt_token_ids": [1, 99999]},
        {"id": "stop", "prompt": "1", "stop_token_ids": [99999]},
        {"id": "long", "prompt": "1" * 300},
        {"id": "never fits", "prompt": "1", "max_tokens": 1000},
        {"id": "good too", "prompt": "2+2"},
    )
    code, out, err = cli("workload=prompts", f"workload.path={path}", "sampling.n=1", "sampling.max_tokens=5")
    assert code == 2
    told = [line for line in err.splitlines() if line.startswith("paged: ")]
    assert len(told) == 1
    assert told[0].startswith("paged: 7 of 9 lines were refused, the first is line 2: not valid JSON")
    rows = {row["id"]: row for row in rows_of(folder_of(out))}
    assert rows["good"]["finish_reason"] in ("stop", "length")
    assert rows["good too"]["finish_reason"] in ("stop", "length")
    for line_id, reason in {
        "line-2": "line 2: not valid JSON",
        "unknown": "line 3: temprature is not a field of a prompt; did you mean temperature?",
        "contradiction": "line 4: n must be 1 when temperature is 0",
        "vocabulary": "line 5: .*99999",
        "stop": "line 6: stop_token_ids holds 99999",
        "long": "line 7: .*max_seq_len",
        "never fits": "line 8: .*max_tokens 1000",
    }.items():
        assert rows[line_id]["finish_reason"] == "refused"
        assert re.match(reason, rows[line_id]["reason"])
    assert summary_of(folder_of(out))["finish_reasons"]["refused"] == 7


# Mistakes


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["foo=1"], "foo is not a key of this config; allowed: allow_long_context, block_size,"),
        (["block_sise=3"], "block_sise is not a key of this config; did you mean block_size?"),
        (["+block_sise=3"], "block_sise is not a key of this config; did you mean block_size?"),
        (["sampling.topp=1"], "sampling.topp is not a key of this config; did you mean sampling.top_p?"),
        (["polcy=fifo"], "polcy is not a key of this config; did you mean policy?"),
        (["hydra.rum.dir=x"], "hydra.rum.dir is not a key of Hydra's config; see --cfg hydra"),
        (["policy.fraction=0.1"], "policy.fraction is not a key of the policy that is chosen"),
        (["policy=lifo"], "policy must be one of fifo, forecast, reserve, watermark, not 'lifo'"),
        (["numerics=exact"], "numerics must be one of fast, invariant, not 'exact'"),
        (["experiment=none"], "experiment must be one of"),
        (["block_size"], "cannot read the override 'block_size': it must be KEY=VALUE or GROUP=OPTION\n"),
        (
            ["workload.path=it's é=1"],
            'cannot read the override "workload.path=it\'s é=1": it must be KEY=VALUE or GROUP=OPTION; a value that '
            "holds other characters stands in quotes of its own, \"workload.path='it\\'s é=1'\"",
        ),
        (["block_size=1,2"], "'block_size=1,2' gives several values: add -m"),
        (["--flag"], "unrecognized arguments: --flag"),
        (["-m", "--cfg", "job"], "only one of --run, --multirun"),
        (["--config-name", "absent"], "Cannot find primary config 'absent'"),
        (["policy=null"], "policy must be one of fifo, forecast, reserve, watermark, not null"),
        (["-m", "policy=fifo,1"], "policy must be one of fifo, forecast, reserve, watermark, not 1"),
        (["-m", "policy=fifo,lifo"], "policy must be one of fifo, forecast, reserve, watermark, not 'lifo'"),
        (
            ["-m", "hydra.sweep.subdir=same", "seed=1,2"],
            "hydra.sweep.subdir must differ from job to job, as ${hydra.job.num}",
        ),
        (
            # The points are in the file: all jobs got the one folder. The other mistake would end each at once.
            ["-m", "hydra.sweep.subdir=same", "experiment=watermark_curve", "block_size=0"],
            "hydra.sweep.subdir must differ from job to job, as ${hydra.job.num}",
        ),
        (["sampling=[1]"], "sampling must hold keys and values, not [1]"),
        (["sampling.stop={a: 1}"], "sampling.stop must be a text or a list of texts, not {a: 1}"),
        (["workload=[1]"], "workload must be one of arithmetic, bill, gamma, "),
        (["sampling.logit_bias={1: '???'}"], "sampling.logit_bias.1 must be given"),
        (["block_size=${foo}"], "block_size: Interpolation key 'foo' not found"),
        (["block_size=abc"], "block_size must be a whole number, not 'abc'"),
        (["block_size=0"], "block_size must be a whole number, at least 1, not 0"),
        (["num_blocks=-1"], "num_blocks must be a whole number, at least 1, not -1"),
        (["num_blocks=1000000000000"], "num_blocks"),
        (["max_num_seqs=0"], "max_num_seqs"),
        (["chunk_size=0"], "chunk_size"),
        (["depth=0"], "depth"),
        (["tp=3"], "tp must divide num_attention_heads 2, and divide intermediate_size 32, not 3"),
        (["tp=2", "numerics.k_segments=3"], "numerics.k_segments must be a power of two, not 3"),
        (["tp=2", "numerics.k_segments=1024"], "numerics.k_segments must divide"),
        (["numerics.reduce_dtype=int8"], "numerics.reduce_dtype must be one of model, float32, not 'int8'"),
        (["tp_timeout_s=0"], "tp_timeout_s must be 0.1 to 31536000, not 0.0"),
        (["dtype=int3"], "dtype must be one of"),
        (["kv_dtype=int3"], "kv_dtype must be one of"),
        (["max_seq_len=100000"], "max_seq_len 100000 exceeds the model's max_position_embeddings"),
        (["gpu_memory_utilization=2"], "gpu_memory_utilization must be above 0 and at most 1, not 2.0"),
        (["sampling.top_p=0"], "sampling.top_p must be a number above 0 and at most 1, not 0.0"),
        (["sampling.temperature=0"], "sampling.n must be 1 when temperature is 0"),
        (["model.path=/nowhere/at/all"], "model.path /nowhere/at/all does not exist"),
        (["weights=auto"], ""),
        (["workload=prompts"], "workload.path must be given"),
        (["workload=prompts", "workload.path=absent.jsonl"], "workload.path must be a file of prompts: 'absent.jsonl'"),
        (
            ["workload=prompts", "workload.path=empty.jsonl"],
            "workload.path must be a file of prompts: 'empty.jsonl' holds",
        ),
        (["workload=prompts", "workload.path=."], "workload.path must be a file of prompts: '.' cannot be read"),
        (["hydra.run.dir=empty.jsonl/run"], "hydra.run.dir must be a folder that can be written"),
        (["-m", "hydra.sweep.dir=empty.jsonl/s"], "hydra.sweep.dir must be a folder that can be written"),
        (["seed=" + "1" * 5000], "the config must hold whole numbers of at most 4300 digits"),
        (["resume=absent"], "resume must be the folder of a run, and 'absent' holds no .hydra/config.yaml"),
        (["resume=a", "resume=b"], "resume must be given once"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(cli: Cli, overrides: list[str], sentence: str) -> None:
    Path("empty.jsonl").write_text("\n")
    code, out, err = cli(*overrides)
    assert code == 2
    assert out == ""
    assert err.startswith(f"paged: {sentence}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            "# @package _global_\nblock_size: [1, 2\nseed: 3\n",
            "FILE, line 3: not valid YAML: expected ',' or ']', but got",
        ),
        ("# @package _global_\nseed: 1\nseed: 2\n", "FILE, line 3: not valid YAML: found duplicate key seed"),
        (
            "# @package _global_\nseed: \x01\n",
            "FILE: not valid YAML: special characters are not allowed (character 27)",
        ),
        (b"# @package _global_\nseed: \xff\n", "FILE: not UTF-8 text (byte 27)"),
        ("# @package _global_\n- seed: 3\n", "FILE must hold keys and values, not a list"),
        ("# @package _global_\nsampling: [1]\n", "FILE has a list where keys and values are wanted, or the other way"),
        ("seed: 3\n", "FILE must begin with the line `# @package _global_`, without which it changes nothing"),
        ("", "FILE must begin with the line `# @package _global_`"),
        (
            "# @package _global_\npolicy: reserve\n",
            "policy must hold keys and values, not 'reserve'; a file chooses an option by `override /policy: reserve`",
        ),
        (
            "# @package _global_\ndefaults:\n  - policy: fifo\n",
            "there is no group experiment/policy; a file's defaults choose another group's option with `overr",
        ),
    ],
    ids=range(10),
)
def test_a_mistake_in_a_file_of_the_users_own_is_one_line_that_names_it(
    cli: Cli, tmp_path: Path, content: str | bytes, sentence: str
) -> None:
    path = tmp_path / "own" / "experiment" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    code, out, err = cli("--config-dir", "own", "experiment=mine")
    assert (code, out) == (2, "")
    assert err.startswith(f"paged: {sentence.replace('FILE', str(path))}")
    assert err.count("\n") == 1


def test_a_file_of_the_users_own_is_an_experiment(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "own" / "experiment" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# @package _global_\nblock_size: 8\n")
    code, out, _ = cli("--config-dir", "own", "experiment=mine", "--cfg", "job")
    assert code == 0
    assert "block_size: 8" in out


def test_a_mistake_through_the_real_process_leaves_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paged", "run", "block_size=x", f"hydra.run.dir={tmp_path}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "paged: block_size must be a whole number, not 'x'\n"


def test_an_internal_error_is_not_taken_for_a_mistake(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from paged.engine import Engine

    def fail(self: Engine) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(Engine, "run_step", fail)
    with pytest.raises(ValueError, match="a fault"):
        cli(*SMALL)


def test_samples_whose_logits_are_nan_end_as_error_and_the_others_finish(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paged.model.decoder import Decoder

    logits = Decoder.logits
    calls = 0

    def poisoned(self: Decoder, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        rows = logits(self, *args)
        if calls == 3:
            rows[0] = float("nan")
        return rows

    monkeypatch.setattr(Decoder, "logits", poisoned)
    code, out, err = cli(*SMALL, "sampling.ignore_eos=true")
    assert code == 1
    assert "paged: 1 samples ended as error, because their logits were NaN" in err
    folder = folder_of(out)
    assert summary_of(folder)["finish_reasons"] == {"error": 1, "length": 3}

    monkeypatch.setattr(Decoder, "logits", logits)
    assert cli(f"resume={folder}", model=False)[0] == 0
    assert tokens_of(folder) == tokens_of(folder_of(cli(*SMALL, "sampling.ignore_eos=true")[1]))


# Ctrl-C and resuming

LONG = ("device=cpu", "workload.num_prompts=3", "sampling.n=2", "sampling.max_tokens=40", "max_num_seqs=4")


@pytest.fixture
def interrupted(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A run that got Ctrl-C once two samples had finished, and what it said."""
    from paged.engine import Engine

    step = Engine.run_step
    finished = 0

    def interrupting(self: Engine) -> Any:
        nonlocal finished
        updates = step(self)
        finished += sum(update.output is not None for update in updates)
        if finished >= 2:
            signal.raise_signal(signal.SIGINT)
        return updates

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run_step", interrupting)
        code, out, err = cli(*LONG)
    assert code == 130
    return folder_of(out), err


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_resume(interrupted: tuple[Path, str]) -> None:
    folder, err = interrupted
    assert err.splitlines()[-1].endswith(f"continue with: python -m paged run resume={folder}")
    summary = summary_of(folder)
    assert summary["interrupted"] is True
    assert summary["num_samples"] >= 2
    assert summary["num_samples"] < 6
    assert summary["finish_reasons"]["abort"] >= 1
    assert len(rows_of(folder)) == sum(summary["finish_reasons"].values())


def test_a_resumed_run_equals_an_uninterrupted_one(cli: Cli, interrupted: tuple[Path, str]) -> None:
    folder, _ = interrupted
    kept = {row["id"] + str(row["sample"]) for row in rows_of(folder) if row["finish_reason"] != "abort"}
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"id": "torn", "sam')
    code, out, err = cli(f"resume={folder}", model=False)
    assert code == 0
    assert folder_of(out) == folder
    assert f"{6 - len(kept)}/{6 - len(kept)}" in err
    assert tokens_of(folder) == tokens_of(folder_of(cli(*LONG)[1]))
    summary = summary_of(folder)
    assert (summary["num_samples"], summary["interrupted"], summary["resumed"]) == (6, False, True)
    events = [json.loads(line)["event"] for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert events.count("config") == 2

    before = (folder / "results.jsonl").read_bytes(), summary
    assert cli(f"resume={folder}", model=False)[0] == 0
    assert ((folder / "results.jsonl").read_bytes(), summary_of(folder)) == before


def test_resuming_needs_nothing_but_the_folder(
    cli: Cli, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model and the prompts were given relative to another folder, and the prompts are gone since."""
    start = tmp_path / "start"
    start.mkdir()
    shutil.copytree(checkpoint, start / "model")
    path = write_lines(start / "p.jsonl", {"id": "a", "prompt": "1+1"}, {"id": "b", "prompt": "2"}, "broken")
    monkeypatch.chdir(start)
    given = ["workload=prompts", "workload.path=p.jsonl", "sampling.max_tokens=5", "weights=dummy", "model.path=model"]
    code, out, _ = cli(*given, model=False)
    assert code == 2
    folder = folder_of(out)
    whole = tokens_of(folder)
    rows = rows_of(folder)
    write_lines(folder / "results.jsonl", *rows[:3])
    path.unlink()
    moved = folder.rename(tmp_path / "mov'd run=1")
    monkeypatch.chdir(tmp_path)
    code, _, err = cli(f"resume={moved}", model=False)
    assert code == 2
    assert "paged: 1 of 3 lines were refused, the first is line 3" in err
    assert tokens_of(moved) == whole


def test_a_pool_may_change_when_a_run_is_resumed(cli: Cli, interrupted: tuple[Path, str]) -> None:
    folder, _ = interrupted
    code, _, _ = cli(f"resume={folder}", "num_blocks=40", "policy=watermark", "policy.fraction=0.1", model=False)
    assert code == 0
    assert summary_of(folder)["kv_tokens"] == 40 * 16
    assert tokens_of(folder) == tokens_of(folder_of(cli(*LONG)[1]))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("sampling.temperature=0.5", "sampling.temperature"),
        ("seed=3", "seed"),
        ("numerics=fast", "numerics"),
        ("dtype=float64", "dtype"),
        ("model=local", "model"),
        ("workload.num_prompts=9", "workload.num_prompts"),
        ("experiment=pressure", "experiment"),
    ],
)
def test_what_would_change_the_samples_is_refused_beside_resume(cli: Cli, override: str, key: str) -> None:
    folder = folder_of(cli(*SMALL)[1])
    before = (folder / "results.jsonl").read_bytes()
    code, out, err = cli(f"resume={folder}", override, model=False)
    assert (code, out) == (2, "")
    assert err.startswith(f"paged: {key} must not be given beside resume")
    assert err.count("\n") == 1
    assert (folder / "results.jsonl").read_bytes() == before


def test_other_bits_and_broken_results_are_not_resumed(cli: Cli) -> None:
    folder = folder_of(cli(*SMALL)[1])
    rows = rows_of(folder)
    write_lines(folder / "results.jsonl", {**rows[0], "numerics_id": "other"}, *rows[1:3])
    code, _, err = cli(f"resume={folder}", model=False)
    assert code == 2
    assert "paged: resume must happen where the numerics are those of the folder" in err
    write_lines(folder / "results.jsonl", rows[0], '{"torn', rows[1])
    code, _, err = cli(f"resume={folder}", model=False)
    assert code == 2
    assert re.match(r"paged: resume must be a folder with intact results: .*results\.jsonl, line 2: ", err)
    assert cli("-m", f"resume={folder}", model=False)[0] == 2


def test_ctrl_c_in_the_real_process(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    args = [f"model.path={checkpoint}", "weights=dummy", "sampling.max_tokens=180", f"hydra.run.dir={folder}"]
    args += ["device=cpu", "workload.num_prompts=8", "sampling.n=2", "max_num_seqs=4"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paged", "run", *args],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (results := folder / "results.jsonl").is_file() or not results.stat().st_size:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert folder_of(out) == folder
    assert "Traceback" not in err
    assert err.splitlines()[-1].endswith(f"continue with: python -m paged run resume={folder}")
    summary = summary_of(folder)
    assert summary["interrupted"] is True
    assert 1 <= summary["num_samples"] < 16
    assert cli(f"resume={folder}", model=False)[0] == 0
    assert len(tokens_of(folder)) == 16


def test_ctrl_c_while_inputs_are_copied_has_nothing_to_resume(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said how to resume: that folder had no inputs or, worse, those of an earlier run with another config."""
    folder = tmp_path / "run"
    given = [*SMALL, f"hydra.run.dir={folder}"]
    assert cli(*given, "num_blocks=1000000000")[0] == 2
    assert (folder / "inputs" / "prompts.jsonl").is_file()
    with monkeypatch.context() as patch:
        patch.setattr("paged.run.write_prompts", lambda *_: signal.raise_signal(signal.SIGINT))
        code, out, err = cli(*given)
    assert (code, out) == (130, "")
    assert err == "paged: interrupted; nothing was sampled yet, so there is nothing to resume\n"
    assert not (folder / "inputs" / "prompts.jsonl").exists()
    assert cli(*given)[0] == 0


@pytest.mark.parametrize("arrival_s", [0, 60])
def test_after_ctrl_c_no_other_line_is_looked_at(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrival_s: int
) -> None:
    """Lines that were to arrive later were all tokenized first: with many of them the stop came much later."""
    from paged.engine import Engine

    looked_at: list[str] = []

    def interrupted(method: Any) -> Any:
        def look(self: Engine, prompt: str, *args: Any, **keys: Any) -> Any:
            looked_at.append(prompt)
            signal.raise_signal(signal.SIGINT)
            return method(self, prompt, *args, **keys)

        return look

    lines = [{"prompt": f"{number}+1", "arrival_s": arrival_s} for number in range(4)]
    path = write_lines(tmp_path / "prompts.jsonl", *lines)
    name = "check_request" if arrival_s else "add_request"
    monkeypatch.setattr(Engine, name, interrupted(getattr(Engine, name)))
    code, out, _ = cli("workload=prompts", f"workload.path={path}", "sampling.n=1", "sampling.max_tokens=3")
    assert code == 130
    assert looked_at == ["0+1"]
    summary = summary_of(folder_of(out))
    assert (summary["interrupted"], summary["num_samples"]) == (True, 0)


def test_ctrl_c_before_a_resumed_run_goes_on_keeps_its_summary(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished run that was resumed and interrupted while it loaded had lost all of its numbers."""
    folder = folder_of(cli(*SMALL)[1])
    before = summary_of(folder)
    with monkeypatch.context() as patch:
        patch.setattr("paged.run._Run._build_engine", lambda *_: signal.raise_signal(signal.SIGINT))
        code, _, err = cli(f"resume={folder}", model=False)
    assert code == 130
    assert err.endswith(f"continue with: python -m paged run resume={folder}\n")
    assert summary_of(folder) == before
    assert cli(f"resume={folder}", model=False)[0] == 0
    assert summary_of(folder) == before


def test_ctrl_c_in_a_sweep_names_the_job_and_leaves_the_table(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from paged.engine import Engine

    step, pools = Engine.run_step, []

    def interrupting(self: Engine) -> Any:
        pools.append(self.scheduler.config.num_blocks)
        if len(set(pools)) == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Engine, "run_step", interrupting)
    code, out, err = cli("-m", "num_blocks=40,41,42", *SMALL)
    assert code == 130
    sweep = folder_of(out)
    assert (
        f"paged: job 1: interrupted; what is finished is kept, continue with: python -m paged run resume={sweep}/1\n"
        in err
    )
    assert [line.split()[:2] for line in out.splitlines() if line.startswith(("0 ", "1 ", "2 "))] == [
        ["0", "40"],
        ["1", "41"],
    ]


@pytest.mark.parametrize("spoils", [False, True], ids=["interrupt", "error of an interrupt"])
def test_ctrl_c_between_the_jobs_of_a_sweep_leaves_the_table(
    spoils: bool, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra composes there: the jobs that were done had no table and no last line, and what omegaconf made of an
    interrupt in the middle of its books was a traceback."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    compose = ConfigLoaderImpl.load_sweep_config
    num_composed = 0

    def interrupted(self: ConfigLoaderImpl, *args: Any, **fields: Any) -> Any:
        nonlocal num_composed
        num_composed += 1
        # All are composed once before the first begins.
        if num_composed == 4:
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                if spoils:
                    raise AttributeError("'NoneType' object has no attribute '_invalidate_flags_cache'")
        return compose(self, *args, **fields)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", interrupted)
    code, out, err = cli("-m", "seed=1,2", *SMALL)
    assert code == 130
    assert err.endswith("paged: interrupted\n")
    sweep = folder_of(out)
    assert (sweep / "sweep.csv").is_file()
    assert len(rows_of(sweep / "0")) == 4


def test_a_mistake_that_is_found_after_other_jobs_leaves_their_table(cli: Cli) -> None:
    """Jobs are composed before the first begins, unless they come in batches: then the table of those done was lost."""
    code, out, err = cli("-m", "policy=fifo,lifo", "hydra.sweeper.max_batch_size=1", *SMALL)
    assert code == 2
    assert err.endswith("paged: policy must be one of fifo, forecast, reserve, watermark, not 'lifo'\n")
    sweep = folder_of(out)
    assert (sweep / "sweep.csv").is_file()
    assert len(rows_of(sweep / "0")) == 4


def test_ctrl_c_at_the_end_of_a_sweep_still_tells_its_folder(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged.sim.sweep.Comparison.write", lambda *_: signal.raise_signal(signal.SIGINT))
    code, out, err = cli("-m", "seed=1", *SMALL)
    assert code == 130
    assert err.endswith("paged: interrupted\n")
    assert len(rows_of(folder_of(out) / "0")) == 4


def test_what_is_no_folder_of_a_run_is_not_resumed(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    """`numerics must be one of ...`, it said of the folder of a plan, and blamed `workload.path` for lost inputs."""
    assert main(["plan", "model=tiny", "tp=1"]) == 0
    plan = folder_of(capsys.readouterr().out)
    sentence = f"paged: resume must be the folder of a run, and {str(plan)!r} is one of another command\n"
    assert cli(f"resume={plan}", model=False) == (2, "", sentence)
    folder = folder_of(cli(*SMALL)[1])
    (folder / "inputs" / "prompts.jsonl").unlink()
    code, out, err = cli(f"resume={folder}", model=False)
    assert (code, out) == (2, "")
    assert err.startswith(
        f"paged: resume must be a run's intact folder: '{folder}/inputs/prompts.jsonl' cannot be read"
    )


def test_ctrl_c_while_python_loads_the_program_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt if name == "main" else AttributeError(name)

    monkeypatch.setitem(sys.modules, "paged.app", Interrupted("paged.app"))
    monkeypatch.delitem(sys.modules, "paged.__main__", raising=False)
    # A KeyboardInterrupt that nobody awaits would end the tests.
    with pytest.raises((SystemExit, KeyboardInterrupt)) as end:
        runpy.run_module("paged", run_name="__main__")
    assert isinstance(end.value, SystemExit)
    assert end.value.code == 130


# What else happens to folders and processes


def test_what_cannot_be_served_is_refused_before_it_arrives(cli: Cli, tmp_path: Path) -> None:
    """With `workload=poisson` the embedded model has no places for most requests, and each was refused when its time
    had come: 512 seconds for nothing."""
    path = write_lines(
        tmp_path / "prompts.jsonl",
        {"id": "long", "prompt": "1+" * 200, "arrival_s": 5},
        {"id": "odd", "prompt_token_ids": [10**6], "arrival_s": 5},
        {"id": "fits", "prompt": "1+1", "arrival_s": 0.1},
    )
    code, out, err = cli("workload=prompts", f"workload.path={path}", "sampling.n=1", "sampling.max_tokens=3")
    assert code == 2
    assert {row["id"]: row["finish_reason"] for row in rows_of(folder_of(out))}.keys() == {"long", "odd", "fits"}
    assert "2 of 3 lines were refused, the first is long: line 1: a prompt of 400 tokens" in err
    summary = summary_of(folder_of(out))
    assert summary["num_samples"] == 1
    assert summary["elapsed_s"] < 4


def test_refusals_are_looked_at_again_when_a_run_is_resumed(cli: Cli, tmp_path: Path) -> None:
    """A line refused for too small a pool counted as done: no later resume, however large its pool, took it."""
    path = write_lines(
        tmp_path / "prompts.jsonl",
        {"id": "short", "prompt": "1+1"},
        {"id": "long", "prompt": "1+" * 30},
        {"id": "never", "prompt": "1", "temprature": 1},
    )
    given = ("device=cpu", "workload=prompts", f"workload.path={path}", "sampling.n=2", "sampling.max_tokens=5")
    code, out, _ = cli(*given)
    assert code == 2
    folder = folder_of(out)
    whole = tokens_of(folder)
    write_lines(folder / "results.jsonl", *(row for row in rows_of(folder) if row["id"] != "long"))

    code, _, err = cli(f"resume={folder}", "num_blocks=2", model=False)
    assert code == 2
    assert (
        "2 of 3 lines were refused, the first is long: line 2: a prompt of 60 tokens with max_tokens 5 can never" in err
    )
    assert tokens_of(folder).keys() == {("short", 0), ("short", 1), ("long", None), ("never", None)}

    code, _, err = cli(f"resume={folder}", "num_blocks=40", model=False)
    assert code == 2
    assert "paged: 1 of 3 lines were refused, the first is never: line 3" in err
    assert tokens_of(folder) == whole
    assert summary_of(folder)["finish_reasons"]["refused"] == 1


def test_a_line_named_like_a_refused_line_is_not_lost(cli: Cli, tmp_path: Path) -> None:
    """A broken line is called after its number; a good line with that very name was taken for refused, and skipped."""
    path = write_lines(tmp_path / "prompts.jsonl", {"id": "line-2", "prompt": "1+1"}, "broken", {"prompt": "2+2"})
    given = ("device=cpu", "workload=prompts", f"workload.path={path}", "sampling.n=2", "sampling.max_tokens=5")
    code, out, _ = cli(*given)
    assert code == 2
    folder = folder_of(out)
    whole = tokens_of(folder)
    assert whole.keys() == {("line-2", 0), ("line-2", 1), ("line-2", None), ("line-3", 0), ("line-3", 1)}
    for kept in (lambda row: row["sample"] is None, lambda row: row["sample"] != 0, lambda row: row["id"] == "line-3"):
        write_lines(folder / "results.jsonl", *filter(kept, rows_of(folder)))
        assert cli(f"resume={folder}", model=False)[0] == 2
        assert tokens_of(folder) == whole


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1, 2]",
        b"just text",
        b"a: [1",
        b"\xff\xfe\x00",
        b"a: ${b}",
        b"model: null\n",
        b"numerics: 3\n",
        b"numerics:\n  name: invariant\n",
    ],
    ids=["empty", "list", "text", "torn", "bytes", "interpolation", "no model", "number", "beginning"],
)
def test_a_damaged_config_is_one_line(cli: Cli, content: bytes) -> None:
    """What a crash or an editor leaves of a run's config was a traceback of the parser, or of whoever met it first."""
    folder = folder_of(cli(*SMALL)[1])
    before = (folder / "results.jsonl").read_bytes()
    (folder / ".hydra" / "config.yaml").write_bytes(content)
    for extra in ((), ("num_blocks=40",)):
        code, out, err = cli(f"resume={folder}", *extra, model=False)
        assert (code, out) == (2, "")
        assert err.startswith("paged: ")
        assert err.count("\n") == 1
    assert (folder / "results.jsonl").read_bytes() == before


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def test_sigterm_is_like_ctrl_c_and_a_folder_has_one_process(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    """A batch system's SIGTERM killed a run without a summary; a second process on its folder wrote samples twice."""
    folder = tmp_path / "run"
    args = [f"model.path={checkpoint}", "weights=dummy", "sampling.max_tokens=180", f"hydra.run.dir={folder}"]
    args += ["device=cpu", "workload.num_prompts=40", "sampling.n=2", "max_num_seqs=4", "sampling.ignore_eos=true"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paged", "run", *args],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (results := folder / "results.jsonl").is_file() or not results.stat().st_size:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        second = cli(f"resume={folder}", model=False)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert second == (2, "", f"paged: resume must be a folder that no other process works on: {folder}\n")
    assert process.returncode == 130, err
    assert folder_of(out) == folder
    assert "Traceback" not in err
    assert err.splitlines()[-1].endswith(f"continue with: python -m paged run resume={folder}")
    summary = summary_of(folder)
    assert summary["interrupted"] is True
    assert 1 <= summary["num_samples"] < 80
    assert len(tokens_of(folder)) == len(rows_of(folder))


def test_a_process_that_has_gone_lets_go_of_its_folder(cli: Cli, tmp_path: Path) -> None:
    """The lock is no file that a crash leaves behind: the file stays, and nobody holds it."""
    sweep = tmp_path / "sweep"
    folder = folder_of(cli(*SMALL, f"hydra.run.dir={sweep}/0")[1])
    assert (folder / ".lock").is_file()
    with (folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        code, out, err = cli(f"resume={folder}", model=False)
        assert (code, out, err.count("\n")) == (2, "", 1)
        told = f"must be a folder that no other process works on: {folder}\n"
        kept = "hydra.output_subdir=null"
        # As where the other process has sampled nothing yet.
        results = (folder / "results.jsonl").rename(tmp_path / "results")
        assert cli(f"hydra.run.dir={folder}", kept, model=False) == (2, "", f"paged: hydra.run.dir {told}")
        code, _, err = cli("-m", f"hydra.sweep.dir={sweep}", kept, model=False)
        assert (code, err.splitlines()[-1]) == (2, f"paged: job 0: hydra.sweep.dir {told}"[:-1])
        results.rename(folder / "results.jsonl")
    assert cli(f"resume={folder}", model=False)[0] == 0


def test_a_reader_that_has_gone_is_no_traceback(checkpoint: Path, tmp_path: Path) -> None:
    """``python -m paged run | true`` ended with a traceback of a broken pipe, and another when Python closed it."""
    given = [f"model.path={checkpoint}", "weights=dummy", *SMALL, f"hydra.run.dir={tmp_path / 'run'}"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "paged", "run", *given],
            cwd=tmp_path,
            env=environment(),
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(writer)
    for sign in ("Traceback", "BrokenPipe", "Broken pipe", "Exception ignored"):
        assert sign not in done.stderr
    assert done.returncode == 1
    assert len(tokens_of(tmp_path / "run")) == 4
    assert summary_of(tmp_path / "run")["interrupted"] is False


def test_another_pipe_that_breaks_is_an_error_of_the_program(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever pipe it was, it was taken for the reader of standard output: the command ended without a word."""

    def lose(*_: Any) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("paged.planner.job", lose)
    with pytest.raises(BrokenPipeError):
        main(["plan"])


# Models known by name

NARROW = ["num_hidden_layers=1", "hidden_size=64", "intermediate_size=32", "max_position_embeddings=64"]


@pytest.mark.parametrize("name", ["goedel8b", "qwen3_8b", "qwen3_0_6b", "mistral7b", "olmoe", "llama3_8b"])
def test_a_named_model_runs_on_dummy_weights_without_a_checkpoint(
    cli: Cli, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its vocabulary and family, with fewer and narrower layers, so that it fits a test."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    sizes = [f"model.spec.{size}" for size in NARROW]
    given = [f"model={name}", "weights=dummy", "num_blocks=8", "sampling.n=1", *sizes]
    code, out, _ = cli(*given, "workload=random", "workload.num_prompts=2", "workload.output_len=3", model=False)
    assert code == 0
    rows = [json.loads(line) for line in (Path(out.splitlines()[-1]) / "results.jsonl").read_text().splitlines()]
    assert [len(row["token_ids"]) for row in rows] == [3, 3]
    code, _, err = cli(*given, model=False)
    assert code == 2
    assert "has no tokenizer.json, so the prompt must be prompt_token_ids" in err


def test_a_named_model_that_is_absent_says_how_to_get_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    code, _, err = cli("model=olmoe", model=False)
    assert code == 2
    assert err.splitlines()[-1].endswith("`hf download allenai/OLMoE-1B-7B-0924` gets it")
    code, _, err = cli("model=olmoe", "model.path=nowhere/at/all", "weights=dummy", model=False)
    assert code == 2
    assert "model.path nowhere/at/all does not exist" in err


def test_what_a_checkpoint_violates_is_a_list_in_one_line(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, folder / "model.safetensors")
    code, _, err = cli(f"model.path={folder}", model=False)
    assert (code, err.count("\n")) == (2, 1)
    assert re.search(r"can't be loaded, \d+ violations: (tensor [\w.]+ is missing; ){3,4}and \d+ more$", err)


def test_a_checkpoint_must_be_the_model_that_is_named(cli: Cli, checkpoint: Path) -> None:
    code, _, err = cli("model=qwen3_0_6b", f"model.path={checkpoint}", model=False)
    assert code == 2
    assert "config.json: the checkpoint is not the model named, it has vocab_size" in err.splitlines()[-1]
    assert "hidden_size" in err.splitlines()[-1]
