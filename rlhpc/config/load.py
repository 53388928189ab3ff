"""Hydra composition -> typed RunConfig, and config.yaml in the run folder.

Checks types only; what spans fields is in `checks`.

Overrides on the command line need none of Hydra's prefixes: `components.actor.sbatch.comment=x` may
add a key,
because unknown keys are refused afterwards, against the dataclasses and with the nearest match.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from rlhpc.config.engines import ENGINES, resolve_engine
from rlhpc.config.schema import RunConfig
from rlhpc.config.typed import BAD, build, nearest, to_plain
from rlhpc.errors import ConfigError, Problem, raise_problems

PRIMARY = "run"
_SECRET_NAME = r"((api|access|secret|private|auth)_?key|token|secret|password|passwd|credentials?)"
_SECRET = re.compile(rf"(^|_){_SECRET_NAME}$", re.IGNORECASE)
_SECRET_ASSIGNED = re.compile(
    rf"\b\w*{_SECRET_NAME}=[\"']?[^\s$<\"']", re.IGNORECASE
)  # not TOKEN=$(cat file)


def builtin_config_dir() -> Path:
    """Folder of rlhpc's configs: inside the installed package, or next to it in a checkout.

    Raises:
        ConfigError: neither is there.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / f"{PRIMARY}.yaml").is_file():
            return folder
    raise ConfigError(f"rlhpc's configs are not in {package} nor beside it; install rlhpc again")


def compose(
    overrides: Sequence[str], *, config_dir: Path | None = None
) -> tuple[RunConfig | None, list[Problem]]:
    """Compose the config and type it.

    Args:
        overrides: Hydra overrides, `group=choice` and `key=value`.
        config_dir: a folder of one's own configs, searched after the built-in ones.

    Returns:
        The config, None where a value could not be typed, and what is wrong so far.

    Raises:
        ConfigError: Hydra cannot compose (unknown choice, malformed override).
    """
    plain = _compose_plain(overrides, config_dir)
    return _typed(plain)


def load_config(overrides: Sequence[str], *, config_dir: Path | None = None) -> RunConfig:
    """Compose the config of ``overrides``; see `compose`.

    Raises:
        ConfigError: lists every unknown key, wrong type and missing value.
    """
    config, problems = compose(overrides, config_dir=config_dir)
    raise_problems(problems)
    assert config is not None, "an untyped config always has a problem"
    return config


def save_config(config: RunConfig, path: Path) -> None:
    """Write ``config`` as YAML, every field; `read_config` gives it back exactly.

    Raises:
        ConfigError: an entry looks like a secret.
    """
    plain = to_plain(config)
    raise_problems(find_secrets(plain))
    path.write_text(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), encoding="utf-8")


def read_config(path: Path) -> RunConfig:
    """Read a config that `save_config` wrote (or a user edited).

    Raises:
        ConfigError: the file is missing, not YAML or not a config.
    """
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as e:
        raise ConfigError(f"config file {path} cannot be read: {e}") from e
    config, problems = _typed(plain)
    raise_problems(problems)
    assert config is not None, "an untyped config always has a problem"
    return config


def absolute_paths(config: RunConfig, base: Path) -> RunConfig:
    """A copy whose model, data and run folder paths do not depend on the working directory."""

    def absolute(path: str) -> str:
        return str(base / Path(path).expanduser())

    model = replace(
        config.model,
        path=absolute(config.model.path),
        tokenizer_path=config.model.tokenizer_path and absolute(config.model.tokenizer_path),
    )
    data = replace(
        config.data,
        train_files=[absolute(p) for p in file_list(config.data.train_files)],
        val_files=[absolute(p) for p in file_list(config.data.val_files)],
    )
    return replace(config, model=model, data=data, run_root=absolute(config.run_root))


def file_list(value: Any) -> list[str]:
    """The paths of `data.train_files` or `data.val_files`: one path, a list or null."""
    if not value and value != 0:
        return []
    return [str(v) for v in value] if isinstance(value, list | tuple) else [str(value)]


def find_secrets(plain: Any, key: str = "") -> list[Problem]:
    """Strings whose key, or an assignment inside them, is named like a secret."""
    found = []
    items = (
        plain.items()
        if isinstance(plain, Mapping)
        else enumerate(plain)
        if isinstance(plain, list)
        else ()
    )
    for name, value in items:
        child = f"{key}.{name}" if key else str(name)
        named = isinstance(name, str) and _SECRET.search(name) and isinstance(value, str) and value
        if named or (isinstance(value, str) and _SECRET_ASSIGNED.search(value)):
            found.append(
                Problem(
                    child,
                    "looks like a secret, and config.yaml and job.sbatch would show it",
                    "no secrets in a config",
                    "Export it in the shell you submit from, or read it from a file in `setup`.",
                )
            )
        found += find_secrets(value, child)
    return found


