"""The model that a run leaves: written in Hugging Face format, and compared with the model in memory before the run counts as a
success, because each engine gathers it with code of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...errors import UserError
from .. import upstream
from ..checkpoint import carried, saved_weights
from ..distributed import heartbeat
from ..distributed.process import this_process
from ..host import files
from ..model import base_weights
from ..model.adapter_weights import saved_names
from ..model.base_files import BaseFiles
from ..upstream import checkpoint_files
from .context import TrainingContext


def save(trainer: TrainingContext, folder: Path) -> None:
    """Write the whole model into a directory. A collective. Checkpoints stay as their engine shards them.

    Raises UserError where files lack a part of it.
    """
    this_process.heartbeat.enter(heartbeat.CHECKPOINT)
    if not trainer.replica.speaks:
        return  # another replica saves it
    trainer.run.check_directory()
    if trainer.args.should_save:
        files.remove_links(folder)
        carried.remove_index(folder)
    with Moving():
        _write(trainer, folder)
    if trainer.args.should_save:
        if not trainer.run.settings.recipe.model.use_peft:
            _complete(trainer, folder)
        files.by_umask(*folder.glob("*.safetensors"))  # of a checkpoint, saving.py does it
        _check(trainer, folder)


class Moving(TorchFunctionMode):
    """Shows with each operation of torch that a save moves on: whoever watches sees bytes of files, and none while tensors are
    gathered, of which the largest models have a terabyte."""

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: Any = None
    ) -> object:
        this_process.heartbeat.enter(heartbeat.CHECKPOINT)
        return func(*args, **(kwargs or {}))


def _write(trainer: TrainingContext, folder: Path) -> None:
    state = trainer.engine.whole_state(trainer)
    if state is None:
        trainer.engine.save_weights(trainer, folder)
        return
    for name, master in trainer.engine.masters(trainer):
        if trainer.args.should_save:
            state[name] = master.cpu()
    if not trainer.args.should_save:
        return  # it has no state, and before 5.23 Transformers would write that over the first rank's adapters
    if not trainer.run.settings.recipe.model.use_peft:
        checkpoint_files.name_once(state, trainer.model)
        _as_in_the_base(state, trainer.base_files)
    model = trainer.engine.model_to_save(trainer)
    checkpoint_files.save_model(trainer, model, folder, state)
    generates = getattr(model, "generation_config", None) is not None  # and is no reward model
    if trainer.run.settings.recipe.model.use_peft and generates:
        model.generation_config.save_pretrained(str(folder))  # PEFT saves adapters, and nothing of where an answer ends


def _as_in_the_base(state: dict[str, torch.Tensor], base: BaseFiles) -> None:
    """Give each weight the precision that it has in the base's files, unless it is trained in a lower one."""
    for name, tensor in state.items():
        dtype = base.saved_dtype(name, tensor.dtype)
        state[name] = tensor if dtype == tensor.dtype else tensor.to("cpu", dtype)


def _complete(trainer: TrainingContext, folder: Path) -> None:
    """Add what is carried over from the base, and correct the config."""
    base = trainer.base_files
    if not trainer.engine.gathers_weights(trainer):
        carried.add_to_checkpoint(folder, base.carried, base.predicts)
        return
    carried.add_to_model(folder, base.carried)
    usual = base.saved_dtype("", trainer.engine.kept_dtype())
    carried.correct_config(folder, base.predicts, str(usual).removeprefix("torch."))


def _check(trainer: TrainingContext, folder: Path) -> None:
    """Raise UserError where the files in `folder` lack a weight or a buffer of the model, or of its adapters. Tied weights are
    there once, and buffers that a model makes anew are in no file: Transformers knows both."""
    section = trainer.run.settings.recipe.model
    if not trainer.engine.gathers_weights(trainer):
        return  # shards lie there, and no model in Hugging Face format: `export` makes one
    try:
        if section.use_peft:
            _compare_adapters(trainer, folder)
        else:
            with upstream.without_zero3():
                base_weights.check(str(folder), section.trust_remote_code, trainer.run.settings.recipe.data.images)
    except UserError as error:
        problem = f"the model that was saved here is not the one that was trained: {error.problem}"
        cure = (
            "the checkpoints have all weights: `python -m brigade export` writes a model of one; and please report it"
        )
        raise UserError(str(folder), problem, cure) from None


def _compare_adapters(trainer: TrainingContext, folder: Path) -> None:
    from safetensors import safe_open

    whole = trainer.engine.whole_model(trainer)
    names = [name for name, parameter in whole.named_parameters() if parameter.requires_grad]
    wanted = saved_names(whole, names)
    with safe_open(folder / saved_weights.ADAPTER, framework="pt") as opened:
        missing = sorted({*wanted.values()} - {*opened.keys()})
    if missing:
        raise UserError(
            str(folder), f"{len(missing)} of {len(wanted)} tensors of its adapters are missing: {missing[0]}", ""
        )
