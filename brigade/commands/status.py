"""`python -m brigade status [OUTPUT ...]`: what runs are there, how far they are, and how they ended."""

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directories", nargs="*", type=Path, metavar="OUTPUT", help="output directories (default: those in outputs/)")
    add("--json", action="store_true", help="a JSON line for each run instead")


def run(options: argparse.Namespace) -> int:
    from ..errors import UserError
    from ..run import status
    from ..run.directory import RECORD

    for directory in options.directories:
        if not (directory / RECORD).is_file():
            raise UserError(str(directory), f"it is no run's: there is no {RECORD} in it", "name an output directory")
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
