from __future__ import annotations

import pytest

from rlhpc.config.schema import ComponentConfig
from rlhpc.errors import PlanError
from rlhpc.slurm.environ import RankEnvironment, clean_environment, rank_variables
from tests.jobs import three_components

TASK = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "12",
    "SLURMD_NODENAME": "n4",
}


def test_a_task_knows_its_rank() -> None:
    env = RankEnvironment.from_env(TASK)
    assert env == RankEnvironment(rank=3, num_ranks=5, local_rank=1, host="n4", job_id="12")


def test_ranks_of_a_second_step_are_moved_by_the_offset() -> None:
    env = RankEnvironment.from_env(TASK | {"RLHPC_RANK_OFFSET": "8", "RLHPC_NUM_RANKS": "16"})
    assert (env.rank, env.num_ranks) == (11, 16)


def test_a_process_that_is_no_task_is_told_so() -> None:
    with pytest.raises(PlanError, match=r"SLURM_LOCALID is not set; expected .* not by hand"):
        RankEnvironment.from_env({k: v for k, v in TASK.items() if k != "SLURM_LOCALID"})
    with pytest.raises(PlanError, match=r"not a number: .*'x'"):
        RankEnvironment.from_env(TASK | {"SLURM_PROCID": "x"})


def test_only_the_address_of_the_cluster_passes_to_a_new_job() -> None:
    env = {"HOME": "/h", "SLURM_CONF": "/c", "SBATCH_PARTITION": "p", "SRUN_X": "1", **TASK}
    env |= {"SLURM_CPU_BIND": "cores"}
    kept, dropped = clean_environment(env)
    assert kept == {"HOME": "/h", "SLURM_CONF": "/c"}
    assert dropped == ["SBATCH_PARTITION=p"]


def test_a_components_variables_win_over_the_clusters_and_the_switches() -> None:
    config = three_components()
    config.cluster.environment = {"A": "cluster", "WANDB_MODE": "online"}
    variables = rank_variables(config, ComponentConfig(environment={"A": "own"}))
    assert variables["A"] == "own"
    assert variables["WANDB_MODE"] == "online"
    assert variables["HF_HUB_OFFLINE"] == "1"
    config.cluster.offline = False
    assert "HF_HUB_OFFLINE" not in rank_variables(config, ComponentConfig())
