"""The one door to megatron-core: every name that rlhpc uses, after the CPU stand-ins are in place.

No other module imports megatron.  Tested with megatron-core 0.16.1.
"""

from __future__ import annotations

import warnings

from rlhpc.training import cpu

cpu.install()  # first: megatron looks at torch.cuda while it is imported

# What Megatron and torch tell each other, not the user.
for _message in (
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    *(("When using sequence parallelism it is recommended",) if cpu.is_installed() else ()),
):
    warnings.filterwarnings("ignore", message=_message)

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.optimizer_param_scheduler import (
        OptimizerParamScheduler,
        get_canonical_lr_for_logging,
    )
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.module import Float16Module, MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "Float16Module",
    "GPTModel",
    "IdentityOp",
    "MegatronModule",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "PackedSeqParams",
    "TransformerConfig",
    "clip_grad_by_total_norm_fp32",
    "finalize_model_grads",
    "get_canonical_lr_for_logging",
    "get_forward_backward_func",
    "get_gpt_decoder_block_spec",
    "get_megatron_optimizer",
    "get_transformer_layer_offset",
    "model_parallel_cuda_manual_seed",
    "parallel_state",
]
