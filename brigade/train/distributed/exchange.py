"""What ranks tell each other, as JSON: reading it runs no code, whoever sent it.

Torch's store and gloo's ports do not ask who connects, so a stranger in a cluster's network can take a rank's place. Hence no
pickles: a message is read into None, booleans, numbers, text, lists, tuples and dicts of these, and nothing else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Store

LARGEST = 2**28  # bytes of a message: names and sizes of all files of the largest checkpoints take a tenth of it
CURE = "see that all hosts run the same packages, and that nobody else can reach their ports (docs/security.md)"
_MADE_OF: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "dict": dict}  # from a list; of a dict: of pairs

T = TypeVar("T")


def encode(value: object) -> bytes:
    """`value` as JSON. What derives from a builtin type (np.float64, OrderedDict) arrives as that type.

    Raise TypeError for a type that is not sent, which only the sender's program can mend.
    """
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def decode(data: bytes | str, sender: str) -> Any:
    """The value that encode() made `data` of. Raise UserError, at `sender`, for anything else."""
    try:
        return json.loads(data, object_hook=_made)
    except (ValueError, TypeError, RecursionError):
        raise refused(sender, "what it sent is not a message of a rank") from None


def gather(value: T, all_gather: Callable[[Tensor], list[Tensor]], senders: list[str]) -> list[T]:
    """`value` of each of a group, in its order, by two collectives: sizes, and messages padded to the largest.

    all_gather: a tensor of each, of equal shapes; senders: how an error calls each of them
    """
    import torch

    data = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
    sizes = [int(size) for size in all_gather(torch.tensor([data.numel()]))]
    for sender, size in zip(senders, sizes, strict=True):
        if not 0 < size <= LARGEST:
            raise refused(sender, f"it announces a message of {size:,} bytes (1 to {LARGEST:,})")
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: data.numel()] = data
    rows = zip(all_gather(padded), sizes, senders, strict=True)
    return [decode(row[:size].cpu().numpy().tobytes(), sender) for row, size, sender in rows]


def gather_in_group(value: T, group: ProcessGroup | None = None) -> list[T]:
    """`value` of each rank of a process group of torch's, in its order. A collective of the group; None: of all ranks."""
    import torch
    import torch.distributed as dist

    # Over gloo where the group has it: NCCL takes tensors of a GPU.
    on_host = "cpu:" in str(dist.get_backend_config(group))
    device = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
    ranks = dist.get_process_group_ranks(group)

    def all_gather(mine: Tensor) -> list[Tensor]:
        mine = mine.to(device)
        tensors = [torch.empty_like(mine) for _ in ranks]
        dist.all_gather(tensors, mine, group=group)
        return tensors

    return gather(value, all_gather, [f"rank {rank}" for rank in ranks])


def refused(sender: str, problem: str) -> UserError:
    """The error of a receiver: the sender is another program, or another version of this one."""
    return UserError(f"an exchange with {sender}", problem, CURE)


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(each)] for key, each in value.items()]}
    raise TypeError(f"ranks do not send each other a {type(value).__name__}: give them its values (exchange.py)")


def _made(found: dict[str, object]) -> object:
    ((kind, items),) = found.items()
    if kind not in _MADE_OF or not isinstance(items, list):
        raise ValueError(kind)
    return _MADE_OF[kind](items)


class Board:
    """What background threads of all ranks tell each other: collectives there would come in another order on each rank than those
    of the main threads. This is the board of a run of one process; others have torch's store."""

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
