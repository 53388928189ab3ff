from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

DEVCLUSTER = Path(__file__).parents[2] / "launch" / "devcluster"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["status"], 3, "not installed"),
        (["start"], 3, "sinfo is not installed; run 'launch/devcluster install' as root"),
        (["install"], 3, "needs root and apt-get"),
        (["env"], 1, "there is no cluster in"),
        (["dance"], 2, "unknown command dance"),
        (["--size", "3", "start"], 2, "unknown option --size"),
        (["stop"], 0, ""),
    ],
)
def test_devcluster_says_what_is_missing(
    tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "id", "realpath", "sed", "cat", "env"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    # what a machine without Slurm and apt-get offers
    for name in ("slurmctld", "slurmd"):
        (programs / name).write_text("#!/bin/bash\n")
        (programs / name).chmod(0o755)
    result = subprocess.run(
        [str(DEVCLUSTER), "--dir", str(tmp_path / "cluster"), *arguments],
        capture_output=True,
        text=True,
        env={"PATH": str(programs)},
    )
    assert (result.returncode, message in result.stderr) == (code, True), result.stderr
    assert not (tmp_path / "cluster").exists()


def test_a_layout_that_is_none_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("shutil")
    result = subprocess.run(
        [str(DEVCLUSTER), "--dir", str(tmp_path / "c"), "--layout", "a100:2", "start"],
        capture_output=True,
        text=True,
    )
    assert result.returncode in (2, 3)
    assert "is not partition:nodes:gpus_per_node" in result.stderr or result.returncode == 3
