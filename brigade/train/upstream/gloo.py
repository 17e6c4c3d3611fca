"""Groups of gloo: one at an address of this host, with one time-out for its connections and another for its transfers; and a
guard around each that torch makes.

torch's public constructor takes the address of an environment variable, and one time-out for both
(torch/distributed/distributed_c10d.py builds groups by ProcessGroupGloo._Options as well; the stubs call it Options).
"""

import datetime
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps

import torch.distributed as dist
from torch.distributed import Store, distributed_c10d


def group(
    store: Store, rank: int, size: int, address: str, connecting: datetime.timedelta, transfers: datetime.timedelta
) -> "dist.ProcessGroupGloo":
    """A ProcessGroupGloo. Raises RuntimeError where not all are connected in time."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = connecting
    found = dist.ProcessGroupGloo(store, rank, size, options)
    found._set_default_timeout(transfers)
    return found


def around_each_group(guard: Callable[[], AbstractContextManager[None]]) -> None:
    """Let each process group that torch makes from here on, whoever asks for it, be made inside of guard()."""
    make = distributed_c10d._new_process_group_helper
    if hasattr(make, "__wrapped__"):  # by an earlier run of this process
        return

    @wraps(make)
    def guarded(*arguments: object, **named: object) -> object:
        with guard():
            return make(*arguments, **named)

    distributed_c10d._new_process_group_helper = guarded
