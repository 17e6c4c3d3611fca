"""What the tests of images share: tiny models of each type, their processors, and pictures."""

import functools
import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from brigade.train.data.images import ImageSource
from brigade.train.model.images.load import read_processor
from brigade.train.model.images.processor import Processor
from testing.vision_models import write_vision_model


@dataclass(eq=False)
class Written:
    """A model of write_vision_model() with what reads it. sources: the images of each of a test's samples"""

    folder: Any
    tokenizer: Any
    config: Any
    processor: Processor
    sources: list[Any] = field(default_factory=list)
    models: dict[str, Any] = field(default_factory=dict)

    def model(self, how: str = "sdpa") -> Any:
        """The model with this attention in its language part, the same one each time, without gradients."""
        from transformers import AutoModelForImageTextToText

        from brigade.train.model import attention, sample_by_sample

        if how not in self.models:
            attention.register()
            each = {"": how, "text_config": how, "vision_config": "sdpa"}
            self.models[how] = AutoModelForImageTextToText.from_pretrained(self.folder, attn_implementation=each)
            sample_by_sample.divide(self.models[how])
        self.models[how].zero_grad()
        return self.models[how]


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """Return a function that gives the Written of a model type, the same each time."""
    from transformers import AutoConfig, AutoTokenizer

    @functools.cache
    def call(kind):
        folder = write_vision_model(tmp_path_factory.mktemp(kind.replace("/", "-")), kind)
        tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
        return Written(folder, tokenizer, config, read_processor("model", str(folder), None, config, tokenizer))

    return call


@pytest.fixture(scope="session")
def picture():
    """Return a function that makes an image of these many pixels, noise that differs with the number."""
    from PIL import Image

    def call(number, width, height):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        return ImageSource(f"{number}.png", file.getvalue(), width, height)

    return call
