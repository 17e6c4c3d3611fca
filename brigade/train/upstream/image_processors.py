"""Processors of models of images and texts, without the packages that only their videos and sounds need.

Transformers builds no processor of Qwen, InternVL, SmolVLM, LLaVA-OneVision or Gemma 4 without torchvision, which wants a
processor of videos (processing_utils.py: check_argument_for_proper_class). Their images can be computed with PIL, and no video
is read here. Llama 4's images it computes with torchvision only; llama4_images.py does it with PIL.
"""

import copy
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from transformers import (
    AutoImageProcessor,
    BaseImageProcessor,
    FeatureExtractionMixin,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    video_processing_utils,
)
from transformers.processing_utils import ProcessorMixin
from transformers.utils import is_torchvision_available

from .llama4_images import Llama4ImageProcessorPil, correct_model


class NoVideos(video_processing_utils.BaseVideoProcessor):
    """Stands where a processor wants one of videos."""

    def __init__(self) -> None:
        """Leave out the parent's, which wants torchvision (image_processing_backends.py: TorchvisionBackend)."""


class NoSounds(FeatureExtractionMixin):
    """Stands where a processor wants one of sounds."""

    def __init__(self) -> None:
        """Leave out the parent's, for there are no settings."""


def no_words(number: int) -> str:
    """Stand for num2words, with which SmolVLM's processor says how many frames a video has (smolvlm/processing_smolvlm.py)."""
    raise NotImplementedError("videos are not read")


STAND_INS = {"video_processor": NoVideos, "feature_extractor": NoSounds}


def processor_class(name: str) -> type[ProcessorMixin]:
    """Return the class of a processor by its name below transformers.models, as "gemma3.processing_gemma3.Gemma3Processor".

    Transformers' own table has a substitute for some of them where torchvision is missing, which refuses to be built.
    """
    module_name, _, class_name = name.rpartition(".")
    with _images_of_pixtral() if "pixtral" in module_name else nullcontext():
        module = importlib.import_module(f"transformers.models.{module_name}")
    if getattr(module, "num2words", no_words) is None:
        module.num2words = no_words  # type: ignore[attr-defined]
    return getattr(module, class_name)


@contextmanager
def _images_of_pixtral() -> Iterator[None]:
    """Let Pixtral's processor take a function from the file of images with PIL, where it looks for it in that of images with
    torchvision (pixtral/processing_pixtral.py: get_resize_output_image_size)."""
    wanted, there = (f"transformers.models.pixtral.image_processing_{name}" for name in ("pixtral", "pil_pixtral"))
    if is_torchvision_available():
        yield
        return
    sys.modules[wanted] = importlib.import_module(there)
    try:
        yield
    finally:
        del sys.modules[wanted]


def read_image_processor(source: str, revision: str | None, config: PreTrainedConfig) -> BaseImageProcessor:
    """Return the image processor of a directory or of a repository on the Hub, with PIL where there is one.

    config: the model's
    """
    settings, _ = Llama4ImageProcessorPil.get_image_processor_dict(source, revision=revision)
    if str(settings.get("image_processor_type")).removesuffix("Fast") == "Llama4ImageProcessor":
        correct_model()
        return Llama4ImageProcessorPil.from_dict(settings)
    how = {"config": config, "backend": "pil", "trust_remote_code": False}
    return AutoImageProcessor.from_pretrained(source, revision=revision, **how)


def build_processor(
    kind: type[ProcessorMixin],
    arguments: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    image_processor: BaseImageProcessor,
) -> ProcessorMixin:
    """Build a processor of this class from what its processor_config.json says, with a tokenizer of its own: Gemma 4's adds a
    token to the one that it gets (gemma4/processing_gemma4.py)."""
    import transformers

    # what a processor of videos has to be, left out without torchvision
    if not hasattr(transformers, "VideoProcessorMixin"):
        transformers.VideoProcessorMixin = video_processing_utils.VideoProcessorMixin  # type: ignore[attr-defined]
    parts = {"tokenizer": copy.deepcopy(tokenizer), "image_processor": image_processor}
    ordered = [parts[name] if name in parts else STAND_INS[name]() for name in kind.get_attributes()]
    return kind.from_args_and_dict(ordered, arguments)
