"""One rank: builds worlds, engines and bridges from the plan, then runs commands until `stop`.

Knows roles and lanes; the process around it (channel, signals, exit) is `worker.py`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.comm.exchange import WeightExchange, exchange_rows
from rlhpc.comm.messages import TRANSFER, Command, Event, Message, Reply
from rlhpc.comm.world import Bridge, World
from rlhpc.config.schema import RunConfig
from rlhpc.controller.placement import row_bridges
from rlhpc.data.batch import ColumnStore
from rlhpc.dataflow import make_stages
from rlhpc.errors import CommandError
from rlhpc.lanes import Inbox, TransferLane
from rlhpc.metrics import sample_device
from rlhpc.plan import RolePlan, RunPlan
from rlhpc.roles.base import RankContext, Role
from rlhpc.roles.build import make_role


class Rank:
    """Runs the commands of one rank."""

    def __init__(
        self,
        config: RunConfig,
        plan: RunPlan,
        *,
        rank: int,
        incarnation: str,
        device: torch.device,
        send: Callable[[Message], None],
        on_transfer_error: Callable[[BaseException, str], None],
    ) -> None:
        self.stage = "start"
        """Stage of the command in hand, for failure reports."""
        self._config = config
        self._plan = plan
        self._rank = rank
        self._send = send
        self._on_transfer_error = on_transfer_error
        self._inbox = Inbox()
        self._transfer = TransferLane(self._run_transfer)
        self._roles: dict[str, Role] = {}
        self._worlds: dict[tuple[int, ...], World] = {}
        self._bridges: dict[str, Bridge] = {}
        self._weights: WeightExchange | None = None
        self._stopped = False
        self._store: dist.Store | None = None
        self._stages = make_stages(
            config.algorithm.name, use_reference=config.algorithm.use_kl_loss
        )
        self._context = RankContext(
            config=config,
            plan=plan,
            rank=rank,
            incarnation=incarnation,
            device=device,
            store=ColumnStore(),
            emit=lambda number, kind, data: send(Event(number, rank, kind, data)),
            reply=lambda number, result: send(Reply(number, rank, result, 0.0)),
            run_until=self._run_until,
            needs_responses=any(s.method == "load_rows" for s in self._stages),
        )

    def receive(self, command: Command) -> None:
        """Queue a command in its lane.  Called by the channel's reader thread."""
        (self._transfer.inbox if command.lane == TRANSFER else self._inbox).put(command)

    def run(self, store: dist.Store) -> None:
        """Run commands until `stop`.

        Between them, step roles that have work in hand.  Main thread only.
        """
        self._store = store
        while not self._stopped:
            busy = [role for role in self._roles.values() if role.busy]
            command = self._inbox.take(block=not busy)
            if command is not None:
                self._run_compute(command)
                continue
            self.stage = "generate"
            for role in busy:
                role.step()

    def _run_until(self, number: int) -> None:
        while True:
            command = self._inbox.take(block=True)
            assert command is not None
            self._run_compute(command)
            if command.number == number:
                return
            if command.number > number:
                raise CommandError(
                    f"rank {self._rank} was called to command {number}, next is {command.number}; "
                    "the replica's leader and followers did not get the same commands"
                )

    def _run_compute(self, command: Command) -> None:
        self._transfer.progress.wait_for(command.after)
        self.stage = command.stage
        started = time.monotonic()
        result = self._dispatch(command)
        if result is not None:
            self._send(Reply(command.number, self._rank, result, time.monotonic() - started))
        self.stage = "idle"

    def _dispatch(self, command: Command) -> dict[str, Any] | None:
        if command.role:
            return self._roles[command.role].run(command)
        match command.method:
            case "build":
                return self._build()
            case "sync_weights":
                return self._sync_weights(command)
            case "stop":
                self._stopped = True
                return {}
        raise CommandError(f"rank {self._rank} has no method {command.method!r}")

    def _run_transfer(self, command: Command) -> None:
        started = time.monotonic()
        try:
            result = self._dispatch_transfer(command)
            self._send(Reply(command.number, self._rank, result, time.monotonic() - started))
        except BaseException as error:
            self._on_transfer_error(error, command.stage)

    def _dispatch_transfer(self, command: Command) -> dict[str, Any]:
        args = command.args
        match command.method:
            case "release":
                self._context.store.release(args["rows"])
                return {}
            case "fetch":
                stats = exchange_rows(
                    self._bridges[args["bridge"]],
                    rank=self._rank,
                    send=args["send"],
                    receive={s: [(r, n) for r, n in rows] for s, rows in args["receive"].items()},
                    columns=args["columns"],
                    store=self._context.store,
                )
                return {"bytes_received": stats}
        raise CommandError(f"the transfer lane has no method {command.method!r}")

    # Building

    def _build(self) -> dict[str, Any]:
        """Bridges first, in plan order on all ranks.

        Then worlds and engines; then the weights' plan.
        """
        log = []
        for name, ranks in row_bridges(self._plan, self._stages).items():
            if self._rank in ranks:
                self._bridges[name] = self._make_bridge(name, ranks)
                log.append(self._bridges[name].describe())
        for role in self._plan.roles_of(self._rank):
            self.stage = f"build {role.name}"
            self._roles[role.name] = make_role(self._context, role, self._world_of(role))
        self.stage = "build weights"
        log += self._plan_weights()
        result: dict[str, Any] = {"log": log, "device": sample_device(self._context.device)}
        if any(r.kind in ("rollout", "reward", "actor") for r in self._plan.roles_of(self._rank)):
            result["num_prompts"] = [
                len(self._context.prompts("train")),
                len(self._context.prompts("val")),
            ]
        return result

    def _make_bridge(self, name: str, ranks: tuple[int, ...]) -> Bridge:
        assert self._store is not None
        return Bridge.create(
            self._store,
            name=name,
            ranks=ranks,
            rank=self._rank,
            device=self._context.device,
            timeout_s=self._config.cluster.collective_timeout_s,
        )

    def _world_of(self, role: RolePlan) -> World:
        """The role's torch default world; roles on the same ranks share one."""
        ranks = role.world_ranks(self._rank)
        if ranks not in self._worlds:
            assert self._store is not None
            self._worlds[ranks] = World.create(
                self._store,
                name=f"world-{zlib.crc32(repr(ranks).encode()):08x}",
                ranks=ranks,
                rank=self._rank,
                device=self._context.device,
                timeout_s=self._config.cluster.collective_timeout_s,
            )
        return self._worlds[ranks]

    def _plan_weights(self) -> list[str]:
        """Plan actor -> rollout once; collective over the ranks of both."""
        actor, rollout = self._plan.role_of_kind("actor"), self._plan.role_of_kind("rollout")
        if actor is None or rollout is None:
            return []
        ranks = tuple(dict.fromkeys((*actor.ranks, *rollout.ranks)))
        if self._rank not in ranks:
            return []
        bridge = self._make_bridge(f"weights {actor.name}->{rollout.name}", ranks)
        mine = self._roles
        self._weights = WeightExchange(
            bridge,
            send=mine[actor.name].weight_parts() if actor.name in mine else [],
            receive=mine[rollout.name].weight_parts() if rollout.name in mine else [],
        )
        return [bridge.describe()]

    def _sync_weights(self, command: Command) -> dict[str, Any]:
        """Actor shards to rollout shards, in place.  Collective over the ranks of both roles."""
        if self._weights is None:
            raise CommandError(f"rank {self._rank} has no part in weight syncs")
        for role in self._roles.values():
            role.before_collective(command.number)
        stats = self._weights.run()
        rollout = self._plan.role_of_kind("rollout")
        if rollout is not None and rollout.name in self._roles:
            self._roles[rollout.name].weights_updated(command.args["version"])
        return {
            "bytes_received": stats.bytes_received,
            "bytes_sent": stats.bytes_sent,
            "bytes_local": stats.bytes_local,
            "own_bytes": stats.own_bytes,
            "seconds": stats.seconds,
        }

    def close(self) -> None:
        """End engines at a clean end.  Main thread only."""
        for role in self._roles.values():
            role.close()
