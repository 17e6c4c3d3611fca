"""How fast hosts exchange what training exchanges."""

import re
import secrets
import statistics
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from . import meaning
from .bandwidth import Sweep, of_inside, of_sweep, slowest
from .hosts import Facts, Hosts
from .meeting import Meeting, lost, meet
from .registry import check
from .results import Result, sound, thresholds, unknown
from .slow_pairs import Way, better, blame, judged, to_confirm
from .sweep import FEW, LONGEST, MANY, MEASURED, PAYLOADS, STREAMS, WARM_UP, rounds


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
        for result in lost(found):
            yield result
        ways = await _measure(hosts, found, most)
    hosts.wanted.measured["apart"] = [pair for pair, way in ways.items() if way.error]
    for result in judged(ways, found):
        yield result


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


@check("pairs by NCCL", size="full", seconds=1200, alone=True)
async def pairs_by_nccl(hosts: Hosts) -> AsyncIterator[Result]:
    """As pairs, over the network that NCCL takes, InfiniBand for instance: each GPU of a host sends to one of its partner's, in
    one process group for all rounds. Threshold: pair_rate of thresholds.yaml."""
    names = list(hosts.hello)
    alike = len(set(hosts.wanted.slots.values())) == 1 and len(names) == len(hosts.wanted.slots)
    if not _gpus(hosts) or not alike or len(names) < 2 or hosts.wanted.measured.get("apart"):
        for host in names:
            yield unknown(
                host, "it needs several hosts that reach each other, each with a GPU for each slot, as many on all"
            )
        return
    games = rounds(len(names), MANY)
    async with meet(hosts) as found:
        facts = await _sweep(hosts, found, hosts.wanted.slots, "nccl", games) if not found.lost else {}
        if any(one["error"] for one in facts.values()) or len(facts) < len(names):
            for result in await _ended(hosts, found, facts):
                yield result
            return
    ways = {(names[a], b): Way(gbit) for b, one in facts.items() for a, gbit in one["received"]}
    found.links = {host: {} for host in names}  # the speed of a card for TCP says nothing of this network
    cure = "`ibstat` and `ibdiagnet` on both ends; NCCL_DEBUG=INFO says which cards NCCL takes"
    for result in judged(ways, found):
        yield replace(result, cure=cure if result.cure else "")


# ---- collectives -------------------------------------------------------------------------------------------------
@check("collectives", size="usual", seconds=900, alone=True)
async def collectives(hosts: Hosts) -> AsyncIterator[Result]:
    """Times all-reduce, all-gather, reduce-scatter and all-to-all over all hosts: NCCL with a rank on each slot's GPU, or where
    there are none gloo with one process on each host. Median of up to 7 times, bus bandwidth by nccl-tests' definition.
    Threshold: floors.yaml for GPUs on a fabric, else link_speed of thresholds.yaml for a card that knows its speed; without
    either none."""
    apart = hosts.wanted.measured.get("apart")
    backend = "nccl" if _gpus(hosts) else "gloo"
    ranks = {host: hosts.wanted.slots[host] if backend == "nccl" else 1 for host in hosts.hello}
    if len(hosts.hello) < len(hosts.wanted.slots) or len(ranks) < 2 or apart:
        because = "there is one host" if len(hosts.wanted.slots) < 2 else "it needs all hosts"
        because = "it would hang: see the row of pairs for hosts that do not reach each other" if apart else because
        for host in hosts.hello:
            yield unknown(host, because)
        return
    async with meet(hosts) as found:
        if found.lost or len(found.address) < len(ranks):
            for result in lost(found):
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
        slowest([facts[host]["figures"] for host in ranks]),
    )
    hosts.wanted.measured["network"] = measured
    for host in ranks:
        yield of_sweep(host, measured, found)


async def _sweep(
    hosts: Hosts,
    found: Meeting,
    ranks: Mapping[str, int],
    backend: str,
    games: list[list[tuple[int, int]]] | None = None,
) -> dict[str, Facts]:
    first = next(iter(ranks))
    each: dict[str, Facts] = {}
    for host, count in ranks.items():
        before = sum(facts["ranks"] for facts in each.values())
        each[host] = {"first": before, "ranks": count, "interface": found.interface[host]}
    what: Facts = {"world": sum(ranks.values()), "address": found.address[first], "port": found.store}
    sizes: Facts = {"backend": backend, "payloads": list(PAYLOADS[backend]), "longest": LONGEST, "games": games}
    return await hosts.ask(
        "collectives.sweep", 180 + what["world"] * 0.05 + 5 * len(games or []), each, **what, **sizes
    )


def _gpus(hosts: Hosts) -> bool:
    return all((hello.get("gpus") or 0) >= hosts.wanted.slots[host] for host, hello in hosts.hello.items())


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
        host: Sweep("nccl", hosts.wanted.slots[host], 1, facts["device"], slowest([facts["figures"]]))
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
        yield of_inside(host, one, usual)


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
            yield sound(host, said.value, said.share)
            continue
        why = "GPUs that wait for the network compute nothing"
        yield Result(host, its_level, said.value, None, said.sentence, why, said.cure)
