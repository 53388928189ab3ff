"""One run of the engine per tp size answers many questions; each test reads its answer."""

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.config.engines import VllmOptions
from rlhpc.errors import CommandError, PlanError
from rlhpc.rollout.base import Sample, SampleRequest
from tests.rollout_models import (
    drain,
    hf_engine,
    prompts,
    requests,
    role_of,
    save_tiny,
    vllm_engine,
    write_checkpoint,
)
from tests.spmd import run_spmd

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

# The long prompts fill blocks of the prefix cache, which must not outlive a weight update.
GREEDY = [
    *requests(12, temperature=0.0),
    *(SampleRequest(12 + i, p * 20, i, 24, 0.0) for i, p in enumerate(prompts(4)[1:])),
]
SAMPLED = requests(16)
WHOLE = [SampleRequest(i, p, i, 20, 0.0) for i, p in enumerate(prompts(6))]
UPDATE_STEP = 9


def run(rank: int, engine: Any, rows: list[SampleRequest], **at: Callable[[], None]) -> Any:
    """Sample ``rows``; before the leader's step N all ranks run the command ``sN``."""
    if rank > 0:
        while (number := engine.follow()) is not None:
            at[f"s{number}"]()
        return None
    engine.add(rows)
    finished: dict[int, Sample] = {}
    step = 0
    while engine.busy:
        step += 1
        if f"s{step}" in at:
            engine.interrupt(step)
            at[f"s{step}"]()
        finished |= {sample.row_id: sample for sample in engine.step()}
    return finished


def scenario(rank: int, tp: int, path: str, other: str) -> dict[str, Any]:
    random.seed(5)
    torch.manual_seed(5)
    set_num_threads = torch.set_num_threads
    engine = vllm_engine(path, rank=rank, tp=tp)
    out: dict[str, Any] = {
        "state kept": set_num_threads is torch.set_num_threads,
        "random": (random.random(), torch.rand(()).item()),
        "parts": [(p.name, p.shape, p.box) for p in engine.weight_parts()],
        "greedy": run(rank, engine, GREEDY),
        "sampled": run(rank, engine, SAMPLED),
        "shuffled": run(rank, engine, SAMPLED[::-3]),
        "alone": run(rank, engine, SAMPLED[5:6]),
    }

    def update(to: str, version: int) -> None:
        write_checkpoint(engine, to)
        engine.weights_updated(version)

    update(other, 1)
    out["other greedy"] = run(rank, engine, GREEDY)
    update(path, 2)
    out["back greedy"] = run(rank, engine, GREEDY)
    out["mixed"] = run(rank, engine, WHOLE, **{f"s{UPDATE_STEP}": lambda: update(other, 3)})
    out["errors"] = [raised(engine.follow), raised(lambda: engine.interrupt(1))] if not rank else []
    maps = Path("/proc/self/maps").read_text().splitlines()
    # Named semaphores are the fork server's way of making locks; ranks of a run have none.
    out["shm"] = [line for line in maps if "/dev/shm/" in line and "/sem." not in line]
    return out


def raised(call: Callable[[], object]) -> str:
    with pytest.raises(CommandError, match="rollout dp0 tp0 pp0") as caught:
        call()
    return str(caught.value)


def fresh(rank: int, tp: int, path: str, rows: list[list[SampleRequest]]) -> Any:
    engine = vllm_engine(path, rank=rank, tp=tp)
    return [run(rank, engine, part) for part in rows]


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    tp = request.param
    model = {"family": "qwen3", "tied": False} if tp == 1 else {"family": "qwen2", "tied": True}
    folder: Path = tmp_path_factory.mktemp(f"tp{tp}")
    path = save_tiny(folder / "a", **model)
    other = save_tiny(folder / "b", seed=1, **model)
    ranks = run_spmd(scenario, tp, tp, path, other, timeout_s=200, preload=("tests.vllm_preload",))
    tails = [
        SampleRequest(i, r.prompt_ids + sample.response_ids[: UPDATE_STEP - 1], 0, 12, 0.0)
        for i, r in enumerate(WHOLE)
        if len((sample := ranks[0]["mixed"][i]).response_ids) >= UPDATE_STEP
    ]
    rows = [GREEDY, tails]
    again = run_spmd(fresh, tp, tp, other, rows, timeout_s=200, preload=("tests.vllm_preload",))
    return {
        "tp": tp,
        "path": path,
        "ranks": ranks,
        "fresh greedy": again[0][0],
        "fresh tails": again[0][1],
    }


