"""From a composed config to checked objects, and the one sentence for whatever is wrong on the way."""

from __future__ import annotations

import difflib
import importlib
import re
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Final

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError
from yaml import MarkedYAMLError, YAMLError
from yaml.reader import ReaderError

from paged.core.json_files import too_many_digits
from paged.outcome import UserError

GIVEN: Final = "given"
"""Metadata of a schema's field that has no default: what it must be, in words."""
INNER: Final = "inner"
"""Metadata of a schema's field that may hold keys of several kinds: all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """What a command's root file holds; each module of this package that is named like a command has its `ROOT`.

    Attributes:
        scalars: schema of the keys that are no groups.
        groups: the schema of each key that holds keys; of a group whose entries differ, the schema by entry's `name`.
        optional: groups that need not be there, because the command only checks them; what is there is checked.
        ignored: schema of scalars that only another command reads, and that an experiment may have all the same.
    """

    scalars: type
    groups: Mapping[str, type | Mapping[str, type]]
    optional: Collection[str] = ()
    ignored: type | None = None

    def read(self, cfg: DictConfig) -> tuple[Any, dict[str, Any]]:
        """The object of `scalars` and, by key, those of the groups' schemas.

        Raises:
            UserError: naming the key and what is allowed.
        """
        try:
            container = OmegaConf.to_container(cfg, resolve=True)
        except OmegaConfBaseException as error:
            raise UserError(f"{error.full_key}: {_first_line(error)}") from error
        assert isinstance(container, dict)
        values = {str(key): value for key, value in container.items()}
        if "experiment" in values:
            line = "the line `# @package _global_`, without which it changes nothing"
            raise UserError(f"{_experiment()} must begin with {line}")
        groups: dict[str, Any] = {}
        for key, schema in self.groups.items():
            if key in self.optional and key not in values:
                continue
            if isinstance(schema, Mapping):
                groups[key] = _choose(schema, values, key)
            else:
                groups[key] = _convert(schema, _group(values, key), f"{key}.")
        ignored = () if self.ignored is None else _check_given(self.ignored, values)
        return _convert(self.scalars, values, "", others=(*self.groups, *ignored)), groups

    def keys(self) -> list[str]:
        """Every key that some config of the command has, dotted."""
        keys = [*self.groups, "experiment", *_dotted(self.scalars, "")]
        for key, schema in self.groups.items():
            for each in schema.values() if isinstance(schema, Mapping) else [schema]:
                keys += _dotted(each, f"{key}.")
        return list(dict.fromkeys(keys))


def conf_folder() -> Path:
    """Where the YAML files are: beside the package in a clone, inside it once installed."""
    import paged.conf

    return Path(next(iter(paged.conf.__path__))).resolve()


_OTHER_NAMES: Final = {
    "tensor_parallel_size": "tp",
    "max_model_len": "max_seq_len",
    "kv_cache_dtype": "kv_dtype",
    "max_num_batched_tokens": "max_step_tokens",
    "workload.n": "workload.num_samples",
    "n": "num_samples",
}
"""What other programs call a key of ours."""
_RUN_AND_SIM: Final = {"run": "sim", "sim": "run"}
"""The commands that take the same description, but for a few keys of their own."""


def nearest(key: str, known: Iterable[str]) -> str:
    """`did you mean X?` for a misspelt key, or else what there is."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"allowed: {', '.join(names)}"


def groups_of(command: str) -> list[str]:
    """The groups that a command's root file chooses from."""
    root = OmegaConf.load(conf_folder() / f"{command}.yaml")
    assert isinstance(root, DictConfig)
    chosen = [entry for entry in root.defaults if isinstance(entry, DictConfig)]
    return [str(group) for entry in chosen for group in entry if group != "hydra"]


def known_keys(command: str) -> list[str]:
    """Every key that some config of the command has, dotted."""
    return _root(command).keys()


def _root(command: str) -> Root:
    root = importlib.import_module(f"paged.config.{command}").ROOT
    assert isinstance(root, Root)
    return root


