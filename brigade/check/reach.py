"""Whether hosts reach each other, open ports and packets of full size, and whether strangers reach them."""

import secrets
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager

from ..errors import shortened
from ..errors.console import counted
from ..hosts.rendezvous import DEFAULT_PORT
from .checks import Facts, Hosts, Level, Result, check, most_common, sound, unknown
from .names import addresses_of, is_loopback, look, mtu_of, named_interface, need_two, partners

ADDRESSES = 5  # of one host that are tried
PORTS, MANY = (8, 4), 16  # ports of the ephemeral range that each host opens; fewer on more hosts than that
OPEN = "let the hosts of a job reach each other on all TCP ports"
# What becomes of long packets -> level, value, and in words: what it is, why it matters, what cures it.
_LOSSES: dict[str, tuple[Level, str, str, str, str]] = {
    "hangs": (
        "red",
        "lost",
        "are lost, short ones arrive, and 100 KB by TCP do not",
        "connections open, and then hang on the first long message",
        "raise the MTU of the switch or tunnel on the way, or lower it on all hosts: sudo ip link set {card} mtu 1400",
    ),
    "told": (
        "yellow",
        "too long",
        "are too long for the way, and a router says so",
        "TCP sends shorter ones and works; RoCE and long datagrams lose theirs",
        "none is needed for TCP; else give the hosts the MTU of the way: sudo ip link set {card} mtu 1500",
    ),
    "lost": (
        "yellow",
        "datagrams lost",
        "are lost, short ones arrive; TCP was not seen to hang",
        "if the way drops them without a word, TCP is slow to find out; RoCE and long datagrams lose theirs",
        "let firewalls on the way pass ICMP and UDP, or lower the MTU on all hosts: sudo ip link set {card} mtu 1400",
    ),
}
Pair = tuple[str, str]  # from, to
CURE = "take hosts for yourself (sbatch --exclusive), or ask these users; and keep strangers out of the hosts' network"


def _listening(
    hosts: Hosts, token: str, count: int, master: int | None = None
) -> AbstractAsyncContextManager[dict[str, Facts]]:
    first = next(iter(hosts.hello), None)
    each = {host: {"host": host, "master": master if host == first else None} for host in hosts.hello}
    return hosts.hold("reach.listen", 10, each, token=token, count=count)


