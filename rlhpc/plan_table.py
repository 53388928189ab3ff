"""The plan as a table for people: component, role, ranks, mesh, memory.  Pure text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhpc.config.memory import estimate_memory, gpu_memory_gib
from rlhpc.config.model_facts import ModelFacts
from rlhpc.config.schema import Launcher, RunConfig
from rlhpc.plan import ComponentPlan, RolePlan, RunPlan

_HEADER = ("component", "place", "role", "engine", "ranks", "mesh", "dtype", "GiB/rank")
_NUMERIC = {"GiB/rank"}


def format_plan(config: RunConfig, plan: RunPlan, facts: ModelFacts) -> str:
    """A headline, the table, and what a GPU has where that is known."""
    rows = [
        _role_row(config, component, role, facts, first=i == 0)
        for component in plan.components
        for i, role in enumerate(r for r in plan.roles if r.component == component.name)
    ]
    return f"{_headline(config, plan, facts)}\n\n{format_table(_HEADER, rows)}"


def _headline(config: RunConfig, plan: RunPlan, facts: ModelFacts) -> str:
    size = facts.num_params
    model = f"{size / 1e9:.1f}B" if size >= 1e9 else f"{size / 1e6:.1f}M"
    batch = f"{config.data.train_batch_size} prompts"
    if any(r.kind == "rollout" for r in plan.roles):
        batch += f" x {config.algorithm.group_size}"
    return (
        f"{plan.run_id}\n"
        f"{config.algorithm.name}, {_count(plan.total_steps, 'step')} of {batch}; "
        f"model {Path(config.model.path).name} "
        f"({facts.architecture.removesuffix('ForCausalLM')}, {model} parameters); "
        f"{_count(plan.num_ranks, 'rank')} in {_count(len(plan.components), 'component')} on "
        f"{config.cluster.launcher.value}, {config.cluster.device.value}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _role_row(
    config: RunConfig,
    component: ComponentPlan,
    role: RolePlan,
    facts: ModelFacts,
    *,
    first: bool,
) -> tuple[str, ...]:
    gib = estimate_memory(config, config.roles[role.name], facts).total_gib
    total = gpu_memory_gib(config.components[component.name])
    memory = "-" if gib == 0 else f"{gib:.1f}" + (f" of {total:.0f}" if total else "")
    axes = [("dp", role.dp), ("tp", role.tp), ("pp", role.pp)]
    mesh = " ".join(f"{name}{size}" for name, size in axes if size > 1) or "1 rank"
    return (
        component.name if first else "",
        _place(config, component) if first else "",
        role.name,
        role.engine.rpartition(".")[2],
        format_ranks(role.ranks),
        mesh,
        role.dtype if gib else "-",
        memory,
    )


def _place(config: RunConfig, component: ComponentPlan) -> str:
    """`a100: 2 x 8 GPUs`: partition, nodes and what each has."""
    c = config.components[component.name]
    unit = "GPU" if c.gpus_per_node else "rank"
    size = f"{component.nodes} x {_count(component.ranks_per_node, unit)}"
    if config.cluster.launcher is Launcher.local:
        return size
    return f"{c.partition or 'default'}: {size}"


def format_ranks(ranks: Sequence[int]) -> str:
    """`0-3,6` for ranks 0 1 2 3 6."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart under a rule; numeric ones to the right."""
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(w) if name in _NUMERIC else cell.ljust(w)
            for cell, w, name in zip(cells, widths, header, strict=True)
        )
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * w for w in widths)
    return "\n".join([line(header), rule, *map(line, rows)])
