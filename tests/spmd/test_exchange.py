"""Weights arrive exactly, in the least bytes, between any two layouts; rows arrive as they are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlhpc.comm import exchange
from rlhpc.comm.exchange import ExchangeStats, WeightExchange, exchange_rows
from rlhpc.comm.world import Bridge
from rlhpc.data.batch import ColumnStore
from rlhpc.dataflow import COLUMNS
from rlhpc.errors import ChannelError, CommandError, LayoutError
from rlhpc.weights.base import WeightPart
from tests.spmd import run_spmd

CPU = torch.device("cpu")
SHAPES = {
    "embed": (96, 32),
    "layers.0.qkv": (64, 32),
    "layers.0.down": (32, 80),
    "layers.1.qkv": (64, 32),
    "layers.1.down": (32, 80),
    "norm": (33,),
    "scale": (),
}
ROW_CUT = ("embed", "layers.0.qkv", "layers.1.qkv")


def _bridge(rank: int, path: str, ranks: tuple[int, ...]) -> Bridge:
    store = dist.FileStore(path, len(ranks))
    return Bridge.create(store, name="t", ranks=ranks, rank=rank, device=CPU, timeout_s=30)


def _truth(name: str, version: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(version * 100 + list(SHAPES).index(name))
    return torch.rand(SHAPES[name], generator=generator)


def _part(name: str, tp: int, index: int, dtype: torch.dtype, version: int | None) -> WeightPart:
    shape = SHAPES[name]
    box = [(0, s) for s in shape]
    if len(shape) == 2:
        dim = 0 if name in ROW_CUT else 1
        box[dim] = (shape[dim] * index // tp, shape[dim] * (index + 1) // tp)
    whole = torch.zeros(shape) if version is None else _truth(name, version)
    view = whole[tuple(slice(*b) for b in box)].to(dtype)
    return WeightPart(name, shape, tuple(box), view)


def _parts(
    ranks: tuple[int, ...], rank: int, cut: tuple[int, int], **kwargs: object
) -> list[WeightPart]:
    """Parts of ``rank`` in a tp x pp x dp layout over ``ranks``; the embedding is on all stages."""
    if rank not in ranks:
        return []
    tp, pp = cut
    at = ranks.index(rank)
    stage = at // tp % pp
    names = [n for n in SHAPES if "layers" not in n or pp == 1 or f"layers.{stage}." in n]
    return [_part(n, tp, at % tp, **kwargs) for n in names]  # type: ignore[arg-type]


def _sync(rank: int, path: str, case: dict) -> list[ExchangeStats]:
    bridge = _bridge(rank, path, case.get("ranks", (0, 1, 2, 3)))
    exchange.DIRECT_BYTES = case.get("direct_bytes", exchange.DIRECT_BYTES)
    sent, received = case.get("dtypes", (torch.float32, torch.float32))
    mine = _parts(case["actor"], rank, case["actor_cut"], dtype=sent, version=0)
    wanted = _parts(case["rollout"], rank, case["rollout_cut"], dtype=received, version=None)
    plan = WeightExchange(
        bridge, send=mine, receive=wanted, bucket_bytes=case.get("bucket", 1 << 20)
    )
    stats = []
    for version in (1, 2):
        for part in mine:
            whole = _truth(part.name, version)
            part.view.copy_(whole[tuple(slice(*b) for b in part.box)])
        stats.append(plan.run())
        for part in wanted:
            whole = _truth(part.name, version).to(sent).to(received)
            assert torch.equal(part.view, whole[tuple(slice(*b) for b in part.box)]), part.name
    return stats


CASES = {
    "tp2 to tp2": ((0, 1), (2, 1), (2, 3), (2, 1)),
    "pp2 to tp2": ((0, 1), (1, 2), (2, 3), (2, 1)),
    "dp2 to dp2": ((0, 1), (1, 1), (2, 3), (1, 1)),
    "tp3 to tp1": ((0, 1, 2), (3, 1), (3,), (1, 1)),
    "tp1 to tp3": ((0,), (1, 1), (1, 2, 3), (3, 1)),
    "colocated tp2 pp2 to tp4": ((0, 1, 2, 3), (2, 2), (0, 1, 2, 3), (4, 1)),
    "half colocated tp2 to tp1 dp3": ((1, 0), (2, 1), (1, 2, 3), (1, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_each_receiver_gets_exactly_its_shard(tmp_path, case):
    actor, actor_cut, rollout, rollout_cut = CASES[case]
    setting = {
        "actor": actor,
        "actor_cut": actor_cut,
        "rollout": rollout,
        "rollout_cut": rollout_cut,
    }
    results = run_spmd(_sync, 4, str(tmp_path / "store"), setting, init=False)
    for first, second in results:
        assert first.bytes_received + first.bytes_local == first.own_bytes
        assert second.bytes_received == first.bytes_received
    assert sum(s[0].bytes_sent for s in results) == sum(s[0].bytes_received for s in results)
    if not set(actor) & set(rollout):
        assert all(s[0].bytes_local == 0 for s in results)


@pytest.mark.parametrize(("bucket", "direct_bytes"), [(64, 1), (3000, 2000), (1 << 30, 1)])
def test_buckets_and_direct_messages_change_nothing(tmp_path, bucket, direct_bytes):
    setting = {
        "actor": (0, 1, 2),
        "actor_cut": (3, 1),
        "rollout": (2, 3),
        "rollout_cut": (2, 1),
        "bucket": bucket,
        "direct_bytes": direct_bytes,
    }
    results = run_spmd(_sync, 4, str(tmp_path / "store"), setting, init=False)
    assert all(s.bytes_received + s.bytes_local == s.own_bytes for r in results for s in r)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_the_receivers_dtype_is_on_the_wire(tmp_path, dtypes):
    setting = {
        "actor": (0, 1),
        "actor_cut": (2, 1),
        "rollout": (1, 2),
        "rollout_cut": (1, 1),
        "ranks": (2, 0, 1),
        "dtypes": dtypes,
    }
    results = run_spmd(_sync, 3, str(tmp_path / "store"), setting, init=False)
    whole = sum(torch.Size(s).numel() for s in SHAPES.values()) * dtypes[1].itemsize
    assert [r[0].own_bytes for r in results] == [0, whole, whole]


def _mixed(rank: int, path: str) -> None:
    """Several dtypes in one packed message, in an order that would misalign."""
    bridge = _bridge(rank, path, (0, 1))
    dtypes = {"a": torch.bool, "b": torch.float64, "c": torch.bfloat16, "d": torch.float32}
    parts = [
        WeightPart(n, (3,), ((0, 3),), torch.tensor([0, 1 - rank, 0]).to(t))
        for n, t in dtypes.items()
    ]
    sides = {"send": parts, "receive": []} if rank == 0 else {"send": [], "receive": parts}
    stats = WeightExchange(bridge, **sides).run()  # type: ignore[arg-type]
    assert all(part.view.tolist() == [0, 1, 0] for part in parts)
    assert stats.bytes_received == (0 if rank == 0 else 3 * (1 + 8 + 2 + 4))


def test_dtypes_share_a_message_without_padding(tmp_path):
    run_spmd(_mixed, 2, str(tmp_path / "store"), init=False)


def _refused(rank: int, path: str, change: str) -> None:
    bridge = _bridge(rank, path, (0, 1, 2))
    shape = (5,) if change == "shape" and rank == 2 else (4,)
    dtype = torch.float64 if change == "dtype" and rank == 1 else torch.float32
    part = WeightPart("w", shape, ((0, 4),), torch.zeros(4, dtype=dtype))
    pattern = {
        "shape": r"tensor w has shape \(5,\) on rank 2 and \(4,\) on rank 0",
        "dtype": r"tensor w is float64 on rank 1 and float32 on rank 0",
        "cover": r"tensor w, box .* of rank 2: 0 of 4",
    }[change]
    send = [part] if rank < 2 and change != "cover" else []
    with pytest.raises(LayoutError, match=pattern):
        WeightExchange(bridge, send=send, receive=[part] if rank == 2 else [])


@pytest.mark.parametrize("change", ["shape", "dtype", "cover"])
def test_ranks_that_disagree_are_all_told(tmp_path, change):
    run_spmd(_refused, 3, str(tmp_path / "store"), change, init=False)


def _peer_that_dies(rank: int, path: str) -> None:
    bridge = _bridge(rank, path, (0, 1))
    part = WeightPart("w", (1 << 18,), ((0, 1 << 18),), torch.zeros(1 << 18))
    send, receive = ([part], []) if rank == 0 else ([], [part])
    plan = WeightExchange(bridge, send=send, receive=receive)
    if rank == 0:
        return
    with pytest.raises(ChannelError, match=r"bridge t broke on rank 1 with peers \[0\]"):
        plan.run()


def test_a_peer_that_dies_ends_the_exchange(tmp_path):
    run_spmd(_peer_that_dies, 2, str(tmp_path / "store"), init=False)


LENGTHS = {0: 3, 1: 5, 2: 1, 3: 4, 4: 2}
OWNER = {0: 0, 1: 0, 2: 1, 3: 2, 4: 2}


def _value(column: str, row: int) -> torch.Tensor:
    dtype = getattr(torch, COLUMNS[column].dtype)
    values = torch.arange(LENGTHS[row]) + 10 * row + len(column)
    return (values if COLUMNS[column].per_token else values[0]).to(dtype)


def _rows(rank: int, path: str, readers: dict[int, list[int]], bucket_bytes: int = 1 << 20) -> int:
    bridge = _bridge(rank, path, (2, 1, 0))
    store = ColumnStore()
    columns = list(COLUMNS)
    for row, owner in OWNER.items():
        if owner == rank:
            for column in columns:
                store.put(column, {row: _value(column, row)})
    owned = {r for r, owner in OWNER.items() if owner == rank}
    received = exchange_rows(
        bridge,
        rank=rank,
        send={to: [r for r in rows if r in owned] for to, rows in readers.items()},
        receive={
            source: [(r, LENGTHS[r]) for r in readers.get(rank, []) if OWNER[r] == source]
            for source in (0, 1, 2)
        },
        columns=columns[::-1] if rank == 1 else columns,
        store=store,
        bucket_bytes=bucket_bytes,
    )
    for row in readers.get(rank, []):
        for column in columns:
            got, true = store.get(column, row), _value(column, row)
            assert got.dtype == true.dtype
            assert torch.equal(got, true), (column, row)
    return received


def test_rows_arrive_with_all_columns_and_no_padding(tmp_path):
    readers = {0: [4, 0, 2], 2: [1, 3]}
    received = run_spmd(_rows, 3, str(tmp_path / "store"), readers, init=False)
    sizes = {c.name: getattr(torch, c.dtype).itemsize for c in COLUMNS.values()}
    per_token = sum(sizes[c.name] for c in COLUMNS.values() if c.per_token)
    per_row = sum(sizes.values()) - per_token
    # Row 0 is already on rank 0, row 3 on rank 2; rank 1 reads nothing.
    assert received == [3 * per_token + 2 * per_row, 0, 5 * per_token + per_row]


@pytest.mark.parametrize("readers", [{0: [2], 1: [3], 2: [1]}, {}, {1: [4, 3, 2, 1, 0]}])
def test_any_pattern_of_readers_ends(tmp_path, readers):
    run_spmd(_rows, 3, str(tmp_path / "store"), readers, init=False)


@pytest.mark.parametrize("bucket_bytes", [1, 200])
def test_rows_over_the_bucket_travel_in_several_messages(tmp_path, bucket_bytes):
    readers = {0: [4, 3, 2], 1: [4, 3, 2, 1, 0]}
    run_spmd(_rows, 3, str(tmp_path / "store"), readers, bucket_bytes, init=False)


def test_a_row_that_is_not_here_is_named(tmp_path):
    bridge = _bridge(0, str(tmp_path / "store"), (0,))
    with pytest.raises(CommandError, match="column old_logprobs of row 7 is not on this rank"):
        exchange_rows(
            bridge, rank=0, send={1: [7]}, receive={}, columns=["old_logprobs"], store=ColumnStore()
        )
