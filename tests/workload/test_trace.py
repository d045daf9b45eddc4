"""Checks traces: each form as it is published, order, units, what is left out, and a sentence for each broken line."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged.core.prompt import HashedPrompt, OpaquePrompt, Prompt
from paged.workload.job import Job
from paged.workload.trace import TraceWorkload, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE = [HEADER, "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109"]
MOONCAKE = [
    {"timestamp": 0, "input_length": 655, "output_length": 52, "hash_ids": [46, 47]},
    {"timestamp": 1500, "input_length": 512, "output_length": 26, "hash_ids": [46]},
]

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes lines, texts or what their JSON holds, as a file."""

    def write_lines(*lines: Any, name: str = "trace", end: str = "\n") -> Path:
        path = tmp_path / name
        texts = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
        path.write_bytes(b"".join(text if isinstance(text, bytes) else (text + end).encode() for text in texts))
        return path

    return write_lines


def jobs_of(path: Path, **fields: Any) -> list[Job]:
    given = {"format": "auto", "speedup": 1.0, "max_requests": None, "cap": None, "seed": 0, **fields}
    return TraceWorkload(path=path, **given).jobs()


def told(jobs: list[Job]) -> list[tuple[object, ...]]:
    return [(job.id, job.arrival_s, len(job.prompt), job.output_len, job.max_tokens) for job in jobs]


def row(name: str, sample: int, prompt: list[int], count: int, reason: str = "stop") -> dict[str, Any]:
    given = {"id": name, "sample": sample, "prompt_token_ids": prompt, "token_ids": [1] * count}
    return {**given, "finish_reason": reason, "text": ""}


# Azure


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_azures_form_as_it_is_published(write: Write, end: str) -> None:
    jobs = jobs_of(write("\ufeff" + AZURE[0], *AZURE[1:], end=end))
    assert told(jobs) == [("line-2", 0.0, 374, 44, 44), ("line-3", pytest.approx(4.314579), 396, 109, 109)]
    assert all(isinstance(job.prompt, OpaquePrompt) for job in jobs)
    assert jobs[0].prompt is not jobs[1].prompt


def test_azures_later_form_has_a_zone_and_columns_may_move(write: Write) -> None:
    path = write("GeneratedTokens,TIMESTAMP,ContextTokens,Model", "5,2024-05-12 00:00:00.001163+00:00,17,x", "")
    assert told(jobs_of(path)) == [("line-2", 0.0, 17, 5, 5)]


def test_a_trace_need_not_end_with_a_newline(write: Write) -> None:
    assert len(jobs_of(write(*AZURE, b"2023-11-16 18:15:51,3,4"))) == 3


def test_times_are_divided_and_the_first_ones_taken(write: Write) -> None:
    path = write(*AZURE, "2023-11-16 18:15:46.6805900,5,6")
    whole = jobs_of(path)
    assert [job.id for job in whole] == ["line-2", "line-4", "line-3"]
    fast = jobs_of(path, speedup=4.0, max_requests=2, cap=40)
    assert told(fast) == [("line-2", 0.0, 374, 40, 40), ("line-4", 0.0, 5, 6, 40)]
    assert jobs_of(path, speedup=4.0)[2].arrival_s == pytest.approx(4.314579 / 4)


