"""What a recipe or the flags say of images, and what these take beside their tokens: the vision tower as layers of its own, its
projector, and pixels.

A tower's layers are attention and an MLP like a decoder's, so that the same tables count them (layer.py), over patches in the
place of tokens. No GPU has measured any of it.
"""

import re
from dataclasses import dataclass, replace

from ...errors import UserError
from ...errors.tables import Document
from ...train.data.images import ImageRules
from ...train.recipe.images import trained_parts, within
from ...train.recipe.schema import Recipe
from ..shape.image_tokens import image_of
from ..shape.model_shape import ModelShape
from ..shape.tower import described_with_tower, row_of
from .job import PROJECTOR, VISION_TOWER, Images, Job, unset

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


def tower_job(job: Job) -> Job:
    """Return the layers of the vision tower as a job: its sequences are the patches of a sequence's images.

    Each rank of a tensor or sequence group runs the whole tower on all images of the group (docs/images.md).

    Attention sees all patches of an image, or of a tile of it, on both sides: as much as a causal one of twice the length. Layers
    are recomputed where the decoder's are; a frozen tower keeps nothing to recompute. Kernels that are compiled, or Liger's, are
    not for them, and neither are weights in four bits.
    """
    images = job.images
    assert images
    shape, trains = images.tower.shape, VISION_TOWER in images.trained
    return replace(
        job,
        shape=replace(shape, window=2 * shape.window),
        sequence=max(1, round(images.per_sample * images.each.patches)),
        attended=2 * images.each.span,
        **unset(
            "tensor", "context", "trained", "labelled", "kernels", "attention", "tiled_mlp", "comparison", "images"
        ),
        method="lora" if job.method == "qlora" else job.method,
        targets=job.targets if trains else "",
        dora=job.dora and trains,
        adapter_dropout=job.adapter_dropout and trains,
        checkpointing=job.checkpointing if trains else "none",
        loss="released",
    )
