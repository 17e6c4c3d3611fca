"""A model's own processor of images: the text and the tensors that an image becomes.

Image processors compute with PIL and numpy, never with torchvision, so that an image's pixels are the same on all hosts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ....errors import UserError, first_line
from ...data.images import DROP, NO_RULES, ImageRules, ImageSource
from ...data.rows import BadRow
from ...data.store import IGNORED, TokenSequence
from ...host.hub import hub_is_away
from ...recipe.images import within
from ...recipe.settings import Settings
from .. import parts
from ..location import location
from .batch import add_images

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

    from ...data.collate import MicroBatch

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
        """Add to a micro-batch of these sequences what forward() takes of their images; see batch.py."""
        add_images(batch, sequences, self)


def load(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, source: str = ""
) -> Processor | None:
    """Load the processor of the recipe's model, or return None where data.images is false.

    config: the model's; source: a directory with its files; default: where the recipe's model lies, or its name on the Hub.
    processor_name_or_path goes before both
    Raises UserError for a model that parts.check_model() refuses, and where its processor's files are missing or cannot be used.
    """
    if not settings.recipe.data.images:
        return None
    model = settings.recipe.model
    parts.check_model(settings, config)
    other = model.processor_name_or_path
    place, revision = settings.place("processor_name_or_path" if other else "model_name_or_path"), model.revision
    source = source or location(settings)
    if not Path(other or source).is_dir():
        hub_is_away()
    # The model's revision is not another repository's.
    rules = ImageRules(settings.recipe.data.max_pixels, settings.recipe.data.min_pixels)
    return read_processor(place, other or source, None if other else revision, config, tokenizer, rules)


def read_processor(
    place: str,
    source: str,
    revision: str | None,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    rules: ImageRules = NO_RULES,
) -> Processor:
    """Read the processor's files of a directory or a repository on the Hub; place: the key of the recipe that names it; rules:
    what the recipe says of images.

    Raises UserError where there are none, or where they are another class's or cannot compute without torchvision.
    """
    from transformers.image_processing_backends import PilBackend

    from ...upstream import image_processors, samples_end_to_end

    model = models()[parts.kind_of(config)]
    if model.masks:
        samples_end_to_end.correct_masks()
    kind = image_processors.processor_class(model.processor)
    try:
        arguments, _ = kind.get_processor_dict(source, revision=revision or "main")
        image_processor = image_processors.read_image_processor(source, revision, config)
    except Exception as error:
        problem = f"no processor of images at {source!r}: {first_line(error)}"
        cure = "name a directory or a repository with a preprocessor_config.json: model.processor_name_or_path"
        raise UserError(place, problem, cure) from None
    named = arguments.get("processor_class", kind.__name__)
    if named != kind.__name__ or not isinstance(image_processor, PilBackend):
        other = named if named != kind.__name__ else type(image_processor).__name__
        problem = f"{source!r} computes images by {other}, which is not known to be exact here"
        raise UserError(place, problem, f"name one for {kind.__name__}, whose images are computed with PIL")
    try:
        processor = Processor(image_processors.build_processor(kind, arguments, tokenizer, image_processor), config)
        processor.limit(rules)
        known = bool((processor.blank()["input_ids"] == processor.image_token_id).any())
    except Exception as error:  # a tokenizer without the tokens of images, above all
        problem = f"{kind.__name__} cannot be built of the files at {source!r}: {first_line(error)}"
        raise UserError(place, problem, "name the model's own processor and tokenizer") from None
    if not known:
        problem = f"an image becomes {processor.expansion(*BLANKS[0])[:80]!r} by {source!r}, in which the model's image token, "
        problem += f"{processor.image_token_id}, does not occur"
        raise UserError(place, problem, "name the model's own processor and tokenizer")
    return processor
