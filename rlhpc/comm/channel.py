"""The control plane: one TCP connection from each rank to the controller.  No tensors, no torch.

Who waits for whom:

    controller thread (rank 0)                       a rank (rank 0 too)
    --------------------------                       -------------------
    ChannelServer: binds port 0   <- token, Hello -- ChannelClient(): waits for the answer
    wait_for_peers(): waits for   -- Hello --------> (or Abort: refused)
      every rank, up to a deadline
    poll(): waits for any rank    <- Reply, Event,   send(): any thread; waits only for the
      or a timeout, never for one    Failure ------    kernel buffer, which poll() drains
    send(), broadcast(): never    -- Command ------> reader thread: waits for the controller,
      wait; what a slow rank does                      hands each message to on_message,
      not take is buffered and                         which must not block
      flushed by poll()
    Lost(rank) from poll()        <- EOF ----------- process died, no Goodbye came first
    close(): flushes, then closes -- EOF ----------> on_lost(reason), unless Goodbye came first

Wire: the token, then frames of a 4-byte big-endian length and a msgpack message (`messages`).
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rlhpc.comm.messages import Abort, Failure, Goodbye, Hello, Message, decode, encode
from rlhpc.errors import ChannelError

MAX_FRAME_BYTES = 64 << 20
MAX_UNSENT_BYTES = 256 << 20
STRANGER_TIMEOUT_S = 30.0
RETRY_S = 0.2
_RECEIVE_BYTES = 256 << 10
_LENGTH = struct.Struct(">I")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lost:
    """The connection of ``rank`` ended without a Goodbye."""

    rank: int
    reason: str


@dataclass
class _Peer:
    """One accepted connection; a stranger until its Hello was accepted."""

    sock: socket.socket
    address: str
    since: float
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    trusted: bool = False
    rank: int | None = None
    host: str = ""
    said_goodbye: bool = False


class ChannelServer:
    """The controller's end.  All methods belong to one thread; none blocks on a single rank."""

    def __init__(
        self, token: str, *, host: str = "", max_frame_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        """Bind a free port on ``host`` ("" is every interface); ranks may connect from now on."""
        self._token = token.encode()
        self._max_frame_bytes = max_frame_bytes
        self._listener = socket.create_server((host, 0), backlog=4096)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._strangers: set[int] = set()
        self._connections: dict[int, _Peer] = {}
        self._peers: dict[int, _Peer] = {}
        self._gone: set[int] = set()
        self._expected: dict[int, str] = {}
        self._inbox: list[tuple[int, Message | Lost]] = []

    @property
    def port(self) -> int:
        """The bound TCP port."""
        return int(self._listener.getsockname()[1])

    def wait_for_peers(self, expected: Mapping[int, str], timeout_s: float) -> dict[int, str]:
        """Host of each rank, once every rank of ``expected`` (rank -> label) is connected.

        Messages that come meanwhile are kept for `poll`.

        Raises:
            ChannelError: Ranks are missing after ``timeout_s``, or one failed or left meanwhile.
        """
        self._expected = dict(expected)
        deadline = time.monotonic() + timeout_s
        while missing := sorted(expected.keys() - self._peers.keys()):
            self._check_nobody_failed()
            left = deadline - time.monotonic()
            if left <= 0:
                names = ", ".join(f"rank {rank} ({expected[rank]})" for rank in missing)
                raise ChannelError(
                    f"{len(missing)} of {len(expected)} ranks did not connect to the controller "
                    f"within {timeout_s:g} s: {names}; look at the logs of these ranks"
                )
            self._turn(left)
        self._check_nobody_failed()
        return {rank: self._peers[rank].host for rank in sorted(expected)}

    def send(self, rank: int, message: Message) -> None:
        """Send to one rank without waiting; to a rank that is gone, nothing (poll reports it)."""
        if rank in self._gone:
            return
        if rank not in self._peers:
            raise ChannelError(f"rank {rank} is not connected; connected: {sorted(self._peers)}")
        self._queue(self._peers[rank], _frame(message, self._max_frame_bytes))

    def broadcast(self, message: Message) -> None:
        """Send to every connected rank without waiting."""
        frame = _frame(message, self._max_frame_bytes)
        for peer in list(self._peers.values()):
            self._queue(peer, frame)

    def poll(self, timeout_s: float) -> list[tuple[int, Message | Lost]]:
        """Messages and losses since the last call as (rank, what); waits for the first of them."""
        deadline = time.monotonic() + timeout_s
        self._turn(0.0 if self._inbox else timeout_s)
        while not self._inbox and (left := deadline - time.monotonic()) > 0:
            self._turn(left)
        taken, self._inbox = self._inbox, []
        return taken

    def close(self, flush_s: float = 5.0) -> None:
        """Give slow ranks up to ``flush_s`` seconds to take what is buffered, then close all."""
        deadline = time.monotonic() + flush_s
        while any(peer.unsent for peer in self._peers.values()) and time.monotonic() < deadline:
            self._turn(0.05)
        for peer in list(self._connections.values()):
            self._forget(peer)
        self._selector.unregister(self._listener)
        self._listener.close()
        self._selector.close()

    def _check_nobody_failed(self) -> None:
        for rank, message in self._inbox:
            if isinstance(message, Lost | Failure):
                why = message.reason if isinstance(message, Lost) else message.cause
                label = self._expected.get(rank, "not expected")
                raise ChannelError(f"rank {rank} ({label}) failed while ranks connected: {why}")

    def _turn(self, timeout_s: float) -> None:
        """Serve every socket that is ready, waiting up to ``timeout_s`` for the first."""
        if self._strangers:
            self._drop_silent_strangers()
            timeout_s = min(timeout_s, 1.0)
        for key, events in self._selector.select(timeout_s):
            peer: _Peer | None = key.data
            if peer is None:
                self._accept()
                continue
            if events & selectors.EVENT_READ:
                self._read(peer)
            if events & selectors.EVENT_WRITE and key.fd in self._connections:
                self._flush(peer)

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # it gave up while it was queued
            sock.setblocking(False)
            _tune(sock)
            peer = _Peer(sock, str(address[0]), time.monotonic())
            self._connections[sock.fileno()] = peer
            self._strangers.add(sock.fileno())
            self._selector.register(sock, selectors.EVENT_READ, peer)

    def _drop_silent_strangers(self) -> None:
        oldest = time.monotonic() - STRANGER_TIMEOUT_S
        for fd in list(self._strangers):
            if self._connections[fd].since < oldest:
                self._lose(self._connections[fd], "said no Hello in time")

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(peer, f"connection broke: {error}")
            return
        if not data:
            self._lose(peer, "connection closed without a goodbye")
            return
        peer.received += data
        if not peer.trusted and not self._check_token(peer):
            return
        try:
            for message in _take_frames(peer.received, self._max_frame_bytes):
                if peer.rank is None:
                    if not self._welcome(peer, message):
                        return
                else:
                    peer.said_goodbye |= isinstance(message, Goodbye)
                    self._inbox.append((peer.rank, message))
        except (ChannelError, msgspec.MsgspecError) as error:
            self._lose(peer, f"sent no valid message: {error}")

    def _check_token(self, peer: _Peer) -> bool:
        """Whether the token is here and right; its bytes are taken off."""
        size = len(self._token)
        # Wrong bytes are refused at once, however few they are.
        shown = bytes(peer.received[:size])
        if not hmac.compare_digest(shown, self._token[: len(shown)]):
            self._lose(peer, "showed a wrong token")
            return False
        if len(shown) < size:
            return False
        del peer.received[:size]
        peer.trusted = True
        return True

    def _welcome(self, peer: _Peer, message: Message) -> bool:
        """Make the stranger a rank, or refuse it with a reason."""
        refusal = ""
        if not isinstance(message, Hello):
            refusal = f"first message was {type(message).__name__}, expected Hello"
        elif message.rank in self._peers or message.rank in self._gone:
            refusal = f"rank {message.rank} has already connected; start each rank once"
        elif self._expected and message.rank not in self._expected:
            refusal = f"rank {message.rank} is not in the plan of {len(self._expected)} ranks"
        if refusal or not isinstance(message, Hello):
            self._queue(peer, _frame(Abort(refusal), self._max_frame_bytes))
            self._lose(peer, refusal)
            return False
        peer.rank, peer.host = message.rank, message.host
        self._strangers.discard(peer.sock.fileno())
        self._peers[message.rank] = peer
        self._queue(peer, _frame(Hello(-1, socket.gethostname(), os.getpid()), 1 << 20))
        return True

    def _queue(self, peer: _Peer, frame: bytes) -> None:
        if peer.unsent:
            peer.unsent += frame
            if len(peer.unsent) > MAX_UNSENT_BYTES:
                self._lose(peer, f"takes no messages: {len(peer.unsent)} bytes wait for it")
            return
        try:
            sent = peer.sock.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lose(peer, f"connection broke: {error}")
            return
        if sent < len(frame):
            peer.unsent += memoryview(frame)[sent:]
            self._selector.modify(peer.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            sent = peer.sock.send(memoryview(peer.unsent)[:_RECEIVE_BYTES])
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(peer, f"connection broke: {error}")
            return
        del peer.unsent[:sent]
        if not peer.unsent:
            self._selector.modify(peer.sock, selectors.EVENT_READ, peer)

    def _lose(self, peer: _Peer, reason: str) -> None:
        """Close the connection; report it unless it said goodbye or never was a rank."""
        if peer.sock.fileno() not in self._connections:
            return
        self._forget(peer)
        if peer.rank is None:
            log.warning("channel: dropped a connection from %s: %s", peer.address, reason)
        elif not peer.said_goodbye:
            self._inbox.append((peer.rank, Lost(peer.rank, reason)))

    def _forget(self, peer: _Peer) -> None:
        fd = peer.sock.fileno()
        self._selector.unregister(peer.sock)
        del self._connections[fd]
        self._strangers.discard(fd)
        if peer.rank is not None:
            del self._peers[peer.rank]
            self._gone.add(peer.rank)
        peer.sock.close()


class ChannelClient:
    """A rank's end: a connection and the thread that reads it."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        *,
        token: str,
        hello: Hello,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
        timeout_s: float,
    ) -> None:
        """Connect to the first of ``addresses`` where the controller answers.

        Args:
            addresses: (host, port) candidates of one controller, tried in turn until the deadline.
            token: The secret of this attempt.
            hello: Who this rank is.
            on_message: Called by the reader thread for each message; must not block.
            on_lost: Called by the reader thread, once, if the connection ends before a Goodbye
                came from the controller or was said here.
            timeout_s: Seconds until ChannelError.

        Raises:
            ChannelError: No controller answered in time, or it refused this rank.
        """
        self._on_message = on_message
        self._on_lost = on_lost
        self._rank = hello.rank
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._received = bytearray()
        self._sock = self._connect(addresses, token.encode() + _frame(hello), timeout_s)
        self._reader = threading.Thread(target=self._read, name="channel-reader", daemon=True)
        self._reader.start()

    @property
    def local_host(self) -> str:
        """This node's address on the route to the controller."""
        return str(self._sock.getsockname()[0])

    def send(self, message: Message) -> None:
        """Send from any thread; raises ChannelError when the connection is broken."""
        frame = _frame(message)
        try:
            with self._lock:
                self._sock.sendall(frame)
        except OSError as error:
            raise ChannelError(
                f"rank {self._rank} lost the controller while sending: {error}"
            ) from error

    def goodbye(self, timeout_s: float = 5.0) -> None:
        """Say goodbye, wait up to ``timeout_s`` for the controller to close, and close."""
        self._ended.set()
        # The controller may be gone first, and then nobody is left to be told.
        with contextlib.suppress(ChannelError, OSError):
            self.send(Goodbye(self._rank))
            self._sock.shutdown(socket.SHUT_WR)
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout_s)
        self._sock.close()

    def _connect(
        self, addresses: Sequence[tuple[str, int]], greeting: bytes, timeout_s: float
    ) -> socket.socket:
        deadline = time.monotonic() + timeout_s
        why: dict[tuple[str, int], str] = {}
        while True:
            for address in addresses:
                left = deadline - time.monotonic()
                try:
                    return self._greet(address, greeting, max(0.05, left))
                except (OSError, EOFError, msgspec.MsgspecError) as error:
                    why[address] = str(error)
            if time.monotonic() + RETRY_S > deadline:
                tried = "; ".join(f"{host}:{port}: {text}" for (host, port), text in why.items())
                raise ChannelError(
                    f"rank {self._rank} found no controller within {timeout_s:g} s ({tried}); "
                    "check that rank 0 runs and that the network lets this node reach it"
                )
            time.sleep(RETRY_S)

    def _greet(self, address: tuple[str, int], greeting: bytes, left_s: float) -> socket.socket:
        """One attempt: connect, show the token, wait for the welcome."""
        sock = socket.create_connection(address, timeout=min(5.0, left_s))
        try:
            # Connected, so it is worth waiting for: the controller answers once it polls.
            sock.settimeout(left_s)
            sock.sendall(greeting)
            self._received.clear()
            while not (answers := _take_frames(self._received, MAX_FRAME_BYTES)):
                data = sock.recv(_RECEIVE_BYTES)
                if not data:
                    raise EOFError("it closed the connection: not our controller, or a wrong token")
                self._received += data
        except BaseException:
            sock.close()
            raise
        if isinstance(answers[0], Abort):
            sock.close()
            raise ChannelError(f"the controller refused rank {self._rank}: {answers[0].reason}")
        sock.settimeout(None)
        _tune(sock)
        for message in answers[1:]:
            self._on_message(message)
        return sock

    def _read(self) -> None:
        reason = "the controller closed the connection without a goodbye"
        try:
            while data := self._sock.recv(_RECEIVE_BYTES):
                self._received += data
                for message in _take_frames(self._received, MAX_FRAME_BYTES):
                    if isinstance(message, Goodbye):
                        self._ended.set()
                    self._on_message(message)
        except (OSError, ChannelError, msgspec.MsgspecError) as error:
            reason = f"the connection to the controller broke: {error}"
        if not self._ended.is_set():
            self._on_lost(reason)


def _frame(message: Message, max_frame_bytes: int = MAX_FRAME_BYTES) -> bytes:
    data = encode(message)
    if len(data) > max_frame_bytes:
        raise ChannelError(
            f"{type(message).__name__} of {len(data)} bytes; a message may have {max_frame_bytes}; "
            "tensors travel by comm.exchange"
        )
    return _LENGTH.pack(len(data)) + data


def _take_frames(received: bytearray, max_frame_bytes: int) -> list[Message]:
    """Whole messages at the front of ``received``, taken off; raises ChannelError on a huge one."""
    messages = []
    at = 0
    while len(received) - at >= _LENGTH.size:
        (size,) = _LENGTH.unpack_from(received, at)
        if size > max_frame_bytes:
            raise ChannelError(f"a frame of {size} bytes; the limit is {max_frame_bytes}")
        if len(received) - at - _LENGTH.size < size:
            break
        at += _LENGTH.size
        messages.append(decode(bytes(received[at : at + size])))
        at += size
    del received[:at]
    return messages


def _tune(sock: socket.socket) -> None:
    """No delay for small frames; notice within about half a minute that a host has died."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):  # not on every laptop
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
