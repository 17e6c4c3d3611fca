"""The parts of a model of images and texts: its language model, its vision tower, and the projector between the two."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UserError
from ...errors.tables import table
from ..recipe.images import FREEZES, LANGUAGE, PARTS, PROJECTOR, VISION_TOWER
from ..recipe.settings import Settings
from .sizes import elements, untaught

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from .per_layer import Config


MODELS = Path(__file__).with_name("vision_models.yaml")
# What wrappers put into a parameter's name: DDP, torch.compile, PEFT.
_WRAPPERS = re.compile(r"(?<![^.])(module|_orig_mod)\.|^base_model\.model\.")

Row = dict[str, Any]  # of the table: what is known of a kind of model


def known() -> dict[str, Row]:
    """Return what vision_models.yaml says: kind -> what is known of such models."""
    models: dict[str, dict[str, Any]] = table(MODELS)
    return models


def kind_of(config: PreTrainedConfig | Config) -> str:
    """Return the key in vision_models.yaml of models of this config, if they are there: its model_type, or
    "model_type/tower" where that file tells the towers of a model_type apart.

    config: of Transformers, or a config.json
    """
    model_type, tower = (_value(each, "model_type") for each in (config, _value(config, "vision_config")))
    by_tower = any(key.startswith(f"{model_type}/") for key in known())
    return f"{model_type}/{tower}" if by_tower else str(model_type)


def _value(config: PreTrainedConfig | Config | None, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def row_of(config: PreTrainedConfig | Config) -> Row:
    """Return what vision_models.yaml says of models of this config; {} where it does not have them."""
    return known().get(kind_of(config), {})


def check_model(settings: Settings, config: PreTrainedConfig | Config) -> None:
    """Raise UserError where a model of this config takes no images, or is not one of those that are proven."""
    place, kind = settings.place("model_name_or_path"), kind_of(config)
    if getattr(config, "vision_config", None) is None:
        problem = f"{type(config).__name__} has no vision tower, and the recipe says images: true"
        raise UserError(place, problem, "name a model of images and texts, or remove images")
    if kind not in known():
        problem = f"nobody has compared {kind!r} with one sample at a time where rows have images"
        raise UserError(place, problem, f"name a model of one of these kinds: {', '.join(sorted(known()))}")


def needs_masks(config: PreTrainedConfig | Config) -> bool:
    """Whether the tokens of an image see each other in both directions."""
    return bool(row_of(config).get("masks"))


def takes_images(config: PreTrainedConfig | Config) -> bool:
    """Whether a model of this config is one of those that are proven with images."""
    return bool(row_of(config))


def why_undivided(config: PreTrainedConfig | Config) -> str:
    """Return why a tensor group cannot divide the language model where rows have images; "" where it can."""
    return str(row_of(config).get("undivided", ""))


def position_rows(config: PreTrainedConfig | Config) -> int:
    """Return how many positions each token has: with M-RoPE that in its text, and those in time, height and width."""
    return 4 if row_of(config).get("positions") == "mrope" else 1


# ---- which parameters are whose --------------------------------------------------------------------------------------
def _paths(config: PreTrainedConfig | Config) -> dict[str, str]:
    """Return path in the model -> part, the longest path first. {} for models that are not in vision_models.yaml."""
    row = row_of(config)
    named = {VISION_TOWER: row.get("tower", ()), PROJECTOR: row.get("projector", ())}
    paths = {path: part for part, given in named.items() for path in given}
    return dict(sorted(paths.items(), key=lambda item: -len(item[0])))


def beside_language(config: PreTrainedConfig | Config) -> list[str]:
    """Return the names of the modules that are, or lie in, the tower and the projector."""
    return sorted(_paths(config))


def plain_name(name: str) -> str:
    """Return a parameter's name in the model, without what wrappers add to it."""
    return _WRAPPERS.sub("", name)


def _part_of(name: str, paths: Mapping[str, str]) -> str:
    plain = plain_name(name)
    return next((part for path, part in paths.items() if plain == path or plain.startswith(f"{path}.")), LANGUAGE)


def _base(model: PreTrainedModel) -> PreTrainedModel:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def parts_of(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return part -> names of its parameters, in the model's order; with adapters, theirs among them.

    The parts are language, projector and vision_tower, and each parameter is in exactly one. What neither texts nor images reach,
    such as an audio tower, is in none of them.
    """
    paths, parts = _paths(_base(model).config), {part: list[str]() for part in PARTS}
    beyond = {id(p) for name, module in unreached(model, images=True).items() for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in beyond:
            parts[_part_of(name, paths)].append(name)
    return parts


def unreached(model: torch.nn.Module, images: bool) -> Row:
    """Return name -> module of what gets no gradient from the loss of a run's samples.

    images: whether these have images; without, a tower and its projector are among them
    """
    paths = _paths(_base(model).config) if images else {}
    beyond = {name: module for name, module in untaught(model).items() if _part_of(name, paths) == LANGUAGE}
    return beyond | (_unread(model) if images else {})


def _unread(model: torch.nn.Module) -> Row:
    """Return name -> module of what lies in the tower and has no part in the features: layers above the one that these are taken
    from, and what vision_models.yaml names."""
    base = _base(model)
    config, row = base.config, row_of(base.config)
    if not row:
        return {}
    modules = dict(base.named_modules())
    names = [*row.get("unread", ())]
    count = getattr(config.vision_config, "num_hidden_layers", None)
    if count:
        chosen = getattr(config, "vision_feature_layer", -1)
        # Of the hidden states before the first layer and after each.
        last = max(each % (count + 1) for each in ([chosen] if isinstance(chosen, int) else chosen))
        inside = [name for name in modules if any(name.startswith(f"{path}.") for path in row["tower"])]
        layers = next(
            (n for n in inside if type(modules[n]).__name__ == "ModuleList" and len(modules[n]) == count), None
        )
        names += [f"{layers}.{number}" for number in range(last, count) if layers]
    return {name: modules[name] for name in names if name in modules}


# ---- what is trained -------------------------------------------------------------------------------------------------
def freeze(model: torch.nn.Module, settings: Settings) -> None:
    """Freeze the parts of a model that its recipe does not train, and what its samples do not reach. With adapters, PEFT freezes
    all weights."""
    images, section = settings.recipe.data.images, settings.recipe.model
    for module in unreached(model, images).values():
        module.requires_grad_(False)
    if not images:
        return
    names = parts_of(model)
    frozen = {name for part, key in FREEZES.items() if getattr(section, key) for name in names[part]}
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)


def adapted(model: torch.nn.Module, parts: Sequence[str]) -> Row:
    """Return name -> module of all that gets a gradient in these parts, and may have adapters."""
    outside = {module for part in unreached(model, images=True).values() for module in part.modules()}
    paths = _paths(_base(model).config)
    return {
        name: module
        for name, module in model.named_modules()
        if module not in outside and _part_of(name, paths) in parts
    }


def count_of(model: torch.nn.Module, trained: bool = False) -> dict[str, int]:
    """Return part -> number of its parameters, or of those that are trained, even where this rank holds a shard."""
    parameters = dict(model.named_parameters())
    return {
        part: sum(elements(parameters[name]) for name in names if parameters[name].requires_grad or not trained)
        for part, names in parts_of(model).items()
    }


def part_number(model: torch.nn.Module) -> Callable[[str], int]:
    """Return what gives a parameter's name the place of its part in PARTS."""
    paths = _paths(_base(model).config)
    return lambda name: PARTS.index(_part_of(name, paths))
