"""Worlds and bridges on gloo: several default worlds in one process, in any order."""

import random
import threading
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlhpc.comm.world import Bridge, World, make_group
from rlhpc.errors import ChannelError, CommandError, PlanError
from tests.spmd import run_spmd

CPU = torch.device("cpu")


def _world(store: dist.Store, name: str, ranks: tuple[int, ...], rank: int) -> World:
    return World.create(store, name=name, ranks=ranks, rank=rank, device=CPU, timeout_s=20)


def _store(path: str, size: int) -> dist.Store:
    return dist.FileStore(path, size)


def _sum(value: int, group: dist.ProcessGroup | None = None) -> int:
    x = torch.tensor([value])
    dist.all_reduce(x, group=group)
    return int(x)


def _alternate(rank: int, path: str) -> list[object]:
    store = _store(path, 3)
    makers = {
        "all": lambda: _world(store, "all", (2, 1, 0), rank),
        "pair": lambda: _world(store, "pair", (0, 2), rank) if rank != 1 else None,
    }
    # Rank 2 makes one group more than the others, first.
    if rank == 2:
        make_group(store, name="own", ranks=(2,), rank=2, backend="gloo", timeout_s=5)
    worlds = {name: makers[name]() for name in ("all", "pair")}
    seen: list[object] = []
    for _ in range(2):
        with worlds["all"].active():
            seen.append((dist.get_rank(), dist.get_world_size(), _sum(rank + 1)))
            seen.append(_sum(rank + 1, dist.new_group([0, 1])) if rank != 0 else None)
            if rank == 0:
                dist.new_group([0, 1])
        if rank != 1:
            with worlds["pair"].active():
                seen.append((dist.get_rank(), dist.get_world_size(), _sum(rank + 1)))
                dist.barrier()
    seen.append(dist.is_initialized())
    return seen


def test_two_worlds_of_one_process_alternate(tmp_path):
    results = run_spmd(_alternate, 3, str(tmp_path / "store"), init=False)
    all0, all1, all2 = (2, 3, 6), (1, 3, 6), (0, 3, 6)
    # World ranks 0 and 1 of (2, 1, 0) are the ranks 2 and 1: 3 + 2.
    assert results[0] == [all0, None, (0, 2, 4), all0, None, (0, 2, 4), False]
    assert results[1] == [all1, 5, all1, 5, False]
    assert results[2] == [all2, 5, (1, 2, 4), all2, 5, (1, 2, 4), False]


def _alone(rank: int, path: str, name: str = "w") -> World:
    return _world(_store(path, 1), name, (rank,), rank)


def _draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


def _random_states(rank: int, path: str) -> None:
    world = _alone(rank, path)
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    outside = [_draw(), _draw()]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    inside = [_draw(), _draw()]
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    with world.active():
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        assert _draw() == inside[0]
    assert _draw() == outside[0]
    with world.active(), world.active():
        assert _draw() == inside[1]
    assert _draw() == outside[1]


def test_each_world_has_its_own_random_states(tmp_path):
    run_spmd(_random_states, 1, str(tmp_path / "store"), init=False)


def _leave_by_error(rank: int, path: str) -> None:
    outer, inner = _alone(rank, path, "outer"), _alone(rank, path, "inner")
    with outer.active():
        before = dist.group.WORLD
        with pytest.raises(RuntimeError, match="in inner: True"), inner.active():
            raise RuntimeError(f"in inner: {dist.group.WORLD is inner.group}")
        assert dist.group.WORLD is before
    assert not dist.is_initialized()


def test_an_error_inside_a_world_restores_the_world_outside(tmp_path):
    run_spmd(_leave_by_error, 1, str(tmp_path / "store"), init=False)


def _enter_by_thread(rank: int, path: str) -> str:
    world, caught = _alone(rank, path), []

    def enter() -> None:
        with pytest.raises(CommandError, match="only the main thread") as info, world.active():
            pass
        caught.append(str(info.value))

    thread = threading.Thread(target=enter, name="transfer")
    thread.start()
    thread.join()
    return caught[0]


def test_only_the_main_thread_enters_a_world(tmp_path):
    (message,) = run_spmd(_enter_by_thread, 1, str(tmp_path / "store"), init=False)
    assert "'transfer'" in message


def _bridge(rank: int, path: str) -> object:
    store = _store(path, 3)
    world = _world(store, "pair", (0, 2), rank) if rank != 1 else None
    bridge = Bridge.create(store, name="a->b", ranks=(2, 1, 0), rank=rank, device=CPU, timeout_s=20)
    x = torch.tensor([rank])
    if world is not None:
        with world.active():
            # Global ranks, although world rank 1 is active on rank 2.
            if rank == 0:
                dist.send(x, dst=2, group=bridge.group)
            else:
                dist.recv(x, src=0, group=bridge.group)
    gathered = bridge.all_gather_object(rank * 10)
    bridge.barrier()
    return gathered, bridge.describe(), int(x)


def test_a_bridge_speaks_global_ranks_whatever_world_is_active(tmp_path):
    results = run_spmd(_bridge, 3, str(tmp_path / "store"), init=False)
    expected = {2: 20, 1: 10, 0: 0}
    assert results[2] == (expected, "bridge a->b: 3 ranks over gloo", 0)
    assert results[1][0] == expected


def test_a_rank_outside_a_group_is_refused(tmp_path):
    store = _store(str(tmp_path / "store"), 1)
    with pytest.raises(PlanError, match=r"rank 5 asked for group 'g', which has ranks \[0, 1\]"):
        make_group(store, name="g", ranks=(0, 1), rank=5, backend="gloo", timeout_s=1)


def _lonely(rank: int, path: str) -> None:
    with pytest.raises(ChannelError, match=r"group 'g' of 2 ranks was not formed within 1 s"):
        make_group(_store(path, 2), name="g", ranks=(0, 1), rank=rank, backend="gloo", timeout_s=1)


def test_a_group_whose_peer_never_comes_names_itself(tmp_path):
    run_spmd(_lonely, 1, str(tmp_path / "store"), init=False)


def _megatron(rank: int, path: str) -> list[int]:
    from megatron.core import parallel_state

    store = _store(path, 4)
    rollout = _world(store, f"rollout {rank}", (rank,), rank)
    actor = _world(store, "actor", (0, 1, 2, 3), rank)
    with rollout.active():
        dist.new_group([0])
    with actor.active():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        tp, dp = (
            _sum(rank, parallel_state.get_tensor_model_parallel_group()),
            _sum(rank, parallel_state.get_data_parallel_group()),
        )
    with rollout.active():
        alone = _sum(rank)
    return [tp, dp, alone]


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
def test_megatron_builds_its_groups_inside_a_world_beside_another(tmp_path):
    results = run_spmd(
        _megatron,
        4,
        str(tmp_path / "store"),
        init=False,
        preload=("torch", "megatron.core.parallel_state"),
    )
    assert results == [[1, 2, 0], [1, 4, 1], [5, 2, 2], [5, 4, 3]]
