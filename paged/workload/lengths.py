"""Owns distributions of lengths, of prompts and outputs alike, and the ways in which a config can describe one."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from paged.core.checks import check_number, check_whole
from paged.workload.job import MAX_LENGTH, InputFiles
from paged.workload.trace import read_lengths, trace_files

Sampler = Callable[[random.Random], int]


class Lengths(ABC):
    """A distribution of whole numbers of tokens, from 1 to `MAX_LENGTH`."""

    __slots__ = ()

    @abstractmethod
    def sampler(self) -> Sampler:
        """Draws a length from the generator it is given; raises ``ValueError`` if a file it needs is unusable."""

    def input_files(self) -> list[InputFiles]:
        """The files that `sampler` reads."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed(Lengths):
    """Always the same length, in tokens."""

    length: int

    def __post_init__(self) -> None:
        check_whole("length", self.length, 1, MAX_LENGTH)

    def sampler(self) -> Sampler:
        """Draws nothing."""
        return lambda generator: self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform(Lengths):
    """Every length from `low` to `high` tokens alike."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    def sampler(self) -> Sampler:
        """One whole number a draw."""
        return lambda generator: generator.randint(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal(Lengths):
    """Lengths whose logarithm is normal: half below `median` tokens, and the larger `sigma`, the longer the tail.

    Rounded down, then moved into `low` to `high`; `low` is at most the median.
    """

    median: float
    sigma: float
    low: int = 1
    high: int | None = None

    def __post_init__(self) -> None:
        check_number("median", self.median, 0.0, MAX_LENGTH, open_low=True)
        check_number("sigma", self.sigma, 0.0, 10.0)
        _check_bounds(self.low, self.high)
        _check_median(self.median, self.low)

    def sampler(self) -> Sampler:
        """One log-normal number a draw."""
        low, high = self.low, self.high or MAX_LENGTH
        return lambda generator: max(low, min(high, int(generator.lognormvariate(0.0, self.sigma) * self.median)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto(Lengths):
    """Lengths of at least `scale` tokens, of which a share of `(scale / x) ** alpha` exceeds x.

    Rounded down, then moved into `low` to `high`; `low` is at most the median. The mean is
    `scale * alpha / (alpha - 1)`, infinite for an alpha of 1 or less.
    """

    scale: float
    alpha: float
    low: int = 1
    high: int | None = None

    def __post_init__(self) -> None:
        check_number("scale", self.scale, 0.0, MAX_LENGTH, open_low=True)
        check_number("alpha", self.alpha, 0.1, 100.0)
        _check_bounds(self.low, self.high)
        _check_median(self.scale * 2 ** (1 / self.alpha), self.low)

    def sampler(self) -> Sampler:
        """One Pareto number a draw."""
        low, high = self.low, self.high or MAX_LENGTH
        return lambda generator: max(low, min(high, int(self.scale * generator.paretovariate(self.alpha))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Empirical(Lengths):
    """Lengths seen before, each as likely as it was frequent.

    Attributes:
        lengths: the lengths, in tokens.
        path: instead of them, a file of lengths (a whole number a line) or a trace in any form that `trace` reads.
        outputs: which of a trace's lengths are meant: its outputs' or its prompts'.
    """

    lengths: tuple[int, ...] | None = None
    path: Path | None = None
    outputs: bool = True

    def __post_init__(self) -> None:
        if (self.lengths is None) == (self.path is None):
            raise ValueError("lengths or path must be given, and not both")
        if self.lengths is not None and not self.lengths:
            raise ValueError("lengths must hold at least one length")
        for length in self.lengths or ():
            if type(length) is not int or not 1 <= length <= MAX_LENGTH:
                raise ValueError(f"lengths must be whole numbers from 1 to {MAX_LENGTH}, not {length!r}")

    def sampler(self) -> Sampler:
        """One choice a draw; the file is read once for all of them."""
        lengths: Sequence[int] | None = self.lengths
        if self.path is not None:
            try:
                lengths = read_lengths(self.path, outputs=self.outputs)
            except ValueError as error:
                key = f"workload.{'output' if self.outputs else 'prompt'}.path"
                raise ValueError(f"{key} must be a file of lengths or a trace: {error}") from error
        assert lengths is not None
        return lambda generator: generator.choice(lengths)

    def input_files(self) -> list[InputFiles]:
        """The file of lengths, or the trace and what is read with it."""
        return [] if self.path is None else [trace_files(self.path)]


_KINDS: Final[Mapping[str, type]] = {
    "fixed": Fixed,
    "uniform": Uniform,
    "lognormal": LogNormal,
    "pareto": Pareto,
    "empirical": Empirical,
}
KEYS: Final = ("dist", "length", "low", "high", "median", "sigma", "scale", "alpha", "lengths", "path")
"""Every key that some distribution has in a config."""
_EXAMPLES: Final[Mapping[str, str]] = {
    "fixed": "fixed:512",
    "uniform": "uniform:100:1024",
    "lognormal": "lognormal:1200:0.9",
    "pareto": "pareto:400:1.3",
    "empirical": "empirical:results.jsonl",
}
_BOUNDED: Final = ("lognormal", "pareto")
"""Distributions whose text may end with both bounds."""
_FORMS: Final = "a whole number, a text such as lognormal:1200:0.9, or keys with dist"


def lengths_from(value: object, key: str, *, outputs: bool) -> Lengths:
    """The distribution that a config's value describes.

    The value is a whole number (`fixed`), a mapping with `dist` and the fields of that distribution, or a text: the
    distribution and its fields in order, between colons (`uniform:100:1024`, `empirical:results.jsonl`).

    Args:
        value: of the config.
        key: its dotted name, for messages.
        outputs: whether the lengths are those of outputs, which says what `empirical` takes from a trace.

    Raises:
        ValueError: one sentence with the dotted key and what is allowed.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"dist": "fixed", "length": value}
    elif isinstance(value, str):
        value = _from_text(value, key)
    if not isinstance(value, Mapping):
        shown = "null" if value is None else repr(value)
        raise ValueError(f"{key} must be {_FORMS}, not {shown}")
    name = value.get("dist")
    if not isinstance(name, str) or name not in _KINDS:
        raise ValueError(f"{key}.dist must be one of {', '.join(_KINDS)}, not {name!r}")
    kind = _KINDS[name]
    known = {field.name: field for field in fields(kind) if field.name != "outputs"}
    given: dict[str, Any] = {}
    for field, number in value.items():
        if field == "dist" or number is None:
            continue
        if field not in known:
            near = get_close_matches(str(field), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            whole = f"a text such as {key}={_EXAMPLES[name]} replaces all keys"
            raise ValueError(f"{key}.{field} is not a key of {name} lengths; {hint} ({whole})")
        given[field] = number
    for missing in [field for field in known if known[field].default is MISSING and field not in given]:
        raise ValueError(f"{key}.{missing} must be given: {name} lengths have {', '.join(known)}")
    if kind is Empirical:
        given = {**_empirical(given, key), "outputs": outputs}
    try:
        lengths: Lengths = kind(**given)
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from error
    return lengths


def _from_text(text: str, key: str) -> dict[str, Any]:
    name, _, rest = text.partition(":")
    if name not in _KINDS or not rest:
        raise ValueError(f"{key} must be a text such as {', '.join(_EXAMPLES.values())}, not {text!r}")
    if name == "empirical":
        return {"dist": name, "path": rest}
    names = [field.name for field in fields(_KINDS[name])]
    allowed = [names[:-2], names] if name in _BOUNDED else [names]
    parts = rest.split(":")
    if len(parts) not in map(len, allowed):
        forms = " or ".join(":".join([name, *map(str.upper, each)]) for each in allowed)
        # A third number looks like the most and would be the least.
        hint = "; workload.cap bounds outputs" if len(parts) > len(allowed[0]) and key == "workload.output" else ""
        raise ValueError(f"{key} must be {forms}, not {text!r}{hint}")
    return {"dist": name, **{field: _number(part, key) for field, part in zip(names, parts, strict=False)}}


def _number(text: str, key: str) -> int | float:
    try:
        return int(text) if text.removeprefix("-").isdecimal() else float(text)
    except ValueError:
        raise ValueError(f"{key} must have numbers between its colons, not {text!r}") from None


def _empirical(given: dict[str, Any], key: str) -> dict[str, Any]:
    """The fields of Empirical as their types; a config gives a list and a text."""
    lengths, path = given.get("lengths"), given.get("path")
    if lengths is not None and not isinstance(lengths, list | tuple):
        raise ValueError(f"{key}.lengths must be a list of whole numbers, not {lengths!r}")
    if path is not None and not isinstance(path, str):
        raise ValueError(f"{key}.path must be a text, not {path!r}")
    return {
        "lengths": None if lengths is None else tuple(lengths),
        "path": None if path is None else Path(path).expanduser(),
    }


def _check_bounds(low: int, high: int | None) -> None:
    check_whole("low", low, 1, MAX_LENGTH)
    if high is not None:
        check_whole("high", high, 1, MAX_LENGTH)
        if high < low:
            raise ValueError(f"high must be at least low, {low}, not {high}")


def _check_median(median: float, low: int) -> None:
    if low > median:
        raise ValueError(f"low must be at most the median, {median:g}, not {low}, which most would have")
