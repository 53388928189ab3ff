"""Checks of algorithm, data, trainer and machine settings.  Touches no file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhpc.config.check_layout import MOST, check_time
from rlhpc.config.data_facts import file_list
from rlhpc.config.engines import MIN_TEMPERATURE, RoleKind
from rlhpc.config.placement import role_dp
from rlhpc.config.schema import Device, Launcher, RoleConfig, RunConfig
from rlhpc.config.typed import nearest, one_of
from rlhpc.dataflow import CONTROLLER, Stage, check_stages, make_stages
from rlhpc.errors import ConfigError, Problem

MAX_TEMPERATURE = 100.0
"""Above it every token is as good as any other."""

LOGGERS = ("console", "file", "tensorboard", "wandb")

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWNED = ("SLURM_", "SLURMD_", "RLHPC_")
"""Variables by which ranks know who they are."""

LONGEST_WAIT_S = 1e7
"""Above it the time-outs of torch and of sockets overflow."""

_WAIT = f"above 0 and at most {LONGEST_WAIT_S:.0f} seconds"

Rule = tuple[str, bool, str]
"""(field, is good, what is expected)."""


def apply_rules(section: str, values: Any, rules: Iterable[Rule]) -> Iterator[Problem]:
    """A problem for each of ``rules`` that the fields of ``values`` at key ``section`` break."""
    for field, good, expected in rules:
        if not good:
            key = f"{section}.{field}"
            yield Problem(key, f"{field}={getattr(values, field)}", expected, f"Change {key}.")


def stages_or_none(config: RunConfig) -> tuple[Stage, ...] | None:
    """The algorithm's stages, None where they cannot be made (a problem of its own)."""
    try:
        return make_stages(config.algorithm.name, use_reference=config.algorithm.use_kl_loss)
    except ConfigError:
        return None


def _role_of(config: RunConfig, kind: RoleKind) -> tuple[str, RoleConfig] | None:
    return next(((n, r) for n, r in config.roles.items() if r.kind is kind), None)


def check_algorithm(config: RunConfig) -> Iterator[Problem]:
    """Stage list against roles, batch sizes against dp, and the ranges of the maths."""
    a = config.algorithm
    yield from _check_stage_list(config)
    yield from apply_rules(
        "algorithm",
        a,
        (
            ("epochs", a.epochs >= 1, "at least 1"),
            ("clip_ratio_low", 0 < a.clip_ratio_low < 1, "in (0, 1)"),
            ("clip_ratio_high", a.clip_ratio_high > 0, "above 0"),
            ("clip_ratio_c", a.clip_ratio_c > 1, "above 1"),
            ("kl_loss_coef", 0 <= a.kl_loss_coef <= MOST, f"in [0, {MOST:.0f}]"),
            ("entropy_coeff", 0 <= a.entropy_coeff <= MOST, f"in [0, {MOST:.0f}]"),
        ),
    )
    yield from apply_rules(
        "sampling",
        config.sampling,
        (
            (
                "temperature",
                MIN_TEMPERATURE <= config.sampling.temperature <= MAX_TEMPERATURE,
                f"at least {MIN_TEMPERATURE}, below which vLLM samples otherwise, and at most "
                f"{MAX_TEMPERATURE}; evaluation is greedy anyway",
            ),
        ),
    )
    yield from _check_batch_sizes(config)


def _check_stage_list(config: RunConfig) -> Iterator[Problem]:
    name = config.algorithm.name
    try:
        stages = make_stages(name, use_reference=config.algorithm.use_kl_loss)
    except ConfigError as e:
        near = nearest(name, ("grpo", "sft"))
        remedy = f"Did you mean {near}?" if near else "Fix algorithm.name."
        yield Problem(
            "algorithm.name", str(e), "grpo, sft or the dotted path of a function", remedy
        )
        return
    needed = dict.fromkeys(s.role for s in stages if s.role != CONTROLLER)
    kinds = {r.kind.value for r in config.roles.values()}
    for kind in needed:
        if kind not in kinds:
            why = " with use_kl_loss" if kind == "reference" else ""
            yield Problem(
                "roles",
                f"algorithm {name}{why} needs a role of kind {kind}, and there is none",
                f"roles of kind {', '.join(needed)}",
                f"Add roles.{kind} with kind={kind}, its component and engine.",
            )
    try:
        check_stages(stages, {*kinds, *needed})
    except ConfigError as e:
        yield Problem("algorithm.name", str(e), "a consistent list of stages", "Fix the stages.")
    for role_name, role in config.roles.items():
        if role.kind.value not in needed:
            hint = " (use_kl_loss=false)" if role.kind is RoleKind.reference else ""
            yield Problem(
                f"roles.{role_name}",
                f"no stage of algorithm {name} uses a {role.kind.value}{hint}",
                f"roles of kind {', '.join(needed)}",
                "Set algorithm.use_kl_loss=true or remove it with ~roles." + role_name + "."
                if role.kind is RoleKind.reference
                else f"Remove it with ~roles.{role_name}.",
            )


