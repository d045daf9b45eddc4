"""A calibration finds the costs that a run was made of, says how wrong it is, and where it knows nothing."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.sim.calibration import (
    FEATURES,
    Calibrated,
    Calibration,
    ErrorSummary,
    Memory,
    Provenance,
    step_class,
)
from paged.sim.fitting import UsedSteps, fit_calibration, robust_fit, supported
from paged.sim.measured import MeasuredStep, StepTimes
from paged.sim.shape import StepShape
from paged.sim.step_log import StepLogReader
from sim_tools import Load, write_run

# Seconds a unit, so large that the log's microseconds do not matter.
COSTS = {
    "step": 4.0,
    "tokens": 0.02,
    "decode_kv": 3e-4,
    "attention_pairs": 2e-5,
    "prefill_kv": 5e-4,
    "tokens_over_256": 0.03,
    "sequences": 0.05,
    "samples": 0.01,
    "max_kv": 2e-3,
}
MEMORY = Memory(num_blocks=4096, block_size=16, kv_tokens=65536)
LARGE = Load(num_requests=300, max_num_seqs=64, prompt=(1, 500), max_step_tokens=1200, chunk_size=256)
DECODE = StepShape.decode(8, 100)
# One chunk of 64 tokens behind 32.
CHUNK = StepShape(64, 1, 1, 96, 96, 64, 1, 32, 64 * 32 + 64 * 65 // 2)

Cost = Callable[[StepShape], float]


def cost_of(costs: Mapping[str, float]) -> Cost:
    return lambda shape: sum(cost * FEATURES[name](shape) for name, cost in costs.items())


def measure(path: Path) -> list[MeasuredStep]:
    times = StepTimes()
    return [step for event in StepLogReader(path) if (step := times.see(event)) is not None]


def fit(runs: Mapping[str, list[MeasuredStep]]) -> Calibration:
    provenance = Provenance(sources=list(runs), depths=[1], versions={})
    return fit_calibration(UsedSteps.of(runs), name="test", memory=MEMORY, provenance=provenance)


def fit_run(
    folder: Path, step_s: Cost, host_s: Cost = lambda shape: 0.0, load: Load | None = LARGE, seed: int = 0
) -> Calibration:
    path = folder / f"steps-{seed}.jsonl"
    path.unlink(missing_ok=True)
    write_run(path, step_s, host_s, load=load, seed=seed)
    return fit({"run": measure(path)})


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    """Fitted to times without noise."""
    host = cost_of({"step": 0.3, "sequences": 0.02})
    return fit_run(tmp_path_factory.mktemp("known"), cost_of(COSTS), host)


# Fitting


def test_known_costs_are_found_again(known: Calibration) -> None:
    assert set(known.coefficients) >= set(COSTS)
    for name, cost in known.coefficients.items():
        assert cost == pytest.approx(COSTS.get(name, 0.0), rel=1e-3, abs=1e-6), name
    assert known.host is not None
    assert known.host.step_s == pytest.approx(0.3, rel=1e-3)
    assert known.host.seq_s == pytest.approx(0.02, rel=1e-3)
    assert known.host.error.mape < 1e-3
    assert set(known.held_out) == {"all", "decode", "mixed"} | ({"prefill"} & set(known.held_out))
    assert known.held_out["all"].mape < 1e-5
    assert known.held_out["all"].num_steps == pytest.approx(known.num_steps / 5, abs=1)
    assert sum(error.num_steps for kind, error in known.held_out.items() if kind != "all") == (
        known.held_out["all"].num_steps
    )
    # The first step took no longer than any other of its size.
    assert (known.num_trimmed, known.num_first, known.other_runs) == (0, 0, {})


def test_the_error_told_is_the_noise_that_was_planted(tmp_path: Path) -> None:
    """A normal error of 10% is off by 8% on average (sqrt(2 / pi) of it), whatever model there is."""
    rng = random.Random(3)
    load = replace(LARGE, num_requests=1000)
    noisy = fit_run(tmp_path, lambda shape: cost_of(COSTS)(shape) * rng.gauss(1, 0.1), load=load)
    error = noisy.held_out["all"]
    planted = 0.1 * math.sqrt(2 / math.pi)
    assert error.num_steps > 100
    assert error.mape == pytest.approx(planted, rel=0.25)
    assert noisy.noise == pytest.approx(planted, rel=0.25)
    assert abs(error.total) < 0.02
    clean = ErrorSummary.of(
        [Calibrated(noisy).step_s(step.shape) for step in measure(tmp_path / "steps-0.jsonl")],
        [cost_of(COSTS)(step.shape) for step in measure(tmp_path / "steps-0.jsonl")],
    )
    assert clean.mape < 0.02


def test_sums_are_not_biased_by_large_noise() -> None:
    """Weighing by the measured time itself makes short times count most: at 30% noise sums came out a tenth small."""
    rng = np.random.default_rng(0)
    truth = rng.uniform(1, 50, 4000)
    columns = {"step": np.ones(4000), "tokens": truth}
    measured = truth * rng.lognormal(-0.045, 0.3, 4000)
    found = robust_fit(columns, measured, np.full(4000, "decode")).predict(columns)
    assert found.sum() / truth.sum() == pytest.approx(1, abs=0.02)


def test_outliers_are_left_out_and_counted(tmp_path: Path) -> None:
    """The first step warms up; later ones meet other programs now and then."""
    rng = random.Random(5)
    planted = []

    def with_outliers(shape: StepShape) -> float:
        number = len(planted)
        planted.append(number > 0 and rng.random() < 0.03)
        return cost_of(COSTS)(shape) * (50 if number == 0 else 6 if planted[-1] else rng.gauss(1, 0.005))

    found = fit_run(tmp_path, with_outliers, load=replace(LARGE, num_requests=1000))
    in_fit = sum(outlier for number, outlier in enumerate(planted[1:]) if number % 5 != 4)
    assert in_fit > 5
    assert found.num_first == 1
    assert in_fit <= found.num_trimmed <= in_fit + 3
    for step in measure(tmp_path / "steps-0.jsonl"):
        assert Calibrated(found).step_s(step.shape) == pytest.approx(cost_of(COSTS)(step.shape), rel=0.03)
    # The held-out steps keep theirs, so that the error told is what a user will meet.
    assert found.held_out["all"].total < -0.05
    assert found.held_out["all"].p50 < 0.02


def test_a_class_that_is_rare_is_not_taken_for_outliers(tmp_path: Path) -> None:
    """Long prefill steps among hundreds of decodes were all far from the first fit, and it never saw them again."""
    load = Load(num_requests=24, at_start=1, every=40, output=(300, 300), prompt=(400, 600), max_step_tokens=700)

    def step_s(shape: StepShape) -> float:
        # Twice as long as any sum of features could say.
        return (1 + 0.01 * shape.num_seqs) * (1 if shape.prefill_seqs == 0 else 2)

    found = fit_run(tmp_path, step_s, load=load)
    assert found.num_steps / 40 < found.ranges["mixed"].num_steps < found.num_steps / 10
    assert found.num_trimmed < found.ranges["mixed"].num_steps / 10
    assert found.held_out["mixed"].mape < 0.4
    assert found.held_out["decode"].mape < 0.01


def test_a_stretch_of_slow_steps_is_not_taken_for_outliers(tmp_path: Path) -> None:
    """Batches too large for a CPU's cache took twice as long, all of them; leaving them out flattered the fit."""
    rng = random.Random(7)
    seen: list[StepShape] = []

    def step_s(shape: StepShape) -> float:
        seen.append(shape)
        slower = 2 if 100 <= len(seen) < 140 else 1
        return cost_of({"step": 1.0, "decode_kv": 1e-3})(shape) * slower * rng.gauss(1, 0.02)

    found = fit_run(tmp_path, step_s)
    assert len(seen) > 400
    assert found.num_trimmed <= 4
    assert found.held_out["all"].mape > 0.05


