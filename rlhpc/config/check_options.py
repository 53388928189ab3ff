"""Ranges of the engines' options, one table a class.

Types are checked when a config is loaded; here is what an engine would only find on the ranks.
What depends on the model is in `check_model`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from rlhpc.config.check_run import LONGEST_WAIT_S, Rule, apply_rules
from rlhpc.config.engines import (
    FunctionOptions,
    HfOptions,
    MegatronOptions,
    VllmOptions,
    engine_options,
)
from rlhpc.config.placement import role_num_ranks
from rlhpc.config.schema import Device, Launcher, RoleConfig, RunConfig
from rlhpc.errors import ConfigError, Problem

GIB = 1024**3


def _megatron(o: MegatronOptions) -> list[Rule]:
    return [
        ("max_tokens_per_micro_batch", o.max_tokens_per_micro_batch >= 1, "at least 1"),
        ("vocab_size_multiple", o.vocab_size_multiple >= 1, "at least 1; 128 is usual on GPUs"),
    ]


def _vllm(o: VllmOptions) -> list[Rule]:
    blocks = o.block_size >= 16 and o.block_size % 16 == 0
    return [
        ("gpu_memory_utilization", 0 < o.gpu_memory_utilization <= 1, "above 0 and at most 1"),
        ("kv_cache_gib", o.kv_cache_gib > 0, "above 0"),
        ("max_num_seqs", o.max_num_seqs >= 1, "at least 1"),
        ("block_size", blocks, "a multiple of 16, at least 16"),
    ]


def _hf(o: HfOptions) -> list[Rule]:
    return [("max_num_seqs", o.max_num_seqs >= 1, "at least 1")]


def _function(o: FunctionOptions) -> list[Rule]:
    good = 0 < o.timeout_s <= LONGEST_WAIT_S
    return [("timeout_s", good, f"above 0 and at most {LONGEST_WAIT_S:.0f} seconds")]


_RULES: dict[type, Callable[[Any], list[Rule]]] = {
    MegatronOptions: _megatron,
    VllmOptions: _vllm,
    HfOptions: _hf,
    FunctionOptions: _function,
}


def check_options(config: RunConfig) -> Iterator[Problem]:
    """The options of every role with a built-in engine."""
    for name, role in config.roles.items():
        try:
            options = engine_options(role.engine, role.options)
        except ConfigError:
            continue  # reported when the options were typed
        rules = _RULES.get(type(options))
        if rules is not None:
            yield from apply_rules(f"roles.{name}.options", options, rules(options))
        if isinstance(options, VllmOptions):
            yield from _check_host_memory(config, name, role, options.kv_cache_gib)


def _check_host_memory(
    config: RunConfig, name: str, role: RoleConfig, kv_cache_gib: float
) -> Iterator[Problem]:
    """KV caches of all ranks on this machine against its memory; CPU and no Slurm."""
    c = config.cluster
    if c.device is not Device.cpu or c.launcher is not Launcher.local:
        return
    try:
        ranks = role_num_ranks(config, role)
    except (ConfigError, KeyError):
        return  # reported at the role
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    if kv_cache_gib * ranks >= total:
        yield Problem(
            f"roles.{name}.options.kv_cache_gib",
            f"kv_cache_gib={kv_cache_gib} on each of {ranks} ranks",
            f"less than the {total:.0f} GiB of this machine together",
            f"Lower roles.{name}.options.kv_cache_gib.",
        )
