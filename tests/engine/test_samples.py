"""Checks what is made of a step's results: samples that grow, updates, and outputs."""

from typing import Any

from paged.core.prompt import Prompt
from paged.core.request import Request, SamplingParams
from paged.core.scheduler import Finished
from paged.core.sequence import FinishReason
from paged.runner.payload import StepPayload, Stop
from paged.samples import Samples, StepOutput


class Words:
    """A tokenizer and stream whose tokens are their numbers; text is told at once."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.num_released = 0

    def stream(self, stops: object) -> Any:
        return Words()

    def push(self, token: int) -> None:
        self.told.append(f"{token} ")

    def release(self) -> str:
        text = "".join(self.told)
        self.told.clear()
        self.num_released += len(text)
        return text

    def decode(self, token_ids: list[int]) -> str:
        return "".join(f"{token} " for token in token_ids)


def request(name: str, sample: int = 0) -> Request:
    return Request(name, sample, Prompt([1, 2]), SamplingParams(n=2, logprobs=1), 0, 9)


def payload(*tokens: int, **fields: Any) -> StepPayload:
    columns = {"top_logprobs": {}, "stops": {}, "scores": [], **fields}
    logprobs = [-float(token) for token in tokens]
    return StepPayload(list(tokens), logprobs, [2 * logprob for logprob in logprobs], **columns)


def test_each_row_goes_to_its_own_sample() -> None:
    first, second, dropped = request("a"), request("a", 1), request("b")
    samples = Samples(None, "id")
    samples.add([first, second], stream_text=True)
    top = ([7], [-0.5])
    samples.take_in(StepOutput(payload(5, 6, 7, 8, top_logprobs={1: top, 3: top}), [first, None, dropped, second], ()))
    assert [sample.token_ids for sample in samples.live.values()] == [[5], [8]]
    assert [sample.behavior_logprobs for sample in samples.live.values()] == [[-10.0], [-16.0]]
    assert [sample.top_logprobs for sample in samples.live.values()] == [[], [top]]
    told = samples.take_updates(list(samples.undelivered))
    assert [(update.request_id, update.sample, update.token_ids, update.logprobs) for update in told] == [
        ("a", 0, [5], [-5.0]),
        ("a", 1, [8], [-8.0]),
    ]
    assert samples.undelivered == {}


def test_an_end_is_told_with_the_last_token_and_the_stop_is_no_text() -> None:
    """The token that is itself the stop is neither in the streamed text nor in the output's."""
    ends, goes_on = request("a"), request("b")
    samples = Samples(Words(), "id")  # type: ignore[arg-type]
    samples.add([ends, goes_on], stream_text=True)
    samples.take_in(StepOutput(payload(4, 5), [ends, goes_on], ()))
    stop = {0: Stop(None, is_token=True)}
    finished = [Finished(ends, FinishReason.STOP, 2, 0, 0)]
    samples.take_in(StepOutput(payload(9, 6, stops=stop), [ends, goes_on], finished))
    told = samples.take_updates(["a", "b"])
    assert [(update.request_id, update.token_ids, update.text) for update in told] == [
        ("a", [4], "4 "),
        ("a", [9], ""),
        ("b", [5], "5 "),
        ("b", [6], "6 "),
    ]
    output = told[1].output
    assert output is not None
    assert (output.token_ids, output.text, output.finish_reason) == ([4, 9], "4 ", "stop")
    assert [update.output for update in told if update is not told[1]] == [None] * 3
    assert not samples.is_current(ends)
    assert samples.is_current(goes_on)


def test_another_request_may_have_the_id_of_one_that_was_forgotten() -> None:
    """A cancelled request's row that was still in flight went to the one that was added under its id."""
    old, new = request("a"), request("a")
    assert old.key == new.key
    samples = Samples(None, "id")
    samples.add([old], stream_text=False)
    samples.forget(["a"])
    samples.add([new], stream_text=False)
    samples.take_in(StepOutput(payload(3), [old], [Finished(old, FinishReason.ABORT, 1, 0, 0)]))
    assert samples.undelivered == {}
    assert [sample.token_ids for sample in samples.live.values()] == [[]]


def test_updates_that_an_output_holds_are_dropped() -> None:
    first, second = request("a"), request("a", 1)
    samples = Samples(None, "id")
    samples.add([first, second], stream_text=False)
    samples.take_in(StepOutput(payload(3, 4), [first, second], ()))
    samples.drop_updates("a", {0})
    assert [update.sample for update in samples.undelivered["a"]] == [1]
    samples.drop_updates("a", {1})
    assert samples.undelivered == {}
