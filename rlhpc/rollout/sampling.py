"""Counter-based sampling of one token a row: pure functions, no generator state, no engine.

Shapes: N rows, V vocabulary.  The uniform number of a token depends on its row's seed and its index
in the response alone, so a row samples the same in any batch, after a restart, and beside any other
row.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Constants of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
# generators"), as signed 64-bit integers because torch has no wrapping unsigned arithmetic.
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def compute_uniforms(seeds: Tensor, indices: Tensor) -> Tensor:
    """One number in [0, 1) for each (seed, index).

    Args:
        seeds: [N] int64, row seeds.
        indices: [N] int64, index of the token in its response, from 0.

    Returns:
        [N] float64, multiples of 2**-53.
    """
    # The seed is mixed first: neighbouring seeds must not be shifted copies of one stream.
    bits = _mix(_mix(seeds + _GOLDEN_GAMMA) + (indices + 1) * _GOLDEN_GAMMA)
    return _shift_right(bits, 11).double() * 2.0**-53


def compute_logprobs(logits: Tensor, temperatures: Tensor) -> Tensor:
    """[N, V] fp32 log_softmax(logits / temperature); temperature 0 (greedy) counts as 1."""
    scale = torch.where(temperatures > 0, temperatures, torch.ones_like(temperatures))
    return (logits.float() / scale[:, None]).log_softmax(dim=-1)


def sample_tokens(
    logits: Tensor, *, temperatures: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample one token a row by inverting the cumulative distribution.

    Args:
        logits: [N, V], any float type.
        temperatures: [N] float32; 0 takes the argmax.
        uniforms: [N] float64 in [0, 1).

    Returns:
        ([N] int64 tokens, [N] float32 log-probs of them under `compute_logprobs`).
    """
    logprobs = compute_logprobs(logits, temperatures)
    # fp64: an fp32 running sum over a large vocabulary loses the mass of its rare tokens.
    cdf = logprobs.double().exp().cumsum(dim=-1)
    target = uniforms[:, None] * cdf[:, -1:]
    # First entry above the target: a token of probability 0 never qualifies.
    sampled = torch.searchsorted(cdf, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(temperatures > 0, sampled, logits.argmax(dim=-1))
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64."""
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)
