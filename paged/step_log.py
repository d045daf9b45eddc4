"""The step log of a run: adds, aborts, plans and commits in order, as JSON lines that a replay can read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from paged.core.plan import StepPlan, StepResult
from paged.core.request import Request
from paged.writing import UnwritableError, writing


class StepLog:
    """Appends one line an event to a file; lines are whole even if the process is killed between them.

    Events, by the key ``event``, each with its time ``time_s`` on this process's monotonic clock: ``config`` (limits
    and policy), ``add`` (the samples of a request), ``abort``, ``plan`` (the columns, blocks started and appended,
    slots released, preemptions; ``step`` is null if there was nothing to do), ``commit`` (tokens, stop flags, and times
    on the executor's clock), ``weights`` (their version changed), ``abandon``. The same calls on a fresh scheduler give
    the same plans.

    A commit that other ranks have to agree to is held back, and all that follows it, until ``release``.

    An event that cannot be written is an ``UnwritableError``, and so is every one after it: a log with a gap tells
    nothing. It can still be closed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)
        self._failure: UnwritableError | None = None
        # Names and lines that are held back.
        self._held: list[tuple[str, str]] = []

    def config(self, limits: Mapping[str, Any], policy: Mapping[str, Any]) -> None:
        """The limits and the policy (its name and fields) that the events after this one were decided under."""
        self._write("config", limits=limits, policy=policy)

    def add(self, requests: Sequence[Request]) -> None:
        """Samples of one request queued."""
        first = requests[0]
        self._write(
            "add",
            id=first.id,
            samples=[request.sample for request in requests],
            seeds=[request.seed for request in requests],
            prompt_token_ids=first.prompt.token_ids,
            max_tokens=first.max_tokens,
            output_len=first.output_len,
            is_scored=first.params.prompt_logprobs is not None,
        )

    def abort(self, request_id: str, sample: int | None, reason: str) -> None:
        """A request, or one sample of it, ended from outside."""
        self._write("abort", id=request_id, sample=sample, reason=reason)

    def plan(self, plan: StepPlan | None) -> None:
        """A step decided, or found empty: looking may have preempted."""
        if plan is None:
            self._write("plan", step=None)
            return
        self._write(
            "plan",
            step=plan.step,
            weight_version=plan.weight_version,
            slots=plan.slots,
            starts=plan.starts,
            lengths=plan.lengths,
            logits=plan.logits,
            started=[[s.slot, s.request.id, s.request.sample, s.num_cached, s.blocks] for s in plan.started],
            appended=plan.appended,
            released=plan.released,
            preempted=plan.preempted,
        )

    def commit(self, result: StepResult, *, is_agreed: bool = True) -> None:
        """A step done; held back with what follows unless ``is_agreed``."""
        self._write(
            "commit",
            is_held=not is_agreed,
            step=result.step,
            tokens=result.tokens,
            stopped=result.stopped,
            start_s=round(result.start_s, 6),
            end_s=round(result.end_s, 6),
        )

    def change_weights(self, version: int) -> None:
        """Other weights from here on; running sequences wait again."""
        self._write("weights", version=version)

    def abandon(self) -> None:
        """All plans in flight dropped."""
        self._write("abandon")

    def release(self) -> None:
        """Write what was held back: all ranks agree to it."""
        held, self._held = self._held, []
        self._append(line for _, line in held)

    def drop(self) -> None:
        """Write what was held back, but for plans and commits: the ranks will never agree to these."""
        self._held = [(name, line) for name, line in self._held if name not in ("plan", "commit")]
        self.release()

    def close(self) -> None:
        """Close the file; nothing can be logged afterwards. A failure that was told already is not raised again."""
        if self._failure is None:
            self.drop()
            with writing(self.path):
                self._file.close()

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, name: str, *, is_held: bool = False, **facts: Any) -> None:
        event = {"event": name, "time_s": round(time.perf_counter(), 6), **facts}
        line = json.dumps(event, separators=(",", ":")) + "\n"
        if is_held or self._held:
            self._held.append((name, line))
        else:
            self._append((line,))

    def _append(self, lines: Iterable[str]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            self._file.writelines(lines)
        except OSError as error:
            self._failure = UnwritableError.of(error, self.path)
            # What is left in the buffer would be tried again, and fail, whenever the file is closed.
            with suppress(OSError):
                self._file.close()
            raise self._failure from error
