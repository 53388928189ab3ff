"""Weight parts of a vLLM model shard: fused and padded parameters as boxes of checkpoint tensors.

Covers the Llama, Qwen2 and Qwen3 dense families under tensor parallelism.  Pure: vLLM itself is not
imported.

vLLM's rows on one tp rank: qkv_proj = [q heads | k heads | v heads] (kv heads replicated where tp
exceeds them), gate_up_proj = [gate | up]; o_proj and down_proj are split by columns; the vocabulary
is split after padding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlhpc.errors import LayoutError
from rlhpc.weights.base import WeightPart

_WHOLE = re.compile(
    r"model\.norm\.weight"
    r"|model\.layers\.\d+\.(input_layernorm|post_attention_layernorm)\.weight"
    r"|model\.layers\.\d+\.self_attn\.(q_norm|k_norm)\.weight"
    r"|model\.layers\.\d+\.(self_attn\.o_proj|mlp\.down_proj)\.bias"
)
_COLUMNS = re.compile(r"model\.layers\.\d+\.(self_attn\.o_proj|mlp\.down_proj)\.weight")
_VOCABULARY = re.compile(r"(model\.embed_tokens|lm_head)\.(weight|bias)")
_QKV = re.compile(r"(model\.layers\.\d+\.self_attn\.)qkv_proj\.(weight|bias)")
_GATE_UP = re.compile(r"(model\.layers\.\d+\.mlp\.)gate_up_proj\.(weight|bias)")
_PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Shard:
    tp: int
    tp_rank: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def vllm_weight_parts(
    model: nn.Module, *, tp: int, tp_rank: int, hf_config: Any
) -> list[WeightPart]:
    """Every weight of the shard as views of its storage; a tied `lm_head` is not listed.

    Args:
        model: vLLM's model on this rank.
        tp: tensor-parallel size.
        tp_rank: this rank in it.
        hf_config: the checkpoint's (text) config.

    Raises:
        LayoutError: a parameter is packed, quantised, unknown, or not of the extents that the
        config gives.
    """
    heads = hf_config.num_attention_heads
    shard = _Shard(
        tp=tp,
        tp_rank=tp_rank,
        vocab_size=hf_config.vocab_size,
        num_heads=heads,
        num_kv_heads=getattr(hf_config, "num_key_value_heads", None) or heads,
        head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
    )
    parts: list[WeightPart] = []
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0 or parameter.dtype not in _PLAIN_DTYPES:
            raise LayoutError(
                f"parameter {name} has {parameter.numel()} elements of {parameter.dtype}; expected "
                "plain fp32, bf16 or fp16: packed or quantised weights cannot be written in place. "
                "Set model.path to a checkpoint that is not quantised"
            )
        parts += _parts_of(name, parameter.data, shard)
    return parts


def _parts_of(name: str, data: Tensor, shard: _Shard) -> Iterator[WeightPart]:
    if _WHOLE.fullmatch(name):
        yield _part(name, data, dim=0, start=0, size=data.shape[0])
    elif _COLUMNS.fullmatch(name):
        columns = data.shape[1]
        yield _part(name, data, dim=1, start=shard.tp_rank * columns, size=shard.tp * columns)
    elif _VOCABULARY.fullmatch(name):
        start = shard.tp_rank * data.shape[0]
        rows = min(data.shape[0], shard.vocab_size - start)
        if rows > 0:  # a rank may hold padding only
            yield _part(name, data[:rows], dim=0, start=start, size=shard.vocab_size)
    elif match := _QKV.fullmatch(name):
        yield from _qkv_parts(match[1], match[2], data, shard)
    elif match := _GATE_UP.fullmatch(name):
        for projection, half in zip(("gate_proj", "up_proj"), data.chunk(2), strict=True):
            extent = half.shape[0]
            full = f"{match[1]}{projection}.{match[2]}"
            yield _part(full, half, dim=0, start=shard.tp_rank * extent, size=shard.tp * extent)
    else:
        raise LayoutError(
            f"vLLM parameter {name} {tuple(data.shape)} is not known; expected those of the "
            "Llama, Qwen2 or Qwen3 dense families. Change model.path"
        )


def _qkv_parts(prefix: str, kind: str, data: Tensor, shard: _Shard) -> Iterator[WeightPart]:
    # With more ranks than kv heads, neighbouring ranks hold the same kv head.
    kv_heads = max(1, shard.num_kv_heads // shard.tp)
    kv_index = shard.tp_rank // max(1, shard.tp // shard.num_kv_heads)
    row = 0
    for projection, heads, index, total in (
        ("q_proj", shard.num_heads // shard.tp, shard.tp_rank, shard.num_heads),
        ("k_proj", kv_heads, kv_index, shard.num_kv_heads),
        ("v_proj", kv_heads, kv_index, shard.num_kv_heads),
    ):
        rows = heads * shard.head_dim
        view = data[row : row + rows]
        name = f"{prefix}{projection}.{kind}"
        yield _part(name, view, dim=0, start=index * rows, size=total * shard.head_dim)
        row += rows
    if row != data.shape[0]:
        raise LayoutError(
            f"{prefix}qkv_proj.{kind} has {data.shape[0]} rows on tp rank {shard.tp_rank} of "
            f"{shard.tp}; expected {row} from the config's heads. Set tp to a divisor of "
            f"num_attention_heads={shard.num_heads}"
        )


def _part(name: str, view: Tensor, *, dim: int, start: int, size: int) -> WeightPart:
    """``view`` as the slice from ``start`` of a tensor that has ``size`` along ``dim``."""
    shape = list(view.shape)
    box: list[tuple[int, int]] = [(0, extent) for extent in shape]
    box[dim] = (start, start + shape[dim])
    shape[dim] = size
    return WeightPart(name, tuple(shape), tuple(box), view)
