"""A model out of what a run saved, whichever strategy wrote it, ready to compute."""

from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UserError
from ..model import adapters
from ..model.load import load_base, weights
from ..model.load_trained import load_trained
from ..model.sizes import half_or_full
from ..recipe.settings import Settings
from ..upstream import peft_layers
from . import saved_weights

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


def read_model(settings: Settings, config: "PreTrainedConfig", source: Path) -> "PreTrainedModel":
    """Load the model whose weights are in `source` (saved_weights.find): whole, or adapters on their base.

    Raises UserError where weights are missing, or are not those of this model.
    """
    adapted = settings.recipe.model.use_peft
    if saved_weights.in_hugging_face_format(source) or (adapted and (source / saved_weights.ADAPTER).is_file()):
        return load_trained(settings, source)
    base = weights(settings, config)
    model: PreTrainedModel = load_base(settings, base, half_or_full(settings))
    if adapted:
        model = adapters.wrap(model, settings, base)
        peft_layers.import_peft().set_peft_model_state_dict(model, read_adapters(model, source))
        return model
    state = saved_weights.load(source, half_or_full(settings))
    left_out = set(model.load_state_dict(state, strict=False).missing_keys)
    whole = model.state_dict()
    given = {tensor.data_ptr() for name, tensor in whole.items() if name not in left_out}
    missing = sorted(name for name in left_out if whole[name].data_ptr() not in given)
    if missing:  # tied weights are there once
        raise UserError(str(source), f"{len(missing)} weights are missing, e.g. {missing[0]}", saved_weights.OTHER_STEP)
    return model


def read_adapters(
    model: "PreTrainedModel", source: Path, dtype: "torch.dtype | None" = None
) -> dict[str, "torch.Tensor"]:
    """Return the adapters' weights in `source`. Raises UserError where they are not those of this model."""
    state = saved_weights.load(source, dtype)
    own = peft_layers.import_peft().get_peft_model_state_dict(model, save_embedding_layers=False)
    odd = sorted(set(state) ^ set(own))
    if odd:
        problem = f"its adapters are not those of run.yaml: {len(odd)} names differ, e.g. {odd[0]}"
        raise UserError(str(source), problem, saved_weights.OTHER_STEP)
    return state
