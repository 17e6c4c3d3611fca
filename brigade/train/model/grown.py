"""A model with rows for new tokens. It is written into the cache before anything is loaded, so that every strategy loads it
like any other model; files without such rows are links to the model's own."""

import copy
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import torch

from ...errors import UserError
from ..host.cache import cache_directory, once, stamp
from ..recipe.settings import Settings
from ..upstream import without_zero3
from .config_json import read_config, with_vocabulary
from .new_tokens import KEY, NewTokens, grow
from .sizes import empty_model

WRITTEN = 1  # raise it when _write() writes something else: what an earlier one wrote stays in caches
_CHUNK = 8192  # rows that are summed at once


def with_rows(settings: Settings, source: str, location: str) -> str:
    """Return a directory with the weights in `source` and a row for each token that the recipe adds; `source` itself where the
    tokenizer has them all.

    A new row is the mean of the rows of all tokens before it, in the embeddings, the output layer and its bias; so is a row that
    makes the vocabulary a multiple of 64. The sum is in float64, and the mean is rounded to the file's type.
    location: of the model, with its tokenizer

    Raises UserError for a model with further weights for each token, and for files that are not in safetensors' format.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, trust_remote_code=settings.recipe.model.trust_remote_code)
    published = copy.deepcopy(config)
    new = grow(settings, location, config)
    if new is None:
        return source
    with without_zero3():
        ends = _check_ends(settings, empty_model(settings, published), empty_model(settings, config))
    files = sorted(Path(source).glob("*.safetensors"))
    cure = "save the model with its save_pretrained(), and name that directory"
    if not files:
        raise UserError(settings.place(KEY), f"{source!r} has no *.safetensors, of which new rows are made", cure)
    made_of = [WRITTEN, new, sorted(ends), *map(stamp, [*files, Path(source) / "config.json"])]
    folder = cache_directory("models") / f"new-tokens-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}"

    def build(aside: Path) -> None:
        found = {end for file in files for end in _write(file, aside / file.name, ends, new)}
        lacking = sorted(ends - found)
        if lacking:
            problem = f"none of the tensors in {source!r} is called {lacking[0]}, as the model's own is"
            raise UserError(settings.place(KEY), problem, cure)
        for pattern in ("*.index.json", "generation_config.json", "*.py"):
            for path in Path(source).glob(pattern):
                (aside / path.name).symlink_to(path.resolve())
        document = with_vocabulary(read_config(Path(source)), new.size)
        (aside / "config.json").write_text(json.dumps(document, indent=2))

    return str(once(folder, build))


def _check_ends(settings: Settings, before: torch.Tensor, after: torch.Tensor) -> set[str]:
    """Return the ends of the names of the weights with a row for each token (`embed_tokens.weight`); of tied ones, the first.

    before, after: the model without memory, with both sizes of the vocabulary
    Raises UserError where others depend on that size.
    """
    place, kind = settings.place(KEY), type(after).__name__
    ends = [end for end in (after.get_input_embeddings(), after.get_output_embeddings()) if end is not None]
    own = {id(parameter) for end in ends for parameter in end.parameters()}
    shapes = {name: tensor.shape for name, tensor in before.state_dict().items()}
    rows = {name for name, parameter in after.named_parameters(remove_duplicate=False) if id(parameter) in own}
    odd = [name for name, tensor in after.state_dict().items() if tensor.shape != shapes[name] and name not in rows]
    if hasattr(after.config.get_text_config(), "vocab_size_per_layer_input"):
        odd.append("embed_tokens_per_layer.weight")
    if odd:
        problem = f"{kind} has further weights for each token, which new ones would lack: {odd[0]}"
        raise UserError(place, problem, "train with its own tokens, or another model")
    return {_end(name) for name, parameter in after.named_parameters() if id(parameter) in own}


def _write(file: Path, written: Path, ends: Iterable[str], new: NewTokens) -> set[str]:
    """Write a file of weights with the new rows, or a link to it where it has none of these weights; return which it has."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(file, framework="pt") as opened:
        names = list(opened.keys())
        hit = [name for name in names if _end(name) in ends and opened.get_slice(name).get_shape()[0] == new.words]
        if not hit:
            written.symlink_to(file.resolve())
            return set()
        state, metadata = {name: opened.get_tensor(name) for name in names}, opened.metadata()
    save_file(state | {name: with_means(state[name], new) for name in hit}, written, metadata)
    return {_end(name) for name in hit}


def with_means(rows: torch.Tensor, new: NewTokens) -> torch.Tensor:
    """Return a matrix, or a vector, of a row for each token with those of new tokens, which are means.

    rows: (words, width) or (words,); returns (size, width) or (size,), of the same type
    """
    known = rows[: new.ids[0]]
    mean = sum(chunk.double().sum(0) for chunk in known.split(_CHUNK)) / len(known)
    grown = rows.new_empty((new.size, *rows.shape[1:]))
    grown[: len(rows)] = rows
    grown[len(rows) :] = mean
    grown[torch.tensor(new.ids)] = mean.to(rows.dtype)
    return grown


def _end(name: str) -> str:
    """Return the last two parts of a weight's name: what stands before them may differ between a model and its files."""
    return ".".join(name.split(".")[-2:])
