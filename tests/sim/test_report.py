"""Checks the numbers of a simulated run against ones worked out by hand."""

from __future__ import annotations

import math

import pytest

from paged.sim.record import SimRecord
from paged.sim.report import SCALARS, combine, flat, refusals, seconds, seed_rows, summarize, summary_table


def test_counts_and_times(record: SimRecord) -> None:
    summary = summarize(record)
    assert summary["makespan_s"] == summary["elapsed_s"] == 9.5
    assert summary["tokens_per_s_end_to_end"] == 8 / 9.5
    assert (summary["num_samples"], summary["prompt_tokens"], summary["output_tokens"]) == (4, 16, 8)
    assert (summary["len_p50"], summary["len_p90"], summary["len_max"]) == (2, 3, 3)
    assert summary["finish_reasons"] == {"length": 2, "refused": 1, "stop": 2}
    assert summary["kv_tokens"] == 40
    assert (summary["num_steps"], summary["preemptions"], summary["peak_running"]) == (6, 1, 2)
    assert (summary["forward_tokens"], summary["minimal_forward_tokens"]) == (24, 20)
    assert summary["recomputed_share"] == 4 / 24
    assert summary["steps_per_wall_s"] == 12
    assert summary["interrupted"] is False


def test_latencies_leave_out_samples_without_one(record: SimRecord) -> None:
    summary = summarize(record)
    assert summary["ttft_s"] == {"mean": 4.5 / 4, "p50": 1.0, "p90": 1.5, "p99": 1.5}
    assert summary["tpot_s"] == {"mean": 5 / 3, "p50": 1.5, "p90": 2.5, "p99": 2.5}
    assert summary["e2e_s"] == {"mean": 11 / 4, "p50": 2.0, "p90": 4.0, "p99": 4.0}
    assert summary["queue_s"] == {"mean": 0.125, "p50": 0.0, "p90": 0.5, "p99": 0.5}


def test_averages_are_weighted_with_time_and_idle_time_counts_as_empty(record: SimRecord) -> None:
    summary = summarize(record)
    assert summary["kv_utilization"] == pytest.approx(15 / 95)
    waste = (3 / 8 + 2 / 12 + 2 * 1 / 8 + 1 / 8 + 0 + 1.5 * 3 / 8) / 7.5
    assert summary["block_waste"] == pytest.approx(waste)
    assert summary["mean_running"] == pytest.approx(1.0)
    assert summary["mean_waiting"] == pytest.approx(1 / 9.5)


def test_littles_law_on_the_hand_made_run(record: SimRecord) -> None:
    """L = lambda W, but for the half second that B arrives before the step that first sees it."""
    summary = summarize(record)
    in_system = summary["mean_running"] + summary["mean_waiting"]
    rate = summary["num_samples"] / summary["makespan_s"]
    assert in_system * 9.5 == pytest.approx(rate * summary["e2e_s"]["mean"] * 9.5 - 0.5)


def tail(*states: tuple[float, int, int]) -> SimRecord:
    """A run whose steps, given as (duration, running, waiting), follow each other."""
    made = SimRecord(num_blocks=4, block_size=4)
    made.add_request(("a", 0), 0.0, prompt_tokens=1, max_tokens=1)
    now_s = 0.0
    for duration_s, running, waiting in states:
        made.append_step(now_s, now_s + duration_s, running, running, running, waiting, 1, 0, 0)
        now_s += duration_s
    return made


@pytest.mark.parametrize(
    ("states", "tail_s"),
    [
        ([(1.0, 8, 3), (1.0, 8, 0), (1.0, 4, 0), (1.0, 3, 0), (2.0, 1, 0)], 3.0),  # half of the peak is no tail yet
        ([(1.0, 8, 0), (1.0, 1, 1), (2.0, 1, 0)], 2.0),  # nor is waiting, however few run
        ([(1.0, 8, 0), (1.0, 1, 0), (2.0, 5, 0), (0.5, 3, 0)], 0.5),  # a lull in the middle does not count
        ([(1.0, 8, 0), (1.0, 8, 0)], 0.0),
        ([(1.0, 1, 0)], 0.0),
        ([], 0.0),
    ],
)
def test_tail(states: list[tuple[float, int, int]], tail_s: float) -> None:
    assert summarize(tail(*states))["tail_s"] == tail_s


