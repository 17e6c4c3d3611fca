"""`python -m brigade report OUTPUT [OUTPUT ...]`: a page for the browser of one run, or of several side by side."""

import argparse
import fcntl
from contextlib import ExitStack, suppress
from pathlib import Path

from ..run import events


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directories", nargs="+", type=Path, metavar="OUTPUT", help="output directories of runs, going on or ended")
    default = "OUTPUT/report.html; of several runs report.html here"
    add("--html", type=Path, metavar="FILE", help=f"the page; its figures go to FILE_files/ (default: {default})")
    add("--page_only", action="store_true", help="write the page alone, no PNG and no CSV")


def run(options: argparse.Namespace) -> int:
    with ExitStack() as turn:
        if options.page_only:  # what a run starts: a page begun earlier, which knows less, must not come last
            with suppress(OSError):  # no run's directory, or no locks there
                fcntl.flock(turn.enter_context((options.directories[0] / events.FILE).open("r+")), fcntl.LOCK_EX)
        return _write(options)


def _write(options: argparse.Namespace) -> int:
    from ..errors.console import counted
    from ..report import facts, page, reading

    records = reading.read(options.directories)
    path = options.html or facts.default_page(options.directories)
    page.write(records, path)
    print(f"{path} ({path.stat().st_size / 2**20:.1f} MB)")
    if not options.page_only:
        folder = path.with_name(f"{path.stem}_files")
        written = page.write_files(records, folder)
        print(f"{folder}/: {counted(len(written) // 2, 'figure')}, each as PNG and CSV")
    return 0
