"""A gloo group at an address of this host, with one time-out for its connections and another for its transfers.

torch's public constructor takes the address of an environment variable, and one time-out for both
(torch/distributed/distributed_c10d.py builds groups by ProcessGroupGloo._Options as well; the stubs call it Options).
"""

import datetime
from typing import Any

import torch.distributed as dist


def group(
    store: Any, rank: int, size: int, address: str, connecting: datetime.timedelta, transfers: datetime.timedelta
) -> Any:
    """A ProcessGroupGloo. Raises RuntimeError where not all are connected in time."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = connecting
    found = dist.ProcessGroupGloo(store, rank, size, options)
    found._set_default_timeout(transfers)
    return found
