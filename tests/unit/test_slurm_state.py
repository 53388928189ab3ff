from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhpc.errors import SubmitError
from rlhpc.slurm.executor import HetWatcher
from rlhpc.slurm.state import (
    job_states,
    merge_states,
    parse_sacct,
    parse_scontrol,
    parse_squeue,
    wait_for_job,
)

SACCT = "26+1|CANCELLED by 0|0:15|n5|r.b\n26+0|FAILED|7:0|n1|r.a\n"


def stub(folder: Path, monkeypatch: pytest.MonkeyPatch, **answers: str) -> None:
    """Programs called squeue, scontrol and sacct; one without an answer fails."""
    for name in ("squeue", "scontrol", "sacct"):
        program = folder / name
        program.write_text(f"#!/bin/bash\n{answers.get(name, 'exit 1')}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_rows_of_squeue_are_components_in_order() -> None:
    states = parse_squeue("26+1|PENDING|Resources||r.b\n26+0|RUNNING|None|n[1-2]|r.a|odd\n")
    assert [(s.index, s.state, s.reason, s.nodes) for s in states] == [
        (0, "RUNNING", "", "n[1-2]"),
        (1, "PENDING", "Resources", ""),
    ]
    assert str(states[1]) == "r.b PENDING (Resources)"
    assert states[0].name == "r.a|odd"


def test_lines_of_scontrol_carry_exit_codes() -> None:
    text = (
        "JobId=27 HetJobId=26 HetJobOffset=1 JobName=r.b JobState=FAILED "
        "Reason=NonZeroExitCode ExitCode=7:0 ReqNodeList=(null) NodeList=n5 Comment=x=y\n"
        "JobId=30 JobName=plain JobState=RUNNING Reason=None ExitCode=0:0 NodeList=n1\n"
    )
    plain, second = parse_scontrol(text)
    assert (second.index, second.exit_code, second.nodes) == (1, "7:0", "n5")
    assert (plain.index, plain.exit_code) == (0, "")


def test_a_live_component_keeps_the_job_live_and_the_worst_names_it() -> None:
    ended = parse_sacct(SACCT)
    assert merge_states(ended) == "FAILED"
    assert merge_states(ended[1:]) == "CANCELLED"
    assert merge_states([*ended, *parse_squeue("26+2|COMPLETING|None|n6|r.c")]) == "COMPLETING"
    assert merge_states([*ended, *parse_squeue("26+2|SOME_NEW_STATE|None|n6|r.c")]) != "FAILED"


def test_accounting_is_asked_when_the_controller_forgot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgot = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    stub(tmp_path, monkeypatch, squeue=forgot, scontrol=forgot, sacct=f"printf '{SACCT}'")
    assert [s.exit_code for s in job_states("26")] == ["7:0", "0:15"]
    watcher = HetWatcher()
    assert watcher.is_done("26")
    assert watcher.get_info("26")["States"] == "FAILED|CANCELLED"


def test_a_silent_slurm_is_an_error_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, monkeypatch)
    with pytest.raises(SubmitError, match="does not answer about job 26"):
        job_states("26")
    with pytest.raises(SubmitError, match="does not answer about job 26"):
        wait_for_job("26", poll_s=0.01, patience_s=0.05)
    watcher = HetWatcher()
    assert not watcher.is_done("26")
    assert watcher.get_state("26") == "UNKNOWN"
