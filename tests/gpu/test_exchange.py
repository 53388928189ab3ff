"""The weight exchange over NCCL: one GPU moves its own parts, two GPUs cross boxes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.comm.exchange import ExchangeStats, WeightExchange
from rlhpc.comm.world import Bridge
from rlhpc.weights.base import WeightPart
from tests.gpu.ranks import run_on_gpus

pytestmark = pytest.mark.gpu

SHAPE = (4099, 1031)


def _whole() -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE) % 251


def _bridge(store: Any, rank: int, size: int, device: torch.device) -> Bridge:
    ranks = tuple(range(size))
    return Bridge.create(store, name="b", ranks=ranks, rank=rank, device=device, timeout_s=60)


def _cut(rank: int, size: int, dim: int, device: torch.device, *, fill: bool) -> WeightPart:
    """This rank's slab of the tensor along ``dim``, in bf16."""
    cuts = [SHAPE[dim] * i // size for i in range(size + 1)]
    box = tuple((cuts[rank], cuts[rank + 1]) if d == dim else (0, SHAPE[d]) for d in (0, 1))
    view = _whole()[tuple(slice(*side) for side in box)].to(device, torch.bfloat16).contiguous()
    return WeightPart("w", SHAPE, box, view if fill else torch.zeros_like(view))


def _cross(
    rank: int, device: torch.device, store: Any, size: int, beside_compute: bool
) -> tuple[bool, ExchangeStats, str]:
    """Rows are sent, columns received, in many rounds; then everything once more."""
    bridge = _bridge(store, rank, size, device)
    send = _cut(rank, size, 0, device, fill=True)
    receive = _cut(rank, size, 1, device, fill=False)
    exchange = WeightExchange(bridge, send=[send], receive=[receive], bucket_bytes=1 << 20)
    exchange.run()
    expected = _cut(rank, size, 1, device, fill=True).view
    send.view.add_(1)
    stats = _run_in_thread(exchange, device) if beside_compute else exchange.run()
    return torch.equal(receive.view, expected + 1), stats, bridge.describe()


def _run_in_thread(exchange: WeightExchange, device: torch.device) -> ExchangeStats:
    """As the transfer lane does it, while the main thread keeps the GPU busy."""
    torch.cuda.synchronize(device)  # the sender's weights are written
    stats: list[ExchangeStats] = []
    thread = threading.Thread(target=lambda: stats.append(exchange.run()))
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    thread.start()
    while thread.is_alive():
        for _ in range(8):
            x = (x @ x).tanh()
        torch.cuda.current_stream().synchronize()
    return stats[0]


@pytest.mark.parametrize("beside_compute", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_every_element_arrives_and_none_twice(
    tmp_path: Path, record_property: Any, size: int, beside_compute: bool
) -> None:
    for arrived, stats, line in run_on_gpus(_cross, size, tmp_path, size, beside_compute):
        assert arrived
        assert line.endswith("over nccl")
        assert stats.bytes_received + stats.bytes_local == stats.own_bytes
        gib_s = stats.own_bytes / stats.seconds / 2**30
        record_property("GiB/s", round(gib_s, 2))
