"""The real Slurm of tests/slurm, for whole runs."""

from tests.slurm.conftest import slurm

__all__ = ["slurm"]
