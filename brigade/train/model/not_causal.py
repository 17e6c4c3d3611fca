"""What a model is that is no causal language model, in words for who named it."""

from typing import Any

from transformers.models.auto import modeling_auto as auto

KINDS = {
    "reads images and text": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "compares images and text": auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "is a speech model": {**auto.MODEL_FOR_CTC_MAPPING_NAMES, **auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES},
    "is a vision model": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}


def what_it_is(config: Any) -> str:
    """Of a configuration whose kind is an encoder's too, or no causal language model's; "" where it is one all the same."""
    kind, is_decoder = config.model_type, getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if getattr(config, "is_encoder_decoder", False) and not is_decoder:
        return "has an encoder and a decoder"
    if kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not is_decoder:
        return "is an encoder"
    if kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or getattr(config, "auto_map", None):
        return ""
    return next((words for words, kinds in KINDS.items() if kind in kinds), "is none, as Transformers knows it")
