"""The composition root: the command word, Hydra, and what the process answers to a mistake or to Ctrl-C."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paged.interrupts import importing, is_interrupt
from paged.outcome import INTERNAL, INTERRUPTED, MISTAKE, OK, InfeasibleError, UserError, of_job, used_folder
from paged.runner import launched
from paged.streams import lenient_streams
from paged.writing import UnwritableError, is_no_room

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True, slots=True)
class Command:
    """A command word, which also names its root file `conf/<word>.yaml`.

    Attributes:
        summary: one line for the usage text.
        module: imported when the command is given; its `job(cfg, folder, overrides) -> int` does the work and
            returns the exit code. It raises UserError for mistakes and must leave standard output to results. If it has
            a `check_sweep(overrides) -> None`, that is called before a sweep and may raise UserError; its
            `finish_sweep(folder, jobs) -> None` is called at the end of one with the folders of its jobs.
        made: the file of results that shows that a folder has been used; None if a folder may be used again.
    """

    summary: str
    module: str
    made: str | None = None


COMMANDS: Final[Mapping[str, Command]] = {
    "run": Command(
        "sample a workload with the engine (python -m paged run --help shows its config)", "paged.run", "results.jsonl"
    ),
    "plan": Command("say on paper what a configuration needs, how fast it could be, and what fits", "paged.planner"),
    "sim": Command(
        "predict what a run would do: the same scheduler on a simulated clock", "paged.simulate", "summary.json"
    ),
    "calibrate": Command("fit a model of step times to the step logs of real runs", "paged.calibrate"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code.

    0 is success, 2 a mistake of the user's, 1 a file or standard output that cannot be written (both told in one line
    on standard error), 130 an interruption. Errors of the program's own are raised. What cannot be shown on standard
    error changes nothing. Of several processes that were started together, as by torchrun, rank 0 runs the command; the
    others only serve its engine.
    """
    with lenient_streams() as output:
        try:
            code = _command(list(sys.argv[1:] if argv is None else argv))
            output.flush()
        except BrokenPipeError:
            if output.failure is None:
                # Of another pipe.
                raise
            # Nobody reads standard output any more.
            return INTERNAL
        if output.failure is not None:
            code = _complain(UnwritableError.of(output.failure, "standard output"), code or INTERNAL)
        return code


