"""Find the mixer of a hybrid among those of mixers.yaml: what layers of a hybrid have instead of attention or beside it, read off
a model that is built (model_shape.Mixer)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .lora import NAMES
from .model_shape import CHANNELS, MIXERS, SCAN, SPACE, Mixer

if TYPE_CHECKING:
    from torch import nn

BESIDE = "hybrid"  # of `layer_types`: with attention beside the mixer
APART = ("mlp", "moe")  # with nothing else: the other layers of such a model have no MLP


def _convolves_keys_and_queries(mixer: Mixer, module: nn.Module) -> bool:
    return mixer.convolved == mixer.heads * mixer.value_dim + 2 * mixer.key_heads * mixer.key_dim


def _gates_channels(mixer: Mixer, module: nn.Module) -> bool:
    """Whether the gate is a sigmoid's (Ling 3), or operations of its own, in Kimi Linear."""
    gate = getattr(module, "forget_gate", None)
    return _convolves_keys_and_queries(mixer, module) and gate is not None and bool(getattr(gate, "safe_gate", True))


def _scans_channels(mixer: Mixer, module: nn.Module) -> bool:
    """Whether B, C and steps have one width for all channels."""
    given = [outer for _, outer in mixer.products[::2]]
    return mixer.convolved == mixer.heads and given == [2 * mixer.heads, mixer.heads]


# Whether a module's parts are those that the formula of a kind counts.
FITS: dict[str, Callable[[Mixer, nn.Module], bool]] = {
    SPACE: _convolves_keys_and_queries,
    CHANNELS: _gates_channels,
    SCAN: _scans_channels,
}
NAMED = frozenset(name for kind in MIXERS.values() for name in kind["named"])


def mixer_of(types: list[str], layers: nn.ModuleList) -> tuple[Mixer | None, list[nn.Module]]:
    """Return (what a hybrid has instead of attention in some layers or beside it in all, the layers with attention).

    None where no formula describes it, and then all layers. types: what the config calls each layer
    """
    kinds = {one for one in types if one in NAMED}
    without = {*NAMED, *APART} - {BESIDE}
    attending = [layer for layer, one in zip(layers, types, strict=False) if one not in without]
    if len(kinds) != 1 or len(types) != len(layers) or not attending:
        return None, list(layers)
    mixing = [layer for layer, one in zip(layers, types, strict=True) if one in NAMED]
    convolutions = [(name, module) for name, module in mixing[0].named_modules() if type(module).__name__ == "Conv1d"]
    if len(convolutions) != 1:
        return None, list(layers)
    module, convolution = mixing[0].get_submodule(convolutions[0][0].rpartition(".")[0]), convolutions[0][1]
    name = kinds.pop()
    states = {
        kind: {field: getattr(module, attribute, 0) for field, attribute in known.get("fields", {}).items()}
        for kind, known in MIXERS.items()
        if name in known["named"]
    }
    kind = next((kind for kind, sizes in states.items() if all(sizes.values())), "")
    if not kind:
        return None, list(layers)
    linear = linear_layers(module)
    products = tuple((one.in_features, one.out_features) for _, one in linear)
    letters = "".join(NAMES.get(name, "-") for name, _ in linear)
    beside = BESIDE in types
    sizes: dict[str, Any] = {**states[kind], **MIXERS[kind].get("fixed", {})}
    mixer = Mixer(kind, len(mixing), products, convolution.in_channels, beside=beside, **sizes)
    if set(letters) > {"-"}:
        mixer = replace(mixer, letters=letters)
    if kind in FITS and not FITS[kind](mixer, module):
        return None, list(layers)
    return mixer, attending


def linear_layers(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return the linear layers of a mixer by their names, that which gives its output at the end."""
    import torch

    found = [(name, each) for name, each in module.named_modules() if isinstance(each, torch.nn.Linear)]
    return sorted(found, key=lambda one: one[0].startswith(("out", "o_proj")))
