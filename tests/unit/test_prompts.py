import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhpc.config.schema import DataConfig, ReasoningGymConfig
from rlhpc.data.prompts import load_prompts, make_sft_row
from rlhpc.data.rows import PromptOrder, row_seed
from rlhpc.data.small_models import make_character_tokenizer
from rlhpc.errors import ConfigError

TOKENIZER = make_character_tokenizer()
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}="


def write(path: Path, rows: list) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def sums(count: int) -> list[dict]:
    return [
        {"prompt": f"{i}+1=", "answer": str(i + 1), "response": str(i + 1)} for i in range(count)
    ]


def load(file, *, split="train", seed=1, need_response=False, **changes):
    config = DataConfig(**{f"{split}_files": file, "chat_template": False, **changes})
    return load_prompts(config, TOKENIZER, split=split, seed=seed, need_response=need_response)


def test_a_string_prompt_is_tokenised_as_it_is(tmp_path):
    dataset = load(write(tmp_path / "sums.jsonl", sums(3)))
    prompt = dataset[2]
    assert (prompt.text, prompt.ground_truth, prompt.data_source) == ("2+1=", "3", "sums")
    assert TOKENIZER.decode(prompt.token_ids) == "2+1="
    assert prompt.index == 2
    assert prompt.response == "3"


def test_a_string_prompt_becomes_one_user_message_under_a_chat_template(tmp_path):
    tokenizer = make_character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = DataConfig(train_files=write(tmp_path / "a.jsonl", [{"prompt": "1+1", "answer": 2}]))
    prompt = load_prompts(config, tokenizer, split="train", seed=1)[0]
    assert prompt.messages == ({"role": "user", "content": "1+1"},)
    assert prompt.text == "1+1="


def test_every_broken_row_is_named_by_file_and_line(tmp_path):
    rows = [
        {"prompt": "1", "answer": "1"},
        "{not json",
        {"answer": "1"},
        {"answer": "2"},
        [1, 2],
        {"prompt": 3, "answer": "1"},
        {"prompt": "1", "answer": "1", "data_source": 4},
        {"prompt": "1"},
    ]
    file = write(tmp_path / "bad.jsonl", rows)
    with pytest.raises(ConfigError, match="7 broken rows") as caught:
        load(file)
    message = str(caught.value)
    assert f"{file}:2: not JSON" in message
    assert f"{file}:3-4: no 'prompt'" in message
    assert f"{file}:5: is of JSON type list; expected an object" in message
    assert f"{file}:6: 'prompt' is of type int; expected a string" in message
    assert f"{file}:7: 'data_source' is of type int" in message
    assert f"{file}:8: no 'reward_model.ground_truth'" in message


def test_bytes_that_are_no_text_are_named_by_line(tmp_path):
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "1", "answer": "1"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"b\.jsonl:2: not JSON"):
        load(str(tmp_path / "b.jsonl"))


def test_parquet_in_verl_columns_is_read(tmp_path):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+2"}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"index": 7},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "v.parquet")
    tokenizer = make_character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = DataConfig(train_files=[str(tmp_path / "v.parquet")])
    prompt = load_prompts(config, tokenizer, split="train", seed=1)[0]
    assert (prompt.data_source, prompt.ground_truth) == ("openai/gsm8k", "3")
    assert prompt.extra_info == {"index": 7}
    assert prompt.text == "1+2="


def test_a_parquet_row_without_ground_truth_is_named(tmp_path):
    rows = [{"prompt": "1", "reward_model": {"ground_truth": g}} for g in ("1", None)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "v.parquet")
    with pytest.raises(ConfigError, match=r"v\.parquet:2: no 'reward_model\.ground_truth'"):
        load(str(tmp_path / "v.parquet"))


def test_messages_need_the_chat_template(tmp_path):
    file = write(
        tmp_path / "m.jsonl", [{"prompt": [{"role": "user", "content": "1"}], "answer": "1"}]
    )
    with pytest.raises(ConfigError, match=r"data\.chat_template=false"):
        load(file)
    with pytest.raises(ConfigError, match="tokenizer has no chat template"):
        load(file, chat_template=True)


