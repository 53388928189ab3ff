"""Losses of a micro-batch, divided by the denominators of its whole mini-batch.

Sums over micro-batches and ranks are therefore the loss of the mini-batch, whatever the split.
Pure functions on one
rank; log-probs come from the engine, denominators from the controller.

Shapes: N rows and T tokens of a micro-batch, M of them under the loss mask.  Entries outside the
mask may hold anything,
NaN included: they are taken out before any arithmetic, so that their gradient is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhpc.algorithms.kl import compute_kl
from rlhpc.config.schema import AlgorithmConfig, LossAggregation
from rlhpc.data.batch import Batch
from rlhpc.dataflow import COLUMNS
from rlhpc.errors import CommandError

LossFn = Callable[[Batch, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, logprobs [T], entropy [T]) -> (loss, metrics).

The loss is already divided by the mini-batch's global denominators, so the loss of a mini-batch is
the plain sum over micro-batches and dp ranks, and so are the metrics.  Entry t of logprobs and
entropy speaks of token t; the first token of a row has 0.
"""

MAX_LOG_RATIO = 20.0
"""Bound of |logprobs - old_logprobs|, so that no ratio overflows."""


@dataclass(frozen=True)
class Denominators:
    """What a whole mini-batch, over all ranks, is divided by."""

    tokens: int
    """Tokens under the loss mask."""
    rows: int
    """Rows with at least one such token."""

    @classmethod
    def from_lengths(cls, response_lengths: Sequence[int]) -> Denominators:
        """Those of a mini-batch whose rows have ``response_lengths`` tokens under the mask."""
        return cls(sum(response_lengths), sum(1 for n in response_lengths if n > 0))


@dataclass(frozen=True)
class _Masked:
    """The tokens of a micro-batch that the loss sees."""

    batch: Batch
    mask: Tensor
    """[T] bool."""
    rows: Tensor
    """[M] int64, position of each token's row."""
    weights: Tensor
    """[M] float32, aggregation weights: a loss is sum(weights * token losses)."""
    per_token: float
    """Weight of a token in a mean over tokens."""

    def column(self, name: str) -> Tensor:
        """[M] values of a [T] or [N] column."""
        if name not in self.batch.columns:
            raise CommandError(
                f"the loss needs column {name}, the micro-batch has {sorted(self.batch.columns)}; "
                "a stage before the update must write it"
            )
        value = self.batch.columns[name].to(self.mask.device)
        return value[self.mask] if COLUMNS[name].per_token else value[self.rows]

    def mean(self, values: Tensor) -> Tensor:
        """This micro-batch's part of the mean over tokens."""
        return values.sum() * self.per_token


def _mask(batch: Batch, like: Tensor, mode: LossAggregation, denominators: Denominators) -> _Masked:
    mask = batch.columns["loss_mask"].to(like.device)
    rows = batch.token_rows().to(like.device)[mask]
    tokens, num_rows = max(denominators.tokens, 1), max(denominators.rows, 1)
    if mode is LossAggregation.token_mean:
        weights = like.new_full((len(rows),), 1 / tokens)
    elif mode is LossAggregation.seq_mean_token_sum:
        weights = like.new_full((len(rows),), 1 / num_rows)
    else:
        lengths = torch.bincount(rows, minlength=len(batch)).to(like.dtype)
        weights = 1 / (num_rows * lengths[rows])
    return _Masked(batch, mask, rows, weights.detach(), 1 / tokens)


def make_policy_loss(config: AlgorithmConfig, *, denominators: Denominators) -> LossFn:
    """Clipped policy-gradient loss, optionally with KL to a reference and an entropy bonus.

    PPO's clip, Schulman et al. 2017 (arXiv:1707.06347, eq. 7) with two bounds as in DAPO, Yu et
    al. 2025
    (arXiv:2503.14476, sec. 3.1), and the dual clip for negative advantages of Ye et al. 2020
    (arXiv:1912.09729, eq. 5).
    Aggregation: `token-mean` as in DAPO (sec. 3.3), `seq-mean-token-mean` as in GRPO,
    `seq-mean-token-sum` as in
    Dr. GRPO without its constant.

    Reads columns `loss_mask`, `old_logprobs` [T] and `advantages` [N]; `ref_logprobs` [T] with
    `use_kl_loss`;
    `rollout_logprobs` [T] where there is one, for the sampler/trainer mismatch.
    """

    def loss_fn(
        batch: Batch, logprobs: Tensor, entropy: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        masked = _mask(batch, logprobs, config.loss_agg_mode, denominators)
        new, old = logprobs[masked.mask], masked.column("old_logprobs")
        loss, metrics = _policy_terms(config, masked, new, old)
        token_entropy = entropy[masked.mask]
        mean_entropy = (masked.weights * token_entropy).sum()
        metrics["actor/entropy"] = mean_entropy
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * mean_entropy
        if config.use_kl_loss:
            kl = compute_kl(new, masked.column("ref_logprobs"), config.kl_loss_type)
            metrics["actor/kl_loss"] = (masked.weights * kl).sum()
            loss = loss + config.kl_loss_coef * metrics["actor/kl_loss"]
        metrics.update(_mismatch(masked, old))
        return loss, {name: value.detach() for name, value in metrics.items()}

    return loss_fn


def _policy_terms(
    config: AlgorithmConfig, masked: _Masked, new: Tensor, old: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate and its metrics, from log-probs [M]."""
    advantages = masked.column("advantages")
    log_ratio = (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    upper = torch.maximum(plain, clipped)
    bound = -advantages * config.clip_ratio_c
    negative = advantages < 0
    token_loss = torch.where(negative, torch.minimum(upper, bound), upper)
    loss = (masked.weights * token_loss).sum()
    return loss, {
        "actor/pg_loss": loss,
        "actor/ppo_kl": masked.mean(-log_ratio),
        "actor/pg_clipfrac": masked.mean((clipped > plain).to(new.dtype)),
        "actor/pg_clipfrac_lower": masked.mean((negative & (upper > bound)).to(new.dtype)),
    }


def _mismatch(masked: _Masked, old: Tensor) -> dict[str, Tensor]:
    """How far the sampler's probabilities are from the trainer's, as means over tokens."""
    if "rollout_logprobs" not in masked.batch.columns:
        return {}
    sampled = masked.column("rollout_logprobs")
    return {
        "training/rollout_logprobs_diff_mean": masked.mean((sampled - old).abs()),
        "training/rollout_probs_diff_mean": masked.mean((sampled.exp() - old.exp()).abs()),
    }


def make_sft_loss(config: AlgorithmConfig, *, denominators: Denominators) -> LossFn:
    """Negative log-likelihood of the masked tokens, aggregated as `config.loss_agg_mode`."""

    def loss_fn(
        batch: Batch, logprobs: Tensor, entropy: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        masked = _mask(batch, logprobs, config.loss_agg_mode, denominators)
        loss = -(masked.weights * logprobs[masked.mask]).sum()
        mean_entropy = (masked.weights * entropy[masked.mask]).sum()
        return loss, {"train/loss": loss.detach(), "actor/entropy": mean_entropy.detach()}

    return loss_fn
