"""Process groups: an engine's torch default world, and bridges between roles.

torch knows one default world a process; engines (Megatron, vLLM, FSDP) take it for their own ranks.
Here a process may host several engines, so a world is a registered group that becomes the default
only inside ``with world.active()``.  A bridge is a group that is never the default.  Ranks are
global ranks of the run unless a line says world rank.
"""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rlhpc.errors import ChannelError, CommandError, PlanError

BOTH_BACKENDS = "cpu:gloo,cuda:nccl"


def make_group(
    store: dist.Store,
    *,
    name: str,
    ranks: Sequence[int],
    rank: int,
    backend: str,
    timeout_s: float,
) -> dist.ProcessGroup:
    """A registered, non-default group.  Collective over ``ranks``, and over no one else.

    `torch.distributed` functions accept it as ``group``; ranks they take are the global ones.

    Args:
        store: Reaches all of ``ranks``; the group opens a connection of its own to it, since a
            blocking wait on a shared one stalls the other threads that use it.
        name: Unique among the groups of the run.
        ranks: Global ranks, in group order.
        rank: This process's global rank.
        backend: `gloo`, `nccl`, or a list by device as torch writes it.
        timeout_s: Of forming the group and of each collective on it.

    Raises:
        PlanError: ``rank`` is not among ``ranks``.
        ChannelError: The ranks did not meet in time.
    """
    if rank not in ranks:
        raise PlanError(f"rank {rank} asked for group {name!r}, which has ranks {list(ranks)}")
    # With a default world torch would try to split the new group from it.
    outer = c10d._world.default_pg
    c10d._update_default_pg(None)
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(rank),
            [],
            backend,
            dist.PrefixStore(name, store.clone()),  # type: ignore[attr-defined]
            group_name=name,  # type: ignore[arg-type]
            timeout=timedelta(seconds=timeout_s),
            group_desc=name,
        )
    except RuntimeError as error:
        raise ChannelError(
            f"group {name!r} of {len(ranks)} ranks was not formed within {timeout_s:g} s on rank "
            f"{rank}: {error}; look for a rank of {list(ranks)} that failed earlier"
        ) from error
    finally:
        c10d._update_default_pg(outer)
    c10d._world.pg_group_ranks[group] = {r: i for i, r in enumerate(ranks)}
    return group


@dataclass(frozen=True)
class _RandomState:
    """States of the process's random number generators that engines seed."""

    torch_cpu: torch.Tensor
    torch_cuda: torch.Tensor | None
    python: tuple[Any, ...]
    numpy: dict[str, Any]

    @staticmethod
    def take() -> _RandomState:
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return _RandomState(
            torch.get_rng_state(), cuda, random.getstate(), np.random.get_state(legacy=False)
        )

    def put(self) -> None:
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda is not None:
            torch.cuda.set_rng_state(self.torch_cuda)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class World:
    """The torch default world of one engine: world ranks are positions in ``ranks``."""

    def __init__(self, group: dist.ProcessGroup, *, name: str, ranks: tuple[int, ...]) -> None:
        self.group = group
        self.name = name
        self.ranks = ranks
        """Global ranks, in world order."""
        # torch names groups by a per-process count, which must agree on all ranks of a world
        # and differ between the worlds of a process.
        self._group_count = zlib.crc32(name.encode()) << 24
        self._random: _RandomState | None = None

    @staticmethod
    def create(
        store: dist.Store,
        *,
        name: str,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        timeout_s: float,
    ) -> World:
        """Form the world.  Collective over ``ranks``; see `make_group`."""
        group = make_group(
            store,
            name=name,
            ranks=ranks,
            rank=rank,
            backend="nccl" if device.type == "cuda" else "gloo",
            timeout_s=timeout_s,
        )
        # As a default group it counts in its own ranks.
        c10d._world.pg_group_ranks[group] = {i: i for i in range(len(ranks))}
        return World(group, name=name, ranks=tuple(ranks))

    @property
    def rank(self) -> int:
        """This process's world rank."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """Ranks of the world."""
        return self.group.size()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this torch's default world, with random states of its own, for the block.

        Main thread only; may be nested, in itself and in other worlds.  The first entry goes on
        from the random states outside; later entries from where the last one ended.

        Raises:
            CommandError: Called by another thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise CommandError(
                f"world {self.name!r} entered by thread {threading.current_thread().name!r}; "
                "only the main thread may call engines"
            )
        outer = c10d._world.default_pg
        if outer is self.group:
            yield
            return
        outer_count, outer_random = c10d._world.group_count, _RandomState.take()
        c10d._update_default_pg(self.group)
        c10d._world.group_count = self._group_count
        if self._random is not None:
            self._random.put()
        try:
            yield
        finally:
            self._group_count, self._random = c10d._world.group_count, _RandomState.take()
            c10d._update_default_pg(outer)
            c10d._world.group_count = outer_count
            outer_random.put()


class Bridge:
    """A group between roles, over which rows and weights move; never a default world."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        device: torch.device,
    ) -> None:
        self.group = group
        self.name = name
        self.ranks = ranks
        """Global ranks, in group order."""
        self.rank = rank
        """This process's global rank."""
        self.device = device
        """Where exchange buffers live."""

    @staticmethod
    def create(
        store: dist.Store,
        *,
        name: str,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        timeout_s: float,
    ) -> Bridge:
        """Form the bridge.  Collective over ``ranks``; see `make_group`."""
        group = make_group(
            store,
            name=f"bridge {name}",
            ranks=ranks,
            rank=rank,
            # gloo too on GPUs: Python objects and barriers need no kernel there.
            backend=BOTH_BACKENDS if device.type == "cuda" else "gloo",
            timeout_s=timeout_s,
        )
        if device.type == "cuda":
            # NCCL forms its communicator at the first operation, which all ranks must share;
            # a later exchange may concern only some of them.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        return Bridge(group, name=name, ranks=tuple(ranks), rank=rank, device=device)

    @property
    def backend(self) -> str:
        """`nccl` or `gloo`: what carries tensors on ``device``."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    def describe(self) -> str:
        """One line for the log: `bridge actor->rollout: 4 ranks over gloo`."""
        return f"bridge {self.name}: {len(self.ranks)} ranks over {self.backend}"

    def all_gather_object(self, value: Any) -> dict[int, Any]:
        """Global rank -> its ``value``.  Collective over the bridge; objects are pickled."""
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self.group)
        return dict(zip(self.ranks, values, strict=True))

    def barrier(self) -> None:
        """Wait until all ranks are here.  Collective over the bridge; does not wait for kernels."""
        dist.all_reduce(torch.zeros(1), group=self.group)
