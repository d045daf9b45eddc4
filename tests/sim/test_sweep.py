"""Checks the end of a sweep: what it reads, how it sorts, and that points without a result say why."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paged.sim import sweep
from paged.sim.sweep import Comparison, Goal, read_point, varying_keys

SMALLEST = Goal("makespan_s", largest=False)
INFEASIBLE = {"feasible": False, "reason": "the weights do not fit"}


def job(folder: Path, number: int, overrides: Sequence[str], summary: dict[str, Any] | None) -> Path:
    made = folder / str(number)
    (made / ".hydra").mkdir(parents=True)
    (made / ".hydra" / "overrides.yaml").write_text("".join(f"- {text}\n" for text in overrides) or "[]\n")
    if summary is not None:
        (made / "summary.json").write_text(json.dumps(summary))
    return made


def compare(folder: Path, jobs: Sequence[Path], goal: Goal, figures: Sequence[str]) -> str:
    """The table of a sweep, whose files are written as well."""
    comparison = Comparison.of(jobs, goal, figures)
    comparison.write(folder)
    return comparison.table()


@pytest.fixture
def jobs(tmp_path: Path) -> list[Path]:
    """Three that went well, one that cannot be, one that left nothing."""
    return [
        job(tmp_path, 0, ["policy=fifo", "tp=4", "seeds=2"], {"makespan_s": 12.5, "ci95": {"makespan_s": 0.25}}),
        job(tmp_path, 1, ["policy=fifo", "tp=1", "seeds=2"], INFEASIBLE),
        job(tmp_path, 2, ["policy=reserve", "tp=4", "seeds=2"], {"makespan_s": 11.0, "ttft_s": {"p50": None}}),
        job(tmp_path, 3, ["policy=reserve", "tp=1", "seeds=2"], None),
        job(
            tmp_path,
            4,
            ["policy=fifo", "tp=2", "seeds=2"],
            {"makespan_s": 14000.4, "preemptions": 1000, "reason": None},
        ),
    ]


def test_table_is_sorted_and_has_only_what_was_swept(jobs: list[Path], tmp_path: Path) -> None:
    table = compare(tmp_path, jobs, SMALLEST, ["preemptions", "makespan_s", "tokens_per_s_end_to_end"])
    assert table.splitlines() == [
        "job  policy   tp   makespan_s  preemptions  note",
        "2    reserve  4            11            -",
        "0    fifo     4   12.5 ± 0.25            -",
        "4    fifo     2        14,000        1,000",
        "1    fifo     1             -            -  the weights do not fit",
        "3    reserve  1             -            -  it ended without a summary",
        "best first: the smallest makespan_s; job is the folder; ± is half of a 95% interval of the mean over seeds",
    ]


def test_the_largest_can_be_best(jobs: list[Path], tmp_path: Path) -> None:
    table = compare(tmp_path, jobs, Goal("makespan_s", largest=True), [])
    assert [line.split()[1:3] for line in table.splitlines()[1:-1]] == [
        ["fifo", "2"],
        ["fifo", "4"],
        ["reserve", "4"],
        ["fifo", "1"],
        ["reserve", "1"],
    ]


def test_a_point_that_did_less_is_not_the_best(jobs: list[Path], tmp_path: Path) -> None:
    short = {"makespan_s": 1.0, "reason": "5 of 9 requests were refused"}
    jobs = [
        *jobs,
        job(tmp_path, 5, ["tp=5"], short),
        job(tmp_path, 6, ["tp=6"], {"makespan_s": 2, "interrupted": True}),
    ]
    compare(tmp_path, jobs, SMALLEST, [])
    order = [point["folder"] for point in json.loads((tmp_path / "sweep.json").read_text())["points"]]
    assert order == ["2", "0", "4", "5", "6", "1", "3"]


def test_sweep_csv_has_all_there_is(jobs: list[Path], tmp_path: Path) -> None:
    compare(tmp_path, jobs, SMALLEST, [])
    with (tmp_path / "sweep.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert len(set(reader.fieldnames or ())) == len(reader.fieldnames or ()) == 9
    assert [row["folder"] for row in rows] == ["2", "0", "4", "1", "3"]
    assert rows[1]["seeds"] == "2"
    assert (rows[1]["makespan_s"], rows[1]["ci95.makespan_s"], rows[0]["ttft_s.p50"]) == ("12.5", "0.25", "")
    assert rows[3]["reason"] == "the weights do not fit"


def test_sweep_json(jobs: list[Path], tmp_path: Path) -> None:
    compare(tmp_path, jobs, Goal("makespan_s", largest=True), [])
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert content["optimize"] == "-makespan_s"
    best = content["points"][0]
    assert best["overrides"] == {"policy": "fifo", "tp": "2", "seeds": "2"}
    assert (best["numbers"]["makespan_s"], best["reason"]) == (14000.4, None)


def test_a_picture_if_there_is_something_to_show(jobs: list[Path], tmp_path: Path) -> None:
    compare(tmp_path, [jobs[1], jobs[3]], SMALLEST, ["preemptions"])
    assert not (tmp_path / "sweep.png").exists()
    compare(tmp_path, jobs, SMALLEST, ["preemptions"])
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, jobs: Sequence[Path]) -> Any:
    figures = []
    monkeypatch.setattr("paged.sim.plots.save", lambda figure, path: figures.append(figure))
    compare(tmp_path, jobs, SMALLEST, ["recomputed_share"])
    return figures[0]


def test_a_number_that_was_swept_is_the_axis_of_a_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []
    for number, (victim, fraction) in enumerate((v, f) for v in ("youngest", "oldest") for f in (0.2, 0.0, 0.1)):
        summary = {"makespan_s": 10 - fraction, "recomputed_share": fraction}
        jobs.append(job(tmp_path, number, [f"policy.victim={victim}", f"+policy.fraction={fraction}"], summary))
    upper, lower = drawn(monkeypatch, tmp_path, jobs).axes
    assert lower.get_xlabel() == "policy.fraction"
    assert upper.get_ylabel() == "makespan, s"
    assert lower.get_ylabel() == "recomputed tokens, %"
    assert [text.get_text() for text in upper.get_legend().get_texts()] == [
        "policy.victim=oldest",
        "policy.victim=youngest",
    ]
    assert lower.containers[0][0].get_xdata().tolist() == [0.0, 0.1, 0.2]
    assert lower.containers[0][0].get_ydata().tolist() == [0.0, 10.0, 20.0]


def test_curves_begin_at_0_and_all_of_them_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference of a percent is not to look like a cliff, and the second curve is much higher than the first."""
    summaries = [{"makespan_s": 100 - fraction, "recomputed_share": 0.1} for fraction in (0, 0.5, 1)]
    jobs = [job(tmp_path, number, [f"a={number}", "b=1"], summary) for number, summary in enumerate(summaries)]
    jobs += [job(tmp_path, 3 + number, [f"a={number}", "b=2"], {"makespan_s": 900}) for number in range(3)]
    low, high = drawn(monkeypatch, tmp_path, jobs).axes[0].get_ylim()
    assert -0.1 * high < low <= 0
    assert high > 900


