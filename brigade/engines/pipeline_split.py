"""A decoder model's own modules, divided into the stages of a pipeline by what they cost.

There is no model definition here. A stage is the model with the layers of other stages replaced by one that hands its input on,
so that rotary embeddings, masks and the loss are the model's own, and every parameter keeps its name.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import upstream
from ..errors import first_line


class HandsOn(nn.Module):
    """In the place of a module that another stage has."""

    weight = None  # it has none, where an embedding's and a head's are compared

    def forward(self, hidden: Any, *_: Any, **__: Any) -> Any:
        return hidden


class Decoder:
    """Where a causal language model has its parts.

    whole: computes logits and loss; outer: the same without the head; inner: holds embed_tokens, layers and norm
    """

    def __init__(self, model: Any) -> None:
        self.whole = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.outer, self.inner = self.whole.base_model, self.whole.get_decoder()
        parts = {name: getattr(self.inner, name, None) for name in ("embed_tokens", "layers", "norm")}
        missing = [name for name, part in parts.items() if not isinstance(part, nn.Module)]
        if missing or not isinstance(parts["layers"], nn.ModuleList) or self.whole.get_output_embeddings() is None:
            raise ValueError(f"its decoder has no {' and no '.join(missing) or 'list of layers and a head'}")

    @property
    def head(self) -> Any:
        return self.whole.get_output_embeddings()


class Part(nn.Module):
    """One stage: some of the layers of a model that may hold those of other stages too, by the model's own forward pass.

    The first stage takes input_ids, the others what the stage before returned: (rows, tokens, hidden size). The last returns
    what the model itself returns.
    """

    def __init__(self, model: Any, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        decoder, hands_on = Decoder(model), HandsOn()
        self._decoder = (decoder,)  # in a tuple: none of this one's own modules
        self.first, self.last = first, last
        every = decoder.inner.layers
        self.layers = nn.ModuleList(layer if number in layers else hands_on for number, layer in enumerate(every))
        self.norm = decoder.inner.norm if last else hands_on
        self.embed_tokens = decoder.inner.embed_tokens if first else None
        self.head = decoder.head if last else None

    def forward(self, hidden: Tensor | None = None, **inputs: Any) -> Any:
        """inputs: of the model's forward pass"""
        (decoder,) = self._decoder
        if not self.first:
            inputs = {**inputs, "input_ids": None, "inputs_embeds": hidden}
        with self._alone(decoder.inner):
            if self.last:
                return decoder.whole(**inputs)
            less = {key: value for key, value in inputs.items() if key not in OF_THE_HEAD}
            return decoder.outer(**less).last_hidden_state

    @contextmanager
    def _alone(self, inner: Any) -> Iterator[None]:
        kept = inner.layers, inner.norm
        inner.layers, inner.norm = self.layers, self.norm
        try:
            yield
        finally:
            inner.layers, inner.norm = kept


OF_THE_HEAD = ("labels", "shift_labels", "logits_to_keep", "num_items_in_batch")  # what the head alone reads


# ---- how much each stage has -----------------------------------------------------------------------------------------
def costs(model: Any) -> tuple[list[int], int]:
    """(products of each layer, of the head) for one token; a model on the meta device will do. An embedding is looked up, and
    costs none; of a mixture's experts a token meets experts_per_token / experts."""
    decoder = Decoder(model)
    text = decoder.whole.config.get_text_config()
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    share = (getattr(text, "num_experts_per_tok", None) or 1) / experts
    return [_products(layer, share) for layer in decoder.inner.layers], decoder.head.weight.numel()


def _products(layer: nn.Module, share: float) -> int:
    found = 0.0
    for name, parameter in layer.named_parameters():
        found += parameter.numel() * (share if ".experts." in f".{name}" else 1.0)
    return round(found)


