"""Where tables and lines go, and how numbers stand in them."""

import io
import math
import sys
from typing import Any

LINES = 30  # seconds between two lines of progress


def write_what_it_can() -> None:
    """Let no answer or sample end a run because the terminal's encoding lacks a letter (PYTHONIOENCODING=ascii, LANG=C)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def figure(value: float, digits: int) -> str:
    """`value` with `digits` decimals, or as many as show two of its digits where that would make it 0.00."""
    if value and not round(value, digits):
        digits = 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{digits}f}"


class _Lines:
    """Takes what tqdm writes, each state of a bar as a line."""

    def write(self, text: str) -> None:
        if line := text.strip():
            print(line, file=sys.stderr)

    def flush(self) -> None:
        sys.stderr.flush()


def bar(total: int | None, doing: str, unit: str) -> Any:
    """A tqdm for work that may take long: a bar on a terminal, elsewhere a line every LINES seconds."""
    from tqdm import tqdm

    shared = {"total": total, "desc": doing, "unit": unit, "unit_scale": True, "leave": False}
    if sys.stderr.isatty():
        return tqdm(**shared, delay=1, dynamic_ncols=True)
    size = "{n_fmt} of {total_fmt} {unit}, {percentage:.0f}%" if total else "{n_fmt} {unit}"
    form = f"{{desc}}: {size}, elapsed {{elapsed}}" + ", ETA {remaining}" * bool(total)
    return tqdm(**shared, delay=LINES, mininterval=LINES, maxinterval=LINES, miniters=1, file=_Lines(), bar_format=form)


def console(**options: Any) -> Any:
    """A rich Console as wide as the terminal; 160 columns into a file or a pipe, which have no width."""
    from rich.console import Console  # not at the top: most commands print no table

    return Console(width=None if sys.stdout.isatty() else 160, **options)


def counted(number: int, thing: str) -> str:
    """`1 host`, `2 hosts`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def millions(parameters: int) -> str:
    """`42 M`, `3.4 M`, `61,440`"""
    if parameters < 1e6:
        return f"{parameters:,}"
    return f"{parameters / 1e6:,.{0 if parameters >= 1e7 else 1}f} M"


def billions(parameters: int) -> str:
    """`8.19 B`; below 0.1 B in millions"""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else millions(parameters)
