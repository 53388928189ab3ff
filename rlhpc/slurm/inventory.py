"""What the cluster has, from sinfo and scontrol, and whether a plan can ever start there.

`sbatch --test-only` lets pass what makes a job of several components pend for ever: more nodes over
all components than there are (components never share a node), a time above the partition's limit, a
partition that is down.  Those are found here, with the config key.
"""

from __future__ import annotations

import difflib
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from rlhpc.config.schema import ComponentConfig, RunConfig
from rlhpc.errors import Problem, SubmitError
from rlhpc.plan import ComponentPlan, RunPlan

_MEM_MB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}


@dataclass(frozen=True)
class Node:
    """One node as configured, whatever runs on it now."""

    name: str
    cpus: int
    mem_mb: int
    gpus: tuple[tuple[str, int], ...]
    """(type, number) of each kind of GPU; type is empty where Slurm knows none."""
    features: frozenset[str]
    state: str

    def num_gpus(self, gpu_type: str | None) -> int:
        """GPUs of ``gpu_type``, or of all types for None."""
        return sum(n for kind, n in self.gpus if gpu_type in (None, kind))


@dataclass(frozen=True)
class Partition:
    """One partition and its nodes."""

    name: str
    is_default: bool
    state: str
    max_time_s: int | None
    """Longest time limit of a job in seconds; None if unlimited."""
    max_nodes: int | None
    """Most nodes of one job; None if unlimited."""
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Inventory:
    """All partitions of a cluster."""

    partitions: tuple[Partition, ...]

    def partition(self, name: str | None) -> Partition | None:
        """The partition called ``name``, or the default one for None."""
        for partition in self.partitions:
            if partition.name == name or (name is None and partition.is_default):
                return partition
        return None


def read_inventory() -> Inventory:
    """Ask Slurm for its partitions and nodes.

    Raises:
        SubmitError: it does not answer.
    """
    nodes = _query(["sinfo", "-h", "-a", "-N", "-o", "%R|%N|%c|%m|%G|%f|%T"])
    partitions = _query(["scontrol", "-o", "show", "partition"])
    return parse_inventory(nodes=nodes, partitions=partitions)


def _query(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise SubmitError(
            f"{command[0]} is not on PATH; expected a Slurm login node. "
            "Go to one, use launch/devcluster, or set cluster=local"
        ) from None
    except subprocess.TimeoutExpired:
        raise SubmitError(f"{command[0]} did not answer in 60 s; try again later") from None
    if result.returncode:
        raise SubmitError(
            f"{' '.join(command)} failed:\n{result.stderr.strip()}\n"
            "Is this a login node, and does its Slurm run?  For the throw-away Slurm: "
            './launch/devcluster start; eval "$(./launch/devcluster env)"'
        )
    return result.stdout


def parse_inventory(*, nodes: str, partitions: str) -> Inventory:
    """Build the inventory from rows of `sinfo` and lines of `scontrol -o show partition`."""
    by_partition: dict[str, list[Node]] = {}
    for line in nodes.splitlines():
        partition, name, cpus, mem, gres, features, state = line.split("|")
        node = Node(
            name=name,
            cpus=int(cpus.rstrip("+")),
            mem_mb=int(mem.rstrip("+")),
            gpus=_parse_gpus(gres),
            features=frozenset(features.split(",")) - {"(null)", ""},
            state=state,
        )
        by_partition.setdefault(partition, []).append(node)
    rows = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in partitions.splitlines()]
    return Inventory(
        tuple(
            Partition(
                name=row["PartitionName"],
                is_default=row.get("Default") == "YES",
                state=row.get("State", "UP"),
                max_time_s=parse_time(row.get("MaxTime", "UNLIMITED")),
                max_nodes=_parse_limit(row.get("MaxNodes", "UNLIMITED")),
                nodes=tuple(by_partition.get(row["PartitionName"], ())),
            )
            for row in rows
            if "PartitionName" in row
        )
    )


def _parse_gpus(gres: str) -> tuple[tuple[str, int], ...]:
    """`gpu:a100:4(S:0-1),gpu:2,nvme:1` -> (("a100", 4), ("", 2))."""
    found = re.findall(r"(?:^|,)gpu:(?:([^:,()]+):)?(\d+)", gres)
    return tuple((kind, int(number)) for kind, number in found)


