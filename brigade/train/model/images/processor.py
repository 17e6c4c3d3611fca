"""A model's own processor of images: the text and the tensors that an image becomes, in micro-batches and in prompts.

Image processors compute with PIL and numpy, never with torchvision, so that an image's pixels are the same on all hosts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ....errors import UserError, first_line
from ...data.images import DROP, ImageRules, ImageSource
from ...data.rows import BadRow
from ...data.store import IGNORED, TokenSequence
from ...recipe.images import within
from .. import parts
from .tower import TOWER, told_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedConfig, ProcessorMixin

    from ...data.collate import MicroBatch

IMAGE = 1  # the type of an image's tokens; a text's is 0
# What a processor gives besides an image's tensors: they are about its text, which is ours.
OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
# Sizes among which is an image of few tokens: some models divide an image by its sides' ratio, and enlarge small ones.
BLANKS = [(32, 32), (64, 32), (128, 32), (256, 32)]


@dataclasses.dataclass(frozen=True)
class Model:
    """What this room reads of a kind in model/vision_models.yaml, which has each field's meaning."""

    processor: str
    masks: bool
    token_types: str | None
    positions: str | None
    most_images: int | None = None
    grids: tuple[str, ...] = ()
    scales: bool = False


@functools.cache
def models() -> Mapping[str, Model]:
    """Return what model/vision_models.yaml says: kind -> Model."""
    names = {field.name for field in dataclasses.fields(Model)}
    return {
        kind: Model(**{name: entry[name] for name in names & entry.keys()}) for kind, entry in parts.known().items()
    }


