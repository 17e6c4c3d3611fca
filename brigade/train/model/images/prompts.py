"""Prompts with images: what generate() takes of their images, and how they are shown."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...data.images import ImageSource

if TYPE_CHECKING:
    import torch

    from .processor import Processor


def inputs_of(processor: "Processor", ids: "torch.Tensor", images: Sequence[ImageSource]) -> "dict[str, torch.Tensor]":
    """Return what generate() takes besides token ids and their mask, where prompts have images; {} where they have none.

    ids: (prompts, longest), padded on the left; images: of all prompts, in the order of their tokens
    The model finds positions by itself: one that has three for each token is told which tokens are an image's.
    """
    if not images:
        return {}
    made = processor.tensors([image.open() for image in images])
    told = processor.model.token_types or ("mm_token_type_ids" if processor.model.positions else None)
    return made | ({told: (ids == processor.image_token_id).long()} if told else {})


def with_one_token_each(processor: "Processor", ids: Sequence[int]) -> list[int]:
    """Return token ids in which one image token stands for all that follow each other."""
    image = processor.image_token_id
    return [token for at, token in enumerate(ids) if token != image or at == 0 or ids[at - 1] != image]