def test_a_prompt_that_the_template_refuses_is_named(tmp_path):
    tokenizer = make_character_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    config = DataConfig(train_files=write(tmp_path / "a.jsonl", sums(1)))
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: the chat template refuses it \(no system"):
        load_prompts(config, tokenizer, split="train", seed=1)


def test_overlong_prompts_are_listed_or_dropped_with_their_count(tmp_path):
    file = write(tmp_path / "s.jsonl", sums(30))
    with pytest.raises(ConfigError, match="20 of 30 prompts are longer") as caught:
        load(file, max_prompt_length=4)
    assert f"{file}:11: 5 tokens" in str(caught.value)
    assert "and 10 more" in str(caught.value)
    dataset = load(file, max_prompt_length=4, filter_overlong_prompts=True)
    assert (len(dataset), dataset.num_overlong) == (10, 20)


def test_a_file_that_is_missing_or_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.train_files: .*nowhere\.jsonl"):
        load("nowhere.jsonl")
    with pytest.raises(ConfigError, match="unknown ending"):
        load(write(tmp_path / "a.csv", sums(1)))
    with pytest.raises(ConfigError, match="cannot be read as parquet"):
        load(write(tmp_path / "a.parquet", sums(1)))
    with pytest.raises(ConfigError, match="gave no prompt that can be used"):
        load([])


def test_held_out_prompts_may_be_absent_and_are_cut_to_a_number(tmp_path):
    assert len(load([], split="val")) == 0
    dataset = load(write(tmp_path / "s.jsonl", sums(9)), split="val", val_max_prompts=4)
    assert [p.index for p in dataset] == [0, 1, 2, 3]


def test_each_epoch_visits_every_prompt_once_in_a_new_order():
    order = PromptOrder(10, seed=1, shuffle=True)
    assert sorted(order.order(0)) == list(range(10))
    assert order.order(0) != order.order(1)
    visits = [v for step in range(5) for v in order.visits(step, 4)]
    assert [v.prompt_index for v in visits] == [*order.order(0), *order.order(1)]
    assert [v.epoch for v in order.visits(2, 4)] == [0, 0, 1, 1]


def test_the_order_depends_on_seed_and_step_only():
    order = PromptOrder(10, seed=1, shuffle=True)
    assert order.visits(7, 4) == PromptOrder(10, seed=1, shuffle=True).visits(7, 4)
    assert order.order(0) != PromptOrder(10, seed=2, shuffle=True).order(0)
    plain = PromptOrder(10, seed=1, shuffle=False)
    assert [v.prompt_index for v in plain.visits(2, 4)] == [8, 9, 0, 1]


def test_row_seeds_are_the_same_in_every_process_and_differ_in_every_argument():
    seed = row_seed(1, 2, 3, 4)
    code = "from rlhpc.data.rows import PromptOrder, row_seed; print(row_seed(1, 2, 3, 4))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) == seed
    seeds = {
        row_seed(a, b, c, d, e)
        for a in (1, 2)
        for b in (1, 2)
        for c in (1, 2)
        for d in (1, 2)
        for e in (0, 1)
    }
    assert len(seeds) == 32
    assert all(0 <= s < 2**63 for s in seeds)


def test_a_supervised_row_masks_response_and_eos():
    prompt = TOKENIZER("1+1=")["input_ids"]
    token_ids, mask = make_sft_row(prompt, "2", TOKENIZER)
    assert TOKENIZER.decode(token_ids) == "1+1=2<eos>"
    assert mask == [False] * 4 + [True] * 2


def test_supervised_stages_need_a_response_within_the_limit(tmp_path):
    rows = [{"prompt": "1", "response": "22"}, {"prompt": "1", "answer": "2"}]
    with pytest.raises(ConfigError, match=r"s\.jsonl:2: no 'response'"):
        load(write(tmp_path / "s.jsonl", rows), need_response=True)
    with pytest.raises(ConfigError, match=r"(?s)data\.max_response_length.*s\.jsonl:1: 3 tokens"):
        load(write(tmp_path / "s.jsonl", rows[:1]), need_response=True, max_response_length=2)


def test_reasoning_gym_gives_other_problems_for_held_out_prompts():
    pytest.importorskip("reasoning_gym")
    gym = ReasoningGymConfig(task="chain_sum", train_size=5, val_size=3)
    train, val = (load([], split=s, reasoning_gym=gym) for s in ("train", "val"))
    assert (len(train), len(val)) == (5, 3)
    assert train[0].data_source == "chain_sum"
    assert not {p.text for p in train} & {p.text for p in val}
    with pytest.raises(ConfigError, match=r"data\.reasoning_gym: task='nope'"):
        load([], reasoning_gym=ReasoningGymConfig(task="nope"))