def hydra_sentence(error: Exception, command: str, overrides: Sequence[str] = (), own_conf: Path | None = None) -> str:
    """One sentence for an error of Hydra's or OmegaConf's, which name their own remedies over several lines.

    Args:
        error: while the config was composed.
        command: the command word, whose keys a misspelt one is compared with.
        overrides: of the command line.
        own_conf: the user's own folder of config files, if one was given.
    """
    from hydra.errors import MissingConfigException, OverrideParseException

    message = str(error) or str(error.__cause__)
    if isinstance(error, YAMLError | UnicodeDecodeError):
        return _unreadable(error, own_conf)
    if (told := too_many_digits(error)) is not None:
        return f"the config {told}"
    if isinstance(error, TypeError) or message.startswith("Config group override must be"):
        # Hydra takes the items of a list that is given to a group for names, and names neither it nor the group.
        reason = f"a group must be given the name of one of its options: {_first_line(message)}"
        return _unnamed_option(overrides, command, own_conf) or reason
    if isinstance(error, OverrideParseException):
        reason = f"cannot read the override {error.override!r}: it must be KEY=VALUE or GROUP=OPTION"
        return reason + _quoting_hint(str(error.override))
    if isinstance(error, MissingConfigException):
        if error.options is not None and error.missing_cfg_file is not None:
            group, _, option = error.missing_cfg_file.rpartition("/")
            if not error.options:
                inside = group.rpartition("/")[2]
                hint = f"; a file's defaults choose another group's option with `override /{inside}: {option}`"
                return f"there is no group {group}{hint if inside in groups_of(command) else ''}"
            return f"{group} must be one of {', '.join(error.options)}, not {option!r}"
        return _first_line(message)
    first = _first_line(message)
    if first.startswith("Could not override '") or first.startswith("Could not delete"):
        return _unknown_key(error, first.split("'")[1].split("@")[0], command)
    if first.startswith("Ambiguous value for argument"):
        override = first.split("'")[1]
        return f"{override!r} gives several values: add -m for a sweep, or write a list as KEY=[A,B]"
    if first.startswith("Error merging override") and error.__cause__ is not None:
        override = first.removeprefix("Error merging override ")
        key, _, value = override.lstrip("+").partition("=")
        wanted = _wanted(command, key)
        return f"{key} must {wanted}, not {value}" if wanted else f"{first}: {_first_line(error.__cause__)}"
    if in_file := re.match(r"In '(.+)': \w+ raised while composing config:\n(.*)", message):
        return _unfit(in_file[1], in_file[2], own_conf)
    return first


def _unknown_key(error: Exception, key: str, command: str) -> str:
    """A sentence for the key of an override that the config has not, with what may have been meant."""
    wrong = getattr(error.__cause__, "full_key", None) or key
    # Of a mapping that was given, one of its keys may be what is wrong.
    key = wrong if wrong.startswith(f"{key}.") else key
    known = known_keys(command)
    if key.startswith(f"{wrong}.") and wrong in groups_of(command):
        return f"{key} can only be set beside {wrong}=NAME, because no {wrong} is chosen"
    if key in known and "." in key:
        return f"{key} is not a key of the {key.partition('.')[0]} that is chosen; see --cfg job"
    if key.startswith("hydra"):
        return f"{key} is not a key of Hydra's config; see --cfg hydra"
    root = key.rpartition(".")[0]
    group = key.partition(".")[0]
    if group in _root("run").groups and group not in known:
        return f"{command} takes no {group}{'.*' if '.' in key else ''}"
    other = _RUN_AND_SIM.get(command)
    if other is not None and key in {each.name for each in fields(_root(other).scalars)} - set(known):
        return f"{command} takes no {key}, which only {other} reads"
    # The key of another program, or one that is a level further down.
    meant = {key, _OTHER_NAMES.get(key, key)}
    deeper = [name for name in known if name in meant or (not root and name.rpartition(".")[2] in meant)]
    if deeper:
        return f"{key} is not a key of this config; did you mean {' or '.join(deeper[:3])}?"
    siblings = [name for name in known if name.rpartition(".")[0] == root]
    if not siblings:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        siblings = near or [name for name in known if "." not in name]
    return f"{key} is not a key of this config; {nearest(key, siblings)}"


