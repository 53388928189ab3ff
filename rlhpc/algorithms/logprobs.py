"""Log-prob and entropy of tokens from logits whose vocabulary is split over ranks.

One autograd function: two collectives forward, none backward, padded vocabulary excluded, logits
left untouched. Its memory beside logits and their gradient is one chunk of rows; the softmax is
computed again in the backward pass.

Shapes: T tokens, V vocabulary, P padded vocabulary of all ranks, tp ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

CHUNK_ELEMENTS = 1 << 25
"""Logits converted to fp32 at a time (128 MiB)."""


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution.  Collective over ``group``.

    Args:
        logits: [T, P / tp], this rank's columns, any float dtype; not modified.
        targets: [T] int64 token ids, the same on all ranks.
        vocab_size: V; columns from V on are padding and take no part.
        temperature: above 0; logits are divided by it.
        group: tensor-parallel ranks in the order of their columns; None means this rank has all.

    Returns:
        log-probs [T] and entropies [T] in nats, fp32, the same on all ranks.
    """
    return _LogProbEntropy.apply(logits, targets, vocab_size, temperature, group)


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK_ELEMENTS // max(1, logits.size(-1)))
    for start in range(0, logits.size(0), rows):
        yield slice(start, start + rows)


def _scale(logits: Tensor, offset: Tensor, temperature: float) -> Tensor:
    """(logits - offset) / temperature as a new fp32 tensor; ``offset`` is [rows] fp32."""
    scaled = torch.sub(logits, offset.unsqueeze(-1))
    return scaled if temperature == 1.0 else scaled.div_(temperature)


class _LogProbEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocab_size: int,
        temperature: float,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        first = logits.size(-1) * (group.rank() if group is not None else 0)
        width = min(max(vocab_size - first, 0), logits.size(-1))
        real = logits[:, :width]  # without padding; maybe no column at all on the last ranks
        here = (targets >= first) & (targets < first + width)
        index = torch.where(here, targets - first, 0).unsqueeze(-1)

        top = logits.new_full((logits.size(0),), -torch.inf, dtype=torch.float32)
        if width:
            top = real.amax(-1).float()
        if group is not None:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)

        sums = top.new_zeros(3, logits.size(0))  # target logit, sum of exp, sum of exp * logit
        for rows in _chunks(real) if width else ():
            scaled = _scale(real[rows], top[rows], temperature)
            sums[0, rows] = scaled.gather(-1, index[rows]).squeeze(-1) * here[rows]
            weights = scaled.exp()
            sums[1, rows] = weights.sum(-1)
            sums[2, rows] = weights.mul_(scaled).sum(-1)
        if group is not None:
            dist.all_reduce(sums, group=group)

        log_total = sums[1].log()
        entropy = log_total - sums[2] / sums[1]
        ctx.save_for_backward(logits, index, here, top + log_total * temperature, entropy)
        ctx.width, ctx.temperature = width, temperature
        ctx.set_materialize_grads(False)
        return sums[0] - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """By logit: [target] - p for the log-prob, -p * (log p + entropy) for the entropy."""
        logits, index, here, log_norm, entropy = ctx.saved_tensors
        grad_logprob, grad_entropy = grads
        if grad_logprob is None and grad_entropy is None:
            return None, None, None, None, None
        out = torch.empty_like(logits)
        out[:, ctx.width :] = 0.0
        for rows in _chunks(logits) if ctx.width else ():
            grad = _scale(logits[rows, : ctx.width], log_norm[rows], ctx.temperature)
            probs = grad.exp()
            if grad_entropy is None:
                grad.zero_()
            else:
                grad.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None])
            if grad_logprob is not None:
                grad.sub_(grad_logprob[rows, None])
            grad.mul_(probs)
            if grad_logprob is not None:
                grad.scatter_add_(-1, index[rows], (grad_logprob * here)[rows, None])
            out[rows, : ctx.width] = grad.div_(ctx.temperature)
        return out, None, None, None, None
