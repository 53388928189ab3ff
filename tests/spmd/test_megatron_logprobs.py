"""algorithms.logprobs over several ranks: the cut of the vocabulary changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhpc.algorithms.logprobs import vocab_parallel_logprobs
from tests.spmd import run_spmd

VOCAB = 13


def _score(rank: int, columns: int) -> Any:
    """The rank's columns of one table of logits that is padded with large numbers."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, dist.get_world_size() * columns, generator=generator)
    targets = torch.randint(0, VOCAB, (7,), generator=generator)
    weights = torch.randn(2, 7, generator=generator)
    whole = logits[:, :VOCAB].double().requires_grad_()
    logits[:, VOCAB:] = 1e4
    mine = logits[:, rank * columns : (rank + 1) * columns].clone().requires_grad_()
    values = torch.stack(
        vocab_parallel_logprobs(
            mine, targets, vocab_size=VOCAB, temperature=0.7, group=dist.group.WORLD
        )
    )
    (values * weights).sum().backward()
    logp = torch.log_softmax(whole / 0.7, -1)
    want = torch.stack([logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)])
    (want * weights).sum().backward()
    assert mine.grad is not None
    assert whole.grad is not None
    padded = torch.nn.functional.pad(whole.grad, (0, logits.size(1) - VOCAB))
    return values - want, mine.grad - padded[:, rank * columns : (rank + 1) * columns]


@pytest.mark.parametrize("columns", [7, 16])
def test_a_split_vocabulary_gives_the_values_of_a_whole_one(columns: int) -> None:
    for value_error, grad_error in run_spmd(_score, 2, columns):  # 16: rank 1 has padding only
        assert float(value_error.detach().abs().max()) < 2e-6
        assert float(grad_error.abs().max()) < 2e-6
