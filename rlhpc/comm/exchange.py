"""The data plane: weights and rows go straight from ranks that hold them to ranks that need them.

Who waits for whom, in round k of an exchange of weights or rows:

    rank A                        rank B                        rank C
    pack what goes out            pack                          pack
    post all sends and receives   post all                      post all
    wait for them  <--- A-B --->  wait for them  <--- B-C --->  wait for them
    unpack what came in           unpack                        unpack
    round k + 1                   ...

Which box of a pair travels in which round follows from the plan alone, so both ends agree without
a word.  In round k a rank waits only for messages that its peers post in their round k, and these
wait only for rounds before: no cycle, in whatever order ranks arrive.  Not here: who needs what
(`layout` for weights, the controller for rows), and when (commands).
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.comm.world import Bridge
from rlhpc.data.batch import Batch, ColumnStore, pack_columns, packed_bytes, unpack_columns
from rlhpc.errors import ChannelError, LayoutError
from rlhpc.layout import Box, Part, box_size, plan_transfers, relative_slices
from rlhpc.weights.base import WeightPart

BUCKET_BYTES = 256 << 20
DIRECT_BYTES = 256 << 10
"""Boxes of this size travel as messages of their own, without a copy where storage allows."""


@dataclass(frozen=True)
class ExchangeStats:
    """What one `WeightExchange.run` moved on this rank."""

    bytes_received: int
    """Over the network."""
    bytes_sent: int
    """Over the network."""
    bytes_local: int
    """Copied inside this rank."""
    own_bytes: int
    """Size of this rank's receiving parts: the least that can arrive."""
    seconds: float


class _Description(NamedTuple):
    """A weight part without its storage, as ranks tell each other."""

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: str


class _Piece(NamedTuple):
    """A view of this rank's storage and what it is on the wire."""

    view: Tensor
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True)
class _Message:
    """One send or receive.  ``direct`` means from or into the view itself, else staged."""

    peer: int
    pieces: list[_Piece]
    direct: bool
    nbytes: int


