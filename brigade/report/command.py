"""`python -m brigade report OUTPUT [OUTPUT ...]`: a page for the browser about one run, or several side by side."""

import argparse
import fcntl
import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from ..errors import UserError
from ..errors.console import counted
from ..errors.flags import add_flags
from ..errors.tables import table
from ..train.run import events
from . import facts
from .records import read_records

TURN = 5.0  # seconds to wait for a page that is being written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_flags(parser, table(Path(__file__).with_suffix(".yaml")))


def run(options: argparse.Namespace) -> int:
    """Write the page, and unless --page_only is given its figures. Returns the exit code."""
    with ExitStack() as turn:
        if options.page_only:  # what a run starts: a page begun earlier, which knows less, must not come last
            _await_turn(options.directories[0] / events.FILE, turn)
        return _write(options)


def _await_turn(file: Path, turn: ExitStack) -> None:
    """Hold a lock until `turn` ends, or do without it: whoever may read the file can lock it for ever."""
    with suppress(OSError):  # no run's directory, or no locks there
        if file.is_file():
            _lock(turn.enter_context(file.open("r+b")), time.monotonic() + TURN)


def _lock(file: IO[bytes], until: float) -> None:
    while time.monotonic() < until:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.1)


def _place(options: argparse.Namespace) -> Path:
    """The page's path. Raises UserError where it would lie in another user's directory and --html does not name it."""
    first, *others = options.directories
    owner = first.stat().st_uid if first.is_dir() else os.geteuid()
    if not options.html and not others and owner != os.geteuid():
        problem = f"it belongs to user {owner}, and a page is written into it only where that is asked for"
        raise UserError(str(first), problem, f"name the page: --html {first.resolve().name}.html")
    return options.html or facts.default_page(options.directories)


def _write(options: argparse.Namespace) -> int:
    from . import page

    path = _place(options)
    records = read_records(options.directories)
    page.write(records, path)
    print(f"{path} ({path.stat().st_size / 2**20:.1f} MB)")
    if not options.page_only:
        folder = path.with_name(f"{path.stem}_files")
        written = page.write_files(records, folder)
        print(f"{folder}/: {counted(len(written) // 2, 'figure')}, each as PNG and CSV")
    return 0
