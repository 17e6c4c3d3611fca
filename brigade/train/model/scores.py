"""A reward model: a decoder with a head of one output, which scores an answer at its last token.

It is Transformers' own class for sequence classification with one label, so that whoever serves it needs nothing of ours. In
training it is asked for the tokens at which samples end, for a sequence holds several (logits_to_keep).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from ...errors import UserError
from ..data.store import IGNORED
from ..upstream import auto_class_for, classifier_class, takes_images, without_zero3

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.utils import ModelOutput


HEAD = "score.weight"


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return a class derived from Transformers' for this config, or None where there is none with a plain head. Its forward pass
    returns -1 times the scores as the loss, and 0 where a target is IGNORED, as token_losses() does: (kept tokens,) in fp32.

    A head that no checkpoint has begins at zero: on every strategy the same.
    """
    base = classifier_class(config)
    if base is None:
        return None

    def forward(
        self: PreTrainedModel,
        input_ids: torch.Tensor | None = None,
        logits_to_keep: torch.Tensor | int | None = None,
        shift_labels: torch.Tensor | None = None,
        **given: object,
    ) -> ModelOutput:
        if logits_to_keep is None:  # outside of training
            return base.forward(self, input_ids, **given)
        given = {key: value for key, value in given.items() if key not in ("labels", "num_items_in_batch")}
        assert shift_labels is not None
        hidden = self.base_model(input_ids, **given).last_hidden_state
        scores = self.score(hidden[:, logits_to_keep]).float()
        # A rank whose part of the sequences holds no answer's end is asked for one all the same, and so is one that has filler.
        losses = -scores.flatten().masked_fill(shift_labels.flatten() == IGNORED, 0.0)
        return CausalLMOutput(loss=losses, logits=scores)

    def _init_weights(self: PreTrainedModel, module: nn.Module) -> None:
        base._init_weights(self, module)
        if module is getattr(self, "score", None):  # absent while the decoder before it is built
            torch.nn.init.zeros_(self.score.weight)

    body = {"forward": forward, "_init_weights": _init_weights, "__module__": base.__module__}
    return type(base.__name__, (base,), body)


def loading(source: str, config: PreTrainedConfig, place: str) -> dict[str, object]:
    """Return what from_pretrained is told to load a reward model from the weights of a language model, or of a reward model.

    config: of these weights; gets a single label. Raises UserError at `place` where they lack more than the head: Transformers
    would make up the rest.
    """
    config.num_labels = 1
    kind = class_of(config)
    with without_zero3():
        _, report = kind.from_pretrained(
            source, config=copy.deepcopy(config), device_map="meta", dtype=torch.bfloat16, output_loading_info=True
        )
    missing = sorted({*report["missing_keys"]} - {HEAD})
    if missing:
        problem = f"weights of {kind.__name__} that {source} lacks ({len(missing)}): {missing[0]}"
        raise UserError(place, problem, "save the model with its save_pretrained(), and name that directory")
    return {"config": config, "model_class": kind}


def auto_class(source: Any, trust_remote_code: bool = False, images: bool | None = False) -> type[PreTrainedModel]:
    """Return Transformers' class for what is saved in a directory: that of classifiers where its config.json names one, as of a
    reward model; else that of causal language models, or of models of images and texts.

    images: whether the model has a vision tower; None: where the class that its config.json names has one
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    name = (getattr(config, "architectures", None) or [""])[0]
    if name.endswith("ForSequenceClassification"):
        return AutoModelForSequenceClassification
    return auto_class_for(takes_images(name) if images is None else images)
