"""Rewards from a Python function, row by row, in a process that can be killed.

A hanging grader (symbolic maths does hang) costs its row and a new process, never the run.  A row
without a usable reward gets NaN and a message, never 0.  Local to one rank; knows nothing of
tokens.

    rank ----row----> child (function)      one row at a time, each with its own deadline
         <--reward--                        late or dead: killed with all that it started, started
                                            anew, the row has no reward
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import Any

from rlhpc.config.engines import FunctionOptions
from rlhpc.errors import CommandError, ConfigError

START_TIMEOUT_S = 300.0
"""Deadline of importing the function; shared file systems are slow on the first import."""

END_TIMEOUT_S = 5.0
"""How long the child's guard may take to end the child and all that the function started."""

MAX_FAILURES_AT_FIRST = 8
"""A function that has never worked is given up after so many rows; one odd row is no proof."""

MAX_FAILURES_IN_A_ROW = 64
"""A function that has worked before is given up after so many rows without a reward."""


@dataclass(frozen=True)
class ScoreItem:
    """One row to score."""

    row_id: int
    data_source: str
    solution_str: str
    """The response without special tokens."""
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False
    """Ended by the length limit; the function sees it as `extra_info["truncated"]`."""


@dataclass(frozen=True)
class ScoreResult:
    """One row's reward."""

    row_id: int
    reward: float
    """NaN when the row has none."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further numbers that the function returned, for example `acc`."""
    error: str = ""
    """Why there is no reward."""


class FunctionEngine:
    """Scores rows with the function at a dotted path.  Local; one child process."""

    def __init__(self, *, function: str, kwargs: dict[str, Any], options: FunctionOptions) -> None:
        """Start the child and load the function.

        Args:
            function: dotted path of `compute_score(data_source, solution_str, ground_truth,
            extra_info=None, **kwargs)`
                that returns a number, or a dict with `score`.
            kwargs: keyword arguments of each call.
            options: deadline of a row.

        Raises:
            ConfigError: the function does not exist or cannot take the arguments.
            CommandError: importing it failed.
        """
        self._function = function
        self._kwargs = kwargs
        self._options = options
        self._any_success = False
        self._failures_in_a_row = 0
        self._start()

    def score(self, items: Sequence[ScoreItem]) -> list[ScoreResult]:
        """The rewards of ``items``, in order.

        Raises:
            CommandError: no row got a reward, now and for `MAX_FAILURES_IN_A_ROW` rows
                (`MAX_FAILURES_AT_FIRST` for a function that has never worked); names the function
                in one line and carries the first traceback as a note.
        """
        results, first_traceback = [], ""
        for item in items:
            result, trace = self._score_one(item)
            results.append(result)
            first_traceback = first_traceback or trace
        if any(not r.error for r in results):
            self._any_success, self._failures_in_a_row = True, 0
        elif results:
            self._failures_in_a_row += len(results)
            most = MAX_FAILURES_IN_A_ROW if self._any_success else MAX_FAILURES_AT_FIRST
            if self._failures_in_a_row >= most:
                raise _with_traceback(
                    f"reward.function {self._function} gave no reward for any of "
                    f"{self._failures_in_a_row} rows; "
                    f"expected a finite number for each. First: {results[0].error}. "
                    "Mend the function or reward.kwargs.",
                    first_traceback,
                )
        return results

    def close(self) -> None:
        """End the child and every process that the function started."""
        if self._connection.closed:
            return
        self._connection.close()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        code = self._process.returncode
        if code is None or code < 0:  # the guard itself hangs or was killed
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        # A plain new interpreter, not a fork: no CUDA, NCCL or thread state, and no second import
        # of __main__.
        # A session of its own keeps the job's warning signals from it.
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "rlhpc.rewards.child",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=(theirs.fileno(),),
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
                },
                start_new_session=True,
            )
        self._connection.send((self._function, self._kwargs))
        failed = self._receive(START_TIMEOUT_S)
        if isinstance(failed, _Lost):
            self.close()
            raise CommandError(
                f"reward.function {self._function}: the process that imports it {failed.why}; "
                "expected it to be "
                "ready. Import the module by hand on that node to see why."
            )
        if failed is not None:
            is_config_error, text, trace = failed
            self.close()
            if is_config_error:
                raise ConfigError(text)
            raise _with_traceback(
                f"reward.function {self._function} cannot be imported ({text}); expected a module "
                "that loads. Mend it, or install what it lacks.",
                trace,
            )

    def _receive(self, timeout_s: float) -> Any:
        """The child's next message, or `_Lost`."""
        try:
            if not self._connection.poll(timeout_s):
                return _Lost(f"took longer than {timeout_s:g} s")
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            return _Lost(f"died (exit code {self._process.wait()})")

    def _score_one(self, item: ScoreItem) -> tuple[ScoreResult, str]:
        """The row's result, and a traceback where the function raised."""
        arguments = (item.data_source, item.solution_str, item.ground_truth)
        extra_info = {**item.extra_info, "truncated": item.truncated}
        try:
            self._connection.send((arguments, extra_info))
            answer = self._receive(self._options.timeout_s)
        except (BrokenPipeError, ConnectionResetError):
            answer = _Lost(f"died (exit code {self._process.wait()})")
        if isinstance(answer, _Lost):
            self.close()
            self._start()
            return ScoreResult(item.row_id, math.nan, error=f"the function {answer.why}"), ""
        reward, extra, error, trace = answer
        return ScoreResult(item.row_id, reward, extra, error), trace


def _with_traceback(headline: str, trace: str) -> CommandError:
    """A CommandError of one line; its printed traceback shows the child's, once."""
    error = CommandError(headline)
    if trace:
        error.add_note(f"First traceback of the function:\n{trace.rstrip()}")
    return error


@dataclass(frozen=True)
class _Lost:
    """The child gave no answer."""

    why: str
