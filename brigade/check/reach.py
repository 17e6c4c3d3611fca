"""Whether hosts reach each other, open ports and packets of full size, and whether strangers reach them."""

import secrets
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager

from ..errors import shortened
from ..errors.console import counted
from ..hosts.rendezvous import DEFAULT_PORT
from .checks import Facts, Hosts, Level, Result, check, most_common, sound, thresholds, unknown
from .findings import fault
from .names import addresses_of, is_loopback, look, mtu_of, named_interface, need_two, partners

ADDRESSES = 5  # of one host that are tried
PORTS, MANY = (8, 4), 16  # ports of the ephemeral range that each host opens; fewer on more hosts than that
# What becomes of long packets, the gravest first, -> the finding that speaks of it.
FATES = {"hangs": "packets-hang", "told": "packets-told", "any": "packets-any", "lost": "packets-lost-alone"}
Pair = tuple[str, str]  # from, to


def _listening(
    hosts: Hosts, token: str, count: int, master: int | None = None
) -> AbstractAsyncContextManager[dict[str, Facts]]:
    first = next(iter(hosts.hello), None)
    per_host = {host: {"host": host, "master": master if host == first else None} for host in hosts.hello}
    return hosts.hold("reach.listen", 10, per_host, token=token, count=count)


def _targets(
    hosts: Hosts, looks: dict[str, Facts], listening: dict[str, Facts], token: str
) -> tuple[dict[str, list[str]], dict[str, Facts]]:
    """Return (host -> the hosts that it tries, host -> its question). The address of the name comes first, as in launch."""
    own, named, tried = addresses_of(hosts), named_interface(hosts), partners(listening)
    ports = {host: [*filter(None, [facts.get("master")]), *facts["ports"]] for host, facts in listening.items()}

    def door(host: str, other: str) -> Facts:
        by_name = [] if named else looks.get(host, {}).get("resolved", {}).get(other, [])
        addresses = [*(address for address in by_name if not is_loopback(address)), *own[other]]
        few, its = list(dict.fromkeys(addresses))[:ADDRESSES], listening[other]
        return {"addresses": few or [other], "ports": ports[other], "datagrams": its["datagrams"], "long": its["long"]}

    return tried, {
        host: {"host": host, "token": token, "targets": {other: door(host, other) for other in others}}
        for host, others in tried.items()
    }


@check("ports", seconds=60)
async def ports(hosts: Hosts) -> AsyncIterator[Result]:
    """Connects each host with each other one, up to 64 of them, beyond with 16: to port 29500 of the first, and to ports
    all over the range from which gloo and NCCL get theirs (net.ipv4.ip_local_port_range). Threshold: all are reached within
    5 s, three tries of TCP. A firewall that opens only 29500 lets ranks meet and then wait in silence for ten minutes. Before
    that it counts short datagrams: where more are lost than packet_loss of thresholds.yaml, that is the fault, and no port."""
    count = 0 if len(hosts.wanted.slots) == 1 else PORTS[len(hosts.hello) > MANY]
    looks, token = await look(hosts) if count else {}, secrets.token_hex(8)
    async with _listening(hosts, token, count, DEFAULT_PORT) as listening:
        tried, questions = _targets(hosts, looks, listening, token)
        found = await hosts.ask("reach.connect", 40, questions if count else {})
        failed: dict[Pair, dict[str, str]] = {
            (host, other): why for host, facts in found.items() for other, why in facts["failed"].items()
        }
        both_ways = {host for host, other in failed if (other, host) in failed}
        asked = [host for host in listening if host in both_ways or "master" in listening[host]]
        controls = {host: {"control": listening[host]["control"]} for host in asked}
        # Asked of the first host in any case: the port is free again when this has answered, for launch to take it.
        heard = {host: facts["heard"] for host, facts in (await hosts.ask("reach.heard", 10, controls)).items()}
    tried = {host: [other for other in others if other in listening] for host, others in tried.items() if host in found}
    lossy = _lossy(found)
    incoming, outgoing = blame(tried, one_way({pair for pair in failed if pair not in lossy}, heard))
    for result in _losses(tried, lossy, set(failed)):
        yield result
    for host, facts in listening.items():
        sources, targets = incoming.get(host, []), outgoing.get(host, [])
        if sources:
            closed = _ports([failed[source, host] for source in sources], facts)
            yield fault("closed", host, sources=_some(sources), ports=closed)
        if targets:
            closed = _ports([failed[host, target] for target in targets], listening[targets[0]])
            yield fault("cannot-get-out", host, targets=_some(targets), ports=closed)
        if not sources and not targets and not any(host in pair for pair in lossy):
            if "taken" in facts:
                yield fault("port-in-use", host, port=DEFAULT_PORT, process=facts["taken"])
            else:
                yield sound(host, "all open" if count else f"{DEFAULT_PORT} is free")


