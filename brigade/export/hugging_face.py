"""Write one Hugging Face directory from what a run saved: the model, or only its adapters, or the two merged."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import UserError
from ..errors.console import counted
from ..errors.disk import writing
from ..train.checkpoint import carried, reading, saved_weights
from ..train.data import chat_template
from ..train.host import files
from ..train.model import adapters, base_files, processor_files
from ..train.model.load import load_base, weights
from ..train.model.load_trained import load_trained, loading_from_run
from ..train.model.location import load_config, location
from ..train.model.sizes import empty_model, half_or_full
from ..train.model.tokenizer import saved_tokenizer
from ..train.recipe.objectives import objective_of
from ..train.recipe.settings import Settings
from ..train.upstream import peft_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class ExportResult:
    """What was written. source: what was read; base: the model that the adapters in `directory` belong to, or None where it
    holds a whole model; untrained: a sentence on what no module takes, "" where there is none"""

    directory: Path
    source: Path
    base: str | None
    untrained: str = ""


def export(
    settings: Settings,
    output: Path,
    destination: Path,
    *,
    step: int | None = None,
    merge: bool = False,
    dtype: torch.dtype | None = None,
) -> ExportResult:
    """Write `destination`, a new or empty directory, from the directory of a run with these settings.

    dtype: of the written weights; default: the base's, by its config.json; of a model from scratch and of adapters as they were
    saved, and of merged ones as the run loaded its base
    Memory holds one copy of the model; where adapters stay adapters, only those.

    Raises UserError where the destination is not empty, there is nothing to read, or there are no adapters to merge.
    """
    adapted = settings.recipe.model.use_peft
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(str(destination), "it is there already, and not empty", "name a new directory")
    if merge and not adapted:
        problem = f"{output} was trained without adapters: its model is whole already"
        raise UserError("flag --merge", problem, "leave the flag out")
    source = saved_weights.find(output, step)
    config = load_config(settings)
    untrained = ""
    with _written(destination) as folder:
        with loading_from_run(source):
            tokenizer = saved_tokenizer(settings, config, source, output)
            base = weights(settings, config) if adapted else ""
            load = _merged if merge else _adapters if adapted else _whole
            model, state = load(settings, config, source, base, dtype)
            _check_range(model.state_dict() if state is None else state, source)
            templates = chat_template.load(settings, tokenizer)
            generation = getattr(model, "generation_config", None)  # a reward model has none
            chat_template.chat_format(tokenizer, templates).record(tokenizer, generation)
            if objective_of(settings.recipe.training).scores:
                model.config.pad_token_id = tokenizer.pad_token_id  # by which a classifier finds the last token
        with writing(destination):
            if state is None:
                model.save_pretrained(folder)
                untrained = _complete(settings, config, folder, Path(base) if base else source)
            else:
                _save_adapters(model, state, folder)
            tokenizer.save_pretrained(folder)
            processor_files.write(processor_files.read(settings), folder)
            files.by_umask(*folder.glob("*.safetensors"))
    of_adapters = None if state is None else model.peft_config["default"].base_model_name_or_path
    return ExportResult(destination, source, of_adapters, untrained)


def _check_range(weights: Mapping[str, torch.Tensor], source: Path) -> None:
    """Raise UserError for a weight that fp16 does not hold: it has become infinite, without a word."""
    for name, weight in weights.items():
        if weight.dtype == torch.float16 and not weight.isfinite().all():
            problem = f"{name} has a weight beyond fp16's range, 65504, or one that is not finite"
            raise UserError(str(source), problem, "write another format: --dtype bf16 or fp32")


@contextmanager
def _written(destination: Path) -> Iterator[Path]:
    """A directory whose files become the destination's at the end, and vanish where anything fails."""
    # An existing directory stays the same one: a shell may be in it, and a mount cannot be replaced.
    there = destination.exists()
    partial = destination / f".{os.getpid()}" if there else destination.with_name(f".{destination.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)  # at once: an error shows before gigabytes are read
    except OSError as error:
        raise UserError(str(destination), f"it cannot be written: {error.strerror}", "name another directory") from None
    try:
        yield partial
        with writing(destination):
            for path in partial.iterdir() if there else ():
                path.replace(destination / path.name)
            if not there:
                partial.replace(destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _complete(settings: Settings, config: "PreTrainedConfig", folder: Path, source: Path) -> str:
    """Add what no module takes, from a base, a run's model or a checkpoint, to a model just written. Return a sentence on it."""
    found = carried.in_checkpoint(source)
    if not found and saved_weights.in_hugging_face_format(source):
        found = base_files.look(settings, source, config).carried
    carried.add_to_model(folder, found)
    layers = config.get_text_config().num_hidden_layers
    if carried.correct_config(folder, any(base_files.predicts(name, layers) for name in found)):
        return "Its config counts no layers for multi-token prediction: their tensors are not in what was read."
    return (
        f"Carried over from the base, not trained: {counted(len(found), 'tensor')}, {base_files.places(found)}."
        if found
        else ""
    )


# Each returns the model, and the adapters' weights if these stay adapters; the model then takes no memory. base: of adapters
def _whole(
    settings: Settings, config: "PreTrainedConfig", source: Path, base: str, dtype: torch.dtype | None
) -> tuple["PreTrainedModel", None]:
    if dtype is None and not settings.recipe.model.from_scratch:
        dtype = config.dtype
    if saved_weights.in_hugging_face_format(source):
        return load_trained(settings, source, dtype=dtype or "auto"), None
    model = empty_model(settings, config)
    state = saved_weights.load(source, dtype)
    left_out = set(model.load_state_dict(state, strict=False, assign=True).missing_keys)
    model.tie_weights()
    empty = [name for name, tensor in model.state_dict().items() if tensor.is_meta and name in left_out]
    if empty:
        raise UserError(str(source), f"{len(empty)} weights are missing, e.g. {empty[0]}", saved_weights.OTHER_STEP)
    model.config.dtype = next(model.parameters()).dtype
    _generate_as_its_base(model, settings)
    return model, None


def _adapters(
    settings: Settings, config: "PreTrainedConfig", source: Path, base: str, dtype: torch.dtype | None
) -> tuple["PreTrainedModel", dict[str, torch.Tensor]]:
    model = empty_model(settings, config)
    _generate_as_its_base(model, settings)
    model = adapters.wrap(model, settings, base)
    return model, reading.read_adapters(model, source, dtype)


def _merged(
    settings: Settings, config: "PreTrainedConfig", source: Path, base: str, dtype: torch.dtype | None
) -> tuple["PreTrainedModel", None]:
    """The base with its adapters merged. One in 4 bits is dequantised first: the adapters were trained on its rounded weights,
    not on the original ones."""
    loaded = half_or_full(settings)
    dtype = dtype or loaded
    model: PreTrainedModel = load_base(settings, base, loaded, device_map="cpu")
    if settings.recipe.model.load_in_4bit:
        model = model.dequantize(dtype=dtype)
    model = adapters.wrap(model.to(dtype), settings, base)
    peft_layers.import_peft().set_peft_model_state_dict(model, reading.read_adapters(model, source, None))
    return model.merge_and_unload().to(dtype), None


def _save_adapters(model: "PreTrainedModel", state: dict[str, torch.Tensor], folder: Path) -> None:
    """Save adapters as PEFT does."""
    from safetensors.torch import save_file

    model.peft_config["default"].inference_mode = True
    model.peft_config["default"].save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    save_file(state, folder / saved_weights.ADAPTER, metadata={"format": "pt"})


def _generate_as_its_base(model: "PreTrainedModel", settings: Settings) -> None:
    from transformers import GenerationConfig

    if objective_of(settings.recipe.training).scores:
        return

    revision = settings.recipe.model.revision
    with suppress(OSError):  # not every model has one
        model.generation_config = GenerationConfig.from_pretrained(location(settings), revision=revision)
