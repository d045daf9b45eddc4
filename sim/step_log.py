"""Reads the step log of a run, `steps.jsonl`, event by event; its writer is `paged.step_log`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paged.core.sequence import FinishReason

STEPS_FILE: Final = "steps.jsonl"


@dataclass(frozen=True, slots=True)
class Event:
    """What every event has.

    Attributes:
        line: its line in the file, from 1.
        time_s: when it was logged, on the clock of the process, seconds.
    """

    line: int
    time_s: float


@dataclass(frozen=True, slots=True)
class ConfigEvent(Event):
    """A process began: the limits and the policy of its scheduler, which knows nothing of what came before."""

    limits: dict[str, Any]
    policy: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AddEvent(Event):
    """Samples of one request were queued, each with its seed; `output_len` is null unless the length was forced."""

    id: str
    samples: list[int]
    seeds: list[int]
    prompt_token_ids: list[int]
    max_tokens: int
    is_scored: bool
    output_len: int | None


@dataclass(frozen=True, slots=True)
class AbortEvent(Event):
    """A request (`sample` is None) or one sample of it ended from outside."""

    id: str
    sample: int | None
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class PlanEvent(Event):
    """A step was decided: the columns of its `StepPlan`; `started` holds slot, id, sample, cached tokens and blocks."""

    step: int
    weight_version: int
    slots: list[int]
    starts: list[int]
    lengths: list[int]
    logits: list[int]
    started: list[Any]
    appended: list[Any]
    released: list[int]
    preempted: list[Any]


@dataclass(frozen=True, slots=True)
class EmptyPlanEvent(Event):
    """The scheduler was asked for a step and had none; looking may have preempted."""


@dataclass(frozen=True, slots=True)
class CommitEvent(Event):
    """A step was done; `start_s` and `end_s` are on the executor's clock."""

    step: int
    tokens: list[int]
    stopped: list[bool]
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class WeightsEvent(Event):
    """Other weights from here on; running sequences wait again."""

    version: int


@dataclass(frozen=True, slots=True)
class AbandonEvent(Event):
    """All plans in flight were dropped."""


