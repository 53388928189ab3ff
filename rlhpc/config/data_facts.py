"""What the login node knows of prompt files without reading them whole: counts, first rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhpc.config.load import file_list
from rlhpc.config.schema import DataConfig
from rlhpc.errors import ConfigError


def count_prompts(data: DataConfig) -> int:
    """Number of training prompts before any is dropped for its length.

    Raises:
        ConfigError: a file cannot be read.
    """
    if data.reasoning_gym is not None:
        return data.reasoning_gym.train_size
    return sum(count_rows(Path(p)) for p in file_list(data.train_files))


def count_rows(path: Path) -> int:
    """Rows of a parquet file (from its footer) or of a JSONL file (lines that are not blank).

    Raises:
        ConfigError: the file cannot be read.
    """
    if path.suffix == ".parquet":
        return int(_parquet(path).metadata.num_rows)
    try:
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError as e:
        raise ConfigError(f"data file {path} cannot be read: {e}; check data.train_files") from e


def first_row(path: Path) -> dict[str, Any] | None:
    """The first row of a parquet or JSONL file, None where the file has none.

    Raises:
        ConfigError: the file cannot be read or is malformed.
    """
    if path.suffix == ".parquet":
        rows = next(_parquet(path).iter_batches(batch_size=1), None)
        return rows.to_pylist()[0] if rows is not None and rows.num_rows else None
    try:
        with path.open(encoding="utf-8") as lines:
            line = next((line for line in lines if line.strip()), None)
        row = None if line is None else json.loads(line)
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"data file {path} cannot be read: {e}; it must hold one JSON object a line"
        ) from e
    if row is not None and not isinstance(row, dict):
        raise ConfigError(
            f"data file {path} starts with a {type(row).__name__}; "
            "it must hold one JSON object a line"
        )
    return row


def _parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet as pq  # 0.2 s, and only where a parquet file is named
    except ImportError as e:
        raise ConfigError(
            f"data file {path} needs pyarrow on the login node; pip install pyarrow"
        ) from e
    try:
        return pq.ParquetFile(path)
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"data file {path} cannot be read as parquet: {e}; check data.train_files"
        ) from e