def test_what_the_data_does_not_show_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write_run(path, cost_of(COSTS), load=replace(LARGE, prompt=(1, 1), max_num_seqs=100))
    found = fit({"run": [step for step in measure(path) if step_class(step.shape) == "decode"]})
    # Where each sequence has one token and samples, tokens, sequences and samples are one.
    assert set(found.coefficients) <= {"step", "tokens", "decode_kv", "max_kv"}
    assert set(found.ranges) == {"decode"}
    assert found.held_out["all"].mape < 1e-3
    model = Calibrated(found)
    assert model.step_s(CHUNK) > 0
    assert model.outside_range()["worst"] == "prefill"
    with pytest.raises(ValueError, match="a step lies outside: a prefill step, of which none was measured"):
        Calibrated(found, "refuse").step_s(CHUNK)


def test_columns_that_say_the_same_are_told_from_those_that_do_not() -> None:
    rng = np.random.default_rng(1)
    tokens, kv = rng.uniform(1, 100, 50), rng.uniform(1, 1000, 50)
    rare = np.zeros(50)
    rare[:7] = 1
    columns = {"step": np.ones(50), "tokens": tokens, "kv": kv, "sequences": 2 * tokens, "mix": 3 * kv - tokens + 5}
    assert supported(columns, np.ones(50)) == ["step", "tokens", "kv"]
    assert supported(columns | {"kv": np.full(50, 7.0)}, np.ones(50)) == ["step", "tokens", "mix"]
    assert supported({"step": np.ones(50), "rare": rare}, np.ones(50)) == ["step"]
    rare[7] = 1
    assert supported({"step": np.ones(50), "rare": rare}, np.ones(50)) == ["step", "rare"]


