"""Tensors of the base that no module takes: a run carries them over, byte for byte and block by block, into what it saves.

In a model in Hugging Face format they are the last shard, with an index. In a checkpoint they are a file of their own: loading a
checkpoint passes over it, and `export` reads it.
"""

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..host import files
from ..model.base_files import Stored, stored_in
from ..model.base_weights import weight_files
from ..model.config_json import prediction_layers, read_config, with_dtype, without_prediction_layers

FILE = "untrained.safetensors"  # in a checkpoint
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_BLOCK = 16 * 2**20


def write(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write a safetensors file of tensors that lie in other files."""
    # Larger elements first: each tensor then begins at a multiple of its element's size, as safetensors' own writer has it.
    of_element = {name: each.bytes / max(math.prod(each.shape), 1) for name, each in tensors.items()}
    order = sorted(tensors, key=lambda name: (-of_element[name], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        each = tensors[name]
        header[name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": [end, end + each.bytes]}
        end += each.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with ExitStack() as opened, files.replacing(path) as written:
        sources = {file: opened.enter_context(file.open("rb")) for file in {each.file for each in tensors.values()}}
        written.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            each = tensors[name]
            sources[each.file].seek(each.start)
            left = each.bytes
            while left:
                block = sources[each.file].read(min(left, _BLOCK))
                if not block:
                    raise OSError(f"{each.file} is shorter than it was")
                written.write(block)
                left -= len(block)


def add_to_model(folder: Path, tensors: Mapping[str, Stored]) -> None:
    """Add tensors to a model that save_pretrained() has just written: as its last shard, with an index of all."""
    saved = [folder / _WHOLE] if (folder / _WHOLE).is_file() else weight_files(folder)
    there = {name for file in saved for name in stored_in(file)}
    tensors = {name: each for name, each in tensors.items() if name not in there}
    if not tensors:
        return
    count = len(saved) + 1
    shards = [folder / f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    write(shards[-1], tensors)
    for before, after in reversed([*zip(saved, shards, strict=False)]):
        before.rename(after)
    stored = {shard: stored_in(shard) for shard in shards}
    sizes = [each.bytes for tensors in stored.values() for each in tensors.values()]
    index = {
        "metadata": {"total_size": sum(sizes)},
        "weight_map": {name: shard.name for shard, tensors in stored.items() for name in sorted(tensors)},
    }
    files.write(folder / _INDEX, json.dumps(index, indent=2))


def add_to_checkpoint(folder: Path, tensors: Mapping[str, Stored], predicts: bool) -> None:
    """Add tensors to a checkpoint, and correct its config.json where it has one. predicts: as for correct_config()"""
    if tensors:
        write(folder / FILE, tensors)
    if (folder / "config.json").is_file():
        correct_config(folder, predicts)


def in_checkpoint(folder: Path) -> dict[str, Stored]:
    """Return what a checkpoint has of them."""
    return stored_in(folder / FILE) if (folder / FILE).is_file() else {}


def correct_config(folder: Path, predicts: bool, dtype: str | None = None) -> bool:
    """Correct a saved config.json; return whether it counted layers that predict further tokens and are not there.

    predicts: whether they are; dtype: of the weights
    """
    path = folder / "config.json"
    before = config = read_config(path)
    wrong = prediction_layers(config) > 0 and not predicts
    if wrong:
        config = without_prediction_layers(config)
    if dtype:
        config = with_dtype(config, dtype)
    if config != before:
        files.write(path, json.dumps(config, indent=2) + "\n")
    return wrong


def remove_index(folder: Path) -> None:
    """Remove the index of a model that is about to be replaced: a smaller one is written without an index."""
    (folder / _INDEX).unlink(missing_ok=True)
