"""Kernels in bf16 on CUDA against plain references: packed attention and log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhpc.algorithms.logprobs import vocab_parallel_logprobs

pytestmark = pytest.mark.gpu

LENGTHS = (1, 700, 33, 2, 1024, 288)


def _random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda")


@pytest.mark.parametrize(("heads", "groups", "size"), [(8, 8, 64), (12, 2, 128)])
def test_packed_attention_keeps_sequences_apart(
    heads: int, groups: int, size: int, record_property: Any
) -> None:
    from rlhpc.training.megatron_modules import attend_each_sequence, pick_attention

    total = sum(LENGTHS)
    inputs = [_random(total, n, size, seed=i) for i, n in enumerate((heads, groups, groups))]
    ends = torch.tensor((0, *LENGTHS), device="cuda").cumsum(0, dtype=torch.int32)
    attend = pick_attention(torch.device("cuda"), torch.bfloat16)
    record_property("kernel", attend.__name__)

    def run(function: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves, ends, max(LENGTHS), size**-0.5)
        out.backward(_random(*out.shape, seed=9).to(dtype))
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    expected = run(attend_each_sequence, torch.float32)
    found = run(attend, torch.bfloat16)
    assert len(found) == len(expected) == 4
    for ours, reference in zip(found, expected, strict=True):
        gap = (ours.float() - reference).norm() / reference.norm()
        assert float(gap) < 0.02


def test_logprobs_of_bf16_logits_equal_those_in_fp64(record_property: Any) -> None:
    tokens, vocab, padded = 512, 151_936, 152_064
    logits = (4 * _random(tokens, padded, seed=0)).bfloat16().requires_grad_()
    targets = torch.randint(vocab, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, vocab_size=vocab, temperature=0.7)
    record_property("extra MiB", round((torch.cuda.max_memory_allocated() - before) / 2**20))
    (grad,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), logits)

    exact = logits.detach().double().requires_grad_()
    logp = torch.log_softmax(exact[:, :vocab] / 0.7, -1)
    expected = logp.gather(-1, targets[:, None]).squeeze(-1)
    expected_entropy = -(logp.exp() * logp).sum(-1)
    (expected_grad,) = torch.autograd.grad(expected.sum() + expected_entropy.sum(), exact)
    assert float((logprobs.double() - expected).abs().max()) < 1e-4
    assert float((entropy.double() - expected_entropy).abs().max()) < 1e-4
    assert float((grad.double() - expected_grad).norm() / expected_grad.norm()) < 0.01
    assert float(grad[:, vocab:].abs().max()) == 0.0
