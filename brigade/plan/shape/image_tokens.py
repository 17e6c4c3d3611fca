"""Count what an image becomes: patches that the tower computes, and tokens that the decoder reads. No torch.

Each rule says in numbers what one family's processor of Transformers does, with the numbers that its models are published with.
tests/unit/test_towers_counted.py compares them with the processors.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from ...errors import UserError
from ...errors.tables import Document

Numbers = Document


class Image(NamedTuple):
    """What one image becomes.

    patches: that the tower computes, all tiles together; span: of them those that see each other
    projected: rows that the projector computes; features: tokens whose embeddings are the tower's; tokens: with those around them
    """

    patches: int
    span: int
    projected: int
    features: int
    tokens: int


def image_of(rule: Numbers, config: Numbers, width: int, height: int) -> Image:
    """Return what an image of that size becomes.

    rule: the model's row of towers.yaml; config: the model's config.json, with all that Transformers adds

    Raises UserError for a size that the processor refuses.
    """
    return RULES[rule["rule"]](rule, config, width, height)


def _side(value: int | list[int] | tuple[int, ...]) -> int:
    """Return the side of a square that a config gives as one number, or as two."""
    return int(value[0] if isinstance(value, (list, tuple)) else value)


def _area(rule: Numbers, config: Numbers, width: int, height: int) -> Image:
    """Qwen's: sides are multiples of a merged patch, and the area lies within bounds."""
    vision = config["vision_config"]
    merge = vision["spatial_merge_size"]
    unit = _side(vision["patch_size"]) * merge
    if max(width, height) > 200 * min(width, height):
        raise _refused(width, height, "its processor takes no image that is more than 200 times as long as wide")
    sides = [round(side / unit) for side in (width, height)]
    if sides[0] * sides[1] * unit**2 > rule["max_pixels"]:
        scale = math.sqrt(rule["max_pixels"] / (width * height))
        sides = [max(1, math.floor(side * scale / unit)) for side in (width, height)]
    elif sides[0] * sides[1] * unit**2 < rule["min_pixels"]:
        scale = math.sqrt(rule["min_pixels"] / (width * height))
        sides = [math.ceil(side * scale / unit) for side in (width, height)]
    features = sides[0] * sides[1]
    patches = features * merge**2
    return Image(patches, patches, features, features, features + rule["beside"])


