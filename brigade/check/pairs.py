"""How fast pairs of hosts exchange, and from their rates: which host is slow, or which link."""

import statistics
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field

from ..errors.console import figure
from .checks import Facts, Hosts, Level, Result, check, sound, thresholds
from .findings import fault, findings, level_of
from .meeting import Meeting, meet, not_met
from .sweep import FEW, MANY, MEASURED, STREAMS, WARM_UP, rounds

TCP = 20.0  # Gbit/s that these streams are expected to reach, whatever the card can do

LOSSY = 0.005  # share of packets from which on TCP slows down: at 0.5 % and 1 ms of round trip to some 0.2 Gbit/s (Mathis 1997)
LONG = 2.0  # ms: hosts of one building answer in a tenth of that
BUSY = 0.5  # share of the time from which on an end's processor, and not the network, may have bounded a rate


@dataclass(frozen=True)
class Way:
    """What one host could send to another one. gbit: Gbit/s; busy, lost, round_trip: see probes/pairs.py: send; error: why it
    could not"""

    gbit: float = 0.0
    busy: float = 0.0
    error: str = ""
    lost: float = 0.0
    round_trip: float = 0.0


Ways = Mapping[tuple[str, str], Way]  # (sender, receiver)


@dataclass
class Blame:
    """usual: Gbit/s of a sound way, see usual_rate(); sends, receives: host -> its own median, of hosts that are slow in that
    direction with most others; links: slow ways between hosts that are not"""

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


def usual_rate(ways: Ways) -> float:
    """The median of all ways. With fewer than five hosts, the median of each host's best one: a slow host has two thirds of the
    ways of three hosts, and half of those of four."""
    fine = {pair: way.gbit for pair, way in ways.items() if not way.error}
    hosts = list(dict.fromkeys(host for pair in ways for host in pair))
    if len(hosts) < 5:
        best = [max((gbit for pair, gbit in fine.items() if host in pair), default=0.0) for host in hosts]
        return statistics.median(best) if best else 0.0
    return statistics.median(fine.values()) if fine else 0.0


def blame(ways: Ways) -> Blame:
    """Blame a host for a direction in which most of its ways are slow, if it has two or more. A slow way between other hosts is a
    slow link; with two hosts, nothing tells which one is at fault."""
    blamed = Blame(usual_rate(ways))
    slow = {pair for pair, way in ways.items() if level(way, blamed.usual) != "green"}
    for end, guilty in ((0, blamed.sends), (1, blamed.receives)):
        for host in dict.fromkeys(pair[end] for pair in ways):
            own = [pair for pair in ways if pair[end] == host]
            if len(own) > 1 and 2 * len([pair for pair in own if pair in slow]) > len(own):
                guilty[host] = statistics.median(ways[pair].gbit for pair in own)
    # With three hosts and one of them slow both ways, each other host has half of its ways slow, and is not blamed.
    blamed.links = [
        pair for pair in ways if pair in slow and pair[0] not in blamed.sends and pair[1] not in blamed.receives
    ]
    return blamed


def to_confirm(ways: Ways, blamed: Blame, each: int = 3, most: int = 16) -> list[tuple[str, str]]:
    """Ways to measure once more, with nothing else on the network, before a host is blamed: the slow links and a few ways of each
    slow host, to hosts that are not slow where possible. Ways that could not connect at all are included."""
    chosen = list(blamed.links)
    for end, guilty in ((0, blamed.sends), (1, blamed.receives)):
        for host in guilty:
            slow = [pair for pair in ways if pair[end] == host and level(ways[pair], blamed.usual) != "green"]
            chosen += sorted(slow, key=lambda pair: pair[1 - end] in blamed.hosts)[:each]
    return list(dict.fromkeys(chosen))[:most]


def better(one: Way, other: Way) -> Way:
    """Return the one of two measurements that says more for the network."""
    if one.error or other.error:
        return other if one.error else one
    return max(one, other, key=lambda way: (way.busy > BUSY, way.gbit))


def typical(ways: Ways, host: str) -> float:
    """Median Gbit/s of a host's ways, in both directions."""
    own = [way.gbit for pair, way in ways.items() if host in pair]
    return statistics.median(own) if own else 0.0


