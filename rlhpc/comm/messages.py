"""What controller and ranks say to each other: small typed structs in msgpack, never a pickle."""

from __future__ import annotations

from typing import Any

import msgspec

COMPUTE = "compute"
TRANSFER = "transfer"


class Hello(msgspec.Struct, tag=True, frozen=True):
    """First words of a rank, after the token."""

    rank: int
    host: str
    pid: int


class Command(msgspec.Struct, tag=True, frozen=True):
    """Controller -> rank.

    Numbers are global and rise; each lane runs its commands in number order.
    """

    number: int
    lane: str
    """`compute` (main thread) or `transfer`."""
    role: str
    """Role that runs it; empty for commands to the rank itself (`fetch`, `release`, `stop`)."""
    method: str
    stage: str
    args: dict[str, Any]
    after: tuple[int, ...] = ()
    """Commands of the other lane that must be done on this rank before this one starts."""


class Reply(msgspec.Struct, tag=True, frozen=True):
    """Rank -> controller: command ``number`` is done here."""

    number: int
    rank: int
    result: dict[str, Any]
    """Counts, scalars and [N] columns; never a [T] column."""
    seconds: float


class Event(msgspec.Struct, tag=True, frozen=True):
    """Rank -> controller, between command and reply: for example rows that finished sampling."""

    number: int
    rank: int
    kind: str
    data: dict[str, Any]


class Failure(msgspec.Struct, tag=True, frozen=True):
    """Rank -> controller, last words of a rank that fails."""

    rank: int
    role: str
    host: str
    stage: str
    cause: str
    """`ValueError: ...` or `signal SIGTERM`."""
    traceback: str
    is_victim: bool
    """The cause is a broken connection to a peer, so the peer is the one to blame."""


class Goodbye(msgspec.Struct, tag=True, frozen=True):
    """Last words of a rank or of the controller at a clean end."""

    rank: int


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Controller -> ranks: leave now; ``reason`` names the first cause."""

    reason: str


Message = Hello | Command | Reply | Event | Failure | Goodbye | Abort

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Message -> msgpack bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Msgpack bytes -> message.  Raises msgspec.DecodeError (a ValueError) on anything else."""
    return _decoder.decode(data)
