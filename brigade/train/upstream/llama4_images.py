"""Llama 4's images with PIL: Transformers computes them with torchvision only (llama4/image_processing_llama4.py).

Sizes, tiles and roundings to bf16 are those of Transformers' own class. PIL and torchvision round some colours of a scaled image
differently, by one of 255 (tests/unit/images/test_llama4_images.py compares it with recorded tiles). torchvision is no
requirement for its sake: pip installs its build for GPUs beside torch's for CPUs, and it then fails to load ("operator
torchvision::nms does not exist").
"""

from typing import Any

import numpy as np
import torch
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs

from .llama4_sizes import sizes


class Settings(ImagesKwargs, total=False):  # type: ignore[call-arg]
    """What a preprocessor_config.json says of Llama 4's images besides what all say. max_patches: the most tiles of an image"""

    max_patches: int
    resize_to_max_canvas: bool


class Llama4ImageProcessorPil(PilBackend):
    """Cuts an image into tiles of one size, and adds one that shows all of it where there are several."""

    resample = PILImageResampling.BILINEAR
    image_mean = [0.5, 0.5, 0.5]
    image_std = [0.5, 0.5, 0.5]
    size = {"height": 336, "width": 336}
    do_resize = True
    do_rescale = True
    do_normalize = True
    do_convert_rgb = True
    max_patches = 16
    resize_to_max_canvas = False
    valid_kwargs = Settings

    def _preprocess(
        self,
        images: list[np.ndarray],
        size: SizeDict,
        resample: PILImageResampling,
        max_patches: int,
        resize_to_max_canvas: bool,
        return_tensors: str | None = None,
        do_resize: bool = True,
        **colours: Any,
    ) -> BatchFeature:
        """Return "pixel_values", the tiles of all images in fp32, and "aspect_ratios", how many tiles each is high and wide.

        images: uint8, (3, height, width) each. Raises ValueError for tiles that are no squares, and for images as they are.
        """
        if not do_resize or size.height != size.width:
            raise ValueError("Llama 4 cuts images into squares of one size")
        tiles, ratios = [], []
        for image in images:
            canvas, inside = sizes(image.shape[1:], size.height, max_patches, resize_to_max_canvas)
            below, beside = canvas[0] - inside[0], canvas[1] - inside[1]
            scaled = np.pad(self.resize(image, SizeDict(*inside), resample), ((0, 0), (0, below), (0, beside)))
            down, across = canvas[0] // size.height, canvas[1] // size.width
            cut = scaled.reshape(3, down, size.height, across, size.width).transpose(1, 3, 0, 2, 4)
            of_image = [cut.reshape(-1, 3, size.height, size.width)]
            if down * across > 1:
                of_image.append(self.resize(image, size, resample)[None])
            tiles.append(_coloured(np.concatenate(of_image), **colours))
            ratios.append(np.array([down, across]))
        pixels = torch.cat(tiles) if return_tensors else tiles
        return BatchFeature({"pixel_values": pixels, "aspect_ratios": ratios}, tensor_type=return_tensors)


def _coloured(
    tiles: np.ndarray,
    do_rescale: bool,
    rescale_factor: float,
    do_normalize: bool,
    image_mean: list[float],
    image_std: list[float],
    **_: object,
) -> torch.Tensor:
    """Return tiles in fp32, where they are both rescaled and normalised with the roundings of bf16."""
    colours = torch.from_numpy(tiles)
    if do_rescale:
        colours = (colours.bfloat16() if do_normalize else colours) * rescale_factor
    if do_normalize:
        mean, std = (torch.tensor(each, dtype=colours.dtype)[:, None, None] for each in (image_mean, image_std))
        colours = (colours - mean) / std
    return colours.float()


def correct_model() -> None:
    """Let Llama 4's model of images take pixels in another precision than that of its tower's weights, as other models do, and
    return what its decoder has returned.

    Pixels are numbers that bf16 can hold, so that none is changed (llama4/modeling_llama4.py: Llama4UnfoldConvolution). The
    model looks for the tower's outputs among the decoder's, which has none (Llama4ForConditionalGeneration: image_outputs).
    """
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast as Outputs
    from transformers.models.llama4.modeling_llama4 import Llama4UnfoldConvolution as Patches

    plain = Patches.forward
    if plain.__module__ != Patches.__module__:  # once
        return

    def forward(self: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        return plain(self, hidden_states.to(self.linear.weight.dtype))

    Patches.forward = forward  # type: ignore[method-assign]
    Outputs.image_outputs = None  # type: ignore[attr-defined]
