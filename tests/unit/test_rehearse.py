"""What a rehearsal makes of a recipe: tiny sizes, the same architecture, and only what this machine can compute."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig

from brigade.train.host.cluster import World
from brigade.train.model.tiny import VOCABULARY, shrink
from brigade.train.recipe import flags
from brigade.train.run import best_checkpoint
from brigade.train.step import rehearse
from brigade.train.strategy import Strategy, check, choose
from testing.shipped import shipped

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", shipped("recipes/*/config.json"), ids=lambda path: path.parent.name)
def test_the_architecture_stays_and_the_sizes_shrink(path):
    config = json.loads(path.read_text())
    tiny = shrink(config)
    assert tiny.keys() >= config.keys() - {"quantization_config"} and tiny["model_type"] == config["model_type"]
    switches = [{k: v for k, v in of.items() if isinstance(v, bool)} for of in (tiny, config)]
    assert switches[0] == switches[1]
    text = tiny.get("text_config", tiny)
    # SmolLM3's fourth layer has no positions; in Gemma 4's E models layers of both kinds take keys and values of earlier ones.
    layers = 4 if text["model_type"] == "smollm3" or text.get("num_kv_shared_layers") else 2
    assert text["hidden_size"] < 100 and text["num_hidden_layers"] == layers and text["vocab_size"] == VOCABULARY
    assert text.get("num_attention_heads", 4) % text.get("num_key_value_heads", 4) == 0


def test_sizes_of_a_text_model_inside_another_shrink_too():
    tiny = shrink({"model_type": "gemma3", "text_config": {"hidden_size": 4096, "num_hidden_layers": 62}})
    assert tiny["text_config"]["hidden_size"] < 100 and tiny["text_config"]["num_hidden_layers"] == 2


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """copied(model, *flags): the settings of a recipe that names that model, with Qwen3-8B's config.json beside it."""

    def make(model, *words):
        shutil.copy(REPOSITORY / "recipes/qwen3-8b/config.json", tmp_path)
        recipe = yaml.safe_load((REPOSITORY / "recipes/qwen3-8b/full.yaml").read_text())
        recipe["model"] |= {"model_name_or_path": model, "revision": None}
        (tmp_path / "full.yaml").write_text(yaml.safe_dump(recipe))
        return flags.load(["--recipe", str(tmp_path / "full.yaml"), *words])

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return make


@pytest.mark.parametrize("model, words, kind, source", [
    ("Qwen/Qwen3-8B", [], "qwen3", "config.json"),
    ("Qwen/Qwen3-8B", ["--model_name_or_path", "recipes/gemma-3-1b-it"], "gemma3_text", "recipes/gemma-3-1b-it/config.json"),
    ("./outputs/not-made-yet", [], "qwen3", "config.json"),
    ("recipes/phi-4", [], "phi3", "recipes/phi-4/config.json"),  # a recipe that was copied, and beside it the first one's
])  # fmt: skip
def test_what_is_rehearsed_is_the_model_that_is_named(model, words, kind, source, copied):
    settings = copied(model, *words)
    config, found = rehearse.model_config(settings)
    assert config["model_type"] == kind and found.endswith(source)


def test_a_config_of_another_model_beside_a_recipe_is_refused_where_the_model_is_known(copied, mistake, monkeypatch):
    settings = copied("Qwen/Qwen3-14B")
    rehearse.model_config(settings)  # nobody here knows better
    other = AutoConfig.from_pretrained(REPOSITORY / "recipes/qwen3-14b")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: "config.json")
    monkeypatch.setattr("brigade.train.step.rehearse.load_config", lambda _: other)
    message = mistake(rehearse.model_config, settings)
    assert "config.json: hidden_size" in message and "Qwen/Qwen3-14B" in message


def test_a_rehearsal_keeps_the_best_checkpoint_and_leaves_tasks_out_with_all_that_speaks_of_them(copied, tmp_path):
    words = "--load_best_model_at_end --early_stopping_patience 2 --eval_steps 9 --save_steps 9 --eval_tasks arc_easy"
    strategy, world = Strategy("ddp", "ddp", "here"), World(0, 0, 2, 2, "host", "torchrun")
    settings = copied("recipes/phi-4", *words.split(), "--eval_tasks_chat_template")
    tiny = rehearse.tiny_recipe(settings, strategy, tmp_path / "model", world)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    rehearsed = flags.load(["--recipe", str(tmp_path / "tiny.yaml")])
    best_checkpoint.check(rehearsed)
    check(strategy, rehearsed, world)
    training = rehearsed.recipe.training
    assert training.load_best_model_at_end and not training.eval_tasks and not training.eval_tasks_chat_template


@pytest.mark.parametrize("training, model, words, key", [
    ({"adam_beta2": 0.99}, {}, "--optim sgd", "adam_beta2"),
    ({"nonfinite": "skip", "nonfinite_limit": 7}, {}, "--nonfinite stop", "nonfinite_limit"),
    ({}, {"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "--load_in_4bit false", "bnb_4bit_quant_type"),
])  # fmt: skip
def test_what_a_flag_makes_void_is_told_and_left_out_of_the_rehearsal(load, tmp_path, training, model, words, key):
    settings, world = load(*words.split(), training=training, model=model), World(0, 0, 2, 2, "host", "torchrun")
    strategy = choose(settings, world, env={})
    (line,) = strategy.overridden
    assert line.startswith(f"{key}, which nothing reads: ")
    tiny = rehearse.tiny_recipe(settings, strategy, tmp_path / "model", world)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    rehearsed = choose(flags.load(["--recipe", str(tmp_path / "tiny.yaml")]), world, env={})
    assert rehearsed == strategy and not rehearsed.overridden


def test_what_needs_a_gpu_is_replaced_and_told():
    settings = flags.load(["--attn_implementation", "flash_attention_2", "--fp16"])
    world = World(0, 0, 2, 2, "host", "torchrun")
    recipe = rehearse.tiny_recipe(settings, Strategy("ddp", "ddp", "a test"), Path("model"), world)
    notes = rehearse.without_gpu(recipe)
    assert len(notes) == 2 and "flash_attention_2" in notes[0] and "fp16" in notes[1]
    assert recipe["model"]["attn_implementation"] == "sdpa" and recipe["training"]["bf16"]
    assert rehearse.without_gpu(recipe) == []
