"""Types for argparse: numbers within limits."""

import math
from collections.abc import Callable
from contextlib import suppress

from . import UserError


def numeric(flag: str, least: float, kind: type[float] = int, below: float = math.inf) -> Callable[[str], float]:
    """Numbers from `least` on and smaller than `below`; raises UserError for all others, NaN too."""
    wanted = f"a {'whole ' if kind is int else ''}number from {least}"
    wanted += f" and below {below:g}" if below < math.inf else ""

    def parse(text: str) -> float:
        with suppress(ValueError):
            value = kind(text)
            if least <= value < below:
                return value
        raise UserError(f"flag --{flag}", f"{text!r} is not {wanted}", f"give {wanted}, or leave the flag out")

    parse.__name__ = wanted.removeprefix("a ")  # for --help
    return parse
