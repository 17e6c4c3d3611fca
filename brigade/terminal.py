"""Where tables and lines go."""

import io
import sys
from typing import Any


def write_what_it_can() -> None:
    """Let no answer or sample end a run because the terminal's encoding lacks a letter (PYTHONIOENCODING=ascii, LANG=C)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def console(**options: Any) -> Any:
    """A rich Console as wide as the terminal; 160 columns into a file or a pipe, which have no width."""
    from rich.console import Console  # not at the top: most commands print no table

    return Console(width=None if sys.stdout.isatty() else 160, **options)
