"""A GGUF file as a model: it is read once, into a directory in Hugging Face's format in the cache, and trained from there.

Its weights are computed back into bf16 from whatever number of bits they have. Transformers reads the families that stand in its
integrations/ggml.py and integrations/gguf.py.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UserError, first_line
from ..host.cache import cache_directory, digest, once
from . import pre_tokenizers

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderField, ReaderTensor
    from transformers import PreTrainedTokenizerBase


SUFFIX = ".gguf"
WEIGHTS = "model.safetensors"
CONVERSION = 1  # raise it when _convert writes something else: what an earlier one wrote stays in caches


def as_folder(file: Path, place: str) -> Path:
    """Return the directory with the model and the tokenizer of a GGUF file. Raises UserError where Transformers cannot read it.

    Call it before TrainingArguments exist: Transformers partitions whatever it builds while a ZeRO-3 configuration lives.
    """
    how = f"{CONVERSION}-transformers-{importlib.metadata.version('transformers')}"
    folder = cache_directory("models") / f"{file.stem}-{digest(file)[:16]}-{how}"

    def build(aside: Path) -> None:
        try:
            _convert(file, aside)
        except Exception as error:
            problem = f"Transformers cannot read {file}: {first_line(error)}"
            raise UserError(place, problem, "name the model's directory, or its name on the Hub") from error

    return once(folder, build)


def _convert(file: Path, folder: Path) -> None:
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said = {"gguf_file": file.name, "local_files_only": True}
    reader = GGUFReader(file)
    _check_size(file, reader.tensors, said)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **said)
    del model.config.quantization_config  # it has been undone
    model.config.architectures = [type(model).__name__]  # which engines that serve it ask for
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **said)
    _restore_splitting(tokenizer, reader.fields)
    tokenizer.save_pretrained(folder)
    weights = model.state_dict()
    for second_name in model.all_tied_weights_keys:
        del weights[second_name]
    # Not save_pretrained: in a process group only rank 0 writes.
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def _check_size(file: Path, tensors: Sequence[ReaderTensor], said: dict[str, object]) -> None:
    """Raise ValueError where the model that a header describes has far more weights than the file. Transformers would make them
    up: where keys are missing, those of its defaults, seven billion for a Llama."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    there = sum(int(tensor.n_elements) for tensor in tensors)
    config = AutoConfig.from_pretrained(file.parent, **said)
    if config.num_hidden_layers > len(tensors):
        raise ValueError(f"its header says {config.num_hidden_layers:,} layers, and it has {len(tensors):,} tensors")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    wanted = sum(weight.numel() for weight in model.parameters())
    if wanted > 2 * there:
        raise ValueError(f"its header describes {wanted:,} weights, and it has {there:,}")


def _restore_splitting(tokenizer: PreTrainedTokenizerBase, fields: Mapping[str, ReaderField]) -> None:
    """Split texts as the file says: Transformers (integrations/ggml.py) does it by the model's family, and leaves SmolLM2's
    digits together. Raises ValueError where the file names a way that is not in pre_tokenizers.NAMES."""
    model, name = (
        fields[key].contents() if key in fields else "" for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre")
    )
    if model != "gpt2":
        return  # SentencePiece, which splits nothing before
    if name not in pre_tokenizers.NAMES:
        known = ", ".join(pre_tokenizers.NAMES)
        raise ValueError(f"its tokenizer splits texts by {name!r}, and only {known} are known")
    pre_tokenizers.split(tokenizer.backend_tokenizer, name)
