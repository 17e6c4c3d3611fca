"""By tiles a model has the loss and the gradients that it has whole, and nothing as large as its logits ever exists."""

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from brigade.train.loss import tiled
from brigade.train.model.tiny import shrink
from testing.vision_models import write_vision_model

FAMILIES = ["llama", "qwen3", "qwen3_moe", "mistral", "phi3", "gemma3_text", "deepseek_v3", "gpt_oss", "mixtral"]
TOKENS, TILE = 96, 8


def config(family, **values):
    return transformers.AutoConfig.for_model(family, **values)


@pytest.fixture
def model():
    torch.manual_seed(0)
    tiny = type(shape := config("llama"))(**shrink(shape.to_dict()) | {"intermediate_size": 512, "vocab_size": 4096})
    return transformers.AutoModelForCausalLM.from_config(tiny)


class Largest(TorchDispatchMode):
    """Most elements of any tensor made meanwhile, parameters' gradients aside; and most bytes alive at once, by what they are."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **kwargs or {})
        for tensor in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(tensor, torch.Tensor):
                self.shapes.add(tuple(tensor.shape))
        return found


def step(model, tokens=TOKENS):
    row = torch.arange(tokens)[None] % 89 + 7
    with Largest() as seen:
        loss = model(row, labels=row, use_cache=False, num_items_in_batch=tokens - 1).loss
        loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients, seen.shapes


@pytest.mark.parametrize("loss, mlp", [(TILE, None), (None, TILE), (TILE, TILE), (7, 11), (1000, 1000), (True, "auto")])
def test_tiles_give_the_same_loss_and_gradients(model, loss, mlp):
    whole, gradients, _ = step(model)
    tiled.apply(model, loss, mlp)
    by_tiles, others, _ = step(model)
    torch.testing.assert_close(by_tiles, whole, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_nothing_is_larger_than_a_tile(model):
    """Neither logits (tokens x vocabulary) nor what lies inside an MLP (tokens x intermediate size), forward or backward."""
    wide = {size: model.config.to_dict()[size] for size in ("vocab_size", "intermediate_size")}

    def most(shapes, width):  # tokens of anything that is so wide; weights are as wide as the hidden size is not
        as_wide = (shape for shape in shapes if shape and shape[-1] == width and len(shape) != 1)
        return max((torch.Size(shape).numel() // width for shape in as_wide), default=0)

    _, _, shapes = step(model)
    assert {key: most(shapes, width) for key, width in wide.items()} == dict.fromkeys(wide, TOKENS)
    tiled.apply(model, TILE, TILE)
    _, _, shapes = step(model)
    hidden = model.config.hidden_size  # weights are transposed: (hidden size, width)
    shapes = {shape for shape in shapes if shape[:1] != (hidden,)}
    assert {key: most(shapes, width) for key, width in wide.items()} == dict.fromkeys(wide, TILE)


def test_without_labels_it_gives_logits(model):
    row = torch.arange(12)[None]
    whole = model(row).logits
    tiled.apply(model, 4, 4)
    step(model)
    torch.testing.assert_close(model(row).logits, whole)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", ["tiled_loss", "tiled_mlp"])
def test_the_recipes_architectures(load, family, key, mistake):
    settings = load(training={key: 16})
    if (family, key) == ("gpt_oss", "tiled_mlp"):  # its MLP returns scores beside the states
        assert "flag" not in mistake(tiled.check, settings, config(family))
        return
    tiled.check(settings, config(family))


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl", "llava_onevision"])
def test_models_of_images_and_texts(load, kind, tmp_path):
    """Their towers have layers with MLPs, too, which stay whole."""
    path = write_vision_model(tmp_path, kind)
    settings = load("--images", "--model_name_or_path", str(path), training={"tiled_loss": 5, "tiled_mlp": 5})
    tiled.check(settings, transformers.AutoConfig.from_pretrained(path))
    model = transformers.AutoModelForImageTextToText.from_pretrained(path)
    tiled.apply(model, 5, 5)
    by_tiles = [name for name, module in model.named_modules() if type(vars(module).get("forward")) is tiled._Tiles]
    assert len(by_tiles) == 2 and all("language_model.layers" in name for name in by_tiles)


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere"])
def test_logits_that_are_changed_before_the_loss_are_refused(load, mistake, family):
    changes = {"granite": {"logits_scaling": 8.0}}.get(family, {})
    message = mistake(tiled.check, load(training={"tiled_loss": True}), config(family, **changes))
    assert "tiled_loss" in message and "leave the key out" in message


@pytest.mark.parametrize("training, model, key", [
    ({"tiled_loss": 8}, {"use_peft": True, "lora_target_modules": ["q_proj", "lm_head"]}, "tiled_loss"),
    ({"tiled_mlp": 8, "torch_compile": True}, {}, "tiled_mlp"),
])  # fmt: skip
def test_what_goes_with_no_tiles(load, mistake, training, model, key):
    assert key in mistake(tiled.check, load(training=training, model=model), config("llama"))