def test_greedy_tokens_and_logprobs_equal_those_of_the_hf_engine(played: dict[str, Any]) -> None:
    expected = drain(hf_engine(played["path"]), GREEDY)
    got = played["ranks"][0]["greedy"]
    assert got.keys() == expected.keys()
    for i, sample in expected.items():
        assert got[i].response_ids == sample.response_ids
        assert got[i].truncated == sample.truncated
        assert got[i].logprobs == pytest.approx(sample.logprobs, abs=1e-4)
        assert got[i].policy_versions == (0,) * len(sample.response_ids)


def test_sampled_tokens_do_not_depend_on_the_batch(played: dict[str, Any]) -> None:
    leader = played["ranks"][0]
    for other in (leader["shuffled"], leader["alone"]):
        for i, sample in other.items():
            assert sample.response_ids == leader["sampled"][i].response_ids
    assert len({sample.response_ids for sample in leader["sampled"].values()}) == 16


def test_logprobs_of_sampled_tokens_are_those_of_a_plain_forward(played: dict[str, Any]) -> None:
    from tests.rollout_models import reference_logprobs

    for row in SAMPLED[:6]:
        sample = played["ranks"][0]["sampled"][row.row_id]
        expected = reference_logprobs(played["path"], row.prompt_ids, sample.response_ids)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0, atol=1e-4)


def test_written_weights_act_exactly_as_a_fresh_engine(played: dict[str, Any]) -> None:
    leader = played["ranks"][0]
    for i, sample in played["fresh greedy"].items():
        got = leader["other greedy"][i]
        assert got.response_ids == sample.response_ids
        assert got.logprobs == sample.logprobs
        assert set(got.policy_versions) == {1}
    assert leader["other greedy"][0].response_ids != leader["greedy"][0].response_ids
    for i, sample in leader["greedy"].items():
        assert leader["back greedy"][i].logprobs == sample.logprobs


def test_weights_written_in_the_middle_act_from_the_next_token(played: dict[str, Any]) -> None:
    prefix = UPDATE_STEP - 1
    assert played["fresh tails"]
    for i, tail in played["fresh tails"].items():
        got = played["ranks"][0]["mixed"][i]
        assert got.response_ids[prefix:] == tail.response_ids
        assert got.logprobs[prefix:] == pytest.approx(tail.logprobs, abs=1e-5)
        assert got.policy_versions == (2,) * prefix + (3,) * len(tail.response_ids)


def test_parts_of_all_ranks_cover_the_checkpoint(played: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    count = {
        name: torch.zeros_like(value, dtype=torch.int64)
        for name, value in load_file(f"{played['path']}/model.safetensors").items()
    }
    for rank in played["ranks"]:
        for name, shape, box in rank["parts"]:
            assert shape == tuple(count[name].shape)
            count[name][tuple(slice(*extent) for extent in box)] += 1
    assert all((value >= 1).all() for value in count.values())


def test_the_process_is_left_as_it_was(played: dict[str, Any]) -> None:
    random.seed(5)
    torch.manual_seed(5)
    expected = (random.random(), torch.rand(()).item())
    for rank in played["ranks"]:
        assert rank["state kept"]
        assert rank["random"] == expected
        assert not rank["shm"]


def test_leaders_do_not_follow_and_idle_engines_are_not_interrupted(played: dict[str, Any]) -> None:
    follow, interrupt = played["ranks"][0]["errors"]
    assert "follow() on the leader" in follow
    assert "interrupt(1) without rows" in interrupt


def overload(rank: int, path: str) -> Any:
    with pytest.raises(PlanError, match=r"world of 1 with pp=1; expected rank 0 of 2"):
        vllm_engine(path, rank=rank, tp=1, role=role_of("vllm", tp=2))
    options = VllmOptions(kv_cache_gib=0.0005, max_num_seqs=4)
    engine = vllm_engine(path, rank=rank, tp=1, options=options)
    with pytest.raises(CommandError, match=r"has temperature 0.001"):
        engine.add([SampleRequest(0, (3,), 0, 4, 0.001)])
    with pytest.raises(CommandError, match="row 0 has 0 prompt tokens"):
        engine.add([SampleRequest(0, (), 0, 4, 1.0)])
    return run(rank, engine, [*SAMPLED, SampleRequest(99, (3,) * 8, 1, 100, 1.0)])


def test_rows_wait_for_slots_and_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, family="llama")
    got = run_spmd(overload, 1, path, timeout_s=200, preload=("tests.vllm_preload",))[0]
    assert got.keys() == {*range(16), 99}
