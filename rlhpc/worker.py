"""The process of a rank: environment, control channel, signals, and an exit that tells the truth.

    main thread       Rank.run: commands and engine steps
    reader thread     ChannelClient: commands into lanes; Abort and a lost controller end the
    process transfer thread   rows between ranks signal thread     SIGTERM: last words, also while
    the main thread sits in a collective controller thread rank 0 only

A rank that fails reports to the controller, waits for the first cause to be named, then leaves with
code 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import psutil
import torch
from torch.distributed import TCPStore

from rlhpc.comm.channel import ChannelClient, ChannelServer
from rlhpc.comm.messages import Abort, Command, Failure, Hello, Message
from rlhpc.comm.rendezvous import (
    Rendezvous,
    await_rendezvous,
    candidate_hosts,
    make_token,
    publish,
)
from rlhpc.config.load import read_config
from rlhpc.config.schema import Device, Launcher, RunConfig
from rlhpc.controller import Controller
from rlhpc.errors import ChannelError, PlanError, RunFailedError
from rlhpc.metrics import MetricsReporter
from rlhpc.plan import RolePlan, RunPlan, read_plan
from rlhpc.rank import Rank
from rlhpc.slurm.environ import RankEnvironment

LAST_WORDS_S = 10.0
"""How long a failing rank waits for the controller to name the first cause."""

_BROKEN_CONNECTION = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "timed out waiting",
    "remote process exited",
    "ncclsystemerror",
    "ncclremoteerror",
)


def main(run_dir: str) -> None:
    """Be a rank of the run in ``run_dir``, to its end.  Called on every task of the job step."""
    environment = RankEnvironment.from_env(os.environ)
    folder = Path(run_dir)
    config = read_config(folder / "config.yaml")
    plan = read_plan(folder / "plan.json")
    if environment.num_ranks != plan.num_ranks:
        raise PlanError(
            f"the job step has {environment.num_ranks} tasks but plan.json has {plan.num_ranks} "
            "ranks; submit the run again instead of changing its job script"
        )
    Worker(config, plan, environment).run()


class Worker:
    """Ties a rank to its process."""

    def __init__(self, config: RunConfig, plan: RunPlan, environment: RankEnvironment) -> None:
        self._config = config
        self._plan = plan
        self._environment = environment
        self._aborted = threading.Event()
        self._client: ChannelClient | None = None
        self._controller: threading.Thread | None = None
        self._rank = Rank(
            config,
            plan,
            rank=environment.rank,
            incarnation=environment.job_id,
            device=choose_device(config, environment.local_rank),
            send=self._send,
            on_transfer_error=self._fail,
        )

    def run(self) -> None:
        """Connect, run commands to the end, leave."""
        watch_signals(self._on_signal)
        try:
            store = self._join()
            self._rank.run(store)
            self._rank.close()
        except BaseException as error:
            self._fail(error)
        assert self._client is not None
        self._client.goodbye()
        if self._controller is not None:
            self._controller.join()
            if not (self._plan.path / "DONE").exists():
                self._leave(1)

    def _send(self, message: Message) -> None:
        assert self._client is not None, "commands come through the client"
        self._client.send(message)

    def _join(self) -> TCPStore:
        """Rendezvous: rank 0 listens and publishes, everyone connects."""
        timeout_s = self._config.cluster.connect_timeout_s
        store: TCPStore | None = None
        if self._environment.rank == 0:
            rendezvous, store = self._listen()
        else:
            rendezvous = await_rendezvous(
                self._plan.path, self._environment.job_id, timeout_s=timeout_s
            )
        self._client = ChannelClient(
            rendezvous.addresses,
            token=rendezvous.token,
            hello=Hello(self._environment.rank, self._environment.host, os.getpid()),
            on_message=self._on_message,
            on_lost=self._on_lost,
            timeout_s=timeout_s,
        )
        choose_interface(self._config, self._client.local_host)
        if store is None:
            store = connect_store(rendezvous, timeout_s)
        return store

    def _listen(self) -> tuple[Rendezvous, TCPStore]:
        """Rank 0: channel, store and controller thread."""
        cluster = self._config.cluster
        token = make_token()
        server = ChannelServer(token)
        store = TCPStore(
            "0.0.0.0",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=cluster.connect_timeout_s),
        )
        rendezvous = Rendezvous(
            job_id=self._environment.job_id,
            hosts=candidate_hosts(
                single_host=cluster.launcher is Launcher.local,
                network_interface=cluster.network_interface or "",
            ),
            port=server.port,
            store_port=store.port,
            token=token,
        )
        self._controller = threading.Thread(
            target=self._control, args=(server,), name="controller", daemon=True
        )
        self._controller.start()
        publish(self._plan.path, rendezvous)
        return rendezvous, store

    def _control(self, server: ChannelServer) -> None:
        """Whatever ends the controller, ranks are told and this process ends: none waits."""
        total_steps = self._plan.total_steps
        try:
            with closing(
                MetricsReporter(self._plan.path, self._config, total_steps=total_steps)
            ) as reporter:
                Controller(self._config, self._plan, server, reporter).run()
        except Exception as error:
            self._say(f"controller: {error}")
            if not isinstance(error, RunFailedError):
                self._report_run(f"{type(error).__name__}: {error}")
            server.broadcast(Abort(first_line(error)))
            server.close()
            self._leave(1)
        server.close()

    def _report_run(self, message: str) -> None:
        """failure.json of a controller that could not write its own."""
        with contextlib.suppress(OSError):  # a full disk must not keep the ranks from ending
            (self._plan.path / "failure.json").write_text(json.dumps({"message": message}))

    # Ends

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Command):
            self._rank.receive(message)
        elif isinstance(message, Abort):
            self._aborted.set()
            self._say(f"ends because {message.reason}")
            self._leave(1)

    def _on_lost(self, reason: str) -> None:
        self._say(f"lost the controller: {reason}")
        self._leave(1)

    def _on_signal(self, name: str) -> None:
        """A peer's failure also brings SIGTERM; the controller knows which came first."""
        self._report(f"signal {name}: cancelled, preempted or out of time", "", is_victim=True)
        self._aborted.wait(LAST_WORDS_S)
        self._leave(143)

    def _fail(self, error: BaseException, stage: str | None = None) -> NoReturn:
        """Last words, a moment for the controller to name the first cause, then the end."""
        self._rank.stage = stage or self._rank.stage
        text = "".join(traceback.format_exception(error))
        self._say(text)
        self._report(
            f"{type(error).__name__}: {first_line(error)}",
            text,
            is_victim=is_broken_connection(error),
        )
        self._aborted.wait(LAST_WORDS_S)
        self._leave(1)

    def _report(self, cause: str, text: str, *, is_victim: bool) -> None:
        failure = Failure(
            rank=self._environment.rank,
            role="+".join(r.label(self._environment.rank) for r in self._my_roles()) or "idle",
            host=self._environment.host,
            stage=self._rank.stage,
            cause=cause,
            traceback=text,
            is_victim=is_victim,
        )
        record_failure(self._plan.path, failure)
        if self._client is not None:
            # The controller may be the one that is gone; the file above is there all the same.
            with contextlib.suppress(ChannelError):
                self._client.send(failure)

    def _my_roles(self) -> tuple[RolePlan, ...]:
        return self._plan.roles_of(self._environment.rank)

    def _say(self, text: str) -> None:
        print(
            f"[rank {self._environment.rank} {self._rank.stage}] {text}",
            file=sys.stderr,
            flush=True,
        )

    def _leave(self, code: int) -> NoReturn:
        """End the process at once: the main thread may sit in a collective that never returns."""
        if self._controller is not None and threading.current_thread() is not self._controller:
            self._controller.join(LAST_WORDS_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def choose_device(config: RunConfig, local_rank: int) -> torch.device:
    """The rank's GPU: its slot among the visible ones, or the only visible one."""
    if config.cluster.device is Device.cpu:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise PlanError(
            "cluster.device=cuda but no GPU is visible on this node; expected one a rank. "
            "Check components.*.gpus_per_node and the node's driver, or set cluster.device=cpu"
        )
    index = 0 if count == 1 else local_rank
    if index >= count:
        raise PlanError(
            f"local rank {local_rank} has no GPU: {count} are visible here; expected one a rank. "
            "Check components.*.gpus_per_node and --gpu-bind in cluster.srun_args"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def choose_interface(config: RunConfig, local_host: str) -> None:
    """Tell gloo, which needs one name, and NCCL, if one is configured, the interface to use."""
    name = config.cluster.network_interface
    if name:
        os.environ["NCCL_SOCKET_IFNAME"] = name
    else:
        name = next(
            (
                interface
                for interface, addresses in psutil.net_if_addrs().items()
                if any(a.family == socket.AF_INET and a.address == local_host for a in addresses)
            ),
            None,
        )
    if name and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def connect_store(rendezvous: Rendezvous, timeout_s: float) -> TCPStore:
    """A client of rank 0's TCPStore, at the first address that answers."""
    errors = []
    for host in rendezvous.hosts:
        try:
            return TCPStore(
                host, rendezvous.store_port, is_master=False, timeout=timedelta(seconds=timeout_s)
            )
        except RuntimeError as error:
            errors.append(f"{host}: {error}")
    raise ChannelError(
        f"cannot reach rank 0's store on port {rendezvous.store_port} ({'; '.join(errors)}); "
        "check that the network lets this node reach it, or set cluster.network_interface"
    )


def record_failure(run_dir: Path, failure: Failure) -> None:
    """failures/<rank>.json: what the job script prints when the controller could not say more."""
    record = {
        "message": f"rank {failure.rank} ({failure.role}) on {failure.host} failed in stage "
        f"{failure.stage}: {failure.cause}",
        "role": failure.role,
        "rank": failure.rank,
        "host": failure.host,
        "stage": failure.stage,
        "cause": failure.cause,
        "traceback": failure.traceback,
        "time": time.time(),
    }
    with contextlib.suppress(OSError):  # a full disk must not keep the rank from ending
        (run_dir / "failures").mkdir(exist_ok=True)
        (run_dir / "failures" / f"{failure.rank}.json").write_text(json.dumps(record, indent=1))


def first_line(error: BaseException) -> str:
    """The headline of ``error``; the rest of its text is in the traceback."""
    return (str(error).splitlines() or [""])[0]


def is_broken_connection(error: BaseException) -> bool:
    """Whether ``error`` says that a peer went away: then the peer is to blame, not this rank."""
    if isinstance(error, ConnectionError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(t in text for t in _BROKEN_CONNECTION)


def watch_signals(on_signal: Callable[[str], None]) -> None:
    """Call ``on_signal(name)`` from a thread at SIGTERM.

    A Python handler would wait for the end of the collective that the main thread sits in; the
    wakeup descriptor does not.
    """
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    signal.signal(signal.SIGTERM, lambda *_: None)

    def watch() -> None:
        while data := os.read(readable, 1):
            if data[0] == signal.SIGTERM:
                on_signal("SIGTERM")

    threading.Thread(target=watch, name="signals", daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1])
