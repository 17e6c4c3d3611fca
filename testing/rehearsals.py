"""Which recipes are rehearsed, and what a rehearsal takes from one."""

from functools import cache
from pathlib import Path
from typing import Any

from brigade.plan.choice.job_of_recipe import strategy_of
from brigade.train.loop import rehearse
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
    """What a rehearsal takes from a recipe. Models that differ in size alone are one tiny model, and rehearsed once."""
    settings = flags.load(["--recipe", str(REPOSITORY / path)])
    (config, _), recipe = rehearse.model_config(settings), settings.recipe
    model, strategy = recipe.model, strategy_of(settings)
    return (
        config["model_type"],
        config.get("tie_word_embeddings"),
        method_of(model),
        *model.lora_modules_to_save,
        *strategy.axes.used,
        strategy.axes.chosen_schedule,
        bool(model.rope_parameters),
        recipe.training.tiled_loss,
        strategy.name,
        recipe.training.activation_checkpointing,
        recipe.data.packing,
    )
