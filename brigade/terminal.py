"""Where tables go."""

import sys
from typing import Any


def console(**options: Any) -> Any:
    """A rich Console as wide as the terminal; 160 columns into a file or a pipe, which have no width."""
    from rich.console import Console  # not at the top: most commands print no table

    return Console(width=None if sys.stdout.isatty() else 160, **options)
