"""What a recipe or the flags say of images, as the formulas count it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ...errors import UserError
from ...errors.tables import Document
from ...train.data.images import ImageRules
from ...train.recipe.images import trained_parts, within
from ...train.recipe.schema import Recipe
from ..costs.job import PROJECTOR, VISION_TOWER, Images
from ..shape.image_tokens import image_of
from ..shape.model_shape import ModelShape
from ..shape.tower import described_with_tower, row_of

USUAL = (1024, 1024)  # pixels of an image, where nobody says: few processors have a size of their own
PARTS = (VISION_TOWER, PROJECTOR)
LIMITS = ("min_pixels", "max_pixels")


@dataclass(frozen=True)
class Asked:
    """What --images-per-sample and --image-size say; None where they are not given. size: width and height in pixels"""

    per_sample: float | None = None
    size: tuple[int, int] | None = None

    def __bool__(self) -> bool:
        return self.per_sample is not None or self.size is not None


NOT_ASKED = Asked()


def size_of(text: str) -> tuple[int, int]:
    """Read `1280x720`. Raises UserError."""
    found = re.fullmatch(r"([1-9]\d{0,5})[x*]([1-9]\d{0,5})", text.strip())
    if not found:
        raise UserError("flag --image-size", f"{text!r} is no width and height", "give pixels, for example 1280x720")
    return int(found[1]), int(found[2])


def described_with_images(
    config: Document,
    place: str,
    name: str,
    asked: Asked,
    trained: tuple[str, ...],
    pixels: tuple[int | None, int | None] = (None, None),
) -> tuple[ModelShape, Images]:
    """Return (the model's shape, tower included, the images of a sample).

    trained: of PARTS those that are trained; pixels: to how many at most, and at least, images are scaled
    Raises UserError for a model that reads no images, or is not known.
    """
    shape, tower, whole = described_with_tower(config, place, name)
    width, height = asked.size or USUAL
    rule, size = row_of(config, place), (width, height)
    if "max_pixels" in rule:  # the processor scales images itself
        rule = rule | dict(zip(LIMITS, within((rule["min_pixels"], rule["max_pixels"]), *pixels), strict=True))
    else:
        size = ImageRules(*pixels).scaled(*size)
    each = image_of(rule, whole, *size)
    per_sample = 1.0 if asked.per_sample is None else asked.per_sample
    return shape, Images(tower, each, per_sample, width, height, assumed=asked.size is None, trained=trained)


def of_recipe(recipe: Recipe, config: Document, place: str, name: str, asked: Asked) -> tuple[ModelShape, Images]:
    """Return what described_with_images() does, of a recipe with data.images."""
    trained = trained_parts(recipe)
    beside = tuple(part for part in PARTS if part in trained)
    return described_with_images(config, place, name, asked, beside, (recipe.data.max_pixels, recipe.data.min_pixels))


def adapter_widths(images: Images, targets: str | Iterable[str]) -> int:
    """Return the widths of the linear layers beside the decoder that have adapters, summed: what one rank of adapters has."""
    return sum(images.tower.adapted(targets, part) for part in images.trained)
