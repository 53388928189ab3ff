"""A model folder without weights, its data, and configs on them, for tests of config and plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig

CONFIG_JSON: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def make_model_folder(folder: Path, **changes: Any) -> Path:
    """What checks look at: config.json with ``changes``, empty weights and tokenizer, 128 rows."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in (CONFIG_JSON | changes).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    rows = [
        {"prompt": f"{i}+{i}=", "answer": str(2 * i), "response": str(2 * i)} for i in range(128)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for split in ("train", "val"):
        (folder / f"{split}.jsonl").write_text(text)
    return folder


def quickstart_overrides(folder: Path, *overrides: str) -> list[str]:
    """The quickstart on the model and data in ``folder``, with ``overrides``."""
    return [
        "experiment=quickstart",
        f"model.path={folder}",
        f"data.train_files={folder}/train.jsonl",
        f"data.val_files={folder}/val.jsonl",
        f"run_root={folder}/runs",
        *overrides,
    ]


def quickstart_config(folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The typed config of `quickstart_overrides`."""
    return load_config(quickstart_overrides(folder, *overrides))
