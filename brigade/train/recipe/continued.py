"""Adapters that a run goes on with (adapter_name_or_path), and what their adapter_config.json decides of its recipe. This module
imports no torch."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...errors import UserError, first_line
from ...errors.tables import Document, Fields
from ..host.hub import hub_is_away, refusal
from . import remote_code
from .files import read_yaml
from .model_section import ModelSection
from .objectives import ADAPTERS_OFF, reference_of
from .settings import Settings

MODEL_KEY = "model_name_or_path"
KEY, FILE, WEIGHTS = "adapter_name_or_path", "adapter_config.json", "adapter_model.safetensors"
# PEFT's name -> the recipe's.
DECIDES = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
    "trainable_token_indices": "trainable_token_indices",
    "lora_dropout": "lora_dropout",
}
# A recipe may say these in its own words: how adapters are trained, and names for layers and tokens, which are compared with the
# adapters' own once there is a model (model/adapter_weights.py).
FREE = (
    "lora_dropout",
    "lora_target_modules",
    "lora_target_parameters",
    "lora_modules_to_save",
    "trainable_token_indices",
)
# PEFT's names that change nothing of what is computed here.
_NO_MATTER = (
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
)  # fmt: skip
_NOTHING: tuple[Any, ...] = (None, False, [], {}, "none")
# other values of init_lora_weights may have changed the base's weights
_RANDOM = (True, False, "gaussian", "orthogonal")


def take_from_model(settings: Settings) -> Settings:
    """Return the settings with the base as model, its adapters as those to go on with, and the tokenizer beside these, where
    adapters are trained and `model_name_or_path` is a directory of some, as an earlier run has left it; else as they are.

    Raises UserError where all weights are to be trained, other adapters are named too, or these name no base.
    """
    model, place = settings.recipe.model, settings.place(MODEL_KEY)
    name, folder = model.model_name_or_path, remote_code.folder_of(model.model_name_or_path)
    if not folder or not holds_only_adapters(folder):
        return settings
    base, base_place = _named_base(folder)
    problem, merge = no_model(name, folder)
    if not model.use_peft:
        cure = f"--use_peft goes on with them, at a learning rate of adapters; or {merge}"
        raise UserError(place, f"{problem}, and this recipe trains all weights", cure)
    if model.adapter_name_or_path is not None:
        raise UserError(place, f"{problem}, and {KEY} names others", f"name one of the two, or {merge}")
    if not base:
        raise UserError(place, problem, f"name here the model that they were trained on, and set {KEY}: {name}")
    revision = _document(folder / FILE).get("revision")
    if model.revision not in (None, revision):
        problem = f"{model.revision!r}, but {name!r} holds adapters of {base} at {revision or 'no revision'}"
        raise UserError(settings.place("revision"), problem, "leave it out (--revision null): the adapters decide it")
    sources = settings.sources | {MODEL_KEY: base_place, "revision": f"{folder / FILE}: revision", KEY: place}
    taken = settings.with_model(model_name_or_path=base, revision=revision, adapter_name_or_path=name)
    if not (model.tokenizer_name_or_path or model.adds_tokens) and (folder / "tokenizer_config.json").is_file():
        taken = taken.with_model(tokenizer_name_or_path=name)  # with the chat template that the adapters have learned
    return replace(taken, sources=sources)


def holds_only_adapters(folder: Path) -> bool:
    """Whether a directory holds adapters and no model."""
    return (folder / FILE).is_file() and not (folder / "config.json").exists()


def no_model(name: str, folder: Path) -> tuple[str, str]:
    """Return what to say of a directory that holds only adapters where a model is wanted, and how it becomes one."""
    problem = f"{name!r} holds adapters of {_named_base(folder)[0] or 'a model that they do not name'}, and no model"
    return problem, f"merge them into a model (python -m brigade export {name} MODEL --merge) and name that"


def fold(settings: Settings, downloads: bool) -> Settings:
    """Return the settings with the keys that the adapters decide, which they continue with; as they are without such a key.

    downloads: whether adapter_config.json may be fetched from the Hub; else only its cache is looked into
    Raises UserError where it cannot be had or read, asks for what no key of a recipe says, or is at odds with the recipe.
    """
    model = settings.recipe.model
    if model.adapter_name_or_path is None or not model.use_peft:  # strategy.check() speaks of the second
        return settings
    _check_reference(settings)
    recorded = settings.recipe_path.name == "run.yaml" and "lora_r" in model.model_fields_set
    try:
        path = _find(settings, downloads)
    except UserError:
        if recorded:  # it has all values, and only training needs the adapters once more
            return settings
        raise
    if path is None:
        return settings
    values = _values(path)
    for theirs, ours in DECIDES.items():
        if ours not in model.model_fields_set or ours not in values:
            continue
        said = getattr(model, ours)
        if ours in FREE:
            del values[ours]
        # Of patterns, the first that fits counts.
        elif said != values[ours] or (isinstance(said, dict) and [*said] != [*values[ours]]):
            problem = f"{said!r}, but {theirs} of the adapters is {values[ours]!r} ({path})"
            raise UserError(settings.place(ours), problem, "leave the key out: the adapters decide it")
    sources = settings.sources | {ours: f"{path}: {theirs}" for theirs, ours in DECIDES.items() if ours in values}
    recipe = settings.recipe.model_copy(update={"model": model.model_copy(update=values)})
    return replace(settings, recipe=recipe, sources=sources)


def is_unread(model: ModelSection) -> bool:
    """Whether a recipe continues adapters whose adapter_config.json this machine does not have: ranks and targets are unknown."""
    return model.adapter_name_or_path is not None and "lora_r" not in model.model_fields_set


def base_of(folder: Path) -> str:
    """Return the name or path of the model that adapters were trained on, "" where they do not say it."""
    return str(_document(folder / FILE).get("base_model_name_or_path") or "")


def _named_base(folder: Path) -> tuple[str, str]:
    """Return the name or path of the model that adapters were trained on, "" where they do not say it, and where it stands.

    A packaged model or a GGUF file was read into this host's cache, and PEFT has to find it there. A run's record beside the
    adapters still has its name, by which it is found on any host and after the cache was cleared.
    """
    base, record = base_of(folder), folder / "run.yaml"
    if Path(base).is_absolute() and record.is_file():
        model = read_yaml(record).get("model")
        named = "" if not isinstance(model, dict) or model.get("from_scratch") else str(model.get(MODEL_KEY) or "")
        if named and not remote_code.folder_of(named):
            return named, f"{record}: model.{MODEL_KEY}"
    return base, f"{folder / FILE}: base_model_name_or_path"


def tokens_of(folder: Path) -> list[int]:
    """Return the ids of the tokens whose embeddings adapters train beside them."""
    named = _document(folder / FILE).get("trainable_token_indices") or []
    return list(next(iter(named.values())) if isinstance(named, dict) else named)


def _check_reference(settings: Settings) -> None:
    """Raise UserError where preferences would be compared with the base, and not with the model that training begins with."""
    if reference_of(settings.recipe) == ADAPTERS_OFF:
        problem = (
            f"training begins with the adapters of {settings.recipe.model.adapter_name_or_path!r}, and the reference "
        )
        problem += "would be their base without them"
        cure = "leave the key out: the reference is then the base with the adapters as they begin"
        raise UserError(settings.place("reference"), problem, cure)


def _find(settings: Settings, downloads: bool) -> Path | None:
    """Return where adapter_config.json lies, or None where it is on the Hub and nothing may be fetched."""
    name, place = str(settings.recipe.model.adapter_name_or_path), settings.place(KEY)
    folder = remote_code.folder_of(name)
    if folder:
        if (folder / FILE).is_file():
            return folder / FILE
        problem = f"{name!r} holds no adapters: there is no {FILE}"
        cure = "name a directory that PEFT has written; `python -m brigade export RUN DIR --step N` makes one of a checkpoint"
        raise UserError(place, problem, cure)
    if not downloads:
        return remote_code.cached(name, FILE, None)
    from huggingface_hub import hf_hub_download

    hub_is_away()
    try:
        return Path(hf_hub_download(name, FILE))
    except Exception as error:
        raise absent(settings, error) from None


def check_saved(settings: Settings, folder: Path) -> None:
    """Raise UserError where the adapters that a run has left are not those of its recipe: PEFT builds what their file says, and
    the folder may be a stranger's."""
    path, model = folder / FILE, settings.recipe.model
    values = _values(path)
    cure = "bring the file back from a copy, or from the run's newest checkpoint"
    for theirs, ours in DECIDES.items():
        if ours not in FREE and values[ours] != getattr(model, ours):
            raise UserError(f"{path}: {theirs}", f"{values[ours]!r}, but the run had {getattr(model, ours)!r}", cure)
    targets = _document(path)["target_modules"]
    if not isinstance(targets, list):  # PEFT takes a text for a pattern
        raise UserError(f"{path}: target_modules", f"{targets!r} is no list of names", cure)


