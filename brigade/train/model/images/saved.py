"""One image through the processor that a run has saved: what serves the model has to make the same of it as training did."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from ....errors import UserError
from ...data.image_store import StoredImages
from .load import read_processor
from .processor import Processor

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

    from ...data.images import ImageSource


def difference(saved: Path, prepared: Path, processor: Processor, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return in words how the processor in a saved model's directory differs from the run's own for one of the run's images; ""
    where it makes the same tensors, bit for bit, and as many tokens.

    prepared: the folder of the run's data; tokenizer: the saved model's
    The image reaches it as from who serves the model: decoded by PIL, in RGB by Transformers' convert_to_rgb.
    """
    image = StoredImages(prepared).one()
    try:
        theirs = read_processor(str(saved), str(saved), None, processor.config, tokenizer)
        given = _as_served(image)
        tensors, count = theirs.tensors([given]), _tokens(theirs, tokenizer, *given.size)
    except UserError as error:
        return f"{error.problem}: {error.cure}"
    about = f"of the image {image.path or 'in the data'}, {image.width:,} x {image.height:,} pixels"
    ours, own = processor.tensors([image.open()]), _tokens(processor, tokenizer, image.width, image.height)
    if count != own:
        return f"the saved processor makes {count:,} tokens {about}, which were {own:,} in training"
    for name, tensor in ours.items():
        other = tensors.get(name)
        if other is None or other.shape != tensor.shape:
            shape = "nothing" if other is None else tuple(other.shape)
            return f"the saved processor makes {shape} as {name} {about}, which was {tuple(tensor.shape)} in training"
        if not bool((other == tensor).all()):
            most = float((other.double() - tensor.double()).abs().max())
            return f"the saved processor's {name} {about} differ from those in training by up to {most:.3g}"
    return ""


def _as_served(image: ImageSource) -> Image:
    """Return an image as who serves the model reads it. What only the recipe says, how it is scaled, is done as in training."""
    from PIL import Image, ImageOps
    from transformers.image_transforms import convert_to_rgb

    with Image.open(io.BytesIO(image.encoded())) as opened:
        plain = Image.fromarray(convert_to_rgb(ImageOps.exif_transpose(opened), return_numpy=True))
    return plain.resize((image.width, image.height), Image.Resampling.BICUBIC) if image.scaled else plain


def _tokens(processor: Processor, tokenizer: PreTrainedTokenizerBase, width: int, height: int) -> int:
    return len(tokenizer(processor.expansion(width, height), add_special_tokens=False)["input_ids"])
