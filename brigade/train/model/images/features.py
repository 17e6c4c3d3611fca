"""Whether a processor writes as many tokens for an image as the model makes features of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....errors import UserError, first_line
from .. import trial
from .load import load
from .processor import Processor

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from ...recipe.settings import Settings

SIZE = (300, 900)  # pixels, width and height
CURE = "check that the processor's files (processor_config.json, preprocessor_config.json) are the model's own"


def load_checked(settings: Settings, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> Processor | None:
    """Load the processor of the recipe's model as load() does, and compare it with the model: a tiny random one of the
    architecture makes features of a blank image. Raises UserError where it cannot, or where it makes another number of them than
    the processor writes tokens for."""
    processor = load(settings, tokenizer, config)
    if processor is None:
        return None
    key = "processor_name_or_path" if settings.recipe.model.processor_name_or_path else "model_name_or_path"
    image = "an image of {} x {} pixels".format(*SIZE)
    try:
        with trial.alone():
            features = _count(trial.tiny_model(config, images=True), processor)
    except Exception as error:
        problem = f"{type(config).__name__} cannot read what the processor makes of {image}: {first_line(error)}"
        raise UserError(settings.place(key), problem, CURE) from None
    tokens = tokenizer(processor.expansion(*SIZE), add_special_tokens=False)["input_ids"].count(
        processor.image_token_id
    )
    if tokens != features:
        problem = f"the processor writes {tokens:,} tokens for {image}, of which the model makes {features:,} features"
        raise UserError(settings.place(key), problem, CURE)
    return processor


def _count(model: torch.nn.Module, processor: Processor) -> int:
    """Return how many embeddings a model makes of a blank image."""
    import torch
    from PIL import Image

    tensors = processor.tensors([Image.new("RGB", SIZE)])
    tensors.pop("batch_num_images", None)  # forward() takes it, and get_image_features() does not
    with torch.inference_mode():
        made = model.get_image_features(**tensors, return_dict=True)
    features = made.last_hidden_state if made.pooler_output is None else made.pooler_output
    return sum(each.shape[:-1].numel() for each in features)
