"""algorithms.logprobs on one rank, against a plain softmax."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhpc.algorithms import logprobs
from rlhpc.algorithms.logprobs import vocab_parallel_logprobs

VOCAB = 13


def _inputs(columns: int = VOCAB, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(7, columns, generator=generator) * 3).to(dtype)
    targets = torch.randint(0, VOCAB, (7,), generator=generator)
    return logits.requires_grad_(), targets


def _plain(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = F.log_softmax(logits[:, :VOCAB].double() / temperature, -1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("columns", [VOCAB, 16])
def test_values_and_gradients_equal_a_plain_softmax(temperature: float, columns: int) -> None:
    logits, targets = _inputs(columns)
    weights = torch.randn(2, 7, generator=torch.Generator().manual_seed(1))
    got = vocab_parallel_logprobs(logits, targets, vocab_size=VOCAB, temperature=temperature)
    want = _plain(logits, targets, temperature)
    for mine, plain in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), plain, rtol=0, atol=2e-6)
    (grad,) = torch.autograd.grad((torch.stack(got) * weights).sum(), logits)
    (plain_grad,) = torch.autograd.grad((torch.stack(want) * weights).sum(), logits)
    torch.testing.assert_close(grad, plain_grad, rtol=1e-5, atol=1e-6)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = _inputs()
    results = []
    for chunk in (1 << 20, 2 * VOCAB):
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
        values = vocab_parallel_logprobs(logits, targets, vocab_size=VOCAB)
        (grad,) = torch.autograd.grad(values[0].sum() + values[1].sum(), logits)
        results.append((*values, grad))
    for whole, chunked in zip(*results, strict=True):
        assert torch.equal(whole, chunked)


def test_logits_stay_as_they_are() -> None:
    logits, targets = _inputs()
    before = logits.detach().clone()
    vocab_parallel_logprobs(logits, targets, vocab_size=VOCAB)[0].sum().backward()
    assert torch.equal(logits, before)


def test_padding_takes_no_part_whatever_it_holds() -> None:
    logits, targets = _inputs(16)
    with torch.no_grad():
        logits[:, VOCAB:] = torch.inf
    value, entropy = vocab_parallel_logprobs(logits, targets, vocab_size=VOCAB)
    (value.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert torch.isfinite(torch.stack([value, entropy])).all()
    assert (logits.grad[:, VOCAB:] == 0).all()


def test_half_precision_logits_get_half_precision_gradients() -> None:
    logits, targets = _inputs(dtype=torch.bfloat16)
    value, _ = vocab_parallel_logprobs(logits, targets, vocab_size=VOCAB)
    value.sum().backward()
    assert value.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_an_unused_entropy_costs_no_gradient() -> None:
    logits, targets = _inputs()
    value, _ = vocab_parallel_logprobs(logits, targets, vocab_size=VOCAB)
    (grad,) = torch.autograd.grad(value.sum(), logits)
    (plain,) = torch.autograd.grad(_plain(logits, targets, 1.0)[0].sum(), logits)
    torch.testing.assert_close(grad, plain, rtol=1e-5, atol=1e-6)
