"""Whether hosts find each other by their names, and by which interface."""

import random
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from typing import Literal

from ..errors.console import counted
from ..hosts.rendezvous import VIRTUAL
from .checks import Facts, Hosts, NotHere, Result, check, sound
from .findings import fault

ALL_PAIRS = 64  # hosts, up to which each one tries every other; beyond, a sample, so that no host is asked for more
SAMPLE = 16
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LEFT_OUT = ("docker", "lo", "virbr")  # by NCCL, in its first round


async def look(hosts: Hosts) -> dict[str, Facts]:
    """Ask one question for several checks: the names of the hosts that each one tries, its interfaces, and its way to the first
    host, or the first one's to the second. With many hosts, the names are a sample: for a thousand hosts, all names would be a
    million look-ups at each launch."""
    own, first, second = addresses_of(hosts), *[*hosts.hello, "", ""][:2]
    per_host = {
        host: {"names": [host, *others], "towards": own.get(second if host == first else first, [])}
        for host, others in partners(hosts.hello).items()
    }
    return await hosts.ask("names.look", per_host=per_host)


def need_two(hosts: Hosts) -> None:
    """Raise NotHere for one host, which has nobody to reach."""
    if len(hosts.wanted.slots) == 1:
        raise NotHere


def addresses_of(hosts: Hosts) -> dict[str, list[str]]:
    """Return host -> its own addresses, those of bridges and containers last; where the user names an interface, those of that
    one."""
    named = named_interface(hosts)
    addresses = {}
    for host, hello in hosts.hello.items():
        own: dict[str, str] = hello.get("addresses", {})
        real = sorted(own, key=lambda address: is_virtual(own[address]))
        addresses[host] = [address for address in real if named and takes(named, own[address])] or real
    return addresses


def named_interface(hosts: Hosts) -> str:
    """The network interface that the user's environment names, or ""."""
    variables = hosts.wanted.environment
    return variables.get("NCCL_SOCKET_IFNAME") or variables.get("GLOO_SOCKET_IFNAME") or ""


