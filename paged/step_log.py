"""The step log of a run: adds, aborts, plans and commits in order, as JSON lines that a replay can read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from paged.core.plan import StepPlan, StepResult
from paged.core.request import Request


class StepLog:
    """Appends one line an event to a file; lines are whole even if the process is killed between them.

    Events, by the key ``event``: ``config`` (limits and policy), ``add`` (a sample), ``abort``, ``plan`` (the columns,
    blocks started and appended, slots released, preemptions), ``commit`` (tokens, stop flags, times in seconds on the
    executor's clock), ``abandon``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)

    def config(self, limits: dict[str, Any], policy: str) -> None:
        """The limits and the policy that the events after this one were decided under."""
        self._write({"event": "config", "limits": limits, "policy": policy})

    def add(self, requests: Iterable[Request]) -> None:
        """Samples queued."""
        for request in requests:
            tokens = request.prompt.token_ids
            event = {"event": "add", "id": request.id, "sample": request.sample, "prompt_token_ids": tokens}
            scored = request.params.prompt_logprobs is not None
            self._write({**event, "max_tokens": request.max_tokens, "seed": request.seed, "scored": scored})

    def abort(self, request_id: str, sample: int | None, reason: str) -> None:
        """A request, or one sample of it, ended from outside."""
        self._write({"event": "abort", "id": request_id, "sample": sample, "reason": reason})

    def plan(self, plan: StepPlan) -> None:
        """A step decided."""
        started = [[s.slot, s.request.id, s.request.sample, s.num_cached, s.blocks] for s in plan.started]
        event = {"event": "plan", "step": plan.step, "slots": plan.slots, "starts": plan.starts}
        event |= {"lengths": plan.lengths, "logits": plan.logits, "started": started, "appended": plan.appended}
        self._write({**event, "released": plan.released, "preempted": plan.preempted})

    def commit(self, result: StepResult) -> None:
        """A step done."""
        event = {"event": "commit", "step": result.step, "tokens": result.tokens, "stopped": result.stopped}
        self._write({**event, "start_s": round(result.start_s, 6), "end_s": round(result.end_s, 6)})

    def abandon(self) -> None:
        """All plans in flight dropped."""
        self._write({"event": "abandon"})

    def close(self) -> None:
        """Close the file; nothing can be logged afterwards."""
        self._file.close()

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event, separators=(",", ":")) + "\n")
