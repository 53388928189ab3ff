"""Real jobs of trivial tasks over three components: what Slurm shows and what the run leaves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhpc.config.schema import RunConfig
from rlhpc.plan import RunPlan
from rlhpc.slurm.executor import HetSlurmJob, submit_run
from rlhpc.slurm.state import ComponentState, job_states, merge_states, wait_for_job
from tests.jobs import plan_of, three_components

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parents[2]

REPORT = """
import json, os, pathlib, sys
from rlhpc.slurm.environ import RankEnvironment
rank = RankEnvironment.from_env(os.environ)
print("hello from", rank)
run = pathlib.Path(os.environ["RLHPC_RUN_DIR"])
names = ("CUDA_VISIBLE_DEVICES", "NOTE", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")
seen = vars(rank) | {name: os.environ.get(name) for name in names}
seen["code_first"] = os.environ["PYTHONPATH"].split(":")[0]
(run / f"seen_{rank.rank}.json").write_text(json.dumps(seen))
"""
DONE = """
import time
end = time.monotonic() + 20
while len(list(run.glob("seen_*.json"))) < rank.num_ranks:
    assert time.monotonic() < end
    time.sleep(0.1)
if rank.rank == 0:
    (run / "DONE").touch()
"""
FAIL = """
import time
if rank.rank == 2:
    (run / "failures").mkdir()
    message = "rollout dp0 on n3 failed: ValueError: it's \\"broken\\""
    (run / "failures" / "2.json").write_text(json.dumps({"message": message}))
    sys.exit(7)
time.sleep(120)
"""


def start(tmp_path: Path, code: str, config: RunConfig) -> tuple[RunPlan, HetSlurmJob]:
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    (run_dir / "code").symlink_to(ROOT)
    (run_dir / "task.py").write_text(code)
    plan = plan_of(config, run_dir)
    return plan, submit_run(config, plan, command=[sys.executable, str(run_dir / "task.py")])


def finish(job: HetSlurmJob) -> list[ComponentState]:
    end = time.monotonic() + 60
    states = job_states(job.job_id)
    while not all(s.is_final for s in states):
        assert time.monotonic() < end, (states, batch_log(job))
        time.sleep(0.3)
        states = job_states(job.job_id)
    return states


def batch_log(job: HetSlurmJob) -> str:
    path = job.paths.folder.parent / "logs" / f"{job.job_id}_batch.out"
    return path.read_text() if path.exists() else "no batch log"


def test_a_job_spans_its_components(tmp_path: Path) -> None:
    config = three_components()
    note = "it's $HOME \"quoted\" `date` \\ 'x'  end"
    config.components["rollout"].environment = {"NOTE": note}
    config.components["reference"].cpus_per_task = 3
    plan, job = start(tmp_path, REPORT + DONE, config)
    listed = subprocess.run(
        ["squeue", "-h", "-j", job.job_id, "-o", "%i %P %j"], capture_output=True, text=True
    ).stdout.split("\n")
    assert sorted(filter(None, listed)) == [
        f"{job.job_id}+0 a100 gsm8k-0001.actor",
        f"{job.job_id}+1 h100 gsm8k-0001.rollout",
        f"{job.job_id}+2 a100 gsm8k-0001.reference",
    ]
    states = finish(job)
    assert [s.state for s in states] == ["COMPLETED"] * 3, batch_log(job)
    assert [s.exit_code for s in states] == ["0:0"] * 3
    seen = [json.loads((plan.path / f"seen_{rank}.json").read_text()) for rank in range(5)]
    # SLURM_JOB_PARTITION is now and then the first component's on all tasks (22.05.8)
    assert [s["host"] for s in seen] == ["n1", "n1", "n3", "n4", "n2"]
    assert [s["local_rank"] for s in seen] == [0, 1, 0, 0, 0]
    assert [s["CUDA_VISIBLE_DEVICES"] for s in seen] == ["0,1", "0,1", "0", "0", "0"]
    assert [s["NOTE"] for s in seen] == [None, None, note, note, None]
    assert {s["job_id"] for s in seen} == {job.job_id}
    assert {s["code_first"] for s in seen} == {f"{plan.run_dir}/code"}
    assert {s["HF_HUB_OFFLINE"] for s in seen} == {"1"}
    assert_logs(plan, job)


def assert_logs(plan: RunPlan, job: HetSlurmJob) -> None:
    """One log a rank, named by role and global rank; `latest` and Submitit find them."""
    latest = plan.path / "logs" / "latest"
    assert latest.readlink() == Path(job.job_id)
    names = ["actor_0.log", "actor_1.log", "reference_4.log", "rollout_2.log", "rollout_3.log"]
    assert sorted(p.name for p in latest.iterdir()) == names
    assert all("hello from" in (latest / name).read_text() for name in names)
    assert "hello from" in job.task(3).stdout()
    assert job.done(force_check=True)
    assert job.state == "COMPLETED"


def test_a_job_without_done_fails_although_srun_returned_0(tmp_path: Path) -> None:
    _, job = start(tmp_path, REPORT, three_components())
    states = finish(job)
    assert [(s.state, s.exit_code) for s in states] == [("FAILED", "98:0")] * 3
    assert "without DONE and without a word" in batch_log(job)


def test_one_failing_rank_ends_all_and_is_named(tmp_path: Path) -> None:
    begin = time.monotonic()
    changes: list[str] = []
    _, job = start(tmp_path, REPORT + FAIL, three_components())
    states = wait_for_job(
        job.job_id, poll_s=0.3, on_change=lambda s: changes.append(merge_states(s))
    )
    assert time.monotonic() - begin < 30
    assert merge_states(states) == "FAILED"
    assert "RUNNING" in changes
    assert 'rollout dp0 on n3 failed: ValueError: it\'s "broken"' in batch_log(job)


def test_the_script_can_be_submitted_again_by_hand(tmp_path: Path) -> None:
    plan, job = start(tmp_path, REPORT + DONE, three_components())
    finish(job)
    (plan.path / "failure.json").write_text('{"message": "of an earlier attempt"}')
    said = subprocess.run(
        ["sbatch", "--parsable", "job.sbatch"], cwd=plan.path, capture_output=True, text=True
    )
    again = HetSlurmJob(plan.path / "submitit", said.stdout.strip(), tasks=range(plan.num_ranks))
    assert again.job_id != job.job_id
    assert merge_states(finish(again)) == "COMPLETED", batch_log(again)
    assert not (plan.path / "failure.json").exists()
    assert again.submission().args == (plan.run_dir,)


def test_a_plain_job_runs_its_setup_and_prefix(tmp_path: Path) -> None:
    config = three_components()
    del config.components["reference"], config.roles["reference"]
    del config.components["rollout"], config.roles["rollout"]
    config.components["actor"].setup = ["export FROM_SETUP='a b'", "export PYTHONPATH=/nowhere"]
    config.components["actor"].launch_prefix = ["env", "FROM_PREFIX=c d"]
    code = REPORT.replace("NOTE", 'FROM_SETUP", "FROM_PREFIX') + DONE
    plan, job = start(tmp_path, code, config)
    assert merge_states(finish(job)) == "COMPLETED", batch_log(job)
    seen = json.loads((plan.path / "seen_1.json").read_text())
    assert (seen["FROM_SETUP"], seen["FROM_PREFIX"]) == ("a b", "c d")
    assert seen["code_first"] == f"{plan.run_dir}/code"


def test_variables_of_the_login_shell_do_not_move_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "h100")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SRUN_CPUS_PER_TASK", "99")
    plan, job = start(tmp_path, REPORT + DONE, three_components())
    assert merge_states(finish(job)) == "COMPLETED", batch_log(job)
    seen = json.loads((plan.path / "seen_0.json").read_text())
    assert seen["host"] == "n1"
    assert seen["num_ranks"] == 5
    assert "SBATCH_PARTITION=h100" in caplog.text


def test_the_example_written_by_hand_runs(tmp_path: Path) -> None:
    text = (ROOT / "sbatch" / "by_hand.sbatch").read_text()
    assert len(re.findall("(?m)^#SBATCH hetjob$", text)) == 1
    small = text.replace("--ntasks=16", "--ntasks=4").replace(
        "ntasks-per-node=8", "ntasks-per-node=2"
    )
    small = small.replace("--ntasks=8", "--ntasks=2").replace("100:8", "100:2")
    run_dir = tmp_path / "a run"
    package = run_dir / "code" / "rlhpc"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "worker.py").write_text(
        "import os, pathlib, sys\n"
        "print(sys.argv[1:], os.environ['SLURM_NTASKS'])\n"
        "os.environ['SLURM_PROCID'] != '0' or (pathlib.Path(sys.argv[1]) / 'DONE').touch()\n"
    )
    script = tmp_path / "mine.sbatch"
    script.write_text(small)
    said = subprocess.run(
        ["sbatch", "--parsable", f"--output={tmp_path}/out", str(script), str(run_dir)],
        capture_output=True,
        text=True,
        env=dict(os.environ, PYTHON=sys.executable),
    )
    states = wait_for_job(said.stdout.strip(), poll_s=0.3)
    assert merge_states(states) == "COMPLETED", (tmp_path / "out").read_text()
    logs = sorted((run_dir / "logs" / "latest").glob("rank_*.log"))
    assert [p.read_text() for p in logs] == [f"['{run_dir}'] 6\n"] * 6
