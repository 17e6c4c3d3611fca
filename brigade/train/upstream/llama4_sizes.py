"""Into how many tiles Llama 4's processor cuts an image, and what the image is scaled to. No torch."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

Size = tuple[int, int]  # height and width


def canvases(most: int, side: int) -> Iterator[Size]:
    """Yield the sizes in pixels of all grids of at most so many tiles, which are squares of this side."""
    for tiles in range(1, most + 1):
        for down in range(1, tiles + 1):
            if tiles % down == 0:
                yield down * side, tiles // down * side


def sizes(image: Size, side: int, most: int, enlarge: bool = False) -> tuple[Size, Size]:
    """Return the size of the canvas that an image gets, and what it is scaled to within it: without distortion, and enlarged to
    one tile at most, unless `enlarge`, in which case it fills the canvas.

    image: in pixels; side: of a tile; most: tiles
    The canvas is the one that enlarges the image least, or, where it fits into none, the one that shrinks it least; of several,
    the smallest. Ratios are rounded as in Transformers: to fp32 where a canvas decides them.
    """
    every = list(canvases(most, side))
    scales = [min(np.float32(h) / np.float32(image[0]), np.float32(w) / np.float32(image[1])) for h, w in every]
    larger = [scale for scale in scales if scale >= 1]
    chosen = (max(larger) if enlarge else min(larger)) if larger else max(scales)
    canvas = min((size for size, scale in zip(every, scales, strict=True) if scale == chosen), key=math.prod)
    wanted: list[Any] = []
    for own, whole in zip(image, canvas, strict=True):
        least = max(own, side)
        wanted.append(np.float32(whole) if enlarge or whole < least else least)
    high, wide = wanted[0] / image[0], wanted[1] / image[1]
    if wide < high:
        inside = min(math.floor(image[0] * wide), int(wanted[0])), int(wanted[1])
    else:
        inside = int(wanted[0]), min(math.floor(image[1] * high), int(wanted[1]))
    return canvas, (max(inside[0], 1), max(inside[1], 1))