def _command(args: list[str]) -> int:
    """Do what `args` say; the exit code."""
    if not args:
        print(_usage(), file=sys.stderr)
        return MISTAKE
    if args[0] in ("-sc", "--shell-completion"):
        return _complete(args)
    word, *rest = args
    if word not in (*COMMANDS, "-h", "--help"):
        near = get_close_matches(word, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are: {', '.join(COMMANDS)}"
        return _complain(f"there is no command {word!r}; {hint}")

    try:
        launch = launched.place() if word == "run" else None
    except ValueError as error:
        return _complain(error)
    if launch is not None and launch.rank > 0:
        from paged.follower import follow_launch

        follow_launch(launch)
        return OK
    try:
        if word not in COMMANDS:
            print(_usage(), flush=True)
            return OK
        return _run_hydra(word, rest)
    except UserError as error:
        return _complain(error)
    except UnwritableError as error:
        return _complain(error, INTERNAL)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except SystemExit as end:
        # Hydra's parser has answered, as to `--version`.
        return end.code if isinstance(end.code, int) else OK
    finally:
        if launch is not None:
            launch.dismiss()


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {word:<{width}}  {command.summary}" for word, command in COMMANDS.items()]
    return "\n".join(["usage: python -m paged COMMAND [GROUP=OPTION] [KEY=VALUE] [-m] [--cfg job]", "", *lines])


def _complete(args: list[str]) -> int:
    """Hydra's shell completion, one word further on: the first word is the command, which it does not know.

    `eval "$(paged -sc install=bash)"` installs it; the shell then asks with `-sc query=bash` and COMP_LINE.
    """
    line = os.environ.get("COMP_LINE", "")
    typed = line.split()[1:]
    if line and not (len(typed) > 1 or (typed and line[-1].isspace())):
        print(" ".join(COMMANDS))
        return OK
    word = typed[0] if typed else next(iter(COMMANDS))
    if word not in COMMANDS:
        return OK
    os.environ["COMP_LINE"] = re.sub(r"^(\s*\S+)\s+\S+", r"\1", line)
    return _run_hydra(word, args)


def _complain(message: object, code: int = MISTAKE) -> int:
    print(f"paged: {message}", file=sys.stderr)
    return code


def _run_hydra(word: str, args: list[str]) -> int:
    """Let Hydra read `args` and run the command's job, once or, in a sweep, once a point; the worst exit code."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from paged.config.convert import conf_folder, groups_of

    args = _overrides_first(args)
    _refuse_used_folder(word, args)
    args = _open_resumed_folder(args)
    codes: list[int] = []
    sweeps: list[str] = []
    jobs: list[Path] = []
    in_job = False

    def task(cfg: DictConfig) -> None:
        nonlocal in_job
        in_job = True
        chosen = HydraConfig.get()
        if chosen.mode == RunMode.MULTIRUN:
            sweeps.append(os.path.abspath(chosen.sweep.dir))
            jobs.append(Path(chosen.runtime.output_dir))
        try:
            overrides = OmegaConf.to_container(chosen.overrides.task, resolve=False)
            try:
                with importing():
                    job = importlib.import_module(COMMANDS[word].module).job
                codes.append(job(cfg, Path(chosen.runtime.output_dir), overrides))
            except (OverflowError, MemoryError) as error:
                reason = str(error) or "out of memory"
                raise UserError(f"some number of the configuration is too large for this machine ({reason})") from error
            except KeyboardInterrupt:
                codes.append(_complain(f"{of_job()}interrupted", INTERRUPTED))
        except (UserError, UnwritableError) as error:
            # Raised here, it would end a sweep whose other points are fine.
            in_sweep = chosen.mode == RunMode.MULTIRUN
            codes.append(_tell_of_job(error, jobs[-1]) if in_sweep else _complain(error, _code_of(error)))
        if codes[-1] == INTERRUPTED:
            raise _JobInterruptedError
        in_job = False

    if _is_sweep(args):
        check_sweep = getattr(importlib.import_module(COMMANDS[word].module), "check_sweep", None)
        if check_sweep is not None:
            check_sweep(args)
    # For the help: Hydra knows no command words, and lists the groups of all commands.
    OmegaConf.register_new_resolver("command", lambda: word, replace=True)
    OmegaConf.register_new_resolver("groups_of", lambda command: ", ".join(groups_of(command)) or "none", replace=True)
    run = hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=word)(task)
    try:
        with _process_as(args):
            run()
    except _JobInterruptedError:
        pass
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else MISTAKE
    except (Exception, KeyboardInterrupt) as error:
        if in_job:
            raise
        # In a sweep other jobs may be done: the table is still written.
        codes.append(_tell_of_hydra(error, word, args, sweep_begun=bool(sweeps)))
    if sweeps:
        finish_sweep = getattr(importlib.import_module(COMMANDS[word].module), "finish_sweep", None)
        if finish_sweep is not None:
            try:
                finish_sweep(Path(sweeps[-1]), jobs)
            except UnwritableError as error:
                codes.append(_complain(error, INTERNAL))
            except KeyboardInterrupt:
                # The jobs are done, and their folder is still told.
                codes.append(_complain("interrupted", INTERRUPTED))
        print(sweeps[-1])
    return max(codes, default=OK)


def _tell_of_hydra(error: BaseException, word: str, args: Sequence[str], *, sweep_begun: bool) -> int:
    """Tell what kept Hydra from composing a config, or from making its folder; the exit code.

    Raises:
        BaseException: `error`, if it is one of the program's own.
    """
    import yaml
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from paged.config.convert import hydra_sentence

    if is_interrupt(error):
        return _complain("interrupted", INTERRUPTED)
    # Hydra raises bare ValueErrors and TypeErrors, too.
    kinds = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, OSError)
    if isinstance(error, BrokenPipeError) or not isinstance(error, kinds):
        raise error
    reason = _write_failure(error)
    if reason is None:
        overrides, own_conf = _overrides_and_own_conf(args)
        return _complain(UserError(hydra_sentence(error, word, overrides, own_conf)))
    key = f"hydra.{'sweep' if sweep_begun or _is_sweep(args) else 'run'}.dir"
    if not sweep_begun and not is_no_room(reason):
        return _complain(UserError(f"{key} must be a folder that can be written: {reason}"))
    return _complain(UnwritableError.of(reason, reason.filename or f"the folder of {key}"), INTERNAL)


def _refuse_used_folder(word: str, args: Sequence[str]) -> None:
    """Refuse a given folder that holds results, before Hydra writes a config over the one that they were made with.

    In a sweep that would also be the one folder of several jobs; an experiment may make them several.
    """
    subdirs = _given(args, "hydra.sweep.subdir")
    if _is_sweep(args) and subdirs and "$" not in subdirs[-1]:
        must = "hydra.sweep.subdir must differ from job to job, as ${hydra.job.num} does"
        raise UserError(f"{must}, not {subdirs[-1]!r}")
    made = COMMANDS[word].made
    if made is None:
        return
    key, places = ("hydra.sweep.dir", f"*/{made}") if _is_sweep(args) else ("hydra.run.dir", made)
    values = _given(args, key)
    # What Hydra has yet to fill in is a new folder, as a rule; the job looks again.
    if not values or "$" in values[-1]:
        return
    found = next(Path(values[-1]).glob(places), None)
    if found is not None:
        raise used_folder(key, found, resumable=word == "run")


def _given(args: Sequence[str], key: str) -> list[str]:
    """The values that `args` give a key, as they stand there but for quotes."""
    return [arg.partition("=")[2].strip("'\"") for arg in args if arg.startswith(f"{key}=")]


def _write_failure(error: Exception) -> OSError | None:
    """What kept Hydra from writing a folder, if `error` is that: of a log file it is a ValueError's cause."""
    reason = error.__cause__ if isinstance(error, ValueError) else error
    # Hydra's own OSErrors, of configs that it does not find, have no number.
    return reason if isinstance(reason, OSError) and reason.errno is not None else None


def _is_sweep(args: Sequence[str]) -> bool:
    return bool({"-m", "--multirun"} & set(args))


def _overrides_and_own_conf(args: Sequence[str]) -> tuple[list[str], Path | None]:
    """The overrides among `args`, and the folder of config files that `--config-dir` names."""
    from hydra._internal.utils import get_args_parser

    given = get_args_parser().parse_args(args)
    return given.overrides, None if given.config_dir is None else Path(given.config_dir).resolve()


def _tell_of_job(error: UserError | UnwritableError, folder: Path) -> int:
    """Leave the reason in the folder of a sweep's job, whose row then says it; the exit code of the job.

    What cannot be is an answer, which `plan` and `sim` are asked for; a mistake is told at once, too, and so is what
    cannot be written.
    """
    from paged.results import write_summary

    try:
        if not (folder / "summary.json").exists():
            write_summary(folder / "summary.json", {"feasible": False, "reason": str(error)})
    except UnwritableError as unwritable:
        if isinstance(error, InfeasibleError):
            error = unwritable
    if isinstance(error, InfeasibleError):
        return OK
    return _complain(f"{of_job()}{error}", _code_of(error))


def _code_of(error: UserError | UnwritableError) -> int:
    return MISTAKE if isinstance(error, UserError) else INTERNAL


class _JobInterruptedError(BaseException):
    """Ends a sweep after a job that was interrupted; not an Exception, which Hydra would report."""


def _overrides_first(args: list[str]) -> list[str]:
    """`args` with the flags moved behind the overrides, as Hydra wants it.

    Raises:
        UserError: for a mistake in the flags, as one line instead of Hydra's whole usage.
    """
    from hydra._internal.utils import get_args_parser

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            flags: Namespace = get_args_parser().parse_intermixed_args(args)
    except SystemExit as end:
        if not end.code:
            raise
        raise UserError(errors.getvalue().strip().rpartition("error: ")[2]) from end
    modes = [flags.run, flags.multirun, flags.cfg is not None, flags.info is not None, flags.shell_completion]
    if sum(modes) > 1:
        raise UserError("only one of --run, --multirun, --cfg, --info and --shell-completion can be given")
    if flags.resolve and flags.cfg is None and not flags.help:
        raise UserError("--resolve needs --cfg or --help beside it")
    if flags.experimental_rerun is not None:
        raise UserError("--experimental-rerun is not supported; resume=FOLDER continues a run")
    others = list(args)
    for override in flags.overrides:
        others.remove(override)
    return [*flags.overrides, *others]


def _open_resumed_folder(args: list[str]) -> list[str]:
    """`args` with `resume=FOLDER` turned into Hydra's terms: its run folder is that one, whose `.hydra` stays.

    The folder is taken literally: it may hold characters that mean something in Hydra's overrides.
    """
    given = [arg for arg in args if arg.startswith("resume=")]
    others = [arg for arg in args if not arg.startswith("resume=")]
    values = [arg.removeprefix("resume=").strip("'\"") for arg in given]
    if not values or values == ["null"]:
        return args
    if len(values) > 1:
        raise UserError("resume must be given once")
    if _is_sweep(others):
        raise UserError("resume must not be given in a sweep: resume one run's folder at a time")
    folder = Path(values[0]).expanduser()
    if not (folder / ".hydra" / "config.yaml").is_file():
        raise UserError(f"resume must be the folder of a run, and {str(folder)!r} holds no .hydra/config.yaml")
    text = "'" + str(folder).replace("'", "\\'") + "'"
    return [*others, f"resume={text}", f"hydra.run.dir={text}", "hydra.output_subdir=null"]


@contextlib.contextmanager
def _process_as(args: list[str]) -> Iterator[None]:
    """The process's arguments as Hydra reads them, and its errors as exceptions instead of its own reports."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = ["paged", *args], "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
