"""Layout invariance of the whole system: the same seeds give the same first step under every cut.

And what a sync leaves behind: the rollout samples from exactly the weights that the actor exports.
"""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhpc.data.small_models import make_tiny_qwen2
from tests.e2e.runs import submit, tiny_grpo

SAME = (
    "critic/rewards/mean",
    "response_length/mean",
    "actor/loss",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
)
LAYOUTS = {
    "dp1": ["components.train.tasks_per_node=1"],
    "dp2": [],
    "tp2": ["roles.actor.tp=2"],
    "pp2": ["roles.actor.pp=2"],
    "one component": [
        "~components.rollout",
        "roles.rollout.component=train",
        "roles.reward.component=train",
    ],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Four layers, so that two pipeline stages get the same number."""
    return make_tiny_qwen2(tmp_path_factory.mktemp("models") / "tiny", num_layers=4)


def first_step(model, tmp_path, *words):
    run = submit(*tiny_grpo(model, "trainer.total_training_steps=1", *words), run_root=tmp_path)
    assert run.code == 0, run.output
    return run.steps[0]


@pytest.mark.slow
def test_the_first_step_does_not_depend_on_the_actors_layout(model, tmp_path):
    steps = {name: first_step(model, tmp_path / name, *words) for name, words in LAYOUTS.items()}
    for name in LAYOUTS:
        for metric in SAME:
            expected = steps["dp1"][metric]
            assert steps[name][metric] == pytest.approx(expected, rel=1e-5, abs=1e-7), (
                name,
                metric,
            )
    assert steps["dp1"]["actor/grad_norm"] > 0


def assert_greedy(model_folder, samples):
    """Each sampled token is the argmax of a plain transformers forward, or within 1e-4 of it."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for sample in samples:
        prompt = tokenizer(sample["prompt"], add_special_tokens=False)["input_ids"]
        response = tokenizer(sample["response"], add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(response).unsqueeze(1))[:, 0]
        assert (logits.max(-1).values - chosen).max() <= 1e-4


@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_after_a_sync_the_rollout_samples_from_the_exported_weights(model, tmp_path, engine):
    words = ["trainer.num_samples=16", "trainer.export=true", "roles.actor.optim.lr=3e-3"]
    words += ["roles.actor.pp=2"]
    if engine == "vllm":
        words += ["roles.rollout.engine=vllm", "roles.rollout.options={}"]
        words += ["components.rollout.tasks_per_node=2", "roles.rollout.tp=2"]
    run = submit(*tiny_grpo(model, *words), run_root=tmp_path)
    assert run.code == 0, run.output
    samples = [json.loads(s) for s in (run.run_dir / "samples.jsonl").read_text().splitlines()]
    assert_greedy(model, [s for s in samples if s["step"] == 0])
    assert_greedy(run.run_dir / "export", [s for s in samples if s["step"] == 2])
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(run.run_dir / "export", dtype=torch.float32)
    old = dict(before.named_parameters())
    assert all(not torch.equal(p, old[name]) for name, p in after.named_parameters())
    for step in run.steps:
        assert step["sync/received_over_shard"] == 1.0
        assert step["training/rollout_logprobs_diff_mean"] < 1e-4
        assert step["actor/grad_norm"] > 0
