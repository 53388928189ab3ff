"""`python -m rlhpc.submit` as a user calls it, up to the point where ranks would start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.config.load import read_config
from rlhpc.plan import read_plan
from rlhpc.run_folder import point_latest
from rlhpc.submit import main
from tests.small_runs import make_model_folder, quickstart_overrides

ROOT = Path(__file__).resolve().parents[2]

STEPS = ("trainer.total_training_steps=160", "data.train_batch_size=32")

LOGIN_NODE = """
import os, sys
from rlhpc.submit import main
code = main(sys.argv[1:])
spent = sum(os.times()[:4])
slow = sorted({"torch", "transformers", "vllm", "megatron"} & set(sys.modules))
print(f"code={code} spent={spent:.2f} slow={slow}", file=sys.stderr)
"""


def only_run(folder: Path) -> Path:
    """The one run folder below ``folder``."""
    (run,) = (folder / "runs").glob("quickstart-*")
    return run


def on_login_node(*arguments: str) -> str:
    """The last line that a fresh process says after running submit with ``arguments``."""
    done = subprocess.run(
        [sys.executable, "-c", LOGIN_NODE, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    return done.stderr.splitlines()[-1]


def test_submit_answers_in_a_second_without_torch(tmp_path: Path) -> None:
    answer = on_login_node("--dry-run", *quickstart_overrides(make_model_folder(tmp_path)))
    assert "code=0" in answer
    assert "slow=[]" in answer
    # CPU seconds, git's included: what the code needs, not what a busy machine adds.
    assert float(answer.split("spent=")[1].split()[0]) < 1.0


def test_a_refusal_answers_in_two_seconds_without_torch(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    overrides = quickstart_overrides(folder, "roles.actor.tp=3", "seeed=1")
    answer = on_login_node(*overrides)
    assert "code=2" in answer
    assert "slow=[]" in answer
    assert float(answer.split("spent=")[1].split()[0]) < 2.0


def test_a_refused_config_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_model_folder(tmp_path)
    assert main(quickstart_overrides(folder, "algorithm.group_size=1", "roles.rollout.tp=2")) == 2
    said = capsys.readouterr().err
    assert said.startswith("3 problems in the config; nothing was submitted:\n  1. ")
    assert "roles.rollout.tp: tp=2 is not served by engine hf" in said
    assert not (folder / "runs").exists()


def test_a_dry_run_writes_a_folder_that_is_enough_to_rerun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_model_folder(tmp_path)
    assert main(["--dry-run", *quickstart_overrides(folder, *STEPS)]) == 0
    run = only_run(folder)
    assert run.name.startswith("quickstart-20")
    config, plan = read_config(run / "config.yaml"), read_plan(run / "plan.json")
    assert (plan.run_dir, plan.total_steps, plan.num_ranks) == (str(run), 160, 3)
    assert Path(config.model.path).is_absolute()
    assert (run / "code" / "rlhpc" / "worker.py").is_file()
    assert not list((run / "code").rglob("__pycache__"))
    version = json.loads((run / "version.json").read_text())
    assert version["packages"]["hydra-core"]
    assert str(run) in capsys.readouterr().out


def test_a_dry_run_for_slurm_writes_the_job_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # a laptop: no sinfo, no git
    folder = make_model_folder(tmp_path)
    assert main(["--dry-run", *quickstart_overrides(folder, "cluster=devcluster")]) == 0
    said = capsys.readouterr()
    run = only_run(folder)
    assert f"sbatch {run}/job.sbatch" in said.out
    assert "partitions were not checked: sinfo is not on PATH" in said.err
    assert (run / "job.sbatch").read_text().count("#SBATCH hetjob") == 1
    assert (run / "submitit" / "submitted.pkl").is_file()


def test_without_slurm_a_real_submit_fails_before_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = make_model_folder(tmp_path)
    assert main(quickstart_overrides(folder, "cluster=devcluster")) == 1
    assert "sinfo is not on PATH; expected a Slurm login node" in capsys.readouterr().err
    assert not (folder / "runs").exists()


TABLE = """\
component place role engine ranks mesh dtype GiB/rank
train 1 x 2 ranks actor megatron 0-1 dp2 fp32 0.1
rollout 1 x 1 rank rollout hf 2 1 rank fp32 0.0
reward function 2 1 rank - -
"""


def test_the_table_shows_where_every_role_lives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dry-run", *quickstart_overrides(make_model_folder(tmp_path), *STEPS)]) == 0
    said = capsys.readouterr().out
    assert "grpo, 160 steps of 32 prompts x 16; model" in said
    header, _, *rows = said.splitlines()[3:8]
    assert [" ".join(line.split()) for line in (header, *rows)] == TABLE.splitlines()


def test_modules_of_ones_own_travel_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards").mkdir()
    (tmp_path / "my_rewards" / "sums.py").write_text(
        "import beside\n\ndef score(*args):\n    return 1.0\n"
    )
    (tmp_path / "my_rewards" / "__init__.py").write_text("raise ImportError('not on login')\n")
    (tmp_path / "my_rewards" / "table.bin").write_bytes(bytes(1 << 21))
    (tmp_path / "beside.py").write_text("import json, hydra\n")
    (tmp_path / "unused.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    overrides = quickstart_overrides(
        make_model_folder(tmp_path), "reward.function=my_rewards.sums.score"
    )
    assert main(["--dry-run", *overrides]) == 0
    code = only_run(tmp_path) / "code"
    assert sorted(p.name for p in code.iterdir()) == ["beside.py", "my_rewards", "rlhpc"]
    assert sorted(p.name for p in (code / "my_rewards").iterdir()) == ["__init__.py", "sums.py"]


def test_two_submits_at_once_get_folders_of_their_own(tmp_path: Path) -> None:
    overrides = quickstart_overrides(make_model_folder(tmp_path))
    for _ in range(2):
        assert main(["--dry-run", *overrides]) == 0
    assert len(list((tmp_path / "runs").glob("quickstart-*"))) == 2


def test_latest_points_to_the_run_that_starts_last(tmp_path: Path) -> None:
    overrides = quickstart_overrides(make_model_folder(tmp_path))
    assert main(["--dry-run", *overrides]) == 0
    latest = tmp_path / "runs" / "latest"
    assert not latest.is_symlink()
    for name in ("a", "b"):
        point_latest(latest.parent / name)
    assert os.readlink(latest) == "b"
    assert not list(latest.parent.glob(".latest*"))


def test_submit_without_arguments_lists_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    said = capsys.readouterr().err
    assert "model.path: no value is given" in said
    assert "components: no component is configured" in said


def test_a_slurm_that_does_not_answer_keeps_its_words_and_gets_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho 'Unable to contact it' >&2; exit 1\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(quickstart_overrides(make_model_folder(tmp_path), "cluster=devcluster")) == 1
    said = capsys.readouterr().err
    assert "failed:\nUnable to contact it\nIs this a login node" in said
    assert 'eval "$(./launch/devcluster env)"' in said


def test_missing_packages_stop_a_run_and_are_told_in_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = quickstart_overrides(make_model_folder(tmp_path))
    assert main(["--dry-run", *overrides]) == 0  # imports what submit needs
    capsys.readouterr()
    (tmp_path / "torch.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(ROOT)])
    assert main(["--dry-run", *overrides]) == 0
    assert "note: roles.rollout.engine: transformers, " in capsys.readouterr().err
    assert main(overrides) == 2
    assert "psutil, megatron.core cannot be found by " in capsys.readouterr().err
