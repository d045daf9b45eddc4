"""How a command ends: its exit codes, and the mistake of a user's that is told in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Final

OK: Final = 0
INTERNAL: Final = 1
MISTAKE: Final = 2
INTERRUPTED: Final = 130


def in_sweep() -> bool:
    """Whether the job that runs is one of a sweep."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def of_job() -> str:
    """What a line on standard error begins with, so that it says which job of a sweep it is of; else nothing."""
    from hydra.core.hydra_config import HydraConfig

    return f"job {HydraConfig.get().job.num}: " if in_sweep() else ""


def folder_key() -> str:
    """The key that the folder of the job that runs follows from."""
    return "hydra.sweep.dir" if in_sweep() else "hydra.run.dir"


def used_folder(key: str, made: Path, *, resumable: bool = False) -> UserError:
    """The refusal of a folder, given by `key`, that holds the results `made`; a run may be continued there."""
    way_out = " (or resume=FOLDER be given)" if resumable else ""
    return UserError(f"{key} must be a new folder{way_out}: {made.parent} has {made.name}")


class UserError(ValueError):
    """A mistake of the user's, in one line (a list of several is cut); the command ends with MISTAKE."""

    def __init__(self, message: object) -> None:
        first, *others = str(message).split("\n")
        if len(others) > 3:
            others = [*others[:3], f"and {len(others) - 3} more"]
        # What a colon leads to is a list.
        rest = "; ".join(map(str.strip, others)) if first.endswith(":") else " ".join(others)
        super().__init__(" ".join(f"{first} {rest}".split()))


class InfeasibleError(UserError):
    """Values that are allowed one by one and impossible together; in a sweep of `plan` or `sim` they are an answer."""
