"""Whether hosts find and reach each other."""

import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

from ..errors.console import counted
from ..launch.launchers import DEFAULT_PORT
from . import interfaces as choice
from .hosts import Facts, Hosts
from .pairs import Pair, blame, one_way, partners
from .registry import check
from .results import Level, NotHere, Result, most_common, sound, unknown

ADDRESSES = 5  # of one host that are tried
PORTS, MANY = (8, 4), 16  # ports of the ephemeral range that each host opens; fewer on more hosts than that
OPEN = "let the hosts of a job reach each other on all TCP ports"


def _looks(hosts: Hosts) -> Any:
    """One question for several checks: names of those that each host tries, interfaces, and the way to the first host; of the
    first one, to the second. Of many hosts names are a sample: all of a thousand would be a million look-ups at each launch."""
    own, first, second = _addresses(hosts), *[*hosts.hello, "", ""][:2]
    each = {
        host: {"names": [host, *others], "towards": own.get(second if host == first else first, [])}
        for host, others in partners(hosts.hello).items()
    }
    return hosts.ask("reach.look", each=each)


def _need_two(hosts: Hosts) -> None:
    """Raises NotHere for one host, which has nobody to reach."""
    if len(hosts.wanted.slots) == 1:
        raise NotHere


def _addresses(hosts: Hosts) -> dict[str, list[str]]:
    """host -> its own addresses, those of bridges and containers last; where the user names an interface, those of that one."""
    named = _named(hosts)
    found = {}
    for host, hello in hosts.hello.items():
        own: dict[str, str] = hello.get("addresses", {})
        real = sorted(own, key=lambda address: choice.is_virtual(own[address]))
        found[host] = [address for address in real if named and choice.takes(named, own[address])] or real
    return found


def _named(hosts: Hosts) -> str:
    variables = hosts.wanted.environment
    return variables.get("NCCL_SOCKET_IFNAME") or variables.get("GLOO_SOCKET_IFNAME") or ""


