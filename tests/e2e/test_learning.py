"""The quickstart's recipe learns, and its negative control does not."""

from __future__ import annotations

import pytest

from tests.e2e.runs import submit


def accuracies(run):
    name = "val-core/addition/acc/mean@1"
    return [m[name] for m in run.metrics if m.get(name) is not None]


@pytest.fixture(scope="module")
def warm_start(tiny_qwen2, tmp_path_factory):
    words = ["experiment=quickstart_sft", f"model.path={tiny_qwen2}"]
    words += [f"data.train_files={tiny_qwen2}/train.jsonl"]
    run = submit(*words, run_root=tmp_path_factory.mktemp("sft"))
    assert run.code == 0, run.output
    return run.run_dir / "export"


def train(warm_start, tiny_qwen2, tmp_path, *more):
    words = ["experiment=quickstart", f"model.path={warm_start}"]
    words += [f"data.{split}_files={tiny_qwen2}/{split}.jsonl" for split in ("train", "val")]
    words += ["trainer.total_training_steps=50", *more]
    run = submit(*words, run_root=tmp_path)
    assert run.code == 0, run.output
    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_held_out_accuracy_rises_with_true_rewards_only(warm_start, tiny_qwen2, tmp_path):
    before, *_, after = accuracies(train(warm_start, tiny_qwen2, tmp_path / "true"))
    assert before <= 0.4
    assert after - before >= 0.2
    control = train(warm_start, tiny_qwen2, tmp_path / "control", "reward.shuffle=true")
    before, *_, after = accuracies(control)
    assert after - before <= 0.05
