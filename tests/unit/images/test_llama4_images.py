"""Llama 4's tiles with PIL are those of Transformers' class, which needs torchvision."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from brigade.train.upstream.llama4_images import Llama4ImageProcessorPil
from brigade.train.upstream.llama4_sizes import sizes

TILES = Path(__file__).parents[2] / "data/images/llama4_tiles.npz"
# (image, canvas, the image within it), height and width each, as Transformers' functions gave them for 16 tiles of 336.
RECORDED = [
    ((336, 336), (336, 336), (336, 336)), ((480, 640), (672, 672), (480, 640)), ((1080, 1920), (1008, 1680), (945, 1680)),
    ((32, 32), (336, 336), (336, 336)), ((20, 48), (336, 336), (140, 336)), ((60, 17), (336, 336), (336, 95)),
    ((3000, 100), (3024, 336), (3000, 100)), ((337, 336), (672, 336), (337, 336)), ((700, 1500), (1008, 1680), (700, 1500)),
    ((4000, 4000), (1344, 1344), (1344, 1344)), ((1, 900), (336, 1008), (1, 900)),
]  # fmt: skip
ENLARGED = [((336, 336), (1344, 1344), (1344, 1344)), ((640, 480), (1344, 1008), (1344, 1007))]  # to fill the canvas


@pytest.mark.parametrize("image, canvas, inside, enlarge", [(*each, each in ENLARGED) for each in RECORDED + ENLARGED])
def test_sizes_are_those_of_transformers(image, canvas, inside, enlarge):
    assert sizes(image, 336, 16, enlarge=enlarge) == (canvas, inside)


def test_tiles_come_row_by_row_and_the_whole_image_last():
    pixels = np.repeat(np.arange(6, dtype=np.uint8).reshape(2, 3) * 40, 16, axis=0).repeat(16, axis=1)
    processor = Llama4ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=6)
    image = Image.fromarray(pixels).convert("RGB")
    plain = processor([image], do_rescale=False, do_normalize=False, return_tensors="pt")
    assert plain["aspect_ratios"].tolist() == [[2, 3]]
    tiles = plain["pixel_values"]
    assert tiles.shape == (7, 3, 16, 16) and tiles[:6, 0, 8, 8].tolist() == [0, 40, 80, 120, 160, 200]
    assert tiles[6, 0, 0, 0] == 0 and tiles[6, 0, -1, -1] == 200
    # As the original, in bf16: 200 / 255 is 0.78515625 there.
    whole = processor([image], return_tensors="pt")["pixel_values"]
    assert whole[5, 0, 8, 8] == (0.78515625 - 0.5) / 0.5 and torch.equal(whole, whole.bfloat16().float())


def test_an_image_s_rest_of_the_canvas_is_black():
    processor = Llama4ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=4)
    made = processor([Image.new("RGB", (20, 10), "white")], return_tensors="pt")["pixel_values"]
    assert made.shape[0] == 3 and made[1, 0, 0, 3] == 1 and made[1, 0, 0, 4] == -1 and made[0, 0, 10, 0] == -1


@pytest.mark.parametrize("size", ["20x30", "9x70", "16x16", "40x12"])
def test_pixels_are_nearly_those_of_torchvision(size):
    """TILES has images of noise, and what Transformers' Llama4ImageProcessor made of them with torchvision 0.28.0."""
    with np.load(TILES) as recorded:
        image, wanted, grid = (recorded[f"{size} {what}"] for what in ("image", "tiles", "grid"))
        coloured = recorded["16x16 scaled"]
    processor = Llama4ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=4)
    plain = processor([Image.fromarray(image)], do_rescale=False, do_normalize=False, return_tensors="pt")
    assert plain["aspect_ratios"].tolist() == [grid.tolist()]
    assert np.abs(plain["pixel_values"].numpy().astype(int) - wanted).max() <= 1  # of 255
    if size == "16x16":  # is not scaled
        pixels = processor([Image.fromarray(image)], return_tensors="pt")["pixel_values"]
        assert np.array_equal(pixels.numpy(), coloured)


def test_a_tower_in_bf16_takes_pixels_in_fp32(written, picture):
    model = written("llama4")
    made = AutoModelForImageTextToText.from_pretrained(model.folder, dtype=torch.bfloat16)
    pixels = model.processor.tensors([picture(1, 32, 32).open()])["pixel_values"]
    assert pixels.dtype == torch.float32
    with torch.no_grad():
        given = (made.get_image_features(each).last_hidden_state for each in (pixels, pixels.bfloat16()))
        assert torch.equal(*given)


def test_a_model_of_images_returns_its_logits(written, picture):
    """Whatever its outputs are called: one release of Transformers looks for a tower's in a decoder's."""
    model = written("llama4")
    made = AutoModelForImageTextToText.from_pretrained(model.folder, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7]])
    pixels = model.processor.tensors([picture(1, 32, 32).open()])["pixel_values"]
    image = torch.full(
        (1, made.get_image_features(pixels).last_hidden_state.flatten(0, -2).shape[0]), made.config.image_token_id
    )
    with torch.no_grad():
        plain = made(ids).logits
        shown = made(torch.cat([image, ids], 1), pixel_values=pixels).logits
    torch.testing.assert_close(plain, made.language_model(ids).logits)
    assert shown.shape[1] == image.shape[1] + 3 and not torch.allclose(shown[:, -3:], plain)
