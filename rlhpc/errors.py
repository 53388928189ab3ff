"""Exception tree, and the one grammar of messages: what is wrong, what is expected, key, remedy.

    RlhpcError
      ConfigError(ValueError)      a config that cannot run, found before anything is queued
      PlanError(ValueError)        a plan that contradicts itself
      LayoutError(ValueError)      two layouts that do not cover each other
      SubmitError(RuntimeError)    the scheduler refused or cannot be asked
      ChannelError(RuntimeError)   the control plane broke: missing peer, wrong token, closed link
      CommandError(RuntimeError)   a rank was told to do what it cannot do
      RunFailedError(RuntimeError) a run ended without reaching its target; carries the first cause

All take one message string only, so that they survive a pickle between processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class RlhpcError(Exception):
    """Base of every error that rlhpc raises on purpose."""


class ConfigError(RlhpcError, ValueError):
    """The config cannot run; the message lists every problem found."""


class PlanError(RlhpcError, ValueError):
    """A plan contradicts itself or the process that reads it."""


class LayoutError(RlhpcError, ValueError):
    """A destination box is not covered by the source layout, or covered twice."""


class SubmitError(RlhpcError, RuntimeError):
    """The scheduler refused the job or cannot be asked."""


class ChannelError(RlhpcError, RuntimeError):
    """The control plane between the controller and a rank broke."""


class CommandError(RlhpcError, RuntimeError):
    """A rank received a command that it cannot carry out."""


class RunFailedError(RlhpcError, RuntimeError):
    """A run ended without reaching its target."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config, in words a user can act on."""

    key: str
    """Dotted config key, for example ``roles.actor.tp``."""
    what: str
    """What is wrong, with its value: ``tp=3 does not divide num_attention_heads=32``."""
    expected: str
    """What is allowed: ``a divisor of 32``."""
    remedy: str
    """What to do: ``set roles.actor.tp=2 or 4``."""

    def __str__(self) -> str:
        return f"{self.key}: {self.what}; expected {self.expected}. {self.remedy}"


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise one ConfigError that lists all ``problems``; return when there are none."""
    if not problems:
        return
    noun = "problem" if len(problems) == 1 else "problems"
    lines = "\n".join(f"  {i}. {p}" for i, p in enumerate(problems, 1))
    raise ConfigError(f"{len(problems)} {noun} in the config; nothing was submitted:\n{lines}")
