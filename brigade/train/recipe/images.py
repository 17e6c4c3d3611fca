"""What a recipe says of images, which is read only with data.images, and of the parts of its model: which ones it trains, and how
fast. This module imports no torch."""

from collections.abc import Callable

from ...errors import UserError
from .schema import Recipe
from .training_section import TrainingSection

LANGUAGE, PROJECTOR, VISION_TOWER = "language", "projector", "vision_tower"
PARTS = (LANGUAGE, PROJECTOR, VISION_TOWER)
# Section -> its keys that nobody reads without data.images: true.
KEYS = {
    "data": ("image_folder", "max_pixels", "min_pixels", "fetch_images"),
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
    """Raise UserError for keys that say something of images in a recipe without any, and for those that contradict each other."""
    if recipe.data.images:
        _check_data(recipe, place)
        _check_parts(recipe, place)
    else:
        _check_without(recipe, place)


def _check_without(recipe: Recipe, place: Callable[[str], str]) -> None:
    for name, keys in KEYS.items():
        section = getattr(recipe, name)
        for key in keys:
            if getattr(section, key) != type(section).model_fields[key].default:
                raise _unread(place(key))
    for number, source in enumerate([recipe.data, *(recipe.data.datasets or [])]):
        at = f"{place('datasets')}[{number - 1}]." if number else ""
        if number and source.image_folder is not None:
            raise _unread(f"{at}image_folder")
        if {"images", "image"}.intersection(source.columns):
            raise _unread(f"{at}columns" if number else place("columns"))


def _unread(place: str) -> UserError:
    return UserError(place, "data.images is not true, so nobody reads it", "set data.images: true, or remove it")


def _check_data(recipe: Recipe, place: Callable[[str], str]) -> None:
    data = recipe.data
    if data.datasets and data.image_folder is not None:
        problem = "it is said of the whole data, and with datasets each source has its own"
        raise UserError(place("image_folder"), problem, "say it of each source in datasets that needs it")
    if data.max_pixels and data.min_pixels and data.min_pixels > data.max_pixels:
        problem = f"{data.min_pixels:,} is more than max_pixels, {data.max_pixels:,}"
        raise UserError(place("min_pixels"), problem, "set it lower, or max_pixels higher")
    if data.streaming:
        problem = "data.images is true, and images are looked at once, before training begins"
        raise UserError(place("streaming"), problem, "remove it: rows with images are prepared once and cached")


def _check_parts(recipe: Recipe, place: Callable[[str], str]) -> None:
    model, training = recipe.model, recipe.training
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


def within(own: tuple[int, int], most: int | None, fewest: int | None) -> tuple[int, int]:
    """Return the limits of pixels, fewest and most, of a processor that scales images itself: its own, or those of the recipe.

    own: fewest and most; most, fewest: data.max_pixels and data.min_pixels
    """
    lower, upper = fewest or own[0], most or own[1]
    return (min(lower, upper), upper) if most else (lower, max(lower, upper))