def test_unfinished_and_aborted_requests_have_no_latency_but_tokens() -> None:
    made = tail((2.0, 1, 0))
    made.requests[0].output_tokens = 7
    aborted = made.add_request(("b", 0), 0.0, prompt_tokens=3, max_tokens=9)
    made.sample(aborted, 1.0)
    made.finish(aborted, 2.0, "abort", output_tokens=1, cached_tokens=0)
    made.interrupted = True
    summary = summarize(made)
    assert summary["finish_reasons"] == {"abort": 1, "unfinished": 1}
    assert (summary["num_samples"], summary["output_tokens"], summary["unfinished_tokens"]) == (0, 0, 8)
    assert summary["tokens_per_s_end_to_end"] == 4.0
    assert summary["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert summary["len_p50"] is None
    table = summary_table(summary)
    assert "interrupted  yes" in table
    assert "TTFT" not in table


def test_a_run_in_which_everything_was_refused_has_a_table_too() -> None:
    made = SimRecord(num_blocks=4, block_size=4)
    made.refuse(made.add_request(("a", 0), 1.0, prompt_tokens=99, max_tokens=1), "it can never fit")
    summary = summarize(made)
    assert summary["makespan_s"] is None
    assert summary["tokens_per_s_end_to_end"] is None
    assert [request.reason for request in refusals(made)] == ["it can never fit"]
    assert "1 refused" in summary_table(summary)


def test_every_number_has_a_name_to_optimise(record: SimRecord) -> None:
    named = [name for name, _ in flat(summarize(record)) if not name.startswith("finish_reasons.")]
    assert sorted(named) == sorted(SCALARS)


def test_seeds_give_means_and_intervals(record: SimRecord) -> None:
    """Student's t at 2 degrees of freedom is 4.302653 for 95%: 4.302653 x 2 / sqrt(3) about 12."""
    summaries = [summarize(record) for _ in range(3)]
    for summary, makespan_s in zip(summaries, (10.0, 12.0, 14.0), strict=True):
        summary["makespan_s"] = makespan_s
    summaries[1]["finish_reasons"] = {"stop": 5}
    summaries[2]["ttft_s"] = {"mean": None, "p50": 1.0, "p90": 1.5, "p99": 1.5}
    combined = combine(summaries)
    assert combined["makespan_s"] == 12.0
    assert combined["ci95"]["makespan_s"] == pytest.approx(4.302653 * 2 / math.sqrt(3), rel=1e-6)
    assert combined["ci95"]["e2e_s"] == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
    assert combined["finish_reasons"] == {"length": 4 / 3, "refused": 2 / 3, "stop": 3.0}
    assert combined["ttft_s"]["mean"] is combined["ci95"]["ttft_s"]["mean"] is None
    assert "12.00 ± 4.97 s" in summary_table(combined)
    assert summaries[1]["finish_reasons"] == {"stop": 5}, "what was given is left alone"


def test_one_seed_has_no_interval(record: SimRecord) -> None:
    assert "ci95" not in combine([summarize(record)])


def test_a_line_a_seed(record: SimRecord) -> None:
    header, first, second = seed_rows([3, 4], [summarize(record), summarize(record)])
    assert header[:2] == ["seed", "makespan_s"]
    assert (first[:2], second[:2]) == ([3, 9.5], [4, 9.5])
    assert len(header) == len(first)


def test_table(record: SimRecord) -> None:
    table = summary_table(summarize(record))
    assert table.splitlines() == [
        "samples      4 finished (length 2, stop 2), 1 refused, 8 tokens",
        "length       p50 2, p90 3, max 3 tokens",
        "makespan     9.50 s, 0.8421 tokens/s",
        "                   mean       p50       p90       p99",
        "queueing       125.0 ms       0 s  500.0 ms  500.0 ms",
        "TTFT             1.12 s    1.00 s    1.50 s    1.50 s",
        "TPOT             1.67 s    1.50 s    2.50 s    2.50 s",
        "end to end       2.75 s    2.00 s    4.00 s    4.00 s",
        "preemptions  1, 4 tokens recomputed, 16.7% of all computed",
        "KV cache     40 tokens, 15.8% used on average, 19.72% of that unfilled",
        "tail         0 s (0.0% of the makespan) with nothing waiting and fewer than half of 2 running",
        "simulated    6 steps in 500.0 ms (12 steps/s, 19x real time)",
    ]


def test_long_times_are_told_in_hours_too(record: SimRecord) -> None:
    summary = {**summarize(record), "makespan_s": 20_850.0, "tail_s": 7199.0}
    assert "makespan     20,850 s (5.8 h), " in summary_table(summary)
    assert "7,199 s (" in summary_table(summary)


def test_a_run_in_which_nothing_waits_has_no_tail(record: SimRecord) -> None:
    assert "tail" not in summary_table({**summarize(record), "mean_waiting": 0.0})


def test_latencies_have_intervals_over_seeds(record: SimRecord) -> None:
    summaries = [summarize(record), summarize(record)]
    summaries[1]["ttft_s"] = {**summaries[0]["ttft_s"], "mean": 2.125}
    [row] = [line for line in summary_table(combine(summaries)).splitlines() if line.startswith("TTFT")]
    assert "1.62 ± 6.35 s" in row


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (4e-6, "4.00 us"), (0.0123, "12.30 ms"), (1.5, "1.50 s"), (123.45, "123.5 s"), (98765.4, "98,765 s")],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text
