"""Images in a micro-batch: their tensors, which tokens are theirs, and the positions of models that place an image in a plane."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ....errors import UserError
from ...data.store import TokenSequence
from ..tower_inputs import TOWER
from .grids import told_of

if TYPE_CHECKING:
    from ...data.collate import MicroBatch
    from .processor import Processor

IMAGE = 1  # the type of an image's tokens; a text's is 0


def add_images(batch: MicroBatch, sequences: Sequence[TokenSequence], processor: Processor) -> None:
    """Add to a micro-batch, whose tokens are laid out, what forward() takes of the images of its sequences.

    batch: "input_ids" of shape (1, tokens), where sequences lie end to end, or (sequences, longest); "position_ids" of that shape
    become (4, ...) where the model wants M-RoPE: the position in the sample's text, and the three of time, height and width
    What the tower is told of grids of patches stands under TOWER, and is not forward()'s.
    Raises UserError where an image cannot be read any more, where tokens of images have no image, and where one image's tokens
    follow another's directly, so that nothing tells where their positions begin.
    """
    images = [source.open() for sequence in sequences for source in sequence.get("images", ())]
    made = processor.tensors(images) if images else {}
    batch.update(made)
    if processor.model.grids and images:
        batch[TOWER] = told_of(made["image_grid_thw"], processor.config.vision_config, processor.model.grids)
    is_image = batch["input_ids"] == processor.image_token_id
    if not images and is_image.any():
        problem = f"a text without an image has the token of images, {processor.image_token!r}"
        raise UserError("data.images", problem, "take it out of the text")
    if processor.model.token_types:
        batch[processor.model.token_types] = is_image.long() * IMAGE
    if processor.model.positions:
        batch["position_ids"] = _rope_positions(batch, sequences, processor, is_image)


def _samples(batch: MicroBatch, sequences: Sequence[TokenSequence]) -> Iterator[tuple[int, slice]]:
    """Yield (row, its tokens) of each sample, in the order of their images. Padding is none."""
    end_to_end, begin = batch["input_ids"].shape[0] == 1, 0
    for number, sequence in enumerate(sequences):
        row, begin = (0, begin) if end_to_end else (number, 0)
        for length in sequence["lengths"].tolist():
            yield row, slice(begin, begin + length)
            begin += length


def _rope_positions(
    batch: MicroBatch, sequences: Sequence[TokenSequence], processor: Processor, is_image: torch.Tensor
) -> torch.Tensor:
    """Return positions of shape (4, *input_ids.shape), each sample's as if it were alone. A text's are four times the same."""
    ids = batch["input_ids"]
    of_text = batch["position_ids"] if "position_ids" in batch else torch.arange(ids.shape[1]).expand(ids.shape)
    positions = of_text.expand(4, *ids.shape).clone()
    grids, used = batch.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.long)), 0
    place = _placer(processor)
    for row, tokens in _samples(batch, sequences):
        marks = is_image[row, tokens]
        count = sum(is_one for is_one, _ in itertools.groupby(marks.tolist()))
        if not count:
            continue
        own = grids[used : used + count]
        used += count
        needed = int((own.prod(dim=-1) // processor.config.vision_config.spatial_merge_size**2).sum())
        if needed != int(marks.sum()):
            _refuse()
        places, _ = place(ids[row : row + 1, tokens], mm_token_type_ids=marks[None].int() * IMAGE, image_grid_thw=own)
        positions[1:, row, tokens] = places[:, 0]
    if used != len(grids):
        _refuse()
    return positions


def _refuse() -> None:
    problem = "two images follow each other without a token between them, so that their positions cannot be told apart"
    raise UserError(
        "data.chat_template", problem, "use the model's own template, which writes tokens around each image"
    )


def _placer(processor: Processor) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return get_rope_index of the model's own class, bound to a model without parameters: it only reads the configuration."""
    from transformers import MODEL_MAPPING

    kind = MODEL_MAPPING[type(processor.config)]
    empty = kind.__new__(kind)
    torch.nn.Module.__init__(empty)
    empty.config = processor.config
    return empty.get_rope_index
