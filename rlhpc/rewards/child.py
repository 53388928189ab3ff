"""The process that runs a reward function: `python -m rlhpc.rewards.child <fd> <parent pid>`.

Started and killed by `rewards.function.FunctionEngine`; holds nothing but the function.
Torch-free.  It speaks over
an inherited socket, so that whatever the function prints goes to the rank's log.
"""

from __future__ import annotations

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
from typing import Any

from rlhpc.errors import ConfigError

_PR_SET_PDEATHSIG = 1


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


def _die_with(parent: int) -> None:
    """Ask the kernel (Linux) to kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


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
        connection.send((isinstance(error, ConfigError), str(error), traceback.format_exc()))
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
    _die_with(int(sys.argv[2]))
    serve(Connection(int(sys.argv[1])))
