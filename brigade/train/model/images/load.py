"""The processor of a recipe's model, loaded: its files are a directory's or a repository's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ....errors import UserError, first_line
from ...data.images import NO_RULES, ImageRules
from ...host.hub import hub_is_away
from ...recipe.settings import Settings
from .. import parts
from ..location import location
from .processor import BLANKS, Processor, models

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


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
