"""Reduce a long curve to few points that keep every spike."""

import math

import numpy as np
from numpy.typing import NDArray


def kept(values: list[float], most: int) -> list[int]:
    """The places of about `most` values: the lowest and the highest of each stretch, the first in it that is not finite, and the
    very first and last of all."""
    count = len(values)
    if count <= most:
        return list(range(count))
    places = {0, count - 1}
    array = np.asarray(values, dtype=float)
    for stretch in np.array_split(np.arange(count), max(1, most // 2)):
        part = array[stretch]
        finite = np.isfinite(part)
        if finite.any():
            places |= {int(stretch[finite][part[finite].argmin()]), int(stretch[finite][part[finite].argmax()])}
        if not finite.all():
            places.add(int(stretch[~finite][0]))
    return sorted(places)


def running_mean(values: list[float], window: int) -> list[float]:
    """The mean of the finite ones among the last `window` values up to each; NaN where there is none."""
    array: NDArray[np.float64] = np.asarray(values, dtype=float)
    finite = np.isfinite(array)
    sums, counts = np.cumsum(np.where(finite, array, 0.0)), np.cumsum(finite)
    sums[window:], counts[window:] = sums[window:] - sums[:-window], counts[window:] - counts[:-window]
    return [total / count if count else math.nan for total, count in zip(sums, counts, strict=True)]
