"""A model from the Hub."""

from pathlib import Path

from ...errors import UserError
from ..distributed.consistency import WEIGHTS
from ..hub import refusal
from ..recipe.flags import Settings


def download(name: str, settings: Settings) -> str:
    """The local snapshot of a model on the Hub. Raises UserError when it cannot be had, here and not while loading."""
    from huggingface_hub import snapshot_download

    folder = ""
    try:
        for pattern in WEIGHTS:  # the first that it has: an older model has both, and they are the same
            folder = snapshot_download(
                name,
                revision=settings.recipe.model.revision,
                allow_patterns=[pattern, "*.json", "*.py"],
                ignore_patterns=["consolidated*", "original/*"],  # once more the same, in their maker's own format
            )
            if any(Path(folder).glob(pattern)):
                break
    except Exception as error:
        why, cure = refusal(error, name, revision=settings.recipe.model.revision)
        problem = f"the weights of {name!r} cannot be had: {why}"
        cure = cure or "check the name, the network and HF_TOKEN"
        raise UserError(settings.place("model_name_or_path"), problem, cure) from None
    return folder
