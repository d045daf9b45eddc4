"""How a command ends: its exit codes, and the mistake of a user's that is told in one sentence."""

from __future__ import annotations

from typing import Final

OK: Final = 0
INTERNAL: Final = 1
MISTAKE: Final = 2
INTERRUPTED: Final = 130


def of_job() -> str:
    """What a line on standard error begins with, so that it says which job of a sweep it is of; else nothing."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return ""
    return f"job {HydraConfig.get().job.num}: "


class UserError(ValueError):
    """A mistake of the user's, in one line (a list of several is cut); the command ends with MISTAKE."""

    def __init__(self, message: object) -> None:
        first, *others = str(message).split("\n")
        if len(others) > 3:
            others = [*others[:3], f"and {len(others) - 3} more"]
        super().__init__(" ".join(" ".join([first, *others]).split()))


class InfeasibleError(UserError):
    """Values that are allowed one by one and impossible together; in a sweep of `plan` or `sim` they are an answer."""
