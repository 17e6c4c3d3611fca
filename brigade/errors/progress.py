"""How far work has come that may take long."""

import sys
from typing import Any

from .console import beneath, printable

LINES = 30  # seconds between two lines of progress


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

    shared = {"total": total, "desc": printable(doing), "unit": unit, "unit_scale": True, "leave": False}
    if sys.stderr.isatty():
        return tqdm(**shared, delay=1, dynamic_ncols=True, file=beneath(sys.stderr))
    size = "{n_fmt} of {total_fmt} {unit}, {percentage:.0f}%" if total else "{n_fmt} {unit}"
    form = f"{{desc}}: {size}, elapsed {{elapsed}}" + ", ETA {remaining}" * bool(total)
    return tqdm(**shared, delay=LINES, mininterval=LINES, maxinterval=LINES, miniters=1, file=_Lines(), bar_format=form)
