import time
from pathlib import Path

import pytest
import torch

from rlhpc.config.engines import HfOptions
from rlhpc.errors import CommandError, PlanError
from rlhpc.rollout.base import SampleRequest
from tests.rollout_models import (
    EOS,
    drain,
    hf_engine,
    prompts,
    reference_logprobs,
    requests,
    role_of,
    save_tiny,
    write_checkpoint,
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("other"), seed=1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_equal_those_of_transformers_generate(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = save_tiny(tmp_path, family=family, tied=family == "qwen2")
    got = drain(hf_engine(path), requests(10, temperature=0.0))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for i, prompt in enumerate(prompts(10)):
        expected = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        assert list(got[i].response_ids) == expected[0, len(prompt) :].tolist()


def test_a_row_samples_the_same_alone_in_a_batch_and_in_another_order(model_path: str) -> None:
    # Exact but for a row whose uniform number lies within rounding (1e-7) of a boundary between two
    # tokens, about one token in a million; these seeds have none.
    rows = requests(16)
    together = drain(hf_engine(model_path), rows)
    waves = drain(hf_engine(model_path, options=HfOptions(max_num_seqs=3)), rows[::-1])
    for i, row in enumerate(rows):
        alone = drain(hf_engine(model_path), [row])[i]
        assert alone.response_ids == together[i].response_ids == waves[i].response_ids
        assert len({together[j].response_ids for j in together}) > 10


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_equal_those_of_a_fresh_forward(model_path: str, temperature: float) -> None:
    rows = requests(12, temperature=temperature)
    got = drain(hf_engine(model_path, options=HfOptions(max_num_seqs=5)), rows)
    for row in rows:
        sample = got[row.row_id]
        expected = reference_logprobs(model_path, row.prompt_ids, sample.response_ids, temperature)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0, atol=1e-5)
        assert sample.policy_versions == (0,) * len(sample.response_ids)


def test_a_row_ends_with_a_stop_token_or_is_truncated(model_path: str) -> None:
    rows = requests(24, limit=100)
    got = drain(hf_engine(model_path, stop_token_ids=(EOS, 5)), rows)
    for sample in got.values():
        assert not {EOS, 5} & set(sample.response_ids[:-1])
        ended = sample.response_ids[-1] in (EOS, 5)
        assert ended != sample.truncated
        assert ended or len(sample.response_ids) == 100
    assert {sample.response_ids[-1] for sample in got.values()} >= {EOS, 5}


def test_a_stop_token_exactly_at_the_limit_is_not_truncation(model_path: str) -> None:
    whole = drain(hf_engine(model_path), requests(24, limit=100))
    row_id, length = next((i, len(s.response_ids)) for i, s in whole.items() if not s.truncated)
    limits = [length if i == row_id else 1 for i in range(24)]
    again = drain(hf_engine(model_path), requests(24, limits=limits))[row_id]
    assert again.response_ids == whole[row_id].response_ids
    assert not again.truncated


def test_new_weights_in_the_middle_act_as_a_fresh_start_from_prompt_and_prefix(
    model_path: str, other_path: str
) -> None:
    engine = hf_engine(model_path, stop_token_ids=())
    engine.add(requests(6, temperature=0.0))
    for _ in range(10):
        engine.step()
    write_checkpoint(engine, other_path)
    engine.weights_updated(7)
    got = drain(engine, [])
    fresh = hf_engine(other_path, stop_token_ids=())
    for i, prompt in enumerate(prompts(6)):
        prefix = got[i].response_ids[:10]
        tail = drain(fresh, [SampleRequest(i, prompt + prefix, 0, 14, 0.0)])[i]
        assert got[i].response_ids[10:] == tail.response_ids
        assert got[i].logprobs[10:] == pytest.approx(tail.logprobs, abs=1e-5)
        assert got[i].policy_versions == (0,) * 10 + (7,) * 14


def test_new_weights_in_the_middle_keep_the_random_stream(model_path: str) -> None:
    rows = requests(6)
    engine = hf_engine(model_path)
    engine.add(rows[:4])
    for _ in range(5):
        engine.step()
    engine.weights_updated(1)
    expected = drain(hf_engine(model_path), rows)
    got = drain(engine, rows[4:])
    assert [got[i].response_ids for i in got] == [expected[i].response_ids for i in got]


def test_weight_parts_are_the_checkpoint(model_path: str) -> None:
    from safetensors.torch import load_file

    stored = load_file(f"{model_path}/model.safetensors")
    parts = {part.name: part for part in hf_engine(model_path).weight_parts()}
    assert parts.keys() == stored.keys()
    for name, part in parts.items():
        assert part.shape == part.view.shape == tuple(stop for _, stop in part.box)
        assert torch.equal(part.view, stored[name])


def test_the_process_random_state_is_untouched(model_path: str) -> None:
    before = torch.get_rng_state()
    drain(hf_engine(model_path), requests(2))
    assert torch.equal(before, torch.get_rng_state())


def test_requests_and_plans_that_cannot_be_served_are_refused(model_path: str) -> None:
    engine = hf_engine(model_path, max_model_len=20)
    for prompt, limit in (((), 4), ((3,), 0), ((3,) * 10, 11)):
        with pytest.raises(CommandError, match=r"row 8 has \d+ prompt tokens"):
            engine.add([SampleRequest(8, prompt, 0, limit, 1.0)])
    with pytest.raises(CommandError, match="no followers"):
        engine.follow()
    with pytest.raises(PlanError, match="tp=2 pp=1 with engine hf"):
        hf_engine(model_path, role=role_of("hf", tp=2))


def test_weights_that_are_not_finite_stop_the_run(model_path: str) -> None:
    engine = hf_engine(model_path)
    engine.weight_parts()[0].view.fill_(float("nan"))
    with pytest.raises(CommandError, match="rollout dp0 tp0 pp0: row 0 sampled"):
        drain(engine, requests(1))


@pytest.mark.slow
def test_a_long_tail_is_cheaper_than_a_static_batch(tmp_path: Path) -> None:
    path = save_tiny(tmp_path)
    limits = [200 if i % 16 == 0 else 10 + i % 23 for i in range(128)]
    rows = requests(128, limits=limits)
    static = [rows[i : i + 32] for i in range(0, 128, 32)]
    engine = hf_engine(
        path, options=HfOptions(max_num_seqs=32), stop_token_ids=(), max_model_len=256
    )
    start = time.perf_counter()
    drain(engine, rows)
    middle = time.perf_counter()
    for batch in static:
        drain(engine, [SampleRequest(r.row_id, r.prompt_ids, r.seed, 200, 1.0) for r in batch])
    assert (time.perf_counter() - middle) > 1.5 * (middle - start)
