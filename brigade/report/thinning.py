"""Few points of a long curve, with every spike of it."""

import math

import numpy as np
from numpy.typing import NDArray


def kept(values: list[float], most: int) -> list[int]:
    """Places of about `most` values at most: of each stretch its lowest and its highest, of those that are not finite the first;
    and the very first and last."""
    count = len(values)
    if count <= most:
        return list(range(count))
    found = {0, count - 1}
    array = np.asarray(values, dtype=float)
    for stretch in np.array_split(np.arange(count), max(1, most // 2)):
        part = array[stretch]
        finite = np.isfinite(part)
        if finite.any():
            found |= {int(stretch[finite][part[finite].argmin()]), int(stretch[finite][part[finite].argmax()])}
        if not finite.all():
            found.add(int(stretch[~finite][0]))
    return sorted(found)


def running_mean(values: list[float], window: int) -> list[float]:
    """Of the last `window` finite values up to each; NaN before there is one."""
    array: NDArray[np.float64] = np.asarray(values, dtype=float)
    finite = np.isfinite(array)
    sums, counts = np.cumsum(np.where(finite, array, 0.0)), np.cumsum(finite)
    sums[window:], counts[window:] = sums[window:] - sums[:-window], counts[window:] - counts[:-window]
    return [total / number if number else math.nan for total, number in zip(sums, counts, strict=True)]
