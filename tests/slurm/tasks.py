"""What the tasks of tests run through Submitit; imported by the ranks, by reference."""

from __future__ import annotations

import os
from pathlib import Path

import rlhpc
from rlhpc.slurm.environ import RankEnvironment


def report(run_dir: str) -> tuple[int, str, str]:
    """Rank, node and package of this task; rank 0 says that the run is done."""
    rank = RankEnvironment.from_env(os.environ).rank
    if rank == 0:
        (Path(run_dir) / "DONE").touch()
    return rank, os.environ["SLURMD_NODENAME"], rlhpc.__file__


def fail_on_rank_3(run_dir: str) -> None:
    """Raise on one rank."""
    if RankEnvironment.from_env(os.environ).rank == 3:
        raise RuntimeError(f"broken in {run_dir}")
