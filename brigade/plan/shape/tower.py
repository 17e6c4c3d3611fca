"""Describe a model's vision tower and its projector in numbers, read off the model itself on the meta device.

Remembered, so that only the first call imports torch. towers.yaml names the models; of no other are images counted.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from ...errors import UserError
from ...errors.tables import Document, Fields, table
from ...train.model import parts
from .built import ATTENTION, build, norms_of, remembered
from .find import described
from .from_code import MeasuredShape
from .model_shape import Family, ModelShape

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

MEASURE = "measure it with a short run instead"


@dataclass(frozen=True)
class Tower:
    """A vision tower and what projects its output into the decoder's width.

    shape: its layers as a decoder's; its parameters are those of the tower without its projector
    projector: parameters; products: (inner, outer) width of the projector's linear layers
    linears: (name, how many, inner and outer width together) of the linear layers of the tower, and of its projector
    pixels: numbers of a patch; scales: vectors by which a layer multiplies its outputs (InternVL's)
    masks: whether the decoder's attention is given masks because of images
    """

    shape: MeasuredShape
    projector: int
    products: tuple[tuple[int, int], ...]
    linears: tuple[tuple[str, int, int], ...]
    of_projector: tuple[tuple[str, int, int], ...]
    pixels: int
    scales: int = 0
    masks: bool = False

    @property
    def parameters(self) -> int:
        return self.shape.parameters

    def adapted(self, targets: str | Iterable[str], part: str) -> int:
        """Return the widths of the linear layers of a part that have adapters, summed: what one rank of adapters has.

        targets: a recipe's lora_target_modules; part: vision_tower or projector
        """
        names = {targets} if isinstance(targets, str) else set(targets)
        found = self.linears if part == "vision_tower" else self.of_projector
        return sum(count * widths for name, count, widths in found if targets == "all-linear" or name in names)


@functools.cache
def towers() -> dict[str, Fields]:
    """Return the rows of towers.yaml by parts.kind_of(), with tower, projector and masks of vision_models.yaml."""
    known = parts.known()
    return {
        kind: row
        | {"tower": known[kind]["tower"][0], "projector": known[kind]["projector"], "masks": known[kind]["masks"]}
        for kind, row in table(Path(__file__).with_name("towers.yaml")).items()
    }


def row_of(config: Document, place: str) -> Fields:
    """Return the row of towers.yaml of a model. Raises UserError for a model without a tower, and for one that is not known."""
    if not config.get("vision_config"):
        problem = "the model reads no images: its config.json has no vision_config"
        raise UserError(place, problem, "plan it without them")
    kind = parts.kind_of(config)
    if kind not in towers():
        known = ", ".join(sorted(towers()))
        cure = f"plan one of {known}, or {MEASURE}"
        raise UserError(f"model_type {kind!r}", "no formula counts its vision tower", cure)
    return towers()[kind]


def described_with_tower(config: Document, place: str, name: str = "") -> tuple[ModelShape, Tower, Fields]:
    """Return (the decoder with its tower among `other`, the tower, the config with all that Transformers adds).

    Raises UserError for a model that towers.yaml does not know, and for one whose parts are not what the model has in all.
    """
    row = row_of(config, place)
    values = remembered(config, {"tower": row}, lambda: _measure(config, row))
    tower, whole = TypeAdapter(Tower).validate_python(values["tower"]), values["config"]
    if "text" in row:
        kind = whole["text_config"]["model_type"] if row["text"] == "own" else row["text"]
        text = {**whole["text_config"], "model_type": kind, "tie_word_embeddings": values["tied"]}
        shape = described(text, place, name)
    else:
        shape = described(config, place, name)
    others = tower.parameters + tower.projector
    if not isinstance(shape, MeasuredShape):
        shape = replace(shape, other=others)
    elif not shape.other:  # Transformers' causal language model of that kind has no tower
        shape = replace(shape, other=others, parameters=shape.parameters + others)
    if shape.parameters != values["parameters"] or shape.other < others:
        problem = f"its parts have {shape.parameters:,} parameters by formula, and the model {values['parameters']:,}"
        raise UserError(f"model_type {config['model_type']!r}", problem, MEASURE)
    return shape, tower, whole


def _measure(config: Document, row: Document) -> Fields:
    """Return plain values: of a Tower, of the config, all parameters, and whether the two ends are one."""
    import torch

    with torch.device("meta"):
        model = build(config, images=True)
    tower = tower_of_model(model, row)
    text = model.config.get_text_config()
    whole = {
        **_plain(model.config.to_dict()),
        "text_config": _plain(text.to_dict()),
        "vision_config": _plain(model.config.vision_config.to_dict()),
    }
    output = model.get_output_embeddings()
    return {
        "tower": asdict(tower),
        "config": whole,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tied": output.weight is model.get_input_embeddings().weight,
    }


def _plain(values: Document) -> Fields:
    """Return what of a config JSON can keep. A dtype is none of it."""
    return {
        key: _plain(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if isinstance(value, (int, float, str, list, tuple, dict))
    }


def tower_of_model(model: "PreTrainedModel", row: Document) -> Tower:
    """Return the tower of a model of AutoModelForImageTextToText. row: its row of towers.yaml

    Raises UserError for layers that are not attention and an MLP, as the formulas have them.
    """
    import torch

    kind, vision = model.config.model_type, model.config.vision_config
    beside = tuple(row["projector"])

    def projects(name: str) -> bool:
        return any(name == part or name.startswith(f"{part}.") for part in beside)

    of_tower = [n for n, _ in model.named_modules() if f"{n}.".startswith(f"{row['tower']}.") and not projects(n)]
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    projector = sum(count for name, count in counts.items() if projects(name))
    parameters = sum(count for n, count in counts.items() if n.startswith(f"{row['tower']}.") and not projects(n))
    lists = [module for name in of_tower if isinstance(module := model.get_submodule(name), torch.nn.ModuleList)]
    layers = max(lists, key=lambda one: sum(p.numel() for p in one.parameters()))
    shape = _shape(kind, vision, layers, parameters, any("rotary" in name.lower() for name in of_tower))
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    products = [(m.in_features, m.out_features) for n, m in linears if projects(n)]
    # Gemma 3's projector multiplies by a parameter of its own.
    in_linears = {id(m.weight) for _, m in linears}
    others = [p for n, p in model.named_parameters() if projects(n) and p.dim() == 2 and id(p) not in in_linears]
    patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    channels = getattr(vision, "in_channels", 0) or getattr(vision, "num_channels", 0) or 3
    return Tower(
        shape,
        projector,
        (*products, *((p.shape[0], p.shape[1]) for p in others)),
        _named(linears, lambda name: name in set(of_tower)),
        _named(linears, projects),
        channels * patch**2 * int(getattr(vision, "temporal_patch_size", 1)),
        sum(p.dim() == 1 for _, p in layers[0].named_parameters(recurse=False)),
        bool(row.get("masks")),
    )


def _named(
    linears: "Iterable[tuple[str, nn.Linear]]", wanted: Callable[[str], bool]
) -> tuple[tuple[str, int, int], ...]:
    """Return (name, how many, widths) of linear layers of the same name and widths."""
    found: dict[tuple[str, int], int] = {}
    for name, module in linears:
        if wanted(name):
            key = (name.removesuffix(".linear").rpartition(".")[2], module.in_features + module.out_features)
            found[key] = found.get(key, 0) + 1
    return tuple((name, count, widths) for (name, widths), count in found.items())


def _shape(
    kind: str, vision: "PreTrainedConfig", layers: "nn.ModuleList", parameters: int, rotary: bool
) -> MeasuredShape:
    """Return the tower's layers as a decoder's: attention sees tokens on both sides, which costs/images.py counts."""
    import torch

    hidden = vision.hidden_size
    heads = next(number for key in ("num_attention_heads", "num_heads") if (number := getattr(vision, key, None)))
    modules = list(layers[0].named_modules())
    linear = {name: module for name, module in modules if isinstance(module, torch.nn.Linear)}
    attention = [(m.in_features, m.out_features) for name, m in linear.items() if ATTENTION.search(name)]
    mlp = [(m.in_features, m.out_features) for name, m in linear.items() if not ATTENTION.search(name)]
    norms = norms_of(layers[0], hidden)
    ffn = vision.intermediate_size
    each = sum(p.numel() for p in layers[0].parameters())
    known = sorted(attention) in ([(hidden, hidden)] * 4, [(hidden, hidden), (hidden, 3 * hidden)])
    known = known and sorted(mlp) == sorted([(hidden, ffn)] * (len(mlp) - 1) + [(ffn, hidden)])
    same = all(sum(p.numel() for p in layer.parameters()) == each for layer in layers)
    if not known or len(mlp) not in (2, 3) or norms["norms"] not in (2, 4) or not same:
        problem = "no formula describes the layers of its vision tower"
        raise UserError(f"model_type {kind!r}", problem, MEASURE)
    family = Family(gated=len(mlp) == 3, fused_qkv=len(attention) == 2, rotary=rotary, **norms)
    window, windowed = _windows(vision, len(layers))
    return MeasuredShape(
        f"{kind}'s vision tower",
        len(layers),
        hidden,
        ffn,
        heads,
        heads,
        hidden // heads,
        0,
        tied=True,
        family=family,
        window=window,
        windowed_layers=windowed,
        scores=True,
        parameters=parameters,
        embedding=parameters - len(layers) * each,
        dense_layer=each,
    )


def _windows(vision: "PreTrainedConfig", layers: int) -> tuple[int, int]:
    """Return (the patches that see each other in layers with a window, how many layers have one), as Qwen2.5-VL's have."""
    side = getattr(vision, "window_size", 0)
    if not side or not hasattr(vision, "fullatt_block_indexes"):
        return 0, 0
    return (side // vision.patch_size) ** 2, layers - len(vision.fullatt_block_indexes)
