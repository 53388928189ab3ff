"""weights.names and weights.megatron: which boxes of a checkpoint a rank's parameters are."""

import pytest
import torch

from rlhpc.errors import LayoutError
from rlhpc.layout import box_size
from rlhpc.weights.base import WeightPart
from rlhpc.weights.megatron import MegatronLayout, megatron_weight_parts
from rlhpc.weights.names import Split, find_hf_names

LAYER = "decoder.layers.0."


def _layout(tp: int, rank: int, *, tied: bool = False, first_layer: int = 0) -> MegatronLayout:
    return MegatronLayout(
        architecture="Qwen2ForCausalLM",
        tied=tied,
        vocab_size=10,
        num_query_groups=4,
        head_size=2,
        tp=tp,
        tp_rank=rank,
        first_layer=first_layer,
    )


def _parts(name: str, data: torch.Tensor, layout: MegatronLayout) -> list[WeightPart]:
    return megatron_weight_parts([(name, data)], layout)


def test_layers_are_counted_over_the_whole_model() -> None:
    names, split = find_hf_names(
        "LlamaForCausalLM", "decoder.layers.1.mlp.linear_fc1.weight", first_layer=10
    )
    assert names == (
        "model.layers.11.mlp.gate_proj.weight",
        "model.layers.11.mlp.up_proj.weight",
    )
    assert split is Split.gate_up


def test_norms_inside_linear_layers_have_the_same_names() -> None:
    own = find_hf_names("LlamaForCausalLM", f"{LAYER}pre_mlp_layernorm.weight", first_layer=0)
    inside = find_hf_names(
        "LlamaForCausalLM", f"{LAYER}mlp.linear_fc1.layer_norm_weight", first_layer=0
    )
    assert own == inside


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(LayoutError, match=r"mlp\.router\.weight of LlamaForCausalLM has no"):
        find_hf_names("LlamaForCausalLM", f"{LAYER}mlp.router.weight", first_layer=0)


def test_query_groups_are_taken_apart() -> None:
    # 4 groups of 3 query heads, head size 2, on 2 ranks: a rank holds [q q q k v] twice.
    data = torch.arange(20 * 5.0).view(20, 5)
    parts = _parts(f"{LAYER}self_attention.linear_qkv.weight", data, _layout(2, 1))
    by_name = {(p.name.split(".")[-2], p.box[0]): p for p in parts}
    assert set(by_name) == {
        *(("q_proj", rows) for rows in ((12, 18), (18, 24))),
        *((name, rows) for name in ("k_proj", "v_proj") for rows in ((4, 6), (6, 8))),
    }
    assert torch.equal(by_name["k_proj", (6, 8)].view, data[16:18])
    assert by_name["q_proj", (12, 18)].shape == (24, 5)


def test_biases_are_taken_apart_like_weights() -> None:
    parts = _parts(f"{LAYER}self_attention.linear_qkv.bias", torch.zeros(40), _layout(1, 0))
    assert sum(p.view.numel() for p in parts) == 40
    assert {p.shape for p in parts} == {(24,), (8,)}


def test_vocabulary_padding_has_no_part() -> None:
    sizes = []
    for rank in range(4):  # 16 padded rows on 4 ranks: 4, 4, 2 and no real ones
        parts = _parts("output_layer.weight", torch.zeros(4, 5), _layout(4, rank))
        sizes.append(sum(box_size(p.box) for p in parts) // 5)
        assert all(p.name == "lm_head.weight" and p.shape == (10, 5) for p in parts)
    assert sizes == [4, 4, 2, 0]


def test_the_tied_copy_on_the_last_stage_has_no_part() -> None:
    assert _parts("output_layer.weight", torch.zeros(10, 5), _layout(1, 0, tied=True)) == []


def test_gate_and_up_and_rows_are_cut_over_ranks() -> None:
    gate, up = _parts(f"{LAYER}mlp.linear_fc1.weight", torch.zeros(6, 5), _layout(2, 1))
    assert (gate.box, up.box) == (((3, 6), (0, 5)), ((3, 6), (0, 5)))
    assert gate.view.data_ptr() != up.view.data_ptr()
    (down,) = _parts(f"{LAYER}mlp.linear_fc2.weight", torch.zeros(5, 3), _layout(2, 1))
    assert (down.box, down.shape) == (((0, 5), (3, 6)), (5, 6))


def test_views_write_into_the_parameter() -> None:
    parameter = torch.nn.Parameter(torch.zeros(40))
    for part in _parts(f"{LAYER}self_attention.linear_qkv.bias", parameter, _layout(1, 0)):
        part.view.fill_(1.0)
    assert bool((parameter == 1).all())
