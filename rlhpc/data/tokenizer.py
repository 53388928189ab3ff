"""Tokenizers from local folders and what sampling needs to know of them.  Never online."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhpc.errors import ConfigError


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer in folder ``path``, as transformers loads it.

    Raises:
        ConfigError: the folder is missing or holds no tokenizer.
    """
    from transformers import AutoTokenizer  # seconds to import; not for those who only read

    if not Path(path).is_dir():
        raise ConfigError(
            f"model.tokenizer_path: {str(path)!r} is not a folder; expected a Hugging Face "
            "folder with a "
            "tokenizer. Set model.tokenizer_path (or model.path) to one."
        )
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.tokenizer_path: {str(path)!r} holds no tokenizer that transformers can load "
            f"({error}); "
            "expected tokenizer.json or its like. Set model.tokenizer_path to a folder that has "
            "one."
        ) from error


def stop_token_ids(model_path: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a response, sorted: `generation_config.json`'s and the tokenizer's.

    Raises:
        ConfigError: neither names one, so that no response could end by itself.
    """
    ids: set[int] = set()
    file = Path(model_path) / "generation_config.json"
    if file.is_file():
        named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        ids.update(named if isinstance(named, list) else [] if named is None else [named])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise ConfigError(
            f"model.path: {str(model_path)!r} names no EOS token; expected eos_token_id in "
            "generation_config.json or eos_token in the tokenizer. Add one of them."
        )
    return tuple(sorted(ids))


def bos_to_add(tokenizer: Any) -> int | None:
    """The BOS id that the tokenizer puts before plain text, None when it puts none."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return None
    return bos if list(tokenizer("a")["input_ids"])[:1] == [bos] else None


def encode_text(texts: list[str], tokenizer: Any) -> list[tuple[int, ...]]:
    """Token ids of rendered ``texts``; special tokens only where spelt, one BOS at most.

    A chat template may spell the BOS itself; it is added only where the tokenizer wants one and
    the text has none.
    """
    if not texts:
        return []
    bos = bos_to_add(tokenizer)
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [tuple(ids) if bos is None or list(ids[:1]) == [bos] else (bos, *ids) for ids in rows]
