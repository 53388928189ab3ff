"""The executor as an executor of Submitit: results, exceptions, the pickle in the run folder."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from submitit.core.utils import FailedJobError

from rlhpc.errors import SubmitError
from rlhpc.plan import RunPlan
from rlhpc.slurm.executor import HetSlurmExecutor, run_worker, write_job
from tests.jobs import plan_of, three_components
from tests.slurm import tasks

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parents[2]


def make_executor(tmp_path: Path) -> tuple[RunPlan, HetSlurmExecutor]:
    (tmp_path / "code").symlink_to(ROOT)
    config = three_components()
    plan = plan_of(config, tmp_path)
    return plan, HetSlurmExecutor(config=config, plan=plan)


def test_results_come_in_global_rank_order_from_the_runs_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    plan, executor = make_executor(tmp_path)
    job = executor.submit(tasks.report, plan.run_dir)
    nodes = ["n1", "n1", "n3", "n4", "n2"]
    package = str(tmp_path / "code" / "rlhpc" / "__init__.py")
    assert job.results() == [(rank, name, package) for rank, name in enumerate(nodes)]
    assert job.paths.submission_file.resolve() == tmp_path / "job.sbatch"


def test_an_exception_of_a_rank_reaches_the_submitter(tmp_path: Path) -> None:
    plan, executor = make_executor(tmp_path)
    job = executor.submit(tasks.fail_on_rank_3, plan.run_dir)
    with pytest.raises(FailedJobError, match="broken in"):
        job.task(3).result()


def test_the_task_is_pickled_by_reference(tmp_path: Path) -> None:
    config = three_components()
    script = write_job(config, plan_of(config, tmp_path))
    assert "submitit.core._submit" in script.read_text()
    raw = (tmp_path / "submitit" / "submitted.pkl").read_bytes()
    assert b"rlhpc.slurm.executor" in raw
    task = pickle.loads(raw)
    assert (task.function, task.args) == (run_worker, (str(tmp_path),))


def test_arrays_are_refused(tmp_path: Path) -> None:
    _, executor = make_executor(tmp_path)
    with pytest.raises(SubmitError, match="2 submissions at once; expected 1"):
        executor.map_array(tasks.report, ["a", "b"])
