"""`python -m brigade attach DIRECTORY`: follow a launch that goes on in the background."""

import argparse
from pathlib import Path

from . import background


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("directory", type=Path, help="output or log directory of a launch of this host")


def run(options: argparse.Namespace) -> int:
    """The exit code of the launch once it has ended; 0 when Ctrl-C leaves it running."""
    record = background.find(options.directory)
    try:
        return background.follow(record)
    except KeyboardInterrupt:
        print(f"\nThe launch goes on (process {record['pid']} on {record['host']}).")
        return 0
