"""The run from first to last: wait for ranks, build, evaluate, train, evaluate, export, stop.

    main thread of rank 0            controller thread of rank 0             every rank
    (its own roles)                  wait_for_peers  <----------------------  connects, says hello
                                     build  ------------------------------->  worlds, engines,
                                     bridges for each step: BatchRun over the stages, metrics to the
                                     reporter stop  -------------------------------->  closes
                                     engines, goodbye DONE

The reporter's thread does the disk I/O; this thread shares its interpreter with a role and only
talks to ranks.
"""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from typing import Any

from rlhpc.comm.channel import ChannelServer
from rlhpc.comm.messages import Abort
from rlhpc.config.schema import RunConfig
from rlhpc.controller.calls import Calls
from rlhpc.controller.rows import RowTable
from rlhpc.controller.steps import BatchRun, BatchSpec
from rlhpc.controller.summary import device_samples, evaluation_metrics, step_metrics
from rlhpc.data.rows import PromptOrder, row_seed
from rlhpc.dataflow import Stage, evaluation_stages, make_stages
from rlhpc.errors import RlhpcError, RunFailedError
from rlhpc.metrics import MetricsReporter
from rlhpc.plan import RunPlan

GOODBYE_TIMEOUT_S = 60.0
"""How long ranks may take to close their engines."""


