"""The `rlhpc` command: subcommands over the same functions as the modules."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhpc import __version__, report, submit
from rlhpc.errors import RlhpcError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return the exit code."""
    parser = argparse.ArgumentParser(prog="rlhpc", description="Reinforcement learning on Slurm.")
    parser.add_argument("--version", action="version", version=f"rlhpc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    submit.add_arguments(commands.add_parser("submit", help="run an experiment"))
    _add_report(commands.add_parser("report", help="plot and summary of a run folder"))
    arguments = parser.parse_args(argv)
    if arguments.command == "report":
        return _report(arguments)
    return submit.submit(arguments)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="run folder")
    parser.add_argument("--samples", type=int, default=3, help="responses to show (default 3)")
    parser.add_argument(
        "--require-rise", type=float, metavar="X", help="exit 1 unless held-out accuracy rose by X"
    )


def _report(arguments: argparse.Namespace) -> int:
    try:
        made = report.make_report(arguments.run_dir, num_samples=arguments.samples)
    except RlhpcError as e:
        print(e, file=sys.stderr)
        return 1
    print(made.text)
    required = arguments.require_rise
    if required is None:
        return 0
    if made.before is None or made.after is None:
        print("The run has no two evaluations to compare.", file=sys.stderr)
        return 1
    rise = made.after - made.before
    print(f"held-out accuracy rose by {rise:+.3f}; required {required:+.3f}")
    return 0 if rise >= required else 1


if __name__ == "__main__":
    sys.exit(main())
