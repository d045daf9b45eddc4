"""Checks the prompts file: its forms, the line's parameters over the job's, a refusal for each broken line."""

import json
from pathlib import Path

import pytest

from paged.core.request import SamplingParams
from paged.workload.job import Job
from paged.workload.prompts import PromptLine, PromptsWorkload, RefusedLine, read_prompts, write_prompts

DEFAULTS = SamplingParams(n=2, max_tokens=7, top_p=0.9)


@pytest.fixture
def read(tmp_path: Path):
    def read_lines(*lines: str | bytes) -> list[PromptLine | RefusedLine]:
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
        return read_prompts(path, DEFAULTS)

    return read_lines


def test_every_form_is_read_in_order(read) -> None:
    chat = [{"role": "user", "content": "hi"}]
    lines = read(
        '{"prompt": "1+1"}',
        "",
        '{"id": "b", "prompt_token_ids": [1, 2]}',
        json.dumps({"id": 7, "messages": chat}),
    )
    assert [(line.number, line.id, line.prompt) for line in lines] == [
        (1, "line-1", "1+1"),
        (3, "b", [1, 2]),
        (4, "7", {"messages": chat}),
    ]
    assert all(line.params == DEFAULTS for line in lines)


def test_a_lines_own_sampling_fields_replace_the_jobs(read) -> None:
    (line,) = read('{"prompt": "1", "n": 1, "temperature": 0, "stop": "x", "logit_bias": {"5": 2}}')
    assert line.params == SamplingParams(n=1, max_tokens=7, top_p=0.9, temperature=0, stop=("x",), logit_bias={5: 2.0})


def test_line_ends_byte_order_mark_and_line_separators_in_text_do_no_harm(read) -> None:
    lines = read(b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}\r', b'{"prompt": "c"}\r', b"  \r", b"")
    assert [(line.id, line.prompt) for line in lines] == [("line-1", "a\u2028b"), ("line-2", "c")]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"prompt": "a"', "not valid JSON"),
        ("nonsense", "not valid JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ("[" * 100_000, "not valid JSON"),
        ('["a"]', "must be a JSON object"),
        ("{}", "exactly one of prompt, prompt_token_ids, messages must be given, not none"),
        ('{"prompt": "a", "messages": []}', "not prompt and messages"),
        ('{"prompt": "a", "temprature": 1}', "temprature is not a field of a prompt; did you mean temperature"),
        ('{"prompt": "a", "prompt": "b"}', "prompt is given twice"),
        ('{"prompt": ""}', "prompt must be a text"),
        ('{"prompt": 5}', "prompt must be a text"),
        ('{"prompt": null}', "prompt must be a text"),
        ('{"prompt_token_ids": []}', "prompt_token_ids must be a list"),
        ('{"prompt_token_ids": "12"}', "prompt_token_ids must be a list"),
        ('{"prompt_token_ids": [1, -1]}', "prompt_token_ids must be whole numbers"),
        ('{"prompt_token_ids": [1, true]}', "prompt_token_ids must be whole numbers"),
        ('{"prompt_token_ids": [1.0]}', "prompt_token_ids must be whole numbers"),
        pytest.param(
            '{"prompt_token_ids": [1, ' + "1" * 5000 + "]}",
            "must hold whole numbers of at most 4300 digits",
            id="digits",
        ),
        ('{"messages": []}', "messages must be a list"),
        ('{"messages": {"role": "user", "content": "a"}}', "messages must be a list"),
        ('{"messages": [{"content": "a"}]}', "role and content"),
        ('{"messages": [{"role": 5, "content": "a"}]}', "role and content"),
        ('{"messages": [{"role": "user", "content": 5}]}', "content in messages must be a text or a list of objects"),
        (
            '{"messages": [{"role": "user", "content": null}]}',
            "content in messages must be a text or a list of objects",
        ),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "content in messages must be a text or a list"),
        ('{"prompt": "a", "id": ""}', "id must be"),
        ('{"prompt": "a", "id": [1]}', "id must be"),
        ('{"prompt": "a", "temperature": 0}', "n must be 1 when temperature is 0"),
        ('{"prompt": "a", "top_p": 0}', "top_p must be a number above 0"),
        ('{"prompt": "a", "temperature": NaN}', "temperature must be a number"),
        ('{"prompt": "a", "max_tokens": "5"}', "max_tokens must be a whole number"),
        ('{"prompt": "a", "n": null}', "n must be a whole number"),
    ],
)
def test_a_broken_line_is_refused_and_its_neighbours_are_read(read, text: str | bytes, reason: str) -> None:
    before, broken, after = read('{"prompt": "a"}', text, '{"prompt": "b"}')
    assert isinstance(broken, RefusedLine)
    assert broken.number == 2
    assert reason in broken.reason
    assert "\n" not in broken.reason
    assert [before.prompt, after.prompt] == ["a", "b"]


