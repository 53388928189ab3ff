"""The control plane under good peers, bad peers and dead peers."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rlhpc.comm import channel
from rlhpc.comm.channel import ChannelClient, ChannelServer, Lost
from rlhpc.comm.messages import (
    COMPUTE,
    Abort,
    Command,
    Event,
    Failure,
    Goodbye,
    Hello,
    Reply,
    decode,
    encode,
)
from rlhpc.errors import ChannelError

TOKEN = "0123456789abcdef"


@pytest.fixture
def server() -> Iterator[ChannelServer]:
    server = ChannelServer(TOKEN, host="127.0.0.1", max_frame_bytes=1 << 20)
    yield server
    server.close(flush_s=0)


def _frame(message: object) -> bytes:
    data = encode(message)  # type: ignore[arg-type]
    return struct.pack(">I", len(data)) + data


def _hello(rank: int) -> bytes:
    return TOKEN.encode() + _frame(Hello(rank, f"node{rank}", 1))


def _dial(server: ChannelServer, data: bytes = b"") -> socket.socket:
    """A peer of raw bytes."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    sock.sendall(data)
    return sock


def _read(sock: socket.socket) -> object:
    """The next message; None at the end of the stream."""
    head = _read_bytes(sock, 4)
    return decode(_read_bytes(sock, *struct.unpack(">I", head))) if head else None


def _read_bytes(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := sock.recv(count - len(data))):
        data += more
    return data


def _join(server: ChannelServer, *ranks: int) -> dict[int, socket.socket]:
    socks = {rank: _dial(server, _hello(rank)) for rank in ranks}
    server.wait_for_peers({rank: f"actor dp{rank}" for rank in ranks}, 5)
    for sock in socks.values():
        assert isinstance(_read(sock), Hello)
    return socks


def _poll_until(server: ChannelServer, count: int) -> list[tuple[int, object]]:
    got: list[tuple[int, object]] = []
    deadline = time.monotonic() + 5
    while len(got) < count and time.monotonic() < deadline:
        got += server.poll(0.2)
    return got


def _serve(server: ChannelServer, until: threading.Event) -> threading.Thread:
    def turn() -> None:
        while not until.is_set():
            server.poll(0.02)

    thread = threading.Thread(target=turn)
    thread.start()
    return thread


def _client(
    server: ChannelServer,
    on_message: Callable[[object], None],
    on_lost: Callable[[str], None],
    **changes: object,
) -> ChannelClient:
    """A client whose connecting is served meanwhile."""
    done = threading.Event()
    thread = _serve(server, done)
    options: dict = {"token": TOKEN, "hello": Hello(3, "node3", 1), "timeout_s": 5.0, **changes}
    addresses = options.pop("addresses", [("127.0.0.1", server.port)])
    try:
        return ChannelClient(addresses, on_message=on_message, on_lost=on_lost, **options)
    finally:
        done.set()
        thread.join()


def _send_until_it_fails(client: ChannelClient) -> None:
    for _ in range(100):
        client.send(Reply(1, 3, {}, 0.0))
        time.sleep(0.01)


def _fail(text: object) -> None:
    raise AssertionError(text)


def _command(number: int) -> Command:
    return Command(number, COMPUTE, "actor", "update", "update", {"rows": [1, 2]})


def test_commands_go_out_and_replies_come_back(server):
    got: list[object] = []
    seen = threading.Semaphore(0)
    client = _client(server, lambda m: (got.append(m), seen.release()), _fail)
    assert server.wait_for_peers({3: "actor dp3"}, 5) == {3: "node3"}
    server.send(3, _command(1))
    server.broadcast(_command(2))
    assert seen.acquire(timeout=5)
    assert seen.acquire(timeout=5)
    assert got == [_command(1), _command(2)]
    client.send(Reply(1, 3, {"tokens": 7}, 0.5))
    assert _poll_until(server, 1) == [(3, Reply(1, 3, {"tokens": 7}, 0.5))]
    done = threading.Event()
    thread = _serve(server, done)
    client.goodbye()
    done.set()
    thread.join()


def test_missing_ranks_are_named_at_the_deadline(server):
    _sock = _dial(server, _hello(1))
    expected = {0: "actor dp0", 1: "actor dp1", 2: "rollout dp0 tp1"}
    with pytest.raises(
        ChannelError, match=r"2 of 3 ranks .* rank 0 \(actor dp0\), rank 2 \(rollout dp0 tp1\)"
    ):
        server.wait_for_peers(expected, 0.3)


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"0123456789abcdeX" + b"\0" * 40,
        b"\xff" * 100_000,
        b"01234",
        TOKEN.encode() + struct.pack(">I", 1 << 30),
        TOKEN.encode() + struct.pack(">I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        TOKEN.encode() + _frame(Goodbye(0)),
        _hello(9),
        b"",
    ],
)
def test_a_bad_stranger_is_dropped_and_the_others_go_on(server, junk):
    stranger = _dial(server, junk)
    half = _dial(server, _hello(1)[:20])
    half.close()
    sock = _dial(server, _hello(0))
    server.wait_for_peers({0: "actor"}, 5)
    stranger.close()
    sock.sendall(_frame(Reply(1, 0, {}, 0.0)))
    assert _poll_until(server, 1) == [(0, Reply(1, 0, {}, 0.0))]
    assert server.poll(0.05) == []


def test_a_silent_stranger_is_dropped_in_time(server, monkeypatch):
    monkeypatch.setattr(channel, "STRANGER_TIMEOUT_S", 0.1)
    stranger = _dial(server, b"0123")
    for _ in range(4):
        server.poll(0.05)
    assert stranger.recv(1) == b""


