"""Reward functions of every temper, loaded by dotted path in a child process."""

# ruff: noqa: ARG001

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path


def length(data_source, solution_str, ground_truth, extra_info=None, *, scale=1.0):
    return {"score": len(solution_str) * scale, "truncated": extra_info["truncated"], "note": "x"}


def moody(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang":
        time.sleep(3600)
    if solution_str == "loop":
        while True:
            pass
    if solution_str == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "raise":
        raise KeyError("answer")
    if solution_str == "exit":
        raise SystemExit(3)
    print("this line must not disturb the answers")
    return {"none": None, "nan": float("nan"), "text": "1", "dict": {"acc": 1.0}}.get(
        solution_str, 1
    )


def report_pid(data_source, solution_str, ground_truth, extra_info=None):
    Path(solution_str).write_text(str(os.getpid()))
    return 0.0


def start_sleep(data_source, solution_str, ground_truth, extra_info=None, *, how="wait"):
    if ground_truth == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    process = subprocess.Popen(["sleep", solution_str], start_new_session=how == "session")
    if how == "native":  # no signal handler of Python's runs in there
        ctypes.PyDLL(None).sleep(3600)
    if ground_truth == "hang":
        process.wait()
    return 0.0


def broken(data_source, solution_str, ground_truth, extra_info=None):
    raise ZeroDivisionError("always")


def wants_more(data_source, solution_str, ground_truth, judge, extra_info=None):
    return 0.0


NOT_A_FUNCTION = 3
