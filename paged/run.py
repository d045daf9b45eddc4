"""The job of `python -m paged run`: a workload through the engine into a folder that can be resumed."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm
from yaml import YAMLError

from paged.config.run import RESUMABLE_KEYS, RunConfig, run_config, with_key
from paged.core.agreement import TPError
from paged.core.sequence import COMPLETE
from paged.interrupts import InterruptRequest, importing
from paged.model.locate import EMBEDDED, find_model
from paged.outcome import INTERNAL, INTERRUPTED, MISTAKE, OK, UserError, folder_key, of_job, used_folder
from paged.results import (
    ResultsFile,
    Tally,
    drop_torn_line,
    keep_finished,
    read_results,
    read_summary,
    refused_row,
    replacing,
    result_row,
    summary_table,
    versions,
    write_summary,
)
from paged.runner import launched
from paged.workload import arithmetic
from paged.workload.arithmetic import ArithmeticWorkload
from paged.workload.job import SizedWorkload
from paged.workload.prompts import PromptLine, PromptsWorkload, RefusedLine, read_prompts, write_prompts
from paged.writing import UnwritableError, writing

if TYPE_CHECKING:
    from paged.engine import CompletionOutput, Engine, SampleUpdate

logger = logging.getLogger(__name__)

INPUTS: Final = Path("inputs", "prompts.jsonl")
"""The copy of a workload's lines in a run's folder."""

SWEEP_FIGURES: Final = ("elapsed_s", "num_samples", "output_tokens", "preemptions", "recomputed_tokens", "solved")
"""What the table of a sweep shows beside the throughput."""


def job(cfg: DictConfig, folder: Path, overrides: Sequence[str]) -> int:
    """Sample the workload that `cfg` describes into `folder`, or complete `folder` if `cfg.resume` is set.

    Standard output gets a table and, on its last line, the folder.

    Returns:
        The exit code: 0; 2 if a line was refused; 130 if interrupted; 1 if the model's logits were NaN, a rank was
        lost, or the folder can no longer be written.

    Raises:
        UserError: if nothing could be sampled for a mistake in the config or the inputs.
        UnwritableError: if the folder cannot be written before there is anything to resume.
    """
    resumed = cfg.get("resume") is not None
    base = Path.cwd()
    if resumed:
        cfg, base = _saved_config(cfg, folder, overrides)
    config = run_config(cfg, overrides)
    run: _Run | None = None
    try:
        model = _local_model(config.model, base)
        with _owned(folder, "resume" if resumed else folder_key()):
            lines = _read_inputs(config, model, folder, resumed)
            run = _Run(config, folder, lines, resumed)
            return run.execute(model)
    except KeyboardInterrupt:
        # Before the first step or, pressed twice, in the middle of one: what is in results.jsonl stays.
        _end_early(folder, run, "interrupted", {"interrupted": True})
        return INTERRUPTED
    except (TPError, UnwritableError) as error:
        if isinstance(error, UnwritableError) and not (folder / INPUTS).is_file():
            raise
        _end_early(folder, run, str(error), {"interrupted": True, "reason": str(error)})
        return INTERNAL


def _end_early(folder: Path, run: _Run | None, why: str, summary: dict[str, Any]) -> None:
    """Say why a run ends and how to go on, and leave a `summary` of that if one can be written.

    The summary of an earlier session stays if this one has not touched the results.
    """
    if (run is not None and run.has_begun) or not (folder / "summary.json").exists():
        with suppress(UnwritableError):
            write_summary(folder / "summary.json", summary)
    if (folder / INPUTS).is_file():
        _say_how_to_resume(folder, why)
    else:
        print(f"paged: {of_job()}{why}; nothing was sampled yet, so there is nothing to resume", file=sys.stderr)


def finish_sweep(folder: Path, jobs: Sequence[Path]) -> None:
    """Print the comparison of a sweep's jobs, fastest first, and write it into the sweep's folder."""
    from paged.sim.sweep import Comparison, Goal

    comparison = Comparison.of(jobs, Goal("tokens_per_s_end_to_end", largest=True), SWEEP_FIGURES)
    print(comparison.table())
    with writing(folder):
        comparison.write(folder)


@contextmanager
def _owned(folder: Path, key: str) -> Iterator[None]:
    """Hold the folder, given by `key`, against another process that would write the same results.

    A crash lets go of it.
    """
    path = folder / ".lock"
    with writing(path):
        lock = path.open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{key} must be a folder that no other process works on: {folder}") from error
        yield


def _saved_config(cfg: DictConfig, folder: Path, overrides: Sequence[str]) -> tuple[DictConfig, Path]:
    """The config of the run in `folder` with the harmless ones of `overrides`, and where its paths begin."""
    process = Path.cwd()
    try:
        saved = OmegaConf.load(folder / ".hydra" / "config.yaml")
        if not isinstance(saved, DictConfig):
            raise ValueError("not a mapping")
        if (folder / ".hydra" / "hydra.yaml").is_file():
            process = Path(OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra.runtime.cwd)
    except (OSError, ValueError, TypeError, YAMLError, OmegaConfBaseException) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"resume must be a run's intact folder, and {folder / '.hydra'} is damaged: {reason}"
        ) from error
    # Of the commands only `run` has the key. The config's name says less: a run that is repeated has another.
    if "resume" not in saved:
        raise UserError(f"resume must be the folder of a run, and {str(folder)!r} is one of another command")
    exact = OmegaConf.select(saved, "numerics.name") == "invariant"
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        root = key.partition(".")[0]
        if root == "resume":
            continue
        if root not in RESUMABLE_KEYS or not exact:
            allowed = f"allowed: {', '.join(RESUMABLE_KEYS)}" if exact else "with numerics=fast no key may"
            raise UserError(f"{key} must not be given beside resume, because it could change the samples; {allowed}")
        saved[root] = cfg[root]
    return saved, process


def _local_model(model: str, base: Path) -> str:
    """`model` as the engine wants it: a relative folder is one below `base`, where the run was first started."""
    folder = base / Path(model).expanduser()
    return str(folder) if model not in EMBEDDED and folder.is_dir() else model


def _made_lines(
    workload: ArithmeticWorkload | SizedWorkload, config: RunConfig, model: str
) -> Iterable[dict[str, Any]]:
    """The lines of a workload that is made, not a file of prompts; ids are those of the model's vocabulary."""
    if isinstance(workload, ArithmeticWorkload):
        prompts = arithmetic.builtin_prompts(workload.num_prompts, workload.seed)
        return ({"id": f"arithmetic-{index}", "prompt": prompt} for index, prompt in enumerate(prompts))
    try:
        need_weights = config.engine["weights"] != "dummy"
        max_seq_len = config.engine["max_seq_len"]
        vocab_size = find_model(model, config.spec, need_weights=need_weights, max_seq_len=max_seq_len)[1].vocab_size
        return workload.lines(vocab_size)
    except ValueError as error:
        raise UserError(error) from error


