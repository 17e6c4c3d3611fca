"""How fast hosts exchange what training exchanges."""

import re
import secrets
import statistics
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..errors.console import figure
from ..launch.rendezvous import candidates
from . import meaning
from .hosts import Facts, Hosts
from .registry import check
from .results import Level, Result, Threshold, sound, thresholds, unknown
from .slow_pairs import BUSY, Way, better, blame, errors, gravest, level, to_confirm, typical
from .sweep import FEW, LONGEST, MANY, MEASURED, PAYLOADS, STREAMS, WARM_UP, bus_bandwidth, rounds

SLOWEST = "all ranks wait for the slowest one in every collective: the whole run gets this host's speed"
# Gbit/s that one process is expected to reach whatever the card can do: Python over TCP, gloo, NCCL over TCP.
REACHED = {"tcp": 20.0, "gloo": 4.0, "nccl": 40.0}


@dataclass
class Meeting:
    """Hosts that found each other.

    address, interface: of each, on its way to the first one; port: on which it listens; lost: host -> why it is not among them
    store: a port of the first host for torch's store; links: interface -> speed, of each; fabric: Gbit/s of RDMA ports, of each
    """

    token: str
    address: dict[str, str] = field(default_factory=dict)
    interface: dict[str, str] = field(default_factory=dict)
    port: dict[str, int] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    store: int = 0
    links: dict[str, Facts] = field(default_factory=dict)
    fabric: dict[str, float] = field(default_factory=dict)

    def speed(self, host: str) -> float | None:
        """Gbit/s of the card itself, where it is one and knows."""
        link = self.links[host].get(self.interface[host], {})
        return link["speed"] / 1000 if link.get("real") and link.get("speed") else None


@asynccontextmanager
async def meet(hosts: Hosts) -> AsyncIterator[Meeting]:
    """All hosts listen; each finds the first one by an address that the others use too, as ranks do (launch/rendezvous.py)."""
    found = Meeting(secrets.token_hex(8))
    async with hosts.hold("network.serve", 20, token=found.token) as serving:
        names = list(serving)
        found.port = {host: facts["port"] for host, facts in serving.items()}
        found.links = {host: facts["links"] for host, facts in serving.items()}
        found.fabric = {host: facts["fabric"] for host, facts in serving.items()}
        if names:
            found.store = serving[names[0]]["free"]
            await _find(hosts, names, found)
        yield found


async def _find(hosts: Hosts, names: list[str], found: Meeting) -> None:
    first, *others = names
    own: dict[str, str] = hosts.hello[first].get("addresses", {})
    tried = await _ways(hosts, others, candidates(first, own), found.port[first], found.token)
    reached = {
        address: [host for host in others if "peer" in tried.get(host, {}).get(address, {})]
        for address in candidates(first, own)
    }
    chosen = max(reached, key=lambda address: len(reached[address]), default="")
    found.address[first], found.interface[first] = "127.0.0.1", "lo"
    for host in others:
        answer = tried.get(host, {}).get(chosen, {})
        if "peer" in answer:
            found.address[host], found.interface[host] = answer["own"], answer["interface"]
            found.address[first], found.interface[first] = answer["peer"], own.get(answer["peer"], "")
        else:
            why = answer.get("error") or hosts.failed.get(host, "no answer")
            found.lost[host] = f"it cannot connect to {first} on port {found.port[first]}: {why}"
    if len(others) > 1 and len(found.lost) == len(others):  # then it is the first one's fault
        found.lost = {
            first: f"no host can connect to it on port {found.port[first]}: {next(iter(found.lost.values()))}"
        }


async def _ways(hosts: Hosts, asked: list[str], addresses: list[str], port: int, token: str) -> dict[str, Facts]:
    each: dict[str, Facts] = {host: {} for host in asked}
    return await hosts.ask("network.way", 15, each, addresses=addresses, port=port, token=token) if asked else {}


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
    async with meet(hosts) as found:
        for result in _lost(found):
            yield result
        ways = await _measure(hosts, found, most)
    for result in judged(ways, found):
        yield result


