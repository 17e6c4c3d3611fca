"""What a rehearsal makes of a recipe: tiny sizes, the same architecture, and only what this machine can compute."""

import json
from pathlib import Path

import pytest

from brigade.cluster import World
from brigade.model.tiny import VOCABULARY, shrink
from brigade.recipe import flags
from brigade.strategy import Strategy
from brigade.training import rehearse
from testing.shipped import shipped

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", shipped("recipes/*/config.json"), ids=lambda path: path.parent.name)
def test_the_architecture_stays_and_the_sizes_shrink(path):
    config = json.loads(path.read_text())
    tiny = shrink(config)
    assert tiny.keys() >= config.keys() - {"quantization_config"} and tiny["model_type"] == config["model_type"]
    assert {k: v for k, v in tiny.items() if isinstance(v, bool)} == {
        k: v for k, v in config.items() if isinstance(v, bool)
    }
    text = tiny.get("text_config", tiny)
    assert text["hidden_size"] < 100 and text["num_hidden_layers"] == 2 and text["vocab_size"] == VOCABULARY
    assert text.get("num_attention_heads", 4) % text.get("num_key_value_heads", 4) == 0


def test_sizes_of_a_text_model_inside_another_shrink_too():
    tiny = shrink({"model_type": "gemma3", "text_config": {"hidden_size": 4096, "num_hidden_layers": 62}})
    assert tiny["text_config"]["hidden_size"] < 100 and tiny["text_config"]["num_hidden_layers"] == 2


def test_what_needs_a_gpu_is_replaced_and_told():
    settings = flags.load(["--attn_implementation", "flash_attention_2", "--fp16"])
    world = World(0, 0, 2, 2, "host", "torchrun")
    recipe = rehearse.tiny_recipe(settings, Strategy("ddp", "ddp", "a test"), Path("model"), world)
    notes = rehearse.without_gpu(recipe)
    assert len(notes) == 2 and "flash_attention_2" in notes[0] and "fp16" in notes[1]
    assert recipe["model"]["attn_implementation"] == "sdpa" and recipe["training"]["bf16"]
    assert rehearse.without_gpu(recipe) == []
