"""rlhpc: reinforcement-learning post-training of language models as one heterogeneous Slurm job."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("rlhpc")
except PackageNotFoundError:  # run from a bare checkout or from a run folder's copy
    __version__ = "0.1.0+source"

__all__ = ["__version__"]
