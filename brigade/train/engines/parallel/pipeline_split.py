"""A decoder's own modules, divided into the stages of a pipeline by what they cost.

There is no model definition here. A stage is the model with other stages' layers replaced by modules that hand their input on, so
that rotary embeddings, masks and the loss are the model's own, and every parameter keeps its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ....errors import first_line
from ... import upstream
from ...data.collate import OF_THE_HEAD, MicroBatch
from ...model import trial
from ...model.sizes import beyond_texts


class HandsOn(nn.Module):
    """What takes the place of a module that another stage has."""

    weight = None  # it has none, where an embedding's and a head's are compared

    def __init__(self, in_tuple: bool = False) -> None:
        super().__init__()
        self.in_tuple = in_tuple

    @classmethod
    def instead_of(cls, layer: nn.Module, in_tuples: frozenset[type]) -> HandsOn:
        """Return one that returns its input as this layer returns its output, with the layer's own plain attributes (its
        kind). in_tuples: layers_in_tuples() of the model"""
        if isinstance(layer, HandsOn):
            return layer
        hands_on = cls(type(layer) in in_tuples)
        for key, value in vars(layer).items():
            if isinstance(value, str | int) and not key.startswith("_"):
                setattr(hands_on, key, value)
        return hands_on

    def forward(self, hidden: torch.Tensor, *_: object, **__: object) -> Tensor | tuple[Tensor]:
        return (hidden,) if self.in_tuple else hidden


class Decoder:
    """The parts of a causal language model, found by what they are, for names differ.

    whole: computes logits and loss; outer: the same without the head; inner: holds the embedding, the layers and the last norm
    in_tuples: layers_in_tuples(), where keep() has left them
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.whole = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.outer, self.inner = self.whole.base_model, self.whole.get_decoder()
        # keep() leaves the names of the parts, for what it puts into their places has none of their properties.
        names: tuple[str, str, str] = getattr(self.inner, "names_of_parts", None) or self._found()
        self.embedding_name, self.layers_name, self.norm_name = names
        self.in_tuples: frozenset[type] = getattr(self.inner, "in_tuples", frozenset())

    def _found(self) -> tuple[str, str, str]:
        """Return the names of embedding, layers and norm. Raises ValueError for a model that does not have exactly one of
        each."""
        children, embedding = dict(self.inner.named_children()), self.whole.get_input_embeddings()
        norms = [name for name, child in children.items() if "norm" in f"{name} {type(child).__name__}".lower()]
        candidates = {
            "embedding of its own": [name for name, child in children.items() if child is embedding],
            "list of layers": [name for name, child in children.items() if isinstance(child, nn.ModuleList)],
            "norm after them": ["norm"] if "norm" in norms else norms,
        }
        missing = [part for part, names in candidates.items() if len(names) != 1]
        if self.whole.get_output_embeddings() is None:
            missing.append("head")
        if missing:
            raise ValueError(f"its decoder has no single {' and no single '.join(missing)}")
        (first,), (layers,), (last,) = candidates.values()
        return first, layers, last

    @property
    def embedding(self) -> torch.nn.Module:
        return getattr(self.inner, self.embedding_name)

    @property
    def layers(self) -> torch.nn.ModuleList:
        return getattr(self.inner, self.layers_name)

    @property
    def norm(self) -> torch.nn.Module:
        return getattr(self.inner, self.norm_name)

    @property
    def head(self) -> torch.nn.Module:
        return self.whole.get_output_embeddings()

    @property
    def others(self) -> list[str]:
        """Names of further modules with weights, with which each stage would compute again."""
        own = (self.embedding_name, self.layers_name, self.norm_name)
        return [name for name, child in self.inner.named_children() if name not in own and [*child.parameters()]]

    @property
    def dropouts(self) -> list[str]:
        """Names of modules that drop some of what passes between the parts, as each stage would do again."""
        children = self.inner.named_children()
        return [name for name, child in children if isinstance(child, nn.Dropout) and child.p > 0]


