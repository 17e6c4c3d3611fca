"""Which interface NCCL and gloo take on a host, by the rules in their sources, and what is wrong with it.

found, in all functions: what probes/reach.py: look() has found.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Of bridges and containers: on every host under the same address, and they lead nowhere.
VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "lxc", "lxd")
_LEFT_OUT = ("docker", "lo", "virbr")  # by NCCL, in its first round


def is_virtual(name: str) -> bool:
    return name == "lo" or name.startswith(VIRTUAL)


def is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def is_own(name: str) -> bool:
    """Whether a hostfile's name means, on every host, that host itself."""
    return name.startswith(("localhost", "ip6-localhost")) or is_loopback(name)


def takes(pattern: str, name: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME allows an interface: "eth,ib" beginnings, "=eth0" whole names, "^docker" all but these."""
    words = [word.partition(":")[0] for word in pattern.lstrip("^=").split(",") if word]
    exact = pattern.lstrip("^").startswith("=")
    hit = any(name == word if exact else name.startswith(word) for word in words)
    return not hit if pattern.startswith("^") else hit


def _all(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [one for one in found["interfaces"] if one["addresses"] or one["kind"] == "loopback"]


def of_nccl(found: Mapping[str, Any], variables: Mapping[str, str]) -> list[str]:
    """All that NCCL uses: those that are named, else InfiniBand's, else all but Docker's bridges and the loopback, else those."""
    names = [one["name"] for one in _all(found)]
    if pattern := variables.get("NCCL_SOCKET_IFNAME"):
        return [name for name in names if takes(pattern, name)]
    rounds = (
        [name for name in names if name.startswith("ib")],
        [name for name in names if not name.startswith(_LEFT_OUT)],
        [name for name in names if name.startswith("docker")],
    )
    return next((some for some in rounds if some), ["lo"])


def of_gloo(found: Mapping[str, Any], variables: Mapping[str, str]) -> list[str]:
    """The one that gloo uses: that is named, else that of the host name's address, else the loopback."""
    if named := variables.get("GLOO_SOCKET_IFNAME"):
        return named.split(",")
    for address in found["own"]:
        if is_loopback(address):
            return ["lo"]
        if name := next((one["name"] for one in _all(found) if address in one["addresses"]), None):
            return [name]
    return ["lo"]


def unfit(names: list[str], found: Mapping[str, Any]) -> str:
    """What is wrong with interfaces that are taken, in words, or ""."""
    kinds = {one["name"]: one["kind"] for one in found["interfaces"]}
    for name in names:
        if kinds.get(name) == "loopback" or name == "lo":
            own = f": {found['hostname']} is {found['own'][0]} there" if found["own"] else ""
            return f"the loopback is taken{own}"
        if (is_virtual(name) or kinds.get(name) == "bridge") and name != found["leads"]:
            way = f"the way to the others is {found['leads']}" if found["leads"] else "which may lead to no other host"
            return f"the bridge {name} is taken, {way}"
    return ""


def _is_certain(name: str, found: Mapping[str, Any], shared: Collection[str]) -> bool:
    """Whether nobody else can be reached over an interface that unfit() speaks of. A bridge may lead to others all the same."""
    one = next((one for one in found["interfaces"] if one["name"] == name), {"kind": "", "addresses": []})
    return name == "lo" or one["kind"] == "loopback" or bool(set(one["addresses"]) & set(shared))


def named_wrongly(
    variable: str, value: str, found: Mapping[str, Any], shared: Collection[str] = ()
) -> tuple[Literal["", "yellow", "red"], str]:
    """(how bad a variable's value is on this host, what is wrong with it in words). gloo takes whole names alone.

    Ranks meet over the first interface that is allowed (src/bootstrap.cc takes one), so "^docker0,lo" is no fault where a bridge
    stands behind a card: red where none is allowed, or where the first leads to nobody for certain; another bridge is a warning.
    shared: addresses that more than one host has, by which each one reaches itself
    """
    value = f"={value}" if variable.startswith("GLOO") else value
    names = [one["name"] for one in _all(found) if takes(value, one["name"])]
    if not names:
        there = ", ".join(one["name"] for one in _all(found))
        return "red", f"no such interface with an address is up; there are {there}"
    if first := unfit(names[:1], found):
        return ("red" if _is_certain(names[0], found, shared) else "yellow"), first
    problem = unfit(names, found)
    return ("yellow", f"behind {names[0]} {problem}") if problem else ("", "")


def mtu(found: Mapping[str, Any]) -> int:
    """Of the interface that leads to the first host; 0 where that is not known."""
    return next((int(one["mtu"]) for one in found["interfaces"] if one["name"] == found["leads"]), 0)