def _lost(found: Meeting) -> list[Result]:
    why = "ranks that do not find each other wait until a timeout ends the run"
    cure = (
        "open all ports between the hosts, both ways: gloo and NCCL choose from /proc/sys/net/ipv4/ip_local_port_range"
    )
    return [Result(host, "red", "not met", None, problem, why, cure) for host, problem in found.lost.items()]


async def _measure(hosts: Hosts, found: Meeting, most: int) -> dict[tuple[str, str], Way]:
    names = [host for host in found.address if host not in found.lost]
    ways: dict[tuple[str, str], Way] = {}
    for games in rounds(len(names), most):
        named = [(names[a], names[b]) for a, b in games]
        for direction in (named, [(b, a) for a, b in named]):
            ways |= await _send(hosts, found, direction)
    for number, pair in enumerate(to_confirm(ways, blame(ways))):
        again = await _send(hosts, found, [pair], attempt=1 + number)
        ways[pair] = better(ways[pair], again[pair])
    return ways


async def _send(
    hosts: Hosts, found: Meeting, direction: list[tuple[str, str]], attempt: int = 0
) -> dict[tuple[str, str], Way]:
    each: dict[str, Facts] = {a: {"address": found.address[b], "port": found.port[b]} for a, b in direction}
    limits: Facts = {"streams": STREAMS, "warm_up": WARM_UP, "window": MEASURED}
    facts = await hosts.ask("network.send", 20, each, token=found.token, attempt=attempt, **limits)
    return {(a, b): Way(**facts.get(a, {"error": hosts.failed.get(a, "no answer")})) for a, b in direction}


def judged(ways: Mapping[tuple[str, str], Way], found: Meeting) -> list[Result]:
    """What the rates say of each host that was met."""
    said = blame(ways)
    results = []
    for host in (host for host in found.address if host not in found.lost):
        mean = typical(ways, host)
        if host in said.hosts:
            results.append(_slow_host(host, ways, found, said.usual, host in said.sends, host in said.receives))
        elif links := [pair for pair in said.links if pair[0] == host]:
            results.append(_slow_links(host, links, ways, said.usual))
        elif (own := _against_own_speed(host, ways, found)) is not None:
            results.append(own)
        else:
            results.append(sound(host, f"{figure(mean, 1)} Gbit/s", mean))
    return results


def _slow_host(
    host: str, ways: Mapping[tuple[str, str], Way], found: Meeting, usual: float, sends: bool, receives: bool
) -> Result:
    parts, worst = [], "yellow"
    for end, does, here in ((0, "sends", sends), (1, "receives", receives)):
        own = [pair for pair in ways if pair[end] == host]
        if here:
            rate = statistics.median(ways[pair].gbit for pair in own)
            why_not = errors(ways, own)
            parts.append(f"{does} at {figure(rate, 2)} Gbit/s" + (f" ({why_not[0]})" if why_not else ""))
            worst = "red" if gravest(ways, host, end, usual) == "red" else worst
    problem = f"it {' and '.join(parts)}, to or from most hosts; the median of all pairs is {figure(usual, 2)}"
    interface = found.interface[host] or "its interface"
    look = f"ssh {host} 'ethtool {interface}; tc qdisc show dev {interface}'"
    cure = f"{look}: are speed and limits those of the others? then its cable and its port of the switch"
    level: Level = "red" if worst == "red" else "yellow"
    mean = typical(ways, host)
    return Result(host, level, f"{figure(mean, 2)} Gbit/s", mean, problem, SLOWEST, cure)


def _slow_links(host: str, links: list[tuple[str, str]], ways: Mapping[tuple[str, str], Way], usual: float) -> Result:
    worst = min(links, key=lambda pair: ways[pair].gbit)
    way, back = ways[worst], ways.get((worst[1], worst[0]))
    to = worst[1]
    what = f"cannot send to {to} ({way.error})" if way.error else f"sends to {to} at {figure(way.gbit, 2)} Gbit/s"
    more = f", and to {len(links) - 1} more so" if len(links) > 1 else ""
    other = f"; {to} sends back at {figure(back.gbit, 2)}" if back and not back.error else ""
    problem = f"it {what}{more}{other}; the median of all pairs is {figure(usual, 2)}, and both have it with others"
    if len(ways) == 2:
        problem = f"it {what}{other}; with two hosts nobody can say which one is slow"
    why = "a ring of ranks that takes this link runs at its speed"
    cure = f"look at the way between the two: `tracepath {to}` on {host}, limits per address (`tc filter`, firewalls), switches"
    red = any(level(ways[pair], usual) == "red" for pair in links)
    return Result(host, "red" if red else "yellow", f"slow to {to}", None, problem, why, cure)