def _quoting_hint(override: str) -> str:
    """How to write an override that cannot be read for characters that its value holds, if that is why."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, value = override.partition("=")
    escaped = value.replace("'", "\\'")
    quoted = f"{key}='{escaped}'"
    if not value:
        return ""
    try:
        OverridesParser.create().parse_override(quoted)
    except HydraException:
        return ""
    # The shell takes the outer quotes away.
    return f'; a value that holds other characters stands in quotes of its own, "{quoted}"'


def _unnamed_option(overrides: Sequence[str], command: str, own_conf: Path | None) -> str | None:
    """A sentence for the first of `overrides` that gives a group something else than a name; None if none does."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep, QuotedString

    for override in OverridesParser.create().parse_overrides(list(overrides)):
        group, value = override.key_or_group, override.value()
        values = value.list if isinstance(value, ChoiceSweep) else value if isinstance(value, list) else [value]
        wrong = [each for each in values if not isinstance(each, str | QuotedString)]
        if wrong and group in groups_of(command) and not override.is_delete():
            folders = [conf_folder()] if own_conf is None else [own_conf, conf_folder()]
            options = sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})
            return f"{group} must be one of {', '.join(options)}, not {_shown(wrong[0])}"
    return None


def _experiment() -> str:
    """The file of the experiment that is chosen, as far as it is known."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return "an experiment's file"
    runtime = HydraConfig.get().runtime
    folders = [Path(source.path) for source in runtime.config_sources if source.schema == "file"]
    return _file_of(f"experiment/{runtime.choices['experiment']}", folders)


def _file_of(name: str, folders: Iterable[Path]) -> str:
    """The file of a config in the first of `folders` that has it; else its name."""
    files = (folder / f"{name}.yaml" for folder in folders)
    return next((str(file) for file in files if file.is_file()), name)


def _unreadable(error: YAMLError | UnicodeDecodeError, own_conf: Path | None) -> str:
    """A sentence for a config file that is no YAML, with its place."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: not valid YAML: {error.problem}"
    if isinstance(error, ReaderError):
        return f"{error.name}: not valid YAML: {error.reason} (character {error.position + 1})"
    if isinstance(error, UnicodeDecodeError):
        # The error names no file.
        files = [] if own_conf is None else sorted(own_conf.rglob("*.yaml"))
        broken = next((str(file) for file in files if error.object in file.read_bytes()), "a config file")
        return f"{broken}: not UTF-8 text (byte {error.start + 1})"
    return _first_line(error)


def _unfit(name: str, reason: str, own_conf: Path | None) -> str:
    """A sentence for a config file whose values cannot take the place of what is there."""
    file = _file_of(name, [conf_folder()] if own_conf is None else [own_conf, conf_folder()])
    if reason != "Cannot merge DictConfig with ListConfig":
        return f"{file}: {reason}"
    if Path(file).is_file() and isinstance(OmegaConf.load(file), ListConfig):
        return f"{file} must hold keys and values, not a list"
    return f"{file} has a list where keys and values are wanted, or the other way round"


def _wanted(command: str, key: str) -> str | None:
    """What the value of a dotted key must be or hold, in words; None for a key that the command has not."""
    root, (head, *rest) = _root(command), key.split(".")
    schemas = root.groups.get(head)
    if schemas is None:
        return _wanted_in(root.scalars, [head, *rest])
    choices = schemas.values() if isinstance(schemas, Mapping) else [schemas]
    return next(filter(None, (_wanted_in(schema, rest) for schema in choices)), None)


def _wanted_in(schema: type, path: list[str]) -> str | None:
    if not path:
        return "hold keys and values"
    found = {field.name: field for field in fields(schema)}.get(path[0])
    if found is None:
        return None
    hint = typing.get_type_hints(schema)[found.name]
    inner = _inner(hint)
    if inner is not None:
        return _wanted_in(inner, path[1:])
    return None if path[1:] else f"be {found.metadata.get(GIVEN) or _allowed(hint)}"


def _dotted(schema: type, prefix: str) -> Iterator[str]:
    """The keys of a schema and of those inside it."""
    hints = typing.get_type_hints(schema)
    for field in fields(schema):
        yield prefix + field.name
        inner = _inner(hints[field.name])
        if inner is not None:
            yield from _dotted(inner, f"{prefix}{field.name}.")
        for inner in field.metadata.get(INNER, ()):
            yield f"{prefix}{field.name}.{inner}"


def _group(values: Mapping[str, Any], key: str, prefix: str = "") -> Mapping[str, Any]:
    group = values.get(key)
    if not isinstance(group, dict):
        raise UserError(f"{prefix}{key} must hold keys and values, not {_shown(group)}")
    return group


