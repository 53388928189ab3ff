"""Metrics of steps under verl's names, and the reporter that writes them from a thread of its own.

The controller shares its interpreter with a role and does no disk I/O, so it only puts messages on
a queue here.
Formatting is `console.py`, the writers are `trackers.py`, the plot and summary at the end are
`report.py`.

    controller thread --step/line/evaluation--> queue --> reporter thread --> console.log,
    metrics.jsonl, trackers
"""

from __future__ import annotations

import functools
import math
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from rlhpc.algorithms.advantages import group_statistics
from rlhpc.config.schema import RunConfig
from rlhpc.console import Devices, evaluation_line, progress_line, role_lines
from rlhpc.errors import RunFailedError
from rlhpc.trackers import ConsoleLog, make_trackers

GIB = 2**30

ROLES_EVERY_S = 5.0
"""Least time between the lines of the roles, so that quick steps leave the progress readable."""

ETA_WINDOW = 20
"""Steps whose mean duration gives the time left."""


class MetricsReporter:
    """Takes metrics and lines from one thread; writes them from another, in order."""

    def __init__(self, run_dir: Path, config: RunConfig, *, total_steps: int) -> None:
        """Open the trackers of `trainer.logger` and start the thread.

        Args:
            run_dir: the run folder.
            config: the run's config.
            total_steps: of the run, for the progress bar.

        Raises:
            ConfigError: a tracker is unknown or its package is missing.
        """
        self._trackers = make_trackers(run_dir, config)
        self._console = next((t for t in self._trackers if isinstance(t, ConsoleLog)), None)
        self._run_dir = run_dir
        self._total_steps = total_steps
        self._step_seconds: deque[float] = deque(maxlen=ETA_WINDOW)
        self._num_samples = config.trainer.num_samples
        self._anything_to_report = False
        self._roles_shown = -math.inf
        self._error: BaseException | None = None
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def line(self, prefix: str, text: str) -> None:
        """Show ``text`` on the console under `[prefix]`, for example `rollout`."""
        self._put(lambda: self._write_lines([(prefix, text)]))

    def step(
        self, step: int, metrics: Mapping[str, float], *, devices: Devices | None = None
    ) -> None:
        """Report a finished training step.

        Args:
            step: from 1.
            metrics: by their usual names; `timing_s/step` drives the time left.
            devices: role name -> what `sample_device` gave on its ranks.
        """
        values = {**metrics, **throughput_metrics(metrics)}
        self._put(lambda: self._write_step(step, values, devices or {}))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report an evaluation with the weights after ``step`` updates (0: before the first)."""
        values = dict(metrics)
        self._put(lambda: self._write_evaluation(step, values))

    def close(self) -> None:
        """Write what is left, then plot and summary.  Waits for both.

        Raises:
            RunFailedError: metrics could not be written.
        """
        self._put(self._finish)
        self._queue.put(None)
        self._thread.join()
        self._check()

    def _put(self, job: Callable[[], None]) -> None:
        self._check()
        self._queue.put(job)

    def _check(self) -> None:
        if self._error is not None:
            raise RunFailedError(
                f"metrics cannot be written in {str(self._run_dir)!r}: {self._error!r}; expected "
                "a folder with "
                "room. Free space or set run_root to another file system"
            ) from self._error

    def _serve(self) -> None:
        """The thread: jobs in order until the first that fails, which the next caller is told."""
        try:
            while (job := self._queue.get()) is not None:
                job()
        except Exception as error:
            self._error = error
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:
                self._error = self._error or error

    def _write_lines(self, lines: Sequence[tuple[str, str]]) -> None:
        if self._console is not None:
            self._console.lines(lines)

    def _write_step(self, step: int, metrics: dict[str, float], devices: Devices) -> None:
        self._anything_to_report = True
        for tracker in self._trackers:
            tracker.log(step, metrics)
        self._step_seconds.append(metrics.get("timing_s/step", math.nan))
        known = [s for s in self._step_seconds if not math.isnan(s)]
        mean = sum(known) / len(known) if known else 0.0
        bar = progress_line(step, self._total_steps, metrics, seconds_per_step=mean)
        lines = [("run", bar)]
        if time.monotonic() - self._roles_shown >= ROLES_EVERY_S:
            self._roles_shown = time.monotonic()
            lines = [*role_lines(metrics, devices), *lines]
        self._write_lines(lines)

    def _write_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._anything_to_report = True
        for tracker in self._trackers:
            tracker.log(step, metrics)
        self._write_lines([("run", evaluation_line(step, metrics))])

    def _finish(self) -> None:
        """Plot and summary, for the console."""
        if not self._anything_to_report or not (self._run_dir / "metrics.jsonl").exists():
            return
        from rlhpc.report import make_report  # matplotlib takes a second to import

        report = make_report(self._run_dir, num_samples=self._num_samples)
        self._write_lines([("run", text) for text in report.text.splitlines()])


def _summarise(name: str, values: Sequence[float]) -> dict[str, float]:
    """`name/mean`, `name/max` and `name/min` of the values that are not NaN."""
    known = [float(v) for v in values if v is not None and not math.isnan(v)]
    if not known:
        return {f"{name}/{what}": math.nan for what in ("mean", "max", "min")}
    return {
        f"{name}/mean": sum(known) / len(known),
        f"{name}/max": max(known),
        f"{name}/min": min(known),
    }


def batch_metrics(
    rewards: Sequence[float],
    *,
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    truncated: Sequence[bool],
    extra: Mapping[str, Sequence[float]] | None = None,
    groups: Sequence[int] | None = None,
) -> dict[str, float]:
    """Metrics of a training batch, all arguments [N].

    Args:
        rewards: NaN where a row has none; empty in a supervised step.
        prompt_lengths: tokens.
        response_lengths: tokens, EOS included.
        truncated: ended by the length limit.
        extra: further numbers of the reward function, for example `acc`.
        groups: prompt of each row, to count the groups that teach nothing.
    """
    metrics = {
        **_summarise("prompt_length", prompt_lengths),
        **_summarise("response_length", response_lengths),
        "response_length/clip_ratio": sum(truncated) / max(len(truncated), 1),
        "perf/total_num_tokens": float(sum(prompt_lengths) + sum(response_lengths)),
    }
    if len(rewards):
        # Score and reward differ once something is added to the score; nothing is yet.
        metrics |= {**_summarise("critic/score", rewards), **_summarise("critic/rewards", rewards)}
        metrics["critic/rewards/missing"] = float(sum(math.isnan(r) for r in rewards))
    if len(rewards) and groups is not None:
        statistics = group_statistics(torch.tensor(rewards), torch.tensor(groups))
        metrics["critic/zero_variance_groups"] = float(statistics.num_zero_variance)
    for name, values in (extra or {}).items():
        metrics[f"critic/{name}/mean"] = _summarise(name, values)[f"{name}/mean"]
    return metrics


def validation_metrics(
    data_sources: Sequence[str],
    rewards: Sequence[float],
    *,
    extra: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, float]:
    """Metrics of an evaluation, one greedy response a prompt, all arguments [N].

    A row without a reward counts as 0: an answer that cannot be graded is no right answer.

    Returns:
        `val-core/<source>/acc/mean@1` where the reward function gives `acc`, else
        `val-core/<source>/reward/mean@1`;
        other numbers under `val-aux/<source>/<name>/mean@1`.
    """
    columns: dict[str, Sequence[float]] = {"reward": rewards, **(extra or {})}
    core = "acc" if "acc" in columns else "reward"
    metrics = {}
    for source in sorted(set(data_sources)):
        rows = [i for i, s in enumerate(data_sources) if s == source]
        for name, values in columns.items():
            graded = [0.0 if math.isnan(values[i]) else float(values[i]) for i in rows]
            section = "val-core" if name == core else "val-aux"
            metrics[f"{section}/{source}/{name}/mean@1"] = sum(graded) / len(graded)
    return metrics


def throughput_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second of each role over its own time in the step, under `perf/tokens_per_s/`.

    Rollout counts response tokens, the others prompt and response.
    """
    total = metrics.get("perf/total_num_tokens")
    prompt, response = (metrics.get(f"{n}_length/mean") for n in ("prompt", "response"))
    if total is None or not prompt or response is None:
        return {}
    sampled = total * response / (prompt + response)
    work = (
        ("rollout", sampled, "gen"),
        ("reference", total, "ref"),
        ("actor", total, "update_actor"),
    )
    return {
        f"perf/tokens_per_s/{role}": tokens / seconds
        for role, tokens, name in work
        if (seconds := metrics.get(f"timing_s/{name}"))
    }


