"""The house rules that a machine can hold: layers, sizes, docstrings, options that do something."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.config import engines, schema
from rlhpc.config.load import builtin_config_dir, compose

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rlhpc"
MODULES = sorted(PACKAGE.rglob("*.py"))

LAYERS: list[str] = [
    # what a module of a line may import: the lines above it, and its own package
    "errors",
    "layout dataflow outcome report console",
    "config",
    "plan",
    "slurm plan_table run_folder",
    "local",
    "submit",
    "cli",
    # --- torch below this line ---
    "data weights rewards trackers",
    "algorithms",
    "comm training rollout metrics",
    "roles lanes",
    "controller",
    "rank",
    "worker",
]
TORCH_LINE = LAYERS.index("data weights rewards trackers")
RANK = {unit: i for i, line in enumerate(LAYERS) for unit in line.split()}

UPWARD = {("slurm.executor", "worker")}
"""The task that Submitit pickles names the worker; it is imported in the job only."""

LOGIN_NODE = (
    "rlhpc.submit",
    "rlhpc.cli",
    "rlhpc.local",
    "rlhpc.slurm.executor",
    "rlhpc.slurm.state",
)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    """`config.load` for rlhpc/config/load.py; empty for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__")


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names that ``path`` imports, inside functions too."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "rlhpc":
            yield from (f"rlhpc.{a.name}" for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_every_module_has_a_layer() -> None:
    units = {name_of(p).split(".")[0] for p in MODULES} - {""}
    assert units == set(RANK)


def test_imports_only_go_down() -> None:
    wrong = []
    for path in MODULES:
        name = name_of(path)
        unit = name.split(".")[0]
        for target in imports_of(path):
            lower = target.removeprefix("rlhpc.").split(".")[0]
            if not target.startswith("rlhpc.") or lower == unit or lower not in RANK:
                continue
            if RANK[lower] >= RANK[unit] and (name, lower) not in UPWARD:
                wrong.append(f"{name} imports {target}")
    assert wrong == []


def test_nothing_above_the_torch_line_names_torch() -> None:
    heavy = {"torch", "transformers", "megatron", "vllm"}
    above = [p for p in MODULES if RANK.get(name_of(p).split(".")[0], 0) < TORCH_LINE]
    assert [name_of(p) for p in above for t in imports_of(p) if t.split(".")[0] in heavy] == []


@pytest.mark.parametrize("module", LOGIN_NODE)
def test_the_login_node_never_loads_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_modules_have_at_most_500_lines() -> None:
    sizes = {name_of(p): len(p.read_text().splitlines()) for p in MODULES}
    assert {n: s for n, s in sizes.items() if s > 500} == {}


def test_functions_have_at_most_7_parameters() -> None:
    """Constructors aside; 7 is what a reward function in verl's form needs."""

    def count(f: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        names = [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
        return len([n for n in names if n not in ("self", "cls")])

    sizes = {f"{name_of(p)}.{f.name}": count(f) for p in MODULES for f in functions_of(p)}
    assert {n: s for n, s in sizes.items() if s > 7 and not n.endswith("__init__")} == {}


def test_modules_and_public_functions_have_docstrings() -> None:
    bare = [name_of(p) for p in MODULES if not ast.get_docstring(tree_of(p))]
    for path in MODULES:
        for node in tree_of(path).body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
            if public and not ast.get_docstring(node):
                bare.append(f"{name_of(path)}.{node.name}")
    assert bare == []


def test_names_say_what_things_do() -> None:
    vague = re.compile(r"utils?$|helpers?$|Manager|Helper|common$", re.IGNORECASE)
    names = [part for p in MODULES for part in name_of(p).split(".")]
    names += [n.name for p in MODULES for n in ast.walk(tree_of(p)) if isinstance(n, ast.ClassDef)]
    assert [n for n in names if vague.search(n)] == []


def test_sources_are_ascii() -> None:
    files = [*MODULES, *sorted((ROOT / "configs").rglob("*.yaml"))]
    assert [str(p.relative_to(ROOT)) for p in files if not p.read_bytes().isascii()] == []


def test_every_package_is_installed() -> None:
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in PACKAGE.rglob("__init__.py")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    assert listed == found | {"rlhpc.configs", "rlhpc.sbatch"}


@pytest.mark.parametrize(
    "experiment", sorted(p.stem for p in (builtin_config_dir() / "experiment").glob("*.yaml"))
)
def test_every_experiment_composes(experiment: str) -> None:
    config, problems = compose([f"experiment={experiment}", "model.path=m"])
    assert config is not None
    assert problems == []


GROUPS = sorted(p.parent.name + "=" + p.stem for p in builtin_config_dir().glob("*/*.yaml"))


@pytest.mark.parametrize("choice", [g for g in GROUPS if not g.startswith("experiment=")])
def test_every_choice_composes(choice: str) -> None:
    assert compose(["experiment=quickstart", choice])[1] == []


def test_every_option_is_read_somewhere() -> None:
    """A cheap search of the text: an option that no code names does nothing."""
    # Being checked is not being read: an option that only checks look at does nothing.
    code = "\n".join(p.read_text() for p in MODULES if not name_of(p).startswith("config.check"))
    classes = [
        c
        for module in (schema, engines)
        for c in vars(module).values()
        if isinstance(c, type) and dataclasses.is_dataclass(c) and c is not engines.EngineSpec
    ]
    refused = {("RoleConfig", axis) for axis in ("ep", "vpp")}  # above 1, until they are built
    fields = {(c.__name__, f.name) for c in classes for f in dataclasses.fields(c)} - refused
    assert sorted(f"{c}.{n}" for c, n in fields if not re.search(rf"\.{n}\b", code)) == []
