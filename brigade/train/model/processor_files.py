"""The files of a model's processor of images, which go with every model that a run saves: others load it with them."""

from collections.abc import Mapping
from pathlib import Path

from ...errors import UserError
from ..hub import hub_is_away, refusal
from ..recipe.flags import Settings
from .location import location

# What AutoProcessor reads besides the tokenizer's files.
NAMES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# The tokenizer's own says how it was trained, and a processor would read the second before it.
TEMPLATES = ("chat_template.jinja", "chat_template.json")


def read(settings: Settings) -> dict[str, bytes]:
    """Return name -> content of the files of the recipe's processor; {} where rows have no images.

    A run reads them before it trains, for where they lie may be gone when it saves.

    Raises UserError where they cannot be had.
    """
    if not settings.recipe.data.images:
        return {}
    folder = _folder(settings)
    return {name: (folder / name).read_bytes() for name in (*NAMES, *TEMPLATES) if (folder / name).is_file()}


def write(files: Mapping[str, bytes], folder: Path) -> None:
    """Write what read() returned into the directory of a saved model, beside its tokenizer; nothing where there is none, as in
    FSDP2's checkpoints."""
    if not (folder / "tokenizer_config.json").is_file():
        return
    has_template = (folder / TEMPLATES[0]).is_file()
    for name, content in files.items():
        if name not in TEMPLATES or not has_template:
            (folder / name).write_bytes(content)


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
