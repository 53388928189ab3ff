"""Runs of the whole system for tests: submit in a subprocess, find its ranks, read what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Run:
    """A finished submit."""

    code: int
    output: str
    run_dir: Path
    seconds: float

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Records of metrics.jsonl."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Records of training steps."""
        return [m for m in self.metrics if "training/global_step" in m]

    @property
    def failure(self) -> dict[str, Any]:
        """failure.json."""
        return dict(json.loads((self.run_dir / "failure.json").read_text()))


def start_submit(
    *words: str, run_root: Path, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start `python -m rlhpc.submit`; ranks find modules of the tests, too."""
    return subprocess.Popen(
        [sys.executable, "-m", "rlhpc.submit", *words, f"run_root={run_root}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
    )


def submit(
    *words: str,
    run_root: Path,
    timeout_s: float = 300,
    during: Callable[[Path], None] | None = None,
    env: dict[str, str] | None = None,
) -> Run:
    """Submit and wait; ``during`` gets the run folder while it runs."""
    started = time.monotonic()
    process = start_submit(*words, run_root=run_root, env=env)
    try:
        if during is not None:
            wait_until(lambda: (run_root / "latest").exists(), 30)
            during((run_root / "latest").resolve())
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    latest = run_root / "latest"
    run_dir = latest.resolve() if latest.exists() else Path("no run folder")
    return Run(process.returncode, output, run_dir, time.monotonic() - started)


def wait_until(ready: Callable[[], bool], timeout_s: float) -> None:
    """Poll until ``ready``."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"not ready after {timeout_s} s"
        time.sleep(0.05)


def console_has(run_dir: Path, text: str) -> Callable[[], bool]:
    """Whether the run's console shows ``text``."""
    console = run_dir / "console.log"
    return lambda: console.exists() and text in console.read_text()


def rank_pid(run_dir: Path, rank: int) -> int:
    """Process id of a rank of the run that is going on."""
    wanted = {f"RLHPC_RUN_DIR={run_dir}", f"SLURM_PROCID={rank}"}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = set((folder / "environ").read_bytes().decode(errors="replace").split("\0"))
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if wanted <= environ and (
            b"rlhpc.worker" in command or b"submitit.core._submit" in command
        ):
            return int(folder.name)
    raise AssertionError(f"rank {rank} of {run_dir} is not running")


def leftovers(run_dir: Path) -> list[str]:
    """Command lines of processes that still belong to the run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"RLHPC_RUN_DIR={run_dir}\0".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return [line for line in found if line]


def tiny_grpo(model: Path, *more: str) -> list[str]:
    """Words of a short GRPO run of the tiny model on three local ranks."""
    return [
        "experiment=quickstart",
        f"model.path={model}",
        f"data.train_files={model}/train.jsonl",
        f"data.val_files={model}/val.jsonl",
        "data.val_max_prompts=16",
        "data.train_batch_size=8",
        "algorithm.group_size=4",
        "algorithm.mini_batch_size=4",
        "trainer.total_training_steps=2",
        "reward.function=tests.e2e.rewards.compute_score",
        *more,
    ]