def _parse_limit(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def parse_time(text: str) -> int | None:
    """Seconds of a Slurm time: `90`, `90:00`, `1:30:00`, `1-12`, `1-12:30`, `1-12:30:00`.

    Returns:
        Seconds, or None for UNLIMITED and INFINITE.

    Raises:
        ValueError: any other text.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not match:
        raise ValueError(f"{text!r} is no Slurm time such as 90, 1:30:00 or 1-12:00:00")
    days, a, b, c = (int(x) if x else 0 for x in match.groups())
    if match[1] is None and match[4] is None:  # minutes[:seconds]
        return 60 * a + b
    return 86400 * days + 3600 * a + 60 * b + c


def check_inventory(config: RunConfig, plan: RunPlan, inventory: Inventory) -> list[Problem]:
    """Why ``plan`` could never start on a cluster with ``inventory``; empty if it could."""
    problems: list[Problem] = []
    suitable: dict[str, frozenset[str]] = {}
    for component in plan.components:
        partition, found = _check_partition(config, component, inventory)
        problems += found
        if partition is None:
            continue
        problems += _check_limits(config, component, partition)
        found, nodes = _check_nodes(config.components[component.name], component, partition)
        problems += found
        if not found:
            suitable[component.name] = nodes
    return problems + _check_sums(plan, suitable)


def _check_partition(
    config: RunConfig, component: ComponentPlan, inventory: Inventory
) -> tuple[Partition | None, list[Problem]]:
    """The component's partition, and what is wrong with it."""
    name = config.components[component.name].partition
    key = f"components.{component.name}.partition"
    names = [p.name for p in inventory.partitions]
    partition = inventory.partition(name)
    if partition is None and name is None:
        remedy = f"Set {key}"
        what = "not set, and the cluster has no default partition"
        return None, [Problem(key, what, f"one of {names}", remedy)]
    if partition is None:
        nearest = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
        remedy = f"Set {key}={nearest[0]}" if nearest else f"Set {key} to one of them"
        return None, [Problem(key, f"no partition {name!r}", f"one of {names}", remedy)]
    if partition.state != "UP":
        what = f"partition {partition.name} is {partition.state}"
        up = [p.name for p in inventory.partitions if p.state == "UP"]
        return partition, [Problem(key, what, f"one that is UP: {up}", "Choose one or wait")]
    return partition, []


def _check_limits(
    config: RunConfig, component: ComponentPlan, partition: Partition
) -> list[Problem]:
    """The partition's own limits of a job."""
    c = config.components[component.name]
    problems = []
    key = f"components.{component.name}.time" if c.time else "cluster.time"
    limit = partition.max_time_s
    try:
        wanted = parse_time(c.time or config.cluster.time)
    except ValueError as error:
        return [Problem(key, str(error), "minutes, h:m:s or d-h:m:s", f"Set {key}")]
    if limit is not None and (wanted is None or wanted > limit):
        what = f"{c.time or config.cluster.time} is over the limit of partition {partition.name}"
        expected = f"at most {format_time(limit)}"
        problems.append(Problem(key, what, expected, f"Set {key}={format_time(limit)} or less"))
    if partition.max_nodes is not None and component.nodes > partition.max_nodes:
        key = f"components.{component.name}.nodes"
        what = f"{component.nodes} nodes, over the limit of partition {partition.name}"
        expected = f"at most {partition.max_nodes} in one job"
        problems.append(Problem(key, what, expected, "Take fewer nodes or another partition"))
    return problems


def format_time(seconds: int) -> str:
    """``seconds`` as Slurm writes them: `1-00:00:00`."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def _check_nodes(
    c: ComponentConfig, component: ComponentPlan, partition: Partition
) -> tuple[list[Problem], frozenset[str]]:
    """What no node of the partition has, and the names of the nodes that have everything."""
    key = f"components.{component.name}"
    where = f"a node of partition {partition.name}"
    nodes: Sequence[Node] = partition.nodes
    if not nodes:
        what = f"partition {partition.name} has no nodes"
        return [Problem(f"{key}.partition", what, "one with nodes", "Choose another")], frozenset()
    for narrow in (_with_features, _with_gpus, _with_cpus, _with_memory):
        left, problem = narrow(nodes, component, c, where)
        if problem:
            return [problem], frozenset()
        nodes = left
    names = frozenset(n.name for n in nodes)
    if component.nodes <= len(names):
        return [], names
    what = f"{component.nodes} nodes"
    expected = f"at most the {len(names)} of partition {partition.name} that fit"
    remedy = f"Set {key}.nodes={len(names)} or choose another partition"
    return [Problem(f"{key}.nodes", what, expected, remedy)], frozenset()


_Narrowed = tuple[Sequence[Node], Problem | None]
"""Nodes that have what is asked for, and what to say if none has."""


def _with_features(
    nodes: Sequence[Node], component: ComponentPlan, c: ComponentConfig, where: str
) -> _Narrowed:
    """Nodes with the features of `constraint`; counts and brackets are left to sbatch."""
    if not c.constraint or re.search(r"[\[\]()*!]", c.constraint):
        return nodes, None
    wanted = [frozenset(re.split("[&,]", part)) for part in c.constraint.split("|")]
    left = [n for n in nodes if any(features <= n.features for features in wanted)]
    have = sorted(frozenset().union(*(n.features for n in nodes)))
    key = f"components.{component.name}.constraint"
    what = f"{c.constraint!r} fits no {where.removeprefix('a ')}"
    return left, None if left else Problem(key, what, f"features of {have}", f"Set {key}")


def _with_gpus(
    nodes: Sequence[Node], component: ComponentPlan, c: ComponentConfig, where: str
) -> _Narrowed:
    """Nodes with enough GPUs of the type."""
    typed = [n for n in nodes if not c.gpu_type or n.num_gpus(c.gpu_type)]
    if not typed and c.gpus_per_node:
        types = sorted({kind for n in nodes for kind, _ in n.gpus})
        key = f"components.{component.name}.gpu_type"
        what = f"{c.gpu_type!r} is not on {where}"
        return [], Problem(key, what, f"one of {types}", f"Set {key} or another partition")
    most = max((n.num_gpus(c.gpu_type) for n in typed), default=0)
    left = [n for n in nodes if n.num_gpus(c.gpu_type) >= c.gpus_per_node]
    return left, None if left else _too_much(
        "gpus_per_node", c.gpus_per_node, most, component, where
    )


def _with_cpus(
    nodes: Sequence[Node], component: ComponentPlan, c: ComponentConfig, where: str
) -> _Narrowed:
    """Nodes with enough CPUs for all ranks of a node."""
    most = max(n.cpus for n in nodes)
    left = [n for n in nodes if n.cpus >= c.cpus_per_task * component.ranks_per_node]
    if left:
        return left, None
    key = f"components.{component.name}.cpus_per_task"
    per_rank = most // component.ranks_per_node
    what = f"{c.cpus_per_task} for each of {component.ranks_per_node} ranks of a node"
    expected = f"at most {per_rank}, since {where} has {most} CPUs"
    return left, Problem(key, what, expected, f"Set {key}={per_rank} or fewer ranks on a node")


def _with_memory(
    nodes: Sequence[Node], component: ComponentPlan, c: ComponentConfig, where: str
) -> _Narrowed:
    """Nodes with enough host memory."""
    key = f"components.{component.name}.mem"
    if c.mem is None:
        return nodes, None
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", c.mem.upper())
    if not match:
        what = f"{c.mem!r} is no amount of memory"
        return [], Problem(key, what, "a number with K, M, G or T", f"Set {key}=100G")
    wanted_mb = int(match[1]) * _MEM_MB[match[2] or "M"]
    left = [n for n in nodes if n.mem_mb >= wanted_mb]
    most = f"{max(n.mem_mb for n in nodes)}M"
    return left, None if left else _too_much("mem", c.mem, most, component, where)


def _too_much(
    field: str, value: object, most: object, component: ComponentPlan, where: str
) -> Problem:
    key = f"components.{component.name}.{field}"
    expected = f"at most {most}, the most that {where} has"
    return Problem(key, f"{value} of each node", expected, f"Set {key}={most} or another partition")


def _check_sums(plan: RunPlan, suitable: dict[str, frozenset[str]]) -> list[Problem]:
    """Whether all components fit at once, on different nodes, also where partitions overlap.

    They do exactly if no set of components asks for more nodes than suit any of them (Hall's
    theorem); the smallest set that does is told.  Too few nodes for one component alone are found
    before.
    """
    components = [c for c in plan.components if c.name in suitable]
    for size in range(2, len(components) + 1):
        for group in combinations(components, size):
            have = len(frozenset().union(*(suitable[c.name] for c in group)))
            wanted = sum(c.nodes for c in group)
            if wanted > have:
                return [_sum_problem(group, wanted, have)]
    return []


def _sum_problem(group: Sequence[ComponentPlan], wanted: int, have: int) -> Problem:
    names = ", ".join(c.name for c in group)
    return Problem(
        key=f"components.{group[-1].name}.nodes",
        what=f"components {names} need {wanted} different nodes together and {have} fit",
        expected=f"at most {have}, since components never share a node",
        remedy="Put roles into one component (roles.*.component, roles.*.gpus) or take fewer nodes",
    )