class WeightExchange:
    """A planned, repeatable move of weights from some ranks' storage into others'."""

    def __init__(
        self,
        bridge: Bridge,
        *,
        send: Sequence[WeightPart],
        receive: Sequence[WeightPart],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Plan from all ranks' parts.  Collective over the bridge.

        Args:
            bridge: The ranks of both sides; a rank may be on both, or on none.
            send: Parts that this rank can give; read at each `run`.
            receive: Parts that this rank needs; written in place at each `run`.
            bucket_bytes: Bound of the extra memory for what goes out, and again for what comes
                in.  The same on all ranks.

        Raises:
            LayoutError: A needed element has no sender, or ranks disagree on a tensor's shape or,
                within one side, on its dtype.
        """
        self._bridge = bridge
        self._own_bytes = sum(part.view.nbytes for part in receive)
        sources, destinations, nodes = _gather(bridge, send, receive)
        dtypes = _wire_dtypes(sources, destinations)
        transfers = plan_transfers(
            {rank: [Part(p.name, p.box) for p in parts] for rank, parts in sources.items()},
            {rank: [Part(p.name, p.box) for p in parts] for rank, parts in destinations.items()},
            itemsize={name: dtype.itemsize for name, dtype in dtypes.items()},
            node_of=nodes,
            rank=bridge.rank,
        )
        self._local: list[tuple[Tensor, Tensor]] = []
        outgoing: dict[int, list[_Piece]] = {}
        incoming: dict[int, list[_Piece]] = {}
        for t in transfers:
            dtype = dtypes[t.name]
            if t.source == t.destination:
                source = _piece(send[t.source_part], t.box, dtype)
                target = _piece(receive[t.destination_part], t.box, dtype)
                self._local.append((target.view, source.view))
            elif t.source == bridge.rank:
                piece = _piece(send[t.source_part], t.box, dtype)
                outgoing.setdefault(t.destination, []).append(piece)
            else:
                piece = _piece(receive[t.destination_part], t.box, dtype)
                incoming.setdefault(t.source, []).append(piece)
        # Both ends must cut a pair's rounds alike, so the rank with most peers sets the size.
        peers = bridge.all_gather_object(max(len(outgoing), len(incoming)))
        pair_bytes = bucket_bytes // max(1, *peers.values())
        self._sends = _cut_rounds(outgoing, pair_bytes, bridge.device)
        self._receives = _cut_rounds(incoming, pair_bytes, bridge.device)

    @torch.no_grad()
    def run(self) -> ExchangeStats:
        """Move the weights once.  Collective over the ranks that have something to move.

        On return, also on CUDA, a receiver's storage holds the new weights and a sender's may be
        written again.
        """
        started = time.monotonic()
        device = self._bridge.device
        with _on(device):
            for target, source in self._local:
                target.copy_(source)
            out, into = _staging(self._sends, device), _staging(self._receives, device)
            for number in range(max(len(self._sends), len(self._receives))):
                sent = _wire_views(self._sends, number, out)
                received = _wire_views(self._receives, number, into)
                for message, data in sent:
                    _copy_pieces(message, data, pack=True)
                _post(
                    self._bridge,
                    sends=[(message.peer, data) for message, data in sent],
                    receives=[(message.peer, data) for message, data in received],
                )
                for message, data in received:
                    _copy_pieces(message, data, pack=False)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return ExchangeStats(
            bytes_received=sum(m.nbytes for r in self._receives for m in r),
            bytes_sent=sum(m.nbytes for r in self._sends for m in r),
            bytes_local=sum(target.nbytes for target, _ in self._local),
            own_bytes=self._own_bytes,
            seconds=time.monotonic() - started,
        )


def exchange_rows(
    bridge: Bridge,
    *,
    rank: int,
    send: Mapping[int, Sequence[int]],
    receive: Mapping[int, Sequence[tuple[int, int]]],
    columns: Sequence[str],
    store: ColumnStore,
    bucket_bytes: int = BUCKET_BYTES,
) -> int:
    """Bytes received, once the named columns of all awaited rows are in ``store``.

    Collective over the ranks that send or receive; all are given matching orders.  A message
    holds all columns of as many rows of a pair of ranks as fit, unpadded.  Rows from this rank
    itself are in place.

    Args:
        bridge: Holds all ranks concerned; ranks here are global.
        rank: This rank.
        send: Destination rank -> ids of the rows it gets.
        receive: Source rank -> (row id, tokens of prompt + response) of each row, in its order.
        columns: Names in `dataflow.COLUMNS`; the same at both ends.
        store: Rows to send are read from it, those that come are put in.
        bucket_bytes: Bound of a message; a single larger row travels alone.  The same at both ends.

    Raises:
        CommandError: A column of a row to send is not here.
    """
    outgoing = {
        peer: _cut_rows(rows, store.lengths(rows, columns), columns, bucket_bytes)
        for peer, rows in sorted(send.items())
        if peer != rank and rows
    }
    incoming = {
        peer: _cut_rows(
            [row for row, _ in rows], [length for _, length in rows], columns, bucket_bytes
        )
        for peer, rows in sorted(receive.items())
        if peer != rank and rows
    }
    num_rounds = max(map(len, (*outgoing.values(), *incoming.values())), default=0)
    with _on(bridge.device):
        return sum(
            _exchange_round(
                bridge,
                send={peer: cut[k].row_ids for peer, cut in outgoing.items() if k < len(cut)},
                receive={peer: cut[k] for peer, cut in incoming.items() if k < len(cut)},
                columns=columns,
                store=store,
            )
            for k in range(num_rounds)
        )


def _exchange_round(
    bridge: Bridge,
    *,
    send: Mapping[int, Sequence[int]],
    receive: Mapping[int, _Rows],
    columns: Sequence[str],
    store: ColumnStore,
) -> int:
    """One message a pair; bytes received."""
    device = bridge.device
    packed = {
        peer: pack_columns(store.batch(rows, columns), columns) for peer, rows in send.items()
    }
    buffers = {peer: _empty_bytes(rows.nbytes(columns), device) for peer, rows in receive.items()}
    _post(
        bridge,
        sends=[(peer, data.to(device)) for peer, data in packed.items()],
        receives=buffers.items(),
    )
    for peer, rows in receive.items():
        columns_in = unpack_columns(buffers[peer].cpu(), rows.lengths, columns)
        store.put_batch(Batch(rows.row_ids, rows.lengths, columns_in), columns)
    return sum(data.numel() for data in buffers.values())


def _empty_bytes(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device)


class _Rows(NamedTuple):
    """Rows of one message."""

    row_ids: list[int]
    lengths: Tensor
    """[N] int64."""

    def nbytes(self, columns: Sequence[str]) -> int:
        return packed_bytes(self.lengths, columns)


def _cut_rows(
    rows: Sequence[int], lengths: Sequence[int], columns: Sequence[str], bucket_bytes: int
) -> list[_Rows]:
    """Rows of a pair in messages of at most ``bucket_bytes``, or one row; alike at both ends."""
    messages: list[tuple[list[int], list[int]]] = []
    left = 0
    for row, length in zip(rows, lengths, strict=True):
        size = packed_bytes(torch.tensor([length]), columns)
        if size > left or not messages:
            messages.append(([], []))
            left = bucket_bytes
        messages[-1][0].append(row)
        messages[-1][1].append(length)
        left -= size
    return [_Rows(ids, torch.tensor(n)) for ids, n in messages]


def _post(
    bridge: Bridge,
    *,
    sends: Iterable[tuple[int, Tensor]],
    receives: Iterable[tuple[int, Tensor]],
) -> None:
    """Send and receive bytes with peers all at once, and wait.  Messages of a pair keep order.

    Raises:
        ChannelError: A connection broke or the group's timeout passed.
    """
    ops = [dist.P2POp(dist.isend, data, peer, bridge.group) for peer, data in sends]
    ops += [dist.P2POp(dist.irecv, data, peer, bridge.group) for peer, data in receives]
    ops = [op for op in ops if op.tensor.numel()]
    if not ops:
        return
    try:
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    except RuntimeError as error:
        peers = sorted({op.peer for op in ops})
        raise ChannelError(
            f"exchange over bridge {bridge.name} broke on rank {bridge.rank} with peers {peers}: "
            f"{error}; a peer failed or was late, look for the first failure"
        ) from error


def _on(device: torch.device) -> AbstractContextManager[None]:
    """The current CUDA device is a thread's own; NCCL needs it to be right."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


# Planning weights


def _gather(
    bridge: Bridge, send: Sequence[WeightPart], receive: Sequence[WeightPart]
) -> tuple[dict[int, list[_Description]], dict[int, list[_Description]], dict[int, str]]:
    """Sending parts, receiving parts and node of every rank.  Collective over the bridge."""
    mine = (_describe(send, bridge.rank), _describe(receive, bridge.rank))
    key = hashlib.sha256(repr(mine).encode()).digest()
    keys = bridge.all_gather_object((key, socket.gethostname()))
    # Replicas have equal parts; the first of them speaks for all.
    first = {k: rank for rank, (k, _) in reversed(keys.items())}
    told = bridge.all_gather_object(mine if first[key] == bridge.rank else None)
    parts = {rank: told[first[k]] for rank, (k, _) in keys.items()}
    nodes = {rank: node for rank, (_, node) in keys.items()}
    return {r: p[0] for r, p in parts.items()}, {r: p[1] for r, p in parts.items()}, nodes


def _describe(parts: Sequence[WeightPart], rank: int) -> list[_Description]:
    for part in parts:
        extents = tuple(stop - start for start, stop in part.box)
        if tuple(part.view.shape) != extents:
            raise LayoutError(
                f"tensor {part.name} of rank {rank}: storage of shape {tuple(part.view.shape)} for "
                f"box {part.box}; expected shape {extents}"
            )
    return [
        _Description(p.name, tuple(p.shape), p.box, str(p.view.dtype).removeprefix("torch."))
        for p in parts
    ]


def _wire_dtypes(
    sources: Mapping[int, Sequence[_Description]],
    destinations: Mapping[int, Sequence[_Description]],
) -> dict[str, torch.dtype]:
    """The receivers' dtype of each tensor; raises LayoutError where ranks disagree."""
    shapes: dict[str, tuple[int, _Description]] = {}
    wire: dict[str, torch.dtype] = {}
    for side in (sources, destinations):
        dtypes: dict[str, tuple[int, _Description]] = {}
        for rank, parts in side.items():
            for part in parts:
                other, first = shapes.setdefault(part.name, (rank, part))
                if part.shape != first.shape:
                    raise LayoutError(
                        f"tensor {part.name} has shape {part.shape} on rank {rank} and "
                        f"{first.shape} on rank {other}; both engines must serve the same model"
                    )
                other, first = dtypes.setdefault(part.name, (rank, part))
                if part.dtype != first.dtype:
                    raise LayoutError(
                        f"tensor {part.name} is {part.dtype} on rank {rank} and {first.dtype} on "
                        f"rank {other}; the ranks of one role must use one dtype"
                    )
        if side is destinations:
            wire = {name: getattr(torch, part.dtype) for name, (_, part) in dtypes.items()}
    return wire


def _piece(part: WeightPart, box: Box, dtype: torch.dtype) -> _Piece:
    view = part.view.detach()[relative_slices(box, part.box)]
    return _Piece(view, dtype, box_size(box) * dtype.itemsize)


def _cut_rounds(
    by_peer: Mapping[int, Sequence[_Piece]], pair_bytes: int, device: torch.device
) -> list[list[_Message]]:
    """Messages by round: a pair moves at most ``pair_bytes`` (or one piece) a round.

    A function of the sizes only, never of how this end stores them, since both ends must agree.
    """
    rounds: list[list[_Message]] = []
    for peer, pieces in by_peer.items():
        number = room = 0
        packed: list[list[_Piece]] = []
        for piece in pieces:
            if piece.nbytes > room:
                number, room = len(packed), pair_bytes
                packed.append([])
            room -= piece.nbytes
            packed[number].append(piece)
        rounds += [[] for _ in range(len(packed) - len(rounds))]
        for number, members in enumerate(packed):
            rounds[number] += _make_messages(peer, members, device)
    return rounds


def _make_messages(peer: int, pieces: Sequence[_Piece], device: torch.device) -> list[_Message]:
    """Large pieces one by one, then the small ones together."""
    messages = []
    small = []
    for piece in pieces:
        if piece.nbytes < DIRECT_BYTES:
            small.append(piece)
            continue
        view = piece.view
        direct = view.is_contiguous() and view.dtype == piece.dtype and view.device == device
        messages.append(_Message(peer, [piece], direct, piece.nbytes))
    if small:
        # Wide dtypes first keeps each piece aligned without padding.
        small.sort(key=lambda p: -p.dtype.itemsize)
        messages.append(_Message(peer, small, False, sum(p.nbytes for p in small)))
    return messages


# Moving weights


def _staging(rounds: Sequence[Sequence[_Message]], device: torch.device) -> Tensor:
    """Bytes for the messages of the largest round that are not direct."""
    sizes = [sum(_aligned(m.nbytes) for m in r if not m.direct) for r in rounds]
    return torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)


def _wire_views(
    rounds: Sequence[Sequence[_Message]], number: int, staging: Tensor
) -> list[tuple[_Message, Tensor]]:
    """The bytes of each message of a round: its own storage, or a stretch of ``staging``."""
    views = []
    at = 0
    for message in rounds[number] if number < len(rounds) else ():
        if message.direct:
            data = message.pieces[0].view.view(-1).view(torch.uint8)
        else:
            data = staging[at : at + message.nbytes]
            at += _aligned(message.nbytes)
        views.append((message, data))
    return views


def _copy_pieces(message: _Message, data: Tensor, *, pack: bool) -> None:
    """Storage to wire (``pack``) or back, with the cast; nothing for a direct message."""
    at = 0
    for piece in () if message.direct else message.pieces:
        wire = data[at : at + piece.nbytes].view(piece.dtype).view(piece.view.shape)
        if pack:
            wire.copy_(piece.view)
        else:
            piece.view.copy_(wire)
        at += piece.nbytes


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
