"""How fast hosts exchange what training exchanges, against the floor of that kind of link."""

import re
import secrets
import statistics
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors.console import figure
from ..errors.tables import table
from .checks import CannotKnow, Facts, Hosts, Level, Result, Threshold, check, sound, unknown
from .findings import fault, level_of
from .meeting import Meeting, meet, not_met
from .pairs import Way, judged_pairs, measure
from .probes.collectives import Figure
from .sweep import FEW, LONGEST, MANY, PAYLOADS, bus_bandwidth, rounds

FLOORS: list[Facts] = table(Path(__file__).with_name("floors.yaml"))
# Gbit/s over TCP that one process is expected to reach, whatever the card can do.
REACHED = {"gloo": 4.0, "nccl": 40.0}


@check("pairs by NCCL", size="full", seconds=1200, alone=True)
async def pairs_by_nccl(hosts: Hosts) -> AsyncIterator[Result]:
    """As pairs, over the network that NCCL takes, InfiniBand for instance: each GPU of a host sends to one of its partner's, in
    one process group for all rounds. Threshold: pair_rate of thresholds.yaml."""
    names = list(hosts.hello)
    alike = len(set(hosts.wanted.slots.values())) == 1 and len(names) == len(hosts.wanted.slots)
    if not have_gpus(hosts) or not alike or len(names) < 2 or hosts.wanted.measured.get("apart"):
        needs = "several hosts that reach each other, each with a GPU for each slot, as many on all"
        raise CannotKnow(f"it needs {needs}")
    games = rounds(len(names), MANY)
    async with meet(hosts) as meeting:
        facts = await _sweep(hosts, meeting, hosts.wanted.slots, "nccl", games) if not meeting.lost else {}
        if any(answer["error"] for answer in facts.values()) or len(facts) < len(names):
            for result in await _ended(hosts, meeting, facts):
                yield result
            return
    ways = {(names[a], b): Way(gbit) for b, answer in facts.items() for a, gbit in answer["received"]}
    meeting.links = {host: {} for host in names}  # the speed of a card for TCP says nothing of this network
    cure = "`ibstat` and `ibdiagnet` on both ends; NCCL_DEBUG=INFO says which cards NCCL takes"
    for result in judged_pairs(ways, meeting):
        yield replace(result, cure=cure if result.cure else "")


# ---- collectives -------------------------------------------------------------------------------------------------
@check("collectives", size="usual", seconds=900, alone=True)
async def collectives(hosts: Hosts) -> AsyncIterator[Result]:
    """Times all-reduce, all-gather, reduce-scatter and all-to-all over all hosts: NCCL with a rank on each slot's GPU, or where
    there are none gloo with one process on each host. Median of up to 7 times, bus bandwidth by nccl-tests' definition.
    Threshold: floors.yaml for GPUs on a fabric, else link_speed of thresholds.yaml for a card that knows its speed; without
    either none."""
    apart = hosts.wanted.measured.get("apart")
    backend = "nccl" if have_gpus(hosts) else "gloo"
    ranks = {host: hosts.wanted.slots[host] if backend == "nccl" else 1 for host in hosts.hello}
    if len(hosts.hello) < len(hosts.wanted.slots) or len(ranks) < 2 or apart:
        if apart:
            raise CannotKnow("it would hang: see the row of pairs for hosts that do not reach each other")
        raise CannotKnow("there is one host" if len(hosts.wanted.slots) < 2 else "it needs all hosts")
    async with meet(hosts) as meeting:
        if meeting.lost or len(meeting.address) < len(ranks):
            for result in not_met(meeting):
                yield result
            for host in (host for host in meeting.address if host not in meeting.lost):
                yield unknown(host, f"it needs all hosts, and {', '.join(meeting.lost) or 'some'} cannot be met")
            return
        facts = await _sweep(hosts, meeting, ranks, backend)
        if any(answer["error"] for answer in facts.values()) or len(facts) < len(ranks):
            for result in await _ended(hosts, meeting, facts):
                yield result
            return
    measured = Sweep(
        backend,
        sum(ranks.values()),
        len(ranks),
        facts[next(iter(ranks))]["device"],
        slowest([facts[host]["figures"] for host in ranks]),
    )
    hosts.wanted.measured["network"] = measured
    for host in ranks:
        yield judged_sweep(host, measured, meeting)


async def _sweep(
    hosts: Hosts,
    meeting: Meeting,
    ranks: Mapping[str, int],
    backend: str,
    games: list[list[tuple[int, int]]] | None = None,
) -> dict[str, Facts]:
    first = next(iter(ranks))
    per_host: dict[str, Facts] = {}
    for host, count in ranks.items():
        before = sum(facts["ranks"] for facts in per_host.values())
        per_host[host] = {"first": before, "ranks": count, "interface": meeting.interface[host]}
    what: Facts = {"world": sum(ranks.values()), "address": meeting.address[first], "port": meeting.store}
    sizes: Facts = {"backend": backend, "payloads": list(PAYLOADS[backend]), "longest": LONGEST, "games": games}
    limit = 160 + what["world"] * 0.05 + 5 * len(games or [])
    return await hosts.ask("collectives.sweep", limit + 20, per_host, limit=limit, **what, **sizes)


def have_gpus(hosts: Hosts) -> bool:
    """Whether every host has a GPU for each of its slots."""
    return all((hello.get("gpus") or 0) >= hosts.wanted.slots[host] for host, hello in hosts.hello.items())


