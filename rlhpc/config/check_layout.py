"""Checks of components, roles and how they share slots.  Knows no model, data or scheduler."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlhpc.config.engines import EngineSpec, RoleKind, resolve_engine
from rlhpc.config.placement import parse_slots, role_num_ranks, role_slots, slots_per_node
from rlhpc.config.schema import ComponentConfig, Device, RoleConfig, RunConfig
from rlhpc.config.typed import nearest, one_of
from rlhpc.errors import ConfigError, Problem

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_TIME = re.compile(r"(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2}|UNLIMITED|INFINITE)", re.IGNORECASE)
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
MOST = 1e6
"""Far above any sensible rate or weight, and far from what overflows in fp32."""
_AXES = ("tp", "pp", "cp", "ep", "vpp")


def check_components(config: RunConfig) -> Iterator[Problem]:
    """Sizes and wording of each component, and that each hosts a role on all of its slots."""
    if not config.components:
        yield Problem(
            "components",
            "no component is configured",
            "at least one",
            "Choose an experiment, for example experiment=quickstart, or add components.",
        )
    for name, component in config.components.items():
        key = f"components.{name}"
        if not _NAME.fullmatch(name):
            yield Problem(
                key,
                f"name {name!r}",
                "letters, digits, - and _, at most 64",
                "Rename the component.",
            )
        yield from _check_component(key, component)
        yield from _check_slots_used(config, name, component)


def _check_component(key: str, component: ComponentConfig) -> Iterator[Problem]:
    for field, least in (("nodes", 1), ("gpus_per_node", 0), ("cpus_per_task", 1)):
        value = getattr(component, field)
        if value < least:
            yield Problem(
                f"{key}.{field}", f"{field}={value}", f"at least {least}", f"Set {key}.{field}."
            )
    tasks = component.tasks_per_node
    if tasks is not None and component.gpus_per_node > 0:
        yield Problem(
            f"{key}.tasks_per_node",
            f"tasks_per_node={tasks} with gpus_per_node={component.gpus_per_node}",
            "one of the two: a component with GPUs has one rank a GPU",
            f"Remove {key}.tasks_per_node, or set {key}.gpus_per_node=0 for CPU ranks.",
        )
    if tasks is not None and tasks < 1:
        yield Problem(
            f"{key}.tasks_per_node", f"tasks_per_node={tasks}", "at least 1", "Set it to 1 or more."
        )
    if component.gpu_mem_gib is not None and component.gpu_mem_gib <= 0:
        yield Problem(
            f"{key}.gpu_mem_gib", f"gpu_mem_gib={component.gpu_mem_gib}", "above 0", "Set GiB."
        )
    if component.time is not None:
        yield from check_time(f"{key}.time", component.time)
    if component.mem is not None and not _MEMORY.fullmatch(component.mem):
        yield Problem(
            f"{key}.mem",
            f"mem={component.mem!r}",
            "a number and K, M, G or T",
            "Write it like 200G.",
        )


def check_time(key: str, value: str) -> Iterator[Problem]:
    """Slurm's formats of a time limit."""
    if not _TIME.fullmatch(value):
        yield Problem(
            key,
            f"time={value!r} is not a time limit",
            "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS",
            'Write it quoted, like "04:00:00".',
        )


def _check_slots_used(
    config: RunConfig, name: str, component: ComponentConfig
) -> Iterator[Problem]:
    roles = [r for r in config.roles.values() if r.component == name]
    if not roles:
        yield Problem(
            f"components.{name}",
            "no role lives in this component",
            "at least one role that names it",
            f"Point a role's component to {name}, or remove it with ~components.{name}.",
        )
        return
    try:
        used = {slot for role in roles for slot in role_slots(config, role)}
    except ConfigError:
        return  # reported at the role
    idle = sorted(set(range(slots_per_node(component))) - used)
    if idle:
        field = "gpus_per_node" if component.gpus_per_node else "tasks_per_node"
        yield Problem(
            f"components.{name}.{field}",
            f"slots {','.join(map(str, idle))} of each node are used by no role",
            "every slot in use",
            f"Lower components.{name}.{field} or widen a role's gpus.",
        )