class StepLogReader:
    """The events of a log in order, each checked; the file is read as they are asked for, never as a whole.

    Iterating raises `ValueError`, one sentence with the line's number, for a line that is no event. A last line that
    is torn, because the process died while writing it, is left out.

    Attributes:
        path: the file.
        torn_line: number of the line left out, once it has been met.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn_line: int | None = None

    def __iter__(self) -> Iterator[Event]:
        number = 0
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    try:
                        event = _event(line, number)
                    except ValueError as error:
                        # The writer ends each line with its newline, so only the last one can lack it.
                        if line.endswith(b"\n"):
                            raise ValueError(f"{self.path}, line {number}: {error}") from error
                        self.torn_line = number
                        break
                    if number == 1 and not isinstance(event, ConfigEvent):
                        raise ValueError(f"{self.path}, line 1: a step log begins with an event config")
                    yield event
        except OSError as error:
            raise ValueError(f"{self.path} can't be read: {error.strerror}") from error
        if number - (self.torn_line is not None) < 1:
            raise ValueError(f"{self.path} holds no events")


def step_log_of(folder: Path) -> Path:
    """The step log of a run's folder, or the log itself if that is what is given.

    Raises:
        ValueError: there is none; the sentence says what is there instead.
    """
    path = folder if folder.is_file() else folder / STEPS_FILE
    if path.is_file():
        return path
    if not folder.exists():
        raise ValueError(f"{folder} does not exist")
    runs = sorted((log.parent.name for log in folder.glob(f"*/{STEPS_FILE}")), key=lambda name: (len(name), name))
    if runs:
        some = ", ".join(runs[:3]) + (", ..." if len(runs) > 3 else "")
        raise ValueError(f"{folder} is the folder of a sweep: give one of the folders in it, {some}")
    raise ValueError(f"{folder} holds no {STEPS_FILE}, which every run leaves")


def _event(line: bytes, number: int) -> Event:
    """One line as an event; ``ValueError`` says what is wrong with it."""
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(facts, dict):
        raise ValueError("not a JSON object")
    name = facts.get("event")
    if not isinstance(name, str) or name not in _READERS:
        raise ValueError(f"event must be one of {', '.join(_READERS)}, not {name!r}")
    return _READERS[name](_Facts(name, facts), number)


class _Facts:
    """An event's values by key; each method gives one of its type or raises ``ValueError`` naming the key."""

    __slots__ = ("_event", "_facts")

    def __init__(self, event: str, facts: Mapping[str, Any]) -> None:
        self._event = event
        self._facts = facts

    def has(self, key: str) -> bool:
        return key in self._facts

    def get(self, key: str) -> Any:
        if key not in self._facts:
            raise ValueError(f"event {self._event} lacks {key}")
        return self._facts[key]

    def wrong(self, key: str, allowed: str) -> ValueError:
        return ValueError(f"{key} of event {self._event} must be {allowed}, not {json.dumps(self._facts[key])[:80]}")

    def number(self, key: str) -> float:
        value = self.get(key)
        if type(value) not in (int, float) or not abs(value) < float("inf"):
            raise self.wrong(key, "a number")
        return float(value)

    def whole(self, key: str) -> int:
        value = self.get(key)
        if type(value) is not int:
            raise self.wrong(key, "a whole number")
        return value

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def boolean(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value

    def list_of(self, key: str, kind: type, allowed: str) -> list[Any]:
        value = self.get(key)
        if type(value) is not list or not {kind}.issuperset(map(type, value)):
            raise self.wrong(key, allowed)
        return value

    def wholes(self, key: str) -> list[int]:
        return self.list_of(key, int, "a list of whole numbers")

    def rows(self, key: str, *kinds: type) -> list[Any]:
        """A list of lists whose items have these types in order."""
        value = self.get(key)
        wanted = list(kinds)
        if type(value) is not list or not all(type(row) is list and list(map(type, row)) == wanted for row in value):
            raise self.wrong(key, f"a list of [{', '.join(kind.__name__ for kind in kinds)}]")
        return value

    def whole_or_none(self, key: str) -> int | None:
        return None if self.get(key) is None else self.whole(key)


def _config(facts: _Facts, line: int) -> Event:
    return ConfigEvent(line, facts.number("time_s"), facts.mapping("limits"), facts.mapping("policy"))


def _add(facts: _Facts, line: int) -> Event:
    samples, seeds, prompt = facts.wholes("samples"), facts.wholes("seeds"), facts.wholes("prompt_token_ids")
    if not samples or len(samples) != len(seeds):
        raise ValueError(f"event add must hold a seed for each sample, not {len(seeds)} for {len(samples)}")
    # Older logs lack the key.
    output_len = facts.whole_or_none("output_len") if facts.has("output_len") else None
    max_tokens, is_scored = facts.whole("max_tokens"), facts.boolean("is_scored")
    time_s = facts.number("time_s")
    return AddEvent(line, time_s, facts.text("id"), samples, seeds, prompt, max_tokens, is_scored, output_len)


def _abort(facts: _Facts, line: int) -> Event:
    sample, reason = facts.whole_or_none("sample"), facts.text("reason")
    if reason not in {*FinishReason}:
        raise ValueError(f"reason of event abort must be one of {', '.join(FinishReason)}, not {reason!r}")
    return AbortEvent(line, facts.number("time_s"), facts.text("id"), sample, FinishReason(reason))


def _plan(facts: _Facts, line: int) -> Event:
    time_s = facts.number("time_s")
    if facts.get("step") is None:
        return EmptyPlanEvent(line, time_s)
    slots, starts, lengths, logits = (facts.wholes(key) for key in ("slots", "starts", "lengths", "logits"))
    if not 0 < len(slots) == len(starts) == len(lengths) == len(logits):
        raise ValueError("slots, starts, lengths and logits of event plan must be equally long and not empty")
    if min(starts) < 0 or min(lengths) < 1:
        raise ValueError("starts of event plan must be at least 0, and lengths at least 1")
    return PlanEvent(
        line,
        time_s,
        facts.whole("step"),
        facts.whole("weight_version"),
        slots,
        starts,
        lengths,
        logits,
        facts.rows("started", int, str, int, int, list),
        facts.rows("appended", int, int),
        facts.wholes("released"),
        facts.rows("preempted", str, int),
    )


def _commit(facts: _Facts, line: int) -> Event:
    tokens, stopped = facts.wholes("tokens"), facts.list_of("stopped", bool, "a list of true and false")
    if len(tokens) != len(stopped):
        raise ValueError(f"event commit must hold a flag for each token, not {len(stopped)} for {len(tokens)}")
    start_s, end_s = facts.number("start_s"), facts.number("end_s")
    if end_s < start_s:
        raise ValueError(f"end_s of event commit must not lie before start_s, {end_s} < {start_s}")
    return CommitEvent(line, facts.number("time_s"), facts.whole("step"), tokens, stopped, start_s, end_s)


def _weights(facts: _Facts, line: int) -> Event:
    return WeightsEvent(line, facts.number("time_s"), facts.whole("version"))


def _abandon(facts: _Facts, line: int) -> Event:
    return AbandonEvent(line, facts.number("time_s"))


_READERS: Final[Mapping[str, Callable[[_Facts, int], Event]]] = {
    "config": _config,
    "add": _add,
    "abort": _abort,
    "plan": _plan,
    "commit": _commit,
    "weights": _weights,
    "abandon": _abandon,
}
