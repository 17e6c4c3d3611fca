"""Where the tokens of images stand in a sample: for the check that they are as many as their features, and for cuts."""

from typing import TYPE_CHECKING

import numpy as np

from ...errors import UserError
from .images import ImageProcessor, ImageSource
from .rows import BadRow
from .samples import Text

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ImageTokens:
    """Tokens of images, as a processor's expansions have them. tokenizer: a Rust tokenizer; special: ids of special tokens"""

    def __init__(self, processor: ImageProcessor, tokenizer: "Tokenizer", special: set[int]) -> None:
        self.processor, self.tokenizer, self.special = processor, tokenizer, special
        self._layouts: dict[tuple[int, int], tuple[int, int, int]] = {}

    def refusal(self, text: Text, ids: np.ndarray, mask: np.ndarray) -> BadRow | None:
        """Return why a sample cannot be used: it has more or fewer tokens that stand for features than its images have, or
        one of them would be learned. None where it can.

        ids, mask: of all its tokens, and which of them are supervised
        """
        own = ids == self.processor.image_token_id
        wanted = sum(self._layout(text, number)[1] for number in range(len(text.images)))
        there = int(own.sum())
        if there != wanted:
            token = self.tokenizer.id_to_token(self.processor.image_token_id)
            problem = (
                f"tokens that stand for images: {there:,}, where the row's have {wanted:,}: a text spells {token} out"
            )
            return BadRow(problem, "remove it from the text")
        if mask[own].any():
            return BadRow(
                "tokens of an image would be learned: the chat template counts them as an answer's", "drop the row"
            )
        return None

    def cut(self, text: Text, ids: np.ndarray, mask: np.ndarray, longest: int) -> tuple[int, tuple[ImageSource, ...]]:
        """Return how many tokens of a sample are within max_length, and its images among them. No image is cut in two: the cut
        falls before the first one that does not fit, and before the special tokens that open it."""
        if len(ids) <= longest:
            return longest, text.images
        places, done = np.flatnonzero(ids == self.processor.image_token_id), 0
        for number in range(len(text.images)):
            before, count, after = self._layout(text, number)
            begin, end = int(places[done]) - before, int(places[done + count - 1]) + 1 + after
            if end > longest:
                begin = max(begin, 0)
                while begin and int(ids[begin - 1]) in self.special and not mask[begin - 1]:
                    begin -= 1
                return min(begin, longest), text.images[:number]
            done += count
        return longest, text.images

    def _layout(self, text: Text, number: int) -> tuple[int, int, int]:
        """Return how many tokens of an image's expansion stand before the first that stands for features, how many stand for
        features, and how many stand behind the last one."""
        image = text.images[number]
        size = image.width, image.height
        if size not in self._layouts:
            encoding = self.tokenizer.encode(text.expansions[number], add_special_tokens=False)
            own = np.flatnonzero(np.array(encoding.ids) == self.processor.image_token_id)
            if not len(own):
                problem = (
                    f"for an image of {image.width} x {image.height} pixels it writes no token that stands for features"
                )
                raise UserError(
                    "the model's processor", problem, "look whether processor and tokenizer belong together"
                )
            # Tokens between them (rows of tiles) are no features.
            self._layouts[size] = int(own[0]), len(own), len(encoding.ids) - 1 - int(own[-1])
        return self._layouts[size]
