"""The ranks of a run divided into replicas: each a torch world of its own, and across them groups in which they meet.

Rank i of a replica meets rank i of every other one, in a process group besides torch's default world. Engines know nothing of
it: for them the world is the replica. Numbers are sent as bytes: fp32, bf16, or int8 with a scale for each block.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from .. import upstream
from ..distributed import exchange, one_host, process_group, ranks
from ..distributed.exchange import T
from ..distributed.process import this_process
from ..host.cluster import World

READ_BY_ENGINES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # LOCAL_RANK stays: it is the device


class Peers:
    """The ranks with this one's place in the other replicas, this one among them, in the order of replicas.

    before: of the environment, what the launcher wrote
    """

    elastic = False

    def __init__(self, store: dist.Store, replica: int, count: int, before: dict[str, str]) -> None:
        self.replica, self.count, self.before = replica, count, before
        with one_host.nobody_else():
            self.groups = [
                dist.ProcessGroupGloo(
                    dist.PrefixStore(name, store), replica, count, timeout=process_group.COLLECTIVE_TIMEOUT
                )
                for name in ("main", "background")  # two threads of a rank must not share one
            ]

    def gather(self, value: T) -> list[T]:
        """`value` of each, on all of them. exchange.py says what may be sent, and what is raised."""
        return exchange.gather(value, self._all, [f"replica {number}" for number in range(self.count)])

    def wait(self, work: dist.Work) -> None:
        """Wait for a transfer."""
        work.wait()

    def _all(self, value: Tensor, background: bool = False) -> list[Tensor]:
        tensors = [torch.empty_like(value) for _ in range(self.count)]
        self.wait(self.groups[background].allgather([tensors], [value]))
        return tensors

    def mean(self, values: Tensor, precision: str, background: bool = False) -> Tensor:
        """The mean of a flat fp32 tensor over all of them, the same to the last bit on each.

        Each averages its part of what all have sent it, and sends the mean to all: 2 (n - 1) / n of the values leave each of
        n, as in a ring. What is sent has `precision` both times; sums are of fp32.
        """
        part = -(-values.numel() // self.count)
        part += -part % BLOCK
        padded = torch.zeros(self.count, part)
        padded.view(-1)[: values.numel()] = values
        sent = encode(padded, precision)
        got = torch.empty_like(sent)
        self.wait(self.groups[background].alltoall_base(got, sent, [], []))
        own = encode(decode(got, precision).mean(0, keepdim=True), precision)
        means = torch.cat(self._all(own, background))
        return decode(means, precision).view(-1)[: values.numel()]

    def rejoin(self) -> None:
        """Bring this process back into the launcher's world, at the end of a run. A collective of all ranks."""
        self.gather(None)
        self.groups = []
        for key in READ_BY_ENGINES:  # deepspeed's launcher sets no LOCAL_WORLD_SIZE
            os.environ.pop(key, None)
        os.environ.update(self.before)
        store = dist.PrefixStore(f"brigade/all-{this_process.turn('division')}", this_process.store)
        _renew(store, int(self.before["RANK"]), int(self.before["WORLD_SIZE"]))
        ranks.barrier()


def divide(world: World, count: int) -> Peers:
    """Leave the launcher's world for the replica's, which is `world`, and return the peers of this rank in the others. A
    collective of all ranks, before any engine looks at it.

    count: of replicas
    """
    this_process.store = process_group.store_of_all()  # of the launcher's world
    store = dist.PrefixStore(f"brigade/replicas-{this_process.turn('division')}", this_process.store)
    ranks.barrier()
    before = {key: os.environ[key] for key in READ_BY_ENGINES if key in os.environ}
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_WORLD_SIZE=str(world.local_size))
    _renew(dist.PrefixStore(f"replica-{world.replica}", store), world.rank, world.size)
    return Peers(dist.PrefixStore(f"peers-{world.rank}", store), world.replica, count, before)


def _renew(store: dist.Store, rank: int, size: int) -> None:
    backend = dist.get_backend_config()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=process_group.COLLECTIVE_TIMEOUT)
    upstream.forget_world()


BLOCK = 256  # values with one scale: 4 bytes, 1.6 % of the int8 ones
LARGEST = 127.0


def encode(values: Tensor, precision: str) -> Tensor:
    """fp32 values, in rows whose length is a multiple of BLOCK, as bytes in as many rows.

    int8: v = scale x q with q from -127 to 127 and scale = max |v| / 127 of a block, rounded to the nearest. What rounding leaves
    out is lost. A block with a value that is not finite decodes to NaN.
    """
    if precision == "int8":
        blocks = values.view(len(values), -1, BLOCK)
        scales = blocks.abs().amax(-1, keepdim=True) / LARGEST
        whole = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().nan_to_num(0).to(torch.int8)
        return torch.cat(
            [whole.view(len(values), -1).view(torch.uint8), scales.view(len(values), -1).view(torch.uint8)], 1
        )
    return (values.bfloat16() if precision == "bf16" else values.contiguous()).view(torch.uint8)


def decode(sent: Tensor, precision: str) -> Tensor:
    """What encode() has made bytes of."""
    if precision == "int8":
        count = sent.shape[1] // (BLOCK + 4) * BLOCK
        whole = sent[:, :count].contiguous().view(torch.int8).view(len(sent), -1, BLOCK)
        scales = sent[:, count:].contiguous().view(torch.float32)
        return (whole * scales[:, :, None]).view(len(sent), -1)
    return sent.contiguous().view(torch.bfloat16).float() if precision == "bf16" else sent.view(torch.float32)
