"""Continue from a checkpoint of another engine or another number of ranks: weights, moments, schedule, loss scale.

Each rank reads its own share of every parameter, one after another, and writes it into its running engine. The checkpoint stays
as it is, and nothing is converted on the disk. checkpoint/compatibility.py says when that is needed, and what cannot be done.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...errors import UserError
from ..checkpoint import compatibility, states
from ..model.adapter_weights import saved_names
from ..upstream import unpickling
from . import lora_plus, parameter_groups
from .hooks import Feature

if TYPE_CHECKING:
    from .trainer import Trainer

# Of modules that wrap others: they are in a parameter's name while it is trained, and in no checkpoint.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
# (parameter, start, stop, tensor that the optimizer steps, offset in it, of each row only these columns)
Share = tuple[torch.nn.Parameter, int, int, Tensor, int, slice | None]


@torch.no_grad()
def reshard(trainer: "Trainer", checkpoint: Path, moments: bool = True) -> None:
    """Set all that training keeps from `checkpoint` into the engine that runs. A collective.

    moments: False leaves the optimizer, the schedule and the loss scale as they are, for who wants only a model.
    Raises UserError where the checkpoint lacks a parameter of the model.
    """
    names = {
        parameter: name_of(name) for name, parameter in trainer.model.named_parameters() if parameter.requires_grad
    }
    order = _order(whole := trainer.engine.whole_model(trainer), trainer)
    source = trainer.engine.reading(states.of_checkpoint(checkpoint, order, saved_names(whole, order)), trainer)
    if missing := [name for name in names.values() if name not in source.sizes]:
        problem = f"it lacks {len(missing)} of the {len(names)} trained parameters, e.g. {missing[0]}"
        raise UserError(str(checkpoint), problem, "continue with the recipe that wrote it")
    moments_of: dict[int, dict[str, Any]] = {}
    for parameter, start, stop, owner, offset, columns in trainer.engine.shares(trainer):
        name, values = names[parameter], flat(owner)
        with states.telling(checkpoint):
            _copy(source, name, states.WEIGHT, (start, stop, columns), values[offset:], parameter)
        if not moments:
            continue
        kept = moments_of.setdefault(id(owner), {})
        with states.telling(checkpoint):
            for key in source.moments_of(name):
                kept.setdefault(key, torch.zeros_like(values))
                _copy(source, name, key, (start, stop, columns), kept[key][offset:], parameter)
        if (step := source.step(name)) is not None:
            kept["step"] = step
    for name, buffer in trainer.model.named_buffers():
        if (saved := source.buffer(name_of(name))) is not None:
            buffer.copy_(saved)
    if moments:
        trainer.engine.load_moments(trainer, moments_of)
        own, schedule = trainer.lr_scheduler.state_dict(), unpickling.load(checkpoint / "scheduler.pt")
        # One of each for a parameter group, and ZeRO leaves out empty ones. All have the same schedule.
        schedule |= {key: own[key] for key in ("lr_lambdas", "base_lrs", "_last_lr")}
        trainer.lr_scheduler.load_state_dict(schedule)
        _load_loss_scale(trainer, checkpoint, source)
    trainer.engine.spread_weights(trainer)


def _copy(source: states.States, name: str, key: str, part: Any, into: Tensor, parameter: Tensor) -> None:
    """Read a share of a parameter's weight or moment into the beginning of a flat tensor."""
    start, stop, columns = part
    values = source.read(name, key, start, stop)
    if columns is not None:
        values = values.view(-1, parameter.shape[1])[:, columns].reshape(-1)
    into[: values.numel()].copy_(values)


class OtherRanks(Feature):
    """Gives each rank random numbers of its own where another number of ranks goes on, from the run's seed and the step only.

    What they decide (LoRA's dropout) cannot be what the other number of ranks would have had.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.checkpoint: Path | None = None

    def begin(self, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before the first step that a run trains: by then Transformers has loaded what this rank's number had."""
        checkpoint, self.checkpoint = self.checkpoint, None
        run = self.trainer.run
        if checkpoint and (not self.trainer.replica.own or compatibility.is_divided_otherwise(checkpoint, run)):
            # The ranks of a tensor group must drop the same.
            numbers = np.random.SeedSequence(
                (run.settings.recipe.training.seed, state.global_step, self.trainer.data_rank)
            )
            transformers.set_seed(int(numbers.generate_state(1)[0]))


