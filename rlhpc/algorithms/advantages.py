"""Advantages from rewards.  Pure functions on [N] tensors of a whole batch.

Shapes: N rows; groups need not be contiguous.  A missing reward is NaN: its row gets advantage 0
and counts in no mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class _Groups(NamedTuple):
    """[N] statistics of the group that each row belongs to."""

    valid: Tensor
    num_valid: Tensor
    mean: Tensor
    std: Tensor
    varies: Tensor


class GroupStatistics(NamedTuple):
    """How much of a batch teaches nothing."""

    num_groups: int
    num_zero_variance: int
    """Groups without a gradient: all valid rewards equal, or fewer than two valid ones."""
    num_missing: int
    """Rows without a reward."""


def compute_grpo_advantages(rewards: Tensor, groups: Tensor, *, normalize: bool = True) -> Tensor:
    """Reward minus the mean of its group, over the group's standard deviation if ``normalize``.

    Outcome-supervised GRPO, Shao et al. 2024 (arXiv:2402.03300, sec. 4.1.2), with the unbiased
    standard deviation
    plus 1e-6; ``normalize=False`` is Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783).  A group whose
    valid rewards are
    all equal, or that has one valid row, gets exactly 0: rounding in its mean must not become a
    direction.

    Args:
        rewards: [N]; NaN where a row has none.
        groups: [N] int, the prompt of each row.
        normalize: divide by the standard deviation.

    Returns:
        [N] of the dtype of ``rewards``, finite.
    """
    stats = _group_rows(rewards, groups)
    centred = rewards.double() - stats.mean
    if normalize:
        centred = centred / (stats.std + 1e-6)
    keep = stats.valid & stats.varies
    return torch.where(keep, centred, torch.zeros_like(centred)).to(rewards.dtype)


def group_statistics(rewards: Tensor, groups: Tensor) -> GroupStatistics:
    """Count groups, groups without variance and missing rewards.

    Args:
        rewards: [N]; NaN where a row has none.
        groups: [N] int.
    """
    varies = _group_rows(rewards, groups).varies
    num_groups = groups.unique().numel()
    return GroupStatistics(
        num_groups, num_groups - groups[varies].unique().numel(), int(rewards.isnan().sum())
    )


def _group_rows(rewards: Tensor, groups: Tensor) -> _Groups:
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)} and groups {tuple(groups.shape)}; "
            "expected [N] both"
        )
    _, place = groups.unique(return_inverse=True)
    size = int(place.max()) + 1 if len(place) else 0
    valid = ~rewards.isnan()
    values = torch.where(valid, rewards, torch.zeros_like(rewards)).double()

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(size).index_add_(0, place, x)[place]

    count = total(valid.double())
    mean = total(values) / count.clamp(min=1)
    squares = torch.where(valid, (values - mean) ** 2, torch.zeros_like(values))
    std = (total(squares) / (count - 1).clamp(min=1)).sqrt()
    inf = torch.full((size,), torch.inf, dtype=values.dtype)
    low = inf.scatter_reduce(0, place, torch.where(valid, values, torch.inf), "amin")
    high = (-inf).scatter_reduce(0, place, torch.where(valid, values, -torch.inf), "amax")
    return _Groups(valid, count, mean, std, (high > low)[place])
