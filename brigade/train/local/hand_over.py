"""What a replica that joins an elastic run takes over from one that is in it: all that training keeps, out of its memory."""

import io
import pickle

import torch
from torch import Tensor

from ...errors.tables import Document
from ..distributed import exchange
from ..engines import shares
from ..engines.engine import StepContext
from ..recipe.training_section import COUNT_IN_GROUPS
from .outer import Outer

# Of a TrainerState, what the run has reached.
REACHED = (
    "global_step",
    "epoch",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)


def pack(trainer: StepContext, outer: Outer, counts: Document) -> bytes:
    """Pack what this rank keeps for the same rank of another replica: synchronised weights, momentum, optimizer states, schedule,
    loss scale and place in the run. counts: of the whole run so far"""
    data = io.BytesIO()
    kept = {
        "last": outer.last,
        "momentum": outer.momentum,
        "moments": _moments(trainer),
        "schedule": trainer.lr_scheduler.state_dict(),
        "scale": trainer.engine.loss_scale(trainer),
        "state": {key: getattr(trainer.state, key) for key in REACHED},
        "counts": counts,
    }
    torch.save(kept, data)
    return data.getvalue()


@torch.no_grad()
def unpack(trainer: StepContext, outer: Outer, data: bytes, sender: str) -> Document:
    """Take over what pack() made, and return its counts. A collective of the replica.

    Raises UserError, at `sender`, for other data.
    """
    try:
        kept = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError):
        raise exchange.refused(sender, "what it hands over cannot be read as weights and states") from None
    outer.last, outer.momentum = kept["last"], kept["momentum"]
    for key, value in kept["state"].items():
        setattr(trainer.state, key, value)
    owners = _owners(trainer)
    trainer.engine.load_moments(
        trainer, {id(owner): moments for owner, moments in zip(owners, kept["moments"], strict=True)}
    )
    trainer.lr_scheduler.load_state_dict(kept["schedule"])
    if kept["scale"] is not None:
        trainer.engine.set_loss_scale(trainer, kept["scale"])
    for number, values in enumerate(outer.last):
        outer.write(number, values)
    outer.spread()
    return kept["counts"]


def _owners(trainer: StepContext) -> list[Tensor]:
    """The tensors that this rank's optimizer steps, each once, in an order that is the same in all replicas."""
    return list({id(owner): owner for _, _, _, owner, _, _ in trainer.engine.shares(trainer)}.values())


def _moments(trainer: StepContext) -> list[dict[str, Tensor | float]]:
    """Return, of each owner, its moments, flat, and its step: as an engine's load_moments takes them."""
    optimizer = trainer.engine.optimizer(trainer)
    steps = {}  # of optimizers that count in their groups
    if trainer.run.settings.recipe.training.optim in COUNT_IN_GROUPS:
        steps = {id(owner): group["step"] for group in optimizer.param_groups for owner in group["params"]}
    found = []
    for owner in _owners(trainer):
        kept = dict(optimizer.state.get(owner, {}))
        step = kept.pop("step", steps.get(id(owner)))
        moments = {key: shares.flat(value).cpu().clone() for key, value in kept.items()}
        found.append(moments | ({} if step is None else {"step": float(step)}))
    return found
