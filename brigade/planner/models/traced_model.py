"""Tracing a model: its own code, forward and backward, on fake tensors, with a count of the storages that live.

FakeTensorMode gives every tensor a shape, a type and a storage without bytes, so that a model of any size runs in seconds
on a CPU. Two of each kind of layer run; the second of them says what every further one adds. Three things differ from a
run on a GPU:

- Kernels that a CPU does not have, or that are no Python, are stood in for by what they save (stand_ins.py).
- Autocast takes more operations to fp32 on a GPU (pow, rsqrt, softmax, sum). Code like Llama's hands them fp32 by itself; an
  activation written with pow (GPT-2's GELU) would keep more there than is seen here.
- Weights' gradients are states, which the formulas count: they are never computed here (`inputs=` of backward()).
"""

import copy
import itertools
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...errors import UserError
from ...model.config_json import check_causal
from .stand_ins import FLASH, flash_known, fuse
from .traced_activations import Asked, Traced


class Live(TorchDispatchMode):
    """Counts the bytes of storages that live, each once, but for those that were there before (weights).

    now, peak: bytes; `reset` begins a new peak
    """

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, int] = {}
        self._weights = {id(weight.untyped_storage()): weight.untyped_storage() for weight in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Autocast's bf16 copy of a weight lives through the step, and is counted with the weights.
        copies = func is torch.ops.aten._to_copy.default and id(args[0].untyped_storage()) in self._weights
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if copies and tensor.dim() > 1:
                    self._weights[id(storage)] = storage
                self._see(storage)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._weights or key in self._seen:
            return
        self._seen[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._seen.pop(key)

    def reset(self) -> None:
        self.peak = self.now


def build(config: Mapping[str, Any], attention: str | None = None, **options: Any) -> Any:
    """The model of a config.json, untrained, on whatever device is the default. Raises UserError.

    attention: its implementation, or None for Transformers' choice; a model with classes of its own has SDPA or eager alone
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise UserError(
            "model_type",
            f"{kind!r} is not known to Transformers {_transformers()}",
            "update transformers, or describe the model by one of the known architectures",
        )
    # A copy: from_dict rewrites nested keys (rope_scaling), and a trace is remembered by the config as it was.
    plain = copy.deepcopy({key: value for key, value in config.items() if key != "quantization_config"})
    try:
        with no_init_weights():
            parsed = CONFIG_MAPPING[kind].from_dict(plain)
            check_causal(parsed, f"model_type {kind!r}")
            model_class = AutoModelForCausalLM._model_mapping.get(type(parsed), None)
            if attention == FLASH and not getattr(model_class, "_supports_attention_backend", True):
                attention = "sdpa" if model_class._supports_sdpa else "eager"
            model = AutoModelForCausalLM.from_config(parsed, attn_implementation=attention, **options)
        model.tie_weights()  # which is not done with weights that are not initialised
        return model
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"model_type {kind!r}",
            f"Transformers {_transformers()} cannot build it: {_first_line(error)}",
            "check the config.json",
        ) from error


def decoder_layers(model: Any) -> tuple[torch.nn.Module, str, torch.nn.ModuleList]:
    """(module that has them, its attribute, the layers): the list of modules with most parameters."""
    lists = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, torch.nn.ModuleList)
    ]
    if not lists:
        raise UserError(type(model).__name__, "it has no list of decoder layers", "name a decoder-only model")
    return max(lists, key=lambda one: sum(p.numel() for p in one[2].parameters()))


def kinds(layers: torch.nn.ModuleList) -> dict[Any, list[torch.nn.Module]]:
    """Layers of the same class with parameters of the same shapes, in order of appearance."""
    found: dict[Any, list[torch.nn.Module]] = {}
    for layer in layers:
        kind = (type(layer), tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()))
        found.setdefault(kind, []).append(layer)
    return found


def measure(config: Mapping[str, Any], wanted: Asked) -> Traced:
    """One row of `wanted.length` tokens. Raises UserError for code that cannot be traced."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it prints what is raised as well
    try:
        with FakeTensorMode(), torch.device("cpu"), flash_known():
            return run(config, wanted)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"model_type {config.get('model_type')!r}",
            f"its code cannot be traced: {_first_line(error)}",
            "plan without --trace",
        ) from error


def run(config: Mapping[str, Any], wanted: Asked) -> Traced:
    """Forward and backward of one row with two layers of each kind, on fake tensors or, of a small model, on real ones."""
    attention = "eager" if wanted.attention == "eager" else FLASH
    model = build(config, attention, dtype=torch.float32 if wanted.autocast else torch.bfloat16)
    model.train()
    fuse(model, wanted.kernels)
    if wanted.checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    owner, name, layers = decoder_layers(model)
    groups = list(kinds(layers).values())
    chosen = [layer for group in groups for layer in group[:2]]
    ids = torch.zeros(1, wanted.length, dtype=torch.long)
    live = Live([*model.parameters(), *model.buffers(), ids])
    marks = _Marks(live, chosen)
    setattr(owner, name, torch.nn.ModuleList([*chosen, marks]))
    text = model.config.get_text_config()
    text.num_hidden_layers = len(chosen) + 1  # models loop over as many
    if getattr(text, "layer_types", None):
        text.layer_types = [*text.layer_types, text.layer_types[-1]]
    embedded: list[torch.Tensor] = []

    def begin(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        """Where the backward pass ends: at the embeddings' output."""
        embedded.append(out.detach().requires_grad_())
        return embedded[0]

    model.get_input_embeddings().register_forward_hook(begin)
    with live:
        with torch.autocast("cpu", torch.bfloat16, enabled=wanted.autocast):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward(inputs=embedded)
    added = [after - before for before, after in itertools.pairwise(marks.begins)]
    kept, each, place = float(marks.begins[-1]), [], 0
    for group in groups:
        place += len(group[:2])
        each.append(float(added[place - 1]))
        kept += each[-1] * (len(group) - len(group[:2]))
    return Traced(kept, tuple(each), max(0.0, live.peak - marks.begins[-1]), float(marks.loss - marks.begins[-1]))


class _Marks(torch.nn.Module):
    """A last layer that changes nothing, and notes what lives where each of `layers` begins and where it begins itself.

    begins: bytes; loss: the peak between the layers' forward and backward passes
    """

    def __init__(self, live: Live, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.begins: list[int] = []
        self.loss = self.results = 0
        self._live, self._started = live, set[int]()
        self._layers = tuple(layers)  # a tuple, so that they are no modules of this one
        for layer in layers:
            layer.register_forward_pre_hook(self._begin)
        layers[-1].register_forward_hook(self._end)

    def __getattr__(self, name: str) -> Any:
        """What model code asks of a layer (its kind of attention) is as of the last one."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layers"][-1], name)

    def _begin(self, layer: torch.nn.Module, args: Any) -> None:
        if id(layer) not in self._started:  # not when it is computed again
            self._started.add(id(layer))
            self.begins.append(self._live.now)

    def _end(self, layer: torch.nn.Module, args: Any, out: Any) -> None:
        self.results = len(out) if isinstance(out, tuple) else 0

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.begins.append(self._live.now)
        self._live.reset()
        hidden.register_hook(self._returned)
        return (hidden, *[None] * (self.results - 1)) if self.results else hidden

    def _returned(self, gradient: Any) -> None:
        self.loss = self._live.peak
        self._live.reset()


def _transformers() -> str:
    import transformers

    return transformers.__version__


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