def _lossy(found: Mapping[str, Facts]) -> dict[Pair, float]:
    """The pairs between which packets are lost, with the share of them. Both directions are listed: the answers do not tell
    which of the two loses them."""
    limit, shares = thresholds()["packet_loss"], dict[Pair, float]()
    for host, facts in found.items():
        for other, share in facts.get("lost", {}).items():
            if limit.level(share) != "green":
                shares |= {pair: max(share, shares.get(pair, 0.0)) for pair in ((host, other), (other, host))}
    return shares


def _losses(tried: Mapping[str, list[str]], lossy: Mapping[Pair, float], failed: Collection[Pair]) -> Iterator[Result]:
    """A fault of each host that loses packets, and a warning where it reaches all ports all the same."""
    incoming, outgoing = blame(tried, lossy)
    for host in tried:
        others = list(dict.fromkeys([*incoming.get(host, []), *outgoing.get(host, [])]))
        pairs = [pair for other in others for pair in ((host, other), (other, host))]
        if not others:
            if any(host in pair for pair in lossy):
                yield sound(host, "all open but where packets are lost")
            continue
        share = max(lossy.get(pair, 0.0) for pair in pairs)
        level: Level = "red" if any(pair in failed for pair in pairs) else "yellow"
        yield fault("packets-lost", host, level, share, share=share, others=_some(others))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {counted(len(names) - 3, 'more host')}" if len(names) > 3 else "")


def _ports(failed: Iterable[dict[str, str]], facts: Facts) -> str:
    """The ports that were not reached, in words, and why not."""
    closed: dict[int, str] = {}
    for refused in failed:
        closed |= {int(port): why for port, why in refused.items()}
    reason = Counter(closed.values()).most_common(1)[0][0]
    high = sorted(port for port in closed if port in facts["ports"])
    words = [f"port {port}" for port in closed if port not in high]
    if high:
        shown = ", ".join(map(str, high[:3])) + (", ..." if len(high) > 3 else "")
        first, last = facts["range"]
        words.append(f"{len(high)} of {len(facts['ports'])} ports tried of {first}-{last} ({shown})")
    return f"{' and '.join(words)}: {reason}"


