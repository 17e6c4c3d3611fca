"""A saved model is compared with the model before the run counts as a success: engines gather it by code of their own."""

from pathlib import Path
from typing import Any

from ...errors import UserError
from .. import upstream
from ..checkpoint import saved_weights
from ..model import base_weights


def check(trainer: Any, folder: Path) -> None:
    """Raises UserError where the files in `folder` lack a weight or a buffer of the model, or of its adapters. Tied weights are
    there once, and buffers that a model makes anew are in no file: Transformers knows both."""
    section = trainer.run.settings.recipe.model
    if not trainer.engine.gathers_weights(trainer):
        return  # shards lie there, and no model in Hugging Face format: `export` makes one
    try:
        if section.use_peft:
            _compare_adapters(trainer, folder)
        else:
            with upstream.without_zero3():
                base_weights.check(str(folder), section.trust_remote_code)
    except UserError as error:
        problem = f"the model that was saved here is not the one that was trained: {error.problem}"
        cure = (
            "the checkpoints have all weights: `python -m brigade export` writes a model of one; and please report it"
        )
        raise UserError(str(folder), problem, cure) from None


def _compare_adapters(trainer: Any, folder: Path) -> None:
    from safetensors import safe_open

    from .resharding import saved_names

    whole = trainer.engine.whole_model(trainer)
    names = [name for name, parameter in whole.named_parameters() if parameter.requires_grad]
    wanted = saved_names(whole, [name.replace("_checkpoint_wrapped_module.", "") for name in names])
    with safe_open(folder / saved_weights.ADAPTER, framework="pt") as opened:
        missing = sorted({*wanted.values()} - {*opened.keys()})
    if missing:
        raise UserError(
            str(folder), f"{len(missing)} of {len(wanted)} tensors of its adapters are missing: {missing[0]}", ""
        )
