"""The model that a run started from, as others know it: its name on the Hub, and its licence."""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..train.model import packaged
from ..train.model.location import location
from ..train.recipe.flags import Settings


class Base(NamedTuple):
    """name: on the Hub, "" of a local directory and of random weights; licence: an SPDX name in lower case, "" where unknown"""

    name: str = ""
    licence: str = ""


def base_of(settings: Settings) -> Base:
    """Return the base of a run. Its licence is that of its model card, which the Hub or its directory has."""
    model = settings.recipe.model
    if model.from_scratch:
        return Base()
    name = model.model_name_or_path
    if name in packaged.MODELS:
        known = packaged.MODELS[name]
        return Base(known.source, known.licence.lower())
    folder = Path(location(settings))
    if folder.is_dir():
        return Base("", _licence(folder / "README.md"))
    from huggingface_hub import hf_hub_download

    with suppress(Exception):  # no card, or no network: the licence is unknown
        return Base(name, _licence(Path(hf_hub_download(name, "README.md", revision=model.revision))))
    return Base(name)


def _licence(card: Path) -> str:
    from huggingface_hub import ModelCard

    with suppress(Exception):  # no card, or one whose front matter is no YAML
        return str(ModelCard.load(card, ignore_metadata_errors=True).data.license or "").lower()
    return ""
