"""The plan of the network checks: who measures with whom in which round, how large payloads become, and how long it all takes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors.console import counted
from ..hosts.rendezvous import AT_ONCE
from .checks import SIZES, Size, checks

if TYPE_CHECKING:  # rich takes long to import
    from rich.table import Table

# What a bus carries for each byte of the payload, over n ranks: nccl-tests' doc/PERFORMANCE.md. The payload is what the larger
# end of the operation holds on one rank: gathers' output, scatters' input.
BUS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}  # times (n - 1) / n
MIB = 2**20
# Bytes. A payload is left out where the one before it lets expect that one operation takes more than LONGEST seconds.
PAYLOADS = {"gloo": (MIB // 16, MIB, 8 * MIB, 64 * MIB), "nccl": (MIB, 16 * MIB, 128 * MIB, 1024 * MIB)}
LONGEST = 1.0
# Seconds of one way of a pair: first what TCP needs to find its rate, then what counts.
WARM_UP, MEASURED = 0.1, 0.25
STREAMS = 4  # TCP connections at a time: a single one does not fill a fast link
FEW, MANY = 7, 63  # rounds at most, of the usual size and of --full: every pair of 8 hosts, and of 64

# Only for estimates. Seconds: of a login and its hello; of a process that measures; of importing torch; of a group per host
LOGIN, ORDER, IMPORT, MEET = 1.5, 0.2, 8.0, 0.02
NCCL_ROUND = 2.0  # both ways, the connections of a pair included
QUICK = 1.6  # all quick checks of two hosts (docs/evidence/preflight.md)
# Beside the quick ones, from the usual size on: torch is imported; a processor's speed is measured (docs/evidence/preflight.md).
TYPICAL = {"sameness": IMPORT, "devices": 6.0}
LONGEST_LOGIN = 20.0  # its limit
NEED_A_RECIPE = ("kernels", "rehearsal")  # groups that are grey without one


def rounds(count: int, most: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs of `count` hosts, such that each host is in one pair of a round, and every pair in one round: the circle
    method of round-robin tournaments. count - 1 rounds for an even number, count for an odd one, in which each host sits out
    once. Where that is more than `most`: so many of them, evenly spread; in each round each host meets another one."""
    last, whole, number_of = count + count % 2 - 1, count_rounds(count, count), count_rounds(count, most)
    games = []
    for number in (step * whole // number_of for step in range(number_of)):
        pairs = [(last, number)]
        pairs += [((number + step) % last, (number - step) % last) for step in range(1, (last + 1) // 2)]
        ordered = [(min(pair), max(pair)) for pair in pairs if max(pair) < count]
        games.append(sorted(ordered))
    return games


def count_rounds(count: int, most: int) -> int:
    """Return how many rounds rounds() gives, without building them. In each of them count // 2 pairs meet."""
    return min(count - 1 + count % 2, most) if count > 1 else 0


def bus_bandwidth(collective: str, payload: int, seconds: float, ranks: int) -> float:
    """Bytes per second, by nccl-tests' definition."""
    return BUS[collective] * (ranks - 1) / ranks * payload / seconds


@dataclass(frozen=True)
class Stage:
    """One line of the plan.

    group, name: as in the table of results; rounds: that follow each other; connections: of all rounds together
    payload: in words; seconds: estimated, or the most they may take (`most`); limit: the most, in any case
    typical: of a line that has only the most, what it took where it was measured; None: nobody knows
    """

    group: str
    name: str
    rounds: int
    connections: int
    payload: str
    seconds: float
    most: bool = False
    limit: float = 0.0
    typical: float | None = None


def plan(slots: Mapping[str, int], size: Size, gpus: bool, job: bool = True) -> Iterator[Stage]:
    """Yield what a check of that size would do on these hosts. gpus: whether they have any; nobody has asked them. job: whether
    there is a recipe, without which some groups are not run."""
    hosts, ranks = len(slots), sum(slots.values())
    waves, usual = -(-hosts // AT_ONCE[0]), SIZES.index(size) >= SIZES.index("usual")
    yield Stage("reach", "logins", waves, hosts, "-", waves * LOGIN, limit=waves * LONGEST_LOGIN)
    for group in dict.fromkeys(check.group for check in checks(size)):
        if group == "network" or (group in NEED_A_RECIPE and not job):
            continue
        if group == "kernels" and not gpus:  # what CPUs compute is proven nowhere
            continue
        own = [check for check in checks(size) if check.group == group]
        longest = max((check.seconds for check in own if not check.alone), default=0.0)
        most = longest + sum(c.seconds for c in own if c.alone)
        more = any(check.size != "quick" for check in own)
        typical = QUICK if group == "reach" else TYPICAL.get(group) if more else 0.0  # all quick ones run together
        yield Stage(group, counted(len(own), "check"), 1, 0, "-", most, True, most, typical)
    if usual:
        limits = {check.name: check.seconds for check in checks(size)}
        if hosts > 1:
            for stage in _network(hosts, ranks if gpus else hosts, "nccl" if gpus else "gloo", size):
                yield replace(stage, limit=max(limits.get(stage.name, 0.0), stage.seconds))
        if gpus and min(slots.values()) > 1:
            payloads, name = PAYLOADS["nccl"], "GPUs of a host"
            words = f"{_bytes(payloads[0])} to {_bytes(payloads[-1])}"
            yield Stage("network", name, len(BUS) * len(payloads), 0, words, limits[name], True, limits[name])
        if hosts > 1:
            yield Stage("network", "waiting", 1, 0, "-", limits["waiting"], True, limits["waiting"], 0.0)


def _network(hosts: int, ranks: int, backend: str, size: Size) -> Iterator[Stage]:
    usual, full, pairs = count_rounds(hosts, FEW), count_rounds(hosts, MANY), hosts // 2  # that meet in a round
    todo = {"pairs": usual} | ({"every pair": full} if size == "full" and full > usual else {})
    each = 2 * (ORDER + WARM_UP + MEASURED)
    for name, games in todo.items():
        words = f"{MEASURED:g} s each way, {STREAMS} streams"
        yield Stage("network", name, games, games * pairs * 2 * STREAMS, words, games * each)
    if size == "full" and backend == "nccl":
        links = 2 * full * pairs * ranks // hosts
        yield Stage("network", "pairs by NCCL", full, links, "1 s at most each way", IMPORT + full * NCCL_ROUND)
    sweep = PAYLOADS[backend]
    # Gloo connects every rank with every other one; NCCL's rings and trees take a few neighbours of each.
    connections = ranks * (ranks - 1) // 2 if backend == "gloo" else 4 * ranks
    words = f"{_bytes(sweep[0])} to {_bytes(sweep[-1])}, {backend}"
    yield Stage("network", "collectives", len(BUS) * len(sweep), connections, words, IMPORT + 8 + ranks * MEET)


def total(stages: Sequence[Stage]) -> tuple[float, float]:
    """Return (seconds by what is measured, seconds by the limits) of all stages."""
    about = sum(stage.typical or 0.0 if stage.most else stage.seconds for stage in stages)
    return about, sum(stage.limit for stage in stages)


def _bytes(number: int) -> str:
    return f"{number // MIB} MiB" if number >= MIB else f"{number // 1024} KiB"


def figures(rows: Sequence[tuple[str, int, float]], ranks: int, backend: str, device: str) -> "Table":
    """A rich Table of a sweep's bus bandwidths. rows: (collective, bytes, seconds)"""
    from rich.table import Table

    title = f"bus bandwidth over {counted(ranks, 'rank')}, GB/s ({backend}, {device})"
    payloads = sorted({payload for _, payload, _ in rows})
    drawn = Table(title=title, title_justify="left", header_style="bold")
    drawn.add_column("collective")
    for payload in payloads:
        drawn.add_column(_bytes(payload), justify="right")
    for name in BUS:
        own = {
            payload: 1e-9 * bus_bandwidth(name, payload, seconds, ranks) for n, payload, seconds in rows if n == name
        }
        cells = (f"{own[payload]:.3g}" if payload in own else "-" for payload in payloads)
        drawn.add_row(name.replace("_", "-"), *cells)
    return drawn


def table(slots: Mapping[str, int], size: Size, stages: Sequence[Stage]) -> "Table":
    """A rich Table."""
    from rich.table import Table

    hosts, ranks = counted(len(slots), "host"), counted(sum(slots.values()), "rank")
    drawn = Table(title=f"{hosts}, {ranks}, {size}: nothing was started", title_justify="left", header_style="bold")
    for number, title in enumerate(("group", "what", "rounds", "connections", "payload", "seconds")):
        drawn.add_column(title, justify="right" if number in (2, 3, 5) else "left", no_wrap=title != "payload")
    for stage in stages:
        seconds = f"{'at most' if stage.most else 'about'} {stage.seconds:,.0f}"
        links = f"{stage.connections:,}" if stage.connections else "-"
        drawn.add_row(stage.group, stage.name, f"{stage.rounds:,}", links, stage.payload, seconds)
    return drawn


def lines(slots: Mapping[str, int], stages: Sequence[Stage]) -> Iterator[str]:
    """Yield what the table does not say: who meets whom first, and what the network's part takes."""
    names = list(slots)
    if len(names) == 1:
        yield "one host: there are no pairs"
    first, full = [pair for pairs in rounds(len(names), 1) for pair in pairs], count_rounds(len(names), len(names))
    some = ", ".join(f"{names[a]} - {names[b]}" for a, b in first[:3])
    more = f", ... ({counted(len(first), 'pair')} at the same time)" if len(first) > 3 else ""
    for stage in stages:
        if stage.name in ("pairs", "every pair"):
            part = "" if stage.rounds == full else f"; a sample: all pairs would take {full:,} rounds"
            yield f"{stage.name}, round 1 of {stage.rounds}: {some}{more}{part}"
    seconds = sum(stage.seconds for stage in stages if stage.group == "network" and not stage.most)
    if seconds:
        yield f"The network takes about {seconds:,.0f} s; a payload that takes more than {LONGEST:g} s at a time is left out."
    about, most = total(stages)
    yield f"all checks: about {about:,.0f} s; at most {most:,.0f} s"
    unknown = [stage for stage in stages if stage.most and stage.typical is None]
    if unknown:
        left_out = ", ".join(stage.name if stage.group == "network" else stage.group for stage in unknown)
        yield f"not in the first figure, for they depend on hosts and recipe: {left_out}"
