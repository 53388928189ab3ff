"""Ranks find rank 0 of their own attempt, or say what they waited for."""

import os
import socket
import stat
import threading

import pytest

from rlhpc.comm.rendezvous import (
    Rendezvous,
    await_rendezvous,
    candidate_hosts,
    make_token,
    publish,
    rendezvous_path,
)
from rlhpc.errors import ChannelError


def _rendezvous(job_id: str) -> Rendezvous:
    return Rendezvous(job_id, ("10.0.0.1", "n1"), 4000, 4001, make_token())


def test_what_rank_0_publishes_is_what_others_read(tmp_path):
    published = _rendezvous("12")
    path = publish(tmp_path, published)
    assert await_rendezvous(tmp_path, "12", timeout_s=1) == published
    assert published.addresses == [("10.0.0.1", 4000), ("n1", 4000)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["12.json"]


def test_a_rank_may_wait_before_the_file_is_there(tmp_path):
    published = _rendezvous("12")
    timer = threading.Timer(0.3, publish, (tmp_path, published))
    timer.start()
    assert await_rendezvous(tmp_path, "12", timeout_s=10) == published
    timer.join()


def test_a_former_attempt_is_not_taken(tmp_path):
    publish(tmp_path, _rendezvous("11"))
    with pytest.raises(ChannelError, match=r"job 12 did not publish .*12\.json within 0.1 s"):
        await_rendezvous(tmp_path, "12", timeout_s=0.1)
    rendezvous_path(tmp_path, "11").rename(rendezvous_path(tmp_path, "12"))
    with pytest.raises(ChannelError, match="it is of job 11"):
        await_rendezvous(tmp_path, "12", timeout_s=0.1)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    path = rendezvous_path(tmp_path, "12")
    path.parent.mkdir()
    path.write_text('{"job_id": "12", "hosts": ')
    with pytest.raises(ChannelError, match="JSONDecodeError"):
        await_rendezvous(tmp_path, "12", timeout_s=0.1)


def test_a_requeued_attempt_replaces_its_file(tmp_path):
    publish(tmp_path, _rendezvous("12"))
    second = _rendezvous("12")
    publish(tmp_path, second)
    assert await_rendezvous(tmp_path, "12", timeout_s=1) == second


def test_one_host_uses_loopback_and_many_never_do():
    assert candidate_hosts(single_host=True) == ("127.0.0.1",)
    hosts = candidate_hosts(single_host=False)
    assert hosts[-1] == socket.gethostname()
    assert not any(host.startswith("127.") for host in hosts)


def test_a_named_interface_gives_its_address():
    assert candidate_hosts(single_host=False, network_interface="lo") == ("127.0.0.1",)
    with pytest.raises(ChannelError, match=r"interface 'ib9' has no IPv4 .*expected one of .*'lo'"):
        candidate_hosts(single_host=False, network_interface="ib9")
