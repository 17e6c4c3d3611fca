"""The files of a model's processor of images, which go with every model that a run saves: others load it with them."""

import json
from collections.abc import Mapping
from pathlib import Path

from ...errors import UserError
from ..host.hub import hub_is_away, refusal
from ..recipe.images import within
from ..recipe.settings import Settings
from .location import location

# What AutoProcessor reads besides the tokenizer's files.
NAMES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
SCALING = "Qwen2VLImageProcessor"  # or a name that begins so, whose limits of pixels have these names and usual values
LIMITS = (("min_pixels", "shortest_edge", 56 * 56), ("max_pixels", "longest_edge", 28 * 28 * 1280))
# The tokenizer's own says how it was trained, and a processor would read the second before it.
TEMPLATES = ("chat_template.jinja", "chat_template.json")


def read(settings: Settings) -> dict[str, bytes]:
    """Return name -> content of the files of the recipe's processor; {} where rows have no images. The recipe's limits of pixels
    replace the processor's in them, where it has some, so that the saved one scales images as training did.

    A run reads them before it trains, for where they lie may be gone when it saves.

    Raises UserError where they cannot be had.
    """
    data = settings.recipe.data
    if not data.images:
        return {}
    folder = _folder(settings)
    files = {name: (folder / name).read_bytes() for name in (*NAMES, *TEMPLATES) if (folder / name).is_file()}
    if data.max_pixels or data.min_pixels:
        files |= {name: limited(files[name], data.max_pixels, data.min_pixels) for name in NAMES[:2] if name in files}
    return files


def limited(content: bytes, most: int | None, fewest: int | None) -> bytes:
    """Return a file's content with these limits of pixels, where it is about images of Qwen's models. A processor_config.json may
    hold the image processor's settings, which Transformers then takes before those of the other file."""
    values = json.loads(content)
    own = values.get("image_processor", values)
    if not str(own.get("image_processor_type")).startswith(SCALING):
        return content
    size = own.get("size") or {}
    given = [(own.get(old), size.get(edge), size.get(old), usual) for old, edge, usual in LIMITS]
    limits = within((next(filter(None, given[0])), next(filter(None, given[1]))), most, fewest)
    for (old, edge, _), limit in zip(LIMITS, limits, strict=True):
        size = {key: value for key, value in size.items() if key != old} | {edge: limit}
        own |= {old: limit} if old in own else {}
    own["size"] = size
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
