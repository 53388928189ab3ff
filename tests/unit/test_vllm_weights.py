from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhpc.errors import LayoutError
from rlhpc.weights.base import WeightPart
from rlhpc.weights.vllm import vllm_weight_parts

CONFIG = SimpleNamespace(
    vocab_size=70, hidden_size=32, num_attention_heads=8, num_key_value_heads=2, head_dim=4
)


class Shard(nn.Module):
    """Parameters of one tp rank, by vLLM's names."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes

    def named_parameters(self, *_: object, **__: object) -> object:
        return [(name, nn.Parameter(torch.zeros(shape))) for name, shape in self.shapes.items()]


def parts_of(tp: int, tp_rank: int, **more: tuple[int, ...]) -> dict[str, WeightPart]:
    layer = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (128 // tp, 32),
        f"{layer}self_attn.qkv_proj.weight": ((8 // tp + 2 * max(1, 2 // tp)) * 4, 32),
        f"{layer}self_attn.qkv_proj.bias": ((8 // tp + 2 * max(1, 2 // tp)) * 4,),
        f"{layer}self_attn.o_proj.weight": (32, 32 // tp),
        f"{layer}mlp.gate_up_proj.weight": (2 * 48 // tp, 32),
        f"{layer}mlp.down_proj.weight": (32, 48 // tp),
        f"{layer}input_layernorm.weight": (32,),
    }
    shard = Shard(shapes | {name.replace("__", "."): shape for name, shape in more.items()})
    parts = vllm_weight_parts(shard, tp=tp, tp_rank=tp_rank, hf_config=CONFIG)
    return {part.name: part for part in parts}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_shards_cover_every_weight_and_repeat_only_norms_and_kv_heads(tp: int) -> None:
    ranks = [parts_of(tp, r) for r in range(tp)]
    names = {name for parts in ranks for name in parts}
    assert len(names) == 12
    for name in names:
        count = torch.zeros(next(p[name].shape for p in ranks if name in p), dtype=torch.int64)
        for parts in ranks:
            if name in parts:
                part = parts[name]
                assert tuple(b - a for a, b in part.box) == part.view.shape
                count[tuple(slice(*extent) for extent in part.box)] += 1
        copies = {"layernorm": tp, "k_proj": max(1, tp // 2), "v_proj": max(1, tp // 2)}
        assert set(count.flatten().tolist()) == {
            next((n for key, n in copies.items() if key in name), 1)
        }


def test_padding_of_the_vocabulary_is_no_part() -> None:
    assert parts_of(2, 1)["model.embed_tokens.weight"].box == ((64, 70), (0, 32))
    assert "model.embed_tokens.weight" not in parts_of(4, 3)


def test_neighbouring_ranks_share_a_kv_head() -> None:
    boxes = [parts_of(4, r)["model.layers.0.self_attn.v_proj.bias"].box for r in range(4)]
    assert boxes == [((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),)]


def test_packed_unknown_and_ragged_parameters_are_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"model\.norm\.weight has 0 elements"):
        parts_of(1, 0, model__norm__weight=(0,))
    with pytest.raises(LayoutError, match=r"model\.layers\.0\.mlp\.experts\.w13 .* is not known"):
        parts_of(1, 0, model__layers__0__mlp__experts__w13=(2, 2))
    with pytest.raises(LayoutError, match=r"qkv_proj\.bias has 50 rows on tp rank 0 of 1"):
        parts_of(1, 0, model__layers__1__self_attn__qkv_proj__bias=(50,))
