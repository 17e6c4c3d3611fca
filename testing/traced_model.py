"""Trace a model: its own code, forward and backward, on fake tensors, with a count of the storages that live.

FakeTensorMode gives every tensor a shape, a type and a storage without bytes, so that a model of any size runs in seconds
on a CPU. Two of each kind of layer run; the second of them says what every further one adds. Three things differ from a
run on a GPU:

- Kernels that a CPU does not have, or that are no Python, are stood in for by what they save (stand_ins.py).
- Autocast takes more operations to fp32 on a GPU (pow, rsqrt, softmax, sum). Code like Llama's hands them fp32 by itself; an
  activation written with pow (GPT-2's GELU) would keep more there than is seen here.
- Weights' gradients are states, which the formulas count: they are never computed here (`inputs=` of backward()).
"""

import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from brigade.errors import UserError, first_line
from brigade.plan.shape.built import build, configured, decoder_layers
from brigade.train import upstream
from brigade.train.model.per_layer import cut, sizes_that_differ

from .stand_ins import FLASH, fuse, mixers, register_flash
from .trace_settings import Trace, TraceSettings


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


def measure(config: Mapping[str, Any], settings: TraceSettings) -> Trace:
    """run() on fake tensors. Raises UserError for code that cannot be traced."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it prints what is raised as well
    try:
        with FakeTensorMode(), torch.device("cpu"):
            return run(config, settings)
    except UserError:
        raise
    except Exception as error:
        place, problem = f"model_type {config.get('model_type')!r}", f"its code cannot be traced: {first_line(error)}"
        raise UserError(place, problem, "trace another one") from error


def run(
    config: Mapping[str, Any], settings: TraceSettings, change: Callable[[Any], dict[str, Any]] = lambda model: {}
) -> Trace:
    """Forward and backward of one row with two layers of each kind, on fake tensors or, of a small model, on real ones.

    change: changes the model before it runs, and returns further inputs
    """
    register_flash()
    attention = _attention(config, settings)
    dtype = torch.float32 if settings.autocast else torch.bfloat16
    model = build(config, attn_implementation=attention, dtype=dtype)
    groups = _alike(decoder_layers(model)[2])
    known = model.config.get_text_config().to_dict()
    own_sizes = bool(sizes_that_differ(known))
    # Of layers with sizes of their own the last of a kind may keep more: keys and values that layers of another kind take.
    taken = [group[: 3 if own_sizes else 2] for group in groups]
    numbers = list(itertools.chain(*taken))
    if own_sizes:  # its code asks the config what the layer of each number has
        numbers.sort()
        model = build(known | cut(known, numbers), attn_implementation=attention, dtype=dtype)
    model.train()
    fuse(model, settings.kernels)
    if settings.checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    owner, name, layers = decoder_layers(model)
    chosen = list(layers) if own_sizes else [layers[number] for number in numbers]
    setattr(owner, name, torch.nn.ModuleList(chosen))
    model.config.get_text_config().num_hidden_layers = len(chosen)  # models loop over as many
    inputs = change(model)
    ids = torch.zeros(1, settings.length, dtype=torch.long)
    embedded: list[torch.Tensor] = []

    def begin(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        """Mark where the backward pass ends: at the embeddings' output."""
        embedded.append(out.detach().requires_grad_())
        return embedded[0]

    model.get_input_embeddings().register_forward_hook(begin)
    with mixers(model), Live([*model.parameters(), *model.buffers(), ids]) as live:
        marks = _Marks(live, chosen)
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.autocast):
            loss = model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
        loss.backward(inputs=embedded)
    added = [after - before for before, after in itertools.pairwise(marks.begins)]
    end, each = marks.begins[-1], []
    kept = float(end)
    for group, few in zip(groups, taken, strict=True):
        each.append(float(added[numbers.index(few[:2][-1])]))
        kept += each[-1] * (len(group) - len(few))
    if known.get(
        "hidden_size_per_layer_input"
    ):  # what layers add of a second embedding is made for all of them before the first
        kept += marks.begins[0] * (sum(map(len, groups)) / len(numbers) - 1)
    return Trace(kept, tuple(each), max(0.0, live.peak - end), float(marks.loss - end))


def _calls_by_name(model_class: type[PreTrainedModel] | None) -> bool:
    """Whether a model's attention calls whatever function is registered under the name of its implementation
    (modeling_utils.py: ALL_ATTENTION_FUNCTIONS); some do that do not say that they take an `attention_backend`."""
    return upstream.supports(model_class, "attention_backend") or hasattr(
        sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS"
    )


def _attention(config: Mapping[str, Any], settings: TraceSettings) -> str:
    """Return what computes attention, by Transformers' name: a model with classes of its own has only SDPA or eager."""
    model_class = upstream.model_class(configured(config))
    if settings.attention == "eager" or _calls_by_name(model_class):
        return "eager" if settings.attention == "eager" else FLASH
    return "sdpa" if upstream.supports(model_class, "sdpa") else "eager"


def _alike(layers: Any) -> list[list[int]]:
    """Return the numbers of layers of the same class, with parameters of the same shapes, in groups."""
    groups: dict[Any, list[int]] = {}
    for number, layer in enumerate(layers):
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        groups.setdefault((type(layer), shapes), []).append(number)
    return list(groups.values())


class _Marks:
    """What lives where each layer begins in the forward pass, and where what follows the last one does. Bytes.

    loss: the peak between the layers' forward and backward passes. Each hook goes with its first call: a layer that is
    computed again begins no second time.
    """

    def __init__(self, live: Live, layers: list[torch.nn.Module]) -> None:
        self.begins: list[int] = []
        self.loss = 0
        self._live = live
        for layer in layers:
            self._once(layer.register_forward_pre_hook, self._begin)
        self._once(layers[-1].register_forward_hook, self._end)

    def _once(self, register: Callable[[Any], Any], mark: Callable[..., None]) -> None:
        def hook(*args: Any) -> None:
            handle.remove()
            mark(*args)

        handle = register(hook)

    def _begin(self, *args: Any) -> None:
        self.begins.append(self._live.now)

    def _end(self, layer: torch.nn.Module, args: Any, out: Any) -> None:
        (out[0] if isinstance(out, tuple) else out).register_hook(self._returned)
        self._once(register_module_forward_pre_hook, self._after)

    def _after(self, module: torch.nn.Module, args: Any) -> None:
        self.begins.append(self._live.now)
        self._live.reset()

    def _returned(self, gradient: Any) -> None:
        self.loss = self._live.peak
        self._live.reset()


def parameters(document: Mapping[str, Any]) -> int:
    """Return how many the whole model has that its own code builds."""
    with torch.device("meta"):
        found: int = sum(each.numel() for each in build(document).parameters())
    return found
