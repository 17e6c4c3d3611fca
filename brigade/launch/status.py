"""`python -m brigade status [OUTPUT ...]`: what runs are there, how far they are, and how they ended."""

import argparse
import json
from contextlib import suppress
from pathlib import Path

from ..errors import UserError
from ..errors.flags import add_flags
from ..errors.tables import table
from ..hosts import launches
from ..train.run import status
from ..train.run.directory import RECORD
from . import background


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_flags(parser, table(Path(__file__).with_suffix(".yaml")))


def run(options: argparse.Namespace) -> int:
    """Show the state of runs. Returns the exit code."""
    for directory in options.directories:
        if not directory.is_dir():
            raise _no_run(directory, "there is no such directory")
        if not (directory / RECORD).is_file():
            raise _no_run(directory, f"it is no run's: there is no {RECORD} in it")
    found = options.directories or sorted(path.parent for path in Path("outputs").glob(f"*/{RECORD}"))
    for directory in found:
        known = status.of(directory)
        print(
            json.dumps(known, default=str)
            if options.json
            else "\n".join(status.lines(known, bool(options.directories)))
        )
    if not found and not options.json:
        print("There is no run in outputs/.")
    return 0


def _no_run(directory: Path, problem: str) -> UserError:
    """The error that says why nothing is known of a directory: a launch may only be on its way to its first step."""
    with suppress(UserError):
        record = background.find(directory)
        if launches.alive(record):
            problem = f"its launch (process {record['pid']} on {record['host']}) is starting: {problem}"
            return UserError(str(directory), problem, f"ask again soon, or `python -m brigade attach {directory}`")
    return UserError(str(directory), problem, "name an output directory")
