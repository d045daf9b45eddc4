"""A paged-KV, continuous-batching sampler for language models, exact to the bit, and the simulator of itself.

from paged import Engine, SamplingParams
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged.core.agreement import TPDesyncError, TPError
from paged.core.request import SamplingParams

if TYPE_CHECKING:
    from paged.engine import CompletionOutput, Engine, EngineConfig, RequestOutput, SampleUpdate

__all__ = [
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "RequestOutput",
    "SampleUpdate",
    "SamplingParams",
    "TPDesyncError",
    "TPError",
]

# `sim/`, `kernels/` and `conf/` are packaged as paged.sim, ...; inside a clone that is not installed they lie
# beside this folder.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "kernels").is_dir():
    __path__.append(str(_root))


def __getattr__(name: str) -> Any:
    """The engine's names, imported on first use: they need torch, which most of the package does not."""
    if name in __all__:
        import paged.engine

        return getattr(paged.engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
