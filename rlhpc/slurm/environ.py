"""The environment of ranks: the only reader of SLURM_* and RLHPC_*, and what a rank is given.

In a step over several components most SLURM_* variables mislead: the node list and the tasks per
node are sorted unions, the CPUs per task are the last component's, and none tells a task its
component.  Only those read here are used; the component of a rank follows from the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhpc.config.schema import ComponentConfig, RunConfig
from rlhpc.errors import PlanError

_FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "SLURMD_")
_KEPT = "SLURM_CONF"
"""Where the cluster's config is: an address, not a setting of a job."""

_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "WANDB_MODE": "offline",
}


@dataclass(frozen=True)
class RankEnvironment:
    """Who this process is in the job step."""

    rank: int
    """Global rank over all components, in component order."""
    num_ranks: int
    local_rank: int
    """Index among the ranks of its node."""
    host: str
    """The node's name as Slurm knows it."""
    job_id: str
    """The id of the whole job, the same on all ranks."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> RankEnvironment:
        """Read the variables of a task.

        Raises:
            PlanError: a variable is missing or not a number, so this is no rank of a job.
        """
        try:
            return cls(
                rank=int(env.get("RLHPC_RANK_OFFSET") or 0) + int(env["SLURM_PROCID"]),
                num_ranks=int(env.get("RLHPC_NUM_RANKS") or env["SLURM_NTASKS"]),
                local_rank=int(env["SLURM_LOCALID"]),
                host=env["SLURMD_NODENAME"],
                job_id=env["SLURM_JOB_ID"],
            )
        except KeyError as error:
            raise PlanError(
                f"{error.args[0]} is not set; expected the variables of a Slurm task. "
                "Ranks are started by the job script or by `cluster=local`, not by hand"
            ) from None
        except ValueError as error:
            raise PlanError(f"a rank variable is not a number: {error}") from None


def clean_environment(env: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """``env`` without what an enclosing job or a profile would impose on a new job.

    Returns:
        The environment for sbatch or for local ranks, and the `NAME=value` of each SBATCH_*
        dropped: those outrank the lines of a job script, so that whoever set one should be told
        that it has no effect.
    """
    kept = {k: v for k, v in env.items() if k == _KEPT or not k.startswith(_FOREIGN)}
    dropped = [f"{k}={v}" for k, v in sorted(env.items()) if k.startswith("SBATCH_")]
    return kept, dropped


def rank_variables(config: RunConfig, component: ComponentConfig) -> dict[str, str]:
    """What ranks of ``component`` get; later ones win: offline switches, cluster's, its own."""
    switches = _OFFLINE if config.cluster.offline else {}
    return {**switches, **config.cluster.environment, **component.environment}