def test_a_run_is_predicted_from_the_others(tmp_path: Path) -> None:
    """Held-out neighbours flatter a fit; a machine that was slower in one run shows when that run is left out."""
    runs = {}
    for name, slower in (("a", 1.0), ("b", 1.0), ("c", 1.5)):
        path = tmp_path / f"{name}.jsonl"
        write_run(path, lambda shape, slower=slower: slower * cost_of(COSTS)(shape), seed=ord(name))  # type: ignore[misc]
        runs[name] = measure(path)
    runs["short"] = runs["a"][:10]
    found = fit(runs)
    assert set(found.other_runs) == {"a", "b", "c"}
    assert found.other_runs["c"].bias == pytest.approx(1 / 1.5 - 1, abs=0.02)
    assert found.other_runs["c"].num_steps == len(runs["c"])
    assert found.num_first == 0


def test_a_first_step_is_left_out_only_if_it_is_slow(tmp_path: Path) -> None:
    """Runs of one prompt have no other prefill: without their first steps a calibration knew nothing of prefill."""
    cost, alone = cost_of(COSTS), Load(num_requests=1, prompt=(40, 120), output=(20, 20))
    runs = {}
    for seed in range(12):
        path = tmp_path / f"{seed}.jsonl"
        write_run(path, cost, load=alone, seed=seed)
        runs[str(seed)] = measure(path)
    used = UsedSteps.of(runs)
    assert (used.num_first, used.runs) == (0, runs)
    assert fit(runs).ranges["prefill"].num_steps == 12
    # Nothing tells what a single one should take but the decodes, and it takes far longer.
    used = UsedSteps.of({"0": [runs["0"][0]._replace(step_s=900.0), *runs["0"][1:], *runs["0"][1:]]})
    assert (used.num_first, used.runs["0"][0].step) == (1, 1)


def test_slow_first_steps_are_told_by_the_later_ones_of_their_class(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write_run(path, cost_of(COSTS), load=LARGE)
    steps = measure(path)
    slow = [steps[0]._replace(step_s=4 * steps[0].step_s), *steps[1:]]
    assert UsedSteps.of({"run": slow}).num_first == 1
    slower = [steps[0]._replace(step_s=1.5 * steps[0].step_s), *steps[1:]]
    assert UsedSteps.of({"run": slower}).runs["run"] == slower
    assert UsedSteps.of({"run": [steps[0], *(step._replace(step_s=0.0) for step in steps[1:])]}).num_first == 0


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="measured steps are too few, at least 20 are needed"):
        fit_run(tmp_path, cost_of(COSTS), load=Load(num_requests=1, output=(5, 20)))


# What a log says of time


def test_a_deeper_pipeline_hides_the_host_and_overlaps_steps(tmp_path: Path) -> None:
    found = fit_run(tmp_path, cost_of(COSTS), cost_of({"step": 0.3}), replace(LARGE, depth=2))
    assert found.host is None
    assert found.held_out["all"].mape < 1e-5
    model = Calibrated(found)
    assert model.host_s(3) == 0
    assert any("no host time" in note for note in model.notes())
    assert Calibrated(found, host=False).notes() == []


def test_only_the_host_alone_between_two_steps_is_host_time(tmp_path: Path) -> None:
    """After an arrival or an empty plan the engine may have waited for something else."""
    path = tmp_path / "steps.jsonl"
    host_s = cost_of({"step": 0.25})
    write_run(path, lambda shape: 1.0, host_s, load=Load(num_requests=6, at_start=2, every=3, output=(9, 9)))
    events = list(StepLogReader(path))
    measured = measure(path)
    kinds = [type(event).__name__ for event in events]
    alone = sum(kinds[i : i + 2] == ["CommitEvent", "PlanEvent"] for i in range(len(kinds)))
    hosts = [step.host_s for step in measured]
    assert len([host for host in hosts if host is not None]) == alone > 10
    assert hosts[0] is None
    assert hosts.count(None) > 1
    assert [host for host in hosts if host is not None] == pytest.approx([0.25] * alone)
    assert [step.step_s for step in measured] == pytest.approx([1.0] * len(measured))
    assert [step.step for step in measured] == list(range(len(measured)))


