"""What a run leaves in its folder for whoever waits: DONE, the first failure, console.log.

Ranks write these files; the launchers (job script, `local`, `submit --follow`) read them.  Only
DONE says that the target was reached: srun and ranks can return 0 for a run that did nothing.

    DONE                   written by rank 0 at the very end
    failure.json           the first cause, written by rank 0's controller, or by `local` if a
                           signal ended it
    failures/<rank>.json   written by each rank that fails by itself, same keys
    console.log            progress for people, written by rank 0

Usage, by the job script: python -m rlhpc.outcome RUN_DIR LOG_DIR
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path


def is_done(run_dir: Path) -> bool:
    """Whether the run reached its target."""
    return (run_dir / "DONE").exists()


def clear_outcome(run_dir: Path) -> None:
    """Forget the outcome of an earlier attempt in ``run_dir``."""
    (run_dir / "DONE").unlink(missing_ok=True)
    (run_dir / "failure.json").unlink(missing_ok=True)
    shutil.rmtree(run_dir / "failures", ignore_errors=True)


def write_failure(run_dir: Path, message: str) -> None:
    """Make ``message`` the first cause; nobody sees half a file."""
    partial = run_dir / "failure.json.launcher"
    partial.write_text(json.dumps({"message": message}))
    partial.replace(run_dir / "failure.json")


def failure_message(run_dir: Path, log_dir: Path, *, otherwise: str = "the run ended early") -> str:
    """Why the run in ``run_dir`` did not reach its target, in a sentence or with a traceback.

    Without the controller's word the earliest of the ranks' own counts: later ones are mostly
    victims.  ``otherwise`` is what the launcher saw itself, told where no rank left a word.
    """
    candidates = sorted((run_dir / "failures").glob("*.json"), key=lambda p: p.stat().st_mtime_ns)
    for path in [run_dir / "failure.json", *candidates]:
        message = _read_message(path)
        if message:
            return message
    return f"{otherwise}, without DONE and without a word of why; see the logs in {log_dir}"


def _read_message(path: Path) -> str:
    """The message of ``path``, or its raw text if a dying rank left half a file; else empty."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return ""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()


class FileFollower:
    """Reads what is appended to a file that may not exist yet; re-opens it each time, for NFS."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        """Start at the file's beginning, or at its present end."""
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read_new(self) -> str:
        """Whole lines appended since the last call; empty if there are none."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return ""
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        return data.decode(errors="replace")


if __name__ == "__main__":
    print(failure_message(Path(sys.argv[1]), Path(sys.argv[2])))