@pytest.mark.parametrize(
    "message",
    [
        '{"role": "user", "content": [{"type": "text", "text": "a"}]}',
        '{"role": "assistant", "content": null, "tool_calls": [{"id": "a"}]}',
    ],
)
def test_content_may_be_parts_and_absent_beside_tool_calls(read, message: str) -> None:
    (line,) = read('{"messages": [' + message + "]}")
    assert line.prompt == {"messages": [json.loads(message)]}


def test_a_repeated_id_is_refused_also_when_one_is_a_number(read) -> None:
    first, second, third = read('{"id": "1", "prompt": "a"}', '{"id": 1, "prompt": "b"}', '{"prompt": "c"}')
    assert isinstance(first, PromptLine)
    assert isinstance(second, RefusedLine)
    assert (second.id, second.reason) == ("line-2", "id '1' was already used by line 1")
    assert isinstance(third, PromptLine)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_gets_a_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "empty.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"empty\.jsonl' holds no prompt"):
        read_prompts(tmp_path / "empty.jsonl", DEFAULTS)


def test_a_missing_file_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.jsonl' cannot be read \(No such file"):
        read_prompts(tmp_path / "absent.jsonl", DEFAULTS)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    write_prompts(path, [{"id": "a", "prompt": "1+1\n"}, {"id": "b", "prompt": "é\u2028"}])
    lines = read_prompts(path, DEFAULTS)
    assert [(line.id, line.prompt) for line in lines] == [("a", "1+1\n"), ("b", "é\u2028")]


# Lengths and arrivals


def test_a_line_can_say_its_length_and_its_arrival(read) -> None:
    first, second = read('{"prompt": "a", "output_len": 5, "arrival_s": 1.5}', '{"prompt": "a", "output_len": null}')
    assert (first.output_len, first.arrival_s) == (5, 1.5)
    assert (second.output_len, second.arrival_s) == (None, 0.0)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ('"output_len": 0', "output_len must be a whole number from 1 to 10000000, not 0"),
        ('"output_len": 1.5', "output_len must be a whole number from 1"),
        ('"output_len": true', "output_len must be a whole number from 1"),
        ('"output_len": "5"', "output_len must be a whole number from 1"),
        ('"output_len": 100000000', "output_len must be a whole number from 1"),
        ('"output_len": 5, "stop": "x"', "stop must be empty beside output_len, which alone ends the samples"),
        ('"output_len": 5, "stop_token_ids": [3]', "stop_token_ids must be empty beside output_len"),
        ('"arrival_s": -1', r"arrival_s must be a number of seconds from 0 to 1e+09, not -1"),
        ('"arrival_s": NaN', "arrival_s must be a number of seconds"),
        ('"arrival_s": Infinity', "arrival_s must be a number of seconds"),
        ('"arrival_s": true', "arrival_s must be a number of seconds"),
        ('"arrival_s": null', "arrival_s must be a number of seconds"),
        ('"arrival_s": "0"', "arrival_s must be a number of seconds"),
    ],
)
def test_an_impossible_length_or_arrival_is_refused(read, fields: str, reason: str) -> None:
    broken, good = read(f'{{"prompt": "a", {fields}}}', '{"prompt": "b"}')
    assert isinstance(broken, RefusedLine)
    assert reason in broken.reason
    assert isinstance(good, PromptLine)