def gravest(ways: Ways, host: str, end: int, usual: float) -> Level:
    """The level of a slow host: that of most of its ways in that direction."""
    levels = [level(way, usual) for pair, way in ways.items() if pair[end] == host]
    return "red" if 2 * levels.count("red") > len(levels) else "yellow"


def errors(ways: Ways, pairs: Iterable[tuple[str, str]]) -> list[str]:
    """The errors that these pairs met, each once."""
    return list(dict.fromkeys(ways[pair].error for pair in pairs if ways[pair].error))


def seen(own: list[Way], others: list[Way]) -> tuple[str, str]:
    """Return (what TCP saw on slow ways, in words; a cure that fits it), each "" where nothing is odd.

    A queue that is full loses packets too, so what is lost may come from a limit of the rate.
    """
    fine = [way for way in own if not way.error]
    if not fine:
        return "", ""
    lost, trip = max(way.lost for way in fine), statistics.median(way.round_trip for way in fine)
    usual = statistics.median(way.round_trip for way in others) if others else 0.0
    words, cures = [], []
    if trip > max(LONG, 3 * usual):
        words.append(f"a round trip takes {figure(trip, 1)} ms" + (f", {figure(usual, 1)} elsewhere" if others else ""))
        cures.append("is it in another place, or behind a VPN or a tunnel? `tracepath` shows the way")
    if lost > LOSSY:
        words.append(f"{figure(100 * lost, 1)} % of the packets are lost and sent again")
        cures.append(
            "`ip -s link` and `ethtool -S` on both ends count what is lost there; `tc qdisc show` shows limits"
        )
    return " and ".join(words), "; ".join(cures)


def judged_pairs(ways: Ways, meeting: Meeting) -> list[Result]:
    """A result for each host that was met, from all rates."""
    guilty = blame(ways)
    results = []
    for host in (host for host in meeting.address if host not in meeting.lost):
        mean, links = typical(ways, host), [pair for pair in guilty.links if pair[0] == host]
        if host in guilty.hosts:
            results.append(_slow_host(host, ways, meeting, guilty.usual, host in guilty.sends, host in guilty.receives))
        elif links:
            results.append(_slow_links(host, links, ways, guilty.usual))
        else:
            slow = _against_own_speed(host, ways, meeting)
            results.append(slow or sound(host, f"{figure(mean, 1)} Gbit/s", mean))
    return results


def _slow_host(host: str, ways: Ways, meeting: Meeting, usual: float, sends: bool, receives: bool) -> Result:
    interface = meeting.interface[host] or "its interface"
    look = f"ssh {host} 'ethtool {interface}; tc qdisc show dev {interface}'"
    cure = f"{look}: are speed and limits those of the others? then its cable and its port of the switch"
    parts, levels, finding = [], ["yellow"], "slow-host"
    value = f"{figure(typical(ways, host), 2)} Gbit/s"
    for end, does, here in ((0, "sends", sends), (1, "receives", receives)):
        if not here:
            continue
        own = [pair for pair in ways if pair[end] == host]
        rate, why_not = statistics.median(ways[pair].gbit for pair in own), errors(ways, own)
        if why_not and not rate:
            cannot = "cannot connect to" if end == 0 else "takes no connections from"
            parts.append(f"{cannot} most hosts ({why_not[0]})")
            finding, cure = "host-not-reached", findings()["not-met"].cure
        else:
            parts.append(f"{does} at {figure(rate, 2)} Gbit/s")
        levels.append(gravest(ways, host, end, usual))
    slow = [way for pair, way in ways.items() if (sends and pair[0] == host) or (receives and pair[1] == host)]
    told, instead = seen(slow, [way for pair, way in ways.items() if host not in pair and not way.error])
    return fault(
        finding,
        host,
        "red" if "red" in levels else "yellow",
        typical(ways, host) or None,
        value=value,
        does=" and ".join(parts),
        usual=figure(usual, 2),
        seen=told and f"; {told}",
        cure=instead if told else cure,
    )


