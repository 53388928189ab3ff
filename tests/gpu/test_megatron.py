"""Megatron on CUDA: bf16 training, the fused optimizer, the CUDA random states."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhpc.config.engines import MegatronOptions, Recompute
from rlhpc.config.schema import OptimConfig
from rlhpc.data.batch import Batch
from tests.gpu.ranks import make_gpu_model, make_megatron, run_on_gpus
from tests.megatron_models import (
    Reference,
    load_reference,
    make_batch,
    make_loss,
    reference_logprobs,
)

pytestmark = pytest.mark.gpu

LENGTHS = [17, 60, 5, 33, 90, 12]
OPTIM = OptimConfig(lr=1e-3, weight_decay=0.1)


def negative_log_likelihood(
    batch: Batch, logprobs: Tensor, _entropy: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    return -(logprobs * batch.columns["loss_mask"]).sum() / sum(LENGTHS), {}


def _train_in_bf16(_rank: int, device: torch.device, _store: Any, path: str) -> dict[str, Any]:
    engine = make_megatron(path, device, optim=OPTIM)
    batch = make_batch(LENGTHS)
    metrics = [engine.update(batch, negative_log_likelihood, temperature=1.0) for _ in range(5)]
    torch.cuda.synchronize()
    started = time.monotonic()
    engine.update(batch, negative_log_likelihood, temperature=1.0)
    torch.cuda.synchronize()
    optimizer = engine._optimizer.megatron
    state = [s for part in optimizer.chained_optimizers for s in part.optimizer.state.values()]
    return {
        "metrics": metrics,
        "step_ms": 1e3 * (time.monotonic() - started),
        "moments": [(s["exp_avg"].dtype, s["exp_avg"].device.type) for s in state],
        "kernel": type(optimizer.chained_optimizers[0].optimizer).__module__,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def test_bf16_updates_are_finite_and_the_loss_falls(tmp_path: Path, record_property: Any) -> None:
    path = make_gpu_model(tmp_path / "model")
    (result,) = run_on_gpus(_train_in_bf16, 1, tmp_path, path)
    record_property("ms/update", round(result["step_ms"], 1))
    record_property("peak GiB", round(result["peak_gib"], 2))
    losses = [m["loss"] for m in result["metrics"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    assert all(0 < m["grad_norm"] < float("inf") for m in result["metrics"])


def test_optimizer_state_is_fp32_on_the_gpu_and_no_stand_in(
    tmp_path: Path, record_property: Any
) -> None:
    path = make_gpu_model(tmp_path / "model")
    (result,) = run_on_gpus(_train_in_bf16, 1, tmp_path, path)
    record_property("kernel", result["kernel"])
    assert set(result["moments"]) == {(torch.float32, "cuda")}
    assert not result["kernel"].startswith("rlhpc")


def _score_in_bf16(_rank: int, device: torch.device, _store: Any, path: str) -> Tensor:
    columns = make_megatron(path, device).compute_logprobs(make_batch(LENGTHS), temperature=0.7)
    return columns["logprobs"]


def test_bf16_logprobs_are_as_exact_as_those_of_transformers(
    tmp_path: Path, record_property: Any
) -> None:
    path = make_gpu_model(tmp_path / "model")
    (logprobs,) = run_on_gpus(_score_in_bf16, 1, tmp_path, path)
    model, batch = load_reference(path), make_batch(LENGTHS)
    with torch.no_grad():
        exact, _ = reference_logprobs(model, batch, 0.7)
        rounded, _ = reference_logprobs(model.bfloat16(), batch, 0.7)
    ours, theirs = ((x - exact).abs().mean().item() for x in (logprobs, rounded))
    record_property("mean gap", f"{ours:.2g} (transformers {theirs:.2g})")
    assert 0 < theirs < exact.abs().mean()
    assert ours < 1.5 * theirs


def _update_in_fp32(
    _rank: int, device: torch.device, _store: Any, path: str, recompute: Recompute
) -> tuple[dict[str, float], dict[str, Tensor]]:
    options = MegatronOptions(max_tokens_per_micro_batch=256, recompute=recompute)
    engine = make_megatron(path, device, dtype="fp32", optim=OPTIM, options=options)
    metrics = engine.update(make_batch(LENGTHS), make_loss(sum(LENGTHS)), temperature=1.0)
    weights = {
        part.name: part.view.cpu()
        for part in engine.weight_parts()
        if part.box == tuple((0, size) for size in part.shape)
    }
    return metrics, weights


@pytest.mark.parametrize("recompute", list(Recompute))
def test_one_fp32_update_equals_torchs_adamw(tmp_path: Path, recompute: Recompute) -> None:
    path = make_gpu_model(tmp_path / "model")
    ((metrics, weights),) = run_on_gpus(_update_in_fp32, 1, tmp_path, path, recompute)
    reference = Reference(path, OPTIM)
    expected = reference.update(make_batch(LENGTHS), make_loss(sum(LENGTHS)), 1.0)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    changed = {n: (w - weights[n]).abs() for n, w in reference.weights().items() if n in weights}
    assert len(changed) > 10
    # Where a gradient is rounding noise, Adam's first step is lr in either direction.
    assert max(float(gap.max()) for gap in changed.values()) <= 2.01 * OPTIM.lr
    assert max(float(gap.mean()) for gap in changed.values()) < 0.02 * OPTIM.lr


def _recompute_dropout(_rank: int, device: torch.device, _store: Any, path: str) -> Tensor:
    make_megatron(path, device)  # seeds Megatron's tracker of random states
    from megatron.core.tensor_parallel.random import checkpoint, get_cuda_rng_tracker

    def drop(x: Tensor) -> Tensor:
        with get_cuda_rng_tracker().fork():
            return F.dropout(x, 0.5)

    x = torch.ones(4096, device=device, requires_grad=True)
    kept = checkpoint(drop, False, x)
    torch.rand(100, device=device)  # moves the generator between forward and recomputation
    kept.sum().backward()
    assert x.grad is not None
    return torch.stack([kept.detach() > 0, x.grad > 0]).cpu()


def test_recomputation_repeats_the_dropout_of_the_forward_pass(tmp_path: Path) -> None:
    path = make_gpu_model(tmp_path / "model", num_hidden_layers=1)
    ((forward, backward),) = run_on_gpus(_recompute_dropout, 1, tmp_path, path)
    assert 0.4 < float(forward.float().mean()) < 0.6
    assert torch.equal(forward, backward)
