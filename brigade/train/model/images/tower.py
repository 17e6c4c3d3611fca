"""What a tower is told of the grids of its images' patches, made with the micro-batch and not in the tower's forward pass.

Transformers makes it there (vision_utils.py) from a tensor on the device that says how many patches each image has, and the
host waits for a dozen answers, and for three more in each layer: the lengths by which attention is divided. The tower takes what
is made here, by the names of its own keyword arguments, as if its model had handed it on. The model itself would hand it on to
the language model, too, and engines would move to the device what is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...distributed.process import this_process
from .. import parts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


TOWER = "tower"  # the key of a micro-batch that holds it, which is not for the model
TowerInputs = dict[str, Any]  # keyword arguments of a tower


def _segments(grids: torch.Tensor, _: object) -> TowerInputs:
    from transformers.vision_utils import get_vision_cu_seqlens

    return {"cu_seqlens": get_vision_cu_seqlens(grids).numpy()}


def _positions(grids: torch.Tensor, vision: PreTrainedConfig) -> TowerInputs:
    from transformers.vision_utils import get_vision_position_ids

    return {"position_ids": get_vision_position_ids(grids, vision.spatial_merge_size)}


def _windows(grids: torch.Tensor, vision: PreTrainedConfig) -> TowerInputs:
    from transformers.vision_utils import get_vision_window_index

    index, borders = get_vision_window_index(grids, vision.spatial_merge_size, vision.window_size, vision.patch_size)
    return {"window_index": index, "cu_window_seqlens": borders.numpy()}


def _interpolation(grids: torch.Tensor, vision: PreTrainedConfig) -> TowerInputs:
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    side = int(vision.num_position_embeddings**0.5)
    how = {"mode": "bilinear", "align_corners": True, "spatial_merge_size": vision.spatial_merge_size}
    indices, weights = get_vision_interpolation_indices_and_weights(grids, side, **how)
    return {"interp_indices": indices, "interp_weights": weights}


# By the words of `grids` in model/vision_models.yaml.
MAKERS: Mapping[str, Callable[[torch.Tensor, Any], dict[str, Any]]] = {
    "segments": _segments,
    "positions": _positions,
    "windows": _windows,
    "interpolation": _interpolation,
}


def told_of(grids: torch.Tensor, vision: PreTrainedConfig, words: Sequence[str]) -> TowerInputs:
    """Return the tower's keyword arguments: tensors for its device, and arrays of numpy of what it reads on the host.

    grids: int64 (images, 3), patches in time, height and width; vision: the model's vision_config; words: of MAKERS
    """
    return {name: each for word in words for name, each in MAKERS[word](grids, vision).items()}


def take_over(model: PreTrainedModel) -> None:
    """Let the tower of a model take what is told of each pass (ForwardPass.of_tower); it makes itself what nobody has made.

    model: with adapters or without, before an engine wraps it
    """
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    row = parts.row_of(whole.config)
    if row.get("grids") and hasattr(whole.config, "vision_config"):
        whole.get_submodule(row["tower"][0]).register_forward_pre_hook(_add, with_kwargs=True)


def _add(
    tower: torch.nn.Module, args: tuple[object, ...], given: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    made = this_process.forward_pass.of_tower
    if made is None:
        return None
    on_host = {name: torch.from_numpy(each) for name, each in made.items() if isinstance(each, np.ndarray)}
    return args, {**given, **made, **on_host}