@check("names")
async def names(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads, on each host, the addresses of the names of those that `ports` tries (getaddrinfo), and who the hosts are.
    Threshold: each name leads to an address of that very host, and no two names to one host. `launch` goes by addresses, so a
    wrong name is a warning; another launcher's --master_addr and DeepSpeed's ssh need the name (ml-engineering: names that are
    the loopback)."""
    _need_two(hosts)
    facts = await _looks(hosts)
    machines: dict[str, list[str]] = {}
    for host, hello in hosts.hello.items():
        machines.setdefault(hello.get("machine") or host, []).append(host)
    for host, found in facts.items():
        twins = machines[hosts.hello[host].get("machine") or host]
        if twins[0] != host:
            problem, why = f"it is the same machine as {twins[0]}", "its ranks would take the same devices twice"
            yield Result(host, "red", "twice", None, problem, why, "keep one of the two lines of the hostfile")
            continue
        others = [name for name in found["resolved"] if name != host and name in facts and not choice.is_own(name)]
        wrong = [(name, what) for name in others if (what := _wrong(hosts, name, found))]
        if choice.is_own(host):
            problem = f"the hostfile says {host}, which is on every host that host itself"
            why = "`launch` goes by addresses; ranks of deepspeed and torchrun, given this name, would wait in vain"
            cure = f"write this host's network name into the hostfile; `hostname` says {found['hostname']} there"
            yield Result(host, "yellow", "no network name", None, problem, why, cure)
        elif not wrong:
            yield sound(host, "resolve")
        else:
            name, what = wrong[0]
            more = f" (and {counted(len(wrong) - 1, 'more name')})" if len(wrong) > 1 else ""
            why = (
                "`launch` goes by addresses; deepspeed and torchrun, given this name, would wait for each other in vain"
            )
            cure = f"ssh {host}, then correct the line of {name} in /etc/hosts, or its DNS entry"
            yield Result(host, "yellow", "wrong names", None, f"{name} {what} here{more}", why, cure)


def _wrong(hosts: Hosts, name: str, found: Facts) -> str:
    """What is wrong with another host's name here, or ""."""
    if not (addresses := found["resolved"].get(name)):
        return f"has no address ({found['unresolved'].get(name, 'no answer')})"
    if loopback := next((address for address in addresses if choice.is_loopback(address)), None):
        return f"is {loopback}, the loopback,"
    its = hosts.hello[name].get("addresses", {})
    if its and not set(addresses) & set(its):
        return f"is {addresses[0]}, which is not an address of {name},"
    return ""


@check("interface")
async def interface(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, the interfaces that are up, the way to the first host, and the address of
    the host's own name. Threshold: what NCCL (src/misc/socket.cc, ncclFindInterfaces) and gloo (torch, ProcessGroupGloo.cpp,
    createDefaultDevice) take is no bridge, no loopback, and leads to the other hosts. Red where a variable that ranks get allows
    none, or where the first that it allows is the loopback, or has an address that another host has too. `launch` sets both
    variables to the interface that does, so what they would take without it is a warning."""
    _need_two(hosts)
    looks, shared = await _looks(hosts), _shared(hosts)
    ways = {found["leads"] for found in looks.values()}
    for host, found in looks.items():
        variables, wanted = found["variables"] | dict(hosts.wanted.environment), hosts.wanted.environment
        gpus = bool(hosts.hello[host].get("gpus"))
        named = {
            name: choice.named_wrongly(name, wanted[name], found, shared) for name in choice.VARIABLES if name in wanted
        }
        bad = [(level, f"{name}={wanted[name]}: {said}", name) for name, (level, said) in named.items() if level]
        if bad:
            level, problem, name = min(bad)  # "red" is before "yellow"
            cure = f"unset {name}: `launch` then sets it on each host to the interface that leads to the others"
            if len(ways) == 1 and "" not in ways:
                cure = f"export {name}={found['leads']}, or {cure}"
            why = "every rank gets this variable, and would wait for the others in vain"
            if level == "yellow":
                why = "every rank gets this variable; where that bridge leads to no other host, ranks wait in vain"
            yield Result(host, level, "wrong variable", None, problem, why, cure)
        else:
            taken = {"GLOO_SOCKET_IFNAME": choice.of_gloo(found, variables)}
            if gpus:
                taken["NCCL_SOCKET_IFNAME"] = choice.of_nccl(found, variables)
            wrong = {name: problem for name, its in taken.items() if (problem := choice.unfit(its, found))}
            if not wrong:
                yield sound(host, "fit")
                continue
            problem = "; ".join(f"without {name} {problem}" for name, problem in wrong.items())
            why = (
                "`launch` sets these variables itself; ranks of deepspeed or torchrun would wait for each other in vain"
            )
            usual = found["leads"] or "the interface that `ip route get` names for another host's address"
            cure = f"for those two, on {host}: " + "; ".join(f"export {name}={usual}" for name in wrong)
            yield Result(host, "yellow", "needs a variable", None, problem, why, cure)


def _shared(hosts: Hosts) -> set[str]:
    """Addresses that more than one machine has: of bridges that stand on every host alike."""
    machines: dict[str, set[str]] = {}
    for host, hello in hosts.hello.items():
        for address in hello.get("addresses", {}):
            machines.setdefault(address, set()).add(hello.get("machine") or host)
    return {address for address, its in machines.items() if len(its) > 1}


# ---- ports and packets -------------------------------------------------------------------------------------------
def _listening(
    hosts: Hosts, token: str, count: int, master: int | None = None
) -> AbstractAsyncContextManager[dict[str, Facts]]:
    first = next(iter(hosts.hello), None)
    each = {host: {"host": host, "master": master if host == first else None} for host in hosts.hello}
    return hosts.hold("ports.listen", 10, each, token=token, count=count)


def _targets(
    hosts: Hosts, looks: dict[str, Facts], listening: dict[str, Facts], token: str
) -> tuple[dict[str, list[str]], dict[str, Facts]]:
    """(host -> whom it tries, the questions to each host). As launch does it: by the name's address first, which ssh found."""
    own, named, tried = _addresses(hosts), _named(hosts), partners(listening)
    ports = {host: [*filter(None, [facts.get("master")]), *facts["ports"]] for host, facts in listening.items()}

    def door(host: str, other: str) -> Facts:
        by_name = [] if named else looks.get(host, {}).get("resolved", {}).get(other, [])
        addresses = [*(address for address in by_name if not choice.is_loopback(address)), *own[other]]
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
    5 s, three tries of TCP. A firewall that opens 29500 alone lets ranks meet and then wait in silence for ten minutes."""
    count = 0 if len(hosts.wanted.slots) == 1 else PORTS[len(hosts.hello) > MANY]
    looks, token = await _looks(hosts) if count else {}, secrets.token_hex(8)
    async with _listening(hosts, token, count, DEFAULT_PORT) as listening:
        tried, questions = _targets(hosts, looks, listening, token)
        found = await hosts.ask("ports.connect", 40, questions) if count else {}
        failed: dict[Pair, dict[str, str]] = {
            (host, other): why for host, facts in found.items() for other, why in facts["failed"].items()
        }
        both_ways = {host for host, other in failed if (other, host) in failed}
        asked = [host for host in listening if host in both_ways or "master" in listening[host]]
        controls = {host: {"control": listening[host]["control"]} for host in asked}
        # Asked of the first host in any case: the port is free again when this has answered, for launch to take it.
        heard = {host: facts["heard"] for host, facts in (await hosts.ask("ports.heard", 10, controls)).items()}
    tried = {host: [other for other in others if other in listening] for host, others in tried.items() if host in found}
    incoming, outgoing = blame(tried, one_way(failed, heard))
    why = "gloo and NCCL choose ports of the whole range: ranks would meet, and then wait for each other in silence"
    for host, facts in listening.items():
        where = f"{OPEN}: ssh {host} 'sudo nft list ruleset' shows what drops them; in a cloud, its security group"
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
    for one in failed:
        closed |= {int(port): why for port, why in one.items()}
    reason = Counter(closed.values()).most_common(1)[0][0]
    high = sorted(port for port in closed if port in facts["ports"])
    words = [f"port {port}" for port in closed if port not in high]
    if high:
        shown = ", ".join(map(str, high[:3])) + (", ..." if len(high) > 3 else "")
        first, last = facts["range"]
        words.append(f"{len(high)} of {len(facts['ports'])} ports tried of {first}-{last} ({shown})")
    return f"{' and '.join(words)}: {reason}"


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


@check("packets", seconds=40)
async def packets(hosts: Hosts) -> AsyncIterator[Result]:
    """Sends datagrams as long as the interface's MTU, which nobody may divide (IP_PMTUDISC_PROBE), between the same pairs as
    `ports`, and 100 KB by TCP where they are lost in silence. Threshold: the MTU is that of most hosts, and they arrive. Where
    ends differ TCP agrees on the smaller size, and where a router says that they are too long TCP sends shorter ones: warnings.
    Red where the network between equal ends drops them and TCP hangs on the first long message, without an error (RFC 2923)."""
    _need_two(hosts)
    looks, token = await _looks(hosts), secrets.token_hex(8)
    async with _listening(hosts, token, 0) as listening:
        tried, questions = _targets(hosts, looks, listening, token)
        found = await hosts.ask("ports.packets", 30, questions)
    sent = {(host, other): one["arrived"] for host, facts in found.items() for other, one in facts["sent"].items()}
    arrived: dict[str, set[str]] = {}
    for pair, what in sent.items():
        for host in pair:
            arrived.setdefault(host, set()).add(what)
    mtus = {host: mtu for host, facts in looks.items() if (mtu := choice.mtu(facts))}
    usual = most_common(mtus) if mtus else 0
    odd = {host for host, mtu in mtus.items() if mtu != usual}
    tried = {host: others for host, others in tried.items() if host in found}
    faults = [
        (what, *blame(tried, {pair for pair, its in sent.items() if its == what and not odd & set(pair)}))
        for what in ("hangs", "told", "lost")
    ]
    for host in found:
        bad = [
            (what, ins.get(host, []), outs.get(host, [])) for what, ins, outs in faults if host in ins or host in outs
        ]
        if host in odd:
            problem = f"{looks[host]['leads']} has MTU {mtus[host]}, elsewhere it is {usual}"
            problem += ", and full-size packets are lost" if arrived.get(host, set()) & {"hangs", "lost"} else ""
            why = "TCP has to take the smaller packets on every connection to it; RoCE and datagrams just lose theirs"
            cure = f"ssh {host} sudo ip link set {looks[host]['leads']} mtu {usual}"
            yield Result(host, "yellow", f"MTU {mtus[host]}", None, problem, why, cure)
        elif bad:
            what, sources, targets = bad[0]
            level, value, says, why, cure = _LOSSES[what]
            way = f"{'from' if sources else 'to'} {_some([*sources, *targets])}"
            problem = f"packets of {mtus.get(host, usual)} bytes {way} {says}"
            card = looks.get(host, {}).get("leads") or "INTERFACE"
            yield Result(host, level, value, None, problem, why, cure.format(card=card))
        elif arrived.get(host) == {"none"}:
            yield unknown(host, "no datagram gets through, short ones neither: a firewall may drop UDP")
        else:
            yield sound(host, f"{usual} bytes" if usual else "arrive")
