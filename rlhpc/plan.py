"""RunConfig -> RunPlan: components, the rank table of every role, its mesh.

The only place where ranks are derived.  A rank is global over the components of the one job step,
in component order.  Inside a role the
mesh order is
tp fastest, then dp, then pp (Megatron's default), so that the tp ranks of a replica are neighbours
on a node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.config.data_facts import count_prompts
from rlhpc.config.engines import engine_options, resolve_engine
from rlhpc.config.placement import role_dp, role_slots, slots_per_node
from rlhpc.config.schema import RunConfig
from rlhpc.config.typed import build, to_plain
from rlhpc.errors import ConfigError, PlanError, Problem


@dataclass(frozen=True)
class ComponentPlan:
    """One component of the job and its block of ranks."""

    name: str
    index: int
    nodes: int
    ranks_per_node: int
    first_rank: int

    @property
    def num_ranks(self) -> int:
        """Ranks of the component."""
        return self.nodes * self.ranks_per_node

    @property
    def ranks(self) -> range:
        """Global ranks of the component, node by node."""
        return range(self.first_rank, self.first_rank + self.num_ranks)


@dataclass(frozen=True)
class RolePlan:
    """One role: its ranks in mesh order and its axes."""

    name: str
    kind: str
    component: str
    engine: str
    world: str
    """`role` or `replica`: see `EngineSpec.world`."""
    dtype: str
    dp: int
    tp: int
    pp: int
    ranks: tuple[int, ...]
    """Global ranks in mesh order: index = tp_index + tp * (dp_index + dp * pp_index)."""
    options: dict[str, Any] = field(default_factory=dict)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(dp, tp, pp) indices of global rank ``rank``."""
        try:
            i = self.ranks.index(rank)
        except ValueError:
            raise PlanError(
                f"rank {rank} is not in role {self.name} (ranks {self.ranks})"
            ) from None
        return i // self.tp % self.dp, i % self.tp, i // (self.tp * self.dp)

    def replica_ranks(self, dp: int) -> tuple[int, ...]:
        """Global ranks of data-parallel replica ``dp``, tp fastest, then pp."""
        return tuple(
            self.ranks[t + self.tp * (dp + self.dp * p)]
            for p in range(self.pp)
            for t in range(self.tp)
        )

    def port(self, dp: int) -> int:
        """The rank through which rows of replica ``dp`` pass: tp 0 of the last pipeline stage."""
        return self.ranks[self.tp * (dp + self.dp * (self.pp - 1))]

    def world_ranks(self, rank: int) -> tuple[int, ...]:
        """Global ranks of the engine's torch default world on ``rank``, in world-rank order."""
        if self.world == "role":
            return self.ranks
        return self.replica_ranks(self.coordinates(rank)[0])

    def label(self, rank: int) -> str:
        """`actor dp1 tp0 pp1`, for logs and errors."""
        dp, tp, pp = self.coordinates(rank)
        return f"{self.name} dp{dp} tp{tp} pp{pp}"


@dataclass(frozen=True)
class RunPlan:
    """Everything that ranks must agree on; written to plan.json before the job is queued."""

    run_id: str
    run_dir: str
    components: tuple[ComponentPlan, ...]
    roles: tuple[RolePlan, ...]
    total_steps: int

    @property
    def num_ranks(self) -> int:
        """Ranks of the job step."""
        return sum(c.num_ranks for c in self.components)

    def component_of(self, rank: int) -> ComponentPlan:
        """The component that hosts global rank ``rank``."""
        for component in self.components:
            if rank in component.ranks:
                return component
        raise PlanError(f"rank {rank} is outside the plan's {self.num_ranks} ranks")

    def roles_of(self, rank: int) -> tuple[RolePlan, ...]:
        """Roles hosted by global rank ``rank``, in config order."""
        return tuple(r for r in self.roles if rank in r.ranks)

    def log_name(self, rank: int) -> str:
        """`rollout+reward_2.log`: the log file of global rank ``rank``, by its roles."""
        return "+".join(r.name for r in self.roles_of(rank)) + f"_{rank}.log"

    def role(self, name: str) -> RolePlan:
        """The role called ``name``."""
        for role in self.roles:
            if role.name == name:
                return role
        raise PlanError(f"no role {name!r} in the plan; roles: {[r.name for r in self.roles]}")

    def role_of_kind(self, kind: str) -> RolePlan | None:
        """The role of ``kind``, or None.  At most one role of a kind is served."""
        return next((r for r in self.roles if r.kind == kind), None)

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path(self.run_dir)


def make_plan(config: RunConfig, *, run_id: str, run_dir: str | Path) -> RunPlan:
    """Number the ranks and derive every role's mesh.

    Raises:
        ConfigError: slots or axes do not fit their component.
        PlanError: a role names a component that is not there.
    """
    components: list[ComponentPlan] = []
    first = 0
    for index, (name, component) in enumerate(config.components.items()):
        block = ComponentPlan(name, index, component.nodes, slots_per_node(component), first)
        components.append(block)
        first += block.num_ranks
    by_name = {c.name: c for c in components}
    return RunPlan(
        run_id=run_id,
        run_dir=str(run_dir),
        components=tuple(components),
        roles=tuple(_make_role(config, name, by_name) for name in config.roles),
        total_steps=compute_total_steps(config),
    )


def _make_role(config: RunConfig, name: str, components: Mapping[str, ComponentPlan]) -> RolePlan:
    role = config.roles[name]
    if role.component not in components:
        raise PlanError(
            f"role {name} names component {role.component!r}, which is not in {list(components)}"
        )
    component = components[role.component]
    slots = role_slots(config, role)
    return RolePlan(
        name=name,
        kind=role.kind.value,
        component=role.component,
        engine=role.engine,
        world=resolve_engine(role.engine).world,
        dtype=role.dtype.value,
        dp=role_dp(config, role),
        tp=role.tp,
        pp=role.pp,
        ranks=tuple(
            component.first_rank + node * component.ranks_per_node + slot
            for node in range(component.nodes)
            for slot in slots
        ),
        options=to_plain(engine_options(role.engine, role.options)),
    )


def compute_total_steps(config: RunConfig) -> int:
    """Steps of the run: what is configured, else whole batches in `total_epochs` passes.

    Prompts are counted without reading them; those that are dropped for their length are not known
    yet.

    Raises:
        ConfigError: the prompts cannot be counted, or are fewer than one batch.
    """
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    prompts = count_prompts(config.data)
    steps = config.trainer.total_epochs * (prompts // config.data.train_batch_size)
    if steps < 1:
        raise ConfigError(
            f"data.train_batch_size={config.data.train_batch_size} with {prompts} prompts and "
            f"trainer.total_epochs={config.trainer.total_epochs} gives no step; "
            f"set data.train_batch_size to at most {prompts} or trainer.total_training_steps"
        )
    return steps


def write_plan(plan: RunPlan, path: Path) -> None:
    """Write ``plan`` as JSON; `read_plan` gives it back exactly."""
    path.write_text(json.dumps(asdict(plan), indent=1) + "\n", encoding="utf-8")


def read_plan(path: Path) -> RunPlan:
    """Read a plan that `write_plan` wrote.

    Raises:
        PlanError: the file is missing or not a plan.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise PlanError(
            f"plan {path} cannot be read ({e}); it is written by rlhpc submit, submit again"
        ) from e
    problems: list[Problem] = []
    plan = build(RunPlan, data, "", problems)
    if problems:
        raise PlanError(
            f"plan {path} is not a plan of this version of rlhpc: {problems[0]}; submit again"
        )
    return plan
