import math

import pytest
import torch

from rlhpc.algorithms.kl import compute_k1, compute_k2, compute_k3, compute_kl
from rlhpc.config.schema import KlLossType


def test_hand_computed_values():
    new, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert compute_k1(new, ref).item() == pytest.approx(math.log(2))
    assert compute_k2(new, ref).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert compute_k3(new, ref).item() == pytest.approx(0.5 - 1 + math.log(2))


@pytest.mark.parametrize("kind", list(KlLossType))
def test_value_and_gradient_are_finite_at_any_gap(kind):
    new = torch.tensor([-1e4, -200.0, -1.0, 0.0, -1e-3], requires_grad=True)
    ref = torch.tensor([0.0, -1.0, -1e4, -500.0, -1e-3])
    kl = compute_kl(new, ref, kind)
    kl.sum().backward()
    assert kl.isfinite().all()
    assert new.grad.isfinite().all()
    assert (kl >= 0).all()


@pytest.mark.parametrize("kind", list(KlLossType))
def test_descent_moves_the_policy_towards_the_reference_and_never_away(kind):
    new = torch.tensor([-5.0, -1.0, -60.0, -1.0], requires_grad=True)
    ref = torch.tensor([-1.0, -5.0, -1.0, -60.0])
    compute_kl(new, ref, kind).sum().backward()
    assert (-new.grad * (ref - new) >= 0).all()
    assert (new.grad[[0, 1, 3]] != 0).all()


def test_k3_is_unbiased_over_the_policy():
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    r = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = (p * (p / r).log()).sum()
    assert (p * compute_k3(p.log(), r.log())).sum().item() == pytest.approx(exact.item())
    assert (p * compute_k1(p.log(), r.log())).sum().item() == pytest.approx(exact.item())
