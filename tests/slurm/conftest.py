"""A real slurmctld for all tests of this folder, from launch/devcluster, in a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

DEVCLUSTER = Path(__file__).parents[2] / "launch" / "devcluster"
NOT_INSTALLED = 3


@pytest.fixture(scope="package")
def slurm() -> Iterator[Path]:
    """Folder of a running cluster of 2 nodes a100 and 2 nodes h100; this process uses it."""
    # not pytest's folder: Slurm's sockets need a path below 108 bytes
    folder = Path(tempfile.mkdtemp(prefix="rlhpc-slurm-"))
    command = [str(DEVCLUSTER), "--dir", str(folder), "--layout", "a100:2:4 h100:2:4"]
    before = os.environ.get("SLURM_CONF")
    try:
        started = subprocess.run([*command, "start"], capture_output=True, text=True)
        if started.returncode == NOT_INSTALLED:
            pytest.skip(started.stderr.strip())
        assert started.returncode == 0, started.stderr
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        yield folder
    finally:
        os.environ.pop("SLURM_CONF", None)
        if before is not None:
            os.environ["SLURM_CONF"] = before
        subprocess.run([*command, "wipe"], check=False)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _empty_queue(slurm: Path) -> Iterator[None]:
    """Each test leaves nothing behind."""
    assert slurm.exists()
    yield
    subprocess.run(["scancel", "-u", str(os.getuid())], check=False)