def _check_batch_sizes(config: RunConfig) -> Iterator[Problem]:
    a, prompts = config.algorithm, config.data.train_batch_size
    stages = stages_or_none(config) or ()
    sampled = any(s.method == "generate" for s in stages)
    if prompts < 1 or (sampled and a.group_size < 1):
        yield Problem("data.train_batch_size", f"{prompts} prompts", "at least 1", "Raise it.")
        return
    if sampled and a.group_size < 2:
        yield Problem(
            "algorithm.group_size",
            f"group_size={a.group_size} leaves every advantage at 0",
            "at least 2",
            "Set algorithm.group_size, 8 is usual.",
        )
    mini = prompts if a.mini_batch_size is None else a.mini_batch_size
    if mini < 1 or prompts % mini:
        legal = one_of(n for n in range(1, prompts + 1) if prompts % n == 0)
        yield Problem(
            "algorithm.mini_batch_size",
            f"mini_batch_size={mini} does not divide data.train_batch_size={prompts}",
            legal,
            f"Set algorithm.mini_batch_size to {legal}.",
        )
    rows_a_prompt = a.group_size if sampled else 1
    limits = [
        (RoleKind.actor, "algorithm.mini_batch_size", "mini-batch", mini * rows_a_prompt),
        (RoleKind.reference, "data.train_batch_size", "step", prompts * rows_a_prompt),
        (RoleKind.rollout, "data.train_batch_size", "step", prompts * rows_a_prompt),
    ]
    for kind, key, unit, rows in limits:
        found = _role_of(config, kind)
        if found is None or found[1].component not in config.components:
            continue
        try:
            dp = role_dp(config, found[1])
        except ConfigError:
            continue  # reported at the role
        if rows < dp:
            yield Problem(
                key,
                f"{rows} rows a {unit} are fewer than dp={dp} of roles.{found[0]}",
                f"at least {dp} rows, so that no replica is idle",
                f"Raise {key} or lower roles.{found[0]}.dp.",
            )


def check_data(config: RunConfig) -> Iterator[Problem]:
    """Where prompts come from and how long they may be; files themselves are checked elsewhere."""
    d = config.data
    files, held_out = file_list(d.train_files), file_list(d.val_files)
    if d.reasoning_gym is not None and (files or held_out):
        yield Problem(
            "data.reasoning_gym",
            "reasoning_gym and files are both given",
            "one of the two",
            "Remove data.train_files and data.val_files, or ~data.reasoning_gym.",
        )
    if d.reasoning_gym is None and not files:
        yield Problem(
            "data.train_files",
            "no prompts are given",
            "a .parquet or .jsonl path, a list of them, or data.reasoning_gym",
            "Set data.train_files=PATH or data.reasoning_gym.task=NAME.",
        )
    if d.reasoning_gym is not None and d.reasoning_gym.train_size < 1:
        yield Problem("data.reasoning_gym.train_size", "no problems", "at least 1", "Raise it.")
    limit = d.val_max_prompts
    yield from apply_rules(
        "data",
        d,
        (
            ("max_prompt_length", d.max_prompt_length >= 1, "at least 1"),
            ("max_response_length", d.max_response_length >= 1, "at least 1"),
            ("val_max_prompts", limit is None or limit >= 1, "at least 1, or null for all"),
        ),
    )
    if held_out and _role_of(config, RoleKind.rollout) is None:
        yield Problem(
            "data.val_files",
            "there is no rollout role, so nothing evaluates held-out prompts",
            "an empty list",
            "Remove data.val_files, or choose an algorithm with a rollout.",
        )


