"""Digests of what several ranks hold alike, compared between them, so that a rank which holds something else is named.

Each rank says what it holds: a tensor or a value, its name, and which part of the whole it is. Ranks with the same name and part
must hold the same bits, whatever strategy has laid them there. So no engine says who has to agree with whom.
"""

import base64
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

COPIED = 2**26  # bytes that are copied at once where a tensor does not begin at a multiple of WORD
WORD = 8  # bytes
LIKE = 0.1  # relative difference of two norms below which tensors are alike up to rounding


@dataclass(frozen=True)
class Held:
    """What a rank holds, of which others may hold the same.

    name: in words; part: of the whole; value: a tensor, or what a digest is made of by its text
    rounded: kernels may have rounded differently, so that only a difference of norms beyond LIKE is one
    """

    name: str
    part: Any
    value: Any
    rounded: bool = False

    @property
    def key(self) -> int:
        return xxhash.xxh3_64_intdigest(repr((self.name, self.part, self.rounded)).encode())

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, Tensor)

    @property
    def detail(self) -> tuple[str, float | None, str]:
        """(name, norm where only that is compared, a value in words)"""
        norm = float(torch.linalg.vector_norm(self.value.detach().float())) if self.rounded else None
        return self.name, norm, "" if self.is_tensor else str(self.value)


@dataclass(frozen=True)
class Difference:
    """A thing that ranks do not hold alike.

    of: ranks that should; odd: those that differ from most of them, or all of `of` where no majority agrees
    values: of each rank in `of`, in words; "" for tensors
    """

    name: str
    of: tuple[int, ...]
    odd: tuple[int, ...]
    values: tuple[str, ...]

    @property
    def known(self) -> bool:
        """Whether a majority tells which ranks are wrong."""
        return len(self.odd) < len(self.of)


@torch.no_grad()
def total(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as integers of 64 bits, modulo 2**64: a scalar, int64, on the tensor's device.

    It is exact, and no order of summation changes it. The host does not wait for it.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = data.numel() // WORD * WORD
    whole, rest = data[:words], data[words:]
    aligned = data.storage_offset() % WORD == 0 and data.data_ptr() % WORD == 0
    parts = [whole] if aligned else [part.clone() for part in whole.split(COPIED)]
    sums = [part.view(torch.int64).sum() for part in parts if part.numel()]
    if rest.numel():
        sums.append(torch.cat([rest, rest.new_zeros(WORD - rest.numel())]).view(torch.int64)[0])
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64, device=tensor.device)


def digests(held: Iterable[Held]) -> dict[int, int]:
    """key -> digest of each thing, in order. Waits for the device once."""
    held = list(held)
    found = {each.key: 0 if each.is_tensor else xxhash.xxh3_64_intdigest(str(each.value).encode()) for each in held}
    totals: dict[int, Tensor] = {}  # by the tensor's id: it may stand under two names
    for each in held:
        if each.is_tensor and id(each.value) not in totals:
            totals[id(each.value)] = total(each.value)
    numbers: dict[int, int] = {}
    for device in {each.device for each in totals.values()}:
        here = {number: each for number, each in totals.items() if each.device == device}
        sums = torch.stack(list(here.values())).cpu().numpy().view(np.uint64).tolist()
        numbers |= dict(zip(here, sums, strict=True))
    return found | {each.key: numbers[id(each.value)] for each in held if each.is_tensor}


class Comparison:
    """Compares what all ranks hold, again and again.

    gather: a value of each rank, on every rank
    groups: from the first comparison on, (ranks that hold the same things, keys of these; none where this rank is not of them)
    """

    def __init__(self, gather: Callable[[Any], list[Any]], rank: int) -> None:
        self.gather, self.rank = gather, rank
        self.signatures: list[int] = []
        self.groups: list[tuple[tuple[int, ...], list[int]]] = []

    def compare(self, held: list[Held]) -> Difference | None:
        """Return the first thing that differs, in the group with most ranks. A collective.

        What no other rank holds, such as a shard of FSDP2's, has no digest: it would be read for nobody.
        """
        things = {each.key: each for each in held}
        signatures = self.gather(_hash(things))
        if signatures != self.signatures:
            self.groups, self.signatures = self._grouped(list(things), signatures), signatures
        found = digests(things[key] for _, keys in self.groups for key in keys)
        own = [_hash(found[key] for key in keys) if keys else None for _, keys in self.groups]
        of_ranks = self.gather(own)
        for number, (ranks, keys) in enumerate(self.groups):
            if len({of_ranks[rank][number] for rank in ranks}) > 1:
                details = self.gather([(found[key], *things[key].detail) for key in keys])
                difference = _first(ranks, [details[rank] for rank in ranks])
                if difference:
                    return difference
        return None

    def _grouped(self, keys: list[int], signatures: list[int]) -> list[tuple[tuple[int, ...], list[int]]]:
        """Who holds what: self.groups, those of many ranks first. One rank of each signature sends its keys. A collective."""
        firsts: dict[int, int] = {}
        for rank, signature in enumerate(signatures):
            firsts.setdefault(signature, rank)
        mine = signatures[self.rank]
        packed = base64.b64encode(np.array(keys, dtype=np.uint64).tobytes()).decode()
        sent = self.gather(packed if firsts[mine] == self.rank else "")
        holders: dict[int, list[int]] = {}  # signatures
        for signature, first in firsts.items():
            for key in np.frombuffer(base64.b64decode(sent[first]), dtype=np.uint64).tolist():
                holders.setdefault(key, []).append(signature)
        together: dict[tuple[int, ...], list[int]] = {}
        for key, of in holders.items():
            together.setdefault(tuple(of), []).append(key)
        groups = []
        for alike, shared in together.items():
            ranks = tuple(rank for rank, signature in enumerate(signatures) if signature in alike)
            if len(ranks) > 1:
                groups.append((ranks, shared if mine in alike else []))
        return sorted(groups, key=lambda group: -len(group[0]))


def _hash(numbers: Iterable[int]) -> int:
    return xxhash.xxh3_64_intdigest(np.array(list(numbers), dtype=np.uint64).tobytes())


def _first(ranks: tuple[int, ...], details: list[list[tuple[int, str, float | None, str]]]) -> Difference | None:
    """The first thing that differs between ranks, beyond rounding where that may differ.

    details: of each rank, (digest, name, norm or None, value in words) of each thing
    """
    for of_thing in zip(*details, strict=True):
        bits, names, norms, values = zip(*of_thing, strict=True)
        said: Any = bits
        if None not in norms:  # those that differ by rounding only say the same
            usual = sorted(norm if math.isfinite(norm) else math.inf for norm in norms)[len(norms) // 2]
            said = [usual if abs(norm - usual) <= LIKE * usual else norm for norm in norms]
        if len(set(said)) == 1:
            continue
        agreed, count = Counter(said).most_common(1)[0]
        most = 2 * count > len(ranks)
        odd = tuple(rank for rank, each in zip(ranks, said, strict=True) if not most or each != agreed)
        return Difference(names[0], ranks, odd, values)
    return None
