"""One batch through a list of stages: each starts when all it reads is there, so roles overlap.

    generate ==events==> score (as groups finish) ---+
        |                                            +--> advantages --> update --> sync_weights
        +--> ref_logprobs, old_logprobs -------------+

A stage without reads waits for every stage before it in the list.  Before a stage runs on a role,
the [T] columns that another role wrote are fetched by the transfer lanes; the stage's command names
the fetches it comes after.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhpc.algorithms.losses import Denominators
from rlhpc.comm.messages import TRANSFER, Event
from rlhpc.config.schema import RunConfig
from rlhpc.controller.advantages import compute_row_advantages
from rlhpc.controller.calls import Call, Calls
from rlhpc.controller.placement import balance, ports_of, split_mini_batches, spread_groups
from rlhpc.controller.rows import RowTable
from rlhpc.dataflow import COLUMNS, Stage
from rlhpc.errors import CommandError
from rlhpc.plan import RolePlan, RunPlan


@dataclass(frozen=True)
class BatchSpec:
    """How a batch is sampled and used."""

    step: int
    split: str
    """`train` or `val`."""
    temperature: float
    """0 is greedy."""
    policy_version: int
    """Version of the weights before the batch's update."""
    num_samples: int = 0
    """Responses to write to samples.jsonl."""


@dataclass
class StageRun:
    """A stage that has started."""

    stage: Stage
    calls: list[Call] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    """Wall time, once finished."""

    @property
    def busy_seconds(self) -> float:
        """Time that the busiest rank spent in the stage's commands."""
        spent: dict[int, float] = {}
        for call in self.calls:
            for rank, reply in call.replies.items():
                spent[rank] = spent.get(rank, 0.0) + reply.seconds
        return max(spent.values(), default=0.0)