def check_trainer(config: RunConfig) -> Iterator[Problem]:
    """Course of the run, loggers and names."""
    t = config.trainer
    steps = t.total_training_steps
    yield from apply_rules(
        "trainer",
        t,
        (
            ("total_training_steps", steps is None or steps >= 1, "at least 1, or null"),
            ("total_epochs", t.total_epochs >= 1, "at least 1"),
            ("test_freq", t.test_freq == -1 or t.test_freq >= 1, "-1 or at least 1"),
            ("num_samples", t.num_samples >= 0, "at least 0"),
            ("sync_tolerance", t.sync_tolerance > 0, "above 0"),
            (
                "experiment_name",
                re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", t.experiment_name) is not None,
                "at most 100 letters, digits, and . _ - (it names folders and the job)",
            ),
        ),
    )
    if t.test_freq >= 1 and not file_list(config.data.val_files) and not config.data.reasoning_gym:
        yield Problem(
            "trainer.test_freq",
            f"test_freq={t.test_freq}, but there are no held-out prompts",
            "-1 without data.val_files",
            "Set data.val_files or trainer.test_freq=-1.",
        )
    for name in t.logger:
        if name not in LOGGERS:
            near = nearest(name, LOGGERS)
            yield Problem(
                "trainer.logger",
                f"logger {name!r} is not known",
                f"some of {', '.join(LOGGERS)}",
                f"Did you mean {near}?" if near else "Remove it.",
            )


def check_machine(config: RunConfig) -> Iterator[Problem]:
    """Seed, time limit, time-outs, devices, variables, network interface."""
    c = config.cluster
    if not 0 <= config.seed < 2**32:
        yield Problem("seed", f"seed={config.seed}", "in [0, 2**32)", "Change seed.")
    if c.launcher is Launcher.local:
        yield from _check_local(config)
    yield from check_time("cluster.time", c.time)
    yield from apply_rules(
        "cluster",
        c,
        (
            ("connect_timeout_s", 0 < c.connect_timeout_s <= LONGEST_WAIT_S, _WAIT),
            ("collective_timeout_s", 0 < c.collective_timeout_s <= LONGEST_WAIT_S, _WAIT),
        ),
    )
    interfaces = Path("/sys/class/net")
    if (
        c.network_interface is not None
        and c.launcher is Launcher.local
        and interfaces.is_dir()
        and not (interfaces / c.network_interface).exists()
    ):
        names = ", ".join(sorted(p.name for p in interfaces.iterdir()))
        yield Problem(
            "cluster.network_interface",
            f"{c.network_interface!r} is not an interface of this machine",
            f"one of {names}, or null",
            "Change cluster.network_interface.",
        )


def _check_local(config: RunConfig) -> Iterator[Problem]:
    """What this machine must have; for Slurm, its script and its nodes are checked instead."""
    devices = [p for pattern in ("nvidia*", "dxg") for p in Path("/dev").glob(pattern)]
    if config.cluster.device is Device.cuda and not devices:
        yield Problem(
            "cluster.device",
            "cuda, but this machine has no NVIDIA GPU (no /dev/nvidia*)",
            "cpu here, or a machine with a GPU",
            "Set cluster.device=cpu, or run on a cluster with cluster=slurm.",
        )
    yield from check_variables("cluster", config.cluster.environment)
    for name, component in config.components.items():
        yield from check_variables(f"components.{name}", component.environment)


def check_variables(key: str, variables: Mapping[str, str]) -> Iterator[Problem]:
    """Names that a shell cannot export, and those that the launcher sets."""
    for name in variables:
        if not _VARIABLE.fullmatch(name):
            yield Problem(
                f"{key}.environment",
                f"{name!r} is no variable name",
                "letters, digits and underscores, not starting with a digit",
                "Rename it",
            )
        elif name.startswith(_OWNED):
            yield Problem(
                f"{key}.environment",
                f"{name} is set by the launcher, and ranks find each other by it",
                f"no variable that starts with {', '.join(_OWNED)}",
                f"Remove it with ~{key}.environment.{name}",
            )
