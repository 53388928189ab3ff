"""The `megatron` engine: tensor, pipeline and data parallel training and scoring.

It implements `training.base.TrainEngine`.  The model comes from `megatron_model`, attention from
`megatron_modules`, the optimizer from `megatron_optim`, weights from `weights.megatron`; without
CUDA, `training.cpu` stands in.

A call packs this replica's rows into micro-batches under a token budget and runs Megatron's
pipeline schedule over them.  Megatron divides by nothing: a loss is already normalised and
gradients are plain sums.  Replicas may have different numbers of micro-batches, because nothing is
exchanged between them before the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhpc.algorithms.logprobs import vocab_parallel_logprobs
from rlhpc.config.engines import MegatronOptions
from rlhpc.config.schema import OptimConfig
from rlhpc.data.batch import Batch
from rlhpc.data.packing import pack_rows, pack_tokens
from rlhpc.errors import CommandError
from rlhpc.plan import RolePlan
from rlhpc.training import cpu
from rlhpc.training.base import LossFn
from rlhpc.training.megatron_imports import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    Float16Module,
    PackedSeqParams,
    finalize_model_grads,
    get_forward_backward_func,
    get_transformer_layer_offset,
    model_parallel_cuda_manual_seed,
    parallel_state,
)
from rlhpc.training.megatron_model import (
    build_model,
    head_size,
    load_hf_config,
    make_transformer_config,
    uses_transformer_engine,
)
from rlhpc.training.megatron_optim import StepOptimizer
from rlhpc.weights.base import WeightPart
from rlhpc.weights.hf_folder import load_weight_parts, save_weight_parts
from rlhpc.weights.megatron import MegatronLayout, megatron_weight_parts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Finish = Callable[[Batch, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, logprobs [T], entropy [T]) -> (loss, what to keep)."""


