"""Checks of paths: model, tokenizer, data, reward function, run folder.

Reads headers and first rows only, and imports nothing of the user's.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from rlhpc.config.check_run import stages_or_none
from rlhpc.config.data_facts import count_prompts, file_list, first_row
from rlhpc.config.engines import RoleKind
from rlhpc.config.model_facts import ARCHITECTURES, read_model_facts
from rlhpc.config.schema import Device, Launcher, RunConfig
from rlhpc.errors import ConfigError, Problem

_HUB_NAME = re.compile(r"(?!models/)[\w.-]+(/[\w.-]+)?")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_OWN_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")


def check_files(config: RunConfig) -> Iterator[Problem]:
    """Everything that the run reads."""
    if config.model.path:  # else reported as missing
        yield from _check_model(config)
        yield from _check_tokenizer(config)
    if config.data.reasoning_gym is None:
        yield from _check_data_files(config)
    yield from _check_batch(config)
    if any(r.kind is RoleKind.reward for r in config.roles.values()):
        yield from _check_function("reward.function", config.reward.function)


def _missing_folder(key: str, path: str) -> Problem:
    if _HUB_NAME.fullmatch(path) and not Path(path).parent.is_dir():
        return Problem(
            key,
            f"{path!r} is no folder here and looks like a hub name",
            "a local folder: compute nodes are offline",
            f"Download it first: hf download {path} --local-dir DIR, then set {key}=DIR.",
        )
    return Problem(
        key,
        f"folder {path!r} does not exist",
        "a Hugging Face folder",
        f"Set {key}, or make a small model with launch/make-model.",
    )


def _check_model(config: RunConfig) -> Iterator[Problem]:
    folder = Path(config.model.path)
    if not folder.is_dir():
        yield _missing_folder("model.path", config.model.path)
        return
    try:
        read_model_facts(folder)
    except ConfigError as e:
        yield Problem(
            "model.path",
            str(e),
            f"a config.json of {', '.join(ARCHITECTURES)}",
            "Set model.path to the folder of such a model.",
        )
    index = folder / "model.safetensors.index.json"
    wanted = {"model.safetensors"}
    if index.is_file():
        try:
            wanted = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as e:
            yield Problem("model.path", f"{index} is broken: {e}", "an index", "Download it again.")
            return
    missing = sorted(name for name in wanted if not (folder / name).is_file())
    if missing:
        yield Problem(
            "model.path",
            f"{folder} lacks {', '.join(missing[:3])}{' and more' if missing[3:] else ''}",
            "weights as safetensors",
            "Download the weights, or save the model with save_pretrained.",
        )


def _check_tokenizer(config: RunConfig) -> Iterator[Problem]:
    key = "model.path" if config.model.tokenizer_path is None else "model.tokenizer_path"
    path = config.model.tokenizer_path or config.model.path
    folder = Path(path)
    if not folder.is_dir():
        if config.model.tokenizer_path is not None:
            yield _missing_folder(key, path)
        return
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield Problem(
            key,
            f"{folder} holds no tokenizer",
            f"one of {', '.join(_TOKENIZER_FILES)}",
            "Copy the tokenizer's files there, or set model.tokenizer_path.",
        )
    elif config.data.chat_template and not _has_chat_template(folder):
        yield Problem(
            "data.chat_template",
            f"the tokenizer in {folder} has no chat template",
            "a chat template, or false",
            "Set data.chat_template=false to use prompts as they are, or use an instruct model.",
        )


def _has_chat_template(folder: Path) -> bool:
    if any((folder / n).is_file() for n in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return bool(_read_json(folder / "tokenizer_config.json").get("chat_template"))
    except (OSError, ValueError):
        return False


def _read_json(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text(encoding="utf-8"))
    return data if isinstance(data, dict) else {}


def _check_data_files(config: RunConfig) -> Iterator[Problem]:
    d = config.data
    stages = stages_or_none(config) or ()
    supervised = any(s.method == "load_rows" for s in stages)
    for key, paths in (("data.train_files", d.train_files), ("data.val_files", d.val_files)):
        for path in map(Path, file_list(paths)):
            if not path.is_file():
                yield Problem(key, f"file {str(path)!r} does not exist", "a file", f"Set {key}.")
            elif path.suffix not in (".parquet", ".jsonl"):
                yield Problem(
                    key, f"{path.name} ends in {path.suffix!r}", ".parquet or .jsonl", "Convert it."
                )
            else:
                yield from _check_columns(config, key, path, supervised=supervised)


def _check_batch(config: RunConfig) -> Iterator[Problem]:
    """A batch that the prompts can fill."""
    try:
        prompts = count_prompts(config.data)
    except ConfigError:
        return  # reported at the file
    wanted = config.data.train_batch_size
    if 0 < prompts < wanted:
        yield Problem(
            "data.train_batch_size",
            f"train_batch_size={wanted}, but there are {prompts} training prompts",
            f"at most {prompts}",
            f"Set data.train_batch_size={prompts} or less, or give more prompts.",
        )


def _check_columns(
    config: RunConfig, key: str, path: Path, *, supervised: bool
) -> Iterator[Problem]:
    d = config.data
    try:
        row = first_row(path)
    except ConfigError as e:
        yield Problem(key, str(e), "a readable file", f"Repair it or change {key}.")
        return
    if row is None:
        yield Problem(key, f"{path} has no rows", "at least one", f"Change {key}.")
        return
    names = ", ".join(row)
    wanted = [("data.prompt_key", d.prompt_key)]
    if supervised:
        wanted.append(("data.response_key", d.response_key))
    elif "answer" not in row or path.suffix == ".parquet":
        wanted.append(("data.answer_key", d.answer_key))
    for column_key, column in wanted:
        if not _has(row, column):
            yield Problem(
                column_key,
                f"{path.name} has no column {column!r}",
                f"one of its columns: {names}",
                f"Set {column_key}, or choose other files for {key}.",
            )


def _has(row: Any, dotted: str) -> bool:
    for part in dotted.split("."):
        if not isinstance(row, dict) or row.get(part) is None:
            return False
        row = row[part]
    return True


def find_module(name: str) -> ModuleSpec | None:
    """Spec of module ``name`` without importing it or its parents; None if not found."""
    path = None
    spec = None
    for i in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:i])
        found = (finder.find_spec(part, path) for finder in sys.meta_path)
        spec = next((s for s in found if s is not None), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


def _check_function(key: str, dotted: str) -> Iterator[Problem]:
    """The module exists and has the name; found by reading, for it may import torch."""
    module, _, name = dotted.rpartition(".")
    spec = find_module(module) if module else None
    expected = "the dotted path of a function, package.module.function"
    if spec is None:
        yield Problem(
            key,
            f"module {module or dotted!r} is not found",
            expected,
            "Fix the path, or run from the folder that holds the module.",
        )
        return
    if spec.origin is None or not spec.origin.endswith(".py"):
        return  # compiled: the ranks will tell
    try:
        names = _top_level_names(Path(spec.origin))
    except (OSError, SyntaxError) as e:
        yield Problem(key, f"{spec.origin} cannot be read: {e}", expected, "Repair the module.")
        return
    if names is not None and name not in names:
        public = ", ".join(sorted(n for n in names if not n.startswith("_"))) or "nothing"
        yield Problem(key, f"module {module} has no {name!r}", f"one of {public}", f"Fix {key}.")


def _top_level_names(path: Path) -> set[str] | None:
    """Names that the module binds, also under if, try and with; None where only running it tells.

    That is so with `from x import *` and with a `__getattr__` of the module.
    """
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(a.asname or a.name.split(".")[0] for a in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif not isinstance(node, _OWN_SCOPES):
            waiting += ast.iter_child_nodes(node)
    return None if names & {"*", "__getattr__"} else names


def is_node_local(path: Path) -> bool:
    """True for folders that only this machine sees, by their usual names."""
    return any(path.is_relative_to(root) for root in _NODE_LOCAL)


def check_run_root(config: RunConfig) -> Iterator[Problem]:
    """The run folder can be written and, for a GPU job, is not local to this machine.

    Rehearsals on CPU (launch/devcluster) only get a warning: their nodes are often this machine.
    """
    root = Path(config.run_root).absolute()
    there = next((p for p in (root, *root.parents) if p.exists()), root)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as e:
        yield Problem(
            "run_root",
            f"{root} cannot be written: {e.strerror or e}",
            "a folder that you can write and that all nodes see",
            "Set run_root=PATH.",
        )
    remote = config.cluster.launcher is Launcher.slurm and config.cluster.device is Device.cuda
    if remote and is_node_local(root):
        yield Problem(
            "run_root",
            f"{root} is local to this machine, and other nodes do not see it",
            "a folder on a shared file system",
            "Set run_root=PATH, for example under your home or scratch.",
        )
