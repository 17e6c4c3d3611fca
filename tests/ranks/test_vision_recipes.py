"""The recipes on images train as they stand, but for a small model of the same kind, a few pictures and two steps."""

import json

import pytest

import train
from testing import image_runs, marks
from testing.command_line import as_flags
from testing.plain_images import parts_of
from testing.ranks import REPOSITORY
from testing.vision_models import write_vision_model

RECIPES = {
    "qwen3-vl-8b/lora.yaml": "qwen3_vl",
    "qwen3-vl-8b/full.yaml": "qwen3_vl",
    "gemma-3-4b-it/lora.yaml": "gemma3",
    "smolvlm2-500m/full.yaml": "smolvlm",
}
TOWERS = ("visual.blocks", "visual.patch_embed", "vision_tower", "vision_model")


def write_parquet(folder):
    """Write train.parquet and heldout.parquet as the recipes' data set has its rows: all contents are lists of parts with an
    index and a text, and the pictures stand in a column."""
    from datasets import Dataset

    for name, rows in image_runs.write_rows(folder).items():
        made = []
        for row in rows:
            images, messages = [], []
            for turn in row["messages"]:
                content = []
                for part in parts_of(turn["content"]):
                    if image := part.get("image"):
                        content.append({"index": len(images), "text": None, "type": "image"})
                        images.append({"bytes": (folder / image).read_bytes(), "path": None})
                    else:
                        content.append({"index": None, "text": part["text"], "type": "text"})
                messages.append({"content": content, "role": turn["role"]})
            made.append({"messages": messages, "images": images})
        Dataset.from_list(made).to_parquet(folder / f"{name}.parquet")


@pytest.mark.parametrize("name", marks.cases(slow=sorted(RECIPES)))
def test_a_recipe_trains(name, tmp_path):
    recipe = REPOSITORY / "recipes" / name
    assert json.loads(recipe.with_name("config.json").read_text())["model_type"] == RECIPES[name]
    write_parquet(tmp_path)
    names = {"train_file": "train", "validation_file": "heldout"}
    files = {key: str(tmp_path / f"{name}.parquet") for key, name in names.items()}
    model = write_vision_model(tmp_path / "model", RECIPES[name])
    small = as_flags(model_name_or_path=str(model), revision=None, dataset_name=None, ds_config="none", **files)
    small += as_flags(global_batch_size=4, max_steps=2, eval_steps=2, save_steps=2, logging_steps=1)
    small += as_flags(report_to="none", output_dir=str(tmp_path / "run"))
    trainer = train.main(["--recipe", str(recipe), *small])
    logs = trainer.state.log_history
    assert [entry["step"] for entry in logs if "loss" in entry] == [1, 2] and any("eval_loss" in each for each in logs)
    trained = [path for path, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert trained and not [path for path in trained if any(tower in path for tower in TOWERS)]
