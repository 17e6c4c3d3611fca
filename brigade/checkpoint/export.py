"""One Hugging Face directory from what a run saved: the model, or its adapters alone, or the two merged."""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data import chat_template
from ..errors import UserError, writing
from ..model import adapters, base_weights
from ..model.load import load_base, weights
from ..model.location import load_config, location
from ..model.sizes import half_or_full
from ..model.tokenizer import load_tokenizer
from ..recipe.flags import Settings
from . import reading

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Exported:
    """source: what was read; base: what the adapters in `directory` go on, or None where it holds a whole model."""

    directory: Path
    source: Path
    base: str | None


def export(
    settings: Settings,
    output: Path,
    destination: Path,
    *,
    step: int | None = None,
    merge: bool = False,
    dtype: "torch.dtype | None" = None,
) -> Exported:
    """Write `destination`, a new or empty directory, from the directory of a run with these settings.

    dtype: of the weights that are written; default: as they were saved, and merged ones as the run loaded its base.
    In memory lies one copy of the model; where adapters stay adapters, only they.

    Raises UserError: the destination is not empty, there is nothing to read, or no adapters to merge.
    """
    has_adapters = settings.recipe.model.use_peft
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(str(destination), "it is there already, and not empty", "name a new directory")
    if merge and not has_adapters:
        raise UserError(
            "flag --merge", f"{output} was trained without adapters: its model is whole already", "leave the flag out"
        )
    source = reading.find(output, step)
    config = load_config(settings)
    model: Any
    # A directory that is there stays the same one: a shell may stand in it, and a mount cannot be replaced.
    there = destination.exists()
    partial = destination / f".{os.getpid()}" if there else destination.with_name(f".{destination.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)  # at once: what cannot be written is known before gigabytes are read
    except OSError as error:
        raise UserError(str(destination), f"it cannot be written: {error.strerror}", "name another directory") from None
    try:
        with base_weights.of_run(source):
            tokenizer = _tokenizer(settings, config, source, output)
            if has_adapters and not merge:
                model = _adapters_alone(settings, config, source, dtype, partial)
            else:
                model = (_merged if merge else _whole)(settings, config, source, dtype)
            chat_template.record(settings, tokenizer, model.generation_config)
        with writing(destination):
            (model.generation_config if has_adapters and not merge else model).save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            for path in partial.iterdir() if there else ():
                path.replace(destination / path.name)
            if not there:
                partial.replace(destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    base = model.peft_config["default"].base_model_name_or_path if has_adapters and not merge else None
    return Exported(destination, source, base)


def _whole(settings: Settings, config: Any, source: Path, dtype: "torch.dtype | None") -> Any:
    """The model of a run that trained all weights."""
    from transformers import AutoModelForCausalLM

    remote = settings.recipe.model.trust_remote_code
    if reading.in_hugging_face_format(source):
        base_weights.check(str(source), remote)
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto", trust_remote_code=remote)
    model = adapters.empty_model(settings, config)  # on the meta device
    state = reading.load(source, dtype)
    left_out = set(model.load_state_dict(state, strict=False, assign=True).missing_keys)
    model.tie_weights()
    if empty := [name for name, tensor in model.state_dict().items() if tensor.is_meta and name in left_out]:
        raise UserError(
            str(source), f"{len(empty)} weights are missing, e.g. {empty[0]}", "name another step: --step N"
        )
    model.config.dtype = next(model.parameters()).dtype
    _generate_as_its_base(model, settings)
    return model


def _generate_as_its_base(model: Any, settings: Settings) -> None:
    from transformers import GenerationConfig

    with suppress(OSError):  # not every model has one
        model.generation_config = GenerationConfig.from_pretrained(
            location(settings), revision=settings.recipe.model.revision
        )


def _adapters_alone(settings: Settings, config: Any, source: Path, dtype: "torch.dtype | None", folder: Path) -> Any:
    """Write the adapters into `folder`, as PEFT does; returns a model without memory that has such."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    base = adapters.empty_model(settings, config)
    _generate_as_its_base(base, settings)
    model = adapters.wrap(base, settings, weights(settings, config))
    state = reading.load(source, dtype)
    _same_names(source, state, get_peft_model_state_dict(model, save_embedding_layers=False))
    model.peft_config["default"].inference_mode = True
    with writing(folder.parent):
        model.peft_config["default"].save_pretrained(folder)
        save_file(state, folder / reading.ADAPTER, metadata={"format": "pt"})
    return model


def _merged(settings: Settings, config: Any, source: Path, dtype: "torch.dtype | None") -> Any:
    """The base with its adapters merged in. One in 4 bits is dequantised for that: what the adapters were trained on is
    not the original model but its rounded copy."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    loaded = half_or_full(settings)
    base = weights(settings, config)
    model: Any = load_base(settings, base, loaded, device_map="cpu")
    if settings.recipe.model.load_in_4bit:
        model = model.dequantize(dtype=dtype or loaded)
    model = adapters.wrap(model.to(dtype or loaded), settings, base)
    state = reading.load(source)
    _same_names(source, state, get_peft_model_state_dict(model, save_embedding_layers=False))
    set_peft_model_state_dict(model, state)
    return model.merge_and_unload().to(dtype or loaded)


def _same_names(source: Path, found: Any, wanted: Any) -> None:
    if odd := sorted(set(found) ^ set(wanted)):
        raise UserError(
            str(source),
            f"its adapters are not those of run.yaml: {len(odd)} names differ, e.g. {odd[0]}",
            "name another step: --step N",
        )


def _tokenizer(settings: Settings, config: Any, source: Path, output: Path) -> Any:
    """The run's own tokenizer: FSDP2's checkpoints hold none."""
    from transformers import AutoTokenizer

    for folder in (source, output):
        if (folder / "tokenizer_config.json").is_file():
            return AutoTokenizer.from_pretrained(folder)
    return load_tokenizer(settings, config.get_text_config().vocab_size)
