"""Whether what a recipe names is there: packages, files, and names on the Hub. Checked before the slow imports; no torch."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from ...errors import UserError
from ..data import chat_template, sources
from ..host.cluster import World
from ..host.hub import is_path
from ..host.urls import is_remote
from ..recipe.objectives import named_models, other_models
from ..recipe.remote_code import folder_of
from ..recipe.settings import Settings
from . import location, packaged
from .config_json import read_config


def check(settings: Settings, world: World) -> None:
    """Look for packages and files that a recipe names, on the first rank of each host. Raise UserError."""
    if world.local_rank != 0:
        return
    for key, problem, cure in lacking_packages(settings):
        raise UserError(settings.place(key), problem, cure, "host")
    check_files(settings)


def absent_models(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield place and path of each model that a recipe names and this machine does not have. Nobody else is asked."""
    for key, name in named_models(settings.recipe).items():
        if is_path(name) and not is_remote(name) and not Path(name).expanduser().exists():
            yield settings.place(key), name


def check_files(settings: Settings) -> None:
    """Look for files, models and data sets that a recipe names. Raise UserError.

    Loading reports whatever else is wrong. Files in object storage are not looked for, and a data set counts as missing only
    where the Hub says so: if the Hub does not answer, caches may have it.
    """
    chat_template.file_of(settings)
    sources.check_named(settings)
    _check_model(settings)
    for key, name in other_models(settings.recipe).items():
        _check_model(settings.of_second(name, key))


def lacking_packages(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Yield key, problem and cure for each package that a recipe asks for and this host lacks."""
    training, model = settings.recipe.training, settings.recipe.model
    packages: list[tuple[str, str, str]] = [
        *(("report_to", package, ", or remove it from report_to") for package in training.report_to),
        *[("use_peft", "peft", "")] * model.use_peft,
        *[("load_in_4bit", "bitsandbytes", "")] * model.load_in_4bit,
        *[("teacher_load_in_4bit", "bitsandbytes", "")] * training.teacher_load_in_4bit,
    ]
    for key, package, otherwise in packages:
        if importlib.util.find_spec(package) is None:
            yield key, f"{package!r} is not installed on this host", f"pip install {package}{otherwise}"


def _check_model(settings: Settings) -> None:
    """Raise UserError for a model that is not there, and where max_length exceeds its positions."""
    model = settings.recipe.model
    name = model.model_name_or_path
    folder = folder_of(name)
    if folder is None and (name in packaged.MODELS or Path(name).expanduser().is_file()):
        return  # it has to be read into a directory first
    path = folder / "config.json" if folder else _from_hub(settings, location.location(settings))
    if not path.is_file():
        raise location.unusable(settings, FileNotFoundError(f"there is no {path}"))
    if not model.rope_parameters:
        location.check_length(settings, read_config(path).get("max_position_embeddings"))


def _from_hub(settings: Settings, name: str) -> Path:
    """Return the config.json of a model on the Hub, in its cache. Raises UserError where it cannot be had."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json", revision=settings.recipe.model.revision))
    except Exception as error:
        raise location.unusable(settings, error) from None
