"""A real model as one heterogeneous job, and the same numbers from local ranks and other cuts."""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import Run, submit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
]

SAME = ("critic/rewards/mean", "actor/loss", "actor/pg_loss", "actor/grad_norm")
PROBLEMS = [
    ("A farmer has 12 hens and buys 9 more. Each hen lays 2 eggs. How many eggs are there?", "42"),
    ("Tom reads 15 pages a day for 8 days. How many pages does he read?", "120"),
    ("A box holds 24 pens. A teacher takes 7 out. How many pens are left?", "17"),
    ("Four friends share 36 sweets equally. How many sweets does each get?", "9"),
]


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> Path:
    """Word problems in the parquet columns that users of verl have."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{question} End with #### and the answer."}],
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": i, "split": "train"},
        }
        for i, (question, answer) in enumerate(PROBLEMS)
    ]
    path = tmp_path_factory.mktemp("data") / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def words(smollm2: Path, problems: Path, *more: str) -> list[str]:
    """A short run of the experiment."""
    return [
        "experiment=smollm2_gsm8k",
        f"model.path={smollm2}",
        f"data.train_files={problems}",
        "data.train_batch_size=4",
        "data.max_prompt_length=128",
        "data.max_response_length=32",
        *more,
    ]


@pytest.fixture(scope="module")
def het_run(slurm, smollm2, problems, tmp_path_factory) -> tuple[Run, list[str]]:
    """Two steps on three components, and what the queue showed meanwhile."""
    assert slurm.exists()
    seen: list[str] = []

    def watch(_: Path) -> None:
        for _ in range(600):
            out = subprocess.run(
                ["squeue", "-h", "-t", "R", "-o", "%i %P"], capture_output=True, text=True
            )
            seen[:] = sorted(out.stdout.split("\n"))[1:]
            if len(seen) == 3:
                return

    more = ["cluster=devcluster", "--wait", "trainer.total_training_steps=2"]
    more.append("trainer.export=true")
    root = tmp_path_factory.mktemp("het")
    run = submit(*words(smollm2, problems, *more), run_root=root, during=watch, timeout_s=1500)
    return run, seen


def test_three_components_train_the_real_model(het_run, smollm2):
    run, seen = het_run
    assert run.code == 0, run.output
    job = re.search(r"job (\d+) is queued", run.output)
    assert job is not None
    assert seen == [f"{job[1]}+0 a100", f"{job[1]}+1 h100", f"{job[1]}+2 a100"]
    assert len(run.steps) == 2
    for step in run.steps:
        assert all(math.isfinite(v) for v in step.values() if isinstance(v, float))
        assert step["actor/grad_norm"] > 0
        assert step["sync/received_over_shard"] == 1.0
        assert step["training/rollout_logprobs_diff_mean"] < 1e-4
        assert step["critic/zero_variance_groups"] <= 2
    before, after = (load_file(d / "model.safetensors") for d in (smollm2, run.run_dir / "export"))
    assert before.keys() == after.keys()
    assert all(not torch.equal(after[name], before[name]) for name in before)
    version = json.loads((run.run_dir / "version.json").read_text())
    assert version["rlhpc"]


@pytest.mark.parametrize(
    ("more", "tolerance"),
    [
        ([], 1e-5),
        (["components.actor.gpus_per_node=1", "roles.actor.pp=1"], 1e-5),
        (["components.actor.gpus_per_node=3", "roles.actor.pp=1", "roles.actor.tp=3"], 1e-4),
    ],
    ids=["local", "pp1", "tp3"],
)
def test_local_ranks_and_other_cuts_give_the_same_first_step(
    het_run, smollm2, problems, tmp_path, more, tolerance
):
    more = ["cluster=local", "trainer.total_training_steps=1", *more]
    run = submit(*words(smollm2, problems, *more), run_root=tmp_path, timeout_s=900)
    assert run.code == 0, run.output
    for name in SAME:
        assert run.steps[0][name] == pytest.approx(het_run[0].steps[0][name], rel=tolerance), name
