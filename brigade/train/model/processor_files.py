"""The files of a model's processor of images, which go with every model that a run saves: others load it with them."""

import json
from collections.abc import Mapping
from pathlib import Path

from ...errors import UserError
from ..hub import hub_is_away, refusal
from ..recipe.flags import Settings
from .location import location

# What AutoProcessor reads besides the tokenizer's files.
NAMES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
OF_IMAGES = NAMES[:2]
# The tokenizer's own says how it was trained, and a processor would read the second before it.
TEMPLATES = ("chat_template.jinja", "chat_template.json")


def read(settings: Settings, pixels: tuple[int, int] | None = None) -> dict[str, bytes]:
    """Return name -> content of the files of the recipe's processor; {} where rows have no images.

    pixels: the fewest and most of an image that the run's processor took in place of its own (Processor.pixels), so that the
    saved one scales images as training did

    A run reads them before it trains, for where they lie may be gone when it saves.

    Raises UserError where they cannot be had.
    """
    if not settings.recipe.data.images:
        return {}
    folder = _folder(settings)
    files = {name: (folder / name).read_bytes() for name in (*NAMES, *TEMPLATES) if (folder / name).is_file()}
    return files | {name: limited(files[name], *pixels) for name in OF_IMAGES if pixels and name in files}


def limited(content: bytes, fewest: int, most: int) -> bytes:
    """Return a file's content with these limits of pixels. A processor_config.json may hold the image processor's settings."""
    values = json.loads(content)
    own = values.get("image_processor", values if "image_processor_type" in values else None)
    if own is None:
        return content
    own["size"] = {"shortest_edge": fewest, "longest_edge": most}
    own |= {name: limit for name, limit in (("min_pixels", fewest), ("max_pixels", most)) if name in own}
    return json.dumps(values, indent=2).encode()


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