class Processor:
    """The processor of a model of images and texts. It can be pickled.

    image_token: what a chat template writes once for each image; image_token_id: the id whose embeddings an image's features
    replace. They differ in some models, as in Gemma 3. own: Transformers' processor
    scales: whether it scales images to limits of pixels that are settings of its own
    """

    def __init__(self, processor: ProcessorMixin, config: PreTrainedConfig) -> None:
        self.config, self.model = config, models()[parts.kind_of(config)]
        self.image_token: str = processor.image_token
        self.image_token_id: int = config.image_token_id
        self.most_images = self.model.most_images
        self.own, self.scales = processor, self.model.scales
        self._expansions: dict[tuple[int, int], str] = {}
        self._blank: TokenSequence | None = None

    def limit(self, rules: ImageRules) -> None:
        """Make the recipe's limits of pixels the processor's own, where it has some. Nothing may have been expanded before."""
        if self.scales and (rules.max_pixels or rules.min_pixels):
            size = self.own.image_processor.size
            own = size["shortest_edge"], size["longest_edge"]
            fewest, most = within(own, rules.max_pixels, rules.min_pixels)
            self.own.image_processor.size = type(size)(shortest_edge=fewest, longest_edge=most)

    def expansion(self, width: int, height: int) -> str:
        """Return the text that stands for an image of that many pixels, in place of its image_token: the processor makes it for
        a blank image, for it depends on nothing but the size. Raises BadRow for a size that it does not take."""
        from PIL import Image

        if (width, height) not in self._expansions:
            try:
                made = self.own(
                    images=[Image.new("RGB", (width, height))],
                    text=[self.image_token],
                    return_text_replacement_offsets=True,
                    do_rescale=False,  # what takes time, and changes colours only
                    do_normalize=False,
                )
            except ValueError as error:  # Qwen's of an image 200 times as long as wide
                problem = f"the model's processor takes no image of {width:,} x {height:,} pixels: {first_line(error)}"
                raise BadRow(problem, f"crop it; {DROP}") from None
            ((replaced,),) = made["text_replacement_offsets"]
            self._expansions[width, height] = replaced["replacement"]
        return self._expansions[width, height]

    def tensors(self, images: Sequence[Image]) -> dict[str, torch.Tensor]:
        """Return what the model's forward() takes of these images, which are in the order of their tokens.

        Each image is an image of its own, however many its sample has: LLaVA-OneVision divides it into patches by its size.
        """
        text = [self.image_token * len(images)]
        made = self.own(images=list(images), text=text, return_tensors="pt")
        return {name: tensor for name, tensor in made.items() if name not in OF_TEXT}

    def identity(self) -> str:
        """Return a digest of all that decides what expansion() and tensors() give."""
        import PIL
        import transformers

        settings = {name: each for name, each in vars(self.own).items() if isinstance(each, str | int | float | list)}
        settings.pop("chat_template", None)
        known = [
            transformers.__version__,
            PIL.__version__,
            self.model.processor,
            self.own.image_processor.to_dict(),
            settings,
        ]
        return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()

    def blank(self) -> TokenSequence:
        """Return a sample of one black image of few tokens, without a label: a micro-batch has it where all ranks have to run
        the tower and it has no image."""
        from PIL import Image

        if self._blank is None:
            tokenizer = self.own.tokenizer
            width, height = min(BLANKS, key=lambda size: len(tokenizer.tokenize(self.expansion(*size))))
            file = io.BytesIO()
            Image.new("RGB", (width, height)).save(file, "PNG")
            ids = np.array(tokenizer.encode(self.expansion(width, height), add_special_tokens=False), dtype=np.int32)
            self._blank = {
                "input_ids": ids,
                "labels": np.full(len(ids), IGNORED, dtype=np.int64),
                "lengths": np.array([len(ids)]),
                "images": [ImageSource("blank.png", file.getvalue(), width, height)],
            }
        return self._blank

    def add_to(self, batch: MicroBatch, sequences: Sequence[TokenSequence]) -> None:
        """Add to a micro-batch, whose tokens are laid out, what forward() takes of the images of its sequences.

        batch: "input_ids" of shape (1, tokens), where sequences lie end to end, or (sequences, longest); "position_ids" of that
        shape become (4, ...) where the model wants M-RoPE: the position in the sample's text, and the three of time, height and
        width. What the tower is told of grids of patches stands under TOWER, and is not forward()'s.
        Raises UserError where an image cannot be read any more, where tokens of images have no image, and where one image's
        tokens follow another's directly, so that nothing tells where their positions begin.
        """
        images = [source.open() for sequence in sequences for source in sequence.get("images", ())]
        made = self.tensors(images) if images else {}
        batch.update(made)
        if self.model.grids and images:
            batch[TOWER] = told_of(made["image_grid_thw"], self.config.vision_config, self.model.grids)
        is_image = batch["input_ids"] == self.image_token_id
        if not images and is_image.any():
            problem = f"a text without an image has the token of images, {self.image_token!r}"
            raise UserError("data.images", problem, "take it out of the text")
        if self.model.token_types:
            batch[self.model.token_types] = is_image.long() * IMAGE
        if self.model.positions:
            batch["position_ids"] = self._rope_positions(batch, sequences, is_image)

    def _rope_positions(
        self, batch: MicroBatch, sequences: Sequence[TokenSequence], is_image: torch.Tensor
    ) -> torch.Tensor:
        """Return positions of shape (4, *input_ids.shape), each sample's as if it were alone. A text's are four times the
        same."""
        ids = batch["input_ids"]
        of_text = batch["position_ids"] if "position_ids" in batch else torch.arange(ids.shape[1]).expand(ids.shape)
        positions = of_text.expand(4, *ids.shape).clone()
        grids, used = batch.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.long)), 0
        place = self._placer()
        for row, tokens in _samples(batch, sequences):
            marks = is_image[row, tokens]
            count = sum(is_one for is_one, _ in itertools.groupby(marks.tolist()))
            if not count:
                continue
            own = grids[used : used + count]
            used += count
            needed = int((own.prod(dim=-1) // self.config.vision_config.spatial_merge_size**2).sum())
            if needed != int(marks.sum()):
                _refuse()
            places, _ = place(
                ids[row : row + 1, tokens], mm_token_type_ids=marks[None].int() * IMAGE, image_grid_thw=own
            )
            positions[1:, row, tokens] = places[:, 0]
        if used != len(grids):
            _refuse()
        return positions

    def _placer(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """Return get_rope_index of the model's own class, bound to a model without parameters: it only reads the
        configuration."""
        from transformers import MODEL_MAPPING

        kind = MODEL_MAPPING[type(self.config)]
        empty = kind.__new__(kind)
        torch.nn.Module.__init__(empty)
        empty.config = self.config
        return empty.get_rope_index

    def of_prompts(self, ids: torch.Tensor, images: Sequence[ImageSource]) -> dict[str, torch.Tensor]:
        """Return what generate() takes besides token ids and their mask, where prompts have images; {} where they have none.

        ids: (prompts, longest), padded on the left; images: of all prompts, in the order of their tokens
        The model finds positions by itself: one that has three for each token is told which tokens are an image's.
        """
        if not images:
            return {}
        made = self.tensors([image.open() for image in images])
        told = self.model.token_types or ("mm_token_type_ids" if self.model.positions else None)
        return made | ({told: (ids == self.image_token_id).long()} if told else {})

    def with_one_token_each(self, ids: Sequence[int]) -> list[int]:
        """Return token ids in which one image token stands for all that follow each other."""
        image = self.image_token_id
        return [token for at, token in enumerate(ids) if token != image or at == 0 or ids[at - 1] != image]


def _samples(batch: MicroBatch, sequences: Sequence[TokenSequence]) -> Iterator[tuple[int, slice]]:
    """Yield (row, its tokens) of each sample, in the order of their images. Padding is none."""
    end_to_end, begin = batch["input_ids"].shape[0] == 1, 0
    for number, sequence in enumerate(sequences):
        row, begin = (0, begin) if end_to_end else (number, 0)
        for length in sequence["lengths"].tolist():
            yield row, slice(begin, begin + length)
            begin += length


def _refuse() -> None:
    problem = "two images follow each other without a token between them, so that their positions cannot be told apart"
    raise UserError(
        "data.chat_template", problem, "use the model's own template, which writes tokens around each image"
    )