async def _ended(hosts: Hosts, meeting: Meeting, facts: dict[str, Facts]) -> list[Result]:
    """Results that say which host is at fault where collectives did not end: one that does not answer; one with a rank whose
    process died or hung; one that pairs find; one that the others' errors name."""
    errors = {host: facts[host]["error"] for host in facts if facts[host]["error"]}
    at_fault = {host: hosts.failed.get(host, "no answer") for host in meeting.address if host not in facts}
    at_fault = at_fault or {host: answer["ended"] for host, answer in facts.items() if answer.get("ended")}
    ways = {} if at_fault else await measure(hosts, meeting, FEW)
    broken = [result for result in judged_pairs(ways, meeting) if result.level == "red"] if ways else []
    if broken:
        at_fault = {result.host: result.problem for result in broken}
    elif not at_fault:
        naming = {
            host: [error for error in errors.values() if _names(error, address)]
            for host, address in meeting.address.items()
        }
        host = max(naming, key=lambda host: len(naming[host]))
        if 2 * len(naming[host]) > len(errors):
            at_fault = {host: naming[host][0]}
    if not at_fault:
        first = next(iter(errors.values()))
        return [fault("collectives-failed", host, said=errors.get(host) or first) for host in meeting.address]
    ended = any(facts.get(host, {}).get("ended") for host in at_fault)
    finding, names = "rank-of-collectives-ended" if ended else "collectives-failed-at-a-host", ", ".join(at_fault)
    return [
        fault(finding, host, said=at_fault[host])
        if host in at_fault
        else unknown(host, f"collectives over all hosts ended on {names}")
        for host in meeting.address
    ]


def _names(error: str, address: str) -> bool:
    return re.search(rf"(?<![\d.:a-f]){re.escape(address)}(?![\d.])", error) is not None


@check("GPUs of a host", size="usual", seconds=200, alone=True)
async def inside(hosts: Hosts) -> AsyncIterator[Result]:
    """Times the collectives over each host's own GPUs by NCCL. Threshold: floors.yaml for eight GPUs of a known kind; else a host
    against the others: inside of thresholds.yaml."""
    if not have_gpus(hosts) or min(hosts.wanted.slots.values()) < 2:
        raise CannotKnow("it needs two GPUs on each host")
    rest: Facts = {"address": "127.0.0.1", "interface": "lo", "backend": "nccl", "longest": LONGEST}
    async with hosts.hold("pairs.serve", 20, token=secrets.token_hex(8)) as serving:
        per_host: dict[str, Facts] = {}
        for host, facts in serving.items():
            count = hosts.wanted.slots[host]
            per_host[host] = {"first": 0, "ranks": count, "world": count, "port": facts["free"]}
        swept = await hosts.ask("collectives.sweep", 150, per_host, limit=130, payloads=list(PAYLOADS["nccl"]), **rest)
    sweeps = {
        host: Sweep("nccl", hosts.wanted.slots[host], 1, facts["device"], slowest([facts["figures"]]))
        for host, facts in swept.items()
        if not facts["error"]
    }
    for host, facts in swept.items():
        if facts["error"]:
            yield fault("collectives-inside-failed", host, said=facts["error"])
    usual = statistics.median(sweep.bandwidth("all_reduce") for sweep in sweeps.values()) if sweeps else 0.0
    for host, sweep in sweeps.items():
        yield judged_inside(host, sweep, usual)


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


def slowest(figures: list[list[Figure]]) -> list[tuple[str, int, float]]:
    """Return the seconds of the slowest host for each row: a collective is over when its last rank is."""
    return [
        (str(same[0][0]), int(same[0][1]), max(float(row[2]) for row in same)) for same in zip(*figures, strict=False)
    ]


def floor(device: str, kind: str) -> Facts:
    """The row of a GPU that has a floor of that kind, or {}."""
    return next((row for row in FLOORS if kind in row and re.search(row["gpu"], device)), {})


def judged_sweep(host: str, sweep: Sweep, meeting: Meeting) -> Result:
    """The result of a host for the sweep between all hosts."""
    best = sweep.bandwidth("all_reduce")
    value = f"all-reduce {best:.3g} GB/s, {sweep.backend}"
    known, fabric, speed = floor(sweep.device, "between"), meeting.fabric[host], meeting.speed(host)
    of = f"{fabric:g} Gbit/s of RDMA"
    if known and fabric >= known["fabric"] and sweep.ranks == 8 * sweep.hosts:
        least = float(known["between"])
        level = _against_floor(best, least)
    elif sweep.backend == "nccl" and fabric:
        least = fabric / 8
        level = level_of("slow-collectives", best / least)
    elif speed:
        least, of = min(speed, REACHED[sweep.backend]) / 8, f"a card of {speed:g} Gbit/s"
        level = level_of("slow-collectives", best / least)
    else:
        return sound(host, value, best)
    if level == "green":
        return sound(host, value, best)
    return fault("slow-collectives", host, level, best, value=value, best=best, of=of, least=figure(least, 1))


def _against_floor(best: float, least: float) -> Level:
    return Threshold(least, least / 2, "GB/s", "floors.yaml", below=True).level(best)


def judged_inside(host: str, sweep: Sweep, usual: float) -> Result:
    """The result of a host for the sweep between its own GPUs. usual: the median of all hosts, GB/s"""
    best, known = sweep.bandwidth("all_reduce"), floor(sweep.device, "inside")
    level, least = level_of("slow-inside", best / usual), usual
    if known and sweep.ranks == 8:
        against = _against_floor(best, float(known["inside"]))
        if against == "red" or level == "green":
            level, least = against, float(known["inside"])
    value = f"{figure(best, 0)} GB/s"
    if level == "green":
        return sound(host, value, best)
    return fault(
        "slow-inside", host, level, best, value=value, ranks=sweep.ranks, best=figure(best, 0), least=figure(least, 0)
    )
