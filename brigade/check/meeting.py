"""Hosts find each other, by the addresses that ranks take, before anything is measured between them."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ..hosts.rendezvous import candidates
from .checks import Facts, Hosts, Result
from .findings import fault


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
    """All hosts listen; each finds the first one by an address that the others use too, as ranks do (hosts/rendezvous.py)."""
    meeting = Meeting(secrets.token_hex(8))
    async with hosts.hold("pairs.serve", 20, token=meeting.token) as serving:
        names = list(serving)
        meeting.port = {host: facts["port"] for host, facts in serving.items()}
        meeting.links = {host: facts["links"] for host, facts in serving.items()}
        meeting.fabric = {host: facts["fabric"] for host, facts in serving.items()}
        if names:
            meeting.store = serving[names[0]]["free"]
            await _find(hosts, names, meeting)
        yield meeting


async def _find(hosts: Hosts, names: list[str], meeting: Meeting) -> None:
    first, *others = names
    own: dict[str, str] = hosts.hello[first].get("addresses", {})
    addresses, asked = candidates(first, own), {host: Facts() for host in others}
    tried = await hosts.ask("pairs.way", 15, asked, addresses=addresses, port=meeting.port[first], token=meeting.token)
    reached = {
        address: [host for host in others if "peer" in tried.get(host, {}).get(address, {})] for address in addresses
    }
    chosen = max(reached, key=lambda address: len(reached[address]), default="")
    meeting.address[first], meeting.interface[first] = "127.0.0.1", "lo"
    for host in others:
        answer = tried.get(host, {}).get(chosen, {})
        if "peer" in answer:
            meeting.address[host], meeting.interface[host] = answer["own"], answer["interface"]
            meeting.address[first], meeting.interface[first] = answer["peer"], own.get(answer["peer"], "")
        else:
            why = answer.get("error") or hosts.failed.get(host, "no answer")
            meeting.lost[host] = f"it cannot connect to {first} on port {meeting.port[first]}: {why}"
    if len(others) > 1 and len(meeting.lost) == len(others):  # then it is the first one's fault
        meeting.lost = {
            first: f"no host can connect to it on port {meeting.port[first]}: {next(iter(meeting.lost.values()))}"
        }


def not_met(meeting: Meeting) -> list[Result]:
    """A fault for each host that was not met."""
    return [fault("not-met", host, said=problem) for host, problem in meeting.lost.items()]
