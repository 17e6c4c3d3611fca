"""`lint FILE --write DIR`: other tools' files as recipes, and what a run says of such a file."""

import json
from pathlib import Path

import pytest
import yaml

from brigade.__main__ import main
from brigade.errors import UserError
from brigade.lint.translate import translated
from brigade.train.recipe import flags

FACTORY = {
    "model_name_or_path": "acme/base", "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 8,
    "lora_target": "all", "dataset": "mine", "cutoff_len": 2048, "preprocessing_num_workers": 16, "output_dir": "saves",
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "learning_rate": 1e-4, "num_train_epochs": 3.0,
    "warmup_ratio": 0.1, "bf16": True, "plot_loss": True,
}  # fmt: skip
AXOLOTL = {
    "base_model": "acme/base", "adapter": "qlora", "sequence_len": 4096, "sample_packing": True, "micro_batch_size": 1,
    "gradient_accumulation_steps": 4, "num_epochs": 1, "optimizer": "adamw_anyprecision", "lr_scheduler": "cosine",
    "learning_rate": 2e-4, "datasets": [{"path": "acme/rows", "type": "alpaca"}], "flash_attention": True,
}  # fmt: skip


@pytest.mark.parametrize("document, recipe, left", [
    (
        FACTORY,
        {
            "model": {"model_name_or_path": "acme/base", "use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear"},
            "data": {"max_length": 2048, "dataset_num_proc": 16},
            "training": {
                "objective": "sft", "per_device_train_batch_size": 2, "learning_rate": 1e-4, "num_train_epochs": 3.0,
                "warmup_steps": 0.1, "bf16": True, "global_batch_size": 16,
            },
        },
        {"do_train": "always trains", "dataset": "train_file", "output_dir": "--output_dir", "plot_loss": "leave it out",
         "gradient_accumulation_steps": "multiply it by yours"},
    ),
    (
        AXOLOTL,
        {
            "model": {"model_name_or_path": "acme/base", "use_peft": True, "load_in_4bit": True},
            "data": {"max_length": 4096, "packing": True},
            "training": {
                "per_device_train_batch_size": 1, "num_train_epochs": 1, "lr_scheduler_type": "cosine", "learning_rate": 2e-4,
                "global_batch_size": 4,
            },
        },
        {"datasets": "acme/rows", "optim": "adamw_anyprecision", "attn_implementation": "True",
         "gradient_accumulation_steps": "4 as global_batch_size"},
    ),
], ids=["LLaMA-Factory", "axolotl"])  # fmt: skip
def test_a_file_of_another_tool_is_a_recipe_and_a_list_of_what_has_no_equal(document, recipe, left, tmp_path, capsys):
    made, said = translated(document, tmp_path / "mine.yaml")
    assert made == recipe and said.keys() == left.keys()
    assert all(word in said[name] for name, word in left.items()), said
    theirs, mine = tmp_path / "theirs.yaml", tmp_path / "recipes"
    theirs.write_text(yaml.safe_dump(document))
    assert main(["lint", str(theirs), "--write", str(mine)]) == 0
    written = mine / "theirs.yaml"
    assert all(f"  {name}: " in capsys.readouterr().out or name for name in left)
    assert flags.load(["--recipe", str(written)]).recipe.model.use_peft
    assert main(["lint", str(theirs), "--write", str(mine)]) == 2 and "there already" in capsys.readouterr().err


@pytest.mark.parametrize("document", [
    {"learning_rate": 1e-4, "lr": 2e-4}, {"training": {"learning_rate": 1e-4}, "lr": 2e-4},
    {"training": {"learning_rate": 1e-4}, "learning_rate": 2e-4},
])  # fmt: skip
def test_two_keys_of_one_meaning_that_differ_are_said(document, tmp_path):
    made, left = translated(document, tmp_path / "mine.yaml")
    assert made["training"]["learning_rate"] == 1e-4
    assert "0.0001 by another key" in (left.get("lr") or left["learning_rate"])
    assert "lr" not in translated({"learning_rate": 1e-4, "lr": 1e-4}, tmp_path / "mine.yaml")[1]