def _slow_links(host: str, links: list[tuple[str, str]], ways: Ways, usual: float) -> Result:
    worst = min(links, key=lambda pair: ways[pair].gbit)
    way, back, to = ways[worst], ways.get((worst[1], worst[0])), worst[1]
    cure = f"look at the way between the two: `tracepath {to}` on {host}, limits per address (`tc filter`, firewalls), switches"
    told, instead = seen([way], [ways[pair] for pair in ways if not {*pair} >= {host, to} and not ways[pair].error])
    return fault(
        "slow-between-two" if len(ways) == 2 else "slow-link",
        host,
        "red" if any(level(ways[pair], usual) == "red" for pair in links) else "yellow",
        other=to,
        does=f"cannot send to {to} ({way.error})" if way.error else f"sends to {to} at {figure(way.gbit, 2)} Gbit/s",
        more=f", and to {len(links) - 1} more so" if len(links) > 1 else "",
        back=f"; {to} sends back at {figure(back.gbit, 2)}" if back and not back.error else "",
        usual=figure(usual, 2),
        seen=told and f"; {told}",
        cure=instead if told else cure,
    )


def _against_own_speed(host: str, ways: Ways, meeting: Meeting) -> Result | None:
    """A result where a card knows its speed, and its best pair does not come near to it; else None."""
    own = [way for pair, way in ways.items() if host in pair and not way.error]
    speed = meeting.speed(host)
    if not own or not speed or any(way.busy > BUSY for way in own):
        return None
    best = max(way.gbit for way in own)
    level_of_best = level_of("slower-than-its-card", best / min(speed, TCP))
    if level_of_best == "green":
        return None
    interface = meeting.interface[host]
    return fault(
        "slower-than-its-card", host, level_of_best, best, best=figure(best, 2), speed=speed, interface=interface
    )


# ---- pairs -------------------------------------------------------------------------------------------------------
@check("pairs", size="usual", seconds=240, alone=True)
async def pairs(hosts: Hosts) -> AsyncIterator[Result]:
    """Measures what TCP reaches between hosts, in rounds in which each host has one partner: all pairs of up to 8 hosts, a sample
    of 7 rounds of more. Threshold: pair_rate and link_speed of thresholds.yaml; a slow way is measured once more with nothing
    else on the network before anybody is blamed, and one that a busy processor bounded blames nobody. TCP does not show
    InfiniBand, which NCCL takes where it is: see the row of collectives."""
    async for result in _pairs(hosts, FEW):
        yield result


@check("every pair", size="full", seconds=900, alone=True)
async def every_pair(hosts: Hosts) -> AsyncIterator[Result]:
    """As pairs, for more than 8 hosts: all pairs of up to 64 hosts in 63 rounds at most, 63 rounds of more. Threshold: as
    there."""
    if len(hosts.hello) <= FEW + 1:
        for host in hosts.hello:
            yield sound(host, "as above")
        return
    async for result in _pairs(hosts, MANY):
        yield result


async def _pairs(hosts: Hosts, most: int) -> AsyncIterator[Result]:
    if len(hosts.hello) == 1:
        yield sound(next(iter(hosts.hello)), "one host")
        return
    async with meet(hosts) as meeting:
        for result in not_met(meeting):
            yield result
        ways = await measure(hosts, meeting, most)
    hosts.wanted.measured["apart"] = [pair for pair, way in ways.items() if way.error]
    for result in judged_pairs(ways, meeting):
        yield result


async def measure(hosts: Hosts, meeting: Meeting, most: int) -> dict[tuple[str, str], Way]:
    """Measure pairs of hosts in at most `most` rounds. Returns {(host, other host): its way}."""
    names = [host for host in meeting.address if host not in meeting.lost]
    ways: dict[tuple[str, str], Way] = {}
    for games in rounds(len(names), most):
        named = [(names[a], names[b]) for a, b in games]
        for direction in (named, [(b, a) for a, b in named]):
            ways |= await _send(hosts, meeting, direction)
    for number, pair in enumerate(to_confirm(ways, blame(ways))):
        again = await _send(hosts, meeting, [pair], attempt=1 + number)
        ways[pair] = better(ways[pair], again[pair])
    return ways


async def _send(
    hosts: Hosts, meeting: Meeting, direction: list[tuple[str, str]], attempt: int = 0
) -> dict[tuple[str, str], Way]:
    per_host: dict[str, Facts] = {a: {"address": meeting.address[b], "port": meeting.port[b]} for a, b in direction}
    limits: Facts = {"streams": STREAMS, "warm_up": WARM_UP, "window": MEASURED}
    facts = await hosts.ask("pairs.send", 20, per_host, token=meeting.token, attempt=attempt, **limits)
    return {(a, b): Way(**facts.get(a, {"error": hosts.failed.get(a, "no answer")})) for a, b in direction}