def _typed(plain: Any) -> tuple[RunConfig | None, list[Problem]]:
    problems: list[Problem] = []
    made = build(RunConfig, plain, "", problems)
    problems += find_secrets(plain)
    if made is BAD:
        return None, problems
    for name, role in made.roles.items():
        key = f"roles.{name}"
        if not role.engine:
            continue  # reported as missing
        try:
            spec = resolve_engine(role.engine)
        except ConfigError as e:
            near = nearest(role.engine, ENGINES)
            expected = f"one of {', '.join(ENGINES)}, or the dotted path of an EngineSpec"
            remedy = f"Did you mean {near}?" if near else "Name a built-in engine or fix the path."
            problems.append(Problem(f"{key}.engine", str(e), expected, remedy))
            continue
        options = build(spec.options, role.options, f"{key}.options", problems)
        if options is BAD:
            return None, problems
        role.options = to_plain(options)
    return made, problems


def _compose_plain(overrides: Sequence[str], config_dir: Path | None) -> Any:
    from hydra import compose as hydra_compose  # 0.15 s, and only submit composes
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    logging.getLogger("hydra").setLevel(logging.ERROR)
    folders = [builtin_config_dir()]
    searchpath = []
    if config_dir is not None:
        folders.append(_own_config_dir(config_dir.resolve(), folders[0]))
        searchpath.append(f"hydra.searchpath=[file://{folders[1]}]")
    _check_choices(overrides, folders)
    arguments = [*(_forced(o, folders) for o in overrides), *searchpath]
    try:
        with initialize_config_dir(str(folders[0]), version_base=None):
            composed = hydra_compose(PRIMARY, overrides=arguments)
        plain = OmegaConf.to_container(composed, resolve=True)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as e:
        raise ConfigError(_unreadable(e, folders)) from e
    except (HydraException, OmegaConfBaseException) as e:
        raise ConfigError(
            f"the overrides cannot be composed: {' '.join(str(e).split())}; "
            "write key=value, and quote values with special characters: 'key=\"a value\"'"
        ) from e

    _check_header(plain, overrides, folders)
    return plain


def _unreadable(error: Exception, folders: Sequence[Path]) -> str:
    """What is wrong with a config file, in one line, and where."""
    where = f"under {folders[-1]}"
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        where = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}"
    what = getattr(error, "problem", None) or str(error)
    return f"config file {where}: {what}; expected YAML (UTF-8, readable); correct that file"


def _check_header(plain: Any, overrides: Sequence[str], folders: Sequence[Path]) -> None:
    """Without its first line an experiment only sets keys below `experiment`, which is no key."""
    if not isinstance(plain.get("experiment"), Mapping):
        return
    files = [p for folder in folders for p in sorted((folder / "experiment").glob("*.yaml"))]
    bare = [p for p in files if "@package" not in p.read_text(encoding="utf-8").partition("\n")[0]]
    named = [p for p in bare if f"experiment={p.stem}" in (o.lstrip("+") for o in overrides)]
    if bare:
        raise ConfigError(
            f"experiment file {(named or bare)[0]} sets keys below `experiment`; expected keys "
            "of the run; add `# @package _global_` as the first line of that file"
        )


def _own_config_dir(own: Path, builtin: Path) -> Path:
    """The user's folder ``own``, whose files must not hide behind built-in ones."""
    if not own.is_dir():
        raise ConfigError(f"--config-dir {own} is not a folder; give one that holds experiment/")
    names = {str(p.relative_to(own)) for p in own.rglob("*.yaml")}
    twice = sorted(names & {str(p.relative_to(builtin)) for p in builtin.rglob("*.yaml")})
    if twice:
        raise ConfigError(
            f"--config-dir {own}: {', '.join(twice)} would hide behind a built-in config of the "
            "same name; rename it"
        )
    return own


def _forced(override: str, folders: Sequence[Path]) -> str:
    """``override`` with the prefix that sets or adds a value; choices of a group stay."""
    key, sep, _ = override.partition("=")
    if not sep or key[:1] in "+~" or _choices(key.partition("@")[0], folders):
        return override
    return f"++{override}"


def _choices(group: str, folders: Sequence[Path]) -> list[str]:
    """Choices of a config group over all config folders; empty when there is no such group."""
    if not re.fullmatch(r"[\w/]+", group):
        return []
    return sorted({p.stem for folder in folders for p in (folder / group).glob("*.yaml")})


def _check_choices(overrides: Sequence[str], folders: Sequence[Path]) -> None:
    for override in overrides:
        group, _, choice = override.lstrip("+").partition("=")
        choices = _choices(group, folders)
        if choices and choice not in (*choices, "null") and not choice.startswith("{"):
            near = nearest(choice, choices)
            hint = f"did you mean {group}={near}?" if near else "or pass --config-dir for your own"
            raise ConfigError(
                f"{group}={choice} is not there; expected one of {', '.join(choices)}; {hint}"
            )
