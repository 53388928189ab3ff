"""weights.hf_folder: slices of a folder, and its shards."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlhpc.errors import ConfigError, LayoutError
from rlhpc.weights import hf_folder
from rlhpc.weights.base import WeightPart
from rlhpc.weights.hf_folder import WeightReader, load_weight_parts

WEIGHT = torch.arange(12.0).view(4, 3)


def _part(name: str = "a", shape: tuple[int, ...] = (4, 3)) -> WeightPart:
    return WeightPart(name, shape, ((1, 3), (0, 2)), torch.zeros(2, 2))


def test_a_box_of_a_shard_fills_a_view(tmp_path: Path) -> None:
    save_file({"a": WEIGHT}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": WEIGHT}, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / hf_folder.INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    part = _part("b")
    load_weight_parts(tmp_path, [part])
    assert torch.equal(part.view, WEIGHT[1:3, :2])
    with WeightReader(tmp_path) as reader:
        assert reader.names == ["a", "b"]


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has neither model\.safetensors nor"):
        WeightReader(tmp_path)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (_part("missing"), r"has no tensor missing; expected shape \(4, 3\)"),
        (_part(shape=(4, 5)), r"a in .* has shape \(4, 3\); expected \(4, 5\)"),
    ],
)
def test_weights_of_another_model_are_refused(
    tmp_path: Path, part: WeightPart, message: str
) -> None:
    save_file({"a": WEIGHT}, tmp_path / hf_folder.SINGLE_FILE)
    with WeightReader(tmp_path) as reader, pytest.raises(LayoutError, match=message):
        reader.read(part)


def test_shards_follow_the_layers_and_keep_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_folder, "MAX_SHARD_BYTES", 100)
    shapes = {f"layers.{i}.w": (3, 4) for i in (10, 9, 2)} | {"big": (10, 10)}
    shards = hf_folder._plan_shards(shapes, 4)
    assert list(shards.values()) == [["big"], ["layers.2.w", "layers.9.w"], ["layers.10.w"]]
    assert next(iter(shards)) == "model-00001-of-00003.safetensors"


def test_a_tensor_that_no_rank_holds_whole_is_named() -> None:
    half = [("a", (4, 3), ((0, 2), (0, 3)))]
    with pytest.raises(LayoutError, match=r"hold 6 elements of a; expected 12, each once"):
        hf_folder._find_owners([half, half])
