"""Checks of the model's sizes against axes, lengths and GPU memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhpc.config.engines import RoleKind, VllmOptions, engine_options
from rlhpc.config.memory import (
    GIB,
    MemoryEstimate,
    estimate_memory,
    gpu_memory_gib,
    kv_bytes,
    row_length,
    weight_bytes,
)
from rlhpc.config.model_facts import ModelFacts
from rlhpc.config.placement import role_num_ranks, role_slots
from rlhpc.config.schema import Device, RoleConfig, RunConfig
from rlhpc.config.typed import one_of
from rlhpc.errors import ConfigError, Problem

VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_model_sizes(config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    """Heads and widths against tp, layers against pp; engines pad the vocabulary."""
    if facts.unsupported:
        yield Problem(
            "model.path",
            f"{Path(config.model.path) / 'config.json'} sets {', '.join(facts.unsupported)}",
            "a dense model with SiLU, full attention and plain weights",
            "Use another model.",
        )
    for name, role in config.roles.items():
        if role.kind is RoleKind.reward:
            continue
        yield from _check_head_size(config, name, role, facts)
        wrong = _tp_misfits(role, role.tp, facts)
        if wrong:
            legal = one_of(t for t in _sizes_up_to(config, role) if not _tp_misfits(role, t, facts))
            yield Problem(
                f"roles.{name}.tp",
                f"tp={role.tp} does not fit {', '.join(wrong)} of the model",
                legal,
                f"Set roles.{name}.tp to {legal}.",
            )
        if role.pp > 0 and facts.num_layers % role.pp:
            legal = one_of(n for n in _sizes_up_to(config, role) if facts.num_layers % n == 0)
            yield Problem(
                f"roles.{name}.pp",
                f"pp={role.pp} does not divide num_hidden_layers={facts.num_layers}",
                legal,
                f"Set roles.{name}.pp to {legal}.",
            )


def _check_head_size(
    config: RunConfig, name: str, role: RoleConfig, facts: ModelFacts
) -> Iterator[Problem]:
    """On CPU vLLM has attention kernels for some head sizes only."""
    on_cpu = config.cluster.device is Device.cpu
    if role.engine == "vllm" and on_cpu and facts.head_dim not in VLLM_CPU_HEAD_SIZES:
        yield Problem(
            f"roles.{name}.engine",
            f"vLLM on CPU has no attention for the model's head size {facts.head_dim}",
            one_of(VLLM_CPU_HEAD_SIZES),
            f"Set roles.{name}.engine=hf, or use another model.",
        )


def _tp_misfits(role: RoleConfig, tp: int, facts: ModelFacts) -> list[str]:
    """Sizes of the model that ``role`` cannot split over ``tp`` ranks, as `name=value`.

    vLLM repeats kv heads where tp is a multiple of them; training engines do not.
    """
    if tp < 1:
        return []
    sizes = {
        "num_attention_heads": facts.num_heads,
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.intermediate_size,
    }
    wrong = [f"{name}={size}" for name, size in sizes.items() if size % tp]
    repeats = role.engine == "vllm" and tp % facts.num_kv_heads == 0
    if facts.num_kv_heads % tp and not repeats:
        wrong.append(f"num_key_value_heads={facts.num_kv_heads}")
    return wrong


def _sizes_up_to(config: RunConfig, role: RoleConfig) -> range:
    """Sizes that an axis of ``role`` could have with the ranks that it has."""
    try:
        return range(1, role_num_ranks(config, role) + 1)
    except (ConfigError, KeyError):
        return range(1, max(role.tp, role.pp) + 1)  # reported at the role


def check_lengths(config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    """A row of prompt and response against the model's context and each engine's budget."""
    length = row_length(config)
    what = (
        f"max_prompt_length={config.data.max_prompt_length} + "
        f"max_response_length={config.data.max_response_length} is {length}"
    )
    if length > facts.max_position_embeddings:
        yield Problem(
            "data.max_response_length",
            f"{what}, above the model's max_position_embeddings={facts.max_position_embeddings}",
            f"at most {facts.max_position_embeddings} together",
            "Lower data.max_response_length or data.max_prompt_length.",
        )
    for name, role in config.roles.items():
        budget = role.options.get("max_tokens_per_micro_batch")
        if budget is not None and length > budget:
            key = f"roles.{name}.options.max_tokens_per_micro_batch"
            yield Problem(
                key, f"{what}, above {budget}", "at least the longest row", f"Set {key}={length}."
            )


def check_memory(config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    """Estimated bytes of all roles on a GPU against its memory, where that is known."""
    for name, role in config.roles.items():
        yield from _check_kv_cache(config, name, role, facts)
    if config.cluster.device is not Device.cuda:
        return
    for component_name, component in config.components.items():
        total = gpu_memory_gib(component)
        if total is None:
            continue
        try:
            shares = _slot_shares(config, component_name, facts)
        except ConfigError:
            continue  # reported at the role
        for roles in sorted({tuple(s) for s in shares.values()}):
            estimates = {n: estimate_memory(config, config.roles[n], facts) for n in roles}
            used = sum(e.total_gib for e in estimates.values())
            if used > total:
                yield _too_much(component_name, estimates, used, total)


def _slot_shares(config: RunConfig, component: str, facts: ModelFacts) -> dict[int, list[str]]:
    """Names of the roles with a model on each slot of ``component``."""
    shares: dict[int, list[str]] = {}
    for name, role in config.roles.items():
        if role.component == component and estimate_memory(config, role, facts).total_gib > 0:
            for slot in role_slots(config, role):
                shares.setdefault(slot, []).append(name)
    return shares


def _too_much(
    component: str, estimates: dict[str, MemoryEstimate], used: float, total: float
) -> Problem:
    parts = "; ".join(f"{n} {e.total_gib:.1f} ({e})" for n, e in estimates.items())
    return Problem(
        f"components.{component}.gpu_mem_gib",
        f"about {used:.0f} GiB a GPU are needed: {parts}",
        f"at most {total:.0f} GiB",
        "Raise tp or pp, lower max_tokens_per_micro_batch, set recompute=full, lower "
        "gpu_memory_utilization, or move a role to a component of its own.",
    )


def _check_kv_cache(
    config: RunConfig, name: str, role: RoleConfig, facts: ModelFacts
) -> Iterator[Problem]:
    """A vLLM replica must be able to hold at least one whole row."""
    try:
        options = engine_options(role.engine, role.options)
    except ConfigError:
        return  # reported when the options were typed
    if not isinstance(options, VllmOptions) or role.component not in config.components:
        return
    row = row_length(config) * kv_bytes(role, facts) / GIB
    if config.cluster.device is Device.cpu:
        if row > options.kv_cache_gib:
            yield Problem(
                f"roles.{name}.options.kv_cache_gib",
                f"kv_cache_gib={options.kv_cache_gib}, but one row of {row_length(config)} tokens "
                f"takes {row:.2f}",
                "room for one row at least, better for many",
                f"Set roles.{name}.options.kv_cache_gib={max(1.0, row * 4):.0f}.",
            )
        return
    total = gpu_memory_gib(config.components[role.component])
    need = weight_bytes(role, facts) / GIB + row
    share = options.gpu_memory_utilization
    if total is not None and need > share * total:
        yield Problem(
            f"roles.{name}.tp",
            f"weights and one row take {need:.1f} GiB a GPU with tp={role.tp}",
            f"at most gpu_memory_utilization={share} of {total:.0f} GiB",
            f"Raise roles.{name}.tp or its gpu_memory_utilization.",
        )