@check("packets", seconds=40)
async def packets(hosts: Hosts) -> AsyncIterator[Result]:
    """Sends datagrams as long as the interface's MTU, which nobody may divide (IP_PMTUDISC_PROBE), between the same pairs as
    `ports`, and 32 KiB by TCP where they are lost in silence. Threshold: the MTU is that of most hosts, and they arrive. Where
    ends differ TCP agrees on the smaller size, and where a router says that they are too long TCP sends shorter ones: warnings.
    Red where the network between equal ends drops them and TCP hangs on the first long message, without an error (RFC 2923)."""
    need_two(hosts)
    looks, token = await look(hosts), secrets.token_hex(8)
    async with _listening(hosts, token, 0) as listening:
        tried, questions = _targets(hosts, looks, listening, token)
        found = await hosts.ask("reach.packets", 30, questions)
    sent = {
        (host, other): sending["arrived"] for host, facts in found.items() for other, sending in facts["sent"].items()
    }
    arrived: dict[str, set[str]] = {}
    for pair, fate in sent.items():
        for host in pair:
            arrived.setdefault(host, set()).add(fate)
    mtus = {host: mtu_of(facts) for host, facts in looks.items() if mtu_of(facts)}
    usual = most_common(mtus) if mtus else 0
    odd = {host for host, mtu in mtus.items() if mtu != usual}
    tried = {host: others for host, others in tried.items() if host in found}
    faults = [
        (fate, *blame(tried, {pair for pair, its in sent.items() if its == fate and not odd & set(pair)}))
        for fate in FATES
    ]
    for host in found:
        bad = [
            (fate, ins.get(host, []), outs.get(host, [])) for fate, ins, outs in faults if host in ins or host in outs
        ]
        card = looks.get(host, {}).get("leads") or "INTERFACE"
        if host in odd:
            lost = ", and full-size packets are lost" if arrived.get(host, set()) & {"hangs", "lost"} else ""
            yield fault("other-mtu", host, card=card, mtu=mtus[host], usual=usual, lost=lost)
        elif bad:
            fate, sources, targets = bad[0]
            way = f"{'from' if sources else 'to'} {_some([*sources, *targets])}"
            yield fault(FATES[fate], host, mtu=mtus.get(host, usual), way=way, card=card)
        elif arrived.get(host) == {"none"}:
            yield unknown(host, "no datagram gets through, short ones neither: a firewall may drop UDP")
        else:
            yield sound(host, f"{usual} bytes" if usual else "arrive")


def blame(
    tried: Mapping[str, Collection[str]], failed: Collection[Pair]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return (host -> hosts from which nothing comes in, host -> hosts to which nothing goes out), of the pairs that failed.

    A host that nobody reaches lets nothing in. A host that reaches nobody, while others reach the same hosts, lets nothing out.
    In all other cases the target of the pair is blamed: firewalls that drop incoming packets are more common.
    """
    failed = set(failed)
    sources: dict[str, list[str]] = {}
    for source, targets in tried.items():
        for target in targets:
            sources.setdefault(target, []).append(source)
    closed = {target for target, its in sources.items() if all((source, target) in failed for source in its)}
    silent = {source for source, its in tried.items() if its and all((source, target) in failed for target in its)}
    incoming: dict[str, list[str]] = {}
    outgoing: dict[str, list[str]] = {}
    place = {host: number for number, host in enumerate(tried)}
    for source, target in sorted(failed, key=lambda pair: (place[pair[0]], pair[1])):
        if source in silent and target not in closed:
            outgoing.setdefault(source, []).append(target)
        else:
            incoming.setdefault(target, []).append(source)
    return incoming, outgoing


def one_way(failed: Collection[Pair], heard: Mapping[str, Collection[str]]) -> set[Pair]:
    """Leave out those of the failed pairs whose packets arrive and whose answers alone are lost: TCP needs both directions.

    heard: host -> from whom datagrams came in, which need one direction
    """
    failed = set(failed)
    innocent = {(a, b) for a, b in failed if (b, a) in failed and a in heard.get(b, ()) and b not in heard.get(a, ())}
    return failed - innocent


@check("other users")
async def other_users(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads from /proc which other people have processes on the hosts. Threshold: none. On several hosts anybody who reaches
    the port of rank 0 (29500) or those of gloo can take a rank's place, and libraries exchange pickles between ranks, which are
    code; torch is not built for networks of strangers (its SECURITY.md). Ranks of one host meet where no other user can join
    them, so it has no row. Whether a firewall keeps out the rest of the network cannot be seen from the hosts."""
    need_two(hosts)
    for host, facts in (await hosts.ask("reach.users")).items():
        others = facts["others"]
        if others:
            users, have = shortened(", ".join(others), 80), "has" if len(others) == 1 else "have"
            yield fault("other-users", host, value=counted(len(others), "other user"), users=users, have=have)
        elif facts["hidden"]:
            yield unknown(host, "/proc shows no processes of other users (hidepid)")
        else:
            yield sound(host, "none")
