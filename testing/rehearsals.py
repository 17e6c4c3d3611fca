"""Which recipes are rehearsed, and what a rehearsal takes from one."""

from functools import cache
from pathlib import Path
from typing import Any

from brigade.plan.choice.job_of_recipe import strategy_of
from brigade.train.model.config_json import read_config
from brigade.train.model.location import config_beside
from brigade.train.recipe import flags
from brigade.train.recipe.method import method_of

from .ranks import REPOSITORY
from .shipped import shipped

# But for those with images, which a rehearsal refuses.
RECIPES = [
    path.relative_to(REPOSITORY)
    for path in shipped("recipes/*/*.yaml")
    if not flags.load(["--recipe", str(path)]).recipe.data.images
]


@cache
def rehearsed(path: Path) -> tuple[Any, ...]:
    """What a rehearsal takes from a recipe. Models that differ in size alone are one tiny model, and rehearsed once.

    It reads the config that lies beside the recipe, and loads no model: tests are collected by it.
    """
    settings = flags.load(["--recipe", str(REPOSITORY / path)])
    recipe, beside = settings.recipe, config_beside(settings)
    config = read_config(beside) if beside else {}
    model, strategy = recipe.model, strategy_of(settings)
    return (
        config.get("model_type", model.model_name_or_path),
        config.get("tie_word_embeddings"),
        method_of(model),
        *model.lora_modules_to_save,
        *strategy.axes.used,
        strategy.axes.chosen_schedule,
        bool(model.rope_parameters),
        recipe.training.objective,
        recipe.training.tiled_loss,
        strategy.name,
        recipe.training.activation_checkpointing,
        recipe.data.packing,
    )
