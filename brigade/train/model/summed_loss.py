"""Whether a model divides the sum of its tokens' losses by the number that it is told: tried out, not believed."""

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from ...errors import first_line
from .. import upstream
from .tiny import shrink


def is_doubtful(model: Any, says: bool) -> bool:
    """Whether a model has to be tried: it says that its loss takes no number, or its forward pass, which takes any keyword, hands
    the loss to something else than Transformers' loss functions (CPM-Ant, TrOCR).

    says: what Transformers makes of its signature (Trainer.model_accepts_loss_kwargs)
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not says or not isinstance(base, PreTrainedModel):  # a stage of a pipeline has no loss of its own
        return not says
    return "self.loss_function(" not in inspect.getsource(inspect.unwrap(type(base).forward))


def why_not_divided(config: Any, trust_remote_code: bool = False, images: bool = False) -> str:
    """Return why the loss of this config's model is no sum over num_items_in_batch, "" where it is.

    Transformers marks most models of images and texts so (accepts_loss_kwargs, Transformers issue 37208), also Gemma 4's, whose
    loss function takes the number. A tiny random model is asked for its loss of one text, with two numbers.

    images: whether it is built with its vision tower
    """
    with upstream.without_zero3(), torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode():
        torch.manual_seed(0)
        try:
            tiny = type(config).from_dict(shrink(config.to_dict()))
            options = {"trust_remote_code": trust_remote_code, "dtype": torch.float32}
            model = upstream.auto_class_for(images).from_config(tiny, **options)
            tokens = torch.arange(7, 23)[None]
            given = {"input_ids": tokens, "labels": tokens, "use_cache": False}
            found = [model.eval()(**given, num_items_in_batch=number) for number in (1, 4)]
        except Exception as error:  # what cannot be tried is not trusted
            return f"a tiny model to try it with fails ({type(error).__name__}: {first_line(error)})"
        whole, quarter = (float(output.loss) for output in found)
        own = torch.nn.functional.cross_entropy(found[0].logits[0, :-1].float(), tokens[0, 1:], reduction="sum")
    if abs(whole - float(own)) > 1e-4 * whole or abs(4 * quarter - whole) > 1e-4 * whole:
        return "it takes no num_items_in_batch"
    return ""
