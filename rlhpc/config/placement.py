"""Which slots a role uses and how many ranks that gives: the arithmetic that checks and plan share.

A slot is a rank's index on its node, which is also the index of its GPU.
"""

from __future__ import annotations

import re

from rlhpc.config.schema import ComponentConfig, RoleConfig, RunConfig
from rlhpc.errors import ConfigError


def slots_per_node(component: ComponentConfig) -> int:
    """Ranks of each node: one a GPU, or `tasks_per_node` (default 1) where there is none."""
    if component.gpus_per_node > 0:
        return component.gpus_per_node
    return component.tasks_per_node or 1


def parse_slots(text: str) -> tuple[int, ...]:
    """Slots of ``text``: `0-1` is (0, 1), `0,2` is (0, 2), `0-1,4` is (0, 1, 4).

    Raises:
        ConfigError: the text is malformed or names a slot twice.
    """
    slots: list[int] = []
    for part in str(text).split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise ConfigError(f"slots {text!r} are malformed; write them like 0-1 or 0,2 or 0-1,4")
        slots += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(set(slots)) != len(slots):
        raise ConfigError(f"slots {text!r} name a slot twice; name each once")
    return tuple(slots)


def role_slots(config: RunConfig, role: RoleConfig) -> tuple[int, ...]:
    """Slots of each node that ``role`` uses; its component must exist.

    Raises:
        ConfigError: `gpus` is malformed or out of range.
    """
    size = slots_per_node(config.components[role.component])
    if role.gpus is None:
        return tuple(range(size))
    slots = parse_slots(role.gpus)
    if max(slots) >= size:
        raise ConfigError(
            f"slots {role.gpus!r} go beyond the {size} of each node of component "
            f"{role.component}; use 0 to {size - 1}"
        )
    return slots


def role_num_ranks(config: RunConfig, role: RoleConfig) -> int:
    """Ranks of ``role``: its slots on every node of its component."""
    return len(role_slots(config, role)) * config.components[role.component].nodes


def role_dp(config: RunConfig, role: RoleConfig) -> int:
    """Data-parallel replicas: what is configured, else what the other axes leave.

    Raises:
        ConfigError: the axes do not multiply to the role's ranks.
    """
    ranks = role_num_ranks(config, role)
    model_parallel = role.tp * role.pp * role.cp
    if min(role.tp, role.pp, role.cp) < 1:
        raise ConfigError(f"tp={role.tp} pp={role.pp} cp={role.cp}; each must be at least 1")
    dp = role.dp if role.dp is not None else max(1, ranks // model_parallel)
    if dp * model_parallel != ranks:
        raise ConfigError(
            f"tp={role.tp} * pp={role.pp} * cp={role.cp} * dp={dp} is {dp * model_parallel}, "
            f"but the role has {ranks} ranks; make the product equal"
        )
    return dp
