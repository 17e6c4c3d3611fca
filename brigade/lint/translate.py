"""A recipe of another tool's flat file (LLaMA-Factory, axolotl, ms-swift, TRL, torchtune), as far as its keys have equals.

Nothing is guessed: a key without an equal, and a value that ours does not take, is named with what to do about it.
"""

from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import ValidationError

from ..errors import UserError, shortened
from ..errors.console import counted
from ..errors.disk import writing
from ..errors.tables import Document, Fields
from ..train.recipe.files import read_yaml
from ..train.recipe.mistakes import MEANINGS, RENAMED, complaints, cure_of, explain, nothing_like
from ..train.recipe.schema import SECTION_OF, SECTIONS, Recipe
from ..train.strategy.unread import unread

# Keys whose defaults differ between these tools, and change what is trained.
OFTEN_OTHERWISE = ("learning_rate", "num_train_epochs", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta2",
                   "max_grad_norm", "max_length", "packing", "seed", "lora_r", "lora_alpha", "lora_dropout")  # fmt: skip


def write(theirs: Path, folder: Path) -> list[str]:
    """Write folder/NAME, a recipe of the file NAME (NAME.yaml of NAME.json). Returns lines: what was written, and what has no
    equal, with what to do.

    Raises UserError where the file cannot be read, or where one of its name is in the folder.
    """
    path = folder / (f"{theirs.stem}.yaml" if theirs.suffix == ".json" else theirs.name)
    if path.exists():
        raise UserError(str(path), "it is there already", "name another directory behind --write")
    recipe, left = translated(read_yaml(theirs), path)
    origin = f"# Of {theirs}, by `python -m brigade lint --write`.\n"
    folder.mkdir(parents=True, exist_ok=True)
    with writing(path):
        path.write_text(origin + yaml.safe_dump(recipe, sort_keys=False))
    said = [f"  {name}: {what}" for name, what in left.items()]
    heading = [f"{counted(len(said), 'key')} of {theirs} left to you:"] * bool(said)
    wrote = f"Wrote {path}: {counted(sum(map(len, recipe.values())), 'key')}."
    default = f"Left at Brigade's default, where its tool may have another: {_by_default(recipe)}."
    return [wrote, *heading, *said, default]


def _by_default(recipe: Fields) -> str:
    """Return the keys of OFTEN_OTHERWISE that a recipe leaves out, with the values that they then have."""
    adapters = bool(recipe.get("model", {}).get("use_peft"))
    keys = [key for key in OFTEN_OTHERWISE if key not in recipe.get(SECTION_OF[key], {})]
    defaults = {key: SECTIONS[SECTION_OF[key]].model_fields[key].default for key in keys}
    return ", ".join(f"{key} {defaults[key]}" for key in keys if adapters or not key.startswith("lora"))


def translated(document: Document, path: Path) -> tuple[Fields, dict[str, str]]:
    """Return (sections of a recipe, their key -> what to do about it, of those that it does not have).

    path: of the recipe, for messages
    """
    recipe: Fields = {section: {} for section in SECTIONS}
    left: dict[str, str] = {}
    flat = list(_flat(document))
    for name, value in flat:
        meanings, ours = MEANINGS.get(name, {}), RENAMED.get(name, name)
        if isinstance(meanings, str):
            meant: Document | None = {meanings: value}
        else:
            meant = meanings.get(str(value).lower()) or ({ours: value} if ours in SECTION_OF else None)
        if meant is None:
            left[name] = cure_of(name) or nothing_like(name)
        for key, own in (meant or {}).items():
            said = recipe[SECTION_OF[key]].setdefault(key, own)
            if said is None:  # a key that its file leaves empty
                recipe[SECTION_OF[key]][key] = own
            elif own is not None and said != own:  # as lr and learning_rate
                left[name] = (
                    f"{shortened(str(value))}: {key} is {shortened(str(said))} by another key of the file; keep one"
                )
    training, accumulated = recipe["training"], dict(flat).get("gradient_accumulation_steps")
    micro = training.get("per_device_train_batch_size")
    if "global_batch_size" not in training and isinstance(micro, int) and isinstance(accumulated, int):
        training["global_batch_size"] = micro * accumulated
        left["gradient_accumulation_steps"] = (
            f"it is {micro * accumulated} as global_batch_size on one GPU: multiply it by yours"
        )
    recipe = {section: keys for section, keys in recipe.items() if keys}
    return _valid(recipe, left, path), left


def _flat(document: Document) -> Iterator[tuple[str, object]]:
    """Yield the keys of a flat file, and those within what has the name of one of our sections."""
    for name, value in document.items():
        if name in SECTIONS and isinstance(value, dict):
            yield from value.items()
        else:
            yield str(name), value


def _valid(recipe: Fields, left: dict[str, str], path: Path) -> Fields:
    """Return the recipe without the values that it does not take; `left` then says why."""
    while True:
        try:
            for row, keys, why in unread(Recipe.model_validate(recipe)):
                # Those of adapters say what their file is for: they stay, and `lint` asks for use_peft.
                for key in keys if row.switches else ():
                    left[key] = f"{shortened(str(recipe[SECTION_OF[key]].pop(key)))}: nothing would read it, for {why}"
            return recipe
        except ValidationError as error:
            told = explain(error, {}, path, recipe)
            section, key, *_ = [*map(str, complaints(error)[0]["loc"]), ""]
            if key not in recipe.get(section, {}):  # what is missing has to be written by hand
                left[key or section] = f"{told.problem}: {told.cure}"
                return recipe
            left[key] = f"{shortened(str(recipe[section].pop(key)))}: {told.problem}; {told.cure}"
