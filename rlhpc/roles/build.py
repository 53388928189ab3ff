"""Makes a role from the plan: finds the engine's class and builds it inside its world."""

from __future__ import annotations

import importlib
import math
from typing import Any

from rlhpc.comm.world import World
from rlhpc.config.engines import EngineSpec, RoleKind, resolve_engine
from rlhpc.config.schema import RoleConfig, RunConfig
from rlhpc.data.tokenizer import stop_token_ids
from rlhpc.plan import RolePlan, RunPlan
from rlhpc.roles.base import RankContext, Role
from rlhpc.roles.reward import RewardRole
from rlhpc.roles.rollout import RolloutRole
from rlhpc.roles.training import TrainingRole


def make_role(context: RankContext, plan: RolePlan, world: World) -> Role:
    """Build the engine of ``plan`` on this rank.  Collective over the role's world."""
    config = context.config.roles[plan.name]
    spec = resolve_engine(config.engine)
    with world.active():
        match RoleKind(plan.kind):
            case RoleKind.actor | RoleKind.reference:
                engine = _make_training_engine(context, plan, config, spec)
                return TrainingRole(context, plan, engine, world)
            case RoleKind.rollout:
                engine = _make_rollout_engine(context, plan, config, spec)
                return RolloutRole(context, plan, engine, world)
            case RoleKind.reward:
                reward = context.config.reward
                engine = _load(spec)(
                    function=reward.function, kwargs=reward.kwargs, options=_options(config, spec)
                )
                return RewardRole(context, plan, engine)


def _load(spec: EngineSpec) -> Any:
    """The engine's class; its libraries are imported here and on no other rank."""
    module, _, name = spec.implementation.partition(":")
    return getattr(importlib.import_module(module), name)


def _options(config: RoleConfig, spec: EngineSpec) -> Any:
    return spec.options(**config.options)


def _make_training_engine(
    context: RankContext, plan: RolePlan, config: RoleConfig, spec: EngineSpec
) -> Any:
    return _load(spec)(
        model_path=context.config.model.path,
        tokenizer_path=context.config.model.tokenizer_path,
        role=plan,
        rank=context.rank,
        options=_options(config, spec),
        dtype=plan.dtype,
        device=context.device,
        optim=config.optim,
        total_updates=total_updates(context.config, context.plan),
        seed=context.config.seed,
    )


def total_updates(config: RunConfig, plan: RunPlan) -> int:
    """Optimizer updates of the whole run, the length of the learning-rate schedule."""
    batch = config.data.train_batch_size
    mini = config.algorithm.mini_batch_size or batch
    return plan.total_steps * config.algorithm.epochs * math.ceil(batch / mini)


def _make_rollout_engine(
    context: RankContext, plan: RolePlan, config: RoleConfig, spec: EngineSpec
) -> Any:
    run = context.config
    dp = plan.coordinates(context.rank)[0]
    return _load(spec)(
        model_path=run.model.path,
        role=plan,
        rank=context.rank,
        options=_options(config, spec),
        dtype=plan.dtype,
        device=context.device,
        max_model_len=run.data.max_prompt_length + run.data.max_response_length,
        seed=run.seed,
        stop_token_ids=stop_token_ids(run.model.path, context.tokenizer()),
        engine_id=f"{context.plan.run_id}-{context.incarnation}-{plan.name}{dp}",
    )
