"""What a model's files hold: tensors that no module takes, such as layers that predict further tokens, and the others' precision.

Transformers drops such tensors when it loads a model (_keys_to_ignore_on_load_unexpected), and saves a config that still counts
their layers. So they are carried over from the files into what is saved; where that cannot be, the saved config counts none.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors.console import counted
from ..recipe.objectives import objective_of
from ..recipe.settings import Settings
from ..upstream import model_loading, without_zero3
from . import base_weights
from .config_json import prediction_layers, published_quantization, read_config
from .location import location
from .sizes import empty_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

# Buffers that older versions saved and a module computes by itself: with stretched rotary positions they would be wrong.
_COMPUTED = ("inv_freq", "position_ids", ".attn.bias", ".attention.bias", "masked_bias")
_EMBEDDINGS = ("embed_tokens.weight", "head.weight")
_PREDICTS = re.compile(r"(^|\.)mtp|nextn")
_LAYER = re.compile(r"^(?:(?:model|language_model|backbone|transformer)\.)*layers\.(\d+)\.")  # of no tower


class Stored(NamedTuple):
    """A tensor in a file. dtype: as safetensors calls it; start: its first byte in the file"""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int


@dataclass(frozen=True)
class BaseFiles:
    """untaken: name -> a tensor that no module takes; why_not: why those are not carried over, "" where they are; counted: layers
    that predict further tokens, by the config; predicts: whether a saved model has them; dtypes: name of a weight -> its dtype in
    the files; usual: that of most weights, None where the files are quantised or pickled"""

    untaken: dict[str, Stored]
    why_not: str
    counted: int
    predicts: bool
    dtypes: dict[str, torch.dtype]
    usual: torch.dtype | None

    @property
    def carried(self) -> dict[str, Stored]:
        """What is copied into each saved model."""
        return {} if self.why_not else self.untaken

    def saved_dtype(self, name: str, trained: torch.dtype) -> torch.dtype:
        """Return the precision in which a weight is saved: the base's, unless it is trained in a lower one."""
        base = self.dtypes.get(name) or self.usual
        if base is None or not trained.is_floating_point or base.itemsize > trained.itemsize:
            return trained
        return base

    def describe(self) -> dict[str, str]:
        """Return a line of the run's table, {} where there is nothing to say."""
        held = _amount(sum(each.bytes for each in self.untaken.values()))
        which = f"{counted(len(self.untaken), 'tensor')}, {held} ({places(self.untaken)})"
        if self.carried:
            copies = any(name.endswith(_EMBEDDINGS) for name in self.carried)
            also = "; copies of the embeddings among them do not follow the trained ones" if copies else ""
            return {"carried over": f"from the base, not trained: {which}{also}"}
        none = "; the saved config counts no layers that predict further tokens" if self.counted else ""
        if self.untaken:
            return {"not carried over": f"{which}: {self.why_not}{none}"}
        if self.counted and not self.predicts:
            return {"not carried over": f"its files hold none of what its config counts{none}"}
        return {}


def look(settings: Settings, source: Path, config: PreTrainedConfig) -> BaseFiles:
    """Look into the files of a model. config: of the run's model; reads headers only"""
    stored = {name: each for file in base_weights.weight_files(source) for name, each in stored_in(file).items()}
    document, text = read_config(source), config.get_text_config()
    with without_zero3():
        model = empty_model(settings, config)
    takers, quantised = model_loading.takers(model, stored), published_quantization(source)
    untaken = {name: each for name, each in stored.items() if takers[name] is None and not name.endswith(_COMPUTED)}
    if not settings.recipe.data.images and "text_config" in document:  # its towers are left out on purpose
        untaken = {name: each for name, each in untaken.items() if predicts(name, text.num_hidden_layers)}
    why_not = ""
    if quantised:
        why_not, untaken = f"the base is quantised ({quantised}), and what is saved is not", {}
    elif objective_of(settings.recipe.training).scores:
        why_not = "a reward model predicts no tokens"
    elif (before := _words_before(settings, text.vocab_size)) and any(
        before in each.shape for each in untaken.values()
    ):
        why_not = f"the vocabulary has grown to {text.vocab_size:,} rows, and theirs has not"
    known = _dtypes()
    dtypes = {
        taker: known[stored[name].dtype] for name, taker in takers.items() if taker and stored[name].dtype in known
    }
    elements = Counter[Any]()
    for name, taker in takers.items():
        dtype = dtypes.get(taker or "")
        if dtype:
            elements[dtype] += stored[name].bytes // dtype.itemsize
    predicting = not why_not and any(predicts(name, text.num_hidden_layers) for name in untaken)
    return BaseFiles(
        untaken,
        why_not,
        prediction_layers(document),
        predicting or any(map(_PREDICTS.search, model.state_dict())),
        dtypes,
        elements.most_common(1)[0][0] if elements else None,
    )


def predicts(name: str, layers: int) -> bool:
    """Whether a tensor belongs to layers that predict further tokens. layers: that the model has besides"""
    layer = _LAYER.search(name)
    return bool(_PREDICTS.search(name)) or (layer is not None and int(layer[1]) >= layers)


def stored_in(file: Path) -> dict[str, Stored]:
    """Return the tensors in a safetensors file, which has been checked (base_weights.check), by its header: 8 bytes that say how
    long it is, and JSON (https://huggingface.co/docs/safetensors)."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return {
        name: Stored(file, each["dtype"], tuple(each["shape"]), 8 + length + begin, end - begin)
        for name, each in header.items()
        for begin, end in [each["data_offsets"]]
    }


def _dtypes() -> dict[str, torch.dtype]:
    import torch

    return {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def _words_before(settings: Settings, words: int) -> int:
    """Return the size of the vocabulary before the recipe's new tokens; 0 where it has not grown."""
    if not settings.recipe.model.adds_tokens:
        return 0
    from transformers import AutoConfig

    section = settings.recipe.model
    published = AutoConfig.from_pretrained(
        location(settings), revision=section.revision, trust_remote_code=section.trust_remote_code
    )
    before: int = published.get_text_config().vocab_size
    return before if before != words else 0


def _amount(count: int) -> str:
    """Return a number of bytes in a unit that shows it: "1.2 GiB", "33.8 KiB"."""
    power = min(max(count, 1).bit_length() - 1, 39) // 10
    return f"{count / 2 ** (10 * power):.3g} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


def places(names: Iterable[str]) -> str:
    """Return where tensors lie: "model.layers.46.*"."""
    layers = [(name, _LAYER.search(name)) for name in names]
    lie_in = dict.fromkeys(name[: layer.end()] if layer else f"{name.split('.')[0]}." for name, layer in layers)
    more = f" and {len(lie_in) - 3} more" if len(lie_in) > 3 else ""
    return ", ".join(f"{place}*" for place in [*lie_in][:3]) + more
