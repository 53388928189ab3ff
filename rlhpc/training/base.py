"""What a training engine must do.

Engines are built inside their world and called by the main thread only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from rlhpc.algorithms.losses import LossFn
from rlhpc.data.batch import Batch
from rlhpc.weights.base import WeightPart

__all__ = ["LossFn", "TrainEngine"]


class TrainEngine(Protocol):
    """Forward and backward over packed rows, in one role's ranks."""

    def compute_logprobs(self, batch: Batch, *, temperature: float) -> dict[str, Tensor] | None:
        """Log-prob and entropy of every token.  Collective over this rank's dp replica.

        Args:
            batch: this replica's rows (the same on all its ranks), with `token_ids`.
            temperature: logits are divided by it.

        Returns:
            `{"logprobs": [T], "entropy": [T]}` in fp32 on host on ranks of the last pipeline stage,
            None elsewhere.
        """
        ...

    def update(self, batch: Batch, loss_fn: LossFn, *, temperature: float) -> dict[str, float]:
        """One optimizer step on this dp replica's rows.  Collective over the role.

        Replicas may hold different numbers of rows, also none.  Gradients are plain sums over
        micro-batches and dp.

        Returns:
            On every rank: the loss function's metrics summed over the role, `loss`, `grad_norm`,
            `lr`.
        """
        ...

    def weight_parts(self) -> list[WeightPart]:
        """This rank's shard of the policy as boxes.

        Views stay valid for the engine's life.  Local.
        """
        ...

    def weights_updated(self) -> None:
        """Told after `weight_parts` views were written from outside, to refresh what is derived.

        Collective.
        """
        ...

    def replica_group(self) -> ProcessGroup | None:
        """Group of this rank's dp replica (tp x pp), None when it has one rank."""
        ...

    def save_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder with the current weights, config and tokenizer.

        Collective over the role.
        """
        ...
