"""Adapters' weights by their names in files, and those that a run goes on with (adapter_name_or_path)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UserError, first_line
from ..host.files import refuse_lfs_pointers
from ..host.hub import hub_is_away
from ..recipe import continued, remote_code
from ..recipe.continued import FILE, KEY, WEIGHTS
from ..recipe.settings import Settings
from ..upstream import peft_layers
from . import token_rows

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


_AGAIN = "download or copy the adapters again"


def saved_names(model: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return parameter -> its name in a file of adapters, as PEFT itself renames them; {} for a model without adapters."""
    if not hasattr(model, "peft_config"):
        return {}
    import torch

    peft = peft_layers.import_peft()
    numbers = {name: torch.tensor(number) for number, name in enumerate(names)}
    saved = peft.get_peft_model_state_dict(model, state_dict=dict(numbers), save_embedding_layers=False)
    of_number = {int(number): name for name, number in saved.items()}
    return {name: of_number[int(number)] for name, number in numbers.items()}


def find(settings: Settings) -> str | None:
    """Return the directory of the adapters that a run goes on with, downloaded where they are on the Hub; None if there are none.

    Raises UserError where their weights are not available.
    """
    name = settings.recipe.model.adapter_name_or_path
    if name is None:
        return None
    folder = remote_code.folder_of(name)
    if not folder:
        from huggingface_hub import snapshot_download

        hub_is_away()
        try:
            folder = Path(snapshot_download(name, allow_patterns=[FILE, WEIGHTS]))
        except Exception as error:
            raise continued.absent(settings, error) from None
    if not (folder / WEIGHTS).is_file():
        problem = f"{name!r} has no {WEIGHTS}, and files in pickle's format are not read"
        raise UserError(settings.place(KEY), problem, "load them with PEFT, and save them with its save_pretrained()")
    return str(folder)


def describe(settings: Settings, model: PreTrainedModel) -> dict[str, str]:
    """Return a line on the adapters that a run begins with, and on their base where that has another name; or {}.

    model: with adapters
    """
    folder = find(settings)
    if folder is None:
        return {}
    base, ours = continued.base_of(Path(folder)), model.peft_config["default"].base_model_name_or_path
    text = f"begin as {settings.recipe.model.adapter_name_or_path}"
    if base != ours and (not base or Path(base).resolve() != Path(ours).resolve()):
        text += f", trained on {base or 'a base that they do not name'}, which is to be this model"
    return {"adapters": text}


def check(model: PreTrainedModel, settings: Settings) -> None:
    """Raise UserError where the weights of the adapters that a run goes on with do not have the names and shapes of those on a
    model, or their tokens are not its tokens. model: with adapters; it may be empty"""
    from safetensors import SafetensorError, safe_open

    folder = find(settings)
    if folder is None:
        return
    refuse_lfs_pointers([Path(folder) / WEIGHTS])
    try:
        with safe_open(Path(folder) / WEIGHTS, framework="pt") as opened:
            theirs = {name: list(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118  (no dict)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder}/{WEIGHTS}", f"it is damaged: {first_line(error)}", _AGAIN) from None
    parameters = trained(model)
    ours = {name: list(getattr(each, "ds_shape", each.shape)) for name, each in parameters.items()}
    base, place = continued.base_of(Path(folder)), settings.place(KEY)
    cure = f"they were trained on {base or 'a base that they do not name'}: name that, and no other targets than theirs"
    odd = sorted(set(ours) ^ set(theirs))
    if odd:
        what = "is not in their file" if odd[0] in ours else "is in their file, and belongs to nothing here"
        problem = f"{len(odd)} of their weights are others than this run's adapters on {type(model.get_base_model()).__name__}: "
        raise UserError(place, f"{problem}{odd[0]} {what}", cure)
    name = next((name for name in sorted(ours) if ours[name] != theirs[name]), None)
    if name:
        raise UserError(place, f"{name} has the shape {theirs[name]}, and here {ours[name]}", cure)
    tokens = sorted(continued.tokens_of(Path(folder)))
    named = token_rows.token_ids(settings, model.config.get_text_config().vocab_size)
    if tokens != named:
        problem = f"the adapters train the tokens {tokens}, and the recipe names {named}"
        raise UserError(settings.place(token_rows.KEY), problem, "leave the key out: the adapters decide it")


def load(model: torch.nn.Module, folder: str | None) -> None:
    """Give a model's adapters the weights that the run begins with, in place and on all ranks, before an engine has it.

    folder: of these weights, of the adapters' names and shapes; None: adapters begin as they are
    """
    if folder is None:
        return
    import torch
    from safetensors.torch import load_file

    state = load_file(Path(folder) / WEIGHTS)
    for name, parameter in trained(model).items():
        if not torch.isfinite(state[name]).all():
            raise UserError(f"{folder}/{WEIGHTS}", f"the weight {name} holds NaN or infinity", _AGAIN)
        with _whole(parameter), torch.no_grad():
            parameter.copy_(state[name])


@contextmanager
def at_the_start(model: torch.nn.Module, settings: Settings) -> Iterator[bool]:
    """For a while, give a trained model, whole in memory, the adapters that its run has gone on with.

    Yields whether it has gone on with any.
    """
    from safetensors.torch import load_file

    folder = find(settings)
    if folder is None:
        yield False
        return
    peft = peft_layers.import_peft()
    now = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    kept = {name: each.clone() for name, each in now.items()}
    peft.set_peft_model_state_dict(model, load_file(Path(folder) / WEIGHTS))
    try:
        yield True
    finally:
        peft.set_peft_model_state_dict(model, kept)


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters of a model with adapters, by their names in a file."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {saved: trained[name] for name, saved in saved_names(model, trained).items()}


def _whole(parameter: torch.nn.Parameter) -> AbstractContextManager[object]:
    """While a parameter that ZeRO-3 has sharded is whole; what the first rank then writes, all have."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
