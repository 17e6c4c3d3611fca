"""What background threads of all ranks tell each other: through torch's store, for collectives there would come in another order
on each rank than those of the main threads."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store


class Board:
    """The board of a run of one process, which needs no store."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}

    def put(self, key: str, value: Mapping[str, object]) -> None:
        self.entries[key] = value

    def get(self, key: str) -> Any:
        """What was put there, as soon as it is."""
        return self.entries[key]


class _Store(Board):
    def __init__(self, store: Store) -> None:
        self.store = store

    def put(self, key: str, value: Mapping[str, object]) -> None:
        self.store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        pause = 0.002
        while not self.store.check([key]):  # a waiting get() would keep the store from this process's main thread
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        return json.loads(self.store.get(key))


def board(world_size: int) -> Board:
    """The board of all ranks. Raise torch's errors, here and later, when rank 0 is gone."""
    if world_size == 1:
        return Board()
    from torch.distributed.distributed_c10d import _get_default_store

    return _Store(_get_default_store())
