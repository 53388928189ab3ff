"""Tiny models made on the spot, and how the rollout tests build and drain an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlhpc.config.engines import HfOptions, VllmOptions
from rlhpc.plan import RolePlan
from rlhpc.rollout.base import Sample, SampleRequest
from rlhpc.rollout.hf import HfEngine

# 70 is no multiple of the 64 to which vLLM pads, so that padding shows.
VOCAB = 70
EOS = 2


def save_tiny(folder: Path, *, family: str = "qwen2", tied: bool = True, seed: int = 0) -> str:
    """Write a random model of 3 layers, 4 heads, 2 kv heads; returns the folder's path."""
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[family]
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        # 32 is the least that vLLM's CPU attention serves; in Qwen3 it is no share of hidden_size.
        head_dim=64 if family == "qwen3" else 32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=EOS,
        # Large enough that tokens and their log-probs depend on the context.
        initializer_range=0.12,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return str(folder)


def role_of(engine: str, *, tp: int = 1, dtype: str = "fp32") -> RolePlan:
    """A rollout role on ranks 0..tp-1."""
    ranks = tuple(range(tp))
    return RolePlan("rollout", "rollout", "main", engine, "replica", dtype, 1, tp, 1, ranks)


def hf_engine(model_path: str, **overrides: Any) -> HfEngine:
    """An fp32 engine on CPU."""
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "role": role_of("hf"),
        "rank": 0,
        "options": HfOptions(),
        "dtype": "fp32",
        "device": torch.device("cpu"),
        "max_model_len": 128,
        "seed": 0,
        "stop_token_ids": (EOS,),
        "engine_id": "test",
    }
    return HfEngine(**(arguments | overrides))


def vllm_engine(model_path: str, *, rank: int, tp: int, **overrides: Any) -> Any:
    """An fp32 engine on CPU; collective over the tp ranks."""
    from rlhpc.rollout.vllm import VllmEngine

    arguments: dict[str, Any] = {
        "model_path": model_path,
        "role": role_of("vllm", tp=tp),
        "rank": rank,
        "options": VllmOptions(kv_cache_gib=0.02, max_num_seqs=32),
        "dtype": "fp32",
        "device": torch.device("cpu"),
        "max_model_len": 128,
        "seed": 0,
        "stop_token_ids": (EOS,),
        "engine_id": f"rlhpc-test-{tp}",
    }
    return VllmEngine(**(arguments | overrides))


def write_checkpoint(engine: Any, model_path: str) -> None:
    """Write a checkpoint of `save_tiny` into the engine's weight parts."""
    from safetensors.torch import load_file

    stored = load_file(f"{model_path}/model.safetensors")
    for part in engine.weight_parts():
        assert part.shape == tuple(stored[part.name].shape)
        part.view.copy_(stored[part.name][tuple(slice(*extent) for extent in part.box)])


def prompts(count: int) -> list[tuple[int, ...]]:
    """Prompts of 1 to 9 tokens."""
    return [
        tuple(3 + (7 * i + 5 * j) % (VOCAB - 3) for j in range(1 + i % 9)) for i in range(count)
    ]


def requests(
    count: int, *, limit: int = 24, temperature: float = 1.0, limits: Sequence[int] = ()
) -> list[SampleRequest]:
    """One row a prompt of `prompts`, with its own seed (and its own limit where ``limits`` is
    given)."""
    lengths = limits or [limit] * count
    return [
        SampleRequest(i, prompt, seed=2**62 + 979 * i, max_new_tokens=n, temperature=temperature)
        for i, (prompt, n) in enumerate(zip(prompts(count), lengths, strict=True))
    ]


def drain(engine: Any, rows: Sequence[SampleRequest]) -> dict[int, Sample]:
    """Sample ``rows`` to their end; by row id."""
    engine.add(rows)
    finished: dict[int, Sample] = {}
    while engine.busy:
        finished |= {sample.row_id: sample for sample in engine.step()}
    return finished


def reference_logprobs(
    model_path: str, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """[len(response)] log-probs from one plain forward."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]
