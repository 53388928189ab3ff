"""vLLM on CUDA: weights written into a running engine give what a fresh engine gives."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhpc.config.engines import VllmOptions
from rlhpc.layout import relative_slices
from rlhpc.rollout.base import Sample
from tests.gpu.ranks import make_gpu_model, run_on_gpus
from tests.rollout_models import drain, requests, role_of

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

ROWS = 8


def _make_engine(path: str, device: torch.device, *, eager: bool) -> Any:
    from rlhpc.rollout.vllm import VllmEngine

    return VllmEngine(
        model_path=path,
        role=role_of("vllm", dtype="bf16"),
        rank=0,
        options=VllmOptions(gpu_memory_utilization=0.2, enforce_eager=eager),
        dtype="bf16",
        device=device,
        max_model_len=128,
        seed=0,
        stop_token_ids=(2,),
        engine_id="gpu",
    )


def _sample(
    _rank: int, device: torch.device, _store: Any, path: str, update: str | None, eager: bool
) -> tuple[dict[int, Sample], float]:
    """Greedy samples of the model at ``path``, after its weights became those of ``update``."""
    engine = _make_engine(path, device, eager=eager)
    drain(engine, requests(ROWS, temperature=0.0))  # fills the prefix cache with old weights
    seconds = 0.0
    if update is not None:
        weights = load_weights(update)
        started = time.monotonic()
        for part in engine.weight_parts():
            whole = tuple((0, size) for size in part.shape)
            part.view.copy_(weights[part.name][relative_slices(part.box, whole)])
        engine.weights_updated(1)
        seconds = time.monotonic() - started
    return drain(engine, requests(ROWS, temperature=0.0)), seconds


def load_weights(path: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(path) / "model.safetensors")


def change_weights(path: str) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    weights = {
        name: weight + 0.1 * torch.randn(weight.shape, generator=generator)
        for name, weight in load_weights(path).items()
    }
    save_file(weights, Path(path) / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_an_updated_engine_equals_a_fresh_one(
    tmp_path: Path, record_property: Any, tied: bool, eager: bool
) -> None:
    old = make_gpu_model(tmp_path / "old", kind="llama", tied=tied)
    new = make_gpu_model(tmp_path / "new", kind="llama", tied=tied)
    change_weights(new)
    results = []
    for name, path, update in (("a", old, new), ("b", new, None), ("c", old, None)):
        (tmp_path / name).mkdir()
        results += run_on_gpus(_sample, 1, tmp_path / name, path, update, eager)
    (updated, seconds), (fresh, _), (stale, _) = results
    record_property("update ms", round(1e3 * seconds, 1))
    tokens = [{i: s.response_ids for i, s in rows.items()} for rows in (updated, fresh, stale)]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]
    for row, sample in updated.items():
        assert sample.logprobs == pytest.approx(fresh[row].logprobs, abs=1e-3)
        assert set(sample.policy_versions) == {1}
