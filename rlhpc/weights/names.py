"""Hugging Face names of Megatron's parameters, one table an architecture.  Pure text; no tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from rlhpc.errors import LayoutError


class Split(Enum):
    """How a Megatron parameter holds its checkpoint tensors, and how it is cut over tp."""

    replicated = "replicated"
    """One tensor, whole on every rank."""
    vocab = "vocab"
    """One tensor, cut along dim 0 after padding."""
    row = "row"
    """One tensor, cut along dim 1."""
    qkv = "qkv"
    """q, k and v, interleaved by query group along dim 0, cut between groups."""
    gate_up = "gate_up"
    """gate and up, each cut along dim 0, one after the other on each rank."""


@dataclass(frozen=True)
class NameRule:
    """One Megatron parameter and its checkpoint tensors; `{layer}` is the layer's index, from 0."""

    megatron: str
    hf: tuple[str, ...]
    split: Split


_LAYER, _HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."


def _qkv(kind: str) -> NameRule:
    names = tuple(f"{_HF_LAYER}self_attn.{x}_proj.{kind}" for x in "qkv")
    return NameRule(f"{_LAYER}self_attention.linear_qkv.{kind}", names, Split.qkv)


def _layer(megatron: str, hf: str, split: Split = Split.replicated) -> NameRule:
    return NameRule(_LAYER + megatron, (_HF_LAYER + hf,), split)


_LLAMA = (
    NameRule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Split.vocab),
    _layer("input_layernorm.weight", "input_layernorm.weight"),
    _qkv("weight"),
    _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", Split.row),
    _layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    NameRule(
        f"{_LAYER}mlp.linear_fc1.weight",
        (f"{_HF_LAYER}mlp.gate_proj.weight", f"{_HF_LAYER}mlp.up_proj.weight"),
        Split.gate_up,
    ),
    _layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", Split.row),
    NameRule("decoder.final_layernorm.weight", ("model.norm.weight",), Split.replicated),
    NameRule("output_layer.weight", ("lm_head.weight",), Split.vocab),
    # Transformer Engine keeps a norm inside the linear layer that follows it.
    _layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    _layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
)

ARCHITECTURES: dict[str, tuple[NameRule, ...]] = {
    "LlamaForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": (*_LLAMA, _qkv("bias")),
    "Qwen3ForCausalLM": (
        *_LLAMA,
        _layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
        _layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    ),
}
"""Rules by the name in `architectures` of config.json."""


def find_hf_names(
    architecture: str, parameter: str, *, first_layer: int
) -> tuple[tuple[str, ...], Split]:
    """Checkpoint names of a Megatron parameter.

    Args:
        architecture: a key of `ARCHITECTURES`.
        parameter: Megatron's name, layers counted from 0 inside the pipeline stage.
        first_layer: index of the stage's first layer in the whole model.

    Raises:
        LayoutError: the table has no such parameter.
    """
    local = re.search(r"\.layers\.(\d+)\.", parameter)
    layer = int(local[1]) if local else 0
    for rule in ARCHITECTURES[architecture]:
        if rule.megatron.format(layer=layer) == parameter:
            return tuple(n.format(layer=layer + first_layer) for n in rule.hf), rule.split
    raise LayoutError(
        f"parameter {parameter} of {architecture} has no Hugging Face name; "
        "expected a dense model. Add a rule to rlhpc.weights.names.ARCHITECTURES"
    )
