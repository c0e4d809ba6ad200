"""Owns the command `pydist`; each subcommand is a module that adds its arguments and runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pydist import _schedule_command
from pydist._version import __version__

SUBCOMMANDS = [_schedule_command]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the subcommand that the arguments name; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="pydist", description="Data-parallel and pipelined training for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"pydist {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in SUBCOMMANDS:
        subparser = subparsers.add_parser(
            module.NAME, help=module.SUMMARY, description=module.SUMMARY
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run, parser=subparser)
    chosen = parser.parse_args(arguments)
    try:
        status: int = chosen.run(chosen)
    except (ValueError, ImportError, OSError) as error:  # what the user asked for cannot be had
        chosen.parser.exit(2, f"{chosen.parser.prog}: error: {error}\n")
    return status