def absent(settings: Settings, error: Exception) -> UserError:
    """Return the error for adapters that the Hub does not give."""
    name = str(settings.recipe.model.adapter_name_or_path)
    why, cure = refusal(error, name)
    problem = f"the adapters of {name!r} cannot be had: {why}"
    return UserError(settings.place(KEY), problem, cure or f"name a directory with {FILE}, or adapters on the Hub")


def _document(path: Path) -> Fields:
    with suppress(OSError, ValueError, RecursionError):
        document = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(document, dict):
            return document
    raise UserError(str(path), "it is damaged: no table in JSON", "download or copy the adapters again")


def _values(path: Path) -> Fields:
    """Return what adapter_config.json says, by the recipe's keys. Raises UserError for what no key says."""
    document = _document(path)
    if document.get("peft_type") != "LORA":
        problem = f"they are {document.get('peft_type')!r}, and only LoRA (with DoRA) is trained here"
        raise UserError(f"{path}: peft_type", problem, "merge them into a model with PEFT, and name that")
    for name, value in document.items():
        unknown = name not in (*DECIDES, *_NO_MATTER, "init_lora_weights") and value not in _NOTHING
        if unknown or (name == "init_lora_weights" and value not in _RANDOM):
            cure = "merge them into a model first (PEFT's merge_and_unload), and train new adapters on it"
            raise UserError(f"{path}: {name}", f"no run continues adapters with {name} {value!r}", cure)
    given = {ours: document[theirs] for theirs, ours in DECIDES.items() if document.get(theirs) is not None}
    target = given.get("lora_target_modules")
    if isinstance(target, str) and target != "all-linear":
        given["lora_target_modules"] = [target]
    given |= _tokens(given.get("trainable_token_indices"), path)
    try:
        section = ModelSection.model_validate({"model_name_or_path": "", "use_peft": True, **given})
    except ValidationError as error:
        first = error.errors()[0]
        theirs = next(theirs for theirs, ours in DECIDES.items() if ours == first["loc"][0])
        problem = f"{first['input']!r} is no value of it: {first_line(ValueError(first['msg']))}"
        raise UserError(f"{path}: {theirs}", problem, "download or copy the adapters again") from None
    # PEFT's defaults are others than a recipe's (r is 8), and adapter_config.json has all keys.
    lacking = [theirs for theirs in ("r", "lora_alpha", "target_modules") if DECIDES[theirs] not in given]
    if lacking:
        raise UserError(str(path), f"it does not say {lacking[0]}", "download or copy the adapters again")
    return {ours: getattr(section, ours) for ours in DECIDES.values()}


def _tokens(named: object, path: Path) -> Document:
    """Return {"trainable_token_indices": ids} of PEFT's list, or of its lists by the names of modules."""
    if not isinstance(named, dict):
        return {}
    lists = list(named.values())
    if any(ids != lists[0] for ids in lists):
        problem = "the two ends of the model have different trained tokens"
        raise UserError(
            f"{path}: trainable_token_indices", problem, "merge the adapters into a model first, and name that"
        )
    return {"trainable_token_indices": lists[0]}
