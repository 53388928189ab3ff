"""All that can be known to be wrong before anything is queued, found at once.

Takes a fraction of a second.  Each check is a generator of problems and trusts nothing that another
one refuses.  What only the scheduler knows (partitions, limits) is checked by `slurm.inventory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rlhpc.config.check_files import check_files, check_run_root, is_node_local
from rlhpc.config.check_layout import check_components, check_roles, check_sharing
from rlhpc.config.check_model import check_lengths, check_memory, check_model_sizes
from rlhpc.config.check_options import check_options
from rlhpc.config.check_run import check_algorithm, check_data, check_machine, check_trainer
from rlhpc.config.model_facts import ModelFacts, read_model_facts
from rlhpc.config.placement import role_slots
from rlhpc.config.schema import Launcher, RunConfig
from rlhpc.errors import ConfigError, Problem

_CHECKS: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    check_components,
    check_roles,
    check_options,
    check_sharing,
    check_algorithm,
    check_data,
    check_trainer,
    check_machine,
    check_files,
    check_run_root,
)

_MODEL_CHECKS: tuple[Callable[[RunConfig, ModelFacts], Iterator[Problem]], ...] = (
    check_model_sizes,
    check_lengths,
    check_memory,
)


def check_config(config: RunConfig) -> list[Problem]:
    """Every problem of ``config``; empty when it can be planned and, it seems, run."""
    problems = [p for check in _CHECKS for p in check(config)]
    facts = model_facts_or_none(config)
    if facts is not None:
        problems += [p for check in _MODEL_CHECKS for p in check(config, facts)]
    return problems


def model_facts_or_none(config: RunConfig) -> ModelFacts | None:
    """The model's sizes, None where `config.json` cannot be read (a problem of its own)."""
    if not config.model.path:
        return None
    try:
        return read_model_facts(Path(config.model.path))
    except ConfigError:
        return None


def find_warnings(config: RunConfig) -> list[Problem]:
    """What will run but probably not as wished; ``config`` must have no problems."""
    return [*_straddling_tp(config), *_local_run_root(config)]


def _straddling_tp(config: RunConfig) -> Iterator[Problem]:
    for name, role in config.roles.items():
        slots = len(role_slots(config, role))
        if role.tp > 1 and slots % role.tp and config.components[role.component].nodes > 1:
            yield Problem(
                f"roles.{name}.tp",
                f"tp={role.tp} groups straddle nodes, {slots} slots a node",
                f"a divisor of {slots}",
                "Tensor parallelism over the network is slow; prefer pp between nodes.",
            )


def _local_run_root(config: RunConfig) -> Iterator[Problem]:
    root = Path(config.run_root).absolute()
    if config.cluster.launcher is Launcher.slurm and is_node_local(root):
        yield Problem(
            "run_root",
            f"{root} is local to this machine, so ranks on other nodes do not see it",
            "a folder on a shared file system",
            "Fine when all nodes are this machine (launch/devcluster); else set run_root.",
        )
