"""What a sweep of collectives found, against the floor of that kind of link."""

import re
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..errors.console import figure
from .meeting import Meeting
from .results import Result, Threshold, sound, thresholds
from .slow_pairs import SLOWEST
from .sweep import bus_bandwidth

# Gbit/s over TCP that one process is expected to reach, whatever the card can do.
REACHED = {"gloo": 4.0, "nccl": 40.0}


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


def slowest(figures: list[list[list[Any]]]) -> list[tuple[str, int, float]]:
    """A collective is over when its last rank is."""
    return [
        (str(same[0][0]), int(same[0][1]), max(float(row[2]) for row in same)) for same in zip(*figures, strict=False)
    ]


@cache
def floors() -> list[dict[str, Any]]:
    """The table of floors.yaml."""
    rows: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("floors.yaml").read_text(encoding="utf-8"))
    return rows


def floor(device: str, kind: str) -> dict[str, Any]:
    """The row of a GPU that has a floor of that kind, or {}."""
    return next((row for row in floors() if kind in row and re.search(row["gpu"], device)), {})


def of_sweep(host: str, sweep: Sweep, found: Meeting) -> Result:
    best = sweep.bandwidth("all_reduce")
    value = f"all-reduce {best:.3g} GB/s, {sweep.backend}"
    known, fabric = floor(sweep.device, "between"), found.fabric[host]
    if known and fabric >= known["fabric"] and sweep.ranks == 8 * sweep.hosts:
        least = float(known["between"])
        limit, of = Threshold(least, least / 2, "GB/s", "floors.yaml", below=True), f"{fabric:g} Gbit/s of RDMA"
        its_level = limit.level(best)
    elif sweep.backend == "nccl" and fabric:
        least, of = fabric / 8, f"{fabric:g} Gbit/s of RDMA"
        its_level = thresholds()["link_speed"].level(best / least)
    elif speed := found.speed(host):
        least, of = min(speed, REACHED[sweep.backend]) / 8, f"a card of {speed:g} Gbit/s"
        its_level = thresholds()["link_speed"].level(best / least)
    else:
        return sound(host, value, best)
    if its_level == "green":
        return sound(host, value, best)
    should = f"{of} should give about {figure(least, 1)}"
    problem = f"an all-reduce over all hosts reaches {best:.3g} GB/s of bus bandwidth; {should}"
    cure = "the row of pairs names a slow host or link; else NCCL_DEBUG=INFO says which network NCCL takes (NET/IB or NET/Socket)"
    return Result(host, its_level, value, best, problem, "each step waits for it", cure)


def of_inside(host: str, sweep: Sweep, usual: float) -> Result:
    best, known = sweep.bandwidth("all_reduce"), floor(sweep.device, "inside")
    its_level, least = thresholds()["inside"].level(best / usual), usual
    if known and sweep.ranks == 8:
        limit = float(known["inside"])
        against = Threshold(limit, limit / 2, "GB/s", "floors.yaml", below=True).level(best)
        if against == "red" or its_level == "green":
            its_level, least = against, limit
    value = f"{figure(best, 0)} GB/s"
    if its_level == "green":
        return sound(host, value, best)
    problem = f"an all-reduce over its {sweep.ranks} GPUs reaches {figure(best, 0)} GB/s of bus bandwidth, not {figure(least, 0)}"
    cure = (
        f"ssh {host} 'nvidia-smi topo -m; nvidia-smi nvlink --status': are all links up, is the fabric manager running?"
    )
    return Result(host, its_level, value, best, problem, SLOWEST, cure)
