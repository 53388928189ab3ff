"""Estimators of KL(policy || reference) from the log-probs of sampled tokens.  Pure, elementwise.

Names after J. Schulman, "Approximating KL divergence" (2020): k1 and k3 are unbiased values, k2 is
biased with an
unbiased gradient to first order.  As a loss k1 has zero expected gradient, so it serves as a
measure only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhpc.config.schema import KlLossType

MAX_EXPONENT = 20.0
"""exp of more than this is cut, so that no gap between the models gives an infinite loss."""


def compute_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Log-ratio: log p - log r."""
    return logprobs - ref_logprobs


def compute_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Half the squared log-ratio."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def compute_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Ratio r / p, minus 1, minus its logarithm; the logarithm is cut at `MAX_EXPONENT`.

    The whole gap is cut, not the exponent alone: else the linear term would push the policy away
    from the reference
    where the exponential is cut.
    """
    gap = (ref_logprobs - logprobs).clamp(max=MAX_EXPONENT)
    return torch.exp(gap) - gap - 1


def compute_kl(logprobs: Tensor, ref_logprobs: Tensor, kind: KlLossType) -> Tensor:
    """The estimator ``kind`` of each token."""
    compute = {KlLossType.k2: compute_k2, KlLossType.k3: compute_k3}[kind]
    return compute(logprobs, ref_logprobs)
