"""Whether the tokens of two answers make a pair. Apart from preferences.py, which lint reads without numpy."""

import numpy as np

from .preferences import DROP, SAME
from .rows import BadRow

Part = tuple[np.ndarray, np.ndarray]  # token ids, and which of them are supervised


def refusal(parts: list[Part]) -> BadRow | None:
    """Return why the tokens of two answers cannot be used; None where they can."""
    return BadRow(SAME, DROP) if np.array_equal(parts[0][0], parts[1][0]) else None


def is_lost(parts: list[Part], max_length: int) -> bool:
    """Return whether within max_length nothing is left of one of two answers, or both are the same."""
    better, worse = (ids[:max_length] for ids, _ in parts)
    return np.array_equal(better, worse) or not all(mask[1:max_length].any() for _, mask in parts)
