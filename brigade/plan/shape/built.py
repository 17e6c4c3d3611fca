"""Models as Transformers builds them from a config.json, without weights: what is read off a model's code is read off these."""

import copy
from typing import TYPE_CHECKING

import torch

from ...errors import UserError, first_line
from ...errors.tables import Document
from ...train.model.config_json import check_causal
from ...train.model.sizes import beyond_texts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def configured(config: Document) -> "PreTrainedConfig":
    """Return what Transformers makes of a config.json. Raises UserError for a kind of model that it does not know."""
    from transformers import CONFIG_MAPPING, __version__

    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        cure = "update transformers, or describe the model by one of the known architectures"
        raise UserError("model_type", f"{kind!r} is not known to Transformers {__version__}", cure)
    # A copy: from_dict rewrites nested keys (rope_scaling), and what is read of a model is remembered by the config as it was.
    plain = copy.deepcopy({key: value for key, value in config.items() if key != "quantization_config"})
    return CONFIG_MAPPING[kind].from_dict(plain)


def build(config: Document, images: bool = False, **options: str) -> "PreTrainedModel":
    """Build the model of a config.json, untrained, on whatever device is the default. Raises UserError.

    images: the model of images and texts, and not the causal language model; options: of from_config
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, __version__
    from transformers.initialization import no_init_weights

    place = f"model_type {str(config.get('model_type'))!r}"
    try:
        with no_init_weights():
            known = configured(config)
            if not images:
                check_causal(known, place)
            kind = AutoModelForImageTextToText if images else AutoModelForCausalLM
            model = kind.from_config(known, trust_remote_code=False, **options)
        model.tie_weights()  # which is not done with weights that are not initialised
        return model
    except UserError:
        raise
    except Exception as error:
        problem = f"Transformers {__version__} cannot build it: {first_line(error)}"
        raise UserError(place, problem, "check the config.json") from error


def decoder_layers(model: "PreTrainedModel") -> tuple[torch.nn.Module, str, torch.nn.ModuleList]:
    """(module that has them, its attribute, the layers): the list of modules with most parameters, towers apart."""
    outside = {id(module) for part in beyond_texts(model).values() for module in part.modules()}
    lists = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, torch.nn.ModuleList) and id(child) not in outside
    ]
    if not lists:
        raise UserError(type(model).__name__, "it has no list of decoder layers", "name a decoder-only model")
    return max(lists, key=lambda one: sum(p.numel() for p in one[2].parameters()))
