"""A generating rollout streams finished rows and takes weight syncs between two engine steps."""

from __future__ import annotations

import json
import sys

import pytest

from rlhpc.local import run_local
from rlhpc.run_folder import make_run_folder
from rlhpc.submit import prepare
from tests.e2e.runs import ROOT, leftovers, tiny_grpo

ENGINES = {
    "hf": [],
    "vllm": [
        "roles.rollout.engine=vllm",
        "roles.rollout.options={}",
        "components.rollout.tasks_per_node=2",
        "roles.rollout.tp=2",
    ],
}


@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_syncs_are_taken_while_rows_are_sampled(tiny_qwen2, tmp_path, monkeypatch, engine):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = [*ENGINES[engine], "data.max_response_length=100", f"run_root={tmp_path}"]
    config, plan = prepare(tiny_grpo(tiny_qwen2, *words))
    make_run_folder(config, plan)
    command = [sys.executable, "-u", "-m", "tests.e2e.scripted", plan.run_dir]
    logs = plan.path / "logs" / "latest"
    code = run_local(config, plan, command=command)
    assert code == 0, "\n".join(p.read_text() for p in logs.iterdir())
    seen = json.loads((plan.path / "seen.json").read_text())
    assert seen.count("sync, generating") == 2
    assert seen[0].endswith("rows")
    assert leftovers(plan.run_dir) == []
