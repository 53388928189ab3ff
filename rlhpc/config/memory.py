"""Memory of one GPU, estimated in closed form before anything is queued.

Rough by design, within tens of per cent.  Bytes per rank of the fullest pipeline stage; w is 2
(bf16) or 4 (fp32) bytes, h hidden size, v vocabulary, L layers of a stage (all / pp), P parameters
of a stage over tp (its layers and its embedding), T `max_tokens_per_micro_batch`:

    weights      w P
    gradients    4 P, or w P without `grad_reduce_in_fp32`
    optimizer    8 P (Adam's moments) + 4 P (fp32 copy of bf16 weights), over dp if distributed
    activations  17 w L h T / tp for each of pp micro-batches in flight, with attention that is
                 never materialised, after Korthikanti et al. 2022 (arXiv:2205.05198; 34 s b h a
                 layer in 16 bit); `full` recompute keeps w L h T and one layer
    logits       4 v T / tp, twice where they have a gradient
    KV cache     2 w L head_dim * kv heads / tp a token

A role that only scores has weights, one layer's activations and logits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from rlhpc.config.engines import (
    HfOptions,
    MegatronOptions,
    Recompute,
    RoleKind,
    VllmOptions,
    engine_options,
)
from rlhpc.config.model_facts import ModelFacts
from rlhpc.config.placement import role_dp
from rlhpc.config.schema import ComponentConfig, Device, DType, RoleConfig, RunConfig

GIB = 1024**3


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank, by what they are for."""

    weights_bytes: float = 0.0
    gradients_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    activations_bytes: float = 0.0
    kv_cache_bytes: float = 0.0

    @property
    def total_gib(self) -> float:
        """Everything, in GiB."""
        return sum(getattr(self, f.name) for f in fields(self)) / GIB

    def __str__(self) -> str:
        parts = ((f.name.removesuffix("_bytes"), getattr(self, f.name)) for f in fields(self))
        return ", ".join(f"{name.replace('_', ' ')} {b / GIB:.1f}" for name, b in parts if b)


def gpu_memory_gib(component: ComponentConfig) -> float | None:
    """Memory of a GPU of ``component``: configured, else by its type's name; None if unknown."""
    if component.gpu_mem_gib is not None:
        return component.gpu_mem_gib
    name = (component.gpu_type or "").lower()
    words = [w for w in name.replace("-", "_").replace(".", "_").split("_") if w]
    sizes = [w.rstrip("b").rstrip("g") for w in words if w.endswith(("g", "gb"))]
    if sizes and sizes[-1].isdigit():
        return float(sizes[-1])
    return next((_KNOWN_GIB[w] for w in words if w in _KNOWN_GIB), None)


_KNOWN_GIB = {  # a100 and v100 come in two sizes, so their bare names say nothing
    "h100": 80.0, "h200": 140.0, "h800": 80.0, "a800": 80.0, "h20": 96.0, "gh200": 96.0,
    "b200": 180.0, "l40s": 48.0, "l40": 48.0, "a40": 48.0, "a6000": 48.0, "a30": 24.0,
    "a10": 24.0, "l4": 24.0, "t4": 16.0,
}  # fmt: skip


def estimate_memory(config: RunConfig, role: RoleConfig, facts: ModelFacts) -> MemoryEstimate:
    """Estimate one rank of ``role``; zero for engines without a model."""
    options = engine_options(role.engine, role.options)
    if isinstance(options, MegatronOptions):
        return _megatron(role, role_dp(config, role), options, facts)
    if isinstance(options, VllmOptions):
        return _vllm(config, role, options, facts)
    if isinstance(options, HfOptions):
        tokens = options.max_num_seqs * row_length(config)
        return MemoryEstimate(
            weights_bytes=weight_bytes(role, facts), kv_cache_bytes=tokens * kv_bytes(role, facts)
        )
    return MemoryEstimate()


def row_length(config: RunConfig) -> int:
    """Longest row in tokens."""
    return config.data.max_prompt_length + config.data.max_response_length


def kv_bytes(role: RoleConfig, facts: ModelFacts) -> float:
    """Bytes of the KV cache of one token on one rank."""
    heads = max(1.0, facts.num_kv_heads / role.tp)
    return 2 * _width(role) * facts.num_layers / role.pp * heads * facts.head_dim


def weight_bytes(role: RoleConfig, facts: ModelFacts) -> float:
    """Bytes of the weights on one rank of the fullest stage."""
    return _width(role) * _stage_params(role, facts)


def _width(role: RoleConfig) -> int:
    return 2 if role.dtype is DType.bf16 else 4


def _stage_params(role: RoleConfig, facts: ModelFacts) -> float:
    matrices = (
        1 if role.pp > 1 or facts.tied else 2
    )  # the first stage embeds, the last one projects
    layers = facts.num_layers / role.pp * facts.layer_params
    return (layers + matrices * facts.embedding_params) / role.tp


def _megatron(
    role: RoleConfig, dp: int, options: MegatronOptions, facts: ModelFacts
) -> MemoryEstimate:
    width, params = _width(role), _stage_params(role, facts)
    tokens = options.max_tokens_per_micro_batch
    logits = 4.0 * facts.vocab_size * tokens / role.tp
    layer = 17.0 * width * facts.hidden_size * tokens / role.tp
    if role.kind is not RoleKind.actor:
        return MemoryEstimate(weights_bytes=width * params, activations_bytes=layer + logits)
    layers = facts.num_layers / role.pp
    kept = layers * layer
    if options.recompute is Recompute.full:
        kept = layers * width * facts.hidden_size * tokens + layer
    shards = dp if options.distributed_optimizer else 1
    return MemoryEstimate(
        weights_bytes=width * params,
        gradients_bytes=(4 if options.grad_reduce_in_fp32 else width) * params,
        optimizer_bytes=(8 + (4 if width == 2 else 0)) * params / shards,
        activations_bytes=kept * role.pp + 2 * logits,
    )


def _vllm(
    config: RunConfig, role: RoleConfig, options: VllmOptions, facts: ModelFacts
) -> MemoryEstimate:
    weights = weight_bytes(role, facts)
    total = gpu_memory_gib(config.components[role.component])
    if config.cluster.device is Device.cpu:
        cache = options.kv_cache_gib * GIB
    elif total is None:
        cache = options.max_num_seqs * row_length(config) * kv_bytes(role, facts)
    else:  # vLLM takes its share whole: what weights leave becomes KV cache
        cache = max(0.0, options.gpu_memory_utilization * total * GIB - weights)
    return MemoryEstimate(weights_bytes=weights, kv_cache_bytes=cache)
