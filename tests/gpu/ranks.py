"""A function on N ranks, one CUDA device each, inside a world over NCCL; and engines on them.

Ranks import Megatron and vLLM themselves: a fork server that loaded them could not hand CUDA on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhpc.comm.world import World
from rlhpc.config.engines import MegatronOptions
from rlhpc.config.schema import OptimConfig
from tests.megatron_models import make_model_folder, make_role
from tests.spmd import run_spmd

TIMEOUT_S = 240.0
BIG_ENOUGH = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""Sizes that the kernels serve: heads of 64."""


def run_on_gpus(body: Callable[..., Any], num_ranks: int, folder: Path, *args: Any) -> list[Any]:
    """Results of ``body(rank, device, store, *args)`` on every rank; skips without enough GPUs."""
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"{num_ranks} GPUs needed, one a rank; {torch.cuda.device_count()} here")
    store = str(folder / "store")
    return run_spmd(
        _in_world, num_ranks, num_ranks, store, body, *args, init=False, timeout_s=TIMEOUT_S
    )


def _in_world(rank: int, num_ranks: int, path: str, body: Callable[..., Any], *args: Any) -> Any:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(path, num_ranks)
    ranks = tuple(range(num_ranks))
    world = World.create(store, name="gpu", ranks=ranks, rank=rank, device=device, timeout_s=60)
    with world.active():
        return body(rank, device, store, *args)


def make_gpu_model(folder: Path, kind: str = "qwen2", **changes: Any) -> str:
    """A random model with heads of 64; see `make_model_folder`."""
    return make_model_folder(folder, kind, **BIG_ENOUGH | changes)


def make_megatron(
    path: str,
    device: torch.device,
    *,
    dtype: str = "bf16",
    optim: OptimConfig | None = None,
    options: MegatronOptions | None = None,
) -> Any:
    """A Megatron engine alone in its world."""
    from rlhpc.training.megatron import MegatronEngine

    return MegatronEngine(
        model_path=path,
        role=make_role(),
        rank=0,
        options=options or MegatronOptions(max_tokens_per_micro_batch=256),
        dtype=dtype,
        device=device,
        optim=optim,
        total_updates=10,
        seed=1,
        tokenizer_path=None,
    )
