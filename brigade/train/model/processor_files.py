"""The files of a model's processor of images, which go with every model that a run saves: others load it with them."""

import shutil
from pathlib import Path

from ...errors import UserError
from ..hub import hub_is_away, refusal
from ..recipe.flags import Settings
from .location import location

# What AutoProcessor reads besides the tokenizer's files.
NAMES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# The tokenizer's own says how it was trained, and a processor would read the second before it.
TEMPLATES = ("chat_template.jinja", "chat_template.json")


def copy(settings: Settings, folder: Path) -> None:
    """Copy the files of the recipe's processor into the directory of a saved model; nothing where rows have no images.

    Raises UserError where they cannot be had any more.
    """
    if not settings.recipe.data.images:
        return
    source = _folder(settings)
    for name in NAMES if (folder / TEMPLATES[0]).is_file() else NAMES + TEMPLATES:
        if (file := source / name).is_file() and file.resolve() != (folder / name).resolve():
            shutil.copyfile(file, folder / name)


def _folder(settings: Settings) -> Path:
    """Return the directory with the processor's files: the recipe's own, or the Hub's snapshot."""
    model = settings.recipe.model
    key = "processor_name_or_path" if model.processor_name_or_path else "model_name_or_path"
    source = model.processor_name_or_path or location(settings)
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    hub_is_away()
    revision = model.revision if key == "model_name_or_path" else None  # which is not another repository's
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=[*NAMES, *TEMPLATES]))
    except Exception as error:
        why, cure = refusal(error, source, revision=revision)
        problem = f"the processor's files of {source!r} cannot be had: {why}"
        raise UserError(settings.place(key), problem, cure or "check the name, the network and HF_TOKEN") from None
