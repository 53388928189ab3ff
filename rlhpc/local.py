"""The plan's ranks as processes of this machine, with the variables that Slurm would give them.

No placement and no limits: all components are here.  As in the job, one failing rank ends all
within seconds, every rank has its own log, and only DONE counts as success.  Ctrl-C, SIGTERM and
SIGHUP end all ranks, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rlhpc.config.schema import Device, RunConfig
from rlhpc.errors import SubmitError
from rlhpc.outcome import FileFollower, clear_outcome, failure_message, is_done, write_failure
from rlhpc.plan import RunPlan
from rlhpc.slurm.environ import clean_environment, rank_variables

_POLL_S = 0.1
_GRACE_S = 5.0
"""Between TERM and KILL."""
_CAUSE_S = 2.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_local(
    config: RunConfig,
    plan: RunPlan,
    *,
    python: str = sys.executable,
    command: list[str] | None = None,
) -> int:
    """Run ``plan`` to its end, showing its console; return 0 only if it reached its target.

    A signal that ends the launcher ends all ranks; the code is then 128 + its number, and
    failure.json names it unless a rank had failed before.

    Args:
        config: The run's config.
        plan: Its plan; `plan.run_dir` holds plan.json and config.yaml.
        python: Interpreter of the ranks.
        command: What each rank runs; None runs the worker.
    """
    job_id = f"local-{os.getpid()}"
    log_dir = _make_log_dir(plan.path, job_id)
    clear_outcome(plan.path)
    console = FileFollower(plan.path / "console.log", from_end=True)
    words = command or [python, "-u", "-m", "rlhpc.worker", plan.run_dir]
    ranks: list[subprocess.Popen[bytes]] = []
    code, seen, stop = 98, "all ranks ended with 0", None
    with _stop_signals() as stops:
        try:
            for rank in range(plan.num_ranks):
                ranks.append(_start_rank(config, plan, rank, job_id=job_id, command=words))
            failed = _watch(ranks, console, stops)
            if failed is not None:
                code = _exit_code(ranks[failed])
                seen = f"rank {failed} ended with {code}, log {plan.log_name(failed)}"
                _await_first_cause(ranks, plan.path)
            elif stops:
                code, seen, stop = 128 + stops[0], _stop_message(stops[0]), stops[0]
        finally:
            has_cause = (plan.path / "failure.json").exists()
            _end_all(ranks)
    if stop and not has_cause and not is_done(plan.path):
        write_failure(plan.path, seen)  # what ranks said since is the consequence
    if stop == signal.SIGHUP:  # the terminal is gone
        return 0 if is_done(plan.path) else code
    _show(console)
    if is_done(plan.path):
        return 0
    print("The run failed.")
    print(failure_message(plan.path, log_dir, otherwise=seen), flush=True)
    return code


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[signal.Signals]]:
    """The stop signals that came, in order; in other threads than the main one always empty.

    They are noted and not raised, so that a second one cannot break off the end of the ranks.  One
    that the caller has us ignore, as nohup does, stays ignored.
    """
    came: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = {n: signal.getsignal(n) for n in _STOP_SIGNALS}
    ours = [n for n, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    try:
        for number in ours:
            signal.signal(number, lambda n, _: came.append(signal.Signals(n)))
        yield came
    finally:
        for number in ours:
            signal.signal(number, before[number])


def _stop_message(number: signal.Signals) -> str:
    what = "interrupted" if number == signal.SIGINT else "terminated"
    return f"the launcher was {what} ({number.name})"


def _make_log_dir(run_dir: Path, job_id: str) -> Path:
    """The attempt's log folder, with `logs/latest` pointing to it."""
    log_dir = run_dir / "logs" / job_id
    log_dir.mkdir(parents=True, exist_ok=True)
    latest = run_dir / "logs" / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(job_id)
    return log_dir


