"""Columns and stages: an algorithm is a short list of stages that say what they read and write.

The login node proves from the list that each column is written before it is read and that no role
is missing; the controller derives from it the exchanges and what may run at the same time.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rlhpc.errors import ConfigError


@dataclass(frozen=True)
class Column:
    """A named field of rows."""

    name: str
    dtype: str
    """torch dtype name."""
    per_token: bool
    """[T] with the length prompt + response of its row, or [N]."""


COLUMNS: dict[str, Column] = {
    c.name: c
    for c in (
        Column("token_ids", "int64", True),
        Column("loss_mask", "bool", True),  # True on sampled (or supervised) response tokens
        Column("rollout_logprobs", "float32", True),
        Column("policy_version", "int32", True),
        Column("old_logprobs", "float32", True),
        Column("ref_logprobs", "float32", True),
        Column("prompt_length", "int64", False),
        Column("truncated", "bool", False),
        Column("rewards", "float32", False),
        Column("advantages", "float32", False),
    )
}

CONTROLLER = "controller"


@dataclass(frozen=True)
class Stage:
    """One step of the algorithm."""

    name: str
    role: str
    """Role kind that runs it, or `controller` for [N] maths."""
    method: str
    """Method of the role."""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    streams: bool = False
    """May run on each group as soon as the group's columns are there."""
    timing: str = ""
    """Name under `timing_s/`; empty takes the stage's name."""


_SAMPLED = (
    "token_ids",
    "loss_mask",
    "rollout_logprobs",
    "policy_version",
    "prompt_length",
    "truncated",
)
_TOKENS = ("token_ids", "loss_mask")

_GENERATE = Stage("generate", "rollout", "generate", writes=_SAMPLED, timing="gen")
_SCORE = Stage(
    "score", "reward", "score", reads=_TOKENS, writes=("rewards",), streams=True, timing="reward"
)


def _logprobs_stage(role: str, column: str, timing: str) -> Stage:
    return Stage(column, role, "compute_logprobs", reads=_TOKENS, writes=(column,), timing=timing)


def grpo_stages(*, use_reference: bool) -> tuple[Stage, ...]:
    """GRPO, Shao et al. 2024 (arXiv:2402.03300), with an optional KL loss to a reference."""
    reference = ("ref_logprobs",) if use_reference else ()
    return (
        _GENERATE,
        _SCORE,
        *(_logprobs_stage("reference", column, "ref") for column in reference),
        _logprobs_stage("actor", "old_logprobs", "old_log_prob"),
        Stage(
            "advantages",
            CONTROLLER,
            "compute_advantages",
            reads=("rewards",),
            writes=("advantages",),
            timing="adv",
        ),
        Stage(
            "update",
            "actor",
            "update",
            reads=(*_TOKENS, "rollout_logprobs", "old_logprobs", "advantages", *reference),
            timing="update_actor",
        ),
        Stage("sync_weights", "actor", "sync_weights", timing="update_weights"),
    )


def sft_stages() -> tuple[Stage, ...]:
    """Supervised fine-tuning on the actor engine: load rows, update."""
    return (
        Stage(
            "load",
            "actor",
            "load_rows",
            writes=("token_ids", "loss_mask", "prompt_length"),
            timing="load",
        ),
        Stage("update", "actor", "update", reads=("token_ids", "loss_mask"), timing="update_actor"),
    )


def make_stages(name: str, *, use_reference: bool) -> tuple[Stage, ...]:
    """The stages of algorithm ``name``: `grpo`, `sft`, or a function's dotted path.

    The function takes `use_reference` and returns stages; its module must be torch-free, for the
    login node reads it.

    Raises:
        ConfigError: the path cannot be imported or does not give stages.
    """
    if name == "grpo":
        return grpo_stages(use_reference=use_reference)
    if name == "sft":
        return sft_stages()
    module, _, attribute = name.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"algorithm.name={name!r} is neither grpo nor sft nor importable ({error}); "
            "expected the dotted path of a function that returns stages. Set algorithm.name"
        ) from error
    stages = tuple(function(use_reference=use_reference))
    if not stages or not all(isinstance(s, Stage) for s in stages):
        raise ConfigError(
            f"algorithm.name={name!r} returned {stages!r}; expected rlhpc.dataflow.Stage objects"
        )
    return stages


def evaluation_stages() -> tuple[Stage, ...]:
    """Greedy responses to held-out prompts, scored.

    Weights and training position stay as they are.
    """
    return (_GENERATE, _SCORE)


def check_stages(stages: Sequence[Stage], role_kinds: Collection[str]) -> None:
    """Raise ConfigError unless columns are written once, before they are read, and roles exist."""
    written: dict[str, str] = {}
    for stage in stages:
        if stage.role != CONTROLLER and stage.role not in role_kinds:
            raise ConfigError(
                f"stage {stage.name} needs a role of kind {stage.role}; "
                f"roles has {sorted(role_kinds)}; add one under roles."
            )
        for column in (*stage.reads, *stage.writes):
            if column not in COLUMNS:
                raise ConfigError(
                    f"stage {stage.name} names column {column!r}; expected one of {sorted(COLUMNS)}"
                )
        for column in stage.reads:
            if column not in written:
                raise ConfigError(
                    f"stage {stage.name} reads {column}, which no earlier stage writes; "
                    "put the stage that writes it before"
                )
        for column in stage.writes:
            if column in written:
                raise ConfigError(
                    f"stage {stage.name} writes {column}, as stage {written[column]} already did"
                )
            written[column] = stage.name
