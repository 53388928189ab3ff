"""The scripts in launch/: options, refusals, and what they leave behind."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    path
    for folder in ("launch", ".ci")
    for path in sorted((ROOT / folder).iterdir())
    if path.is_file() and path.read_bytes().startswith(b"#!")
]


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
        check=False,
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable(script: Path) -> None:
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("name", ["setup", "test", "quickstart", "gpu-check"])
def test_help_names_the_script_and_does_nothing_else(name: str) -> None:
    result = run(ROOT / "launch" / name, "--help")
    assert result.returncode == 0
    assert f"usage: launch/{name}" in result.stdout


def test_setup_refuses_an_unknown_option() -> None:
    result = run(ROOT / "launch/setup", "--wrong")
    assert result.returncode == 1
    assert "unknown option '--wrong'" in result.stderr


def test_setup_refuses_a_python_that_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "python3.8"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    venv = tmp_path / "venv"
    result = run(ROOT / "launch/setup", "--venv", venv, PYTHON=str(old))
    assert result.returncode == 1
    assert "expected 3.11, 3.12 or 3.13" in result.stderr
    assert "PYTHON=" in result.stderr
    assert not venv.exists()


def stub_venv(folder: Path) -> Path:
    """A virtual environment whose Python only writes down its arguments."""
    python = folder / "bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$*" >>{folder}/calls\n')
    python.chmod(0o755)
    return folder


def installs(venv: Path) -> list[str]:
    calls = (venv / "calls").read_text().splitlines()
    return [call for call in calls if " install " in call]


def test_setup_takes_torch_first_and_lets_nothing_replace_it(tmp_path: Path) -> None:
    venv = stub_venv(tmp_path / "venv")
    assert run(ROOT / "launch/setup", "--tests", "--venv", venv).returncode == 0
    first, *others = installs(venv)
    pinned = (venv / "constraints.txt").read_text().strip()
    assert first.endswith(pinned)
    assert pinned.startswith("torch==")
    with_dependencies = [call for call in others if "--no-deps" not in call]
    assert len(with_dependencies) == 3
    assert all(f"--constraint {venv}/constraints.txt" in call for call in with_dependencies)


def test_setup_without_options_installs_neither_vllm_nor_test_tools(tmp_path: Path) -> None:
    venv = stub_venv(tmp_path / "venv")
    assert run(ROOT / "launch/setup", "--venv", venv).returncode == 0
    assert "vllm" not in " ".join(installs(venv))
    assert "dev" not in " ".join(installs(venv))


def test_setup_installs_nothing_the_second_time(tmp_path: Path) -> None:
    venv = stub_venv(tmp_path / "venv")
    run(ROOT / "launch/setup", "--venv", venv)
    before = installs(venv)
    result = run(ROOT / "launch/setup", "--venv", venv)
    assert "is up to date" in result.stdout
    assert installs(venv) == before


def test_setup_goes_on_and_says_so_when_vllm_cannot_be_had(tmp_path: Path) -> None:
    venv = stub_venv(tmp_path / "venv")
    script = (venv / "bin/python").read_text()
    (venv / "bin/python").write_text(script + 'case "$*" in *vllm*) exit 1;; esac\n')
    result = run(ROOT / "launch/setup", "--tests", "--venv", venv)
    assert result.returncode == 0
    assert "tests marked vllm will be skipped" in result.stdout
    assert not (venv / ".setup-vllm_cpu").exists()
