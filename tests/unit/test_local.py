from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlhpc.config.schema import Device, RunConfig
from rlhpc.errors import SubmitError
from rlhpc.local import rank_environment, run_local
from rlhpc.plan import RunPlan
from tests.jobs import plan_of, three_components

ROOT = Path(__file__).parents[2]
HEAD = """
import json, os, pathlib, subprocess, sys, time
run = pathlib.Path(os.environ["RLHPC_RUN_DIR"])
rank = int(os.environ["SLURM_PROCID"])
(run / f"pid_{rank}").write_text(str(os.getpid()))
print("hello from", rank, flush=True)
"""


def make_run(tmp_path: Path, code: str) -> tuple[RunConfig, RunPlan, list[str]]:
    config = three_components()
    (tmp_path / "task.py").write_text(HEAD + code)
    return config, plan_of(config, tmp_path), [sys.executable, str(tmp_path / "task.py")]


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def alive_pids(tmp_path: Path) -> list[int]:
    pids = [int(p.read_text() or 0) for p in tmp_path.glob("pid_*")]
    return [pid for pid in pids if is_alive(pid)]


def test_ranks_get_slurms_variables_and_their_own_logs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
(run / f"env_{rank}.json").write_text(json.dumps(dict(os.environ, CWD=os.getcwd())))
if rank == 0:
    (run / "console.log").write_text("[actor] step 1\\n")
    while len(list(run.glob("env_*"))) < 5: time.sleep(0.05)
    (run / "DONE").touch()
"""
    config, plan, command = make_run(tmp_path, code)
    config.components["reference"].setup = ["export FROM_SETUP='a b'"]
    config.components["rollout"].launch_prefix = ["env", "FROM_PREFIX=c d"]
    assert run_local(config, plan, command=command) == 0
    assert "[actor] step 1\n" in capfd.readouterr().out
    env = [json.loads((tmp_path / f"env_{rank}.json").read_text()) for rank in range(5)]
    assert [e["SLURM_LOCALID"] for e in env] == ["0", "1", "0", "0", "0"]
    assert {e["SLURM_NTASKS"] for e in env} == {"5"}
    assert {e["SLURM_JOB_ID"] for e in env} == {f"local-{os.getpid()}"}
    assert {e["PYTHONPATH"].split(":")[0] for e in env} == {f"{tmp_path}/code"}
    assert (env[4]["FROM_SETUP"], env[2]["FROM_PREFIX"]) == ("a b", "c d")
    assert {e["CWD"] for e in env} == {str(tmp_path)}
    latest = tmp_path / "logs" / "latest"
    assert (latest / "reference_4.log").read_text() == "hello from 4\n"
    assert len(list(latest.iterdir())) == 5


def test_one_failing_rank_ends_all_and_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
if rank == 3:
    while len(list(run.glob("pid_*"))) < 5: time.sleep(0.05)
    (run / "failures").mkdir()
    (run / "failures" / "3.json").write_text(json.dumps({"message": "rollout dp1: boom"}))
    sys.exit(7)
time.sleep(100)
"""
    config, plan, command = make_run(tmp_path, code)
    begin = time.monotonic()
    assert run_local(config, plan, command=command) == 7
    assert time.monotonic() - begin < 10
    assert "The run failed.\nrollout dp1: boom" in capfd.readouterr().out
    assert alive_pids(tmp_path) == []


def test_a_killed_rank_that_left_no_word_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "if rank == 0: os.kill(os.getpid(), 9)\ntime.sleep(100)"
    config, plan, command = make_run(tmp_path, code)
    assert run_local(config, plan, command=command) == 137
    assert "rank 0 ended with 137, log actor_0.log, without DONE" in capfd.readouterr().out