def name_of(name: str) -> str:
    """A parameter's name in the model, without what wrappers add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _order(model: Any, trainer: "Trainer") -> list[str]:
    """Names of the trained parameters as the Trainer's optimizer numbers them (create_optimizer, Transformers' and ours)."""
    decayed = {name_of(name) for name in trainer.get_decay_parameter_names(model)}
    names = [name_of(name) for name, parameter in model.named_parameters() if parameter.requires_grad]
    names.sort(key=lambda name: name not in decayed)  # stable
    recipe = trainer.run.settings.recipe
    if parameter_groups.divides(recipe.training):
        names = parameter_groups.order(model, names, recipe.training)
    return lora_plus.order(names) if recipe.model.loraplus_lr_ratio else names


def shares_of(model: torch.nn.Module) -> Iterator[Share]:
    """Yield what this rank has of each trained parameter, which the optimizer steps itself."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        offset = 0
        for start, stop, columns in _ranges(parameter):
            yield parameter, start, stop, parameter, offset, columns
            offset += stop - start


def _ranges(parameter: Tensor) -> list[tuple[int, int, slice | None]]:
    """Where, in the flattened whole, what this rank holds of a parameter lies: a range of rows under FSDP2, of these only some
    columns where a tensor group has divided them, and a range of each of a rank's experts where experts are divided too."""
    if not isinstance(parameter, DTensor):
        return [(0, parameter.numel(), None)]
    if not parameter.to_local().numel():
        return [(0, 0, None)]
    chunk, shape = parameter.__create_chunk_list__()[0], parameter.shape
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if len(shape) == 2 and chunk.sizes[1] != shape[1]:
        start, columns = chunk.offsets[0] * shape[1], slice(chunk.offsets[1], chunk.offsets[1] + chunk.sizes[1])
        return [(start, start + chunk.sizes[0] * shape[1], columns)]
    cut = max((dim for dim, size in enumerate(chunk.sizes) if size != shape[dim]), default=0)  # the last one divided
    first, length = sum(map(operator.mul, chunk.offsets, strides)), chunk.sizes[cut] * strides[cut]
    starts = [first + sum(map(operator.mul, at, strides)) for at in itertools.product(*map(range, chunk.sizes[:cut]))]
    return [(start, start + length, None) for start in starts]


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, in the same memory and without a gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flat(owner: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, in one dimension and in the same memory."""
    return local_part(owner).view(-1)


def _like(owner: Tensor, flat: Tensor) -> Tensor:
    if not isinstance(owner, DTensor):
        return flat.view(owner.shape)
    local, shape, stride = flat.view(owner.to_local().shape), owner.shape, owner.stride()
    return DTensor.from_local(local, owner.device_mesh, owner.placements, run_check=False, shape=shape, stride=stride)


def load_moments(optimizer: Any, moments_of: Mapping[int, dict[str, Any]], by_group: bool) -> None:
    """Give an optimizer of torch's kind moments.

    moments_of: id of the tensor that it steps -> that one's moments and step; by_group: it counts steps in its groups
    """
    loaded: dict[int, dict[str, Any]] = {}
    owners = [owner for group in optimizer.param_groups for owner in group["params"]]
    for number, owner in enumerate(owners):
        kept = dict(moments_of[id(owner)])
        step = kept.pop("step", None)
        # In the order in which torch's optimizers make them; of each its own step: an optimizer adds to it in place.
        counted = {} if step is None or by_group else {"step": torch.tensor(step)}
        loaded[number] = counted | {key: _like(owner, flat) for key, flat in kept.items()}
    groups = optimizer.state_dict()["param_groups"]
    if by_group:
        groups = [{**group, "step": int(step)} for group in groups]
    optimizer.load_state_dict({"state": {n: state for n, state in loaded.items() if state}, "param_groups": groups})


def _load_loss_scale(trainer: "Trainer", checkpoint: Path, source: states.States) -> None:
    """fp16's. Only the scale: engines count differently for how long it has held."""
    kept = checkpoint / "scaler.pt"
    scale = unpickling.load(kept).get("scale") if kept.is_file() else source.loss_scale()
    if scale is not None:
        trainer.engine.set_loss_scale(trainer, {"scale": float(scale)})