def check_roles(config: RunConfig) -> Iterator[Problem]:
    """Each role by itself: component, engine and kind, axes, slots, optimizer."""
    if not config.roles:
        yield Problem(
            "roles",
            "no role is configured",
            "at least an actor",
            "Choose an experiment, for example experiment=quickstart, or add roles.",
        )
    seen: dict[RoleKind, str] = {}
    for name, role in config.roles.items():
        key = f"roles.{name}"
        if not _NAME.fullmatch(name):
            yield Problem(
                key, f"name {name!r}", "letters, digits, - and _, at most 64", "Rename the role."
            )
        if role.kind in seen:
            yield Problem(
                f"{key}.kind",
                f"kind={role.kind.value} is also that of roles.{seen[role.kind]}",
                "one role of a kind",
                f"Remove one of them, for example with ~{key}; use dp for more replicas.",
            )
        seen.setdefault(role.kind, name)
        yield from _check_optim(key, role)
        try:
            spec = resolve_engine(role.engine)
        except ConfigError:
            continue  # reported when the options were typed
        yield from _check_engine(config, key, role, spec)
        if role.component not in config.components:
            if not role.component:
                continue  # reported as missing
            near = nearest(role.component, config.components)
            yield Problem(
                f"{key}.component",
                f"component {role.component!r} does not exist",
                f"one of {', '.join(config.components) or 'components (there are none)'}",
                f"Did you mean {near}?" if near else f"Add components.{role.component}.",
            )
        else:
            yield from _check_mesh(config, key, role)


def _check_engine(
    config: RunConfig, key: str, role: RoleConfig, spec: EngineSpec
) -> Iterator[Problem]:
    if role.kind not in spec.kinds:
        kinds = ", ".join(sorted(k.value for k in spec.kinds))
        yield Problem(
            f"{key}.engine",
            f"engine {role.engine} does not serve kind {role.kind.value}",
            f"an engine of that kind ({role.engine} serves {kinds})",
            f"Change {key}.engine or {key}.kind.",
        )
    for axis in _AXES:
        size = getattr(role, axis)
        if size < 1:
            yield Problem(f"{key}.{axis}", f"{axis}={size}", "at least 1", f"Set {key}.{axis}=1.")
        elif size > 1 and axis not in spec.axes:
            yield Problem(
                f"{key}.{axis}",
                f"{axis}={size} is not served by engine {role.engine}",
                f"1 (axes of {role.engine}: {', '.join(sorted(spec.axes))})",
                f"Set {key}.{axis}=1.",
            )
    component = config.components.get(role.component)
    needs_gpu = config.cluster.device is Device.cuda and role.kind is not RoleKind.reward
    if component is not None and needs_gpu and component.gpus_per_node == 0:
        yield Problem(
            f"components.{role.component}.gpus_per_node",
            f"gpus_per_node=0, but {key} runs {role.engine} with cluster.device=cuda",
            "at least 1",
            f"Set components.{role.component}.gpus_per_node, or cluster.device=cpu to rehearse.",
        )


