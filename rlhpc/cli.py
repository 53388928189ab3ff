"""The `rlhpc` command: subcommands over the same functions as the modules."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rlhpc import __version__, submit


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return the exit code."""
    parser = argparse.ArgumentParser(prog="rlhpc", description=__doc__)
    parser.add_argument("--version", action="version", version=f"rlhpc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    submit.add_arguments(commands.add_parser("submit", help="run an experiment"))
    arguments = parser.parse_args(argv)
    return submit.submit(arguments)


if __name__ == "__main__":
    sys.exit(main())
