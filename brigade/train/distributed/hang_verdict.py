"""Which rank all others wait for, from what each says of itself after a long silence; and the sentence that tells it."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .heartbeat import PHASES

# As they stand after "in".
PLACES = {
    "starting": "the start",
    "loading": "loading the model",
    "window": "preparing a window of data",
    "data": "data loading",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "measuring": "Brigade's own measurement of its device (a product of two matrices)",
    "optimizer": "the optimizer's step",
    "synchronising": "the synchronisation of replicas",
    "evaluation": "the evaluation",
    "checkpoint": "saving",
}
_READS = ("loading", "window", "data", "checkpoint")  # where a rank waits for files more often than it computes
# A pattern in names as gloo:all_reduce, nccl:_allgather_base, nccl:reduce_scatter_tensor_coalesced -> what it is called here.
_COLLECTIVES = {
    re.sub("-", "_?", name): name
    for name in ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "barrier", "send", "recv", "reduce",
                 "gather", "scatter")
}  # fmt: skip


@dataclass(frozen=True)
class Silent:
    """What is known of one rank in a hang.

    phase: of heartbeat.PHASES, in this step; seconds: of its silence; stopped: its process was, by SIGSTOP for one
    answers: whether anything in it still runs; collective: that it waits in, as torch's flight recorder calls it ("": in none;
    None: not known); number: that collective's, counted by its process group (0: not counted)
    """

    rank: int
    host: str
    phase: str
    step: int
    seconds: float = 0.0
    stopped: bool = False
    answers: bool = True
    collective: str | None = None
    number: int = 0
    group: str = ""


def culprits(ranks: list[Silent]) -> list[Silent]:
    """The ranks that the others wait for; [] where all wait for each other in one collective, and none can be told apart.

    A process that is stopped, or in which nothing runs any more, goes first. Then come ranks in no collective while others are in
    one; ranks in an earlier one, or in another; and where nothing is known of collectives, those that have come least far.
    """
    others = len(ranks) - 1
    for group in (
        [rank for rank in ranks if rank.stopped],
        [rank for rank in ranks if not rank.answers],
        [rank for rank in ranks if rank.collective == ""],
    ):
        if group and len(group) <= max(others, 1):
            return group
    if all(rank.collective for rank in ranks) and len({rank.group for rank in ranks}) == 1:
        places = [(rank.number, collective_in_words(rank.collective)) for rank in ranks]
        if len({number for number, _ in places}) == 1:
            ((usual, _),) = Counter(places).most_common(1)
            return [rank for rank, place in zip(ranks, places, strict=True) if place != usual]
        return _least(ranks, [number for number, _ in places])
    return _least(ranks, [(rank.step, PHASES.index(rank.phase)) for rank in ranks])


def _least(ranks: list[Silent], places: list) -> list[Silent]:
    """The ranks at the earliest place; [] where all are at the same."""
    if len(set(places)) == 1:
        return []
    return [rank for rank, place in zip(ranks, places, strict=True) if place == min(places)]


def sentence(ranks: list[Silent]) -> str:
    """`rank 3 on node2 has waited in data loading since step 41; ranks 0-2 wait for it in reduce-scatter`"""
    late = culprits(ranks)
    if not late:
        rank = ranks[0]
        where = _numbered(rank) if rank.collective else PLACES[rank.phase]
        if len(ranks) == 1:
            return f"{_named(ranks)} {_what(rank)}"
        text = f"{names(rank.rank for rank in ranks)} have waited for each other in {where} since step {rank.step}"
        return f"{text}: the network between them, or a device, has stopped without an error"
    waiting = [rank for rank in ranks if rank not in late]
    first = min(late, key=lambda rank: (rank.step, rank.rank))
    text = f"{_named(late)} {_what(first, len(late) > 1)}"
    if waiting:
        verb, them = "waits" if len(waiting) == 1 else "wait", "it" if len(late) == 1 else "them"
        places = Counter(collective_in_words(rank.collective) or PLACES[rank.phase] for rank in waiting)
        text += f"; {names(rank.rank for rank in waiting)} {verb} for {them} in {places.most_common(1)[0][0]}"
    return text


def _what(rank: Silent, several: bool = False) -> str:
    has, since = "have" if several else "has", f"since step {rank.step}"
    if rank.stopped:
        return f"{has} been stopped (SIGSTOP, or a debugger) {since}"
    if not rank.answers:
        return f"{has} not answered {since}; last seen in {PLACES[rank.phase]}"
    if rank.collective:
        return f"{has} waited in {_numbered(rank)} {since}"
    return f"{has} {'waited' if rank.phase in _READS else 'hung'} in {PLACES[rank.phase]} {since}"


def _numbered(rank: Silent) -> str:
    """`all-reduce, number 812,`; what is not counted has no number."""
    words = collective_in_words(rank.collective)
    return f"{words}, number {rank.number}," if rank.number else words


def _named(ranks: list[Silent]) -> str:
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    more = f" and {len(hosts) - 3} more hosts" if len(hosts) > 4 else ""
    return f"{names(rank.rank for rank in ranks)} on {', '.join(hosts[: 3 if more else 4])}{more}"


def names(numbers: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2`, `ranks 0-2, 5`"""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank{'s' * (len(runs) > 1 or runs[0][0] != runs[0][1])} {', '.join(words)}"


def collective_in_words(name: str | None) -> str:
    """`reduce-scatter` for nccl:_reduce_scatter_base; an unusual name as it is."""
    return next(
        (words for pattern, words in _COLLECTIVES.items() if re.search(pattern, (name or "").lower())), name or ""
    )