def _read_inputs(config: RunConfig, model: str, folder: Path, resumed: bool) -> list[PromptLine | RefusedLine]:
    """The workload's lines, read from the copy in `folder`, which is made unless the run is resumed."""
    copy = folder / INPUTS
    workload = config.workload
    if not resumed:
        if (made := folder / "results.jsonl").exists():
            raise used_folder(folder_key(), made, resumable=True)
        _copy_inputs(config, model, copy)
    source = workload.path if isinstance(workload, PromptsWorkload) and not resumed else copy
    try:
        return read_prompts(copy, config.sampling, source=source)
    except ValueError as error:
        must = "resume must be a run's intact folder" if resumed else "workload.path must be a file of prompts"
        raise UserError(f"{must}: {error}") from error


def _copy_inputs(config: RunConfig, model: str, copy: Path) -> None:
    """Write the workload's lines to `copy`: all of them or no file, because a resumed run takes it for the whole.

    A `copy` that is itself the workload's file stays as it is.
    """
    workload = config.workload
    if isinstance(workload, PromptsWorkload) and _is_same_file(workload.path, copy):
        return
    with writing(copy):
        # Of a run in the same folder that came to nothing, and whose config is gone.
        copy.unlink(missing_ok=True)
    if isinstance(workload, PromptsWorkload):
        try:
            content = workload.path.read_bytes()
        except OSError as error:
            reason = f"{str(workload.path)!r} cannot be read ({error.strerror})"
            raise UserError(f"workload.path must be a file of prompts: {reason}") from error
    else:
        assert isinstance(workload, ArithmeticWorkload | SizedWorkload), workload
        lines = _made_lines(workload, config, model)
    with writing(copy.parent):
        copy.parent.mkdir(exist_ok=True)
    with replacing(copy) as fresh:
        if isinstance(workload, PromptsWorkload):
            fresh.write_bytes(content)
        else:
            write_prompts(fresh, lines)


