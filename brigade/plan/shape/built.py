"""Models as Transformers builds them from a config.json, without weights: what is read off a model's code is read off these,
and remembered, so that only the first call imports torch."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UserError, first_line
from ...errors.tables import Document, Fields
from ...train.host import cache
from ...train.model.config_json import check_causal
from ...train.model.per_layer import each_layers, sizes_that_differ
from ...train.model.sizes import beyond_texts
from ...train.upstream.experts import routers
from .lora import NAMES
from .model_shape import CHANNELS, MIXERS, SCAN, SPACE, LayerSizes, Mixer

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


ATTENTION = re.compile(r"attn|attention")
# What a shape that is read off a model's code depends on.
HERE = ("built.py", "from_code.py", "from_config.py", "lora.py", "model_shape.py", "tower.py", "mixers.yaml")
HALL = ("model/config_json.py", "model/per_layer.py", "model/sizes.py", "upstream/experts.py")
CODE = [*map(Path(__file__).with_name, HERE), *(Path(__file__).parents[2] / "train" / name for name in HALL)]


def remembered(config: Document, what: Document, make: Callable[[], Fields]) -> Fields:
    """Return make(), or what it returned for the same config, `what`, and versions of torch, transformers and this code."""
    code = [hashlib.sha256(path.read_bytes()).hexdigest() for path in CODE]
    key = json.dumps([config, versions(), version("peft"), code, what], sort_keys=True, default=str)
    return json.loads(cache.remembered(key, lambda: json.dumps(make()), lambda text: text.endswith("}")))


def versions() -> dict[str, str]:
    """The versions of the packages that a model's code depends on."""
    return {package: version(package) for package in ("torch", "transformers")}


def configured(config: Document) -> PreTrainedConfig:
    """Return what Transformers makes of a config.json. Raises UserError for a kind of model that it does not know."""
    from transformers import CONFIG_MAPPING, __version__

    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        cure = "update transformers, or describe the model by one of the known architectures"
        raise UserError("model_type", f"{kind!r} is not known to Transformers {__version__}", cure)
    # A copy: from_dict rewrites nested keys (rope_scaling), and what is read of a model is remembered by the config as it was.
    plain = copy.deepcopy({key: value for key, value in config.items() if key != "quantization_config"})
    return CONFIG_MAPPING[kind].from_dict(plain)


def build(config: Document, images: bool = False, **options: str) -> PreTrainedModel:
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


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, str, nn.ModuleList]:
    """(module that has them, its attribute, the layers): the list of modules with most parameters, towers apart."""
    from torch import nn

    outside = {id(module) for part in beyond_texts(model).values() for module in part.modules()}
    lists = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and id(child) not in outside
    ]
    if not lists:
        raise UserError(type(model).__name__, "it has no list of decoder layers", "name a decoder-only model")
    return max(lists, key=lambda one: sum(p.numel() for p in one[2].parameters()))


# Keys in which layers may differ; MLPs differ where keys and values are shared.
KNOWN = {"head_dim", "num_key_value_heads"}
FLASH_WIDTH = 256  # of a head, the most that FlashAttention takes
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def sizes_of_layers(kind: str, text: PreTrainedConfig, layers: nn.ModuleList) -> tuple[LayerSizes, ...]:
    """Return the sizes of each kind of layer, in the model's order; () where all layers have the same.

    kind: the model_type; text: the text model's config; layers: the decoder's
    Raises UserError for a model whose layers differ in something else, or are built otherwise than the config says.
    """
    differ = sizes_that_differ(text.to_dict())
    if not differ:
        return ()
    problem = f"the formulas describe layers of one size, and its layers differ in {', '.join(differ)}"
    refusal = UserError(f"model_type {kind!r}", problem, "measure it with a short run instead")
    configs, types = each_layers(text), list(getattr(text, "layer_types", None) or ())
    if not set(differ) <= KNOWN or not len(configs) == len(types) == len(layers):
        raise refusal
    kinds = []
    for layer, config, named in zip(layers, configs, types, strict=True):
        found = {name.rpartition(".")[2]: module for name, module in layer.named_modules()}
        widths = {name: getattr(found.get(name), "out_features", 0) for name in (*PROJECTIONS, *MLP)}
        heads, head_dim, kv_heads = text.num_attention_heads, config.head_dim, config.num_key_value_heads
        made = [name for name in ("k_proj", "v_proj") if widths[name]]
        as_said = widths["q_proj"] == heads * head_dim and widths["o_proj"] == widths["down_proj"] == text.hidden_size
        if not as_said or any(widths[name] != kv_heads * head_dim for name in made) or made == ["v_proj"]:
            raise refusal
        window = text.sliding_window if named == "sliding_attention" else 0
        kinds.append((widths["up_proj"], kv_heads, head_dim, window, len(made)))
    return tuple(LayerSizes(kinds.count(one), *one) for one in dict.fromkeys(kinds))


def largest(sizes: tuple[LayerSizes, ...]) -> LayerSizes | None:
    """Return the sizes of layers that have the most of everything, or None for none."""
    names = ("layers", "ffn", "kv_heads", "head_dim", "window", "made")
    return LayerSizes(*(max(getattr(one, name) for one in sizes) for name in names)) if sizes else None


def norms_of(layer: nn.Module, hidden: int) -> Fields:
    """Return what a Family says of the norms in a layer. hidden: the width of what the layer reads and gives"""
    from torch.nn import LayerNorm

    modules = dict(layer.named_modules())
    norms = {
        name: module
        for name, module in modules.items()
        if "norm" in type(module).__name__.lower() and getattr(module, "weight", None) is not None
    }
    around = [module for name, module in norms.items() if not ATTENTION.search(name.rpartition(".")[0])]
    return {
        "norms": sum(module.weight.numel() == hidden for module in around),
        "qk_norm": any(re.search(r"(q|k|query|key)_(layer)?norm$", name) for name in norms),
        "layer_norm": any(isinstance(module, LayerNorm) for module in norms.values()),
        "fp32_norm": bool(norms) and keeps_fp32(next(iter(norms.values()))),
        "norm_bias": any(getattr(module, "bias", None) is not None for module in norms.values()),
        "v_norm": any(name.endswith("v_norm") for name in modules),
    }


def keeps_fp32(norm: nn.Module) -> bool:
    """Return whether a norm's weight, on the meta device, multiplies in fp32, so that autograd keeps a second tensor in fp32."""
    return len(_kept_in_fp32(norm, norm.weight.numel())) > 1


def router_reads_fp32(model: nn.Module, hidden: int) -> bool:
    """Return whether the routers of a model on the meta device read an fp32 copy of what they are given in bf16. False where no
    router of it can be run by itself."""
    try:
        return bool(_kept_in_fp32(routers(model)[0][0], hidden))
    except Exception:  # of any kind: it wants more than hidden states, or is a part of something else
        return False


def _kept_in_fp32(module: nn.Module, width: int) -> set[int]:
    """Return which tensors of its inputs' shape in fp32 autograd keeps of a module in bf16, on the meta device."""
    import torch

    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    inputs = torch.empty(2, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        copy.deepcopy(module).to(torch.bfloat16)(inputs)
    return {id(one) for one in kept if one.dtype == torch.float32 and one.shape == inputs.shape}


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