def test_steps_are_timed_anew_in_each_process(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for seed in range(2):
        write_run(path, lambda shape: 1.0, load=Load(num_requests=3, output=(9, 9)), seed=seed)
    measured = measure(path)
    assert {step.session for step in measured} == {0, 1}
    assert [step.step for step in measured].count(0) == 2
    assert [step.step_s for step in measured] == pytest.approx([1.0] * len(measured))


def test_a_commit_of_another_step_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write_run(path, lambda shape: 1.0, load=Load(num_requests=2))
    lines = path.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if '"commit"' in line)
    path.write_text("\n".join([*lines[: first + 1], *lines[first:]]) + "\n")
    with pytest.raises(ValueError, match=f"line {first + 2} commits step 0, but none is in flight"):
        measure(path)


# Predicting


def test_a_prediction_is_the_sum_of_costs_times_features(known: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    shapes = write_run(path, cost_of(COSTS), load=LARGE, seed=1)
    model = Calibrated(known)
    assert {step_class(shape) for shape in shapes} >= {"decode", "mixed"}
    for shape in shapes:
        expected = sum(cost * FEATURES[name](shape) for name, cost in known.coefficients.items())
        assert model.step_s(shape) == pytest.approx(expected, rel=1e-9)
        assert model.step_s(shape) == pytest.approx(cost_of(COSTS)(shape), rel=1e-3)
    assert model.num_steps == 2 * len(shapes)
    assert known.host is not None
    assert model.host_s(10) == known.host.step_s + 10 * known.host.seq_s
    assert Calibrated(known, host=False).host_s(10) == 0


SIZES = st.integers(1, 5000)


@given(st.lists(st.tuples(SIZES, st.integers(0, 5000)), min_size=1, max_size=20), st.data())
def test_more_work_never_takes_less_time(known: Calibration, rows: list[tuple[int, int]], data: st.DataObject) -> None:
    """Rows of (length, start); one that grows, and one that is added."""
    model = Calibrated(known)

    def time_of(rows: list[tuple[int, int]]) -> float:
        chunks = [(length, start) for length, start in rows if length > 1]
        shape = StepShape(
            sum(length for length, _ in rows),
            len(rows),
            len(rows),
            sum(map(sum, rows)),
            max(map(sum, rows)),
            sum(length for length, _ in chunks),
            len(chunks),
            sum(start for _, start in chunks),
            sum(length * start + length * (length + 1) // 2 for length, start in chunks),
        )
        return model.step_s(shape)

    before = time_of(rows)
    assert before >= known.floor_s > 0
    index = data.draw(st.integers(0, len(rows) - 1))
    length, start = rows[index]
    # One token more in the cache; a row of one token must not become a chunk, whose cost is another.
    assert time_of([*rows[:index], (length, start + 1), *rows[index + 1 :]]) >= before - 1e-9
    if length > 1:
        assert time_of([*rows[:index], (length + 1, start), *rows[index + 1 :]]) >= before - 1e-9
    assert time_of([*rows, (1, 0)]) >= before - 1e-9


def test_steps_outside_the_range_are_counted_by_feature(known: Calibration) -> None:
    low, high = known.ranges["decode"].bounds["kv_tokens"]
    seqs = known.ranges["decode"].bounds["num_seqs"][1]
    longest = known.ranges["decode"].bounds["max_kv"][1]
    inside = StepShape.decode(8, 100)._replace(max_kv=longest)
    model = Calibrated(known)
    model.step_s(inside)
    assert model.outside_range() == {"steps": 0, "share": 0.0, "classes": {}, "worst": None, "by": {}}
    assert model.notes() == []
    model.step_s(inside._replace(kv_tokens=3 * high))
    model.step_s(inside._replace(kv_tokens=2 * high, max_kv=longest + 1))
    model.step_s(inside._replace(num_tokens=seqs + 1, num_seqs=seqs + 1, num_samples=seqs + 1))
    found = model.outside_range()
    assert (found["steps"], found["share"], found["worst"]) == (3, 0.75, "decode.kv_tokens")
    assert found["by"]["decode.kv_tokens"] == {"steps": 2, "furthest": 3 * high, "measured": [low, high]}
    assert found["by"]["decode.max_kv"]["steps"] == 1
    assert found["by"]["decode.num_seqs"] == {
        "steps": 1,
        "furthest": seqs + 1,
        "measured": list(known.ranges["decode"].bounds["num_seqs"]),
    }
    assert json.loads(json.dumps(found)) == found
    (note,) = model.notes()
    worst = f"kv_tokens up to {3 * high:,}, measured {low:,}-{high:,}"
    assert note == f"3 of 4 steps lie outside the calibrated range: 3 decode ({worst})"


def test_steps_outside_the_range_are_told_by_class_with_the_reason(known: Calibration) -> None:
    low, high = known.ranges["decode"].bounds["max_kv"]
    model = Calibrated(replace(known, ranges={"decode": known.ranges["decode"]}))
    for _ in range(2):
        model.step_s(StepShape.decode(8, 100)._replace(max_kv=2 * high))
    model.step_s(CHUNK)
    model.step_s(CHUNK._replace(num_seqs=2, num_tokens=65, num_samples=2))
    assert model.outside_range()["classes"] == {"decode": 2, "prefill": 1, "mixed": 1}
    (note,) = model.notes()
    reason = f"2 decode (max_kv up to {2 * high:,}, measured {low:,}-{high:,})"
    assert note == (
        f"4 of 4 steps lie outside the calibrated range: {reason}, 1 prefill (none measured), 1 mixed (none measured)"
    )
    below = Calibrated(known)
    below.step_s(StepShape.decode(8, 100)._replace(max_kv=low - 1))
    assert below.notes()[0].endswith(f"(max_kv down to {low - 1:,}, measured {low:,}-{high:,})")


def summary(num_steps: int, p50: float) -> ErrorSummary:
    return ErrorSummary(num_steps=num_steps, mape=p50, p50=p50, p90=p50, bias=0.0, total=0.0)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"held_out": {"all": summary(100, 0.04)}}, "good: held-out steps are off by 4.0% in the median"),
        ({"held_out": {"all": summary(100, 0.06)}}, "fair: held-out steps are off by 6.0% in the median"),
        (
            {"held_out": {"all": summary(100, 0.21)}},
            "poor: held-out steps are off by 21% in the median; was the machine busy?",
        ),
        (
            {"held_out": {"all": summary(100, 0.04), "mixed": summary(4, 0.3), "prefill": summary(3, 0.3)}},
            "poor: held-out mixed steps are off by 30% in the median; was the machine busy?",
        ),
        (
            {"held_out": {"all": summary(100, 0.3), "decode": summary(100, 0.4)}, "num_trimmed": 80},
            "poor: held-out steps are off by 30% in the median and 20% of the steps are outliers; "
            "was the machine busy?",
        ),
        ({"num_trimmed": 41}, "poor: 10% of the steps are outliers; was the machine busy?"),
        ({"num_trimmed": 40}, "good: held-out steps are off by 4.0% in the median"),
        ({"held_out": {}}, "not known: no step was held out"),
    ],
)
def test_a_calibration_is_judged(changes: dict[str, Any], verdict: str, known: Calibration) -> None:
    ranges = {kind: replace(known.ranges["decode"], num_steps=8) for kind in ("decode", "prefill", "mixed")}
    usual = replace(known, ranges=ranges, num_steps=500, held_out={"all": summary(100, 0.04)})
    judged = replace(usual, **changes)
    assert judged.quality == verdict
    assert any("the calibration is poor" in note for note in Calibrated(judged).notes()) == verdict.startswith("poor")


