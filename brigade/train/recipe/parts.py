"""The parts of a model of images and texts: which ones a recipe trains, and how fast. This module imports no torch."""

from collections.abc import Callable

from ...errors import UserError
from .schema import Recipe
from .training_section import TrainingSection

LANGUAGE, PROJECTOR, VISION_TOWER = "language", "projector", "vision_tower"
PARTS = (LANGUAGE, PROJECTOR, VISION_TOWER)
# Section -> its keys that nobody reads without data.images: true.
KEYS = {
    "model": ("processor_name_or_path", "freeze_vision_tower", "freeze_projector", "lora_parts"),
    "training": ("vision_tower_learning_rate", "projector_learning_rate"),
}
FREEZES = {VISION_TOWER: "freeze_vision_tower", PROJECTOR: "freeze_projector"}
RATES = {VISION_TOWER: "vision_tower_learning_rate", PROJECTOR: "projector_learning_rate"}


def trained_parts(recipe: Recipe) -> tuple[str, ...]:
    """Return the parts that a run with images trains, whole or by adapters, in the order of PARTS."""
    model = recipe.model
    if model.use_peft:
        return tuple(part for part in PARTS if part in model.lora_parts)
    return tuple(part for part in PARTS if part == LANGUAGE or not getattr(model, FREEZES[part]))


def learning_rates(training: TrainingSection, scaled: float) -> dict[str, float]:
    """Return the peak learning rate of each part.

    scaled: learning_rate after learning_rate_scaling, which scales the others as much
    """
    factor = scaled / training.learning_rate
    own = {part: getattr(training, RATES[part]) if part in RATES else None for part in PARTS}
    return {part: scaled if rate is None else rate * factor for part, rate in own.items()}


def has_own_rates(training: TrainingSection) -> bool:
    """Whether a part has a learning rate of its own."""
    return any(getattr(training, key) is not None for key in RATES.values())


def check(recipe: Recipe, place: Callable[[str], str]) -> None:
    """Raise UserError for keys about parts that the recipe does not read, or that contradict each other."""
    model, training = recipe.model, recipe.training
    if not recipe.data.images:
        for section, keys in KEYS.items():
            values = getattr(recipe, section)
            for key in keys:
                if getattr(values, key) != type(values).model_fields[key].default:
                    problem = "data.images is not true, so nobody reads it"
                    raise UserError(place(key), problem, "set data.images: true, or remove it")
        return
    for key in FREEZES.values():
        if model.use_peft and getattr(model, key) != type(model).model_fields[key].default:
            problem = (
                "with adapters (use_peft) all weights stay as they are, and lora_parts says which parts get adapters"
            )
            raise UserError(place(key), problem, "leave it out, and set lora_parts")
    trained = trained_parts(recipe)
    for part, key in RATES.items():
        if getattr(training, key) is not None and part not in trained:
            cure = f"name {part} in lora_parts" if model.use_peft else f"set {FREEZES[part]}: false"
            raise UserError(place(key), f"the {part.replace('_', ' ')} is not trained", f"{cure}, or leave the key out")
    if model.model_name_or_path.endswith(".gguf"):
        problem = "a GGUF file holds the language model, and no vision tower"
        raise UserError(place("model_name_or_path"), problem, "name the model's directory or its name on the Hub")
    if model.rope_parameters:
        problem = "positions are stretched for texts; nobody has compared those of images"
        raise UserError(place("rope_parameters"), problem, "leave it out, or train on texts")
