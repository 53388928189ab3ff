"""Messages survive the wire, and nothing else is taken for one."""

import subprocess
import sys

import msgspec
import pytest

from rlhpc.comm.messages import (
    COMPUTE,
    Abort,
    Command,
    Event,
    Failure,
    Goodbye,
    Hello,
    Message,
    Reply,
    decode,
    encode,
)

MESSAGES = [
    Hello(3, "node1", 77),
    Command(1, COMPUTE, "actor", "update", "update", {"rows": {0: [1, 2]}, "d": 0.5}, after=(4,)),
    Reply(1, 3, {"tokens": 12, "loss": -0.25, "log": ["x"]}, 1.5),
    Event(1, 3, "rows", {"ids": [5, 6]}),
    Failure(3, "actor dp0", "node1", "update", "ValueError: x", "Traceback", True),
    Goodbye(3),
    Abort("rank 2 failed"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire(message):
    assert decode(encode(message)) == message


def test_every_kind_of_message_is_tried_here():
    assert {type(m) for m in MESSAGES} == set(Message.__args__)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "truncated"),
        (b"\xc1", "malformed"),
        (msgspec.msgpack.encode({"type": "Shell", "cmd": "rm"}), "Invalid value 'Shell'"),
        (msgspec.msgpack.encode({"type": "Goodbye"}), "missing required field `rank`"),
        (msgspec.msgpack.encode({"type": "Goodbye", "rank": "3"}), "Expected `int`"),
    ],
)
def test_other_bytes_are_no_message(data, what):
    with pytest.raises(msgspec.MsgspecError, match=what):
        decode(data)


def test_the_control_plane_and_the_planner_need_no_torch():
    code = (
        "import sys, rlhpc.layout, rlhpc.comm.channel, rlhpc.comm.rendezvous; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