def _against_own_speed(host: str, ways: Mapping[tuple[str, str], Way], found: Meeting) -> Result | None:
    """Where a card knows its speed, its best pair has to come near to it."""
    own = [way for pair, way in ways.items() if host in pair and not way.error]
    speed = found.speed(host)
    if not own or not speed or any(way.busy > BUSY for way in own):
        return None
    best = max(way.gbit for way in own)
    found_level = thresholds()["link_speed"].level(best / min(speed, REACHED["tcp"]))
    if found_level == "green":
        return None
    interface = found.interface[host]
    problem = f"its best pair reaches {figure(best, 2)} Gbit/s, and {interface} says it has {speed:g}"
    cure = (
        f"is {interface} the one that should be taken? else look at `ethtool {interface}` on {host} and at the switch"
    )
    return Result(host, found_level, f"{figure(best, 2)} of {speed:g} Gbit/s", best, problem, SLOWEST, cure)


# ---- collectives -------------------------------------------------------------------------------------------------
@check("collectives", size="usual", seconds=900, alone=True)
async def collectives(hosts: Hosts) -> AsyncIterator[Result]:
    """Times all-reduce, all-gather, reduce-scatter and all-to-all over all hosts: NCCL with a rank on each slot's GPU, or where
    there are none gloo with one process on each host. Median of up to 7 times, bus bandwidth by nccl-tests' definition.
    Threshold: floors.yaml for GPUs on a fabric, else link_speed of thresholds.yaml for a card that knows its speed; without
    either none."""
    backend = "nccl" if _gpus(hosts) else "gloo"
    ranks = {host: hosts.wanted.slots[host] if backend == "nccl" else 1 for host in hosts.hello}
    if len(hosts.hello) < len(hosts.wanted.slots) or len(ranks) < 2:
        because = "there is one host" if len(hosts.wanted.slots) < 2 else "it needs all hosts"
        for host in hosts.hello:
            yield unknown(host, because)
        return
    async with meet(hosts) as found:
        if found.lost or len(found.address) < len(ranks):
            for result in _lost(found):
                yield result
            for host in (host for host in found.address if host not in found.lost):
                yield unknown(host, f"it needs all hosts, and {', '.join(found.lost) or 'some'} cannot be met")
            return
        facts = await _sweep(hosts, found, ranks, backend)
        if any(one["error"] for one in facts.values()) or len(facts) < len(ranks):
            for result in await _ended(hosts, found, facts):
                yield result
            return
    measured = Sweep(
        backend,
        sum(ranks.values()),
        len(ranks),
        facts[next(iter(ranks))]["device"],
        _slowest([facts[host]["figures"] for host in ranks]),
    )
    hosts.wanted.measured["network"] = measured
    for host in ranks:
        yield _of_sweep(host, measured, found)


async def _sweep(hosts: Hosts, found: Meeting, ranks: Mapping[str, int], backend: str) -> dict[str, Facts]:
    first = next(iter(ranks))
    each: dict[str, Facts] = {}
    for host, count in ranks.items():
        before = sum(facts["ranks"] for facts in each.values())
        each[host] = {"first": before, "ranks": count, "interface": found.interface[host]}
    what: Facts = {"world": sum(ranks.values()), "address": found.address[first], "port": found.store}
    sizes: Facts = {"backend": backend, "payloads": list(PAYLOADS[backend]), "longest": LONGEST}
    return await hosts.ask("collectives.sweep", 120 + what["world"] * 0.05, each, **what, **sizes)


def _gpus(hosts: Hosts) -> bool:
    return all((hello.get("gpus") or 0) >= hosts.wanted.slots[host] for host, hello in hosts.hello.items())