def _choose(schemas: Mapping[str, type], values: Mapping[str, Any], key: str) -> Any:
    """The schema object of a group whose entries differ, chosen by the entry's `name`."""
    group = values.get(key)
    name = group.get("name") if isinstance(group, dict) else group
    if isinstance(group, str) and group in schemas:
        how = f"a file chooses an option by `override /{key}: {group}` in its defaults"
        raise UserError(f"{key} must hold keys and values, not {group!r}; {how}")
    if not isinstance(group, dict) or not isinstance(name, str) or name not in schemas:
        raise UserError(f"{key} must be one of {', '.join(schemas)}, not {_shown(name)}")
    return _convert(schemas[name], group, f"{key}.")


def _convert(schema: type, values: Mapping[str, Any], prefix: str, others: tuple[str, ...] = ()) -> Any:
    """`values` as an object of `schema`, types checked, nothing unknown and nothing missing; `others` are skipped."""
    hints = typing.get_type_hints(schema)
    given = {field.name: field.metadata.get(GIVEN) for field in fields(schema)}
    target = OmegaConf.structured(schema)
    for key, value in values.items():
        if key in others:
            continue
        if key not in hints:
            raise UserError(f"{prefix}{key} is not a key of this config; {nearest(str(key), (*hints, *others))}")
        inner = _inner(hints[key])
        if inner is not None and not (value is None and isinstance(hints[key], UnionType)):
            if not isinstance(value, dict) and "value" in typing.get_type_hints(inner):
                write = f"write {prefix}{key}.value={_shown(value)}"
                raise UserError(f"{prefix}{key} must hold keys and values, not {_shown(value)}; {write}")
            target[key] = _convert(inner, _group(values, key, prefix), f"{prefix}{key}.")
        elif value != MISSING:
            try:
                if hints[key] is bool and not isinstance(value, bool):
                    # OmegaConf would take any number, and words such as `on`.
                    raise ValidationError
                target[key] = _listed(value, hints[key])
            except OmegaConfBaseException as error:
                raise UserError(f"{prefix}{key} must be {_allowed(hints[key])}, not {_shown(value)}") from error
    for key in hints:
        if OmegaConf.is_missing(target, key):
            raise UserError(f"{prefix}{key} must be given: {given[key] or _allowed(hints[key])}")
    if inside := OmegaConf.missing_keys(target):
        raise UserError(f"{prefix}{min(inside)} must be given")
    return OmegaConf.to_object(target)


def _check_given(schema: type, values: Mapping[str, Any]) -> list[str]:
    """The keys of a schema that are there, once their values have been checked; none has to be."""
    hints = {key: hint for key, hint in typing.get_type_hints(schema).items() if key in values}
    given = make_dataclass(schema.__name__, [(key, hint, MISSING) for key, hint in hints.items()])
    _convert(given, {key: values[key] for key in hints}, "")
    return list(hints)


def _inner(hint: Any) -> type | None:
    """The schema that a field holds, optional or not; None for a plain value."""
    parts = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return next((part for part in parts if isinstance(part, type) and is_dataclass(part)), None)


def _allowed(hint: Any) -> str:
    """What a value of a schema's type may be, in words."""
    if isinstance(hint, UnionType):
        words = [_allowed(part) for part in typing.get_args(hint) if part is not type(None)]
        return " or ".join([*words, "null"])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(hint.__members__)
    if is_dataclass(hint):
        return "keys and values"
    known = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    known |= {list[int]: "a whole number or a list of them", list[str]: "a text or a list of texts"}
    known |= {list[float]: "a number or a list of them"}
    known |= {dict[str, Any]: "a mapping of config.json's fields to values"}
    known |= {dict[int, float]: "a mapping of token ids to numbers"}
    known |= {dict[int, dict[int, float]]: "a mapping of whole numbers to mappings of whole numbers to numbers"}
    return known[hint]


def _listed(value: Any, hint: Any) -> Any:
    """`value`, or a list of it where one is wanted, as in the library."""
    single = isinstance(value, str | int | float) and not isinstance(value, bool)
    parts = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return [value] if single and any(typing.get_origin(part) is list for part in parts) else value


def _shown(value: object) -> str:
    """`value` as it is written in YAML, where that differs from Python."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _first_line(message: object) -> str:
    return str(message).strip().partition("\n")[0]
