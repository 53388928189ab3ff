"""One run as one Slurm job through Submitit: `submit_run`, its executor, job and watcher.

Submitit's own SlurmExecutor makes one-component jobs, reads `123+0` from sacct as an unknown job
and needs slurmdbd; what differs is overridden here.  The task that it pickles is `run_worker`, by
reference, with the run folder as its only argument, so that the script can be submitted again by
hand.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.slurm import slurm

from rlhpc.config.schema import RunConfig
from rlhpc.errors import SubmitError
from rlhpc.plan import RunPlan
from rlhpc.slurm.environ import clean_environment
from rlhpc.slurm.script import component_options, option_words, render_job_script
from rlhpc.slurm.state import job_states, merge_states

_log = logging.getLogger(__name__)


def submit_run(
    config: RunConfig, plan: RunPlan, *, command: list[str] | None = None
) -> HetSlurmJob:
    """Write `job.sbatch` and the task into the run folder and queue the job.

    Args:
        config: The run's config.
        plan: Its plan; `plan.run_dir` exists and holds what the ranks need.
        command: What each task runs; None runs the worker through Submitit.

    Raises:
        ConfigError: the script cannot carry the config.
        SubmitError: Slurm refused; its words are in the message and nothing is queued.
    """
    executor = HetSlurmExecutor(config=config, plan=plan, command=command)
    job = executor.submit(run_worker, plan.run_dir)
    assert isinstance(job, HetSlurmJob), type(job)
    return job


def write_job(config: RunConfig, plan: RunPlan) -> Path:
    """Write `job.sbatch` and the task into the run folder, for `sbatch` by hand; queues nothing.

    Raises:
        ConfigError: the script cannot carry the config.
    """
    folder = plan.path / "submitit"
    text = render_job_script(config, plan, command=_submitit_command(folder))
    return _write_files(plan, text, utils.DelayedSubmission(run_worker, plan.run_dir))


def _submitit_command(folder: Path) -> list[str]:
    return [sys.executable, "-u", "-m", "submitit.core._submit", str(folder)]


def _write_files(plan: RunPlan, text: str, task: utils.DelayedSubmission) -> Path:
    """Write script ``text`` and ``task`` into the run folder; return the script's path."""
    (plan.path / "submitit").mkdir(parents=True, exist_ok=True)
    # Slurm does not make the folder of the batch log, and ends the job without a word.
    (plan.path / "logs").mkdir(exist_ok=True)
    task.set_timeout(0, 0)
    task.dump(plan.path / "submitit" / "submitted.pkl")
    script = plan.path / "job.sbatch"
    script.write_text(text)
    return script


def run_worker(run_dir: str) -> Any:
    """What each task runs: the rank's worker on ``run_dir``."""
    from rlhpc.worker import main  # imports torch, which the login node must not wait for

    return main(run_dir)


def check_with_sbatch(config: RunConfig, plan: RunPlan) -> None:
    """Ask Slurm about each component as a plain job; the job as a whole names no culprit.

    Raises:
        SubmitError: lists what Slurm says of each component it refuses.
    """
    refusals = []
    for component in plan.components:
        options = component_options(config, plan, component)
        result = _sbatch(["--test-only", *option_words(options), "--wrap=true"])
        if result.returncode:
            refusals.append(f"components.{component.name}: {result.stderr.strip()}")
    if refusals:
        raise SubmitError(
            "Slurm refuses this job; nothing was queued. "
            "A node that is drained or down also looks like this (sinfo -R).\n"
            + "\n".join(refusals)
        )


def _sbatch(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run sbatch in a clean environment."""
    environment, _ = clean_environment(os.environ)
    try:
        return subprocess.run(
            ["sbatch", *arguments], capture_output=True, text=True, env=environment, check=False
        )
    except FileNotFoundError:
        raise SubmitError(
            "sbatch is not on PATH; expected a Slurm login node. "
            "Go to one, use launch/devcluster, or set cluster=local"
        ) from None


class HetWatcher(core.InfoWatcher):
    """Submitit's view of job states, by `job_states`; one entry for all components of a job."""

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """One state for the whole job; UNKNOWN only before the first look."""
        return self.get_info(job_id, mode=mode).get("State", "UNKNOWN")

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether all components ended."""
        return self.get_info(job_id, mode=mode).get("Done") == "yes"

    def update(self) -> None:
        """Ask about all registered jobs that have not ended; a silent Slurm changes nothing."""
        self._num_calls += 1
        for job_id in sorted(self._registered - self._finished):
            try:
                states = job_states(job_id)
            except SubmitError as error:
                _log.warning("%s", error)
                continue
            done = all(s.is_final for s in states)
            self._info_dict[job_id] = {
                "JobID": job_id,
                "State": merge_states(states),
                "NodeList": ",".join(s.nodes for s in states),
                "States": "|".join(s.state for s in states),
                "ExitCodes": "|".join(s.exit_code for s in states),
                "Done": "yes" if done else "no",
            }
            if done:
                self._finished.add(job_id)
        self._last_status_check = time.time()


class HetSlurmJob(slurm.SlurmJob[Any]):
    """A queued run: Submitit's Job over all ranks, `results()` in global rank order."""

    watcher = HetWatcher(delay_s=30)


class HetSlurmExecutor(slurm.SlurmExecutor):
    """Submits the run of one config and plan; Submitit's folder is `<run_dir>/submitit`."""

    job_class = HetSlurmJob

    def __init__(
        self,
        *,
        config: RunConfig,
        plan: RunPlan,
        command: list[str] | None = None,
    ) -> None:
        if self.affinity() <= 0:
            raise SubmitError(
                "srun is not on PATH; expected a Slurm login node. "
                "Go to one, use launch/devcluster, or set cluster=local"
            )
        super().__init__(plan.path / "submitit")
        self.config = config
        self.plan = plan
        self.command = command

    @classmethod
    def affinity(cls) -> int:
        """Below SlurmExecutor's 2: Submitit's AutoExecutor never picks this one by itself."""
        return min(1, super().affinity())

    def _num_tasks(self) -> int:
        return self.plan.num_ranks

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join(self.command or _submitit_command(self.folder))

    def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002
        return render_job_script(self.config, self.plan, command=shlex.split(command))

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        """Check, write and queue one job."""
        if len(delayed_submissions) != 1:
            raise SubmitError(
                f"{len(delayed_submissions)} submissions at once; expected 1, since Slurm has no "
                "arrays of jobs with several components. Submit the runs one by one"
            )
        text = self._make_submission_file_text(self._submitit_command_str, uid="")
        check_with_sbatch(self.config, self.plan)
        script = _write_files(self.plan, text, delayed_submissions[0])
        job_id = self._queue(script)
        job = self.job_class(self.folder, job_id, tasks=range(self.plan.num_ranks))
        for path, target in (
            (job.paths.submitted_pickle, "submitted.pkl"),
            (job.paths.submission_file, "../job.sbatch"),
        ):
            if not path.is_symlink():
                path.symlink_to(target)
        return [job]

    def _queue(self, script: Path) -> str:
        """Sbatch ``script``; return the job's id."""
        _, dropped = clean_environment(os.environ)
        if dropped:
            _log.warning(
                "ignored, since the job script states all options: %s (use components.*.sbatch)",
                ", ".join(dropped),
            )
        result = _sbatch([str(script)])
        found = re.search(r"\bjob (\d+)", result.stdout)
        if result.returncode or not found:
            said = (result.stderr + result.stdout).strip()
            raise SubmitError(f"sbatch refused {script}; nothing was queued:\n{said}")
        return found.group(1)
