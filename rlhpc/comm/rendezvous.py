"""How ranks find rank 0: one small file in the run folder, written once an attempt.  No torch.

The folder is on a shared file system, often NFS, so a poll opens the file anew: what a rank has
open or cached may be stale.  The job id in name and content keeps a former attempt's file out.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhpc.errors import ChannelError

POLL_S = 0.2


@dataclass(frozen=True)
class Rendezvous:
    """Where rank 0 listens, and the secret of this attempt."""

    job_id: str
    hosts: tuple[str, ...]
    """Addresses of rank 0's node, best first; a client tries each."""
    port: int
    """Port of the channel."""
    store_port: int
    """Port of the TCPStore that bootstraps process groups."""
    token: str

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """(host, port) candidates of the channel."""
        return [(host, self.port) for host in self.hosts]


def make_token() -> str:
    """A fresh secret for one attempt."""
    return secrets.token_hex(32)


def rendezvous_path(run_dir: Path, job_id: str) -> Path:
    """The file of attempt ``job_id``."""
    return run_dir / "rendezvous" / f"{job_id}.json"


def publish(run_dir: Path, rendezvous: Rendezvous) -> Path:
    """Write the file at once and readable by its owner only; called by rank 0."""
    path = rendezvous_path(run_dir, rendezvous.job_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(asdict(rendezvous), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return path


def await_rendezvous(run_dir: Path, job_id: str, *, timeout_s: float) -> Rendezvous:
    """Poll for the file of attempt ``job_id``.

    Raises:
        ChannelError: It did not appear within ``timeout_s`` seconds, or never became readable.
    """
    path = rendezvous_path(run_dir, job_id)
    deadline = time.monotonic() + timeout_s
    why = ""
    while True:
        try:
            # Listing the folder makes an NFS client ask its server for new names.
            os.listdir(path.parent)
            found = _parse(json.loads(path.read_text()))
            if found.job_id == job_id:
                return found
            why = f"it is of job {found.job_id}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
        if time.monotonic() > deadline:
            raise ChannelError(
                f"rank 0 of job {job_id} did not publish {path} within {timeout_s:g} s ({why}); "
                "look at the log of rank 0, or raise the connect timeout"
            )
        time.sleep(POLL_S)


def _parse(data: dict[str, Any]) -> Rendezvous:
    return Rendezvous(
        job_id=str(data["job_id"]),
        hosts=tuple(data["hosts"]),
        port=int(data["port"]),
        store_port=int(data["store_port"]),
        token=str(data["token"]),
    )


def candidate_hosts(*, single_host: bool, network_interface: str | None = None) -> tuple[str, ...]:
    """Addresses under which other ranks may reach this node, best first.

    Loopback for a run on one host.  Otherwise the address of ``network_interface`` if one is
    named, else the address that the routing table prefers, then what the host name resolves to,
    and last the name itself (names may be unknown on compute nodes, so they are never alone).

    Raises:
        ChannelError: ``network_interface`` has no IPv4 address here.
    """
    if single_host:
        return ("127.0.0.1",)
    if network_interface:
        return (_interface_address(network_interface),)
    name = socket.gethostname()
    found = [_routed_address(), *_resolve(name)]
    good = [a for a in found if a and not a.startswith("127.")]
    return tuple(dict.fromkeys([*good, name]))


def _routed_address() -> str:
    """The source address of packets to elsewhere, empty without a route; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737): an address of nobody
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _resolve(name: str) -> Sequence[str]:
    try:
        infos = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror:
        return ()
    return [str(info[4][0]) for info in infos]


def _interface_address(interface: str) -> str:
    import fcntl  # Linux only, as are named interfaces on a cluster
    import struct

    request = struct.pack("256s", interface.encode()[:15])
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), get_address, request)
        except OSError as error:
            names = [name for _, name in socket.if_nameindex()]
            raise ChannelError(
                f"network interface {interface!r} has no IPv4 address here ({error}); "
                f"expected one of {names}; set network_interface"
            ) from error
    return socket.inet_ntoa(answer[20:24])