def test_a_picture_names_what_all_points_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [
        job(
            tmp_path,
            number,
            [f"tp={number}"],
            {"makespan_s": 1, "title": f"m on {number} x a10g: policy fifo, roofline"},
        )
        for number in (1, 2)
    ]
    assert [text.get_text() for text in drawn(monkeypatch, tmp_path, jobs).texts] == ["m, policy fifo, roofline"]


def test_otherwise_a_bar_a_point_the_best_on_top(
    jobs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = drawn(monkeypatch, tmp_path, jobs).axes[0]
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == ["policy=reserve, tp=4", "policy=fifo, tp=4", "policy=fifo, tp=2"]
    low, high = axes.get_ylim()
    assert low > high, "the first is on top"
    assert "2 without a result" in axes.get_title(loc="left")


def test_a_sweep_of_very_many_points_shows_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(tmp_path, number, [f"name=n{number}"], {"makespan_s": number + 1}) for number in range(50)]
    axes = drawn(monkeypatch, tmp_path, jobs).axes[0]
    assert len(axes.patches) == sweep._MOST_BARS
    assert "the best 40 are shown" in axes.get_title(loc="left")


def test_overrides_are_told_apart_whatever_their_form(tmp_path: Path) -> None:
    point = read_point(job(tmp_path, 0, ["+policy.fraction=0.1", "++a=b=c", "~d"], {"interrupted": True}))
    assert point.overrides == {"policy.fraction": "0.1", "a": "b=c", "d": ""}
    assert point.reason == "it was interrupted"


def test_one_job_shows_all_its_overrides(jobs: list[Path]) -> None:
    assert varying_keys([read_point(jobs[0])]) == ["policy", "tp", "seeds"]
    assert varying_keys([read_point(jobs[0]), read_point(jobs[2])]) == ["policy"]


def test_a_sweep_without_overrides_has_a_table(tmp_path: Path) -> None:
    table = compare(tmp_path, [job(tmp_path, 0, [], {"makespan_s": 2})], SMALLEST, [])
    assert table.splitlines()[:2] == ["job  makespan_s", "0             2"]


def test_a_point_that_computed_nothing_shows_no_zeros(tmp_path: Path) -> None:
    refused = {"makespan_s": None, "preemptions": 0, "reason": "9 of 9 requests were refused"}
    table = compare(tmp_path, [job(tmp_path, 0, ["tp=1"], refused)], SMALLEST, ["preemptions"])
    assert table.splitlines()[1] == "0    1            -            -  9 of 9 requests were refused"


def test_goals() -> None:
    names = ["makespan_s", "kv_tokens", "ttft_s.mean", "ttft_s.p50"]
    assert Goal.parse("makespan_s", names) == Goal("makespan_s", largest=False)
    assert Goal.parse("-kv_tokens", names) == Goal("kv_tokens", largest=True)
    allowed = r"makespan_s, kv_tokens, ttft_s\.mean\|p50"
    with pytest.raises(ValueError, match=rf"optimize must be one of {allowed}, with - .* not 'speed'"):
        Goal.parse("speed", names)
    for text, meant in (
        ("throughput", "-tokens_per_s_end_to_end"),
        ("ttft", "ttft_s.mean"),
        ("makespan", "makespan_s"),
    ):
        with pytest.raises(ValueError, match=f"not '{text}'; did you mean {meant}"):
            Goal.parse(text, names)
