"""Replicas that train by themselves and meet every `sync_every` steps: how many a run has, and what cannot be one."""

from ..cluster import World
from ..errors import UserError
from ..errors.console import counted
from ..recipe.flags import Settings
from .axes import Axes

OUTER = ("sync_replica", "outer_optim", "outer_learning_rate", "outer_momentum", "sync_precision", "sync_fragments")
OF_NESTEROV = ("outer_learning_rate", "outer_momentum")
_NO_AXES = "each of its ranks has a part of the model that no other replica's rank has in the same place"


def touched(settings: Settings) -> list[str]:
    """The keys of replicas that do not have their defaults."""
    training = settings.recipe.training
    return [key for key in OUTER if getattr(training, key) != type(training).model_fields[key].default]


def count(settings: Settings, world: World, groups: int) -> int:
    """How many replicas the ranks of a run are divided into; 1 without sync_every.

    groups: of HSDP, which are its replicas; else 1. Raises UserError where there is one replica alone.
    """
    training = settings.recipe.training
    if training.sync_every is None:
        return 1
    many_hosts = 1 < world.local_size < world.size
    unit = training.sync_replica
    if unit == "auto" and groups > 1:
        found = groups
    elif unit == "host" or (unit == "auto" and many_hosts):
        found, rest = divmod(world.size, world.local_size)
        if rest:
            problem = (
                f"{counted(world.size, 'rank')} on hosts of different sizes: a replica has as many ranks as any other"
            )
            raise UserError(settings.place("sync_replica"), problem, "give all hosts the same number of slots")
    else:
        found = world.size
    if found < 2 and not settings.rehearse:
        what = f"{counted(world.size, 'rank')} on {counted(world.hosts, 'host')}"
        cure = "start more ranks or hosts, set sync_replica: rank, or leave sync_every out"
        raise UserError(settings.place("sync_every"), f"{what}: a single replica has nobody to meet", cure)
    return max(1, found)


def check_keys(settings: Settings, axes: Axes, source: str) -> None:
    """Raises UserError for keys of replicas without sync_every, and for what cannot be averaged."""
    training, changed = settings.recipe.training, touched(settings)
    if training.sync_every is None:
        if changed:
            problem = f"{changed[0]} is {getattr(training, changed[0])}, but without sync_every nothing is averaged"
            raise UserError(settings.place(changed[0]), problem, "set sync_every: 50, or leave the key out")
        return
    if training.outer_optim == "average" and (of := [key for key in changed if key in OF_NESTEROV]):
        problem = f"{of[0]} is {getattr(training, of[0])}, and outer_optim average has no such thing"
        raise UserError(settings.place(of[0]), problem, "set outer_optim: nesterov, or leave the key out")
    if training.sync_fragments > training.sync_every:
        problem = f"{training.sync_fragments} fragments in {counted(training.sync_every, 'step')}: each needs a step of its own"
        raise UserError(settings.place("sync_fragments"), problem, f"set it to {training.sync_every} at most")
    if axes:
        raise UserError(
            source, f"sync_every does not go with {axes}: {_NO_AXES}", "use DDP, ZeRO or FSDP2 in a replica"
        )
    for key, wrong, why in (
        ("nonfinite", training.nonfinite == "rollback", "rollback would take one replica back alone: use skip or stop"),
        ("loss_spike", training.loss_spike is not None, "it would take one replica back alone: leave it out"),
    ):
        if wrong:
            problem = f"{key} does not go with sync_every"
            raise UserError(settings.place(key), problem, why)
    if settings.recipe.data.streaming:
        problem = "streaming does not go with sync_every: each replica would read and tokenise every window"
        raise UserError(settings.place("streaming"), problem, "prepare the data once (streaming: false)")