def test_an_unsorted_trace_is_sorted_and_says_so(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    lines = ["2023-11-16 18:15:47,1,1", "2023-11-16 18:15:45,2,2", "2023-11-16 18:15:47,3,3", "2023-11-16 18:15:45,4,4"]
    jobs = jobs_of(write(HEADER, *lines))
    assert told(jobs) == [
        ("line-3", 0.0, 2, 2, 2),
        ("line-5", 0.0, 4, 4, 4),
        ("line-2", 2.0, 1, 1, 1),
        ("line-4", 2.0, 3, 3, 3),
    ]
    assert "is not in order of time; it has been sorted" in caplog.text
    caplog.clear()
    jobs_of(write(*AZURE))
    assert not caplog.text


def test_an_output_of_no_token_counts_as_one_and_is_reported(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    lines = ["2023-11-16 18:15:47,1,0", "2023-11-16 18:15:48,2,2", "2023-11-16 18:15:49,3,0"]
    jobs = jobs_of(write(HEADER, *lines))
    assert [job.output_len for job in jobs] == [1, 2, 1]
    assert "2 of 3 requests generated no token, which counts as one" in caplog.text


# Mooncake


def test_mooncakes_form_as_it_is_published(write: Write) -> None:
    jobs = jobs_of(write(*MOONCAKE))
    assert told(jobs) == [("line-1", 0.0, 655, 52, 52), ("line-2", 1.5, 512, 26, 26)]
    prompts = [job.prompt for job in jobs]
    assert all(isinstance(prompt, HashedPrompt) for prompt in prompts)
    assert [prompt.hash_ids for prompt in prompts if isinstance(prompt, HashedPrompt)] == [(46, 47), (46,)]
    first, second = (list(prompt.block_keys(16, b"")) for prompt in prompts)
    assert second == first[:32]


def test_mooncakes_form_without_hashes_shares_nothing(write: Write) -> None:
    path = write({"timestamp": 10.5, "input_length": 3, "output_length": 1})
    (job,) = jobs_of(path, format="mooncake")
    assert isinstance(job.prompt, OpaquePrompt)


# Results


def test_results_are_put_back_into_the_order_of_their_ids_and_share_prompts(write: Write) -> None:
    rows = [row("r-10", 0, [7], 5), row("r-9", 1, [7, 8], 3), row("r-9", 0, [7, 8], 4, "length")]
    jobs = jobs_of(write(*rows))
    assert told(jobs) == [("r-9-0", 0.0, 2, 4, 4), ("r-9-1", 0.0, 2, 3, 3), ("r-10-0", 0.0, 1, 5, 5)]
    assert isinstance(jobs[0].prompt, Prompt)
    assert jobs[0].prompt is jobs[1].prompt
    assert jobs[2].prompt.token_ids == (7,)


def test_results_beside_their_prompts_arrive_as_they_did(tmp_path: Path, write: Write) -> None:
    (tmp_path / "inputs").mkdir()
    given = [
        {"id": "z", "prompt": "a", "arrival_s": 2.0},
        "broken",
        {"id": "b", "prompt": "b"},
        {"prompt": "c", "n": 2},
    ]
    write(*given, name="inputs/prompts.jsonl")
    write(
        row("line-4", 1, [3], 1),
        row("z", 0, [1], 2),
        row("line-4", 0, [3], 4),
        row("b", 0, [2], 3),
        name="results.jsonl",
    )
    assert told(jobs_of(tmp_path)) == [
        ("b-0", 0.0, 1, 3, 3),
        ("line-4-0", 0.0, 1, 4, 4),
        ("line-4-1", 0.0, 1, 1, 1),
        ("z-0", 2.0, 1, 2, 2),
    ]


def test_what_did_not_finish_is_left_out_and_reported(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    refused = {**row("c", 0, [], 0, "refused"), "sample": None}
    path = write(row("a", 0, [1], 2), row("b", 0, [1], 1, "abort"), refused, b'{"id": "d", "sam')
    assert [job.id for job in jobs_of(path)] == ["a-0"]
    assert "3 rows are left out, because they did not finish" in caplog.text


# Mistakes


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([HEADER], "holds no request"),
        ([], "holds no request"),
        (["", ""], "holds no request"),
        (["a,b,c", "1,2,3"], "the first line of '.*' is none of the forms azure"),
        (['{"a": 1}'], "is none of the forms"),
        (["{"], "is none of the forms"),
        ([*AZURE, "2023-11-16 18:15:51,3"], "line 4: must have 3 columns, not 2"),
        ([*AZURE, "", "2023-11-16 18:15:51,3,x"], "line 5: GeneratedTokens must be a whole number from 0 .* not 'x'"),
        (
            [*AZURE, "2023-11-16 18:15:51,0,3"],
            "line 4: ContextTokens must be a whole number from 1 to 10000000, not 0",
        ),
        ([*AZURE, "2023-11-16 18:15:51,-3,3"], "line 4: ContextTokens must be"),
        ([*AZURE, "2023-11-16 18:15:51,3.0,3"], "line 4: ContextTokens must be"),
        ([*AZURE, "2023-11-16 18:15:51,nan,3"], "line 4: ContextTokens must be"),
        ([*AZURE, "2023-11-16 18:15:51,3,99999999"], "line 4: GeneratedTokens must be"),
        ([*AZURE, "2023-11-16 18:15:51,3," + "9" * 5000], "line 4: GeneratedTokens must be"),
        (
            [AZURE[0], "yesterday,3,3"],
            r"line 2: TIMESTAMP must be a date and time such as 2023-11-16 18:15:46\.680590, not",
        ),
        ([*AZURE, "yesterday,3,3"], "line 4: TIMESTAMP must be a date and time .* not 'yesterday'"),
        ([*AZURE, "2023-11-16 18:15:51+00:00,3,3"], "line 4: TIMESTAMP must be a date and time like that of the first"),
        ([*AZURE, "9023-11-16 18:15:51,3,3"], r"line 4: TIMESTAMP must be within 1e\+09 s of the first"),
        ([*AZURE, b"\xff,3,3\n"], r"line 4: not UTF-8 text \(byte 1\)"),
        ([*MOONCAKE, "{"], "line 3: not valid JSON"),
        ([*MOONCAKE, "[1]"], "line 3: must be a JSON object"),
        ([*MOONCAKE, {"timestamp": 1, "input_length": 3}], "line 3: output_length is missing"),
        ([{**MOONCAKE[0], "timestamp": -1}], "line 1: timestamp must be milliseconds, from 0 to .* not -1"),
        ([{**MOONCAKE[0], "timestamp": float("nan")}], "line 1: timestamp must be milliseconds"),
        ([{**MOONCAKE[0], "timestamp": "0"}], "line 1: timestamp must be milliseconds"),
        ([{**MOONCAKE[0], "timestamp": 1e300}], "line 1: timestamp must be milliseconds"),
        ([{**MOONCAKE[0], "timestamp": True}], "line 1: timestamp must be milliseconds"),
        ([{**MOONCAKE[0], "output_length": 1.5}], "line 1: output_length must be a whole number from 0"),
        ([{**MOONCAKE[0], "output_length": True}], "line 1: output_length must be a whole number from 0"),
        ([{**MOONCAKE[0], "input_length": 0}], "line 1: input_length must be a whole number from 1"),
        ([{**MOONCAKE[0], "hash_ids": [46]}], "line 1: hash_ids must be 2 whole numbers, one for each 512 tokens"),
        ([{**MOONCAKE[0], "hash_ids": [46, "47"]}], "line 1: hash_ids must be 2 whole numbers"),
        ([{**MOONCAKE[0], "hash_ids": 46}], "line 1: hash_ids must be 2 whole numbers"),
        ([row("a", 0, [1], 1), '{"id": "d"', row("b", 0, [1], 1)], "line 2: not valid JSON"),
        ([row("a", 0, [1], 1), {"id": "d"}, row("b", 0, [1], 1)], "line 2: sample is missing"),
        ([row("a", 0, [1], 1), row("a", 0, [1], 1)], "line 2: id 'a' has sample 0 for the second time"),
        ([row("a", 0, [], 1)], "line 1: prompt_token_ids must be a list of token ids, at least one"),
        ([row("a", 0, [-1], 1)], "line 1: prompt_token_ids must be a list of token ids"),
        ([row("a", 0, [1], 0)], "line 1: token_ids must be a list of token ids, at least one"),
        ([{**row("a", 0, [1], 1), "sample": "0"}], "line 1: id must be a text and sample a whole number"),
        ([row("a", 0, [1], 1, "abort")], "holds no request"),
    ],
)
def test_a_broken_trace_gets_one_sentence_with_its_line(write: Write, lines: list[Any], message: str) -> None:
    path = write(*lines)
    with pytest.raises(ValueError, match=f"^workload.path must be a trace: .*{message}") as caught:
        jobs_of(path)
    assert "\n" not in str(caught.value)


def test_a_form_that_is_named_is_the_one_that_is_read(write: Write) -> None:
    with pytest.raises(ValueError, match=r"line 1: the header must have .*, and lacks TIMESTAMP"):
        jobs_of(write("a,b"), format="azure")
    with pytest.raises(ValueError, match="line 1: timestamp is missing"):
        jobs_of(write(row("a", 0, [1], 1)), format="mooncake")


def test_a_missing_file_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent' cannot be read \(No such file"):
        jobs_of(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"results.jsonl' cannot be read \(No such file"):
        jobs_of(tmp_path)


# Anything at all

REQUESTS = st.lists(
    st.tuples(st.integers(0, 10**9), st.integers(1, 10**7), st.integers(0, 10**7)), min_size=1, max_size=20
)
ANY_FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@ANY_FILE
@given(REQUESTS, st.floats(0.1, 100))
def test_any_azure_trace_is_read_as_it_was_written(
    write: Write, requests: list[tuple[int, int, int]], speedup: float
) -> None:
    begin = datetime(2023, 11, 16)
    lines = [f"{begin + timedelta(microseconds=time)},{prompt},{output}" for time, prompt, output in requests]
    jobs = jobs_of(write(HEADER, *lines), speedup=speedup)
    expected = sorted(enumerate(requests, start=2), key=lambda item: item[1][0])
    first = expected[0][1][0]
    assert told(jobs) == [
        (f"line-{number}", pytest.approx((time - first) / 1e6 / speedup), prompt, output or 1, output or 1)
        for number, (time, prompt, output) in expected
    ]
    assert jobs[0].arrival_s == 0
    fewer = jobs_of(write(HEADER, *lines), speedup=speedup, max_requests=3)
    assert told(fewer) == told(jobs)[:3]


@ANY_FILE
@given(REQUESTS, st.integers(1, 10**6))
def test_any_mooncake_trace_is_read_as_it_was_written(
    write: Write, requests: list[tuple[int, int, int]], cap: int
) -> None:
    requests = [(time, prompt % 5000 + 1, output) for time, prompt, output in requests]
    lines = [
        {"timestamp": time, "input_length": prompt, "output_length": output, "hash_ids": list(range(-(-prompt // 512)))}
        for time, prompt, output in requests
    ]
    jobs = jobs_of(write(*lines), cap=cap)
    assert sorted((len(job.prompt), job.output_len) for job in jobs) == sorted(
        (prompt, min(output or 1, cap)) for _, prompt, output in requests
    )
    assert {job.max_tokens for job in jobs} == {cap}
    longest = max(jobs, key=lambda job: len(job.prompt)).prompt.block_keys(16, b"s")
    for job in jobs:
        keys = job.prompt.block_keys(16, b"s")
        assert list(keys) == list(longest)[: len(keys)]


@ANY_FILE
@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode), st.sampled_from([b"", HEADER.encode() + b"\n"]))
def test_any_bytes_are_read_or_refused_in_one_sentence(write: Write, content: bytes, begin: bytes) -> None:
    path = write(begin + content)
    for form in ("auto", "azure", "mooncake", "results"):
        try:
            assert read_trace(path, form)
        except ValueError as error:
            assert "\n" not in str(error) and str(path) in str(error)  # noqa: PT017, PT018 - either outcome is right


@ANY_FILE
@given(
    st.dictionaries(
        st.sampled_from(["timestamp", "input_length", "output_length", "hash_ids", "id", "sample", "token_ids"]),
        st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=4),
    )
)
def test_any_json_object_is_read_or_refused_in_one_sentence(write: Write, values: dict[str, Any]) -> None:
    good = {"prompt_token_ids": [1], "finish_reason": "stop"}
    path = write({**MOONCAKE[0], **row("a", 0, [1], 1), **good, **values}, "")
    for form in ("mooncake", "results"):
        try:
            assert len(read_trace(path, form)) == 1
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017 - either outcome is right


def test_reading_says_nothing_below_warnings(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    jobs_of(write(*MOONCAKE))
    assert not caplog.records
