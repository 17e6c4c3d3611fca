"""States that DeepSpeed wrote of a model that was divided over tensor groups: of each part as of a model by itself."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from . import reading
from .states import States


class Divided(States):
    """Parameters put together from what the ranks of a tensor group have of them.

    parts: the states of the group's first rank, its second, and so on
    whole: shape of each whole parameter. A part is shorter along one dimension, or along none: then all parts are the same.
    """

    def __init__(
        self, parts: Sequence[States], whole: Mapping[str, tuple[int, ...]], local: Mapping[str, tuple[int, ...]]
    ):
        self._parts, self._whole = parts, whole
        self.moments = parts[0].moments
        self.sizes = {name: prod(whole[name]) for name in parts[0].sizes}
        self._along = {
            name: next((n for n, (a, b) in enumerate(zip(local[name], whole[name], strict=True)) if a != b), None)
            for name in self.sizes
        }

    def read(self, name: str, key: str, start: int, stop: int) -> Tensor:
        along = self._along[name]
        if along is None:
            return self._parts[0].read(name, key, start, stop)
        if along == 0:  # one part after the other
            size = self.sizes[name] // len(self._parts)
            edges = [(max(start - n * size, 0), min(stop - n * size, size)) for n in range(len(self._parts))]
            pairs = zip(self._parts, edges, strict=True)
            return torch.cat([part.read(name, key, first, last) for part, (first, last) in pairs if first < last])
        row = self._whole[name][1]
        first, last, width = start // row, -(-stop // row), row // len(self._parts)
        columns = [part.read(name, key, first * width, last * width).view(-1, width) for part in self._parts]
        return torch.cat(columns, dim=1).reshape(-1)[start - first * row : stop - first * row]

    def step(self, name: str) -> float | None:
        return self._parts[0].step(name)

    def buffer(self, name: str) -> Tensor | None:
        return self._parts[0].buffer(name)

    def loss_scale(self) -> float | None:
        return self._parts[0].loss_scale()


def whole_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of all weights in the Hugging Face files of a checkpoint, by their headers."""
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob(reading.FULL)):
        with safe_open(file, framework="pt") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    return found
