"""Whether the tokens of answers can be compared. Apart from preferences.py, which lint reads without numpy."""

from collections.abc import Sequence

import numpy as np

from .preferences import DROP, SAME
from .rows import BadRow

Part = tuple[np.ndarray, np.ndarray]  # token ids, and which of them are supervised
LONGER = "raise max_length, or drop the row"


def refusal(parts: Sequence[Part], max_length: int) -> BadRow | None:
    """Return why the tokens of a row's answers cannot be compared; None where they can.

    parts: of a judged answer, or of the chosen and the rejected one
    """
    names = ("chosen answer", "rejected answer") if len(parts) == 2 else ("answer",)
    for name, (_, mask) in zip(names, parts, strict=True):
        if mask[1:max_length].any():  # nothing comes before the first token that could predict it
            continue
        if not mask.any():
            return BadRow(f"no token of the {name} is learned", DROP)
        return BadRow(f"nothing of the {name} is left within max_length ({max_length:,} tokens)", LONGER)
    if len(parts) == 2:
        (better, _), (worse, _) = parts
        if np.array_equal(better, worse):
            return BadRow(SAME, DROP)
        if np.array_equal(better[:max_length], worse[:max_length]):
            return BadRow(f"chosen and rejected are the same within max_length ({max_length:,} tokens)", LONGER)
    return None
