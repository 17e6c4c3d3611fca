"""Images of rows: where each is, and how large it is when a model's processor gets it."""

import io
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageSource(NamedTuple):
    """An image by its file, or by its encoded bytes; width and height in pixels, of what the processor gets."""

    path: str
    content: bytes | None
    width: int
    height: int

    def open(self) -> "Image":
        """Return the image as RGB, of that size."""
        from PIL import Image, ImageOps

        with Image.open(io.BytesIO(self.content) if self.content is not None else self.path) as image:
            turned = ImageOps.exif_transpose(image).convert("RGB")
        size = (self.width, self.height)
        return turned if turned.size == size else turned.resize(size, Image.Resampling.BICUBIC)