def _is_same_file(path: Path, other: Path) -> bool:
    """Whether both are there and are one file, by whatever names."""
    try:
        return path.samefile(other)
    except OSError:
        return False


class _Run:
    """One run of the engine over the lines of a workload; it owns the folder's results and summary.

    Attributes:
        has_begun: whether the folder's results may differ from those before this session.
    """

    def __init__(
        self, config: RunConfig, folder: Path, lines: Sequence[PromptLine | RefusedLine], resumed: bool
    ) -> None:
        self.config = config
        self.folder = folder
        self.lines = lines
        self.resumed = resumed
        self.has_begun = False
        self.tally = Tally()
        self.refusals: list[str] = []
        self.finished: set[tuple[str, int]] = set()
        self.numerics_ids: set[str] = set()
        # Samples still to come, by request id.
        self.unfinished: dict[str, int] = {}
        # Lines whose time has not come, by time, each with the indices of its samples.
        self.arriving: deque[tuple[PromptLine, list[int]]] = deque()
        self.texts: dict[str, str] = {}

    @property
    def results_path(self) -> Path:
        return self.folder / "results.jsonl"

    def execute(self, model: str) -> int:
        """Build the engine, sample what is missing, write the summary, print the table; the exit code."""
        if self.resumed:
            self._read_earlier_results()
        engine = self._build_engine(model)
        try:
            # Updates come and go with every step. A full collection would look at all that is imported and loaded, too,
            # which stops the run for a tenth of a second now and then.
            gc.collect()
            gc.freeze()
            self.has_begun = True
            if self.resumed:
                self._take_over_results(engine)
            with ResultsFile(self.results_path) as results, InterruptRequest() as interrupt:
                self._add(engine, results, interrupt)
                num_samples = sum(self.unfinished.values())
                logger.info("%d samples to come from %s, %s", num_samples, model, engine.numerics_id)
                start_s = time.perf_counter()
                num_tokens = self._sample(engine, results, interrupt)
                # A step that was cut off here may have finished samples.
                num_tokens += sum(self._take(results, update) for update in engine.settle())
                elapsed_s = time.perf_counter() - start_s
                interrupted = bool(self.unfinished)
                if interrupted:
                    self._abort(engine, results)
            peaks: list[int] = []
            # All samples are there: a rank that is lost now takes nothing with it.
            with suppress(TPError):
                peaks = engine.peak_bytes_by_rank()
            summary = {
                # Of this session, which is the whole run unless it was resumed; those of the whole folder follow.
                **engine.metrics(),
                **({"peak_device_bytes_by_rank": peaks} if any(peaks) else {}),
                **({"memory": engine.memory} if engine.memory is not None else {}),
                "tokens_per_s_end_to_end": num_tokens / elapsed_s,
                "elapsed_s": elapsed_s,
                **self.tally.summary(),
                "numerics_id": engine.numerics_id,
                "tp": self.config.engine["tp"],
                "device": engine.device_name,
                "resumed": self.resumed,
                "interrupted": interrupted,
                "versions": versions("paged", "torch", "triton", "tokenizers", "hydra-core"),
            }
        finally:
            gc.unfreeze()
            engine.close()
        earlier = read_summary(self.folder / "summary.json") if self.resumed and not num_samples else None
        summary = earlier or summary
        summary["reason"] = "; ".join(self._shortfalls(summary)) or None
        if not earlier:
            write_summary(self.folder / "summary.json", summary)
        return self._report(summary)

    def _read_earlier_results(self) -> None:
        try:
            for row in read_results(self.results_path):
                if row["finish_reason"] in COMPLETE:
                    self.finished.add((row["id"], row["sample"]))
                    self.tally.add(row)
                    if "numerics_id" in row:
                        self.numerics_ids.add(row["numerics_id"])
        except (ValueError, OSError) as error:
            raise UserError(f"resume must be a folder with intact results: {error}") from error

    def _build_engine(self, model: str) -> Engine:
        # Read when torch is loaded. OpenMP's threads spin while they wait, and where other programs keep the cores
        # busy (or a container has fewer than it shows) that made a run 19 times slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        with importing():
            from paged.engine import Engine, EngineConfig

        step_log = self.folder / "steps.jsonl"
        drop_torn_line(step_log)
        try:
            config = EngineConfig(**self.config.engine)
            return Engine.from_pretrained(
                model, spec=self.config.spec, config=config, step_log=step_log, launch=launched.place()
            )
        except UnwritableError:
            raise
        except (ValueError, OSError) as error:
            raise UserError(with_key(error)) from error

    def _take_over_results(self, engine: Engine) -> None:
        """Keep what is finished, unless this engine would continue it with other bits."""
        if self.numerics_ids - {engine.numerics_id}:
            made = ", ".join(sorted(self.numerics_ids))
            raise UserError(
                f"resume must happen where the numerics are those of the folder: its numerics_id is {made}, "
                f"this engine's is {engine.numerics_id}"
            )
        if self.results_path.is_file():
            keep_finished(self.results_path)

    def _add(self, engine: Engine, results: ResultsFile, interrupt: InterruptRequest) -> None:
        """Take in every line, but for samples that are finished; refusals go straight to the results.

        Lines that arrive later wait for `_sample`, unless they are refused; what a resumed run did not finish has
        arrived.
        """
        for line in self.lines:
            if isinstance(line, RefusedLine):
                self._refuse(results, line, line.reason)
                continue
            missing = [sample for sample in range(line.params.n) if (line.id, sample) not in self.finished]
            if not missing:
                continue
            self.unfinished[line.id] = len(missing)
            if interrupt.requested:
                # It still counts as missing, but looking at its prompt would only delay the end.
                continue
            if line.arrival_s > 0 and not self.resumed:
                self._await(engine, results, line, missing)
            else:
                self._hand_over(engine, results, line, missing)
        self.arriving = deque(sorted(self.arriving, key=lambda arriving: arriving[0].arrival_s))

    def _await(self, engine: Engine, results: ResultsFile, line: PromptLine, samples: list[int]) -> None:
        """Keep a line until it arrives, or refuse it now: nobody should wait for what can be told at once."""
        with self._refusing(results, line):
            engine.check_request(line.prompt, line.params, output_len=line.output_len)
            self.arriving.append((line, samples))

    def _hand_over(self, engine: Engine, results: ResultsFile, line: PromptLine, samples: list[int]) -> None:
        """Add samples of a line to the engine; if it refuses, they are no longer to come."""
        with self._refusing(results, line):
            engine.add_request(
                line.prompt, line.params, request_id=line.id, samples=samples, output_len=line.output_len
            )
            if isinstance(self.config.workload, ArithmeticWorkload) and isinstance(line.prompt, str):
                self.texts[line.id] = line.prompt

    @contextmanager
    def _refusing(self, results: ResultsFile, line: PromptLine) -> Iterator[None]:
        """While entered, a ``ValueError`` of the engine's is the line's refusal."""
        try:
            yield
        except ValueError as error:
            del self.unfinished[line.id]
            self._refuse(results, line, " ".join(str(error).split()))

    def _refuse(self, results: ResultsFile, line: PromptLine | RefusedLine, reason: str) -> None:
        if isinstance(self.config.workload, PromptsWorkload):
            reason = f"line {line.number}: {reason}"
        own_id = line.id != f"line-{line.number}"
        self.refusals.append(f"{line.id}: {reason}" if own_id else reason)
        row = refused_row(line.id, reason)
        results.write(row)
        self.tally.add(row)

    def _sample(self, engine: Engine, results: ResultsFile, interrupt: InterruptRequest) -> int:
        """Step until all has arrived and is finished, or Ctrl-C; the number of tokens sampled."""
        num_tokens = 0
        start_s = time.perf_counter()
        # A terminal is redrawn often; a log file gets a line now and then.
        every_s = 0.1 if sys.stderr.isatty() else 10.0
        total = sum(self.unfinished.values())
        with tqdm(total=total, unit=" samples", mininterval=every_s, file=sys.stderr, dynamic_ncols=True) as bar:
            while (engine.has_unfinished or self.arriving) and not interrupt.requested:
                now_s = time.perf_counter() - start_s
                while self.arriving and self.arriving[0][0].arrival_s <= now_s:
                    self._hand_over(engine, results, *self.arriving.popleft())
                    bar.total = bar.n + sum(self.unfinished.values())
                if not engine.has_unfinished:
                    if self.arriving:
                        # Short, because a signal only leaves a note.
                        time.sleep(min(0.05, self.arriving[0][0].arrival_s - now_s))
                    continue
                num_finished = 0
                for update in engine.run_step():
                    num_tokens += self._take(results, update)
                    num_finished += update.output is not None
                rate = num_tokens / (time.perf_counter() - start_s)
                state = f"{rate:,.0f} tokens/s, {engine.num_running} running, {engine.num_waiting} waiting"
                bar.set_postfix_str(state, refresh=False)
                bar.update(num_finished)
        return num_tokens

    def _take(self, results: ResultsFile, update: SampleUpdate) -> int:
        """Write what has finished; the number of new tokens."""
        if update.output is not None:
            self._finish(results, update.output)
        return len(update.token_ids)

    def _finish(self, results: ResultsFile, output: CompletionOutput) -> None:
        solved = None
        if output.request_id in self.texts:
            solved = arithmetic.is_solved(self.texts[output.request_id], output.text)
        row = result_row(output, solved)
        results.write(row)
        self.tally.add(row)
        self.unfinished[output.request_id] -= 1
        if not self.unfinished[output.request_id]:
            del self.unfinished[output.request_id]

    def _abort(self, engine: Engine, results: ResultsFile) -> None:
        """Give up what is unfinished; what a sample has so far is kept as `abort`, until it is resumed."""
        for request_id in self.unfinished:
            for output in engine.abort(request_id):
                if output.token_ids:
                    row = result_row(output, None)
                    results.write(row)
                    self.tally.add(row)

    def _shortfalls(self, summary: dict[str, Any]) -> Iterator[str]:
        """What was not sampled as asked for, a sentence each."""
        if self.refusals:
            noun = "lines" if isinstance(self.config.workload, PromptsWorkload) else "prompts"
            yield f"{len(self.refusals)} of {len(self.lines)} {noun} were refused, the first is {self.refusals[0]}"
        if errors := summary["finish_reasons"].get("error", 0):
            yield f"{errors} samples ended as error, because their logits were NaN"

    def _report(self, summary: dict[str, Any]) -> int:
        print(summary_table(summary))
        print(self.folder, flush=True)
        for sentence in self._shortfalls(summary):
            print(f"paged: {of_job()}{sentence}", file=sys.stderr)
        if summary["interrupted"]:
            _say_how_to_resume(self.folder, "interrupted")
            return INTERRUPTED
        if summary["finish_reasons"].get("error", 0):
            return INTERNAL
        return MISTAKE if self.refusals else OK


def _say_how_to_resume(folder: Path, why: str) -> None:
    command = f"python -m paged run resume={shlex.quote(str(folder))}"
    print(f"paged: {of_job()}{why}; what is finished is kept, continue with: {command}", file=sys.stderr)
