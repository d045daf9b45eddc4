"""What benchmarks of engines take on their command lines."""

from __future__ import annotations

from typing import Any

import yaml


def setting(text: str) -> tuple[str, Any]:
    """A field of ``EngineConfig`` and its value, from ``depth=1``."""
    name, _, value = text.partition("=")
    return name, yaml.safe_load(value)
