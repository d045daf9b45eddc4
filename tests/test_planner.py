"""Checks `python -m paged plan`: every figure of the study through the command, and its answers to what can't be."""

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from command_tools import Cli, commands

REPOSITORY = Path(__file__).resolve().parent.parent
Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Runs `python -m paged plan` in this process; exit code, output, errors."""
    with commands(tmp_path, monkeypatch, capsys, "plan") as call:
        yield call


@pytest.fixture
def plan(cli: Cli) -> Plan:
    """The summary that a plan leaves."""

    def call(*args: str) -> dict[str, Any]:
        code, out, _ = cli(*args)
        assert code == 0
        return json.loads((Path(out.splitlines()[-1]) / "summary.json").read_text())

    return call


# Memory


@pytest.mark.parametrize(
    ("model", "tp", "expected"),
    [("qwen3_8b", 1, 147_456), ("mistral7b", 1, 131_072), ("goedel8b", 4, 36_864), ("goedel8b", 2, 73_728)],
)
def test_bytes_of_a_token_on_a_rank(plan: Plan, model: str, tp: int, expected: int) -> None:
    assert plan(f"model={model}", f"tp={tp}")["kv_bytes_per_token_per_rank"] == expected


@pytest.mark.parametrize(
    ("overrides", "tokens", "sequences"),
    [
        ("tp=1 memory.weights_gib=15.26 memory.activation_gib=1 memory.context_gib=0.4", 23_248, (5, 1, 0)),
        (
            "tp=1 gpu_memory_utilization=0.95 memory.weights_gib=15.26 memory.activation_gib=1 memory.context_gib=0.4",
            31_280,
            (7, 1, 0),
        ),
        ("tp=2 memory.weights_gib=7.63 memory.context_gib=0.4", 164_912, (40, 10, 4)),
        ("tp=4 memory.weights_gib=3.815 memory.context_gib=0.4", 440_944, (107, 26, 10)),
        ("tp=1", 26_192, (6, 1, 0)),
        ("tp=2", 163_472, (39, 9, 3)),
        ("tp=4", 438_048, (106, 26, 10)),
        ("tp=4 gpu_memory_utilization=0.95", 470_176, (114, 28, 11)),
        ("tp=4 memory.activation_gib=0.36 memory.context_gib=0.02", 456_112, (111, 27, 11)),
    ],
)
def test_the_pool_is_the_studys(plan: Plan, overrides: str, tokens: int, sequences: tuple[int, ...]) -> None:
    summary = plan("caps=[4096,16384,40960]", *overrides.split())
    assert summary["kv_tokens"] == tokens
    assert summary["num_kv_blocks"] == tokens // 16
    assert tuple(summary["max_concurrency"].values()) == sequences
    assert list(summary["max_concurrency"]) == ["4096", "16384", "40960"]


def test_vllms_measured_pool_is_met_within_a_thousandth(plan: Plan) -> None:
    tokens = plan("memory.activation_gib=0.36", "memory.context_gib=0.02")["kv_tokens"]
    assert tokens / 455_888 - 1 == pytest.approx(0.0005, abs=5e-5)
    assert tokens / 40_960 == pytest.approx(11.14, abs=0.005)


@pytest.mark.parametrize(
    ("tp", "parameters", "size"),
    [(1, 8_190_735_360, 16_381_470_720), (2, 4_095_521_792, 8_191_043_584), (4, 2_047_915_008, 4_095_830_016)],
)
def test_parameters_and_bytes_of_a_rank(plan: Plan, tp: int, parameters: int, size: int) -> None:
    summary = plan(f"tp={tp}")
    assert summary["num_parameters"] == 8_190_735_360
    assert summary["num_parameters_per_rank"] == parameters
    assert summary["weights_bytes_per_rank"] == size
    # Plain P / tp, which gives wrong block counts, leaves the copied norms out.
    assert size == 2 * ((8_190_735_360 - 308_224) // tp + 308_224)


def test_the_parts_of_the_memory_sum_up(plan: Plan) -> None:
    summary = plan()
    used = sum(summary[key] for key in ("weights_bytes_per_rank", "activation_bytes", "context_bytes"))
    assert summary["kv_budget_bytes"] == int(22.06 * 2**30 * 0.9) - used
    block = 16 * summary["kv_bytes_per_token_per_rank"]
    assert summary["num_kv_blocks"] == summary["kv_budget_bytes"] // block


# Latency

# By batch and context: weights, KV; all-reduce, gather and step (all ms) and tokens/s for 20, 50 and 100 us.
STUDY = {
    (1, 4096): ("6.83", "0.25", "1.76 3.95 7.60", "0.10 0.13 0.18", "8.9 11.2 14.9", "112 90 67"),
    (16, 4096): ("6.83", "4.03", "6.2 8.4 12.1", "1.24 1.27 1.32", "18.3 20.6 24.3", "873 778 660"),
    (64, 4096): ("6.83", "16.1", "20.6 22.8 26.4", "4.88 4.91 4.96", "48.4 50.6 54.3", "1322 1264 1178"),
    (64, 8192): ("6.83", "32.2", "20.6 22.8 26.4", "4.88 4.91 4.96", "64.5 66.7 70.4", "992 959 909"),
}


def rounded(value: float, like: str) -> str:
    """`value` with as many decimals as `like`."""
    return f"{value:.{len(like.partition('.')[2])}f}"


@pytest.mark.parametrize("point", STUDY, ids=lambda point: f"{point[0]}x{point[1]}")
def test_the_default_plan_has_the_studys_latency_table(plan: Plan, point: tuple[int, int]) -> None:
    weights, kv, *columns = STUDY[point]
    rows = [row for row in plan()["latency"] if (row["batch"], row["context"]) == point]
    assert [row["link_latency_us"] for row in rows] == [20, 50, 100]
    for row in rows:
        assert rounded(row["weights_ms"], weights) == weights
        assert rounded(row["kv_ms"], kv) == kv
        assert row["compute_ms"] == 0
    for name, column in zip(("all_reduce_ms", "gather_ms", "step_ms", "tokens_per_s"), columns, strict=True):
        expected = column.split()
        assert [rounded(row[name], like) for row, like in zip(rows, expected, strict=True)] == expected


def test_a_row_of_the_printed_table_shows_all_latencies_of_the_link(cli: Cli) -> None:
    row = "16    4,096  20 / 50 / 100        6.83   4.03  6.24 / 8.43 / 12.1  1.24 / 1.27 / 1.32  18.3 / 20.6 / 24.3"
    assert row in cli()[1]


def test_the_link_carries_what_the_study_says(plan: Plan, cli: Cli) -> None:
    link = plan()["link_bytes"]
    assert link["layers_per_token"] / 1024 == 864
    assert link["embedding_per_token"] / 1024 == 12
    assert round(link["logits_per_sampled_row"] / 1024) == 223
    out = cli()[1]
    assert re.search(r"876 KiB  864 KiB of the layers, 12 KiB of the embedding", out)
    assert "223 KiB" in out


def test_batches_contexts_and_latencies_can_be_chosen(plan: Plan) -> None:
    rows = plan("batches=[2,3]", "contexts=100", "link_latencies_us=[5,6]")["latency"]
    assert [(row["batch"], row["context"], row["link_latency_us"]) for row in rows] == [
        (2, 100, 5),
        (2, 100, 6),
        (3, 100, 5),
        (3, 100, 6),
    ]
    assert rows[1]["all_reduce_ms"] - rows[0]["all_reduce_ms"] == pytest.approx(0.073)
    assert plan("batches=[]")["latency"] == []


def test_a_measured_table_stands_unless_latencies_are_given(plan: Plan, cli: Cli) -> None:
    measured = plan("hardware=h200", "tp=2", "batches=1", "contexts=4096")["latency"]
    assert [row["link_latency_us"] for row in measured] == [None]
    assert measured[0]["all_reduce_ms"] == pytest.approx(73 * 12.1e-3)
    assert re.search(r"^ +1 +4,096 +table ", cli("hardware=h200", "tp=2")[1], re.MULTILINE)
    given = plan("hardware=h200", "tp=2", "batches=1", "contexts=4096", "link_latencies_us=0")["latency"]
    assert given[0]["all_reduce_ms"] == pytest.approx(73 * 8192 / 218e9 * 1e3)


def test_one_card_has_no_link(plan: Plan, cli: Cli) -> None:
    summary = plan("tp=1")
    assert {(row["all_reduce_ms"], row["gather_ms"], row["link_latency_us"]) for row in summary["latency"]} == {
        (0.0, 0.0, None)
    }
    assert not [figure for figure in summary["figures"] if "link" in figure["name"]]
    assert "all-reduce" not in cli("tp=1")[1]


# What fits, and what is not counted


def test_what_does_not_fit_is_said_with_what_would(plan: Plan, cli: Cli) -> None:
    summary = plan("tp=1")
    assert summary["feasible"]
    assert not summary["fits"]
    assert summary["reason"] == "a sequence of max_seq_len 40,960 tokens does not fit: the pool holds 26,192"
    [problem] = summary["problems"]
    assert [remedy["override"] for remedy in problem["remedies"]] == ["kv_dtype=fp8", "tp=2", "max_seq_len=26192"]
    for remedy in problem["remedies"]:
        after = plan("tp=1", remedy["override"])
        assert after["kv_tokens"] == remedy["kv_tokens"]
        assert after["fits"], remedy
    assert plan("tp=1", f"hardware.memory_gib.value={problem['memory_gib_needed']}")["fits"]
    code, out, _ = cli("tp=1")
    assert code == 0
    assert "tp=2 (pool of 163,472 tokens)" in out
    assert "cards of 24.32 GiB" in out


def test_weights_that_are_too_large_are_an_answer_too(plan: Plan) -> None:
    summary = plan("tp=1", "hardware=l4", "gpu_memory_utilization=0.6")
    assert (summary["num_kv_blocks"], summary["kv_tokens"], summary["fits"]) == (0, 0, False)
    assert summary["kv_budget_bytes"] < 0
    assert summary["max_concurrency"] == {"16384": 0, "40960": 0}
    assert "3.02 GiB more than a card may hold" in summary["reason"]


def test_a_plan_that_fits_names_no_problem(plan: Plan, cli: Cli) -> None:
    summary = plan()
    assert (summary["fits"], summary["reason"], summary["problems"]) == (True, None, [])
    assert "what does not fit" not in cli()[1]


def test_points_of_the_table_beyond_the_pool_are_marked(plan: Plan, cli: Cli) -> None:
    assert {(row["batch"], row["context"]) for row in plan()["latency"] if not row["fits"]} == {(64, 8192)}
    assert re.search(r"^ +64\* +8,192 ", cli()[1], re.MULTILINE)
    tiny = plan("model=tiny", "hardware=cpu", "tp=1", "batches=1", "contexts=[1024,1025]")
    assert [row["fits"] for row in tiny["latency"]] == [True, False]


def test_transients_that_are_not_counted_are_warned_of(plan: Plan, cli: Cli) -> None:
    overrides = ["model=qwen3_8b", "tp=1", "batches=64", "contexts=4800", "max_num_seqs=64"]
    logits, sampling, attention = plan(*overrides)["transients"]
    assert logits["bytes"] == 64 * 151_936 * 4
    assert sampling["bytes"] == 64 * 151_936 * 48
    # No more of them than the pool of 26,192 tokens holds.
    assert attention["bytes"] == 5 * 8 * 4800 * 128 * 2 * 2
    assert [each["exceeds"] for each in (logits, sampling, attention)] == [False, False, False]
    warning = r"6 sequences of 4,800 tokens +0\.11 GiB  more than memory\.activation_gib allows"
    assert re.search(warning, cli(*overrides, "memory.activation_gib=0.05")[1])


def test_room_for_sampling_is_said_beside_the_fit(plan: Plan, cli: Cli) -> None:
    """Two warnings that contradict each other are none: what fits is also told with the temporaries counted."""
    row_bytes = 151_936 * (4 + 48)
    sampling = plan()["sampling"]
    assert sampling["max_rows"] == 2**29 // row_bytes == 67
    assert sampling["override"] == "memory.activation_gib=1.9"
    assert 1.8 * 2**30 < 256 * row_bytes <= 1.9 * 2**30
    counted = plan("memory.activation_gib=1.9")
    assert counted["sampling"]["override"] is None
    assert sampling["max_concurrency"] == counted["max_concurrency"] == {"16384": 24, "40960": 9}
    assert sampling["kv_tokens"] == counted["kv_tokens"]
    assert plan("max_num_seqs=67")["sampling"]["override"] is None
    out = cli()[1]
    assert "room to sample 67 sequences at once, max_num_seqs is 256" in out
    assert re.search(r"at 16,384 tokens +26 sequences  with memory\.activation_gib=1\.9: 24", out)
    assert "which leaves a pool of 397,264 tokens; or max_num_seqs=67" in out


def test_a_fit_that_the_temporaries_undo_is_said(plan: Plan, cli: Cli) -> None:
    overrides = ["tp=1", "max_seq_len=26000"]
    summary = plan(*overrides)
    assert (summary["fits"], summary["sampling"]["fits"]) == (True, False)
    assert "tokens, less than a sequence of max_seq_len 26,000; or max_num_seqs=67" in cli(*overrides)[1]


def test_what_is_assumed_is_said_with_its_source(plan: Plan, cli: Cli) -> None:
    figures = {figure["name"]: figure for figure in plan()["figures"]}
    assumed = {name for name, figure in figures.items() if figure["assumed"]}
    assert {"hardware.memory_bytes_per_s", "hardware.link_latency_us", "memory.activation_gib"} <= assumed
    assert not {"hardware.memory_gib", "hardware.link_bytes_per_s"} & assumed
    assert all(figure["source"] for figure in figures.values())
    assert re.search(r"hardware\.memory_bytes_per_s +6e\+11 +assumed +NVIDIA A10G datasheet", cli()[1])


@pytest.mark.parametrize(
    "overrides",
    [
        ["hardware.memory_gib.value=40", "hardware.link_bytes_per_s.value=5e9"],
        ["hardware.memory_gib={value: 40}", "++hardware.link_bytes_per_s.value=5e9", "tp=8"],
    ],
)
def test_a_figure_that_is_replaced_does_not_keep_its_source(plan: Plan, overrides: list[str]) -> None:
    figures = {figure["name"]: figure for figure in plan(*overrides, "memory.context_gib=1")["figures"]}
    for name, value in (("hardware.memory_gib", 40), ("hardware.link_bytes_per_s", 5e9), ("memory.context_gib", 1)):
        assert figures[name] == {"name": name, "value": value, "source": "given on the command line", "assumed": False}
    assert "datasheet" in figures["hardware.flops_per_s"]["source"]


def test_a_source_can_be_given_with_the_figure(plan: Plan) -> None:
    given = ["hardware.memory_gib={value: 40, source: a friend}", "hardware.memory_gib.assumed=true"]
    [figure] = [figure for figure in plan(*given)["figures"] if figure["name"] == "hardware.memory_gib"]
    assert (figure["value"], figure["source"], figure["assumed"]) == (40, "a friend", True)


def test_a_link_measured_on_fewer_cards_is_assumed(plan: Plan) -> None:
    def link(*overrides: str) -> tuple[bool, str]:
        figures = {figure["name"]: figure for figure in plan(*overrides)["figures"]}
        return figures["hardware.link_bytes_per_s"]["assumed"], figures["hardware.link_bytes_per_s"]["source"]

    assert not link("tp=4")[0]
    assumed, source = link("tp=8")
    assert assumed
    assert source.endswith("; assumed for 8")
    assert not link("hardware=h200", "tp=2")[0]
    assert link("hardware=h200", "tp=4")[0]


def test_a_table_of_the_link_is_told_only_where_it_is_used(plan: Plan) -> None:
    names = [{figure["name"] for figure in plan("hardware=h200", f"tp={tp}")["figures"]} for tp in (2, 4)]
    assert ["hardware.all_reduce_us" in each for each in names] == [True, False]


def test_copied_heads_are_said(plan: Plan, cli: Cli) -> None:
    assert plan("tp=8")["kv_head_copies"] == 1
    assert plan("tp=16")["kv_head_copies"] == 2
    assert "keys and values in bfloat16; each head is copied to 2 ranks" in cli("tp=16")[1]


@pytest.mark.parametrize("hardware", ["a10g", "l4", "a100_80g", "h100", "h200", "cpu"])
def test_every_card_has_a_plan(plan: Plan, hardware: str) -> None:
    summary = plan(f"hardware={hardware}", "tp=2")
    assert summary["hardware"] == hardware
    assert summary["kv_tokens"] > 0
    assert all(row["step_ms"] > 0 for row in summary["latency"])


def test_a_cpus_pool_is_the_engines_constant(plan: Plan, cli: Cli) -> None:
    from paged.engine_config import CPU_POOL_BYTES

    assert plan("hardware=cpu", "model=tiny", "tp=1")["kv_budget_bytes"] == CPU_POOL_BYTES
    assert "fixed by hardware.pool_gib" in cli("hardware=cpu", "model=tiny", "tp=1")[1]


# The command


def test_a_plan_leaves_a_folder_and_its_path_on_the_last_line(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli()
    assert (code, err) == (0, "")
    folder = Path(out.splitlines()[-1])
    assert re.fullmatch(r"outputs/plan/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d\.\d{6}", str(folder.relative_to(tmp_path)))
    assert (folder / ".hydra" / "config.yaml").is_file()
    assert "438,048 tokens  27,378 blocks of 16" in out


def test_a_model_without_a_name_is_read_from_its_folder(plan: Plan, cli: Cli, tmp_path: Path) -> None:
    tiny = REPOSITORY / "paged" / "assets" / "tiny"
    shutil.copy(tiny / "config.json", tmp_path)
    embedded, local = plan("model=tiny", "tp=1"), plan("model=local", f"model.path={tmp_path}", "tp=1")
    assert embedded["num_parameters"] == local["num_parameters"] == 3_312_384
    code, _, err = cli("model=local", "model.path=nowhere/here", "tp=1")
    assert code == 2
    assert err.startswith("paged: model.path nowhere/here is neither a folder nor in the local Hub cache")


def test_a_folder_that_is_another_model_than_named_is_refused(cli: Cli, tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "paged" / "assets" / "tiny" / "config.json", tmp_path)
    code, _, err = cli("model=qwen3_8b", f"model.path={tmp_path}")
    assert code == 2
    assert len(err.splitlines()) == 1


def test_a_sweep_is_a_table_in_which_what_cannot_be_says_why(cli: Cli) -> None:
    code, out, err = cli("-m", "tp=1,2,3", "kv_dtype=null,fp8")
    assert code == 0, "what cannot be is an answer"
    header, *lines, _, folder = out.splitlines()
    assert header.split() == [
        *("job", "tp", "kv_dtype", "kv_tokens", "max_concurrency.16384", "max_concurrency.40960"),
        *("largest.batch", "largest.context", "largest.step_ms", "largest.tokens_per_s", "note"),
    ]
    assert [line.split()[0] for line in lines] == ["3", "2", "1", "0", "4", "5"]
    assert [line.split()[3] for line in lines[:4]] == ["317,056", "163,472", "50,800", "26,192"]
    assert lines[3].endswith("a sequence of max_seq_len 40,960 tokens does not fit: the pool holds 26,192")
    reason = "tp must divide num_attention_heads 32, and divide or be a multiple of num_key_value_heads 8, not 3"
    assert lines[4].endswith(reason)
    assert "paged: job" not in err
    assert json.loads((Path(folder) / "4" / "summary.json").read_text()) == {"feasible": False, "reason": reason}
    assert {"sweep.csv", "sweep.json", "sweep.png"} <= {path.name for path in Path(folder).iterdir()}


def test_a_sweep_shows_the_largest_batch_that_fits(cli: Cli) -> None:
    _, out, _ = cli("-m", "tp=1,4", "batches=[1,3,16,64]", "contexts=[100,8192]")
    rows = list(csv.DictReader((Path(out.splitlines()[-1]) / "sweep.csv").open(newline="")))
    assert [(row["tp"], row["largest.batch"], row["largest.context"]) for row in rows] == [
        ("4", "64", "100"),
        ("1", "64", "100"),
    ]
    _, out, _ = cli("-m", "tp=1,4", "batches=[1,3,16]", "contexts=[8192]")
    rows = list(csv.DictReader((Path(out.splitlines()[-1]) / "sweep.csv").open(newline="")))
    assert [(row["largest.batch"], row["largest.context"]) for row in rows] == [("16", "8192"), ("3", "8192")]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("tp=3", "tp must divide num_attention_heads 32, and divide or be a multiple of num_key_value_heads 8, not 3"),
        ("tp=0", "tp must be a whole number, at least 1, not 0"),
        ("tp=x", "tp must be a whole number, not 'x'"),
        ("tpp=4", "tpp is not a key of this config; did you mean tp?"),
        ("sampling.n=4", "plan takes no sampling.*"),
        ("policy=fifo", "plan takes no policy"),
        ("tensor_parallel_size=4", "tensor_parallel_size is not a key of this config; did you mean tp?"),
        ("hardware=b200", "hardware must be one of a100_80g, a10g, cpu, h100, h200, l4, not 'b200'"),
        ("hardware.memory_gib.value=x", "hardware.memory_gib.value must be a number, not 'x'"),
        ("hardware.memory_gib.value=0", "hardware.memory_gib.value must be above 0, not 0.0"),
        ("hardware.memory_gib.value=inf", "hardware.memory_gib.value must be above 0, not inf"),
        ("hardware.host_step_us.value=-1", "hardware.host_step_us.value must be at least 0, not -1.0"),
        (
            "hardware.memory_gib=40",
            "hardware.memory_gib must hold keys and values, not 40; write hardware.memory_gib.value=40",
        ),
        ("hardware.memory_gib=${seed}", "hardware.memory_gib: Interpolation key 'seed' not found"),
        ("hardware.memory_gib=???", "hardware.memory_gib must hold keys and values, not '???'"),
        ("hardware.memory_gb.value=40", "hardware.memory_gb.value is not a key of this config; did you mean"),
        ("~hardware.flops_per_s.source", "hardware.flops_per_s.source must be given: a text"),
        (
            "hardware=h200 +hardware.all_reduce_us.value={4:{9:1}}",
            "hardware.all_reduce_us.value.4 must be at least two times above 0 that grow with the bytes",
        ),
        (
            "hardware=h200 +hardware.gather_us={value:{2:{9:2,10:1}},source:x,assumed:false}",
            "hardware.gather_us.value.2 must be at least two times above 0 that grow with the bytes",
        ),
        ("memory.weight_gib=3", "memory.weight_gib is not a key of this config; did you mean memory.weights_gib?"),
        ("memory.weights_gib=-3", "memory.weights_gib must be a number, at least 0, not -3.0"),
        ("gpu_memory_utilization=1.5", "gpu_memory_utilization must be above 0 and at most 1, not 1.5"),
        ("kv_dtype=int4", "kv_dtype must be one of float64, float32, bfloat16, float16, fp8, float8_e4m3fn, not"),
        ("dtype=fp8", "dtype must be one of float64, float32, bfloat16, float16, not 'fp8'"),
        ("max_seq_len=50000", "max_seq_len 50000 exceeds the model's max_position_embeddings 40960; set allow_long"),
        ("max_seq_len=0", "max_seq_len must be a whole number, at least 1, not 0"),
        ("caps=[0]", "caps must hold whole numbers, at least 1, not 0"),
        ("batches=null", "batches must be a whole number or a list of them, not null"),
        ("link_latencies_us=[-1]", "link_latencies_us must hold numbers, at least 0, not -1.0"),
        ("model=local", "model.path must be given: a checkpoint folder, or a Hub id"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(cli: Cli, overrides: str, sentence: str) -> None:
    code, out, err = cli(*overrides.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"paged: {sentence}")
    assert len(err.splitlines()) == 1


def test_a_mistake_in_a_sweep_is_told_at_once_and_in_its_row(cli: Cli) -> None:
    code, out, err = cli("-m", "block_size=0,16")
    assert code == 2
    assert "paged: job 0: block_size must be a whole number, at least 1, not 0" in err
    assert out.splitlines()[2].endswith("-  block_size must be a whole number, at least 1, not 0")


def test_planning_loads_no_torch() -> None:
    code = (
        "import sys; from paged.app import main; import paged.planner\n"
        "code = main(['plan', 'model=tiny', 'tp=1', 'hydra.run.dir=.', 'hydra.output_subdir=null', '--cfg', 'job'])\n"
        "sys.exit(code or not sys.modules.keys().isdisjoint({'torch', 'triton', 'transformers', 'matplotlib'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True).returncode == 0