class BatchRun:
    """Runs the stages of one batch."""

    def __init__(
        self, calls: Calls, config: RunConfig, plan: RunPlan, rows: RowTable, spec: BatchSpec
    ) -> None:
        self.rows = rows
        self.spec = spec
        self.runs: dict[str, StageRun] = {}
        self._calls = calls
        self._config = config
        self._plan = plan
        self._complete: set[str] = set()  # columns known for every row
        self._scored: set[int] = set()
        self._finished_rows: set[int] = set()
        algorithm = config.algorithm
        self._mini_batches = split_mini_batches(
            rows.num_prompts,
            algorithm.mini_batch_size or max(rows.num_prompts, 1),
            epochs=algorithm.epochs,
            seed=config.seed * 1_000_003 + spec.step,
        )
        self._start: dict[str, Callable[[StageRun], None]] = {
            "generate": self._start_generate,
            "load_rows": self._start_load_rows,
            "score": self._start_score,
            "compute_logprobs": self._start_compute_logprobs,
            "compute_advantages": self._compute_advantages,
            "update": self._start_update,
            "sync_weights": self._start_sync_weights,
        }

    def run(self, stages: Sequence[Stage]) -> None:
        """Run all stages to the end."""
        waiting = list(stages)
        active: list[StageRun] = []
        while waiting or active:
            for stage in [s for s in waiting if self._is_ready(s, stages)]:
                waiting.remove(stage)
                run = StageRun(stage)
                self.runs[stage.name] = run
                self._start[stage.method](run)
                active.append(run)
            finished = [r for r in active if self._is_finished(r)]
            for run in finished:
                active.remove(run)
                run.seconds = time.monotonic() - run.started
                self._complete.update(run.stage.writes)
            if not finished:
                self._calls.poll(1.0)

    def _is_ready(self, stage: Stage, stages: Sequence[Stage]) -> bool:
        earlier = stages[: stages.index(stage)]
        if not stage.reads:
            return all(
                s.name in self.runs and self.runs[s.name].seconds is not None for s in earlier
            )
        if stage.streams:
            return all(self._writer(c, earlier).name in self.runs for c in stage.reads)
        return all(c in self._complete for c in stage.reads)

    @staticmethod
    def _writer(column: str, stages: Sequence[Stage]) -> Stage:
        return next(s for s in stages if column in s.writes)

    def _is_finished(self, run: StageRun) -> bool:
        if run.stage.method == "score" and len(self._scored) < len(self.rows):
            return False
        return all(call.done for call in run.calls)

    # Placement and fetching

    def _role(self, kind: str) -> RolePlan:
        role = self._plan.role_of_kind(kind)
        if role is None:
            raise CommandError(f"the plan has no role of kind {kind}")
        return role

    def _place(self, role: RolePlan) -> None:
        """Choose the replica of each row for ``role`` once a batch."""
        if role.name in self.rows.places:
            return
        places = [-1] * len(self.rows)
        ports = ports_of(role)
        for part in self._placement_parts():
            for port, chosen in zip(
                ports, balance([self.rows.lengths[p] for p in part], role.dp), strict=True
            ):
                for i in chosen:
                    places[part[i]] = port
        self.rows.places[role.name] = places

    def _placement_parts(self) -> list[list[int]]:
        """Positions that are balanced together: each mini-batch of a pass, for all roles alike."""
        first_pass = len(self._mini_batches) // self._config.algorithm.epochs
        return [self._positions_of_prompts(m) for m in self._mini_batches[:first_pass]]

    def _positions_of_prompts(self, prompts: Sequence[int]) -> list[int]:
        chosen = set(prompts)
        return [i for i, p in enumerate(self.rows.prompts) if p in chosen]

    def _fetch(
        self, role: RolePlan, reads: Sequence[str], positions: Sequence[int]
    ) -> dict[int, tuple[int, ...]]:
        """Command the transfers that ``role`` needs; returns rank -> numbers of its fetches."""
        after: dict[int, tuple[int, ...]] = {}
        by_source: dict[str, list[str]] = {}
        for column in reads:
            if COLUMNS[column].per_token and self.rows.writer[column] != role.name:
                by_source.setdefault(self.rows.writer[column], []).append(column)
        for source, columns in by_source.items():
            missing = [c for c in columns if c not in self.rows.copies_at(role.name)]
            moves = self.rows.moves(source, role.name, positions)
            if not missing or not moves:
                continue
            call = self._calls.issue(
                "fetch",
                self._fetch_args(f"{source}->{role.name}", moves, missing),
                lane=TRANSFER,
                stage=f"fetch {source}->{role.name}",
            )
            for _, destination in moves:
                after[destination] = (*after.get(destination, ()), call.number)
        return {rank: tuple(dict.fromkeys(numbers)) for rank, numbers in after.items()}

    def _fetch_args(
        self, bridge: str, moves: dict[tuple[int, int], list[int]], columns: list[str]
    ) -> dict[int, dict[str, Any]]:
        args: dict[int, dict[str, Any]] = {}
        rows = self.rows
        for (source, destination), positions in sorted(moves.items()):
            for rank in (source, destination):
                args.setdefault(
                    rank, {"bridge": bridge, "columns": columns, "send": {}, "receive": {}}
                )
            args[source]["send"][destination] = [rows.ids[p] for p in positions]
            args[destination]["receive"][source] = [
                [rows.ids[p], rows.lengths[p]] for p in positions
            ]
        return args

    def _replica_args(
        self, role: RolePlan, positions: Sequence[int], extra: dict[str, Any]
    ) -> tuple[dict[int, dict[str, Any]], list[list[int]]]:
        """Arguments of every rank of ``role`` (its replica's rows); positions of each replica."""
        by_port = self.rows.rows_by_place(role.name, positions)
        args, chosen = {}, []
        for d in range(role.dp):
            mine = by_port.get(role.port(d), [])
            chosen.append(mine)
            for rank in role.replica_ranks(d):
                args[rank] = {
                    "rows": [self.rows.ids[p] for p in mine],
                    "lengths": [self.rows.lengths[p] for p in mine],
                    **extra,
                }
        return args, chosen

    # Stages

    def _start_generate(self, run: StageRun) -> None:
        role = self._role("rollout")
        rows, data = self.rows, self._config.data
        group = len(rows) // max(rows.num_prompts, 1)
        places = [-1] * len(rows)
        args: dict[int, dict[str, Any]] = {}
        for d, prompts in enumerate(spread_groups(rows.num_prompts, role.dp)):
            positions = [p * group + i for p in prompts for i in range(group)]
            for rank in role.replica_ranks(d):
                args[rank] = {
                    "rows": [
                        [rows.ids[p], rows.prompt_indices[p], rows.seeds[p]] for p in positions
                    ],
                    "split": self.spec.split,
                    "temperature": self.spec.temperature,
                    "max_new_tokens": data.max_response_length,
                }
            for p in positions:
                places[p] = role.port(d)
        rows.places[role.name] = places
        self._note_writer(run.stage, role)
        run.calls.append(
            self._calls.issue(
                "generate", args, role=role.name, stage="generate", on_event=self._on_rows
            )
        )

    def _on_rows(self, event: Event) -> None:
        """Rows finished sampling: note their [N] columns and let streaming stages have them."""
        ids = event.data["rows"]
        for column in ("prompt_length", "length", "truncated"):
            self.rows.set_values(column, ids, event.data[column])
        self._finished_rows.update(self.rows.positions_of(ids))
        if "score" in self.runs:
            self._score_finished(self.runs["score"])

    def _start_load_rows(self, run: StageRun) -> None:
        role = self._role("actor")
        rows = self.rows
        places = [-1] * len(rows)
        for part in self._placement_parts():
            for d, chosen in enumerate(spread_groups(len(part), role.dp)):
                for i in chosen:
                    places[part[i]] = role.port(d)
        rows.places[role.name] = places
        self._note_writer(run.stage, role)
        args = {
            rank: {"rows": [[rows.ids[p], rows.prompt_indices[p]] for p in positions]}
            for rank, positions in rows.rows_by_place(role.name, range(len(rows))).items()
        }
        run.calls.append(
            self._calls.issue(
                "load_rows", args, role=role.name, stage="load", on_event=self._on_rows
            )
        )

    def _start_score(self, run: StageRun) -> None:
        role = self._role("reward")
        ports = ports_of(role)
        source = self._role("rollout")
        where = self.rows.places[source.name]
        # A row stays where it was sampled when a reward rank lives there; the rest goes round.
        self.rows.places[role.name] = [
            rank if rank in ports else ports[i % len(ports)] for i, rank in enumerate(where)
        ]
        self._score_finished(run)

    def _score_finished(self, run: StageRun) -> None:
        """Send whole groups that have finished sampling to the reward role."""
        rows = self.rows
        group = len(rows) // max(rows.num_prompts, 1)
        ready: list[int] = []
        for first in range(0, len(rows), group):
            positions = range(first, first + group)
            if first not in self._scored and all(p in self._finished_rows for p in positions):
                ready += positions
                self._scored.update(positions)
        if not ready:
            return
        role = self._role("reward")
        after = self._fetch(role, run.stage.reads, ready)
        args = {
            rank: {
                "rows": [[rows.ids[p], rows.prompt_indices[p]] for p in positions],
                "truncated": [rows.columns["truncated"][p] for p in positions],
                "split": self.spec.split,
                "step": self.spec.step,
                "sample_rows": [rows.ids[p] for p in positions if p < self.spec.num_samples],
            }
            for rank, positions in rows.rows_by_place(role.name, ready).items()
        }
        call = self._calls.issue(
            "score", args, role=role.name, stage="score", after=after, on_event=self._on_scores
        )
        run.calls.append(call)

    def _on_scores(self, event: Event) -> None:
        """Rewards of some rows."""
        self.rows.set_values("rewards", event.data["rows"], event.data["rewards"])
        self.rows.set_values("data_source", event.data["rows"], event.data["data_source"])
        for name, values in event.data["extra"].items():
            self.rows.set_values(f"score/{name}", event.data["rows"], values)

    def _start_compute_logprobs(self, run: StageRun) -> None:
        role = self._role(run.stage.role)
        self._place(role)
        everything = range(len(self.rows))
        after = self._fetch(role, run.stage.reads, everything)
        self._note_writer(run.stage, role)
        args, _ = self._replica_args(
            role,
            everything,
            {"output": run.stage.writes[0], "temperature": self._config.sampling.temperature},
        )
        run.calls.append(
            self._calls.issue(
                "compute_logprobs", args, role=role.name, stage=run.stage.name, after=after
            )
        )
        self._mark_fetched(role, run.stage.reads)

    def _compute_advantages(self, _: StageRun) -> None:
        self.rows.columns["advantages"] = compute_row_advantages(
            self._config, self.rows.columns["rewards"], self.rows.prompts, step=self.spec.step
        )

    def _start_update(self, run: StageRun) -> None:
        """All mini-batches in a row: the ranks' lanes keep the order."""
        role = self._role("actor")
        self._place(role)
        after = self._fetch(role, run.stage.reads, range(len(self.rows)))
        self._mark_fetched(role, run.stage.reads)
        response_lengths = self.rows.response_lengths
        for prompts in self._mini_batches:
            positions = self._positions_of_prompts(prompts)
            denominators = Denominators.from_lengths([response_lengths[p] for p in positions])
            extra = {
                "columns": [c for c in run.stage.reads if COLUMNS[c].per_token],
                "num_loss_tokens": denominators.tokens,
                "num_rows": denominators.rows,
                "temperature": self._config.sampling.temperature,
            }
            args, chosen = self._replica_args(role, positions, extra)
            if "advantages" in run.stage.reads:
                for d, mine in enumerate(chosen):
                    for rank in role.replica_ranks(d):
                        args[rank]["advantages"] = [
                            self.rows.columns["advantages"][p] for p in mine
                        ]
            run.calls.append(
                self._calls.issue("update", args, role=role.name, stage="update", after=after)
            )

    def _start_sync_weights(self, run: StageRun) -> None:
        ranks = {*self._role("actor").ranks, *self._role("rollout").ranks}
        args = {rank: {"version": self.spec.policy_version + 1} for rank in sorted(ranks)}
        run.calls.append(self._calls.issue("sync_weights", args, stage="sync_weights"))

    def _note_writer(self, stage: Stage, role: RolePlan) -> None:
        for column in stage.writes:
            self.rows.writer[column] = role.name

    def _mark_fetched(self, role: RolePlan, columns: Sequence[str]) -> None:
        self.rows.copies.setdefault(role.name, set()).update(columns)

    # What is left behind

    def release(self) -> None:
        """Let every rank that held rows forget them."""
        ranks = {r for places in self.rows.places.values() for r in places}
        self._calls.issue(
            "release", {rank: {"rows": self.rows.ids} for rank in sorted(ranks)}, lane=TRANSFER
        )

    def results(self, stage: str) -> list[dict[int, dict[str, Any]]]:
        """Results by rank of each call of ``stage``; empty when the stage did not run."""
        return [c.results for c in self.runs[stage].calls] if stage in self.runs else []