@pytest.fixture
def simulated(tmp_path: Path):
    def jobs_of(*lines: str) -> list[Job]:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(line + "\n" for line in lines))
        return PromptsWorkload(path=path).jobs()

    return jobs_of


def test_a_file_with_lengths_can_be_simulated(simulated) -> None:
    jobs = simulated(
        '{"id": "b", "prompt_token_ids": [1, 2], "output_len": 7, "max_tokens": 9, "arrival_s": 2}',
        '{"prompt_token_ids": [3], "max_tokens": 4}',
        '{"prompt_token_ids": [3], "output_len": 5, "arrival_s": 1}',
        '{"prompt_token_ids": [3], "output_len": 5, "max_tokens": 3}',
    )
    told = [(job.id, job.prompt.token_ids, job.output_len, job.max_tokens, job.arrival_s) for job in jobs]
    assert told == [
        ("line-2", (3,), 4, 4, 0.0),
        ("line-4", (3,), 3, 3, 0.0),
        ("line-3", (3,), 5, None, 1),
        ("b", (1, 2), 7, 9, 2),
    ]


def test_what_a_simulated_line_does_not_say_the_sampling_says(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_token_ids": [1]}\n{"prompt_token_ids": [2], "n": 1, "max_tokens": 3, "top_k": 5}\n')
    sampling = SamplingParams(n=2, max_tokens=7, prompt_logprobs=0)
    jobs = PromptsWorkload(path=path, sampling=sampling).jobs()
    assert [(job.id, job.output_len, job.max_tokens) for job in jobs] == [
        ("line-1-0", 7, 7),
        ("line-1-1", 7, 7),
        ("line-2-0", 3, 3),
    ]
    assert jobs[0].params == sampling
    assert jobs[2].params == SamplingParams(n=1, max_tokens=3, top_k=5, prompt_logprobs=0)


def test_that_a_length_is_only_a_bound_is_logged(simulated, caplog: pytest.LogCaptureFixture) -> None:
    simulated('{"prompt_token_ids": [3], "output_len": 4}')
    assert caplog.text == ""
    simulated('{"prompt_token_ids": [3], "max_tokens": 4}', '{"prompt_token_ids": [3], "output_len": 4}')
    assert "1 of 2 lines have no output_len: their samples are taken to be max_tokens long" in caplog.text


def test_samples_of_a_simulated_line_are_numbered(simulated) -> None:
    jobs = simulated(
        '{"id": "a", "prompt_token_ids": [1], "max_tokens": 3, "n": 2}',
        '{"id": "a-1", "prompt_token_ids": [1], "max_tokens": 3}',
    )
    assert [job.id for job in jobs] == ["a-0", "a-1", "a-1-0"]
    assert jobs[0].prompt is jobs[1].prompt


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a", "max_tokens": 3}', "line 2: must have prompt_token_ids, and output_len or max_tokens"),
        ('{"prompt_token_ids": [1]}', "line 2: must have prompt_token_ids, and output_len or max_tokens"),
        ('{"prompt_token_ids": []}', "line 2: prompt_token_ids must be a list of at least one token id"),
        ("{", "line 2: not valid JSON"),
    ],
)
def test_what_cannot_be_simulated_gets_one_sentence(simulated, line: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^workload.path must be a file of prompts.*{reason}"):
        simulated('{"prompt_token_ids": [1], "max_tokens": 3}', line)


def test_a_missing_file_cannot_be_simulated(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^workload.path must be a file of prompts: .* cannot be read"):
        PromptsWorkload(path=tmp_path / "absent").jobs()
