"""Calls: a command to some ranks and the replies that end it.

The controller's only way to the ranks.

                  issue()                               poll()
controller thread ------> ChannelServer ==> ranks ==> ChannelServer ------> replies end calls,
      |                                                                      events feed callbacks,
      +--- wait(calls): polls until they are done                            a failure raises
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhpc.comm.channel import ChannelServer, Lost
from rlhpc.comm.messages import COMPUTE, Command, Event, Failure, Goodbye, Reply
from rlhpc.errors import RunFailedError
from rlhpc.plan import RunPlan

FIRST_CAUSE_GRACE_S = 1.0
"""How long after the first sign of failure others are heard before one is named the cause."""


@dataclass
class Call:
    """One command on its way."""

    number: int
    stage: str
    waiting: set[int]
    started: float = field(default_factory=time.monotonic)
    replies: dict[int, Reply] = field(default_factory=dict)
    finished: float | None = None
    on_event: Callable[[Event], None] | None = None

    @property
    def done(self) -> bool:
        """All ranks have replied."""
        return not self.waiting

    @property
    def results(self) -> dict[int, dict[str, Any]]:
        """Results by rank."""
        return {rank: reply.result for rank, reply in self.replies.items()}


class Calls:
    """Issues commands in one total order and matches replies to them."""

    def __init__(self, server: ChannelServer, plan: RunPlan) -> None:
        self._server = server
        self._plan = plan
        self._next = 1
        self._open: dict[int, Call] = {}
        self._hosts: dict[int, str] = {}
        self._goodbyes: set[int] = set()
        self.failure: Failure | None = None
        """The first cause, once `poll` has raised."""

    def set_hosts(self, hosts: Mapping[int, str]) -> None:
        """Host of each rank, for failure messages."""
        self._hosts = dict(hosts)

    def issue(
        self,
        method: str,
        args: Mapping[int, dict[str, Any]],
        *,
        role: str = "",
        stage: str = "",
        lane: str = COMPUTE,
        after: Mapping[int, tuple[int, ...]] | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> Call:
        """Send one command with its own arguments to each rank of ``args``."""
        number = self._next
        self._next += 1
        call = Call(number, stage or method, set(args), on_event=on_event)
        if args:
            self._open[number] = call
        for rank, rank_args in args.items():
            depends = (after or {}).get(rank, ())
            command = Command(number, lane, role, method, stage or method, rank_args, depends)
            self._server.send(rank, command)
        return call

    def poll(self, timeout_s: float) -> None:
        """Take in what the ranks say.  Raises RunFailedError that names the first cause."""
        messages = self._server.poll(timeout_s)
        failures = [(r, m) for r, m in messages if isinstance(m, Failure | Lost)]
        if failures:
            self.failure = self._first_cause(failures)
            raise RunFailedError(describe_failure(self.failure))
        for rank, message in messages:
            match message:
                case Reply():
                    call = self._open[message.number]
                    call.replies[rank] = message
                    call.waiting.discard(rank)
                    if call.done:
                        call.finished = time.monotonic()
                        del self._open[message.number]
                case Event():
                    call = self._open[message.number]
                    if call.on_event is not None:
                        call.on_event(message)
                case Goodbye():
                    self._goodbyes.add(rank)

    def wait(self, *calls: Call) -> None:
        """Poll until ``calls`` are done."""
        while not all(call.done for call in calls):
            self.poll(1.0)

    def wait_for_all(self) -> None:
        """Poll until no call is open."""
        self.wait(*self._open.values())

    def wait_for_goodbyes(self, timeout_s: float) -> None:
        """Poll until every rank has said goodbye.

        Raises RunFailedError naming those that did not.
        """
        deadline = time.monotonic() + timeout_s
        while len(self._goodbyes) < self._plan.num_ranks:
            if time.monotonic() > deadline:
                missing = sorted(set(range(self._plan.num_ranks)) - self._goodbyes)
                raise RunFailedError(
                    f"ranks {missing} did not end within {timeout_s} s of the stop"
                )
            self.poll(0.2)

    def _first_cause(self, failures: list[tuple[int, Failure | Lost]]) -> Failure:
        """Hear others for a moment, then name the one that is not another's victim."""
        seen = [self._as_failure(rank, message) for rank, message in failures]
        deadline = time.monotonic() + FIRST_CAUSE_GRACE_S
        while time.monotonic() < deadline:
            for other, text in self._server.poll(0.1):
                if isinstance(text, Failure | Lost):
                    seen.append(self._as_failure(other, text))
        # A rank that reported and then closed its connection is one failure, not two.
        reported = {f.rank for f in seen if f.cause != _VANISHED}
        seen = [f for f in seen if f.cause != _VANISHED or f.rank not in reported]
        return next((f for f in seen if not f.is_victim), seen[0])

    def _as_failure(self, rank: int, message: Failure | Lost) -> Failure:
        if isinstance(message, Failure):
            return message
        stages = [c.stage for c in self._open.values() if rank in c.waiting]
        return Failure(
            rank=rank,
            role="+".join(r.label(rank) for r in self._plan.roles_of(rank)) or "idle",
            host=self._hosts.get(rank, "unknown host"),
            stage=stages[0] if stages else "idle",
            cause=_VANISHED,
            traceback="",
            is_victim=False,
        )


_VANISHED = (
    "the process vanished without a word: killed (SIGKILL, for example by the kernel when host "
    "memory ran out), crashed in native code, or its node was lost"
)


def describe_failure(failure: Failure) -> str:
    """One message that names role, rank, host, stage and cause, with the traceback below."""
    head = (
        f"rank {failure.rank} ({failure.role}) on {failure.host} failed in stage {failure.stage}: "
        f"{failure.cause}"
    )
    return f"{head}\n{failure.traceback}".rstrip()
