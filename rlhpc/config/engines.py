"""What each engine can do and the options it takes.  Torch-free: the login node reads it.

An engine of one's own is an `EngineSpec` in any importable, torch-free module; a role names it by
dotted path
(`engine: my_package.my_module.MY_ENGINE`).  `implementation` is imported on the ranks only.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rlhpc.config.typed import build
from rlhpc.errors import ConfigError, Problem, raise_problems

MIN_TEMPERATURE = 0.01
"""Below it vLLM would silently sample at another temperature."""


class RoleKind(Enum):
    """What a role does in the algorithm."""

    actor = "actor"
    rollout = "rollout"
    reference = "reference"
    reward = "reward"


class Recompute(Enum):
    """Which activations Megatron recomputes in the backward pass."""

    none = "none"
    selective = "selective"
    full = "full"


@dataclass(kw_only=True)
class MegatronOptions:
    """Options of the `megatron` engine."""

    max_tokens_per_micro_batch: int = 4096
    """Token budget of one packed micro-batch on one rank; a longer row is refused."""
    sequence_parallel: bool = True
    """Split norms and residuals over tp along the sequence; ignored at tp=1 (as in Megatron)."""
    distributed_optimizer: bool = True
    """Shard optimizer state over dp (ZeRO-1)."""
    recompute: Recompute = Recompute.none
    """Recompute core attention (`selective`) or whole layers (`full`) in the backward pass."""
    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in fp32, whatever the dtype of the weights."""
    vocab_size_multiple: int = 1
    """The vocabulary is padded to a multiple of this times tp; 128 is usual on GPUs."""


@dataclass(kw_only=True)
class VllmOptions:
    """Options of the `vllm` engine."""

    gpu_memory_utilization: float = 0.85
    """Share of the GPU's memory that vLLM may use for weights and KV cache; GPU only."""
    kv_cache_gib: float = 0.25
    """KV cache of one rank in GiB; CPU only (a GPU takes what `gpu_memory_utilization` leaves)."""
    max_num_seqs: int = 256
    """Rows that one replica samples at the same time."""
    enforce_eager: bool = False
    """Skip CUDA graphs; always eager on CPU."""
    enable_prefix_caching: bool = True
    """Share the KV cache of equal prompt prefixes; reset at every weight sync."""
    block_size: int = 32
    """KV cache block in tokens."""


@dataclass(kw_only=True)
class HfOptions:
    """Options of the `hf` engine (plain transformers sampling)."""

    max_num_seqs: int = 256
    """Rows that are sampled at the same time; the rest waits."""


@dataclass(kw_only=True)
class FunctionOptions:
    """Options of the `function` engine (rewards computed by a Python function)."""

    timeout_s: float = 30.0
    """Deadline of scoring one row; a row over it has no reward and is counted."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine serves; checked at submit, imported on the ranks."""

    name: str
    kinds: frozenset[RoleKind]
    """Role kinds it can run."""
    options: type
    """Dataclass of its options; defaults live on its fields."""
    implementation: str
    """`package.module:Class`, imported on the ranks only."""
    axes: frozenset[str] = field(default_factory=lambda: frozenset({"dp"}))
    """Mesh axes that may be above 1."""
    world: str = "replica"
    """Torch default world of its ranks: `role` (all the role's ranks) or `replica` (one dp index).
    """


ENGINES: dict[str, EngineSpec] = {
    spec.name: spec
    for spec in (
        EngineSpec(
            "megatron",
            frozenset({RoleKind.actor, RoleKind.reference}),
            MegatronOptions,
            "rlhpc.training.megatron:MegatronEngine",
            frozenset({"dp", "tp", "pp"}),
            world="role",
        ),
        EngineSpec(
            "vllm",
            frozenset({RoleKind.rollout}),
            VllmOptions,
            "rlhpc.rollout.vllm:VllmEngine",
            frozenset({"dp", "tp"}),
        ),
        EngineSpec("hf", frozenset({RoleKind.rollout}), HfOptions, "rlhpc.rollout.hf:HfEngine"),
        EngineSpec(
            "function",
            frozenset({RoleKind.reward}),
            FunctionOptions,
            "rlhpc.rewards.function:FunctionEngine",
        ),
    )
}


def resolve_engine(name: str) -> EngineSpec:
    """The engine called ``name``: built-in, or at a dotted path in a torch-free module.

    Raises:
        ConfigError: there is none, or importing it brings in torch.
    """
    if name in ENGINES:
        return ENGINES[name]
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise ConfigError(f"engine {name!r} is not known")
    had_torch = "torch" in sys.modules
    try:
        spec = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"engine {name!r} cannot be imported ({e})") from e
    if not isinstance(spec, EngineSpec):
        raise ConfigError(
            f"engine {name!r} is a {type(spec).__name__}, not a rlhpc.config.engines.EngineSpec"
        )
    if "torch" in sys.modules and not had_torch:
        raise ConfigError(
            f"the module of engine {name!r} imports torch, which the login node must not "
            "(keep the EngineSpec in a module of its own, its class named in `implementation`)"
        )
    return spec


def engine_options(engine: str, options: Mapping[str, Any]) -> Any:
    """Typed options: the engine's dataclass, made of the mapping of a config or a plan.

    Raises:
        ConfigError: an option is unknown or has the wrong type.
    """
    spec = resolve_engine(engine)
    problems: list[Problem] = []
    made = build(spec.options, options, "options", problems)
    raise_problems(problems)
    return made
