"""Job scripts as they are written: every change of the text is seen in review."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.config.schema import ComponentConfig, RunConfig
from rlhpc.slurm.script import render_job_script
from tests.jobs import make_config, plan_of, three_components


def one_component() -> RunConfig:
    """All roles on the same two GPUs: a plain job."""
    return make_config(
        {"all": ComponentConfig(partition="a100", gpus_per_node=2, mem="16G", exclusive=True)},
        {"actor": ("all", None), "rollout": ("all", None), "reward": ("all", None)},
    )


def split_with_extras() -> RunConfig:
    """Roles that split a node, awkward values, a container, options removed and added."""
    config = make_config(
        {
            "train": ComponentConfig(
                partition="a100",
                nodes=2,
                gpus_per_node=4,
                gpu_type="a100",
                cpus_per_task=6,
                account="lab",
                qos="high",
                constraint="a100&80gb",
                reservation="course",
                sbatch={"distribution": None, "no_kill": True, "comment": "it's # 1", "nice": 5},
                setup=["module load cuda/12.4", 'echo "on $(hostname)"'],
                launch_prefix=["apptainer", "exec", "--nv", "my image.sif"],
                environment={"NOTE": 'it\'s $HOME "quoted"', "LIST": "a b"},
            ),
            "score": ComponentConfig(partition="cpu", tasks_per_node=2, time="1-00:00:00"),
        },
        {"actor": ("train", "0-1"), "rollout": ("train", "2-3"), "reward": ("score", None)},
    )
    config.cluster.environment = {"NCCL_DEBUG": "WARN", "LIST": "is overridden"}
    config.cluster.setup = ["ulimit -n 65536"]
    config.cluster.offline = False
    return config


CASES = {
    "one_component": one_component,
    "three_components": three_components,
    "split_with_extras": split_with_extras,
}


def render(make: Callable[[], RunConfig]) -> str:
    config = make()
    command = ["python", "-u", "-m", "submitit.core._submit", "/runs/a b/submitit"]
    text = render_job_script(config, plan_of(config, "/runs/a b"), command=command)
    return text.replace(sys.executable, "python")


@pytest.mark.parametrize("name", CASES)
def test_a_job_script_is_as_reviewed(name: str, check_golden: Callable[[str, str], None]) -> None:
    check_golden(f"{name}.sbatch", render(CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_a_job_script_is_sound_bash(name: str, tmp_path: Path) -> None:
    text = render(CASES[name])
    rank_script = text.split("RLHPC_RANK_SCRIPT'\n")[1].split("\nRLHPC_RANK_SCRIPT\n")[0]
    for part, content in {"job": text, "rank": "#!/bin/bash\n" + rank_script + "\n"}.items():
        script = tmp_path / f"{part}.sh"
        script.write_text(content)
        subprocess.run(["bash", "-n", str(script)], check=True)
        if shutil.which("shellcheck"):
            result = subprocess.run(
                ["shellcheck", "--severity=warning", str(script)], capture_output=True, text=True
            )
            assert result.returncode == 0, result.stdout


def test_a_plain_job_has_no_trace_of_components() -> None:
    text = render(one_component)
    assert "hetjob" not in text
    assert "het-group" not in text