class Part(nn.Module):
    """One stage: some layers of a model, which may hold those of other stages too, computed by the model's own forward pass.

    The first stage takes input_ids, the others what the stage before returned: (sequences, tokens, hidden size). The last returns
    what the model itself returns.
    """

    def __init__(self, model: torch.nn.Module, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        decoder, hands_on = Decoder(model), HandsOn()
        self._decoder = (decoder,)  # in a tuple, so that it is no submodule
        self.first, self.last = first, last
        self.layers = nn.ModuleList(
            layer if number in layers else HandsOn.instead_of(layer, decoder.in_tuples)
            for number, layer in enumerate(decoder.layers)
        )
        self.norm = decoder.norm if last else hands_on
        self.embedding = decoder.embedding if first else None
        self.head = decoder.head if last else None

    def forward(self, hidden: Tensor | None = None, **inputs: object) -> Tensor:
        """Compute the stage. inputs: those of the model's forward pass"""
        (decoder,) = self._decoder
        if not self.first:
            inputs = {**inputs, "input_ids": None, "inputs_embeds": hidden}
        own = {decoder.layers_name: self.layers, decoder.norm_name: self.norm}
        with upstream.replaced(decoder.inner, **own):
            if self.last:
                return decoder.whole(**inputs)
            less = {key: value for key, value in inputs.items() if key not in OF_THE_HEAD}
            return decoder.outer(**less).last_hidden_state


# ---- how much each stage has -----------------------------------------------------------------------------------------
def costs(model: torch.nn.Module) -> tuple[list[int], int]:
    """Return (products of each layer, products of the head) for one token; a model on the meta device will do.

    Looking up an embedding costs none, and a token meets experts_per_token / experts of a mixture's experts.
    """
    decoder = Decoder(model)
    text = decoder.whole.config.get_text_config()
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    share = (getattr(text, "num_experts_per_tok", None) or 1) / experts
    return [_products(layer, share) for layer in decoder.layers], decoder.head.weight.numel()


def _products(layer: nn.Module, share: float) -> int:
    sizes = (
        parameter.numel() * (share if ".experts." in f".{name}" else 1) for name, parameter in layer.named_parameters()
    )
    return round(sum(sizes))


def split(layers: Sequence[int], head: int, stages: int) -> list[range]:
    """Return the layers of each stage: neighbours, at least one for each, such that the most expensive stage costs the least.

    The last stage has the head too. Where splits are equal in that, the most even one is taken. Raises ValueError where there are
    fewer layers than stages.
    """
    if stages > len(layers):
        raise ValueError(f"{len(layers)} layers do not fill {stages} stages")
    # best[n][k]: for the last k stages, beginning with layer n: (cost of the most expensive one, sum of the squares of all costs,
    # the layer after the first of them)
    count = len(layers)
    after = [sum(layers[n:]) for n in range(count + 1)]
    best = [{1: (after[n] + head, (after[n] + head) ** 2, count)} for n in range(count)]
    for k in range(2, stages + 1):
        for n in range(count - k + 1):
            splits = []
            for end in range(n + 1, count - k + 2):
                own, (highest, squares, _) = after[n] - after[end], best[end][k - 1]
                splits.append((max(own, highest), own**2 + squares, end))
            best[n][k] = min(splits)
    ranges, begin = [], 0
    for k in range(stages, 0, -1):
        end = best[begin][k][2]
        ranges.append(range(begin, end))
        begin = end
    return ranges


# ---- loading a stage's own weights -----------------------------------------------------------------------------------
def class_of_stage(config: PreTrainedConfig, layers: set[int], first: bool, last: bool) -> type[PreTrainedModel]:
    """Return a class derived from the model's, whose instances have only these layers: from_pretrained then reads only their
    weights.

    Tied embeddings lie on the first and on the last stage. What texts do not reach (a vision tower) lies on the first.
    """
    base, in_tuples = upstream.model_class(config), layers_in_tuples(config)

    def __init__(self: torch.nn.Module, config: PreTrainedConfig, *args: object, **options: object) -> None:
        base.__init__(self, config, *args, **options)
        keep(self, layers, first, last, in_tuples)

    def tied(self: torch.nn.Module, *args: object, **options: object) -> dict[str, str]:
        keys = base.get_expanded_tied_weights_keys(self, *args, **options)
        return keys if getattr(self, "has_ends", True) else {}

    body = {"__init__": __init__, "get_expanded_tied_weights_keys": tied, "__module__": base.__module__}
    return type(base.__name__, (base,), body)


@contextmanager
def in_whole(model: torch.nn.Module, whole: PreTrainedModel) -> Iterator[None]:
    """Give a stage's model, for a while, the modules of `whole`, which takes no memory, in place of those that other stages have:
    adapters then get the same random numbers on each stage as in one process."""
    others = away(model)
    for name in others:
        model.set_submodule(name, whole.get_submodule(name))
    try:
        yield
    finally:
        for name, module in others.items():
            model.set_submodule(name, module)


def away(model: torch.nn.Module) -> dict[str, HandsOn]:
    """Return name -> what stands in the place of a module that another stage has."""
    return {name: module for name, module in model.named_modules() if isinstance(module, HandsOn)}


def keep(model: torch.nn.Module, layers: set[int], first: bool, last: bool, in_tuples: frozenset[type]) -> None:
    """Leave a model only its own parts, in place. in_tuples: layers_in_tuples() of it"""
    decoder = Decoder(model)
    tied = bool(model.all_tied_weights_keys)
    both = tied and (first or last)
    for name in beyond_texts(model) if not first else ():
        outer, _, own = name.rpartition(".")
        setattr(model.get_submodule(outer), own, HandsOn())
    decoder.inner.names_of_parts = decoder.embedding_name, decoder.layers_name, decoder.norm_name
    decoder.inner.in_tuples = in_tuples
    for number, layer in enumerate(decoder.layers):
        if number not in layers:
            decoder.layers[number] = HandsOn.instead_of(layer, in_tuples)
    upstream.init_own_layers_alone(decoder.inner, decoder.layers_name, [decoder.layers[number] for number in layers])
    if not last:
        setattr(decoder.inner, decoder.norm_name, HandsOn())
    if not (first or both):
        setattr(decoder.inner, decoder.embedding_name, HandsOn())
    if not (last or both):
        model.set_output_embeddings(HandsOn())
    model.has_ends = both or not tied
    if not model.has_ends:
        model.all_tied_weights_keys = {}


def tried(config: PreTrainedConfig, trust_remote_code: bool) -> str:
    """Return why stages of this architecture do not compute what the whole model does; "" where the losses are equal to the bit.

    It is tried with a tiny random model and a stage for each of its layers. Some models scale what they take for embeddings, or
    look back at them, or at another layer, in each layer.
    """
    return _tried(trial.Architecture.of(config), trust_remote_code)[0]


def layers_in_tuples(config: PreTrainedConfig) -> frozenset[type]:
    """Return the classes of layers that return their output in a tuple (Falcon-H1's), as tried() sees them: their annotations are
    not reliable."""
    return _tried(trial.Architecture.of(config), False)[1]


@lru_cache(maxsize=16)
def _tried(architecture: trial.Architecture, trust_remote_code: bool) -> tuple[str, frozenset[type]]:
    """Return (tried(), layers_in_tuples())."""
    ids = torch.arange(7, 19).view(1, -1)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    also, in_tuples = "", frozenset[type]()
    with trial.alone(), torch.inference_mode():
        try:
            model = trial.tiny_model(architecture.config, trust_remote_code=trust_remote_code)
            decoder = Decoder(model)
            dropouts = decoder.dropouts
            if dropouts:
                return f"each of them would drop again what its {' and '.join(dropouts)} drops", in_tuples
            others = decoder.others
            if others:
                also = f": besides embedding, layers and norm its decoder has {', '.join(others)}"
            whole, returned = _run(model, decoder.layers, inputs)
            if any(isinstance(each, tuple) and len(each) > 1 for each in returned.values()):
                return "its layers hand each other more than one result", in_tuples
            in_tuples = frozenset(kind for kind, each in returned.items() if isinstance(each, tuple))
            decoder.inner.in_tuples = in_tuples
            last = len(decoder.layers) - 1
            hidden: Any = None
            for number in range(last + 1):
                part = Part(model, range(number, number + 1), number == 0, number == last)
                hidden = part(hidden, **inputs) if number else part(**inputs)
            divided = hidden.loss
        except Exception as error:  # what cannot be tried is not trusted
            return f"{type(error).__name__}: {first_line(error)}{also}", in_tuples
    if torch.equal(whole, divided):
        return "", in_tuples
    return f"they give a loss of {divided:.6f}, and the model gives {whole:.6f}{also}", in_tuples


def _run(model: torch.nn.Module, layers: torch.nn.ModuleList, inputs: MicroBatch) -> tuple[Tensor, dict[type, object]]:
    """Return (the loss, what the last layer of each class returned)."""
    returned: dict[type, object] = {}

    def see(layer: nn.Module, _: object, output: object) -> None:
        returned[type(layer)] = output

    hooks = [layer.register_forward_hook(see) for layer in layers]
    loss = model(**inputs).loss
    for hook in hooks:
        hook.remove()
    return loss, returned
