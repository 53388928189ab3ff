"""launch/gpu-check: versions, the tests marked `gpu`, and a table of what ran and how long it took.

Run as `python -m tests.gpu.report [pytest arguments]`.  Writes `$OUT/gpu-check.json` if `OUT` is
set.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

PACKAGES = (
    "megatron-core",
    "transformers",
    "vllm",
    "flash-attn",
    "transformer-engine",
    "triton",
)


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def apex_version() -> str:
    """NVIDIA's apex is built from source; PyPI's package of that name is something else."""
    spec = importlib.util.find_spec("apex")
    if spec is None or not spec.submodule_search_locations:
        return "not installed"
    folder = Path(next(iter(spec.submodule_search_locations)))
    if (folder / "optimizers").is_dir():
        return package_version("apex")
    return "WRONG PACKAGE: PyPI's apex is not NVIDIA's; pip uninstall apex and build NVIDIA/apex"


def find_versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found["CUDA"] = torch.version.cuda or "none"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        found["GPU"] = f"{torch.cuda.device_count()} x {device.name}, "
        found["GPU"] += f"{device.total_memory / 2**30:.0f} GiB, sm_{device.major}{device.minor}"
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["cuDNN"] = str(torch.backends.cudnn.version())
    found.update({name: package_version(name) for name in PACKAGES})
    found["apex"] = apex_version()
    return found


@dataclass
class Results:
    """Pytest plugin that keeps one line a test: name, outcome, seconds, measured properties."""

    tests: list[dict[str, object]] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.outcome != "passed" and report.when == "setup"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self.tests.append(
                {
                    "name": report.nodeid.removeprefix("tests/gpu/"),
                    "outcome": report.outcome,
                    "seconds": round(report.duration, 2),
                    "measured": {key: str(value) for key, value in report.user_properties},
                    "reason": reason.removeprefix("Skipped: "),
                }
            )


def print_table(tests: list[dict[str, object]]) -> None:
    width = max((len(str(test["name"])) for test in tests), default=4)
    print(f"\n{'test':{width}}  outcome  seconds  measured")
    for test in tests:
        measured = test["measured"]
        assert isinstance(measured, dict), "made above"
        note = ", ".join(f"{key} {value}" for key, value in measured.items()) or test["reason"]
        print(f"{test['name']:{width}}  {test['outcome']:7}  {test['seconds']:7}  {note}")


def main(arguments: list[str]) -> int:
    started = time.monotonic()
    found = find_versions()
    for name, value in found.items():
        print(f"{name:20}{value}")
    if not torch.cuda.is_available():
        print(
            "gpu-check: no CUDA device; expected one. Run it on a GPU node.",
            file=sys.stderr,
        )
        return 1
    results = Results()
    code = pytest.main(["-m", "gpu", "--tb=short", "tests/gpu", *arguments], plugins=[results])
    print_table(results.tests)
    seconds = round(time.monotonic() - started, 1)
    print(f"\n{seconds} s in all")
    if out := os.environ.get("OUT"):
        record = {"versions": found, "tests": results.tests, "seconds": seconds, "exit": int(code)}
        (Path(out) / "gpu-check.json").write_text(json.dumps(record, indent=1) + "\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
