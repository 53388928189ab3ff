"""Rows of prompt files as plain dictionaries that know where they came from.

Reads JSONL, parquet and reasoning-gym; knows nothing of columns' meaning or tokens.  Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.config.schema import DataConfig, ReasoningGymConfig
from rlhpc.data.rows import stable_hash
from rlhpc.errors import ConfigError


@dataclass
class Problems:
    """What is wrong with rows, by message: the places (file, line) where it was seen."""

    places: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    def add(self, file: str, line: int, what: str) -> None:
        """Note ``what`` at ``file``:``line``."""
        self.places.setdefault(what, {}).setdefault(file, []).append(line)

    def raise_all(self) -> None:
        """Raise one ConfigError that names every place; return when there is none."""
        if not self.places:
            return
        count = len({(f, n) for at in self.places.values() for f, ns in at.items() for n in ns})
        lines = [
            f"  {file}:{_ranges(numbers)}: {what}"
            for what, at in self.places.items()
            for file, numbers in at.items()
        ]
        raise ConfigError(
            f"{count} broken rows in the data; expected rows that name prompt and answer "
            "(keys data.prompt_key, data.answer_key). Mend the lines or the keys:\n"
            + "\n".join(lines)
        )


def _ranges(numbers: Sequence[int]) -> str:
    """`3, 5-9` for the rising ``numbers`` 3 5 6 7 8 9."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@dataclass(frozen=True)
class RawRow:
    """A row as it was read."""

    file: str
    line: int
    """From 1; the row's number in a parquet file."""
    values: dict[str, Any]


def prompt_files(config: DataConfig, split: str) -> list[str]:
    """Paths of the files of ``split``."""
    value = config.train_files if split == "train" else config.val_files
    if value is None:
        return []
    return [value] if isinstance(value, str) else [str(v) for v in value]


def read_rows(config: DataConfig, *, split: str, seed: int, problems: Problems) -> Iterator[RawRow]:
    """The rows of ``split``; lines that are no objects are noted in ``problems``."""
    if config.reasoning_gym is not None:
        yield from _read_reasoning_gym(config.reasoning_gym, config, split=split, seed=seed)
        return
    for file in prompt_files(config, split):
        if not Path(file).is_file():
            raise ConfigError(
                f"data.{split}_files: {file!r} is not a file; expected a .jsonl or "
                ".parquet file. "
                f"Set data.{split}_files to files that every node sees."
            )
        if file.endswith(".jsonl"):
            yield from _read_jsonl(file, problems)
        elif file.endswith(".parquet"):
            yield from _read_parquet(file, config)
        else:
            raise ConfigError(
                f"data.{split}_files: {file!r} has an unknown ending; expected .jsonl or "
                ".parquet. "
                "Convert it, or rename it if it is one of them."
            )


def _read_jsonl(file: str, problems: Problems) -> Iterator[RawRow]:
    with open(file, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except ValueError as error:  # also bytes that are no UTF-8
                problems.add(file, number, f"not JSON ({error})")
                continue
            if isinstance(values, dict):
                yield RawRow(file, number, values)
            else:
                problems.add(
                    file, number, f"is of JSON type {type_name(values)}; expected an object"
                )


def _read_parquet(file: str, config: DataConfig) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    keys = (config.prompt_key, config.answer_key, config.response_key, "data_source", "extra_info")
    try:
        parquet = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigError(
            f"data: {file!r} cannot be read as parquet ({error}); expected a parquet file. "
            "Make the file again or take it out of the list."
        ) from error
    names = {k.split(".")[0] for k in keys} & set(parquet.schema_arrow.names)
    number = 0
    for batch in parquet.iter_batches(columns=sorted(names)):
        for values in batch.to_pylist():
            number += 1
            yield RawRow(file, number, {k: v for k, v in values.items() if v is not None})


def _read_reasoning_gym(
    task: ReasoningGymConfig, config: DataConfig, *, split: str, seed: int
) -> Iterator[RawRow]:
    import reasoning_gym

    size = task.train_size if split == "train" else task.val_size
    data_seed = stable_hash("reasoning_gym", seed, split) % 2**31
    arguments = {**task.options, "size": size, "seed": data_seed}
    try:
        dataset = reasoning_gym.create_dataset(task.task, **arguments)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"data.reasoning_gym: task={task.task!r} with options {task.options} cannot be made "
            f"({error}); "
            "expected a task of reasoning-gym and options of its config. "
            "Set data.reasoning_gym.task and .options."
        ) from error
    for index in range(size):
        entry = dataset[index]
        recipe = {"task": task.task, "options": arguments, "index": index}
        values: dict[str, Any] = {"data_source": task.task, "extra_info": recipe}
        values[config.prompt_key] = entry["question"]
        # Some tasks have many right answers and name none; their scorer needs none.
        values["answer"] = "" if entry["answer"] is None else str(entry["answer"])
        yield RawRow(f"reasoning_gym/{task.task}", index + 1, values)


def type_name(value: Any) -> str:
    """What a user calls the type of ``value``."""
    names = {dict: "object", list: "list", str: "string", bool: "bool", type(None): "null"}
    return names.get(type(value), type(value).__name__)


MISSING = object()


def descend(values: dict[str, Any], key: str) -> Any:
    """The value at dotted ``key``, or `MISSING` where a part of it is absent or null."""
    here: Any = values
    for part in key.split("."):
        if not isinstance(here, dict) or here.get(part) is None:
            return MISSING
        here = here[part]
    return here