@dataclass(frozen=True)
class Sweep:
    """rows: (collective, bytes, seconds of the slowest rank); device: the GPUs' name, or CPU"""

    backend: str
    ranks: int
    hosts: int
    device: str
    rows: list[tuple[str, int, float]]

    def bandwidth(self, collective: str) -> float:
        """Bus bandwidth in GB/s of its best payload."""
        own = [row for row in self.rows if row[0] == collective]
        return max((1e-9 * bus_bandwidth(*row, self.ranks) for row in own), default=0.0)

    @property
    def rate(self) -> float:
        """GB/s that a host's network gives to what training sends: the median of the three collectives that it consists of."""
        return statistics.median(map(self.bandwidth, ("all_reduce", "all_gather", "reduce_scatter")))


def _slowest(figures: list[list[list[Any]]]) -> list[tuple[str, int, float]]:
    """A collective is over when its last rank is."""
    return [
        (str(same[0][0]), int(same[0][1]), max(float(row[2]) for row in same)) for same in zip(*figures, strict=False)
    ]


@cache
def floors() -> list[dict[str, Any]]:
    """The table of floors.yaml."""
    rows: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("floors.yaml").read_text(encoding="utf-8"))
    return rows


def floor(device: str, kind: str) -> dict[str, Any]:
    """The row of a GPU that has a floor of that kind, or {}."""
    return next((row for row in floors() if kind in row and re.search(row["gpu"], device)), {})


def _of_sweep(host: str, sweep: Sweep, found: Meeting) -> Result:
    best = sweep.bandwidth("all_reduce")
    value = f"all-reduce {figure(best, 2)} GB/s, {sweep.backend}"
    known, fabric = floor(sweep.device, "between"), found.fabric[host]
    if known and fabric >= known["fabric"] and sweep.ranks == 8 * sweep.hosts:
        least = float(known["between"])
        limit, of = Threshold(least, least / 2, "GB/s", "floors.yaml", below=True), f"{fabric:g} Gbit/s of RDMA"
        its_level = limit.level(best)
    elif sweep.backend == "nccl" and fabric:
        least, of = fabric / 8, f"{fabric:g} Gbit/s of RDMA"
        its_level = thresholds()["link_speed"].level(best / least)
    elif speed := found.speed(host):
        least, of = min(speed, REACHED[sweep.backend]) / 8, f"a card of {speed:g} Gbit/s"
        its_level = thresholds()["link_speed"].level(best / least)
    else:
        return sound(host, value, best)
    if its_level == "green":
        return sound(host, value, best)
    should = f"{of} should give about {figure(least, 1)}"
    problem = f"an all-reduce over all hosts reaches {figure(best, 2)} GB/s of bus bandwidth; {should}"
    cure = "the row of pairs names a slow host or link; else NCCL_DEBUG=INFO says which network NCCL takes (NET/IB or NET/Socket)"
    return Result(host, its_level, value, best, problem, "each step waits for it", cure)


async def _ended(hosts: Hosts, found: Meeting, facts: dict[str, Facts]) -> list[Result]:
    """Whose fault it is that collectives did not end: a host whose process does not answer; one that pairs find; one that the
    others' errors name."""
    why = "the run would hang in its first collective"
    said = {host: facts[host]["error"] for host in facts if facts[host]["error"]}
    at_fault = {host: hosts.failed.get(host, "no answer") for host in found.address if host not in facts}
    ways = {} if at_fault else await _measure(hosts, found, FEW)
    broken = [result for result in judged(ways, found) if result.level == "red"] if ways else []
    if broken:
        at_fault = {result.host: result.problem for result in broken}
    elif not at_fault:
        named = {host: sum(_names(error, found.address[host]) for error in said.values()) for host in found.address}
        host = max(named, key=lambda host: named[host])
        if 2 * named[host] > len(said):
            at_fault = {host: next(error for error in said.values() if _names(error, found.address[host]))}
    if not at_fault:
        cure = "ports that gloo and NCCL choose, and the interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
        return [
            Result(host, "red", "failed", None, said.get(host) or next(iter(said.values())), why, cure)
            for host in found.address
        ]
    cure = "open all ports between the hosts, and look at this host's interface and its limits"
    names = ", ".join(at_fault)
    return [
        Result(host, "red", "failed", None, at_fault[host], why, cure)
        if host in at_fault
        else unknown(host, f"collectives over all hosts ended on {names}")
        for host in found.address
    ]


