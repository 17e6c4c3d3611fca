"""Continue from a checkpoint of another engine or another number of ranks: weights, moments, schedule, loss scale.

Each rank reads its own share of every parameter, one after another, and writes it into its running engine. The checkpoint stays
as it is, and nothing is converted on the disk. checkpoint/compatibility.py says when that is needed, and what cannot be done.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ..checkpoint import states
from ..model.adapter_weights import saved_names
from ..upstream import unpickling
from . import parameter_groups, shares
from .engine import StepContext

Part = tuple[int, int, slice | None]  # of a parameter: first element, last, and of each row only these columns


@torch.no_grad()
def reshard(trainer: StepContext, checkpoint: Path, moments: bool = True) -> None:
    """Load everything that training keeps from `checkpoint` into the running engine. A collective.

    moments: False leaves the optimizer, the schedule and the loss scale as they are, for callers that want only a model.
    Raises UserError where the checkpoint lacks a parameter of the model.
    """
    names = {
        parameter: shares.name_of(name)
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    }
    whole = trainer.engine.whole_model(trainer)
    order = _order(whole, trainer)
    source = trainer.engine.reading(states.of_checkpoint(checkpoint, order, saved_names(whole, order)), trainer)
    missing = [name for name in names.values() if name not in source.sizes]
    if missing:
        problem = f"it lacks {len(missing)} of the {len(names)} trained parameters, e.g. {missing[0]}"
        raise UserError(str(checkpoint), problem, "continue with the recipe that wrote it")
    moments_of: dict[int, dict[str, Any]] = {}
    for parameter, start, stop, owner, offset, columns in trainer.engine.shares(trainer):
        name, values = names[parameter], shares.flat(owner)
        with states.telling(checkpoint):
            _copy(source, name, states.WEIGHT, (start, stop, columns), values[offset:], parameter)
        if not moments:
            continue
        kept = moments_of.setdefault(id(owner), {})
        with states.telling(checkpoint):
            for key in source.moments_of(name):
                kept.setdefault(key, torch.zeros_like(values))
                _copy(source, name, key, (start, stop, columns), kept[key][offset:], parameter)
        step = source.step(name)
        if step is not None:
            kept["step"] = step
    for name, buffer in trainer.model.named_buffers():
        saved = source.buffer(shares.name_of(name))
        if saved is not None:
            buffer.copy_(saved)
    if moments:
        trainer.engine.load_moments(trainer, moments_of)
        own, schedule = trainer.lr_scheduler.state_dict(), unpickling.load(checkpoint / "scheduler.pt")
        # One of each for a parameter group, and ZeRO leaves out empty ones. All have the same schedule.
        schedule |= {key: own[key] for key in ("lr_lambdas", "base_lrs", "_last_lr")}
        trainer.lr_scheduler.load_state_dict(schedule)
        _load_loss_scale(trainer, checkpoint, source)
    trainer.engine.spread_weights(trainer)


def _copy(source: states.States, name: str, key: str, part: Part, into: Tensor, parameter: Tensor) -> None:
    """Read a share of a parameter's weight or moment into the beginning of a flat tensor."""
    start, stop, columns = part
    values = source.read(name, key, start, stop)
    if columns is not None:
        values = values.view(-1, parameter.shape[1])[:, columns].reshape(-1)
    into[: values.numel()].copy_(values)


def _order(model: torch.nn.Module, trainer: StepContext) -> list[str]:
    """Names of the trained parameters as the Trainer's optimizer numbers them (create_optimizer, Transformers' and ours)."""
    decayed = {shares.name_of(name) for name in trainer.get_decay_parameter_names(model)}
    names = [shares.name_of(name) for name, parameter in model.named_parameters() if parameter.requires_grad]
    names.sort(key=lambda name: name not in decayed)  # stable
    recipe = trainer.run.settings.recipe
    if parameter_groups.divides(recipe.training):
        names = parameter_groups.order(model, names, recipe.training)
    return parameter_groups.order_lora_plus(names) if recipe.model.loraplus_lr_ratio else names


def _load_loss_scale(trainer: StepContext, checkpoint: Path, source: states.States) -> None:
    """Load fp16's loss scale, and nothing else: engines count differently how long it has held."""
    kept = checkpoint / "scaler.pt"
    scale = unpickling.load(kept).get("scale") if kept.is_file() else source.loss_scale()
    if scale is not None:
        trainer.engine.set_loss_scale(trainer, {"scale": float(scale)})
