"""What all hosts must have alike before a model is built: what the run goes by, and the model's files.

Each function that speaks of hosts is a collective. This module imports no torch.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UserError, shown
from ...errors.tables import Document, Fields
from ..host.cluster import World
from ..recipe.files import REPOSITORY
from ..recipe.schema import difference
from . import ranks

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")  # what from_pretrained loads, which prefers the first
_VOLATILE = ("_name_or_path", "transformers_version")  # of a config.json, at any depth
_BLOCK = 4096


def check(same: Document, world: World) -> None:
    """End all ranks with one message that names the first key in which a host differs from the first rank's, both values
    and both hosts. same: {what: {key: value}}, JSON-able, in the order in which differences are looked for."""
    same = json.loads(json.dumps(same, default=str))
    digest = _digest(json.dumps(same, sort_keys=True).encode())
    if len(set(ranks.gather(digest))) == 1:  # as ever: what follows would send it all to all
        return
    host, first = ranks.gather((world.host, same))[0]
    with ranks.agreed(world):
        for kind in first:
            other = difference(first[kind], same[kind])
            if other:
                key, theirs, ours = other
                problem = f"{shown(ours)} on {world.host}, but {shown(theirs)} on {host}, rank 0"
                cure = "give all hosts the same flags and files, best on one file system for all"
                raise UserError(f"the {kind}{f': {key}' if key else ''}", problem, cure)


def of_model(config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerBase", *folders: Path | str | None) -> Fields:
    """What check() compares: the model's configuration with all its values, and digests of its tokenizer and of the weights in
    `folders` (None: they are made from configuration and seed)."""
    # How it was last called (padding, truncation) is part of its state, but says nothing of it.
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    texts = {
        "tokenizer.json": backend,
        "special tokens": tokenizer.special_tokens_map,
        "chat template": tokenizer.chat_template,
    }
    return {
        "model's configuration": _without(_VOLATILE, config.to_dict()),
        "tokenizer": {name: _digest(json.dumps(text, default=str).encode()) for name, text in texts.items()},
        "weights": {name: digest for folder in folders if folder for name, digest in digests(Path(folder)).items()},
    }


def code() -> dict[str, str]:
    """A digest of each file of train.py and the library."""
    paths = sorted([REPOSITORY / "train.py", *(REPOSITORY / "brigade").rglob("*")])
    files = (path for path in paths if path.suffix in (".py", ".yaml", ".jinja"))
    return {path.relative_to(REPOSITORY).as_posix(): _digest(path.read_bytes()) for path in files}


def digests(folder: Path) -> dict[str, str]:
    """A digest of each file of weights: of its size, its beginning, where safetensors keep names, types and shapes, and some
    blocks from all over it. Another checkpoint of the same model differs in all of them; a single changed value is
    not seen. It reads 80 to 320 KiB of each file."""
    files = sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))
    blocks = max(4, 64 // max(1, len(files)))
    return {path.name: _sampled(path, blocks) for path in files} | {
        path.name: _digest(path.read_bytes())
        for path in sorted(folder.glob("*.py"))  # of trust_remote_code
    }


def _without(keys: Iterable[str], tree: object) -> object:
    if not isinstance(tree, dict):
        return tree
    return {key: _without(keys, below) for key, below in tree.items() if key not in keys}


def _sampled(path: Path, blocks: int) -> str:
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        parts = [os.pread(file.fileno(), 16 * _BLOCK, 0)]
        parts += [os.pread(file.fileno(), _BLOCK, max(0, size * i // blocks - _BLOCK)) for i in range(1, blocks + 1)]
    return _digest(b"".join([str(size).encode(), *parts]))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
