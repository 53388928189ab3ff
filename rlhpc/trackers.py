"""Where metrics go: the console log, metrics.jsonl, TensorBoard, Weights & Biases.

Used by the reporter's thread only.  Missing packages are found when a tracker is made, before the
first step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from rlhpc.config.schema import RunConfig
from rlhpc.errors import ConfigError


class Tracker(Protocol):
    """A place where metrics go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of ``step``."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class ConsoleLog:
    """`console.log`: the lines that the launcher shows."""

    def __init__(self, run_dir: Path, config: RunConfig) -> None:  # noqa: ARG002
        self._file = open(run_dir / "console.log", "a", encoding="utf-8")  # noqa: SIM115

    def lines(self, lines: Sequence[tuple[str, str]]) -> None:
        """Write (prefix, text) pairs as `[prefix] text`, the prefix on every line of a text."""
        for prefix, text in lines:
            head = f"[{prefix}]"
            self._file.writelines(f"{head:<11} {part}\n" for part in text.splitlines())
        self._file.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing: the reporter writes lines."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class FileTracker:
    """`metrics.jsonl`: an object a step, with `step` and unix `time`; null for NaN and inf."""

    def __init__(self, run_dir: Path, config: RunConfig) -> None:  # noqa: ARG002
        self._file = open(run_dir / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        values = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        json.dump({"step": step, "time": round(time.time(), 3), **values}, self._file)
        self._file.write("\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardTracker:
    """Event files in `tensorboard/` of the run folder."""

    def __init__(self, run_dir: Path, config: RunConfig) -> None:  # noqa: ARG002
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard", "tensorboard") from error
        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write scalars."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbTracker:
    """Weights & Biases; offline unless `cluster.offline` is false or WANDB_MODE says otherwise."""

    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb", "wandb") from error
        os.environ.setdefault("WANDB_MODE", "offline" if config.cluster.offline else "online")
        self._run = wandb.init(
            project=config.trainer.project_name,
            name=run_dir.name,
            dir=str(run_dir),
            config=_plain(dataclasses.asdict(config)),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log under ``step``; an evaluation joins the training metrics of its step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, RunConfig], Tracker]] = {
    "console": ConsoleLog,
    "file": FileTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}
"""By the name in `trainer.logger`."""


def make_trackers(run_dir: Path, config: RunConfig) -> list[Tracker]:
    """The trackers that `trainer.logger` names, in its order.

    Raises:
        ConfigError: a name is unknown or its package is missing.
    """
    if unknown := [name for name in config.trainer.logger if name not in TRACKERS]:
        raise ConfigError(
            f"trainer.logger: unknown {unknown}; expected some of {sorted(TRACKERS)}. "
            "Take the others out of trainer.logger."
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    return [TRACKERS[name](run_dir, config) for name in dict.fromkeys(config.trainer.logger)]


def _missing(tracker: str, package: str) -> ConfigError:
    return ConfigError(
        f"trainer.logger: {tracker} needs the package {package}, which is not installed; "
        "expected it on rank 0. "
        f"Install it (pip install {package}) or take {tracker} out of trainer.logger."
    )


def _plain(value: Any) -> Any:
    """Dataclasses' values as JSON knows them."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
