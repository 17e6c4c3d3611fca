"""How long collectives take on the links that they cross.

Ring: each of n ranks sends its part n-1 times, T = (n-1) latency + (n-1)/n S / B for a gather or a scatter of S bytes in all, twice that for an
all-reduce; a tree takes 2 log2(n) latency + 2 S / B. Between nodes B is what the node's network cards give all of its ranks
together, because a ring crosses each node's border once (nccl-tests' doc/PERFORMANCE.md defines the bus bandwidth so).
"""

import math
import re
from dataclasses import dataclass

from .hardware import Gpu

PEER_SHARE = 0.8  # of a card's link that gathers and scatters reach: 361 of 450 GB/s on eight H200
PEER_LATENCY = 3.4e-6  # NCCL's own tuning table, NVLink, ring, per hop
CALL_LATENCY = 15e-6  # launching a collective and waking its kernels
# What a network reaches of its cards' line rate, and seconds per hop.
# EFA's figures follow from bus bandwidths over 2 to 64 nodes (HF Ultra-Scale Playbook), InfiniBand's latency is NCCL's own.
NETWORKS = {"EFA": (0.5, 33e-6), "": (0.85, 14e-6)}
NODE_GBIT = {"A100 80GB": 1600, "A100 40GB": 400, "H100 80GB": 3200, "H100 94GB": 3200, "H200": 3200, "B200": 3200, "GB200": 3200}


@dataclass(frozen=True)
class Links:
    """peer, node: bytes per second that one rank's ring reaches inside a node, and across."""

    peer: float
    node: float
    hop_seconds: float
    node_size: int

    def crosses(self, ranks: int, stride: int = 1) -> bool:
        """Whether a group of `ranks`, each `stride` ranks from the next, has members on several nodes."""
        return ranks > 1 and ranks * stride > self.node_size

    def half(self, payload: float, ranks: int, stride: int = 1) -> float:
        """Seconds of a gather or a scatter of `payload` bytes in all."""
        if ranks == 1:
            return 0.0
        if not self.crosses(ranks, stride):
            return CALL_LATENCY + (ranks - 1) * (PEER_LATENCY + payload / ranks / self.peer)
        # A node's cards serve all groups that cross its border side by side: one for each rank of `stride`.
        side_by_side = min(stride, self.node_size)
        rate = min(self.peer, self.node / side_by_side)
        return CALL_LATENCY + (ranks - 1) * (self.hop_seconds + payload / ranks / rate)

    def all_reduce(self, payload: float, ranks: int, stride: int = 1) -> float:
        if ranks == 1:
            return 0.0
        ring = 2 * self.half(payload, ranks, stride)
        if not self.crosses(ranks, stride):
            return ring
        rate = min(self.peer, self.node / min(stride, self.node_size))
        return min(ring, CALL_LATENCY + 2 * math.log2(ranks) * self.hop_seconds + 2 * payload / rate)

    def send(self, payload: float, stride: int) -> float:
        """One point-to-point transfer to the rank `stride` away."""
        if stride < self.node_size:
            return CALL_LATENCY + payload / self.peer
        return CALL_LATENCY + self.hop_seconds + payload / (self.node / self.node_size)


def links(gpu: Gpu, named: str, node_size: int) -> Links:
    """Of a cluster whose network is `named`: "3200 Gb/s", "EFA (3200Gb/s per node)", or nothing known: the GPU kind's usual one."""
    share, hop = next((v for k, v in NETWORKS.items() if k and k in named), NETWORKS[""])
    match = re.search(r"([\d,.]+) ?G(?:bit|b|bps)?/?s", named)
    gbit = float(match[1].replace(",", "")) if match else NODE_GBIT.get(gpu.kind, 100)
    return Links(gpu.peer_gb_s * PEER_SHARE * 1e9, gbit / 8 * share * 1e9, hop, node_size)
