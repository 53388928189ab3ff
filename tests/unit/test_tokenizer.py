import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlhpc.data.small_models import make_character_tokenizer, make_tiny_qwen2
from rlhpc.data.tokenizer import encode_text, load_tokenizer, stop_token_ids
from rlhpc.errors import ConfigError


def tokenizer_with_bos():
    raw = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "?": 2}, unk_token="?"))
    raw.add_special_tokens(["<s>"])
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")


def test_there_is_exactly_one_bos_whether_or_not_the_text_spells_it():
    assert encode_text(["<s>aa", "aa"], tokenizer_with_bos()) == [(0, 1, 1), (0, 1, 1)]


def test_a_tokenizer_without_bos_adds_none():
    assert encode_text(["12"], make_character_tokenizer()) == [(4 - 1, 4)]


def test_stop_tokens_are_those_of_the_model_and_of_the_tokenizer(tmp_path):
    tokenizer = make_character_tokenizer()
    assert stop_token_ids(tmp_path, tokenizer) == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert stop_token_ids(tmp_path, tokenizer) == (1, 5, 7)


def test_a_model_without_any_stop_token_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="names no EOS token"):
        stop_token_ids(tmp_path, tokenizer_with_bos())


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path: .* is not a folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_the_tiny_model_is_complete_seeded_and_made_once(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = make_tiny_qwen2(tmp_path / "a")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert make_tiny_qwen2(folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    again = make_tiny_qwen2(tmp_path / "b")
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(load_tokenizer(folder)) == 32


def test_held_out_sums_are_disjoint_from_training_in_either_order(tmp_path):
    folder = make_tiny_qwen2(tmp_path / "a")
    pairs = {}
    for name in ("train", "val"):
        rows = [json.loads(x) for x in (folder / f"{name}.jsonl").read_text().splitlines()]
        pairs[name] = {frozenset(r["prompt"][:-1].split("+")) for r in rows}
        assert all(eval(r["prompt"][:-1]) == int(r["answer"]) for r in rows)
    assert not pairs["train"] & pairs["val"]
    assert len(pairs["val"]) == 256


def test_a_half_made_model_folder_is_not_overwritten(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="exists but lacks"):
        make_tiny_qwen2(tmp_path)