class Controller:
    """Orders rollout, scoring and updates."""

    def __init__(
        self, config: RunConfig, plan: RunPlan, server: ChannelServer, reporter: MetricsReporter
    ) -> None:
        self._config = config
        self._plan = plan
        self._server = server
        self._reporter = reporter
        self._calls = Calls(server, plan)
        self._stages: tuple[Stage, ...] = make_stages(
            config.algorithm.name, use_reference=config.algorithm.use_kl_loss
        )
        self._policy_version = 0
        self._next_row = 0
        self._num_val_prompts = 0
        self._order: PromptOrder | None = None

    def run(self) -> None:
        """The whole run; writes DONE at its end.

        Raises:
            RunFailedError: it did not come to its end; failure.json holds the first cause, all
            ranks were told.
        """
        try:
            self._connect()
            self._build()
            self._train()
            self._stop()
        except Exception as error:
            message = str(error)
            if not isinstance(error, RlhpcError):
                message = f"the controller failed: {error!r}\n{traceback.format_exc()}"
            self._record_failure(message)
            self._server.broadcast(Abort(message.splitlines()[0]))
            raise RunFailedError(message) from error
        (self._plan.path / "DONE").write_text(f"{self._plan.total_steps}\n")

    def _connect(self) -> None:
        expected = {
            rank: "+".join(r.label(rank) for r in self._plan.roles_of(rank)) or "idle"
            for rank in range(self._plan.num_ranks)
        }
        hosts = self._server.wait_for_peers(expected, self._config.cluster.connect_timeout_s)
        self._calls.set_hosts(hosts)
        nodes = ", ".join(sorted(set(hosts.values())))
        self._reporter.line("run", f"{self._plan.num_ranks} ranks connected on {nodes}")

    def _build(self) -> None:
        started = time.monotonic()
        call = self._calls.issue("build", {r: {} for r in range(self._plan.num_ranks)})
        self._calls.wait(call)
        sizes = [r["num_prompts"] for r in call.results.values() if "num_prompts" in r]
        if not sizes or any(s != sizes[0] for s in sizes):
            raise RunFailedError(
                f"ranks read different data: (train, val) prompts {sizes}; expected one answer. "
                "Check that data.train_files and data.val_files are the same files on all nodes"
            )
        num_train, self._num_val_prompts = sizes[0]
        self._order = PromptOrder(
            num_train, seed=self._config.seed, shuffle=self._config.data.shuffle
        )
        for line in sorted({text for r in call.results.values() for text in r["log"]}):
            self._reporter.line("run", line)
        self._reporter.line(
            "run",
            f"built in {time.monotonic() - started:.1f} s; {num_train} training and "
            f"{self._num_val_prompts} held-out prompts",
        )

    def _train(self) -> None:
        trainer = self._config.trainer
        if trainer.val_before_train:
            self._evaluate(0)
        for step in range(1, self._plan.total_steps + 1):
            self._train_step(step)
            last = step == self._plan.total_steps
            if last or (trainer.test_freq > 0 and step % trainer.test_freq == 0):
                self._evaluate(step)
        if trainer.export:
            self._export()

    def _train_step(self, step: int) -> None:
        started = time.monotonic()
        rows = self._make_training_rows(step)
        spec = BatchSpec(step, "train", self._config.sampling.temperature, self._policy_version)
        batch = BatchRun(self._calls, self._config, self._plan, rows, spec)
        batch.run(self._stages)
        batch.release()
        self._policy_version += 1
        assert self._order is not None
        metrics = step_metrics(
            self._plan,
            batch,
            step_s=time.monotonic() - started,
            epoch=self._order.visits(step - 1, 1)[0].epoch,
        )
        self._check_sync(step, metrics)
        self._reporter.step(step, metrics, devices=device_samples(self._plan, batch))

    def _make_training_rows(self, step: int) -> RowTable:
        """Rows of ``step`` (from 1): `group_size` a prompt where they are sampled, else one."""
        assert self._order is not None
        config = self._config
        sampled = any(s.method == "generate" for s in self._stages)
        group = config.algorithm.group_size if sampled else 1
        visits = self._order.visits(step - 1, config.data.train_batch_size)
        rows = [(p, visit, sample) for p, visit in enumerate(visits) for sample in range(group)]
        return RowTable(
            ids=self._take_row_ids(len(rows)),
            prompts=[p for p, _, _ in rows],
            prompt_indices=[v.prompt_index for _, v, _ in rows],
            seeds=[row_seed(config.seed, v.epoch, v.prompt_index, s) for _, v, s in rows],
        )

    def _take_row_ids(self, count: int) -> list[int]:
        first, self._next_row = self._next_row, self._next_row + count
        return list(range(first, self._next_row))

    def _evaluate(self, step: int) -> None:
        """Greedy responses to the held-out prompts; has no effect on training seeds or position."""
        if not self._num_val_prompts or self._plan.role_of_kind("rollout") is None:
            return
        count = self._num_val_prompts
        rows = RowTable(
            ids=self._take_row_ids(count),
            prompts=list(range(count)),
            prompt_indices=list(range(count)),
            seeds=[row_seed(self._config.seed, 0, p, 0) for p in range(count)],
        )
        spec = BatchSpec(
            step, "val", 0.0, self._policy_version, num_samples=self._config.trainer.num_samples
        )
        started = time.monotonic()
        batch = BatchRun(self._calls, self._config, self._plan, rows, spec)
        batch.run(evaluation_stages())
        batch.release()
        self._reporter.evaluation(
            step, evaluation_metrics(batch, seconds=time.monotonic() - started)
        )

    def _check_sync(self, step: int, metrics: dict[str, float]) -> None:
        """Stop when sampler and trainer disagree: such a run's numbers are silently wrong."""
        gap = metrics.get("training/rollout_logprobs_diff_mean")
        limit = self._config.trainer.sync_tolerance
        if self._config.trainer.check_sync and gap is not None and not gap <= limit:
            raise RunFailedError(
                f"step {step}: sampler and trainer disagree by {gap:.3g} in mean |log-prob|; "
                f"expected at most trainer.sync_tolerance={limit:g}. The rollout runs other "
                "weights or another precision; set roles.*.dtype alike, or raise "
                "trainer.sync_tolerance if this is rounding"
            )

    def _export(self) -> None:
        role = self._plan.role_of_kind("actor")
        assert role is not None, "checked at submit: a trained role"
        folder = str(self._plan.path / "export")
        call = self._calls.issue(
            "export", {r: {"folder": folder} for r in role.ranks}, role=role.name
        )
        self._calls.wait(call)
        self._reporter.line("actor", f"exported Hugging Face folder {folder}")

    def _stop(self) -> None:
        self._calls.wait_for_all()
        call = self._calls.issue("stop", {r: {} for r in range(self._plan.num_ranks)})
        self._calls.wait(call)
        self._calls.wait_for_goodbyes(GOODBYE_TIMEOUT_S)

    def _record_failure(self, message: str) -> None:
        """failure.json is what the job script prints; it must be there before ranks end."""
        failure = self._calls.failure
        record: dict[str, Any] = {"message": message}
        if failure is not None:
            record.update(
                role=failure.role,
                rank=failure.rank,
                host=failure.host,
                stage=failure.stage,
                cause=failure.cause,
                traceback=failure.traceback,
            )
        path = self._plan.path / "failure.json"
        partial = path.with_suffix(".partial")
        # A full disk, or a reporter that failed on it, must not keep the ranks from being told.
        with contextlib.suppress(OSError, RunFailedError):
            partial.write_text(json.dumps(record, indent=1))
            partial.replace(path)
            self._reporter.line("run", f"FAILED: {message}")
