"""Whether a model divides the sum of its tokens' losses by the number that it is told: tried out, not believed."""

import inspect
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from ..model import trial

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def is_doubtful(model: "PreTrainedModel", says: bool) -> bool:
    """Whether a model has to be tried: it says that its loss takes no number, or its forward pass, which takes any keyword, hands
    the loss to something else than Transformers' loss functions (CPM-Ant, TrOCR).

    says: what Transformers makes of its signature (Trainer.model_accepts_loss_kwargs)
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not says or not isinstance(base, PreTrainedModel):  # a stage of a pipeline has no loss of its own
        return not says
    return "self.loss_function(" not in inspect.getsource(inspect.unwrap(type(base).forward))


def why_not_divided(config: "PreTrainedConfig", trust_remote_code: bool = False, images: bool = False) -> str:
    """Return why the loss of this config's model is no sum over num_items_in_batch, "" where it is.

    Transformers marks most models of images and texts so (accepts_loss_kwargs, Transformers issue 37208), also Gemma 4's, whose
    loss function takes the number. A tiny random model is asked for its loss of one text, with two numbers.

    images: whether it is built with its vision tower
    """

    def ask() -> str:
        model = trial.tiny_model(config, images, trust_remote_code=trust_remote_code)
        tokens = torch.arange(7, 23)[None]
        with torch.inference_mode():
            one, four = (
                model(input_ids=tokens, labels=tokens, use_cache=False, num_items_in_batch=number) for number in (1, 4)
            )
            summed = float(
                torch.nn.functional.cross_entropy(one.logits[0, :-1].float(), tokens[0, 1:], reduction="sum")
            )
        whole, quarter = float(one.loss), float(four.loss)
        if abs(whole - summed) > 1e-4 * whole or abs(4 * quarter - whole) > 1e-4 * whole:
            return "it takes no num_items_in_batch"
        return ""

    return trial.why_not(ask)
