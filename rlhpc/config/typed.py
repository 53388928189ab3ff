"""Plain data (what YAML gives) <-> dataclasses, with every problem found at once.

OmegaConf's own structured merge stops at the first error and names no near match, so types are
checked here.
This module knows no key of the schema but the synonyms that it hints at.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from functools import cache
from typing import Any

from rlhpc.errors import Problem

_SYNONYMS = {
    "learning_rate": "lr",
    "n": "group_size",
    "num_generations": "group_size",
    "tensor_model_parallel_size": "tp",
    "tensor_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "pipeline_parallel_size": "pp",
    "data_parallel_size": "dp",
}
"""What other frameworks call a key -> its name here; for hints only."""


class _Bad:
    """Marks a value that could not be built; its problem is in the list."""


BAD = _Bad()


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def field_names(cls: type) -> list[str]:
    """Names of the fields of dataclass ``cls``, in order."""
    return [f.name for f in dataclasses.fields(cls)]


def nearest(name: str, names: Collection[str]) -> str | None:
    """The entry of ``names`` most like ``name``, or None when none is alike."""
    found = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.55)
    return found[0] if found else None


def one_of(values: Iterable[Any]) -> str:
    """`one of 1, 2, 4` of ``values``, or `1` where there is only that."""
    texts = [str(v) for v in values]
    return texts[0] if len(texts) == 1 else f"one of {', '.join(texts)}"


def build(tp: Any, value: Any, key: str, problems: list[Problem]) -> Any:
    """Make a ``tp`` of plain ``value``.

    Args:
        tp: a type as written on a dataclass field.
        value: plain data.
        key: dotted key of the value, for messages.
        problems: receives what is wrong.

    Returns:
        The typed value, or `BAD` where one could not be made.  Unknown keys are left out, and a
        missing
        string is empty, so that later checks can go on.
    """
    if tp is Any:
        return value
    origin = typing.get_origin(tp)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (tp,) = (a for a in typing.get_args(tp) if a is not type(None))
        return build(tp, value, key, problems)
    if dataclasses.is_dataclass(tp) and isinstance(tp, type):
        return _build_dataclass(tp, value, key, problems)
    if origin is list:
        return _build_list(typing.get_args(tp)[0], value, key, problems)
    if origin is tuple:
        return _build_tuple(typing.get_args(tp), value, key, problems)
    if origin is dict:
        return _build_dict(typing.get_args(tp)[1], value, key, problems)
    if isinstance(tp, type) and issubclass(tp, Enum):
        return _build_enum(tp, value, key, problems)
    return _build_scalar(tp, value, key, problems)


def _wrong(value: Any, expected: str, key: str, problems: list[Problem], remedy: str = "") -> _Bad:
    shown = "null" if value is None else repr(value)
    what = f"{shown} has the wrong type" if not remedy else f"{shown} is not offered"
    problems.append(Problem(key, what, expected, remedy or f"Set {key} to {expected}."))
    return BAD


def _build_dataclass(cls: type, value: Any, key: str, problems: list[Problem]) -> Any:
    if isinstance(value, cls):
        return value
    names = field_names(cls)
    if not isinstance(value, Mapping):
        return _wrong(value, f"a mapping with keys of {names}", key, problems)
    prefix = f"{key}." if key else ""
    for name in value:
        if name not in names:
            problems.append(_unknown(str(name), names, prefix))
    made = {}
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        given = value.get(f.name, "???")
        if given != "???" and not (required and given == ""):
            made[f.name] = build(_hints(cls)[f.name], given, prefix + f.name, problems)
        elif required:
            made[f.name] = _missing(_hints(cls)[f.name], prefix + f.name, problems)
    return BAD if any(v is BAD for v in made.values()) else cls(**made)


def _missing(tp: Any, key: str, problems: list[Problem]) -> Any:
    """A required value that was not given; of a section, its own required keys are named."""
    if dataclasses.is_dataclass(tp) and isinstance(tp, type):
        return _build_dataclass(tp, {}, key, problems)
    expected = _describe(tp)
    problems.append(
        Problem(
            key, "no value is given", expected, f"Add {key}=... to the command or the experiment."
        )
    )
    return "" if tp is str else BAD


def _unknown(name: str, names: list[str], prefix: str) -> Problem:
    synonym = _SYNONYMS.get(name)
    near = synonym if synonym in names else nearest(name, names)
    remedy = f"Did you mean {prefix}{near}?" if near else f"Remove {prefix}{name}."
    return Problem(prefix + name, "unknown key", f"one of {', '.join(names)}", remedy)


def _build_list(tp: Any, value: Any, key: str, problems: list[Problem]) -> Any:
    if not isinstance(value, list | tuple):
        return _wrong(value, f"a list, [{_describe(tp)}, ...]", key, problems)
    made = [build(tp, v, f"{key}[{i}]", problems) for i, v in enumerate(value)]
    return BAD if any(v is BAD for v in made) else made


def _build_tuple(tps: tuple[Any, ...], value: Any, key: str, problems: list[Problem]) -> Any:
    if isinstance(value, list | tuple) and tps[-1] is Ellipsis:
        made = _build_list(tps[0], value, key, problems)
        return made if made is BAD else tuple(made)
    if not isinstance(value, list | tuple) or len(value) != len(tps):
        return _wrong(value, f"a list of {len(tps)} entries", key, problems)
    made = [
        build(t, v, f"{key}[{i}]", problems)
        for i, (t, v) in enumerate(zip(tps, value, strict=True))
    ]
    return BAD if any(v is BAD for v in made) else tuple(made)


def _build_dict(tp: Any, value: Any, key: str, problems: list[Problem]) -> Any:
    if not isinstance(value, Mapping):
        return _wrong(value, f"a mapping of names to {_describe(tp)}", key, problems)
    made = {str(k): build(tp, v, f"{key}.{k}", problems) for k, v in value.items()}
    return BAD if any(v is BAD for v in made.values()) else made


def _build_enum(cls: type[Enum], value: Any, key: str, problems: list[Problem]) -> Any:
    if isinstance(value, cls):
        return value
    for member in cls:
        if value in (member.value, member.name):
            return member
    values = [str(m.value) for m in cls]
    near = nearest(str(value), values)
    remedy = f"Did you mean {key}={near}?" if near else f"Set {key} to one of these."
    return _wrong(value, f"one of {', '.join(values)}", key, problems, remedy)


def _build_scalar(tp: Any, value: Any, key: str, problems: list[Problem]) -> Any:
    if tp is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if tp is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 1e-6, without a dot, as a string
        except ValueError:
            return _wrong(value, "a number", key, problems)
    if isinstance(value, tp) and not (tp is int and isinstance(value, bool)):
        return value
    return _wrong(value, _describe(tp), key, problems)


def _describe(tp: Any) -> str:
    """What a user would call a value of ``tp``."""
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    if tp in words:
        return words[tp]
    if isinstance(tp, type) and issubclass(tp, Enum):
        return f"one of {', '.join(str(m.value) for m in tp)}"
    if dataclasses.is_dataclass(tp) and isinstance(tp, type):
        return f"mappings with keys of {field_names(tp)}"
    return "a value" if tp is Any else str(tp)


def to_plain(value: Any) -> Any:
    """Plain data of a typed value: dataclasses become mappings, enums their value, tuples lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    return value