def _targets(
    hosts: Hosts, looks: dict[str, Facts], listening: dict[str, Facts], token: str
) -> tuple[dict[str, list[str]], dict[str, Facts]]:
    """Return (host -> whom it tries, the questions to each host). As launch does it: by the name's address first, which ssh
    found."""
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
    5 s, three tries of TCP. A firewall that opens only 29500 lets ranks meet and then wait in silence for ten minutes."""
    count = 0 if len(hosts.wanted.slots) == 1 else PORTS[len(hosts.hello) > MANY]
    looks, token = await look(hosts) if count else {}, secrets.token_hex(8)
    async with _listening(hosts, token, count, DEFAULT_PORT) as listening:
        tried, questions = _targets(hosts, looks, listening, token)
        found = await hosts.ask("reach.connect", 40, questions) if count else {}
        failed: dict[Pair, dict[str, str]] = {
            (host, other): why for host, facts in found.items() for other, why in facts["failed"].items()
        }
        both_ways = {host for host, other in failed if (other, host) in failed}
        asked = [host for host in listening if host in both_ways or "master" in listening[host]]
        controls = {host: {"control": listening[host]["control"]} for host in asked}
        # Asked of the first host in any case: the port is free again when this has answered, for launch to take it.
        heard = {host: facts["heard"] for host, facts in (await hosts.ask("reach.heard", 10, controls)).items()}
    tried = {host: [other for other in others if other in listening] for host, others in tried.items() if host in found}
    incoming, outgoing = blame(tried, one_way(failed, heard))
    why = "gloo and NCCL choose ports of the whole range: ranks would meet, and then wait for each other in silence"
    for host, facts in listening.items():
        where = f"{OPEN}: ssh {host} 'sudo nft list ruleset' shows what drops them; in a cloud, its security group"
        where += ". Where the row of addresses is red, that comes first"
        if sources := incoming.get(host):
            closed = [failed[source, host] for source in sources]
            problem = f"{_some(sources)} cannot reach it on {_ports(closed, facts)}"
            yield Result(host, "red", "closed", None, problem, why, where)
        if targets := outgoing.get(host):
            closed = [failed[host, target] for target in targets]
            problem = (
                f"it cannot reach {_some(targets)}, which others reach, on {_ports(closed, listening[targets[0]])}"
            )
            yield Result(host, "red", "cannot get out", None, problem, why, where)
        if host not in incoming and host not in outgoing:
            if "taken" in facts:
                problem = f"port {DEFAULT_PORT} is in use by {facts['taken']}"
                reason = "deepspeed and torchrun meet there; `launch` takes a free port instead, unless --master_port names it"
                cure = f"end that process on {host}, or give another --master_port"
                yield Result(host, "yellow", f"{DEFAULT_PORT} in use", None, problem, reason, cure)
            else:
                yield sound(host, "all open" if count else f"{DEFAULT_PORT} is free")


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
    `ports`, and 100 KB by TCP where they are lost in silence. Threshold: the MTU is that of most hosts, and they arrive. Where
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
    mtus = {host: mtu for host, facts in looks.items() if (mtu := mtu_of(facts))}
    usual = most_common(mtus) if mtus else 0
    odd = {host for host, mtu in mtus.items() if mtu != usual}
    tried = {host: others for host, others in tried.items() if host in found}
    faults = [
        (fate, *blame(tried, {pair for pair, its in sent.items() if its == fate and not odd & set(pair)}))
        for fate in ("hangs", "told", "lost")
    ]
    for host in found:
        bad = [
            (fate, ins.get(host, []), outs.get(host, [])) for fate, ins, outs in faults if host in ins or host in outs
        ]
        if host in odd:
            problem = f"{looks[host]['leads']} has MTU {mtus[host]}, elsewhere it is {usual}"
            problem += ", and full-size packets are lost" if arrived.get(host, set()) & {"hangs", "lost"} else ""
            why = "TCP has to take the smaller packets on every connection to it; RoCE and datagrams just lose theirs"
            cure = f"ssh {host} sudo ip link set {looks[host]['leads']} mtu {usual}"
            yield Result(host, "yellow", f"MTU {mtus[host]}", None, problem, why, cure)
        elif bad:
            fate, sources, targets = bad[0]
            level, value, says, why, cure = _LOSSES[fate]
            way = f"{'from' if sources else 'to'} {_some([*sources, *targets])}"
            problem = f"packets of {mtus.get(host, usual)} bytes {way} {says}"
            card = looks.get(host, {}).get("leads") or "INTERFACE"
            yield Result(host, level, value, None, problem, why, cure.format(card=card))
        elif arrived.get(host) == {"none"}:
            yield unknown(host, "no datagram gets through, short ones neither: a firewall may drop UDP")
        else:
            yield sound(host, f"{usual} bytes" if usual else "arrive")


def blame(
    tried: Mapping[str, Collection[str]], failed: Collection[Pair]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return (host -> from whom nothing comes in there, host -> to whom nothing goes out from there), of the pairs that failed.

    Whom nobody reaches has closed its own door. Who reaches nobody, while others reach the same hosts, cannot get out of its own.
    Else it is the one that should have been reached: firewalls that drop what comes in are more common.
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
    """The pairs that failed without those that failed only since no answer comes back: a connection needs both directions.

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
    for host, found in (await hosts.ask("reach.users")).items():
        if others := found["others"]:
            value = counted(len(others), "other user")
            problem = f"{shortened(', '.join(others), 80)} {'has' if len(others) == 1 else 'have'} processes here"
            why = "port 29500 of the first host and gloo's ports on all of them ask nobody who he is: whoever connects first"
            why += " takes a rank's place, and can run code as you"
            yield Result(host, "yellow", value, None, problem, why, CURE)
        elif found["hidden"]:
            yield unknown(host, "/proc shows no processes of other users (hidepid)")
        else:
            yield sound(host, "none")
