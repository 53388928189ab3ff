"""States of a job's components, from squeue, then scontrol, then sacct.

Works without slurmdbd: the controller knows a job for minutes after its end (MinJobAge), sacct for
longer where there is accounting.  A job that nobody knows any more is GONE, which is final: whether
it reached its target is for DONE in its run folder to say.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rlhpc.errors import SubmitError

GONE = "GONE"
_WORST_FIRST = (
    "NODE_FAIL",
    "BOOT_FAIL",
    "OUT_OF_MEMORY",
    "TIMEOUT",
    "DEADLINE",
    "FAILED",
    "PREEMPTED",
    "CANCELLED",
    "REVOKED",
    GONE,
    "COMPLETED",
)
"""All final states; any other, known or new, counts as live."""


@dataclass(frozen=True)
class ComponentState:
    """One component of a job as Slurm sees it."""

    index: int
    name: str
    """The component's job name, `<run_id>.<component>`."""
    state: str
    """Slurm's long state without additions, or `GONE`."""
    reason: str
    """Why it is pending or how it ended; empty where Slurm says None."""
    nodes: str
    exit_code: str
    """`code:signal` of the batch script; empty while it runs."""

    @property
    def is_final(self) -> bool:
        """Whether the component will not run any more."""
        return self.state in _WORST_FIRST

    def __str__(self) -> str:
        notes = [x for x in (self.nodes, self.reason) if x]
        return f"{self.name} {self.state}" + (f" ({', '.join(notes)})" if notes else "")


def job_states(job_id: str) -> list[ComponentState]:
    """States of all components of ``job_id``, in component order.

    Raises:
        SubmitError: the controller is silent and the accounting has no record.
    """
    job_id = job_id.partition("+")[0]
    listed = _ask(["squeue", "-h", "-t", "all", "-j", job_id, "-o", "%i|%T|%r|%N|%j"])
    states = parse_squeue(listed or "")
    if states and not all(s.is_final for s in states):
        return states
    shown = _ask(["scontrol", "-o", "show", "job", job_id])
    states = parse_scontrol(shown or "") or states
    if states:
        return states
    counted = _ask(
        ["sacct", "-X", "-P", "-n", "-j", job_id, "-o", "JobID,State,ExitCode,NodeList,JobName"]
    )
    states = parse_sacct(counted or "")
    if not states and shown is None:
        raise SubmitError(
            f"Slurm does not answer about job {job_id}: scontrol failed, sacct knows nothing; "
            "expected a reachable slurmctld. Check `scontrol ping` and try again"
        )
    return states or [ComponentState(0, f"job {job_id}", GONE, "no longer known to Slurm", "", "")]


def merge_states(states: Sequence[ComponentState]) -> str:
    """One state for the whole job: that of the first live component, else the worst."""
    for state in states:
        if not state.is_final:
            return state.state
    return min((s.state for s in states), key=_WORST_FIRST.index)


def wait_for_job(
    job_id: str,
    *,
    poll_s: float = 2.0,
    on_change: Callable[[list[ComponentState]], None] | None = None,
    on_poll: Callable[[], None] | None = None,
    patience_s: float = 600.0,
) -> list[ComponentState]:
    """Wait until all components of ``job_id`` ended; return their last states.

    Args:
        job_id: The job's id.
        poll_s: Seconds between two looks.
        on_change: Called with the states whenever they changed.
        on_poll: Called at every look, for example to print what is new in a log.
        patience_s: Seconds of silence from Slurm that are taken for a restart of its daemon.

    Raises:
        SubmitError: Slurm was silent for ``patience_s``.
    """
    last: list[ComponentState] = []
    silent_since: float | None = None
    while True:
        try:
            states = job_states(job_id)
            silent_since = None
        except SubmitError:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > patience_s:
                raise
            states = last
        if states != last and on_change:
            on_change(states)
        last = states
        if on_poll:
            on_poll()
        if states and all(s.is_final for s in states):
            return states
        time.sleep(poll_s)


def parse_squeue(text: str) -> list[ComponentState]:
    """Rows of `squeue -o '%i|%T|%r|%N|%j'`."""
    rows = [line.split("|", 4) for line in text.splitlines() if line.count("|") >= 4]
    return _ordered(
        _make_state(index=_offset(row[0]), name=row[4], state=row[1], reason=row[2], nodes=row[3])
        for row in rows
    )


def parse_scontrol(text: str) -> list[ComponentState]:
    """Lines of `scontrol -o show job`."""
    rows = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines()]
    return _ordered(
        _make_state(
            index=int(row.get("HetJobOffset", "0")),
            name=row["JobName"],
            state=row["JobState"],
            reason=row["Reason"],
            nodes=row.get("NodeList", ""),
            exit_code=row["ExitCode"],
        )
        for row in rows
        if "JobState" in row
    )


def parse_sacct(text: str) -> list[ComponentState]:
    """Rows of `sacct -X -P -n -o JobID,State,ExitCode,NodeList,JobName`."""
    rows = [line.split("|", 4) for line in text.splitlines() if line.count("|") >= 4]
    return _ordered(
        _make_state(
            index=_offset(row[0]), name=row[4], state=row[1], nodes=row[3], exit_code=row[2]
        )
        for row in rows
    )


def _make_state(
    *, index: int, name: str, state: str, nodes: str, reason: str = "", exit_code: str = ""
) -> ComponentState:
    """A state without Slurm's ways of saying nothing and without `CANCELLED by 0`'s tail."""
    state = state.split()[0].rstrip("+")
    empty = ("None", "(null)", "None assigned")
    return ComponentState(
        index=index,
        name=name,
        state=state,
        reason="" if reason in empty else reason,
        nodes="" if nodes in empty else nodes,
        exit_code=exit_code if state in _WORST_FIRST else "",
    )


def _ordered(states: Iterable[ComponentState]) -> list[ComponentState]:
    return sorted(states, key=lambda s: s.index)


def _offset(job_id: str) -> int:
    """Component of `123+2`: 2; a plain id is component 0."""
    return int(job_id.partition("+")[2] or 0)


def _ask(command: list[str]) -> str | None:
    """Output of a query; empty if Slurm answers that it knows no such job, None if it is silent."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    if result.returncode == 0:
        return result.stdout
    return "" if "Invalid job id" in result.stderr else None