def _check_mesh(config: RunConfig, key: str, role: RoleConfig) -> Iterator[Problem]:
    size = slots_per_node(config.components[role.component])
    if role.gpus is not None:
        try:
            slots = parse_slots(role.gpus)
        except ConfigError as e:
            yield Problem(f"{key}.gpus", str(e), "slots of a node", f"Set {key}.gpus.")
            return
        if max(slots) >= size:
            yield Problem(
                f"{key}.gpus",
                f"gpus={role.gpus!r} goes beyond the nodes of component {role.component}",
                f"slots from 0 to {size - 1}",
                f"Change {key}.gpus or the size of components.{role.component}.",
            )
            return
    ranks = role_num_ranks(config, role)
    model_parallel = max(1, role.tp) * max(1, role.pp)
    if role.dp is not None and role.dp * model_parallel != ranks:
        yield Problem(
            f"{key}.dp",
            f"tp={role.tp} * pp={role.pp} * dp={role.dp} is {model_parallel * role.dp}, "
            f"but the role has {ranks} ranks",
            f"a product of {ranks}",
            _mesh_remedy(key, role, ranks),
        )
    elif role.dp is None and ranks % model_parallel:
        yield Problem(
            f"{key}.tp",
            f"tp={role.tp} * pp={role.pp} is {model_parallel}, which does not divide "
            f"the role's {ranks} ranks",
            f"a divisor of {ranks}",
            _mesh_remedy(key, role, ranks),
        )


def _mesh_remedy(key: str, role: RoleConfig, ranks: int) -> str:
    model_parallel = max(1, role.tp) * max(1, role.pp)
    if ranks % model_parallel == 0:
        return f"Set {key}.dp={ranks // model_parallel}, or remove it to have it derived."
    legal = one_of(n for n in range(1, ranks + 1) if ranks % n == 0)
    return f"Make tp * pp {legal}, or change the component's nodes or GPUs."


def _check_optim(key: str, role: RoleConfig) -> Iterator[Problem]:
    if role.kind is RoleKind.actor and role.optim is None:
        yield Problem(
            f"{key}.optim",
            "the actor has no optimizer",
            "a section with lr",
            f"Add {key}.optim.lr, for example 1e-6.",
        )
    if role.kind is not RoleKind.actor and role.optim is not None:
        yield Problem(
            f"{key}.optim",
            f"a {role.kind.value} is not trained, so nothing reads its optimizer",
            "optim on the actor only",
            f"Remove it with ~{key}.optim.",
        )
    if role.optim is None:
        return
    o = role.optim
    rules = (
        ("lr", 0 < o.lr <= MOST, f"above 0 and at most {MOST:.0f}"),
        ("weight_decay", 0 <= o.weight_decay <= MOST, f"in [0, {MOST:.0f}]"),
        ("betas", all(0 <= b < 1 for b in o.betas), "two numbers in [0, 1)"),
        ("eps", 0 < o.eps <= MOST, f"above 0 and at most {MOST:.0f}"),
        ("clip_grad", o.clip_grad >= 0, "at least 0; 0 turns clipping off"),
        ("lr_warmup_steps", o.lr_warmup_steps >= 0, "at least 0"),
        ("min_lr_ratio", 0 <= o.min_lr_ratio <= 1, "in [0, 1]"),
    )
    for field, good, expected in rules:
        if not good:
            full = f"{key}.optim.{field}"
            yield Problem(full, f"{field}={getattr(o, field)}", expected, f"Change {full}.")


def check_sharing(config: RunConfig) -> Iterator[Problem]:
    """Two Megatron roles that meet on a rank must have the same slots and axes."""
    megatron = [(n, r) for n, r in config.roles.items() if r.engine == "megatron"]
    for i, (name, role) in enumerate(megatron):
        for other_name, other in megatron[:i]:
            if role.component != other.component or role.component not in config.components:
                continue
            try:
                slots, other_slots = role_slots(config, role), role_slots(config, other)
            except ConfigError:
                continue  # reported at the role
            mesh, other_mesh = (slots, role.tp, role.pp), (other_slots, other.tp, other.pp)
            if set(slots) & set(other_slots) and mesh != other_mesh:
                yield Problem(
                    f"roles.{name}.tp",
                    f"slots {list(slots)} with tp={role.tp} pp={role.pp} meet "
                    f"roles.{other_name} on {list(other_slots)} with tp={other.tp} "
                    f"pp={other.pp}",
                    "the same slots, tp and pp for Megatron roles on the same ranks",
                    "Make them equal, split the slots with gpus, or use two components.",
                )