def _names(error: str, address: str) -> bool:
    return re.search(rf"(?<![\d.:a-f]){re.escape(address)}(?![\d.])", error) is not None


@check("GPUs of a host", size="usual", seconds=200, alone=True)
async def inside(hosts: Hosts) -> AsyncIterator[Result]:
    """Times the collectives over each host's own GPUs by NCCL. Threshold: floors.yaml for eight GPUs of a known kind; else a host
    against the others: inside of thresholds.yaml."""
    if not _gpus(hosts) or min(hosts.wanted.slots.values()) < 2:
        for host in hosts.hello:
            yield unknown(host, "it needs two GPUs on each host")
        return
    rest: Facts = {"address": "127.0.0.1", "interface": "lo", "backend": "nccl", "longest": LONGEST}
    async with hosts.hold("network.serve", 20, token=secrets.token_hex(8)) as serving:
        each: dict[str, Facts] = {}
        for host, facts in serving.items():
            count = hosts.wanted.slots[host]
            each[host] = {"first": 0, "ranks": count, "world": count, "port": facts["free"]}
        swept = await hosts.ask("collectives.sweep", 150, each, payloads=list(PAYLOADS["nccl"]), **rest)
    found = {
        host: Sweep("nccl", hosts.wanted.slots[host], 1, facts["device"], _slowest([facts["figures"]]))
        for host, facts in swept.items()
        if not facts["error"]
    }
    for host, facts in swept.items():
        if facts["error"]:
            why, cure = (
                "the run would end in the same way",
                f"ssh {host}, then `nvidia-smi topo -m` and NCCL_DEBUG=INFO",
            )
            yield Result(host, "red", "failed", None, facts["error"], why, cure)
    usual = statistics.median(one.bandwidth("all_reduce") for one in found.values()) if found else 0.0
    for host, one in found.items():
        yield _of_inside(host, one, usual)


def _of_inside(host: str, sweep: Sweep, usual: float) -> Result:
    best, known = sweep.bandwidth("all_reduce"), floor(sweep.device, "inside")
    its_level, least = thresholds()["inside"].level(best / usual), usual
    if known and sweep.ranks == 8:
        limit = float(known["inside"])
        against = Threshold(limit, limit / 2, "GB/s", "floors.yaml", below=True).level(best)
        if against == "red" or its_level == "green":
            its_level, least = against, limit
    value = f"{figure(best, 0)} GB/s"
    if its_level == "green":
        return sound(host, value, best)
    problem = f"an all-reduce over its {sweep.ranks} GPUs reaches {figure(best, 0)} GB/s of bus bandwidth, not {figure(least, 0)}"
    cure = (
        f"ssh {host} 'nvidia-smi topo -m; nvidia-smi nvlink --status': are all links up, is the fabric manager running?"
    )
    return Result(host, its_level, value, best, problem, SLOWEST, cure)


# ---- what it means -----------------------------------------------------------------------------------------------
@check("waiting", size="usual", seconds=30, alone=True)
async def waiting(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads what the row of collectives measured, and asks the planner what part of each step the recipe's ranks wait for the
    network with it, and with other strategies. Without a recipe: for a stated model. Threshold: network_wait of thresholds.yaml,
    for hosts with GPUs and a recipe."""
    measured = hosts.wanted.measured.get("network")
    said = meaning.say(hosts.wanted, measured) if isinstance(measured, Sweep) else "no collective was measured"
    if not isinstance(said, str):
        hosts.wanted.measured["meaning"] = said.sentence
    for host in hosts.hello:
        if isinstance(said, str):
            yield unknown(host, said)
            continue
        its_level = thresholds()["network_wait"].level(said.share) if _gpus(hosts) and hosts.wanted.job else "green"
        if its_level == "green":
            yield sound(host, said.value)
            continue
        why = "GPUs that wait for the network compute nothing"
        yield Result(host, its_level, said.value, None, said.sentence, why, said.cure)
