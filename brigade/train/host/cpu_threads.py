"""How many threads a rank's work on the CPU has: offloaded optimizers, loading, conversion. Needs only the standard library.

torchrun and accelerate launch set OMP_NUM_THREADS=1 for their ranks where nobody has set it (torch/distributed/run.py:
config_from_args; accelerate/commands/launch.py). One thread takes minutes for what a rank's share of the cores does in seconds.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress

from . import control_groups, processes

VARIABLE = "OMP_NUM_THREADS"
# A word of a launcher's command line; its own flag for the number is a choice of the user's.
_LAUNCHER = re.compile(
    r"(?:^|/)(?:torchrun|accelerate|deepspeed)$|torch[./]distributed[./](?:run|launch)|^deepspeed\.launcher"
)
_CHOSEN = re.compile(r"^--num[_-]cpu[_-]threads[_-]per[_-]process")


def share(ranks: int) -> int:
    """Return the threads of each of so many ranks of a host: the cores that this process may use, divided."""
    return max(1, int(control_groups.cores() // ranks))


def of_rank(ranks: int) -> int:
    """Return the threads of this process, one of so many ranks of a host.

    One that was bound to cores of its own (by srun, or numactl) has those. Several may be bound to the same, so that it takes no
    more than a rank's share of all cores of the host.
    """
    if is_bound():
        return max(1, min(int(control_groups.cores()), (os.cpu_count() or 1) // ranks))
    return share(ranks)


def is_bound() -> bool:
    """Whether this process may use fewer cores than the process that started it."""
    with suppress(OSError, AttributeError):  # no such call but on Linux
        return len(os.sched_getaffinity(0)) < len(os.sched_getaffinity(os.getppid()))
    return False


def is_chosen() -> bool:
    """Whether a user has chosen the number of threads of this process, and not a launcher.

    A launcher's number is not in the environment that the launcher itself was started with. So of the processes above this one
    the first tells that has none. Where /proc does not say, a number that is set counts as the user's.
    """
    if os.environ.get(VARIABLE) != "1":
        return VARIABLE in os.environ
    for pid in _above(os.getpid()):
        given = processes.environment(pid)
        if given is None:
            return True
        if VARIABLE not in given:
            words = processes.command(pid)
            return any(map(_CHOSEN.match, words)) or not any(map(_LAUNCHER.search, words))
    return True


def _above(pid: int) -> Iterator[int]:
    """Yield the parent of a process, its parent, and so on."""
    while pid > 1:
        pid = processes.parent(pid)
        yield pid
