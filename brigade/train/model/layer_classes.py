"""Classes that a strategy's file names as the model's layers: FSDP2 shards each module of such a class by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import UserError
from .. import upstream
from ..recipe.settings import Settings
from ..strategy import Strategy
from ..strategy.accelerate_config import LAYERS, layer_classes
from .sizes import empty_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check(settings: Settings, config: PreTrainedConfig, strategy: Strategy) -> None:
    """Raise UserError where the strategy names a class that no module of the model has: Accelerate looks for it only once the
    weights are loaded (utils/fsdp_utils.py: fsdp2_prepare_auto_wrap_policy)."""
    named = layer_classes(strategy.fsdp)
    if not named:
        return
    model = empty_model(settings, config)
    classes = {type(module).__name__ for module in model.modules()}
    own = sorted(upstream.layer_classes(model))
    for name in named:
        if name not in classes:
            problem = f"{type(model).__name__} has no layer of class {name!r}"
            cure = f"leave the line out; the model's own layers are then taken: {', '.join(own) or 'it names none'}"
            raise UserError(f"{strategy.source}: fsdp_config.{LAYERS}", problem, cure)
