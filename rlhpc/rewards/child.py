"""The process that runs a reward function: `python -m rlhpc.rewards.child <fd> <parent pid>`.

Started and ended by `rewards.function.FunctionEngine`; holds nothing but the function.
Torch-free.  It speaks over an inherited socket, so that whatever the function prints goes to the
rank's log.  Linux only.

    guard      this process: ends all below at SIGTERM, at the rank's death, and when the child ends
      child    its fork: runs the function
        ...    what the function started, also in sessions of its own
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlhpc.errors import ConfigError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


def load_function(path: str) -> Callable[..., Any]:
    """The function at dotted ``path``.

    Raises:
        ConfigError: the module or the function does not exist, or is not callable.  An error
        inside the module is
            raised as it is.
    """
    module_name, _, name = path.rpartition(".")
    what = f"reward.function: {path!r}"
    hint = "Set reward.function to package.module.function, importable on the reward role's ranks."
    if not module_name:
        raise ConfigError(f"{what} has no module; expected a dotted path. {hint}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there and lacks something itself
        raise ConfigError(f"{what}: there is no module {error.name!r}. {hint}") from error
    function = getattr(module, name, None)
    if function is None:
        raise ConfigError(
            f"{what}: module {module_name} ({module.__file__}) has no {name!r}. {hint}"
        )
    if not callable(function):
        raise ConfigError(f"{what} is a {type(function).__name__}; expected a function. {hint}")
    return function


def check_arguments(function: Callable[..., Any], path: str, kwargs: dict[str, Any]) -> None:
    """Raise ConfigError unless ``function`` takes the contract's arguments and ``kwargs``."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some compiled functions tell nothing of themselves
    try:
        signature.bind("", "", "", extra_info={}, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"reward.function: {path}{signature} cannot be called ({error}); expected "
            "(data_source, solution_str, ground_truth, extra_info=None, **kwargs). "
            "Change the function or reward.kwargs."
        ) from error


def check_result(value: Any) -> tuple[float, dict[str, float]]:
    """(reward, further numbers) of what a reward function returned.

    Args:
        value: a number, or a dict with a number under `score`; its other numbers become metrics,
        the rest is dropped.

    Raises:
        TypeError: neither of both, for example None.
        ValueError: the reward is not finite.
    """
    extra: dict[str, float] = {}
    if isinstance(value, dict):
        if "score" not in value:
            raise TypeError(
                f"returned a dict with keys {sorted(map(str, value))}; expected 'score'"
            )
        extra = {str(k): n for k, v in value.items() if (n := _number(v)) is not None}
        value = value["score"]
        extra.pop("score", None)
    reward = _number(value)
    if reward is None:
        raise TypeError(f"returned {value!r} ({type(value).__name__}); expected a number or a dict")
    if not math.isfinite(reward):
        raise ValueError(f"returned {reward}; expected a finite number")
    return reward, extra


def _number(value: Any) -> float | None:
    """A Python, NumPy or torch scalar as float, else None."""
    if not isinstance(value, int | float) and getattr(value, "shape", None) == ():
        value = value.item()
    return float(value) if isinstance(value, int | float) else None


def guard(parent: int) -> None:
    """Fork; return in the child.  The guard never returns: it ends with all its descendants.

    A process of its own because a function that hangs in native code runs no signal handler.

    Args:
        parent: the rank.  The kernel signals the end of the thread in it that started this process.
    """
    awaited = (signal.SIGTERM, signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    # Orphans come to the guard instead of init, so that it finds them.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _die_with(parent, signal.SIGTERM)
    me = os.getpid()
    child = os.fork()
    if child == 0:
        _die_with(me, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        return
    code: int | None = None
    while code is None and signal.sigwait(awaited) != signal.SIGTERM:
        code = _reap().get(child)
    _end_descendants()
    # The code as a shell gives it: 137 for KILL.
    os._exit(0 if code is None else code if code >= 0 else 128 - code)


def _reap() -> dict[int, int]:
    """The exit codes by pid of all children that have ended."""
    codes = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def _end_descendants() -> None:
    """Kill every child, then those that come to this subreaper thereby, until there are none."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in _children():
                os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children() -> list[int]:
    """The pids of this process's children.  They stay valid: nobody else reaps them."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            # pid (name) state ppid ...; the name may hold spaces and brackets
            if int(path.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                pids.append(int(path.parent.name))
    return pids


def _die_with(parent: int, number: signal.Signals) -> None:
    """Ask the kernel to send ``number`` when the thread that started this process ends."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(0)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def serve(connection: Connection) -> None:
    """Load the function named in the first message, then answer rows until the stream ends."""
    path, kwargs = connection.recv()
    try:
        function = load_function(path)
        check_arguments(function, path, kwargs)
    except Exception as error:
        is_config_error = isinstance(error, ConfigError)
        text = str(error) if is_config_error else _first_line(error)
        connection.send((is_config_error, text, traceback.format_exc()))
        return
    connection.send(None)
    while True:
        try:
            arguments, extra_info = connection.recv()
        except EOFError:
            return
        try:
            answer = (*check_result(function(*arguments, extra_info=extra_info, **kwargs)), "", "")
        except Exception as error:  # whatever it is, it is the row's answer
            answer = (math.nan, {}, _first_line(error), traceback.format_exc())
        connection.send(answer)


if __name__ == "__main__":
    # What the function starts must not hold the socket open.
    os.set_inheritable(int(sys.argv[1]), False)
    guard(int(sys.argv[2]))
    serve(Connection(int(sys.argv[1])))
