"""What a role is to its rank: it runs commands; between them it may have work of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rlhpc.comm.messages import Command
from rlhpc.config.schema import RunConfig
from rlhpc.data.batch import ColumnStore
from rlhpc.data.prompts import PromptDataset, load_prompts
from rlhpc.data.tokenizer import load_tokenizer
from rlhpc.plan import RunPlan
from rlhpc.weights.base import WeightPart


@dataclass
class RankContext:
    """What all roles of a rank share."""

    config: RunConfig
    plan: RunPlan
    rank: int
    incarnation: str
    """Unique for each start of the run: names what outlives a process, such as shared memory."""
    device: torch.device
    store: ColumnStore
    emit: Callable[[int, str, dict[str, Any]], None]
    """(command number, kind, data): send an event to the controller."""
    reply: Callable[[int, dict[str, Any]], None]
    """(command number, result): end a command whose `run` returned None."""
    run_until: Callable[[int], None]
    """Run this rank's compute commands up to and including the given number."""
    needs_responses: bool = False
    """Supervised stages: training prompts must come with a target text."""
    _datasets: dict[str, PromptDataset] = field(default_factory=dict)

    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        return load_tokenizer(self.config.model.tokenizer_path or self.config.model.path)

    def prompts(self, split: str) -> PromptDataset:
        """Prompts of ``split``, loaded once."""
        if split not in self._datasets:
            self._datasets[split] = load_prompts(
                self.config.data,
                self.tokenizer(),
                split=split,
                seed=self.config.seed,
                need_response=self.needs_responses,
            )
        return self._datasets[split]


class Role(Protocol):
    """One role on one rank."""

    name: str

    @property
    def busy(self) -> bool:
        """There is work to `step` between commands."""
        ...

    def run(self, command: Command) -> dict[str, Any] | None:
        """Carry out a command; None when the reply comes later through the context."""
        ...

    def step(self) -> None:
        """Advance the work in hand a little."""
        ...

    def before_collective(self, number: int) -> None:
        """Told before command ``number``, which all ranks of the replica run: call the peers."""
        ...

    def weight_parts(self) -> list[WeightPart]:
        """Weights of the policy on this rank, or nothing."""
        ...

    def weights_updated(self, version: int) -> None:
        """The parts were written from outside."""
        ...

    def close(self) -> None:
        """Free what outlives the process."""
        ...