def test_all_ranks_ending_with_0_is_no_success(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, plan, command = make_run(tmp_path, "")
    (tmp_path / "DONE").touch()
    assert run_local(config, plan, command=command) == 98
    assert "all ranks ended with 0, without DONE" in capfd.readouterr().out


def test_a_rank_that_ignores_term_and_its_children_are_killed(tmp_path: Path) -> None:
    code = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 1:
    child = subprocess.Popen(["sleep", "100"])
    (run / "pid_child").write_text(str(child.pid))
    (run / "ready").touch()
while not (run / "ready").exists(): time.sleep(0.05)
if rank == 2: sys.exit(1)
time.sleep(100)
"""
    config, plan, command = make_run(tmp_path, code)
    assert run_local(config, plan, command=command) == 1
    assert alive_pids(tmp_path) == []


def start_launcher(tmp_path: Path, code: str, *, prefix: str = "") -> subprocess.Popen[str]:
    """A process that runs `run_local`, once all its ranks are up."""
    _, _, command = make_run(tmp_path, code)
    program = (
        "import sys, signal\n"
        "from rlhpc.local import run_local\n"
        "from tests.jobs import plan_of, three_components\n"
        f"config = three_components()\n{prefix}\n"
        f"sys.exit(run_local(config, plan_of(config, {str(tmp_path)!r}), command={command!r}))\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, process_group=0, stdout=-1, text=True
    )
    end = time.monotonic() + 20
    while len(list(tmp_path.glob("ready_*"))) < 5 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(alive_pids(tmp_path)) >= 5
    return launcher


READY = '(run / f"ready_{rank}").touch()\n'
STUBBORN = """
import signal
def word(*_):
    (run / "failure.json").write_text(json.dumps({"message": "signal SIGTERM"}))
signal.signal(signal.SIGTERM, word)
child = subprocess.Popen(["sleep", "100"])
(run / f"pid_child_{rank}").write_text(str(child.pid))
"""
SLEEP = READY + "while True: time.sleep(1)"


def await_no_rank(tmp_path: Path) -> None:
    end = time.monotonic() + 3
    while alive_pids(tmp_path) and time.monotonic() < end:
        time.sleep(0.05)
    assert alive_pids(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "word"),
    [("SIGINT", "interrupted"), ("SIGTERM", "terminated"), ("SIGHUP", "terminated")],
)
def test_a_signal_to_the_launcher_ends_all_and_is_the_cause(
    tmp_path: Path, name: str, word: str
) -> None:
    number = signal.Signals[name]
    launcher = start_launcher(tmp_path, STUBBORN + SLEEP)
    launcher.send_signal(number)
    time.sleep(1)
    launcher.send_signal(number)  # must not break off the end of the ranks
    out, _ = launcher.communicate(timeout=15)
    assert launcher.returncode == 128 + number
    message = f"the launcher was {word} ({name})"
    assert json.loads((tmp_path / "failure.json").read_text()) == {"message": message}
    assert (message in out) == (name != "SIGHUP")
    assert alive_pids(tmp_path) == []


def test_an_earlier_cause_stays_when_the_launcher_is_terminated(tmp_path: Path) -> None:
    code = '(run / "failure.json").write_text(json.dumps({"message": "boom"}))\n'
    launcher = start_launcher(tmp_path, code + SLEEP)
    launcher.terminate()
    out, _ = launcher.communicate(timeout=15)
    assert (launcher.returncode, "The run failed.\nboom" in out) == (143, True)
    assert json.loads((tmp_path / "failure.json").read_text()) == {"message": "boom"}


def test_a_launcher_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    prefix = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    launcher = start_launcher(tmp_path, SLEEP, prefix=prefix)
    launcher.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired, match="timed out"):
        launcher.wait(timeout=1)
    assert len(alive_pids(tmp_path)) == 5
    launcher.terminate()
    launcher.communicate(timeout=15)


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    launcher = start_launcher(tmp_path, SLEEP)
    launcher.kill()
    launcher.communicate(timeout=15)
    await_no_rank(tmp_path)


def test_the_callers_handlers_are_back_after_a_run_and_other_threads_need_none(
    tmp_path: Path,
) -> None:
    config, plan, command = make_run(tmp_path, "")
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(n) for n in numbers]
    assert run_local(config, plan, command=command) == 98
    assert [signal.getsignal(n) for n in numbers] == before
    with ThreadPoolExecutor() as pool:
        assert pool.submit(run_local, config, plan, command=command).result() == 98


def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    config, plan, _ = make_run(tmp_path, "")
    with pytest.raises(SubmitError, match=r"no-such-program cannot be started"):
        run_local(config, plan, command=["no-such-program"])


def test_ranks_see_the_gpus_of_their_node_where_there_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, plan, _ = make_run(tmp_path, "")
    config.cluster.device = Device.cuda

    def visible(rank: int) -> str | None:
        return rank_environment(config, plan, rank, job_id="x").get("CUDA_VISIBLE_DEVICES")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6,7")
    assert [visible(rank) for rank in range(5)] == ["3,4", "3,4", "5", "6", "7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert visible(4) == "3"