@functools.cache
def _process() -> psutil.Process:
    """This process; the first `cpu_percent` of an object only starts its clock."""
    process = psutil.Process()
    process.cpu_percent(None)
    return process


def sample_device(device: torch.device | str) -> dict[str, Any]:
    """Use and memory of this rank's device, for a reply to the controller.  Local.

    Returns:
        `host`; `device` (`cuda:0` or `cpu`); `utilization` in percent, None where it cannot be
        read (for CUDA it needs
        the package nvidia-ml-py; for a CPU it is that of this process since the last call, 100 a
        core);
        `memory_used_gib` (the whole card's, or this process's) and `memory_total_gib`.
    """
    device = torch.device(device)
    host = socket.gethostname().partition(".")[0]
    if device.type != "cuda":
        return {
            "host": host,
            "device": "cpu",
            "utilization": _process().cpu_percent(None),
            "memory_used_gib": _process().memory_info().rss / GIB,
            "memory_total_gib": psutil.virtual_memory().total / GIB,
        }
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    return {
        "host": host,
        "device": f"cuda:{index}",
        "utilization": _gpu_utilization(index),
        "memory_used_gib": (total - free) / GIB,
        "memory_total_gib": total / GIB,
    }


def _gpu_utilization(index: int) -> float | None:
    """Percent, None where the driver's library or its Python package is absent or refuses."""
    try:
        return float(torch.cuda.utilization(index))
    except (ModuleNotFoundError, RuntimeError):
        return None
