"""Read slices of tensors from a torch.distributed.checkpoint without ranks: from each file only the chunks that overlap."""

import io
import math
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..upstream import unpickling

Where = tuple[Any, ...]  # the path of an entry in the saved state dict: keys, and places in lists


class Chunks:
    """The tensors of one checkpoint.

    shapes: the shape of every tensor, by its path in the saved state dict: ("optimizer", "state", NAME, "exp_avg")
    """

    def __init__(self, folder: Path) -> None:
        unpickling.data_only()
        self._reader = FileSystemReader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        entries: dict[str, Any] = metadata.state_dict_metadata
        paths: dict[str, Where] = metadata.planner_data
        self._key = {tuple(path): key for key, path in paths.items() if key in entries}
        self._entries = {path: entries[key] for path, key in self._key.items()}
        tensors = ((path, entry) for path, entry in self._entries.items() if isinstance(entry, TensorStorageMetadata))
        self.shapes: dict[Where, torch.Size] = {path: entry.size for path, entry in tensors}

    def read(self, path: Where, start: int, stop: int) -> torch.Tensor:
        """Elements start..stop of the flattened tensor at `path`. Memory holds the rows that they lie in, and one chunk."""
        shape, entry = self.shapes[path], self._entries[path]
        if start >= stop:
            return torch.empty(0, dtype=entry.properties.dtype)
        row = math.prod(shape[1:])
        first, last = (start // row, -(-stop // row)) if shape else (0, 1)
        sizes = torch.Size([last - first, *shape[1:]]) if shape else shape
        offsets = torch.Size([first, *(0 for _ in shape[1:])]) if shape else shape
        into = _Into(torch.empty(sizes, dtype=entry.properties.dtype))
        wanted = ChunkStorageMetadata(offsets, sizes)
        items = create_read_items_for_chunk_list(self._key[path], entry, [wanted])
        self._reader.read_data(LoadPlan(items), into).wait()
        return into.tensor.reshape(-1)[start - first * row : stop - first * row]

    def value(self, path: Where) -> float | None:
        """A number that was saved at `path`, by itself and not as a tensor, or None where there is none."""
        if path not in self._key:
            return None
        index, none, into = MetadataIndex(self._key[path]), torch.Size([0]), _Into(torch.empty(0))
        item = ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)
        self._reader.read_data(LoadPlan([item]), into).wait()
        return into.value


class _Into(DefaultLoadPlanner):
    """Puts what is read into one tensor, or into `value`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.value: float | None = None

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        place = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self.tensor[tuple(slice(offset, offset + length) for offset, length in place)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the tensor is in its place already."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.value = torch.load(value, weights_only=True)
