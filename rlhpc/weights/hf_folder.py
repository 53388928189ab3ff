"""Read slices of a Hugging Face folder and write one from the weight parts of a role's ranks.

Only safetensors: one file, or shards with an index.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhpc.errors import ConfigError, LayoutError
from rlhpc.layout import Box, box_size, relative_slices
from rlhpc.weights.base import WeightPart

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
)


class WeightReader:
    """Slices of a folder's tensors; files are opened once and mapped, not read whole."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}
        index, single = self.folder / INDEX_FILE, self.folder / SINGLE_FILE
        if index.is_file():
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif single.is_file():
            self._file_of = dict.fromkeys(self._handle(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise ConfigError(
                f"model.path: {folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; "
                "expected a Hugging Face folder with safetensors. Convert the weights or set "
                "another path"
            )

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(str(self.folder / file), framework="pt", device="cpu")
        return self._open[file]

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return sorted(self._file_of)

    def read(self, part: WeightPart) -> Tensor:
        """The box of ``part``, on host, in the checkpoint's dtype.

        Raises:
            LayoutError: the folder has no such tensor or has it in another shape.
        """
        file = self._file_of.get(part.name)
        if file is None:
            raise LayoutError(
                f"{self.folder} has no tensor {part.name}; expected shape {part.shape}. "
                "config.json and the weights do not belong together: check model.path"
            )
        tensor = self._handle(file).get_slice(part.name)
        if tuple(tensor.get_shape()) != part.shape:
            raise LayoutError(
                f"{part.name} in {self.folder} has shape {tuple(tensor.get_shape())}; "
                f"expected {part.shape}. config.json and the weights do not belong together: "
                "check model.path"
            )
        return tensor[tuple(slice(start, stop) for start, stop in part.box)]

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.clear()


def load_weight_parts(folder: str | Path, parts: Iterable[WeightPart]) -> None:
    """Fill the views of ``parts`` from ``folder``, reading these boxes only.  Local."""
    with WeightReader(folder) as reader, torch.no_grad():
        for part in parts:
            part.view.copy_(reader.read(part))


def save_weight_parts(
    folder: Path,
    parts: Sequence[WeightPart],
    *,
    model_path: str | Path,
    tokenizer_path: str | Path | None = None,
) -> None:
    """Write a Hugging Face folder on rank 0.  Collective over the default world.

    Rank 0 holds one shard (5 GB) at a time in host memory; each box comes from the lowest rank that
    has it.

    Args:
        folder: made if missing; files of the same names are replaced.
        parts: this rank's; those of all ranks must make up every tensor.
        model_path: folder whose config.json and generation_config.json are taken.
        tokenizer_path: folder whose tokenizer files are taken; None means ``model_path``.
    """
    rank = dist.get_rank()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [(p.name, p.shape, p.box) for p in parts])
    owners = _find_owners(gathered)
    dtype = parts[0].view.dtype if parts else torch.float32
    mine = {(p.name, p.box): p.view for p in parts}
    shards = _plan_shards({name: shape for name, (shape, _) in owners.items()}, dtype.itemsize)
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        copy_model_files(folder, model_path, tokenizer_path or model_path, dtype)
        _write_index(folder, shards, owners, dtype.itemsize)
    for file, names in shards.items():
        tensors = {}
        for name in names:
            shape, boxes = owners[name]
            whole = torch.empty(shape, dtype=dtype) if rank == 0 else None
            for box, owner in boxes.items():
                _move_box(whole, box, owner, mine.get((name, box)))
            if whole is not None:
                tensors[name] = whole
        if rank == 0:
            save_file(tensors, str(folder / file), metadata={"format": "pt"})
    dist.barrier()


Owners = dict[str, tuple[tuple[int, ...], dict[Box, int]]]
"""Tensor name -> shape and the rank that sends each box."""


def _find_owners(gathered: Sequence[Sequence[tuple[str, tuple[int, ...], Box]]]) -> Owners:
    """The lowest rank of each box; raises LayoutError when boxes do not add up to a tensor."""
    owners: Owners = {}
    for rank, parts in enumerate(gathered):
        for name, shape, box in parts:
            owners.setdefault(name, (shape, {}))[1].setdefault(box, rank)
    for name, (shape, boxes) in owners.items():
        covered = sum(box_size(box) for box in boxes)
        if covered != prod(shape):
            raise LayoutError(
                f"the ranks hold {covered} elements of {name}; expected {prod(shape)}, each once"
            )
    return owners


def _move_box(whole: Tensor | None, box: Box, owner: int, view: Tensor | None) -> None:
    """Bring one box into ``whole`` on rank 0.  Called by every rank."""
    rank = dist.get_rank()
    if rank == owner and rank != 0:
        assert view is not None, "the owner has the box"
        dist.send(view.contiguous(), dst=0)
    if whole is None:
        return
    if owner != 0:
        extents = [stop - start for start, stop in box]
        view = torch.empty(extents, dtype=whole.dtype, device=_communication_device())
        dist.recv(view, src=owner)
    assert view is not None, "received or owned"
    whole[relative_slices(box, tuple((0, size) for size in whole.shape))] = view.cpu()


def _communication_device() -> torch.device:
    """Where the default world's backend takes tensors."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key: layer 10 after layer 9."""
    runs = ("".join(run) for _, run in groupby(name, str.isdigit))
    return [(0, int(run)) if run.isdigit() else (1, run) for run in runs]


def _plan_shards(shapes: dict[str, tuple[int, ...]], itemsize: int) -> dict[str, list[str]]:
    """File name -> tensors in natural order, at most `MAX_SHARD_BYTES` or one tensor each."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in sorted(shapes, key=_natural):
        num_bytes = prod(shapes[name]) * itemsize
        if groups[-1] and size + num_bytes > MAX_SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {
        f"model-{i:05d}-of-{len(groups):05d}.safetensors": names
        for i, names in enumerate(groups, 1)
    }


def _write_index(folder: Path, shards: dict[str, list[str]], owners: Owners, itemsize: int) -> None:
    """The index of shards, or none for a single file."""
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    if list(shards) == [SINGLE_FILE]:
        return
    total = sum(prod(shape) for shape, _ in owners.values()) * itemsize
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def copy_model_files(
    folder: Path, model_path: str | Path, tokenizer_path: str | Path, dtype: torch.dtype
) -> None:
    """Copy config.json (with ``dtype``), generation config and tokenizer, where they exist."""
    config = json.loads((Path(model_path) / "config.json").read_text())
    config.pop("torch_dtype", None)  # the name before transformers 4.56
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for source in (Path(model_path) / "generation_config.json", *_tokenizer_files(tokenizer_path)):
        if source.is_file():
            shutil.copyfile(source, folder / source.name)


def _tokenizer_files(path: str | Path) -> Iterator[Path]:
    for pattern in TOKENIZER_FILES:
        yield from sorted(Path(path).glob(pattern))
