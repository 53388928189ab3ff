"""Group baselines on the controller: [N] rewards in, [N] advantages out.

Also the negative control's shuffle.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from rlhpc.algorithms.advantages import compute_grpo_advantages
from rlhpc.config.schema import RunConfig


def compute_row_advantages(
    config: RunConfig, rewards: Sequence[float], prompts: Sequence[int], *, step: int
) -> list[float]:
    """[N] advantages of [N] rewards; siblings share their entry of ``prompts``."""
    values = list(rewards)
    if config.reward.shuffle:
        values = _deranged(values, seed=config.seed * 7_919 + step)
    advantages = compute_grpo_advantages(
        torch.tensor(values, dtype=torch.float32),
        torch.tensor(prompts, dtype=torch.int64),
        normalize=config.algorithm.norm_adv_by_std,
    )
    return advantages.tolist()


def _deranged(values: Sequence[float], *, seed: int) -> list[float]:
    """``values`` in an order in which none keeps its place (of two or more): one random cycle."""
    order = list(range(len(values)))
    random.Random(seed).shuffle(order)
    out = list(values)
    for here, there in zip(order, order[1:] + order[:1], strict=True):
        out[here] = values[there]
    return out
