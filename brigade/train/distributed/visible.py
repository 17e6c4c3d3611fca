"""Which GPUs a rank may see: those of CUDA_VISIBLE_DEVICES where the run was started, which DeepSpeed's launcher replaces.

`deepspeed` writes the numbers of a host's slots over the variable (launcher/launch.py: set_visible_devices_envs), and deletes it
before where --num_gpus, --include or --exclude is given (launcher/runner.py: main): ranks would be on other people's GPUs. What
`launch` and `make demo` start hands the list on under a name of our own. Who types `deepspeed` is told, and refused where ranks
were given a GPU that was not asked for. On further hosts that `deepspeed` reaches by itself nothing was asked for: it hands no
CUDA_* on.
"""

import os
from typing import NamedTuple

from ...errors import UserError
from ..host import processes
from ..host.cluster import World

VISIBLE = "CUDA_VISIBLE_DEVICES"
ASKED = "BRIGADE_VISIBLE_DEVICES"  # VISIBLE as it was where the run was started
BY_DEEPSPEED = "CROSS_SIZE"  # a variable of ranks that DeepSpeed's launcher starts, by `accelerate launch` too
HIDDEN = ("", "-1", "none", "nodevfiles")  # a first word of VISIBLE with which a program sees no GPU
# From a rank up to `deepspeed`: the process that starts ranks, and under `launch` one that watches over the rank.
_GENERATIONS = 4


class Gpus(NamedTuple):
    """asked: VISIBLE where the run was started, None where it was not set, names none, or a launcher kept it; given: what this
    rank sees."""

    asked: str | None = None
    given: str = ""

    @property
    def others(self) -> list[str]:
        """The GPUs among the given ones that were not asked for. A number and a UUID cannot be compared: they count as others."""
        return [name for name in entries(self.given) if name not in entries(self.asked or "")] if self.asked else []


def entries(visible: str) -> list[str]:
    """Return the devices that a list names; CUDA takes it as far as the first name that is none."""
    names = [name.strip() for name in visible.split(",")]
    end = next((number for number, name in enumerate(names) if name.lower() in HIDDEN), len(names))
    return names[:end]


def restore() -> str | None:
    """Let this process see the GPUs that were handed on to it, which are returned; None: nothing was, or it sees them already.
    Comes before torch is imported: CUDA reads the variable once."""
    asked = os.environ.pop(ASKED, None)
    if asked is not None:
        os.environ[VISIBLE] = asked
    return asked


def settle() -> Gpus:
    """Let this process see the GPUs that were asked for; none where ranks were given others, so that it can be refused without
    taking them. Comes first, as restore()."""
    asked = restore()
    if asked is None and BY_DEEPSPEED in os.environ:
        asked = _where_it_was_started()
    if asked is None:
        return Gpus()
    if not entries(asked):  # who asks for a CPU gets one
        os.environ[VISIBLE] = asked
    gpus = Gpus(asked or None, os.environ.get(VISIBLE, ""))
    if gpus.others:
        os.environ[VISIBLE] = ""
    return gpus


def check(gpus: Gpus, world: World) -> None:
    """Say which GPUs were asked for and which are used. Raise UserError where these are others."""
    if gpus.others:
        problem = f"{VISIBLE}={gpus.asked} asks for these GPUs, but `deepspeed` gave GPUs {gpus.given} to its ranks"
        cure = "python -m brigade launch, or torchrun --nproc_per_node, which keep the variable; with `deepspeed` choose by "
        cure += f"--include {world.host if world.hosts > 1 else 'localhost'}:NUMBERS and unset {VISIBLE}"
        raise UserError(f"host {world.host}", problem, cure)
    used = entries(gpus.given)[: world.local_size]
    if used and world.is_main_rank:
        print(f"{VISIBLE}={gpus.asked} asks for GPUs, and this host's ranks use {', '.join(used)}")


def _where_it_was_started() -> str | None:
    """Return VISIBLE as the outermost of DeepSpeed's processes above this one found it: what a process began with stays in /proc,
    whatever it deletes. None where it was not set."""
    found, process = None, os.getppid()
    for _ in range(_GENERATIONS):
        words = processes.command(process)
        if "deepspeed.launcher.launch" in words or {word.rpartition("/")[2] for word in words} & {"deepspeed", "ds"}:
            found = (processes.environment(process) or {}).get(VISIBLE, found)
        process = processes.parent(process)
    return found
