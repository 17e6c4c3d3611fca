"""The keys of a recipe that say something of images, which are read only with data.images. This module imports no torch."""

from collections.abc import Callable

from ...errors import UserError
from .schema import Recipe

# Section -> its keys that nobody reads without data.images: true.
KEYS = {"data": ("image_folder", "max_pixels", "min_pixels", "fetch_images")}


def check(recipe: Recipe, place: Callable[[str], str]) -> None:
    """Raise UserError for keys that say something of images in a recipe without any, and for those that contradict each other."""
    data = recipe.data
    if not data.images:
        for name, keys in KEYS.items():
            section = getattr(recipe, name)
            for key in keys:
                if getattr(section, key) != type(section).model_fields[key].default:
                    raise _unread(place(key))
        for number, source in enumerate([data, *(data.datasets or [])]):
            at = f"{place('datasets')}[{number - 1}]." if number else ""
            if number and source.image_folder is not None:
                raise _unread(f"{at}image_folder")
            if {"images", "image"}.intersection(source.columns):
                raise _unread(f"{at}columns" if number else place("columns"))
        return
    if data.datasets and data.image_folder is not None:
        problem = "it is said of the whole data, and with datasets each source has its own"
        raise UserError(place("image_folder"), problem, "say it of each source in datasets that needs it")
    if data.max_pixels and data.min_pixels and data.min_pixels > data.max_pixels:
        problem = f"{data.min_pixels:,} is more than max_pixels, {data.max_pixels:,}"
        raise UserError(place("min_pixels"), problem, "set it lower, or max_pixels higher")
    if data.streaming:
        problem = "data.images is true, and images are looked at once, before training begins"
        raise UserError(place("streaming"), problem, "remove it: rows with images are prepared once and cached")


def _unread(place: str) -> UserError:
    return UserError(place, "data.images is not true, so nobody reads it", "set data.images: true, or remove it")


def within(own: tuple[int, int], most: int | None, fewest: int | None) -> tuple[int, int]:
    """Return the limits of pixels, fewest and most, of a processor that scales images itself: its own, or those of the recipe.

    own: fewest and most; most, fewest: data.max_pixels and data.min_pixels
    """
    lower, upper = fewest or own[0], most or own[1]
    return (min(lower, upper), upper) if most else (lower, max(lower, upper))
