"""How long collectives take on the links that they cross.

Ring: each of n ranks sends its part n-1 times, T = (n-1) latency + (n-1)/n S / B for a gather or a scatter of S bytes in all,
twice that for an all-reduce. Between nodes B is what a node's network cards give all of its ranks together, because a ring
crosses each node's border once (nccl-tests' doc/PERFORMANCE.md on bus bandwidth).
"""

import math
import re
from dataclasses import dataclass

from ...errors import UserError
from ..constants import CONSTANTS
from . import Gpu


@dataclass(frozen=True)
class Links:
    """Bytes per second. peer: of one rank's ring inside a node; node: of a node's network cards together.

    node_size: ranks of a node, where a node is what NVLink joins: a host, or the hosts of a rack with a switch of its own
    """

    peer: float
    node: float
    node_size: int

    @property
    def gbit(self) -> float:
        """Line rate of a node's network cards together, Gbit/s."""
        return self.node * 8e-9 / CONSTANTS.line_share

    def crosses(self, ranks: int, stride: int = 1) -> bool:
        """Return whether a group of `ranks`, each `stride` ranks from the next, has members on several nodes."""
        return ranks > 1 and ranks * stride > self.node_size

    def ring(self, ranks: int, stride: int) -> tuple[float, float]:
        """Return (bytes per second, seconds of all hops) of a ring. Groups side by side share a node's cards."""
        if not self.crosses(ranks, stride):
            return self.peer, (ranks - 1) * CONSTANTS.peer_latency
        return min(self.peer, self.node / min(stride, self.node_size)), (ranks - 1) * CONSTANTS.ring_delay

    def half(self, payload: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds of a gather or a scatter of `payload` bytes in all."""
        if ranks == 1:
            return 0.0
        rate, hops = self.ring(ranks, stride)
        return CONSTANTS.call_latency + hops + (ranks - 1) / ranks * payload / rate

    def all_reduce(self, payload: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds of a scatter and a gather of `payload` bytes in all."""
        return 2 * self.half(payload, ranks, stride)

    def exchange(self, payload: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds in which each rank sends the others their parts of its `payload` bytes (all-to-all).

        Between nodes the ranks of a node share its cards, and no ring helps: each part goes the whole way.
        """
        if not self.crosses(ranks, stride):
            return self.half(payload, ranks, stride)
        inside = max(1, self.node_size // stride)
        outside = (1 - inside / ranks) * payload / (self.node / self.node_size)
        here = (inside - 1) / ranks * payload / self.peer
        return CONSTANTS.call_latency + CONSTANTS.node_latency + max(outside, here)

    def send(self, payload: float, stride: int, stages: int) -> float:
        """Return the seconds of one point-to-point transfer from each of a stage's `stride` ranks to the next stage.

        Where the pipeline lies on several nodes, over the border between two: every micro-batch has to pass it, and the ranks of
        a stage share the node's cards.
        """
        if stride * stages <= self.node_size:
            return CONSTANTS.call_latency + payload / self.peer
        rate = min(self.peer, self.node / min(stride, self.node_size))
        return CONSTANTS.call_latency + CONSTANTS.node_latency + payload / rate


# `3200 Gb/s`, `8x400 Gbit/s`, `4 * 100Gb RoCE`, `3.2 Tbps`, `100 GbE`, `50 GB/s`, of a node or `per GPU`
RATE = re.compile(
    r"(?<!\de)(?:(\d+) ?[x\u00d7*] ?)?(\d[\d,.]*) ?([GT])(bits?/?s?|b/?s|bps|bE|ps|b|)(?![a-z])(.*per (?:GPU|card|rank|device))?",
    re.I,
)


LEAST_OF_NVLINK = 100  # GB/s between two cards, one direction: PCIe 5 gives 55
NVLINK_RACK = re.compile(r"\bNVL(\d+)\b", re.I)


def joined(named: str, node_size: int) -> int:
    """Return the GPUs that NVLink joins: those of a host, or those of a rack where the network is named after it (NVL72)."""
    rack = NVLINK_RACK.search(named)
    return max(node_size, int(rack[1])) if rack else node_size


def node_gbit(named: str, node_size: int) -> float | None:
    """Return the Gbit/s of a node's network cards, as the name of a network states them; None where it states no rate.

    Raises UserError for a rate that is none.
    """
    match = RATE.search(named)
    if not match:
        return None
    cards, rate, prefix, unit, each = match.groups()
    try:
        gbit = float(rate.replace(",", ""))
    except ValueError:
        gbit = 0.0
    gbit = gbit * (1000 if prefix in "Tt" else 1) * (8 if unit.startswith("B") and unit.upper() != "BE" else 1)
    gbit *= int(cards or 1) * (node_size if each else 1)
    if not 0 < gbit < 1e7 or named.lstrip().startswith("-"):
        raise UserError(f"network {named!r}", f"{match[0]!r} is no rate", "give one like `3200 Gb/s`")
    return gbit


def is_measured(gpu: Gpu, named: str) -> bool:
    """Return whether a network is known by more than its name: EFA (HF Ultra-Scale Playbook), and what `check` has measured."""
    return gpu.network_measured or "EFA" in named


def unproven_cards(gpu: Gpu, named: str, node_size: int) -> int:
    """Return a node's network cards of which only one may work for all that is known; 1 where the rate was measured.

    A name states what the cards could do together; whether collectives use them all is a matter of settings and cables. Runs on
    hosts with four cards of Omni-Path took as long as one of them takes.
    """
    if is_measured(gpu, named):
        return 1
    match = RATE.search(named)
    if match and (match[1] or match[5]):
        return int(match[1] or 1) * (node_size if match[5] else 1)
    return math.ceil((node_gbit(named, node_size) or gpu.node_gbit) / CONSTANTS.fastest_card)


def hold_name(named: str, place: str) -> None:
    """Raise UserError at `place` for a network that names neither a rate, nor EFA, nor a rack that NVLink joins."""
    if named and "EFA" not in named and not NVLINK_RACK.search(named) and node_gbit(named, 1) is None:
        cure = "give what a node's cards reach together: `3200 Gb/s`, `8x400 Gb/s`, `EFA 3200 Gb/s`; `NVL72` in a rack"
        raise UserError(place, f"{named!r} states no rate", cure)
    node_gbit(named, 1)


def links(gpu: Gpu, named: str, node_size: int) -> Links:
    """Return the links of a cluster of hosts with `node_size` GPUs.

    named: its network, "3200 Gb/s", "EFA (3200Gb/s per node)", "NVL72"; without a rate the usual one
    Raises UserError for a rack of GPUs that have no NVLink.
    """
    if NVLINK_RACK.search(named) and gpu.peer_gb_s < LEAST_OF_NVLINK:
        problem = f"it is a rack that NVLink joins, and {gpu.kind} has no NVLink"
        raise UserError(f"network {named!r}", problem, "give what a host's network cards reach together, as `400 Gb/s`")
    gbit = node_gbit(named, node_size) or gpu.node_gbit
    # step_time divides everything by the efficiency that was measured inside of nodes, which is none of the network's.
    node = gbit / 8 * CONSTANTS.line_share * 1e9 * gpu.network / gpu.efficiency
    size = joined(named, node_size)
    return Links(gpu.peer_gb_s * CONSTANTS.peer_share * 1e9, node * size / node_size, size)
