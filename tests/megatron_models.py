"""Tiny random models, batches and the plain torch loop that Megatron tests compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhpc.config.engines import MegatronOptions
from rlhpc.config.schema import OptimConfig
from rlhpc.data.batch import Batch
from rlhpc.plan import RolePlan

PRELOAD = ("torch", "tests.spmd_preload_megatron")
VOCAB = 101
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_config(kind: str, *, tied: bool = False, **changes: Any) -> Any:
    import transformers

    sizes: dict[str, Any] = {**SIZES, "tie_word_embeddings": tied, **changes}
    if kind == "llama":
        return transformers.LlamaConfig(**sizes)
    if kind == "llama3":
        return transformers.LlamaConfig(**sizes, rope_parameters=LLAMA3_ROPE)
    if kind == "qwen2":
        return transformers.Qwen2Config(**sizes)
    return transformers.Qwen3Config(**sizes, head_dim=16)


def make_model_folder(folder: Path, kind: str, *, tied: bool = False, **changes: Any) -> str:
    """A random model, norms and biases away from 1 and 0, in fp32."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        make_config(kind, tied=tied, **changes), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    return str(folder)


def make_batch(lengths: list[int], seed: int = 0, first_id: int = 0) -> Batch:
    """Rows of random tokens; the first three tokens of a row are its prompt."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(lengths, dtype=torch.int64)
    batch = Batch([first_id + i for i in range(len(lengths))], sizes)
    total = int(sizes.sum())
    batch.columns["token_ids"] = torch.randint(3, VOCAB, (total,), generator=generator)
    position = torch.arange(total) - batch.offsets[:-1].repeat_interleave(sizes)
    batch.columns["loss_mask"] = position >= 3
    batch.columns["advantages"] = torch.randn(len(lengths), generator=generator)
    return batch


def make_loss(num_tokens: int, entropy_coeff: float = 0.01) -> Any:
    """Policy gradient with an entropy bonus over ``num_tokens`` of the whole mini-batch."""

    def loss_fn(
        batch: Batch, logprobs: Tensor, entropy: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask = batch.columns["loss_mask"]
        weight = batch.columns["advantages"][batch.token_rows()] * mask / num_tokens
        bonus = (entropy * mask).sum() / num_tokens
        return -(logprobs * weight).sum() - entropy_coeff * bonus, {"entropy": bonus}

    return loss_fn


def load_reference(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def reference_logprobs(model: Any, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy [T], one row at a time, by transformers."""
    columns: list[list[Tensor]] = [[], []]
    for ids in batch.columns["token_ids"].split(batch.lengths.tolist()):
        logp = F.log_softmax(model(ids[None]).logits[0, :-1].float() / temperature, -1)
        columns[0] += [torch.zeros(1), logp.gather(-1, ids[1:, None])[:, 0]]
        columns[1] += [torch.zeros(1), -(logp.exp() * logp).sum(-1)]
    return torch.cat(columns[0]), torch.cat(columns[1])


class Reference:
    """A plain torch training loop: AdamW, norms and biases without weight decay, clipped
    gradients.
    """

    def __init__(self, path: str, optim: OptimConfig) -> None:
        self.model = load_reference(path)
        self.clip_grad = optim.clip_grad
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": optim.weight_decay},
                {"params": rest, "weight_decay": 0.0},
            ],
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
        )

    def update(self, batch: Batch, loss_fn: Any, temperature: float) -> dict[str, float]:
        self.optimizer.zero_grad()
        loss, metrics = loss_fn(batch, *reference_logprobs(self.model, batch, temperature))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.clip_grad or float("inf")
        )
        self.optimizer.step()
        values = {name: float(value.detach()) for name, value in metrics.items()}
        return {"loss": float(loss), "grad_norm": float(norm), **values}

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}


def make_role(dp: int = 1, tp: int = 1, pp: int = 1) -> RolePlan:
    return RolePlan(
        name="actor",
        kind="actor",
        component="train",
        engine="megatron",
        world="role",
        dtype="fp32",
        dp=dp,
        tp=tp,
        pp=pp,
        ranks=tuple(range(dp * tp * pp)),
    )


def make_engine(
    path: str,
    rank: int,
    *,
    role: RolePlan,
    optim: OptimConfig | None = None,
    options: MegatronOptions | None = None,
    dtype: str = "fp32",
) -> Any:
    from rlhpc.training.megatron import MegatronEngine

    return MegatronEngine(
        model_path=path,
        role=role,
        rank=rank,
        options=options or MegatronOptions(max_tokens_per_micro_batch=64),
        dtype=dtype,
        device=torch.device("cpu"),
        optim=optim,
        total_updates=10,
        seed=1,
        tokenizer_path=None,
    )
