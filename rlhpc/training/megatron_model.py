"""A Megatron GPT model from a Hugging Face config: Llama, Qwen2 and Qwen3, dense.

Weights are not loaded here; see `weights.megatron`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhpc.config.engines import MegatronOptions, Recompute
from rlhpc.config.model_facts import ROPE_TYPES
from rlhpc.errors import ConfigError, Problem
from rlhpc.plan import RolePlan
from rlhpc.training.megatron_imports import (
    GPTModel,
    TransformerConfig,
    get_gpt_decoder_block_spec,
    parallel_state,
)
from rlhpc.training.megatron_modules import use_own_modules
from rlhpc.weights.names import ARCHITECTURES

"""Rotary embeddings whose frequencies do not depend on the sequence length and that do not scale
attention.
"""


def load_hf_config(model_path: str, role: RolePlan) -> Any:
    """The transformers config of ``model_path``.

    Raises:
        ConfigError: the model or its cut over ``role``'s axes is not served; all problems at once.
    """
    from transformers import AutoConfig  # seconds to import

    if not (Path(model_path) / "config.json").is_file():
        raise ConfigError(
            str(
                Problem(
                    "model.path",
                    f"{model_path} has no config.json",
                    "a Hugging Face folder that every node sees",
                    "Set model.path to such a folder",
                )
            )
        )
    config = AutoConfig.from_pretrained(model_path)
    problems = [*_model_problems(config), *_axis_problems(config, role)]
    if problems:
        raise ConfigError("\n".join(str(p) for p in problems))
    return config


def _model_problems(config: Any) -> list[Problem]:
    """What of the model is not served."""
    rope_type = config.rope_parameters.get("rope_type", "default")
    wrong = {
        f"architecture {config.architectures}": not set(config.architectures or ())
        <= set(ARCHITECTURES)
        or not config.architectures,
        f"hidden_act={config.hidden_act}": config.hidden_act != "silu",
        f"rope_type={rope_type}": rope_type not in ROPE_TYPES,
        "attention_bias=true": config.model_type != "qwen2"
        and getattr(config, "attention_bias", False),
        "mlp_bias=true": getattr(config, "mlp_bias", False),
        "use_sliding_window=true": getattr(config, "use_sliding_window", False),
    }
    expected = (
        f"one of {sorted(ARCHITECTURES)} with silu, rope_type in {ROPE_TYPES}, "
        "no other biases, full attention"
    )
    return [
        Problem("model.path", f"config.json has {what}", expected, "Choose another model")
        for what, is_wrong in wrong.items()
        if is_wrong
    ]


def _axis_problems(config: Any, role: RolePlan) -> list[Problem]:
    """What does not divide."""
    problems = []
    for axis, field in (
        ("tp", "num_attention_heads"),
        ("tp", "num_key_value_heads"),
        ("tp", "intermediate_size"),
        ("pp", "num_hidden_layers"),
    ):
        size, count = getattr(role, axis), getattr(config, field)
        if count % size:
            problems.append(
                Problem(
                    f"roles.{role.name}.{axis}",
                    f"{axis}={size} does not divide {field}={count}",
                    f"a divisor of {count}",
                    f"Set roles.{role.name}.{axis} to one",
                )
            )
    return problems


def head_size(config: Any) -> int:
    """Elements of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def padded_vocab_size(vocab_size: int, *, multiple: int) -> int:
    """The next multiple."""
    return -(-vocab_size // multiple) * multiple


def _leave_empty(_: Tensor) -> None:
    """Initialise nothing: weights come from a checkpoint.

    Megatron's own switch for this would also drop the marks of tensor-parallel parameters, and with
    them a right gradient norm.
    """


def uses_transformer_engine(device: torch.device, dtype: torch.dtype) -> bool:
    """Transformer Engine is here, with kernels for packed sequences on this device and dtype."""
    half_on_gpu = device.type == "cuda" and dtype == torch.bfloat16
    return half_on_gpu and importlib.util.find_spec("transformer_engine") is not None


def make_transformer_config(
    config: Any, *, role: RolePlan, options: MegatronOptions, dtype: torch.dtype, fused: bool
) -> Any:
    """Megatron's config of the same network; ``fused`` takes Transformer Engine's kernels."""
    recompute: dict[str, Any] = {}
    mode = Recompute(options.recompute)  # options of a config file are text
    if mode is Recompute.full:
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif mode is Recompute.selective:
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        ffn_hidden_size=config.intermediate_size,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=config.model_type == "qwen3",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method=_leave_empty,
        output_layer_init_method=_leave_empty,
        tensor_model_parallel_size=role.tp,
        pipeline_model_parallel_size=role.pp,
        sequence_parallel=options.sequence_parallel and role.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Packed micro-batches differ in length; Megatron then insists on this dispatcher, also
        # without experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # The loss function normalises; Megatron adds up and divides by nothing.
        calculate_per_token_loss=True,
        apply_rope_fusion=fused,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        **recompute,
    )


def build_model(config: Any, transformer: Any, *, vocab_multiple: int, fused: bool) -> Any:
    """This rank's part of the model, weights not set.  `parallel_state` must be initialised."""
    spec = get_gpt_decoder_block_spec(
        transformer, use_transformer_engine=fused, normalization="RMSNorm"
    )
    if not fused:
        use_own_modules(spec)
    rope = config.rope_parameters
    model = GPTModel(
        transformer,
        spec,
        vocab_size=padded_vocab_size(config.vocab_size, multiple=vocab_multiple),
        max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        parallel_output=True,
    )
    if rope.get("rope_type", "default") != "default":
        _set_rope_frequencies(model, config)
    return model


def _set_rope_frequencies(model: Any, config: Any) -> None:
    """Take the frequencies from transformers: Megatron fixes what the model's config sets."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    compute = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]]
    frequencies, attention_scale = compute(config, "cpu")
    assert attention_scale == 1.0, "ROPE_TYPES has only types that leave attention unscaled"
    model.rotary_pos_emb.inv_freq = frequencies.to(model.rotary_pos_emb.inv_freq.device)