def _start_rank(
    config: RunConfig, plan: RunPlan, rank: int, *, job_id: str, command: list[str]
) -> subprocess.Popen[bytes]:
    """Start ``rank`` in a process group of its own; it dies with this process."""
    c = config.components[plan.component_of(rank).name]
    words = [*c.launch_prefix, *command]
    setup = [*config.cluster.setup, *c.setup]
    if setup:
        code = shlex.quote(f"{plan.run_dir}/code")
        path = f"export PYTHONPATH={code}${{PYTHONPATH:+:$PYTHONPATH}}"
        words = ["bash", "-c", "\n".join([*setup, path, f"exec {shlex.join(words)}"])]
    parent = os.getpid()
    with (plan.path / "logs" / job_id / plan.log_name(rank)).open("ab") as log:
        try:
            return subprocess.Popen(
                words,
                env=rank_environment(config, plan, rank, job_id=job_id),
                # `python -m` looks there before PYTHONPATH: no other rlhpc must be there
                cwd=plan.path,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=lambda: _die_with(parent),
            )
        except FileNotFoundError as error:
            raise SubmitError(
                f"{error.filename} cannot be started; expected a program on PATH. "
                "Change components.*.launch_prefix"
            ) from None


def rank_environment(config: RunConfig, plan: RunPlan, rank: int, *, job_id: str) -> dict[str, str]:
    """Everything that ``rank`` finds in its environment."""
    component = plan.component_of(rank)
    c = config.components[component.name]
    env, _ = clean_environment(os.environ)
    env.setdefault("OMP_NUM_THREADS", str(c.cpus_per_task))
    env |= rank_variables(config, c)
    paths = [f"{plan.run_dir}/code", *filter(None, [env.get("PYTHONPATH")])]
    place = rank - component.first_rank
    env |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "RLHPC_RUN_DIR": plan.run_dir,
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(plan.num_ranks),
        "SLURM_LOCALID": str(place % component.ranks_per_node),
        "SLURM_JOB_ID": job_id,
        "SLURMD_NODENAME": socket.gethostname(),
    }
    if config.cluster.device is Device.cuda:
        env |= _node_devices(plan, rank, env.get("CUDA_VISIBLE_DEVICES"))
    return env


def _node_devices(plan: RunPlan, rank: int, visible: str | None) -> dict[str, str]:
    """The GPUs of the rank's node of its component, so that local rank is the device as in a job.

    Only where this machine has a GPU for every rank; else the ranks see all and share.
    """
    if visible is None:
        found = Path("/dev").glob("nvidia[0-9]*")
        devices = sorted((p.name.removeprefix("nvidia") for p in found), key=int)
    else:
        devices = visible.split(",")
    if len(devices) < plan.num_ranks:
        return {}
    component = plan.component_of(rank)
    first = rank - (rank - component.first_rank) % component.ranks_per_node
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[first : first + component.ranks_per_node])}


def _die_with(parent: int) -> None:
    """In the child: be killed when the launcher dies, however it dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _watch(
    ranks: list[subprocess.Popen[bytes]], console: FileFollower, stops: list[signal.Signals]
) -> int | None:
    """Show the console until one rank failed (return it), all ended or a signal came (None)."""
    while not stops:
        _show(console)
        codes = [rank.poll() for rank in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            return failed[0]
        if all(code == 0 for code in codes):
            return None
        time.sleep(_POLL_S)
    return None


def _exit_code(rank: subprocess.Popen[bytes]) -> int:
    """The code of a rank that ended, as a shell gives it: 137 for KILL."""
    return rank.returncode if rank.returncode > 0 else 128 - rank.returncode


def _await_first_cause(ranks: list[subprocess.Popen[bytes]], run_dir: Path) -> None:
    """Give rank 0 the moment it needs to write down which rank broke, before TERM ends it."""
    end = time.monotonic() + _CAUSE_S
    while time.monotonic() < end and ranks[0].poll() is None:
        if (run_dir / "failure.json").exists():
            return
        time.sleep(_POLL_S)


def _show(console: FileFollower) -> None:
    sys.stdout.write(console.read_new())
    sys.stdout.flush()


def _end_all(ranks: list[subprocess.Popen[bytes]]) -> None:
    """TERM to every rank's group, KILL to what is left after the grace time."""
    for rank in ranks:
        _signal_group(rank, signal.SIGTERM)
    end = time.monotonic() + _GRACE_S
    while time.monotonic() < end and any(rank.poll() is None for rank in ranks):
        time.sleep(_POLL_S)
    for rank in ranks:
        _signal_group(rank, signal.SIGKILL)
        rank.wait()


def _signal_group(rank: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the rank and what it started, also when the rank itself is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.pid, number)