def test_what_was_hardly_measured_is_part_of_the_verdict(known: Calibration) -> None:
    ranges = {"decode": known.ranges["decode"], "mixed": replace(known.ranges["mixed"], num_steps=7)}
    judged = replace(known, ranges=ranges, held_out={"all": summary(100, 0.01)})
    assert judged.quality == (
        "fair: held-out steps are off by 1.0% in the median; it has seen 7 mixed and no prefill steps"
    )


def test_a_step_outside_the_range_can_be_refused(known: Calibration) -> None:
    model = Calibrated(known, "refuse")
    model.step_s(DECODE._replace(max_kv=known.ranges["decode"].bounds["max_kv"][0]))
    with pytest.raises(ValueError, match=r"latency\.outside is refuse, and a step lies outside: a decode step with"):
        model.step_s(StepShape.decode(5000, 10))
    with pytest.raises(ValueError, match=r"latency\.outside must be one of warn, refuse, not 'ignore'"):
        Calibrated(known, "ignore")


# The file


def test_a_calibration_survives_its_file(known: Calibration, tmp_path: Path) -> None:
    known.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json") == known
    assert Calibration.load(tmp_path) == known


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda value: value.pop(key)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without("coefficients"), "coefficients is missing"),
        (lambda value: value.update(format=2), "format must be 1, not 2"),
        (lambda value: value.update(format="1"), "format must be 1, not '1'"),
        (lambda value: value.update(colour=3), "colour is not a key of a calibration; allowed: format, name"),
        (lambda value: value.update(name=3), "name must be a text, not 3"),
        (lambda value: value["coefficients"].update(tokens=-1), "coefficients.tokens must be 0 or more, not -1.0"),
        (lambda value: value["coefficients"].update(tokens="x"), 'coefficients.tokens must be a number, not "x"'),
        (lambda value: value["coefficients"].update(tokens=math.nan), "coefficients.tokens must be a number, not NaN"),
        (lambda value: value["coefficients"].update(heads=1), "coefficients must be of step, tokens, "),
        (lambda value: value.update(coefficients=[1]), "coefficients must be an object, not [1]"),
        (lambda value: value.update(floor_s=0), "floor_s must be above 0"),
        (lambda value: value.update(floor_s=True), "floor_s must be a number, not true"),
        (lambda value: value.update(ranges={}), "ranges must be of decode, prefill, mixed, not nothing"),
        (lambda value: value["ranges"].update(scoring=value["ranges"]["decode"]), "ranges must be of decode, prefill"),
        (lambda value: value["ranges"]["decode"].pop("bounds"), "ranges.decode.bounds is missing"),
        (lambda value: value["ranges"]["decode"]["bounds"].pop("max_kv"), "ranges.decode.bounds must be of num_tokens"),
        (
            lambda value: value["ranges"]["decode"]["bounds"].update(max_kv=[9, 3]),
            "ranges.decode.bounds.max_kv must be ascending, not 9, 3",
        ),
        (
            lambda value: value["ranges"]["decode"]["bounds"].update(max_kv=[9]),
            "ranges.decode.bounds.max_kv must be a list of two whole numbers, not [9]",
        ),
        (lambda value: value["host"].update(step_s=-0.5), "host.step_s and host.seq_s must be 0 or more"),
        (lambda value: value["held_out"]["all"].update(mape=None), "held_out.all.mape must be a number, not null"),
        (lambda value: value["memory"].update(num_blocks=0), "memory.kv_tokens must be num_blocks x block_size"),
        (lambda value: value["memory"].update(kv_tokens=99_999), "memory.kv_tokens must be num_blocks x block_size"),
        (lambda value: value["memory"].update(kv_bytes=1.5), "memory.kv_bytes must be a whole number, not 1.5"),
        (lambda value: value["provenance"].update(sources="run"), 'provenance.sources must be a list, not "run"'),
    ],
)
def test_a_malformed_file_is_refused_in_one_sentence(
    change: Callable[[dict[str, Any]], Any], sentence: str, known: Calibration, tmp_path: Path
) -> None:
    value = json.loads(json.dumps(asdict(known)))
    change(value)
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"calibration\.json: ") as error:
        Calibration.load(path)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_file_of_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't be read: No such file"):
        Calibration.load(tmp_path / "nothing.json")
    with pytest.raises(ValueError, match="can't be read: No such file"):
        Calibration.load(tmp_path)
    (tmp_path / "torn.json").write_text('{"format": 1, ')
    with pytest.raises(ValueError, match=r"torn\.json is not JSON"):
        Calibration.load(tmp_path / "torn.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match=r"list\.json: a calibration must be an object, not \[\]"):
        Calibration.load(tmp_path / "list.json")


def test_an_error_summary_by_hand() -> None:
    summary = ErrorSummary.of([1.0, 3.0, 2.0, 4.0], [1.0, 2.0, 4.0, 5.0])
    assert summary == ErrorSummary(
        num_steps=4,
        mape=pytest.approx((0 + 0.5 + 0.5 + 0.2) / 4),
        p50=pytest.approx(0.35),
        p90=pytest.approx(0.5),
        bias=pytest.approx((0 + 0.5 - 0.5 - 0.2) / 4),
        total=pytest.approx(10 / 12 - 1),
    )
    assert ErrorSummary.of([], []).num_steps == 0