class MegatronEngine:
    """See `training.base.TrainEngine`.  Built inside an active world of the role's ranks."""

    @cpu.as_cuda()
    def __init__(
        self,
        *,
        model_path: str,
        role: RolePlan,
        rank: int,
        options: MegatronOptions,
        dtype: str,
        device: torch.device,
        optim: OptimConfig | None,
        total_updates: int,
        seed: int,
        tokenizer_path: str | None,
    ) -> None:
        """Build the model and load this rank's weights.  Collective over the role.

        Args:
            model_path: Hugging Face folder.
            role: its axes and ranks; the torch default world must be its ranks in mesh order.
            rank: global rank of this process.
            options: engine options.
            dtype: `fp32` or `bf16`.
            device: where the model lives.
            optim: optimizer; None builds a model that only scores.
            total_updates: updates of the whole run, for the learning rate's course.
            seed: seed of Megatron's RNG states.
            tokenizer_path: folder whose tokenizer `save_hf` copies; None means ``model_path``.

        Raises:
            ConfigError: the model or its cut over the axes is not served.
            CommandError: the process cannot host this engine.
        """
        self._check_device(device)
        self._role, self._options, self._device = role, options, device
        self._model_path, self._tokenizer_path = model_path, tokenizer_path
        self._dtype = DTYPES[dtype]
        self._hf_config = load_hf_config(model_path, role)
        _join_mesh(role, rank, seed)
        self._build(trained=optim is not None)
        self._parts = self._make_parts()
        load_weight_parts(model_path, self._parts)
        self._optimizer: StepOptimizer | None = None
        self._refresh_tied_copy()
        if optim is not None:
            self._optimizer = StepOptimizer(
                self._model,
                optim,
                options=options,
                dtype=self._dtype,
                total_updates=total_updates,
            )

    @staticmethod
    def _check_device(device: torch.device) -> None:
        if device.type == "cpu" and torch.cuda.is_available():
            raise CommandError(
                "cluster.device=cpu in a process that sees CUDA devices, on which Megatron would "
                "put its tensors; expected none. Set CUDA_VISIBLE_DEVICES to the empty string in "
                "cluster.environment"
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def _build(self, *, trained: bool) -> None:
        """Set `_core`, the bare GPT model, and `_model`, wrapped for its dtype and training."""
        fused = uses_transformer_engine(self._device, self._dtype)
        config = make_transformer_config(
            self._hf_config,
            role=self._role,
            options=self._options,
            dtype=self._dtype,
            fused=fused,
        )
        config.finalize_model_grads_func = _sum_gradients
        multiple = self._options.vocab_size_multiple * self._role.tp
        self._core: Any = build_model(self._hf_config, config, vocab_multiple=multiple, fused=fused)
        if self._core.pre_process:
            self._core.embedding.word_embeddings.weight.data.zero_()  # rows of vocabulary padding
        self._config = config
        self._align = self._role.tp if config.sequence_parallel else 1
        self._model: Any = self._core
        if self._dtype != torch.float32:
            self._model = Float16Module(config, self._model)
        if trained:
            ddp = DistributedDataParallelConfig(
                grad_reduce_in_fp32=self._options.grad_reduce_in_fp32,
                use_distributed_optimizer=self._options.distributed_optimizer,
            )
            self._model = DistributedDataParallel(config, ddp, self._model)
        else:
            self._model.requires_grad_(False)

    def _make_parts(self) -> list[WeightPart]:
        """After wrapping, which moves the weights into its own buffers."""
        layout = MegatronLayout(
            architecture=self._hf_config.architectures[0],
            tied=self._hf_config.tie_word_embeddings,
            vocab_size=self._hf_config.vocab_size,
            num_query_groups=self._hf_config.num_key_value_heads,
            head_size=head_size(self._hf_config),
            tp=self._role.tp,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            first_layer=get_transformer_layer_offset(self._config),
        )
        return megatron_weight_parts(self._core.named_parameters(), layout)

    @cpu.as_cuda()
    def compute_logprobs(self, batch: Batch, *, temperature: float) -> dict[str, Tensor] | None:
        """See `TrainEngine.compute_logprobs`."""
        micro_batches = self._split(batch)

        def keep(_: Batch, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return logprobs.sum(), {"logprobs": logprobs.cpu(), "entropy": entropy.cpu()}

        self._model.eval()
        with torch.no_grad():
            kept = self._run(batch, micro_batches, keep, temperature=temperature, train=False)
        if not self._core.post_process:
            return None
        return {
            name: _in_row_order(batch, micro_batches, [values[name] for values in kept])
            for name in ("logprobs", "entropy")
        }

    @cpu.as_cuda()
    def update(self, batch: Batch, loss_fn: LossFn, *, temperature: float) -> dict[str, float]:
        """See `TrainEngine.update`.

        Raises:
            CommandError: loss or gradient norm is not finite; the weights stay as they were.
        """
        if self._optimizer is None:
            raise CommandError(
                f"role {self._role.name} has no optimizer and cannot be updated; "
                f"expected roles.{self._role.name}.optim to be set"
            )

        def compute_loss(
            rows: Batch, logprobs: Tensor, entropy: Tensor
        ) -> tuple[Tensor, dict[str, Tensor]]:
            loss, metrics = loss_fn(rows, logprobs, entropy)
            kept = {"loss": loss, **metrics}
            return loss, {name: value.detach() for name, value in kept.items()}

        self._model.train()
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        kept = self._run(
            batch, self._split(batch), compute_loss, temperature=temperature, train=True
        )
        metrics = self._sum_over_role(kept)
        if not math.isfinite(metrics["loss"]):
            raise CommandError(
                f"loss={metrics['loss']} at update {self._optimizer.num_updates + 1}; expected a "
                "finite number; the weights were not changed. Look for extreme advantages or "
                "log-probs in this batch"
            )
        lr = self._optimizer.lr
        return {**metrics, "grad_norm": self._optimizer.step(), "lr": lr}

    def weight_parts(self) -> list[WeightPart]:
        """See `TrainEngine.weight_parts`."""
        return list(self._parts)

    @cpu.as_cuda()
    def weights_updated(self) -> None:
        """See `TrainEngine.weights_updated`: tied output layer and the optimizer's fp32 copies."""
        self._refresh_tied_copy()
        if self._optimizer is not None:
            self._optimizer.reload_weights()

    def replica_group(self) -> ProcessGroup | None:
        """See `TrainEngine.replica_group`."""
        if self._role.tp * self._role.pp == 1:
            return None
        return parallel_state.get_model_parallel_group()

    @cpu.as_cuda()
    def save_hf(self, folder: Path) -> None:
        """See `TrainEngine.save_hf`."""
        save_weight_parts(
            folder,
            self._parts,
            model_path=self._model_path,
            tokenizer_path=self._tokenizer_path,
        )

    def _refresh_tied_copy(self) -> None:
        """Copy the embedding to the last stage, where it is the output layer.  Collective."""
        tied = self._hf_config.tie_word_embeddings
        if tied and self._role.pp > 1 and parallel_state.is_rank_in_embedding_group():
            weight = self._core.shared_embedding_or_output_weight()
            dist.broadcast(weight.data, group=parallel_state.get_embedding_group(), group_src=0)

    def _split(self, batch: Batch) -> list[list[int]]:
        """Positions of the rows of each micro-batch."""
        return pack_rows(
            batch.lengths.tolist(),
            max_tokens=self._options.max_tokens_per_micro_batch,
            align=self._align,
        )

    def _run(
        self,
        batch: Batch,
        micro_batches: list[list[int]],
        finish: Finish,
        *,
        temperature: float,
        train: bool,
    ) -> list[dict[str, Tensor]]:
        """Forward, with ``train`` also backward; on the last stage what ``finish`` kept."""
        if not micro_batches:
            if train:
                _sum_gradients([self._model])  # zeros, for the replicas that have rows
            return []
        rows: Iterator[Batch] = (batch.select(positions) for positions in micro_batches)
        return get_forward_backward_func()(
            forward_step_func=partial(self._forward, finish=finish, temperature=temperature),
            data_iterator=rows,
            model=self._model,
            num_microbatches=len(micro_batches),
            seq_length=self._options.max_tokens_per_micro_batch,  # unused: lengths vary
            micro_batch_size=1,
            forward_only=not train,
        )

    def _forward(
        self, rows: Iterator[Batch], model: Any, *, finish: Finish, temperature: float
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        """One micro-batch through this pipeline stage, in the form of Megatron's schedules."""
        batch = next(rows)
        packed = pack_tokens(batch, align=self._align, device=self._device)
        # Not the length of the pack: rotary embeddings count from the start of each sequence.
        packing = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=packed.cu_seqlens,
            cu_seqlens_kv=packed.cu_seqlens,
            max_seqlen_q=packed.max_seqlen,
            max_seqlen_kv=packed.max_seqlen,
        )
        keep_dtype = {} if self._dtype == torch.float32 else {"fp32_output": False}
        output = model(
            packed.token_ids.unsqueeze(0),
            None,  # position ids, which Megatron's rotary embedding does not read
            None,  # attention mask
            packed_seq_params=packing,
            **keep_dtype,
        )

        def compute_loss(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            logprobs, entropy = vocab_parallel_logprobs(
                logits.squeeze(0),
                packed.targets,
                vocab_size=self._hf_config.vocab_size,
                temperature=temperature,
                group=parallel_state.get_tensor_model_parallel_group(),
            )
            loss, kept = finish(
                batch.to(self._device),
                packed.token_column(logprobs),
                packed.token_column(entropy),
            )
            # The count of tokens would divide the gradients; `_sum_gradients` ignores it.
            return loss, torch.zeros((), dtype=torch.int, device=self._device), kept

        return output, compute_loss

    def _sum_over_role(self, kept: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sum over micro-batches and replicas, on every rank.  Collective over the role."""
        mine: dict[str, float] = {}
        # All tp ranks of the last stage have the same numbers; the first speaks for its replica.
        if self._core.post_process and parallel_state.get_tensor_model_parallel_rank() == 0:
            for values in kept:
                for name, value in values.items():
                    mine[name] = mine.get(name, 0.0) + float(value)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        total: dict[str, float] = {}
        for values in everyone:
            for name, value in values.items():
                total[name] = total.get(name, 0.0) + value
        total.setdefault("loss", 0.0)
        return total


def _in_row_order(batch: Batch, micro_batches: list[list[int]], values: list[Tensor]) -> Tensor:
    """[T] column of ``batch`` from those of its micro-batches."""
    pieces = [torch.zeros(0)] * len(batch)
    for rows, value in zip(micro_batches, values, strict=True):
        for row, piece in zip(rows, value.split(batch.lengths[rows].tolist()), strict=True):
            pieces[row] = piece
    return torch.cat([torch.zeros(0), *pieces])


def _sum_gradients(model: list[Any], _num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Megatron's end of a backward pass without its division by tokens."""
    finalize_model_grads(model, None, **groups)


def _join_mesh(role: RolePlan, rank: int, seed: int) -> None:
    """Make Megatron's process groups, once a process.  Collective over the default world.

    Raises:
        CommandError: the world is not the role's, or an engine with other axes lives in this
            process.
    """
    if dist.get_world_size() != len(role.ranks):
        raise CommandError(
            f"role {role.name} has {len(role.ranks)} ranks but the default world has "
            f"{dist.get_world_size()}; expected them to be the same"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            role.tp, role.pp, create_gloo_process_groups=False, order="tp-cp-ep-dp-pp"
        )
        with torch.random.fork_rng(devices=[]):
            model_parallel_cuda_manual_seed(seed)
    here = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    sizes = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )
    if sizes != (role.tp, role.pp, role.dp):
        raise CommandError(
            f"role {role.name} has (tp, pp, dp)={(role.tp, role.pp, role.dp)}, but another "
            f"megatron role of this process has {sizes}; expected the same. Set equal axes and "
            "ranks, or give it ranks of its own"
        )
    expected = role.coordinates(rank)
    assert here == expected, f"Megatron put rank {rank} at {here}, the plan at {expected}"
