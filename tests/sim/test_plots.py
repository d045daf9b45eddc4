"""Checks what the pictures show, and that long runs are thinned without losing their extremes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paged.sim import plots
from paged.sim.plots import Band, band, time_unit, write_plots
from paged.sim.record import SimRecord
from paged.sim.report import summarize

PNG = b"\x89PNG\r\n"


def texts(axes: object) -> str:
    return " ".join(text.get_text() for text in axes.texts) + axes.get_title(loc="left")  # type: ignore[attr-defined]


def test_a_short_run_is_shown_step_by_step(record: SimRecord) -> None:
    seen = band(record.steps.start_s, record.until_s(), record.steps.num_running, record.end_s)
    assert seen.edges.tolist() == [0, 1, 2, 4, 6, 7, 8, 9.5]
    assert seen.mean.tolist() == [1, 2, 1, 0, 2, 1, 1], "nothing runs from 4 to 6 s"
    assert np.array_equal(seen.low, seen.high)


def test_bins_keep_extremes_and_the_weighted_mean() -> None:
    """Ten seconds at 1 with one spike to 9 for a tenth of a second, in bins of a second."""
    start_s = np.arange(0, 10, 0.1)
    values = np.ones(100, np.int64)
    values[55] = 9
    seen = band(start_s, np.append(start_s[1:], 10.0), values, 10.0, most_bins=10)
    assert seen.edges == pytest.approx(np.arange(11))
    assert seen.high.tolist() == [1, 1, 1, 1, 1, 9, 1, 1, 1, 1]
    assert seen.low.tolist() == [1] * 10
    assert seen.mean == pytest.approx([1, 1, 1, 1, 1, 1.8, 1, 1, 1, 1])


def test_a_step_longer_than_a_bin_fills_all_it_covers() -> None:
    start_s, until_s = np.array([0.0, 0.5, 6.0, 6.1]), np.array([0.5, 6.0, 6.1, 8.0])
    seen = band(start_s, until_s, np.array([1, 2, 3, 4]), 8.0, most_bins=3)
    assert seen.low.tolist() == [1, 2, 2]
    assert seen.high.tolist() == [2, 2, 4]


def test_bins_of_any_step_function_are_those_of_a_fine_grid() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        start_s = np.cumsum(random.uniform(0.01, 1, 300))
        until_s = start_s + np.append(np.diff(start_s), 0.5) * random.choice([0.3, 1.0], 300, p=[0.1, 0.9])
        end_s = float(until_s[-1])
        values = random.integers(1, 50, 300)
        seen = band(start_s, until_s, values, end_s, most_bins=40)
        assert len(seen.mean) == 40
        area = float(((until_s - start_s) * values).sum())
        assert float((seen.mean * np.diff(seen.edges)).sum()) == pytest.approx(area)
        grid = np.linspace(start_s[0], end_s, 20_000, endpoint=False)
        step = np.searchsorted(start_s, grid, side="right") - 1
        fine = np.where(grid < until_s[step], values[step], 0)
        bins = np.minimum(np.searchsorted(seen.edges, grid, side="right") - 1, 39)
        for index in range(40):
            inside = fine[bins == index]
            assert seen.low[index] <= inside.min()
            assert seen.high[index] >= inside.max()


def test_pictures_of_a_run(record: SimRecord, tmp_path: Path) -> None:
    write_plots(record, summarize(record), tmp_path)
    for name in ("kv.png", "queue.png", "latency.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)
    assert len(list(tmp_path.iterdir())) == 3


def test_equal_runs_give_equal_files(record: SimRecord, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_plots(record, summarize(record), tmp_path / name)
    assert (tmp_path / "first" / "kv.png").read_bytes() == (tmp_path / "second" / "kv.png").read_bytes()


def test_a_run_without_a_step_has_no_pictures(tmp_path: Path) -> None:
    empty = SimRecord(num_blocks=4, block_size=4)
    write_plots(empty, summarize(empty), tmp_path)
    assert not list(tmp_path.iterdir())


def test_axes_say_what_they_measure_and_in_which_unit(record: SimRecord) -> None:
    summary = summarize(record)
    kv, queue, latency = (draw(record, summary) for draw in (plots._draw_kv, plots._draw_queue, plots._draw_latency))
    assert [axes.get_ylabel() for axes in kv.axes] == ["KV blocks in use, %", "empty places in\nused blocks, %"]
    assert [axes.get_ylabel() for axes in queue.axes] == ["running sequences", "waiting sequences"]
    for figure in (kv, queue):
        assert figure.axes[-1].get_xlabel() == "time since the first arrival, s"
    assert [axes.get_xlabel() for axes in latency.axes] == ["time, s"] * 3
    assert latency.axes[0].get_ylabel() == "requests at or below, %"
    assert "1 preemption" in texts(kv.axes[0])
    assert kv.axes[0].get_ylim() == (0, 100)


def test_every_picture_says_what_was_simulated(
    record: SimRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    write_plots(record, summarize(record), tmp_path, "m on 4 x a10g: policy fifo")
    assert [figure.texts[0].get_text() for figure in figures] == ["m on 4 x a10g: policy fifo"] * 3


def test_a_band_is_explained_where_there_is_one(record: SimRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plots._draw_kv(record, summarize(record)).legends
    monkeypatch.setattr(plots, "band", lambda *args: band(*args, most_bins=2))
    [legend] = plots._draw_queue(record, summarize(record)).legends
    assert [text.get_text() for text in legend.get_texts()] == ["average over 4.75 s", "lowest to highest in that time"]


def test_preemptions_are_marked_when_they_happen(record: SimRecord) -> None:
    marks = plots._draw_kv(record, summarize(record)).axes[0].collections[-1]
    assert [segment[0][0] for segment in marks.get_segments()] == [7.0]


def test_distributions_reach_their_percentiles(record: SimRecord) -> None:
    latency = plots._draw_latency(record, summarize(record))
    labels = [text.get_text() for text in latency.axes[2].get_legend().get_texts()]
    assert labels == ["p50 2.00 s", "p90 4.00 s", "p99 4.00 s"]
    curve = latency.axes[2].lines[0]
    assert curve.get_xdata().tolist() == [1.5, 1.5, 2.0, 3.5, 4.0]
    assert curve.get_ydata().tolist() == [0, 25, 50, 75, 100]


def test_no_complete_request_is_said(record: SimRecord) -> None:
    for request in record.requests:
        request.finish_reason = "abort"
    latency = plots._draw_latency(record, summarize(record))
    assert "no complete request" in texts(latency.axes[0])


@pytest.mark.parametrize(
    ("span_s", "unit"), [(5e-7, "ms"), (0.5, "ms"), (1.9, "ms"), (119.0, "s"), (120.0, "min"), (7200.0, "h")]
)
def test_time_units(span_s: float, unit: str) -> None:
    assert time_unit(span_s)[1] == unit


def test_matplotlib_is_loaded_only_to_draw_and_without_pyplot(tmp_path: Path) -> None:
    code = (
        "import sys, paged.sim.plots as plots\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plots.save(plots.new_figure(1, 1), plots.Path(sys.argv[1]) / 'x.png')\n"
        "assert 'matplotlib.figure' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, check=True)


def test_a_band_is_what_its_name_says(record: SimRecord) -> None:
    seen = band(record.steps.start_s, record.until_s(), record.steps.used_blocks, record.end_s, most_bins=3)
    assert isinstance(seen, Band)
    assert np.all((seen.low <= seen.mean) & (seen.mean <= seen.high))