def _fixed(rule: Numbers, config: Numbers, width: int, height: int) -> Image:
    """Gemma 3's: every image has the same size, and as many tokens."""
    vision, features = config["vision_config"], int(config["mm_tokens_per_image"])
    patches = (_side(vision["image_size"]) // _side(vision["patch_size"])) ** 2
    return Image(patches, patches, features, features, features + rule["beside"])


def _budget(rule: Numbers, config: Numbers, width: int, height: int) -> Image:
    """Gemma 4's: as many patches as fit a budget, filled up to it with empty ones, which the tower computes too."""
    vision = config["vision_config"]
    most, pool, patch = rule["most"], vision["pooling_kernel_size"], _side(vision["patch_size"])
    unit, patches = pool * patch, most * pool**2
    scale = math.sqrt(patches * patch**2 / (width * height))
    across, down = (math.floor(side * scale / unit) for side in (width, height))
    if across + down == 0:
        raise _refused(width, height, "its processor scales it to nothing")
    across = across or min(width // height, most)
    down = down or min(height // width, most)
    if min(across, down) == 0:
        across, down = max(across, 1), max(down, 1)
    features = across * down
    return Image(patches, patches, features, features, features + rule["beside"])


def _split(rule: Numbers, config: Numbers, width: int, height: int) -> Image:
    """SmolVLM's: the longest side is scaled to some tiles, and the image cut into them; one more tile shows all of it.

    Each tile has a token for its place and one before it, and each row of tiles a newline.
    """
    vision = config["vision_config"]
    tile = _side(vision["image_size"])
    longest = rule["times"] * tile

    def even(side: float) -> int:
        return int(side) + int(side) % 2

    ratio = width / height
    wide, high = (longest, even(longest / ratio)) if width >= height else (even(longest * ratio), longest)
    ratio = wide / max(high, 1)
    if wide >= high:
        across = math.ceil(wide / tile)
        down = math.ceil(int(across * tile / ratio) / tile)
    else:
        down = math.ceil(high / tile)
        across = math.ceil(int(down * tile * ratio) / tile)
    across, down = max(across, 1), max(down, 1)
    span = (tile // _side(vision["patch_size"])) ** 2
    of_tile = int(span / config["scale_factor"] ** 2)
    tiles = across * down + 1
    features = tiles * of_tile
    return Image(tiles * span, span, features, features, features + 2 * across * down + down + 1 + rule["beside"])


def _canvas(rule: Numbers, config: Numbers, width: int, height: int) -> Image:
    """InternVL's: the grid of tiles whose sides' ratio is nearest, of equal ones the larger while the image fills half of it, and
    where that is more than one tile one that shows all of it."""
    vision = config["vision_config"]
    tile = _side(vision["image_size"])
    numbers = range(1, rule["most"] + 1)
    grids = [grid for grid in itertools.product(numbers, numbers) if grid[0] * grid[1] <= rule["most"]]
    best, nearest = (1, 1), math.inf
    for grid in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        off = abs(width / height - grid[0] / grid[1])
        if off < nearest or (off == nearest and width * height > 0.5 * tile**2 * grid[0] * grid[1]):
            best, nearest = grid, off
    tiles = best[0] * best[1]
    tiles += tiles > 1
    patches = (tile // _side(vision["patch_size"])) ** 2
    span, features = patches + rule["cls"], tiles * int(patches * config["downsample_ratio"] ** 2)
    return Image(tiles * span, span, features, features, features + rule["beside"])


def _pinpoints(rule: Numbers, config: Numbers, width: int, height: int) -> Image:
    """LLaVA-OneVision's: the resolution of a list that wastes least, cut into tiles, and one tile more that shows all of it.

    The tiles' features are cut to the image's ratio, scaled down above a number of tiles, and have a newline each row.
    """
    vision, most = config["vision_config"], int(str(config["vision_aspect_ratio"]).removeprefix("anyres_max_"))
    tile = _side(vision["image_size"])
    side = tile // _side(vision["patch_size"])

    def fitness(size: tuple[int, int]) -> tuple[int, int]:
        high, wide = size
        scale = min(wide / width, high / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        return used, used - wide * high

    high, wide = max(config["image_grid_pinpoints"], key=fitness)
    down, across = high // tile * side, wide // tile * side
    tiles = 1 + (down // side) * (across // side)
    if width / height > across / down:
        down -= 2 * ((down - int(round(height * (across / width), 7))) // 2)
    else:
        across -= 2 * ((across - int(round(width * (down / height), 7))) // 2)
    ratio = math.sqrt(down * across / (most * side**2))
    if ratio > 1.1:
        down, across = int(down // ratio), int(across // ratio)
    features = down * across + down + side**2
    return Image(tiles * side**2, side**2, tiles * side**2, features, features + rule["beside"])


def _lines(rule: Numbers, config: Numbers, width: int, height: int) -> Image:
    """Pixtral's: the longest side is bounded, sides are multiples of a merged patch, and one more token ends each row.

    Only Mistral 3 merges patches.
    """
    vision, merge = config["vision_config"], config.get("spatial_merge_size", 1)
    longest, unit = _side(vision["image_size"]), _side(vision["patch_size"]) * merge
    ratio = max(width, height) / longest
    if ratio > 1:
        width, height = math.floor(width / ratio), math.floor(height / ratio)
    across, down = ((side - 1) // unit + 1 for side in (width, height))
    features = across * down
    return Image(features * merge**2, features * merge**2, features, features, features + down + rule["beside"])


def _tiles(rule: Numbers, config: Numbers, width: int, height: int) -> Image:
    """Llama 4's: a canvas of tiles that enlarges the image least, and one more tile that shows all of it where there are several.

    Each tile of the canvas has a token behind it.
    """
    from ...train.upstream.llama4_sizes import sizes  # it imports numpy, and `plan --help` comes at once

    vision = config["vision_config"]
    tile = _side(vision["image_size"])
    canvas, _ = sizes((height, width), tile, rule["most"])
    cut = canvas[0] // tile * (canvas[1] // tile)
    patches = (tile // _side(vision["patch_size"])) ** 2
    tiles, separators = (cut + 1, cut) if cut > 1 else (1, 0)
    span, features = patches + rule["cls"], tiles * int(patches * vision["pixel_shuffle_ratio"] ** 2)
    return Image(tiles * span, span, features, features, features + separators + rule["beside"])


def _refused(width: int, height: int, why: str) -> UserError:
    return UserError("image size", f"{width:,} x {height:,} pixels: {why}", "give another --image-size")


RULES: dict[str, Callable[[Numbers, Numbers, int, int], Image]] = {
    rule.__name__.removeprefix("_"): rule
    for rule in (_area, _fixed, _budget, _split, _canvas, _pinpoints, _lines, _tiles)
}
