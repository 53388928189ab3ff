"""RunConfig -> RunPlan: components, the rank table of every role, its mesh.  The only place where ranks are derived.

A rank is global over the components of the one job step, in component order.  Inside a role the mesh order is
tp fastest, then dp, then pp (Megatron's default), so that the tp ranks of a replica are neighbours on a node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.errors import PlanError


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
            raise PlanError(f"rank {rank} is not in role {self.name} (ranks {self.ranks})") from None
        return i // self.tp % self.dp, i % self.tp, i // (self.tp * self.dp)

    def replica_ranks(self, dp: int) -> tuple[int, ...]:
        """Global ranks of data-parallel replica ``dp``, tp fastest, then pp."""
        return tuple(
            self.ranks[t + self.tp * (dp + self.dp * p)]
            for p in range(self.pp)
            for t in range(self.tp)
        )

    def port(self, dp: int) -> int:
        """The rank of replica ``dp`` through which its rows come and go: tp 0 of the last pipeline stage."""
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
