"""A failing rank ends the run within seconds, the first cause is named, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from tests.e2e.runs import console_has, leftovers, rank_pid, submit, tiny_grpo, wait_until

SECONDS_TO_END = 20.0
"""From the fault to the end of the launcher; seconds on a quiet machine."""


def assert_blames(run, *, rank, role, stage, cause):
    assert run.code != 0, run.output
    assert run.failure["rank"] == rank
    assert run.failure["role"].startswith(role)
    assert run.failure["stage"] == stage
    assert cause in run.failure["cause"]
    assert f"rank {rank} ({role}" in run.output
    assert cause in run.output
    assert not (run.run_dir / "DONE").exists()
    assert leftovers(run.run_dir) == []


@pytest.mark.parametrize(
    ("fault", "stage", "cause"),
    [
        ("build", "build rollout", "ValueError: the engine cannot be built"),
        ("raise", "generate", "ValueError: the engine broke at its second step"),
        ("exit", "generate", "the process vanished without a word"),
    ],
)
def test_a_fault_of_an_engine_is_the_headline(tiny_qwen2, tmp_path, fault, stage, cause):
    run = submit(
        *tiny_grpo(tiny_qwen2, "roles.rollout.engine=tests.e2e.faulty.FAULTY_HF"),
        run_root=tmp_path,
        env={"FAULT": fault},
    )
    assert_blames(run, rank=2, role="rollout dp0 tp0 pp0", stage=stage, cause=cause)
    if fault != "exit":
        assert "faulty_engine.py" in run.failure["traceback"]


@pytest.mark.slurm
def test_a_fault_in_a_heterogeneous_job_ends_all_its_components(slurm, tiny_qwen2, tmp_path):
    assert slurm.exists()
    words = tiny_grpo(
        tiny_qwen2,
        "cluster=devcluster",
        "--wait",
        "components.train={partition: a100, gpus_per_node: 2, tasks_per_node: null}",
        "components.rollout={partition: h100, gpus_per_node: 1, tasks_per_node: null}",
        "roles.rollout.engine=tests.e2e.faulty.FAULTY_HF",
        "cluster.environment.FAULT=raise",
    )
    run = submit(*words, run_root=tmp_path)
    cause = "ValueError: the engine broke at its second step"
    assert_blames(run, rank=2, role="rollout dp0 tp0 pp0", stage="generate", cause=cause)
    assert "FAILED" in run.output
    batch_log = next((run.run_dir / "logs").glob("*_batch.out")).read_text()
    assert cause in batch_log
    assert subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout == ""


def test_a_killed_rank_is_named_and_its_victims_are_not(tiny_qwen2, tmp_path):
    killed_at = []

    def kill(run_dir):
        wait_until(console_has(run_dir, "/500 ["), 120)
        os.kill(rank_pid(run_dir, 1), signal.SIGKILL)
        killed_at.append(time.monotonic())

    words = tiny_grpo(tiny_qwen2, "trainer.total_training_steps=500")
    run = submit(*words, run_root=tmp_path, during=kill)
    assert time.monotonic() - killed_at[0] < SECONDS_TO_END
    assert run.code != 0
    assert run.failure["rank"] == 1
    assert "vanished" in run.failure["cause"]
    assert "rank 1 (actor dp1 tp0 pp0)" in run.output
    assert leftovers(run.run_dir) == []


def test_a_terminated_rank_says_so(tiny_qwen2, tmp_path):
    def terminate(run_dir):
        wait_until(console_has(run_dir, "/500 ["), 120)
        os.kill(rank_pid(run_dir, 2), signal.SIGTERM)

    words = tiny_grpo(tiny_qwen2, "trainer.total_training_steps=500")
    run = submit(*words, run_root=tmp_path, during=terminate)
    assert run.code != 0
    assert run.failure["rank"] == 2
    assert "signal SIGTERM" in run.failure["cause"]


def test_a_disk_that_is_full_ends_the_run_with_a_word(tiny_qwen2, tmp_path):
    """metrics.jsonl is a link to a device that is always full."""

    def fill(run_dir):
        (run_dir / "metrics.jsonl").symlink_to("/dev/full")

    run = submit(*tiny_grpo(tiny_qwen2), run_root=tmp_path, during=fill)
    assert run.code != 0
    assert "metrics cannot be written" in run.output
    assert "No space left on device" in run.output
    assert leftovers(run.run_dir) == []


def test_losing_rank_0_ends_the_run(tiny_qwen2, tmp_path):
    def kill(run_dir):
        wait_until(console_has(run_dir, "/500 ["), 120)
        os.kill(rank_pid(run_dir, 0), signal.SIGKILL)

    words = tiny_grpo(tiny_qwen2, "trainer.total_training_steps=500")
    run = submit(*words, run_root=tmp_path, during=kill)
    assert run.code != 0
    assert "rank 0" in run.output
    assert leftovers(run.run_dir) == []
