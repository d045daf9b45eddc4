"""Checks who imports whom: deciding never sees tensors, nothing imports upward, nothing goes in circles."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Top-level folders that are installed under the package's name.
INSIDE = {"kernels": "paged.kernels", "conf": "paged.conf", "sim": "paged.sim"}
FOLDERS = ("paged", *INSIDE)


@dataclass(frozen=True)
class Rule:
    """What the modules of one part may import.

    Attributes:
        ours: allowed parts of this project.
        others: allowed packages outside the standard library; None allows all but those ``never``.
        never: packages that are refused whatever else is allowed.
    """

    ours: tuple[str, ...]
    others: tuple[str, ...] | None = None
    never: tuple[str, ...] = ()


EVERYTHING = Rule(ours=("paged",))
BELOW_THE_ENGINE = ("paged.core", "paged.kernels", "paged.model", "paged.runner")
# Of core, the runner sees no scheduler, no sequence and no block pool.
SEEN_BY_THE_RUNNER = ("agreement", "json_files", "memory", "model_spec", "plan", "request")
ENGINE = (
    "paged.consensus",
    "paged.engine",
    "paged.engine_config",
    "paged.engine_parts",
    "paged.engine_ranks",
    "paged.follower",
    "paged.intake",
    "paged.loop",
    "paged.other_ranks",
    "paged.outputs",
    "paged.samples",
    "paged.step_log",
    "paged.interrupts",
    "paged.streams",
    "paged.writing",
)  # one part in several files
COMPOSITION_ROOT = (
    "paged.app",
    "paged.__main__",
    "paged.config",
    "paged.run",
    "paged.planner",
    "paged.simulate",
    "paged.calibrate",
)
RULES: dict[str, Rule] = {
    "paged.core": Rule(("paged.core",), ()),
    "paged.workload": Rule(("paged.core", "paged.workload"), ()),
    "paged.conf": Rule(("paged.conf",), ()),
    "paged.kernels": Rule(("paged.kernels",), ("torch", "triton", "numpy")),  # numpy: indices made on the host
    "paged.model": Rule(("paged.core", "paged.kernels", "paged.model")),
    "paged.runner": Rule(
        (
            *(f"paged.core.{name}" for name in SEEN_BY_THE_RUNNER),
            "paged.kernels",
            "paged.model",
            "paged.runner",
            "paged.interrupts",  # a leaf: when an interruption may fall
        )
    ),
    **dict.fromkeys(ENGINE, Rule((*BELOW_THE_ENGINE, *ENGINE))),
    "paged.step_log": Rule(("paged.core", "paged.step_log", "paged.writing"), ()),
    "paged.interrupts": Rule(()),
    "paged.streams": Rule((), ()),
    "paged.writing": Rule((), ()),
    "paged.plan_text": Rule(("paged.core", "paged.plan_text"), ()),
    "paged.outcome": Rule(("paged.outcome",), ("hydra",)),
    "paged.results": Rule(("paged.core", "paged.engine", "paged.results", "paged.writing"), ()),
    "paged.run_facts": Rule(("paged.core", "paged.model", "paged.run_facts"), ("omegaconf", "yaml")),
    "paged.sim": Rule(("paged.core", "paged.workload", "paged.sim"), None, ("torch", "triton", "transformers")),
    **dict.fromkeys(COMPOSITION_ROOT, EVERYTHING),
    "paged": EVERYTHING,  # what the package exports
}


def within(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


def rule_of(module: str) -> Rule | None:
    """The rule of the smallest part that holds ``module``; of ``paged`` itself only for the package's own file."""
    parts = [part for part in RULES if part != "paged" and within(module, part)]
    return RULES[max(parts, key=len)] if parts else RULES["paged"] if module == "paged" else None


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts[:1] = INSIDE.get(parts[0], parts[0]).split(".")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> dict[str, str]:
    """Source of every module of the package, by the name it is imported by."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {module_name(path): path.read_text(encoding="utf-8") for path in paths}


def imports(module: str, source: str, known: frozenset[str], is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported anywhere in ``source``, in functions and for types too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".") if is_package else module.split(".")[:-1]
            base = base[: len(base) + 1 - node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                longer = f"{name}.{alias.name}"
                yield node.lineno, longer if longer in known or rule_of(longer) is not rule_of(name) else name


def violations(module: str, source: str, known: frozenset[str] = frozenset(), is_package: bool = False) -> list[str]:
    found = []
    rule = rule_of(module)
    assert rule is not None, f"{module} has no rule"
    for line, name in imports(module, source, known, is_package):
        top = name.split(".")[0]
        if top in INSIDE:
            found.append(f"{module}:{line} imports {name}, which must be called {INSIDE[top]}")
        elif top == "paged":
            if not any(within(name, part) for part in rule.ours):
                found.append(f"{module}:{line} imports {name}")
        elif top not in sys.stdlib_module_names:
            refused = rule.others is not None and top not in rule.others
            if refused or top in rule.never:
                found.append(f"{module}:{line} imports {name}")
    return list(dict.fromkeys(found))


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Every way round that a depth-first walk meets."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for other in sorted(graph.get(module, ())):
                visit(other, [*path, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def packages(sources: dict[str, str]) -> set[str]:
    return {module for module in sources if any(other.startswith(module + ".") for other in sources)}


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return modules()


def test_the_parts_that_exist_are_found(sources: dict[str, str]) -> None:
    assert {"paged.core.scheduler", "paged.core.blocks"} <= sources.keys()
    assert RULES.keys() <= sources.keys(), "a rule is for a part that is not there"
    assert not [module for module in sources if rule_of(module) is None], "a module has no rule"
    assert rule_of("paged.helpers") is None


def test_nobody_imports_what_its_part_may_not(sources: dict[str, str]) -> None:
    known, inner = frozenset(sources), packages(sources)
    found = [each for name, text in sources.items() for each in violations(name, text, known, name in inner)]
    assert not found, "\n".join(found)


def test_nothing_goes_in_circles(sources: dict[str, str]) -> None:
    known, inner = frozenset(sources), packages(sources)
    graph = {
        name: {other for _, other in imports(name, text, known, name in inner) if other in known}
        for name, text in sources.items()
    }
    assert sum(map(len, graph.values())) > 10
    assert not circles(graph)


def test_top_level_names_of_inner_folders_are_never_imported() -> None:
    """A top-level ``kernels`` shadows a package of that name that transformers looks for."""
    for folder in ("tests", "benchmarks", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, name in imports(path.stem, path.read_text(encoding="utf-8"), frozenset()):
                assert name.split(".")[0] not in INSIDE, f"{path}:{line} imports {name}"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("paged.core.plan", "import torch"),
        ("paged.core.plan", "import numpy as np"),
        ("paged.core.plan", "def f():\n    import torch.nn"),
        ("paged.core.plan", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor"),
        ("paged.core.plan", "from paged.workload import arithmetic"),
        ("paged.core.plan", "from ..workload import arithmetic"),
        ("paged.core.plan", "from paged import engine"),
        ("paged.core.plan", "import paged.engine"),
        ("paged.workload.trace", "import torch"),
        ("paged.workload.trace", "from paged.runner import cache"),
        ("paged.kernels.norm", "from paged.core import plan"),
        ("paged.kernels.norm", "import scipy"),
        ("paged.kernels.norm", "import kernels.gemm"),
        ("paged.kernels.norm", "from kernels import gemm"),
        ("paged.conf", "import paged.core"),
        ("paged.model.decoder", "from paged.runner.cache import KVCache"),
        ("paged.model.decoder", "import paged.engine"),
        ("paged.model.decoder", "from conf import x"),
        ("paged.runner.runner", "from paged.core.scheduler import Scheduler"),
        ("paged.runner.runner", "from paged.engine import Engine"),
        ("paged.runner.runner", "from paged import Engine"),
        ("paged.engine", "from paged.app import main"),
        ("paged.engine", "from paged.workload import arithmetic"),
        ("paged.engine", "from paged.config.run import RunConfig"),
        ("paged.step_log", "import torch"),
        ("paged.sim.driver", "import torch"),
        ("paged.sim.driver", "from paged.engine import Engine"),
        ("paged.sim.driver", "from sim import report"),
        ("paged.plan_text", "from paged.model.locate import find_model"),
        ("paged.plan_text", "import omegaconf"),
        ("paged.outcome", "from paged.app import main"),
        ("paged.results", "import torch"),
        ("paged.run_facts", "from paged.engine import Engine"),
    ],
)
def test_each_rule_can_fail(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("paged.core.plan", "import math\nfrom collections import abc\nfrom paged.core.request import Request"),
        ("paged.core.plan", "from .request import Request\nfrom . import request"),
        ("paged.workload.trace", "import json\nfrom paged.core import request"),
        ("paged.kernels.norm", "import torch, triton.language as tl\nfrom paged.kernels import twin"),
        ("paged.model.decoder", "import torch, safetensors\nfrom paged.kernels import norm"),
        ("paged.runner.runner", "from paged.model.decoder import Decoder\nfrom paged.core.plan import StepPlan"),
        ("paged.engine", "from paged.runner.runner import Runner\nfrom paged.core import scheduler"),
        ("paged.sim.driver", "import simpy, numpy\nfrom paged.core import scheduler"),
        ("paged.app", "def main():\n    from paged.engine import Engine\n    import hydra"),
        ("paged", "def __getattr__(name):\n    from paged.engine import Engine"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c", "a"]]
    assert circles({"a": {"a"}}) == [["a", "a"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in memory after ``statement`` in a fresh interpreter."""
    program = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_deciding_loads_no_torch() -> None:
    loaded = loaded_by("import paged.core.scheduler, paged.workload")
    assert "paged" in loaded
    assert not loaded & {"torch", "numpy", "triton", "transformers", "hydra", "simpy"}


def test_every_module_of_core_and_workload_loads_no_torch(sources: dict[str, str]) -> None:
    names = [name for name in sources if within(name, "paged.core") or within(name, "paged.workload")]
    assert len(names) > 8
    assert not loaded_by(f"import {', '.join(names)}") & {"torch", "numpy", "triton"}


def test_planning_and_simulating_load_no_torch(sources: dict[str, str]) -> None:
    roots = [name for name in ("paged.planner", "paged.simulate", "paged.calibrate") if name in sources]
    names = [name for name in sources if within(name, "paged.sim") or within(name, "paged.config")]
    assert len(names) > 6
    assert not loaded_by(f"import {', '.join([*roots, *names])}") & {"torch", "triton", "transformers"}