@check("names")
async def names(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads, on each host, the addresses of the names of those that `ports` tries (getaddrinfo), and who the hosts are.
    Threshold: each name leads to an address of that very host, and no two names to one host. `launch` goes by addresses, so a
    wrong name is a warning; another launcher's --master_addr and DeepSpeed's ssh need the name (ml-engineering: names that are
    the loopback)."""
    need_two(hosts)
    facts = await look(hosts)
    machines: dict[str, list[str]] = {}
    for host, hello in hosts.hello.items():
        machines.setdefault(hello.get("machine") or host, []).append(host)
    for host, seen in facts.items():
        twins = machines[hosts.hello[host].get("machine") or host]
        if twins[0] != host:
            yield fault("named-twice", host, twin=twins[0])
            continue
        others = [n for n in seen["resolved"] if n != host and n in facts and not is_own(n) and "@" not in n]
        said_of = {name: _wrong(hosts, name, seen) for name in others}
        wrong = {name: said for name, said in said_of.items() if said}
        user, at, plain = host.rpartition("@")
        if at:
            yield fault("names-a-user", host, user=user, plain=plain)
        elif is_own(host):
            yield fault("no-network-name", host, hostname=seen["hostname"])
        elif wrong:
            name, said = next(iter(wrong.items()))
            more = f" (and {counted(len(wrong) - 1, 'more name')})" if len(wrong) > 1 else ""
            yield fault("wrong-names", host, name=name, wrong=said, more=more)
        else:
            yield sound(host, "resolve")


def _wrong(hosts: Hosts, name: str, facts: Facts) -> str:
    """Say what is wrong with another host's name here, "" where nothing is."""
    addresses = facts["resolved"].get(name)
    if not addresses:
        return f"has no address ({facts['unresolved'].get(name, 'no answer')})"
    loopback = next(filter(is_loopback, addresses), None)
    if loopback:
        return f"is {loopback}, the loopback,"
    its = hosts.hello[name].get("addresses", {})
    if its and not set(addresses) & set(its):
        return f"is {addresses[0]}, which is not an address of {name},"
    return ""


@check("addresses")
async def addresses(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads which card answers for the addresses of those that `ports` tries (/proc/net/arp), and the hosts' own cards.
    Threshold: it is one of that host's. Two machines with one address answer in turn, and a wrong entry leads nowhere: both look
    like a firewall or a bad cable. A card that answers for several hosts is a router's or a cloud's, and is not judged; nor is
    anything where no entry is right."""
    need_two(hosts)
    own, tried = addresses_of(hosts), partners(hosts.hello)
    per_host = {
        host: {"addresses": [a for other in others for a in own[other] if ":" not in a]}
        for host, others in tried.items()
    }
    answers = await hosts.ask("names.neighbours", per_host=per_host)
    cards = {host: set(facts["cards"]) for host, facts in answers.items()}
    seen = [
        (host, other, address, facts["arp"][address])
        for host, facts in answers.items()
        for other in tried[host]
        for address in own[other]
        if address in facts["arp"] and address not in own[host] and other in cards
    ]
    odd = [entry for entry in seen if entry[3] not in cards[entry[1]]]
    answers_for: dict[str, set[str]] = {}
    for _, other, _, card in odd:
        answers_for.setdefault(card, set()).add(other)
    odd = [entry for entry in odd if len(answers_for[entry[3]]) == 1] if len(odd) < len(seen) else []
    at = {host: [entry for entry in seen if entry[1] == host] for host in answers}
    wrong = {host: [entry for entry in odd if entry[1] == host] for host in answers}
    taken = {host for host in answers if len(wrong[host]) > 1 and 2 * len(wrong[host]) > len(at[host])}
    for host in answers:
        mine = next((entry for entry in odd if entry[0] == host and entry[1] not in taken), None)
        if host in taken:
            finders = ", ".join(entry[0] for entry in wrong[host][:3])
            yield _odd_card(host, f"{finders} find", "its", wrong[host][0], cards)
        elif mine:
            yield _odd_card(host, "it finds", f"{mine[1]}'s", mine, cards)
        else:
            yield sound(host, f"{counted(len(at[host]), 'neighbour')} agree" if at[host] else "not compared")


def _odd_card(host: str, who: str, whose: str, entry: tuple[str, str, str, str], cards: dict[str, set[str]]) -> Result:
    """entry: who looked, at whom, by which address, and the card that answers for it"""
    looked, target, address, card = entry
    other = next((name for name, its in cards.items() if card in its and name != target), "")
    of = f" of {other}" if other else ""
    return fault(
        "wrong-card", host, who=who, card=card, other=of, whose=whose, address=address, target=target, looked=looked
    )


@check("interface")
async def interface(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, the interfaces that are up, the way to the first host, and the address of
    the host's own name. Threshold: what NCCL (src/misc/socket.cc, ncclFindInterfaces) and gloo (torch, ProcessGroupGloo.cpp,
    createDefaultDevice) take is no bridge, no loopback, and leads to the other hosts. Red where a variable that ranks get allows
    none, or where the first that it allows is the loopback, or has an address that another host has too. `launch` sets both
    variables to the interface that does, so what they would take without it is a warning."""
    need_two(hosts)
    looks, shared = await look(hosts), _shared(hosts)
    ways = {seen["leads"] for seen in looks.values()}
    for host, seen in looks.items():
        given = hosts.wanted.environment
        named = {name: named_wrongly(name, given[name], seen, shared) for name in VARIABLES if name in given}
        bad = [(level, name, said) for name, (level, said) in named.items() if level]
        if bad:
            level, name, said = min(bad)  # "red" is before "yellow"
            finding = "wrong-variable" if level == "red" else "doubtful-variable"
            export = f"export {name}={seen['leads']}, or " if len(ways) == 1 and "" not in ways else ""
            yield fault(finding, host, name=name, named=given[name], said=said, export=export)
            continue
        variables = seen["variables"] | dict(given)
        taken = {"GLOO_SOCKET_IFNAME": of_gloo(seen, variables)}
        if hosts.hello[host].get("gpus"):
            taken["NCCL_SOCKET_IFNAME"] = of_nccl(seen, variables)
        problems = {name: unfit(cards, seen) for name, cards in taken.items() if unfit(cards, seen)}
        if not problems:
            yield sound(host, "fit")
            continue
        usual = seen["leads"] or "the interface that `ip route get` names for another host's address"
        said = "; ".join(f"without {name} {problem}" for name, problem in problems.items())
        yield fault("needs-a-variable", host, said=said, exports="; ".join(f"export {n}={usual}" for n in problems))


def _shared(hosts: Hosts) -> set[str]:
    """Addresses that more than one machine has: of bridges that stand on every host alike."""
    machines: dict[str, set[str]] = {}
    for host, hello in hosts.hello.items():
        for address in hello.get("addresses", {}):
            machines.setdefault(address, set()).add(hello.get("machine") or host)
    return {address for address, its in machines.items() if len(its) > 1}


def partners(hosts: Iterable[str]) -> dict[str, list[str]]:
    """Return host -> those that it tries: all others; of more than ALL_PAIRS hosts its neighbours in the list, by which each
    one is tried at least twice, and others that are drawn by its name."""
    names = list(hosts)
    if len(names) <= ALL_PAIRS:
        return {host: [other for other in names if other != host] for host in names}
    tried = {}
    for number, host in enumerate(names):
        steps = [-1, 1, *random.Random(host).sample(range(2, len(names) - 1), SAMPLE - 2)]
        tried[host] = [names[(number + step) % len(names)] for step in steps]
    return tried


def is_virtual(name: str) -> bool:
    """Tell whether a network interface is not hardware: a bridge, a container's interface, or the loopback."""
    return name == "lo" or name.startswith(VIRTUAL)


def is_loopback(address: str) -> bool:
    """Whether an address is a host's own, which no other host can reach."""
    return address == "::1" or address.startswith("127.")


def is_own(name: str) -> bool:
    """Tell whether a hostfile's name means, on every host, that host itself."""
    return name.startswith(("localhost", "ip6-localhost")) or is_loopback(name)


def takes(pattern: str, name: str) -> bool:
    """Tell whether NCCL_SOCKET_IFNAME allows an interface: "eth,ib" beginnings, "=eth0" whole names, "^docker" all but these."""
    words = [word.partition(":")[0] for word in pattern.lstrip("^=").split(",") if word]
    exact = pattern.lstrip("^").startswith("=")
    hit = any(name == word if exact else name.startswith(word) for word in words)
    return not hit if pattern.startswith("^") else hit


def _all(facts: Facts) -> list[Facts]:
    """The interfaces that count. facts, here and below: what probes/names.py: look() has found on a host"""
    return [card for card in facts["interfaces"] if card["addresses"] or card["kind"] == "loopback"]


def of_nccl(facts: Facts, variables: Mapping[str, str]) -> list[str]:
    """The interfaces that NCCL uses: those that are named, else InfiniBand's, else all but Docker's bridges and the loopback,
    else those."""
    names = [card["name"] for card in _all(facts)]
    pattern = variables.get("NCCL_SOCKET_IFNAME")
    if pattern:
        return [name for name in names if takes(pattern, name)]
    rounds = (
        [name for name in names if name.startswith("ib")],
        [name for name in names if not name.startswith(_LEFT_OUT)],
        [name for name in names if name.startswith("docker")],
    )
    return next((some for some in rounds if some), ["lo"])


def of_gloo(facts: Facts, variables: Mapping[str, str]) -> list[str]:
    """The interface that gloo uses: the one that is named, else that of the host name's address, else the loopback."""
    named = variables.get("GLOO_SOCKET_IFNAME")
    if named:
        return named.split(",")
    for address in facts["own"]:
        if is_loopback(address):
            return ["lo"]
        cards = [card["name"] for card in _all(facts) if address in card["addresses"]]
        if cards:
            return cards[:1]
    return ["lo"]


def unfit(names: list[str], facts: Facts) -> str:
    """Say what is wrong with interfaces that are taken, "" where nothing is."""
    kinds = {card["name"]: card["kind"] for card in facts["interfaces"]}
    for name in names:
        if kinds.get(name) == "loopback" or name == "lo":
            own = f": {facts['hostname']} is {facts['own'][0]} there" if facts["own"] else ""
            return f"the loopback is taken{own}"
        if (is_virtual(name) or kinds.get(name) == "bridge") and name != facts["leads"]:
            way = f"the way to the others is {facts['leads']}" if facts["leads"] else "which may lead to no other host"
            return f"the bridge {name} is taken, {way}"
    return ""


def _is_certain(name: str, facts: Facts, shared: Collection[str]) -> bool:
    """Tell whether an interface that unfit() names certainly leads to no other host: a bridge may lead to one."""
    card = next((card for card in facts["interfaces"] if card["name"] == name), {"kind": "", "addresses": []})
    return name == "lo" or card["kind"] == "loopback" or bool(set(card["addresses"]) & set(shared))


def named_wrongly(
    variable: str, value: str, facts: Facts, shared: Collection[str] = ()
) -> tuple[Literal["", "yellow", "red"], str]:
    """Return (how bad a variable's value is on this host, what is wrong with it in words). gloo takes only whole names.

    Ranks meet over the first interface that is allowed (src/bootstrap.cc takes one), so "^docker0,lo" is no fault where a bridge
    stands behind a card: red where none is allowed, or where the first leads to nobody for certain; another bridge is a warning.
    shared: addresses that more than one host has, by which each one reaches itself
    """
    value = f"={value}" if variable.startswith("GLOO") else value
    names = [card["name"] for card in _all(facts) if takes(value, card["name"])]
    if not names:
        there = ", ".join(card["name"] for card in _all(facts))
        return "red", f"no such interface with an address is up; there are {there}"
    first = unfit(names[:1], facts)
    if first:
        return ("red" if _is_certain(names[0], facts, shared) else "yellow"), first
    problem = unfit(names, facts)
    return ("yellow", f"behind {names[0]} {problem}") if problem else ("", "")


def mtu_of(facts: Facts) -> int:
    """The MTU of the interface that leads to the first host; 0 where that is not known."""
    return next((int(card["mtu"]) for card in facts["interfaces"] if card["name"] == facts["leads"]), 0)