def test_a_rank_that_comes_twice_is_refused_with_a_reason(server):
    first = _join(server, 0)[0]
    second = _dial(server, _hello(0))
    server.poll(0.2)
    assert _read(second) == Abort("rank 0 has already connected; start each rank once")
    assert _read(second) is None
    first.sendall(_frame(Reply(1, 0, {}, 0.0)))
    assert _poll_until(server, 1) == [(0, Reply(1, 0, {}, 0.0))]


def test_bytes_may_come_one_by_one(server):
    sock = _dial(server)
    for byte in _hello(0) + _frame(Event(1, 0, "rows", {"ids": [1]})):
        sock.sendall(bytes([byte]))
        server.poll(0)
    assert _poll_until(server, 1) == [(0, Event(1, 0, "rows", {"ids": [1]}))]


def test_a_dead_rank_is_lost_but_one_that_said_goodbye_is_not(server):
    socks = _join(server, 0, 1)
    socks[0].sendall(_frame(Goodbye(0)))
    socks[0].close()
    socks[1].close()
    got = _poll_until(server, 2)
    assert (0, Goodbye(0)) in got
    assert (1, Lost(1, "connection closed without a goodbye")) in got
    server.send(1, _command(1))
    server.broadcast(_command(2))
    assert server.poll(0.05) == []


def test_a_broken_frame_makes_a_rank_lost(server):
    socks = _join(server, 0, 1)
    socks[0].sendall(struct.pack(">I", (1 << 20) + 1))
    socks[1].sendall(struct.pack(">I", 3) + b"abc")
    lost = dict(_poll_until(server, 2))
    assert "a frame of 1048577 bytes; the limit is 1048576" in lost[0].reason
    assert "sent no valid message" in lost[1].reason


def test_a_failure_while_ranks_connect_ends_the_wait_at_once(server):
    failure = Failure(0, "actor", "node0", "start", "ImportError: no megatron", "", False)
    _dial(server, _hello(0) + _frame(failure)).close()
    with pytest.raises(ChannelError, match=r"rank 0 \(actor\) failed .*ImportError: no megatron"):
        server.wait_for_peers({0: "actor", 1: "rollout"}, 5)


def test_an_unknown_rank_cannot_be_sent_to(server):
    with pytest.raises(ChannelError, match="rank 4 is not connected"):
        server.send(4, _command(1))


def test_a_message_over_the_limit_is_refused_where_it_is_made(server):
    _join(server, 0)
    with pytest.raises(ChannelError, match=r"Event of \d+ bytes; a message may have 1048576"):
        server.send(0, Event(1, 0, "x", {"data": "y" * (1 << 20)}))


def test_a_slow_rank_does_not_hold_up_the_others(server):
    socks = _join(server, 0, 1)
    big = Event(1, 0, "x", {"data": "y" * 500_000})
    started = time.monotonic()
    for _ in range(40):
        server.send(0, big)
    server.send(1, _command(1))
    assert time.monotonic() - started < 2
    assert _read(socks[1]) == _command(1)
    done = threading.Event()
    thread = _serve(server, done)
    assert all(_read(socks[0]) == big for _ in range(40))
    done.set()
    thread.join()


def test_a_rank_that_takes_nothing_is_given_up(server, monkeypatch):
    monkeypatch.setattr(channel, "MAX_UNSENT_BYTES", 10 << 20)
    _socks = _join(server, 0)
    for _ in range(60):
        server.send(0, Event(1, 0, "x", {"data": "y" * 500_000}))
    ((rank, lost),) = server.poll(0.1)
    assert rank == 0
    assert "takes no messages" in lost.reason


def test_two_hundred_ranks_are_served_together(server):
    socks = _join(server, *range(200))
    server.broadcast(_command(1))
    for rank, sock in socks.items():
        assert _read(sock) == _command(1)
        sock.sendall(_frame(Reply(1, rank, {}, 0.0)))
    got = _poll_until(server, 200)
    assert sorted(rank for rank, _ in got) == list(range(200))
    for sock in socks.values():
        sock.close()


def test_a_client_with_a_wrong_token_is_told_at_its_deadline(server):
    with pytest.raises(
        ChannelError, match=r"rank 3 found no controller within 0.3 s .*a wrong token"
    ):
        _client(server, _fail, _fail, token="x" * 16, timeout_s=0.3)


def test_a_client_that_is_refused_gives_up_at_once(server):
    _join(server, 3)
    with pytest.raises(ChannelError, match="refused rank 3: rank 3 has already connected"):
        _client(server, _fail, _fail, timeout_s=60.0)


def test_a_client_tries_each_address_until_one_answers(server):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    addresses = [("no-such-host.invalid", 1), ("127.0.0.1", port), ("127.0.0.1", server.port)]
    client = _client(server, _fail, lambda _: None, addresses=addresses)
    assert client.local_host == "127.0.0.1"
    assert server.wait_for_peers({3: "actor"}, 5) == {3: "node3"}


def test_a_client_reports_a_controller_that_vanished():
    server = ChannelServer(TOKEN, host="127.0.0.1")
    lost: list[str] = []
    seen = threading.Event()
    client = _client(server, _fail, lambda reason: (lost.append(reason), seen.set()))
    server.close(flush_s=0)
    assert seen.wait(5)
    assert lost == ["the controller closed the connection without a goodbye"]
    with pytest.raises(ChannelError, match="rank 3 lost the controller while sending"):
        _send_until_it_fails(client)


def test_a_client_hears_goodbye_and_is_not_lost():
    server = ChannelServer(TOKEN, host="127.0.0.1")
    heard = threading.Event()
    client = _client(server, lambda _: heard.set(), _fail)
    server.broadcast(Goodbye(0))
    server.close()
    assert heard.wait(5)
    client.goodbye()
