"""Sizes of a model from its `config.json`, read as JSON: the login node never loads transformers.

Parameter counts are closed forms of the dense Llama and Qwen families.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.errors import ConfigError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures that every engine serves."""

ROPE_TYPES = ("default", "linear", "llama3")
"""Rotary embeddings that every engine serves."""

_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class ModelFacts:
    """What checks and memory estimates need to know of a model."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tied: bool
    """Input and output embeddings are one tensor."""
    qkv_bias: bool
    qk_norm: bool
    unsupported: tuple[str, ...] = ()
    """Settings of config.json that no engine serves, with their value."""

    @property
    def embedding_params(self) -> int:
        """Parameters of one embedding matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def layer_params(self) -> int:
        """Parameters of one layer."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q + 2 * kv)
        bias = q + 2 * kv if self.qkv_bias else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        return attention + bias + norms + 3 * self.hidden_size * self.intermediate_size

    @property
    def num_params(self) -> int:
        """Parameters of the whole model."""
        embeddings = self.embedding_params * (1 if self.tied else 2)
        return embeddings + self.num_layers * self.layer_params + self.hidden_size


def read_model_facts(folder: Path) -> ModelFacts:
    """Read `config.json` of a Hugging Face folder.

    Raises:
        ConfigError: it is missing, malformed or lacks a size.
    """
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read: {e}") from e
    architecture = str((data.get("architectures") or ["none"])[0])
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture {architecture} of {path} is not served")
    missing = [k for k in _REQUIRED if not isinstance(data.get(k), int)]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}")
    return _facts(architecture, data)


def _facts(architecture: str, data: dict[str, Any]) -> ModelFacts:
    heads = data["num_attention_heads"]
    qwen3 = architecture == "Qwen3ForCausalLM"
    unsupported = []
    if data.get("hidden_act", "silu") != "silu":
        unsupported.append(f"hidden_act={data['hidden_act']}")
    flags = ["use_sliding_window", "mlp_bias"]
    if architecture != "Qwen2ForCausalLM":  # where it means q, k and v only
        flags.append("attention_bias")
    for flag in flags:
        if data.get(flag):
            unsupported.append(f"{flag}=true")
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        unsupported.append(f"rope_type={rope_type}")
    if data.get("quantization_config"):
        unsupported.append("quantization_config")
    return ModelFacts(
        architecture=architecture,
        num_layers=data["num_hidden_layers"],
        hidden_size=data["hidden_size"],
        num_heads=heads,
        num_kv_heads=data.get("num_key_value_heads") or heads,
        head_dim=data.get("head_dim") or (128 if qwen3 else data["hidden_size"] // heads),
        intermediate_size=data["intermediate_size"],
        vocab_size=data["vocab_size"],
        max_position_embeddings=data["max_position_embeddings"],
        tied=bool(data.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=qwen3,
        unsupported=tuple(unsupported),
    )
