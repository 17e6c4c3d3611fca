"""From the rates of pairs of hosts: which host is slow, or which link alone."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .results import Level, thresholds

BUSY = 0.5  # share of the time from which on an end's processor, and not the network, may have bounded a rate


@dataclass(frozen=True)
class Way:
    """What one host could send to another one. gbit: Gbit/s; busy: see probes/network.py: send; error: it could not, and why"""

    gbit: float = 0.0
    busy: float = 0.0
    error: str = ""


Ways = Mapping[tuple[str, str], Way]  # (sender, receiver)


@dataclass
class Blame:
    """usual: median Gbit/s of all ways; sends, receives: host -> its own median, of hosts that are slow in that direction with
    most others; links: slow ways between hosts that are not"""

    usual: float
    sends: dict[str, float] = field(default_factory=dict)
    receives: dict[str, float] = field(default_factory=dict)
    links: list[tuple[str, str]] = field(default_factory=list)

    @property
    def hosts(self) -> list[str]:
        return list(dict.fromkeys([*self.sends, *self.receives]))


def level(way: Way, usual: float) -> Level:
    """Threshold: pair_rate of thresholds.yaml. What a busy processor bounded says nothing of the network."""
    if way.error:
        return "red"
    if way.busy > BUSY or not usual:
        return "green"
    return thresholds()["pair_rate"].level(way.gbit / usual)


def blame(ways: Ways) -> Blame:
    """A host is slow in one direction where most of its ways in it are, of two at least. A slow way of a host that is not is a
    slow link: with two hosts nobody can say whose fault it is."""
    fine = [way.gbit for way in ways.values() if not way.error]
    found = Blame(statistics.median(fine) if fine else 0.0)
    slow = {pair for pair, way in ways.items() if level(way, found.usual) != "green"}
    for end, guilty in ((0, found.sends), (1, found.receives)):
        for host in dict.fromkeys(pair[end] for pair in ways):
            own = [pair for pair in ways if pair[end] == host]
            if len(own) > 1 and 2 * len([pair for pair in own if pair in slow]) > len(own):
                guilty[host] = statistics.median(ways[pair].gbit for pair in own)
    # With three hosts and one of them slow both ways, each other host has half of its ways slow, and is not blamed.
    found.links = [
        pair for pair in ways if pair in slow and pair[0] not in found.sends and pair[1] not in found.receives
    ]
    return found


def to_confirm(ways: Ways, found: Blame, each: int = 3, most: int = 16) -> list[tuple[str, str]]:
    """Ways to measure once more, with nothing else on the network, before anybody is blamed: a few of each slow host's, to hosts
    that are not, and the slow links. Those that could not connect at all among them."""
    chosen = list(found.links)
    for end, guilty in ((0, found.sends), (1, found.receives)):
        for host in guilty:
            own = [pair for pair in ways if pair[end] == host and level(ways[pair], found.usual) != "green"]
            chosen += sorted(own, key=lambda pair: pair[1 - end] in found.hosts)[:each]
    return list(dict.fromkeys(chosen))[:most]


def better(one: Way, other: Way) -> Way:
    """The one that says more for the network."""
    if one.error or other.error:
        return other if one.error else one
    return max(one, other, key=lambda way: (way.busy > BUSY, way.gbit))


def typical(ways: Ways, host: str) -> float:
    """Median Gbit/s of a host's ways, in both directions."""
    own = [way.gbit for pair, way in ways.items() if host in pair]
    return statistics.median(own) if own else 0.0


def gravest(ways: Ways, host: str, end: int, usual: float) -> Level:
    """Of a slow host: what most of its ways in that direction are."""
    levels = [level(way, usual) for pair, way in ways.items() if pair[end] == host]
    return "red" if 2 * levels.count("red") > len(levels) else "yellow"


def errors(ways: Ways, pairs: Iterable[tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(ways[pair].error for pair in pairs if ways[pair].error))