def split(layers: Sequence[int], head: int, stages: int) -> list[range]:
    """Which layers each stage has: neighbours, at least one for each, so that the dearest stage costs as little as it can.
    The last stage has the head too. Of splits whose dearest stages are equally dear, the more even one.

    Raises ValueError where there are fewer layers than stages.
    """
    if stages > len(layers):
        raise ValueError(f"{len(layers)} layers do not fill {stages} stages")
    # best[n][k]: of the k last stages, where they begin with layer n: (cost of the dearest, sum of the squares of all, where the
    # first of them ends)
    count = len(layers)
    after = [sum(layers[n:]) for n in range(count + 1)]
    best = [{1: (after[n] + head, (after[n] + head) ** 2, count)} for n in range(count)]
    for k in range(2, stages + 1):
        for n in range(count - k + 1):
            found = []
            for end in range(n + 1, count - k + 2):
                own, (dearest, squares, _) = after[n] - after[end], best[end][k - 1]
                found.append((max(own, dearest), own**2 + squares, end))
            best[n][k] = min(found)
    ranges, begin = [], 0
    for k in range(stages, 0, -1):
        end = best[begin][k][2]
        ranges.append(range(begin, end))
        begin = end
    return ranges


# ---- loading a stage's own weights -----------------------------------------------------------------------------------
def class_of_stage(config: Any, layers: set[int], first: bool, last: bool) -> Any:
    """The model's class, whose instances have these layers alone: from_pretrained then reads their weights and no others.

    Tied embeddings lie on the first and on the last stage. What texts do not reach (a vision tower) lies on the first.
    """
    base = upstream.model_class(config)

    def __init__(self: Any, config: Any, *args: Any, **options: Any) -> None:
        base.__init__(self, config, *args, **options)
        keep(self, layers, first, last)

    def tied(self: Any, *args: Any, **options: Any) -> dict[str, str]:
        found = base.get_expanded_tied_weights_keys(self, *args, **options)
        return found if getattr(self, "has_ends", True) else {}

    body = {"__init__": __init__, "get_expanded_tied_weights_keys": tied, "__module__": base.__module__}
    return type(base.__name__, (base,), body)


@contextmanager
def in_whole(model: Any, whole: Any) -> Iterator[None]:
    """Meanwhile a stage's model has the modules of `whole`, which takes no memory, in the place of those that other stages have:
    adapters are then drawn from the same random numbers on each stage as in one process."""
    others = away(model)
    for name in others:
        model.set_submodule(name, whole.get_submodule(name))
    try:
        yield
    finally:
        for name, module in others.items():
            model.set_submodule(name, module)


def away(model: Any) -> dict[str, HandsOn]:
    """Name -> what stands in the place of a module that another stage has."""
    return {name: module for name, module in model.named_modules() if isinstance(module, HandsOn)}


def keep(model: Any, layers: set[int], first: bool, last: bool) -> None:
    """Leave a model its own parts, in place."""
    from ..model.sizes import beyond_texts

    decoder = Decoder(model)
    tied = bool(model.all_tied_weights_keys)
    both = tied and (first or last)
    for name in beyond_texts(model) if not first else ():
        outer, _, own = name.rpartition(".")
        setattr(model.get_submodule(outer), own, HandsOn())
    for number in range(len(decoder.inner.layers)):
        if number not in layers:
            decoder.inner.layers[number] = HandsOn()
    if not last:
        decoder.inner.norm = HandsOn()
    if not (first or both):
        decoder.inner.embed_tokens = HandsOn()
    if not (last or both):
        model.set_output_embeddings(HandsOn())
    model.has_ends = both or not tied
    if not model.has_ends:
        model.all_tied_weights_keys = {}


def tried(config: Any, trust_remote_code: bool) -> str:
    """Why stages of this architecture do not compute what the whole model does, tried out with a tiny random one; "" where the
    losses are equal to the bit. Some models scale what they take for embeddings, or look back at them in each layer."""
    from transformers import AutoModelForCausalLM

    from ..model.tiny import shrink

    ids = torch.arange(7, 19).view(1, -1)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    with upstream.without_zero3(), torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode():
        torch.manual_seed(0)
        try:
            tiny = type(config).from_dict(shrink(config.to_dict()))
            model = AutoModelForCausalLM.from_config(tiny, dtype=torch.float32, trust_remote_code=trust_remote_code)
            model.eval()
            count = len(Decoder(model).inner.layers)
            first, last = Part(model, range(1), True, False), Part(model, range(1, count), False, True)
            whole, divided = model(**inputs).loss, last(first(**inputs), **inputs).loss
        except Exception as error:  # what cannot be tried is not trusted
            return f"{type(error).__name__}: {first_line(error)}"
    return "" if torch.equal(whole, divided) else f"they give a loss of {divided:.6f}, and the model gives {whole:.6f}"