def test_what_nothing_would_read_is_left_out_and_said_but_never_adapters(tmp_path):
    """Other trainers take Adam's figures beside any optimizer; whoever gives a rank means LoRA."""
    document = {"model_name_or_path": "a/b", "dataset_name": "c/d", "global_batch_size": 8, "lora_r": 8}
    document |= {"optim": "adafactor", "adam_beta2": 0.999}
    made, left = translated(document, tmp_path / "mine.yaml")
    assert made["training"] == {"global_batch_size": 8, "optim": "adafactor"} and made["model"]["lora_r"] == 8
    assert left == {"adam_beta2": "0.999: nothing would read it, for adafactor reads nothing of Adam's"}


def test_arguments_in_json_become_a_recipe(tmp_path, capsys):
    """As ms-swift and LLaMA-Factory read them."""
    arguments = {"model": "acme/base", "torch_dtype": "bfloat16", "max_length": 64, "x": 1}
    arguments |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    (tmp_path / "a.json").write_text(json.dumps(arguments))
    assert main(["lint", str(tmp_path / "a.json"), "--write", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    assert "x: nothing is like it here" in said
    defaults = said.partition("Left at Brigade's default")[2]
    assert "adam_beta2 0.95" in defaults and "lr_scheduler_type cosine" in defaults
    assert "max_length" not in defaults and "lora" not in defaults, "the file says it, or nothing reads it"
    recipe = flags.load(["--recipe", str(tmp_path / "new/a.yaml")]).recipe
    assert recipe.model.model_name_or_path == "acme/base" and recipe.training.bf16


def test_empty_keys_hide_nothing_that_comes_after_them(tmp_path):
    """Axolotl's examples leave many keys empty."""
    empty = {"lora_target_modules": None, "fp16": None, "lora_model_dir": None}
    document = AXOLOTL | empty | {"lora_target_linear": True, "bf16": "auto"}
    made, left = translated(document, tmp_path / "mine.yaml")
    assert made["model"]["lora_target_modules"] == "all-linear" and "datasets" not in made["data"]
    assert left.keys() == {"datasets", "optim", "attn_implementation", "gradient_accumulation_steps", "fp16", "bf16"}
    nested = {"model": {"_component_": "llama", "lora_rank": 64}, "optimizer": {"lr": 3e-4}, "system": "Be kind."}
    made, left = translated(nested, tmp_path / "mine.yaml")
    assert made["model"] == {"lora_r": 64} and "column system" in left["system"]
    assert left.keys() == {"_component_", "optim", "system", "model_name_or_path"}


def test_a_run_names_every_wrong_key_of_a_flat_file_at_once(tmp_path):
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(yaml.safe_dump(FACTORY))
    with pytest.raises(UserError) as told:  # whose cure is longer than other errors' lines
        flags.load(["--recipe", str(theirs)])
    assert all(name in told.value.problem for name in FACTORY), told.value
    for words in (
        "under model: ",
        "lora_rank as lora_r",
        "cutoff_len as max_length",
        "plot_loss: nothing is like it",
        "--write",
    ):
        assert words in told.value.cure


def test_wrong_keys_of_a_section_are_named_at_once(tmp_path, user_error):
    recipe = yaml.safe_load(Path("recipes/tiny/full.yaml").read_text())
    recipe["training"] |= {"lr": 1e-4, "max_length": 64, "frobnicate": 1}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    told = user_error(flags.load, ["--recipe", str(tmp_path / "mine.yaml")])
    assert "3 keys are not known here: frobnicate, lr, max_length" in told.problem
    assert "under data: max_length; under training: lr as learning_rate; frobnicate: nothing is like it" in told.cure
