"""RMSNorm and packed attention for Megatron's layer specs, without Transformer Engine.

They run on CPU and CUDA and repeat the arithmetic of the transformers library.

Shapes: S packed tokens, H query heads, G key-value heads, D head size (all of this tensor-parallel
rank).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhpc.training.megatron_imports import IdentityOp, MegatronModule

VarlenAttention = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]
"""(q [S, H, D], k and v [S, G, D], cu_seqlens, max_seqlen, scale) -> [S, H, D], causal in each
sequence.
"""


class RMSNorm(nn.Module):
    """Root mean square norm, Zhang and Sennrich 2019 (arXiv:1910.07467), computed in fp32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # Megatron sums the gradients of parameters with this mark over tp.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  new name

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last dim."""
        scaled = hidden.float()
        scaled = scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(hidden.dtype)


class PackedAttention(MegatronModule):
    """Causal core attention over sequences packed end to end."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,  # noqa: ARG002  Megatron passes these by name
        attention_type: Any,  # noqa: ARG002
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,  # noqa: ARG002  the packing is the mask
        *,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """[S, H, D], [S, G, D], [S, G, D] -> [S, H * D]."""
        assert packed_seq_params is not None, "attention is built for packed sequences only"
        attend = pick_attention(query.device, query.dtype)
        out = attend(
            query,
            key,
            value,
            packed_seq_params.cu_seqlens_q,
            packed_seq_params.max_seqlen_q,
            self.scale,
        )
        return out.flatten(1)


def pick_attention(device: torch.device, dtype: torch.dtype) -> VarlenAttention:
    """In half precision on CUDA flash-attn or torch's kernel, elsewhere one SDPA a sequence."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return attend_each_sequence
    return _flash_attention if importlib.util.find_spec("flash_attn") else _torch_varlen_attention


def attend_each_sequence(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, _max: int, scale: float
) -> Tensor:
    """Scaled dot-product attention, sequence by sequence."""
    repeats = query.size(1) // key.size(1)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    lengths = cu_seqlens.diff().tolist()
    outs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, length, D]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs)


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float
) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    return flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        softmax_scale=scale,
        causal=True,
    )


def _torch_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # the interface of torch 2.13

    out: Any = varlen_attn(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),  # causal
        enable_gqa=query.size(1) != key.size(1),
    )
    return out


def use_own_modules(block_spec: Any) -> None:
    """Put RMSNorm and PackedAttention into a block spec, in place."""
    for layer in block_spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = PackedAttention
        # Megatron sums the gradients of q and k norms over tp by their names.
        if attention.q_layernorm not in (None, IdentityOp):
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    block_spec.layer_norm = RMSNorm
