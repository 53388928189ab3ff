"""Configs and plans for the tests of scripts and launchers; no model, no data, no GPU."""

from __future__ import annotations

from pathlib import Path

from rlhpc.config.engines import RoleKind
from rlhpc.config.schema import (
    ClusterConfig,
    ComponentConfig,
    Device,
    ModelConfig,
    OptimConfig,
    RoleConfig,
    RunConfig,
    TrainerConfig,
)
from rlhpc.plan import RunPlan, make_plan


def make_config(
    components: dict[str, ComponentConfig], roles: dict[str, tuple[str, str | None]]
) -> RunConfig:
    """A config of ``components`` and of roles given as name -> (component, slots of each node)."""
    return RunConfig(
        components=components,
        roles={name: _make_role(name, *place) for name, place in roles.items()},
        model=ModelConfig(path="/models/tiny"),
        trainer=TrainerConfig(total_training_steps=1),
        cluster=ClusterConfig(device=Device.cpu, time="5"),
    )


def _make_role(name: str, component: str, gpus: str | None) -> RoleConfig:
    kind = RoleKind(name)
    engine = {RoleKind.actor: "megatron", RoleKind.reference: "megatron"}.get(kind, "hf")
    optim = OptimConfig() if kind is RoleKind.actor else None
    if kind is RoleKind.reward:
        engine = "function"
    return RoleConfig(kind=kind, component=component, engine=engine, gpus=gpus, optim=optim)


def plan_of(config: RunConfig, run_dir: Path | str) -> RunPlan:
    """The plan of ``config`` in ``run_dir``, with a fixed run id."""
    return make_plan(config, run_id="gsm8k-0001", run_dir=run_dir)


def three_components() -> RunConfig:
    """Actor on 2 tasks of a100, rollout on 2 nodes with 1 task of h100, reference on 1 of a100."""
    return make_config(
        {
            "actor": ComponentConfig(partition="a100", gpus_per_node=2, time="3"),
            "rollout": ComponentConfig(partition="h100", nodes=2, gpus_per_node=1),
            "reference": ComponentConfig(partition="a100", gpus_per_node=1, gpu_type="a100"),
        },
        {
            "actor": ("actor", None),
            "rollout": ("rollout", None),
            "reference": ("reference", None),
        },
    )
