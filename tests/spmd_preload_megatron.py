"""Imported once by the fork server, so that no rank of a test spends seconds on imports."""

import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

import rlhpc.training.megatron  # noqa: F401
