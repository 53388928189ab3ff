"""Actor and reference roles: gather rows over the replica, run the engine, keep the results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.algorithms.losses import Denominators, make_policy_loss, make_sft_loss
from rlhpc.comm.messages import Command
from rlhpc.comm.world import World
from rlhpc.data.batch import Batch, pack_columns, packed_bytes, unpack_columns
from rlhpc.data.prompts import make_sft_row
from rlhpc.errors import CommandError
from rlhpc.metrics import sample_device
from rlhpc.plan import RolePlan
from rlhpc.roles.base import RankContext
from rlhpc.training.base import TrainEngine
from rlhpc.weights.base import WeightPart


class TrainingRole:
    """One rank of a role that runs a training engine, with or without an optimizer."""

    def __init__(
        self, context: RankContext, plan: RolePlan, engine: TrainEngine, world: World
    ) -> None:
        self.name = plan.name
        self._context = context
        self._plan = plan
        self._engine = engine
        self._world = world
        self._port = plan.port(plan.coordinates(context.rank)[0])
        self._methods = {
            "compute_logprobs": self._compute_logprobs,
            "update": self._update,
            "load_rows": self._load_rows,
            "export": self._export,
        }

    @property
    def busy(self) -> bool:
        """Never: each command runs to its end."""
        return False

    def step(self) -> None:
        """Nothing to do between commands."""

    def run(self, command: Command) -> dict[str, Any] | None:
        """Carry out a command.

        Collective over the replica, `update` and `export` over the role.
        """
        if command.method not in self._methods:
            raise CommandError(f"role {self.name} has no method {command.method!r}")
        started = time.monotonic()
        with self._world.active():
            result = self._methods[command.method](command)
        return {
            **result,
            "seconds": time.monotonic() - started,
            "device": sample_device(self._context.device),
        }

    def _gather(self, args: dict[str, Any], columns: Sequence[str]) -> Batch:
        """The command's rows with ``columns`` on every rank of the replica.

        They come from its port.
        """
        rows, store = args["rows"], self._context.store
        group = self._engine.replica_group()
        if group is None or not rows:
            return store.batch(rows, columns)
        lengths = torch.tensor(args["lengths"], dtype=torch.int64)
        if self._context.rank == self._port:
            packed = pack_columns(store.batch(rows, columns), columns)
        else:
            packed = torch.empty(packed_bytes(lengths, columns), dtype=torch.uint8)
        packed = packed.to(self._context.device)
        dist.broadcast(packed, src=self._plan.ranks.index(self._port), group=group)
        return Batch(rows, lengths, unpack_columns(packed.cpu(), lengths, columns))

    def _compute_logprobs(self, command: Command) -> dict[str, Any]:
        args = command.args
        if not args["rows"]:
            return {"num_tokens": 0}
        batch = self._gather(args, ("token_ids",))
        out = self._engine.compute_logprobs(batch, temperature=args["temperature"])
        if self._context.rank == self._port:
            assert out is not None, "the port is on the last pipeline stage"
            batch.columns[args["output"]] = out["logprobs"]
            self._context.store.put_batch(batch, (args["output"],))
        return {"num_tokens": batch.num_tokens}

    def _update(self, command: Command) -> dict[str, Any]:
        args = command.args
        batch = self._gather(args, args["columns"])
        denominators = Denominators(tokens=args["num_loss_tokens"], rows=args["num_rows"])
        algorithm = self._context.config.algorithm
        if "advantages" in args:
            batch.columns["advantages"] = torch.tensor(args["advantages"], dtype=torch.float32)
            loss_fn = make_policy_loss(algorithm, denominators=denominators)
        else:
            loss_fn = make_sft_loss(algorithm, denominators=denominators)
        metrics = self._engine.update(batch, loss_fn, temperature=args["temperature"])
        return {"metrics": metrics, "num_tokens": batch.num_tokens}

    def _load_rows(self, command: Command) -> dict[str, Any]:
        """Supervised rows straight from the data set, on the port of each replica."""
        rows = command.args["rows"]
        prompts, tokenizer = self._context.prompts("train"), self._context.tokenizer()
        lengths, prompt_lengths = [], []
        for row, prompt_index in rows:
            prompt = prompts[prompt_index]
            token_ids, mask = make_sft_row(prompt.token_ids, prompt.response, tokenizer)
            self._context.store.put("token_ids", {row: torch.tensor(token_ids)})
            self._context.store.put("loss_mask", {row: torch.tensor(mask, dtype=torch.bool)})
            lengths.append(len(token_ids))
            prompt_lengths.append(len(token_ids) - sum(mask))
        self._context.emit(
            command.number,
            "rows",
            {
                "rows": [row for row, _ in rows],
                "prompt_length": prompt_lengths,
                "length": lengths,
                "truncated": [False] * len(rows),
            },
        )
        return {}

    def _export(self, command: Command) -> dict[str, Any]:
        folder = Path(command.args["folder"])
        self._engine.save_hf(folder)
        return {"folder": str(folder)}

    def before_collective(self, number: int) -> None:
        """All ranks of the role take every command already."""

    def weight_parts(self) -> list[WeightPart]:
        """This rank's shard of the policy."""
        return self._engine.weight_parts()

    def weights_updated(self, version: int) -> None:
        """The actor is where weights come from; a reference keeps its own."""
        raise CommandError(f"role {self.name} does not take weights (version {version})")

    def close(self) -> None:
        """Nothing outlives the process."""
