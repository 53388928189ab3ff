"""Megatron's optimizer and schedule from `OptimConfig`; a step refuses what is not finite."""

from __future__ import annotations

import math
from typing import Any

import torch

from rlhpc.config.engines import MegatronOptions
from rlhpc.config.schema import LrSchedule, OptimConfig
from rlhpc.errors import CommandError
from rlhpc.training.megatron_imports import (
    OptimizerConfig,
    OptimizerParamScheduler,
    clip_grad_by_total_norm_fp32,
    get_canonical_lr_for_logging,
    get_megatron_optimizer,
)


class StepOptimizer:
    """AdamW over a DDP-wrapped model, with Transformer Engine's, Apex's or torch's kernel."""

    def __init__(
        self,
        model: Any,
        config: OptimConfig,
        *,
        options: MegatronOptions,
        dtype: torch.dtype,
        total_updates: int,
    ) -> None:
        min_lr = config.lr * config.min_lr_ratio
        if config.lr_schedule is LrSchedule.constant:
            min_lr = config.lr
        self.clip_grad = config.clip_grad
        self.num_updates = 0
        self.megatron = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=config.clip_grad,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=options.distributed_optimizer,
            ),
            [model],
            use_gloo_process_groups=False,
        )
        # Also exempts norms and biases from weight decay: the optimizer alone would decay them.
        self._schedule = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0 if config.lr_warmup_steps else config.lr,
            max_lr=config.lr,
            min_lr=min_lr,
            lr_warmup_steps=config.lr_warmup_steps,
            lr_decay_steps=max(total_updates, config.lr_warmup_steps + 1),
            lr_decay_style=config.lr_schedule.value,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return float(get_canonical_lr_for_logging(self.megatron.param_groups) or 0.0)

    def zero_grad(self) -> None:
        """Forget gradients outside the DDP buffers."""
        self.megatron.zero_grad()

    def reload_weights(self) -> None:
        """Take weights that were written from outside into the fp32 copies."""
        self.megatron.reload_model_params()

    def step(self) -> float:
        """Clip and apply the gradients; the norm before clipping.  Collective over the role.

        Raises:
            CommandError: the norm is not finite; weights and optimizer state stay as they were.
        """
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            raise CommandError(
                f"grad_norm={norm} at update {self.num_updates + 1}; expected a finite number; "
                "the weights were not changed. Lower roles.<role>.optim.lr or look for extreme "
                "advantages or log-probs"
            )
        if self.clip_grad > 0:
            for part in self.megatron.chained_optimizers:
                clip_grad_by_total_norm_fp32(part.get_parameters(), self.clip_grad, norm)
        self.megatron.step_with_ready_grads()
        self._schedule.step(increment=1)
        self.num_updates += 1
        return norm
